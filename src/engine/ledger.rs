//! What was evicted on one stream and is not given back yet: a queue for each kind of owner.
//!
//! What it is not: it decides nothing about when bytes may go.
//!
//! Invariant: a place in a queue is a storage's only while it carries the storage's ticket; a place
//! from before a storage was taken back is nobody's. A fence covers the oldest places.
//!
//! ```text
//!   Ledger { stream, queues: [owned, adopted, fixed], latest, passed_out }
//!   Queue  [ (storage, ticket) .. ]  Fence { a point on every stream, covers: 3 of them }
//! ```
//!
//! Part of the engine.

use crate::storage::{Owner, Slot};
use crate::stream::Point;
use crate::unit::{Bytes, StorageId, StreamId, Table};
use std::collections::VecDeque;
use std::ops::Range;

/// What was evicted on one stream and is not given back yet.
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) stream: StreamId,
    pub(super) raw: usize,
    /// Of storages whose bytes the engine frees, of those of frameworks, and of those whose address
    /// stays.
    queues: [Queue; 3],
    next_ticket: u64,
    pub(super) latest: Option<StorageId>,
    /// Of frameworks' storages that ended, and were not evicted then.
    buried_bytes: Bytes,
    /// The stream has passed this copy of the out lane, and so all before it.
    pub(super) passed_out: u64,
    /// The points of the last fence, gone; kept for its room.
    pub(super) points: Vec<Point>,
}

/// Storages of one owner, oldest first, each with its ticket. Some may have been taken back; then
/// their ticket is another one.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) places: VecDeque<(StorageId, u64)>,
    pub(super) fence: Option<Fence>,
    unreleased_bytes: Bytes,
}

/// Places a queue may have beyond twice the storages alive before it is looked through.
const PLACES_SPARE: usize = 64;

/// One moment on every stream seen, and how many of the oldest storages wait for it.
#[derive(Debug)]
pub(super) struct Fence {
    /// Of the streams that were not seen past it.
    pub(super) points: Vec<Point>,
    /// The streams, by number, on which it is still to be marked: when there are events.
    pub(super) unmarked: Range<usize>,
    pub(super) covers: usize,
}

impl Ledger {
    pub(super) fn new(stream: StreamId, raw: usize) -> Ledger {
        Ledger {
            stream,
            raw,
            queues: Default::default(),
            next_ticket: 1,
            latest: None,
            buried_bytes: Bytes::ZERO,
            passed_out: 0,
            points: Vec::new(),
        }
    }

    /// Lists a storage evicted just now; returns its ticket.
    pub(super) fn enter(&mut self, id: StorageId, owner: Owner, len: Bytes) -> u64 {
        let queue = self.queue(owner);
        queue.unreleased_bytes += len;
        let last = queue.places.len();
        self.latest = Some(id);
        self.insert(last, id, owner)
    }

    /// An eviction ended: the bytes went, or it was taken back.
    pub(super) fn leave(&mut self, owner: Owner, len: Bytes) {
        self.queue(owner).unreleased_bytes -= len;
    }

    /// A framework's storage ended that is not evicted; its bytes are to go.
    pub(super) fn buried(&mut self, len: Bytes) {
        self.buried_bytes += len;
    }

    /// They went.
    pub(super) fn unburied(&mut self, len: Bytes) {
        self.buried_bytes -= len;
    }

    /// Bytes that are to go and did not, for whose copies the stream can be made to wait.
    pub(super) fn waitable_bytes(&self) -> Bytes {
        let [owned, adopted, _] = &self.queues;
        owned.unreleased_bytes + adopted.unreleased_bytes + self.buried_bytes
    }

    /// All bytes evicted and not given back.
    pub(super) fn unreleased_bytes(&self) -> Bytes {
        Bytes(self.queues.iter().map(|queue| queue.unreleased_bytes.0).sum())
    }

    /// Places in its queues, nobody's among them.
    pub(super) fn places(&self) -> usize {
        self.queues.iter().map(|queue| queue.places.len()).sum()
    }

    /// Does it list bytes of this owner?
    pub(super) fn has_any(&self, owner: Owner) -> bool {
        !self.queues[owner as usize].places.is_empty()
    }

    /// Gives a storage that ended a place: the first one that no fence covers; or else the last
    /// one, but ahead of the storage evicted last, which stays until another one follows it.
    pub(super) fn list(&mut self, id: StorageId, owner: Owner, is_ahead: bool) -> u64 {
        // Nobody waits for an operator on bytes that ended.
        self.latest.take_if(|latest| *latest == id);
        let latest = self.latest;
        let queue = self.queue(owner);
        let covered = queue.fence.as_ref().map_or(0, |fence| fence.covers);
        let stays = queue.places.back().is_some_and(|(last, _)| Some(*last) == latest);
        // No fence covers the storage evicted last, but a place that was its own it may.
        let last = (queue.places.len() - usize::from(stays)).max(covered);
        let place = if is_ahead { covered } else { last };
        self.insert(place, id, owner)
    }

    fn insert(&mut self, place: usize, id: StorageId, owner: Owner) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.queue(owner).places.insert(place, (id, ticket));
        ticket
    }

    /// Forgets places that are nobody's any more, where they are more than those of somebody: a
    /// framework may evict and acquire for ever without asking what it may drop.
    pub(super) fn compact(&mut self, owner: Owner, slots: &Table<Slot>, home: usize) {
        let queue = self.queue(owner);
        if queue.places.len() <= 2 * slots.len() + PLACES_SPARE {
            return;
        }
        let covered = queue.fence.as_ref().map_or(0, |fence| fence.covers);
        let (mut place, mut covers) = (0, 0);
        queue.places.retain(|(id, ticket)| {
            let slot = slots.find(id.0);
            let is_held = slot.is_some_and(|slot| slot.ticket == *ticket && slot.home == home);
            covers += usize::from(is_held && place < covered);
            place += 1;
            is_held
        });
        if let Some(fence) = &mut queue.fence {
            fence.covers = covers;
        }
        self.end_fence(owner);
    }

    /// A fence that nobody waits for goes, and its events are free for others.
    fn end_fence(&mut self, owner: Owner) {
        if let Some(mut fence) = self.queue(owner).fence.take_if(|fence| fence.covers == 0) {
            fence.points.clear();
            self.points = fence.points;
        }
    }

    /// Room is short: the storage evicted last may be given back like the others.
    pub(super) fn latest_may_go(&mut self) {
        self.latest = None;
    }

    /// The oldest storage leaves its queue.
    pub(super) fn pop(&mut self, owner: Owner) {
        let queue = self.queue(owner);
        queue.places.pop_front();
        if let Some(fence) = &mut queue.fence {
            fence.covers -= 1;
        }
        self.end_fence(owner);
    }

    pub(super) fn queue(&mut self, owner: Owner) -> &mut Queue {
        &mut self.queues[owner as usize]
    }
}
