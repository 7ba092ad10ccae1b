//! The fault guarded against: a step that stands still since an eviction page-locks memory in it,
//! or a first step that moves nothing since nobody reserved any.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::backend::sim::{Config, Fault, FaultPlan, Model, Spot};
use lightering::pinned::{Growth, PoolOptions};
use lightering::policy::Kept;
use lightering::storage::Storage;
use lightering::{Acquire, Bytes, Evict, Options};
use support::{Rig, options, small_pool};

const LEN: Bytes = Bytes::kib(256);

/// A pool whose arenas hold one storage each.
fn rig(pinned_growth: Growth) -> Rig {
    rig_of(Config::timed(Model::default()), pinned_growth)
}

fn rig_of(config: Config, pinned_growth: Growth) -> Rig {
    let pool = PoolOptions { arena_bytes: LEN, arena_bytes_max: LEN, ..small_pool(Bytes::mib(4)) };
    let options = Options { pinned_growth, unreleased_bytes_max: LEN, ..options() };
    Rig::new(config, pool, options, 1)
}

/// A forward that evicts so many storages, and a backward that has them back. Says how many stayed
/// on the device for want of pinned memory.
fn step(rig: &mut Rig, count: usize) -> usize {
    let on = rig.streams[0].engine;
    let mut kept = 0;
    let mut storages: Vec<Storage> = Vec::new();
    for layer in 0..count {
        let storage = rig.engine.alloc(LEN, on, format!("layer.{layer}").as_str()).unwrap();
        let range = rig.engine.range(storage.id()).unwrap();
        rig.fill(0, range, layer as u64);
        match rig.engine.evict(storage.id(), on).unwrap() {
            Evict::Moving(_) => {}
            Evict::Kept(why) => {
                assert_eq!(why, Kept::NoPinnedRoom);
                kept += 1;
            }
            Evict::Clean => panic!("a new storage has no host copy"),
        }
        storages.push(storage);
    }
    for (layer, storage) in storages.into_iter().enumerate().rev() {
        let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else {
            panic!("the engine owns the bytes");
        };
        rig.check(0, range, layer as u64, format!("layer {layer}"));
        rig.engine.release(storage, on).unwrap();
    }
    kept
}

/// Arenas that evictions added: all of them, and those after the first step.
fn growths(rig: &Rig) -> (u64, u64) {
    let counts = rig.engine.stats().pinned.counts;
    assert_eq!(counts.grown_after_close, 0);
    (counts.growths, counts.late_growths)
}

#[test]
fn the_first_step_finds_its_memory_and_no_later_one_waits_for_pinning() {
    let mut rig = rig(Growth::Allowed);
    assert_eq!((step(&mut rig, 4), growths(&rig)), (0, (4, 0)), "nobody reserved");
    rig.engine.mark_step().unwrap();
    assert_eq!((step(&mut rig, 4), growths(&rig)), (0, (4, 0)), "a warm step pins nothing");
    rig.engine.mark_step().unwrap();
    // What is more than the first step's stays on the device, and says so.
    assert_eq!((step(&mut rig, 6), growths(&rig)), (2, (4, 0)));
    // A reservation is the user's own word, at any time.
    rig.pool.reserve(Bytes(2 * LEN.0)).unwrap();
    rig.engine.mark_step().unwrap();
    assert_eq!(step(&mut rig, 6), 0);
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_first_step_whose_end_nobody_marks_ends_when_all_is_back() {
    let mut rig = rig(Growth::Allowed);
    assert_eq!(step(&mut rig, 3), 0);
    assert_eq!((step(&mut rig, 5), growths(&rig)), (2, (3, 0)));
    rig.assert_right();
}

#[test]
fn a_step_marked_before_anything_left_is_not_the_first() {
    let mut rig = rig(Growth::Allowed);
    rig.engine.mark_step().unwrap();
    rig.engine.mark_step().unwrap();
    assert_eq!((step(&mut rig, 3), growths(&rig)), (0, (3, 0)));
    rig.assert_right();
}

#[test]
fn growth_after_the_first_step_is_opted_into_and_counted_apart() {
    let mut rig = rig(Growth::Late);
    assert_eq!((step(&mut rig, 2), growths(&rig)), (0, (2, 0)));
    rig.engine.mark_step().unwrap();
    assert_eq!((step(&mut rig, 5), growths(&rig)), (0, (5, 3)));
    rig.assert_right();
}

#[test]
fn an_engine_that_may_never_grow_the_pool_keeps_all_until_somebody_reserves() {
    let mut rig = rig(Growth::Closed);
    assert_eq!((step(&mut rig, 2), growths(&rig)), (2, (0, 0)));
    rig.pool.reserve(Bytes(2 * LEN.0)).unwrap();
    assert_eq!((step(&mut rig, 2), growths(&rig)), (0, (0, 0)));
    rig.assert_right();
}

#[test]
fn a_step_asks_a_system_that_page_locks_no_more_once() {
    // Each eviction of each later step mapped memory, touched it and had it refused again.
    let refused = |plan: FaultPlan, nth| plan.at(Spot::Register, nth, Fault::Refuse);
    let faults = (3..200).fold(FaultPlan::default(), refused);
    let mut rig = rig_of(Config { faults, ..Config::timed(Model::default()) }, Growth::Late);
    assert_eq!(step(&mut rig, 2), 0);
    for later in 1..4 {
        rig.engine.mark_step().unwrap();
        assert_eq!((step(&mut rig, 8), rig.world.faults_struck()), (6, later));
    }
    assert_eq!(growths(&rig), (2, 0));
    rig.assert_right();
}
