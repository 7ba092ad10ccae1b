//! One mapping of host memory, page-locked piece by piece, and the only way to its bytes.
//!
//! What it is not: it does not know which of its bytes are lent. Its callers hand out ranges that
//! share no byte, and copy only where no device copy is in flight.
//!
//! Invariant: a piece stays mapped from before its registration until after the end of it. Where
//! that end cannot be had, the mapping stays for good, and is counted. Bytes past `len` are mapped
//! and not yet page-locked: nobody but the one who fills the arena knows of them.
//!
//! ```text
//!   base (2 MiB aligned)                       len                            room
//!   |== piece 0 ==|==== piece 1 ====|== .. ====|.. being touched ..|..........|
//!   map -> fill: touch on threads -> register 0, 1, ..       Drop: .., 1, 0 -> unmap
//!                                       `-- fails: the pieces before it stay, or Drop
//! ```
//!
//! Only [`crate::pinned`] uses it.

#[cfg(test)]
mod machines;
mod mapping;
mod pieces;
mod place;
mod system;
mod touch;

pub(super) use pieces::Pieces;
pub(super) use system::{Linux, System};
pub(super) use touch::{Crew, Pages};

use super::Inner;
use crate::backend::Pinner;
use crate::error::{Error, Misuse, Result};
use crate::unit::{Bytes, PinnedPtr, PinnedRange};
use mapping::Mapping;
use rustix::process::{Pid, getpid};
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Bytes of all arenas that were left mapped on purpose, in this process.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Bytes that stay page-locked for good, because nobody could say that no copy uses them, or
/// because the driver refused to end their registration.
pub(super) fn leaked() -> Bytes {
    Bytes(LEAKED.load(Ordering::Relaxed))
}

/// Page-locked host memory in one mapping.
#[derive(Debug)]
pub(super) struct Arena {
    mapping: Option<Mapping>,
    base: *mut u8,
    room: u64,
    /// Page-locked bytes, from the base on.
    len: AtomicU64,
    /// Device address of each piece, once it is registered.
    addresses: Box<[OnceLock<PinnedPtr>]>,
    pieces: Pieces,
    pinner: Arc<dyn Pinner>,
    /// Known to the device and not page-locked.
    pageable: bool,
    /// The pool's count of bytes left page-locked on purpose.
    leaked: Arc<AtomicU64>,
    /// The pool that it belongs to, for blocks that are dropped.
    pool: Weak<Inner>,
    /// The process that page-locked it; a child has no such mapping.
    pid: Pid,
    /// Its registrations have been ended, and its memory has been unmapped where that was allowed.
    ended: AtomicBool,
}

// SAFETY: the mapping belongs to the arena, not to a thread; its bytes are reached through raw
// pointers only, in ranges of which each has one owner.
unsafe impl Send for Arena {}
// SAFETY: as above; what else changes in it is atomic or set once.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `room` bytes (a multiple of 4 KiB); none is page-locked yet. For a pinner that needs no
    /// memory they are mapped without any.
    ///
    /// # Errors
    /// `OutOfMemory` where the system has no room to map; `Usage(BadValue)` where a registration
    /// cannot hold a page.
    pub(super) fn map(
        pinner: &Arc<dyn Pinner>,
        room: Bytes,
        pieces: Pieces,
        crew: &Crew,
        leaked: &Arc<AtomicU64>,
        pool: Weak<Inner>,
    ) -> Result<Arena> {
        let mapping = Mapping::new(room.to_usize()?, pinner.needs_memory(), crew)?;
        Ok(Arena {
            base: mapping.base(),
            mapping: Some(mapping),
            room: room.get(),
            len: AtomicU64::new(0),
            addresses: (0..pieces.count(room.get())).map(|_| OnceLock::new()).collect(),
            pieces,
            pinner: Arc::clone(pinner),
            pageable: false,
            leaked: Arc::clone(leaked),
            pool,
            pid: getpid(),
            ended: AtomicBool::new(false),
        })
    }

    /// The same memory, which is not to be page-locked.
    pub(super) fn pageable(mut self) -> Arena {
        self.pageable = true;
        self
    }

    pub(super) fn is_pageable(&self) -> bool {
        self.pageable
    }

    /// Touches and page-locks the arena piece by piece, and tells `each` the length so far; `each`
    /// says whether to go on. The next pieces are touched while one is being registered.
    ///
    /// # Errors
    /// The pinner's, where it refuses a piece; the pieces before it stay.
    pub(super) fn fill(&self, crew: &Crew, each: &mut dyn FnMut(u64) -> bool) -> Result<()> {
        let Some(mapping) = &self.mapping else { return Ok(()) };
        let mut nth = 0;
        let mut register = |from: u64, to: u64| {
            // SAFETY: the piece lies in the mapping, which outlives its registration: `end` ends
            // every registration before it unmaps, or does not unmap. Nobody else has the address.
            let address = unsafe { self.register(mapping.at(from), Bytes(to - from)) }?;
            let first = self.addresses[nth].set(address);
            assert!(first.is_ok(), "an arena is filled by one thread, once");
            nth += 1;
            self.len.store(to, Ordering::Release);
            Ok(each(to))
        };
        let mut ends = (1..).map(|nth| self.pieces.start(nth).min(self.room));
        touch::pipeline(mapping, self.room, &mut ends, crew, &mut register)
    }

    /// # Safety
    /// That of [`Pinner::register`].
    unsafe fn register(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        if !self.pageable {
            // SAFETY: the caller's promise is passed on.
            return unsafe { self.pinner.register(at, len) };
        }
        let Some(pageable) = self.pinner.pageable() else {
            return Err(Error::usage(Misuse::BadValue, "register")
                .bytes(len)
                .detail("this device copies page-locked memory alone"));
        };
        // SAFETY: as above.
        unsafe { pageable.register_pageable(at, len) }
    }

    /// Nobody fills the arena any more: what is not page-locked is unmapped.
    pub(super) fn end_here(&self) {
        if let Some(mapping) = &self.mapping {
            mapping.keep(self.len());
        }
    }

    /// The pool, if it is still there.
    pub(super) fn pool(&self) -> Option<Arc<Inner>> {
        self.pool.upgrade()
    }

    /// Page-locked bytes.
    pub(super) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Of up to `max` pages spread over the arena: how many the kernel told about, and how many of
    /// them lie on that node.
    pub(super) fn pages_on(&self, node: u32, max: usize) -> (u64, u64) {
        self.mapping.as_ref().map_or((0, 0), |mapping| mapping.pages_on(self.len(), node, max))
    }

    /// The device's address of at most `len` bytes from `offset` on, cut at the piece's end.
    pub(super) fn trunk(&self, offset: u64, len: u64) -> Result<PinnedRange> {
        let nth = self.pieces.of(offset);
        let Some(&at) = self.addresses.get(nth).and_then(OnceLock::get) else {
            return Err(Error::usage(Misuse::OutOfRange, "trunk").bytes(Bytes(offset)));
        };
        let end = self.pieces.start(nth + 1).min(self.room);
        let from = at.offset(Bytes(offset - self.pieces.start(nth)))?;
        PinnedRange::new(from, Bytes(len.min(end - offset)))
    }

    /// Copies bytes out of the arena. The caller owns the range, and no copy into it is in flight.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.host(offset, into.len(), "read")?;
        // SAFETY: `host` checked that the range is mapped here; `into` is a Rust slice and so not
        // in the mapping, to which no Rust reference is ever made.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes into the arena. The caller owns the range, and no copy of it is in flight.
    pub(super) fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.host(offset, from.len(), "write")?;
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Ok(())
    }

    /// Sets `len` bytes to zero. The caller owns the range, and no copy of it is in flight.
    pub(super) fn zero(&self, offset: u64, len: u64) -> Result<()> {
        let to = self.host(offset, Bytes(len).to_usize()?, "scrub")?;
        // SAFETY: as in `read`.
        unsafe { ptr::write_bytes(to, 0, len as usize) };
        Ok(())
    }

    /// Gives the memory back to the system, whoever still knows the arena: no byte of it is lent
    /// now, nor ever again.
    pub(super) fn end(&self) {
        // A child of fork: neither the mapping nor the registration is its own.
        if self.pid != getpid() || self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut kept = false;
        for at in self.addresses.iter().rev().filter_map(OnceLock::get) {
            kept |= self.pinner.unregister(*at).is_err();
        }
        if kept {
            return self.count_leak();
        }
        self.len.store(0, Ordering::Release);
        if let Some(mapping) = &self.mapping {
            mapping.keep(0);
        }
    }

    /// Keeps the memory page-locked and mapped for good, and counts it.
    pub(super) fn leak(arena: Arc<Arena>) {
        arena.count_leak();
        mem::forget(arena);
    }

    fn count_leak(&self) {
        LEAKED.fetch_add(self.len(), Ordering::Relaxed);
        self.leaked.fetch_add(self.len(), Ordering::Relaxed);
    }

    /// The host address of a range, all of which is page-locked by this process.
    fn host(&self, offset: u64, len: usize, op: &'static str) -> Result<*mut u8> {
        if offset.checked_add(len as u64).is_none_or(|end| end > self.len()) {
            return Err(Error::usage(Misuse::OutOfRange, op).bytes(Bytes(len as u64)));
        }
        if self.pid != getpid() {
            return Err(Error::usage(Misuse::Forked, op));
        }
        Ok(self.base.wrapping_add(offset as usize))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.end();
        // What could not be unmapped stays, and so does what is another process's.
        mem::forget(self.mapping.take());
    }
}
