//! Kernels of the stress tests, in a form for each device: the crate's pattern (`kernels/`), and
//! one that holds a stream.

use lightering::backend::{Arg, Cost, Grid, HostArgs, Kernel};
use lightering::{DeviceRange, Result};

const PATTERN: Option<&str> = Some(include_str!("../../kernels/ptx/lightering.ptx"));
const HOLD: Option<&str> = Some(include_str!("../cuda_device/kernels.ptx"));

pub(crate) static FILL: Kernel =
    Kernel { name: "fill_pattern", ptx: PATTERN, host: Some(host_fill), cost: Cost::of_bytes };
pub(crate) static CHECK: Kernel =
    Kernel { name: "check_pattern", ptx: PATTERN, host: Some(host_check), cost: Cost::of_bytes };
pub(crate) static SPIN: Kernel =
    Kernel { name: "spin", ptx: HOLD, host: Some(host_spin), cost: Cost::of_bytes };

/// The pattern's blocks have 256 threads, and each thread takes many words.
pub(crate) const GRID: Grid = Grid::row(1024, 256);
pub(crate) const ONE_THREAD: Grid = Grid::row(1, 1);

pub(crate) fn fill_args(to: DeviceRange, seed: u64) -> [Arg; 3] {
    [Arg::Write(to), Arg::U64(seed), Arg::U64(to.len().0)]
}

/// Adds to the word at `bad` how many of the words differ.
pub(crate) fn check_args(from: DeviceRange, bad: DeviceRange, seed: u64) -> [Arg; 4] {
    [Arg::Read(from), Arg::Update(bad), Arg::U64(seed), Arg::U64(from.len().0)]
}

fn mixed(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The bytes that belong at the places of word `index`.
fn wanted(seed: u64, index: usize) -> [u8; 8] {
    mixed(seed ^ mixed(index as u64)).to_le_bytes()
}

/// How many words of the pattern differ; the last one may be cut short.
pub(crate) fn words_wrong(bytes: &[u8], seed: u64) -> u64 {
    let words = bytes.chunks(8).enumerate();
    words.filter(|(index, word)| **word != wanted(seed, *index)[..word.len()]).count() as u64
}

fn host_fill(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let seed = args.u64(1)?;
    for (index, word) in args.write::<u8>(0)?.chunks_mut(8).enumerate() {
        word.copy_from_slice(&wanted(seed, index)[..word.len()]);
    }
    Ok(())
}

fn host_check(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let wrong = words_wrong(args.read::<u8>(0)?, args.u64(2)?);
    args.write::<u64>(1)?[0] += wrong;
    Ok(())
}

/// There the schedule holds streams.
fn host_spin(_: &Grid, _: &mut HostArgs<'_>) -> Result<()> {
    Ok(())
}
