//! What only the simulated device does: it shows wrong order as wrong bytes, and replays.
//!
//! The fault it guards against: a simulator that is kinder than a device. If a missing wait never
//! shows, if freed bytes keep their value, if two runs of a seed differ, then the tests that lean
//! on it pass for nothing.

// Helpers outside `#[test]` functions unwrap too: a failed call there is a failed test.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)] // The helpers serve several test files; each uses its part.
#[path = "conformance/rig.rs"]
mod rig;

use lightering::backend::sim::{Config, Eager, Lazy, Model, Sim, World};
use lightering::backend::traced::Traced;
use lightering::backend::{Backend, Timing};
use lightering::trace::{Actor, Digest, Op, Site, Use};
use lightering::{Bytes, DevicePtr, DeviceRange, EventId, Kind, Missing, Misuse, StreamId};
use rig::{PAGE, Pages, alloc, chain, event, part, pattern, until_done};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn open(config: Config) -> Sim {
    World::new(config).device(0).unwrap()
}

fn small(seed: u64, bytes: u64) -> Config {
    Config { device_bytes: Bytes(bytes), ..Config::adversary(seed) }
}

/// Copies a pattern in on one stream and out on another, with or without the wait between.
fn hop(sim: &mut Sim, wait: bool) -> Vec<u8> {
    let (pages, pin) = Pages::pinned(sim, 2 * PAGE);
    let (a, b) = (sim.create_stream().unwrap(), sim.create_stream().unwrap());
    pages.write(0, &pattern(1, PAGE));
    let device = alloc(sim, PAGE, a);
    // The allocation is ordered before both; only the copy-in may be missed.
    chain(sim, a, b);
    sim.copy_in(device, part(pin, 0, PAGE), a).unwrap();
    if wait {
        chain(sim, a, b);
    }
    sim.copy_out(part(pin, PAGE, PAGE), device, b).unwrap();
    sim.sync().unwrap();
    pages.read(PAGE, PAGE)
}

#[test]
fn a_missing_wait_shows_as_wrong_bytes_and_a_kept_one_never_does() {
    let right = pattern(1, PAGE);
    let (mut none, mut torn, mut lucky) = (0, 0, 0);
    for seed in 0..400 {
        assert_eq!(hop(&mut open(Config::adversary(seed)), true), right, "seed {seed}");
        let read = hop(&mut open(Config::adversary(seed)), false);
        if read == right {
            lucky += 1;
        } else if read.iter().all(|byte| *byte == 0xa1) {
            none += 1;
        } else {
            torn += 1;
        }
    }
    assert!(none > 20 && torn > 20 && lucky > 20, "{none} unwritten, {torn} torn, {lucky} lucky");
}

#[test]
fn a_torn_copy_is_torn_in_whole_pieces_of_256_bytes() {
    let right = pattern(1, PAGE);
    let torn = (0..400).map(|seed| hop(&mut open(Config::adversary(seed)), false));
    let mut shapes = BTreeSet::new();
    for read in torn {
        let pieces = read.chunks(256).zip(right.chunks(256));
        let shape: Vec<bool> = pieces
            .map(|(read, right)| {
                assert!(read == right || read.iter().all(|byte| *byte == 0xa1));
                read == right
            })
            .collect();
        shapes.insert(shape);
    }
    let holes = |shape: &&Vec<bool>| shape.windows(2).filter(|pair| pair[0] != pair[1]).count() > 2;
    assert!(shapes.iter().filter(holes).count() > 10, "pieces come in any order: {}", shapes.len());
}

#[test]
fn a_read_behind_a_free_finds_poison() {
    let mut poisoned = 0;
    for seed in 0..200 {
        let sim = &mut open(Config::adversary(seed));
        let (pages, pin) = Pages::pinned(sim, 2 * PAGE);
        let (a, b) = (sim.create_stream().unwrap(), sim.create_stream().unwrap());
        pages.write(0, &pattern(2, PAGE));
        let device = alloc(sim, PAGE, a);
        sim.copy_in(device, part(pin, 0, PAGE), a).unwrap();
        chain(sim, a, b);
        // The copy-out on `b` is not awaited by `a` before the free there.
        sim.copy_out(part(pin, PAGE, PAGE), device, b).unwrap();
        sim.free_device(device.at(), a).unwrap();
        sim.sync().unwrap();
        poisoned += usize::from(pages.read(PAGE, PAGE).contains(&0xde));
    }
    assert!(poisoned > 20, "only {poisoned} of 200 orders show the free");
}

#[test]
fn a_freed_range_is_lent_at_once_on_its_stream_and_elsewhere_only_when_free() {
    let sim = &mut open(Config::scheduled(Box::new(Lazy::default())));
    let (a, b) = (sim.create_stream().unwrap(), sim.create_stream().unwrap());
    let first = alloc(sim, PAGE, a);
    sim.free_device(first.at(), a).unwrap();
    let other = alloc(sim, PAGE, b);
    assert!(!other.overlaps(first), "its free has not run");
    assert_eq!(alloc(sim, PAGE, a), first, "the same stream keeps the order");
    sim.free_device(first.at(), a).unwrap();
    sim.sync().unwrap();
    assert_eq!(alloc(sim, PAGE, b), first, "now its free has run");
}

#[test]
fn an_allocation_waits_for_frees_before_it_fails() {
    for seed in 0..50 {
        let sim = &mut open(small(seed, 4 * PAGE as u64));
        let (a, b) = (sim.create_stream().unwrap(), sim.create_stream().unwrap());
        let ranges = [0; 4].map(|_| alloc(sim, PAGE, a));
        let full = sim.alloc_device(Bytes(1), b).unwrap_err();
        assert_eq!(full.kind(), Kind::OutOfMemory);
        assert_eq!(sim.memory().unwrap().free, Bytes::ZERO);
        for range in &ranges[..3] {
            sim.free_device(range.at(), a).unwrap();
        }
        // Three neighbours make one gap once their frees have run.
        let large = alloc(sim, 3 * PAGE, b);
        assert!(!large.overlaps(ranges[3]), "seed {seed}");
    }
}

/// A small program in which every answer depends on the order of steps.
fn digest_of(seed: u64) -> Digest {
    let mut sim = Traced::new(open(Config::adversary(seed)), 0);
    let digest = Arc::new(Mutex::new(Digest::default()));
    let seen = Arc::clone(&digest);
    sim.observe(Some(Box::new(move |record| record.digest(&mut seen.lock().unwrap()))));
    let (_pages, pin) = Pages::pinned(&sim, 4 * PAGE);
    let streams = [0; 3].map(|_| sim.create_stream().unwrap());
    let events = [0; 3].map(|_| event(&mut sim));
    for round in 0..24 {
        let (on, done) = (streams[round % 3], events[round % 3]);
        let device = alloc(&mut sim, PAGE, on);
        sim.copy_in(device, part(pin, round % 4 * PAGE, PAGE), on).unwrap();
        sim.record(done, on).unwrap();
        sim.free_device(device.at(), on).unwrap();
        for asked in &events[..=round.min(2)] {
            sim.query(*asked, Site::Outside).unwrap();
        }
    }
    sim.sync().unwrap();
    *digest.lock().unwrap()
}

#[test]
fn a_seed_replays_and_another_seed_runs_otherwise() {
    let digests: Vec<Digest> = (0..64).map(digest_of).collect();
    for (seed, digest) in digests.iter().enumerate() {
        assert_eq!(digest_of(seed as u64), *digest, "seed {seed}");
    }
    let different: BTreeSet<u64> = digests.iter().map(|digest| digest.0).collect();
    assert!(different.len() > 58, "{} different runs of 64", different.len());
}

#[test]
fn a_lazy_device_runs_nothing_until_the_host_waits_or_polls() {
    let sim = &mut open(Config::scheduled(Box::new(Lazy::default())));
    let (pages, pin) = Pages::pinned(sim, PAGE);
    let a = sim.create_stream().unwrap();
    let device = alloc(sim, PAGE, a);
    sim.copy_out(pin, device, a).unwrap();
    let done = event(sim);
    sim.record(done, a).unwrap();
    assert!(!sim.query(done, Site::Outside).unwrap());
    assert_eq!(pages.read(0, PAGE), vec![0; PAGE]);
    until_done(sim, done);
    assert_eq!(pages.read(0, PAGE), vec![0xa1; PAGE], "fresh bytes are marked");
}

#[test]
fn an_eager_device_is_done_when_the_call_returns() {
    let sim = &mut open(Config::scheduled(Box::new(Eager)));
    let (pages, pin) = Pages::pinned(sim, PAGE);
    let a = sim.create_stream().unwrap();
    let device = alloc(sim, PAGE, a);
    sim.copy_out(pin, device, a).unwrap();
    assert_eq!(pages.read(0, PAGE), vec![0xa1; PAGE]);
    let done = event(sim);
    sim.record(done, a).unwrap();
    assert!(sim.query(done, Site::Outside).unwrap());
}

#[test]
fn memory_in_use_is_neither_unpinned_nor_forgotten() {
    let sim = &mut open(Config::scheduled(Box::new(Lazy::default())));
    let (mut pages, pin) = Pages::pinned(sim, PAGE);
    let a = sim.create_stream().unwrap();
    let device = alloc(sim, PAGE, a);
    sim.copy_in(device, pin, a).unwrap();
    assert_eq!(pages.unpin().unwrap_err().kind(), Kind::Busy);
    assert_eq!(sim.world().removals_refused(), 1);
    sim.sync().unwrap();
    pages.unpin().unwrap();
    let refused = sim.copy_in(device, pin, a).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::OutOfRange));
}

#[test]
fn a_stream_of_another_device_is_not_adopted() {
    let world = World::new(Config::adversary(0));
    let (mut zero, mut one) = (world.device(0).unwrap(), world.device(1).unwrap());
    let stream = zero.create_stream().unwrap();
    let raw = zero.raw_stream(stream).unwrap();
    assert_eq!(one.adopt_stream(raw).unwrap_err().misuse(), Some(Misuse::WrongDevice));
    assert_eq!(one.adopt_stream(0xdead_0000).unwrap_err().misuse(), Some(Misuse::Foreign));
    let shared = world.device(0).unwrap().adopt_stream(raw);
    assert!(shared.is_ok());
    zero.close_stream(stream).unwrap();
    assert_eq!(zero.adopt_stream(raw).unwrap_err().misuse(), Some(Misuse::Foreign));
    let missing = world.device(2).unwrap_err();
    assert_eq!(missing.kind(), Kind::Unavailable(Missing::Device));
}

#[test]
fn a_stream_closed_by_its_owner_is_stale_to_those_who_adopted_it() {
    let world = World::new(Config::adversary(0));
    let (mut one, mut two) = (world.device(0).unwrap(), world.device(0).unwrap());
    let stream = one.create_stream().unwrap();
    let adopted = two.adopt_stream(one.raw_stream(stream).unwrap()).unwrap();
    let done = event(&mut two);
    two.record(done, adopted).unwrap();
    one.close_stream(stream).unwrap();
    assert_eq!(two.record(done, adopted).unwrap_err().misuse(), Some(Misuse::Stale));
    until_done(&mut two, done);
    two.close_stream(adopted).unwrap();
}

#[test]
fn bytes_of_another_device_are_out_of_range() {
    let world = World::new(Config::adversary(0));
    let (mut zero, mut one) = (world.device(0).unwrap(), world.device(1).unwrap());
    let (_pages, pin) = Pages::pinned(&zero, PAGE);
    let (a, b) = (zero.create_stream().unwrap(), one.create_stream().unwrap());
    let device = alloc(&mut zero, PAGE, a);
    let refused = one.copy_in(device, pin, b).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::OutOfRange));
    // Pinned memory is shared by all devices of the world.
    let device = alloc(&mut one, PAGE, b);
    one.copy_in(device, pin, b).unwrap();
    zero.free_device(device.at(), a).unwrap_err();
    one.sync().unwrap();
}

#[test]
fn a_range_that_leaves_its_allocation_is_refused() {
    let sim = &mut open(Config::adversary(0));
    let (_pages, pin) = Pages::pinned(sim, 2 * PAGE);
    let a = sim.create_stream().unwrap();
    let (one, two) = (alloc(sim, 1000, a), alloc(sim, PAGE, a));
    let over = DeviceRange::new(one.at(), Bytes(1001)).unwrap();
    let both = DeviceRange::new(one.at(), Bytes(two.end() - one.at().0)).unwrap();
    sim.free_device(two.at(), a).unwrap();
    let high = DeviceRange::new(DevicePtr(u64::MAX - 8), Bytes(8)).unwrap();
    for range in [over, both, two, high] {
        let refused = sim.copy_out(part(pin, 0, range.len().0 as usize), range, a).unwrap_err();
        assert_eq!(refused.misuse(), Some(Misuse::OutOfRange), "{range:?}");
    }
    sim.sync().unwrap();
}

#[test]
fn a_fence_outlives_the_user_it_came_from() {
    let world = World::new(Config::scheduled(Box::new(Lazy::default())));
    let mut sim = world.device(0).unwrap();
    let (pages, pin) = Pages::pinned(&sim, PAGE);
    let a = sim.create_stream().unwrap();
    let device = alloc(&mut sim, PAGE, a);
    sim.copy_out(pin, device, a).unwrap();
    let done = event(&mut sim);
    sim.record(done, a).unwrap();
    let fence = sim.fence();
    drop(sim);
    assert!(!fence.done(done).unwrap());
    world.device(0).unwrap().sync().unwrap();
    assert!(fence.done(done).unwrap());
    assert_eq!(pages.read(0, PAGE), vec![0xa1; PAGE]);
    drop(fence);
}

#[test]
fn the_trace_of_a_traced_device_tells_what_was_asked() {
    let mut sim = Traced::new(open(Config::timed(Model::default())), 64);
    let a: StreamId = sim.create_stream().unwrap();
    let done: EventId = sim.create_event(Timing::Off).unwrap();
    let device = alloc(&mut sim, PAGE, a);
    sim.record(done, a).unwrap();
    sim.note(Actor::Stream(a), &[Use::read(device)]).unwrap();
    sim.free_device(device.at(), a).unwrap();
    sim.sync().unwrap();
    let ops: Vec<Op> = sim.ring().iter().map(|record| record.op).collect();
    assert!(matches!(ops[2], Op::Alloc { range, .. } if range == device));
    assert!(matches!(ops.last(), Some(Op::Sync)));
    assert_eq!(sim.counters().failures, 0);
    assert!(sim.inner().world().now() > Duration::ZERO);
}
