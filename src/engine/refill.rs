//! In: a storage's bytes come home, for a reader or ahead of one.
//!
//! What it is not: it never makes the host wait. What a reader gets, and when, `acquire.rs` says.
//!
//! Invariant: a copy-in is ordered behind the stream on which its target was taken (E5) and behind
//! the copy-out of the same block (E4) and the copy-ins from it before (E7); each reader's stream
//! behind the copy-in (E6). A failure leaves the storage evicted, its block whole.
//!
//! ```text
//!   compute   ..target's old users.. |E5|            wait(E6) |==reader==|
//!   in lane                          `->wait |==copy==| end --^
//! ```
//!
//! Part of the engine.

use super::Engine;
use super::events::{COPY_IN_URGENT, TURNS};
use super::lanes::Ask;
use super::unmarked::Unmarked;
use crate::backend::Backend;
use crate::checksum::{Sum, SumSlot};
use crate::copy::{CopyFailed, End, Job, Left, Work};
use crate::error::{Error, Kind, Misuse, Result};
use crate::storage::{Inward, Owner, Residency, StreamSet, Tier};
use crate::trace::{Access, Actor, Site, Use};
use crate::unit::{Bytes, DeviceRange, StorageId, StreamId};

impl Engine {
    /// Brings a storage's bytes into memory that its framework took in the order of `compute`, for
    /// a reader that will be enqueued on `compute` next.
    ///
    /// # Errors
    /// `Usage(State)` where the bytes are not evicted; `Usage` for a target of another length, or
    /// one that overlaps another storage; `Busy` where the lane is full, or no event is free. The
    /// storage is evicted as before, and the framework may drop the target in the order of
    /// `compute`.
    pub fn refill(
        &mut self,
        id: StorageId,
        target: DeviceRange,
        compute: StreamId,
    ) -> Result<DeviceRange> {
        const OP: &str = "refill";
        let _range = self.mark(OP, id);
        self.begin(OP)?;
        let on = self.open_stream(compute, OP)?;
        self.make_slots()?;
        self.check_target(id, target, OP)?;
        self.refill_into(id, target, on, Ask::Reader)?;
        let range = self.serve(id, on)?;
        self.writer_came(id, on)?;
        Ok(range)
    }

    /// The storage of `compute` whose framework should take room next, and how much, so that it can
    /// be fetched ahead with [`Engine::prefetch`]. Call it until it says `None`; taking no room is
    /// always allowed.
    ///
    /// # Errors
    /// `Usage` for streams; driver errors.
    pub fn wanted(&mut self, compute: StreamId) -> Result<Option<(StorageId, Bytes)>> {
        self.begin("wanted")?;
        self.open_stream(compute, "wanted")?;
        let wanted = self.next_wanted(compute, true);
        if wanted.is_none() || !self.may_come_in(Inward::Ahead)? {
            return Ok(None);
        }
        Ok(wanted)
    }

    /// The next one to fetch whose bytes are a framework's, or those whose bytes are not.
    pub(super) fn next_wanted(
        &self,
        stream: StreamId,
        of_framework: bool,
    ) -> Option<(StorageId, Bytes)> {
        self.prefetcher.wanted(stream, |id| {
            let slot = self.slots.get(id.0, "wanted").ok()?;
            let is_away = slot.residency() == Residency::Evicted(Tier::Host);
            let is_of = (slot.owner == Owner::Framework) == of_framework;
            (is_away && is_of && !slot.is_dropped).then_some(slot.len)
        })
    }

    /// Fetches a storage ahead of its reader, into memory that its framework took in the order of
    /// `compute`. The framework keeps the memory until a reader acquired the storage, or
    /// [`Engine::cancel`] or `release` returned.
    ///
    /// # Errors
    /// As [`Engine::refill`].
    pub fn prefetch(
        &mut self,
        id: StorageId,
        target: DeviceRange,
        compute: StreamId,
    ) -> Result<()> {
        const OP: &str = "prefetch";
        let _range = self.mark(OP, id);
        self.begin(OP)?;
        let on = self.open_stream(compute, OP)?;
        self.make_slots()?;
        self.check_target(id, target, OP)?;
        self.refill_into(id, target, on, Ask::Guess)
    }

    /// Gives a storage that was fetched ahead up again; its host copy is as good as before. The
    /// framework may drop the memory in the order of `compute` when this returns.
    ///
    /// # Errors
    /// `Usage(State)` where it is not being fetched; driver errors, after which it still is.
    pub fn cancel(&mut self, id: StorageId, compute: StreamId) -> Result<()> {
        const OP: &str = "cancel";
        self.begin(OP)?;
        let on = self.open_stream(compute, OP)?;
        self.slot(id, OP)?.must_be(Residency::Refilling, OP)?;
        self.cancel_refill(id, on)
    }

    pub(super) fn cancel_refill(&mut self, id: StorageId, on: usize) -> Result<()> {
        self.undo_refill(id, on, false)?;
        self.wasted(id)
    }

    fn check_target(&mut self, id: StorageId, target: DeviceRange, op: &'static str) -> Result<()> {
        let slot = self.slot(id, op)?;
        slot.must_be(Residency::Evicted(Tier::Host), op)?;
        if slot.owner != Owner::Framework {
            let error = Error::usage(Misuse::State, op).at(slot.name);
            return Err(error.detail("the engine owns its device bytes: acquire it"));
        }
        if target.len() != slot.len {
            return Err(Error::usage(Misuse::LengthMismatch, op).at(slot.name).bytes(target.len()));
        }
        let name = slot.name;
        self.check_range(target).map_err(|error| error.at(name))
    }

    /// Order, copy, sum. The storage is Refilling afterwards, or evicted as before.
    pub(super) fn refill_into(
        &mut self,
        id: StorageId,
        target: DeviceRange,
        on: usize,
        ask: Ask,
    ) -> Result<()> {
        let owner = self.slots.get(id.0, self.verb)?.owner;
        let inward = self.lane_for(ask, on, owner)?;
        match self.submit_in(id, target, on, (ask, inward)) {
            Ok(end) => {
                let times = self.lane_mut(inward).take_times();
                self.copied(id, Some(inward), times);
                let slot = self.slots.get_mut(id.0, self.verb)?;
                slot.range = Some(target);
                slot.copied_in(inward, end);
                slot.home = on;
                slot.readers = StreamSet::default();
                slot.become_(Residency::Refilling);
                let (len, name) = (slot.len, slot.name);
                self.enter_range(id, name, target);
                self.stats.refilled_bytes += len.0;
                self.stats.refilled_count += 1;
                if ask == Ask::Guess {
                    self.prefetcher.fetched(len);
                }
                Ok(())
            }
            Err(failed) => Err(self.refill_failed(id, target, on, inward, failed)),
        }
    }

    fn submit_in(
        &mut self,
        id: StorageId,
        target: DeviceRange,
        on: usize,
        (ask, inward): (Ask, Inward),
    ) -> std::result::Result<End, CopyFailed> {
        let ordered = self.order_in(id, target, on, inward);
        let sum = ordered.map_err(CopyFailed::before)?;
        let arriving = self.arriving_slot(sum, inward.way());
        let at = arriving.map(|(at, _)| at);
        self.joins_lane(inward, on);
        let copied = self.copy_in(id, target, (ask, inward), at);
        self.after.clear();
        match &copied {
            Ok(end) => self.sum_arrives(id, arriving, end.seq),
            Err(_) => self.slot_unused(at),
        }
        copied
    }

    /// E5, E4, E7. Returns what the bytes in the block add up to.
    fn order_in(
        &mut self,
        id: StorageId,
        target: DeviceRange,
        on: usize,
        inward: Inward,
    ) -> Result<Option<Sum>> {
        let stream = self.ledgers[on].stream;
        if self.slots.get(id.0, "refill")?.owner == Owner::Framework {
            // Said first, as its end is said even where the lane has no room.
            let taken = Use { access: Access::Alloc, span: target.into() };
            self.backend.note(Actor::Stream(stream), &[taken])?;
        }
        if !self.may_come_in(inward)? {
            return Err(self.lane_full(id));
        }
        let ahead = if inward == Inward::Ahead { TURNS } else { 0 };
        self.free_events(COPY_IN_URGENT + ahead)?;
        let slot = self.slots.get(id.0, "refill")?;
        self.after.clear();
        // Where the address stays the bytes were mapped just now: they have no other users.
        if slot.owner != Owner::Fixed {
            let free = self.events.mark(&mut self.backend, stream)?;
            self.after.push((free, Site::TargetFree));
        }
        let out = slot.out.as_ref().map(|out| (out.point.clone(), Site::RefillAfterCopyOut));
        self.after.extend(out);
        let earlier = slot.last_copy_in();
        self.after.extend(earlier.map(|end| (end.point.clone(), Site::EarlierCopyIn)));
        Ok(slot.sum)
    }

    /// The copy, then the sum of what arrived.
    fn copy_in(
        &mut self,
        id: StorageId,
        target: DeviceRange,
        (ask, inward): (Ask, Inward),
        at: Option<SumSlot>,
    ) -> std::result::Result<End, CopyFailed> {
        let owner = self.slots.get(id.0, "refill").map_err(CopyFailed::before)?.owner;
        let limits = self.limits_for(ask, target.len(), owner).map_err(CopyFailed::before)?;
        let slot = self.slots.get(id.0, "refill").map_err(CopyFailed::before)?;
        let Some(block) = &slot.block else {
            return Err(CopyFailed::before(slot.refuse(self.verb)));
        };
        let lane = match inward {
            Inward::Ahead => &mut self.ahead,
            Inward::Urgent => &mut self.urgent,
        };
        let mut sum = self.checks.as_ref().zip(at).map(|(checks, at)| {
            move |backend: &mut dyn Backend| checks.enqueue(backend, at, target)
        });
        let (after, work) = (&self.after[..], sum.as_mut().map(|sum| sum as Work<'_>));
        let timers = self.timeline.has_room().then_some(&mut self.timers);
        let job = Job { storage: id, after, work, timers };
        lane.copy_in(&mut self.backend, &mut self.events, limits, job, target, block)
    }

    /// The storage stays evicted. What was enqueued may still write the target, so `compute` is
    /// ordered behind it before the target goes.
    fn refill_failed(
        &mut self,
        id: StorageId,
        target: DeviceRange,
        on: usize,
        inward: Inward,
        failed: CopyFailed,
    ) -> Error {
        let mut error = failed.error;
        let undone = match failed.left {
            Left::Nothing => self.undo_target(id, target, on, None, true),
            Left::Until(end) => self.undo_target(id, target, on, Some((inward, end)), true),
            Left::Unmarked => self.keep_target(id, target, on, inward, &error),
        };
        if let Ok(slot) = self.slots.get(id.0, self.verb) {
            error = error.at(slot.name).bytes(slot.len);
        }
        match (self.refusal::<()>(Err(error)), undone) {
            // A loss on the way back outweighs what led there.
            (Err(lost), _) | (_, Err(lost)) => lost,
            (Ok(Some(error)), Ok(())) => error,
            (Ok(None), Ok(())) => Error::new(Kind::Busy, self.verb),
        }
    }

    /// Nothing says when a copy into the target is done. The engine keeps its own; a framework was
    /// told that its target is its own again, so there it has to be told of a loss.
    fn keep_target(
        &mut self,
        id: StorageId,
        target: DeviceRange,
        on: usize,
        inward: Inward,
        cause: &Error,
    ) -> Result<()> {
        if self.slots.get(id.0, "refill")?.owner == Owner::Framework {
            return Err(self.give_up(cause));
        }
        self.in_doubt(Unmarked::In { storage: id, on, inward, target });
        Ok(())
    }

    pub(super) fn undo_target(
        &mut self,
        id: StorageId,
        target: DeviceRange,
        on: usize,
        ready: Option<(Inward, End)>,
        must: bool,
    ) -> Result<()> {
        let stream = self.ledgers[on].stream;
        let owner = self.slots.get(id.0, "refill")?.owner;
        let mut after = None;
        if let Some((inward, end)) = ready {
            self.front.strays(inward, end.seq);
            if owner == Owner::Fixed {
                // They are unmapped once the copy-in is known done; no stream waits for it.
            } else if must && owner == Owner::Engine {
                after = Some(end.point.clone());
            } else if must {
                self.pass(&end.point, stream, Site::FreeAfterCopyIn)?;
            } else {
                let waited = end.point.wait(&mut self.backend, stream, Site::FreeAfterCopyIn);
                self.seen(waited)?;
            }
            // The block is being read; whoever takes it next must know.
            self.slots.get_mut(id.0, "refill")?.copied_in(inward, end);
        }
        match owner {
            Owner::Engine => return self.free_behind(target, stream, after),
            Owner::Fixed => return self.linger(id),
            Owner::Framework => {}
        }
        let free = Use { access: Access::Free, span: target.into() };
        let noted = self.backend.note(Actor::Stream(stream), &[free]);
        self.seen(noted)
    }

    /// Refilling back to Evicted: the target goes in the order of `on`, behind the copy-in. What
    /// `must` be undone is, even if a failing driver has to be waited for, or asked again later.
    pub(super) fn undo_refill(&mut self, id: StorageId, on: usize, must: bool) -> Result<()> {
        let slot = self.slots.get(id.0, "cancel")?;
        let (range, ready) = (slot.range, slot.ready.clone());
        if let Some(range) = range {
            self.undo_target(id, range, on, ready, must)?;
            self.leave_range(id, range);
        }
        let slot = self.slots.get_mut(id.0, "cancel")?;
        slot.range = None;
        slot.become_(Residency::Evicted(Tier::Host));
        Ok(())
    }
}
