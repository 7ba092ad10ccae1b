//! What is left of a verb that was refused half way: nothing, or what the verb's text says.
//!
//! The faults guarded against are those that random schedules with two or three refusals in one run
//! have found: a storage claimed by a reader that was never made to wait, a block that is nobody's,
//! bytes that nobody ever names, events held for ever, a panic that takes the process with it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, Eager, Fault, FaultPlan, Lazy, Spot, World};
use lightering::policy::Kept;
use lightering::storage::{Residency, Tier};
use lightering::{
    Acquire, Bytes, Engine, Evict, Kind, Options, PinnedPool, Result, Shared, StorageId,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use support::{Rig, options, small_pool};

const LEN: Bytes = Bytes::kib(2);
const AWAY: Residency = Residency::Evicted(Tier::Host);

fn bounds() -> Options {
    Options { note_uses: false, prefetch_count_max: 0, ..options() }
}

/// A rig on a device that runs nothing until it must, with faults.
fn lazy(faults: FaultPlan, options: Options, streams: usize) -> Rig {
    let config = Config { faults, ..Config::scheduled(Box::new(Lazy::default())) };
    Rig::new(config, small_pool(Bytes::mib(1)), options, streams)
}

/// The same on a device that runs everything at once.
fn eager(faults: FaultPlan, options: Options, streams: usize) -> Rig {
    let config = Config { faults, ..Config::scheduled(Box::new(Eager)) };
    Rig::new(config, small_pool(Bytes::mib(1)), options, streams)
}

fn filled(rig: &mut Rig, seed: u64) -> lightering::Storage {
    let storage = rig.engine.alloc(LEN, rig.streams[0].engine, "x").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, seed);
    storage
}

fn named(rig: &mut Rig, stream: usize) -> Option<StorageId> {
    rig.engine.releasable(rig.streams[stream].engine).unwrap()
}

#[test]
fn a_reader_that_could_not_be_made_to_wait_has_claimed_nothing() {
    // Producer, flush, target, copy-out; the fifth wait is the reader's own.
    let faults = FaultPlan::default().at(Spot::Wait, 5, Fault::Refuse);
    let mut rig = lazy(faults, bounds(), 1);
    let on = rig.streams[0].engine;
    let storage = filled(&mut rig, 1);
    rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    let refused = rig.engine.acquire(storage.id(), on).unwrap_err();
    assert_eq!(refused.kind(), Kind::OutOfMemory);
    assert_eq!(rig.engine.residency(storage.id()).unwrap(), AWAY);
    let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else { panic!() };
    rig.check(0, range, 1, "the second time".into());
    rig.engine.release(storage, on).unwrap();
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_block_whose_event_could_not_be_asked_about_goes_back_to_the_pool() {
    let faults = FaultPlan::default().at(Spot::Query, 2, Fault::Refuse);
    let world = World::new(Config { faults, ..Config::scheduled(Box::new(Eager)) });
    let mut sim = world.device(0).unwrap();
    // Room for one block, which two engines want.
    let pool = PinnedPool::new(sim.pinner(), support::quick_pool(Bytes::kib(4))).unwrap();
    let stream = sim.create_stream().unwrap();
    let raw = sim.raw_stream(stream).unwrap();
    let [(mut first, here), (mut second, there)] = [0; 2].map(|_| {
        let device = Box::new(world.device(0).unwrap());
        let mut engine = Engine::new(device, &pool, bounds()).unwrap();
        let on = engine.adopt_stream(raw).unwrap();
        (engine, on)
    });
    // The first one gives the block back busy; the second one learns by a fence that it is not.
    let a = first.alloc(LEN, here, "a").unwrap();
    first.evict(a.id(), here).unwrap();
    first.flush(here).unwrap();
    first.release(a, here).unwrap();
    let b = second.alloc(LEN, there, "b").unwrap();
    assert!(matches!(second.evict(b.id(), there).unwrap(), Evict::Moving(_)));
    second.drain().unwrap();
    second.flush(there).unwrap();
    second.release(b, there).unwrap();
    // Now the first one's event is home, and cannot be asked about.
    let c = first.alloc(LEN, here, "c").unwrap();
    let kept = first.evict(c.id(), here).unwrap();
    assert_eq!((kept, world.faults_struck()), (Evict::Kept(Kept::NoPinnedRoom), 1));
    assert_eq!(pool.stats().quarantined, Bytes::ZERO);
    assert!(matches!(first.evict(c.id(), here).unwrap(), Evict::Moving(_)));
    drop(c);
    for mut engine in [first, second] {
        engine.drain().unwrap();
        engine.shutdown().unwrap();
    }
    assert_eq!((pool.stats().lent, pool.stats().quarantined), (Bytes::ZERO, Bytes::ZERO));
}

#[test]
fn bytes_whose_handle_was_dropped_before_a_stream_was_named_are_named_to_who_asks() {
    let mut rig = eager(FaultPlan::default(), bounds(), 2);
    let range = rig.take(0, LEN).unwrap();
    let storage = rig.engine.adopt(range, "never left").unwrap();
    let id = storage.id();
    rig.fill(0, range, 1);
    drop(storage);
    // The first stream is not asked about any more; several streams have a fence to pass.
    let mut asked = 0;
    while named(&mut rig, 1) != Some(id) {
        asked += 1;
        assert!(asked < 100);
    }
    assert_eq!((named(&mut rig, 0), named(&mut rig, 1)), (None, None), "once");
    rig.give(1, range.at());
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_fence_that_was_passed_holds_no_events() {
    // Eight events: two fences of three streams each would hold six of them for ever.
    let mut rig = eager(FaultPlan::default(), Options { events_max: 8, ..bounds() }, 3);
    for round in 0..6 {
        let s = round % 3;
        let range = rig.take(s, LEN).unwrap();
        let storage = rig.engine.adopt(range, "x").unwrap();
        rig.fill(s, range, 1);
        let on = rig.streams[s].engine;
        let became = rig.engine.evict(storage.id(), on).unwrap();
        assert!(matches!(became, Evict::Moving(_)), "round {round}: {became:?}");
        rig.engine.flush(on).unwrap();
        let mut asked = 0;
        while named(&mut rig, s) != Some(storage.id()) {
            asked += 1;
            assert!(asked < 100, "round {round}");
        }
        rig.give(s, range.at());
    }
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_fence_gets_the_events_that_copies_need_no_more() {
    let mut rig = lazy(FaultPlan::default(), Options { events_max: 8, ..bounds() }, 3);
    let on = rig.streams[0].engine;
    let mut ranges = Vec::new();
    for _ in 0..6 {
        let range = rig.take(0, LEN).unwrap();
        let storage = rig.engine.adopt(range, "x").unwrap();
        rig.fill(0, range, 1);
        assert!(matches!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Moving(_)));
        ranges.push((storage, range));
    }
    rig.engine.flush(on).unwrap();
    rig.sim.sync().unwrap();
    // Six copies hold an event each, and are done; nobody has asked about them.
    for (storage, range) in &ranges {
        let named = (0..1000).find_map(|_| named(&mut rig, 0));
        assert_eq!(named, Some(storage.id()));
        rig.give(0, range.at());
    }
    drop(ranges);
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn device_bytes_that_a_capture_kept_from_going_go_later() {
    let mut rig = lazy(FaultPlan::default(), bounds(), 1);
    let theirs = rig.streams[0].here;
    let storage = filled(&mut rig, 1);
    rig.sim.inner().set_capturing(theirs, true).unwrap();
    drop(storage);
    rig.engine.step().unwrap();
    assert!(rig.engine.memory().unwrap().allocated > Bytes::ZERO, "its stream is captured");
    rig.sim.inner().set_capturing(theirs, false).unwrap();
    rig.engine.step().unwrap();
    assert_eq!(rig.engine.memory().unwrap().allocated, Bytes::ZERO);
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn device_bytes_that_a_capture_kept_from_going_go_at_shutdown_whatever_is_captured() {
    let mut rig = lazy(FaultPlan::default(), bounds(), 1);
    let theirs = rig.streams[0].here;
    let storage = filled(&mut rig, 1);
    rig.sim.inner().set_capturing(theirs, true).unwrap();
    drop(storage);
    rig.engine.step().unwrap();
    rig.engine.shutdown().unwrap();
    rig.sim.inner().set_capturing(theirs, false).unwrap();
    rig.sim.sync().unwrap();
    let memory = rig.sim.memory().unwrap();
    assert_eq!(memory.free, memory.total, "nobody is left to free them");
    rig.assert_right();
}

#[test]
fn a_loss_met_on_the_way_back_from_a_refusal_is_what_the_verb_reports() {
    // The reader's wait is refused, and the undoing of its copy-in finds the device gone.
    let mut lost = 0;
    for call in 16..70 {
        let faults = FaultPlan::default().at(Spot::Wait, 5, Fault::Refuse);
        let faults = faults.at(Spot::Any, call, Fault::Fatal(700));
        let mut rig = lazy(faults, bounds(), 0);
        let acquired = (|| -> Result<()> {
            let here = rig.sim.create_stream()?;
            let on = rig.engine.adopt_stream(rig.sim.raw_stream(here)?)?;
            let storage = rig.engine.alloc(LEN, on, "x")?;
            rig.engine.evict(storage.id(), on)?;
            rig.engine.flush(on)?;
            let acquired = rig.engine.acquire(storage.id(), on);
            let is_lost = rig.engine.residency(storage.id())? == Residency::Lost;
            std::mem::forget(storage);
            match acquired {
                Err(error) => {
                    assert_eq!(error.is_lost(), is_lost, "call {call}: {error}");
                    Err(error)
                }
                Ok(_) => Ok(()),
            }
        })();
        lost += u64::from(acquired.is_err_and(|error| error.is_lost()));
    }
    assert!(lost > 10, "{lost}");
}

/// A kernel's host form that panics in the middle of whatever verb lets it run.
fn blow(rig: &mut Rig, stream: usize) {
    let on = rig.streams[stream].here;
    let cost = lightering::backend::Cost {
        flops: 0.0,
        bytes: 0.0,
        work: lightering::backend::Work::Vector,
    };
    let body = |_: &mut lightering::backend::HostArgs<'_>| {
        std::panic::resume_unwind(Box::new("a kernel's host form"))
    };
    rig.sim.inner().launch_fn(on, &[], cost, Box::new(body)).unwrap();
}

#[test]
fn an_engine_whose_verb_panicked_touches_the_driver_no_more() {
    let mut rig = lazy(FaultPlan::default(), bounds(), 1);
    let on = rig.streams[0].engine;
    let storage = filled(&mut rig, 1);
    rig.engine.evict(storage.id(), on).unwrap();
    blow(&mut rig, 0);
    let Rig { engine, pool, trace, .. } = rig;
    let shared = Shared::new(engine);
    let drained = catch_unwind(AssertUnwindSafe(|| shared.lock().drain()));
    assert!(drained.is_err(), "the kernel ran inside");
    let after = shared.lock().evict(storage.id(), on).unwrap_err();
    assert!(after.is_lost() && after.to_string().contains("panicked"), "{after}");
    assert_eq!(shared.lock().residency(storage.id()).unwrap(), Residency::Lost);
    drop(shared);
    assert!(pool.stats().quarantined > Bytes::ZERO, "what the copy writes is lent to nobody");
    drop(trace);
}

#[test]
fn h38_a_panic_does_not_leave_the_drop_of_an_engine() {
    let patient = Options { drop_deadline: Duration::from_secs(20), ..bounds() };
    let mut rig = lazy(FaultPlan::default(), patient, 1);
    let on = rig.streams[0].engine;
    let storage = filled(&mut rig, 1);
    rig.engine.evict(storage.id(), on).unwrap();
    blow(&mut rig, 0);
    let Rig { engine, pool, .. } = rig;
    drop(engine);
    assert_eq!(pool.stats().lent, Bytes::ZERO);
    drop(storage);
}
