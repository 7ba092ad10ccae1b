//! The simulated device's memory is bounded as a device's is, and what is nobody's on it is not the
//! host's burden.
//!
//! The fault guarded against: a small device in name, whose evicted and freed bytes stay with the
//! host until the system kills the process. One test, since it asks what the process holds.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, Model, Sim, World};
use lightering::pinned::{PinnedPool, PoolOptions};
use lightering::{
    Acquire, Budget, Bytes, DeviceRange, Engine, Evict, Kind, Options, StreamId, trace,
};

/// What the host may hold for bytes that were freed, and as much for those that were unmapped.
const WARM: Bytes = Bytes::mib(256);

fn world(device_bytes: Bytes) -> World {
    World::new(Config { device_bytes, ..Config::timed(Model::default()) })
}

/// Bytes of memory that this process holds now.
fn held() -> Bytes {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split_whitespace().nth(1).unwrap().parse().unwrap();
    Bytes(pages * 4096)
}

#[track_caller]
fn no_more_than(before: Bytes, max: Bytes, what: &str) {
    let more = Bytes(held().0.saturating_sub(before.0));
    // Thread stacks, books, the allocator's own.
    let slack = Bytes::mib(64);
    assert!(more <= max + slack, "{what}: {more} held, {max} bears it");
}

fn device(world: &World) -> (Sim, StreamId) {
    let mut sim = world.device(0).unwrap();
    let on = sim.create_stream().unwrap();
    (sim, on)
}

/// Storages at fixed addresses that are all away but one: each keeps its addresses.
fn bytes_that_are_unmapped_are_not_the_hosts(before: Bytes) {
    let world = world(Bytes::mib(64));
    let (mut sim, _) = device(&world);
    let len = Bytes::mib(32);
    for _ in 0..64 {
        let range = sim.reserve_range(len).unwrap();
        let memory = sim.create_memory(len).unwrap();
        sim.map_memory(range, &[memory]).unwrap();
        sim.unmap_memory(range).unwrap();
        sim.close_memory(memory).unwrap();
    }
    no_more_than(before, WARM, "2 GiB were mapped, 32 MiB at a time");
}

fn freed_bytes_are_not_the_hosts(before: Bytes) {
    let world = world(Bytes::gib(4));
    let (mut sim, on) = device(&world);
    let all: Vec<_> = (0..16).map(|_| sim.alloc_device(Bytes::mib(64), on).unwrap()).collect();
    sim.sync().unwrap();
    for at in all {
        sim.free_device(at, on).unwrap();
    }
    sim.sync().unwrap();
    // Nobody need take anything before the host has its memory back.
    no_more_than(before, WARM, "1 GiB was freed");
    let last = sim.alloc_device(Bytes(1), on).unwrap();
    // What is lent again is whole.
    let again = DeviceRange::new(sim.alloc_device(Bytes::gib(1), on).unwrap(), Bytes::gib(1));
    sim.free_device(again.unwrap().at(), on).unwrap();
    sim.free_device(last, on).unwrap();
    sim.sync().unwrap();
    let memory = sim.memory().unwrap();
    assert_eq!(memory.free, memory.total);
}

fn a_device_lends_what_it_has_and_no_more(before: Bytes) {
    let capacity = Bytes::mib(64);
    let world = world(capacity);
    let (mut sim, on) = device(&world);
    let granularity = sim.map_granularity().unwrap();
    let a_third = Bytes(capacity.0 / 3 / granularity.0 * granularity.0);
    // Both kinds come out of one store.
    sim.alloc_device(a_third, on).unwrap();
    sim.create_memory(a_third).unwrap();
    for refused in [
        sim.alloc_device(a_third + granularity + granularity + granularity, on).unwrap_err(),
        sim.create_memory(a_third + granularity + granularity + granularity).unwrap_err(),
    ] {
        assert_eq!((refused.kind(), refused.driver_code()), (Kind::OutOfMemory, Some(2)));
        let free = capacity - a_third - a_third;
        let told = refused.to_string();
        assert!(told.contains(&format!("{free} of {capacity} are free")), "{told}");
    }
    no_more_than(before, WARM + WARM + capacity, "64 MiB are all there is");
}

/// A program that evicts far more than the device has, through an engine.
fn storages_that_come_and_go_leave_nothing_with_the_host(before: Bytes) {
    let world = world(Bytes::mib(64));
    let sim = Box::new(world.device(0).unwrap());
    let (framework, here) = device(&world);
    let budget = Bytes::mib(128);
    let pool = PoolOptions { budget: Budget::Bytes(budget), ..PoolOptions::default() };
    let pool = PinnedPool::new(sim.pinner(), pool).unwrap();
    let mut engine = Engine::new(sim, &pool, Options::default()).unwrap();
    let on = engine.adopt_stream(framework.raw_stream(here).unwrap()).unwrap();
    let len = Bytes::mib(32);
    for nth in 0..48 {
        let storage = match nth % 2 {
            0 => engine.alloc_fixed(len, on, "fixed"),
            _ => engine.alloc(len, on, "at any address"),
        };
        let storage = storage.unwrap();
        let range = engine.range(storage.id()).unwrap();
        engine.note(on, &[trace::Use::write(range)]).unwrap();
        assert!(matches!(engine.evict(storage.id(), on).unwrap(), Evict::Moving(_)));
        engine.flush(on).unwrap();
        assert!(matches!(engine.acquire(storage.id(), on).unwrap(), Acquire::Ready(_)));
        engine.release(storage, on).unwrap();
    }
    engine.drain().unwrap();
    no_more_than(before, WARM + WARM + budget, "1.5 GiB came and went");
    engine.shutdown().unwrap();
}

#[test]
fn a_small_device_costs_its_host_little_whatever_comes_and_goes() {
    for story in [
        bytes_that_are_unmapped_are_not_the_hosts,
        freed_bytes_are_not_the_hosts,
        a_device_lends_what_it_has_and_no_more,
        storages_that_come_and_go_leave_nothing_with_the_host,
    ] {
        story(held());
    }
}
