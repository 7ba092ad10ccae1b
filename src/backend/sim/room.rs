//! Which addresses of a simulated device are taken: a stream-ordered allocator of offsets.
//!
//! What it is not: it touches no bytes and runs no op; it holds offsets only.
//!
//! Invariant: `live` and `gaps` together cover the device's addresses exactly once. What is used of
//! them and what is mapped elsewhere is no more than the device has. A gap that waits for its free
//! to run is lent only to the stream on which that free was enqueued.
//!
//! ```text
//!   | live | gap after (stream 3, op 17) | live | gap |       take(stream 3) may use both gaps,
//!                                                             take(stream 5) only the second
//! ```
//!
//! The simulated device may use it. A freed range is handed out again as soon as the order of
//! streams allows, because that is what shows a missing wait.

use super::queue::Mark;
use std::collections::BTreeMap;

/// Every allocation starts at a multiple of this, and takes a multiple of it.
pub(super) const GRAIN_BYTES: u64 = 256;

/// One allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// Bytes asked for.
    pub(super) len: u64,
    /// Who took it.
    pub(super) user: usize,
}

#[derive(Clone, Copy, Debug)]
struct Gap {
    at: u64,
    len: u64,
    /// The free that must have run before others may have it.
    after: Option<Mark>,
    /// At most so many of its bytes take memory of the host's: they were somebody's once.
    warm: u64,
}

#[derive(Debug)]
pub(super) struct Room {
    size: u64,
    used: u64,
    /// Of those, bytes of memory that has no place here: it is mapped elsewhere, if at all.
    apart: u64,
    live: BTreeMap<u64, Block>,
    /// By address.
    gaps: Vec<Gap>,
}

/// The bytes an allocation of `len` takes.
pub(super) fn rounded(len: u64) -> u64 {
    len.next_multiple_of(GRAIN_BYTES)
}

impl Room {
    pub(super) fn new(size: u64) -> Room {
        let size = size / GRAIN_BYTES * GRAIN_BYTES;
        let gaps = vec![Gap { at: 0, len: size, after: None, warm: 0 }];
        Room { size, used: 0, apart: 0, live: BTreeMap::new(), gaps }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes not taken, as enqueued.
    pub(super) fn free(&self) -> u64 {
        self.size - self.used
    }

    /// Takes the best-fitting gap that the stream `lane` may have; of equals the one whose free is
    /// still to run, then the lowest.
    pub(super) fn take(&mut self, block: Block, lane: Mark) -> Option<u64> {
        let len = rounded(block.len);
        if len > self.free() {
            return None;
        }
        let fits = |gap: &&Gap| gap.len >= len && gap.after.is_none_or(|mark| mark.same(lane));
        let best =
            self.gaps.iter().filter(fits).min_by_key(|gap| (gap.len, gap.after.is_none()))?;
        let at = best.at;
        let index = self.gaps.partition_point(|gap| gap.at < at);
        let gap = &mut self.gaps[index];
        gap.at += len;
        gap.len -= len;
        // Which of them were warm nobody knows: as many as may be are taken to be left.
        gap.warm = gap.warm.min(gap.len);
        if gap.len == 0 {
            self.gaps.remove(index);
        }
        self.live.insert(at, block);
        self.used += len;
        Some(at)
    }

    /// Takes memory that has no address yet. What waits for its free to run is not to be had.
    pub(super) fn take_apart(&mut self, len: u64) -> bool {
        let pending: u64 =
            self.gaps.iter().filter(|gap| gap.after.is_some()).map(|gap| gap.len).sum();
        let fits = len.saturating_add(pending) <= self.free();
        if fits {
            self.used += len;
            self.apart += len;
        }
        fits
    }

    /// Gives such memory back.
    pub(super) fn give_apart(&mut self, len: u64) {
        assert!(len <= self.apart, "memory is given back once");
        self.used -= len;
        self.apart -= len;
    }

    /// Gives the allocation at `at` back, for others once `after` has run.
    pub(super) fn give(&mut self, at: u64, after: Mark) -> Option<Block> {
        let block = self.live.remove(&at)?;
        let len = rounded(block.len);
        self.used -= len;
        let index = self.gaps.partition_point(|gap| gap.at < at);
        self.gaps.insert(index, Gap { at, len, after: Some(after), warm: len });
        self.merge();
        Some(block)
    }

    /// Opens the gaps whose free has run to everybody.
    pub(super) fn settle(&mut self, done: impl Fn(Mark) -> bool) {
        let mut opened = false;
        for gap in &mut self.gaps {
            if gap.after.is_some_and(&done) {
                gap.after = None;
                opened = true;
            }
        }
        if opened {
            self.merge();
        }
    }

    /// Where more than `warm_max` bytes that are open to everybody take memory of the host's: tells
    /// `give_back` all places, from where on and how many bytes. They take none afterwards.
    pub(super) fn cool(&mut self, warm_max: u64, mut give_back: impl FnMut(u64, u64)) {
        let open = self.gaps.iter_mut().filter(|gap| gap.after.is_none() && gap.warm > 0);
        let warm: u64 = open.map(|gap| gap.warm).sum();
        if warm <= warm_max {
            return;
        }
        for gap in self.gaps.iter_mut().filter(|gap| gap.after.is_none() && gap.warm > 0) {
            give_back(gap.at, gap.len);
            gap.warm = 0;
        }
    }

    /// A free that is still to run, if any.
    pub(super) fn pending(&self) -> Option<Mark> {
        self.gaps.iter().find_map(|gap| gap.after)
    }

    /// The allocation at exactly `at`.
    pub(super) fn block(&self, at: u64) -> Option<Block> {
        self.live.get(&at).copied()
    }

    /// Do these bytes lie in one allocation?
    pub(super) fn holds(&self, at: u64, len: u64) -> bool {
        let before = self.live.range(..=at).next_back();
        before.is_some_and(|(start, block)| {
            at.checked_add(len).is_some_and(|end| end <= start + block.len)
        })
    }

    /// Where the allocation starts that an address lies in, and how long it is.
    pub(super) fn around(&self, at: u64) -> Option<(u64, u64)> {
        let (start, block) = self.live.range(..=at).next_back()?;
        (at < start + block.len).then_some((*start, block.len))
    }

    fn merge(&mut self) {
        self.gaps.dedup_by(|next, gap| {
            let alike = match (gap.after, next.after) {
                (None, None) => true,
                (Some(a), Some(b)) => a.same(b),
                _ => false,
            };
            let merged = alike && gap.at + gap.len == next.at;
            if merged {
                gap.len += next.len;
                gap.warm += next.warm;
                gap.after = gap.after.max(next.after);
            }
            merged
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::sim::schedule::Dice;

    fn mark(slot: u32, seq: u64) -> Mark {
        Mark { slot, uid: slot, seq }
    }

    fn block(len: u64) -> Block {
        Block { len, user: 0 }
    }

    fn covers_once(room: &Room) {
        let live = room.live.iter().map(|(at, block)| (*at, rounded(block.len)));
        let mut parts: Vec<_> = live.chain(room.gaps.iter().map(|gap| (gap.at, gap.len))).collect();
        parts.sort_unstable();
        let end = parts.iter().fold(0, |end, (at, len)| {
            assert_eq!(*at, end, "no hole and no overlap");
            assert!(*len > 0, "no empty part");
            at + len
        });
        assert_eq!(end, room.size);
        let taken: u64 = room.live.values().map(|block| rounded(block.len)).sum();
        assert_eq!(room.free(), room.size - taken);
    }

    #[test]
    fn live_ranges_and_gaps_cover_the_device_once() {
        let mut dice = Dice::new(3);
        let mut room = Room::new(64 * GRAIN_BYTES + 100);
        let mut live = Vec::new();
        for seq in 0..4_000 {
            let slot = dice.below(3) as u32;
            match dice.below(8) {
                0..4 => {
                    let taken = room.take(block(1 + dice.below(1_500) as u64), mark(slot, 0));
                    live.extend(taken);
                }
                4..7 if !live.is_empty() => {
                    let at = live.swap_remove(dice.below(live.len()));
                    assert!(room.give(at, mark(slot, seq)).is_some());
                    assert!(room.give(at, mark(slot, seq)).is_none(), "given back twice");
                }
                _ => room.settle(|mark| mark.seq + 20 < seq),
            }
            covers_once(&room);
        }
        for at in live {
            assert!(room.give(at, mark(0, 0)).is_some());
        }
        room.settle(|_| true);
        assert_eq!(room.gaps.len(), 1, "neighbours become one gap");
        assert_eq!(room.take(block(64 * GRAIN_BYTES), mark(9, 0)), Some(0));
    }

    #[test]
    fn a_gap_whose_free_is_still_to_run_is_kept_from_other_streams() {
        let mut room = Room::new(2 * GRAIN_BYTES);
        let at = room.take(block(1), mark(1, 0)).unwrap();
        room.give(at, mark(1, 5));
        let other = room.take(block(1), mark(2, 0)).unwrap();
        assert_ne!(other, at);
        assert_eq!(room.take(block(1), mark(2, 0)), None);
        assert_eq!(room.pending(), Some(mark(1, 5)));
        // The same slot under another stream is another stream.
        assert_eq!(room.take(block(1), Mark { slot: 1, uid: 7, seq: 0 }), None);
        assert_eq!(room.take(block(1), mark(1, 0)), Some(at));
    }
}
