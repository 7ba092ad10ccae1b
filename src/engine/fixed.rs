//! Storages whose address stays: their bytes are unmapped and mapped again, at the same place.
//!
//! What it is not: stream-ordered. The driver unmaps at once, whatever is enqueued; so bytes go
//! only when the host knows everything done that uses them, and never behind a wait of a stream.
//!
//! Invariant: bytes are unmapped when the copies of them were seen done, and after that a moment on
//! every stream of the engine's. The addresses stay reserved until the storage ends, and in the
//! engine's list of ranges.
//!
//! ```text
//!   evict    resident, mapped -> copy-out seen done? -> every stream seen past it? -> unmapped
//!   acquire  unmapped -> memory: idle, new, or waited for (counted) -> mapped -> copy-in
//! ```
//!
//! Part of the engine.

use super::Engine;
use super::ledger::Ledger;
use crate::backend::Backend;
use crate::error::{Error, Kind, Result};
use crate::handles::Fixed;
use crate::storage::{Owner, Residency, Slot, Storage, Tier};
use crate::trace::Site;
use crate::unit::{Bytes, DeviceRange, Name, StorageId, StreamId};
use std::time::Instant;

/// May the host wait for memory?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Never,
    /// As long as `memory_wait_max`.
    Bounded,
}

/// A host that waits asks so often before it lets other threads have the processor.
const ASKS_A_TURN: u32 = 64;

impl Engine {
    /// Takes `len` bytes of device memory at an address that stays the same for the storage's life,
    /// whether its bytes are there or not: for weights, and for what a captured graph points to.
    /// The bytes are undefined, and resident for `compute`. Addresses and memory are rounded up to
    /// what the device maps (2 MiB); mapping takes the host longer than an allocation does, and is
    /// worth it for large storages only.
    ///
    /// An eviction gives the memory back once the host knows that the copy-out, and all that the
    /// streams of this engine were asked to do until then, is done: [`Engine::step`],
    /// [`Engine::mark_step`] and [`Engine::releasable`] ask; after [`Engine::flush`] also for the
    /// storage evicted last. Every stream on which the bytes are used, a graph's replay included,
    /// is one that [`Engine::adopt_stream`] named; what is evicted while one is captured stays
    /// mapped until the capture is over.
    /// Nothing may use the address while the storage is evicted: a device fault is the answer, and
    /// the end of the context. A use that [`Engine::note`] is told of is refused. Work that writes
    /// the bytes, an optimizer's step for one, acquires them by [`Engine::acquire_mut`]; else the
    /// next eviction keeps what was there before.
    ///
    /// A reader of an evicted one may have to wait, on the host, for memory that others are about
    /// to give back: no longer than [`Options::memory_wait_max`](super::Options::memory_wait_max),
    /// counted in [`Stats::memory_stalls`](super::Stats::memory_stalls).
    ///
    /// # Errors
    /// `Unavailable(Mapping)` where the device or its driver cannot do that; `OutOfMemory` after
    /// room was made and none was found; `Usage` for zero bytes and streams; `Busy` past
    /// `storages_max`.
    pub fn alloc_fixed(
        &mut self,
        len: Bytes,
        compute: StreamId,
        name: impl Into<Name>,
    ) -> Result<Storage> {
        const OP: &str = "alloc_fixed";
        self.begin(OP)?;
        let name = name.into();
        let on = self.open_stream(compute, OP)?;
        if self.slots.is_full() {
            return Err(super::too_many(name, OP));
        }
        let named = |error: Error| error.at(name).bytes(len);
        let reserved = self.handles.reserve(&mut self.backend, len, OP);
        let mut fixed = self.seen(reserved).map_err(named)?;
        if let Err(error) = self.map_with_room(&mut fixed, on, Wait::Bounded) {
            self.handles.release(&mut self.backend, fixed);
            return Err(named(error));
        }
        let mut slot =
            Slot::resident(name, Owner::Fixed, fixed.range().part(Bytes::ZERO, len)?, on);
        slot.readers.insert(on);
        slot.fixed = Some(fixed);
        self.insert(slot, OP)
    }

    /// Maps the bytes of an evicted storage, unless they still are. Returns where.
    pub(super) fn map_again(
        &mut self,
        id: StorageId,
        on: usize,
        wait: Wait,
    ) -> Result<DeviceRange> {
        let verb = self.verb;
        let slot = self.slots.get_mut(id.0, verb)?;
        let len = slot.len;
        let Some(mut fixed) = slot.fixed.take() else { return Err(slot.refuse(verb)) };
        let mapped = match fixed.is_mapped() {
            true => Ok(()),
            false => self.map_with_room(&mut fixed, on, wait),
        };
        let range = fixed.range();
        self.slots.get_mut(id.0, "acquire")?.fixed = Some(fixed);
        mapped?;
        range.part(Bytes::ZERO, len)
    }

    /// Maps memory; makes room where there is none.
    fn map_with_room(&mut self, fixed: &mut Fixed, on: usize, wait: Wait) -> Result<()> {
        let since = Instant::now();
        let mut may_trim = true;
        // Each round takes away what it made room of, so there are not many.
        loop {
            let mapped = self.handles.map(&mut self.backend, fixed);
            let error = match self.seen(mapped) {
                Err(error) if error.kind() == Kind::OutOfMemory && wait == Wait::Bounded => error,
                other => return other,
            };
            // What is idle after a try that failed was idle before: once is enough.
            if !(may_trim && self.handles.trim(&mut self.backend)) {
                may_trim = self.unmap_some(on, since)?;
                if !may_trim && !self.free_some(on, since)? && !self.cancel_fixed(on)? {
                    return Err(self.no_memory(error, since));
                }
            } else {
                may_trim = false;
            }
            self.stats.made_room_count += 1;
        }
    }

    /// No room was found. What the device said at the try that failed was the room besides the
    /// memory that this try held already; all of it is back now.
    fn no_memory(&mut self, error: Error, since: Instant) -> Error {
        let free = match self.backend.memory() {
            Ok(memory) => format!("{} of {} are free", memory.free, memory.total),
            Err(_) => String::new(),
        };
        let max = self.options.memory_wait_max;
        error.detail(match since.elapsed() < max {
            true => free,
            false => format!("{free}; memory that others are to give back was waited for {max:?}"),
        })
    }

    /// Unmaps bytes that were evicted; at the end of what uses them, if that must be waited for.
    /// Says whether any went.
    pub(super) fn unmap_some(&mut self, on: usize, since: Instant) -> Result<bool> {
        self.ledgers[on].latest_may_go();
        let before = self.handles.unmapped_count();
        self.release_fixed()?;
        if self.handles.unmapped_count() > before {
            return Ok(true);
        }
        if !self.is_fixed_pending() || self.is_any_captured()? {
            return Ok(false);
        }
        self.stall(since, |engine| {
            engine.release_fixed()?;
            Ok(engine.handles.unmapped_count() > before)
        })
    }

    /// Gives back what goes in the order of a stream, and waits until the stream got there: memory
    /// that has no address yet is in no stream's order. Says whether any went.
    fn free_some(&mut self, on: usize, since: Instant) -> Result<bool> {
        if !self.make_stream_room(on)? {
            return Ok(false);
        }
        let freed = self.orders.mark(&mut self.backend, self.ledgers[on].stream);
        let freed = self.seen(freed)?;
        self.stall(since, |engine| {
            let done = freed.done(&mut engine.backend, Site::TransferQuery);
            engine.seen(done)
        })?;
        Ok(true)
    }

    /// What was fetched ahead is a guess, and who asks is a reader: it goes once its copy is done.
    /// No stream orders that, so whose guess it is does not matter. Says whether there was any.
    pub(super) fn cancel_fixed(&mut self, on: usize) -> Result<bool> {
        self.cancel_each(on, |slot| slot.owner == Owner::Fixed)
    }

    /// Waits, on the host, until it is there or `memory_wait_max` has passed; says which.
    fn stall(
        &mut self,
        since: Instant,
        mut is_there: impl FnMut(&mut Engine) -> Result<bool>,
    ) -> Result<bool> {
        self.stats.memory_stalls += 1;
        let start = Instant::now();
        let (mut there, mut asked) = (Ok(false), 0_u32);
        while matches!(there, Ok(false)) && since.elapsed() < self.options.memory_wait_max {
            // Not long, as a rule: the rest of a copy that runs. Others may have work, though.
            asked = asked.wrapping_add(1);
            if asked.is_multiple_of(ASKS_A_TURN) {
                std::thread::yield_now();
            }
            there = is_there(self);
        }
        self.stats.memory_stall_time += start.elapsed();
        there
    }

    /// Are there bytes that will be unmapped once all that uses them is done? Not those of the one
    /// evicted last, which is listed last: another one has to follow it first.
    fn is_fixed_pending(&mut self) -> bool {
        let Engine { ledgers, lingering, slots, .. } = self;
        let lingers = |id: &StorageId| {
            let slot = slots.find(id.0).filter(|slot| slot.is_mapped() && !slot.is_dropped);
            slot.is_some_and(|slot| slot.residency() == Residency::Evicted(Tier::Host))
        };
        let may_go = |(on, ledger): (usize, &mut Ledger)| {
            let latest = ledger.latest;
            let mut places = ledger.queue(Owner::Fixed).places.iter();
            let oldest = places.find_map(|(id, ticket)| {
                let slot = slots.find(id.0)?;
                (slot.ticket == *ticket && slot.home == on).then_some((*id, slot.is_dropped))
            });
            oldest.is_some_and(|(id, is_dropped)| is_dropped || latest != Some(id))
        };
        lingering.iter().any(lingers) || ledgers.iter_mut().enumerate().any(may_go)
    }

    /// Does somebody capture one of the streams now? Then no moment on it can be marked.
    pub(super) fn is_any_captured(&mut self) -> Result<bool> {
        for index in 0..self.ledgers.len() {
            let capturing = self.backend.capturing(self.ledgers[index].stream);
            if self.seen(capturing)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Is there a moment already that bytes to be unmapped wait for? One at a time, as each holds
    /// an event for every stream until somebody asks about them.
    pub(super) fn is_fixed_fenced(&mut self) -> bool {
        self.ledgers.iter_mut().any(|ledger| ledger.queue(Owner::Fixed).fence.is_some())
    }

    /// Unmaps the bytes that may go, on all streams' accounts.
    pub(super) fn release_fixed(&mut self) -> Result<()> {
        for on in 0..self.ledgers.len() {
            while self.ledgers[on].has_any(Owner::Fixed)
                && self.next_release(on, Owner::Fixed)?.is_some()
            {}
        }
        let mut at = 0;
        while let Some(id) = self.lingering.get(at).copied() {
            if self.settle_lingering(id)? {
                self.lingering.swap_remove(at);
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// A fetch was given up: its bytes go when no copy uses them, unless they are wanted again.
    pub(super) fn linger(&mut self, id: StorageId) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "cancel")?;
        if let Some(fixed) = &mut slot.fixed
            && !std::mem::replace(&mut fixed.is_lingering, true)
        {
            self.lingering.push(id);
        }
        Ok(())
    }

    /// Unmaps bytes that linger, if that may be. Says whether they linger no more.
    fn settle_lingering(&mut self, id: StorageId) -> Result<bool> {
        let Some(slot) = self.slots.find_mut(id.0) else { return Ok(true) };
        let is_away = slot.residency() == Residency::Evicted(Tier::Host) && !slot.is_dropped;
        let Some(fixed) = &mut slot.fixed else { return Ok(true) };
        if !is_away || !fixed.is_mapped() {
            // Wanted again; or ended, and listed with the others that did.
            fixed.is_lingering = false;
            return Ok(true);
        }
        if !self.copies_done(id, Site::UnmapQuery)? {
            return Ok(false);
        }
        self.unmap_bytes(id).map(|()| true)
    }

    fn unmap_bytes(&mut self, id: StorageId) -> Result<()> {
        let Engine { slots, handles, backend, .. } = self;
        let slot = slots.get_mut(id.0, "release")?;
        let unmapped = match &mut slot.fixed {
            Some(fixed) => handles.unmap(backend, fixed),
            None => Ok(()),
        };
        self.seen(unmapped)
    }

    /// The bytes of a storage go: nothing uses them any more.
    pub(super) fn unmap(&mut self, id: StorageId) -> Result<()> {
        self.unmap_bytes(id)?;
        let slot = self.slots.get_mut(id.0, "release")?;
        let (home, len, is_dropped) = (slot.home, slot.len, slot.is_dropped);
        let was_evicting = slot.residency() == Residency::Evicting;
        // Its addresses stay its own: whoever would use them now hears of it.
        slot.range = None;
        if was_evicting {
            self.ledgers[home].leave(Owner::Fixed, len);
            self.stats.released_bytes += len.0;
        }
        if is_dropped {
            return self.forget(id);
        }
        slot.ticket = 0;
        slot.readers = Default::default();
        slot.become_(Residency::Evicted(Tier::Host));
        Ok(())
    }
}
