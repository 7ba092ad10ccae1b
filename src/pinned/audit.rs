//! Walks over all the books: what is lent, what is free in one piece, and whether it all adds up.
//!
//! What it is not: on nobody's fast way. Each walk holds the pool's lock for O(blocks).
//!
//! Invariant: it changes nothing.
//!
//! ```text
//!   seats -> first chunk -> after -> after ..    every byte once
//!   lists (bins, idle, busy by size and age)     every chunk in just the lists of its use
//!   counters                                     equal to what the walk counted
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use super::arena::Arena;
use super::class::shelf;
use super::ledger::{Account, Ledger, Tag};
use super::space::{NONE, Thread, Use};
use super::stats::LentRow;
use crate::unit::Bytes;
use std::sync::Arc;

impl Ledger {
    /// Stops the program where the books are wrong.
    pub(super) fn audit(&self) {
        self.space.audit();
        for (key, seat) in &self.seats {
            let mut size = 0;
            let mut id = seat.first;
            while id != NONE {
                assert_eq!(self.space.extent(id) as usize, key, "a chunk lies in its own extent");
                assert_eq!(self.space.offset(id), size, "chunks lie side by side");
                size += self.space.size(id);
                id = self.space.after(id);
            }
            assert_eq!(size, seat.size, "the chunks of an arena cover it");
            assert!(size <= seat.arena.len(), "what is not page-locked is in no books");
        }
        let mut listed = 0;
        for (on, &list) in self.idle.iter().enumerate() {
            for id in self.walk(list, Thread::Size) {
                assert_eq!(self.space.used(id), Use::Idle, "only idle blocks are on the shelves");
                assert_eq!(shelf(self.space.size(id)), on, "a block is on its size's shelf");
                listed += self.space.size(id);
            }
        }
        assert_eq!(listed, self.space.bytes(Use::Idle), "all idle blocks are on the shelves");
        let lent = self.blocks_of(|_| true).filter(|&id| self.space.used(id) == Use::Lent);
        let requested: u64 = lent.map(|id| self.tags[id as usize].requested).sum();
        assert_eq!(requested, self.requested, "requested bytes are those of the lent blocks");
        assert_eq!(self.blocks_of(|_| true).count(), self.blocks, "blocks are counted");
        for (key, account) in &self.accounts {
            self.audit_account(key as u32, account);
        }
        for (id, tag) in self.tags.iter().enumerate() {
            let Some(arena) = tag.arena() else { continue };
            let used = self.space.used(id as u32);
            let kept = matches!(used, Use::Idle | Use::Busy | Use::Quarantined);
            assert!(kept, "a {used:?} chunk keeps its arena");
            let seat = &self.seats[self.space.extent(id as u32) as usize];
            assert!(Arc::ptr_eq(arena, &seat.arena), "a block lies in its own arena");
        }
    }

    fn audit_account(&self, slot: u32, account: &Account) {
        let held: u64 = self.blocks_of(|owner| owner == slot).map(|id| self.space.size(id)).sum();
        assert_eq!(held, account.held, "a client holds what is lent, busy or quarantined for it");
        assert!(held <= account.quota, "no client is over its quota");
        self.audit_front(slot, account);
        let mut aged: Vec<u32> = self.walk(account.busy_by_age, Thread::Age).collect();
        let sized = account.busy.iter().flat_map(|&list| self.walk(list, Thread::Size));
        let mut sized: Vec<u32> = sized.collect();
        assert_eq!(aged.len(), account.busy_blocks, "busy blocks are counted");
        aged.sort_unstable();
        sized.sort_unstable();
        assert_eq!(aged, sized, "a busy block is listed by size and by age");
        for id in aged {
            let tag = &self.tags[id as usize];
            assert_eq!(self.space.used(id), Use::Busy, "only busy blocks are listed as busy");
            assert!(tag.owner == slot && tag.ticket != 0, "a busy block is its owner's");
            assert!(tag.event.is_some(), "a busy block has its event");
        }
    }

    /// The lent, busy and quarantined blocks of some owners.
    fn blocks_of(&self, whose: impl Fn(u32) -> bool) -> impl Iterator<Item = u32> {
        (0..self.space.numbers()).filter(move |&id| {
            let out = matches!(self.space.used(id), Use::Lent | Use::Busy | Use::Quarantined);
            out && whose(self.tags[id as usize].owner)
        })
    }

    /// The longest run of free and idle bytes, and every lent block.
    pub(super) fn survey(&mut self) -> (u64, Vec<LentRow>) {
        self.spill_all();
        (0..self.accounts.capacity()).for_each(|slot| self.catch_up(slot as u32));
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
}
