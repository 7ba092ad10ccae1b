//! Copies whose end nothing marks: the driver refused the record behind them, and then the wait for
//! the whole device, too, as it does while somebody captures a stream.
//!
//! The faults guarded against: a block that goes back to the pool, or device bytes that go back to
//! the driver or their framework, while such a copy may still touch them; and an engine that never
//! gets over it, though the next record is not refused.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "../examples/train/passing.rs"]
mod passing;
#[path = "unmarked/story.rs"]
mod story;
mod support;

use lightering::backend::sim::{Config, Fault, FaultPlan, Lazy, Random, Sim, Spot};
use lightering::backend::{About, Arg, Backend, Fence, Grid, Kernel, Memory, Pinner, Timing};
use lightering::pack::UNPACK;
use lightering::storage::{Residency, Tier};
use lightering::trace::{Actor, Site, Use};
use lightering::{
    Acquire, Bytes, DevicePtr, DeviceRange, Engine, Error, EventId, Kind, Misuse, Options,
    PinnedRange, Result, StreamId,
};
use passing::pass_on;
use std::sync::Arc;
use std::time::Duration;
use story::{LEN, Story, TRIES, filled, strips};
use support::{Rig, options, small_pool};

const AWAY: Residency = Residency::Evicted(Tier::Host);
/// A stream is being captured, so that the wait for the device is refused.
const CAPTURED: Fault = Fault::Reject(900);

fn bounds() -> Options {
    let drop_deadline = Duration::ZERO;
    Options { note_uses: false, prefetch_count_max: 0, drop_deadline, ..options() }
}

/// The device refuses `records`, and every wait for the whole of it up to the `syncs`-th.
fn silent(records: std::ops::RangeInclusive<u64>, syncs: u64) -> FaultPlan {
    let plan =
        records.fold(FaultPlan::default(), |plan, nth| plan.at(Spot::Record, nth, Fault::Refuse));
    (1..=syncs).fold(plan, |plan, nth| plan.at(Spot::Sync, nth, CAPTURED))
}

/// A rig on a device that runs nothing until it must.
fn lazy(faults: FaultPlan) -> Rig {
    let config = Config { faults, ..Config::scheduled(Box::new(Lazy::default())) };
    Rig::new(config, small_pool(Bytes::mib(1)), bounds(), 1)
}

fn assert_no_hazard(rig: &Rig) {
    assert_eq!(rig.hazards(), Vec::<String>::new());
}

/// All is over, and the engine is as good as new.
fn assert_healed(rig: &mut Rig) {
    rig.assert_right();
    assert_eq!(rig.engine.memory().unwrap().allocated, Bytes::ZERO);
    rig.assert_nothing_left();
    assert_no_hazard(rig);
}

#[test]
fn a_block_that_an_unmarked_copy_fills_is_lent_to_nobody() {
    // E1, then the end of the copy; the next verbs ask for it again.
    let mut rig = lazy(silent(2..=4, 3));
    let on = rig.streams[0].engine;
    let storage = filled(&mut rig, 1);
    let refused = rig.engine.evict(storage.id(), on).unwrap_err();
    assert_eq!(refused.kind(), Kind::OutOfMemory, "the first cause: {refused}");
    assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Resident);
    // Another engine of the pool's, whose copies come behind nothing of the first one's.
    let mut other =
        Engine::new(Box::new(rig.world.device(0).unwrap()), &rig.pool, bounds()).unwrap();
    other.observe(Some(support::observer(&rig.trace)));
    let raw = rig.sim.raw_stream(rig.streams[0].here).unwrap();
    let there = other.adopt_stream(raw).unwrap();
    rig.trace.lock().unwrap().streams.insert(there, rig.streams[0].here);
    let theirs = other.alloc(LEN, there, "theirs").unwrap();
    let range = other.range(theirs.id()).unwrap();
    rig.fill(0, range, 7);
    for _ in 0..2 {
        let pool = rig.pool.stats();
        assert!(pool.lent + pool.quarantined >= LEN, "a copy still fills it: {pool}");
        let still = rig.engine.step().unwrap_err();
        assert_eq!(still.kind(), Kind::OutOfMemory, "{still}");
    }
    other.evict(theirs.id(), there).unwrap();
    assert_no_hazard(&rig);
    // The fifth record is not refused: the copy has an end, and the block a guard.
    rig.engine.step().unwrap();
    other.release(theirs, there).unwrap();
    other.drain().unwrap();
    other.shutdown().unwrap();
    rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else { panic!() };
    rig.check(0, range, 1, "after all".into());
    rig.engine.release(storage, on).unwrap();
    assert_healed(&mut rig);
}

#[test]
fn device_bytes_that_an_unmarked_copy_reads_are_not_freed() {
    let mut rig = lazy(silent(2..=3, 2));
    let on = rig.streams[0].engine;
    let storage = filled(&mut rig, 1);
    rig.engine.evict(storage.id(), on).unwrap_err();
    rig.engine.release(storage, on).unwrap_err();
    // What would go to the freed bytes' place.
    let mine = rig.take(0, LEN).unwrap();
    rig.fill(0, mine, 2);
    assert_no_hazard(&rig);
    rig.engine.step().unwrap();
    rig.give(0, mine.at());
    rig.engine.drain().unwrap();
    assert_eq!(rig.engine.stats().storages, 0, "it ended when it could");
    assert_healed(&mut rig);
}

#[test]
fn a_frameworks_bytes_that_an_unmarked_copy_reads_are_not_named() {
    let mut rig = lazy(silent(2..=5, 4));
    let on = rig.streams[0].engine;
    let range = rig.take(0, LEN).unwrap();
    let storage = rig.engine.adopt(range, "x").unwrap();
    rig.fill(0, range, 1);
    rig.engine.evict(storage.id(), on).unwrap_err();
    rig.engine.note(on, &[Use::write(range)]).expect_err("a copy still reads them");
    let id = storage.id();
    rig.engine.release(storage, on).unwrap_err();
    rig.engine.releasable(on).unwrap_err();
    rig.engine.flush(on).unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(id), "once, when it may");
    rig.give(0, range.at());
    assert_healed(&mut rig);
}

#[test]
fn a_target_that_an_unmarked_copy_writes_is_not_freed() {
    let mut rig = lazy(FaultPlan::default());
    let on = rig.streams[0].engine;
    let storage = filled(&mut rig, 1);
    rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    let records = rig.engine.stats().seam.records;
    drop(storage);
    drop(rig);
    // The target's own record, then the end of the copy-in.
    let mut rig = lazy(silent(records + 2..=records + 3, 2));
    let on = rig.streams[0].engine;
    let storage = filled(&mut rig, 1);
    rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    rig.engine.acquire(storage.id(), on).unwrap_err();
    assert_eq!(rig.engine.residency(storage.id()).unwrap(), AWAY);
    let mine = rig.take(0, LEN).unwrap();
    rig.fill(0, mine, 2);
    assert_no_hazard(&rig);
    rig.engine.acquire(storage.id(), on).unwrap_err();
    let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else { panic!() };
    rig.check(0, range, 1, "after all".into());
    rig.check(0, mine, 2, "another's".into());
    rig.give(0, mine.at());
    rig.engine.release(storage, on).unwrap();
    assert_healed(&mut rig);
}

/// A storage whose address stays, out and unmapped.
fn unmapped(faults: FaultPlan) -> (Rig, lightering::Storage) {
    let mut rig = lazy(faults);
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc_fixed(LEN, on, "stays").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, 1);
    rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    while rig.engine.residency(storage.id()).unwrap() != AWAY {
        rig.engine.step().unwrap();
    }
    assert_eq!(rig.engine.stats().mapped_bytes, 0);
    (rig, storage)
}

#[test]
fn a_fixed_address_that_an_unmarked_copy_writes_stays_mapped_until_it_is_over() {
    let records = unmapped(FaultPlan::default()).0.engine.stats().seam.records;
    for is_ended in [false, true] {
        // The end of the copy-in, then the same asked for again.
        let (mut rig, storage) = unmapped(silent(records + 1..=records + 2, 2));
        let on = rig.streams[0].engine;
        rig.engine.acquire(storage.id(), on).unwrap_err();
        assert_eq!(rig.engine.residency(storage.id()).unwrap(), AWAY);
        let mapped = rig.engine.stats().mapped_bytes;
        assert!(mapped >= LEN.0, "unmapped under the copy");
        let mut storage = Some(storage);
        if is_ended {
            rig.engine.release(storage.take().unwrap(), on).unwrap_err();
        } else {
            rig.engine.step().unwrap_err();
        }
        assert_eq!(rig.engine.stats().mapped_bytes, mapped, "unmapped under the copy");
        assert_no_hazard(&rig);
        for _ in 0..1000 {
            rig.engine.step().unwrap();
        }
        assert_eq!(rig.engine.stats().mapped_bytes, 0, "nobody wants it");
        if let Some(storage) = storage {
            let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else {
                panic!()
            };
            rig.check(0, range, 1, "after all".into());
            rig.engine.release(storage, on).unwrap();
            rig.engine.drain().unwrap();
        }
        assert_healed(&mut rig);
    }
}

#[test]
fn a_fixed_address_that_an_unmarked_copy_reads_is_not_unmapped_by_its_end() {
    // E1, then the end of the copy; the next verb asks for it again.
    let mut rig = lazy(silent(2..=3, 2));
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc_fixed(LEN, on, "stays").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, 1);
    rig.engine.evict(storage.id(), on).unwrap_err();
    let mapped = rig.engine.stats().mapped_bytes;
    rig.engine.release(storage, on).unwrap_err();
    assert_eq!(rig.engine.stats().mapped_bytes, mapped, "unmapped under the copy");
    assert_no_hazard(&rig);
    for _ in 0..1000 {
        rig.engine.step().unwrap();
    }
    let stats = rig.engine.stats();
    assert_eq!((stats.mapped_bytes, stats.storages), (0, 0));
    assert_healed(&mut rig);
}

#[test]
fn what_nothing_ever_proves_idle_is_in_quarantine_when_its_engine_is_gone() {
    let mut rig = lazy(silent(2..=1000, 1000));
    let on = rig.streams[0].engine;
    let storage = filled(&mut rig, 1);
    rig.engine.evict(storage.id(), on).unwrap_err();
    rig.engine.drain().unwrap_err();
    rig.engine.shutdown().unwrap_err();
    let Rig { engine, pool, trace, sim, .. } = rig;
    drop(engine);
    let (lent, quarantined) = (pool.stats().lent, pool.stats().quarantined);
    assert_eq!(lent, Bytes::ZERO);
    assert!(quarantined >= LEN, "{quarantined}");
    let held = trace.lock().unwrap().checker.total();
    assert_eq!(held, 0, "{}", support::told(&trace.lock().unwrap().checker));
    drop((storage, sim));
}

#[test]
fn a_block_that_is_being_filled_when_the_device_is_lost_is_lent_to_nobody() {
    // The record behind the copy is where the loss is first seen.
    let mut rig = lazy(FaultPlan::default().at(Spot::Record, 2, Fault::Fatal(700)));
    let on = rig.streams[0].engine;
    let storage = filled(&mut rig, 1);
    assert!(rig.engine.evict(storage.id(), on).unwrap_err().is_lost());
    let pool = rig.pool.stats();
    assert!(pool.lent + pool.quarantined >= LEN, "another device may use the pool: {pool}");
    let Rig { engine, pool, .. } = rig;
    drop(engine);
    assert_eq!(pool.stats().lent, Bytes::ZERO);
    assert!(pool.stats().quarantined >= LEN, "{}", pool.stats());
}

/// Cannot load the kernel that unpacks; all else it can.
struct NoUnpack {
    inner: Sim,
}

impl Backend for NoUnpack {
    pass_on!(memory);

    fn launch(
        &mut self,
        kernel: &'static Kernel,
        g: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        if std::ptr::eq(kernel, &UNPACK) {
            return Err(Error::usage(Misuse::BadKernel, "launch"));
        }
        self.inner.launch(kernel, g, args, on)
    }

    pass_on!(rest);
}

#[test]
fn a_batch_whose_second_way_back_was_refused_keeps_its_block_for_the_first() {
    // The gather's wait; then two for the copy to the staging bytes, whose kernel is refused, and
    // the first of those for the copies row by row.
    let faults = FaultPlan::default().at(Spot::Wait, 4, Fault::Refuse);
    let config = Config { faults, ..Config::scheduled(Box::new(Lazy::default())) };
    let wrap = |inner: Sim| -> Box<dyn Backend> { Box::new(NoUnpack { inner }) };
    let mut rig = Rig::wrapped(config, small_pool(Bytes::mib(1)), bounds(), 1, wrap);
    let on = rig.streams[0].engine;
    let from = rig.take(0, LEN).unwrap();
    rig.fill(0, from, 1);
    let mut batch = rig.engine.gather(&strips(from), on, "strips").unwrap();
    let to = rig.take(0, LEN).unwrap();
    let refused = rig.engine.scatter(&mut batch, &strips(to), on).unwrap_err();
    assert_eq!((refused.kind(), rig.world.faults_struck()), (Kind::OutOfMemory, 1), "{refused}");
    rig.engine.discard(batch).unwrap();
    // As large as the one before, so it would get that block.
    let batch = rig.engine.gather(&strips(from), on, "others").unwrap();
    rig.engine.gathered(&batch, on).unwrap();
    assert_no_hazard(&rig);
    rig.engine.discard(batch).unwrap();
    rig.give(0, from.at());
    rig.give(0, to.at());
    rig.engine.drain().unwrap();
    assert_healed(&mut rig);
}

#[test]
fn a_framework_whose_memory_a_copy_may_touch_for_ever_hears_of_a_loss() {
    let whole = |rig: &mut Rig| rig.take(0, LEN).unwrap();
    // The end of a gather.
    let mut rig = lazy(silent(2..=2, 1));
    let on = rig.streams[0].engine;
    let from = whole(&mut rig);
    rig.fill(0, from, 1);
    let lost = rig.engine.gather(&strips(from), on, "strips").unwrap_err();
    assert!(lost.is_lost() && lost.to_string().contains("a fault that was ordered"), "{lost}");
    assert_eq!(rig.engine.step().unwrap_err(), lost, "for good");
    assert!(rig.pool.stats().quarantined >= Bytes::kib(2), "{}", rig.pool.stats());
    // The end of a scatter.
    let mut rig = lazy(silent(4..=4, 1));
    let on = rig.streams[0].engine;
    let from = whole(&mut rig);
    rig.fill(0, from, 1);
    let mut batch = rig.engine.gather(&strips(from), on, "strips").unwrap();
    assert!(rig.engine.scatter(&mut batch, &strips(from), on).unwrap_err().is_lost());
    let Rig { engine, pool, .. } = rig;
    drop((engine, batch));
    assert!(pool.stats().quarantined >= Bytes::kib(2), "{}", pool.stats());
    // The end of a copy into a framework's target.
    let mut rig = lazy(silent(4..=4, 1));
    let on = rig.streams[0].engine;
    let range = whole(&mut rig);
    let storage = rig.engine.adopt(range, "x").unwrap();
    rig.fill(0, range, 1);
    rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(storage.id()));
    rig.give(0, range.at());
    let target = whole(&mut rig);
    assert!(rig.engine.refill(storage.id(), target, on).unwrap_err().is_lost());
    assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Lost);
    assert_no_hazard(&rig);
}

#[test]
fn a_reader_that_neither_waits_nor_sees_the_device_idle_has_the_copy_asked_about() {
    // A capture that refuses the fourth wait, the reader's own behind a scatter, and all syncs.
    let faults = (1..=9).fold(FaultPlan::default(), |plan, nth| plan.at(Spot::Sync, nth, CAPTURED));
    let faults = faults.at(Spot::Wait, 4, CAPTURED);
    for (drop_deadline, is_told) in [(Duration::MAX, true), (Duration::ZERO, false)] {
        let schedule = Box::new(Lazy::default());
        let config = Config { faults: faults.clone(), ..Config::scheduled(schedule) };
        let bounds = Options { drop_deadline, ..bounds() };
        let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), bounds, 1);
        let on = rig.streams[0].engine;
        let from = rig.take(0, LEN).unwrap();
        rig.fill(0, from, 1);
        let mut batch = rig.engine.gather(&strips(from), on, "strips").unwrap();
        let scattered = rig.engine.scatter(&mut batch, &strips(from), on);
        assert_eq!(rig.world.faults_struck(), 2, "{scattered:?}");
        match scattered {
            Ok(()) => assert!(is_told),
            Err(error) => assert!(!is_told && error.is_lost(), "{error}"),
        }
        assert_no_hazard(&rig);
        let Rig { engine, .. } = rig;
        std::mem::forget((engine, batch));
    }
}

/// Where a run of the story came to.
#[derive(Debug, Default)]
struct Sums {
    runs: u64,
    struck: u64,
    refused: u64,
    lost: u64,
}

/// Tells the story with these faults on a device in this order.
fn told(config: Config, faults: FaultPlan, what: &str, sums: &mut Sums) {
    let config = Config { faults, ..config };
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), bounds(), 1);
    let mut story = Story { rig: &mut rig, theirs: None, refused: 0 };
    let ended = story.tell().and_then(|()| story.wait());
    sums.runs += 1;
    sums.refused += story.refused;
    sums.struck += rig.world.faults_struck();
    assert_eq!(rig.hazards(), Vec::<String>::new(), "{what}");
    match ended {
        Ok(()) => {
            let shut = (0..TRIES).any(|_| rig.engine.shutdown().is_ok());
            assert!(shut, "{what}");
            let pool = rig.pool.stats();
            assert_eq!((pool.lent, pool.busy), (Bytes::ZERO, Bytes::ZERO), "{what}");
            assert_eq!(pool.quarantined, Bytes::ZERO, "{what}");
            while rig.sim.sync().is_err() {}
            let memory = rig.sim.memory().unwrap();
            assert_eq!(memory.free, memory.total, "{what}: device bytes are lost");
            rig.assert_right();
        }
        Err(error) => {
            assert!(error.is_lost());
            sums.lost += 1;
            let Rig { engine, pool, .. } = rig;
            drop(engine);
            assert_eq!(pool.stats().lent, Bytes::ZERO, "{what}");
        }
    }
}

#[test]
fn no_refusal_behind_a_copy_gives_away_what_the_copy_touches() {
    let mut sums = Sums::default();
    for spot in [Spot::Record, Spot::Wait, Spot::Copy] {
        for nth in 1..60 {
            for (in_a_row, syncs) in [(1, 0), (1, 1), (2, 2), (3, 1), (5, 50)] {
                let what = format!("{spot:?} {nth}, {in_a_row} in a row, {syncs} syncs");
                let plan = (nth..nth + in_a_row)
                    .fold(FaultPlan::default(), |plan, nth| plan.at(spot, nth, Fault::Refuse));
                let plan = (1..=syncs).fold(plan, |plan, nth| plan.at(Spot::Sync, nth, CAPTURED));
                let config = Config::scheduled(Box::new(Lazy::default()));
                told(config, plan.clone(), &what, &mut sums);
                told(Config::scheduled(Box::new(Random::new(nth))), plan, &what, &mut sums);
            }
        }
    }
    println!("{sums:?}");
    assert!(sums.struck > sums.runs / 2 && sums.refused > sums.runs / 4, "{sums:?}");
    assert!(sums.lost > 0 && sums.lost < sums.runs / 4, "{sums:?}");
}
