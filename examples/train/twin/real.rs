//! CUDA's form of the kernels on a real device, where there is one.
//!
//! What it is not: a benchmark of the example. It says what each kernel moves a second at the
//! largest sizes, so that a slow one is seen alone.
//!
//! Invariant: without a device, or without cuBLAS, it says aloud that nothing was tried.
//!
//! ```text
//!   LIGHTERING_CUDA=N (default: 0) -> cuda:N -> every case, every shape -> a table, then an error
//!   --ignored: the same kernels at 32768 tokens x 4096 channels -> time, GB/s, TFLOP/s
//! ```
//!
//! `cases` has the cases.

use super::cases::{Case, Tensor};
use super::rig::Rig;
use super::{SHAPES, cases, compare};
use crate::blas::Cublas;
use crate::emulator::aloud;
use crate::kernel::adam;
use crate::passing::pass_on;
use crate::products::Products;
use crate::queue::Queue;
use crate::shape::Shape;
use lightering::backend::sim::{Config, Model, World};
use lightering::backend::{
    About, Arg, Backend, Cost, Fence, Grid, Kernel, Memory, Pinner, Timing, Work,
};
use lightering::trace::{Actor, Site, Use};
use lightering::{Bytes, DevicePtr, DeviceRange, EventId, PinnedRange, Result, StreamId};
use std::sync::{Arc, Mutex};

/// Launches that are timed together.
const LAUNCHES: u32 = 8;

fn ordinal() -> u32 {
    std::env::var("LIGHTERING_CUDA").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn open() -> Result<Box<dyn Backend>> {
    let inner = lightering::open(&format!("cuda:{}", ordinal()))?.backend;
    Ok(Box::new(Products::new(Box::new(Cublas::open(ordinal())?), inner)))
}

/// Is there a device? Says aloud where there is none.
fn is_here() -> bool {
    match open() {
        Ok(backend) => {
            aloud(&format!("on {}", backend.about().name));
            true
        }
        Err(error) => {
            aloud(&format!("CUDA's kernels were NOT tried on a device: {error}"));
            false
        }
    }
}

#[test]
fn every_kernel_agrees_with_its_host_form_on_the_device() {
    if !is_here() {
        return;
    }
    let mut wrong = Vec::new();
    let mut rig = open().and_then(Rig::new).unwrap();
    for (tokens, hidden) in SHAPES {
        wrong.extend(compare(&mut rig, &cases::all(tokens, hidden), &mut aloud));
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// What a launch cost.
type Last = Arc<Mutex<Cost>>;

/// A backend that keeps the cost of its last kernel.
struct Costed {
    inner: Box<dyn Backend>,
    last: Last,
}

impl Backend for Costed {
    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        *self.last.lock().unwrap() = (kernel.cost)(&grid, args);
        self.inner.launch(kernel, grid, args, on)
    }

    pass_on!(memory);
    pass_on!(rest);
}

/// Seconds of one launch, and what it costs.
fn time(rig: &mut Rig, last: &Last, case: &Case, shape: &Shape) -> Result<(f64, Cost)> {
    let mut ranges = Vec::new();
    for tensor in (case.tensors)(shape) {
        let bytes = tensor.bytes(shape.element);
        if let Tensor::Text { .. } = tensor {
            ranges.push(rig.upload(&tensor.data().bytes(shape.element))?);
            continue;
        }
        let mut queue = Queue::new(&mut *rig.backend, rig.stream);
        let range = queue.take(bytes)?;
        // bf16 noise is noise in single precision too: its upper half counts.
        adam::fill(&mut queue, range, 1, 1.0)?;
        ranges.push(range);
    }
    let (from, to) = (rig.backend.create_event(Timing::On)?, rig.backend.create_event(Timing::On)?);
    let mut queue = Queue::new(&mut *rig.backend, rig.stream);
    (case.launch)(&mut queue, shape, &ranges)?;
    rig.backend.record(from, rig.stream)?;
    for _ in 0..LAUNCHES {
        let mut queue = Queue::new(&mut *rig.backend, rig.stream);
        (case.launch)(&mut queue, shape, &ranges)?;
    }
    rig.backend.record(to, rig.stream)?;
    rig.backend.sync()?;
    let seconds = rig.backend.elapsed(from, to)?.as_secs_f64() / f64::from(LAUNCHES);
    for range in ranges {
        Queue::new(&mut *rig.backend, rig.stream).give(range)?;
    }
    rig.backend.sync()?;
    let cost = *last.lock().unwrap();
    Ok((seconds, cost))
}

fn costed(inner: Box<dyn Backend>) -> Result<(Rig, Last)> {
    let last = Arc::new(Mutex::new(Cost { flops: 0.0, bytes: 0.0, work: Work::Vector }));
    let rig = Rig::new(Box::new(Costed { inner, last: last.clone() }))?;
    Ok((rig, last))
}

#[test]
fn a_kernels_time_is_taken_between_two_events() {
    let sim = World::new(Config::timed(Model::default())).device(0).unwrap();
    let (mut rig, last) = costed(Box::new(sim)).unwrap();
    for case in cases::all(16, 24) {
        let (seconds, cost) = time(&mut rig, &last, &case, &cases::shape(16, 24, 4)).unwrap();
        assert!(seconds > 0.0 && cost.bytes > 0.0, "{}", case.name);
    }
}

#[test]
#[ignore = "needs a CUDA device with 8 GiB: it measures"]
fn what_each_kernel_moves_a_second() {
    if !is_here() {
        return;
    }
    let (mut rig, last) = open().and_then(costed).unwrap();
    let (tokens, hidden) = (32768, 4096);
    let shape = cases::shape(tokens, hidden, 2);
    for case in cases::all(tokens, hidden) {
        let (seconds, cost) = time(&mut rig, &last, &case, &shape).unwrap();
        let (rate, flops) = (cost.bytes / seconds / 1e9, cost.flops / seconds / 1e12);
        let time = format!("{:9.1} us", 1e6 * seconds);
        aloud(&format!("{:14} {time} {rate:8.0} GB/s {flops:6.0} TFLOP/s", case.name));
        assert!(seconds > 0.0);
    }
}
