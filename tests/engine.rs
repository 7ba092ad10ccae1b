//! The engine's verbs, one story each, on the simulated device: bytes leave and come home, whatever
//! the device does in between, and a verb that does not fit is refused before anything is enqueued.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, Lazy, Model};
use lightering::policy::Kept;
use lightering::storage::{Residency, Tier};
use lightering::trace::Use;
use lightering::{Acquire, Bytes, Evict, Kind, Misuse, Options};
use support::{Rig, options, small_pool};

const LEN: Bytes = Bytes::kib(8);

/// A device that runs nothing until it is forced to: every missing edge shows as wrong bytes or a
/// wrong answer.
fn lazy() -> Rig {
    let config = Config::scheduled(Box::new(Lazy::default()));
    Rig::new(config, small_pool(Bytes::mib(1)), options(), 1)
}

#[test]
fn bytes_that_left_come_home_under_any_schedule() {
    for seed in 0..200 {
        let mut rig = Rig::adversary(seed);
        let on = rig.streams[0].engine;
        let storages: Vec<_> = (0..6)
            .map(|n| {
                let storage = rig.engine.alloc(LEN, on, format!("layer.{n}").as_str()).unwrap();
                let range = rig.engine.range(storage.id()).unwrap();
                rig.fill(0, range, n);
                let became = rig.engine.evict(storage.id(), on).unwrap();
                assert!(matches!(became, Evict::Moving(_)));
                storage
            })
            .collect();
        rig.engine.flush(on).unwrap();
        assert_eq!(
            rig.engine.memory().unwrap().allocated,
            Bytes::ZERO,
            "all of it is off the device"
        );
        for (n, storage) in storages.into_iter().enumerate().rev() {
            let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else {
                panic!("the engine owns the bytes");
            };
            rig.check(0, range, n as u64, format!("seed {seed} layer {n}"));
            rig.engine.release(storage, on).unwrap();
        }
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn nothing_waits_while_unreleased_bytes_are_under_the_bound() {
    let mut rig = lazy();
    let on = rig.streams[0].engine;
    let a = rig.engine.alloc(LEN, on, "a").unwrap();
    let b = rig.engine.alloc(LEN, on, "b").unwrap();
    let before = rig.engine.stats().seam.waits;
    rig.engine.evict(a.id(), on).unwrap();
    rig.engine.evict(b.id(), on).unwrap();
    // One wait of the lane for each producer, none of the caller's stream.
    assert_eq!(rig.engine.stats().seam.waits - before, 2);
    assert_eq!(rig.engine.stats().unreleased_bytes, 2 * LEN.0);
    assert_eq!(rig.engine.residency(a.id()).unwrap(), Residency::Evicting);
}

#[test]
fn the_oldest_goes_first_when_the_bound_is_passed() {
    let mut rig = lazy();
    let on = rig.streams[0].engine;
    let all: Vec<_> = (0..4)
        .map(|_| {
            let storage = rig.engine.alloc(LEN, on, "x").unwrap();
            rig.engine.evict(storage.id(), on).unwrap();
            storage
        })
        .collect();
    // The bound is two storages; the device has run nothing, and yet the oldest two are gone.
    let states: Vec<_> = all.iter().map(|s| rig.engine.residency(s.id()).unwrap()).collect();
    let gone = Residency::Evicted(Tier::Host);
    assert_eq!(states, [gone, gone, Residency::Evicting, Residency::Evicting]);
    assert_eq!(rig.engine.stats().unreleased_bytes, 2 * LEN.0);
}

#[test]
fn the_storage_evicted_last_is_not_named_before_flush() {
    let mut rig = lazy();
    let on = rig.streams[0].engine;
    let range = rig.take(0, LEN).unwrap();
    let storage = rig.engine.adopt(range, "input").unwrap();
    rig.fill(0, range, 1);
    rig.engine.evict(storage.id(), on).unwrap();
    rig.sim.sync().unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), None, "its operator may not be enqueued yet");
    rig.engine.flush(on).unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(storage.id()));
    assert_eq!(rig.engine.releasable(on).unwrap(), None);
}

#[test]
fn a_reader_that_comes_before_the_bytes_went_uses_them_as_they_are() {
    let mut rig = lazy();
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, "x").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, 7);
    rig.engine.evict(storage.id(), on).unwrap();
    assert_eq!(rig.engine.acquire(storage.id(), on).unwrap(), Acquire::Ready(range));
    assert_eq!(rig.engine.stats().refilled_bytes, 0);
    assert_eq!(rig.engine.stats().forwarded_count, 1);
    rig.check(0, range, 7, "live".into());
    // The copy-out went on: the next eviction has nothing to copy.
    assert_eq!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Clean);
    let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else { panic!() };
    rig.check(0, range, 7, "from the clean copy".into());
    rig.engine.release(storage, on).unwrap();
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_write_makes_the_host_copy_stale() {
    for seed in 0..50 {
        let mut rig = Rig::adversary(seed);
        let on = rig.streams[0].engine;
        let storage = rig.engine.alloc(LEN, on, "w").unwrap();
        let range = rig.engine.range(storage.id()).unwrap();
        rig.fill(0, range, 1);
        rig.engine.evict(storage.id(), on).unwrap();
        // In place, while the copy-out may be running.
        rig.engine.note(on, &[Use::write(range)]).unwrap();
        rig.fill(0, range, 2);
        assert!(matches!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Moving(_)));
        rig.engine.flush(on).unwrap();
        let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else { panic!() };
        rig.check(0, range, 2, format!("seed {seed}"));
        rig.engine.release(storage, on).unwrap();
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn a_storage_too_small_or_without_pinned_room_stays_and_is_counted() {
    let tight = Options { storage_bytes_min: Bytes(64), ..options() };
    let pool = small_pool(Bytes::kib(4));
    let mut rig = Rig::new(Config::adversary(1), pool, tight, 1);
    let on = rig.streams[0].engine;
    let small = rig.engine.alloc(Bytes(63), on, "small").unwrap();
    let large = rig.engine.alloc(LEN, on, "large").unwrap();
    assert_eq!(
        rig.engine.offer(small.id(), on).unwrap(),
        Some((small.id(), Evict::Kept(Kept::TooSmall)))
    );
    assert_eq!(
        rig.engine.offer(large.id(), on).unwrap(),
        Some((large.id(), Evict::Kept(Kept::NoPinnedRoom)))
    );
    assert_eq!(rig.engine.residency(large.id()).unwrap(), Residency::Resident);
    let stats = rig.engine.stats();
    assert_eq!(stats.kept_for(Kept::NoPinnedRoom).bytes, LEN.0);
    assert_eq!(stats.kept_for(Kept::TooSmall).count, 1);
}

#[test]
fn the_host_reads_a_copy_only_after_it_arrived() {
    let mut rig = lazy();
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, "h").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, 3);
    rig.engine.evict(storage.id(), on).unwrap();
    let mut bytes = vec![0; 100];
    let early = rig.engine.read_host(storage.id(), Bytes(16), &mut bytes).unwrap_err();
    assert_eq!(early.kind(), Kind::Busy);
    rig.sim.sync().unwrap();
    rig.engine.read_host(storage.id(), Bytes(16), &mut bytes).unwrap();
    let mut right = vec![0; LEN.0 as usize];
    support::fill(&mut right, 3);
    assert_eq!(bytes, right[16..116]);
    let far = rig.engine.read_host(storage.id(), Bytes(LEN.0 - 1), &mut bytes).unwrap_err();
    assert_eq!(far.misuse(), Some(Misuse::OutOfRange));
    assert!(far.to_string().contains(&format!("from byte {} of {LEN}", LEN.0 - 1)), "{far}");
}

#[test]
fn what_the_state_table_disallows_is_refused_by_name() {
    let mut rig = Rig::adversary(3);
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, "layer.9").unwrap();
    let id = storage.id();
    let range = rig.engine.range(id).unwrap();
    rig.engine.evict(id, on).unwrap();
    let again = rig.engine.evict(id, on).unwrap_err();
    assert_eq!(again.misuse(), Some(Misuse::State));
    assert!(again.to_string().contains("layer.9"), "{again}");
    rig.engine.flush(on).unwrap();
    assert_eq!(rig.engine.evict(id, on).unwrap_err().misuse(), Some(Misuse::State));
    assert_eq!(rig.engine.range(id).unwrap_err().misuse(), Some(Misuse::NotThere));
    assert_eq!(rig.engine.take(id).unwrap_err().misuse(), Some(Misuse::State));
    assert_eq!(rig.engine.cancel(id, on).unwrap_err().misuse(), Some(Misuse::State));
    assert_eq!(rig.engine.refill(id, range, on).unwrap_err().misuse(), Some(Misuse::State));
    rig.engine.release(storage, on).unwrap();
    assert_eq!(rig.engine.acquire(id, on).unwrap_err().misuse(), Some(Misuse::Stale));
    assert_eq!(rig.engine.residency(id).unwrap_err().misuse(), Some(Misuse::Stale));
}

#[test]
fn ranges_and_targets_that_do_not_fit_are_refused() {
    let mut rig = Rig::adversary(4);
    let on = rig.streams[0].engine;
    let range = rig.take(0, LEN).unwrap();
    let storage = rig.engine.adopt(range, "first").unwrap();
    let inside = range.part(Bytes(256), Bytes(256)).unwrap();
    assert_eq!(rig.engine.adopt(inside, "second").unwrap_err().misuse(), Some(Misuse::Overlap));
    let empty = range.part(Bytes(0), Bytes(0)).unwrap();
    assert_eq!(rig.engine.adopt(empty, "none").unwrap_err().misuse(), Some(Misuse::Empty));
    assert_eq!(
        rig.engine.alloc(Bytes::ZERO, on, "none").unwrap_err().misuse(),
        Some(Misuse::Empty)
    );
    rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(storage.id()));
    assert_eq!(rig.engine.acquire(storage.id(), on).unwrap(), Acquire::NeedsRoom(LEN));
    let short = range.part(Bytes(0), Bytes(256)).unwrap();
    let wrong = rig.engine.refill(storage.id(), short, on).unwrap_err();
    assert_eq!(wrong.misuse(), Some(Misuse::LengthMismatch));
    rig.engine.refill(storage.id(), range, on).unwrap();
}

#[test]
fn a_lane_or_a_foreign_stream_is_no_compute_stream() {
    let mut rig = Rig::adversary(5);
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, "x").unwrap();
    let theirs = rig.streams[0].here;
    let foreign = rig.engine.evict(storage.id(), theirs).unwrap_err();
    assert_eq!(foreign.misuse(), Some(Misuse::Foreign));
    rig.sim.inner().set_capturing(theirs, true).unwrap();
    let records = rig.engine.stats().seam.records;
    let captured = rig.engine.evict(storage.id(), on).unwrap_err();
    assert_eq!(captured.misuse(), Some(Misuse::Capturing));
    assert_eq!(rig.engine.stats().seam.records, records, "nothing was enqueued");
    rig.sim.inner().set_capturing(theirs, false).unwrap();
    assert!(rig.engine.evict(storage.id(), on).is_ok());
}

#[test]
fn a_step_in_steady_state_opens_no_event_and_waits_for_nothing() {
    let model = Model::default();
    let mut rig = Rig::new(Config::timed(model), small_pool(Bytes::mib(1)), options(), 1);
    let on = rig.streams[0].engine;
    let mut opened = 0;
    for step in 0..20 {
        let storages: Vec<_> = (0..8)
            .map(|_| {
                let storage = rig.engine.alloc(LEN, on, "x").unwrap();
                rig.engine.offer(storage.id(), on).unwrap();
                storage
            })
            .collect();
        for storage in storages.into_iter().rev() {
            rig.engine.acquire(storage.id(), on).unwrap();
            rig.engine.release(storage, on).unwrap();
        }
        rig.engine.mark_step().unwrap();
        let seam = rig.engine.stats().seam;
        assert_eq!(seam.syncs, 0);
        if step == 10 {
            opened = seam.events_opened;
        }
        assert!(step <= 10 || seam.events_opened == opened, "step {step} opened an event");
    }
    rig.assert_nothing_left();
}

#[test]
fn readers_in_the_expected_order_find_their_bytes_fetched_ahead() {
    let model = Model::default();
    let mut rig = Rig::new(Config::timed(model), small_pool(Bytes::mib(1)), options(), 1);
    let on = rig.streams[0].engine;
    for _ in 0..3 {
        let storages: Vec<_> = (0..8u64)
            .map(|n| {
                let storage = rig.engine.alloc(LEN, on, "x").unwrap();
                let range = rig.engine.range(storage.id()).unwrap();
                rig.fill(0, range, n);
                rig.engine.offer(storage.id(), on).unwrap();
                storage
            })
            .collect();
        rig.engine.flush(on).unwrap();
        for (n, storage) in storages.into_iter().enumerate().rev() {
            let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else {
                panic!()
            };
            rig.check(0, range, n as u64, format!("layer {n}"));
            rig.engine.release(storage, on).unwrap();
        }
        rig.engine.mark_step().unwrap();
    }
    let guesses = rig.engine.stats().guesses;
    assert_eq!((guesses.hits, guesses.misses, guesses.wrong), (21, 3, 0));
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_lane_that_only_looks_full_goes_on_fetching_what_the_engine_owns() {
    let few = Options { transfers_max: 4, prefetch_count_max: 2, ..options() };
    let mut rig = Rig::new(Config::adversary(5), small_pool(Bytes::mib(1)), few, 1);
    let on = rig.streams[0].engine;
    let storages: Vec<_> = (0..32u64)
        .map(|n| {
            let storage = rig.engine.alloc(LEN, on, "x").unwrap();
            let range = rig.engine.range(storage.id()).unwrap();
            rig.fill(0, range, n);
            rig.engine.evict(storage.id(), on).unwrap();
            rig.engine.drain().unwrap();
            storage
        })
        .collect();
    rig.engine.flush(on).unwrap();
    for (n, storage) in storages.into_iter().enumerate().rev() {
        let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else { panic!() };
        rig.check(0, range, n as u64, format!("layer {n}"));
        // The device is done; the engine has not asked.
        rig.sim.sync().unwrap();
        rig.engine.release(storage, on).unwrap();
    }
    let guesses = rig.engine.stats().guesses;
    assert_eq!((guesses.hits, guesses.misses), (31, 1));
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_refill_without_device_room_makes_room_and_loses_nothing() {
    let mut config = Config::adversary(9);
    config.device_bytes = Bytes::kib(64);
    let none_ahead = Options { prefetch_count_max: 0, ..options() };
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), none_ahead, 1);
    let on = rig.streams[0].engine;
    let storages: Vec<_> = (0..16u64)
        .map(|n| {
            let storage = rig.engine.alloc(LEN, on, "x").unwrap();
            let range = rig.engine.range(storage.id()).unwrap();
            rig.fill(0, range, n);
            rig.engine.evict(storage.id(), on).unwrap();
            storage
        })
        .collect();
    for (n, storage) in storages.iter().enumerate() {
        let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else { panic!() };
        rig.check(0, range, n as u64, format!("layer {n}"));
        rig.engine.evict(storage.id(), on).unwrap();
    }
    // Now the framework takes all of the device: the storage stays evicted, its bytes safe.
    rig.engine.flush(on).unwrap();
    let mut hog = Vec::new();
    while let Ok(range) = rig.take(0, LEN) {
        hog.push(range);
    }
    let id = storages[5].id();
    let full = rig.engine.acquire(id, on).unwrap_err();
    assert_eq!(full.kind(), Kind::OutOfMemory);
    assert_eq!(rig.engine.residency(id).unwrap(), Residency::Evicted(Tier::Host));
    for range in hog {
        rig.give(0, range.at());
    }
    let Acquire::Ready(range) = rig.engine.acquire(id, on).unwrap() else { panic!() };
    rig.check(0, range, 5, "after the device had room again".into());
    rig.assert_right();
    drop(storages);
    rig.assert_nothing_left();
}

#[test]
fn what_was_fetched_ahead_makes_room_for_a_reader() {
    let mut config = Config::adversary(2);
    config.device_bytes = Bytes::kib(24);
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), options(), 1);
    let on = rig.streams[0].engine;
    let storages: Vec<_> = (0..6u64)
        .map(|n| {
            let storage = rig.engine.alloc(LEN, on, "x").unwrap();
            let range = rig.engine.range(storage.id()).unwrap();
            rig.fill(0, range, n);
            rig.engine.evict(storage.id(), on).unwrap();
            storage
        })
        .collect();
    rig.engine.flush(on).unwrap();
    // The last one is asked for, two more fill the device; then the first one is asked for.
    for n in [5, 0] {
        let Acquire::Ready(range) = rig.engine.acquire(storages[n].id(), on).unwrap() else {
            panic!()
        };
        rig.check(0, range, n as u64, format!("layer {n}"));
    }
    let stats = rig.engine.stats();
    assert!(stats.made_room_count > 0 && stats.guesses.wasted_bytes > 0, "{stats:?}");
    rig.assert_right();
    drop(storages);
    rig.assert_nothing_left();
}

#[test]
fn options_that_no_engine_can_work_with_are_refused_at_construction() {
    let world = lightering::backend::sim::World::new(Config::adversary(1));
    let device = world.device(0).unwrap();
    let pool = lightering::pinned::PinnedPool::new(device.pinner(), small_pool(LEN)).unwrap();
    let bad = Options { trunk_bytes_max: Bytes::ZERO, ..Options::default() };
    let error = lightering::Engine::new(Box::new(device), &pool, bad).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::BadValue));
}

#[test]
fn the_host_waits_for_the_copy_out_even_after_a_refill_was_chained_behind_it() {
    let none_kept = Options { unreleased_bytes_max: Bytes::ZERO, ..options() };
    let config = Config::scheduled(Box::new(Lazy::default()));
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), none_kept, 1);
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, "h").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, 3);
    rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    rig.engine.acquire(storage.id(), on).unwrap();
    let mut bytes = vec![0; LEN.0 as usize];
    let early = rig.engine.read_host(storage.id(), Bytes::ZERO, &mut bytes).unwrap_err();
    assert_eq!(early.kind(), Kind::Busy);
}

#[test]
fn a_storage_taken_back_and_evicted_on_another_stream_goes_in_that_streams_order() {
    let config = Config::scheduled(Box::new(Lazy::default()));
    let bounds = Options { unreleased_bytes_max: Bytes::ZERO, ..options() };
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), bounds, 2);
    let (first, second) = (rig.streams[0].engine, rig.streams[1].engine);
    let storage = rig.engine.alloc(LEN, first, "x").unwrap();
    rig.engine.evict(storage.id(), first).unwrap();
    rig.engine.acquire(storage.id(), second).unwrap();
    assert_eq!(rig.engine.evict(storage.id(), second).unwrap(), Evict::Clean);
    rig.engine.flush(first).unwrap();
    assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Evicting);
    rig.engine.flush(second).unwrap();
    assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Evicted(Tier::Host));
}

#[test]
fn a_second_stream_that_takes_an_eviction_back_waits_for_the_first_ones_copy_in() {
    let config = Config::scheduled(Box::new(Lazy::default()));
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), options(), 2);
    let (first, second) = (rig.streams[0].engine, rig.streams[1].engine);
    let storage = rig.engine.alloc(LEN, first, "x").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, 1);
    rig.engine.evict(storage.id(), first).unwrap();
    rig.engine.flush(first).unwrap();
    // Home on the first stream, evicted anew from the second, wanted there at once.
    rig.engine.acquire(storage.id(), first).unwrap();
    rig.engine.take(storage.id()).unwrap();
    assert!(matches!(rig.engine.evict(storage.id(), second).unwrap(), Evict::Moving(_)));
    let Acquire::Ready(range) = rig.engine.acquire(storage.id(), second).unwrap() else { panic!() };
    rig.check(1, range, 1, "on the second stream".into());
    rig.engine.release(storage, second).unwrap();
    rig.sim.sync().unwrap();
    assert!(rig.wrong.lock().unwrap().is_empty());
}
