//! The streams of one lane, used in turns, so that the copies of others get in between.
//!
//! What it is not: more bandwidth. A direction has one copy engine; it serves one copy at a time.
//!
//! Invariant: with three streams, work of a turn starts only when the last but one turn is done,
//! and an end marked in a turn stands for all turns before it. So the copy engine always has a turn
//! that may start beside the one that runs, and never two: who comes with a copy of its own waits
//! for two turns at most. With one stream everything is in that stream's order.
//!
//! ```text
//!   stream 0  |turn 1|e1                  wait(e2)|turn 4|e4
//!   stream 1         |turn 2|e2                   wait(e3) ..
//!   stream 2         wait(e1)|turn 3|e3
//!   another                    |copy|             in between, at the latest behind turn 3
//! ```
//!
//! Part of the lanes.

use crate::backend::Backend;
use crate::error::Result;
use crate::stream::{EventPool, Point};
use crate::trace::Site;
use crate::unit::{Bytes, StreamId};

/// What a copy waits for, and the edge that keeps.
pub type After = [(Point, Site)];

/// How many streams take turns: one runs, one may start, one waits.
const STREAMS: usize = 3;

/// A lane's streams, and whose turn it is.
#[derive(Debug)]
pub(super) struct Turns {
    /// One, or [`STREAMS`].
    streams: Vec<StreamId>,
    /// Whose turn it is.
    at: usize,
    /// Bytes enqueued in this turn.
    bytes: Bytes,
    /// The end of the turn before.
    before: Option<Point>,
    /// The stream whose turn it is was ordered behind `before`, too.
    is_joined: bool,
}

impl Turns {
    /// Opens the streams.
    pub(super) fn open(backend: &mut dyn Backend, takes_turns: bool) -> Result<Turns> {
        let count = if takes_turns { STREAMS } else { 1 };
        let streams = (0..count).map(|_| backend.create_stream()).collect::<Result<_>>()?;
        Ok(Turns { streams, at: 0, bytes: Bytes::ZERO, before: None, is_joined: true })
    }

    pub(super) fn streams(&self) -> &[StreamId] {
        &self.streams
    }

    /// Whose turn it is.
    pub(super) fn stream(&self) -> StreamId {
        self.streams[self.at]
    }

    /// Orders the work to come behind `after`.
    pub(super) fn wait(&self, backend: &mut dyn Backend, after: &After) -> Result<()> {
        after.iter().try_for_each(|(point, site)| point.wait(backend, self.stream(), *site))
    }

    /// Would `bytes` more be too many for this turn?
    pub(super) fn is_over(&self, bytes: Bytes, turn_bytes_max: Bytes) -> bool {
        let is_too_much = self.bytes.checked_add(bytes).is_none_or(|sum| sum > turn_bytes_max);
        self.streams.len() > 1 && !self.bytes.is_zero() && is_too_much
    }

    /// Passes the turn on where `bytes` more would be too many for this one. The work to come is
    /// ordered behind `after` on the next stream as well: that was enqueued on this one only.
    pub(super) fn make_room(
        &mut self,
        backend: &mut dyn Backend,
        events: &mut EventPool,
        bytes: Bytes,
        turn_bytes_max: Bytes,
        after: &After,
    ) -> Result<()> {
        if !self.is_over(bytes, turn_bytes_max) {
            return Ok(());
        }
        let end = events.mark(backend, self.stream())?;
        let next = (self.at + 1) % STREAMS;
        let stream = self.streams[next];
        if let Some(before) = &self.before {
            before.wait(backend, stream, Site::AheadTurn)?;
        }
        after.iter().try_for_each(|(point, site)| point.wait(backend, stream, *site))?;
        self.at = next;
        self.bytes = Bytes::ZERO;
        self.before = Some(end);
        self.is_joined = false;
        Ok(())
    }

    /// The end of the turn before is not needed any more once it is passed: its event is free.
    ///
    /// No byte depends on that question. It is asked between copies, whose end joined the turn
    /// before, and of one without an end the engine marks that before anything else: what ends
    /// later stands for that turn all the same. What would be lost is who gets in between: with the
    /// next turn a second one might start beside the one that runs.
    pub(super) fn free_event(&mut self, backend: &mut dyn Backend) -> Result<()> {
        if let Some(before) = &self.before
            && before.done(backend, Site::TransferQuery)?
        {
            self.before = None;
        }
        Ok(())
    }

    /// The turn begins anew: nothing is under way, or nobody else is to get in between.
    pub(super) fn begin(&mut self) {
        self.bytes = Bytes::ZERO;
    }

    /// A trunk was enqueued.
    pub(super) fn enqueued(&mut self, bytes: Bytes) {
        self.bytes = self.bytes.checked_add(bytes).unwrap_or(Bytes::MAX);
    }

    /// Orders the work to come behind every turn before this one, so that its end stands for all.
    pub(super) fn join(&mut self, backend: &mut dyn Backend) -> Result<()> {
        if let (false, Some(before)) = (self.is_joined, &self.before) {
            before.wait(backend, self.stream(), Site::AheadJoin)?;
        }
        self.is_joined = true;
        Ok(())
    }
}
