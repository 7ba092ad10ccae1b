//! Both ends of the model: bytes to rows, rows to the loss, and back.
//!
//! What it is not: it holds no product; the head's matrix is `product`'s work.
//!
//! Invariant: a byte's row of the embedding's gradient is the sum of its tokens' rows in the order
//! of the tokens; one thread sums one channel of one byte, so nothing is added atomically.
//!
//! ```text
//!   tokens: T + 1 bytes; token t is read, token t + 1 is to be guessed
//!   embed: x[t] = table[token t]      norm: n[t] = x[t] / rms(x[t])
//!   cross_entropy: loss[t] = -ln softmax(logits[t])[token t + 1];   logits -> their gradient
//! ```
//!
//! `model` uses it.

use super::{PTX, dot, inverse_rms};
use crate::queue::{Queue, blocks_for, number};
use crate::shape::{Shape, VOCABULARY};
use lightering::backend::{Arg, Cost, Grid, HostArgs, Kernel};
use lightering::{DeviceRange, Result};

pub(crate) static EMBED: Kernel = Kernel {
    name: "embed",
    ptx: Some(PTX),
    host: Some(|_, args| host_embed(args)),
    cost: Cost::of_bytes,
};

pub(crate) static EMBED_BACK: Kernel = Kernel {
    name: "embed_back",
    ptx: Some(PTX),
    host: Some(|_, args| host_embed_back(args)),
    cost: Cost::of_bytes,
};

pub(crate) static NORM: Kernel = Kernel {
    name: "norm",
    ptx: Some(PTX),
    host: Some(|_, args| host_norm(args)),
    cost: Cost::of_bytes,
};

pub(crate) static NORM_BACK: Kernel = Kernel {
    name: "norm_back",
    ptx: Some(PTX),
    host: Some(|_, args| host_norm_back(args)),
    cost: Cost::of_bytes,
};

pub(crate) static CROSS_ENTROPY: Kernel = Kernel {
    name: "cross_entropy",
    ptx: Some(PTX),
    host: Some(|_, args| host_cross_entropy(args)),
    cost: Cost::of_bytes,
};

/// Enqueues `x[t] = table[token t]`.
pub(crate) fn embed(
    queue: &mut Queue<'_>,
    shape: &Shape,
    table: DeviceRange,
    tokens: DeviceRange,
    x: DeviceRange,
) -> Result<()> {
    let args = [
        Arg::Read(table),
        Arg::Read(tokens),
        Arg::Write(x),
        number(shape.hidden),
        number(shape.tokens),
    ];
    queue.run(&EMBED, blocks_for(shape.tokens), &args)
}

/// Enqueues the embedding's gradient from that of its rows.
pub(crate) fn embed_back(
    queue: &mut Queue<'_>,
    shape: &Shape,
    d: DeviceRange,
    tokens: DeviceRange,
    table_d: DeviceRange,
) -> Result<()> {
    let args = [
        Arg::Read(d),
        Arg::Read(tokens),
        Arg::Write(table_d),
        number(shape.hidden),
        number(shape.tokens),
    ];
    // A block for each byte and each strip of 1024 channels.
    let strips = shape.hidden.div_ceil(1024) as u32;
    let blocks = [VOCABULARY as u32, strips, 1];
    queue.run(&EMBED_BACK, Grid { blocks, ..Grid::row(1, 256) }, &args)
}

/// Enqueues `n[t] = x[t] / rms(x[t])`.
pub(crate) fn norm(
    queue: &mut Queue<'_>,
    shape: &Shape,
    x: DeviceRange,
    n: DeviceRange,
) -> Result<()> {
    let args = [Arg::Read(x), Arg::Write(n), number(shape.hidden), number(shape.tokens)];
    queue.run(&NORM, blocks_for(shape.tokens), &args)
}

/// Enqueues `x -> ` the gradient of `x`, from that of `n`.
pub(crate) fn norm_back(
    queue: &mut Queue<'_>,
    shape: &Shape,
    n_d: DeviceRange,
    x: DeviceRange,
) -> Result<()> {
    let args = [Arg::Read(n_d), Arg::Update(x), number(shape.hidden), number(shape.tokens)];
    queue.run(&NORM_BACK, blocks_for(shape.tokens), &args)
}

/// Enqueues each token's loss, and `logits -> ` the gradient of the mean loss.
pub(crate) fn cross_entropy(
    queue: &mut Queue<'_>,
    shape: &Shape,
    logits: DeviceRange,
    tokens: DeviceRange,
    losses: DeviceRange,
) -> Result<()> {
    let args = [Arg::Update(logits), Arg::Read(tokens), Arg::Write(losses), number(shape.tokens)];
    queue.run(&CROSS_ENTROPY, blocks_for(shape.tokens), &args)
}

fn host_embed(args: &mut HostArgs<'_>) -> Result<()> {
    let (table, tokens) = (args.read::<f32>(0)?, args.read::<u8>(1)?);
    let x = args.write::<f32>(2)?;
    let hidden = args.u32(3)? as usize;
    for (row, token) in x.chunks_exact_mut(hidden).zip(tokens) {
        row.copy_from_slice(&table[usize::from(*token) * hidden..][..hidden]);
    }
    Ok(())
}

fn host_embed_back(args: &mut HostArgs<'_>) -> Result<()> {
    let (d, tokens) = (args.read::<f32>(0)?, args.read::<u8>(1)?);
    let table_d = args.write::<f32>(2)?;
    let hidden = args.u32(3)? as usize;
    table_d.fill(0.0);
    for (row, token) in d.chunks_exact(hidden).zip(tokens) {
        let sums = &mut table_d[usize::from(*token) * hidden..][..hidden];
        for (sum, d) in sums.iter_mut().zip(row) {
            *sum += d;
        }
    }
    Ok(())
}

fn host_norm(args: &mut HostArgs<'_>) -> Result<()> {
    let x = args.read::<f32>(0)?;
    let n = args.write::<f32>(1)?;
    let hidden = args.u32(2)? as usize;
    for (n, x) in n.chunks_exact_mut(hidden).zip(x.chunks_exact(hidden)) {
        let inv = inverse_rms(x);
        for (n, x) in n.iter_mut().zip(x) {
            *n = inv * x;
        }
    }
    Ok(())
}

fn host_norm_back(args: &mut HostArgs<'_>) -> Result<()> {
    let n_d = args.read::<f32>(0)?;
    let x = args.write::<f32>(1)?;
    let hidden = args.u32(2)? as usize;
    for (x, n_d) in x.chunks_exact_mut(hidden).zip(n_d.chunks_exact(hidden)) {
        let inv = inverse_rms(x);
        let pull = inv * inv * inv * dot(n_d, x) / hidden as f32;
        for (x, n_d) in x.iter_mut().zip(n_d) {
            *x = inv * n_d - pull * *x;
        }
    }
    Ok(())
}

fn host_cross_entropy(args: &mut HostArgs<'_>) -> Result<()> {
    let logits = args.write::<f32>(0)?;
    let tokens = args.read::<u8>(1)?;
    let losses = args.write::<f32>(2)?;
    let share = 1.0 / losses.len() as f32;
    let rows = logits.chunks_exact_mut(VOCABULARY as usize);
    for ((row, wanted), loss) in rows.zip(&tokens[1..]).zip(losses) {
        let wanted = usize::from(*wanted);
        let top = row.iter().fold(f32::NEG_INFINITY, |top, logit| top.max(*logit));
        let wanted_logit = row[wanted] - top;
        let mut sum = 0.0f32;
        for logit in row.iter_mut() {
            *logit = (*logit - top).exp();
            sum += *logit;
        }
        *loss = sum.ln() - wanted_logit;
        for logit in row.iter_mut() {
            *logit *= share / sum;
        }
        row[wanted] -= share;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::bench::{noise, read, run, write};

    #[test]
    fn equal_logits_cost_the_logarithm_of_the_vocabulary() {
        let mut logits = vec![3.0f32; 2 * 256];
        let mut losses = vec![0.0f32; 2];
        run(&CROSS_ENTROPY, vec![write(&mut logits), read(&[7u8, 8, 9]), write(&mut losses)]);
        assert!(losses.iter().all(|loss| (loss - 256f32.ln()).abs() < 1e-5));
        assert!((logits[8] - (1.0 / 256.0 - 1.0) / 2.0).abs() < 1e-6, "the guessed byte's pull");
        assert!(logits.iter().sum::<f32>().abs() < 1e-5, "a row's gradient sums to zero");
    }

    #[test]
    fn huge_logits_overflow_nothing() {
        let mut logits: Vec<f32> = noise(5, 256).iter().map(|x| x * 1e30).collect();
        let mut losses = vec![0.0f32; 1];
        run(&CROSS_ENTROPY, vec![write(&mut logits), read(&[0u8, 1]), write(&mut losses)]);
        assert!(logits.iter().chain(&losses).all(|x| x.is_finite()));
    }

    #[test]
    fn a_byte_seen_twice_gets_both_rows_gradients() {
        let d = noise(6, 3 * 8);
        let mut table = vec![f32::NAN; 256 * 8];
        let hidden = crate::kernel::bench::size(8);
        run(&EMBED_BACK, vec![read(&d), read(&[9u8, 4, 9, 0]), write(&mut table), hidden]);
        for c in 0..8 {
            assert_eq!(table[9 * 8 + c], d[c] + d[16 + c]);
            assert_eq!(table[4 * 8 + c], d[8 + c]);
            assert_eq!(table[c], 0.0, "the last byte is only guessed, never read");
        }
    }
}
