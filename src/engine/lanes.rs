//! Which lane a copy-in takes, and whether copies ahead take turns there.
//!
//! What it is not: it copies nothing, and decides nothing about what is fetched.
//!
//! Invariant: a reader's copy goes behind copies ahead only where each of those was asked for
//! before it on the same stream, which waits for them anyhow. Whoever finds others in front of it
//! goes on a lane of its own, and from then on copies ahead take turns.
//!
//! ```text
//!   out busy, calm   ahead  |copy|copy|copy|copy ..      one stream that waits
//!   else             ahead  |turn|   |turn|              three, so that others get in between
//!                             |turn|   |turn|
//! ```
//!
//! Beside kernels that keep the memory busy, each stream but the first whose copies wait for the
//! device to come to them takes some three percent of the rate of the copies out that run meanwhile
//! (docs/performance.md). So while copies leave, what waits to come in does so in one stream.
//!
//! Part of the engine.

use super::Engine;
use super::close::{landed_in, landed_out};
use super::events::{COPY_IN_URGENT, TURNS};
use crate::checksum::Way;
use crate::copy::{Lane, LaneLimits};
use crate::error::Result;
use crate::storage::{Inward, Owner};
use crate::unit::{Bytes, StorageId};

/// Who asks for a copy-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Nobody yet.
    Guess,
    /// A reader, which comes next on its stream.
    Reader,
}

/// What is on the lane of copies ahead, as far as a reader's copy could be behind it.
#[derive(Debug, Default)]
pub(super) struct Front {
    /// Number of the stream that the last copy was for.
    home: usize,
    /// Up to this copy there is something in front that is not asked for, or by another stream.
    strays_until: u64,
    /// A reader's copy found others in front of it: in this pass, and in the one before.
    was_overtaken: [bool; 2],
}

impl Front {
    /// The next pass begins.
    pub(super) fn next_pass(&mut self) {
        self.was_overtaken = [false, self.was_overtaken[0]];
    }

    /// The stream that a copy was fetched for will not ask for it first.
    pub(super) fn strays(&mut self, inward: Inward, seq: u64) {
        if inward == Inward::Ahead {
            self.strays_until = self.strays_until.max(seq);
        }
    }
}

impl Engine {
    /// The lane for a copy that is for the stream `on`. What looks as if it were in a reader's way
    /// is asked about once: in a backward nobody else asks.
    ///
    /// # Errors
    /// A loss of the device.
    pub(super) fn lane_for(&mut self, ask: Ask, on: usize, owner: Owner) -> Result<Inward> {
        if ask == Ask::Guess
            || self.may_go_behind(on, owner)
            || (self.is_ahead_idle()? && self.may_go_behind(on, owner))
        {
            return Ok(Inward::Ahead);
        }
        self.overtakes();
        Ok(Inward::Urgent)
    }

    /// May a reader's copy go behind all that is on the lane of copies ahead, and is there room?
    fn may_go_behind(&mut self, on: usize, owner: Owner) -> bool {
        // Guesses for addresses that stay wait for no target: nothing that does goes before them.
        // The count is of all times: an engine that unmapped any keeps its readers apart for good.
        if owner != Owner::Fixed && self.handles.unmapped_count() > 0 {
            return false;
        }
        let has_room = !self.ahead.is_full(self.options.lane_in(Inward::Ahead))
            && self.events.has(COPY_IN_URGENT + TURNS)
            && self.checks.as_ref().is_none_or(|checks| checks.has_spare(Way::Ahead));
        let Engine { ahead, front, prefetcher, .. } = self;
        let is_theirs = front.home == on && prefetcher.bytes_ahead().is_zero();
        has_room && ahead.is_known_done(front.strays_until) && (is_theirs || ahead.last().is_none())
    }

    /// A driver that does not say is taken to have copies under way.
    fn is_ahead_idle(&mut self) -> Result<bool> {
        let Engine { ahead, backend, slots, .. } = self;
        let idle = ahead.is_idle(backend, &mut landed_in(slots, Inward::Ahead));
        let is_idle = idle == Ok(true);
        self.refusal(idle).map(|_| is_idle)
    }

    /// A reader's copy goes on a lane of its own: is somebody in front of it?
    pub(super) fn overtakes(&mut self) {
        self.front.was_overtaken[0] |= self.ahead.last().is_some();
    }

    /// Bytes were fetched ahead that whom they were for will not ask for.
    pub(super) fn wasted(&mut self, id: StorageId) -> Result<()> {
        let slot = self.slots.get(id.0, self.verb)?;
        self.prefetcher.wasted(slot.len);
        if let Some((inward, end)) = &slot.ready {
            self.front.strays(*inward, end.seq);
        }
        Ok(())
    }

    /// A copy for the stream `on` is about to be put on a lane.
    pub(super) fn joins_lane(&mut self, inward: Inward, on: usize) {
        if inward == Inward::Ahead && self.front.home != on {
            let last = self.ahead.last().map_or(0, |end| end.seq);
            self.front.strays(inward, last);
            self.front.home = on;
        }
    }

    /// Copies ahead were ordered behind something else. The next one tells when that is done; as
    /// long as there is none, readers' copies have a lane of their own.
    pub(super) fn ahead_gave_way(&mut self) {
        self.front.strays(Inward::Ahead, self.ahead.seq_next());
    }

    /// Bounds for a copy of `len` bytes. One that a reader waits for gives way to nobody: it is not
    /// cut, and takes no turn.
    ///
    /// # Errors
    /// A loss of the device.
    pub(super) fn limits_for(&mut self, ask: Ask, len: Bytes, owner: Owner) -> Result<LaneLimits> {
        let on_and_on = |limits| LaneLimits { turn_bytes_max: Bytes::MAX, ..limits };
        if ask == Ask::Reader {
            return Ok(on_and_on(self.options.lane()));
        }
        let limits = self.options.lane_in(Inward::Ahead);
        if !self.ahead.would_pass_on(len, limits) {
            return Ok(limits);
        }
        // Copies to addresses that stay wait for nothing, so that nobody gets in between for that.
        let sum = self.ahead.bytes_in_flight().saturating_add(len);
        let is_over = owner == Owner::Fixed && sum > self.options.prefetch_bytes_max;
        if is_over || self.takes_turns()? {
            return Ok(limits);
        }
        // It is asked again after as many bytes as a turn has.
        self.ahead.go_on();
        Ok(on_and_on(limits))
    }

    fn takes_turns(&mut self) -> Result<bool> {
        if self.front.was_overtaken.contains(&true) {
            return Ok(true);
        }
        let Engine { out, backend, slots, .. } = self;
        let idle = out.is_idle(backend, &mut landed_out(slots));
        // Where the driver does not say, the rate of copies out is what turns may cost.
        let leaves = idle == Ok(false);
        self.refusal(idle).map(|_| !leaves)
    }

    pub(super) fn lane_mut(&mut self, inward: Inward) -> &mut Lane {
        match inward {
            Inward::Ahead => &mut self.ahead,
            Inward::Urgent => &mut self.urgent,
        }
    }

    pub(super) fn lane_in(&self, inward: Inward) -> &Lane {
        match inward {
            Inward::Ahead => &self.ahead,
            Inward::Urgent => &self.urgent,
        }
    }
}
