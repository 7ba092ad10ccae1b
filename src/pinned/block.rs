//! One lent range of page-locked memory, and its host's view of it.
//!
//! What it is not: it is no slice, and gives none. Its bytes are copied in and out, never borrowed,
//! because a device may be touching them.
//!
//! Invariant: a block cannot be cloned, and goes back once: by `give_back`, or by its drop.
//! Dropped, it is quarantined: the pool does not know what still copies into it or out of it.
//!
//! ```text
//!   |<--------------- room ----------------->|
//!   |<------------ len ----------------->|
//!   |==== written: can be read ====|.....|---|
//!        trunk(at, n) -> device range, cut where a registration ends
//! ```
//!
//! Borrowers of the pool use it: the engine, its disk workers.
#![deny(unsafe_code)]

use super::arena::Arena;
use super::ledger::Loan;
use crate::error::{Error, Misuse, Result};
use crate::unit::{Bytes, PinnedRange};
use std::sync::Arc;

/// A range of page-locked memory, lent to one client.
#[derive(Debug)]
#[must_use = "a dropped block is quarantined: give it back"]
pub struct Block {
    /// Where it lies: kept here, so that a copy in trunks asks the pool for nothing. It leaves with
    /// the block.
    pub(super) arena: Option<Arc<Arena>>,
    pub(super) offset: u64,
    pub(super) id: u32,
    /// Tag of the client it is lent to.
    pub(super) owner: u32,
    len: u64,
    room: u64,
    written: u64,
    pub(super) returned: bool,
}

impl Block {
    pub(super) fn new(owner: u32, len: u64, loan: Loan) -> Block {
        let Loan { id, arena, offset, room, .. } = loan;
        let arena = Some(arena);
        Block { arena, offset, id, owner, len, room, written: 0, returned: false }
    }

    /// Length that was asked for, in bytes.
    pub fn len(&self) -> Bytes {
        Bytes(self.len)
    }

    /// Never: a block has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes it occupies in the pool.
    pub fn room(&self) -> Bytes {
        Bytes(self.room)
    }

    /// Is it not page-locked? Then the host waits in copies of it, and no kernel reaches it.
    pub fn is_pageable(&self) -> bool {
        self.arena.as_ref().is_some_and(|arena| arena.is_pageable())
    }

    /// How many bytes from the start on have been written, as far as the block was told.
    pub fn written(&self) -> Bytes {
        Bytes(self.written)
    }

    /// Says that a copy (enqueued already) or a host write fills the first `len` bytes.
    ///
    /// # Errors
    /// `Usage(OutOfRange)` past the block's end.
    pub fn mark_written(&mut self, len: Bytes) -> Result<()> {
        if len.get() > self.len {
            return Err(Error::usage(Misuse::OutOfRange, "mark written").bytes(len));
        }
        self.written = self.written.max(len.get());
        Ok(())
    }

    /// The device's address of the bytes from `offset` on: at most `len_max` of them, and no more
    /// than lie in one registration. Walk a block by adding the length of what was returned.
    ///
    /// # Errors
    /// `Usage(OutOfRange)` at or past the block's end, `Usage(Empty)` for a `len_max` of zero.
    pub fn trunk(&self, offset: Bytes, len_max: Bytes) -> Result<PinnedRange> {
        if len_max.is_zero() {
            return Err(Error::usage(Misuse::Empty, "trunk"));
        }
        if offset.get() >= self.len {
            return Err(Error::usage(Misuse::OutOfRange, "trunk").bytes(offset));
        }
        let len = len_max.get().min(self.len - offset.get());
        self.arena("trunk")?.trunk(self.offset + offset.get(), len)
    }

    /// Copies bytes of the block to `into`. No copy into it is in flight: ask its event first.
    ///
    /// # Errors
    /// `Usage(OutOfRange)` for bytes that were not written since the block was lent;
    /// `Usage(Forked)` in a child process.
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<()> {
        self.within(offset, into.len(), self.written, "read block")?;
        self.arena("read block")?.read(self.offset + offset.get(), into)
    }

    /// Copies `from` into the block. No copy of the block is in flight: ask its event first. Bytes
    /// are written in order: `offset` is at most [`Block::written`].
    ///
    /// # Errors
    /// `Usage(OutOfRange)` past the block's end or behind a gap; `Usage(Forked)` in a child.
    pub fn write(&mut self, offset: Bytes, from: &[u8]) -> Result<()> {
        let end = self.within(offset, from.len(), self.len, "write block")?;
        if offset.get() > self.written {
            return Err(Error::usage(Misuse::OutOfRange, "write block").bytes(offset));
        }
        self.arena("write block")?.write(self.offset + offset.get(), from)?;
        self.written = self.written.max(end);
        Ok(())
    }

    fn arena(&self, op: &'static str) -> Result<&Arena> {
        self.arena.as_deref().ok_or_else(|| Error::usage(Misuse::Stale, op).of("block"))
    }

    fn within(&self, offset: Bytes, len: usize, end: u64, op: &'static str) -> Result<u64> {
        let len = Bytes(len as u64);
        match offset.checked_add(len) {
            Some(to) if to.get() <= end => Ok(to.get()),
            _ => Err(Error::usage(Misuse::OutOfRange, op).bytes(len)),
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // Without a pool the arena stays page-locked for good: it went while the block was lent.
        if !self.returned
            && let Some(pool) = self.arena.as_ref().and_then(|arena| arena.pool())
        {
            pool.lock().quarantine(self.id);
        }
    }
}
