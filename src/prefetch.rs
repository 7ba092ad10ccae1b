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
//! ```
//!
//! The engine asks it.

use crate::storage::Homed;
use crate::unit::{Bytes, StorageId, StreamId};

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

    /// A storage leaves; returns its ordinal in this pass.
    pub fn left(&mut self, homed: Homed) -> u32 {
        self.is_inward = false;
        self.evicted.push(Some(homed));
        self.live_count += 1;
        self.tail = self.evicted.len();
        (self.evicted.len() - 1) as u32
    }

    /// A reader came for bytes that had left in this pass.
    pub fn asked(&mut self, ordinal: u32) {
        self.is_inward = true;
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
    pub fn gone(&mut self, ordinal: u32) {
        self.take(ordinal);
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

    /// Storages still away, the next one first.
    fn order(&self) -> impl Iterator<Item = Homed> {
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

    /// Starts the next pass. What is still away is carried over under a new ordinal, which
    /// `renumber` is told; `None` where too much is away to be carried: it is served on demand.
    pub fn next_pass(&mut self, mut renumber: impl FnMut(StorageId, Option<u32>)) {
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
        if self.live_count < self.limits.pass_len_max {
            let mut ordinal = self.whole;
            for old in self.whole..self.evicted.len() {
                let Some(homed) = self.evicted[old].take() else { continue };
                self.evicted[ordinal] = Some(homed);
                renumber(homed.storage, Some(ordinal as u32));
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
mod tests {
    use super::*;
    use crate::unit::Key;

    const STREAM: StreamId = StreamId(Key { owner: 9, index: 0, generation: 0 });

    fn id(index: u32) -> StorageId {
        StorageId(Key { owner: 1, index, generation: 0 })
    }

    fn homed(index: u32) -> Homed {
        Homed { storage: id(index), stream: STREAM }
    }

    fn prefetcher(bytes_max: u64, count_max: usize) -> Prefetcher {
        let bytes_max = Bytes(bytes_max);
        Prefetcher::new(PrefetchLimits { bytes_max, count_max, pass_len_max: 100 })
    }

    /// Ordinals that would be fetched now, each taking ten bytes, without fetching them.
    fn next(prefetcher: &Prefetcher) -> Option<u32> {
        prefetcher.wanted(STREAM, |_| Some(Bytes(10))).map(|(id, _)| id.0.index)
    }

    fn leave(prefetcher: &mut Prefetcher, count: u32) {
        for index in 0..count {
            assert_eq!(prefetcher.left(homed(index)), index);
        }
    }

    #[test]
    fn a_pass_that_begins_looks_at_what_came_and_went_alone() {
        let mut it = Prefetcher::new(PrefetchLimits {
            bytes_max: Bytes(100),
            count_max: 2,
            pass_len_max: 1 << 20,
        });
        leave(&mut it, 10_000);
        it.asked(9_000);
        it.next_pass(|_, _| {});
        let mut told = Vec::new();
        for index in [20_000, 20_001, 20_002] {
            it.left(homed(index));
        }
        it.asked(10_000);
        it.next_pass(|storage, ordinal| told.push((storage.0.index, ordinal)));
        assert_eq!(told, [(20_000, Some(9_999)), (20_002, Some(10_000))]);
        assert!((0..10_001).all(|ordinal| it.at(ordinal).is_some()));
    }

    #[test]
    fn nothing_is_fetched_while_storages_are_leaving() {
        let mut it = prefetcher(100, 2);
        leave(&mut it, 3);
        assert_eq!(next(&it), None);
        it.turned();
        assert_eq!(next(&it), Some(2));
        it.left(homed(3));
        assert_eq!(next(&it), None);
    }

    #[test]
    fn the_window_bounds_bytes_and_number() {
        let mut it = prefetcher(25, 8);
        leave(&mut it, 4);
        it.turned();
        it.fetched(Bytes(10));
        it.fetched(Bytes(10));
        assert_eq!(next(&it), None, "thirty bytes would exceed the window");
        it.claimed(Bytes(10));
        assert_eq!(next(&it), Some(3));
        let mut it = prefetcher(1000, 1);
        leave(&mut it, 4);
        it.turned();
        it.fetched(Bytes(10));
        assert_eq!(next(&it), None);
    }

    #[test]
    fn an_order_asked_once_is_expected_the_next_time() {
        let mut it = prefetcher(100, 2);
        let order = [1, 0, 2];
        leave(&mut it, 3);
        for ordinal in order {
            it.asked(ordinal);
        }
        assert!(it.pass_is_over());
        it.next_pass(|_, _| panic!("nothing is away"));
        leave(&mut it, 3);
        it.turned();
        let wrong = it.guesses().wrong;
        for ordinal in order {
            assert_eq!(next(&it), Some(ordinal));
            it.asked(ordinal);
        }
        assert_eq!(it.guesses().wrong, wrong);
    }

    #[test]
    fn the_reverse_order_is_no_wrong_guess_in_the_first_pass() {
        let mut it = prefetcher(100, 2);
        leave(&mut it, 3);
        for ordinal in [2, 1, 0] {
            it.asked(ordinal);
        }
        assert_eq!(it.guesses().wrong, 0);
    }

    #[test]
    fn an_order_that_changed_is_followed_and_learned_anew() {
        let mut it = prefetcher(100, 2);
        for order in [[2, 1, 0], [0, 2, 1]] {
            leave(&mut it, 3);
            for ordinal in order {
                it.asked(ordinal);
            }
            it.next_pass(|_, _| {});
        }
        assert!(it.guesses().wrong > 0);
        leave(&mut it, 3);
        it.turned();
        assert_eq!(next(&it), Some(0));
    }

    #[test]
    fn a_pass_of_another_length_goes_by_the_reverse_order() {
        let mut it = prefetcher(100, 2);
        leave(&mut it, 2);
        it.asked(0);
        it.asked(1);
        it.next_pass(|_, _| {});
        leave(&mut it, 3);
        it.turned();
        assert_eq!(next(&it), Some(2));
    }

    #[test]
    fn what_is_still_away_is_carried_into_the_next_pass() {
        let mut it = prefetcher(100, 2);
        leave(&mut it, 3);
        it.asked(1);
        let mut renumbered = Vec::new();
        it.next_pass(|id, ordinal| renumbered.push((id.0.index, ordinal)));
        assert_eq!(renumbered, [(0, Some(0)), (2, Some(1))]);
        it.turned();
        assert_eq!(next(&it), Some(2));
    }

    #[test]
    fn a_pass_that_never_ends_stays_bounded() {
        let mut it = prefetcher(100, 2);
        for index in 0..10_000 {
            if it.pass_is_over() {
                it.next_pass(|_, _| {});
            }
            it.left(homed(index));
        }
        assert!(it.evicted.len() <= 100 && it.live_count <= 100);
    }

    #[test]
    fn a_storage_that_is_gone_is_not_fetched() {
        let mut it = prefetcher(100, 2);
        leave(&mut it, 2);
        it.gone(1);
        it.gone(1);
        it.turned();
        assert_eq!(next(&it), Some(0));
    }

    #[test]
    fn storages_of_another_stream_are_left_alone() {
        let mut it = prefetcher(100, 2);
        leave(&mut it, 1);
        it.turned();
        let other = StreamId(Key { owner: 9, index: 1, generation: 0 });
        assert_eq!(it.wanted(other, |_| Some(Bytes(1))), None);
    }
}
