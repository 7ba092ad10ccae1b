//! Mapped memory of the simulated device: what a driver would say too late, or by ending the
//! process, it says by name.
//!
//! The fault guarded against is an address that outlives its bytes: whoever uses it then must be
//! found, and so must whoever takes the bytes away too early.

#![allow(clippy::unwrap_used)]

use lightering::backend::sim::{Config, Fault, FaultPlan, Lazy, Model, Sim, Spot, World};
use lightering::backend::traced::Traced;
use lightering::backend::{Backend, Cost, Timing, Work};
use lightering::hazard::{self, Checker};
use lightering::trace::{Actor, Site, Use};
use lightering::{Bytes, DeviceRange, Kind, MemoryId, Missing, Misuse, StreamId};
use std::sync::{Arc, Mutex};

const UNIT: Bytes = Bytes(512);

fn lazy() -> Config {
    Config::scheduled(Box::new(Lazy::default()))
}

struct Bench {
    sim: Traced<Sim>,
    on: StreamId,
    range: DeviceRange,
    memory: MemoryId,
    checker: Arc<Mutex<Checker>>,
}

impl Bench {
    fn new(config: Config) -> Bench {
        let world = World::new(config);
        let mut sim = Traced::new(world.device(0).unwrap(), 0);
        let checker = Arc::new(Mutex::new(Checker::new()));
        let push = checker.clone();
        sim.observe(Some(Box::new(move |record| push.lock().unwrap().push(record))));
        let on = sim.create_stream().unwrap();
        let range = sim.reserve_range(UNIT).unwrap();
        let memory = sim.create_memory(UNIT).unwrap();
        Bench { sim, on, range, memory, checker }
    }

    fn mapped(config: Config) -> Bench {
        let mut bench = Bench::new(config);
        bench.sim.map_memory(bench.range, &[bench.memory]).unwrap();
        bench
    }

    /// A kernel that writes all of the bytes.
    fn fill(&mut self) -> lightering::Result<()> {
        let uses = [Use::write(self.range)];
        let cost = Cost { flops: 0.0, bytes: 0.0, work: Work::Vector };
        let body = Box::new(|args: &mut lightering::backend::HostArgs<'_>| {
            args.write::<u8>(0)?.fill(1);
            Ok(())
        });
        self.sim.inner().launch_fn(self.on, &uses, cost, body)?;
        self.sim.note(Actor::Stream(self.on), &uses)
    }

    fn hazards(&self) -> Vec<hazard::Kind> {
        self.checker.lock().unwrap().hazards().iter().map(|hazard| hazard.kind).collect()
    }
}

#[test]
fn bytes_unmapped_under_queued_work_are_a_loss_that_says_so() {
    let mut bench = Bench::mapped(lazy());
    bench.fill().unwrap();
    bench.sim.unmap_memory(bench.range).unwrap();
    let lost = bench.sim.sync().unwrap_err();
    assert_eq!((lost.kind(), lost.driver_code()), (Kind::Lost, Some(700)));
    assert!(lost.to_string().contains("unmapped that queued work uses"), "{lost}");
    assert_eq!(bench.hazards(), [hazard::Kind::FreeInFlight]);
}

#[test]
fn bytes_unmapped_once_their_work_is_known_done_are_gone_and_no_more() {
    let mut bench = Bench::mapped(lazy());
    bench.fill().unwrap();
    let done = bench.sim.create_event(Timing::Off).unwrap();
    bench.sim.record(done, bench.on).unwrap();
    while !bench.sim.query(done, Site::Outside).unwrap() {}
    bench.sim.unmap_memory(bench.range).unwrap();
    let refused = bench.fill().unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::OutOfRange), "{refused}");
    bench.sim.map_memory(bench.range, &[bench.memory]).unwrap();
    bench.fill().unwrap();
    bench.sim.sync().unwrap();
    bench.sim.unmap_memory(bench.range).unwrap();
    bench.checker.lock().unwrap().finish();
    assert_eq!(bench.hazards(), []);
}

#[test]
fn what_is_done_but_not_known_done_is_flagged_all_the_same() {
    // The device is fast enough this time; the order that was asked for allows another.
    let mut bench = Bench::mapped(Config::scheduled(Box::new(lightering::backend::sim::Eager)));
    bench.fill().unwrap();
    bench.sim.unmap_memory(bench.range).unwrap();
    bench.sim.sync().unwrap();
    assert_eq!(bench.hazards(), [hazard::Kind::FreeInFlight]);
}

#[test]
fn memory_that_stays_mapped_is_a_leak() {
    let bench = Bench::mapped(lazy());
    bench.checker.lock().unwrap().finish();
    assert_eq!(bench.hazards(), [hazard::Kind::Leak]);
}

#[test]
fn a_note_of_bytes_that_are_not_mapped_is_a_use_after_free() {
    let mut bench = Bench::mapped(lazy());
    bench.sim.unmap_memory(bench.range).unwrap();
    bench.sim.note(Actor::Stream(bench.on), &[Use::read(bench.range)]).unwrap();
    assert_eq!(bench.hazards(), [hazard::Kind::UseAfterFree]);
}

#[test]
fn a_device_that_cannot_map_memory_says_so() {
    let world = World::new(Config { map_granularity: Bytes::ZERO, ..lazy() });
    let mut sim = world.device(0).unwrap();
    let refusals = [
        sim.map_granularity().map(drop),
        sim.reserve_range(UNIT).map(drop),
        sim.create_memory(UNIT).map(drop),
    ];
    for refused in refusals {
        assert_eq!(refused.unwrap_err().kind(), Kind::Unavailable(Missing::Mapping));
    }
}

#[test]
fn a_call_of_mapping_that_fails_changes_nothing() {
    let faults = [(Spot::Create, 3), (Spot::Create, 4), (Spot::Map, 1), (Spot::Unmap, 1)];
    for (spot, nth) in faults {
        let mut config = lazy();
        config.faults = FaultPlan::default().at(spot, nth, Fault::Refuse);
        let mut bench = Bench::new(config);
        let mut failed = 0;
        let mut twice = |result: lightering::Result<()>| match result {
            Ok(()) => false,
            Err(error) => {
                failed += 1;
                assert_eq!(error.kind(), Kind::OutOfMemory, "{error}");
                true
            }
        };
        let free = bench.sim.memory().unwrap().free;
        let memory = match bench.sim.create_memory(UNIT) {
            Err(error) => {
                twice(Err(error));
                assert_eq!(bench.sim.memory().unwrap().free, free);
                bench.sim.create_memory(UNIT).unwrap()
            }
            Ok(memory) => memory,
        };
        let range = match bench.sim.reserve_range(UNIT) {
            Err(error) => {
                twice(Err(error));
                bench.sim.reserve_range(UNIT).unwrap()
            }
            Ok(range) => range,
        };
        if twice(bench.sim.map_memory(range, &[memory])) {
            assert_eq!(bench.sim.unmap_memory(range).unwrap_err().misuse(), Some(Misuse::State));
            bench.sim.map_memory(range, &[memory]).unwrap();
        }
        if twice(bench.sim.unmap_memory(range)) {
            assert_eq!(bench.sim.close_memory(memory).unwrap_err().misuse(), Some(Misuse::State));
            bench.sim.unmap_memory(range).unwrap();
        }
        bench.sim.close_memory(memory).unwrap();
        bench.sim.release_range(range).unwrap();
        assert_eq!((failed, bench.sim.memory().unwrap().free), (1, free), "{spot:?}");
    }
}

#[test]
fn memory_serves_only_once_the_stream_that_frees_it_got_there() {
    let mut config = lazy();
    config.device_bytes = UNIT;
    let world = World::new(config);
    let mut sim = world.device(0).unwrap();
    let on = sim.create_stream().unwrap();
    let at = sim.alloc_device(UNIT, on).unwrap();
    sim.free_device(at, on).unwrap();
    let refused = sim.create_memory(UNIT).unwrap_err();
    assert_eq!(refused.kind(), Kind::OutOfMemory, "the free has not run: {refused}");
    sim.sync().unwrap();
    let memory = sim.create_memory(UNIT).unwrap();
    // And what is mapped elsewhere is room that nobody else has.
    assert_eq!(sim.alloc_device(Bytes(1), on).unwrap_err().kind(), Kind::OutOfMemory);
    sim.close_memory(memory).unwrap();
    sim.alloc_device(UNIT, on).unwrap();
}

#[test]
fn where_only_times_count_mapped_memory_takes_none_of_the_hosts() {
    let world = World::new(Config::times_only(Model::default()));
    let mut sim = world.device(0).unwrap();
    let len = Bytes::gib(128);
    let (range, memory) = (sim.reserve_range(len).unwrap(), sim.create_memory(len).unwrap());
    sim.map_memory(range, &[memory]).unwrap();
    sim.unmap_memory(range).unwrap();
    sim.close_memory(memory).unwrap();
    sim.release_range(range).unwrap();
}
