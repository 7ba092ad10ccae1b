//! The timed clock against the figures measured on an H200.
//!
//! The fault it guards against: a model that drifts from the machine it stands for, so that a plan
//! made on it is wrong. Every table here was measured; the model may be 12 percent off a point of
//! the piece-size curve, and 3 percent off a sum.

// Helpers outside `#[test]` functions unwrap too: a failed call there is a failed test.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)] // The helpers serve several test files; each uses its part.
#[path = "conformance/rig.rs"]
mod rig;

use lightering::backend::sim::{Config, Model, Sim, World};
use lightering::backend::{Backend, Cost, Timing, Work};
use lightering::trace::Site;
use lightering::{Bytes, DeviceRange, PinnedRange, StreamId};
use rig::{PAGE, Pages, alloc, event, part};
use std::time::Duration;

#[derive(Clone, Copy)]
enum Way {
    Out,
    In,
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn near(value: f64, wanted: f64, percent: f64) {
    let off = (value / wanted - 1.0).abs() * 100.0;
    assert!(off <= percent, "{value} is {off:.1} % off {wanted}");
}

fn copy(sim: &mut Sim, way: Way, device: DeviceRange, pin: PinnedRange, on: StreamId) {
    match way {
        Way::Out => sim.copy_out(pin, device, on).unwrap(),
        Way::In => sim.copy_in(device, pin, on).unwrap(),
    }
}

/// Rate in GB/s of `count` copies of `len` bytes, one after the other.
fn rate(way: Way, len: usize, count: usize) -> f64 {
    let sim = &mut World::new(Config::default()).device(0).unwrap();
    let (_pages, pin) = Pages::pinned(sim, len);
    let a = sim.create_stream().unwrap();
    let device = alloc(sim, len, a);
    let [from, to] = [0; 2].map(|_| sim.create_event(Timing::On).unwrap());
    sim.record(from, a).unwrap();
    for _ in 0..count {
        copy(sim, way, device, pin, a);
    }
    sim.record(to, a).unwrap();
    sim.sync().unwrap();
    (len * count) as f64 / sim.elapsed(from, to).unwrap().as_secs_f64() / 1e9
}

#[test]
fn the_curve_over_piece_sizes_is_the_one_measured() {
    let sizes = [4, 16, 64, 256, 1024, 4096, 16384, 65536];
    let out = [1.2, 4.8, 15.4, 33.4, 47.3, 53.2, 54.2, 54.9];
    let back = [0.9, 3.5, 11.1, 29.2, 45.3, 52.2, 52.4, 54.5];
    for (index, size) in sizes.into_iter().enumerate() {
        let count = if size < 1024 { 32 } else { 1 };
        near(rate(Way::Out, size * KIB, count), out[index], 12.0);
        near(rate(Way::In, size * KIB, count), back[index], 12.0);
    }
}

/// Starts copies of 16 MiB on a stream each for the devices and ways given, and returns the GB/s of
/// all together.
fn rate_together(lanes: &[(u32, Way)]) -> f64 {
    let world = World::new(Config::default());
    let (len, count) = (16 * MIB, 4);
    let mut users: Vec<_> = lanes
        .iter()
        .map(|(device, way)| {
            let mut sim = world.device(*device).unwrap();
            let (pages, pin) = Pages::pinned(&sim, len);
            let stream = sim.create_stream().unwrap();
            let device = alloc(&mut sim, len, stream);
            (sim, pages, pin, stream, device, *way)
        })
        .collect();
    let start = world.now();
    for _ in 0..count {
        for (sim, _, pin, stream, device, way) in &mut users {
            copy(sim, *way, *device, *pin, *stream);
        }
    }
    for (sim, ..) in &mut users {
        sim.sync().unwrap();
    }
    (len * count * lanes.len()) as f64 / (world.now() - start).as_secs_f64() / 1e9
}

#[test]
fn ways_and_devices_share_what_the_host_gives() {
    near(rate_together(&[(0, Way::Out), (0, Way::Out)]), 54.6, 3.0);
    near(rate_together(&[(0, Way::Out), (0, Way::In)]), 92.8, 5.0);
    near(rate_together(&[(0, Way::Out), (1, Way::Out)]), 2.0 * 54.8, 5.0);
    let all = [(0, Way::Out), (0, Way::In), (1, Way::Out), (1, Way::In)];
    near(rate_together(&all), 149.0, 5.0);
}

/// Time of `count` kernels of one cost, while copies go the ways given.
fn kernels(cost: Cost, count: usize, ways: &[Way]) -> f64 {
    let world = World::new(Config::default());
    let mut sim = world.device(0).unwrap();
    let len = 8 * MIB;
    let (_pages, pin) = Pages::pinned(&sim, len);
    let streams = [0; 3].map(|_| sim.create_stream().unwrap());
    let device = alloc(&mut sim, len, streams[0]);
    sim.sync().unwrap();
    let [from, to] = [0; 2].map(|_| sim.create_event(Timing::On).unwrap());
    let copies = (count as f64 * cost.bytes.max(cost.flops / 170.0) / 70.0 / len as f64) as usize;
    for _ in 0..copies + 1 {
        for (way, stream) in ways.iter().zip(&streams[1..]) {
            copy(&mut sim, *way, device, pin, *stream);
        }
    }
    sim.record(from, streams[0]).unwrap();
    for _ in 0..count {
        sim.launch_fn(streams[0], &[], cost, Box::new(|_| Ok(()))).unwrap();
    }
    sim.record(to, streams[0]).unwrap();
    sim.sync().unwrap();
    sim.elapsed(from, to).unwrap().as_secs_f64() * 1e3
}

#[test]
fn copies_slow_kernels_as_measured() {
    let memory = Cost { flops: 0.0, bytes: 3.9e12 * 0.02182 / 40.0, work: Work::Vector };
    let alone = kernels(memory, 4, &[]);
    near(alone, 2.182, 0.5);
    near(kernels(memory, 4, &[Way::Out]) / alone, 22.03 / 21.82, 0.3);
    near(kernels(memory, 4, &[Way::Out, Way::In]) / alone, 22.31 / 21.82, 0.5);
    let product = Cost { flops: 2.0 * 8192_f64.powi(3), bytes: 4e8, work: Work::Matrix };
    let alone = kernels(product, 2, &[]);
    near(alone, 31.2 / 10.0, 1.0);
    near(kernels(product, 2, &[Way::Out, Way::In]) / alone, 32.3 / 31.2, 0.5);
}

#[test]
fn the_host_runs_ahead_and_pays_for_its_calls() {
    let world = World::new(Config::default());
    let mut sim = world.device(0).unwrap();
    let (_pages, pin) = Pages::pinned(&sim, MIB);
    let a = sim.create_stream().unwrap();
    let device = alloc(&mut sim, MIB, a);
    let done = event(&mut sim);
    let start = world.now();
    sim.copy_out(pin, device, a).unwrap();
    sim.record(done, a).unwrap();
    assert_eq!(world.now() - start, Duration::from_nanos(3_000), "enqueuing does not wait");
    assert!(!sim.query(done, Site::Outside).unwrap());
    // The copy began when it was enqueued and takes 3.0 us and 19.07 us.
    world.host_work(Duration::from_nanos(24_700) - (world.now() - start));
    assert!(!sim.world().now().is_zero());
    assert!(
        sim.query(done, Site::Outside).unwrap(),
        "done meanwhile, at {:?}",
        world.now() - start
    );
    let before = world.now();
    sim.sync().unwrap();
    assert_eq!(world.now(), before, "there was nothing left to wait for");
}

#[test]
fn a_host_that_polls_gets_on() {
    let world = World::new(Config::default());
    let mut sim = world.device(0).unwrap();
    let (_pages, pin) = Pages::pinned(&sim, MIB);
    let a = sim.create_stream().unwrap();
    let device = alloc(&mut sim, MIB, a);
    sim.copy_out(pin, device, a).unwrap();
    let done = event(&mut sim);
    sim.record(done, a).unwrap();
    let polls = (1..).find(|_| sim.query(done, Site::Outside).unwrap()).unwrap();
    assert!((40..60).contains(&polls), "22 us at 0.45 us each: {polls}");
}

#[test]
fn a_copy_hides_behind_a_kernel_and_work_behind_a_wait_does_not() {
    let together = |ordered: bool| {
        let world = World::new(Config::default());
        let mut sim = world.device(0).unwrap();
        let (_pages, pin) = Pages::pinned(&sim, 4 * MIB);
        let (a, b) = (sim.create_stream().unwrap(), sim.create_stream().unwrap());
        let device = alloc(&mut sim, 4 * MIB, a);
        sim.sync().unwrap();
        let start = world.now();
        let cost = Cost { flops: 0.0, bytes: 3.9e12 * 100e-6, work: Work::Vector };
        sim.launch_fn(a, &[], cost, Box::new(|_| Ok(()))).unwrap();
        if ordered {
            rig::chain(&mut sim, a, b);
        }
        sim.copy_out(pin, device, b).unwrap();
        sim.sync().unwrap();
        (world.now() - start).as_secs_f64() * 1e6
    };
    near(together(false), 100.0 + 2.5 + 0.8, 2.0);
    near(together(true), 100.0 + 2.5 + 79.3, 2.0);
}

#[test]
fn an_urgent_copy_waits_for_the_one_in_flight_only() {
    let world = World::new(Config::default());
    let mut sim = world.device(0).unwrap();
    let (_pages, pin) = Pages::pinned(&sim, 4 * MIB);
    let [bulk, hop, urgent] = [0; 3].map(|_| sim.create_stream().unwrap());
    let device = alloc(&mut sim, 4 * MIB, bulk);
    sim.sync().unwrap();
    // An event hop between the pieces of a long copy lets others into the line.
    for _ in 0..8 {
        sim.copy_in(device, pin, bulk).unwrap();
        rig::chain(&mut sim, bulk, hop);
        rig::chain(&mut sim, hop, bulk);
    }
    let done = event(&mut sim);
    let start = world.now();
    let small = DeviceRange::new(device.at(), Bytes(PAGE as u64)).unwrap();
    sim.copy_in(small, part(pin, 0, PAGE), urgent).unwrap();
    sim.record(done, urgent).unwrap();
    rig::until_done(&mut sim, done);
    let waited = (world.now() - start).as_secs_f64() * 1e6;
    assert!(waited < 2.0 * 82.0, "waited {waited} us, the whole line is 656 us");
    sim.sync().unwrap();
}

#[test]
fn equal_programs_take_equal_times_whatever_the_host_asks_between() {
    let run = |polls: usize| {
        let world = World::new(Config::timed(Model { query_call_ns: 0.0, ..Model::default() }));
        let mut sim = world.device(0).unwrap();
        let (_pages, pin) = Pages::pinned(&sim, MIB);
        let (a, b) = (sim.create_stream().unwrap(), sim.create_stream().unwrap());
        let device = alloc(&mut sim, MIB, a);
        let done = event(&mut sim);
        for _ in 0..4 {
            sim.copy_out(pin, device, a).unwrap();
            sim.record(done, a).unwrap();
            sim.copy_in(device, pin, b).unwrap();
            for _ in 0..polls {
                sim.query(done, Site::Outside).unwrap();
            }
        }
        sim.sync().unwrap();
        world.now().as_nanos() as f64
    };
    assert_eq!(run(0), run(0));
    near(run(7), run(0), 0.001);
}
