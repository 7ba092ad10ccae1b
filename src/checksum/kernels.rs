//! The kernels that make sums, and what a sum is.
//!
//! What it is not: it holds no memory and knows no lanes.
//!
//! Invariant: the sum of some bytes is the same on every device and in every order of their words.
//!
//! ```text
//!   bytes   |w0 ......|w1 ......|w2 ..000|      words of eight bytes, the last one filled up
//!   sum  =  mixed(w0, 0) + mixed(w1, 1) + mixed(w2, 2)   modulo 2^64
//! ```
//!
//! Only [`crate::checksum`] launches them; others may take a host's sum with [`sum_of`].

use crate::backend::{Arg, Backend, Cost, Grid, HostArgs, Kernel};
use crate::error::{Error, Misuse, Result};
use crate::unit::{Bytes, DeviceRange, StreamId};

const PTX: &str = include_str!("../../kernels/ptx/checksum.ptx");

/// Sets sums of eight bytes each to zero: `[Write(sums), U64(how many bytes)]`.
pub static CLEAR: Kernel = Kernel {
    name: "lightering_clear",
    ptx: Some(PTX),
    host: Some(clear_host),
    cost: Cost::of_bytes,
};

/// Adds up bytes: `[Read(bytes), Update(sum), U64(how many bytes)]`. The bytes may lie at any
/// address; the sum was cleared before. See [`sum_of`] for what is added; the words may be added in
/// any order.
pub static CHECKSUM: Kernel = Kernel {
    name: "lightering_checksum",
    ptx: Some(PTX),
    host: Some(checksum_host),
    cost: Cost::of_bytes,
};

fn clear_host(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    args.write::<u64>(0)?.fill(0);
    Ok(())
}

fn checksum_host(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let bytes = args.read::<u8>(0)?;
    if args.u64(2)? != bytes.len() as u64 {
        return Err(Error::usage(Misuse::LengthMismatch, "checksum"));
    }
    let sum = args.write::<u64>(1)?;
    sum[0] = sum[0].wrapping_add(sum_of(bytes));
    Ok(())
}

/// The sum of some bytes: that of all mixed words of eight bytes, little end first, the last
/// one filled up with zeros. It wraps, so a device may add the words in any order.
pub fn sum_of(bytes: &[u8]) -> u64 {
    let (words, tail) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    let words = words.iter().chain((!tail.is_empty()).then_some(&last));
    let sum = |sum: u64, (index, word): (usize, &[u8; 8])| {
        sum.wrapping_add(mixed(u64::from_le_bytes(*word), index as u64))
    };
    words.enumerate().fold(0, sum)
}

/// A word and its place, mixed so that every bit of both moves every bit of the sum. For one place
/// no two words mix to the same, so a single wrong word is always found; several wrong ones go
/// unseen once in 2^64.
fn mixed(word: u64, index: u64) -> u64 {
    let mut x = word ^ index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 32)
}

/// Enqueues [`CLEAR`].
pub(super) fn clear(backend: &mut dyn Backend, sums: DeviceRange, on: StreamId) -> Result<()> {
    let args = [Arg::Write(sums), Arg::U64(sums.len().0)];
    backend.launch(&CLEAR, grid(sums.len()), &args, on)
}

/// Enqueues [`CHECKSUM`] of `bytes` into `sum`.
pub(super) fn checksum(
    backend: &mut dyn Backend,
    bytes: DeviceRange,
    sum: DeviceRange,
    on: StreamId,
) -> Result<()> {
    let args = [Arg::Read(bytes), Arg::Update(sum), Arg::U64(bytes.len().0)];
    backend.launch(&CHECKSUM, grid(bytes.len()), &args, on)
}

/// Threads that go over the words in strides; enough to fill a device, few enough that each one's
/// share outweighs its one addition to the sum.
fn grid(len: Bytes) -> Grid {
    const THREADS: u32 = 256;
    const WORDS_EACH: u64 = 16;
    const BLOCKS_MAX: u64 = 1024;
    let words = len.0.div_ceil(8);
    let blocks = words.div_ceil(u64::from(THREADS) * WORDS_EACH).clamp(1, BLOCKS_MAX);
    Grid::row(blocks as u32, THREADS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_bit_a_lost_tail_and_words_out_of_place_change_the_sum() {
        let bytes: Vec<u8> = (0..203u32).map(|n| (n * 7) as u8).collect();
        let right = sum_of(&bytes);
        for bit in 0..bytes.len() * 8 {
            let mut wrong = bytes.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(sum_of(&wrong), right, "bit {bit}");
        }
        for len in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[len..].fill(0xa1);
            assert_ne!(sum_of(&wrong), right, "{len} bytes arrived");
        }
        let mut wrong = bytes.clone();
        wrong.rotate_left(8);
        assert_ne!(sum_of(&wrong), right);
        let mut wrong = bytes.clone();
        wrong[..16].rotate_left(8);
        assert_ne!(sum_of(&wrong), right);
    }

    #[test]
    fn a_run_of_equal_words_adds_up_by_place() {
        let sums: Vec<u64> = (1..64).map(|words| sum_of(&vec![0; words * 8])).collect();
        let mut unlike = sums.clone();
        unlike.sort_unstable();
        unlike.dedup();
        assert_eq!(unlike.len(), sums.len());
        assert_eq!(sum_of(&[]), 0);
        assert_eq!(sum_of(&[1, 2, 3]), sum_of(&[1, 2, 3, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn a_sum_is_the_same_as_another_program_computes_by_the_words_of_its_definition() {
        let bytes: Vec<u8> = (0..=255).chain([7]).collect();
        assert_eq!(sum_of(&[1, 2, 3]), 0x019e_469d_1bfd_69df);
        assert_eq!(sum_of(&bytes), 0x65ad_eab5_8f53_fbe6);
    }

    #[test]
    fn a_sum_in_pieces_added_in_any_order_is_the_same() {
        let bytes: Vec<u8> =
            (0..4096u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut words: Vec<(u64, u64)> = bytes
            .chunks(8)
            .enumerate()
            .map(|(index, word)| (index as u64, u64::from_le_bytes(word.try_into().unwrap())))
            .collect();
        words.reverse();
        words.rotate_left(100);
        let sum =
            words.iter().fold(0u64, |sum, (index, word)| sum.wrapping_add(mixed(*word, *index)));
        assert_eq!(sum, sum_of(&bytes));
    }

    #[test]
    fn the_grid_covers_a_byte_and_a_gigabyte() {
        assert_eq!(grid(Bytes(1)), Grid::row(1, 256));
        assert_eq!(grid(Bytes::gib(1)), Grid::row(1024, 256));
    }
}
