//! Storages that left again after their readers came, in the order in which those may come again.
//!
//! What it is not: a pass. Nobody knows whether there is another one: of those of the first pass
//! nothing is fetched until a reader came for one. Whoever came twice is expected to come again.
//!
//! Invariant: at most `len_max` places; the oldest go first, and their readers are served on
//! demand. A place keeps its number while it is here.
//!
//! ```text
//!   rest: 5 4 3 2 ...        ask: 5 --> 4 3 are wanted next; 5 rests again, behind 2
//!         ^first             ^cursor
//! ```
//!
//! Part of the prefetcher.

use crate::storage::Homed;
use std::collections::VecDeque;

/// The order of those that rest.
#[derive(Debug)]
pub(super) struct Resting {
    /// `None` once asked for or gone.
    places: VecDeque<Option<Homed>>,
    /// The number of the first of them.
    first: u64,
    /// Number of the next one that is expected to be asked for.
    cursor: u64,
    len_max: usize,
}

impl Resting {
    pub(super) fn new(len_max: usize) -> Resting {
        Resting { places: VecDeque::new(), first: 0, cursor: 0, len_max }
    }

    /// A storage rests; returns the number of its place.
    pub(super) fn push(&mut self, homed: Homed) -> u64 {
        while self.places.len() >= self.len_max.max(1) {
            self.pop();
        }
        self.places.push_back(Some(homed));
        self.first + self.places.len() as u64 - 1
    }

    /// The one of this place rests no more. Says whether it did.
    pub(super) fn take(&mut self, number: u64) -> bool {
        let place = number.checked_sub(self.first).and_then(|at| self.places.get_mut(at as usize));
        let was_there = place.and_then(Option::take).is_some();
        while matches!(self.places.front(), Some(None)) {
            self.pop();
        }
        was_there
    }

    fn pop(&mut self) {
        if self.places.pop_front().is_some() {
            self.first += 1;
        }
    }

    /// A reader came for the one of this place: those behind it are expected next.
    pub(super) fn go_on_behind(&mut self, number: u64) {
        self.cursor = number + 1;
    }

    /// Number of the one expected next.
    pub(super) fn expected(&self) -> Option<u64> {
        self.ahead().next().map(|(number, _)| number)
    }

    /// Those expected next, by their numbers.
    pub(super) fn ahead(&self) -> impl Iterator<Item = (u64, Homed)> {
        let from = self.cursor.max(self.first);
        let places = self.places.iter().skip((from - self.first) as usize);
        (from..).zip(places).filter_map(|(number, place)| place.map(|homed| (number, homed)))
    }
}
