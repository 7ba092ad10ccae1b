//! Out: a storage's bytes leave for a pinned block.
//!
//! What it is not: it does not free device bytes; `release.rs` does, when edge E2 holds.
//!
//! Invariant: the copy-out is ordered behind everything that the caller's stream, and every other
//! stream that acquired the storage, was asked to do until now (E1); the block behind its last
//! copy-in (E7). A failure leaves the storage resident and the block with the pool.
//!
//! ```text
//!   compute  ..producer.. |E1|
//!   out lane              `->wait  wait(block's last copy) |==copy==| end
//! ```
//!
//! Part of the engine.

use super::Engine;
use super::unmarked::Unmarked;
use crate::backend::Backend;
use crate::checksum::SumSlot;
use crate::copy::{CopyFailed, End, Job, Left, Transfer, Work};
use crate::error::{Error, Kind, Result};
use crate::pinned::{Block, Lent};
use crate::policy::{Advice, Kept};
use crate::storage::{Homed, Owner, Residency};
use crate::stream::Point;
use crate::trace::{Actor, Site, Use};
use crate::unit::{Bytes, DeviceRange, Name, StorageId, StreamId};

/// What became of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evict {
    /// The copy-out is enqueued.
    Moving(Transfer),
    /// The host copy is current, as nobody acquired the bytes to write them: nothing has to be
    /// copied. Bytes that a *reader* wrote are **not** kept: call [`Engine::acquire_mut`], or
    /// [`Engine::note`] the write. With [`Options::verify`](super::Options::verify) such a write is
    /// found, and the storage reported `Corrupt`.
    Clean,
    /// The storage stays on the device.
    Kept(Kept),
}

/// Which reader a storage that leaves is expected to have next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// One of the pass that goes on, or is about to begin.
    InPass,
    /// One of a pass like that which has just read it, should there be another.
    Again,
}

impl Engine {
    /// Says that a storage will not be used for a while; the policy decides what is evicted for it,
    /// if anything. Returns that storage and what became of it, which may be an earlier one than
    /// the one offered.
    ///
    /// # Errors
    /// Those of [`Engine::evict`]; `Usage(State)` where the storage is not resident.
    pub fn offer(
        &mut self,
        id: StorageId,
        compute: StreamId,
    ) -> Result<Option<(StorageId, Evict)>> {
        self.begin("offer")?;
        self.stream_index(compute, "offer")?;
        let slot = self.slot(id, "offer")?;
        slot.must_be(Residency::Resident, "offer")?;
        let len = slot.len;
        match self.policy.offer(Homed { storage: id, stream: compute }, len) {
            Advice::Keep(why) => {
                self.stats.keep(why, len);
                Ok(Some((id, Evict::Kept(why))))
            }
            Advice::Evict(None) => {
                self.stats.keep(Kept::AmongLast, len);
                Ok(None)
            }
            Advice::Evict(Some(homed)) => {
                let became = self.evict_for(homed.storage, homed.stream)?;
                Ok(Some((homed.storage, became)))
            }
        }
    }

    /// Sends a resident storage's bytes to the host. `compute` is the stream on which its producer
    /// was enqueued, as it is current now. Returns at once; the bytes stay readable on the device
    /// until they are released.
    ///
    /// A storage that came back is copied out again only if somebody acquired it by
    /// [`Engine::acquire_mut`], or noted a write of its bytes ([`Engine::note`]); for readers the
    /// host copy from before is as good.
    ///
    /// # Errors
    /// `Usage(State)` where it is not resident; `Corrupt` where it is lost; `Usage` for handles,
    /// lanes as streams, and streams under capture; driver errors, after which the storage is
    /// resident as before.
    pub fn evict(&mut self, id: StorageId, compute: StreamId) -> Result<Evict> {
        self.begin("evict")?;
        self.evict_for(id, compute)
    }

    /// As [`Engine::evict`], of a storage whose readers came and may come again, each pass in the
    /// order of the one before: a graph that is kept for another backward. It is fetched ahead once
    /// such a pass has begun. `compute` is the stream of its last reader.
    ///
    /// # Errors
    /// Those of [`Engine::evict`].
    pub fn rest(&mut self, id: StorageId, compute: StreamId) -> Result<Evict> {
        self.begin("rest")?;
        self.send_off(id, compute, Next::Again)
    }

    /// On behalf of the verb that was begun.
    fn evict_for(&mut self, id: StorageId, compute: StreamId) -> Result<Evict> {
        self.send_off(id, compute, Next::InPass)
    }

    fn send_off(&mut self, id: StorageId, compute: StreamId, next: Next) -> Result<Evict> {
        let _range = self.mark("evict", id);
        let on = self.open_stream(compute, self.verb)?;
        self.make_slots()?;
        let slot = self.slot(id, self.verb)?;
        slot.must_be(Residency::Resident, self.verb)?;
        let has_copy = slot.block.is_some();
        self.policy.forget(id);
        if next == Next::InPass && self.prefetcher.pass_is_over() {
            self.next_pass();
        }
        let became = match has_copy {
            true => self.evict_clean(id, on, next)?,
            false => self.evict_copy(id, on, next)?,
        };
        // What may go besides can go later: the eviction itself is done.
        let released = self.release_owned(on);
        self.refusal(released)?;
        Ok(became)
    }

    /// The host copy is current: the device bytes can go as they are.
    fn evict_clean(&mut self, id: StorageId, on: usize, next: Next) -> Result<Evict> {
        if let Some(became) = self.sum_clean(id, on)? {
            return Ok(became);
        }
        let slot = self.slots.get(id.0, "evict")?;
        let (readers, owner, len) = (slot.readers, slot.owner, slot.len);
        if owner != Owner::Fixed {
            // The bytes go in the order of `on`, so the other readers are ordered before that.
            let stream = self.ledgers[on].stream;
            self.order_behind(stream, Engine::others(readers, on), Site::FreeAfterUsers)?;
        }
        self.stats.clean_bytes += len.0;
        self.leave(id, on, next)?;
        Ok(Evict::Clean)
    }

    fn evict_copy(&mut self, id: StorageId, on: usize, next: Next) -> Result<Evict> {
        let slot = self.slots.get(id.0, "evict")?;
        let (len, name) = (slot.len, slot.name);
        let Some(range) = slot.range else { return Err(slot.refuse(self.verb)) };
        if !self.may_go_out()? {
            return Ok(self.keep(id, Kept::LaneFull));
        }
        let lent = match self.lend(len, name) {
            Ok(lent) => lent,
            Err(error) if error.is_retryable() => return Ok(self.keep(id, Kept::NoPinnedRoom)),
            Err(error) => return self.seen(Err(error)),
        };
        let after = lent.after.and_then(|event| self.unhold(event));
        let mut block = lent.block;
        block.mark_written(len)?;
        let at = self.leaving_slot();
        let submitted = self.submit_out(id, range, on, &block, after.as_ref(), at);
        self.after.clear();
        match submitted {
            Ok(end) => {
                let transfer = Transfer { storage: id, seq: end.seq, bytes: len };
                let times = self.out.take_times();
                self.copied(id, None, times);
                let sum = self.sum_left(at, id, end.seq);
                let slot = self.slots.get_mut(id.0, "evict")?;
                slot.block = Some(block);
                slot.sum = sum;
                slot.copied_out(end);
                self.leave(id, on, next)?;
                Ok(Evict::Moving(transfer))
            }
            Err(failed) => {
                self.slot_unused(at);
                self.stays(id, on, block, after, failed.left)?;
                match failed.error.kind() {
                    Kind::Busy => Ok(self.keep(id, Kept::LaneFull)),
                    _ => self.seen(Err(failed.error.at(name).bytes(len))),
                }
            }
        }
    }

    /// The copy-out failed, and the storage stays. What was enqueued fills the block, and reads the
    /// device bytes: E2 and E7 count for it, too.
    pub(super) fn stays(
        &mut self,
        id: StorageId,
        on: usize,
        block: Block,
        after: Option<Point>,
        left: Left,
    ) -> Result<()> {
        match left {
            Left::Nothing => self.give_back(block, after),
            Left::Until(end) => self.left_by_copy_out(id, on, block, end),
            Left::Unmarked => {
                self.in_doubt(Unmarked::Out { storage: id, on, block });
                Ok(())
            }
        }
    }

    /// A copy-out that leads nowhere ends here.
    pub(super) fn left_by_copy_out(
        &mut self,
        id: StorageId,
        on: usize,
        block: Block,
        end: End,
    ) -> Result<()> {
        self.give_back(block, Some(end.point.clone()))?;
        let slot = self.slots.get_mut(id.0, "evict")?;
        slot.copied_out(end);
        slot.home = on;
        Ok(())
    }

    /// A block; where the pool has none, those given back busy are asked about first. In the first
    /// step the pool may grow for it, and the host waits that long: nobody reserved.
    pub(super) fn lend(&mut self, len: Bytes, name: Name) -> Result<Lent> {
        let lent = match self.client.lend(len, name) {
            Err(error) if error.is_retryable() => {
                self.settle_blocks()?;
                self.client.lend(len, name)?
            }
            other => other?,
        };
        if lent.returned > 0 {
            // An event came home by another engine's lend: ask, so that the trace shows it done.
            if let Err(error) = self.settle_blocks() {
                return match self.client.give_back(lent.block, lent.after) {
                    Ok(()) => Err(error),
                    Err(refused) => Err(refused.error),
                };
            }
        }
        Ok(lent)
    }

    pub(super) fn keep(&mut self, id: StorageId, why: Kept) -> Evict {
        if let Ok(slot) = self.slots.get(id.0, "evict") {
            self.stats.keep(why, slot.len);
        }
        Evict::Kept(why)
    }

    /// E1, E7, then the sum and the copy.
    fn submit_out(
        &mut self,
        id: StorageId,
        range: DeviceRange,
        on: usize,
        block: &Block,
        after: Option<&Point>,
        at: Option<SumSlot>,
    ) -> std::result::Result<End, CopyFailed> {
        self.note_producer(id, range, on).map_err(CopyFailed::before)?;
        self.order_out(id, on, after).map_err(CopyFailed::before)?;
        let limits = self.options.lane();
        let mut sum = self.checks.as_ref().zip(at).map(|(checks, at)| {
            move |backend: &mut dyn Backend| checks.enqueue(backend, at, range)
        });
        let (after, work) = (&self.after[..], sum.as_mut().map(|sum| sum as Work<'_>));
        let timers = self.timeline.has_room().then_some(&mut self.timers);
        let job = Job { storage: id, after, work, timers };
        self.out.copy_out(&mut self.backend, &mut self.events, limits, job, range, block)
    }

    /// With `note_uses`: the bytes that are about to leave were written by their producer.
    fn note_producer(&mut self, id: StorageId, range: DeviceRange, on: usize) -> Result<()> {
        let slot = self.slots.get(id.0, "evict")?;
        let is_first = Engine::others(slot.readers, on).is_empty() && slot.out_of_these().is_none();
        if self.options.note_uses && is_first {
            // Where other streams have read them since, or an eviction that failed half way, the
            // write is older: not told again.
            let by = Actor::Stream(self.ledgers[on].stream);
            self.backend.note(by, &[Use::write(range)])?;
        }
        Ok(())
    }

    /// The out lane's next work comes behind all that uses the bytes now, and behind `after`.
    pub(super) fn order_out(
        &mut self,
        id: StorageId,
        on: usize,
        after: Option<&Point>,
    ) -> Result<()> {
        let others = Engine::others(self.slots.get(id.0, "evict")?.readers, on);
        let lane = self.out.stream();
        self.order_behind_one(lane, on, Site::ProducerDone)?;
        self.order_behind(lane, others, Site::OtherUsersDone)?;
        self.after.clear();
        let reused = after.map(|after| (after.clone(), Site::BlockReuseWait));
        self.after.extend(reused);
        Ok(())
    }

    /// Enters the storage among those that wait for their device bytes to go.
    fn leave(&mut self, id: StorageId, on: usize, next: Next) -> Result<()> {
        let stream = self.ledgers[on].stream;
        let homed = Homed { storage: id, stream };
        let place = match next {
            Next::InPass => self.prefetcher.left(homed),
            Next::Again => self.prefetcher.rests(homed),
        };
        let slot = self.slots.get_mut(id.0, "evict")?;
        slot.become_(Residency::Evicting);
        slot.home = on;
        slot.place = Some(place);
        let (len, owner) = (slot.len, slot.owner);
        slot.ticket = self.ledgers[on].enter(id, owner, len);
        self.ledgers[on].compact(owner, &self.slots, on);
        self.stats.evicted_bytes += len.0;
        self.stats.evicted_count += 1;
        Ok(())
    }

    /// Has this copy been seen done? Asks the driver about the lane's oldest copies.
    ///
    /// # Errors
    /// Those of [`Backend::query`].
    pub fn is_done(&mut self, transfer: Transfer) -> Result<bool> {
        self.begin("is_done")?;
        if !self.out.is_known_done(transfer.seq) {
            self.poll_out()?;
        }
        Ok(self.out.is_known_done(transfer.seq))
    }

    /// The error of a verb that finds the lane full.
    pub(super) fn lane_full(&self, id: StorageId) -> Error {
        let error = crate::copy::full(self.verb);
        match self.slots.get(id.0, self.verb) {
            Ok(slot) => error.at(slot.name).bytes(slot.len),
            Err(_) => error,
        }
    }
}
