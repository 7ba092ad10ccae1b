//! The events of a pool, side by side in memory, and which of them nobody uses.
//!
//! What it is not: it calls no driver. An event is a number here.
//!
//! Invariant: an event is on the list of free ones, with the pool, or in use, and nowhere twice.
//! Whoever lets go of it last puts it on the list; the pool takes the whole list when it has none.
//! Taking one costs the same however many there are; few are in use, so that they stay in cache.
//!
//! ```text
//!   cells [c c c c c c ..]      free: head -> 5 -> 70 -> 3 -> none    mine -> 9 -> none
//!          ^ Used, Used          ^ the last user puts it on            ^ the pool takes it here
//! ```
//!
//! Part of `stream`.

use crate::unit::{EventId, Key};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

/// Cells that are made at once: neighbours are used together.
const CHUNK: usize = 64;
/// No cell.
const NONE: u32 = u32::MAX;
/// The cell is on no list.
const UNLISTED: u32 = u32::MAX - 1;
/// Holders of a cell whose event is in use by one: the pool, and that one.
const SOLE: usize = 2;
/// Cells looked at for one that two users, on two threads, let go of at the same moment: each saw
/// the other, and neither put it on the list. Only where the list is empty is it looked for.
const LOOKS_MAX: usize = 16;

#[derive(Debug)]
struct Cell {
    /// The event's key; set before anybody uses it.
    event: [AtomicU32; 3],
    /// Once true it stays true until the event is recorded anew, when nobody uses it.
    done: AtomicBool,
    /// The next free one, [`NONE`] behind the last, [`UNLISTED`].
    next: AtomicU32,
    number: u32,
    /// The number of the first free cell; each names the next one.
    free: Arc<AtomicU32>,
}

impl Cell {
    fn event(&self) -> EventId {
        let [owner, index, generation] =
            self.event.each_ref().map(|word| word.load(Ordering::Relaxed));
        EventId(Key { owner, index, generation })
    }

    /// Puts it on the list.
    fn put(&self) {
        let mut first = self.free.load(Ordering::Relaxed);
        loop {
            self.next.store(first, Ordering::Relaxed);
            // Release: what was done with it is seen by the pool that takes it.
            let (ok, not) = (Ordering::Release, Ordering::Relaxed);
            match self.free.compare_exchange_weak(first, self.number, ok, not) {
                Ok(_) => return,
                Err(other) => first = other,
            }
        }
    }
}

/// An event that nobody uses, in the hands of its pool.
#[derive(Debug)]
pub(super) struct Vacant(Arc<Cell>);

impl Vacant {
    pub(super) fn event(&self) -> EventId {
        self.0.event()
    }

    /// It was recorded: its first user.
    pub(super) fn into_used(self) -> Used {
        self.0.done.store(false, Ordering::Relaxed);
        Used(self.0)
    }

    /// Back to the list.
    pub(super) fn put_back(self) {
        self.0.put();
    }
}

/// One user of an event.
#[derive(Clone, Debug)]
pub(super) struct Used(Arc<Cell>);

impl Used {
    pub(super) fn event(&self) -> EventId {
        self.0.event()
    }

    pub(super) fn is_done(&self) -> bool {
        self.0.done.load(Ordering::Relaxed)
    }

    pub(super) fn set_done(&self, done: bool) {
        self.0.done.store(done, Ordering::Relaxed);
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        // Whoever sees that it is the only user is: only a user makes another.
        if Arc::strong_count(&self.0) == SOLE {
            // What the others did comes before what the next recording does.
            fence(Ordering::Acquire);
            self.0.put();
        }
    }
}

/// All events of a pool.
#[derive(Debug)]
pub(super) struct Cells {
    /// Those that have an event, and some that have none yet.
    cells: Vec<Arc<Cell>>,
    len: usize,
    /// Those put back since the list was taken last.
    free: Arc<AtomicU32>,
    /// The first of those that the pool has: the rest of the list it took.
    mine: u32,
    /// Where it is looked for one that is on no list.
    at: usize,
}

impl Cells {
    pub(super) fn new() -> Cells {
        let free = Arc::new(AtomicU32::new(NONE));
        Cells { cells: Vec::new(), len: 0, free, mine: NONE, at: 0 }
    }

    /// How many events there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// One that nobody uses; in constant time.
    pub(super) fn take(&mut self) -> Option<Vacant> {
        if self.mine == NONE {
            self.mine = self.free.swap(NONE, Ordering::Acquire);
        }
        if self.mine == NONE {
            self.look_for_unlisted();
        }
        let cell = self.cells.get(self.mine as usize)?;
        self.mine = cell.next.load(Ordering::Relaxed);
        cell.next.store(UNLISTED, Ordering::Relaxed);
        Some(Vacant(Arc::clone(cell)))
    }

    /// Are there so many that nobody uses? Those put back since are looked through once each.
    pub(super) fn has(&mut self, count: usize) -> bool {
        let mut last = NONE;
        let mut found = self.walk(self.mine, count, &mut last);
        if found < count {
            // The list put back since comes in front of the rest of the one before.
            let first = self.free.swap(NONE, Ordering::Acquire);
            found += self.walk(first, usize::MAX, &mut last);
            if first != NONE {
                self.cells[last as usize].next.store(self.mine, Ordering::Relaxed);
                self.mine = first;
            }
        }
        found >= count
    }

    /// How many cells lie on a list, at most `max`, and which is the `last` of those.
    fn walk(&self, first: u32, max: usize, last: &mut u32) -> usize {
        let (mut at, mut found) = (first, 0);
        while found < max && at != NONE {
            *last = at;
            at = self.cells[at as usize].next.load(Ordering::Relaxed);
            found += 1;
        }
        found
    }

    fn look_for_unlisted(&mut self) {
        for _ in 0..LOOKS_MAX.min(self.len) {
            self.at = (self.at + 1) % self.len;
            let cell = &self.cells[self.at];
            if Arc::strong_count(cell) != 1 {
                continue;
            }
            // What its users did is seen from here on; so whether one of them put it on the list is
            // asked only now.
            fence(Ordering::Acquire);
            if cell.next.load(Ordering::Relaxed) == UNLISTED {
                cell.next.store(NONE, Ordering::Relaxed);
                self.mine = cell.number;
                return;
            }
        }
    }

    /// A cell for an event that was just made.
    pub(super) fn add(&mut self, event: EventId) -> Vacant {
        if self.len == self.cells.len() {
            self.cells.extend((self.len..self.len + CHUNK).map(|number| {
                Arc::new(Cell {
                    event: [0; 3].map(AtomicU32::new),
                    done: AtomicBool::new(false),
                    next: AtomicU32::new(UNLISTED),
                    number: number as u32,
                    free: Arc::clone(&self.free),
                })
            }));
        }
        let cell = &self.cells[self.len];
        self.len += 1;
        let Key { owner, index, generation } = event.0;
        for (word, value) in cell.event.iter().zip([owner, index, generation]) {
            word.store(value, Ordering::Relaxed);
        }
        Vacant(Arc::clone(cell))
    }

    /// Gives all events up, in use or not; users that are left put theirs on a list nobody reads.
    pub(super) fn drain(&mut self) -> Vec<EventId> {
        let Cells { cells, len, .. } = std::mem::replace(self, Cells::new());
        cells[..len].iter().map(|cell| cell.event()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::Key;

    fn event(index: u32) -> EventId {
        EventId(Key { owner: 1, index, generation: 0 })
    }

    #[test]
    fn an_event_is_free_again_only_when_its_last_user_is_gone() {
        let mut cells = Cells::new();
        let first = cells.add(event(0)).into_used();
        let second = first.clone();
        drop(first);
        assert!(cells.take().is_none());
        drop(second);
        let again = cells.take().unwrap();
        assert_eq!((again.event(), cells.len()), (event(0), 1));
        assert!(cells.take().is_none(), "it is with the pool now");
        again.put_back();
        assert!(cells.take().is_some());
    }

    #[test]
    fn those_that_nobody_uses_are_counted_and_none_is_lost_by_it() {
        let mut cells = Cells::new();
        assert!(cells.has(0) && !cells.has(1));
        let all: Vec<Used> = (0..5).map(|nth| cells.add(event(nth)).into_used()).collect();
        assert!(!cells.has(1));
        let mut kept = Vec::new();
        for (nth, used) in all.into_iter().enumerate() {
            drop(used);
            assert!(cells.has(nth + 1 - kept.len()) && !cells.has(nth + 2 - kept.len()));
            if nth == 2 {
                kept.extend(cells.take());
            }
        }
        kept.extend(std::iter::from_fn(|| cells.take()));
        let mut numbers: Vec<u32> = kept.iter().map(|vacant| vacant.event().0.index).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn users_on_many_threads_lose_no_event_and_free_none_twice() {
        const COUNT: u32 = 200;
        let mut cells = Cells::new();
        let mut all: Vec<Vacant> = (0..COUNT).map(|nth| cells.add(event(nth))).collect();
        for _ in 0..50 {
            let used: Vec<Used> = all.drain(..).map(Vacant::into_used).collect();
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    let mine = used.clone();
                    scope.spawn(move || drop(mine));
                }
                // Taken while others put some on.
                drop(used);
                while all.len() < COUNT as usize / 2 {
                    cells.has(COUNT as usize);
                    all.extend(cells.take());
                }
            });
            // Those that no user saw itself the last of are looked for a few at a time.
            for _ in 0..2 * COUNT {
                all.extend(cells.take());
            }
            let mut numbers: Vec<u32> = all.iter().map(|vacant| vacant.event().0.index).collect();
            numbers.sort_unstable();
            assert_eq!(numbers, (0..COUNT).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_user_left_behind_by_its_pool_does_no_harm() {
        let mut cells = Cells::new();
        let left = cells.add(event(7)).into_used();
        assert_eq!(cells.drain(), [event(7)]);
        assert_eq!(cells.len(), 0);
        drop(left);
        assert!(cells.take().is_none(), "what is destroyed is not lent");
    }
}
