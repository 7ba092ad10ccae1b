//! The books of mapped memory: which addresses are reserved, which memory there is, what is where.
//!
//! What it is not: it maps nothing. A backend asks it before it acts, and tells it afterwards; so
//! every backend refuses the same requests in the same words.
//!
//! Invariant: memory is mapped at one range at most, and a range is mapped as a whole or not at
//! all.
//!
//! ```text
//!   reserve  range ----.                     release: nothing is mapped
//!                       map -> mapped -> unmap
//!   create   memory ---'                     close:   it is mapped nowhere
//! ```
//!
//! The simulated device and CUDA use it.

use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::{Bytes, DeviceRange, MemoryId, Table};
use std::collections::BTreeMap;

/// The most pieces of memory that one backend has at once.
const MEMORY_MAX: usize = 1 << 16;

/// A range that was reserved.
#[derive(Debug)]
struct Reserved {
    len: Bytes,
    /// What is mapped there, from its start on.
    memory: Vec<MemoryId>,
}

/// Physical memory.
#[derive(Debug)]
struct Memory<H> {
    handle: H,
    len: Bytes,
    is_mapped: bool,
}

/// The books of one user of a device; `H` is what its backend calls memory.
#[derive(Debug)]
pub(super) struct Books<H> {
    ranges: BTreeMap<u64, Reserved>,
    memory: Table<Memory<H>>,
}

impl<H: Copy> Books<H> {
    pub(super) fn new() -> Books<H> {
        Books { ranges: BTreeMap::new(), memory: Table::new("memory", MEMORY_MAX) }
    }

    /// May the backend take one more piece of memory?
    pub(super) fn check_room(&self, op: &'static str) -> Result<()> {
        if self.memory.is_full() {
            return Err(Error::new(Kind::Busy, op)
                .detail("as much memory as one backend keeps books of; close some"));
        }
        Ok(())
    }

    /// Addresses were reserved.
    pub(super) fn reserved(&mut self, range: DeviceRange) {
        let reserved = Reserved { len: range.len(), memory: Vec::new() };
        let before = self.ranges.insert(range.at().0, reserved);
        assert!(before.is_none(), "addresses that are reserved are not given out again");
    }

    fn range(&self, range: DeviceRange, op: &'static str) -> Result<&Reserved> {
        match self.ranges.get(&range.at().0) {
            Some(reserved) if reserved.len == range.len() => Ok(reserved),
            _ => Err(Error::usage(Misuse::OutOfRange, op)
                .bytes(range.len())
                .detail("no range that was reserved here")),
        }
    }

    /// May the addresses be given back?
    pub(super) fn check_release(&self, range: DeviceRange, op: &'static str) -> Result<()> {
        if self.range(range, op)?.memory.is_empty() {
            return Ok(());
        }
        Err(state(op, "memory is mapped there"))
    }

    /// The addresses were given back.
    pub(super) fn released(&mut self, range: DeviceRange) {
        self.ranges.remove(&range.at().0);
    }

    /// Memory was taken.
    pub(super) fn created(&mut self, handle: H, len: Bytes, op: &'static str) -> Result<MemoryId> {
        let key = self.memory.insert(Memory { handle, len, is_mapped: false });
        key.map(MemoryId).ok_or_else(|| Error::new(Kind::Busy, op))
    }

    /// What the backend calls memory that is mapped nowhere, and its length.
    pub(super) fn idle(&self, id: MemoryId, op: &'static str) -> Result<(H, Bytes)> {
        let memory = self.memory.get(id.0, op)?;
        if memory.is_mapped {
            return Err(state(op, "the memory is mapped"));
        }
        Ok((memory.handle, memory.len))
    }

    /// The memory was given back.
    pub(super) fn closed(&mut self, id: MemoryId, op: &'static str) -> Result<()> {
        self.memory.remove(id.0, op).map(drop)
    }

    /// May all of this be mapped there?
    pub(super) fn check_map(
        &self,
        range: DeviceRange,
        memory: &[MemoryId],
        op: &'static str,
    ) -> Result<()> {
        self.check_release(range, op)?;
        let mut sum = Bytes::ZERO;
        for (nth, id) in memory.iter().enumerate() {
            sum = sum.saturating_add(self.idle(*id, op)?.1);
            if memory[..nth].contains(id) {
                return Err(state(op, "the memory is named twice"));
            }
        }
        if sum != range.len() {
            let error = Error::usage(Misuse::LengthMismatch, op).bytes(range.len());
            return Err(error.detail(format!("the memory has {sum}")));
        }
        Ok(())
    }

    /// All of this was mapped there.
    pub(super) fn mapped(&mut self, range: DeviceRange, memory: &[MemoryId]) {
        if let Some(reserved) = self.ranges.get_mut(&range.at().0) {
            reserved.memory.extend_from_slice(memory);
        }
        self.mark(memory, true);
    }

    /// Is anything mapped there?
    pub(super) fn check_unmap(&self, range: DeviceRange, op: &'static str) -> Result<()> {
        if self.range(range, op)?.memory.is_empty() {
            return Err(state(op, "nothing is mapped there"));
        }
        Ok(())
    }

    /// Nothing is mapped there any more.
    pub(super) fn unmapped(&mut self, range: DeviceRange) {
        let Some(reserved) = self.ranges.get_mut(&range.at().0) else { return };
        // Its room is kept for the next mapping.
        let mut memory = std::mem::take(&mut reserved.memory);
        self.mark(&memory, false);
        memory.clear();
        if let Some(reserved) = self.ranges.get_mut(&range.at().0) {
            reserved.memory = memory;
        }
    }

    fn mark(&mut self, memory: &[MemoryId], is_mapped: bool) {
        for id in memory {
            if let Some(memory) = self.memory.find_mut(id.0) {
                memory.is_mapped = is_mapped;
            }
        }
    }
}

/// Refuses a length that no backend takes.
pub(super) fn check_len(len: Bytes, granularity: Bytes, op: &'static str) -> Result<()> {
    if len.is_zero() {
        return Err(Error::usage(Misuse::Empty, op));
    }
    if !len.0.is_multiple_of(granularity.0) {
        let error = Error::usage(Misuse::BadValue, op).bytes(len);
        return Err(error.detail(format!("no multiple of the granularity of {granularity}")));
    }
    Ok(())
}

fn state(op: &'static str, what: &'static str) -> Error {
    // Of memory, and not of a storage: the kind's own words would mislead.
    Error::new(Kind::Usage(Misuse::State), op).detail(what)
}
