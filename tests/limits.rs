//! Bounds and promises at their edges: few events, huge lengths, refused calls in the middle of a
//! verb, and what the engine says it counts, names and retries.
//!
//! The fault guarded against: an edge at which a promise in the docs silently stops to hold.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::adapter::{self, Checkpoint};
use lightering::backend::Backend;
use lightering::backend::sim::{Config, Fault, FaultPlan, Lazy, Spot, World};
use lightering::pinned::PinnedPool;
use lightering::policy::Kept;
use lightering::trace::Use;
use lightering::{Acquire, Bytes, DevicePtr, DeviceRange, Engine, Evict, Kind, Misuse, Options};
use std::panic::{AssertUnwindSafe, catch_unwind};
use support::{Hands, Memory, Rig, options, small_pool};

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

/// The handle's documentation: a framework keeps the bytes until `releasable` names the storage.
#[test]
fn b11_a_dropped_handle_of_a_frameworks_bytes_is_named_even_if_it_never_left() {
    let mut rig = Rig::adversary(3);
    let on = rig.streams[0].engine;
    let range = rig.take(0, LEN).unwrap();
    let storage = rig.engine.adopt(range, "x").unwrap();
    let id = storage.id();
    drop(storage);
    rig.engine.flush(on).unwrap();
    rig.sim.sync().unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(id));
}

/// The same by way of the adapter: a forward without backward leaves the kept input with the
/// framework for ever.
#[test]
fn b12_a_forward_without_backward_gives_all_of_a_frameworks_memory_back() {
    let bounds = Options { keep_last_count: 1, ..options() };
    let mut rig = Rig::new(Config::adversary(4), small_pool(Bytes::mib(1)), bounds, 1);
    let on = rig.streams[0];
    let (mut checkpoint, mut memory) = (Checkpoint::new(), Memory::default());
    for n in 0..4 {
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, n);
        let input = rig.engine.adopt(range, "input").unwrap();
        memory.ranges.insert(input.id(), range);
        checkpoint.keep(&mut rig.engine, input, on.engine).unwrap();
    }
    checkpoint.end_step(&mut rig.engine).unwrap();
    rig.engine.flush(on.engine).unwrap();
    let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory: &mut memory };
    adapter::pull(&mut rig.engine, on.engine, &mut hands).unwrap();
    assert!(memory.ranges.is_empty(), "{} inputs are never given back", memory.ranges.len());
}

/// An eviction that failed half way still reads the bytes; the dropped handle says "never touched".
#[test]
fn b13_a_handle_dropped_after_half_an_eviction_is_named_when_the_copy_is_done() {
    let mut config = lazy();
    config.faults = FaultPlan::default().at(Spot::Copy, 3, Fault::Refuse);
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), options(), 1);
    let on = rig.streams[0].engine;
    let range = rig.take(0, LEN).unwrap();
    rig.fill(0, range, 1);
    let storage = rig.engine.adopt(range, "x").unwrap();
    let id = storage.id();
    rig.engine.evict(id, on).unwrap_err();
    drop(storage);
    assert_eq!(rig.engine.releasable(on).unwrap(), None, "the copy still reads the bytes");
    assert_eq!(rig.engine.stats().storages, 1, "it lives until the copy is done");
    rig.sim.sync().unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(id));
}

/// Counters are added with `+`: an absurd length offered a few times ends in a panic.
#[test]
fn b14_an_absurd_length_kept_again_and_again_panics_nowhere() {
    let range = DeviceRange::new(DevicePtr(0x1000), Bytes(1 << 62)).unwrap();
    let refused = Rig::adversary(5).engine.adopt(range, "absurd").unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::OutOfRange));
    // Of a backend that cannot tell what is allocated it is taken.
    let (config, pool) = (Config::adversary(5), small_pool(Bytes::mib(1)));
    let (mut rig, _) = Rig::broken(config, pool, options(), 1, None);
    let on = rig.streams[0].engine;
    let storage = rig.engine.adopt(range, "absurd").unwrap();
    for _ in 0..6 {
        let became = rig.engine.evict(storage.id(), on).unwrap();
        assert_eq!(became, Evict::Kept(Kept::NoPinnedRoom));
    }
}

#[test]
fn b15_absurd_options_are_refused_and_panic_nowhere() {
    let world = World::new(Config::adversary(1));
    let absurd = [
        Options { ring_records: usize::MAX, ..Options::default() },
        Options { events_max: usize::MAX, ..Options::default() },
        Options { keep_last_count: usize::MAX, ..Options::default() },
        Options { prefetch_count_max: usize::MAX, ..Options::default() },
        Options { step_queries_max: usize::MAX, ..Options::default() },
        Options { transfers_max: usize::MAX, ..Options::default() },
    ];
    for (n, options) in absurd.into_iter().enumerate() {
        let made = catch_unwind(AssertUnwindSafe(|| {
            let device = world.device(0).unwrap();
            let pool = PinnedPool::new(device.pinner(), small_pool(Bytes::mib(1))).unwrap();
            let mut engine = Engine::new(Box::new(device), &pool, options)?;
            let on = engine.adopt_stream(0)?;
            let all: Vec<_> = (0..4)
                .map(|_| {
                    let one = engine.alloc(LEN, on, "x").unwrap();
                    engine.offer(one.id(), on).unwrap();
                    one
                })
                .collect();
            engine.flush(on)?;
            for one in all.iter().rev() {
                engine.acquire(one.id(), on)?;
            }
            engine.step()
        }));
        assert!(made.is_ok(), "option {n} panics");
    }
}

/// `Kept::AmongLast` is a reason with a counter that nothing ever counts.
#[test]
fn b16_what_stays_because_it_is_among_the_last_is_counted() {
    let bounds = Options { keep_last_count: 1, ..options() };
    let mut rig = Rig::new(Config::adversary(6), small_pool(Bytes::mib(1)), bounds, 1);
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, "x").unwrap();
    rig.engine.offer(storage.id(), on).unwrap();
    assert_eq!(rig.engine.stats().kept_for(Kept::AmongLast).count, 1);
}

/// The framework has no room in a refill: bytes that were evicted already could go, and the refill
/// be tried again.
#[test]
fn b17_a_frameworks_refill_without_room_makes_room_once() {
    let mut config = lazy();
    config.device_bytes = Bytes::kib(48);
    let bounds =
        Options { unreleased_bytes_max: Bytes::mib(1), prefetch_count_max: 0, ..options() };
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), bounds, 1);
    let on = rig.streams[0];
    let (mut checkpoint, mut memory) = (Checkpoint::new(), Memory::default());
    let mut keep = |rig: &mut Rig, memory: &mut Memory, n: u64| {
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, n);
        let input = rig.engine.adopt(range, "input").unwrap();
        memory.ranges.insert(input.id(), range);
        checkpoint.keep(&mut rig.engine, input, on.engine).unwrap();
    };
    keep(&mut rig, &mut memory, 0);
    keep(&mut rig, &mut memory, 1);
    rig.engine.flush(on.engine).unwrap();
    let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory: &mut memory };
    adapter::pull(&mut rig.engine, on.engine, &mut hands).unwrap();
    // Six more fill the device, all of them evicted and not given back yet.
    for n in 2..8 {
        keep(&mut rig, &mut memory, n);
    }
    let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory: &mut memory };
    let got = checkpoint.restore_into(&mut rig.engine, 0, on.engine, &mut hands);
    let range = got.expect("six evicted inputs could have made room");
    rig.check(0, range, 0, "layer 0".into());
    rig.assert_right();
}

/// A dropped engine whose device is alive gives everything back, though one call of its last steps
/// failed.
#[test]
fn b18_one_refused_call_while_an_engine_is_dropped_leaks_nothing() {
    let mut leaks = Vec::new();
    for nth in 1..40 {
        let mut config = Config::adversary(7);
        config.faults = FaultPlan::default().at(Spot::Query, nth, Fault::Refuse);
        let bounds = Options { unreleased_bytes_max: Bytes::mib(1), ..options() };
        let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), bounds, 1);
        let on = rig.streams[0].engine;
        let all: Vec<_> = (0..4)
            .map(|_| {
                let one = rig.engine.alloc(LEN, on, "x").unwrap();
                let _ = rig.engine.evict(one.id(), on);
                one
            })
            .collect();
        let Rig { engine, pool, mut sim, .. } = rig;
        drop(engine);
        drop(all);
        sim.sync().unwrap();
        let memory = sim.memory().unwrap();
        if pool.stats().quarantined > Bytes::ZERO || memory.free != memory.total {
            leaks.push(nth);
        }
    }
    assert!(leaks.is_empty(), "blocks and device bytes leak where query {leaks:?} is refused");
}

/// Everything is done and the host copy is clean; only the home of the bytes is under capture.
#[test]
fn b19_an_engine_dropped_while_a_stream_is_captured_leaks_nothing() {
    let mut rig = Rig::new(Config::adversary(8), small_pool(Bytes::mib(1)), options(), 1);
    let on = rig.streams[0].engine;
    let one = rig.engine.alloc(LEN, on, "x").unwrap();
    rig.engine.evict(one.id(), on).unwrap();
    ready(rig.engine.acquire(one.id(), on).unwrap());
    rig.engine.drain().unwrap();
    rig.sim.inner().set_capturing(rig.streams[0].here, true).unwrap();
    let Rig { engine, pool, mut sim, .. } = rig;
    drop(engine);
    assert_eq!(pool.stats().quarantined, Bytes::ZERO, "a block that nothing uses");
    let memory = sim.memory().unwrap();
    assert_eq!(memory.free, memory.total, "device bytes that nothing uses");
}

/// A usage error is "refused before anything was enqueued"; a note over two storages is half done.
#[test]
fn b20_a_note_that_is_refused_changes_nothing() {
    let mut rig = Rig::new(Config::adversary(9), small_pool(Bytes::mib(1)), options(), 1);
    let on = rig.streams[0].engine;
    let whole = rig.take(0, Bytes::kib(16)).unwrap();
    let low = whole.part(Bytes::ZERO, LEN).unwrap();
    let high = whole.part(LEN, LEN).unwrap();
    let a = rig.engine.adopt(low, "low").unwrap();
    let b = rig.engine.adopt(high, "high").unwrap();
    // `low` is away and coming back, `high` is resident with a clean copy.
    rig.engine.evict(a.id(), on).unwrap();
    rig.engine.evict(b.id(), on).unwrap();
    rig.engine.acquire(b.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(a.id()));
    rig.engine.prefetch(a.id(), low, on).unwrap();
    let error = rig.engine.note(on, &[Use::write(whole)]).unwrap_err();
    assert!(matches!(error.kind(), Kind::Usage(_)), "{error}");
    assert_eq!(rig.engine.evict(b.id(), on).unwrap(), Evict::Clean, "the copy is still good");
}

/// A refill whose last wait is refused says "evicted as before, drop the target", and keeps it.
#[test]
fn b22_a_refill_that_failed_does_not_keep_the_target_that_its_framework_drops() {
    for nth in 1..14 {
        let mut config = lazy();
        config.faults = FaultPlan::default().at(Spot::Wait, nth, Fault::Refuse);
        let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), options(), 1);
        let on = rig.streams[0].engine;
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, 1);
        let storage = rig.engine.adopt(range, "x").unwrap();
        if rig.engine.evict(storage.id(), on).is_err() || rig.engine.flush(on).is_err() {
            continue;
        }
        assert_eq!(rig.engine.releasable(on).unwrap(), Some(storage.id()));
        rig.give(0, range.at());
        let target = rig.take(0, LEN).unwrap();
        if rig.engine.refill(storage.id(), target, on).is_ok() {
            continue;
        }
        rig.give(0, target.at());
        // The bytes are somebody else's now.
        let theirs = rig.take(0, LEN).unwrap();
        rig.fill(0, theirs, 9);
        let got = match rig.engine.acquire(storage.id(), on).unwrap() {
            Acquire::Ready(range) => range,
            Acquire::NeedsRoom(len) => {
                let target = rig.take(0, len).unwrap();
                rig.engine.refill(storage.id(), target, on).unwrap()
            }
        };
        rig.check(0, got, 1, format!("wait {nth}"));
        rig.check(0, theirs, 9, format!("theirs, wait {nth}"));
        rig.assert_right();
    }
}

/// "Driver errors, after which nothing has changed": the storage is never named, nor freed, again.
#[test]
fn b23_a_release_that_was_refused_is_tried_again() {
    {
        let bounds = Options { unreleased_bytes_max: Bytes::mib(1), ..options() };
        let mut rig = Rig::new(lazy(), small_pool(Bytes::mib(1)), bounds, 2);
        let (a, b) = (rig.streams[0].engine, rig.streams[1].engine);
        let one = rig.engine.alloc(LEN, a, "one").unwrap();
        let two = rig.engine.alloc(LEN, a, "two").unwrap();
        rig.engine.evict(one.id(), a).unwrap();
        rig.engine.evict(two.id(), a).unwrap();
        rig.sim.sync().unwrap();
        // Freeing is refused once, since the stream is under capture.
        rig.sim.inner().set_capturing(rig.streams[0].here, true).unwrap();
        let _ = rig.engine.step();
        rig.sim.inner().set_capturing(rig.streams[0].here, false).unwrap();
        rig.engine.step().unwrap();
        rig.engine.flush(a).unwrap();
        rig.engine.step().unwrap();
        assert_eq!(rig.engine.memory().unwrap().allocated, Bytes::ZERO, "bytes are never freed");
        assert_eq!(rig.engine.stats().unreleased_bytes, 0);
        let _ = b;
    }
}

/// A reader's verb fails since another storage could not be fetched ahead.
#[test]
fn b24_a_guess_that_is_refused_is_not_the_readers_error() {
    for nth in 1..30 {
        let mut config = lazy();
        config.faults = FaultPlan::default().at(Spot::Copy, nth, Fault::Refuse);
        let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), options(), 1);
        let on = rig.streams[0].engine;
        let all: Vec<_> = (0..3)
            .map(|_| {
                let one = rig.engine.alloc(LEN, on, "x").unwrap();
                let _ = rig.engine.evict(one.id(), on);
                one
            })
            .collect();
        rig.engine.flush(on).unwrap();
        let last = all[2].id();
        if let Err(error) = rig.engine.acquire(last, on) {
            let state = rig.engine.residency(last).unwrap();
            assert_ne!(state, lightering::Residency::Resident, "copy {nth}: {error}");
        }
    }
}

/// "Driver errors, after which the storage is resident as before."
#[test]
fn b25_an_eviction_that_says_it_failed_left_the_storage_resident() {
    for (spot, nth) in [Spot::Query, Spot::Wait, Spot::Record, Spot::Copy]
        .into_iter()
        .flat_map(|spot| (1..12).map(move |nth| (spot, nth)))
    {
        let mut config = lazy();
        config.faults = FaultPlan::default().at(spot, nth, Fault::Refuse);
        let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), options(), 1);
        let on = rig.streams[0].engine;
        let mut all = Vec::new();
        for _ in 0..4 {
            let Ok(one) = rig.engine.alloc(LEN, on, "x") else { continue };
            if let Err(error) = rig.engine.evict(one.id(), on) {
                let state = rig.engine.residency(one.id()).unwrap();
                assert_eq!(state, lightering::Residency::Resident, "{spot:?} {nth}: {error}");
            }
            all.push(one);
        }
    }
}

#[test]
fn a_framework_that_never_asks_what_it_may_drop_grows_no_queue() {
    let mut rig = Rig::adversary(3);
    let on = rig.streams[0].engine;
    let range = rig.take(0, Bytes(256)).unwrap();
    rig.fill(0, range, 1);
    let storage = rig.engine.adopt(range, "x").unwrap();
    for _ in 0..5_000 {
        rig.engine.evict(storage.id(), on).unwrap();
        rig.engine.acquire(storage.id(), on).unwrap();
    }
    // Each eviction leaves a place behind that is nobody's once it is taken back.
    assert!(rig.engine.places() <= 2 + 64 + 1, "{} places", rig.engine.places());
    rig.engine.release(storage, on).unwrap();
}
