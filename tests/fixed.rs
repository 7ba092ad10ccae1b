//! Storages whose address stays: what they promise whoever keeps a pointer to them, story by story.
//!
//! The faults guarded against: an address that changes, bytes unmapped while something uses them, a
//! host that waits without saying so, and memory that is nobody's.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "fixed/ends.rs"]
mod ends;
#[path = "fixed/goes.rs"]
mod goes;
#[path = "fixed/room.rs"]
mod room;
mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, Eager, Fault, FaultPlan, Lazy, Model, Spot};
use lightering::storage::{Residency, Tier};
use lightering::{Acquire, Bytes, DeviceRange, Evict, Kind, Missing, Misuse, Options, Storage};
use std::time::Duration;
use support::{Rig, options, small_pool};

const LEN: Bytes = Bytes(5000);
/// What the device maps for it.
const MAPPED: Bytes = Bytes(5120);
const AWAY: Residency = Residency::Evicted(Tier::Host);

/// Pieces of 2 KiB, of which any is kept idle.
fn bounds() -> Options {
    Options {
        memory_bytes_max: Bytes::kib(2),
        memory_pooled_bytes_min: Bytes::ZERO,
        prefetch_count_max: 0,
        ..options()
    }
}

/// One piece for each storage.
fn whole() -> Options {
    Options { memory_bytes_max: Bytes::MAX, ..bounds() }
}

fn rig_of(config: Config, options: Options, streams: usize) -> Rig {
    Rig::new(config, small_pool(Bytes::mib(1)), options, streams)
}

fn lazy() -> Config {
    Config::scheduled(Box::new(Lazy::default()))
}

fn eager() -> Config {
    Config::scheduled(Box::new(Eager))
}

/// A device with room for so many storages.
fn with_room(mut config: Config, count: u64) -> Config {
    config.device_bytes = Bytes(count * MAPPED.0);
    config
}

fn fixed(rig: &mut Rig, seed: u64) -> (Storage, DeviceRange) {
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc_fixed(LEN, on, "weight").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    assert_eq!(range.len(), LEN);
    rig.fill(0, range, seed);
    (storage, range)
}

fn evict(rig: &mut Rig, storage: &Storage) {
    let on = rig.streams[0].engine;
    let became = rig.engine.evict(storage.id(), on).unwrap();
    assert!(matches!(became, Evict::Moving(_) | Evict::Clean), "{became:?}");
}

/// Asks until the bytes of a storage are gone; whatever is refused is tried again.
fn until_gone(rig: &mut Rig, storage: &Storage) {
    let on = rig.streams[0].engine;
    for _ in 0..10_000 {
        if rig.engine.residency(storage.id()).unwrap() == AWAY {
            return;
        }
        let _ = rig.engine.flush(on);
        let _ = rig.engine.mark_step();
    }
    panic!("the bytes stay for ever: {:?}", rig.engine);
}

fn acquire(rig: &mut Rig, storage: &Storage) -> DeviceRange {
    let on = rig.streams[0].engine;
    match rig.engine.acquire(storage.id(), on).unwrap() {
        Acquire::Ready(range) => range,
        Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
    }
}

/// Everything ended, and neither memory nor an address is left.
#[track_caller]
fn assert_all_given_back(mut rig: Rig) {
    rig.assert_right();
    rig.assert_nothing_left();
    let stats = rig.engine.stats();
    assert_eq!((stats.mapped_bytes, stats.idle_memory_bytes), (0, 0));
    assert_eq!(stats.seam.maps, stats.seam.unmaps);
    let memory = rig.sim.memory().unwrap();
    assert_eq!(memory.free, memory.total);
    let mut trace = rig.trace.lock().unwrap();
    trace.checker.finish();
    assert_eq!(trace.checker.total(), 0, "{}", support::told(&trace.checker));
}

#[test]
fn bytes_leave_and_come_home_to_the_same_address_under_any_schedule() {
    for seed in 0..200 {
        let mut rig = rig_of(Config::adversary(seed), bounds(), 1);
        let mut all: Vec<_> = (0..4).map(|n| fixed(&mut rig, n)).collect();
        for round in 0..2 {
            for (storage, _) in &all {
                evict(&mut rig, storage);
            }
            for (storage, _) in &all {
                until_gone(&mut rig, storage);
            }
            let held = rig.engine.memory().unwrap().allocated;
            assert!(held <= Bytes::kib(4), "{held}: no more than two pieces are kept");
            for (n, (storage, range)) in all.iter().enumerate().rev() {
                let at = acquire(&mut rig, storage);
                assert_eq!(at, *range, "the address stays");
                rig.check(0, at, n as u64, format!("seed {seed} round {round} storage {n}"));
            }
        }
        assert_eq!(rig.engine.stats().evicted_count, 8);
        let on = rig.streams[0].engine;
        let (last, _) = all.pop().unwrap();
        rig.engine.release(last, on).unwrap();
        drop(all);
        assert_all_given_back(rig);
    }
}

#[test]
fn live_bytes_are_handed_out_and_nothing_is_unmapped() {
    let mut rig = rig_of(lazy(), bounds(), 1);
    let (a, range) = fixed(&mut rig, 1);
    evict(&mut rig, &a);
    assert_eq!(acquire(&mut rig, &a), range);
    rig.check(0, range, 1, "live".into());
    rig.sim.sync().unwrap();
    (0..4).for_each(|_| rig.engine.step().unwrap());
    let stats = rig.engine.stats();
    assert_eq!((stats.forwarded_count, stats.seam.unmaps, stats.seam.copies_in), (1, 0, 0));
    assert_eq!(stats.unreleased_bytes, 0);
    drop(a);
    assert_all_given_back(rig);
}

#[test]
fn a_piece_of_memory_serves_the_next_storage_of_its_length() {
    let mut rig = rig_of(with_room(eager(), 64), whole(), 1);
    let (a, _) = fixed(&mut rig, 1);
    let (b, at) = fixed(&mut rig, 2);
    for (gone, back) in [(&a, &b), (&b, &a)] {
        evict(&mut rig, gone);
        until_gone(&mut rig, gone);
        let held = rig.engine.memory().unwrap();
        assert_eq!(rig.engine.stats().idle_memory_bytes, MAPPED.0);
        acquire(&mut rig, back);
        acquire(&mut rig, gone);
        assert_eq!(rig.engine.stats().idle_memory_bytes, 0);
        assert_eq!(rig.engine.memory().unwrap().peak, held.allocated, "none was taken besides");
    }
    rig.check(0, at, 2, "the other one".into());
    drop((a, b));
    assert_all_given_back(rig);
}

#[test]
fn small_pieces_and_those_past_the_bound_go_back_to_the_device() {
    let small = Options { memory_pooled_bytes_min: Bytes(MAPPED.0 + 1), ..whole() };
    for (options, kept) in [(whole(), 2), (small, 0)] {
        let mut rig = rig_of(eager(), options, 1);
        let all: Vec<_> = (0..5).map(|n| fixed(&mut rig, n).0).collect();
        all.iter().for_each(|storage| evict(&mut rig, storage));
        all.iter().for_each(|storage| until_gone(&mut rig, storage));
        assert_eq!(rig.engine.stats().idle_memory_bytes, kept * MAPPED.0);
        assert_eq!(rig.engine.memory().unwrap().allocated, Bytes(kept * MAPPED.0));
        // Whoever wants room in the order of a stream gets theirs, too.
        let on = rig.streams[0].engine;
        let all_of_it = rig.engine.memory().unwrap().total;
        let large = rig.engine.alloc(all_of_it, on, "large").unwrap();
        assert_eq!(rig.engine.stats().idle_memory_bytes, 0);
        drop((all, large));
        assert_all_given_back(rig);
    }
}

#[test]
fn a_reader_that_must_wait_for_memory_is_counted_and_gets_it() {
    for seed in 0..100 {
        let mut rig = rig_of(with_room(Config::adversary(seed), 2), bounds(), 1);
        let (a, at) = fixed(&mut rig, 1);
        evict(&mut rig, &a);
        until_gone(&mut rig, &a);
        let (b, _) = fixed(&mut rig, 2);
        let (c, _) = fixed(&mut rig, 3);
        evict(&mut rig, &b);
        let stalls = rig.engine.stats().memory_stalls;
        let range = acquire(&mut rig, &a);
        assert_eq!(range, at);
        rig.check(0, range, 1, format!("seed {seed}"));
        let stats = rig.engine.stats();
        assert_eq!(rig.engine.residency(b.id()).unwrap(), AWAY);
        assert!(stats.memory_stalls - stalls <= 1);
        drop((a, b, c));
        assert_all_given_back(rig);
    }
    // A device that is late keeps the host waiting.
    let patient = Options { memory_wait_max: Duration::MAX, ..bounds() };
    let mut rig = rig_of(with_room(lazy(), 1), patient, 1);
    let (a, _) = fixed(&mut rig, 1);
    evict(&mut rig, &a);
    let (b, _) = fixed(&mut rig, 2);
    let stats = rig.engine.stats();
    assert_eq!(stats.memory_stalls, 1);
    assert!(stats.memory_stall_time > Duration::ZERO);
    drop((a, b));
    assert_all_given_back(rig);
}

#[test]
fn nobody_waits_for_a_storage_that_another_one_must_follow() {
    let patient = Options { memory_wait_max: Duration::MAX, ..bounds() };
    for is_late in [true, false] {
        let config = if is_late { lazy() } else { eager() };
        let mut rig = rig_of(with_room(config, 2), patient.clone(), 2);
        let (kept, ended) = (fixed(&mut rig, 1).0, fixed(&mut rig, 2).0);
        let (here, other) = (rig.streams[0].engine, rig.streams[1].engine);
        evict(&mut rig, &ended);
        assert!(matches!(rig.engine.acquire(ended.id(), here), Ok(Acquire::Ready(_))));
        evict(&mut rig, &kept);
        // Its operator may come yet.
        let refused = rig.engine.alloc_fixed(LEN, other, "third").unwrap_err();
        assert_eq!(refused.kind(), Kind::OutOfMemory, "{refused}");
        assert_eq!(rig.engine.stats().memory_stalls, 0);
        // One that ended goes ahead of it, though a copy may read it: that is waited for.
        rig.engine.release(ended, here).unwrap();
        let third = rig.engine.alloc_fixed(LEN, other, "third").unwrap();
        assert_eq!(rig.engine.stats().memory_stalls > 0, is_late);
        assert_eq!(rig.engine.stats().mapped_bytes, 2 * MAPPED.0, "the other one stays");
        // On the stream itself a verb follows the operator.
        let fourth = rig.engine.alloc_fixed(LEN, here, "fourth").unwrap();
        drop((kept, third, fourth));
        assert_all_given_back(rig);
    }
}

#[test]
fn bytes_that_go_in_a_streams_order_make_room_for_a_fixed_address() {
    for seed in 0..100 {
        let mut rig = rig_of(with_room(Config::adversary(seed), 1), bounds(), 1);
        let on = rig.streams[0].engine;
        let owned = rig.engine.alloc(LEN, on, "owned").unwrap();
        let range = rig.engine.range(owned.id()).unwrap();
        rig.fill(0, range, 1);
        rig.engine.evict(owned.id(), on).unwrap();
        // The stream has yet to get to where they are freed.
        let (a, at) = fixed(&mut rig, 2);
        assert_eq!(rig.engine.stats().memory_stalls, 1);
        rig.check(0, at, 2, format!("seed {seed}"));
        evict(&mut rig, &a);
        until_gone(&mut rig, &a);
        let range = acquire(&mut rig, &owned);
        rig.check(0, range, 1, format!("seed {seed}: owned"));
        drop((owned, a));
        assert_all_given_back(rig);
    }
}

#[test]
fn a_wait_for_memory_ends_at_its_bound_and_changes_nothing() {
    let options = Options { memory_wait_max: Duration::ZERO, ..bounds() };
    let mut rig = rig_of(with_room(lazy(), 1), options, 1);
    let (a, _) = fixed(&mut rig, 1);
    evict(&mut rig, &a);
    let on = rig.streams[0].engine;
    let error = rig.engine.alloc_fixed(LEN, on, "second").unwrap_err();
    assert_eq!(error.kind(), Kind::OutOfMemory, "{error}");
    let told = error.to_string();
    assert!(told.contains("second") && told.contains("waited for 0ns"), "{told}");
    assert_eq!(rig.engine.residency(a.id()).unwrap(), Residency::Evicting);
    assert_eq!(rig.engine.stats().memory_stalls, 1);
    until_gone(&mut rig, &a);
    let second = rig.engine.alloc_fixed(LEN, on, "second").unwrap();
    // Where nobody is about to give memory back nobody is waited for.
    let error = rig.engine.acquire(a.id(), on).unwrap_err();
    assert_eq!((error.kind(), rig.engine.stats().memory_stalls), (Kind::OutOfMemory, 1), "{error}");
    assert_eq!(rig.engine.residency(a.id()).unwrap(), AWAY);
    rig.engine.release(second, on).unwrap();
    rig.sim.sync().unwrap();
    while rig.engine.stats().mapped_bytes > 0 {
        rig.engine.step().unwrap();
    }
    let range = acquire(&mut rig, &a);
    rig.check(0, range, 1, "after all that".into());
    drop(a);
    assert_all_given_back(rig);
}

#[test]
fn bytes_are_fetched_ahead_and_given_up_and_fetched_again() {
    let options = Options { prefetch_count_max: 2, ..bounds() };
    for seed in 0..100 {
        let mut rig = rig_of(Config::adversary(seed), options.clone(), 1);
        let on = rig.streams[0].engine;
        let all: Vec<_> = (0..3).map(|n| fixed(&mut rig, n)).collect();
        all.iter().for_each(|(storage, _)| evict(&mut rig, storage));
        all.iter().for_each(|(storage, _)| until_gone(&mut rig, storage));
        let range = acquire(&mut rig, &all[2].0);
        rig.check(0, range, 2, format!("seed {seed}"));
        assert_eq!(rig.engine.residency(all[1].0.id()).unwrap(), Residency::Refilling);
        rig.engine.cancel(all[1].0.id(), on).unwrap();
        if seed % 2 == 0 {
            // Its bytes go once the copy is done; or else they are wanted before that.
            (0..seed).for_each(|_| rig.engine.step().unwrap());
        }
        for (n, (storage, at)) in all.iter().enumerate() {
            let range = acquire(&mut rig, storage);
            assert_eq!(range, *at);
            rig.check(0, range, n as u64, format!("seed {seed} storage {n}"));
        }
        drop(all);
        assert_all_given_back(rig);
    }
}

#[test]
fn a_call_of_mapping_that_fails_loses_nothing_wherever_it_is() {
    for spot in [Spot::Create, Spot::Map, Spot::Unmap] {
        for nth in 1..12 {
            let mut config = eager();
            config.faults = FaultPlan::default().at(spot, nth, Fault::Reject(800));
            let mut rig = rig_of(config, bounds(), 1);
            let on = rig.streams[0].engine;
            let mut storages = Vec::new();
            for n in 0..2 {
                let storage = match rig.engine.alloc_fixed(LEN, on, "weight") {
                    Ok(storage) => storage,
                    Err(error) => {
                        assert_eq!(error.driver_code(), Some(800), "{spot:?} {nth}: {error}");
                        rig.engine.alloc_fixed(LEN, on, "weight").unwrap()
                    }
                };
                let range = rig.engine.range(storage.id()).unwrap();
                rig.fill(0, range, n);
                storages.push((storage, range));
            }
            for (storage, _) in &storages {
                evict(&mut rig, storage);
                until_gone(&mut rig, storage);
            }
            for (n, (storage, range)) in storages.iter().enumerate() {
                if let Err(error) = rig.engine.acquire(storage.id(), on) {
                    assert_eq!(error.driver_code(), Some(800), "{spot:?} {nth}: {error}");
                    assert_eq!(rig.engine.residency(storage.id()).unwrap(), AWAY);
                }
                assert_eq!(acquire(&mut rig, storage), *range);
                rig.check(0, *range, n as u64, format!("{spot:?} {nth}"));
            }
            drop(storages);
            let _ = rig.engine.drain();
            let shut = (0..3).find(|_| rig.engine.shutdown().is_ok());
            assert!(shut.is_some(), "{spot:?} {nth}: an end that fails can be tried again");
            rig.assert_right();
            let memory = rig.sim.memory().unwrap();
            assert_eq!(memory.free, memory.total, "{spot:?} {nth}");
        }
    }
}

#[test]
fn a_device_that_cannot_map_refuses_by_name_and_does_all_else() {
    let config = Config { map_granularity: Bytes::ZERO, ..eager() };
    let mut rig = rig_of(config, bounds(), 1);
    let on = rig.streams[0].engine;
    let error = rig.engine.alloc_fixed(LEN, on, "weight").unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable(Missing::Mapping), "{error}");
    assert!(error.to_string().contains("weight"), "{error}");
    let owned = rig.engine.alloc(LEN, on, "owned").unwrap();
    drop(owned);
    assert_all_given_back(rig);
}

#[test]
fn no_bytes_and_too_many_storages_are_refused_before_anything_is_taken() {
    let mut rig = rig_of(eager(), Options { storages_max: 1, ..bounds() }, 1);
    let on = rig.streams[0].engine;
    let error = rig.engine.alloc_fixed(Bytes::ZERO, on, "none").unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::Empty), "{error}");
    let (a, _) = fixed(&mut rig, 1);
    let before = rig.engine.memory().unwrap().allocated;
    let error = rig.engine.alloc_fixed(LEN, on, "second").unwrap_err();
    assert_eq!(error.kind(), Kind::Busy, "{error}");
    assert_eq!(rig.engine.memory().unwrap().allocated, before);
    let error = rig.engine.alloc_fixed(Bytes::MAX, on, "all").unwrap_err();
    assert!(!error.is_lost(), "{error}");
    let target = rig.take(0, LEN).unwrap();
    evict(&mut rig, &a);
    until_gone(&mut rig, &a);
    let error = rig.engine.refill(a.id(), target, on).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::State), "its bytes have a place: {error}");
    rig.give(0, target.at());
    drop(a);
    assert_all_given_back(rig);
}

#[test]
fn what_comes_back_is_verified_at_a_fixed_address_too() {
    let mut rig = rig_of(eager(), Options { verify: true, ..bounds() }, 1);
    let (a, at) = fixed(&mut rig, 1);
    evict(&mut rig, &a);
    until_gone(&mut rig, &a);
    assert_eq!(acquire(&mut rig, &a), at);
    rig.sim.sync().unwrap();
    rig.engine.step().unwrap();
    assert_eq!(rig.engine.stats().verified_count, 1);
    drop(a);
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_step_may_be_predicted_where_no_byte_moves() {
    let config = Config::times_only(Model::default());
    let mut rig = rig_of(
        config,
        Options { pinned_growth: lightering::pinned::Growth::Late, ..Options::default() },
        1,
    );
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc_fixed(Bytes::kib(100), on, "weight").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    evict(&mut rig, &storage);
    until_gone(&mut rig, &storage);
    // 2 MiB is what an H200 maps, and too little to be kept.
    assert_eq!(rig.engine.memory().unwrap().allocated, Bytes::ZERO);
    assert_eq!(acquire(&mut rig, &storage), range);
    assert_eq!(rig.engine.stats().mapped_bytes, Bytes::mib(2).0);
    drop(storage);
    rig.assert_nothing_left();
}
