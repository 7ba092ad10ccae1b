//! What runs next to the copies: a busy kernel, matrix products, or kernels that only move memory.
//!
//! What it is not: needed by any copy, or in need of one.
//!
//! Invariant: its time is proportional to its amount.
//!
//! ```text
//!   busy   one kernel, `amount` rounds of integer arithmetic         asks for no memory
//!   gemm   `amount` products in bf16, by cuBLAS on a real device     asks for the tensor cores
//!   hbm    `amount` times y = a x + y                                asks for device memory
//! ```
//!
//! `rig` runs it.

use crate::blas::call::Product;
use crate::blas::{Blas, Cublas, WORKSPACE};
use crate::busy::{self, BUSY};
use lightering::backend::{Arg, Backend, Cost, Grid, HostArgs, Kernel, Work};
use lightering::trace::{Access, Actor, Use};
use lightering::{Bytes, DeviceRange, Error, Misuse, Result, StreamId};
use std::str::FromStr;

const PTX: &str = include_str!("../../kernels/ptx/overlap.ptx");
/// Rows and columns of each product's matrices; on a device that computes here, few.
const ROWS: u32 = 8192;
const ROWS_HERE: u32 = 64;
/// Bytes of each of the two vectors: so large that a stream holds all launches of a run.
const VECTOR: Bytes = Bytes::gib(1);
const VECTOR_HERE: Bytes = Bytes::mib(4);
const FACTOR: f32 = 1.0 / 1024.0;

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Busy,
    Gemm,
    Hbm,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Busy => "busy",
            Kind::Gemm => "gemm",
            Kind::Hbm => "hbm",
        }
    }

    /// The amount that tells how long one takes.
    pub(crate) fn trial(self) -> u32 {
        match self {
            Kind::Busy => 200_000,
            Kind::Gemm | Kind::Hbm => 16,
        }
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Kind, String> {
        let kinds = [Kind::Busy, Kind::Gemm, Kind::Hbm];
        let known = kinds.into_iter().find(|kind| kind.name() == text);
        known.ok_or_else(|| String::from("must be busy, gemm or hbm"))
    }
}

/// `y = a x + y` in single precision.
pub(crate) static AXPY: Kernel =
    Kernel { name: "axpy", ptx: Some(PTX), host: Some(host_axpy), cost: Cost::of_bytes };

/// `c = a b` on the simulated device, square, in single precision. CUDA's is cuBLAS's.
static GEMM: Kernel = Kernel {
    name: "gemm",
    ptx: None,
    host: Some(host_gemm),
    cost: |grid, args| {
        let rows = match args {
            [_, _, _, Arg::U32(rows), ..] => f64::from(*rows),
            _ => 0.0,
        };
        Cost { flops: 2.0 * rows.powi(3), work: Work::Matrix, ..Cost::of_bytes(grid, args) }
    },
};

/// What everything begins with: a device may compute faster with zeros.
static NOISE: Kernel =
    Kernel { name: "noise", ptx: Some(PTX), host: Some(host_noise), cost: Cost::of_bytes };

fn host_noise(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    for (i, to) in (0..).zip(args.write::<u32>(0)?) {
        *to = (mixed(i) as u32 & 0x807f_807f) | 0x3f00_3f00;
    }
    Ok(())
}

/// A bijection of 64-bit words that leaves no bit where it was (the finish of SplitMix64).
fn mixed(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

fn host_axpy(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let (x, y, a) = (args.read::<f32>(0)?, args.write::<f32>(1)?, args.f32(2)?);
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
    Ok(())
}

fn host_gemm(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let (a, b) = (args.read::<f32>(0)?, args.read::<f32>(1)?);
    let (c, rows) = (args.write::<f32>(2)?, args.u32(3)? as usize);
    c.fill(0.0);
    for (c, a) in c.chunks_exact_mut(rows).zip(a.chunks_exact(rows)) {
        for (b, a) in b.chunks_exact(rows).zip(a) {
            c.iter_mut().zip(b).for_each(|(c, b)| *c += a * b);
        }
    }
    Ok(())
}

/// Where it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// On the real device of that ordinal.
    Cuda(u32),
    /// On this machine's processor, for a simulated device.
    Here,
    /// Nowhere: a simulated device that keeps time alone.
    Nowhere,
}

/// One kind of compute with all it needs, on one stream.
pub(crate) struct Compute {
    kind: Kind,
    on: StreamId,
    rows: u32,
    /// Products on a real device, with their workspace.
    cublas: Option<(Cublas, DeviceRange)>,
    /// All it works on.
    ranges: Vec<DeviceRange>,
}

impl Compute {
    /// Takes what `kind` needs on the device at `place`.
    pub(crate) fn new(
        backend: &mut dyn Backend,
        kind: Kind,
        place: Place,
        on: StreamId,
    ) -> Result<Compute> {
        let mut take = |len| DeviceRange::new(backend.alloc_device(len, on)?, len);
        let here = place == Place::Here;
        let (rows, vector) = if here { (ROWS_HERE, VECTOR_HERE) } else { (ROWS, VECTOR) };
        let element = if here { 4 } else { 2 };
        let matrix = Bytes(element * u64::from(rows) * u64::from(rows));
        let (len, count) = match kind {
            Kind::Busy => (Bytes(busy::THREADS * 4), 1),
            Kind::Gemm => (matrix, 3),
            Kind::Hbm => (vector, 2),
        };
        let ranges = (0..count).map(|_| take(len)).collect::<Result<Vec<_>>>()?;
        let cublas = match (kind, place) {
            (Kind::Gemm, Place::Cuda(ordinal)) => {
                let workspace = take(WORKSPACE)?;
                let mut cublas = Cublas::open(ordinal)?;
                cublas.bind(backend.raw_stream(on)?, workspace)?;
                Some((cublas, workspace))
            }
            _ => None,
        };
        for range in &ranges {
            let args = [Arg::Write(*range), Arg::U64(range.len().0)];
            backend.launch(&NOISE, Grid::row(1024, 256), &args, on)?;
        }
        Ok(Compute { kind, on, rows, cublas, ranges })
    }

    /// Device bytes that `kind` needs at `place`.
    pub(crate) fn bytes(kind: Kind, place: Place) -> Bytes {
        let here = place == Place::Here;
        match kind {
            Kind::Busy => Bytes(busy::THREADS * 4),
            Kind::Gemm if here => Bytes(3 * 4 * u64::from(ROWS_HERE).pow(2)),
            Kind::Gemm => Bytes(3 * 2 * u64::from(ROWS).pow(2) + WORKSPACE.0),
            Kind::Hbm if here => Bytes(2 * VECTOR_HERE.0),
            Kind::Hbm => Bytes(2 * VECTOR.0),
        }
    }

    /// Enqueues so much of it.
    pub(crate) fn enqueue(&mut self, backend: &mut dyn Backend, amount: u32) -> Result<()> {
        match (self.kind, &self.ranges[..]) {
            (Kind::Busy, [numbers]) => {
                let args = [Arg::Update(*numbers), Arg::U32(amount)];
                backend.launch(&BUSY, busy::GRID, &args, self.on)
            }
            (Kind::Hbm, [x, y]) => {
                let bytes = x.len().0;
                let grid = Grid::row((bytes / (16 * 256)).max(1) as u32, 256);
                let args = [Arg::Read(*x), Arg::Update(*y), Arg::F32(FACTOR), Arg::U64(bytes)];
                (0..amount).try_for_each(|_| backend.launch(&AXPY, grid, &args, self.on))
            }
            (Kind::Gemm, [a, b, c]) => {
                let (a, b, c) = (*a, *b, *c);
                (0..amount).try_for_each(|_| self.product(backend, a, b, c))
            }
            _ => Err(Error::usage(Misuse::State, "compute")),
        }
    }

    fn product(
        &mut self,
        backend: &mut dyn Backend,
        a: DeviceRange,
        b: DeviceRange,
        c: DeviceRange,
    ) -> Result<()> {
        let rows = self.rows;
        let sizes = [rows, rows, rows, 0].map(Arg::U32);
        let args = [&[Arg::Read(a), Arg::Read(b), Arg::Write(c)], &sizes[..]].concat();
        let Some((cublas, workspace)) = &mut self.cublas else {
            return backend.launch(
                &GEMM,
                Grid::row(rows.div_ceil(128).pow(2), 256),
                &args,
                self.on,
            );
        };
        cublas.product(&Product::of_args(&args, false)?)?;
        let mut uses: Vec<Use> = args.iter().filter_map(Arg::uses).collect();
        uses.push(Use { access: Access::Write, span: (*workspace).into() });
        backend.note(Actor::Stream(self.on), &uses)
    }

    /// Gives everything back; nothing of it is left to run.
    pub(crate) fn close(self, backend: &mut dyn Backend) -> Result<()> {
        let workspace = self.cublas.map(|(_, workspace)| workspace);
        for range in self.ranges.into_iter().chain(workspace) {
            backend.free_device(range.at(), self.on)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! The fault guarded against: CUDA's form of a kernel that computes something else.
    use super::*;
    use crate::emulator::{self, Order};
    use lightering::backend::kernel::HostArg;

    /// Runs both forms on the same numbers: some to read, then those written, then sizes.
    fn agree(kernel: &Kernel, grid: Grid, read: &[f32], numbers: &[Arg]) {
        let start: Vec<u32> = (0..4096).map(|i| 0x3f80_0000 + 77 * i).collect();
        let run = |form: &dyn Fn(&mut HostArgs<'_>) -> Result<()>| {
            let mut left = start.clone();
            let mut args = vec![HostArg::Write(bytemuck::cast_slice_mut(&mut left))];
            if !read.is_empty() {
                args.insert(0, HostArg::Read(bytemuck::cast_slice(read)));
            }
            args.extend(numbers.iter().map(|number| HostArg::Number(*number)));
            form(&mut HostArgs::new(args)).unwrap();
            left
        };
        let host = run(&|args| (kernel.host.unwrap())(&grid, args));
        let device = run(&|args| emulator::run(kernel.name, &grid, args, Order::Descending));
        assert!(host == device && host != start, "{}", kernel.name);
    }

    #[test]
    fn every_kernel_agrees_with_its_host_form() {
        if !emulator::is_here() {
            return;
        }
        let x: Vec<f32> = (0..4096).map(|i| i as f32 / 64.0 - 7.0).collect();
        let bytes = Arg::U64(4 * 4096);
        // Of the busy kernel each thread has one number, of the others several.
        agree(&BUSY, Grid::row(16, 256), &[], &[Arg::U32(77)]);
        agree(&NOISE, Grid::row(2, 256), &[], &[bytes]);
        agree(&AXPY, Grid::row(1, 256), &x, &[Arg::F32(0.5), bytes]);
    }

    #[test]
    fn each_kernel_is_in_its_ptx_with_the_arguments_it_gets() {
        for (kernel, wanted) in [(&BUSY, "li"), (&AXPY, "llfl"), (&NOISE, "ll")] {
            assert_eq!(emulator::parameters(kernel).as_deref(), Some(wanted), "{}", kernel.name);
        }
    }

    #[test]
    fn a_product_is_that_of_its_matrices() {
        let (a, b) = ([1.0f32, 2.0, 3.0, 4.0], [5.0f32, 6.0, 7.0, 8.0]);
        let mut c = [f32::NAN; 4];
        let args = vec![
            HostArg::Read(bytemuck::cast_slice(&a)),
            HostArg::Read(bytemuck::cast_slice(&b)),
            HostArg::Write(bytemuck::cast_slice_mut(&mut c)),
            HostArg::Number(Arg::U32(2)),
        ];
        host_gemm(&Grid::row(1, 1), &mut HostArgs::new(args)).unwrap();
        assert_eq!(c, [19.0, 22.0, 43.0, 50.0]);
    }
}
