//! What comes back, and when: a window of bytes over the order in which readers will ask.
//!
//! What it is not: a promise. A wrong guess costs time: every reader is served on demand, whatever
//! was guessed. It enqueues nothing.
//!
//! Invariant: bytes fetched ahead and not yet asked for never exceed the window, nor do their
//! number. Nothing is fetched while storages are leaving (the forward pass), only after a reader
//! came back.
//!
//! ```text
//!   leave:  0 1 2 3 4 5 |      ask: 5   4   3 ...            first pass: the reverse order
//!   learned order         5 4 3 2 1 0                        later: what the last full pass asked
//!                         ^cursor  ^ at most the window ahead
//!   rest:  5 4 3 (a graph that is kept)  ask: 5          those that rested after it: 4 3
//! ```
//!
//! The engine asks it.

mod resting;

use crate::storage::{Homed, Place};
use crate::unit::{Bytes, StorageId, StreamId};
use resting::Resting;

/// Bounds of what is fetched ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchLimits {
    /// At most so many bytes are on the device that nobody asked for yet.
    pub bytes_max: Bytes,
    /// At most so many storages; 2 is double buffering.
    pub count_max: usize,
    /// A pass with more evictions than this is split, and its order not learned.
    pub pass_len_max: usize,
}

/// How good the guesses were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guesses {
    /// Readers whose bytes were fetched ahead.
    pub hits: u64,
    /// Readers whose bytes were fetched on demand.
    pub misses: u64,
    /// Readers that were not the one expected next.
    pub wrong: u64,
    /// Bytes fetched ahead whose storage was then dropped or cancelled: moved for nothing.
    pub wasted_bytes: u64,
}

/// The window and the order.
#[derive(Debug)]
pub struct Prefetcher {
    limits: PrefetchLimits,
    bytes_ahead: Bytes,
    count_ahead: usize,
    /// This pass's evictions by ordinal; `None` once asked for or gone.
    evicted: Vec<Option<Homed>>,
    live_count: usize,
    /// No storage is away from this ordinal on, so that a search from the end stays short.
    tail: usize,
    /// Ordinals in the order their readers came, this pass.
    asked: Vec<u32>,
    /// The same of the last full pass; empty where none is known.
    learned: Vec<u32>,
    /// Where each ordinal stands in `learned`.
    places: Vec<u32>,
    /// Next place in `learned`.
    cursor: usize,
    /// Every storage before this ordinal is away: those need no new ordinal in the next pass.
    whole: usize,
    is_inward: bool,
    /// Those that left again after their readers came.
    resting: Resting,
    /// The last reader came for one that rested: it is their order that goes on.
    is_again: bool,
    guesses: Guesses,
}

impl Prefetcher {
    /// A prefetcher that knows no order yet: it guesses the reverse one.
    pub fn new(limits: PrefetchLimits) -> Prefetcher {
        Prefetcher {
            limits,
            bytes_ahead: Bytes::ZERO,
            count_ahead: 0,
            evicted: Vec::new(),
            live_count: 0,
            tail: 0,
            asked: Vec::new(),
            learned: Vec::new(),
            places: Vec::new(),
            cursor: 0,
            whole: 0,
            is_inward: false,
            resting: Resting::new(limits.pass_len_max),
            is_again: false,
            guesses: Guesses::default(),
        }
    }

    /// Sets the window in bytes.
    pub fn set_bytes_max(&mut self, bytes_max: Bytes) {
        self.limits.bytes_max = bytes_max;
    }

    /// How good the guesses were.
    pub fn guesses(&self) -> Guesses {
        self.guesses
    }

    /// Bytes fetched ahead that nobody asked for yet.
    pub fn bytes_ahead(&self) -> Bytes {
        self.bytes_ahead
    }

    /// Has the pass ended: something came back, and nothing is away any more?
    pub fn pass_is_over(&self) -> bool {
        (self.live_count == 0 && !self.asked.is_empty())
            || self.evicted.len() >= self.limits.pass_len_max
    }

    /// A storage leaves; returns its place in this pass.
    pub fn left(&mut self, homed: Homed) -> Place {
        self.is_inward = false;
        self.evicted.push(Some(homed));
        self.live_count += 1;
        self.tail = self.evicted.len();
        Place::Left((self.evicted.len() - 1) as u32)
    }

    /// A storage leaves whose readers of this pass came: it is of no pass, but may be asked for
    /// again behind those that rested before it.
    pub fn rests(&mut self, homed: Homed) -> Place {
        Place::Rests(self.resting.push(homed))
    }

    /// A reader came for bytes that had left.
    pub fn asked(&mut self, place: Place) {
        self.is_inward = true;
        match place {
            Place::Left(ordinal) => self.asked_in_pass(ordinal),
            Place::Rests(number) => self.asked_again(number),
        }
    }

    fn asked_again(&mut self, number: u64) {
        let expected = self.resting.expected().filter(|_| self.is_again);
        if !self.resting.take(number) {
            return;
        }
        if expected.is_some_and(|next| next != number) {
            self.guesses.wrong += 1;
        }
        self.is_again = true;
        self.resting.go_on_behind(number);
    }

    fn asked_in_pass(&mut self, ordinal: u32) {
        self.is_again = false;
        let expected = self.expected();
        if !self.take(ordinal) {
            return;
        }
        if expected.is_some_and(|next| next != ordinal) {
            self.guesses.wrong += 1;
        }
        self.asked.push(ordinal);
        // Go on behind the one that came; those jumped over are served on demand.
        if let Some(place) = self.places.get(ordinal as usize) {
            self.cursor = self.cursor.max(*place as usize + 1);
        }
    }

    /// A reader came for bytes that never left: the backward pass has begun.
    pub fn turned(&mut self) {
        self.is_inward = true;
    }

    /// How the reader that came was served.
    pub fn served(&mut self, was_ahead: bool) {
        if was_ahead {
            self.guesses.hits += 1;
        } else {
            self.guesses.misses += 1;
        }
    }

    /// The storage is gone before anybody asked for it.
    pub fn gone(&mut self, place: Place) {
        match place {
            Place::Left(ordinal) => self.take(ordinal),
            Place::Rests(number) => self.resting.take(number),
        };
    }

    /// `len` bytes are being fetched ahead.
    pub fn fetched(&mut self, len: Bytes) {
        self.bytes_ahead += len;
        self.count_ahead += 1;
    }

    /// Bytes fetched ahead were asked for.
    pub fn claimed(&mut self, len: Bytes) {
        self.bytes_ahead -= len;
        self.count_ahead -= 1;
    }

    /// Bytes fetched ahead were given up again.
    pub fn wasted(&mut self, len: Bytes) {
        self.claimed(len);
        self.guesses.wasted_bytes += len.0;
    }

    /// The storage of `stream` to fetch next, if the window has room for it. `fetchable` says how
    /// many bytes a storage would bring, or `None` where it needs no fetch now.
    pub fn wanted(
        &self,
        stream: StreamId,
        fetchable: impl Fn(StorageId) -> Option<Bytes>,
    ) -> Option<(StorageId, Bytes)> {
        if !self.is_inward || self.count_ahead >= self.limits.count_max {
            return None;
        }
        // Those fetched already come first in the order; look a little past them.
        let looks = self.count_ahead + self.limits.count_max.min(LOOKS_PAST);
        for homed in self.order().take(looks) {
            if homed.stream != stream {
                continue;
            }
            if let Some(len) = fetchable(homed.storage) {
                let fits = self.bytes_ahead.saturating_add(len) <= self.limits.bytes_max;
                return fits.then_some((homed.storage, len));
            }
        }
        None
    }

    /// Storages still away, the next one first. Of those that rest none before a reader came again.
    fn order(&self) -> impl Iterator<Item = Homed> {
        let again = self.resting.ahead().map(|(_, homed)| homed);
        again.take_while(|_| self.is_again).chain(self.order_of_pass())
    }

    fn order_of_pass(&self) -> impl Iterator<Item = Homed> {
        let learned = self.learned.iter().skip(self.cursor);
        let by_learned = learned.filter_map(|ordinal| self.at(*ordinal));
        let by_reverse = self.evicted[..self.tail].iter().rev().flatten().copied();
        let knows = self.knows_this_pass();
        by_learned.filter(move |_| knows).chain(by_reverse.filter(move |_| !knows))
    }

    /// The learned order fits this pass while it has as many evictions, and none is left over.
    fn knows_this_pass(&self) -> bool {
        self.cursor < self.learned.len() && self.learned.len() == self.evicted.len()
    }

    fn expected(&self) -> Option<u32> {
        if self.knows_this_pass() {
            return self.learned.get(self.cursor).copied();
        }
        // The last one away ends the part that is searched.
        self.tail.checked_sub(1).map(|last| last as u32)
    }

    fn at(&self, ordinal: u32) -> Option<Homed> {
        self.evicted.get(ordinal as usize).copied().flatten()
    }

    fn take(&mut self, ordinal: u32) -> bool {
        match self.evicted.get_mut(ordinal as usize) {
            Some(place) if place.is_some() => {
                *place = None;
                self.live_count -= 1;
                self.whole = self.whole.min(ordinal as usize);
                while self.tail > 0 && self.evicted[self.tail - 1].is_none() {
                    self.tail -= 1;
                }
                true
            }
            _ => false,
        }
    }

    /// Starts the next pass. What is still away is carried over to a new place, which `renumber` is
    /// told; `None` where too much is away to be carried: it is served on demand. Those that rest
    /// stay where they are.
    pub fn next_pass(&mut self, mut renumber: impl FnMut(StorageId, Option<Place>)) {
        let was_full = self.asked.len() == self.evicted.len() && !self.asked.is_empty();
        if was_full && self.evicted.len() < self.limits.pass_len_max {
            std::mem::swap(&mut self.learned, &mut self.asked);
            self.places.clear();
            self.places.resize(self.learned.len(), 0);
            for (place, ordinal) in (0..).zip(&self.learned) {
                self.places[*ordinal as usize] = place;
            }
        }
        self.asked.clear();
        self.cursor = 0;
        self.is_inward = false;
        self.is_again = false;
        if self.live_count < self.limits.pass_len_max {
            let mut ordinal = self.whole;
            for old in self.whole..self.evicted.len() {
                let Some(homed) = self.evicted[old].take() else { continue };
                self.evicted[ordinal] = Some(homed);
                renumber(homed.storage, Some(Place::Left(ordinal as u32)));
                ordinal += 1;
            }
            self.evicted.truncate(ordinal);
        } else {
            self.evicted.drain(..).flatten().for_each(|homed| renumber(homed.storage, None));
        }
        self.live_count = self.evicted.len();
        self.tail = self.live_count;
        self.whole = self.live_count;
    }
}

/// How far past what is fetched already the order is searched for something to fetch.
const LOOKS_PAST: usize = 8;

#[cfg(test)]
mod tests;
