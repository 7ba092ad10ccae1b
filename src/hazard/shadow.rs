//! Shadow memory: for every byte of one address space, who wrote it last and who read it since.
//!
//! What it is not: the rules. It keeps states by byte range; `rules` says what an access does to
//! one.
//!
//! Invariant: segments never overlap, and two that touch differ in state. Bytes in no segment are
//! in the default state: they exist, are defined, and nothing that could still matter uses them.
//!
//! ```text
//!   0x1000       0x1400          0x2000                       0x3000
//!   |---- A ------|------ B -------|   (default, not stored)   |--- C ---|
//!          a visit of 0x1200..0x1800 cuts A and B there; equal neighbours grow together again
//! ```
//!
//! Only the checker may use it.

use super::clock::{Actors, Clock};
use super::report::Touch;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Segments beyond which what is settled is forgotten.
const SEGMENTS_MIN: usize = 1 << 14;

/// One access: when, by whom, and what a report says of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    /// Place in everything the checker was shown; names the access.
    pub(super) position: u64,
    /// The actor's slot.
    pub(super) slot: usize,
    /// The actor's tick.
    pub(super) tick: u64,
    /// For the report.
    pub(super) touch: Touch,
}

impl PartialEq for Stamp {
    fn eq(&self, other: &Stamp) -> bool {
        self.position == other.position
    }
}

impl Stamp {
    /// Did it happen before what `slot` does next?
    pub(super) fn before(&self, slot: usize, actors: &Actors) -> bool {
        actors.ordered(self.slot, self.tick, slot)
    }

    fn is_settled(&self, host: &Clock) -> bool {
        host.at(self.slot) >= self.tick
    }
}

/// The reads since the last write of which none is ordered before another; nearly always one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Reads {
    one: Option<Stamp>,
    more: Vec<Stamp>,
}

impl Reads {
    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Stamp> {
        self.one.iter().chain(&self.more)
    }

    /// Keeps only those for which `keep` holds.
    pub(super) fn retain(&mut self, keep: impl Fn(&Stamp) -> bool) {
        if self.one.as_ref().is_some_and(|stamp| !keep(stamp)) {
            self.one = None;
        }
        self.more.retain(keep);
    }

    /// Adds one.
    pub(super) fn push(&mut self, stamp: Stamp) {
        match self.one {
            None => self.one = Some(stamp),
            Some(_) => self.more.push(stamp),
        }
    }

    /// Forgets them all.
    pub(super) fn clear(&mut self) {
        self.one = None;
        self.more.clear();
    }
}

/// Do the bytes exist?
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Life {
    /// Yes, as far as the trace tells.
    #[default]
    Present,
    /// A framework or the host said that it gave them back.
    Dropped,
    /// They were given back to the driver.
    Gone,
}

/// What is known of a byte.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct State {
    pub(super) life: Life,
    /// Has something written it since it came into being?
    pub(super) is_defined: bool,
    /// The last write; an allocation or a release is one.
    pub(super) write: Option<Stamp>,
    /// Reads since.
    pub(super) reads: Reads,
    /// What the driver's last release of the byte was ordered behind, until it is lent again.
    pub(super) freed: Option<Arc<Clock>>,
}

impl Default for State {
    fn default() -> State {
        State {
            life: Life::Present,
            is_defined: true,
            write: None,
            reads: Reads::default(),
            freed: None,
        }
    }
}

impl State {
    fn is_default(&self) -> bool {
        *self == State::default()
    }

    /// Forgets accesses that the host has seen the end of. Whatever comes later is ordered behind
    /// them, so they can take part in no race; a report can no longer name them, though.
    fn settle(&mut self, host: &Clock) {
        self.write = self.write.filter(|stamp| !stamp.is_settled(host));
        self.reads.retain(|stamp| !stamp.is_settled(host));
        if self.freed.as_ref().is_some_and(|freed| host.covers(freed)) {
            self.freed = None;
        }
    }
}

#[derive(Debug)]
struct Segment {
    end: u64,
    state: State,
}

/// The bytes of one address space.
#[derive(Debug, Default)]
pub(super) struct Space {
    segments: BTreeMap<u64, Segment>,
    segments_max: usize,
    /// Empty between calls; here to keep its memory.
    scratch: Vec<(u64, u64)>,
}

impl Space {
    /// Shows the state of every byte of `at..end` to `each`, which may change it.
    pub(super) fn visit(&mut self, at: u64, end: u64, mut each: impl FnMut(&mut State)) {
        if at >= end {
            return;
        }
        match self.segments.get_mut(&at) {
            Some(segment) if segment.end == end => each(&mut segment.state),
            _ => {
                self.cut(at);
                self.cut(end);
                self.fill(at, end);
                for segment in self.segments.range_mut(at..end).map(|(_, segment)| segment) {
                    each(&mut segment.state);
                }
            }
        }
        self.mend(at, end);
    }

    /// Shows the states of `at..end` to `each`.
    pub(super) fn peek(&self, at: u64, end: u64, mut each: impl FnMut(&State)) {
        let before = self.segments.range(..at).next_back().filter(|(_, segment)| segment.end > at);
        if at < end {
            for (_, segment) in before.into_iter().chain(self.segments.range(at..end)) {
                each(&segment.state);
            }
        }
    }

    /// Makes a segment start at `at`, if one has that byte inside.
    fn cut(&mut self, at: u64) {
        if let Some((_, segment)) = self.segments.range_mut(..at).next_back()
            && segment.end > at
        {
            let right = Segment { end: segment.end, state: segment.state.clone() };
            segment.end = at;
            self.segments.insert(at, right);
        }
    }

    /// Gives the bytes of `at..end` that are in no segment one.
    fn fill(&mut self, at: u64, end: u64) {
        let mut from = at;
        for (start, segment) in self.segments.range(at..end) {
            if from < *start {
                self.scratch.push((from, *start));
            }
            from = segment.end;
        }
        if from < end {
            self.scratch.push((from, end));
        }
        for (at, end) in self.scratch.drain(..) {
            self.segments.insert(at, Segment { end, state: State::default() });
        }
    }

    /// Joins equal neighbours in `at..end` and at its edges; from the right, in one walk.
    fn mend(&mut self, at: u64, end: u64) {
        let mut right: Option<(u64, &mut Segment)> = None;
        for (start, segment) in self.segments.range_mut(..=end).rev() {
            if segment.end < at {
                break;
            }
            if let Some((middle, next)) = right {
                debug_assert_eq!(segment.end, middle, "a visit leaves no gap");
                if segment.state == next.state {
                    segment.end = next.end;
                    self.scratch.push((middle, next.end));
                }
            }
            right = Some((*start, segment));
        }
        for (middle, _) in self.scratch.drain(..) {
            self.segments.remove(&middle);
        }
    }

    /// How many segments there are.
    pub(super) fn len(&self) -> usize {
        self.segments.len()
    }

    /// Are there so many segments that it pays to forget what is settled?
    pub(super) fn is_crowded(&self) -> bool {
        self.segments.len() > self.segments_max.max(SEGMENTS_MIN)
    }

    /// Forgets what can no longer matter. The bound then doubles what is left, so that this costs
    /// nothing much per record.
    pub(super) fn settle(&mut self, host: &Clock) {
        let mut kept: Vec<(u64, Segment)> = Vec::new();
        for (at, mut segment) in std::mem::take(&mut self.segments) {
            segment.state.settle(host);
            match kept.last_mut() {
                _ if segment.state.is_default() => {}
                Some((_, last)) if last.end == at && last.state == segment.state => {
                    last.end = segment.end;
                }
                _ => kept.push((at, segment)),
            }
        }
        self.segments_max = 2 * kept.len();
        self.segments = kept.into_iter().collect();
    }

    /// Shows the slot of every access kept to `each`.
    pub(super) fn slots(&self, mut each: impl FnMut(usize)) {
        for state in self.segments.values().map(|segment| &segment.state) {
            state.write.iter().chain(state.reads.iter()).for_each(|stamp| each(stamp.slot));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Actor, Use};
    use crate::unit::{Bytes, DeviceId, DevicePtr, DeviceRange};

    fn stamp(position: u64) -> Stamp {
        let uses = Some(Use::write(DeviceRange::new(DevicePtr(0), Bytes(1)).unwrap()));
        let touch =
            Touch { seq: position, device: DeviceId(0), by: Actor::Host, uses, word: "note" };
        Stamp { position, slot: 0, tick: position, touch }
    }

    fn write(space: &mut Space, at: u64, end: u64, position: u64) {
        space.visit(at, end, |state| state.write = Some(stamp(position)));
    }

    fn picture(space: &Space) -> Vec<(u64, u64, Option<u64>)> {
        let of = |(at, segment): (&u64, &Segment)| {
            (*at, segment.end, segment.state.write.map(|stamp| stamp.position))
        };
        space.segments.iter().map(of).collect()
    }

    #[test]
    fn pieces_written_as_a_whole_grow_together_again() {
        let mut space = Space::default();
        write(&mut space, 0, 100, 1);
        write(&mut space, 20, 30, 2);
        write(&mut space, 90, 120, 3);
        let cut = [(0, 20, 1), (20, 30, 2), (30, 90, 1), (90, 120, 3)];
        assert_eq!(picture(&space), cut.map(|(at, end, by)| (at, end, Some(by))));
        write(&mut space, 0, 120, 4);
        assert_eq!(picture(&space), [(0, 120, Some(4))]);
    }

    #[test]
    fn a_look_that_changes_nothing_leaves_no_cut() {
        let mut space = Space::default();
        write(&mut space, 0, 100, 1);
        for (at, end) in [(0, 40), (40, 60), (60, 100), (0, 100), (90, 110), (95, 105)] {
            space.visit(at, end, |_| {});
            space.visit(at, end, |state| state.is_defined = false);
            space.visit(at, end, |state| state.is_defined = true);
        }
        assert_eq!(picture(&space), [(0, 100, Some(1)), (100, 110, None)]);
    }

    #[test]
    fn a_gap_inside_a_visit_is_seen_once_and_in_order() {
        let mut space = Space::default();
        write(&mut space, 10, 20, 1);
        write(&mut space, 30, 40, 2);
        let mut seen = Vec::new();
        space.visit(0, 50, |state| seen.push(state.write.map(|stamp| stamp.position)));
        assert_eq!(seen, [None, Some(1), None, Some(2), None]);
        space.visit(7, 7, |_| panic!("no bytes, no visit"));
    }

    #[test]
    fn a_byte_just_outside_a_visit_keeps_its_state() {
        let mut space = Space::default();
        write(&mut space, 0, 10, 1);
        write(&mut space, 10, 20, 2);
        assert_eq!(picture(&space), [(0, 10, Some(1)), (10, 20, Some(2))]);
        let mut seen = 0;
        space.peek(10, 20, |state| seen = state.write.map_or(0, |stamp| stamp.position));
        assert_eq!(seen, 2);
        space.peek(9, 10, |state| seen = state.write.map_or(0, |stamp| stamp.position));
        assert_eq!(seen, 1);
    }

    #[test]
    fn what_is_settled_is_forgotten_and_what_is_not_is_kept() {
        let mut space = Space::default();
        for piece in 0..10 {
            write(&mut space, 10 * piece, 10 * piece + 10, piece + 1);
        }
        let mut actors = Actors::default();
        let slot = actors.worker(0, DeviceId(0));
        (0..5).for_each(|_| {
            actors.enter(slot);
            actors.tick(slot);
            actors.answer(slot);
        });
        space.settle(actors.host());
        assert_eq!(picture(&space).len(), 5, "five of the ten writes are known done");
        assert_eq!(picture(&space)[0], (50, 60, Some(6)));
    }
}
