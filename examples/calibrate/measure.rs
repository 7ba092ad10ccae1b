//! What is measured, figure by figure, as the simulated device's model takes it.
//!
//! What it is not: a benchmark of anything but the device. No engine is in it.
//!
//! Invariant: each figure is the median of several takes, and those that are ratios alternate what
//! they compare.
//!
//! ```text
//!   copies   long and short ones -> rate and start; both ways -> their sum
//!   kernels  memory, products, the shortest; each next to copies -> slowdown
//!   calls    the host's time for each verb
//! ```
//!
//! `main` uses it.

use crate::rig::{LONG, Rig, Way};
use crate::work::Products;
use lightering::backend::Timing;
use lightering::trace::Site;
use lightering::{Bytes, Result};

/// A figure of the model by its name.
pub(crate) type Figure = (&'static str, f64);

/// Takes of each figure; the median counts.
const TAKES: usize = 5;
/// Calls of a take, and copies or kernels of one that are short: few enough for a driver's queue.
const CALLS: u32 = 256;
/// How long products run before and while they are timed: until the chip's power has settled.
const SETTLE_SECONDS: f64 = 1.0;
/// How long kernels run beside copies.
const BESIDE_SECONDS: f64 = 0.1;
const SHORT: Bytes = Bytes::kib(64);
const TINY: Bytes = Bytes::kib(4);

/// Every figure that one device alone can tell.
pub(crate) fn all(rig: &mut Rig, layer: [u32; 2]) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    rig.long_vector()?;
    copies(rig, &mut figures)?;
    memory(rig, &mut figures)?;
    products(rig, layer, &mut figures)?;
    calls(rig, &mut figures)?;
    Ok(figures)
}

/// The median of several takes.
fn median(mut take: impl FnMut() -> Result<f64>) -> Result<f64> {
    let mut takes = (0..TAKES).map(|_| take()).collect::<Result<Vec<f64>>>()?;
    takes.sort_unstable_by(f64::total_cmp);
    Ok(takes[TAKES / 2])
}

fn copies(rig: &mut Rig, figures: &mut Vec<Figure>) -> Result<()> {
    let names = [
        ("copy_out_bytes_per_s", "copy_out_start_ns"),
        ("copy_in_bytes_per_s", "copy_in_start_ns"),
    ];
    let mut rates = [0.0; 2];
    for (way, (rate_name, start_name)) in [Way::Out, Way::In].into_iter().zip(names) {
        let long = median(|| one_copy(rig, way, LONG, 8))?;
        let short = median(|| one_copy(rig, way, SHORT, CALLS))?;
        // A copy takes its start, then its bytes: two lengths tell the two apart.
        let rate = (LONG.0 - SHORT.0) as f64 / (long - short);
        rates[way as usize] = rate;
        figures.push((rate_name, rate));
        figures.push((start_name, (short - SHORT.0 as f64 / rate).max(0.0) * 1e9));
    }
    let count = 16;
    let both = median(|| {
        let [out, back] = rig.both_ways(count)?;
        // Until the first way is done both move; then the other goes on alone.
        let (first, alone) = if out < back { (out, rates[1]) } else { (back, rates[0]) };
        let left = (out - back).abs() * alone;
        Ok((2.0 * f64::from(count) * LONG.0 as f64 - left) / first)
    })?;
    figures.push(("copy_both_bytes_per_s", both));
    Ok(())
}

/// Seconds of one copy, in a row of `count` behind a long one: the host is ahead of the device.
fn one_copy(rig: &mut Rig, way: Way, len: Bytes, count: u32) -> Result<f64> {
    rig.copy(way, LONG)?;
    let seconds =
        rig.span(rig.stream(way), |rig| (0..count).try_for_each(|_| rig.copy(way, len)))?;
    Ok(seconds / f64::from(count))
}

fn memory(rig: &mut Rig, figures: &mut Vec<Figure>) -> Result<()> {
    let compute = rig.compute;
    let seconds = median(|| rig.span(compute, |rig| vectors(rig, 16)))? / 16.0;
    figures.push(("memory_bytes_per_s", rig.vector_bytes() / seconds));
    let count = (BESIDE_SECONDS / seconds).ceil() as u32;
    let names = ["vector_slowdown.out", "vector_slowdown.back"];
    slowdowns(rig, names, figures, |rig| vectors(rig, count))?;
    let floor = median(|| {
        // The device is busy until the host has enqueued all the short ones.
        vectors(rig, 8)?;
        rig.span(compute, |rig| (0..CALLS).try_for_each(|_| rig.vector(TINY)))
    })?;
    figures.push(("kernel_floor_ns", floor / f64::from(CALLS) * 1e9));
    Ok(())
}

fn vectors(rig: &mut Rig, count: u32) -> Result<()> {
    (0..count).try_for_each(|_| rig.long_vector())
}

fn products(rig: &mut Rig, layer: [u32; 2], figures: &mut Vec<Figure>) -> Result<()> {
    let compute = rig.compute;
    let mut products = Products::new(&mut *rig.backend, compute, layer)?;
    let mut times = |rig: &mut Rig, count: u32| {
        (0..count).try_for_each(|_| products.enqueue(&mut *rig.backend, compute))
    };
    // The first time the library and its kernels are loaded.
    rig.span(compute, |rig| times(rig, 1))?;
    let one = rig.span(compute, |rig| times(rig, 1))?;
    let count = |seconds: f64| (seconds / one).ceil().clamp(1.0, f64::from(CALLS)) as u32;
    rig.span(compute, |rig| times(rig, count(SETTLE_SECONDS)))?;
    let settled = rig.span(compute, |rig| times(rig, count(SETTLE_SECONDS)))?;
    let names = ["matrix_slowdown.out", "matrix_slowdown.back"];
    let beside = count(BESIDE_SECONDS);
    slowdowns(rig, names, figures, |rig| times(rig, beside))?;
    let flops = products.flops * f64::from(count(SETTLE_SECONDS));
    figures.push(("matrix_flops_per_s", flops / settled));
    rig.backend.sync()?;
    products.close(&mut *rig.backend, compute)
}

/// The part by which copies one way lengthen kernels, for each way: alone, beside, beside, alone.
fn slowdowns(
    rig: &mut Rig,
    names: [&'static str; 2],
    figures: &mut Vec<Figure>,
    mut work: impl FnMut(&mut Rig) -> Result<()>,
) -> Result<()> {
    let compute = rig.compute;
    for (way, name) in [Way::Out, Way::In].into_iter().zip(names) {
        let part = median(|| {
            let first = rig.span(compute, &mut work)?;
            // Enough copies at twice the rate of today's links; more are added where it is not.
            let copies = (1.2 * first * 110e9 / LONG.0 as f64) as u32 + 2;
            let beside =
                rig.beside(way, copies, &mut work)? + rig.beside(way, copies, &mut work)?;
            let last = rig.span(compute, &mut work)?;
            Ok((beside / (first + last) - 1.0).max(0.0))
        })?;
        figures.push((name, part));
    }
    Ok(())
}

fn calls(rig: &mut Rig, figures: &mut Vec<Figure>) -> Result<()> {
    let (compute, out) = (rig.compute, rig.stream(Way::Out));
    let event = rig.backend.create_event(Timing::Off)?;
    rig.backend.record(event, compute)?;
    let mut each = |name, per_take: u32, call: &mut dyn FnMut(&mut Rig) -> Result<()>| {
        let seconds = median(|| rig.host(|rig| (0..CALLS).try_for_each(|_| call(rig))))?;
        figures.push((name, seconds / f64::from(CALLS * per_take) * 1e9));
        Result::Ok(())
    };
    each("copy_call_ns", 1, &mut |rig| rig.copy(Way::Out, TINY))?;
    each("record_call_ns", 1, &mut |rig| rig.backend.record(event, compute))?;
    each("wait_call_ns", 1, &mut |rig| rig.backend.wait(out, event, Site::Outside))?;
    each("query_call_ns", 1, &mut |rig| rig.backend.query(event, Site::Outside).map(drop))?;
    each("alloc_call_ns", 2, &mut |rig| {
        let at = rig.backend.alloc_device(LONG, compute)?;
        rig.backend.free_device(at, compute)
    })?;
    each("launch_call_ns", 1, &mut |rig| rig.vector(TINY))?;
    let mut made = Vec::new();
    each("object_call_ns", 1, &mut |rig| {
        made.push(rig.backend.create_event(Timing::Off)?);
        Ok(())
    })?;
    made.push(event);
    made.into_iter().try_for_each(|event| rig.backend.close_event(event))
}
