//! The kernels that are timed: one that memory bounds, and a training step's products.
//!
//! What it is not: the training example's own launchers. Sizes, forms and kinds of numbers are that
//! example's, so that the rates are those its step will see.
//!
//! Invariant: the products' factors are as dense as a step's: a third of their bytes has passed a
//! squared ReLU, so half of it is zeros, which a GPU multiplies at less power and so faster.
//!
//! ```text
//!   forward  up, down      made anew  up      backward  a d, down's d, up's d, m d
//! ```
//!
//! The measuring files use it.

use crate::blas::call::Product;
use crate::blas::{Blas, Cublas, WORKSPACE};
use lightering::backend::{Arg, Backend, Cost, Grid, Kernel, Work};
use lightering::{Bytes, DeviceRange, Result, StreamId};

const TRAIN: &str = include_str!("../../kernels/ptx/train.ptx");
const OVERLAP: &str = include_str!("../../kernels/ptx/overlap.ptx");

/// `y = a x + y`.
pub(crate) static AXPY: Kernel =
    Kernel { name: "axpy", ptx: Some(OVERLAP), host: None, cost: Cost::of_bytes };
static FILL: Kernel = Kernel { name: "fill", ptx: Some(TRAIN), host: None, cost: Cost::of_bytes };
static ACT_BACK: Kernel =
    Kernel { name: "act_back", ptx: Some(TRAIN), host: None, cost: Cost::of_bytes };
/// A product where no library is asked: it has a cost alone.
static PRODUCT: Kernel = Kernel { name: "product", ptx: None, host: None, cost: product_cost };

/// A row of 256 threads a block, one thread for each 16 bytes; kernels stride over the rest.
pub(crate) fn grid(len: Bytes) -> Grid {
    Grid::row(len.0.div_ceil(16 * 256).clamp(1, 1 << 20) as u32, 256)
}

/// Enqueues `y = y + 0 x`: it reads both and writes one.
pub(crate) fn axpy(
    backend: &mut dyn Backend,
    [x, y]: [DeviceRange; 2],
    on: StreamId,
) -> Result<()> {
    let args = [Arg::Read(x), Arg::Update(y), Arg::F32(0.0), Arg::U64(x.len().0)];
    backend.launch(&AXPY, grid(x.len()), &args, on)
}

fn product_cost(grid: &Grid, args: &[Arg]) -> Cost {
    let size = |index: usize| match args.get(index) {
        Some(Arg::U32(size)) => f64::from(*size),
        _ => 0.0,
    };
    let flops = 2.0 * size(3) * size(4) * size(5);
    Cost { flops, work: Work::Matrix, ..Cost::of_bytes(grid, args) }
}

/// Takes device memory for so many bf16 numbers, or as many bytes of others, and fills it with
/// numbers between `-bound` and `bound`.
pub(crate) fn filled(
    backend: &mut dyn Backend,
    on: StreamId,
    len: Bytes,
    (seed, bound): (u64, f32),
) -> Result<DeviceRange> {
    let range = DeviceRange::new(backend.alloc_device(len, on)?, len)?;
    let args = [Arg::Write(range), Arg::U64(seed), Arg::F32(bound), Arg::U64(len.0)];
    backend.launch(&FILL, grid(len), &args, on)?;
    Ok(range)
}

/// What a layer's products read and write: rows of tokens by channels, and the two matrices.
struct Layer {
    sizes: [u32; 2],
    /// After norm and mixing, and the gradient of the layer's output.
    m: DeviceRange,
    d: DeviceRange,
    /// After the squared ReLU, and the gradient before it.
    a: DeviceRange,
    a_d: DeviceRange,
    up: DeviceRange,
    down: DeviceRange,
    /// Results: wide rows, a matrix's gradient, narrow rows.
    wide: DeviceRange,
    matrix_d: DeviceRange,
    narrow: DeviceRange,
}

impl Layer {
    fn new(backend: &mut dyn Backend, on: StreamId, sizes: [u32; 2]) -> Result<Layer> {
        let [hidden, tokens] = sizes.map(u64::from);
        let [rows, wide, matrix] = [tokens * hidden, 4 * tokens * hidden, 4 * hidden * hidden];
        let small = 1.0 / (hidden as f32).sqrt();
        let mut seed = 0;
        let mut take = |numbers: u64, bound: f32| {
            seed += 1;
            filled(backend, on, Bytes(2 * numbers), (seed, bound))
        };
        let layer = Layer {
            sizes,
            m: take(rows, 1.0)?,
            d: take(rows, 1e-3)?,
            a: take(wide, 1.0)?,
            a_d: take(wide, 1e-3)?,
            up: take(matrix, small)?,
            down: take(matrix, small)?,
            wide: take(wide, 0.0)?,
            matrix_d: take(matrix, 0.0)?,
            narrow: take(rows, 0.0)?,
        };
        let args = [Arg::Update(layer.a), Arg::Update(layer.a_d), Arg::U64(layer.a.len().0)];
        backend.launch(&ACT_BACK, grid(layer.a.len()), &args, on)?;
        Ok(layer)
    }

    /// The products of a step that makes inner results anew.
    fn forms(&self) -> [Form; 7] {
        let [h, t] = self.sizes;
        let f = 4 * h;
        let Layer { m, d, a, a_d, up, down, .. } = *self;
        let form = |x, y, to, [m, n, k]: [u32; 3], flags| {
            let [m, n, k, flags] = [m, n, k, flags].map(Arg::U32);
            [Arg::Read(x), Arg::Read(y), to, m, n, k, flags]
        };
        let [wide, matrix_d, narrow] = [self.wide, self.matrix_d, self.narrow].map(Arg::Write);
        let widen = form(m, up, wide, [t, f, h], 0);
        [
            (widen, false),
            (form(a, down, Arg::Update(self.narrow), [t, h, f], 0), true),
            (widen, false),
            (form(d, down, wide, [t, f, h], 2), false),
            (form(a, d, matrix_d, [f, h, t], 1), false),
            (form(m, a_d, matrix_d, [h, f, t], 1), false),
            (form(a_d, up, narrow, [t, h, f], 2), false),
        ]
    }

    fn ranges(&self) -> [DeviceRange; 9] {
        let Layer { m, d, a, a_d, up, down, wide, matrix_d, narrow, .. } = *self;
        [m, d, a, a_d, up, down, wide, matrix_d, narrow]
    }
}

/// One product's arguments, and whether it is added to what is there.
type Form = ([Arg; 7], bool);

/// The products of one layer.
pub(crate) struct Products {
    blas: Option<Box<dyn Blas>>,
    forms: [Form; 7],
    ranges: Vec<DeviceRange>,
    /// Floating-point operations of all of them.
    pub(crate) flops: f64,
}

impl Products {
    /// Takes memory for a layer of `hidden` by `4 * hidden` over `tokens`, and fills it.
    pub(crate) fn new(
        backend: &mut dyn Backend,
        on: StreamId,
        sizes: [u32; 2],
    ) -> Result<Products> {
        let about = backend.about();
        let layer = Layer::new(backend, on, sizes)?;
        let forms = layer.forms();
        let flops = |(args, _): &Form| product_cost(&Grid::row(1, 1), args).flops;
        let flops = forms.iter().map(flops).sum();
        let mut ranges = layer.ranges().to_vec();
        let blas: Option<Box<dyn Blas>> = match about.simulated {
            true => None,
            false => {
                let mut blas = Cublas::open(about.device.0)?;
                let workspace = filled(backend, on, WORKSPACE, (0, 0.0))?;
                ranges.push(workspace);
                blas.bind(backend.raw_stream(on)?, workspace)?;
                Some(Box::new(blas))
            }
        };
        Ok(Products { blas, forms, ranges, flops })
    }

    /// Enqueues all of them on the stream that they were made for.
    pub(crate) fn enqueue(&mut self, backend: &mut dyn Backend, on: StreamId) -> Result<()> {
        for (args, add) in &self.forms {
            match &mut self.blas {
                Some(blas) => blas.product(&Product::of_args(args, *add)?)?,
                None => backend.launch(&PRODUCT, Grid::row(1, 1), args, on)?,
            }
        }
        Ok(())
    }

    /// Gives the memory back; nothing of it is in use.
    pub(crate) fn close(self, backend: &mut dyn Backend, on: StreamId) -> Result<()> {
        // The library may touch its workspace until it is gone.
        drop(self.blas);
        self.ranges.iter().try_for_each(|range| backend.free_device(range.at(), on))
    }
}
