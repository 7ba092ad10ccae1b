//! Where events are short: who holds some, and lets go of those that stand for what is done.
//!
//! What it is not: a wait. What is not done keeps its event, and who needs one is refused or comes
//! later.
//!
//! Invariant: a verb is refused for want of events only where the device has not passed what holds
//! them. A stream is ordered behind another one, or a lane behind a stream, with an event of its
//! own, which nobody holds: that is never refused.
//!
//! ```text
//!   copies under way ........ their lanes are asked           one each, and a lane's turn
//!   blocks given back busy .. held by the ends of copies, which are known by then
//!   fences .................. each moment is asked about      one for each stream
//!   batches ................. none: they keep a copy's number
//! ```
//!
//! Part of the engine.

use super::Engine;
use super::close::{landed_in, landed_out};
use crate::error::Result;
use crate::storage::{Inward, Owner, StreamSet};
use crate::stream::Point;
use crate::trace::Site;
use crate::unit::StreamId;

/// Events that order one stream behind another: nobody holds one longer than that takes, so that it
/// is never refused.
pub(super) const ORDERS: usize = 1;
/// What a copy out takes: its end.
pub(super) const COPY_OUT: usize = 1;
/// A copy in for a reader: a moment of the stream on which its target was taken, and its end.
pub(super) const COPY_IN_URGENT: usize = 2;
/// A copy ahead besides: the ends of two of its lane's turns.
pub(super) const TURNS: usize = 2;

impl Engine {
    /// Before events are taken. Where `count` of them are not to be had, those let go of theirs who
    /// hold them for what is done; it is asked about until there are as many. Says whether there
    /// are. The questions are bounded: a few for each lane, and one for each stream that a fence
    /// waits for.
    pub(super) fn free_events(&mut self, count: usize) -> Result<bool> {
        if self.busy.len() > super::BUSY_ROOM_MAX / 2 {
            // Events there may be, but the table of those that blocks wait for has its room, too.
            self.poll_lanes()?;
            self.settle_blocks()?;
        }
        if self.events.has(count) {
            return Ok(true);
        }
        self.free_copies()?;
        for on in 0..self.ledgers.len() {
            for owner in [Owner::Framework, Owner::Fixed] {
                if self.events.has(count) {
                    return Ok(true);
                }
                self.free_fence(on, owner)?;
            }
        }
        Ok(self.events.has(count))
    }

    /// Copies that are done, blocks that were busy with them, and tables that they read.
    fn free_copies(&mut self) -> Result<()> {
        let Engine { out, ahead, urgent, backend, slots, .. } = self;
        let mut freed = out.free_events(backend, &mut landed_out(slots));
        for (lane, inward) in [(ahead, Inward::Ahead), (urgent, Inward::Urgent)] {
            let landed = &mut landed_in(slots, inward);
            freed = freed.and_then(|()| lane.free_events(backend, landed));
        }
        self.seen(freed)?;
        self.packer.free_events();
        self.settle_known()
    }

    /// Blocks whose copies are known done come home. No driver call: of whatever copy a block
    /// waits for, its lane was asked.
    fn settle_known(&mut self) -> Result<()> {
        let count = |holds: &(Point, u32)| holds.1 as usize;
        let known = self.busy.values().filter(|(point, _)| point.is_known_done());
        let mut left: usize = known.map(count).sum();
        let all: usize = self.busy.values().map(count).sum();
        // Each time the oldest are looked at, at least one, and go behind the others.
        for _ in 0..all {
            if left == 0 {
                break;
            }
            let settled = self.settle_with(|point, _| Ok(point.is_known_done()))?;
            left = left.saturating_sub(settled);
        }
        Ok(())
    }

    /// The streams of a fence that are past it let its events go.
    fn free_fence(&mut self, on: usize, owner: Owner) -> Result<()> {
        let Engine { ledgers, backend, .. } = self;
        let Some(fence) = &mut ledgers[on].queue(owner).fence else { return Ok(()) };
        let mut asked = Ok(true);
        fence.points.retain(|point| {
            if asked.is_ok() {
                asked = point.done(backend, fence_site(owner));
            }
            asked != Ok(true)
        });
        self.seen(asked).map(drop)
    }

    /// Marks a fence's moment on the streams where it is not marked yet, as far as there are
    /// events: a later moment does as well. Says whether it is marked on all. Where the driver
    /// refuses, the fence is gone, and what it covered waits for another one.
    pub(super) fn mark_fence(&mut self, on: usize, owner: Owner) -> Result<bool> {
        let is_marked = self.unmarked_stream(on, owner).is_none();
        if owner == Owner::Fixed && !is_marked && self.is_any_captured()? {
            // No moment can be marked on a stream under capture: later.
            return Ok(false);
        }
        while let Some(stream) = self.unmarked_stream(on, owner) {
            if !self.free_events(1)? {
                return Ok(false);
            }
            let marked = self.events.mark(&mut self.backend, stream);
            let fence = &mut self.ledgers[on].queue(owner).fence;
            match (marked, fence) {
                (Ok(point), Some(fence)) => {
                    fence.points.push(point);
                    fence.unmarked.start += 1;
                }
                (marked, fence) => {
                    *fence = None;
                    return self.seen(marked).map(|_| false);
                }
            }
        }
        Ok(true)
    }

    /// The first stream on which a fence is not marked yet.
    fn unmarked_stream(&mut self, on: usize, owner: Owner) -> Option<StreamId> {
        let next = self.ledgers[on].queue(owner).fence.as_ref()?.unmarked.clone().next()?;
        Some(self.ledgers[next].stream)
    }

    /// Is every stream past the moment that a fence stands for? What is passed lets its event go.
    pub(super) fn is_fence_passed(&mut self, on: usize, owner: Owner) -> Result<bool> {
        let Engine { ledgers, backend, .. } = self;
        let Some(fence) = &mut ledgers[on].queue(owner).fence else { return Ok(false) };
        while let Some(point) = fence.points.last() {
            match point.done(backend, fence_site(owner)) {
                Ok(true) => drop(fence.points.pop()),
                other => return self.seen(other),
            }
        }
        Ok(true)
    }

    /// Orders the later work of `stream` behind all that `others` were asked to do until now.
    pub(super) fn order_behind(
        &mut self,
        stream: StreamId,
        others: StreamSet,
        site: Site,
    ) -> Result<()> {
        others.iter().try_for_each(|other| self.order_behind_one(stream, other, site))
    }

    /// The same, of one stream.
    pub(super) fn order_behind_one(
        &mut self,
        stream: StreamId,
        other: usize,
        site: Site,
    ) -> Result<()> {
        let used = self.orders.mark(&mut self.backend, self.ledgers[other].stream);
        let used = self.seen(used)?;
        let waited = used.wait(&mut self.backend, stream, site);
        self.seen(waited)
    }
}

/// The question that a fence of such bytes asks.
fn fence_site(owner: Owner) -> Site {
    if owner == Owner::Fixed { Site::UnmapFence } else { Site::ReleaseFence }
}
