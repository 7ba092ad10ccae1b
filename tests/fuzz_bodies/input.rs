//! A fuzzer's bytes, taken one decision at a time.
//!
//! What it is not: a format. Any bytes are a whole program; after their end everything is zero.
//!
//! Invariant: a decision takes at least one byte while there are any, so every run ends.
//!
//! ```text
//!   [3, 0, 7, ..]  -->  byte() = 3, below(5) = 0, ..
//! ```
//!
//! The bodies beside it use it.

pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl Input<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let (first, rest) =
            self.0.split_first().map_or((0, self.0), |(first, rest)| (*first, rest));
        self.0 = rest;
        first
    }

    /// A number below `end`, which is at most 256.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end.max(1)
    }

    /// A number of 64 bits: small, near a power of two, near the end, or anything.
    pub(crate) fn number(&mut self) -> u64 {
        let shape = self.byte();
        let small = u64::from(self.byte());
        match shape % 4 {
            0 => small,
            1 => (1_u64 << (shape >> 2)).wrapping_add(small).wrapping_sub(128),
            2 => u64::MAX - small,
            _ => (0..7).fold(small, |number, _| number << 8 | u64::from(self.byte())),
        }
    }
}
