//! Progress between verbs, and the end.
//!
//! What it is not: `step` never waits; `drain` and `shutdown` do, and are for the end of a run.
//!
//! Invariant: nothing a copy in flight touches is freed or given back. Where that cannot be proved
//! any more (the device is lost, a deadline passed) it is leaked on purpose, and counted.
//!
//! ```text
//!   step:      ask about the oldest copies -> settle blocks, sums -> free what may go -> report
//!   shutdown:  wait for the device -> free -> give back -> close streams and events
//!   drop:      ask until the deadline -> as shutdown, or leak
//! ```
//!
//! Part of the engine.

use super::Engine;
use super::events::COPY_OUT;
use crate::backend::Backend;
use crate::error::{Error, Kind, Misuse, Result};
use crate::storage::{Inward, Owner, Slot};
use crate::stream::Point;
use crate::trace::Site;
use crate::unit::{StorageId, Table};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

impl Engine {
    /// Learns what is done, without waiting: a bounded number of questions to the driver. Called
    /// now and then it keeps blocks and device bytes moving; every verb works without it.
    ///
    /// # Errors
    /// Those of the driver. With `verify`, `Corrupt` naming a storage whose bytes did not come back
    /// as they left, one at a call; all else was done, and the engine goes on.
    pub fn step(&mut self) -> Result<()> {
        self.begin_or_report("step")?;
        self.step_for()
    }

    /// On behalf of the verb that was begun.
    pub(super) fn step_for(&mut self) -> Result<()> {
        self.poll_lanes()?;
        self.settle_blocks()?;
        self.settle_stalls()?;
        self.settle_spans(self.options.step_queries_max)?;
        self.settle_sums(self.options.step_queries_max, self.options.verify_slots_max)?;
        self.release_all()?;
        self.report(self.verb)
    }

    /// Frees what may go, on every stream on which work may be enqueued now.
    fn release_all(&mut self) -> Result<()> {
        for on in 0..self.ledgers.len() {
            if !self.ledgers[on].has_any(Owner::Engine) {
                continue;
            }
            let capturing = self.backend.capturing(self.ledgers[on].stream);
            if !self.seen(capturing)? {
                self.release_owned(on)?;
            }
        }
        self.handles.pay(&mut self.backend);
        self.release_fixed()
    }

    pub(super) fn poll_lanes(&mut self) -> Result<()> {
        self.poll_out()?;
        self.poll_in(Inward::Ahead)?;
        self.poll_in(Inward::Urgent)
    }

    /// Learns which copies out are done.
    pub(super) fn poll_out(&mut self) -> Result<()> {
        let Engine { out, backend, slots, options, .. } = self;
        let polled = out.poll(backend, options.step_queries_max, &mut landed_out(slots));
        self.seen(polled)
    }

    /// Learns which copies in are done.
    pub(super) fn poll_in(&mut self, inward: Inward) -> Result<()> {
        let Engine { ahead, urgent, backend, slots, options, .. } = self;
        let lane = if inward == Inward::Ahead { ahead } else { urgent };
        let polled = lane.poll(backend, options.step_queries_max, &mut landed_in(slots, inward));
        self.seen(polled)
    }

    /// May one more copy come in on that lane? What looks full is asked first: else a lane that
    /// nobody asks about stays full for good.
    pub(super) fn may_come_in(&mut self, inward: Inward) -> Result<bool> {
        let limits = self.options.lane_in(inward);
        if self.lane_in(inward).is_full(limits) {
            self.poll_in(inward)?;
        }
        Ok(!self.lane_in(inward).is_full(limits))
    }

    /// As [`Engine::may_come_in`], of copies out; and is there an event for its end? That is asked
    /// before a block is lent: of one that is busy the verb itself holds the event from then on.
    pub(super) fn may_go_out(&mut self) -> Result<bool> {
        let limits = self.options.lane();
        if self.out.is_full(limits) {
            self.poll_out()?;
        }
        Ok(!self.out.is_full(limits) && self.free_events(COPY_OUT)?)
    }

    /// Lets the pool learn which of this engine's blocks are idle.
    pub(super) fn settle_blocks(&mut self) -> Result<usize> {
        self.settle_with(|point, backend| point.done(backend, Site::BlockIdleQuery))
    }

    /// The same, as `is_done` says.
    pub(super) fn settle_with(
        &mut self,
        is_done: impl Fn(&Point, &mut dyn Backend) -> Result<bool>,
    ) -> Result<usize> {
        let Engine { client, backend, busy, returned, .. } = self;
        let settled = client.settle(
            &mut |event| match busy.get(&event) {
                Some((point, _)) => is_done(point, backend),
                None => Ok(true),
            },
            &mut |event| returned.push(event),
        );
        while let Some(event) = self.returned.pop() {
            self.unhold(event);
        }
        self.seen(settled)
    }

    /// Adds up how long readers' streams waited, as far as it is known.
    fn settle_stalls(&mut self) -> Result<()> {
        while let Some((before, after)) = self.stalls.front().cloned() {
            let done = after.done(&mut self.backend, Site::TransferQuery);
            if !self.seen(done)? {
                break;
            }
            before.set_done();
            let waited = after.since(&mut self.backend, &before);
            let waited = self.seen(waited)?;
            self.stats.stall_time += waited;
            self.stalls.pop_front();
        }
        Ok(())
    }

    /// Waits, on the host, until everything enqueued on the device is done, and learns of it.
    ///
    /// # Errors
    /// Those of [`Backend::sync`]; `Corrupt` as for [`Engine::step`].
    pub fn drain(&mut self) -> Result<()> {
        self.begin_or_report("drain")?;
        self.settle_all(self.options.verify_slots_max)?;
        self.report("drain")
    }

    fn settle_all(&mut self, reports_max: usize) -> Result<()> {
        let synced = self.backend.sync();
        self.seen(synced)?;
        self.out.set_all_done(&mut landed_out(&mut self.slots));
        self.ahead.set_all_done(&mut landed_in(&mut self.slots, Inward::Ahead));
        self.urgent.set_all_done(&mut landed_in(&mut self.slots, Inward::Urgent));
        for (point, _) in self.busy.values() {
            point.set_done();
        }
        while self.settle_blocks()? > 0 {}
        self.settle_stalls()?;
        self.settle_spans(usize::MAX)?;
        self.settle_sums(usize::MAX, reports_max)?;
        self.is_idle = true;
        let released = self.release_all();
        self.is_idle = false;
        released
    }

    /// Drains, ends every storage, gives everything back, and closes the engine. Bytes that a
    /// framework owns and that are on the device stay the framework's; bytes only on the host are
    /// gone: acquire them before.
    ///
    /// # Errors
    /// The first error of the driver; what it kept from being closed is leaked and counted.
    /// `Corrupt` as for [`Engine::step`]: the engine is closed then, and the same call names the
    /// next storage, until it says `Closed`.
    pub fn shutdown(&mut self) -> Result<()> {
        self.begin_or_report("shutdown")?;
        self.settle_all(usize::MAX)?;
        let ids: Vec<StorageId> = self.slots.iter().map(|(key, _)| StorageId(key)).collect();
        for id in ids {
            self.end_idle(id)?;
        }
        self.pay_all()?;
        let ended = self.handles.end(&mut self.backend);
        self.seen(ended)?;
        self.end_tables()?;
        while self.settle_blocks()? > 0 {}
        self.is_closed = true;
        let backend = &mut self.backend;
        let checks = self.checks.take().map(|checks| checks.close(backend, &mut self.client));
        let mut result = checks.unwrap_or(Ok(()));
        result = result.and(self.events.close(backend));
        result = result.and(self.orders.close(backend));
        result = result.and(self.timers.close(backend));
        for lane in [&self.out, &self.ahead, &self.urgent] {
            for stream in lane.streams() {
                result = result.and(backend.close_stream(*stream));
            }
        }
        for ledger in self.ledgers.drain(..) {
            result = result.and(backend.close_stream(ledger.stream));
        }
        self.seen(result)?;
        self.report("shutdown")
    }

    /// Ends a storage after the whole device was waited for.
    fn end_idle(&mut self, id: StorageId) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "shutdown")?;
        if let Some(fixed) = &mut slot.fixed {
            let unmapped = self.handles.unmap(&mut self.backend, fixed);
            self.seen(unmapped)?;
        }
        let slot = self.slots.get(id.0, "shutdown")?;
        if let (Owner::Engine, Some(range)) = (slot.owner, slot.range) {
            // Everything is done, so any stream will do: a lane is never captured.
            let freed = self.backend.free_device(range.at(), self.out.stream());
            self.seen(freed)?;
        }
        let slot = self.slots.remove(id.0, "shutdown")?;
        if let Some(fixed) = slot.fixed {
            self.handles.release(&mut self.backend, fixed);
        }
        match slot.block {
            Some(block) => self.give_back(block, None),
            None => Ok(()),
        }
    }

    /// Asks until every copy is done or the deadline has passed; says which.
    fn wait_until(&mut self, deadline: Duration) -> Result<bool> {
        let start = Instant::now();
        loop {
            match self.step() {
                // Nobody is left to be told, and what was refused may work the next time; but not
                // in a forked child, or while the process exits.
                Err(error) if !is_final(&error) => {}
                other => other?,
            }
            let moving = [&self.out, &self.ahead, &self.urgent];
            if self.unmarked.is_none() && moving.iter().all(|lane| lane.last().is_none()) {
                return Ok(true);
            }
            if start.elapsed() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// What copies in flight may touch is never given back: blocks stay out of the pool, device
    /// bytes stay allocated.
    fn leak(&mut self) {
        let ids: Vec<StorageId> = self.slots.iter().map(|(key, _)| StorageId(key)).collect();
        for id in ids {
            if let Ok(slot) = self.slots.remove(id.0, "drop") {
                if slot.block.is_some() || slot.range.is_some() {
                    self.stats.leaked_on_purpose_bytes += slot.len.0;
                }
                // Dropping a block without giving it back puts it into the pool's quarantine.
                drop(slot);
            }
        }
        self.stats.leaked_on_purpose_bytes += self.handles.idle_bytes().0;
        for (range, ..) in self.owed.drain(..) {
            self.stats.leaked_on_purpose_bytes += range.len().0;
        }
        if let Some(unmarked) = self.unmarked.take() {
            self.stats.leaked_on_purpose_bytes += unmarked.len().0;
        }
        if let Some(checks) = self.checks.take() {
            self.stats.leaked_on_purpose_bytes += checks.bytes().0;
        }
        self.is_closed = true;
    }
}

/// No later call in this process can work.
fn is_final(error: &Error) -> bool {
    error.is_lost() || error.kind() == Kind::Closed || error.kind() == Kind::Usage(Misuse::Forked)
}

pub(super) fn landed_out(slots: &mut Table<Slot>) -> impl FnMut(StorageId, u64) {
    |storage, seq| {
        if let Some(slot) = slots.find_mut(storage.0) {
            slot.landed_out(seq);
        }
    }
}

pub(super) fn landed_in(slots: &mut Table<Slot>, inward: Inward) -> impl FnMut(StorageId, u64) {
    move |storage, seq| {
        if let Some(slot) = slots.find_mut(storage.0) {
            slot.landed_in(inward, seq);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.is_closed {
            return;
        }
        // A panic that left a drop would end the process where another one is under way.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            let idle = self.wait_until(self.options.drop_deadline);
            if idle.is_ok_and(|idle| idle) {
                // What it cannot close it counts; what it has to report nobody is left to hear.
                let _ = self.shutdown();
            }
        }));
        if !self.is_closed {
            self.leak();
        }
    }
}
