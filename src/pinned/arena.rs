//! One mapping of host memory, page-locked piece by piece: the pool's only unsafe code.
//!
//! What it is not: it does not know which of its bytes are lent. Its callers hand out ranges that
//! share no byte, and copy only where no device copy is in flight.
//!
//! Invariant: a piece stays mapped from before its registration until after the end of it. Where
//! that end cannot be had, the mapping stays for good, and is counted.
//!
//! ```text
//!   base (2 MiB aligned)                                              base + len
//!   |== piece 0: one registration ==|== piece 1 ==|== .. ==|= last, shorter =|
//!   map -> advise -> touch on threads -> register 0, 1, ..       Drop: .., 1, 0 -> unmap
//!                                             `-- fails: unregister what was done, unmap
//! ```
//!
//! Only [`crate::pinned`] uses it.

use super::class::{GRAIN, STEP};
use crate::backend::Pinner;
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::{Bytes, PinnedPtr, PinnedRange};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use rustix::process::{Pid, getpid};
use std::ffi::c_void;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Bytes of all arenas that were left mapped on purpose, in this process.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Each thread that touches pages gets at least this much.
const TOUCH_BYTES_MIN: usize = 8 << 20;

/// Bytes that stay page-locked for good, because nobody could say that no copy uses them, or
/// because the driver refused to end their registration.
pub(super) fn leaked() -> Bytes {
    Bytes(LEAKED.load(Ordering::Relaxed))
}

/// Page-locked host memory in one mapping.
#[derive(Debug)]
pub(super) struct Arena {
    mapping: Option<Mapping>,
    base: NonNull<u8>,
    len: u64,
    /// Device address of each piece; all but the last have `piece_len` bytes.
    pieces: Vec<PinnedPtr>,
    piece_len: u64,
    pinner: Arc<dyn Pinner>,
    /// The pool's count of bytes left page-locked on purpose.
    leaked: Arc<AtomicU64>,
    /// The process that page-locked it; a child has no such mapping.
    pid: Pid,
}

// SAFETY: the mapping belongs to the arena, not to a thread; its bytes are reached through raw
// pointers only, in ranges of which each has one owner.
unsafe impl Send for Arena {}
// SAFETY: as above; everything else in it does not change after it was made.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps, touches and page-locks `len` bytes (a multiple of 4 KiB). For a pinner that needs no
    /// memory they are mapped without any.
    ///
    /// # Errors
    /// `OutOfMemory` where the system has no room to map; the pinner's error where it refuses a
    /// piece. Nothing is mapped or page-locked then.
    pub(super) fn new(
        pinner: &Arc<dyn Pinner>,
        len: Bytes,
        piece_max: Bytes,
        threads_max: usize,
        leaked: &Arc<AtomicU64>,
    ) -> Result<Arena> {
        let piece_len = piece_len(pinner.registration_max().min(piece_max))?;
        let backed = pinner.needs_memory();
        let mapping = Mapping::new(len.to_usize()?, backed)?;
        if backed {
            mapping.touch(threads_max);
        }
        let mut arena = Arena {
            base: mapping.base,
            mapping: Some(mapping),
            len: len.get(),
            pieces: Vec::with_capacity(len.get().div_ceil(piece_len) as usize),
            piece_len,
            pinner: Arc::clone(pinner),
            leaked: Arc::clone(leaked),
            pid: getpid(),
        };
        for at in (0..arena.len).step_by(piece_len as usize) {
            let part = Bytes(piece_len.min(arena.len - at));
            // SAFETY: the piece lies in the mapping, which outlives its registration: `drop` ends
            // every registration before it unmaps, or does not unmap. Nobody else has the address.
            let registered = unsafe { pinner.register(arena.base.add(at as usize), part) };
            arena.pieces.push(registered?);
        }
        Ok(arena)
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The device's address of at most `len` bytes from `offset` on, cut at the piece's end.
    pub(super) fn trunk(&self, offset: u64, len: u64) -> Result<PinnedRange> {
        let piece = offset / self.piece_len;
        let Some(&at) = self.pieces.get(piece as usize) else {
            return Err(Error::usage(Misuse::OutOfRange, "trunk").bytes(Bytes(offset)));
        };
        let end = ((piece + 1) * self.piece_len).min(self.len);
        PinnedRange::new(at.offset(Bytes(offset % self.piece_len))?, Bytes(len.min(end - offset)))
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

    /// Keeps the memory page-locked and mapped for good, and counts it.
    pub(super) fn leak(arena: Arc<Arena>) {
        arena.count_leak();
        mem::forget(arena);
    }

    fn count_leak(&self) {
        LEAKED.fetch_add(self.len, Ordering::Relaxed);
        self.leaked.fetch_add(self.len, Ordering::Relaxed);
    }

    /// The host address of a range, all of which is mapped in this process.
    fn host(&self, offset: u64, len: usize, op: &'static str) -> Result<*mut u8> {
        if offset.checked_add(len as u64).is_none_or(|end| end > self.len) {
            return Err(Error::usage(Misuse::OutOfRange, op).bytes(Bytes(len as u64)));
        }
        if self.pid != getpid() {
            return Err(Error::usage(Misuse::Forked, op));
        }
        Ok(self.base.as_ptr().wrapping_add(offset as usize))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.pid != getpid() {
            // A child of fork: neither the mapping nor the registration is its own.
            mem::forget(self.mapping.take());
            return;
        }
        let mut kept = false;
        for &at in self.pieces.iter().rev() {
            kept |= self.pinner.unregister(at).is_err();
        }
        if kept {
            self.count_leak();
            mem::forget(self.mapping.take());
        }
    }
}

/// Length of a piece: whole huge pages where a registration may be that long.
fn piece_len(max: Bytes) -> Result<u64> {
    let unit = if max.get() >= STEP { STEP } else { GRAIN };
    match max.get() / unit * unit {
        0 => Err(Error::usage(Misuse::BadValue, "pin")
            .bytes(max)
            .detail("a registration must hold at least 4 KiB")),
        len => Ok(len),
    }
}

/// Anonymous private memory, zeroed, at an address that is a multiple of 2 MiB.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

impl Mapping {
    fn new(len: usize, backed: bool) -> Result<Mapping> {
        let step = STEP as usize;
        let refused = |detail: String| {
            let error = Error::new(Kind::OutOfMemory, "map").bytes(Bytes(len as u64));
            error.detail(format!("the system maps no more host memory: {detail}"))
        };
        let Some(wide) = len.checked_add(step) else { return Err(refused("too long".into())) };
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = match backed {
            true => MapFlags::PRIVATE,
            false => MapFlags::PRIVATE | MapFlags::NORESERVE,
        };
        // SAFETY: no address is asked for, so no mapping of anybody is replaced.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), wide, prot, flags) }
            .map_err(|e| refused(e.to_string()))?
            .cast::<u8>();
        let head = start.addr().next_multiple_of(step) - start.addr();
        cut(start, head);
        let base = start.wrapping_add(head);
        cut(base.wrapping_add(len), step - head);
        let base = NonNull::new(base).ok_or_else(|| refused("no address".into()))?;
        let mapping = Mapping { base, len };
        // Advice only: without huge pages it is slower; with fork a child would copy it all.
        mapping.advise(Advice::LinuxHugepage);
        mapping.advise(Advice::LinuxDontFork);
        Ok(mapping)
    }

    fn advise(&self, advice: Advice) {
        // SAFETY: the range is this mapping; neither advice used here changes its bytes.
        let _ = unsafe { mm::madvise(self.base.as_ptr().cast::<c_void>(), self.len, advice) };
    }

    /// Makes the system back every page, on several threads: one faults 5.6 GB/s, sixteen 34.
    fn touch(&self, threads_max: usize) {
        let wanted = threads_max.min(self.len / TOUCH_BYTES_MIN);
        if wanted <= 1 {
            return touch_pages(self.base.as_ptr().expose_provenance(), 0, self.len);
        }
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        let threads = cores.min(wanted);
        let share = self.len.div_ceil(threads).next_multiple_of(STEP as usize);
        let (base, len) = (self.base.as_ptr().expose_provenance(), self.len);
        thread::scope(|scope| {
            for from in (share..len).step_by(share) {
                let to = (from + share).min(len);
                // Without the thread, this one touches the share too.
                let work = move || touch_pages(base, from, to);
                if thread::Builder::new().spawn_scoped(scope, work).is_err() {
                    touch_pages(base, from, to);
                }
            }
            touch_pages(base, 0, share.min(len));
        });
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        cut(self.base.as_ptr(), self.len);
    }
}

/// Writes one byte of every page in `from..to` of a fresh mapping at the exposed address `base`.
fn touch_pages(base: usize, from: usize, to: usize) {
    for at in (from..to).step_by(GRAIN as usize) {
        let page = ptr::with_exposed_provenance_mut::<u8>(base + at);
        // SAFETY: the page lies in the mapping being made, which nobody else has yet, and no two
        // threads touch the same page.
        unsafe { page.write_volatile(0) };
    }
}

/// Unmaps a part of a mapping that its owner no longer uses.
fn cut(at: *mut u8, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: the callers pass parts of their own mapping: the ends cut off for alignment, or all
    // of it once it goes; no pointer into it is used afterwards.
    let _ = unsafe { mm::munmap(at.cast::<c_void>(), len) };
}
