//! What the hazards' tests share: devices, storages, and an engine with one place broken.
//!
//! What it is not: a test.
//!
//! Invariant: a program gets the same calls whether a place is broken or not.
//!
//! ```text
//!   needs(site, program): many orders, whole -> right     broken at the site -> flagged, each time
//! ```
//!
//! The files beside it use it.

use crate::support::broken::{Fault, Plan, is_query};
use crate::support::{Rig, options, quick_pool};
use lightering::backend::Backend;
use lightering::backend::sim::{Config, FaultPlan, Lazy};
use lightering::trace::Site;
use lightering::{Acquire, Bytes, DeviceRange, Evict, Options, Storage};

pub(crate) const LEN: Bytes = Bytes::kib(2);
/// Enough orders for a missing one to show in bytes, too, where it can.
pub(crate) const SEEDS: u64 = 60;

pub(crate) fn bounds() -> Options {
    Options { trunk_bytes_max: Bytes::kib(1), prefetch_count_max: 0, note_uses: false, ..options() }
}

pub(crate) fn config(seed: u64) -> Config {
    Config { device_bytes: Bytes::kib(64), ..Config::adversary(seed) }
}

/// A device in the order of a seed, with so many streams and pinned bytes.
pub(crate) fn rig(seed: u64, pool: Bytes, streams: usize) -> Rig {
    Rig::new(config(seed), quick_pool(pool), bounds(), streams)
}

/// A device that runs nothing before it must.
pub(crate) fn lazy(streams: usize) -> Rig {
    with_faults(FaultPlan::default(), streams)
}

/// The same, with faults.
pub(crate) fn with_faults(faults: FaultPlan, streams: usize) -> Rig {
    let config = Config { faults, ..Config::scheduled(Box::new(Lazy::default())) };
    Rig::new(config, quick_pool(Bytes::mib(1)), bounds(), streams)
}

/// The program is right in many orders; without what the site keeps it is flagged in each.
#[track_caller]
pub(crate) fn needs(site: Site, streams: usize, pool: Bytes, program: fn(&mut Rig)) {
    let fault = if is_query(site) { Fault::EarlyTrue } else { Fault::DropWait };
    for seed in 0..SEEDS {
        for plan in [None, Some(Plan { site, fault })] {
            let pool = quick_pool(pool);
            let (mut rig, reach) = Rig::broken(config(seed), pool, bounds(), streams, plan);
            program(&mut rig);
            match plan {
                None => rig.assert_right(),
                Some(plan) => {
                    rig.sim.sync().unwrap();
                    assert!(reach.count() > 0, "{plan:?} is not met");
                    assert!(!rig.hazards().is_empty(), "{plan:?} is lost unseen, seed {seed}");
                }
            }
        }
    }
}

/// A storage of the engine's own that shows `seed`.
pub(crate) fn owned(rig: &mut Rig, s: usize, len: Bytes, seed: u64) -> Storage {
    let storage = rig.engine.alloc(len, rig.streams[s].engine, "owned").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(s, range, seed);
    storage
}

/// A storage of the framework's that shows `seed`.
pub(crate) fn adopted(rig: &mut Rig, s: usize, seed: u64) -> (Storage, DeviceRange) {
    let range = rig.take(s, LEN).unwrap();
    rig.fill(s, range, seed);
    (rig.engine.adopt(range, "adopted").unwrap(), range)
}

/// A storage of the framework's whose bytes are on the host alone.
pub(crate) fn away(rig: &mut Rig, seed: u64) -> Storage {
    let (storage, range) = adopted(rig, 0, seed);
    evict(rig, 0, &storage);
    flush(rig, 0);
    let on = rig.streams[0].engine;
    // With several streams the copy is known done first, then a moment on each.
    let named = (0..1000).find_map(|_| {
        rig.sim.sync().unwrap();
        rig.engine.releasable(on).unwrap()
    });
    assert_eq!(named, Some(storage.id()));
    rig.give(0, range.at());
    storage
}

pub(crate) fn evict(rig: &mut Rig, s: usize, storage: &Storage) -> Evict {
    rig.engine.evict(storage.id(), rig.streams[s].engine).unwrap()
}

pub(crate) fn flush(rig: &mut Rig, s: usize) {
    rig.engine.flush(rig.streams[s].engine).unwrap();
}

pub(crate) fn acquire(rig: &mut Rig, s: usize, storage: &Storage) -> DeviceRange {
    match rig.engine.acquire(storage.id(), rig.streams[s].engine).unwrap() {
        Acquire::Ready(range) => range,
        Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
    }
}

/// Reads a storage on stream `s`: it must show `seed`.
pub(crate) fn read(rig: &mut Rig, s: usize, storage: &Storage, seed: u64) {
    let range = acquire(rig, s, storage);
    rig.check(s, range, seed, format!("{seed} on stream {s}"));
}

pub(crate) fn release(rig: &mut Rig, s: usize, storage: Storage) {
    rig.engine.release(storage, rig.streams[s].engine).unwrap();
}
