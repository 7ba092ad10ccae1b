//! The owner's side of the blocks at hand: which there are, and where they lie.
//!
//! What it is not: the truth. Others may have taken a block that is not lent; the card's word
//! tells, when it is compared.
//!
//! Invariant: what is kept of a card that is not empty is of the block that the card names.
//!
//! ```text
//!   give_back(b, e)     kept[1] = b  card 1: Busy          no card left, or direct: the books
//!   settle: e is done   card 1: Busy -> Idle   fails: taken, and e comes home by the books
//!   lend(same size)     card 1: Idle -> Lent   fails: taken, look further
//! ```
//!
//! Only the client uses it.
#![deny(unsafe_code)]

use super::arena::Arena;
use super::block::Block;
use super::busy::Doubt;
use super::front::{CARDS, Front, State, state, word};
use super::ledger::{Ledger, Loan};
use crate::error::Result;
use crate::unit::{EventId, Name};
use std::sync::Arc;

/// A client's blocks at hand.
#[derive(Debug)]
pub(super) struct Till {
    front: Arc<Front>,
    slot: u32,
    kept: [Kept; CARDS],
    /// How often this side changed a word.
    turn: u64,
    /// Which card is asked about first.
    next: usize,
}

/// What the owner knows of the block that a card names.
#[derive(Debug, Default)]
struct Kept {
    /// The last word that this side wrote.
    word: u64,
    id: u32,
    room: u64,
    offset: u64,
    /// Of a block that is not lent. The arena may have been given back to the system after somebody
    /// took the block; that ends its mapping, whoever knows the arena.
    arena: Option<Arc<Arena>>,
    event: Option<EventId>,
}

impl Kept {
    /// As if it had never been kept.
    fn forget(&mut self) {
        self.word = 0;
        self.arena = None;
    }
}

impl Till {
    pub(super) fn new(front: Arc<Front>, slot: u32) -> Till {
        Till { front, slot, kept: Default::default(), turn: 0, next: 0 }
    }

    fn turn(&mut self, to: State) -> u64 {
        self.turn += 1;
        word(self.turn, to)
    }

    /// Lends an idle block of exactly that size.
    pub(super) fn lend(&mut self, room: u64, len: u64, name: Name) -> Option<Loan> {
        if self.front.is_direct() {
            return None;
        }
        for at in 0..CARDS {
            let kept = &self.kept[at];
            if kept.room != room || state(kept.word) != State::Idle {
                continue;
            }
            let to = self.turn(State::Lent);
            let kept = &mut self.kept[at];
            let card = self.front.card(at);
            card.describe(len, name);
            let is_taken = !card.change(kept.word, to);
            let Some(arena) = kept.arena.take() else { continue };
            if is_taken {
                kept.forget();
                continue;
            }
            kept.word = to;
            self.front.count_lend();
            let (id, offset) = (kept.id, kept.offset);
            return Some(Loan { id, arena, offset, room, after: None, returned: 0 });
        }
        None
    }

    /// Keeps a block that its client gives back; says no where the books are to have it.
    pub(super) fn give_back(&mut self, block: &mut Block, event: EventId) -> bool {
        if self.front.is_direct() {
            return false;
        }
        let own = |kept: &Kept| state(kept.word) == State::Lent && kept.id == block.id;
        let at = match self.kept.iter().position(own) {
            Some(at) => at,
            None => match (0..CARDS).find(|&at| self.front.card(at).is_empty()) {
                Some(at) => at,
                None => return false,
            },
        };
        let kept = &mut self.kept[at];
        let card = self.front.card(at);
        if card.is_empty() {
            if block.is_pageable() {
                return false;
            }
            (kept.id, kept.room, kept.offset) = (block.id, block.room().get(), block.offset);
            card.join(kept.id, kept.room);
        }
        self.turn += 1;
        kept.arena = block.arena.take();
        kept.event = Some(event);
        kept.word = card.put_busy(event, self.turn);
        true
    }

    /// Asks about the busy ones, at most `max`; as [`super::Client::settle`].
    pub(super) fn settle(
        &mut self,
        max: usize,
        poll: &mut impl FnMut(EventId) -> Result<bool>,
        on_done: &mut impl FnMut(EventId),
    ) -> Result<usize> {
        let (mut asked, mut settled) = (0, 0);
        for nth in 0..CARDS {
            let at = (self.next + nth) % CARDS;
            let Kept { word, event: Some(event), .. } = self.kept[at] else { continue };
            if state(word) != State::Busy {
                continue;
            }
            if asked == max {
                self.next = at;
                break;
            }
            asked += 1;
            if !poll(event)? {
                continue;
            }
            let to = self.turn(State::Idle);
            if self.front.card(at).change(word, to) {
                self.kept[at].word = to;
                on_done(event);
                settled += 1;
            } else {
                // Somebody has put the block into the books, and its event with it.
                self.kept[at].forget();
            }
        }
        Ok(settled)
    }

    /// A lent block is to go into the books by itself. Under the pool's lock.
    pub(super) fn leave(&mut self, id: u32) {
        let own = |kept: &&mut Kept| state(kept.word) == State::Lent && kept.id == id;
        if let Some(kept) = self.kept.iter_mut().find(own) {
            kept.forget();
            self.front.leave(id);
        }
    }

    /// Have the books something of the client that goes first?
    pub(super) fn is_direct(&self) -> bool {
        self.front.is_direct()
    }

    /// Is there anything that is not lent, as far as this side knows?
    pub(super) fn has_some(&self) -> bool {
        self.kept.iter().any(|kept| kept.arena.is_some())
    }

    /// Puts everything that is not lent into the books; what is busy of it joins the `doubts`, of
    /// which there are at most `max`.
    pub(super) fn spill(&mut self, ledger: &mut Ledger, doubts: &mut Vec<Doubt>, max: usize) {
        if !self.has_some() {
            return;
        }
        let kept = &mut self.kept;
        let mut busy = |doubt| {
            if doubts.len() < max {
                doubts.push(doubt);
            }
        };
        ledger.spill(self.slot, &mut |at| kept[at].arena.take(), &mut busy);
        // Where others were quicker the books have the block already.
        for kept in self.kept.iter_mut().filter(|kept| state(kept.word) != State::Lent) {
            kept.forget();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::backend::{Fence, open};
    use crate::pinned::{Budget, Client, PinnedPool, PoolOptions};
    use crate::unit::{Bytes, Key};
    use std::cell::Cell;

    thread_local! {
        /// How often this thread took a pool's lock.
        pub(in crate::pinned) static LOCKS: Cell<usize> = const { Cell::new(0) };
    }

    /// Every event is done.
    #[derive(Debug)]
    struct Done;

    impl Fence for Done {
        fn done(&self, _event: EventId) -> Result<bool> {
            Ok(true)
        }
    }

    fn turn(client: &mut Client, sizes: &[u64]) -> usize {
        let before = LOCKS.get();
        for (nth, &len) in sizes.iter().enumerate() {
            let event = EventId(Key { owner: 1, index: nth as u32, generation: 0 });
            let block = client.lend(Bytes(len), Name::new("x")).unwrap().block;
            client.give_back(block, Some(event)).unwrap();
            let mut home = Vec::new();
            client.settle(&mut |_| Ok(true), &mut |event| home.push(event)).unwrap();
            assert_eq!(home, [event]);
        }
        LOCKS.get() - before
    }

    #[test]
    fn a_size_that_repeats_takes_no_lock() {
        let options =
            PoolOptions { budget: Budget::Bytes(Bytes::mib(64)), ..PoolOptions::default() };
        let pool = PinnedPool::new(open("sim").unwrap().backend.pinner(), options).unwrap();
        let mut client = pool.client(Arc::new(Done), Bytes::MAX).unwrap();
        assert!(turn(&mut client, &[5000]) > 0, "the first one is not at hand");
        assert_eq!((0..9).map(|_| turn(&mut client, &[5000])).sum::<usize>(), 0);
        // A new size: its first turns come by the books, and so on.
        for _ in 0..99 {
            turn(&mut client, &[70_000]);
        }
        assert_eq!(turn(&mut client, &[70_000]), 0, "for ever by the books");
        assert_eq!(pool.stats().counts.lends_repeated + pool.stats().counts.lends_split, 110);
    }
}
