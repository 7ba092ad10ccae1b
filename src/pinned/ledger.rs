//! The pool's books: who has which block, which event guards it, and every move between uses.
//!
//! What it is not: it waits for nothing, asks no device and pins nothing. It is plain data behind
//! the pool's one lock, which is never held while a fence, a pinner or a caller's code runs.
//!
//! Invariant: an event is in exactly one place: with its owner, on one busy block, or among the
//! owner's returned ones. A block is busy exactly as long as the ledger has an event for it or
//! somebody who learned that the event is done is scrubbing it.
//!
//! ```text
//!                 give_back(None)                     flush
//!        +----------------------------> Idle ---------------------> Free
//!        |                               | ^  \                      |
//!       Lent <--- lend (same size) ------+ |   `-- claim, shelve     |
//!       | ^ ^                              |       (event is done)   |
//!       | | +---- lend (split) ------------|-------------------------+
//!       | |                                |
//!       | +------ lend (own, `after`) --- Busy <--- give_back(Some(event)) --- Lent
//!       +--drop-> Quarantined --- reclaim (owner synced) ---> Idle
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use super::arena::Arena;
use super::busy::Doubt;
use super::class::{SHELVES, shelf};
use super::front::Front;
use super::reservation::Job;
use super::space::{List, NONE, Space, Thread, Use};
use super::stats::Counts;
use crate::backend::Fence;
use crate::unit::{EventId, Name, next_owner};
use slab::Slab;
use std::sync::Arc;

/// Whose a block is that nobody can settle any more.
const NOBODY: u32 = u32::MAX;
/// The most returns that are merged at once after sizes have changed.
const MERGES_MAX: u64 = 1 << 20;

/// What the ledger knows of a block beside its place.
#[derive(Debug)]
pub(super) struct Tag {
    /// Length asked for.
    pub(super) requested: u64,
    pub(super) name: Name,
    /// Slot of the account that has it, or had it last.
    pub(super) owner: u32,
    /// What a busy block waits for.
    pub(super) event: Option<EventId>,
    /// Tells this giving-back from every other one; 0 while somebody settles it.
    pub(super) ticket: u64,
    /// Of an idle or busy block: handed on with it, so that nobody counts up and down.
    arena: Option<Arc<Arena>>,
}

impl Tag {
    /// Of a number that no block has yet.
    fn vacant(name: Name) -> Tag {
        Tag { requested: 0, name, owner: NOBODY, event: None, ticket: 0, arena: None }
    }

    /// What an idle or busy block hands on.
    pub(super) fn arena(&self) -> Option<&Arc<Arena>> {
        self.arena.as_ref()
    }
}

/// One client's share of the books.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) fence: Arc<dyn Fence>,
    /// What it has at hand, which is lent as far as the books know.
    pub(super) front: Arc<Front>,
    pub(super) quota: u64,
    /// Bytes nobody else can have because of it: lent, busy, quarantined.
    pub(super) held: u64,
    pub(super) busy_blocks: usize,
    pub(super) busy: Box<[List; SHELVES]>,
    pub(super) busy_by_age: List,
    /// Events that are done and wait for their owner to ask.
    pub(super) returned: Vec<EventId>,
}

/// An arena with its extent's first chunk.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) arena: Arc<Arena>,
    pub(super) first: u32,
    /// What of the arena is in the books.
    pub(super) size: u64,
    /// More of it is on the way.
    pub(super) filling: bool,
    /// Not page-locked: it has one block, and goes with it.
    pub(super) pageable: bool,
}

impl Seat {
    /// May it go? No byte of it is in use, and nobody is at work on it.
    fn is_unused(&self, space: &Space) -> bool {
        !self.filling && space.is_whole(self.first)
    }
}

/// What `lend` found.
#[derive(Debug)]
pub(super) struct Loan {
    pub(super) id: u32,
    pub(super) arena: Arc<Arena>,
    pub(super) offset: u64,
    pub(super) room: u64,
    pub(super) after: Option<EventId>,
    pub(super) returned: usize,
}

/// Everything behind the pool's lock.
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) space: Space,
    pub(super) tags: Vec<Tag>,
    pub(super) idle: Box<[List; SHELVES]>,
    /// One bit for every shelf that may have idle blocks.
    stocked: [u64; SHELVES.div_ceil(64)],
    pub(super) seats: Slab<Seat>,
    pub(super) accounts: Slab<Account>,
    /// Bytes asked for, of the lent blocks.
    pub(super) requested: u64,
    /// Blocks that are lent, busy or quarantined.
    pub(super) blocks: usize,
    pub(super) block_max: usize,
    pub(super) step: u64,
    pub(super) closed: bool,
    /// Somebody pins; nobody else does meanwhile.
    pub(super) pinning: bool,
    /// Bytes that somebody pins, or is going to, and that are not in the books yet.
    pub(super) promised: u64,
    /// Bytes that have left the books and may still be page-locked.
    pub(super) leaving: u64,
    /// Bytes of blocks that are not page-locked, and of those being made.
    pub(super) pageable: u64,
    pub(super) pageable_coming: u64,
    /// Memory of such blocks, for the next ones of their size.
    pub(super) spare: Vec<Arc<Arena>>,
    /// The background reservation, as long as it runs.
    pub(super) job: Option<Arc<Job>>,
    pub(super) counts: Counts,
    /// How many blocks that come back are merged at once, from now on and at the next drift.
    merges: u64,
    patience: u64,
    /// The last ticket given out.
    pub(super) ticket: u64,
    /// Whose busy blocks are asked about first.
    pub(super) turn: usize,
}

impl Ledger {
    pub(super) fn new(block_max: usize, step: u64, closed: bool) -> Ledger {
        Ledger {
            space: Space::new(),
            tags: Vec::new(),
            idle: Box::new([List::EMPTY; SHELVES]),
            stocked: [0; SHELVES.div_ceil(64)],
            seats: Slab::new(),
            accounts: Slab::new(),
            requested: 0,
            blocks: 0,
            block_max,
            step,
            closed,
            pinning: false,
            promised: 0,
            leaving: 0,
            pageable: 0,
            pageable_coming: 0,
            spare: Vec::new(),
            job: None,
            counts: Counts::default(),
            merges: 0,
            patience: 0,
            ticket: 0,
            turn: 0,
        }
    }

    /// Opens an account and says its slot, and a tag that no other account ever had.
    pub(super) fn open(
        &mut self,
        fence: Arc<dyn Fence>,
        front: Arc<Front>,
        quota: u64,
    ) -> (u32, u32) {
        let slot = self.accounts.insert(Account {
            fence,
            front,
            quota,
            held: 0,
            busy_blocks: 0,
            busy: Box::new([List::EMPTY; SHELVES]),
            busy_by_age: List::EMPTY,
            returned: Vec::new(),
        });
        (slot as u32, next_owner())
    }

    /// Closes an account: its blocks that are not back by now are nobody's, and never lent again.
    pub(super) fn close(&mut self, slot: u32) {
        self.spill(slot, &mut |_| None, &mut |_| {});
        self.catch_up(slot);
        self.counts.lends_repeated += self.accounts[slot as usize].front.lends();
        for id in 0..self.space.numbers() {
            if self.tags.get(id as usize).is_none_or(|tag| tag.owner != slot) {
                continue;
            }
            if self.space.used(id) == Use::Busy && self.tags[id as usize].ticket != 0 {
                self.unlist(id);
                self.tags[id as usize].event = None;
                self.space.reuse(id, Use::Quarantined);
            }
            self.tags[id as usize].owner = NOBODY;
        }
        self.accounts.remove(slot as usize);
    }

    /// Adds the first `size` bytes of an arena, and says its seat.
    pub(super) fn seat(&mut self, arena: &Arc<Arena>, size: u64, filling: bool) -> usize {
        let entry = self.seats.vacant_entry();
        let key = entry.key();
        let first = self.space.add(key as u32, size);
        let pageable = arena.is_pageable();
        self.pageable += if pageable { size } else { 0 };
        entry.insert(Seat { arena: Arc::clone(arena), first, size, filling, pageable });
        key
    }

    /// Adds what of an arena is page-locked by now.
    pub(super) fn extend(&mut self, key: usize, size: u64) {
        let seat = &mut self.seats[key];
        self.space.extend(key as u32, size - seat.size);
        seat.size = size;
    }

    /// Takes out the arenas of which no byte is in use. They are `leaving` until they are gone.
    pub(super) fn unseat(&mut self) -> Vec<Arc<Arena>> {
        self.flush();
        let space = &self.space;
        let whole = |(key, seat): (usize, &Seat)| seat.is_unused(space).then_some(key);
        let keys: Vec<usize> = self.seats.iter().filter_map(whole).collect();
        let seats = keys.into_iter().map(|key| self.seats.remove(key));
        let seats: Vec<Seat> = seats.collect();
        for seat in &seats {
            self.space.remove(seat.first);
            self.leaving += seat.size;
        }
        self.counts.trims += seats.len() as u64;
        seats.into_iter().map(|seat| seat.arena).collect()
    }

    /// Bytes of the arenas of which no byte is in use; true right after [`Ledger::flush`].
    pub(super) fn unused(&self) -> u64 {
        let whole = self.seats.iter().filter(|(_, seat)| seat.is_unused(&self.space));
        whole.map(|(_, seat)| seat.size).sum()
    }

    /// Is somebody pinning, or about to, or giving memory back? What comes of that may be all that
    /// is missing.
    pub(super) fn is_changing(&self) -> bool {
        self.pinning || self.job.is_some() || self.leaving > 0
    }

    /// How many blocks that come back are still to be merged at once.
    pub(super) fn merges_left(&self) -> u64 {
        self.merges
    }

    /// Bytes in the books that are page-locked.
    pub(super) fn pinned(&self) -> u64 {
        self.space.total() - self.pageable
    }

    /// Lends a block without asking anybody: idle of that size, own busy of that size, or split.
    pub(super) fn lend(&mut self, slot: u32, room: u64, len: u64, name: Name) -> Option<Loan> {
        let account = &self.accounts[slot as usize];
        let allowed = room <= account.quota.saturating_sub(account.held);
        let allowed = allowed && self.blocks < self.block_max;
        let on = shelf(room);
        let idle = if allowed { self.find(self.idle[on], room) } else { NONE };
        if idle != NONE {
            let mut list = self.idle[on];
            self.space.unlink(&mut list, Thread::Size, idle);
            self.idle[on] = list;
            self.space.reuse(idle, Use::Lent);
            self.counts.lends_repeated += 1;
            return Some(self.enter(idle, slot, len, name));
        }
        let busy = self.find(self.accounts[slot as usize].busy[on], room);
        if busy != NONE {
            self.unlist(busy);
            self.space.reuse(busy, Use::Lent);
            self.blocks -= 1;
            self.accounts[slot as usize].held -= room;
            self.counts.lends_behind += 1;
            let event = self.tags[busy as usize].event.take();
            let loan = self.enter(busy, slot, len, name);
            return Some(Loan { after: event, ..loan });
        }
        if !allowed {
            return None;
        }
        if self.space.bytes(Use::Idle) > 0 {
            self.drift();
        }
        let id = self.space.take(room)?;
        self.counts.lends_split += 1;
        Some(self.enter(id, slot, len, name))
    }

    /// Sizes have changed. What is idle lies where the old sizes put it, and new ones that happen
    /// to fit there would leave holes between them: so all of it is merged, and for a while
    /// whatever comes back is. The while is longer each time, so that under sizes that never repeat
    /// it is seldom over.
    fn drift(&mut self) {
        let now = self.blocks as u64 + 1 + self.flush();
        self.counts.drifts += 1;
        self.patience = (2 * self.patience).clamp(8 * now, MERGES_MAX.max(8 * now));
        self.merges = self.patience;
    }

    /// A lent block comes back: idle, or busy until `event` is done.
    pub(super) fn give_back(
        &mut self,
        id: u32,
        event: Option<EventId>,
        arena: Option<Arc<Arena>>,
    ) -> Option<Doubt> {
        let tag = &mut self.tags[id as usize];
        tag.arena = arena;
        self.requested -= tag.requested;
        match event {
            None => {
                self.shelve(id);
                None
            }
            Some(event) => Some(self.put_busy(id, event)),
        }
    }

    /// A lent block was dropped: nobody knows what still uses it.
    pub(super) fn quarantine(&mut self, id: u32) {
        self.leave(id);
        self.requested -= self.tags[id as usize].requested;
        self.space.reuse(id, Use::Quarantined);
    }

    /// The owner says that nothing uses this quarantined block any more: it is idle.
    pub(super) fn reclaim(&mut self, id: u32) -> u64 {
        self.shelve(id);
        self.space.size(id)
    }

    /// A claimed block is idle from now on.
    pub(super) fn shelve(&mut self, id: u32) {
        self.release(id);
        self.put_idle(id);
    }

    /// A claimed block could not be made ready: it stays out of use.
    pub(super) fn quarantine_claimed(&mut self, id: u32) {
        self.space.reuse(id, Use::Quarantined);
    }

    /// The quarantined blocks of an account.
    pub(super) fn quarantined(&self, slot: u32) -> Vec<u32> {
        let ids = 0..self.space.numbers();
        let mine = |id: &u32| {
            self.space.used(*id) == Use::Quarantined && self.tags[*id as usize].owner == slot
        };
        ids.filter(mine).collect()
    }

    /// Where a block lies.
    pub(super) fn place(&self, id: u32) -> (Arc<Arena>, u64, u64) {
        let seat = &self.seats[self.space.extent(id) as usize];
        (Arc::clone(&seat.arena), self.space.offset(id), self.space.size(id))
    }

    /// Merges everything that is idle, and says how many blocks that were.
    pub(super) fn flush(&mut self) -> u64 {
        self.spill_all();
        let mut merged = 0;
        for word in 0..self.stocked.len() {
            let mut bits = std::mem::take(&mut self.stocked[word]);
            while bits != 0 {
                let on = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                merged += self.clear(on);
            }
        }
        merged
    }

    /// Merges what is idle on one shelf.
    fn clear(&mut self, on: usize) -> u64 {
        let mut merged = 0;
        let mut id = std::mem::replace(&mut self.idle[on], List::EMPTY).head;
        while id != NONE {
            let next = self.space.next(id, Thread::Size);
            self.tags[id as usize].arena = None;
            self.space.free(id);
            merged += 1;
            id = next;
        }
        merged
    }

    /// The chunks of a list.
    pub(super) fn walk(&self, list: List, thread: Thread) -> impl Iterator<Item = u32> {
        let some = |id: u32| (id != NONE).then_some(id);
        std::iter::successors(some(list.head), move |&id| some(self.space.next(id, thread)))
    }

    /// The first chunk of a shelf's list that has exactly that size.
    fn find(&self, list: List, room: u64) -> u32 {
        self.walk(list, Thread::Size).find(|&id| self.space.size(id) == room).unwrap_or(NONE)
    }

    /// Writes a lent block into the books.
    pub(super) fn enter(&mut self, id: u32, slot: u32, len: u64, name: Name) -> Loan {
        if id as usize >= self.tags.len() {
            self.tags.resize_with(self.space.numbers() as usize, || Tag::vacant(name));
        }
        let tag = &mut self.tags[id as usize];
        (tag.requested, tag.name, tag.owner, tag.event, tag.ticket) = (len, name, slot, None, 0);
        let kept = tag.arena.take();
        let seat = || Arc::clone(&self.seats[self.space.extent(id) as usize].arena);
        let arena = kept.unwrap_or_else(seat);
        let (offset, room) = (self.space.offset(id), self.space.size(id));
        let account = &mut self.accounts[slot as usize];
        account.held += room;
        let returned = account.returned.len();
        self.blocks += 1;
        self.requested += len;
        self.direct(&self.accounts[slot as usize]);
        Loan { id, arena, offset, room, after: None, returned }
    }

    /// The block's owner no longer holds its bytes.
    fn release(&mut self, id: u32) {
        let size = self.space.size(id);
        let owner = std::mem::replace(&mut self.tags[id as usize].owner, NOBODY);
        if owner != NOBODY {
            self.accounts[owner as usize].held -= size;
        }
        self.blocks -= 1;
    }

    /// Takes a pageable block out of the books, with its extent; its memory is spare.
    fn retire(&mut self, id: u32) {
        let key = self.space.extent(id) as usize;
        self.tags[id as usize].arena = None;
        self.space.free(id);
        self.space.remove(id);
        let Seat { arena, size, .. } = self.seats.remove(key);
        self.pageable -= size;
        self.spare.push(arena);
    }

    fn put_idle(&mut self, id: u32) {
        if self.seats[self.space.extent(id) as usize].pageable {
            return self.retire(id);
        }
        if self.merges > 0 {
            self.merges -= 1;
            self.tags[id as usize].arena = None;
            return self.space.free(id);
        }
        let on = shelf(self.space.size(id));
        self.space.reuse(id, Use::Idle);
        let mut list = self.idle[on];
        self.space.push_front(&mut list, Thread::Size, id);
        self.idle[on] = list;
        self.stocked[on / 64] |= 1 << (on % 64);
    }
}
