//! What came back is compared with what left (law 8), on a device that spoils one copy.
//!
//! The fault guarded against: bytes that come back wrong, and a loss that still falls; and its
//! twin, an alarm over bytes that are right, which teaches people to turn the check off.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;
#[path = "verify_support/mod.rs"]
mod verify_support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, Lazy, World};
use lightering::pack::Strip;
use lightering::pinned::PinnedPool;
use lightering::storage::{Residency, Tier};
use lightering::trace::{Actor, Op, Use};
use lightering::{
    Acquire, Bytes, DeviceRange, Engine, Evict, Kind, Misuse, Options, Result, Storage, StreamId,
};
use std::sync::Mutex;
use support::{Rig, options, small_pool};
use verify_support::{Crooked, Plan, Refused, Shared, Wrong};

const LEN: Bytes = Bytes::kib(8);

fn verifying() -> Options {
    // One trunk a copy, so that copies count as storages do.
    Options { verify: true, verify_slots_max: 32, trunk_bytes_max: LEN, ..options() }
}

fn rig(config: Config, options: Options, plan: Plan) -> (Rig, Shared) {
    let plan = Shared::new(Mutex::new(plan));
    let theirs = plan.clone();
    let wrap = |sim| Box::new(Crooked { sim, plan: theirs }) as Box<dyn Backend>;
    (Rig::wrapped(config, small_pool(Bytes::mib(1)), options, 1, wrap), plan)
}

fn spoiled(seed: u64, wrong: &[(Wrong, u32)]) -> (Rig, StreamId) {
    let plan = Plan { wrong: wrong.to_vec(), ..Plan::default() };
    let none_ahead = Options { prefetch_count_max: 0, ..verifying() };
    let (rig, _) = rig(Config::adversary(seed), none_ahead, plan);
    let on = rig.streams[0].engine;
    (rig, on)
}

/// A storage of the engine's own with the pattern of `seed`, evicted; its bytes are gone.
fn away(rig: &mut Rig, seed: u64, name: &str) -> Storage {
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, name).unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, seed);
    assert!(matches!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Moving(_)));
    rig.engine.flush(on).unwrap();
    storage
}

fn home(rig: &mut Rig, storage: &Storage) -> DeviceRange {
    match rig.engine.acquire(storage.id(), rig.streams[0].engine).unwrap() {
        Acquire::Ready(range) => range,
        Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
    }
}

#[track_caller]
fn names(result: Result<()>, name: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt, "{error}");
    assert_eq!(error.name().unwrap().as_str(), name);
    assert!(error.to_string().contains("8.00 KiB"), "{error}");
}

#[track_caller]
fn is_corrupt<T: std::fmt::Debug>(result: Result<T>) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt, "{error}");
    assert_eq!(error.name().unwrap().as_str(), "spoiled");
}

#[test]
fn bytes_that_came_back_wrong_are_found_and_named_however_they_went_wrong() {
    for (wrong, nth) in [
        (Wrong::Misdirected, 1),
        (Wrong::Halved, 1),
        (Wrong::Lost, 1),
        // The second to leave is the first to come back.
        (Wrong::Flipped, 2),
    ] {
        for seed in 0..40 {
            let (mut rig, on) = spoiled(seed, &[(wrong, nth)]);
            let right = away(&mut rig, 1, "right");
            let storage = away(&mut rig, 2, "spoiled");
            home(&mut rig, &storage);
            names(rig.engine.drain(), "spoiled");
            assert_eq!(rig.engine.drain(), Ok(()), "a storage is named once");
            assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Lost);
            // The others go on.
            let range = home(&mut rig, &right);
            rig.check(0, range, 1, format!("{wrong:?} seed {seed}"));
            assert_eq!(rig.engine.drain(), Ok(()));
            let stats = rig.engine.stats();
            assert_eq!((stats.verified_count, stats.corrupt_count), (1, 1));
            rig.engine.release(storage, on).unwrap();
            rig.engine.release(right, on).unwrap();
            rig.assert_right();
            rig.assert_nothing_left();
        }
    }
}

#[test]
fn a_step_finds_it_without_waiting() {
    let (mut rig, _) = spoiled(7, &[(Wrong::Halved, 1)]);
    let storage = away(&mut rig, 1, "spoiled");
    home(&mut rig, &storage);
    let found = (0..10_000).find_map(|_| rig.engine.step().err());
    names(found.map_or(Ok(()), Err), "spoiled");
    assert_eq!(rig.engine.stats().seam.syncs, 0);
    // What the host read of the sums is in the trace.
    let is_host = |op: Op| matches!(op, Op::Use { by: Actor::Host, .. });
    assert!(rig.engine.recent().filter(|record| is_host(record.op)).count() >= 2);
    drop(storage);
    rig.assert_nothing_left();
}

#[test]
fn a_lost_storage_refuses_every_verb_but_its_end() {
    let (mut rig, on) = spoiled(1, &[(Wrong::Halved, 1)]);
    let storage = away(&mut rig, 1, "spoiled");
    let range = home(&mut rig, &storage);
    names(rig.engine.drain(), "spoiled");
    let id = storage.id();
    is_corrupt(rig.engine.evict(id, on));
    is_corrupt(rig.engine.offer(id, on));
    is_corrupt(rig.engine.acquire(id, on));
    is_corrupt(rig.engine.refill(id, range, on));
    is_corrupt(rig.engine.prefetch(id, range, on));
    is_corrupt(rig.engine.cancel(id, on));
    is_corrupt(rig.engine.take(id));
    is_corrupt(rig.engine.range(id));
    is_corrupt(rig.engine.note(on, &[Use::write(range)]));
    is_corrupt(rig.engine.read_host(id, Bytes::ZERO, &mut [0; 8]));
    rig.engine.release(storage, on).unwrap();
    assert_eq!(rig.engine.residency(id).unwrap_err().misuse(), Some(Misuse::Stale));
    rig.assert_nothing_left();
}

#[test]
fn a_storage_that_ended_before_its_bytes_were_compared_is_named_all_the_same() {
    for (seed, by_drop) in (0..40).flat_map(|seed| [(seed, false), (seed, true)]) {
        let (mut rig, on) = spoiled(seed, &[(Wrong::Misdirected, 1)]);
        let right = away(&mut rig, 1, "right");
        let storage = away(&mut rig, 2, "spoiled");
        home(&mut rig, &storage);
        if by_drop {
            drop(storage);
        } else {
            rig.engine.release(storage, on).unwrap();
        }
        // Others take the room and the block meanwhile.
        let next = away(&mut rig, 3, "next");
        let range = home(&mut rig, &next);
        rig.check(0, range, 3, "next".into());
        names(rig.engine.drain(), "spoiled");
        assert_eq!(rig.engine.residency(right.id()).unwrap(), Residency::Evicted(Tier::Host));
        drop((right, next));
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn a_storage_found_lost_in_any_state_leaves_the_books_even() {
    for state in 0..3 {
        let (mut rig, on) = spoiled(3, &[(Wrong::Halved, 1)]);
        let storage = away(&mut rig, 1, "spoiled");
        home(&mut rig, &storage);
        if state > 0 {
            assert_eq!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Clean);
            assert_eq!(rig.engine.stats().unreleased_bytes, LEN.0);
        }
        if state > 1 {
            rig.engine.flush(on).unwrap();
        }
        names(rig.engine.drain(), "spoiled");
        assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Lost);
        assert_eq!(rig.engine.stats().unreleased_bytes, 0, "state {state}");
        rig.engine.flush(on).unwrap();
        rig.engine.release(storage, on).unwrap();
        rig.assert_nothing_left();
    }
}

#[test]
fn a_storage_found_lost_while_it_is_fetched_ahead_gives_the_window_back() {
    let plan = Plan { wrong: vec![(Wrong::Halved, 1)], ..Plan::default() };
    let (mut rig, _) = rig(Config::adversary(2), verifying(), plan);
    let on = rig.streams[0].engine;
    let spoiled = away(&mut rig, 1, "spoiled");
    home(&mut rig, &spoiled);
    assert_eq!(rig.engine.evict(spoiled.id(), on).unwrap(), Evict::Clean);
    let other = away(&mut rig, 2, "other");
    // The reader of the one has the other fetched, a second time, from the same block.
    home(&mut rig, &other);
    assert_eq!(rig.engine.residency(spoiled.id()).unwrap(), Residency::Refilling);
    assert_eq!(rig.engine.stats().prefetched_bytes, LEN.0);
    names(rig.engine.drain(), "spoiled");
    assert_eq!(rig.engine.stats().prefetched_bytes, 0);
    drop((spoiled, other));
    rig.assert_nothing_left();
}

#[test]
fn a_framework_gets_its_bytes_back_from_a_lost_storage() {
    for by_drop in [false, true] {
        let (mut rig, on) = spoiled(5, &[(Wrong::Halved, 1)]);
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, 1);
        let storage = rig.engine.adopt(range, "spoiled").unwrap();
        let id = storage.id();
        rig.engine.evict(id, on).unwrap();
        rig.engine.flush(on).unwrap();
        assert_eq!(rig.engine.releasable(on).unwrap(), Some(id));
        rig.give(0, range.at());
        let target = rig.take(0, LEN).unwrap();
        rig.engine.refill(id, target, on).unwrap();
        // Evicted again, so that it stands among those to be named.
        assert_eq!(rig.engine.evict(id, on).unwrap(), Evict::Clean);
        names(rig.engine.drain(), "spoiled");
        rig.engine.flush(on).unwrap();
        assert_eq!(rig.engine.releasable(on).unwrap(), None, "it has not ended");
        if by_drop {
            drop(storage);
            assert_eq!(rig.engine.releasable(on).unwrap(), Some(id));
            assert_eq!(rig.engine.releasable(on).unwrap(), None);
        } else {
            rig.engine.release(storage, on).unwrap();
        }
        rig.give(0, target.at());
        rig.assert_nothing_left();
    }
}

#[test]
fn a_spoiled_host_copy_is_found_at_each_reader_and_named_once() {
    let (mut rig, on) = spoiled(4, &[(Wrong::Flipped, 1)]);
    let storage = away(&mut rig, 1, "spoiled");
    home(&mut rig, &storage);
    rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    home(&mut rig, &storage);
    names(rig.engine.drain(), "spoiled");
    assert_eq!(rig.engine.drain(), Ok(()));
    assert_eq!(rig.engine.stats().corrupt_count, 2);
    drop(storage);
    rig.assert_nothing_left();
}

#[test]
fn an_engine_that_is_shut_down_names_every_storage_that_was_lost() {
    let wrong = [(Wrong::Halved, 1), (Wrong::Lost, 2)];
    let (mut rig, _) = spoiled(6, &wrong);
    let first = away(&mut rig, 1, "first");
    let second = away(&mut rig, 2, "second");
    home(&mut rig, &first);
    home(&mut rig, &second);
    names(rig.engine.shutdown(), "first");
    assert_eq!(rig.pool.stats().lent, Bytes::ZERO, "it is closed all the same");
    names(rig.engine.shutdown(), "second");
    assert_eq!(rig.engine.shutdown().unwrap_err().kind(), Kind::Closed);
    assert_eq!(rig.engine.stats().leaked_on_purpose_bytes, 0);
}

#[test]
fn an_engine_that_is_dropped_with_a_lost_storage_leaves_nothing() {
    let (mut rig, _) = spoiled(6, &[(Wrong::Halved, 1)]);
    let storage = away(&mut rig, 1, "spoiled");
    home(&mut rig, &storage);
    let Rig { engine, pool, mut sim, .. } = rig;
    drop(engine);
    let stats = pool.stats();
    assert_eq!((stats.lent, stats.quarantined), (Bytes::ZERO, Bytes::ZERO));
    let memory = sim.memory().unwrap();
    assert_eq!(memory.free, memory.total);
}

/// Every way in which one host copy is used, on a device that does nothing wrong.
#[test]
fn an_honest_device_raises_no_alarm() {
    for seed in 0..100 {
        let (mut rig, on) = spoiled(seed, &[]);
        let storage = away(&mut rig, 1, "x");
        let id = storage.id();
        // Two refills of one host copy.
        for what in ["first", "second"] {
            let range = home(&mut rig, &storage);
            rig.check(0, range, 1, format!("seed {seed} {what}"));
            assert_eq!(rig.engine.evict(id, on).unwrap(), Evict::Clean);
            rig.engine.flush(on).unwrap();
        }
        // Changed in place, evicted, changed again while that runs, evicted, taken back, evicted.
        let range = home(&mut rig, &storage);
        for n in 2..4 {
            rig.engine.note(on, &[Use::write(range)]).unwrap();
            rig.fill(0, range, n);
            assert!(matches!(rig.engine.evict(id, on).unwrap(), Evict::Moving(_)));
        }
        let range = home(&mut rig, &storage);
        rig.check(0, range, 3, format!("seed {seed} taken back"));
        assert_eq!(rig.engine.evict(id, on).unwrap(), Evict::Clean);
        rig.engine.flush(on).unwrap();
        let range = home(&mut rig, &storage);
        rig.check(0, range, 3, format!("seed {seed} last"));
        // Gone at once, its room and its block with somebody else.
        rig.engine.release(storage, on).unwrap();
        let next = away(&mut rig, 9, "next");
        home(&mut rig, &next);
        rig.engine.release(next, on).unwrap();
        assert_eq!(rig.engine.drain(), Ok(()), "seed {seed}");
        let stats = rig.engine.stats();
        assert_eq!(stats.verified_count, stats.refilled_count);
        assert_eq!((stats.refilled_count, stats.unverified_count), (5, 0));
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn copies_without_a_slot_are_counted_and_no_verb_waits_for_one() {
    let tight = Options { verify_slots_max: 1, prefetch_count_max: 0, ..verifying() };
    let (mut rig, _) = rig(Config::scheduled(Box::new(Lazy::default())), tight, Plan::default());
    let on = rig.streams[0].engine;
    let all: Vec<_> = (0..3).map(|n| away(&mut rig, n, "x")).collect();
    for (n, storage) in all.iter().enumerate() {
        let range = home(&mut rig, storage);
        rig.check(0, range, n as u64, format!("storage {n}"));
    }
    // Two copies out had no slot for their sum, so their copies in are not compared.
    rig.engine.drain().unwrap();
    let stats = rig.engine.stats();
    assert_eq!((stats.verified_count, stats.unverified_count), (1, 2));
    // Once the slots are read they serve again.
    for storage in &all {
        let range = rig.engine.range(storage.id()).unwrap();
        rig.engine.note(on, &[Use::write(range)]).unwrap();
        rig.fill(0, range, 5);
        rig.engine.evict(storage.id(), on).unwrap();
        rig.engine.flush(on).unwrap();
        rig.sim.sync().unwrap();
        home(&mut rig, storage);
        rig.sim.sync().unwrap();
    }
    rig.engine.drain().unwrap();
    let stats = rig.engine.stats();
    assert_eq!((stats.verified_count, stats.unverified_count), (4, 2));
    rig.assert_right();
    drop(all);
    rig.assert_nothing_left();
}

#[test]
fn a_caller_that_never_looks_cannot_make_the_reports_grow() {
    let wrong: Vec<_> = (1..40).map(|nth| (Wrong::Lost, nth)).collect();
    let plan = Plan { wrong, ..Plan::default() };
    let tight = Options { verify_slots_max: 2, prefetch_count_max: 0, ..verifying() };
    let (mut rig, _) = rig(Config::adversary(8), tight, plan);
    for n in 0..20 {
        let storage = away(&mut rig, n, "spoiled");
        home(&mut rig, &storage);
        rig.sim.sync().unwrap();
    }
    let stats = rig.engine.stats();
    assert_eq!(stats.corrupt_count, 2, "two reports wait, more are not made");
    assert!(stats.unverified_count > 10, "{stats:?}");
    let mut named = 0;
    while let Err(error) = rig.engine.drain() {
        assert_eq!(error.kind(), Kind::Corrupt);
        named += 1;
    }
    let stats = rig.engine.stats();
    assert_eq!(named, stats.corrupt_count);
    assert_eq!(stats.corrupt_count + stats.unverified_count, stats.refilled_count);
    rig.assert_nothing_left();
}

/// Evicts and refills through a refusal, which is tried again. With one slot a lane, each copy is
/// drained, so that a slot lost by the refusal is missed by the next.
fn run_refused(refused: (Refused, u32), seed: u64, slots: usize) -> bool {
    let plan = Plan { refused: Some(refused), ..Plan::default() };
    let bounds = Options {
        trunk_bytes_max: Bytes::kib(2),
        verify_slots_max: slots,
        prefetch_count_max: slots.min(2),
        ..verifying()
    };
    let (mut rig, plan) = rig(Config::adversary(seed), bounds, plan);
    let on = rig.streams[0].engine;
    let mut all = Vec::new();
    for n in 0..3 {
        let storage = rig.engine.alloc(LEN, on, "x").unwrap();
        let range = rig.engine.range(storage.id()).unwrap();
        rig.fill(0, range, n);
        if let Err(error) = rig.engine.evict(storage.id(), on) {
            assert_eq!(error.kind(), Kind::OutOfMemory, "{error}");
            assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Resident);
            rig.engine.note(on, &[Use::write(range)]).unwrap();
            rig.fill(0, range, n);
            assert!(matches!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Moving(_)));
        }
        rig.engine.flush(on).unwrap();
        all.push(storage);
        if slots == 1 {
            rig.engine.drain().unwrap();
        }
    }
    for (n, storage) in all.into_iter().enumerate().rev() {
        let acquired = rig.engine.acquire(storage.id(), on);
        let range = match acquired.or_else(|_| rig.engine.acquire(storage.id(), on)).unwrap() {
            Acquire::Ready(range) => range,
            Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
        };
        rig.check(0, range, n as u64, format!("{refused:?} seed {seed} storage {n}"));
        rig.engine.release(storage, on).unwrap();
        if slots == 1 {
            rig.engine.drain().unwrap();
        }
    }
    assert_eq!(rig.engine.drain(), Ok(()), "{refused:?} seed {seed}");
    let stats = rig.engine.stats();
    assert_eq!((stats.verified_count, stats.unverified_count), (stats.refilled_count, 0));
    rig.assert_right();
    rig.assert_nothing_left();
    plan.lock().unwrap().was_refused()
}

#[test]
fn a_refused_sum_refuses_the_copy_and_loses_nothing() {
    for what in [Refused::Launch, Refused::CopyOut, Refused::CopyIn, Refused::Record] {
        // Opening takes six launches.
        let first = if what == Refused::Launch { 7 } else { 1 };
        for slots in [1, 32] {
            let mut count = 0;
            while run_refused((what, first + count), u64::from(count), slots) {
                count += 1;
            }
            assert!(count >= 6, "{what:?}: only {count} requests were there to refuse");
        }
    }
}

#[test]
fn a_device_without_kernels_is_refused_when_the_engine_is_made() {
    let world = World::new(Config::adversary(1));
    let mut sim = world.device(0).unwrap();
    let pool = PinnedPool::new(sim.pinner(), small_pool(Bytes::mib(1))).unwrap();
    let open = |options| {
        let plan = Shared::new(Mutex::new(Plan { without_kernels: true, ..Plan::default() }));
        let device = Crooked { sim: world.device(0).unwrap(), plan };
        Engine::new(Box::new(device), &pool, options)
    };
    let error = open(verifying()).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::BadKernel));
    assert_eq!((error.op(), error.call()), ("new", Some("verify")), "{error}");
    assert_eq!(pool.stats().lent, Bytes::ZERO);
    let memory = sim.memory().unwrap();
    assert_eq!(memory.free, memory.total, "the memory for sums is given back");
    assert!(open(options()).is_ok(), "without verify it needs no kernels");
}

#[test]
fn an_engine_without_room_for_sums_is_refused_and_leaves_nothing() {
    let world = World::new(Config::adversary(1));
    let mut sim = world.device(0).unwrap();
    let pool = PinnedPool::new(sim.pinner(), small_pool(Bytes::kib(4))).unwrap();
    let large = Options { verify_slots_max: 1024, ..verifying() };
    let device = Box::new(world.device(0).unwrap());
    let error = Engine::new(device, &pool, large).unwrap_err();
    assert_eq!(error.kind(), Kind::OverBudget);
    assert_eq!(error.name().unwrap().as_str(), "verify");
    let memory = sim.memory().unwrap();
    assert_eq!(memory.free, memory.total);
}

#[test]
fn a_batch_that_nobody_compares_is_counted() {
    for verify in [true, false] {
        let options = Options { verify, ..verifying() };
        let (mut rig, _) = rig(Config::adversary(3), options, Plan::default());
        let (on, within) = (rig.streams[0].engine, rig.take(0, LEN).unwrap());
        let strips = [Strip::whole(within).unwrap()];
        let mut batch = rig.engine.gather(&strips, on, "rows").unwrap();
        rig.engine.scatter(&mut batch, &strips, on).unwrap();
        rig.engine.drain().unwrap();
        let stats = rig.engine.stats();
        let wanted = if verify { 2 } else { 0 };
        assert_eq!((stats.unverified_count, stats.verified_count), (wanted, 0));
        rig.engine.discard(batch).unwrap();
        rig.give(0, within.at());
    }
}
