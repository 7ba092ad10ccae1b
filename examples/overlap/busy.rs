//! A kernel that computes for as long as it is told to, and touches hardly any memory.
//!
//! What it is not: useful. Its numbers are those of a linear congruential generator, so that no
//! compiler can leave it out and any device can be checked against another.
//!
//! Invariant: its time is proportional to its rounds, its result a function of them.
//!
//! ```text
//!   number -> number * FACTOR + SHIFT -> ...     rounds times, each thread its own number
//! ```
//!
//! `rig` runs it.

use lightering::Result;
use lightering::backend::{Arg, Cost, Grid, HostArgs, Kernel, Work};

/// Threads of the busy kernel: enough for every device of today.
pub(crate) const THREADS: u64 = 1 << 18;
/// Each number goes `rounds` steps of a linear congruential generator further.
pub(crate) static BUSY: Kernel = Kernel {
    name: "busy",
    ptx: Some(include_str!("../../kernels/ptx/overlap.ptx")),
    host: Some(|_, args| busy_host(args)),
    cost: |_, args| {
        let rounds = match args {
            [_, Arg::U32(rounds)] => f64::from(*rounds),
            _ => 0.0,
        };
        Cost { flops: 2.0 * rounds * THREADS as f64, bytes: 0.0, work: Work::Vector }
    },
};

const FACTOR: u32 = 1_664_525;
const SHIFT: u32 = 1_013_904_223;

/// One block for each 256 numbers.
pub(crate) const GRID: Grid = Grid::row((THREADS / 256) as u32, 256);

/// The device takes every step; here `rounds` steps are put together to one, with the same result.
fn busy_host(args: &mut HostArgs<'_>) -> Result<()> {
    let (numbers, rounds) = (args.write::<u32>(0)?, args.u32(1)?);
    let (mut factor, mut shift) = (1u32, 0u32);
    let (mut power, mut power_shift) = (FACTOR, SHIFT);
    for bit in 0..u32::BITS {
        if rounds >> bit & 1 == 1 {
            factor = factor.wrapping_mul(power);
            shift = shift.wrapping_mul(power).wrapping_add(power_shift);
        }
        power_shift = power_shift.wrapping_mul(power).wrapping_add(power_shift);
        power = power.wrapping_mul(power);
    }
    for number in numbers {
        *number = number.wrapping_mul(factor).wrapping_add(shift);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use lightering::backend::kernel::HostArg;

    #[test]
    fn many_rounds_at_once_are_that_many_rounds() {
        for rounds in [0u32, 1, 2, 7, 1000] {
            let start = [0u32, 1, 0xdead_beef];
            let mut at_once = start;
            let args = vec![
                HostArg::Write(bytemuck::cast_slice_mut(&mut at_once)),
                HostArg::Number(Arg::U32(rounds)),
            ];
            busy_host(&mut HostArgs::new(args)).unwrap();
            for (number, got) in start.into_iter().zip(at_once) {
                let step = |x: u32, _| x.wrapping_mul(FACTOR).wrapping_add(SHIFT);
                assert_eq!(got, (0..rounds).fold(number, step));
            }
        }
    }
}
