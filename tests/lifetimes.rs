//! Ends of storages, streams and engines at awkward moments: handles dropped under a capture, a
//! release on another stream than the eviction's, an engine dropped over a refused question.
//!
//! The fault guarded against: a verb that gives up half way, after which bytes are freed under a
//! copy, or a storage, a block or a handle is left behind for good.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, Eager, Fault, FaultPlan, Lazy, Spot};
use lightering::pinned::PoolOptions;
use lightering::trace::Use;
use lightering::{Acquire, Bytes, DeviceRange, Evict, Kind, Options};
use std::panic::{AssertUnwindSafe, catch_unwind};
use support::{Rig, options, small_pool};

const LEN: Bytes = Bytes::kib(8);

fn lazy() -> Config {
    Config::scheduled(Box::new(Lazy::default()))
}

#[allow(dead_code)]
fn ready(acquired: Acquire) -> DeviceRange {
    match acquired {
        Acquire::Ready(range) => range,
        Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
    }
}

/// A clean eviction is ordered behind readers on its own stream only; released on another stream,
/// the bytes are freed under the reader's kernel.
#[test]
fn b01_a_clean_eviction_released_on_another_stream_frees_under_its_reader() {
    let bounds = Options { note_uses: false, unreleased_bytes_max: Bytes::mib(1), ..options() };
    let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(1)), bounds, 2);
    let (a, b) = (rig.streams[0].engine, rig.streams[1].engine);
    let storage = rig.engine.alloc(LEN, a, "x").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, 1);
    rig.engine.evict(storage.id(), a).unwrap();
    // The copy-out is done; a reader takes the eviction back.
    rig.engine.drain().unwrap();
    let range = match rig.engine.acquire(storage.id(), a).unwrap() {
        Acquire::Ready(range) => range,
        other => panic!("{other:?}"),
    };
    rig.check(0, range, 1, "the reader on the first stream".into());
    assert_eq!(rig.engine.evict(storage.id(), a).unwrap(), Evict::Clean);
    assert_eq!(rig.engine.stats().unreleased_bytes, LEN.0, "not freed yet");
    rig.engine.release(storage, b).unwrap();
    rig.assert_right();
}

/// An error in a handle's end is not the next verb's error, and not a leak until shutdown.
#[test]
fn b02_a_handle_dropped_while_its_stream_is_captured_is_freed_later_and_fails_nobody() {
    let mut rig = Rig::adversary(1);
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, "x").unwrap();
    rig.sim.inner().set_capturing(rig.streams[0].here, true).unwrap();
    drop(storage);
    let other = rig.engine.memory();
    rig.sim.inner().set_capturing(rig.streams[0].here, false).unwrap();
    assert!(other.is_ok(), "a verb that has nothing to do with it: {other:?}");
    rig.engine.step().unwrap();
    rig.engine.drain().unwrap();
    assert_eq!(rig.engine.stats().storages, 0, "the dropped storage is never ended");
    assert_eq!(rig.engine.memory().unwrap().allocated, Bytes::ZERO);
}

#[test]
fn b03_step_goes_on_while_one_served_stream_is_captured() {
    let bounds = Options { unreleased_bytes_max: Bytes::mib(1), ..options() };
    let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(1)), bounds, 1);
    let on = rig.streams[0].engine;
    let a = rig.engine.alloc(LEN, on, "a").unwrap();
    let b = rig.engine.alloc(LEN, on, "b").unwrap();
    rig.engine.evict(a.id(), on).unwrap();
    rig.engine.evict(b.id(), on).unwrap();
    rig.sim.sync().unwrap();
    rig.sim.inner().set_capturing(rig.streams[0].here, true).unwrap();
    let stepped = rig.engine.step();
    rig.sim.inner().set_capturing(rig.streams[0].here, false).unwrap();
    assert!(stepped.is_ok(), "{stepped:?}");
}

/// A failed release says "out of memory" or "busy" ("nothing changed, try again"), yet it took the
/// handle: nobody can try again, and the bytes stay until shutdown.
#[test]
fn b04_a_release_that_failed_leaves_nothing_for_ever() {
    let mut hit = 0;
    for nth in 1..6 {
        let mut config = lazy();
        config.faults = FaultPlan::default().at(Spot::Record, nth, Fault::Refuse);
        let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), options(), 2);
        let (a, b) = (rig.streams[0].engine, rig.streams[1].engine);
        let storage = rig.engine.alloc(LEN, a, "x").unwrap();
        rig.engine.acquire(storage.id(), b).unwrap();
        if rig.engine.release(storage, a).is_ok() {
            continue;
        }
        hit += 1;
        rig.engine.drain().unwrap();
        rig.engine.step().unwrap();
        assert_eq!(rig.engine.stats().storages, 0, "record {nth}: the storage is never ended");
        assert_eq!(rig.engine.memory().unwrap().allocated, Bytes::ZERO);
    }
    assert!(hit > 0, "no record of a release was refused");
}

/// A storage ends while it is fetched ahead, and its bytes cannot go yet; who wants its memory then
/// gives the fetch up once more, and counts it as wasted twice.
#[test]
fn b05_a_fetched_storage_that_ended_is_not_wasted_twice() {
    let mut config = Config::scheduled(Box::new(Eager));
    config.device_bytes = Bytes(2 * LEN.0);
    let one_ahead = Options { prefetch_count_max: 1, ..options() };
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), one_ahead, 2);
    let on = rig.streams[0].engine;
    let mut all = Vec::new();
    for name in ["first", "second"] {
        let storage = rig.engine.alloc_fixed(LEN, on, name).unwrap();
        rig.engine.evict(storage.id(), on).unwrap();
        while rig.engine.stats().mapped_bytes > 0 {
            rig.engine.flush(on).unwrap();
            rig.engine.step().unwrap();
        }
        all.push(storage);
    }
    let (second, first) = (all.pop().unwrap(), all.pop().unwrap());
    rig.engine.acquire(second.id(), on).unwrap();
    assert_eq!(rig.engine.stats().prefetched_bytes, LEN.0, "the first is fetched ahead");
    // Somebody captures, so no moment can be marked on every stream, and nothing is unmapped.
    let captured = rig.streams[1].here;
    rig.sim.inner().set_capturing(captured, true).unwrap();
    rig.engine.release(first, on).unwrap();
    let wasted = rig.engine.stats().guesses.wasted_bytes;
    assert_eq!((rig.engine.stats().prefetched_bytes, wasted), (0, LEN.0));
    let refused = rig.engine.alloc_fixed(LEN, on, "third").unwrap_err();
    assert_eq!(refused.kind(), Kind::OutOfMemory, "{refused}");
    assert_eq!(rig.engine.stats().guesses.wasted_bytes, LEN.0, "it was given up once");
    rig.sim.inner().set_capturing(captured, false).unwrap();
    let third = rig.engine.alloc_fixed(LEN, on, "third").unwrap();
    for storage in [second, third] {
        rig.engine.release(storage, on).unwrap();
    }
    rig.assert_nothing_left();
}

/// A copy-in fails half way, and so does the wait that should order the target's end behind it: the
/// framework drops the target while the first trunk still writes it.
#[test]
fn b06_a_target_is_not_given_back_under_a_copy_that_failed_half_way() {
    let mut bad = Vec::new();
    for nth in 1..14 {
        let mut config = lazy();
        config.faults = FaultPlan::default().at(Spot::Copy, 6, Fault::Refuse).at(
            Spot::Wait,
            nth,
            Fault::Refuse,
        );
        let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), options(), 1);
        let on = rig.streams[0].engine;
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, 1);
        let storage = rig.engine.adopt(range, "x").unwrap();
        if rig.engine.evict(storage.id(), on).is_err() || rig.engine.flush(on).is_err() {
            continue;
        }
        if rig.engine.releasable(on) != Ok(Some(storage.id())) {
            continue;
        }
        rig.give(0, range.at());
        let target = rig.take(0, LEN).unwrap();
        if rig.engine.refill(storage.id(), target, on).is_ok() {
            continue;
        }
        // As the documentation allows: dropped in the order of `compute`, and taken anew.
        rig.give(0, target.at());
        let mine = rig.take(0, LEN).unwrap();
        rig.fill(0, mine, 9);
        rig.check(0, mine, 9, "somebody else's bytes".into());
        rig.sim.sync().unwrap();
        let hazards = catch_unwind(AssertUnwindSafe(|| rig.assert_right()));
        if hazards.is_err() {
            bad.push(nth);
        }
    }
    assert!(bad.is_empty(), "a copy writes freed bytes where wait {bad:?} is refused");
}

/// The same of the engine's own target: it is neither freed nor counted.
#[test]
fn b07_a_target_of_the_engines_own_is_not_lost_where_two_calls_fail() {
    for nth in 1..14 {
        let mut config = lazy();
        config.faults = FaultPlan::default().at(Spot::Copy, 6, Fault::Refuse).at(
            Spot::Wait,
            nth,
            Fault::Refuse,
        );
        let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), options(), 1);
        let on = rig.streams[0].engine;
        let storage = rig.engine.alloc(LEN, on, "x").unwrap();
        if rig.engine.evict(storage.id(), on).is_err() || rig.engine.flush(on).is_err() {
            continue;
        }
        let _ = rig.engine.acquire(storage.id(), on);
        let _ = rig.engine.release(storage, on);
        rig.engine.drain().unwrap();
        rig.engine.shutdown().unwrap();
        rig.sim.sync().unwrap();
        let memory = rig.sim.memory().unwrap();
        assert_eq!(memory.free, memory.total, "wait {nth}: device bytes are lost");
    }
}

/// More busy blocks than one `settle` asks about: closing the engine quarantines the rest for good.
#[test]
fn b08_shutdown_brings_every_block_home_whatever_settle_asks_at_once() {
    let pool = PoolOptions { settle_calls_max: 1, ..small_pool(Bytes::mib(4)) };
    let mut rig = Rig::new(lazy(), pool, options(), 1);
    let on = rig.streams[0].engine;
    for n in 1..12u64 {
        let storage = rig.engine.alloc(Bytes::kib(4 * n), on, "x").unwrap();
        rig.engine.evict(storage.id(), on).unwrap();
        rig.engine.release(storage, on).unwrap();
    }
    rig.engine.shutdown().unwrap();
    assert_eq!(rig.pool.stats().busy, Bytes::ZERO, "after shutdown");
    let Rig { engine, pool, .. } = rig;
    drop(engine);
    assert_eq!(pool.stats().quarantined, Bytes::ZERO, "after the engine is gone");
}

/// The default asks 64 at once.
#[test]
fn b08_shutdown_brings_every_block_home_with_the_default_bounds() {
    let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(64)), options(), 1);
    let on = rig.streams[0].engine;
    let all: Vec<_> = (1..200u64)
        .map(|_| {
            let storage = rig.engine.alloc(Bytes::kib(4), on, "x").unwrap();
            rig.engine.evict(storage.id(), on).unwrap();
            storage
        })
        .collect();
    for storage in all {
        rig.engine.release(storage, on).unwrap();
    }
    rig.engine.shutdown().unwrap();
    let Rig { engine, pool, .. } = rig;
    drop(engine);
    assert_eq!(pool.stats().busy, Bytes::ZERO);
    assert_eq!(pool.stats().quarantined, Bytes::ZERO, "after the engine is gone");
}

/// `drain` waits until everything is done "and learns of it".
#[test]
fn b09_drain_learns_that_every_block_is_idle() {
    let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(64)), options(), 1);
    let on = rig.streams[0].engine;
    let all: Vec<_> = (1..200u64)
        .map(|_| {
            let storage = rig.engine.alloc(Bytes::kib(4), on, "x").unwrap();
            rig.engine.evict(storage.id(), on).unwrap();
            storage
        })
        .collect();
    for storage in all {
        rig.engine.release(storage, on).unwrap();
    }
    rig.engine.drain().unwrap();
    assert_eq!(rig.pool.stats().busy, Bytes::ZERO);
}

/// "Every verb works without `step`": few events, none asked for.
#[test]
fn b10_few_events_and_no_step_do_not_stop_the_engine_for_ever() {
    let bounds = Options { events_max: 8, ..options() };
    let config = Config::scheduled(Box::new(Eager));
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), bounds, 1);
    let on = rig.streams[0].engine;
    let mut kept = 0;
    for round in 0..200u64 {
        let storage = rig.engine.alloc(LEN, on, "x").unwrap();
        let range = rig.engine.range(storage.id()).unwrap();
        rig.fill(0, range, round);
        if matches!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Kept(_)) {
            kept += 1;
        } else {
            rig.engine.flush(on).unwrap();
        }
        // The device has done everything at once; nothing is in flight.
        let got = rig.engine.acquire(storage.id(), on);
        assert!(got.is_ok(), "round {round}: {got:?}");
        rig.engine.release(storage, on).unwrap();
    }
    assert!(kept < 20, "{kept} of 200 were kept");
}

/// A backward pass runs ahead of its device. The inputs that left last come back before their
/// copies ran; once ended they kept on the device all that ended after them, 63 inputs of 64.
#[test]
fn b26_bytes_that_nothing_touches_wait_for_nobodys_copy() {
    for streams in [1, 2] {
        let bounds = Options { unreleased_bytes_max: Bytes::mib(1), ..options() };
        let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(1)), bounds, streams);
        let on = rig.streams[0].engine;
        let [left, other] = [1, 2].map(|seed| {
            let range = rig.take(0, LEN).unwrap();
            rig.fill(0, range, seed);
            rig.engine.adopt(range, "x").unwrap()
        });
        let (left_id, other_id) = (left.id(), other.id());
        rig.engine.evict(left_id, on).unwrap();
        ready(rig.engine.acquire(left_id, on).unwrap());
        drop((left, other));
        let first = rig.engine.releasable(on).unwrap();
        if streams == 1 {
            assert_eq!(first, Some(other_id), "it waits for the copy of another");
            assert_eq!(rig.engine.releasable(on).unwrap(), None, "a copy reads these");
        } else {
            assert_eq!(first, None, "no stream is known past this moment");
        }
        let mut named = Vec::new();
        // Of several streams the next ones take a moment of their own, marked by a call.
        for _ in 0..streams {
            rig.sim.sync().unwrap();
            while let Some(id) = rig.engine.releasable(on).unwrap() {
                named.push(id);
            }
            rig.sim.sync().unwrap();
        }
        let expected = if streams == 1 { vec![left_id] } else { vec![other_id, left_id] };
        assert_eq!(named, expected);
        rig.assert_right();
    }
}

/// Without that, what came back before it had left and then ended is of no bound.
#[test]
fn b27_ended_bytes_that_a_copy_still_reads_are_of_the_bound() {
    let bounds = Options { unreleased_bytes_max: Bytes(2 * LEN.0), ..options() };
    let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(1)), bounds, 1);
    let on = rig.streams[0].engine;
    for seed in 0..6 {
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, seed);
        let storage = rig.engine.adopt(range, "x").unwrap();
        rig.engine.evict(storage.id(), on).unwrap();
        ready(rig.engine.acquire(storage.id(), on).unwrap());
    }
    let mut named = 0;
    while rig.engine.releasable(on).unwrap().is_some() {
        named += 1;
    }
    assert_eq!(named, 4, "the stream waits for all but two");
    rig.sim.sync().unwrap();
    while rig.engine.releasable(on).unwrap().is_some() {
        named += 1;
    }
    assert_eq!((named, rig.engine.stats().storages), (6, 0));
    rig.assert_right();
}

/// A storage that was fetched ahead ends while its copy runs. Listed behind the one evicted last,
/// which another has to follow, its bytes were named to nobody though nothing touched them.
#[test]
fn b28_ended_bytes_do_not_wait_for_the_one_that_another_must_follow() {
    let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(1)), options(), 1);
    let on = rig.streams[0].engine;
    let [ended, latest] = [1, 2].map(|seed| {
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, seed);
        rig.engine.adopt(range, "x").unwrap()
    });
    let ended_id = ended.id();
    rig.engine.evict(ended_id, on).unwrap();
    ready(rig.engine.acquire(ended_id, on).unwrap());
    rig.engine.evict(latest.id(), on).unwrap();
    drop(ended);
    assert_eq!(rig.engine.releasable(on).unwrap(), None, "a copy reads these");
    rig.sim.sync().unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(ended_id), "nothing touches them");
    assert_eq!(rig.engine.releasable(on).unwrap(), None, "its operator may come yet");
    rig.engine.release(latest, on).unwrap();
    rig.assert_right();
}

/// Two storages that left, the first of them behind a moment that was marked on both streams.
fn one_behind_a_fence(rig: &mut Rig) -> [lightering::Storage; 2] {
    let on = rig.streams[0].engine;
    let both = [1, 2].map(|seed| {
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, seed);
        let storage = rig.engine.adopt(range, "x").unwrap();
        rig.engine.evict(storage.id(), on).unwrap();
        storage
    });
    rig.sim.sync().unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), None, "the moment is marked now");
    both
}

/// What goes ahead goes behind a moment that was marked before it ended: its users on another
/// stream may have come since.
#[test]
fn b29_bytes_that_nothing_touches_are_not_of_a_fence_from_before_they_ended() {
    let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(1)), options(), 2);
    let on = rig.streams[0].engine;
    let [first, latest] = one_behind_a_fence(&mut rig);
    let range = rig.take(1, LEN).unwrap();
    let ended = rig.engine.adopt(range, "x").unwrap();
    rig.fill(1, range, 3);
    let ended_id = ended.id();
    drop(ended);
    // Its end is heard of while the fence stands.
    rig.engine.memory().unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), None);
    rig.sim.sync().unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(first.id()));
    assert_eq!(rig.engine.releasable(on).unwrap(), None, "a moment of its own is marked now");
    rig.sim.sync().unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(ended_id));
    drop((first, latest));
}

/// Places of nobody go while a fence stands; it covers no others afterwards than before.
#[test]
fn b30_a_fence_covers_the_same_storages_when_places_of_nobody_went() {
    let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(1)), options(), 2);
    let on = rig.streams[0].engine;
    let [first, second] = one_behind_a_fence(&mut rig);
    let range = rig.take(0, LEN).unwrap();
    let other = rig.engine.adopt(range, "other").unwrap();
    for _ in 0..100 {
        rig.engine.evict(other.id(), on).unwrap();
        ready(rig.engine.acquire(other.id(), on).unwrap());
    }
    assert!(rig.engine.places() < 80, "{} places", rig.engine.places());
    rig.engine.evict(other.id(), on).unwrap();
    rig.sim.sync().unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(first.id()));
    assert_eq!(rig.engine.releasable(on).unwrap(), None, "the fence is from before it may go");
    rig.sim.sync().unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(second.id()));
    drop((first, second, other));
}

/// A framework writes bytes whose storage ended while they were on their way out, and says so. That
/// took the eviction of nobody's storage back, and its bytes were never named.
#[test]
fn b31_a_write_after_its_end_does_not_keep_a_storage_for_ever() {
    for streams in [1, 2] {
        let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(1)), options(), streams);
        let on = rig.streams[0].engine;
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, 1);
        let storage = rig.engine.adopt(range, "x").unwrap();
        let id = storage.id();
        rig.engine.evict(id, on).unwrap();
        drop(storage);
        // Behind the copy-out that still reads them.
        rig.engine.note(on, &[Use::write(range)]).unwrap();
        rig.fill(0, range, 2);
        rig.check(0, range, 2, "what was written".into());
        let mut named = Vec::new();
        for _ in 0..3 {
            named.extend(rig.engine.releasable(on).unwrap());
            rig.sim.sync().unwrap();
        }
        assert_eq!(named, [id]);
        assert_eq!(rig.engine.stats().unreleased_bytes, 0);
        rig.give(0, range.at());
        rig.assert_right();
        rig.assert_nothing_left();
    }
}
