//! The block of a batch, and who has it before and after: each copy on it is over, or waited for,
//! before the block is anybody else's (E7).
//!
//! The faults guarded against: a gather into a block that a copy-in still reads, and a block of a
//! batch that goes back to the pool as idle, or busy with the wrong copy, while its own still runs.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod support;

use lightering::backend::sim::{Config, Fault, FaultPlan, Lazy, Spot};
use lightering::engine::Batch;
use lightering::pack::Strip;
use lightering::{Acquire, Bytes, DeviceRange, Evict, Options, Storage};
use support::{Rig, options, quick_pool};

const LEN: Bytes = Bytes::kib(2);
/// Schedules tried; what each test guards against shows in most of them.
const SEEDS: u64 = 50;

fn bounds() -> Options {
    // The framework notes its own uses: `fill` and `check` do.
    Options { trunk_bytes_max: Bytes::kib(1), prefetch_count_max: 0, note_uses: false, ..options() }
}

fn small(config: Config) -> Config {
    Config { device_bytes: Bytes::kib(64), ..config }
}

/// A pool with room for one block of `LEN`, and for no table: rows are copied one by one.
fn one_block(seed: u64) -> Rig {
    Rig::new(small(Config::adversary(seed)), quick_pool(Bytes::kib(4)), bounds(), 2)
}

/// A device that runs nothing before the host waits, and the faults it has.
fn lazy(faults: FaultPlan) -> Rig {
    let config = Config { faults, ..Config::scheduled(Box::new(Lazy::default())) };
    let bounds = Options { pack_blocks_max: 0, ..bounds() };
    Rig::new(config, quick_pool(Bytes::mib(1)), bounds, 1)
}

fn owned(rig: &mut Rig, s: usize, seed: u64) -> Storage {
    let storage = rig.engine.alloc(LEN, rig.streams[s].engine, "owned").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(s, range, seed);
    storage
}

fn rows(rig: &mut Rig, s: usize, seed: u64) -> DeviceRange {
    let range = rig.take(s, LEN).unwrap();
    rig.fill(s, range, seed);
    range
}

fn gather(rig: &mut Rig, s: usize, rows: DeviceRange) -> Batch {
    let strips = [Strip::whole(rows).unwrap()];
    rig.engine.gather(&strips, rig.streams[s].engine, "rows").unwrap()
}

fn read(rig: &mut Rig, s: usize, storage: &Storage, seed: u64) {
    let on = rig.streams[s].engine;
    let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else {
        panic!("the engine owns the bytes")
    };
    rig.check(s, range, seed, format!("{seed} on stream {s}"));
}

/// Nothing of the pool that a copy still uses is unpinned.
#[track_caller]
fn trims(rig: &mut Rig, what: &str) {
    rig.pool.trim();
    assert_eq!(rig.world.removals_refused(), 0, "{what}: unpinned under its copy");
    rig.assert_right();
}

#[test]
fn a_gather_into_a_block_waits_for_the_copy_in_that_still_reads_it() {
    for seed in 0..SEEDS {
        let mut rig = one_block(seed);
        let first = rig.streams[0].engine;
        let storage = owned(&mut rig, 0, 1);
        let rows = rows(&mut rig, 1, 7);
        rig.engine.evict(storage.id(), first).unwrap();
        rig.engine.flush(first).unwrap();
        read(&mut rig, 0, &storage, 1);
        rig.engine.release(storage, first).unwrap();
        let batch = gather(&mut rig, 1, rows);
        rig.engine.discard(batch).unwrap();
        rig.assert_right();
    }
}

#[test]
fn the_block_of_a_discarded_batch_is_filled_only_behind_its_scatter() {
    for is_dropped in [false, true] {
        for seed in 0..SEEDS {
            let mut rig = one_block(seed);
            let (first, second) = (rig.streams[0].engine, rig.streams[1].engine);
            let rows = rows(&mut rig, 0, 7);
            let storage = owned(&mut rig, 1, 3);
            let mut batch = gather(&mut rig, 0, rows);
            rig.engine.scatter(&mut batch, &[Strip::whole(rows).unwrap()], first).unwrap();
            if is_dropped {
                drop(batch);
            } else {
                rig.engine.discard(batch).unwrap();
            }
            // There is no other block.
            let evicted = rig.engine.evict(storage.id(), second).unwrap();
            assert!(matches!(evicted, Evict::Moving(_)), "{evicted:?}");
            rig.check(0, rows, 7, "scattered".into());
            rig.assert_right();
        }
    }
}

#[test]
fn the_block_of_a_discarded_batch_is_not_unpinned_under_its_gather() {
    let mut rig = lazy(FaultPlan::default());
    let rows = rows(&mut rig, 0, 7);
    let batch = gather(&mut rig, 0, rows);
    rig.engine.discard(batch).unwrap();
    trims(&mut rig, "a batch that nobody scattered");
}

#[test]
fn the_block_of_a_gather_that_failed_half_way_is_not_unpinned_under_the_other_half() {
    let mut rig = lazy(FaultPlan::default().at(Spot::Copy, 2, Fault::Refuse));
    let rows = rows(&mut rig, 0, 7);
    let strips = [Strip::rows(rows, Bytes::ZERO, Bytes(64), 8, Bytes(128)).unwrap()];
    let on = rig.streams[0].engine;
    rig.engine.gather(&strips, on, "rows").unwrap_err();
    // What was enqueued reads the rows, too.
    rig.fill(0, rows, 8);
    trims(&mut rig, "half a gather");
}
