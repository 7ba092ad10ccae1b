//! Where the pieces of an arena lie: the first is small, so that it is usable soon, and each is
//! twice as long as the one before it up to the longest, so that registrations stay few.
//!
//! What it is not: it registers nothing. Every function here is arithmetic on offsets.
//!
//! Invariant: pieces lie side by side, each a whole number of pages, none longer than allowed.
//!
//! ```text
//!   | 64M | 128M  |   256M     |         512M           |      1G       |      1G       | ..
//!   0     1       2            3                        4 = doublings   5
//! ```
//!
//! The arena uses it.

use super::super::class::{GRAIN, STEP};
use crate::error::{Error, Misuse, Result};
use crate::unit::Bytes;

/// Lengths of an arena's pieces; the arena's end cuts the last one.
#[derive(Clone, Copy, Debug)]
pub(in crate::pinned) struct Pieces {
    first: u64,
    doublings: u32,
}

impl Pieces {
    /// Pieces from about `first` to at most `max` bytes.
    ///
    /// # Errors
    /// `Usage(BadValue)` where `max` is less than a page.
    pub(in crate::pinned) fn new(first: Bytes, max: Bytes) -> Result<Pieces> {
        // Whole huge pages, where a registration may be that long.
        let whole = |len: u64| len / unit(len) * unit(len);
        let max = whole(max.get());
        if max == 0 {
            return Err(Error::usage(Misuse::BadValue, "pin")
                .bytes(Bytes(max))
                .detail("a registration must hold at least 4 KiB"));
        }
        let first = whole(first.get().max(GRAIN).min(max));
        Ok(Pieces { first, doublings: (max / first).ilog2() })
    }

    /// Offset at which a piece starts, and the one before it ends.
    pub(in crate::pinned) fn start(&self, nth: usize) -> u64 {
        let nth = nth as u64;
        let doubled = nth.min(u64::from(self.doublings));
        let rest = (nth - doubled).saturating_mul(self.first << self.doublings);
        (self.first * ((1 << doubled) - 1)).saturating_add(rest)
    }

    /// The piece that an offset lies in.
    pub(in crate::pinned) fn of(&self, offset: u64) -> usize {
        let doubled = self.start(self.doublings as usize);
        if offset < doubled {
            return (offset / self.first + 1).ilog2() as usize;
        }
        self.doublings as usize + ((offset - doubled) / (self.first << self.doublings)) as usize
    }

    /// How many pieces `len` bytes take.
    pub(in crate::pinned) fn count(&self, len: u64) -> usize {
        len.checked_sub(1).map_or(0, |last| self.of(last) + 1)
    }
}

fn unit(len: u64) -> u64 {
    if len >= STEP { STEP } else { GRAIN }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_side_by_side_and_none_is_longer_than_allowed() {
        for (first, max, lens) in [
            (Bytes::mib(64), Bytes::gib(1), vec![64u64 << 20, 128 << 20, 256 << 20, 512 << 20]),
            (Bytes::mib(64), Bytes::mib(300), vec![64 << 20, 128 << 20, 256 << 20, 256 << 20]),
            (Bytes::mib(64), Bytes::kib(24), vec![24 << 10; 4]),
            (Bytes(1), Bytes(10_000), vec![4096, 8192, 8192]),
            (Bytes::gib(1), Bytes::MAX, vec![1 << 30, 2 << 30]),
        ] {
            let pieces = Pieces::new(first, max).unwrap();
            let mut at = 0;
            for (nth, len) in lens.into_iter().enumerate() {
                assert_eq!(pieces.start(nth), at, "{first} {max} {nth}");
                assert!(len <= max.get());
                assert_eq!((pieces.of(at), pieces.of(at + len - 1)), (nth, nth));
                assert_eq!((pieces.count(at), pieces.count(at + 1)), (nth, nth + 1));
                at += len;
            }
        }
        assert!(Pieces::new(Bytes::mib(1), Bytes(4095)).is_err());
    }

    #[test]
    fn thirty_two_gibibytes_take_a_few_dozen_registrations() {
        let pieces = Pieces::new(Bytes::mib(64), Bytes::gib(1)).unwrap();
        assert_eq!(pieces.count(32 << 30), 36);
    }
}
