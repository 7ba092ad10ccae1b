//! A world that keeps time and books, and moves no byte.
//!
//! The fault it guards against: a prediction that differs from the run it stands for, in a time, an
//! account or a refusal; and one that costs the memory of the machine it is about.

// Helpers outside `#[test]` functions unwrap too: a failed call there is a failed test.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)] // The helpers serve several test files; each uses its part.
#[path = "conformance/rig.rs"]
mod rig;

use lightering::adapter::Checkpoint;
use lightering::backend::sim::{Config, Fault, FaultPlan, Model, Sim, Spot, World};
use lightering::backend::{Arg, Backend, Cost, Grid, Kernel, Memory, Timing, Work};
use lightering::pinned::{Budget, PoolOptions};
use lightering::trace::Use;
use lightering::{Bytes, Engine, Kind, Misuse, Name, Options, PinnedPool};
use rig::{PAGE, Pages, alloc, chain, part, pattern};
use std::time::Duration;

fn open(config: Config) -> Sim {
    World::new(config).device(0).unwrap()
}

/// What a step came to.
#[derive(Debug, PartialEq)]
struct Outcome {
    step: Duration,
    host: Duration,
    after_forward: Memory,
    after_backward: Memory,
    pinned: Bytes,
    moved: Bytes,
    freed: Bytes,
}

/// Forward and backward over layers whose inputs leave and come back next to kernels, each twice as
/// long as the copy of an input.
fn step(config: Config, layers: usize, bytes: Bytes) -> Outcome {
    let world = World::new(config);
    let mut sim = world.device(0).unwrap();
    // A block is an eighth larger at most, in whole pages.
    let room = Bytes((bytes.0 * 9 / 8).next_multiple_of(PAGE as u64) * layers as u64);
    let options = PoolOptions { budget: Budget::Bytes(room), ..PoolOptions::default() };
    let pool = PinnedPool::new(sim.pinner(), options).unwrap();
    pool.reserve(room).unwrap();
    let (unreleased_bytes_max, prefetch_bytes_max) = (Bytes(2 * bytes.0), Bytes(2 * bytes.0));
    let options = Options { unreleased_bytes_max, prefetch_bytes_max, ..Options::default() };
    let mut engine = Engine::new(Box::new(world.device(0).unwrap()), &pool, options).unwrap();
    let stream = sim.create_stream().unwrap();
    let compute = engine.adopt_stream(sim.raw_stream(stream).unwrap()).unwrap();
    let [from, to] = [0; 2].map(|_| sim.create_event(Timing::On).unwrap());
    let flops = 2.0 * bytes.0 as f64 / 55e9 * Model::default().matrix_flops_per_s;
    let cost = Cost { flops, bytes: 0.0, work: Work::Matrix };
    let mut checkpoint = Checkpoint::new();
    sim.record(from, stream).unwrap();
    for _ in 0..layers {
        let storage = engine.alloc(bytes, compute, "input").unwrap();
        let range = engine.range(storage.id()).unwrap();
        sim.launch_fn(stream, &[Use::write(range)], cost, Box::new(|_| Ok(()))).unwrap();
        checkpoint.keep(&mut engine, storage, compute).unwrap();
    }
    let after_forward = engine.memory().unwrap();
    for layer in (0..layers).rev() {
        let range = checkpoint.restore(&mut engine, layer, compute).unwrap();
        sim.launch_fn(stream, &[Use::read(range)], cost, Box::new(|_| Ok(()))).unwrap();
        checkpoint.done(&mut engine, layer, compute).unwrap();
    }
    checkpoint.end_step(&mut engine).unwrap();
    sim.record(to, stream).unwrap();
    sim.sync().unwrap();
    let stats = engine.stats();
    let outcome = Outcome {
        step: sim.elapsed(from, to).unwrap(),
        host: world.now(),
        after_forward,
        after_backward: engine.memory().unwrap(),
        pinned: pool.stats().pinned,
        moved: Bytes(stats.seam.bytes_out),
        freed: Bytes(stats.released_bytes),
    };
    engine.shutdown().unwrap();
    outcome
}

#[test]
fn times_and_books_are_those_of_the_run_that_moves_bytes() {
    for (layers, bytes) in [(1, Bytes::kib(4)), (5, Bytes::kib(64)), (8, Bytes::mib(1))] {
        let model = Model { copy_out_bytes_per_s: 31e9, ..Model::default() };
        let moves = step(Config::timed(model), layers, bytes);
        assert_eq!(step(Config::times_only(model), layers, bytes), moves);
        assert!(layers == 1 || moves.freed >= Bytes(2 * bytes.0), "{moves:?}");
    }
}

/// Physical memory of this process now.
fn resident() -> Bytes {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    Bytes::kib(line.trim().strip_suffix("kB").unwrap().trim().parse().unwrap())
}

#[test]
fn a_step_larger_than_this_machine_costs_it_next_to_nothing() {
    let before = resident();
    // 100 GB of inputs, which leave a device of 141 GB for pinned memory and come back.
    let bytes = Bytes(100_000_000_000 / 48);
    let outcome = step(Config::times_only(Model::default()), 48, bytes);
    let grown = resident().saturating_sub(before);
    assert!(grown < Bytes::mib(256), "this process grew by {grown}");
    assert!(outcome.pinned > Bytes(100_000_000_000) && outcome.moved >= Bytes(90_000_000_000));
    assert!(outcome.after_forward.allocated < Bytes(8 * bytes.0), "{:?}", outcome.after_forward);
    // Two kernels a layer, of twice a copy's time each, slowed while copies run.
    let kernels = 48.0 * 4.0 * bytes.0 as f64 / 55e9;
    let step = outcome.step.as_secs_f64();
    assert!(step > kernels && step < 1.02 * kernels, "{step} {kernels}");
}

#[test]
fn no_byte_of_pinned_memory_changes_and_no_kernel_runs() {
    static NOWHERE: Kernel = Kernel { name: "nowhere", ptx: None, host: None, cost: cost_of_one };
    fn cost_of_one(_: &Grid, _: &[Arg]) -> Cost {
        Cost { flops: 0.0, bytes: 3.9e6, work: Work::Vector }
    }
    let mut sim = open(Config::times_only(Model::default()));
    let (pages, pin) = Pages::pinned(&sim, 2 * PAGE);
    pages.write(0, &pattern(1, 2 * PAGE));
    let stream = sim.create_stream().unwrap();
    let device = alloc(&mut sim, PAGE, stream);
    sim.sync().unwrap();
    let before = sim.world().now();
    sim.copy_in(device, part(pin, 0, PAGE), stream).unwrap();
    sim.launch_fn(stream, &[Use::write(device)], cost_of_one(&Grid::row(1, 1), &[]), {
        Box::new(|_| panic!("a closure ran"))
    })
    .unwrap();
    // A kernel that has no form here still has a cost.
    sim.launch(&NOWHERE, Grid::row(1, 1), &[Arg::Update(device)], stream).unwrap();
    sim.copy_out(part(pin, PAGE, PAGE), device, stream).unwrap();
    sim.sync().unwrap();
    assert!(sim.world().now() - before > Duration::from_micros(2));
    assert_eq!(pages.read(0, 2 * PAGE), pattern(1, 2 * PAGE));
    let mut moves = open(Config::default());
    let stream = moves.create_stream().unwrap();
    let refused = moves.launch(&NOWHERE, Grid::row(1, 1), &[], stream).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::BadKernel), "where bytes move it needs a form");
}

#[test]
fn what_a_device_refuses_is_refused() {
    let faults = FaultPlan::default().at(Spot::Copy, 3, Fault::Refuse);
    let mut sim = open(Config { faults, ..Config::times_only(Model::default()) });
    let (mut pages, pin) = Pages::pinned(&sim, 2 * PAGE);
    let (a, b) = (sim.create_stream().unwrap(), sim.create_stream().unwrap());
    let device = alloc(&mut sim, PAGE, a);
    let long = sim.copy_out(pin, device, a).unwrap_err();
    assert_eq!(long.misuse(), Some(Misuse::LengthMismatch));
    let large = sim.alloc_device(Bytes(141_000_000_000), a).unwrap_err();
    assert_eq!(large.kind(), Kind::OutOfMemory);
    let same = [Use::write(device), Use::read(device)];
    let cost = Cost { flops: 0.0, bytes: 0.0, work: Work::Vector };
    let overlap = sim.launch_fn(a, &same, cost, Box::new(|_| Ok(()))).unwrap_err();
    assert_eq!(overlap.misuse(), Some(Misuse::BadKernel));
    // Memory that queued work uses stays registered.
    sim.copy_out(part(pin, 0, PAGE), device, a).unwrap();
    assert_eq!(pages.unpin().unwrap_err().kind(), Kind::Busy);
    chain(&mut sim, a, b);
    sim.copy_in(device, part(pin, 0, PAGE), b).unwrap();
    let struck = sim.copy_out(part(pin, 0, PAGE), device, a).unwrap_err();
    assert_eq!(struck.kind(), Kind::OutOfMemory, "a fault that was ordered");
    sim.sync().unwrap();
    sim.free_device(device.at(), a).unwrap();
    let freed = sim.copy_out(part(pin, 0, PAGE), device, a).unwrap_err();
    assert_eq!(freed.misuse(), Some(Misuse::OutOfRange));
    // Devices without memory behind them still have addresses of their own.
    let mut other = sim.world().device(1).unwrap();
    let c = other.create_stream().unwrap();
    let there = alloc(&mut other, PAGE, c);
    assert!(sim.copy_out(part(pin, 0, PAGE), there, a).is_err());
    assert!(there.at() != device.at());
}

#[test]
fn a_pool_is_bounded_by_its_budget_alone_and_must_have_one() {
    let sim = open(Config::times_only(Model::default()));
    let auto = PinnedPool::new(sim.pinner(), PoolOptions::default()).unwrap_err();
    assert_eq!(auto.misuse(), Some(Misuse::BadValue));
    assert!(auto.to_string().contains("state a budget"), "{auto}");
    let budget = Budget::Bytes(Bytes::gib(512));
    let options = PoolOptions { budget, ..PoolOptions::default() };
    let pool = PinnedPool::new(sim.pinner(), options).unwrap();
    assert_eq!(pool.budget(), Bytes::gib(512));
    pool.reserve(Bytes::gib(300)).unwrap();
    assert_eq!(pool.reserve(Bytes::gib(600)).unwrap_err().kind(), Kind::OverBudget);
    // What the host writes itself is there.
    let mut client = pool.client(sim.fence(), Bytes::MAX).unwrap();
    let mut block = client.lend(Bytes::gib(1), Name::new("text")).unwrap().block;
    block.write(Bytes::ZERO, b"own").unwrap();
    let mut read = [0; 3];
    block.read(Bytes::ZERO, &mut read).unwrap();
    assert_eq!(&read, b"own");
    client.give_back(block, None).unwrap();
}
