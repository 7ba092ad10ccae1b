//! A layer's norm and its causal mixing over tokens, forward and backward.
//!
//! What it is not: attention. Each channel sees its own last `TAPS` tokens, through weights of its
//! own; that is enough to learn a text's letters, and every step of it is a plain sum.
//!
//! Invariant: row `t` of the mixed result depends on rows `t - TAPS + 1 ..= t` alone.
//!
//! ```text
//!   inv[t] = 1 / rms(x[t])     z[t] = inv[t] x[t]      mixed[t] = sum over k of w[k] * z[t - k]
//!
//!   mix_back   d[t] += the gradient of mixed, brought back through mixing and norm
//!   mix_grad   w's gradient, summed over each of TILES runs of tokens     mix_sum   over the runs
//! ```
//!
//! `model` uses it.

use super::{MIX_PTX, dot, inverse_rms};
use crate::queue::{Queue, blocks_for, number, threads_for};
use crate::shape::{Shape, TAPS, TILES};
use lightering::backend::{Arg, Cost, Grid, HostArgs, Kernel};
use lightering::{DeviceRange, Result};

pub(crate) static NORM_MIX: Kernel = Kernel {
    name: "norm_mix",
    ptx: Some(MIX_PTX),
    host: Some(|_, args| host(args)),
    cost: Cost::of_bytes,
};

pub(crate) static MIX_BACK: Kernel = Kernel {
    name: "mix_back",
    ptx: Some(MIX_PTX),
    host: Some(|_, args| host_back(args)),
    cost: Cost::of_bytes,
};

pub(crate) static MIX_GRAD: Kernel = Kernel {
    name: "mix_grad",
    ptx: Some(MIX_PTX),
    host: Some(|_, args| host_grad(args)),
    cost: Cost::of_bytes,
};

pub(crate) static MIX_SUM: Kernel = Kernel {
    name: "mix_sum",
    ptx: Some(MIX_PTX),
    host: Some(|_, args| host_sum(args)),
    cost: Cost::of_bytes,
};

/// Tokens that a block of CUDA's form takes.
const A_BLOCK: u64 = 16;

/// What the backward reads of a layer's norm and mixing.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    /// The layer's input.
    pub(crate) x: DeviceRange,
    /// One over each row's root mean square, in single precision.
    pub(crate) inv: DeviceRange,
}

/// Enqueues the norm and the mixing of a layer.
pub(crate) fn norm_mix(
    queue: &mut Queue<'_>,
    shape: &Shape,
    source: Source,
    w: DeviceRange,
    mixed: DeviceRange,
) -> Result<()> {
    let args = [
        Arg::Read(source.x),
        Arg::Read(w),
        Arg::Write(source.inv),
        Arg::Write(mixed),
        number(shape.tokens),
        number(shape.hidden),
    ];
    queue.run(&NORM_MIX, blocks_for(shape.tokens.div_ceil(A_BLOCK)), &args)
}

/// Enqueues `d += ` the gradient of `mixed` brought back to the layer's input.
pub(crate) fn mix_back(
    queue: &mut Queue<'_>,
    shape: &Shape,
    source: Source,
    w: DeviceRange,
    mixed_d: DeviceRange,
    d: DeviceRange,
) -> Result<()> {
    let args = [
        Arg::Read(source.x),
        Arg::Read(w),
        Arg::Read(source.inv),
        Arg::Read(mixed_d),
        Arg::Update(d),
        number(shape.tokens),
        number(shape.hidden),
    ];
    queue.run(&MIX_BACK, blocks_for(shape.tokens.div_ceil(A_BLOCK)), &args)
}

/// Enqueues the partial sums of the weights' gradient: `TILES` times as many as there are weights.
pub(crate) fn mix_grad(
    queue: &mut Queue<'_>,
    shape: &Shape,
    source: Source,
    mixed_d: DeviceRange,
    partials: DeviceRange,
) -> Result<()> {
    let args = [
        Arg::Read(source.x),
        Arg::Read(source.inv),
        Arg::Read(mixed_d),
        Arg::Write(partials),
        number(shape.tokens),
        number(shape.hidden),
    ];
    // A thread for four channels of a run of tokens.
    let blocks = [shape.hidden.div_ceil(4 * 256) as u32, TILES as u32, 1];
    queue.run(&MIX_GRAD, Grid { blocks, ..Grid::row(1, 256) }, &args)
}

/// Enqueues the sums of all layers' partial sums.
pub(crate) fn mix_sum(
    queue: &mut Queue<'_>,
    shape: &Shape,
    partials: DeviceRange,
    grads: DeviceRange,
) -> Result<()> {
    let width = TAPS * shape.hidden;
    let args = [Arg::Read(partials), Arg::Write(grads), number(width), number(shape.layers)];
    queue.run(&MIX_SUM, threads_for(shape.layers * width), &args)
}

fn host(args: &mut HostArgs<'_>) -> Result<()> {
    let (x, w) = (args.read::<f32>(0)?, args.read::<f32>(1)?);
    let (inv, mixed) = (args.write::<f32>(2)?, args.write::<f32>(3)?);
    let hidden = args.u32(5)? as usize;
    let rows = x.chunks_exact(hidden);
    for (inv, row) in inv.iter_mut().zip(rows) {
        *inv = inverse_rms(row);
    }
    for (t, out) in mixed.chunks_exact_mut(hidden).enumerate() {
        out.fill(0.0);
        for (k, w) in w.chunks_exact(hidden).enumerate().take(t + 1) {
            let (row, inv) = (&x[(t - k) * hidden..][..hidden], inv[t - k]);
            for ((out, w), x) in out.iter_mut().zip(w).zip(row) {
                *out += w * (inv * x);
            }
        }
    }
    Ok(())
}

fn host_back(args: &mut HostArgs<'_>) -> Result<()> {
    let (x, w) = (args.read::<f32>(0)?, args.read::<f32>(1)?);
    let (inv, mixed_d) = (args.read::<f32>(2)?, args.read::<f32>(3)?);
    let d = args.write::<f32>(4)?;
    let (tokens, hidden) = (args.u32(5)? as usize, args.u32(6)? as usize);
    let mut z_d = vec![0.0f32; hidden];
    for (t, d) in d.chunks_exact_mut(hidden).enumerate() {
        let (row, inv) = (&x[t * hidden..][..hidden], inv[t]);
        z_d.fill(0.0);
        for (k, w) in w.chunks_exact(hidden).enumerate().take(tokens - t) {
            let later = &mixed_d[(t + k) * hidden..][..hidden];
            for ((z_d, w), later) in z_d.iter_mut().zip(w).zip(later) {
                *z_d += w * later;
            }
        }
        let pull = inv * inv * inv * dot(&z_d, row) / hidden as f32;
        for ((d, z_d), x) in d.iter_mut().zip(&z_d).zip(row) {
            *d += inv * z_d - pull * x;
        }
    }
    Ok(())
}

fn host_grad(args: &mut HostArgs<'_>) -> Result<()> {
    let (x, inv) = (args.read::<f32>(0)?, args.read::<f32>(1)?);
    let mixed_d = args.read::<f32>(2)?;
    let partials = args.write::<f32>(3)?;
    let (tokens, hidden) = (args.u32(4)? as usize, args.u32(5)? as usize);
    let a_tile = tokens.div_ceil(TILES as usize);
    for (tile, sums) in partials.chunks_exact_mut(TAPS as usize * hidden).enumerate() {
        sums.fill(0.0);
        for t in (tile * a_tile).min(tokens)..((tile + 1) * a_tile).min(tokens) {
            let d = &mixed_d[t * hidden..][..hidden];
            for (k, sums) in sums.chunks_exact_mut(hidden).enumerate().take(t + 1) {
                let (row, inv) = (&x[(t - k) * hidden..][..hidden], inv[t - k]);
                for ((sum, d), x) in sums.iter_mut().zip(d).zip(row) {
                    *sum += d * (inv * x);
                }
            }
        }
    }
    Ok(())
}

fn host_sum(args: &mut HostArgs<'_>) -> Result<()> {
    let partials = args.read::<f32>(0)?;
    let grads = args.write::<f32>(1)?;
    let width = args.u32(2)? as usize;
    let layers = partials.chunks_exact(TILES as usize * width);
    for (grads, layer) in grads.chunks_exact_mut(width).zip(layers) {
        grads.fill(0.0);
        for tile in layer.chunks_exact(width) {
            for (grad, part) in grads.iter_mut().zip(tile) {
                *grad += part;
            }
        }
    }
    Ok(())
}
