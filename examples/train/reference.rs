//! The model once more, in double precision and plain loops, to check the kernels against.
//!
//! What it is not: fast, or a backward. Its gradients are differences of losses.
//!
//! Invariant: it shares no arithmetic with the kernels, only the order of the parameters.
//!
//! ```text
//!   parameters (as the device filled them) -> loss          (loss(w + e) - loss(w - e)) / 2 e
//! ```
//!
//! Tests use it. The fault it guards against: a backward that is not the forward's derivative, or a
//! forward made anew that differs from the first in a bit.

use crate::kernel::EPSILON;
use crate::model::Model;
use crate::queue::Queue;
use crate::shape::{Shape, TAPS};
use crate::staging::Staging;
use lightering::backend::Backend;
use lightering::backend::sim::{Config, World};
use lightering::{Bytes, DeviceRange, StreamId};

const VOCABULARY: usize = 256;

/// Mean loss over the tokens.
fn loss(shape: &Shape, parameters: &[f64], tokens: &[u8]) -> f64 {
    let (h, f, layers) = (shape.hidden as usize, shape.inner() as usize, shape.layers as usize);
    let taps = TAPS as usize;
    let (table, rest) = parameters.split_at(VOCABULARY * h);
    let (mixes, rest) = rest.split_at(layers * taps * h);
    let (matrices, head) = rest.split_at(layers * 2 * h * f);
    let read = &tokens[..tokens.len() - 1];
    let mut x: Vec<Vec<f64>> =
        read.iter().map(|token| table[usize::from(*token) * h..][..h].to_vec()).collect();
    for layer in 0..layers {
        let w = &mixes[layer * taps * h..][..taps * h];
        let (up, down) = matrices[layer * 2 * h * f..][..2 * h * f].split_at(h * f);
        let z: Vec<Vec<f64>> = x.iter().map(|row| normed(row)).collect();
        for (t, row) in x.iter_mut().enumerate() {
            let m: Vec<f64> = (0..h)
                .map(|c| (0..taps.min(t + 1)).map(|k| w[k * h + c] * z[t - k][c]).sum())
                .collect();
            let a: Vec<f64> = (0..f)
                .map(|j| (0..h).map(|c| m[c] * up[c * f + j]).sum::<f64>().max(0.0).powi(2))
                .collect();
            for (c, x) in row.iter_mut().enumerate() {
                *x += (0..f).map(|j| a[j] * down[j * h + c]).sum::<f64>();
            }
        }
    }
    let losses = x.iter().zip(&tokens[1..]).map(|(row, wanted)| {
        let n = normed(row);
        let logit = |v: usize| (0..h).map(|c| n[c] * head[c * VOCABULARY + v]).sum::<f64>();
        (0..VOCABULARY).map(|v| logit(v).exp()).sum::<f64>().ln() - logit(usize::from(*wanted))
    });
    losses.sum::<f64>() / read.len() as f64
}

fn normed(row: &[f64]) -> Vec<f64> {
    let square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    row.iter().map(|x| x / (square + f64::from(EPSILON)).sqrt()).collect()
}

/// A tiny model on the simulated device, after the forward and backward of one stretch.
struct Run {
    weights: Vec<f32>,
    grads: Vec<f32>,
    losses: Vec<f32>,
}

fn run(shape: Shape, tokens: &[u8], keep: bool) -> Run {
    let mut sim = World::new(Config::default()).device(0).unwrap();
    let stream = sim.create_stream().unwrap();
    let backend: &mut dyn Backend = &mut sim;
    let mut queue = Queue::new(backend, stream);
    let model = Model::new(&mut queue, shape).unwrap();
    let device_tokens = queue.take(tokens.len() as u64).unwrap();
    let losses = queue.take(shape.tokens * 4).unwrap();
    upload(backend, stream, device_tokens, tokens);
    let weights = download(backend, stream, model.weights_run());
    let mut queue = Queue::new(backend, stream);
    let mut take = || queue.take(shape.boundary_bytes().0).unwrap();
    let rows: Vec<DeviceRange> = (0..=shape.layers).map(|_| take()).collect();
    model.embed(&mut queue, device_tokens, rows[0]).unwrap();
    let mut kept = Vec::new();
    for (layer, pair) in rows.windows(2).enumerate() {
        kept.push(model.forward(&mut queue, layer as u64, pair[0], pair[1], keep).unwrap());
    }
    let d = rows[rows.len() - 1];
    model.head(&mut queue, device_tokens, d, losses).unwrap();
    for (layer, x) in rows[..rows.len() - 1].iter().enumerate().rev() {
        model.backward(&mut queue, layer as u64, *x, kept[layer].take(), d).unwrap();
    }
    model.finish(&mut queue, device_tokens, d, losses, 0).unwrap();
    let grads = download(backend, stream, model.grads_run());
    let losses = download(backend, stream, losses);
    Run { weights, grads, losses }
}

fn upload(backend: &mut dyn Backend, stream: StreamId, to: DeviceRange, bytes: &[u8]) {
    let mut staging = Staging::new(backend, to.len()).unwrap();
    staging.write(0, bytes).unwrap();
    backend.copy_in(to, staging.range(0, to.len().0).unwrap(), stream).unwrap();
    backend.sync().unwrap();
}

fn download(backend: &mut dyn Backend, stream: StreamId, from: DeviceRange) -> Vec<f32> {
    let staging = Staging::new(backend, Bytes(from.len().0)).unwrap();
    backend.copy_out(staging.range(0, from.len().0).unwrap(), from, stream).unwrap();
    backend.sync().unwrap();
    let mut values = vec![0.0f32; from.len().0 as usize / 4];
    staging.read(0, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

#[test]
fn the_gradients_are_the_losses_differences() {
    let tokens = b"the cat sat on the mat";
    let shape = Shape::new(2, 8, tokens.len() as u64 - 1, 4).unwrap();
    let Run { weights, grads, losses } = run(shape, tokens, false);
    let parameters: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
    let mean = losses.iter().map(|x| f64::from(*x)).sum::<f64>() / losses.len() as f64;
    let wanted = loss(&shape, &parameters, tokens);
    assert!((mean - wanted).abs() < 1e-5, "loss {mean}, by the definition {wanted}");

    let ends = VOCABULARY * 8;
    let layers = ends..weights.len() - ends;
    let seen = usize::from(b't') * 8;
    // All of the layers' parameters, a byte's row of the embedding, some of the head's.
    let head = (weights.len() - ends..weights.len()).step_by(37);
    let mut large = 0;
    for index in layers.chain(seen..seen + 8).chain(head) {
        let at = |shift: f64| {
            let mut moved = parameters.clone();
            moved[index] += shift;
            loss(&shape, &moved, tokens)
        };
        let difference = (at(1e-5) - at(-1e-5)) / 2e-5;
        let off = (difference - f64::from(grads[index])).abs();
        assert!(off < 2e-6 + 1e-3 * difference.abs(), "{index}: {difference} {}", grads[index]);
        large += usize::from(difference.abs() > 1e-3);
    }
    assert!(large > 300, "only {large} gradients are large enough to tell");
}

#[test]
fn results_made_anew_change_no_bit() {
    for (tokens, layers) in [(&b"to be, or not to be: that"[..], 3), (&b"ab"[..], 1)] {
        let shape = Shape::new(layers, 16, tokens.len() as u64 - 1, 4).unwrap();
        let [kept, anew] = [true, false].map(|keep| run(shape, tokens, keep));
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        assert_eq!(bits(&kept.grads), bits(&anew.grads));
        assert_eq!(bits(&kept.losses), bits(&anew.losses));
        assert!(kept.grads.iter().any(|g| *g != 0.0));
    }
}
