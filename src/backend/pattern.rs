//! A pattern that tells each byte's place, and its check, by kernels of every device.
//!
//! What it is not: a checksum. The check knows what should be there.
//!
//! Invariant: word `i` (eight bytes, little-endian; the last one may be cut) is a function of the
//! seed and `i` alone, so bytes that come back to the wrong place, or of an older filling, count.
//!
//! ```text
//!   fill(range, seed) .. bytes leave and come back .. check(range, bad, seed): bad += words wrong
//! ```
//!
//! Stress tests and examples may use it.

use super::{Arg, Backend, Cost, Grid, HostArgs, Kernel};
use crate::error::{Error, Misuse, Result};
use crate::unit::{DeviceRange, StreamId};

const PTX: &str = include_str!("../../kernels/ptx/lightering.ptx");
/// Bytes of the count that [`check`] adds to.
pub const COUNT_BYTES: u64 = 8;

/// Writes the pattern.
pub static FILL: Kernel = Kernel {
    name: "fill_pattern",
    ptx: Some(PTX),
    host: Some(|_, args| host_fill(args)),
    cost: Cost::of_bytes,
};

/// Counts the words that are not the pattern's.
pub static CHECK: Kernel = Kernel {
    name: "check_pattern",
    ptx: Some(PTX),
    host: Some(|_, args| host_check(args)),
    cost: Cost::of_bytes,
};

/// Enqueues the pattern of `seed` on all bytes of the range.
///
/// # Errors
/// `Usage(BadKernel)` for a range with a whole word that does not start at a multiple of eight;
/// those of [`Backend::launch`].
pub fn fill(backend: &mut dyn Backend, at: DeviceRange, seed: u64, on: StreamId) -> Result<()> {
    let args = [Arg::Write(at), Arg::U64(seed), Arg::U64(at.len().0)];
    backend.launch(&FILL, grid(at)?, &args, on)
}

/// Enqueues the comparison of all bytes of the range with the pattern of `seed`. How many words
/// differ is added to the 64-bit number in `bad`.
///
/// # Errors
/// As [`fill`]; also for a `bad` of another length.
pub fn check(
    backend: &mut dyn Backend,
    at: DeviceRange,
    bad: DeviceRange,
    seed: u64,
    on: StreamId,
) -> Result<()> {
    if bad.len().0 != COUNT_BYTES {
        return Err(refusal("the count has eight bytes"));
    }
    grid(bad)?;
    let args = [Arg::Read(at), Arg::Update(bad), Arg::U64(seed), Arg::U64(at.len().0)];
    backend.launch(&CHECK, grid(at)?, &args, on)
}

fn refusal(why: &'static str) -> Error {
    Error::usage(Misuse::BadKernel, "pattern").detail(why)
}

/// How many words of some bytes on the host are not the pattern's.
pub fn words_wrong(bytes: &[u8], seed: u64) -> u64 {
    let is_wrong = |(i, from): &(u64, &[u8])| **from != word(seed, *i).to_le_bytes()[..from.len()];
    (0..).zip(bytes.chunks(8)).filter(is_wrong).count() as u64
}

/// A thread for each word, in blocks of 256; past the most blocks each takes several.
fn grid(at: DeviceRange) -> Result<Grid> {
    if at.len().0 >= 8 && !at.at().0.is_multiple_of(8) {
        return Err(refusal("words that do not start at a multiple of eight"));
    }
    let blocks = at.len().0.div_ceil(8 * 256).clamp(1, 1 << 16);
    Ok(Grid::row(blocks as u32, 256))
}

/// The word at place `i`.
fn word(seed: u64, i: u64) -> u64 {
    mixed(seed ^ mixed(i))
}

/// A bijection of 64-bit words that leaves no bit where it was (the finish of SplitMix64).
fn mixed(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

fn host_fill(args: &mut HostArgs<'_>) -> Result<()> {
    let (to, seed) = (args.write::<u8>(0)?, args.u64(1)?);
    for (i, to) in (0..).zip(to.chunks_mut(8)) {
        to.copy_from_slice(&word(seed, i).to_le_bytes()[..to.len()]);
    }
    Ok(())
}

fn host_check(args: &mut HostArgs<'_>) -> Result<()> {
    let (from, seed) = (args.read::<u8>(0)?, args.u64(2)?);
    let bad = args.write::<u64>(1)?;
    let count = words_wrong(from, seed);
    bad.iter_mut().for_each(|bad| *bad += count);
    Ok(())
}
