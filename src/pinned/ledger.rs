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
use super::class::{SHELVES, shelf};
use super::space::{List, NONE, Space, Thread, Use};
use super::stats::{Counts, LentRow};
use crate::backend::Fence;
use crate::unit::{Bytes, EventId, Name, next_owner};
use slab::Slab;
use std::sync::Arc;

/// Whose a block is that nobody can settle any more.
const NOBODY: u32 = u32::MAX;

/// What the ledger knows of a block beside its place.
#[derive(Clone, Debug)]
pub(super) struct Tag {
    /// Length asked for.
    pub(super) requested: u64,
    pub(super) name: Name,
    /// Slot of the account that has it, or had it last.
    pub(super) owner: u32,
    event: Option<EventId>,
    /// Tells this giving-back from every other one; 0 while somebody settles it.
    ticket: u64,
}

/// One client's share of the books.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) fence: Arc<dyn Fence>,
    pub(super) quota: u64,
    /// Bytes nobody else can have because of it: lent, busy, quarantined.
    pub(super) held: u64,
    pub(super) busy_blocks: usize,
    busy: Box<[List; SHELVES]>,
    busy_by_age: List,
    /// Events that are done and wait for their owner to ask.
    pub(super) returned: Vec<EventId>,
}

/// An arena with its extent's first chunk.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) arena: Arc<Arena>,
    pub(super) first: u32,
}

/// What `lend` found.
#[derive(Debug)]
pub(super) struct Loan {
    pub(super) id: u32,
    pub(super) room: u64,
    pub(super) after: Option<EventId>,
    pub(super) returned: usize,
}

/// A busy block whose event somebody is about to ask for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    pub(super) id: u32,
    pub(super) ticket: u64,
    pub(super) event: EventId,
}

/// Everything behind the pool's lock.
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) space: Space,
    pub(super) tags: Vec<Tag>,
    idle: Box<[List; SHELVES]>,
    pub(super) seats: Slab<Seat>,
    pub(super) accounts: Slab<Account>,
    /// Bytes asked for, of the lent blocks.
    pub(super) requested: u64,
    /// Blocks that are lent, busy or quarantined.
    pub(super) blocks: usize,
    pub(super) block_max: usize,
    pub(super) step: u64,
    pub(super) closed: bool,
    pub(super) counts: Counts,
    ticket: u64,
    /// Whose busy blocks are asked about first.
    turn: usize,
}

impl Ledger {
    pub(super) fn new(block_max: usize, step: u64, closed: bool) -> Ledger {
        Ledger {
            space: Space::new(),
            tags: Vec::new(),
            idle: Box::new([List::EMPTY; SHELVES]),
            seats: Slab::new(),
            accounts: Slab::new(),
            requested: 0,
            blocks: 0,
            block_max,
            step,
            closed,
            counts: Counts::default(),
            ticket: 0,
            turn: 0,
        }
    }

    /// Opens an account and says its slot, and a tag that no other account ever had.
    pub(super) fn open(&mut self, fence: Arc<dyn Fence>, quota: u64) -> (u32, u32) {
        let slot = self.accounts.insert(Account {
            fence,
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

    /// Adds an arena's bytes.
    pub(super) fn seat(&mut self, arena: Arena) {
        let size = arena.len();
        let entry = self.seats.vacant_entry();
        let first = self.space.add(entry.key() as u32, size);
        entry.insert(Seat { arena: Arc::new(arena), first });
    }

    /// Takes out the arenas of which no byte is in use.
    pub(super) fn unseat(&mut self) -> Vec<Arc<Arena>> {
        self.flush();
        let space = &self.space;
        let whole = |(key, seat): (usize, &Seat)| space.is_whole(seat.first).then_some(key);
        let keys: Vec<usize> = self.seats.iter().filter_map(whole).collect();
        let seats = keys.into_iter().map(|key| self.seats.remove(key));
        let seats: Vec<Seat> = seats.collect();
        for seat in &seats {
            self.space.remove(seat.first);
        }
        self.counts.trims += seats.len() as u64;
        seats.into_iter().map(|seat| seat.arena).collect()
    }

    /// Bytes of the arenas of which no byte is in use; true right after [`Ledger::flush`].
    pub(super) fn unused(&self) -> u64 {
        let whole = self.seats.iter().filter(|(_, seat)| self.space.is_whole(seat.first));
        whole.map(|(_, seat)| seat.arena.len()).sum()
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
        let id = if allowed { self.space.take(room)? } else { return None };
        self.counts.lends_split += 1;
        Some(self.enter(id, slot, len, name))
    }

    /// A lent block comes back: idle, or busy until `event` is done.
    pub(super) fn give_back(&mut self, id: u32, event: Option<EventId>) {
        let requested = self.tags[id as usize].requested;
        self.requested -= requested;
        match event {
            None => {
                self.release(id);
                self.put_idle(id);
            }
            Some(event) => self.put_busy(id, event),
        }
    }

    /// A lent block was dropped: nobody knows what still uses it.
    pub(super) fn quarantine(&mut self, id: u32) {
        self.requested -= self.tags[id as usize].requested;
        self.space.reuse(id, Use::Quarantined);
    }

    /// The owner says that nothing uses this quarantined block any more: it is idle.
    pub(super) fn reclaim(&mut self, id: u32) -> u64 {
        self.shelve(id);
        self.space.size(id)
    }

    /// Somebody learned that the event of that giving-back is done: the event leaves the books,
    /// the block is the caller's until [`Ledger::shelve`]. `None` where the block went meanwhile.
    pub(super) fn claim(&mut self, id: u32, ticket: u64) -> Option<(u32, EventId)> {
        let tag = self.tags.get(id as usize)?;
        if ticket == 0 || tag.ticket != ticket || self.space.used(id) != Use::Busy {
            return None;
        }
        self.unlist(id);
        let tag = &mut self.tags[id as usize];
        tag.ticket = 0;
        Some((tag.owner, tag.event.take()?))
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

    /// The longest run of free and idle bytes, and every lent block.
    pub(super) fn survey(&self) -> (u64, Vec<LentRow>) {
        let (mut largest, mut rows) = (0, Vec::new());
        for (_, seat) in &self.seats {
            let (mut id, mut run) = (seat.first, 0);
            while id != NONE {
                let size = self.space.size(id);
                match self.space.used(id) {
                    Use::Free | Use::Idle => run += size,
                    Use::Lent => {
                        let Tag { name, requested, .. } = self.tags[id as usize];
                        rows.push(LentRow { name, requested: Bytes(requested), lent: Bytes(size) });
                        run = 0;
                    }
                    _ => run = 0,
                }
                largest = largest.max(run);
                id = self.space.after(id);
            }
        }
        (largest, rows)
    }

    /// Every arena, and whether a copy may still be touching some of it.
    pub(super) fn drain_seats(&mut self) -> Vec<(Arc<Arena>, bool)> {
        let mut seats = Vec::new();
        for seat in self.seats.drain() {
            let mut id = seat.first;
            let mut in_use = false;
            while id != NONE {
                in_use |= !matches!(self.space.used(id), Use::Free | Use::Idle);
                id = self.space.after(id);
            }
            seats.push((seat.arena, in_use));
        }
        seats
    }

    /// Where a block lies.
    pub(super) fn place(&self, id: u32) -> (Arc<Arena>, u64, u64) {
        let seat = &self.seats[self.space.extent(id) as usize];
        (Arc::clone(&seat.arena), self.space.offset(id), self.space.size(id))
    }

    /// Merges everything that is idle.
    pub(super) fn flush(&mut self) {
        for on in 0..SHELVES {
            let mut id = std::mem::replace(&mut self.idle[on], List::EMPTY).head;
            while id != NONE {
                let next = self.space.next(id, Thread::Size);
                self.space.free(id);
                id = next;
            }
        }
    }

    /// Busy blocks of others that are worth asking about for a request of `room` bytes, at most
    /// `max` in all: those of that size first, then the oldest. Every account gets its turn.
    pub(super) fn doubts(
        &mut self,
        room: u64,
        except: u32,
        max: usize,
    ) -> Vec<(Doubt, Arc<dyn Fence>)> {
        let others = |(key, a): &(usize, &Account)| *key as u32 != except && a.busy_blocks > 0;
        let others: Vec<&Account> = self.accounts.iter().filter(others).map(|(_, a)| a).collect();
        let mut doubts = Vec::new();
        let Some(share) = max.checked_div(others.len()) else { return doubts };
        self.turn = self.turn.wrapping_add(1);
        for nth in 0..others.len().min(max) {
            let account = others[(self.turn + nth) % others.len()];
            let full = doubts.len() + share.max(1);
            let mut ask = |id: u32| {
                let tag = &self.tags[id as usize];
                if let Some(event) = tag.event.filter(|_| doubts.len() < full) {
                    doubts.push((Doubt { id, ticket: tag.ticket, event }, account.fence.clone()));
                }
            };
            let exact = self.walk(account.busy[shelf(room)], Thread::Size);
            exact.filter(|&id| self.space.size(id) == room).take(max).for_each(&mut ask);
            let aged = self.walk(account.busy_by_age, Thread::Age);
            aged.filter(|&id| self.space.size(id) != room).take(max).for_each(&mut ask);
        }
        doubts
    }

    /// The oldest busy blocks of an account, at most `max`, into `doubts`.
    pub(super) fn oldest(&self, slot: u32, max: usize, doubts: &mut Vec<Doubt>) {
        for id in self.walk(self.accounts[slot as usize].busy_by_age, Thread::Age).take(max) {
            let tag = &self.tags[id as usize];
            doubts.extend(tag.event.map(|event| Doubt { id, ticket: tag.ticket, event }));
        }
    }

    fn walk(&self, list: List, thread: Thread) -> impl Iterator<Item = u32> {
        let some = |id: u32| (id != NONE).then_some(id);
        std::iter::successors(some(list.head), move |&id| some(self.space.next(id, thread)))
    }

    /// The block's event is not done yet: others are asked first next time.
    pub(super) fn postpone(&mut self, doubt: &Doubt) {
        let id = doubt.id;
        let tag = &self.tags[id as usize];
        if tag.ticket != doubt.ticket || self.space.used(id) != Use::Busy {
            return;
        }
        let account = &mut self.accounts[tag.owner as usize];
        self.space.unlink(&mut account.busy_by_age, Thread::Age, id);
        self.space.push_back(&mut account.busy_by_age, Thread::Age, id);
        let list = &mut account.busy[shelf(self.space.size(id))];
        self.space.unlink(list, Thread::Size, id);
        self.space.push_back(list, Thread::Size, id);
    }

    /// The first chunk of a shelf's list that has exactly that size.
    fn find(&self, list: List, room: u64) -> u32 {
        self.walk(list, Thread::Size).find(|&id| self.space.size(id) == room).unwrap_or(NONE)
    }

    /// Writes a lent block into the books.
    fn enter(&mut self, id: u32, slot: u32, len: u64, name: Name) -> Loan {
        let tag = Tag { requested: len, name, owner: slot, event: None, ticket: 0 };
        if id as usize >= self.tags.len() {
            let vacant = Tag { owner: NOBODY, ..tag.clone() };
            self.tags.resize(self.space.numbers() as usize, vacant);
        }
        self.tags[id as usize] = tag;
        let room = self.space.size(id);
        let account = &mut self.accounts[slot as usize];
        account.held += room;
        let returned = account.returned.len();
        self.blocks += 1;
        self.requested += len;
        Loan { id, room, after: None, returned }
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

    fn put_idle(&mut self, id: u32) {
        let on = shelf(self.space.size(id));
        self.space.reuse(id, Use::Idle);
        let mut list = self.idle[on];
        self.space.push_front(&mut list, Thread::Size, id);
        self.idle[on] = list;
    }

    fn put_busy(&mut self, id: u32, event: EventId) {
        self.ticket += 1;
        self.space.reuse(id, Use::Busy);
        let tag = &mut self.tags[id as usize];
        tag.event = Some(event);
        tag.ticket = self.ticket;
        let account = &mut self.accounts[tag.owner as usize];
        account.busy_blocks += 1;
        // Room for every event that may come home, so that sending one home allocates nothing.
        account.returned.reserve(account.busy_blocks);
        let list = &mut account.busy[shelf(self.space.size(id))];
        self.space.push_back(list, Thread::Size, id);
        self.space.push_back(&mut account.busy_by_age, Thread::Age, id);
    }

    /// Takes a busy block out of its owner's lists.
    fn unlist(&mut self, id: u32) {
        let account = &mut self.accounts[self.tags[id as usize].owner as usize];
        account.busy_blocks -= 1;
        let list = &mut account.busy[shelf(self.space.size(id))];
        self.space.unlink(list, Thread::Size, id);
        self.space.unlink(&mut account.busy_by_age, Thread::Age, id);
    }
}
