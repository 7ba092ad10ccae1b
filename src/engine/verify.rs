//! Law 8: what came back is compared with what left, and a storage that differs is named.
//!
//! What it is not: it waits for nothing and asks the driver nothing of its own. It looks at the
//! copies that `step`, or a lane out of slots, has seen done.
//!
//! Invariant: every copy-in that an eviction's sum and a free slot allow is compared once, whatever
//! became of its storage meanwhile. A storage whose bytes differ is Lost, and only that one, though
//! it may have been written since: its reader read what never left. It is reported once, by the
//! next `step`, `drain` or `shutdown`. An eviction that copies nothing is compared as well: bytes
//! that a reader wrote are not those in the block, and would be lost without a word. Batches have
//! no sums: each gather and each scatter is counted as not compared.
//!
//! ```text
//!   evict    slot s |sum, copy|    block keeps Coming(s) -> Known(sum)
//!   refill   slot t |copy, sum|    (t, what the block keeps) -- step --> equal: verified
//!                                                                \-----> not:   Lost, reported
//!   evict    slot u |sum|          (u, what the block keeps), where the host copy is current
//! ```
//!
//! Part of the engine.

use super::Engine;
use super::evict::Evict;
use crate::backend::Backend;
use crate::checksum::{Arrival, Checks, Sum, SumSlot, Way};
use crate::copy::{CopyFailed, End, Job, Left};
use crate::error::{Error, Kind, Result};
use crate::policy::Kept;
use crate::storage::{Residency, Slot};
use crate::unit::{Bytes, Name, StorageId};

/// A storage that was found lost and not reported yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Report {
    name: Name,
    len: Bytes,
    cause: &'static str,
}

/// Bytes that a reader wrote, whose host copy was taken to be as good.
const WRITTEN: &str = "evicted without a copy while the device bytes were not those of the host \
                       copy: who writes acquires by acquire_mut, or notes the write";

impl Engine {
    /// Takes the memory for sums, where they are wanted.
    pub(super) fn with_checks(mut self) -> Result<Engine> {
        if self.options.verify {
            let streams = [self.out.stream(), self.ahead.stream(), self.urgent.stream()];
            let slots_max = self.options.verify_slots_max;
            let opened = Checks::open(&mut self.backend, &mut self.client, slots_max, streams);
            self.checks = Some(opened.map_err(|error| error.during("new"))?);
        }
        Ok(self)
    }

    /// At the start of a verb that copies: a lane without a free slot asks about its oldest copies.
    /// Storages may be found lost by it, so the verb looks at states only afterwards.
    pub(super) fn make_slots(&mut self) -> Result<()> {
        if !self.checks.as_ref().is_some_and(Checks::is_short) {
            return Ok(());
        }
        self.poll_lanes()?;
        self.settle_sums(self.options.step_queries_max, self.options.verify_slots_max)
    }

    /// A slot for the sum of a copy-out.
    pub(super) fn leaving_slot(&mut self) -> Option<SumSlot> {
        self.checks.as_mut()?.lend(Way::Out)
    }

    /// A slot for the sum of a copy-in, and the sum of what left, if there are both.
    pub(super) fn arriving_slot(&mut self, sum: Option<Sum>, way: Way) -> Option<(SumSlot, Sum)> {
        let sum = sum?;
        Some((self.checks.as_mut()?.lend(way)?, sum))
    }

    /// A copy failed; what was enqueued for its slot is harmless.
    pub(super) fn slot_unused(&mut self, at: Option<SumSlot>) {
        if let (Some(checks), Some(at)) = (&mut self.checks, at) {
            checks.take_back(at);
        }
    }

    /// A copy-out was enqueued; returns the sum to keep with its block.
    pub(super) fn sum_left(&mut self, at: Option<SumSlot>, id: StorageId, seq: u64) -> Option<Sum> {
        Some(self.checks.as_mut()?.left(at?, id, seq))
    }

    /// A copy-in was enqueued; it is to be compared where it was given a slot.
    pub(super) fn sum_arrives(&mut self, id: StorageId, slot: Option<(SumSlot, Sum)>, seq: u64) {
        let Some(checks) = &mut self.checks else { return };
        match (slot, self.slots.find(id.0)) {
            (Some((at, sum)), Some(Slot { name, len, .. })) => {
                let arrival = Arrival { storage: id, name: *name, len: *len, sum };
                checks.arrived(at, arrival, seq);
            }
            _ => self.sum_missing(),
        }
    }

    /// A copy is not compared; counted where it was to be.
    pub(super) fn sum_missing(&mut self) {
        self.stats.unverified_count += u64::from(self.checks.is_some());
    }

    /// Before an eviction that copies nothing: are the device bytes those in the block? The out
    /// lane sums them up, where there is a slot, and they go behind that (E2). Returns what became
    /// of the eviction where it ends here.
    pub(super) fn sum_clean(&mut self, id: StorageId, on: usize) -> Result<Option<Evict>> {
        if self.checks.is_none() {
            return Ok(None);
        }
        if !self.may_go_out()? {
            return Ok(Some(self.keep(id, Kept::LaneFull)));
        }
        let slot = self.slots.get(id.0, "evict")?;
        let (name, len, sum) = (slot.name, slot.len, slot.sum);
        let Some((at, sum)) = self.arriving_slot(sum, Way::Out) else {
            self.stats.clean_unverified_count += 1;
            return Ok(None);
        };
        let submitted = self.submit_sum(id, on, at);
        self.after.clear();
        match submitted {
            Ok(end) => {
                if let Some(checks) = &mut self.checks {
                    checks.arrived(at, Arrival { storage: id, name, len, sum }, end.seq);
                }
                self.slots.get_mut(id.0, "evict")?.copied_out(end);
                Ok(None)
            }
            Err(CopyFailed { error, left }) => {
                self.slot_unused(Some(at));
                self.sum_failed(id, on, left)?;
                match error.kind() {
                    Kind::Busy => Ok(Some(self.keep(id, Kept::LaneFull))),
                    _ => self.seen(Err(error.at(name).bytes(len))),
                }
            }
        }
    }

    /// E1, then the sum alone.
    fn submit_sum(
        &mut self,
        id: StorageId,
        on: usize,
        at: SumSlot,
    ) -> std::result::Result<End, CopyFailed> {
        self.order_out(id, on, None).map_err(CopyFailed::before)?;
        let Engine { out, backend, events, slots, checks, after, options, .. } = self;
        let slot = slots.get(id.0, "evict").map_err(CopyFailed::before)?;
        let (Some(checks), Some(range)) = (checks, slot.range) else {
            return Err(CopyFailed::before(slot.refuse("evict")));
        };
        let mut sum = |backend: &mut dyn Backend| checks.enqueue(backend, at, range);
        let job = Job { storage: id, after, work: Some(&mut sum), timers: None };
        out.work(backend, events, options.lane(), job, Bytes::ZERO)
    }

    /// The sum failed, and the storage stays. Where a part of it runs, the bytes are being read as
    /// by a copy-out that leads nowhere; the host copy goes with that, as one that nothing vouches
    /// for.
    fn sum_failed(&mut self, id: StorageId, on: usize, left: Left) -> Result<()> {
        if let Left::Nothing = left {
            return Ok(());
        }
        let slot = self.slots.get_mut(id.0, "evict")?;
        slot.sum = None;
        let last_use = slot.last_use();
        match slot.block.take() {
            Some(block) => self.stays(id, on, block, last_use, left),
            None => Ok(()),
        }
    }

    /// Compares what is known to have arrived: at most `count_max` copies of each lane, and no more
    /// while `reports_max` storages wait to be reported.
    pub(super) fn settle_sums(&mut self, count_max: usize, reports_max: usize) -> Result<()> {
        for _ in 0..count_max {
            if !self.settle_left()? {
                break;
            }
        }
        // Copies in first: bytes that came back wrong differ from those in the block as well.
        for way in [Way::Ahead, Way::Urgent, Way::Out] {
            for _ in 0..count_max {
                if self.reports.len() >= reports_max || !self.settle_arrived(way)? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// The oldest copy-out's sum becomes a number.
    fn settle_left(&mut self) -> Result<bool> {
        let Some(checks) = &mut self.checks else { return Ok(false) };
        let settled = checks.next_left(&mut self.backend, &self.out);
        let Some((id, coming, known)) = self.seen(settled)? else { return Ok(false) };
        if let Some(slot) = self.slots.find_mut(id.0)
            && slot.sum == Some(coming)
        {
            slot.sum = Some(known);
        }
        Ok(true)
    }

    /// The oldest copy-in of a lane is compared; or the oldest eviction that copied nothing.
    fn settle_arrived(&mut self, way: Way) -> Result<bool> {
        let Some(checks) = &mut self.checks else { return Ok(false) };
        let lane = match way {
            Way::Out => &self.out,
            Way::Ahead => &self.ahead,
            Way::Urgent => &self.urgent,
        };
        let settled = checks.next_arrived(&mut self.backend, way, lane);
        let Some((arrival, is_equal)) = self.seen(settled)? else { return Ok(false) };
        match (way, is_equal) {
            (Way::Out, true) => {}
            // Of one that ended, or whose bytes came back wrong already, nothing more is lost.
            (Way::Out, false) if !self.is_alive(arrival.storage) => {}
            (Way::Out, false) => {
                self.stats.corrupt_count += 1;
                self.condemn(&arrival, WRITTEN);
            }
            (_, true) => self.stats.verified_count += 1,
            (_, false) => {
                self.stats.corrupt_count += 1;
                self.condemn(&arrival, "");
            }
        }
        Ok(true)
    }

    fn is_alive(&self, id: StorageId) -> bool {
        let slot = self.slots.find(id.0);
        slot.is_some_and(|slot| !slot.is_dropped && slot.residency() != Residency::Lost)
    }

    /// The storage is lost, and will be reported; one that is lost already was.
    fn condemn(&mut self, arrival: &Arrival, cause: &'static str) {
        let id = arrival.storage;
        match self.slots.find_mut(id.0) {
            Some(slot) if slot.residency() == Residency::Lost => return,
            // It ends as it would have; there is nobody whom it could be refused.
            Some(slot) if slot.is_dropped => {}
            Some(slot) => {
                let (was, home, len) = (slot.residency(), slot.home, slot.len);
                let owner = slot.owner;
                slot.become_(Residency::Lost);
                if let Some(place) = slot.place.take() {
                    self.prefetcher.gone(place);
                }
                self.policy.forget(id);
                slot.ticket = 0;
                match was {
                    Residency::Evicting => self.ledgers[home].leave(owner, len),
                    Residency::Refilling => self.prefetcher.wasted(len),
                    _ => {}
                }
            }
            None => {}
        }
        let Arrival { name, len, .. } = *arrival;
        self.reports.push_back(Report { name, len, cause });
    }

    /// Names the oldest storage found lost that was not named yet.
    pub(super) fn report(&mut self, op: &'static str) -> Result<()> {
        match self.reports.pop_front() {
            Some(Report { name, len, cause }) => {
                Err(Error::new(Kind::Corrupt, op).at(name).bytes(len).detail(cause))
            }
            None => Ok(()),
        }
    }

    /// As `begin`, for the verbs that report: what was found is told even when all is closed.
    pub(super) fn begin_or_report(&mut self, op: &'static str) -> Result<()> {
        if self.is_closed && self.lost.is_none() {
            self.report(op)?;
        }
        self.begin(op)
    }
}
