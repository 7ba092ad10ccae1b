//! The pattern's kernels, in a form for each device; word `i` is the one of `support::fill`.

use crate::support::{fill, mixed};
use lightering::backend::{Arg, Cost, Grid, HostArgs, Kernel};
use lightering::{DeviceRange, Result};

const PTX: Option<&str> = Some(include_str!("kernels.ptx"));

pub(crate) static FILL: Kernel =
    Kernel { name: "fill_pattern", ptx: PTX, host: Some(host_fill), cost: Cost::of_bytes };
pub(crate) static CHECK: Kernel =
    Kernel { name: "check_pattern", ptx: PTX, host: Some(host_check), cost: Cost::of_bytes };
pub(crate) static SPIN: Kernel =
    Kernel { name: "spin", ptx: PTX, host: Some(host_spin), cost: Cost::of_bytes };

pub(crate) const GRID: Grid = Grid::row(1024, 256);
pub(crate) const ONE_THREAD: Grid = Grid::row(1, 1);

/// Whole words only.
pub(crate) fn fill_args(to: DeviceRange, seed: u64) -> [Arg; 3] {
    assert!(to.len().0.is_multiple_of(8), "the pattern is one of words");
    [Arg::Write(to), Arg::U64(seed), Arg::U64(to.len().0)]
}

/// Adds to the word at `bad` how many of the words differ.
pub(crate) fn check_args(from: DeviceRange, bad: DeviceRange, seed: u64) -> [Arg; 4] {
    assert!(from.len().0.is_multiple_of(8), "the pattern is one of words");
    [Arg::Read(from), Arg::Update(bad), Arg::U64(seed), Arg::U64(from.len().0)]
}

fn host_fill(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let seed = args.u64(1)?;
    fill(args.write::<u8>(0)?, seed);
    Ok(())
}

fn host_check(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let (words, seed) = (args.read::<u64>(0)?, args.u64(2)?);
    let places = words.iter().zip(0..);
    let wrong = places.filter(|(word, place)| **word != mixed(seed, *place)).count();
    args.write::<u64>(1)?[0] += wrong as u64;
    Ok(())
}

/// There the schedule holds streams.
fn host_spin(_: &Grid, _: &mut HostArgs<'_>) -> Result<()> {
    Ok(())
}
