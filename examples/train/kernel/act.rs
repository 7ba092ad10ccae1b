//! The squared ReLU between a layer's two products, forward and backward.
//!
//! What it is not: it needs no result of the forward but the product's own.
//!
//! Invariant: each number depends on the numbers at its own place alone.
//!
//! ```text
//!   act       a = max(u, 0)^2                        and y = x, for the next product to add to
//!   act_back  u -> a = max(u, 0)^2    d -> 2 max(u, 0) d        (a is made anew)
//! ```
//!
//! `model` uses it.

use super::PTX;
use crate::queue::{Queue, length, vectors_for};
use lightering::backend::{Arg, Cost, HostArgs, Kernel};
use lightering::{DeviceRange, Result};

pub(crate) static ACT: Kernel =
    Kernel { name: "act", ptx: Some(PTX), host: Some(|_, args| host(args)), cost: Cost::of_bytes };

pub(crate) static ACT_BACK: Kernel = Kernel {
    name: "act_back",
    ptx: Some(PTX),
    host: Some(|_, args| host_back(args)),
    cost: Cost::of_bytes,
};

/// Enqueues `a = max(u, 0)^2` and the copy `y = x`.
pub(crate) fn act(
    queue: &mut Queue<'_>,
    u: DeviceRange,
    x: DeviceRange,
    a: DeviceRange,
    y: DeviceRange,
) -> Result<()> {
    let args = [Arg::Read(u), Arg::Read(x), Arg::Write(a), Arg::Write(y), length(u), length(x)];
    queue.run(&ACT, vectors_for(u), &args)
}

/// Enqueues `u -> max(u, 0)^2` and `d -> 2 max(u, 0) d`, with the `u` of before.
pub(crate) fn act_back(queue: &mut Queue<'_>, u: DeviceRange, d: DeviceRange) -> Result<()> {
    queue.run(&ACT_BACK, vectors_for(u), &[Arg::Update(u), Arg::Update(d), length(u)])
}

fn host(args: &mut HostArgs<'_>) -> Result<()> {
    let (u, x) = (args.read::<f32>(0)?, args.read::<f32>(1)?);
    let (a, y) = (args.write::<f32>(2)?, args.write::<f32>(3)?);
    for (a, u) in a.iter_mut().zip(u) {
        let positive = u.max(0.0);
        *a = positive * positive;
    }
    y.copy_from_slice(x);
    Ok(())
}

fn host_back(args: &mut HostArgs<'_>) -> Result<()> {
    let (u, d) = (args.write::<f32>(0)?, args.write::<f32>(1)?);
    for (u, d) in u.iter_mut().zip(d) {
        let positive = u.max(0.0);
        *u = positive * positive;
        *d *= 2.0 * positive;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::bench::{noise, read, run, write};

    #[test]
    fn the_derivative_is_that_of_the_forward() {
        let (u, x) = (noise(1, 64), noise(2, 16));
        let at = |shift: f32| {
            let moved: Vec<f32> = u.iter().map(|u| u + shift).collect();
            let (mut a, mut y) = (vec![0.0f32; 64], vec![0.0f32; 16]);
            run(&ACT, vec![read(&moved), read(&x), write(&mut a), write(&mut y)]);
            assert_eq!(x, y);
            a
        };
        let (mut again, mut d) = (u.clone(), vec![1.0f32; 64]);
        run(&ACT_BACK, vec![write(&mut again), write(&mut d)]);
        assert_eq!(again, at(0.0));
        for ((high, low), d) in at(1e-3).iter().zip(at(-1e-3)).zip(&d) {
            assert!(((high - low) / 2e-3 - d).abs() < 2e-3);
        }
    }
}
