//! The few blocks that a client keeps at hand, lent and taken back without the pool's lock.
//!
//! What it is not: a second set of books. The ledger has such a block as lent to the client all the
//! time; its card says what it is besides: lent, busy behind its event, or idle.
//!
//! Invariant: a card that names a block keeps naming it until somebody who holds the pool's lock
//! makes the card empty. No word comes twice, so who compares it knows that nothing happened to the
//! card in between; and of two who want a block that is not lent one gets it.
//!
//! ```text
//!   the owner, without a lock:                  Empty -> Busy <-> Idle -> Lent -> Busy
//!   whoever holds the lock, by `take`:          Busy, Idle -> Empty      into the books
//!   and by `leave`, where a lent block goes there by its drop or its giving-back: Lent -> Empty
//!
//!   card.word = turn << 2 | state          turn: counts the owner's changes of all its cards
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use super::sync::{AtomicBool, AtomicU32, AtomicU64};
use crate::unit::{EventId, Key, Name};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// How many blocks a client keeps at hand. Each lend looks at all of them.
pub(super) const CARDS: usize = if cfg!(loom) { 2 } else { 4 };
/// A card that three changes did not leave alone was lent in between.
const TRIES: usize = 4;

/// What a block at hand is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The card names no block.
    Empty = 0,
    Lent = 1,
    Busy = 2,
    Idle = 3,
}

pub(super) fn state(word: u64) -> State {
    match word & 3 {
        0 => State::Empty,
        1 => State::Lent,
        2 => State::Busy,
        _ => State::Idle,
    }
}

pub(super) fn word(turn: u64, state: State) -> u64 {
    turn << 2 | state as u64
}

/// One block, as others may see it. What is beside the word is written before the word is.
#[derive(Debug, Default)]
pub(super) struct Card {
    word: AtomicU64,
    id: AtomicU32,
    room: AtomicU64,
    /// Of the loan, not of the books.
    requested: AtomicU64,
    name: [AtomicU64; Name::WORDS],
    event: [AtomicU64; 2],
}

/// A client's cards. Aligned so that no two clients write to one line of a cache.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Front {
    cards: [Card; CARDS],
    /// The books have something of the client that goes first: it keeps nothing at hand meanwhile.
    direct: AtomicBool,
    /// Blocks lent from here; written by the owner alone.
    lends: AtomicU64,
}

/// A card that names a block, at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shown {
    pub(super) id: u32,
    pub(super) room: u64,
    pub(super) requested: u64,
    pub(super) state: State,
}

impl Card {
    /// Whom a block of the books is shown as; the card is empty, and its owner calls.
    pub(super) fn join(&self, id: u32, room: u64) {
        self.id.store(id, Release);
        self.room.store(room, Release);
    }

    /// What the next loan is for.
    pub(super) fn describe(&self, len: u64, name: Name) {
        self.requested.store(len, Release);
        for (to, from) in self.name.iter().zip(name.to_words()) {
            to.store(from, Release);
        }
    }

    /// The block is busy until the event is done. Nobody else changes the word of a card that is
    /// lent or empty.
    #[inline]
    pub(super) fn put_busy(&self, event: EventId, turn: u64) -> u64 {
        let Key { owner, index, generation } = event.0;
        self.event[0].store(u64::from(owner) << 32 | u64::from(index), Release);
        self.event[1].store(u64::from(generation), Release);
        let busy = word(turn, State::Busy);
        self.word.store(busy, Release);
        busy
    }

    /// Changes the word, if it still is what its owner knows.
    #[inline]
    pub(super) fn change(&self, from: u64, to: u64) -> bool {
        self.word.compare_exchange(from, to, AcqRel, Acquire).is_ok()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        state(self.word.load(Acquire)) == State::Empty
    }

    fn event(&self) -> EventId {
        let [first, second] = [0, 1].map(|nth| self.event[nth].load(Acquire));
        let (owner, index) = ((first >> 32) as u32, first as u32);
        EventId(Key { owner, index, generation: second as u32 })
    }
}

impl Front {
    pub(super) fn card(&self, at: usize) -> &Card {
        &self.cards[at]
    }

    pub(super) fn is_direct(&self) -> bool {
        self.direct.load(Relaxed)
    }

    /// Told under the pool's lock.
    pub(super) fn set_direct(&self, direct: bool) {
        self.direct.store(direct, Relaxed);
    }

    pub(super) fn lends(&self) -> u64 {
        self.lends.load(Relaxed)
    }

    /// The owner has lent one more.
    pub(super) fn count_lend(&self) {
        self.lends.store(self.lends.load(Relaxed) + 1, Relaxed);
    }

    /// The cards, longest not changed first.
    pub(super) fn by_age(&self) -> [usize; CARDS] {
        let words: [u64; CARDS] = std::array::from_fn(|at| self.cards[at].word.load(Relaxed));
        let mut ats: [usize; CARDS] = std::array::from_fn(|at| at);
        ats.sort_unstable_by_key(|&at| words[at]);
        ats
    }

    /// Do all cards name nothing, or something lent? Then there is nothing to take.
    pub(super) fn is_out(&self) -> bool {
        let mut words = self.cards.iter().map(|card| card.word.load(Acquire));
        words.all(|word| matches!(state(word), State::Empty | State::Lent))
    }

    /// The blocks at hand. Under the pool's lock; none of them is named anew meanwhile.
    pub(super) fn shown(&self) -> impl Iterator<Item = Shown> {
        self.cards.iter().filter_map(|card| {
            let state = state(card.word.load(Acquire));
            let [room, requested] = [&card.room, &card.requested].map(|at| at.load(Acquire));
            let shown = Shown { id: card.id.load(Acquire), room, requested, state };
            (state != State::Empty).then_some(shown)
        })
    }

    /// Takes a block that is not lent, with its event if it is busy. Under the pool's lock.
    pub(super) fn take(&self, at: usize) -> Option<(u32, Option<EventId>)> {
        let card = &self.cards[at];
        for _ in 0..TRIES {
            let now = card.word.load(Acquire);
            // Read before the word is compared: while the word stays, so do they.
            let (id, event) = (card.id.load(Acquire), card.event());
            let event = match state(now) {
                State::Empty | State::Lent => return None,
                State::Busy => Some(event),
                State::Idle => None,
            };
            if card.change(now, word(now >> 2, State::Empty)) {
                return Some((id, event));
            }
        }
        None
    }

    /// A lent block goes into the books by itself: its card, if it has one, names it no more. Under
    /// the pool's lock, by whoever has the block.
    pub(super) fn leave(&self, id: u32) {
        for card in &self.cards {
            let now = card.word.load(Acquire);
            if state(now) == State::Lent && card.id.load(Acquire) == id {
                card.word.store(word(now >> 2, State::Empty), Release);
            }
        }
    }

    /// The lent blocks, what was asked for and under which name. A block that is lent anew all the
    /// time while somebody looks is left out. Under the pool's lock.
    pub(super) fn lent(&self) -> impl Iterator<Item = (u32, u64, Name)> {
        self.cards.iter().filter_map(|card| {
            (0..TRIES).find_map(|_| {
                let before = card.word.load(Acquire);
                let words: [u64; Name::WORDS] =
                    std::array::from_fn(|nth| card.name[nth].load(Acquire));
                let lent = (card.id.load(Acquire), card.requested.load(Acquire));
                // What was written for a later loan was written after the word had changed.
                let same = card.word.load(Acquire) == before;
                let is_lent = state(before) == State::Lent && same;
                is_lent.then(|| (lent.0, lent.1, Name::from_words(words)))
            })
        })
    }
}
