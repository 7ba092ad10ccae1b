//! Schedules that look for orders on purpose: by priorities (PCT), and all of them.
//!
//! The fault guarded against: a search that claims to have tried everything and left orders out, or
//! tried some twice; and one that claims to look for rare orders and is no better than chance.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[allow(dead_code, reason = "the helpers serve several test files; each uses its part")]
#[path = "conformance/rig.rs"]
mod rig;

use lightering::backend::sim::{Config, Orders, Pct, Random, Schedule, Sim, World};
use lightering::backend::{Backend, Cost, HostArgs, Timing, Work};
use lightering::trace::{Site, Use};
use lightering::{Bytes, EventId, StreamId};
use rig::Pages;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// What ran, by name, in the order it ran.
type Log = Arc<Mutex<Vec<char>>>;

fn no_cost() -> Cost {
    Cost { flops: 0.0, bytes: 0.0, work: Work::Vector }
}

struct Bench {
    sim: Sim,
    log: Log,
}

impl Bench {
    fn new(schedule: Box<dyn Schedule>) -> Bench {
        let config = Config { device_bytes: Bytes::kib(4), ..Config::scheduled(schedule) };
        Bench { sim: World::new(config).device(0).unwrap(), log: Log::default() }
    }

    fn stream(&mut self) -> StreamId {
        self.sim.create_stream().unwrap()
    }

    /// A kernel that writes its name down when it runs.
    fn kernel(&mut self, on: StreamId, name: char) {
        let log = self.log.clone();
        let body = move |_: &mut HostArgs<'_>| {
            log.lock().unwrap().push(name);
            Ok(())
        };
        self.sim.launch_fn(on, &[], no_cost(), Box::new(body)).unwrap();
    }

    fn kernels(&mut self, on: StreamId, names: &str) {
        names.chars().for_each(|name| self.kernel(on, name));
    }

    fn record(&mut self, on: StreamId) -> EventId {
        let event = self.sim.create_event(Timing::Off).unwrap();
        self.sim.record(event, on).unwrap();
        event
    }

    fn finish(mut self) -> String {
        self.sim.sync().unwrap();
        let log = self.log.lock().unwrap();
        log.iter().collect()
    }
}

/// Every order of a program: how many runs, and the logs that differ.
fn enumerate(mut program: impl FnMut(Bench) -> String) -> (u64, BTreeSet<String>) {
    let mut orders = Orders::new();
    let mut logs = BTreeSet::new();
    while let Some(schedule) = orders.next() {
        logs.insert(program(Bench::new(schedule)));
    }
    (orders.runs(), logs)
}

#[test]
fn two_streams_have_as_many_orders_as_ways_to_shuffle_them() {
    // Binomials: 3 of 7, 4 of 9.
    for (a, b, count) in [("ab", "", 1), ("abc", "wxyz", 35), ("abcde", "wxyz", 126)] {
        let (runs, logs) = enumerate(|mut bench| {
            let (first, second) = (bench.stream(), bench.stream());
            bench.kernels(first, a);
            bench.kernels(second, b);
            bench.finish()
        });
        assert_eq!((runs, logs.len() as u64), (count, count), "no order twice, none left out");
    }
}

#[test]
fn three_streams_and_a_wait_have_the_orders_that_the_wait_leaves() {
    let (runs, logs) = enumerate(|mut bench| {
        let [first, second, third] = [0; 3].map(|_| bench.stream());
        bench.kernels(first, "ab");
        let event = bench.record(first);
        bench.sim.wait(second, event, Site::Outside).unwrap();
        bench.kernels(second, "cd");
        bench.kernels(third, "xy");
        bench.finish()
    });
    // A chain of four and one of two: 2 of 6. Without the wait there were 6! / 2!2!2! = 90.
    assert_eq!((runs, logs.len()), (15, 15));
    let follows = |log: &String| log.find('b') < log.find('c');
    assert!(logs.iter().all(follows));
}

#[test]
fn a_host_that_asks_hears_every_answer_there_can_be() {
    let (runs, logs) = enumerate(|mut bench| {
        let (stream, log) = (bench.stream(), bench.log.clone());
        bench.kernels(stream, "ab");
        let event = bench.record(stream);
        let done = bench.sim.query(event, Site::Outside).unwrap();
        log.lock().unwrap().push(if done { '!' } else { '?' });
        bench.finish()
    });
    let heard: Vec<&str> = logs.iter().map(String::as_str).collect();
    assert_eq!((runs, heard), (3, vec!["?ab", "a?b", "ab!"]));
}

#[test]
fn memory_is_taken_before_and_after_a_free_has_run() {
    let mut places = BTreeSet::new();
    let (runs, _) = enumerate(|mut bench| {
        let (first, second) = (bench.stream(), bench.stream());
        let at = bench.sim.alloc_device(Bytes(256), first).unwrap();
        bench.sim.free_device(at, first).unwrap();
        places.insert(bench.sim.alloc_device(Bytes(256), second).unwrap());
        bench.finish()
    });
    assert_eq!(places.len(), 2, "the same bytes, or others");
    // The device is at the first alloc's fill, at the free's, or through. Then the fill on the
    // second stream runs: before, between or after the two, before or after the one, alone.
    assert_eq!(runs, 3 + 2 + 1);
}

#[test]
fn a_path_replays_the_run_it_came_from() {
    let program = |schedule| {
        let mut bench = Bench::new(schedule);
        let (first, second) = (bench.stream(), bench.stream());
        bench.kernels(first, "abc");
        bench.kernels(second, "xyz");
        bench.finish()
    };
    let mut orders = Orders::new();
    while let Some(schedule) = orders.next() {
        let log = program(schedule);
        assert_eq!(program(Orders::replay(&orders.path())), log);
    }
    assert_eq!(orders.runs(), 20);
}

#[test]
fn a_torn_copy_is_torn_in_every_way_its_pieces_allow() {
    let (_, shapes) = enumerate(|bench| {
        let Bench { mut sim, log } = bench;
        let (pages, pin) = Pages::pinned(&sim, 512);
        pages.write(0, &[1; 512]);
        let (copy, look) = (sim.create_stream().unwrap(), sim.create_stream().unwrap());
        let target = rig::alloc(&mut sim, 512, copy);
        sim.copy_in(target, pin, copy).unwrap();
        let seen = log.clone();
        let looks = move |args: &mut HostArgs<'_>| {
            let pieces = args.read::<u8>(0)?.chunks(256);
            let arrived = pieces.map(|piece| if piece[0] == 1 { '1' } else { '0' });
            seen.lock().unwrap().extend(arrived);
            Ok(())
        };
        sim.launch_fn(look, &[Use::read(target)], no_cost(), Box::new(looks)).unwrap();
        sim.sync().unwrap();
        let log = log.lock().unwrap();
        log.iter().collect()
    });
    let shapes: Vec<&str> = shapes.iter().map(String::as_str).collect();
    assert_eq!(shapes, ["00", "01", "10", "11"]);
}

/// Does a run of two streams, each with so many kernels, come out in one given order? It is one
/// that keeps now one and now the other waiting for longer than a fair choice ever does.
fn planted(schedule: Box<dyn Schedule>, order: &str) -> bool {
    let mut bench = Bench::new(schedule);
    let (a, b) = (bench.stream(), bench.stream());
    for (on, name) in [(b, 'b'), (a, 'a')] {
        order.chars().filter(|one| *one == name).for_each(|_| bench.kernel(on, name));
    }
    bench.finish() == order
}

fn hits(order: &str, runs: u64, schedule: impl Fn(u64) -> Box<dyn Schedule>) -> u64 {
    (0..runs).filter(|seed| planted(schedule(*seed), order)).count() as u64
}

/// Steps of a run of `planted`: the host's calls (two for streams) and the kernels.
fn steps(order: &str) -> u64 {
    2 + 2 * order.len() as u64
}

#[test]
fn priorities_find_a_fault_of_two_orders_that_chance_does_not() {
    let order = format!("{}b{}", "a".repeat(20), "a".repeat(10));
    let (runs, k) = (4_000, steps(&order));
    let pct = hits(&order, runs, |seed| Box::new(Pct::new(seed, 2, k)));
    let random = hits(&order, runs, |seed| Box::new(Random::new(seed)));
    println!("depth 2: {pct} by priorities, {random} by chance, of {runs}; k = {k}");
    // Host and two streams: the guarantee is one in 3 * k.
    assert!(pct >= runs / (3 * k), "{pct} of {runs}");
    assert!(pct > 10 * random, "{pct} by priorities, {random} by chance, of {runs}");
}

#[test]
fn priorities_find_a_fault_of_three_orders_that_chance_does_not() {
    let order = "aaaaaabbbbaaaaaaaabbbbbbbbbb";
    let (runs, k) = (40_000, steps(order));
    let pct = hits(order, runs, |seed| Box::new(Pct::new(seed, 3, k)));
    let random = hits(order, runs, |seed| Box::new(Random::new(seed)));
    println!("depth 3: {pct} by priorities, {random} by chance, of {runs}; k = {k}");
    // The guarantee is one in 3 * k * k.
    assert!(pct >= runs / (3 * k * k), "{pct} of {runs}");
    assert!(pct > 10 * random, "{pct} by priorities, {random} by chance, of {runs}");
}

#[test]
fn a_depth_of_one_finds_no_fault_of_two_orders() {
    let order = format!("{}b{}", "a".repeat(20), "a".repeat(10));
    let k = steps(&order);
    assert_eq!(hits(&order, 2_000, |seed| Box::new(Pct::new(seed, 1, k))), 0);
}

#[test]
fn a_host_that_polls_under_priorities_gets_its_answer() {
    for seed in 0..200 {
        let mut bench = Bench::new(Box::new(Pct::new(seed, 3, 100)));
        let stream = bench.stream();
        bench.kernels(stream, "abc");
        let event = bench.record(stream);
        let polls = (0..10_000).find(|_| bench.sim.query(event, Site::Outside).unwrap());
        assert!(polls.is_some(), "seed {seed}");
    }
}

#[test]
fn equal_seeds_give_equal_runs() {
    let log = |seed| {
        let mut bench = Bench::new(Box::new(Pct::new(seed, 3, 40)));
        let [a, b, c] = [0; 3].map(|_| bench.stream());
        for (on, names) in [(a, "abcdef"), (b, "mnopqr"), (c, "uvwxyz")] {
            bench.kernels(on, names);
        }
        bench.finish()
    };
    let logs: BTreeSet<String> = (0..100).map(log).collect();
    assert!(logs.len() > 20, "{} orders under 100 seeds", logs.len());
    assert!((0..100).all(|seed| log(seed) == log(seed)));
}
