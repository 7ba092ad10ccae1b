//! Kernels on the simulated device, and plain host memory served as a device's.
//!
//! The fault it guards against: a kernel that runs too early, twice, or over bytes that another
//! argument of it aliases; and a host-synchronous stream that returns before its work is done, so
//! that a framework's tensors in host memory are freed under a copy.

// Helpers outside `#[test]` functions unwrap too: a failed call there is a failed test.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)] // The helpers serve several test files; each uses its part.
#[path = "conformance/rig.rs"]
mod rig;

use lightering::backend::sim::{
    Config, Fault, FaultPlan, HOST_STREAM, Lazy, Model, Sim, Spot, World,
};
use lightering::backend::{Arg, Backend, Cost, Grid, HostArgs, Kernel, Timing};
use lightering::trace::{Access, Site, Use};
use lightering::{Bytes, DevicePtr, DeviceRange, Kind, Misuse, Result};
use rig::{PAGE, Pages, alloc, chain, event, part, pattern};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

fn add(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    let (term, sums) = (args.read::<u32>(0)?, args.write::<u32>(1)?);
    let scale = args.u32(2)?;
    sums.iter_mut().zip(term).for_each(|(sum, term)| *sum = sum.wrapping_add(term * scale));
    Ok(())
}

static ADD: Kernel = Kernel { name: "add", ptx: None, host: Some(add), cost: Cost::of_bytes };

fn fail(_: &Grid, args: &mut HostArgs<'_>) -> Result<()> {
    args.u32(0).map(drop)
}

static FAIL: Kernel = Kernel { name: "fail", ptx: None, host: Some(fail), cost: Cost::of_bytes };

const GRID: Grid = Grid::row(1, 32);

fn open(config: Config) -> Sim {
    World::new(config).device(0).unwrap()
}

fn lazy() -> Config {
    Config::scheduled(Box::new(Lazy::default()))
}

fn numbers(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(4).map(|four| u32::from_ne_bytes(four.try_into().unwrap())).collect()
}

#[test]
fn a_kernel_runs_once_in_the_order_of_its_stream() {
    let timed = std::iter::once(Config::timed(Model::default()));
    for config in timed.chain((0..40).map(Config::adversary)) {
        let sim = &mut open(config);
        let (pages, pin) = Pages::pinned(sim, 3 * PAGE);
        let a = sim.create_stream().unwrap();
        let b = sim.create_stream().unwrap();
        pages.write(0, &[1, 0, 0, 0].repeat(PAGE / 4));
        let (term, sums) = (alloc(sim, PAGE, a), alloc(sim, PAGE, a));
        sim.copy_in(term, part(pin, 0, PAGE), a).unwrap();
        sim.copy_in(sums, part(pin, PAGE, PAGE), a).unwrap();
        chain(sim, a, b);
        for scale in [1, 10, 100] {
            sim.launch(&ADD, GRID, &[Arg::Read(term), Arg::Update(sums), Arg::U32(scale)], b)
                .unwrap();
        }
        chain(sim, b, a);
        sim.copy_out(part(pin, 2 * PAGE, PAGE), sums, a).unwrap();
        sim.sync().unwrap();
        assert!(numbers(&pages.read(2 * PAGE, PAGE)).iter().all(|sum| *sum == 111));
    }
}

#[test]
fn arguments_that_alias_a_written_one_are_refused() {
    let sim = &mut open(Config::adversary(0));
    let (_pages, pin) = Pages::pinned(sim, PAGE);
    let a = sim.create_stream().unwrap();
    let device = alloc(sim, PAGE, a);
    let (head, tail) =
        (device.part(Bytes(0), Bytes(2052)).unwrap(), device.part(Bytes(2048), Bytes(8)).unwrap());
    let seen = DeviceRange::new(DevicePtr(pin.at().0), pin.len()).unwrap();
    let refused = [
        sim.launch(&ADD, GRID, &[Arg::Read(head), Arg::Update(tail)], a),
        sim.launch(&ADD, GRID, &[Arg::Write(head), Arg::Read(tail)], a),
        sim.launch(&ADD, GRID, &[Arg::Write(tail), Arg::U32(3), Arg::Write(tail)], a),
        sim.launch_fn(a, &[Use::write(pin), Use::read(seen)], cost(), Box::new(|_| Ok(()))),
        sim.launch_fn(
            a,
            &[Use { access: Access::Free, span: device.into() }],
            cost(),
            Box::new(|_| Ok(())),
        ),
    ];
    for refused in refused {
        assert_eq!(refused.unwrap_err().misuse(), Some(Misuse::BadKernel));
    }
    let read = [Arg::Read(head), Arg::Read(tail)];
    sim.launch(&FAIL, GRID, &read, a).unwrap();
    let out = DeviceRange::new(device.at(), Bytes(PAGE as u64 + 1)).unwrap();
    let refused = sim.launch(&ADD, GRID, &[Arg::Write(out)], a).unwrap_err();
    // The launch before may have been reached, and its loss is told first.
    assert!(refused.is_lost() || refused.misuse() == Some(Misuse::OutOfRange));
}

fn cost() -> Cost {
    Cost::of_bytes(&GRID, &[])
}

#[test]
fn a_closure_runs_over_pinned_and_device_bytes_when_reached() {
    let sim = &mut open(lazy());
    let (pages, pin) = Pages::pinned(sim, PAGE);
    let a = sim.create_stream().unwrap();
    let device = alloc(sim, PAGE, a);
    let runs = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&runs);
    let body = move |args: &mut HostArgs<'_>| {
        seen.fetch_add(1, Ordering::Relaxed);
        let source = args.read::<u8>(0)?;
        args.write::<u8>(1)?.copy_from_slice(source);
        Ok(())
    };
    sim.launch_fn(a, &[Use::read(device), Use::write(pin)], cost(), Box::new(body)).unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 0);
    assert_eq!(sim.pinner().unregister(pin.at()).unwrap_err().kind(), Kind::Busy);
    sim.sync().unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    assert_eq!(pages.read(0, PAGE), vec![0xa1; PAGE]);
}

#[test]
fn a_kernel_that_fails_loses_the_device_and_the_next_verb_says_so() {
    let world = World::new(lazy());
    let (mut one, mut two) = (world.device(0).unwrap(), world.device(0).unwrap());
    let a = one.create_stream().unwrap();
    let done = event(&mut one);
    one.launch(&FAIL, GRID, &[], a).unwrap();
    one.record(done, a).unwrap();
    let lost = loop {
        match one.query(done, Site::Outside) {
            Ok(done) => assert!(!done, "nothing behind the fault is ever done"),
            Err(error) => break error,
        }
    };
    assert_eq!((lost.kind(), lost.op(), lost.driver_code()), (Kind::Lost, "query", Some(719)));
    for later in [one.sync(), two.sync(), two.create_stream().map(drop), one.record(done, a)] {
        assert_eq!(later.unwrap_err(), lost, "the loss keeps the name of who saw it first");
    }
    // The other device of the world is well.
    world.device(1).unwrap().sync().unwrap();
}

#[test]
fn a_kernel_that_panics_leaves_the_device_usable() {
    for config in clocks() {
        let sim = &mut open(config);
        let (mut pages, pin) = Pages::pinned(sim, PAGE);
        let a = sim.create_stream().unwrap();
        let panicking = Box::new(|_: &mut HostArgs<'_>| panic!("ordered by the test"));
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            sim.launch_fn(a, &[Use::write(pin)], cost(), panicking).unwrap();
            sim.sync().unwrap();
        }));
        assert!(caught.is_err());
        let device = alloc(sim, PAGE, a);
        sim.copy_out(pin, device, a).unwrap();
        sim.sync().unwrap();
        assert_eq!(pages.read(0, PAGE), vec![0xa1; PAGE]);
        pages.unpin().unwrap();
    }
}

/// Host memory adopted as memory of the device.
fn adopt(sim: &mut Sim, pages: &Pages, len: usize) -> DeviceRange {
    // SAFETY: the pages outlive the adoption in every test, and are touched between verbs only
    // where no work is queued on them.
    let at = unsafe { sim.adopt_host(pages.at(), Bytes(len as u64)) }.unwrap();
    DeviceRange::new(at, Bytes(len as u64)).unwrap()
}

fn clocks() -> impl Iterator<Item = Config> {
    let others = [lazy(), Config::timed(Model::default())];
    others.into_iter().chain((0..40).map(Config::adversary))
}

#[test]
fn adopted_memory_is_evicted_and_refilled_beside_a_host_synchronous_stream() {
    for config in clocks() {
        let sim = &mut open(config);
        let tensor = Pages::new(PAGE);
        let (pages, pin) = Pages::pinned(sim, PAGE);
        let (host, lane) = (sim.host_stream().unwrap(), sim.create_stream().unwrap());
        let device = adopt(sim, &tensor, PAGE);
        assert_eq!(device.at().0, tensor.at().as_ptr() as u64, "adopted at its own address");
        tensor.write(0, &pattern(5, PAGE));
        chain(sim, host, lane);
        sim.copy_out(pin, device, lane).unwrap();
        // The wait returns only when the copy is done, so the tensor may change at once.
        chain(sim, lane, host);
        tensor.write(0, &pattern(6, PAGE));
        assert_eq!(pages.read(0, PAGE), pattern(5, PAGE));
        chain(sim, host, lane);
        sim.copy_in(device, pin, lane).unwrap();
        chain(sim, lane, host);
        assert_eq!(tensor.read(0, PAGE), pattern(5, PAGE));
        sim.forget_host(device.at()).unwrap();
        assert_eq!(sim.world().removals_refused(), 0);
    }
}

#[test]
fn everything_on_the_host_synchronous_stream_is_done_when_the_call_returns() {
    for config in clocks() {
        let sim = &mut open(config);
        let (pages, pin) = Pages::pinned(sim, PAGE);
        let host = sim.host_stream().unwrap();
        assert_eq!(sim.raw_stream(host).unwrap(), HOST_STREAM);
        let device = alloc(sim, PAGE, host);
        sim.copy_out(pin, device, host).unwrap();
        assert_eq!(pages.read(0, PAGE), vec![0xa1; PAGE]);
        let done = sim.create_event(Timing::On).unwrap();
        sim.record(done, host).unwrap();
        assert!(sim.query(done, Site::Outside).unwrap());
        assert!(sim.elapsed(done, done).unwrap().is_zero());
        sim.free_device(device.at(), host).unwrap();
    }
}

#[test]
fn adopted_memory_in_use_is_not_forgotten() {
    let sim = &mut open(lazy());
    let tensor = Pages::new(2 * PAGE);
    let (_pages, pin) = Pages::pinned(sim, PAGE);
    let a = sim.create_stream().unwrap();
    let device = adopt(sim, &tensor, PAGE);
    // SAFETY: refused, so nothing is adopted.
    let twice = unsafe { sim.adopt_host(tensor.at(), Bytes(2 * PAGE as u64)) }.unwrap_err();
    assert_eq!(twice.misuse(), Some(Misuse::Overlap));
    let over = DeviceRange::new(device.at(), Bytes(PAGE as u64 + 1)).unwrap();
    let refused = sim.launch_fn(a, &[Use::read(over)], cost(), Box::new(|_| Ok(())));
    assert_eq!(refused.unwrap_err().misuse(), Some(Misuse::OutOfRange));
    sim.copy_out(pin, device, a).unwrap();
    assert_eq!(sim.forget_host(device.at()).unwrap_err().kind(), Kind::Busy);
    assert_eq!(sim.world().removals_refused(), 1);
    sim.sync().unwrap();
    sim.forget_host(device.at()).unwrap();
    assert_eq!(sim.forget_host(device.at()).unwrap_err().misuse(), Some(Misuse::Stale));
    let gone = sim.copy_out(pin, device, a).unwrap_err();
    assert_eq!(gone.misuse(), Some(Misuse::OutOfRange));
}

#[test]
fn a_host_synchronous_call_on_a_lost_device_returns_with_the_loss() {
    let faults = FaultPlan::default().at(Spot::Copy, 2, Fault::Fatal(700));
    let sim = &mut open(Config { faults, ..lazy() });
    let (_pages, pin) = Pages::pinned(sim, PAGE);
    let (host, lane) = (sim.host_stream().unwrap(), sim.create_stream().unwrap());
    let device = alloc(sim, PAGE, host);
    sim.copy_out(pin, device, lane).unwrap();
    let done = event(sim);
    sim.record(done, lane).unwrap();
    let lost = sim.copy_out(pin, device, lane).unwrap_err();
    assert_eq!((lost.kind(), lost.op(), lost.driver_code()), (Kind::Lost, "copy_out", Some(700)));
    assert_eq!(sim.wait(host, done, Site::Outside).unwrap_err(), lost);
}
