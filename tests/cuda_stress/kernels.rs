//! The kernel of the stress tests that holds a stream.

use lightering::Result;
use lightering::backend::{Cost, Grid, HostArgs, Kernel};

const HOLD: Option<&str> = Some(include_str!("../cuda_device/kernels.ptx"));

pub(crate) static SPIN: Kernel =
    Kernel { name: "spin", ptx: HOLD, host: Some(host_spin), cost: Cost::of_bytes };

pub(crate) const ONE_THREAD: Grid = Grid::row(1, 1);

/// There the schedule holds streams.
fn host_spin(_: &Grid, _: &mut HostArgs<'_>) -> Result<()> {
    Ok(())
}
