//! Hazards of the calls, H103 to H106: ranges that are none, handles of somebody else, threads, and
//! calls from inside calls. The C interface has its own, when it comes.

use crate::bench::{LEN, away, bounds, evict, owned, rig};
use crate::support::{Rig, quick_pool};
use lightering::backend::Backend;
use lightering::backend::sim::{Config, World};
use lightering::pack::Strip;
use lightering::trace::{Counters, Use};
use lightering::{
    Bytes, DevicePtr, DeviceRange, Engine, Error, Kind, Misuse, PinnedPool, Shared, Storage,
};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

const POOL: Bytes = Bytes::kib(64);

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> Misuse {
    let error = result.unwrap_err();
    error.misuse().unwrap_or_else(|| panic!("{error}"))
}

#[test]
fn h103_ranges_that_are_none_are_refused_before_the_device_hears_of_them() {
    let mut rig = rig(1, POOL, 1);
    let on = rig.streams[0].engine;
    let storage = owned(&mut rig, 0, LEN, 1);
    let before = rig.engine.stats().seam;
    let none = DeviceRange::new(DevicePtr(0), Bytes::ZERO).unwrap();
    assert_eq!(refused(rig.engine.adopt(none, "nothing at zero")), Misuse::Empty);
    assert_eq!(refused(rig.engine.alloc(Bytes::ZERO, on, "nothing")), Misuse::Empty);
    assert_eq!(refused(DeviceRange::new(DevicePtr(u64::MAX), Bytes(1))), Misuse::TooLarge);
    let range = rig.engine.range(storage.id()).unwrap();
    assert_eq!(refused(range.part(Bytes(LEN.0), Bytes(1))), Misuse::OutOfRange);
    assert_eq!(refused(range.part(Bytes(u64::MAX), Bytes(2))), Misuse::OutOfRange);
    let past = rig.engine.read_host(storage.id(), Bytes(u64::MAX), &mut [0; 8]);
    assert_eq!(refused(past), Misuse::NotThere);
    // The one that asks for no bytes gets as far as the seam, which refuses it.
    assert_eq!(rig.engine.stats().seam, Counters { failures: 1, ..before });
    // Bytes that no allocation holds: null, unaligned, huge.
    for (at, len) in [(0, 64), (1, 63), (7, 1 << 40), (u64::MAX - 64, 64)] {
        let wild = DeviceRange::new(DevicePtr(at), Bytes(len)).unwrap();
        let error = rig.engine.adopt(wild, "wild").unwrap_err();
        assert_eq!(error.misuse(), Some(Misuse::OutOfRange), "{at} {len}: {error}");
        assert!(error.to_string().contains("wild"), "{error}");
    }
    assert_eq!(rig.pool.stats().lent, Bytes::ZERO);
    rig.check(0, range, 1, "what was right all along".into());
    rig.assert_right();
}

/// Each was taken as it came, since its caller says that it is there, and told from good bytes by
/// the driver alone: when events and waits were enqueued already, or by a kernel, which kills the
/// context.
#[test]
fn h103_ranges_that_leave_their_allocation_are_refused_before_anything_is_enqueued() {
    let mut rig = rig(1, POOL, 1);
    let on = rig.streams[0].engine;
    let storage = away(&mut rig, 1);
    let gone = rig.take(0, LEN).unwrap();
    let whole = rig.take(0, Bytes(2 * LEN.0)).unwrap();
    rig.give(0, gone.at());
    rig.fill(0, whole, 2);
    rig.sim.sync().unwrap();
    let behind = DeviceRange::new(whole.at().offset(Bytes(2 * LEN.0 - 8)).unwrap(), LEN).unwrap();
    let before = rig.engine.stats().seam;
    let pushed = |rig: &Rig| rig.engine.stats().seam;
    assert_eq!(refused(rig.engine.adopt(behind, "behind")), Misuse::OutOfRange);
    for target in [behind, gone] {
        for error in [
            rig.engine.prefetch(storage.id(), target, on).unwrap_err(),
            rig.engine.refill(storage.id(), target, on).unwrap_err(),
        ] {
            assert_eq!(error.misuse(), Some(Misuse::OutOfRange), "{error}");
        }
    }
    let first = whole.part(Bytes::ZERO, Bytes(16)).unwrap();
    let strips = [first, behind].map(|range| Strip::whole(range).unwrap());
    assert_eq!(refused(rig.engine.gather(&strips, on, "rows")), Misuse::OutOfRange);
    assert_eq!(pushed(&rig), before);
    let second = whole.part(LEN, LEN).unwrap();
    let good = [first, second].map(|range| Strip::whole(range).unwrap());
    let mut batch = rig.engine.gather(&good, on, "rows").unwrap();
    let before = pushed(&rig);
    assert_eq!(refused(rig.engine.scatter(&mut batch, &strips, on)), Misuse::OutOfRange);
    assert_eq!(pushed(&rig), before);
    rig.engine.scatter(&mut batch, &good, on).unwrap();
    rig.engine.discard(batch).unwrap();
    // Nothing was lost: it comes home to bytes that are there.
    rig.engine.refill(storage.id(), second, on).unwrap();
    rig.check(0, second, 1, "what left before".into());
    rig.assert_right();
}

#[test]
fn h104_handles_of_another_engine_are_refused_by_every_verb() {
    let world = World::new(Config::adversary(1));
    let mut sim = world.device(0).unwrap();
    let pool = PinnedPool::new(sim.pinner(), quick_pool(POOL)).unwrap();
    let stream = sim.create_stream().unwrap();
    let raw = sim.raw_stream(stream).unwrap();
    let [(mut ours, on), (mut theirs, there)] = [0; 2].map(|_| {
        let device = Box::new(world.device(0).unwrap());
        let mut engine = Engine::new(device, &pool, bounds()).unwrap();
        let on = engine.adopt_stream(raw).unwrap();
        (engine, on)
    });
    let (mine, storage) =
        (ours.alloc(LEN, on, "m").unwrap(), theirs.alloc(LEN, there, "t").unwrap());
    let (id, before) = (storage.id(), ours.stats().seam);
    let range = theirs.range(id).unwrap();
    for misuse in [
        refused(ours.residency(id)),
        refused(ours.range(id)),
        refused(ours.offer(id, on)),
        refused(ours.evict(id, on)),
        refused(ours.acquire(id, on)),
        refused(ours.refill(id, range, on)),
        refused(ours.prefetch(id, range, on)),
        refused(ours.cancel(id, on)),
        refused(ours.take(id)),
        refused(ours.read_host(id, Bytes::ZERO, &mut [0; 8])),
        // And its stream, which names the same queue of the driver.
        refused(ours.evict(mine.id(), there)),
        refused(ours.flush(there)),
        refused(ours.releasable(there)),
        refused(ours.wanted(there)),
        refused(ours.note(there, &[Use::read(range)])),
        refused(ours.alloc(LEN, there, "x")),
    ] {
        assert_eq!(misuse, Misuse::Foreign);
    }
    assert_eq!(ours.stats().seam, before, "nothing was enqueued");
    assert_eq!(refused(ours.release(storage, on)), Misuse::Foreign);
    theirs.step().unwrap();
    assert_eq!(theirs.stats().storages, 0, "the handle is gone, and its own engine heard of it");
    drop(mine);
}

/// A value that asks at compile time whether a type may be shared.
struct Probe<T: ?Sized>(PhantomData<T>);

trait NotShared {
    fn is_shared(&self) -> bool {
        false
    }
}

impl<T: ?Sized> NotShared for &Probe<T> {}

impl<T: Sync + ?Sized> Probe<T> {
    fn is_shared(&self) -> bool {
        true
    }
}

#[test]
fn h105_an_engine_moves_between_threads_and_is_shared_by_a_lock_only() {
    fn sent<T: Send>() {}
    sent::<Engine>();
    sent::<Storage>();
    let (engine, shared) = (&Probe::<Engine>(PhantomData), &Probe::<Shared>(PhantomData));
    assert!(!engine.is_shared() && shared.is_shared(), "two threads are in one engine");
    let Rig { engine, streams, pool, mut sim, .. } = rig(1, POOL, 1);
    let (shared, on) = (Shared::new(engine), streams[0].engine);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let shared = shared.clone();
            scope.spawn(move || {
                for round in 0..50 {
                    let storage = match shared.lock().alloc(Bytes(600), on, "x") {
                        Ok(storage) => storage,
                        Err(error) => panic!("round {round}: {error}"),
                    };
                    shared.lock().evict(storage.id(), on).unwrap();
                    shared.lock().acquire(storage.id(), on).unwrap();
                    if round % 2 == 0 {
                        shared.lock().release(storage, on).unwrap();
                    }
                }
            });
        }
    });
    let mut engine = shared.lock();
    engine.drain().unwrap();
    assert_eq!((engine.stats().storages, engine.memory().unwrap().allocated), (0, Bytes::ZERO));
    engine.shutdown().unwrap();
    assert_eq!(pool.stats().lent, Bytes::ZERO);
    sim.sync().unwrap();
}

#[test]
fn every_verb_of_an_engine_that_was_shut_down_says_so() {
    let mut rig = rig(1, POOL, 1);
    let on = rig.streams[0].engine;
    let storage = owned(&mut rig, 0, LEN, 1);
    evict(&mut rig, 0, &storage);
    let id = storage.id();
    drop(storage);
    rig.engine.drain().unwrap();
    rig.engine.shutdown().unwrap();
    let range = DeviceRange::new(DevicePtr(4096), LEN).unwrap();
    for closed in [
        rig.engine.adopt(range, "x").map(drop),
        rig.engine.alloc(LEN, on, "x").map(drop),
        rig.engine.evict(id, on).map(drop),
        rig.engine.acquire(id, on).map(drop),
        rig.engine.flush(on),
        rig.engine.step(),
        rig.engine.mark_step(),
        rig.engine.memory().map(drop),
    ] {
        assert_eq!(closed.unwrap_err().kind(), Kind::Closed);
    }
}

#[test]
fn h106_an_observer_that_calls_a_verb_is_refused_and_does_not_wait_for_itself() {
    let Rig { engine, streams, pool, mut sim, .. } = rig(1, POOL, 1);
    let (shared, on) = (Shared::new(engine), streams[0].engine);
    let (inside, seen) = (shared.clone(), Arc::new(Mutex::new(Vec::new())));
    let told = seen.clone();
    shared.lock().observe(Some(Box::new(move |_| {
        let again = catch_unwind(AssertUnwindSafe(|| drop(inside.lock())));
        let why = again.unwrap_err().downcast::<&str>().unwrap();
        told.lock().unwrap().push(*why);
    })));
    let storage = shared.lock().alloc(LEN, on, "seen").unwrap();
    let said = std::mem::take(&mut *seen.lock().unwrap());
    assert!(!said.is_empty(), "the observer was called");
    assert!(said.iter().all(|why| *why == "a verb is called from inside of a verb"), "{said:?}");
    // The verb went on, and so does the engine, on this thread and another.
    let other = shared.clone();
    std::thread::spawn(move || other.lock().evict(storage.id(), on).map(drop))
        .join()
        .unwrap()
        .unwrap();
    shared.lock().observe(None);
    shared.lock().shutdown().unwrap();
    assert_eq!(pool.stats().lent, Bytes::ZERO);
    sim.sync().unwrap();
}
