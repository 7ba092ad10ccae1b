//! What is allocated, and what bytes are called: two maps by address.
//!
//! What it is not: the shadow. It says which bytes belong together, not who uses them.
//!
//! Invariant: ranges of one map never overlap; a new one takes the place of those it overlaps.
//! There are never more than `NAMES_MAX` names.
//!
//! ```text
//!   allocations   start -> (end, the access that took it)     a free by address finds its length
//!   names         start -> (end, name)                        the latest name of a byte wins
//! ```
//!
//! Only the checker may use it.

use crate::unit::{DeviceId, Name};
use std::collections::BTreeMap;

/// The most names kept; beyond that the older half is forgotten.
const NAMES_MAX: usize = 1 << 14;

/// Which address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    Device(DeviceId),
    Pinned,
}

/// A thing for each of some ranges.
#[derive(Debug)]
pub(super) struct Ranges<T> {
    map: BTreeMap<(Place, u64), (u64, T)>,
}

impl<T> Default for Ranges<T> {
    fn default() -> Ranges<T> {
        Ranges { map: BTreeMap::new() }
    }
}

impl<T: Copy> Ranges<T> {
    /// Gives `at..end` to `thing`, and takes every range that overlaps it out, lowest first.
    pub(super) fn insert(&mut self, place: Place, at: u64, end: u64, thing: T) -> Vec<T> {
        let mut replaced = Vec::new();
        while let Some(start) = self.last_overlapping(place, at, end) {
            replaced.extend(self.map.remove(&(place, start)).map(|(_, thing)| thing));
        }
        replaced.reverse();
        self.map.insert((place, at), (end, thing));
        replaced
    }

    fn last_overlapping(&self, place: Place, at: u64, end: u64) -> Option<u64> {
        let (key, (last, _)) = self.map.range((place, 0)..(place, end)).next_back()?;
        (*last > at).then_some(key.1)
    }

    /// End of the range that starts at `at`.
    pub(super) fn end_of(&self, place: Place, at: u64) -> Option<u64> {
        self.map.get(&(place, at)).map(|(end, _)| *end)
    }

    /// Takes out the ranges that start in `at..end`.
    pub(super) fn remove(&mut self, place: Place, at: u64, end: u64) {
        while let Some(key) = self.map.range((place, at)..(place, end)).next().map(|(key, _)| *key)
        {
            self.map.remove(&key);
        }
    }

    /// The things of the ranges that overlap `at..end`.
    pub(super) fn overlapping(
        &self,
        place: Place,
        at: u64,
        end: u64,
    ) -> impl Iterator<Item = T> + '_ {
        let below = self.map.range((place, 0)..(place, end)).rev();
        below.take_while(move |(_, (last, _))| *last > at).map(|(_, (_, thing))| *thing)
    }

    /// How many ranges there are.
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// Takes everything out, lowest first.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = T> + use<T> {
        std::mem::take(&mut self.map).into_values().map(|(_, thing)| thing)
    }
}

/// What bytes are called.
#[derive(Debug, Default)]
pub(super) struct Names {
    ranges: Ranges<(u64, Name)>,
    /// Names given so far.
    given: u64,
}

impl Names {
    /// Calls the bytes `name` from now on.
    pub(super) fn give(&mut self, place: Place, at: u64, end: u64, name: Name) {
        self.given += 1;
        self.ranges.insert(place, at, end, (self.given, name));
        if self.ranges.len() > NAMES_MAX {
            let mut ages: Vec<u64> = self.ranges.map.values().map(|(_, (age, _))| *age).collect();
            let (_, middle, _) = ages.select_nth_unstable(NAMES_MAX / 2);
            let middle = *middle;
            self.ranges.map.retain(|_, (_, (age, _))| *age >= middle);
        }
    }

    /// The latest name given to any of the bytes.
    pub(super) fn of(&self, place: Place, at: u64, end: u64) -> Option<Name> {
        let latest = self.ranges.overlapping(place, at, end).max_by_key(|(age, _)| *age);
        latest.map(|(_, name)| name)
    }

    /// How many names are kept.
    pub(super) fn len(&self) -> usize {
        self.ranges.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_range_takes_the_place_of_those_it_overlaps_and_of_no_neighbour() {
        let mut ranges = Ranges::default();
        for (at, end, thing) in [(0, 10, 'a'), (10, 20, 'b'), (20, 30, 'c'), (30, 40, 'd')] {
            assert!(ranges.insert(Place::Pinned, at, end, thing).is_empty());
        }
        assert_eq!(ranges.insert(Place::Pinned, 15, 30, 'e'), ['b', 'c']);
        let found = |at, end| ranges.overlapping(Place::Pinned, at, end).collect::<String>();
        assert_eq!(found(0, 40), "dea");
        assert_eq!(found(10, 15), "");
        assert_eq!(found(29, 30), "e");
        assert_eq!(ranges.end_of(Place::Pinned, 15), Some(30));
        let elsewhere = Place::Device(DeviceId(0));
        assert_eq!(ranges.overlapping(elsewhere, 0, 40).count(), 0);
    }

    #[test]
    fn names_without_end_keep_the_later_ones() {
        let mut names = Names::default();
        let many = 3 * NAMES_MAX as u64;
        for at in 0..many {
            names.give(Place::Pinned, at, at + 1, Name::new(&at.to_string()));
            assert!(names.len() <= NAMES_MAX);
        }
        assert_eq!(names.of(Place::Pinned, 0, 1), None);
        assert_eq!(names.of(Place::Pinned, 0, many), Some(Name::new(&(many - 1).to_string())));
    }
}
