//! Size classes: how much room a request of some length gets, and where room is looked up.
//!
//! What it is not: it holds nothing. Every function here is arithmetic on lengths.
//!
//! Invariant: room is a multiple of 4 KiB, is never less than the request, and giving room the size
//! of a class returns it unchanged. The waste is at most one eighth of the request, or less than
//! 4 KiB where an eighth is smaller than that.
//!
//! ```text
//!   4K 8K .. 32K | 36K 40K 44K .. 64K | 72K 80K .. 128K | ... 16M | 18M 20M 22M ...
//!   every 4 KiB  | eight steps per doubling ............          | every 2 MiB
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

/// Everything starts and ends at a multiple of this: what direct file access needs at most.
pub(super) const GRAIN: u64 = 4 << 10;
/// From here on classes are [`STEP`] apart.
const LARGE: u64 = 16 << 20;
/// Distance of the large classes, and of arena sizes: one huge page.
pub(super) const STEP: u64 = 2 << 20;
/// The longest request: half of what a file offset counts, so that no sum of a few can wrap.
const LEN_MAX: u64 = 1 << 62;

/// Number of bins: every size up to [`LEN_MAX`] has one.
pub(super) const BINS: usize = 8 * (50 - 2) + 8;
/// Number of shelves: one per class up to [`LARGE`], and a ring for the classes above.
pub(super) const SHELVES: usize = SMALL_SHELVES + LARGE_SHELVES;
const SMALL_SHELVES: usize = 81;
const LARGE_SHELVES: usize = 128;

/// The room a request of `len` bytes gets; `None` for zero bytes and for more than 2^62.
pub(super) fn room(len: u64) -> Option<u64> {
    if len == 0 || len > LEN_MAX {
        return None;
    }
    if len > LARGE {
        return Some(len.next_multiple_of(STEP));
    }
    let grains = len.div_ceil(GRAIN);
    if grains < 8 {
        return Some(grains * GRAIN);
    }
    Some(grains.next_multiple_of(1 << (grains.ilog2() - 3)) * GRAIN)
}

/// The bin of a free range of `size` bytes: eight bins per doubling. All ranges of a later bin are
/// larger. Up to 16 MiB every range of the bin of a class has room for that class.
pub(super) fn bin(size: u64) -> usize {
    let grains = size / GRAIN;
    if grains < 8 {
        return grains as usize;
    }
    let doubling = grains.ilog2();
    (8 * (doubling - 2) + ((grains >> (doubling - 3)) & 7) as u32) as usize
}

/// The shelf of the blocks of one class. Two classes share one only where they differ by a multiple
/// of 256 MiB, so whoever looks for a size compares it too.
pub(super) fn shelf(room: u64) -> usize {
    if room <= LARGE {
        return bin(room);
    }
    SMALL_SHELVES + (room / STEP) as usize % LARGE_SHELVES
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths at and around every power of two and every eighth between, from `from` on.
    fn edges(from: u32) -> impl Iterator<Item = u64> {
        (from..62).flat_map(|n| {
            (0..8).flat_map(move |k| {
                let at = (1u64 << n) + k * (1 << n >> 3);
                [at - 1, at, at + 1]
            })
        })
    }

    #[test]
    fn no_request_wastes_more_than_an_eighth_or_a_page() {
        for len in edges(3).filter(|&len| len <= LEN_MAX) {
            let room = room(len).unwrap();
            assert!(room >= len && room.is_multiple_of(GRAIN), "{len} -> {room}");
            assert!(room - len <= (len / 8).max(GRAIN - 1), "{len} -> {room}");
            assert_eq!(super::room(room), Some(room), "the room of {len} is not a class");
        }
    }

    #[test]
    fn sizes_drawn_evenly_over_the_doublings_waste_less_than_a_twentieth() {
        // 16 KiB to 16 GiB: 20 doublings, 4,000 sizes in each.
        let mean = |from: u32, to: u32| {
            let sizes = (from * 4000..to * 4000).map(|i| (i as f64 / 4000.0).exp2() as u64);
            let waste: f64 = sizes.map(|len| room(len).unwrap() as f64 / len as f64 - 1.0).sum();
            waste / f64::from((to - from) * 4000)
        };
        assert!(mean(14, 34) < 0.05, "{}", mean(14, 34));
        assert!(mean(20, 34) < 0.03, "{}", mean(20, 34));
    }

    #[test]
    fn a_length_without_room_is_refused() {
        for len in [0, LEN_MAX + 1, i64::MAX as u64, u64::MAX] {
            assert_eq!(room(len), None);
        }
    }

    #[test]
    fn every_range_of_a_small_classs_bin_has_room_for_it() {
        for len in edges(12) {
            let Some(room) = room(len) else { continue };
            assert!(bin(room) < BINS && shelf(room) < SHELVES, "{room}");
            if room <= LARGE {
                assert!(room == GRAIN || bin(room - GRAIN) < bin(room), "{room}");
            }
            assert!(bin(room + GRAIN) >= bin(room));
        }
    }
}
