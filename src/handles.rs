//! Bytes whose address stays: reserved addresses, and the pool of memory that is mapped there.
//!
//! What it is not: it knows no streams. When bytes may go is the engine's affair; here they go at
//! once.
//!
//! Invariant: a piece of memory is mapped for one storage, idle here, or owed to the device; what
//! cannot be given back now is tried again. No more than `idle_max` pieces are idle between calls,
//! and none of them was taken by a call that failed.
//!
//! ```text
//!   reserve -> Fixed { range }   map: idle pieces of the right length, else new ones
//!                                unmap: idle again; too small or too many: back to the device
//!   a range is cut into pieces of at most `bytes_max`; a piece is asked for as long as it is cut
//! ```
//!
//! Storages keep a [`Fixed`]; the engine has the pool.

use crate::backend::Backend;
use crate::error::{Error, Misuse, Result};
use crate::unit::{Bytes, DeviceRange, MemoryId};
use std::collections::VecDeque;

/// Bounds of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandleLimits {
    /// A range is mapped in pieces of at most this many bytes.
    pub bytes_max: Bytes,
    /// Pieces with fewer bytes are not kept idle.
    pub pooled_bytes_min: Bytes,
    /// At most this many pieces are kept idle.
    pub idle_max: usize,
}

/// Physical memory, and its length.
type Piece = (MemoryId, Bytes);

/// The addresses of one storage, and the memory that is mapped there.
#[derive(Debug)]
pub struct Fixed {
    range: DeviceRange,
    /// Empty while nothing is mapped.
    pieces: Vec<Piece>,
    /// A fetch into it was given up: it is to be unmapped once no copy uses it.
    pub is_lingering: bool,
}

impl Fixed {
    /// The addresses reserved.
    pub fn range(&self) -> DeviceRange {
        self.range
    }

    /// Are there bytes?
    pub fn is_mapped(&self) -> bool {
        !self.pieces.is_empty()
    }
}

/// Memory to be mapped, and what is owed to the device.
#[derive(Debug)]
pub struct Handles {
    limits: HandleLimits,
    /// Idle since longest first.
    idle: VecDeque<Piece>,
    owed_memory: Vec<Piece>,
    owed_ranges: Vec<DeviceRange>,
    mapped_bytes: Bytes,
    unmapped_count: u64,
    /// Names of pieces, for one call; kept for its room.
    names: Vec<MemoryId>,
    /// Those that were taken from the device in one call; kept for its room.
    fresh: Vec<MemoryId>,
}

impl Handles {
    /// An empty pool.
    pub fn new(limits: HandleLimits) -> Handles {
        let (idle, owed_memory, owed_ranges, names, fresh) = Default::default();
        let (mapped_bytes, unmapped_count) = (Bytes::ZERO, 0);
        Handles {
            limits,
            idle,
            owed_memory,
            owed_ranges,
            mapped_bytes,
            unmapped_count,
            names,
            fresh,
        }
    }

    /// Bytes of memory that is mapped.
    pub fn mapped_bytes(&self) -> Bytes {
        self.mapped_bytes
    }

    /// Bytes of memory that is idle, or that the device refused to take back.
    pub fn idle_bytes(&self) -> Bytes {
        Bytes(self.idle.iter().chain(&self.owed_memory).map(|(_, len)| len.0).sum())
    }

    /// How often something was unmapped.
    pub fn unmapped_count(&self) -> u64 {
        self.unmapped_count
    }

    /// Reserves addresses for `len` bytes, rounded up to what the device maps.
    ///
    /// # Errors
    /// `Unavailable(Mapping)` where the device maps none; those of [`Backend::reserve_range`].
    pub fn reserve(
        &mut self,
        backend: &mut dyn Backend,
        len: Bytes,
        op: &'static str,
    ) -> Result<Fixed> {
        if len.is_zero() {
            return Err(Error::usage(Misuse::Empty, op));
        }
        let granularity = backend.map_granularity()?;
        let rounded = len.0.checked_next_multiple_of(granularity.0).map(Bytes);
        let rounded = rounded.ok_or_else(|| Error::usage(Misuse::TooLarge, op).bytes(len))?;
        let range = backend.reserve_range(rounded)?;
        Ok(Fixed { range, pieces: Vec::new(), is_lingering: false })
    }

    /// Maps memory over all of a range where nothing is mapped: what is idle, or new.
    ///
    /// # Errors
    /// Those of [`Backend::create_memory`] and [`Backend::map_memory`]; nothing is mapped then, and
    /// what was idle is idle again.
    pub fn map(&mut self, backend: &mut dyn Backend, fixed: &mut Fixed) -> Result<()> {
        assert!(!fixed.is_mapped(), "memory is mapped once");
        let granularity = backend.map_granularity()?;
        let cut = self.limits.bytes_max.0 / granularity.0 * granularity.0;
        let cut = Bytes(cut.max(granularity.0));
        let mut left = fixed.range.len();
        let mut taken = Ok(());
        self.fresh.clear();
        while taken.is_ok() && !left.is_zero() {
            let len = left.min(cut);
            taken = self.take(backend, len).map(|piece| {
                fixed.pieces.push(piece);
                left -= len;
            });
        }
        let mapped = taken.and_then(|()| {
            self.names.clear();
            self.names.extend(fixed.pieces.iter().map(|(name, _)| *name));
            backend.map_memory(fixed.range, &self.names)
        });
        match mapped {
            Ok(()) => self.mapped_bytes += fixed.range.len(),
            Err(_) => {
                self.drop_fresh(backend, fixed);
                self.put_back(backend, fixed);
            }
        }
        mapped
    }

    /// Takes the memory away. Nothing uses the bytes any more, and the host knows it.
    ///
    /// # Errors
    /// Those of [`Backend::unmap_memory`]; it is still mapped then.
    pub fn unmap(&mut self, backend: &mut dyn Backend, fixed: &mut Fixed) -> Result<()> {
        if !fixed.is_mapped() {
            return Ok(());
        }
        backend.unmap_memory(fixed.range)?;
        fixed.is_lingering = false;
        self.mapped_bytes -= fixed.range.len();
        self.unmapped_count += 1;
        self.put_back(backend, fixed);
        Ok(())
    }

    /// Gives the addresses back, now or as soon as the device takes them.
    pub fn release(&mut self, backend: &mut dyn Backend, fixed: Fixed) {
        assert!(!fixed.is_mapped(), "what is mapped is unmapped before its addresses go");
        if backend.release_range(fixed.range).is_err() {
            self.owed_ranges.push(fixed.range);
        }
    }

    /// Gives all idle memory back to the device. Says whether any went.
    pub fn trim(&mut self, backend: &mut dyn Backend) -> bool {
        let mut went = self.pay_memory(backend);
        while let Some(piece) = self.idle.pop_front() {
            went |= self.close(backend, piece);
        }
        went
    }

    /// Gives back what is owed, as far as the device takes it.
    pub fn pay(&mut self, backend: &mut dyn Backend) {
        self.pay_memory(backend);
        self.owed_ranges.retain(|range| backend.release_range(*range).is_err());
    }

    /// Gives everything back.
    ///
    /// # Errors
    /// The first of those that the device refused to take; it is still here, to be tried again.
    pub fn end(&mut self, backend: &mut dyn Backend) -> Result<()> {
        self.owed_memory.extend(self.idle.drain(..));
        while let Some((name, _)) = self.owed_memory.last() {
            backend.close_memory(*name)?;
            self.owed_memory.pop();
        }
        while let Some(range) = self.owed_ranges.last() {
            backend.release_range(*range)?;
            self.owed_ranges.pop();
        }
        Ok(())
    }

    fn take(&mut self, backend: &mut dyn Backend, len: Bytes) -> Result<Piece> {
        let found = self.idle.iter().rposition(|(_, idle)| *idle == len);
        match found.and_then(|at| self.idle.remove(at)) {
            Some(piece) => Ok(piece),
            None => {
                let name = backend.create_memory(len)?;
                self.fresh.push(name);
                Ok((name, len))
            }
        }
    }

    /// What a call took that failed goes back to the device: whoever asked has nothing of it.
    fn drop_fresh(&mut self, backend: &mut dyn Backend, fixed: &mut Fixed) {
        let mut fresh = std::mem::take(&mut self.fresh);
        fixed.pieces.retain(|piece| {
            let is_fresh = fresh.contains(&piece.0);
            if is_fresh {
                self.close(backend, *piece);
            }
            !is_fresh
        });
        fresh.clear();
        self.fresh = fresh;
    }

    /// The pieces of a range where they are not mapped, or not any more.
    fn put_back(&mut self, backend: &mut dyn Backend, fixed: &mut Fixed) {
        self.idle.extend(fixed.pieces.drain(..));
        let HandleLimits { pooled_bytes_min, idle_max, .. } = self.limits;
        while let Some(at) = self.idle.iter().position(|(_, len)| *len < pooled_bytes_min) {
            self.drop_idle(backend, at);
        }
        while self.idle.len() > idle_max {
            self.drop_idle(backend, 0);
        }
    }

    fn drop_idle(&mut self, backend: &mut dyn Backend, at: usize) {
        if let Some(piece) = self.idle.remove(at) {
            self.close(backend, piece);
        }
    }

    fn close(&mut self, backend: &mut dyn Backend, piece: Piece) -> bool {
        let is_closed = backend.close_memory(piece.0).is_ok();
        if !is_closed {
            self.owed_memory.push(piece);
        }
        is_closed
    }

    fn pay_memory(&mut self, backend: &mut dyn Backend) -> bool {
        let before = self.owed_memory.len();
        self.owed_memory.retain(|(name, _)| backend.close_memory(*name).is_err());
        self.owed_memory.len() < before
    }
}
