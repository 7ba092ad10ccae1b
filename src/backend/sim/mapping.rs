//! Mapped memory of the simulated device: addresses that stay while the memory behind them goes.
//!
//! What it is not: a page table. Memory is a number of bytes; what it holds is undefined once it is
//! mapped anew, so the bytes belong to the range.
//!
//! Invariant: bytes are reached while they are mapped and at no other time. Where queued work still
//! uses bytes that are unmapped the device is broken from then on, as a real one would be when it
//! gets there.
//!
//! ```text
//!   reserve: addresses -> map: a backing, a region, poisoned -> unmap: no region, the backing goes
//!   copy to unmapped bytes: refused          unmap under a queued copy: code 700
//! ```
//!
//! Reached through [`Backend`](crate::backend::Backend) only. The model has no figures of mapping:
//! each call takes the time of making an object.

use super::Spot;
use super::memory::{Backing, MAPPED_OFFSET, device_base};
use super::state::State;
use super::user::Sim;
use super::verbs::FRESH_BYTE;
use crate::backend::cannot_map;
use crate::backend::mapping::{Books, check_len};
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::{Bytes, DevicePtr, DeviceRange, MemoryId};
use std::sync::MutexGuard;

/// What a driver says of work that reaches bytes which are not there.
const ILLEGAL_ADDRESS: u32 = 700;

impl Sim {
    fn begin(&self, op: &'static str) -> Result<MutexGuard<'_, State>> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, op)?;
        if state.map_granularity == 0 {
            return Err(cannot_map(op));
        }
        Ok(state)
    }

    /// Lets faults strike a call that is right, and the host pay for it.
    fn pay(&self, state: &mut State, spot: Spot, op: &'static str) -> Result<()> {
        state.strike(self.seat.device, spot, None, op)?;
        state.charge(|model| model.object_call_ns);
        Ok(())
    }

    pub(super) fn granularity(&self, op: &'static str) -> Result<Bytes> {
        self.begin(op).map(|state| Bytes(state.map_granularity))
    }

    pub(super) fn reserve(&mut self, len: Bytes) -> Result<DeviceRange> {
        const OP: &str = "reserve_range";
        let device = self.seat.device;
        let mut state = self.begin(OP)?;
        check_len(len, Bytes(state.map_granularity), OP)?;
        len.to_usize()?;
        self.pay(&mut state, Spot::Create, OP).map_err(|error| error.bytes(len))?;
        // A gap between ranges shows who runs past the end of one.
        let taken = len.0.saturating_add(state.map_granularity);
        let own = state.machine.device(device);
        let at = device_base(device) + own.ranges_next;
        let next = own.ranges_next.checked_add(taken).filter(|next| *next < 2 * MAPPED_OFFSET);
        let next = next.ok_or_else(|| Error::new(Kind::OutOfMemory, OP).bytes(len))?;
        let range = DeviceRange::new(DevicePtr(at), len)?;
        let own = state.machine.device(device);
        own.ranges_next = next;
        own.ranges.insert(at, None);
        self.books(&mut state).reserved(range);
        Ok(range)
    }

    pub(super) fn unreserve(&mut self, range: DeviceRange) -> Result<()> {
        const OP: &str = "release_range";
        let mut state = self.begin(OP)?;
        self.books(&mut state).check_release(range, OP)?;
        self.pay(&mut state, Spot::Unmap, OP)?;
        self.books(&mut state).released(range);
        // Nothing is mapped, so no op has its address.
        let own = state.machine.device(self.seat.device);
        own.no_longer_warm(range.at().0);
        own.ranges.remove(&range.at().0);
        Ok(())
    }

    pub(super) fn create(&mut self, len: Bytes) -> Result<MemoryId> {
        const OP: &str = "create_memory";
        let (user, device) = (self.seat.user, self.seat.device);
        let mut state = self.begin(OP)?;
        check_len(len, Bytes(state.map_granularity), OP)?;
        self.books(&mut state).check_room(OP)?;
        self.pay(&mut state, Spot::Create, OP).map_err(|error| error.bytes(len))?;
        state.machine.settle_room(device);
        let room = &mut state.machine.device(device).room;
        if !room.take_apart(len.0) {
            let (free, total) = (Bytes(room.free()), Bytes(room.size()));
            return Err(Error::new(Kind::OutOfMemory, OP)
                .bytes(len)
                .detail(format!("{free} of {total} are free"))
                .code(2, "CUDA_ERROR_OUT_OF_MEMORY"));
        }
        let taker = &mut state.machine.users[user];
        taker.allocated += len.0;
        taker.peak = taker.peak.max(taker.allocated);
        taker.books.created((), len, OP)
    }

    pub(super) fn close(&mut self, memory: MemoryId) -> Result<()> {
        const OP: &str = "close_memory";
        let mut state = self.begin(OP)?;
        let ((), len) = self.books(&mut state).idle(memory, OP)?;
        self.pay(&mut state, Spot::Unmap, OP)?;
        self.books(&mut state).closed(memory, OP)?;
        state.machine.device(self.seat.device).room.give_apart(len.0);
        state.machine.users[self.seat.user].allocated -= len.0;
        Ok(())
    }

    pub(super) fn map(&mut self, range: DeviceRange, memory: &[MemoryId]) -> Result<()> {
        const OP: &str = "map_memory";
        let device = self.seat.device;
        let mut state = self.begin(OP)?;
        self.books(&mut state).check_map(range, memory, OP)?;
        self.pay(&mut state, Spot::Map, OP).map_err(|error| error.bytes(range.len()))?;
        let (at, len) = (range.at().0, range.len());
        let moves_bytes = state.machine.moves_bytes;
        let own = state.machine.device(device);
        let Some(backing) = own.ranges.get_mut(&at) else {
            return Err(Error::usage(Misuse::OutOfRange, OP));
        };
        let bytes = match backing {
            Some(backing) => backing.at(0),
            None if moves_bytes => backing.insert(Backing::new(len.0)?).at(0),
            None => Backing::none(at).at(0),
        };
        own.no_longer_warm(at);
        if moves_bytes {
            bytes.fill(len.to_usize()?, FRESH_BYTE);
        }
        state.machine.regions.map(at, bytes, len.0, device);
        self.books(&mut state).mapped(range, memory);
        Ok(())
    }

    pub(super) fn unmap(&mut self, range: DeviceRange) -> Result<()> {
        const OP: &str = "unmap_memory";
        let mut state = self.begin(OP)?;
        self.books(&mut state).check_unmap(range, OP)?;
        self.pay(&mut state, Spot::Unmap, OP)?;
        let was_in_use = state.machine.regions.unmap(range.at().0);
        self.books(&mut state).unmapped(range);
        if was_in_use {
            // The op that gets there meets no bytes; so none gets anywhere any more.
            let broken = &mut state.machine.device(self.seat.device).broken;
            let cause = "bytes were unmapped that queued work uses";
            broken.get_or_insert((ILLEGAL_ADDRESS, cause.to_string()));
        } else {
            state.machine.device(self.seat.device).keep_warm(range.at().0, range.len().0);
        }
        Ok(())
    }

    fn books<'a>(&self, state: &'a mut State) -> &'a mut Books<()> {
        &mut state.machine.users[self.seat.user].books
    }
}
