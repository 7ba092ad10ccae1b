//! Law 8: what came back is compared with what left, and a storage that differs is named.
//!
//! What it is not: it waits for nothing and asks the driver nothing of its own. It looks at the
//! copies that `step`, or a lane out of slots, has seen done.
//!
//! Invariant: every copy-in that an eviction's sum and a free slot allow is compared once, whatever
//! became of its storage meanwhile. A storage whose bytes differ is Lost, and only that one, though
//! it may have been written since: its reader read what never left. It is reported once, by the
//! next `step`, `drain` or `shutdown`.
//!
//! ```text
//!   evict    slot s |sum, copy|    block keeps Coming(s) -> Known(sum)
//!   refill   slot t |copy, sum|    (t, what the block keeps) -- step --> equal: verified
//!                                                                \-----> not:   Lost, reported
//! ```
//!
//! Part of the engine.

use super::Engine;
use crate::checksum::{Arrival, Checks, Sum, SumSlot, Way};
use crate::error::{Error, Kind, Result};
use crate::storage::{Inward, Residency, Slot};
use crate::unit::StorageId;

impl Engine {
    /// Takes the memory for sums, where they are wanted.
    pub(super) fn with_checks(mut self) -> Result<Engine> {
        if self.options.verify {
            let streams = [self.out.stream(), self.ahead.stream(), self.urgent.stream()];
            let slots_max = self.options.verify_slots_max;
            let opened = Checks::open(&mut self.backend, &mut self.client, slots_max, streams);
            self.checks = Some(opened?);
        }
        Ok(self)
    }

    /// At the start of a verb that copies: a lane without a free slot asks about its oldest copies.
    /// Storages may be found lost by it, so the verb looks at states only afterwards.
    pub(super) fn make_slots(&mut self) -> Result<()> {
        self.free_events()?;
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
            _ => self.stats.unverified_count += 1,
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
        for inward in [Inward::Ahead, Inward::Urgent] {
            for _ in 0..count_max {
                if self.reports.len() >= reports_max || !self.settle_arrived(inward)? {
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

    /// The oldest copy-in of a lane is compared.
    fn settle_arrived(&mut self, inward: Inward) -> Result<bool> {
        let Some(checks) = &mut self.checks else { return Ok(false) };
        let lane = match inward {
            Inward::Ahead => &self.ahead,
            Inward::Urgent => &self.urgent,
        };
        let settled = checks.next_arrived(&mut self.backend, inward.way(), lane);
        let Some((arrival, is_equal)) = self.seen(settled)? else { return Ok(false) };
        if is_equal {
            self.stats.verified_count += 1;
        } else {
            self.stats.corrupt_count += 1;
            self.condemn(&arrival);
        }
        Ok(true)
    }

    /// The storage is lost, and will be reported; one that is lost already was.
    fn condemn(&mut self, arrival: &Arrival) {
        let id = arrival.storage;
        match self.slots.find_mut(id.0) {
            Some(slot) if slot.residency() == Residency::Lost => return,
            // It ends as it would have; there is nobody whom it could be refused.
            Some(slot) if slot.is_dropped => {}
            Some(slot) => {
                let (was, home, len) = (slot.residency(), slot.home, slot.len);
                let owner = slot.owner;
                slot.become_(Residency::Lost);
                if let Some(ordinal) = slot.ordinal.take() {
                    self.prefetcher.gone(ordinal);
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
        self.reports.push_back((arrival.name, arrival.len));
    }

    /// Names the oldest storage found lost that was not named yet.
    pub(super) fn report(&mut self, op: &'static str) -> Result<()> {
        match self.reports.pop_front() {
            Some((name, len)) => Err(Error::new(Kind::Corrupt, op).at(name).bytes(len)),
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
