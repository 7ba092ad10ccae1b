//! The simulated device with CUDA's form of the kernels: bf16, blocks, threads and barriers.
//!
//! What it is not: a test of the PTX. That is made from the same sources, and its parameters are
//! compared with each launch's arguments here.
//!
//! Invariant: a kernel runs when its stream gets there, as any on the simulated device.
//!
//! ```text
//!   launch(act, ..) -> the simulated device, launch(act as C++, ..)
//! ```
//!
//! `twin` uses it.

use super::cases::{narrow, wide};
use super::rig::Rig;
use super::{SHAPES, cases, compare};
use crate::args::Mode;
use crate::blas::call::{Product, tests::by_columns};
use crate::device::{Opened, Plan};
use crate::emulator::{self, Order};
use crate::kernel::ALL;
use crate::meter::Metered;
use crate::passing::pass_on;
use crate::text::Text;
use lightering::backend::kernel::HostFn;
use lightering::backend::sim::{Config, World};
use lightering::backend::{
    About, Arg, Backend, Fence, Grid, HostArgs, Kernel, Memory, Pinner, Timing,
};
use lightering::trace::{Actor, Site, Use};
use lightering::{
    Bytes, DevicePtr, DeviceRange, Error, EventId, Misuse, PinnedRange, Result, StreamId,
};
use std::sync::{Arc, OnceLock};

/// A simulated device whose kernels are CUDA's.
struct Emulated {
    inner: Box<dyn Backend>,
    order: Order,
}

/// Kernel `N` of [`ALL`], as its C++ form runs it.
fn form<const N: usize, const UP: bool>(grid: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let order = if UP { Order::Ascending } else { Order::Descending };
    match ALL[N].name {
        "product" => by_cublas(args, false),
        "product_add" => by_cublas(args, true),
        name => emulator::run(name, grid, args, order),
    }
}

macro_rules! forms {
    ($up:literal: $($n:literal)*) => { [$(form::<$n, $up>),*] };
}

/// For each order of threads, every kernel with its C++ form.
fn twins(order: Order) -> &'static [Kernel] {
    static TWINS: OnceLock<[Vec<Kernel>; 2]> = OnceLock::new();
    let all = TWINS.get_or_init(|| {
        let up: [HostFn; 17] = forms!(true: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
        let down: [HostFn; 17] = forms!(false: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
        [up, down].map(|forms| {
            let twin = |(kernel, host): (&&Kernel, HostFn)| Kernel { host: Some(host), ..**kernel };
            ALL.iter().zip(forms).map(twin).collect()
        })
    });
    &all[usize::from(order == Order::Descending)]
}

/// The product as cuBLAS is asked for it, by the definition of what it is asked.
fn by_cublas(args: &mut HostArgs<'_>, add: bool) -> Result<()> {
    let floats = |bits: &[u16]| bits.iter().map(|bits| wide(*bits)).collect::<Vec<f32>>();
    let (a, b) = (floats(args.read::<u16>(0)?), floats(args.read::<u16>(1)?));
    let to = args.write::<u16>(2)?;
    let (m, n, k, flags) = (args.u32(3)?, args.u32(4)?, args.u32(5)?, args.u32(6)?);
    let (a_transposed, b_transposed) = (flags & 1 != 0, flags & 2 != 0);
    // The addresses say which factor is which.
    let product = Product { a: 1, b: 2, c: 3, m, n, k, a_transposed, b_transposed, add };
    let call = product.call()?;
    let factor = |at: u64| if at == 1 { &a } else { &b };
    let mut c = floats(to);
    by_columns(&call, factor(call.at[0]), factor(call.at[1]), &mut c);
    for (to, c) in to.iter_mut().zip(&c) {
        *to = narrow(*c);
    }
    Ok(())
}

impl Backend for Emulated {
    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        let twin = twins(self.order).iter().find(|twin| twin.name == kernel.name).unwrap();
        if let Some(wanted) = emulator::parameters(kernel)
            && wanted != emulator::letters(args)
        {
            let given = emulator::letters(args);
            let error = Error::usage(Misuse::BadKernel, "launch");
            return Err(error.detail(format!("{}: PTX takes {wanted}, not {given}", kernel.name)));
        }
        self.inner.launch(twin, grid, args, on)
    }

    pass_on!(memory);
    pass_on!(rest);
}

/// All cases of a shape; of a long one only those that take tokens by the thousand, for time.
fn some(tokens: u64, hidden: u64) -> Vec<cases::Case> {
    let mut all = cases::all(tokens, hidden);
    all.retain(|case| tokens < 1000 || case.name == "embed_back");
    all
}

fn emulated(world: &World, order: Order) -> Result<Box<dyn Backend>> {
    Ok(Box::new(Emulated { inner: Box::new(world.device(0)?), order }))
}

#[test]
fn every_kernel_agrees_with_its_host_form() {
    if !emulator::is_here() {
        return;
    }
    let device = emulated(&World::new(Config::default()), Order::Ascending).unwrap();
    let mut rig = Rig::new(device).unwrap();
    for (tokens, hidden) in SHAPES {
        let wrong = compare(&mut rig, &some(tokens, hidden), &mut |_| ());
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

#[test]
fn no_kernel_depends_on_the_order_of_its_threads() {
    if !emulator::is_here() {
        return;
    }
    let [mut up, mut down] = [Order::Ascending, Order::Descending]
        .map(|order| Rig::new(emulated(&World::new(Config::default()), order).unwrap()).unwrap());
    for (tokens, hidden) in SHAPES {
        let shape = cases::shape(tokens, hidden, 2);
        for case in some(tokens, hidden) {
            let [a, b] = [&mut up, &mut down].map(|rig| rig.run(&case, &shape).unwrap());
            assert!(a == b, "{}, {tokens} x {hidden}", case.name);
        }
    }
}

#[test]
fn every_kernel_of_the_model_is_tried() {
    let cases = cases::all(1, 8);
    for kernel in ALL {
        assert!(cases.iter().any(|case| case.name == kernel.name), "{}", kernel.name);
        let is_product = kernel.name.starts_with("product");
        assert_eq!(emulator::parameters(kernel).is_some(), !is_product, "{}", kernel.name);
    }
}

/// A plan on the emulated device.
fn plan(shape: &crate::shape::Shape) -> Plan {
    let bytes = shape.boundary_bytes();
    let about = World::new(Config::default()).device(0).unwrap().about();
    Plan {
        about,
        reason: None,
        pinned: Bytes(shape.layers * crate::offload::room(bytes).0),
        prefetch: Bytes(2 * bytes.0),
        open: Box::new(|meter| {
            let world = World::new(Config::default());
            let one = || -> Result<Box<dyn Backend>> {
                let device = emulated(&world, Order::Ascending)?;
                Ok(Box::new(Metered::new(device, meter.clone())))
            };
            Ok([one()?, one()?])
        }),
    }
}

#[test]
fn the_model_learns_in_bf16_and_its_modes_agree() {
    if !emulator::is_here() {
        return;
    }
    let line = "--layers 2 --hidden 64 --tokens 96 --steps 7 --keep-last 1 \
                --modes none,checkpoint,checkpoint+raw,checkpoint+offload";
    let words = line.split_whitespace().map(String::from);
    let crate::args::Command::Run(mut options) = crate::args::parse(words).unwrap() else {
        panic!("a run")
    };
    options.shape.element = 2;
    let (plan, text) = (plan(&options.shape), Text::open(None).unwrap());
    let run = |mode: Mode| {
        let outcome = crate::steps(&options, &plan, &text, mode, &mut Vec::new()).unwrap();
        let Opened { meter, .. } = plan.open().unwrap();
        assert_eq!(meter.taken(), Bytes::ZERO);
        outcome
    };
    let outcomes: Vec<_> = options.modes.iter().map(|mode| run(*mode)).collect();
    for (outcome, mode) in outcomes.iter().zip(&options.modes) {
        assert_eq!(outcome.checksum, outcomes[0].checksum, "{}", mode.name());
        let (first, last) = (outcome.first_loss, outcome.loss);
        assert!(last < first - 1.5, "{}: {first} to {last}", mode.name());
    }
    // The same model in single precision begins with nearly the same loss.
    options.shape.element = 4;
    options.device = crate::args::Device::Sim;
    let single = crate::device::plan(&mut options).unwrap();
    let wanted = crate::steps(&options, &single, &text, Mode::Checkpoint, &mut Vec::new()).unwrap();
    let got = &outcomes[1];
    assert!((got.first_loss - wanted.first_loss).abs() < 0.01 * wanted.first_loss);
    assert!((got.loss - wanted.loss).abs() < 0.1, "{} {}", got.loss, wanted.loss);
}
