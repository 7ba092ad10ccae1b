//! The model's kernels: what each computes, its form for the simulated device, its launcher.
//!
//! What it is not: the model. Which kernel follows which is in `model`.
//!
//! Invariant: every sum is taken in a fixed order, so equal inputs give equal bits, in every mode
//! and with any number of threads; no kernel adds with atomics. That holds on each device for
//! itself: the order differs between devices, and so does the element.
//!
//! ```text
//!   product  C = A B, C += A B (either side transposed)      the only matrix work
//!   mix      norm + causal mixing over tokens, and back      one row a token
//!   act      squared ReLU, and back                          one thread a number
//!   head     embedding, last norm, cross-entropy, and back   one row a token
//!   adam     first numbers, and the update of all of them    one thread a number
//!   tally    a hash of all gradients, the step's loss        one number a step
//! ```
//!
//! `model` and `step` use it.

pub(crate) mod act;
pub(crate) mod adam;
pub(crate) mod head;
pub(crate) mod mix;
pub(crate) mod product;
pub(crate) mod tally;

#[cfg(test)]
use lightering::backend::Kernel;

/// CUDA's form of all kernels but the products, which are cuBLAS's, and mixing. Where the host form
/// has `f32` tensors this one has bf16, computed in `f32`: parameters, their gradients and the rows
/// between. What is `f32` in both: norms, losses, partial sums, Adam's moments. It knows no lengths
/// but those among its arguments; the host form may ignore these.
pub(crate) const PTX: &str = include_str!("../../../kernels/ptx/train.ptx");
/// CUDA's form of norm and mixing.
pub(crate) const MIX_PTX: &str = include_str!("../../../kernels/ptx/mix.ptx");

/// Every kernel of the model.
#[cfg(test)]
pub(crate) static ALL: [&Kernel; 17] = [
    &act::ACT,
    &act::ACT_BACK,
    &adam::ADAM,
    &adam::FILL,
    &head::CROSS_ENTROPY,
    &head::EMBED,
    &head::EMBED_BACK,
    &head::NORM,
    &head::NORM_BACK,
    &mix::MIX_BACK,
    &mix::MIX_GRAD,
    &mix::MIX_SUM,
    &mix::NORM_MIX,
    &product::PRODUCT,
    &product::PRODUCT_ADD,
    &tally::CHECKSUM,
    &tally::TALLY,
];

/// Keeps the norm of a row of zeros finite.
pub(crate) const EPSILON: f32 = 1e-6;

/// Sum of the products, in eight interleaved parts: a fixed order that the processor's vectors
/// like. The length is a multiple of 8.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for lane in 0..8 {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// One over the root of the row's mean square.
fn inverse_rms(row: &[f32]) -> f32 {
    1.0 / (dot(row, row) / row.len() as f32 + EPSILON).sqrt()
}

#[cfg(test)]
pub(crate) mod bench {
    //! Runs a kernel's host form on plain slices.
    use lightering::backend::kernel::HostArg;
    use lightering::backend::{Arg, Grid, HostArgs, Kernel};

    /// Bytes of a slice to read.
    pub(crate) fn read<T: bytemuck::Pod>(values: &[T]) -> HostArg<'_> {
        HostArg::Read(bytemuck::cast_slice(values))
    }

    /// Bytes of a slice to write.
    pub(crate) fn write<T: bytemuck::Pod>(values: &mut [T]) -> HostArg<'_> {
        HostArg::Write(bytemuck::cast_slice_mut(values))
    }

    /// A size.
    pub(crate) fn size<'a>(value: usize) -> HostArg<'a> {
        HostArg::Number(Arg::U32(value as u32))
    }

    /// Runs the kernel once.
    pub(crate) fn run(kernel: &Kernel, args: Vec<HostArg<'_>>) {
        let host = kernel.host.expect("the kernel has a host form");
        host(&Grid::row(1, 1), &mut HostArgs::new(args)).expect("the kernel runs");
    }

    /// Numbers between -1 and 1 that differ with the seed.
    pub(crate) fn noise(seed: u64, len: usize) -> Vec<f32> {
        (0..len).map(|i| super::adam::uniform(seed, i as u64)).collect()
    }
}
