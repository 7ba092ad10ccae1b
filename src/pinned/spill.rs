//! The books and the blocks at hand: what these add to the figures, and how they get in there.
//!
//! What it is not: on the way of a size that repeats. Whoever comes here holds the pool's lock.
//!
//! Invariant: a block at hand stands in the books as lent to its client, with what was asked for
//! when the client took it out of them. Every figure is of the books and of the cards together.
//!
//! ```text
//!   books:  lent | b1 b2 b3 ..|    cards of b1: busy, b2: idle, b3: lent, of another length
//!   shown:  lent | b3 ..      |  busy + b1   free + b2   requested: that of b3's card
//!   spill:  b1 -> busy by size and age, b2 -> idle; b3 stays where it is
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use super::arena::Arena;
use super::busy::Doubt;
use super::front::{Front, State};
use super::ledger::{Account, Ledger};
use super::space::Use;
use std::sync::Arc;

/// What the blocks at hand are besides lent, of one client or of all.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AtHand {
    pub(super) busy: u64,
    pub(super) busy_blocks: usize,
    pub(super) idle: u64,
    pub(super) idle_blocks: usize,
    /// What the books say was asked for, of all of them.
    pub(super) booked: u64,
    /// What was asked for, of the lent ones.
    pub(super) requested: u64,
    /// Blocks lent by cards so far.
    pub(super) lends: u64,
}

impl Ledger {
    fn add_at_hand(&self, front: &Front, sum: &mut AtHand) {
        sum.lends += front.lends();
        for shown in front.shown() {
            sum.booked += self.tags[shown.id as usize].requested;
            match shown.state {
                State::Empty => {}
                State::Lent => sum.requested += shown.requested,
                State::Busy => {
                    sum.busy += shown.room;
                    sum.busy_blocks += 1;
                }
                State::Idle => {
                    sum.idle += shown.room;
                    sum.idle_blocks += 1;
                }
            }
        }
    }

    /// What is at hand of all clients. They may go on meanwhile; each block is counted once.
    pub(super) fn at_hand(&self) -> AtHand {
        let mut sum = AtHand::default();
        self.accounts.iter().for_each(|(_, account)| self.add_at_hand(&account.front, &mut sum));
        sum
    }

    /// What is at hand of one client.
    pub(super) fn at_hand_of(&self, slot: u32) -> AtHand {
        let mut sum = AtHand::default();
        self.add_at_hand(&self.accounts[slot as usize].front, &mut sum);
        sum
    }

    /// Puts what a client has at hand and not lent into the books, in the order of its coming back.
    /// `arena` hands over the arena of a card's block where the caller has it; `busy` is told what
    /// there is to ask about now.
    pub(super) fn spill(
        &mut self,
        slot: u32,
        arena: &mut dyn FnMut(usize) -> Option<Arc<Arena>>,
        busy: &mut dyn FnMut(Doubt),
    ) {
        if self.accounts[slot as usize].front.is_out() {
            return;
        }
        let front = Arc::clone(&self.accounts[slot as usize].front);
        for at in front.by_age() {
            if let Some((id, event)) = front.take(at) {
                self.give_back(id, event, arena(at)).into_iter().for_each(&mut *busy);
            }
        }
    }

    /// The same for all clients: somebody needs what they have, or wants to see it in the books.
    pub(super) fn spill_all(&mut self) {
        for slot in 0..self.accounts.capacity() {
            if self.accounts.contains(slot) {
                self.spill(slot as u32, &mut |_| None, &mut |_| {});
            }
        }
    }

    /// Enters into the books what the lent blocks at hand of an account are lent for.
    pub(super) fn catch_up(&mut self, slot: u32) {
        let Some(account) = self.accounts.get(slot as usize) else { return };
        for (id, requested, name) in account.front.lent() {
            let tag = &mut self.tags[id as usize];
            self.requested = self.requested - tag.requested + requested;
            (tag.requested, tag.name) = (requested, name);
        }
    }

    /// A lent block goes into the books by itself.
    pub(super) fn leave(&self, id: u32) {
        let owner = self.tags[id as usize].owner as usize;
        if let Some(account) = self.accounts.get(owner) {
            account.front.leave(id);
        }
    }

    /// Says whether a client may keep blocks at hand: not while the books have something of it that
    /// goes first, nor while whatever comes back is merged.
    pub(super) fn direct(&self, account: &Account) {
        let owed = account.busy_blocks > 0 || !account.returned.is_empty();
        account.front.set_direct(owed || self.merges_left() > 0);
    }

    pub(super) fn audit_front(&self, slot: u32, account: &Account) {
        for shown in account.front.shown() {
            let tag = &self.tags[shown.id as usize];
            assert_eq!(self.space.used(shown.id), Use::Lent, "in the books it is lent");
            assert_eq!(tag.owner, slot, "a client keeps its own blocks at hand");
            assert_eq!(self.space.size(shown.id), shown.room, "a card says its block's size");
            // Of a block that is not lent, what is asked for is that of a loan before it.
            let is_loan = shown.state == State::Lent;
            assert!(!is_loan || shown.requested <= shown.room, "a loan fits its block");
            let seat = &self.seats[self.space.extent(shown.id) as usize];
            assert!(!seat.pageable, "what is at hand is page-locked");
        }
    }
}
