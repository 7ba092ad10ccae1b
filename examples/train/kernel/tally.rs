//! A 64-bit hash of all gradients, and the step's loss, kept on the device.
//!
//! What it is not: cryptographic. It is there to show one changed bit, not to resist an attacker.
//!
//! Invariant: changing any one word changes the sum (`mixed` is a bijection), and the sum does not
//! depend on the order of its parts, so any number of threads gives the same.
//!
//! ```text
//!   checksum: parts[p] = sum over words i = p, p + parts, ... of mixed(word + i * odd)
//!   tally:    state = { mixed(old hash ^ sum of parts), mean of the tokens' losses as f64 }
//! ```
//!
//! `model` uses it.

use super::PTX;
use crate::queue::{Queue, length, number, threads_for};
use lightering::backend::{Arg, Cost, Grid, HostArgs, Kernel};
use lightering::{DeviceRange, Result};

/// The fewest partial sums of the hash. How many there are changes no bit of it.
const PARTS: u64 = 4096;
/// The most: a thread each, and enough of them to keep any device's memory busy.
const PARTS_MAX: u64 = 1 << 16;
/// Bytes of the state: the hash, then the loss.
pub(crate) const STATE_BYTES: u64 = 16;

const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

pub(crate) static CHECKSUM: Kernel = Kernel {
    name: "checksum",
    ptx: Some(PTX),
    host: Some(|_, args| host_checksum(args)),
    cost: Cost::of_bytes,
};

pub(crate) static TALLY: Kernel = Kernel {
    name: "tally",
    ptx: Some(PTX),
    host: Some(|_, args| host_tally(args)),
    cost: Cost::of_bytes,
};

/// Partial sums for the hash of so many bytes.
pub(crate) fn parts(bytes: u64) -> u64 {
    (bytes / 512).clamp(PARTS, PARTS_MAX).next_multiple_of(256)
}

/// Enqueues the hash's partial sums over `words`, whose length is a multiple of eight.
pub(crate) fn checksum(
    queue: &mut Queue<'_>,
    words: DeviceRange,
    parts: DeviceRange,
) -> Result<()> {
    let args = [Arg::Read(words), Arg::Write(parts), length(words)];
    queue.run(&CHECKSUM, threads_for(parts.len().0 / 8), &args)
}

/// Enqueues the step's entry in the state.
pub(crate) fn tally(
    queue: &mut Queue<'_>,
    parts: DeviceRange,
    losses: DeviceRange,
    state: DeviceRange,
) -> Result<()> {
    let (hashes, count) = (number(parts.len().0 / 8), number(losses.len().0 / 4));
    let args = [Arg::Read(parts), Arg::Read(losses), Arg::Update(state), hashes, count];
    queue.run(&TALLY, Grid::row(1, 256), &args)
}

/// A bijection of 64-bit words that leaves no bit where it was (the finish of SplitMix64).
pub(crate) fn mixed(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

fn host_checksum(args: &mut HostArgs<'_>) -> Result<()> {
    let words = args.read::<u64>(0)?;
    let parts = args.write::<u64>(1)?;
    parts.fill(0);
    let mut offset = ODD;
    for row in words.chunks(parts.len()) {
        for (part, word) in parts.iter_mut().zip(row) {
            *part = part.wrapping_add(mixed(word.wrapping_add(offset)));
            offset = offset.wrapping_add(ODD);
        }
    }
    Ok(())
}

fn host_tally(args: &mut HostArgs<'_>) -> Result<()> {
    let (parts, losses) = (args.read::<u64>(0)?, args.read::<f32>(1)?);
    let state = args.write::<u64>(2)?;
    let sum = parts.iter().fold(0u64, |sum, part| sum.wrapping_add(*part));
    let loss = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / losses.len() as f64;
    state[0] = mixed(state[0] ^ sum);
    state[1] = loss.to_bits();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::bench::{noise, read, run, write};

    fn hash(words: &[u64]) -> u64 {
        let (mut parts, mut state) = (vec![1u64; PARTS as usize], [0u64; 2]);
        run(&CHECKSUM, vec![read(words), write(&mut parts)]);
        run(&TALLY, vec![read(&parts), read(&[1.0f32, 2.0]), write(&mut state)]);
        assert_eq!(f64::from_bits(state[1]), 1.5);
        state[0]
    }

    #[test]
    fn one_changed_bit_changes_the_hash() {
        let mut words: Vec<u64> =
            (0..20_000).map(|i| u64::from(noise(i, 1)[0].to_bits())).collect();
        let before = hash(&words);
        for (index, bit) in [(0, 0), (4095, 63), (4096, 31), (19_999, 17)] {
            words[index] ^= 1 << bit;
            assert_ne!(hash(&words), before, "word {index}, bit {bit}");
            words[index] ^= 1 << bit;
        }
        assert_eq!(hash(&words), before);
        words.swap(3, 4 + PARTS as usize);
        assert_ne!(hash(&words), before, "two words changed places");
    }
}
