//! Device bytes go: edge E2, and the order in which owners are told.
//!
//! What it is not: it frees nothing a framework owns. It says when the framework may.
//!
//! Invariant: a storage is named, or its bytes freed, only when the copy-out of them (and any
//! copy-in into them) is done, or the stream in whose order they go has been told to wait for it.
//! The storage evicted last on a stream is never named before another one follows, or `flush`: the
//! operator that made the caller evict it may not be enqueued yet.
//!
//! ```text
//!   evicted, not given back:   a  b  c  d     within the bound: only those known done go
//!                              ^oldest  ^latest        above: the stream waits for a, a goes
//! ```
//!
//! Part of the engine.

use super::Engine;
use crate::backend::Backend;
use crate::error::Result;
use crate::storage::{Owner, Residency, Slot, Storage};
use crate::stream::Point;
use crate::trace::{Access, Actor, Site, Use};
use crate::unit::{Bytes, StorageId, StreamId, Table};
use std::collections::VecDeque;

/// What was evicted on one stream and is not given back yet.
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) stream: StreamId,
    pub(super) raw: usize,
    /// Storages whose bytes the engine frees, oldest first, each with its ticket. Some may have
    /// been taken back; then their ticket is another one.
    owned: VecDeque<(StorageId, u64)>,
    /// Storages whose bytes a framework frees, likewise.
    adopted: VecDeque<(StorageId, u64)>,
    next_ticket: u64,
    pub(super) unreleased_bytes: Bytes,
    latest: Option<StorageId>,
    /// The stream has passed this copy of the out lane, and so all before it.
    passed_out: u64,
    fence: Option<Fence>,
    /// The points of the last fence, gone; kept for its room.
    points: Vec<Point>,
}

/// Places a queue may have beyond twice the storages alive before it is looked through.
const PLACES_SPARE: usize = 64;

/// One moment on every stream seen, and how many of the oldest storages wait for it.
#[derive(Debug)]
struct Fence {
    points: Vec<Point>,
    covers: usize,
}

impl Ledger {
    pub(super) fn new(stream: StreamId, raw: usize) -> Ledger {
        Ledger {
            stream,
            raw,
            owned: VecDeque::new(),
            adopted: VecDeque::new(),
            next_ticket: 1,
            unreleased_bytes: Bytes::ZERO,
            latest: None,
            passed_out: 0,
            fence: None,
            points: Vec::new(),
        }
    }

    /// Lists a storage evicted just now; returns its ticket.
    pub(super) fn enter(&mut self, id: StorageId, owner: Owner, len: Bytes) -> u64 {
        self.unreleased_bytes += len;
        self.latest = Some(id);
        self.list(id, owner)
    }

    /// Does it list bytes that the engine frees?
    pub(super) fn owns_any(&self) -> bool {
        !self.owned.is_empty()
    }

    fn list(&mut self, id: StorageId, owner: Owner) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.queue(owner).push_back((id, ticket));
        ticket
    }

    /// Forgets places that are nobody's any more, where they are more than those of somebody: a
    /// framework may evict and acquire for ever without asking what it may drop.
    pub(super) fn compact(&mut self, owner: Owner, slots: &Table<Slot>, home: usize) {
        if self.queue(owner).len() <= 2 * slots.len() + PLACES_SPARE {
            return;
        }
        let covered = self.fence.as_ref().map_or(0, |fence| fence.covers);
        let (mut place, mut covers) = (0, 0);
        self.queue(owner).retain(|(id, ticket)| {
            let slot = slots.find(id.0);
            let is_held = slot.is_some_and(|slot| slot.ticket == *ticket && slot.home == home);
            covers += usize::from(is_held && place < covered);
            place += 1;
            is_held
        });
        if let (Owner::Framework, Some(fence)) = (owner, &mut self.fence) {
            fence.covers = covers;
            self.end_fence();
        }
    }

    /// A fence that nobody waits for goes, and its events are free for others.
    fn end_fence(&mut self) {
        if let Some(mut fence) = self.fence.take_if(|fence| fence.covers == 0) {
            fence.points.clear();
            self.points = fence.points;
        }
    }

    /// Room is short: the storage evicted last may be given back like the others.
    pub(super) fn latest_may_go(&mut self) {
        self.latest = None;
    }

    /// The oldest storage left its queue.
    fn uncover(&mut self, owner: Owner) {
        if let (Owner::Framework, Some(fence)) = (owner, &mut self.fence) {
            fence.covers -= 1;
            self.end_fence();
        }
    }

    fn queue(&mut self, owner: Owner) -> &mut VecDeque<(StorageId, u64)> {
        match owner {
            Owner::Engine => &mut self.owned,
            Owner::Framework => &mut self.adopted,
        }
    }
}

impl Engine {
    /// Places in the queues of those whose device bytes are to go, nobody's among them.
    #[doc(hidden)]
    pub fn places(&self) -> usize {
        self.ledgers.iter().map(|ledger| ledger.owned.len() + ledger.adopted.len()).sum()
    }

    /// The next storage evicted on `compute` whose device bytes its framework may drop now, in
    /// the order of `compute`; or of any other stream, where several are in use. Call it until it
    /// says `None`. A storage that was dropped by its handle is named here too, once nothing
    /// touches its bytes.
    ///
    /// # Errors
    /// `Usage` for streams; driver errors, after which nothing has changed.
    pub fn releasable(&mut self, compute: StreamId) -> Result<Option<StorageId>> {
        self.begin("releasable")?;
        let on = self.open_stream(compute, "releasable")?;
        while let Some(id) = self.homeless.pop() {
            self.bury(id, on)?;
        }
        self.next_release(on, Owner::Framework)
    }

    /// Makes everything evicted on `compute` releasable: `compute` waits, on the device, for the
    /// copies. With several streams in use a framework's bytes go only when all of them are known
    /// past the copy; then those are named by later calls of [`Engine::releasable`].
    ///
    /// # Errors
    /// `Usage` for streams; driver errors.
    pub fn flush(&mut self, compute: StreamId) -> Result<()> {
        self.begin("flush")?;
        let on = self.open_stream(compute, "flush")?;
        self.ledgers[on].latest_may_go();
        self.pass_all(on)?;
        self.release_owned(on)
    }

    /// The stream passes every copy-out enqueued so far.
    pub(super) fn pass_all(&mut self, on: usize) -> Result<()> {
        let Some(end) = self.out.last().cloned() else { return Ok(()) };
        let ledger = &mut self.ledgers[on];
        if ledger.passed_out < end.seq {
            let waited = end.point.wait(&mut self.backend, ledger.stream, Site::ReleaseWait);
            self.seen(waited)?;
            self.ledgers[on].passed_out = end.seq;
        }
        Ok(())
    }

    /// Frees the engine's own bytes that may go.
    pub(super) fn release_owned(&mut self, on: usize) -> Result<()> {
        while self.next_release(on, Owner::Engine)?.is_some() {}
        Ok(())
    }

    fn next_release(&mut self, on: usize, owner: Owner) -> Result<Option<StorageId>> {
        let Some(id) = self.head(on, owner)? else { return Ok(None) };
        let is_fenced = self.is_fenced(owner);
        // Behind a fence the bytes go now, for every stream alike.
        let by = if is_fenced { Actor::Host } else { Actor::Stream(self.ledgers[on].stream) };
        // First, as it may be refused: then the storage is still the oldest.
        self.let_go(id, on, by)?;
        let ledger = &mut self.ledgers[on];
        ledger.queue(owner).pop_front();
        ledger.uncover(owner);
        Ok(Some(id))
    }

    /// The oldest storage, if its bytes may go.
    fn head(&mut self, on: usize, owner: Owner) -> Result<Option<StorageId>> {
        while let Some(&(id, ticket)) = self.ledgers[on].queue(owner).front() {
            let slot = self.slots.get(id.0, "releasable");
            if slot.is_ok_and(|slot| slot.ticket == ticket && slot.home == on) {
                return Ok(self.may_go(id, on, owner)?.then_some(id));
            }
            // Taken back by a reader, perhaps evicted on another stream since, or gone.
            let ledger = &mut self.ledgers[on];
            ledger.queue(owner).pop_front();
            ledger.uncover(owner);
        }
        Ok(None)
    }

    fn may_go(&mut self, id: StorageId, on: usize, owner: Owner) -> Result<bool> {
        let is_dropped = self.slots.get(id.0, "releasable")?.is_dropped;
        if is_dropped && owner == Owner::Engine {
            return self.users_passed(id, on).map(|()| true);
        }
        if self.ledgers[on].latest == Some(id) && !is_dropped {
            return Ok(false);
        }
        if self.is_fenced(owner) {
            return self.fence_passed(on);
        }
        let over = self.ledgers[on].unreleased_bytes > self.options.unreleased_bytes_max;
        self.copies_passed(id, on, over)
    }

    /// Several streams are in use, and a framework's allocator may hand bytes to any of them.
    fn is_fenced(&self, owner: Owner) -> bool {
        owner == Owner::Framework && self.ledgers.len() > 1
    }

    /// Are the copies that touch the device bytes done, or behind a wait of the stream? With
    /// `insist` the stream is told to wait for them.
    fn copies_passed(&mut self, id: StorageId, on: usize, insist: bool) -> Result<bool> {
        let slot = self.slots.get(id.0, "releasable")?;
        let out = slot.out_of_these().cloned();
        // A stream that acquired the storage is behind the copy-in already, and so is a later
        // copy-out.
        let is_reader = slot.readers.has(on) || out.is_some();
        let ready = slot.ready.as_ref().filter(|_| !is_reader).map(|(_, end)| end.point.clone());
        let stream = self.ledgers[on].stream;
        if let Some(end) = out {
            let passed = self.ledgers[on].passed_out >= end.seq || self.out.is_known_done(end.seq);
            if !passed && insist {
                let waited = end.point.wait(&mut self.backend, stream, Site::ReleaseWait);
                self.seen(waited)?;
                self.ledgers[on].passed_out = end.seq;
            } else if !passed {
                let done = end.point.done(&mut self.backend, Site::ReleaseQuery);
                if !self.seen(done)? {
                    return Ok(false);
                }
            }
        }
        if let Some(point) = ready {
            if insist {
                let waited = point.wait(&mut self.backend, stream, Site::FreeAfterCopyIn);
                self.seen(waited)?;
            } else {
                let done = point.done(&mut self.backend, Site::ReleaseQuery);
                return self.seen(done);
            }
        }
        Ok(true)
    }

    /// First the copies must be known done, then a moment on every stream.
    fn fence_passed(&mut self, on: usize) -> Result<bool> {
        if self.ledgers[on].fence.is_none() {
            let covers = self.count_copied(on)?;
            if covers == 0 {
                return Ok(false);
            }
            self.free_events()?;
            let mut points = std::mem::take(&mut self.ledgers[on].points);
            for index in 0..self.ledgers.len() {
                let point = self.events.mark(&mut self.backend, self.ledgers[index].stream);
                points.push(self.seen(point)?);
            }
            self.ledgers[on].fence = Some(Fence { points, covers });
        }
        let Some(fence) = &self.ledgers[on].fence else { return Ok(false) };
        for point in &fence.points {
            match point.done(&mut self.backend, Site::ReleaseFence) {
                Ok(true) => {}
                other => return self.seen(other),
            }
        }
        Ok(true)
    }

    /// How many of the oldest storages have their copies known done.
    fn count_copied(&mut self, on: usize) -> Result<usize> {
        for count in 0..self.ledgers[on].adopted.len() {
            let (id, ticket) = self.ledgers[on].adopted[count];
            let Ok(slot) = self.slots.get(id.0, "releasable") else { continue };
            if slot.ticket != ticket || slot.home != on {
                continue;
            }
            if self.ledgers[on].latest == Some(id) && !slot.is_dropped {
                return Ok(count);
            }
            let points = [
                slot.out_of_these().map(|end| end.point.clone()),
                slot.ready.as_ref().map(|(_, end)| end.point.clone()),
            ];
            for point in points.into_iter().flatten() {
                let done = point.done(&mut self.backend, Site::ReleaseQuery);
                if !self.seen(done)? {
                    return Ok(count);
                }
            }
        }
        Ok(self.ledgers[on].adopted.len())
    }

    /// The device bytes go: freed by the engine in the order of `on`, or named to their owner, who
    /// may drop them in the order of `by`.
    fn let_go(&mut self, id: StorageId, on: usize, by: Actor) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "release")?;
        let Some(range) = slot.range else { return Ok(()) };
        let (owner, len, home, is_dropped) = (slot.owner, slot.len, slot.home, slot.is_dropped);
        let was_evicting = slot.residency() == Residency::Evicting;
        let stream = self.ledgers[on].stream;
        if owner == Owner::Engine {
            self.free(range, stream)?;
        } else {
            let free = Use { access: Access::Free, span: range.into() };
            let noted = self.backend.note(by, &[free]);
            self.seen(noted)?;
        }
        self.ranges.remove(&range.at().0);
        if was_evicting {
            self.ledgers[home].unreleased_bytes -= len;
            self.stats.released_bytes += len.0;
        }
        if is_dropped {
            return self.forget(id);
        }
        let slot = self.slots.get_mut(id.0, "release")?;
        slot.range = None;
        slot.ticket = 0;
        slot.readers = Default::default();
        slot.become_(Residency::Evicted(crate::storage::Tier::Host));
        Ok(())
    }

    /// Ends a storage. A framework may drop its bytes in the order of `compute` when this returns;
    /// the engine frees its own. Nothing waits on the host.
    ///
    /// # Errors
    /// `Usage` for handles and streams; driver errors, after which the storage goes on as if its
    /// handle had been dropped: the engine frees its own bytes later, and names a framework's by
    /// [`Engine::releasable`].
    pub fn release(&mut self, storage: Storage, compute: StreamId) -> Result<()> {
        const OP: &str = "release";
        self.begin(OP)?;
        let on = self.open_stream(compute, OP)?;
        self.slot(storage.id(), OP)?;
        let id = storage.disarm();
        self.end(id, on)
    }

    /// A handle was dropped, on whatever thread. Its stream is the one it was last seen on.
    pub(super) fn handle_dropped(&mut self, id: StorageId) -> Result<()> {
        let Ok(slot) = self.slots.get_mut(id.0, "drop") else { return Ok(()) };
        let (owner, home, on_device) = (slot.owner, slot.home, slot.range.is_some());
        if owner == Owner::Framework && on_device {
            // Its bytes are somebody else's: they are named by `releasable` when nothing uses them.
            self.unlist(id)?;
            if home != Slot::NO_HOME {
                return self.bury(id, home);
            }
            self.homeless.push(id);
            return Ok(());
        }
        // What could not be ended is buried; this verb was about something else.
        let ended = self.end(id, home);
        self.refusal(ended).map(|_| ())
    }

    /// Lists a storage that ended, whose device bytes are still to go.
    fn bury(&mut self, id: StorageId, on: usize) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "drop")?;
        if slot.residency() != Residency::Evicting {
            slot.home = on;
        }
        slot.ticket = self.ledgers[slot.home].list(id, slot.owner);
        Ok(())
    }

    /// Ends a storage in the order of stream `on`.
    fn end(&mut self, id: StorageId, on: usize) -> Result<()> {
        self.unlist(id)?;
        if self.slots.get(id.0, "release")?.range.is_none() {
            return self.forget(id);
        }
        let passed = self.users_passed(id, on);
        if let Some(error) = self.refusal(passed)? {
            self.bury(id, on)?;
            return Err(error);
        }
        let by = Actor::Stream(self.ledgers[on].stream);
        self.let_go(id, on, by)
    }

    /// Orders stream `on` behind all that uses the device bytes of a storage that ends.
    fn users_passed(&mut self, id: StorageId, on: usize) -> Result<()> {
        self.copies_passed(id, on, true)?;
        let slot = self.slots.get(id.0, "release")?;
        // An eviction is ordered behind them already: its copy-out is, or the stream it is of.
        let is_behind = slot.residency() == Residency::Evicting && slot.home == on;
        if slot.owner == Owner::Engine && !is_behind {
            let others = Engine::others(slot.readers, on);
            self.order_behind(on, others, Site::FreeAfterUsers)?;
        }
        Ok(())
    }

    /// The storage is no candidate of policy and prefetch any more.
    fn unlist(&mut self, id: StorageId) -> Result<()> {
        self.policy.forget(id);
        let slot = self.slots.get_mut(id.0, "release")?;
        // Once, though the end may be tried more than once.
        let is_first = !std::mem::replace(&mut slot.is_dropped, true);
        if is_first && slot.residency() == Residency::Refilling {
            self.prefetcher.wasted(slot.len);
        }
        if let Some(ordinal) = slot.ordinal.take() {
            self.prefetcher.gone(ordinal);
        }
        Ok(())
    }

    /// The storage is no more; its block goes back, busy while a copy uses it.
    fn forget(&mut self, id: StorageId) -> Result<()> {
        let slot = self.slots.remove(id.0, "release")?;
        let last_use = slot.last_use();
        match slot.block {
            Some(block) => self.give_back(block, last_use),
            None => Ok(()),
        }
    }
}
