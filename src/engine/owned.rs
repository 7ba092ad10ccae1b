//! Device bytes that the engine itself takes and frees.
//!
//! What it is not: an allocator. The driver's stream-ordered pool is; this asks it, and makes room
//! where it has none.
//!
//! Invariant: making room loses nothing. A storage whose bytes find no room stays where it is.
//!
//! ```text
//!   alloc_device -> OutOfMemory -> idle memory to be mapped goes           -> again
//!                              \-> unmap what is evicted and not used     -> again
//!                              \-> pass the copies, free what was evicted -> again
//!                              \-> cancel what was fetched ahead          -> again -> OutOfMemory
//! ```
//!
//! Part of the engine.

use super::Engine;
use super::fixed::Wait;
use super::lanes::Ask;
use crate::backend::Backend;
use crate::error::{Error, Kind, Result};
use crate::storage::{Inward, Owner, Residency, Slot, Storage};
use crate::stream::Point;
use crate::trace::Site;
use crate::unit::{Bytes, DevicePtr, DeviceRange, Name, StorageId, StreamId};
use std::time::Instant;

impl Engine {
    /// Takes `len` bytes of device memory in the order of `compute`, for a storage whose bytes the
    /// engine frees and takes again by itself, at any address (see [`Engine::alloc_fixed`]). They
    /// are undefined, and resident for `compute`.
    ///
    /// # Errors
    /// `OutOfMemory` after room was made and none was found; `Usage` for zero bytes and streams;
    /// `Busy` past `storages_max`.
    pub fn alloc(
        &mut self,
        len: Bytes,
        compute: StreamId,
        name: impl Into<Name>,
    ) -> Result<Storage> {
        const OP: &str = "alloc";
        self.begin(OP)?;
        let name = name.into();
        let on = self.open_stream(compute, OP)?;
        let at = self.take_room(len, on).map_err(|error| error.at(name).bytes(len))?;
        let range = DeviceRange::new(at, len)?;
        let mut slot = Slot::resident(name, Owner::Engine, range, on);
        slot.readers.insert(on);
        match self.insert(slot, OP) {
            Ok(storage) => Ok(storage),
            Err(error) => {
                self.free(range, compute)?;
                Err(error)
            }
        }
    }

    /// Frees device bytes in the order of a stream. Where the driver refuses (somebody captures the
    /// stream), they are owed, and freed later in the same order: nothing is to undo.
    pub(super) fn free(&mut self, range: DeviceRange, on: StreamId) -> Result<()> {
        self.free_behind(range, on, None)
    }

    /// The same, behind a copy into them that ends at `after`.
    pub(super) fn free_behind(
        &mut self,
        range: DeviceRange,
        on: StreamId,
        after: Option<Point>,
    ) -> Result<()> {
        if let Some(point) = &after {
            let waited = point.wait(&mut self.backend, on, Site::FreeAfterCopyIn);
            if self.refusal(waited)?.is_some() {
                self.owed.push((range, on, after));
                return Ok(());
            }
        }
        let freed = self.backend.free_device(range.at(), on);
        if self.refusal(freed)?.is_some() {
            self.owed.push((range, on, None));
        }
        Ok(())
    }

    /// Frees what is owed, as far as the driver lets it.
    pub(super) fn pay(&mut self) -> Result<()> {
        for _ in 0..self.owed.len() {
            let (range, on, after) = self.owed.remove(0);
            self.free_behind(range, on, after)?;
        }
        Ok(())
    }

    /// Frees what is owed when the whole device was waited for.
    pub(super) fn pay_all(&mut self) -> Result<()> {
        while let Some((range, ..)) = self.owed.last() {
            // Any stream will do: a lane is never captured.
            let freed = self.backend.free_device(range.at(), self.out.stream());
            self.seen(freed)?;
            self.owed.pop();
        }
        Ok(())
    }

    /// Device bytes in the order of a stream; room is made where there is none.
    fn take_room(&mut self, len: Bytes, on: usize) -> Result<DevicePtr> {
        let stream = self.ledgers[on].stream;
        let (mut tries_left, since) = (self.options.oom_retries_max, Instant::now());
        loop {
            let taken = self.backend.alloc_device(len, stream);
            match self.seen(taken) {
                Err(error) if error.kind() == Kind::OutOfMemory && tries_left > 0 => {
                    tries_left -= 1;
                    if !self.make_room(on, since)? {
                        return Err(error);
                    }
                    self.stats.made_room_count += 1;
                }
                other => return other,
            }
        }
    }

    /// Gives back memory that is idle, or bytes that were evicted already, or else those fetched
    /// ahead. Says whether any went.
    fn make_room(&mut self, on: usize, since: Instant) -> Result<bool> {
        if self.handles.trim(&mut self.backend) || self.unmap_idle(on)? {
            return Ok(true);
        }
        if self.make_stream_room(on)? {
            return Ok(true);
        }
        // No stream orders what goes from a fixed address: its copy is waited for.
        Ok(self.cancel_fixed(on)? && self.unmap_some(on, since)?)
    }

    /// Unmaps bytes at fixed addresses, as far as all that uses them is done. Says whether any
    /// went.
    fn unmap_idle(&mut self, on: usize) -> Result<bool> {
        let before = self.handles.unmapped_count();
        self.ledgers[on].latest_may_go();
        let released = self.release_fixed();
        self.refusal(released)?;
        self.handles.trim(&mut self.backend);
        Ok(self.handles.unmapped_count() > before)
    }

    /// The same, of bytes that go in the order of a stream.
    pub(super) fn make_stream_room(&mut self, on: usize) -> Result<bool> {
        let before = self.stats.released_bytes;
        self.ledgers[on].latest_may_go();
        self.pass_all(on)?;
        self.release_owned(on)?;
        if self.stats.released_bytes > before {
            return Ok(true);
        }
        self.cancel_owned(on)
    }

    /// Cancels everything fetched ahead for a stream, or else for the others: the bytes go in the
    /// order of this one.
    fn cancel_owned(&mut self, on: usize) -> Result<bool> {
        let own = self.cancel_each(on, |slot| slot.owner == Owner::Engine && slot.home == on)?;
        Ok(own || self.cancel_each(on, |slot| slot.owner == Owner::Engine)?)
    }

    /// Cancels every guess that `is_one` picks. Says whether there were any.
    pub(super) fn cancel_each(
        &mut self,
        on: usize,
        is_one: impl Fn(&Slot) -> bool,
    ) -> Result<bool> {
        let is_ahead = |slot: &Slot| slot.residency() == Residency::Refilling && !slot.is_dropped;
        let ahead = self.slots.iter().filter(|(_, slot)| is_one(slot) && is_ahead(slot));
        let ahead: Vec<StorageId> = ahead.map(|(key, _)| StorageId(key)).collect();
        for id in &ahead {
            self.cancel_refill(*id, on)?;
        }
        Ok(!ahead.is_empty())
    }

    /// Brings an evicted storage of the engine's own back for a reader.
    pub(super) fn refill_owned(&mut self, id: StorageId, on: usize) -> Result<()> {
        let slot = self.slots.get(id.0, "acquire")?;
        let (len, name, owner) = (slot.len, slot.name, slot.owner);
        let named = |error: Error| error.at(name).bytes(len);
        let target = match owner {
            Owner::Fixed => self.map_again(id, on, Wait::Bounded).map_err(named)?,
            _ => DeviceRange::new(self.take_room(len, on).map_err(named)?, len)?,
        };
        self.refill_into(id, target, on, Ask::Reader)
    }

    /// Fetches ahead into memory of the engine's own as far as the window goes. It is a guess: only
    /// a loss is an error.
    pub(super) fn prefetch_owned(&mut self, on: usize) -> Result<()> {
        let stream = self.ledgers[on].stream;
        while let Some((id, len)) = self.next_wanted(stream, false) {
            let may = self.may_come_in(Inward::Ahead);
            if !matches!(may, Ok(true)) {
                return self.refusal(may).map(drop);
            }
            let taken = match self.slots.get(id.0, "prefetch")?.owner {
                Owner::Fixed => self.map_again(id, on, Wait::Never),
                _ => {
                    let taken = self.backend.alloc_device(len, stream);
                    self.seen(taken).and_then(|at| DeviceRange::new(at, len))
                }
            };
            let fetched = taken.and_then(|target| self.refill_into(id, target, on, Ask::Guess));
            if self.refusal(fetched)?.is_some() {
                // The reader will ask, and then room is made for it.
                self.stats.prefetch_refused_count += 1;
                return Ok(());
            }
        }
        Ok(())
    }
}
