//! The parameters' first numbers, and Adam's update of all of them at once.
//!
//! What it is not: it knows no layers. Parameters lie in one run, and so do their gradients.
//!
//! Invariant: number `i` of a fill depends on the seed and `i` alone, so any device fills alike.
//!
//! ```text
//!   fill   w[i] = bound * uniform(seed, i)
//!   adam   m, v: running means of g and g^2        w -= rate * m' / (sqrt(v') + epsilon)
//! ```
//!
//! `model` uses it.

use super::PTX;
use super::tally::mixed;
use crate::queue::{Queue, length, vectors_for};
use crate::shape::Shape;
use lightering::backend::{Arg, Cost, HostArgs, Kernel};
use lightering::{DeviceRange, Result};

const DECAY_MEAN: f32 = 0.9;
const DECAY_SQUARE: f32 = 0.98;
/// The step's size, over the width: a wider row adds up more numbers that each took the step.
const RATE: f32 = 1.5;
const WARM_STEPS: u64 = 4;
const EPSILON: f32 = 1e-9;

pub(crate) static FILL: Kernel = Kernel {
    name: "fill",
    ptx: Some(PTX),
    host: Some(|_, args| host_fill(args)),
    cost: Cost::of_bytes,
};

pub(crate) static ADAM: Kernel = Kernel {
    name: "adam",
    ptx: Some(PTX),
    host: Some(|_, args| host_adam(args)),
    cost: Cost::of_bytes,
};

/// Enqueues a fill with numbers between `-bound` and `bound`.
pub(crate) fn fill(queue: &mut Queue<'_>, at: DeviceRange, seed: u64, bound: f32) -> Result<()> {
    let args = [Arg::Write(at), Arg::U64(seed), Arg::F32(bound), length(at)];
    queue.run(&FILL, vectors_for(at), &args)
}

/// Where the parameters and all that belongs to them lie, as runs of equally many numbers. The
/// moments are in single precision on every device. bf16 weights are rounded up or down by a chance
/// that place and step fix: of steps smaller than half a weight's last bit, none would be left.
#[derive(Clone, Copy)]
pub(crate) struct State {
    pub(crate) weights: DeviceRange,
    pub(crate) grads: DeviceRange,
    pub(crate) mean: DeviceRange,
    pub(crate) square: DeviceRange,
}

/// Enqueues the update of step `step`, counted from 0.
pub(crate) fn adam(queue: &mut Queue<'_>, shape: &Shape, state: &State, step: u64) -> Result<()> {
    let power = i32::try_from(step + 1).unwrap_or(i32::MAX);
    let warm = ((step + 1) as f32 / WARM_STEPS as f32).min(1.0);
    let rate = RATE * warm / shape.hidden as f32;
    let args = [
        Arg::Read(state.grads),
        Arg::Update(state.weights),
        Arg::Update(state.mean),
        Arg::Update(state.square),
        Arg::F32(rate / (1.0 - DECAY_MEAN.powi(power))),
        Arg::F32(1.0 / (1.0 - DECAY_SQUARE.powi(power))),
        length(state.grads),
        Arg::U64(step),
    ];
    queue.run(&ADAM, vectors_for(state.grads), &args)
}

/// A number between -1 and 1.
pub(crate) fn uniform(seed: u64, index: u64) -> f32 {
    let bits = mixed(seed ^ mixed(index)) >> 40;
    // 24 bits fit a single-precision number exactly.
    bits as f32 / (1u32 << 23) as f32 - 1.0
}

fn host_fill(args: &mut HostArgs<'_>) -> Result<()> {
    let to = args.write::<f32>(0)?;
    let (seed, bound) = (args.u64(1)?, args.f32(2)?);
    for (index, to) in to.iter_mut().enumerate() {
        // Zero has no sign, so that it is zero for whatever reads the bytes.
        *to = bound * uniform(seed, index as u64) + 0.0;
    }
    Ok(())
}

fn host_adam(args: &mut HostArgs<'_>) -> Result<()> {
    let grads = args.read::<f32>(0)?;
    let (weights, mean) = (args.write::<f32>(1)?, args.write::<f32>(2)?);
    let square = args.write::<f32>(3)?;
    let (rate, correction) = (args.f32(4)?, args.f32(5)?);
    for (((w, m), v), g) in weights.iter_mut().zip(mean).zip(square).zip(grads) {
        *m = DECAY_MEAN * *m + (1.0 - DECAY_MEAN) * g;
        *v = DECAY_SQUARE * *v + (1.0 - DECAY_SQUARE) * g * g;
        *w -= rate * *m / ((*v * correction).sqrt() + EPSILON);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fill_is_spread_evenly_and_the_same_each_time() {
        let numbers: Vec<f32> = (0..4096).map(|i| uniform(7, i)).collect();
        assert!(numbers.iter().all(|x| (-1.0..=1.0).contains(x)));
        let mean = numbers.iter().sum::<f32>() / 4096.0;
        let square = numbers.iter().map(|x| x * x).sum::<f32>() / 4096.0;
        assert!(mean.abs() < 0.05 && (square - 1.0 / 3.0).abs() < 0.02, "{mean} {square}");
        assert_eq!(uniform(7, 5).to_bits(), numbers[5].to_bits());
        assert_ne!(uniform(8, 5), numbers[5]);
    }
}
