//! A hash of keys by which keys that were made one after another lie side by side.
//!
//! What it is not: one for keys that somebody chooses. Keys come from tables of this process.
//!
//! Invariant: a key's hash is its numbers' and nothing else's; of one table and generation, two
//! keys in a row have two hashes in a row.
//!
//! ```text
//!   Key { owner, index, generation } -> index in the low bits: the next key's place is next to it
//!   a table of busy events is then gone through in order, as its events are used
//! ```
//!
//! Everyone may use it, by way of [`crate::unit`].

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by ids.
pub type IdMap<Id, V> = HashMap<Id, V, BuildHasherDefault<NearHasher>>;

/// What a table's tag and generation are spread by: odd, and without a pattern.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
/// A table tells keys in one place apart by these bits.
const TOP: u64 = 0x7f << 57;

/// Hashes the three numbers of a key.
#[derive(Clone, Copy, Debug, Default)]
pub struct NearHasher {
    sum: u64,
    numbers: u32,
}

impl Hasher for NearHasher {
    fn write(&mut self, bytes: &[u8]) {
        // Keys have numbers alone; anything else is hashed all the same.
        for byte in bytes {
            self.sum = (self.sum ^ u64::from(*byte)).wrapping_mul(SPREAD);
        }
    }

    fn write_u32(&mut self, number: u32) {
        // The index is the second one.
        let weight = if self.numbers == 1 { 1 } else { SPREAD };
        self.sum = self.sum.wrapping_add(u64::from(number).wrapping_mul(weight));
        self.numbers += 1;
    }

    fn finish(&self) -> u64 {
        self.sum ^ (self.sum.wrapping_mul(SPREAD) & TOP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::{EventId, Key};
    use std::hash::BuildHasher;

    fn hash(index: u32, generation: u32) -> u64 {
        let key = EventId(Key { owner: 3, index, generation });
        BuildHasherDefault::<NearHasher>::default().hash_one(key)
    }

    #[test]
    fn keys_made_in_a_row_lie_in_a_row_and_are_told_apart() {
        let low = |hash: u64| hash & 0xffff_ffff;
        for index in 0..10_000 {
            assert_eq!(low(hash(index + 1, 0)), low(hash(index, 0)).wrapping_add(1) & 0xffff_ffff);
        }
        let mut all: Vec<u64> =
            (0..300).flat_map(|index| (0..30).map(move |nth| hash(index, nth))).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 9000);
        let tops = (0..1000).map(|index| hash(index, 0) >> 57);
        assert!(tops.collect::<std::collections::HashSet<_>>().len() > 100);
    }
}
