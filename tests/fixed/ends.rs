//! The ends of storages whose address stays: whatever they were doing, nothing is left.

use crate::support::{Rig, small_pool};
use crate::{
    LEN, acquire, assert_all_given_back, bounds, eager, evict, fixed, lazy, rig_of, until_gone,
};
use lightering::backend::Backend;
use lightering::backend::sim::Config;
use lightering::{Bytes, Evict, Options, PoolOptions, Storage};

#[test]
fn an_end_in_any_state_gives_everything_back() {
    type Way = fn(&mut Rig, &Storage);
    let ways: [Way; 6] = [
        |_, _| {},
        |rig, a| evict(rig, a),
        |rig, a| {
            evict(rig, a);
            until_gone(rig, a);
        },
        |rig, a| {
            evict(rig, a);
            until_gone(rig, a);
            acquire(rig, a);
        },
        |rig, a| {
            evict(rig, a);
            acquire(rig, a);
            evict(rig, a);
        },
        |rig, a| {
            evict(rig, a);
            rig.engine.drain().unwrap();
        },
    ];
    for seed in 0..60 {
        for (n, way) in ways.iter().enumerate() {
            for is_dropped in [true, false] {
                let mut rig = rig_of(Config::adversary(seed), bounds(), 2);
                let (a, _) = fixed(&mut rig, 1);
                way(&mut rig, &a);
                let on = rig.streams[n % 2].engine;
                match is_dropped {
                    true => drop(a),
                    false => rig.engine.release(a, on).unwrap(),
                }
                for _ in 0..seed {
                    rig.engine.step().unwrap();
                }
                assert_all_given_back(rig);
            }
        }
    }
}

#[test]
fn an_ended_storage_gives_its_memory_back_by_steps_alone() {
    let mut rig = rig_of(eager(), Options { memory_pooled_bytes_min: Bytes::MAX, ..bounds() }, 1);
    let on = rig.streams[0].engine;
    let (a, _) = fixed(&mut rig, 1);
    rig.engine.release(a, on).unwrap();
    (0..4).for_each(|_| rig.engine.step().unwrap());
    assert_eq!(rig.engine.memory().unwrap().allocated, Bytes::ZERO);
    assert_eq!((rig.engine.stats().storages, rig.engine.stats().seam.unmaps), (0, 1));
    assert_all_given_back(rig);
}

/// A framework's bytes are fetched ahead in two turns: the lane keeps the end of the first.
fn fetch_in_turns(rig: &mut Rig) {
    let on = rig.streams[0].engine;
    let range = rig.take(0, Bytes::kib(4)).unwrap();
    rig.fill(0, range, 3);
    let storage = rig.engine.adopt(range, "fetched").unwrap();
    evict(rig, &storage);
    rig.engine.flush(on).unwrap();
    rig.sim.sync().unwrap();
    while rig.engine.releasable(on).unwrap() != Some(storage.id()) {
        rig.sim.sync().unwrap();
    }
    rig.give(0, range.at());
    let target = rig.take(0, Bytes::kib(4)).unwrap();
    rig.engine.prefetch(storage.id(), target, on).unwrap();
    assert_eq!(acquire(rig, &storage), target);
    rig.engine.release(storage, on).unwrap();
    rig.give(0, target.at());
    rig.engine.drain().unwrap();
}

/// Three events of a fence that nobody asks about, those of copies that nobody looks at, and one of
/// a lane's turn left too few: a framework's bytes were never named.
#[test]
fn a_fence_in_front_of_unmapping_keeps_no_events_from_what_a_framework_asks_for() {
    for copies in 1..=2 {
        let bounds = Options { events_max: 8, ahead_trunk_bytes_max: Bytes::kib(2), ..bounds() };
        let mut rig = rig_of(lazy(), bounds, 3);
        let on = rig.streams[0].engine;
        fetch_in_turns(&mut rig);
        let (weights, _) = fixed(&mut rig, 1);
        evict(&mut rig, &weights);
        rig.sim.sync().unwrap();
        rig.engine.flush(on).unwrap();
        let mut theirs = Vec::new();
        for _ in 0..copies {
            let range = rig.take(0, Bytes::kib(4)).unwrap();
            rig.fill(0, range, 2);
            let storage = rig.engine.adopt(range, "theirs").unwrap();
            evict(&mut rig, &storage);
            theirs.push((storage, range));
        }
        rig.engine.flush(on).unwrap();
        for (storage, range) in theirs {
            let named = (0..20).any(|_| {
                rig.sim.sync().unwrap();
                rig.engine.releasable(on) == Ok(Some(storage.id()))
            });
            assert!(named, "{copies} copies");
            rig.give(0, range.at());
        }
        drop(weights);
        assert_all_given_back(rig);
    }
}

#[test]
fn a_host_that_waited_for_the_device_need_not_ask_again() {
    for seed in 0..50 {
        let options = Options { memory_pooled_bytes_min: Bytes::MAX, ..bounds() };
        let mut rig = rig_of(Config::adversary(seed), options, 2);
        let on = rig.streams[0].engine;
        let (a, at) = fixed(&mut rig, 1);
        let (b, _) = fixed(&mut rig, 2);
        evict(&mut rig, &a);
        rig.order(0, 1);
        rig.check(1, at, 1, "live, on another stream".into());
        rig.engine.release(b, on).unwrap();
        rig.engine.flush(on).unwrap();
        rig.engine.drain().unwrap();
        assert_eq!(rig.engine.memory().unwrap().allocated, Bytes::ZERO, "seed {seed}");
        assert_eq!(acquire(&mut rig, &a), at);
        rig.check(0, at, 1, format!("seed {seed}"));
        drop(a);
        assert_all_given_back(rig);
    }
}

#[test]
fn an_engine_dropped_while_bytes_are_mapped_gives_them_back() {
    for seed in 0..50 {
        let mut rig = rig_of(Config::adversary(seed), bounds(), 1);
        let (a, _) = fixed(&mut rig, 1);
        let (b, _) = fixed(&mut rig, 2);
        evict(&mut rig, &a);
        let Rig { engine, pool, mut sim, .. } = rig;
        drop(engine);
        drop((a, b));
        sim.sync().unwrap();
        let memory = sim.memory().unwrap();
        assert_eq!(memory.free, memory.total);
        assert_eq!(pool.stats().lent, Bytes::ZERO);
    }
}

#[test]
fn the_block_of_what_ended_is_lent_again_while_its_device_bytes_are_still_to_go() {
    // Found by twin programs on an H200: a copy-out that was still running kept the only block.
    let room = LEN.0.next_multiple_of(4096);
    for is_fixed in [true, false] {
        let pool = PoolOptions { arena_bytes: Bytes(room), ..small_pool(Bytes(room)) };
        let mut rig = Rig::new(lazy(), pool, bounds(), 1);
        let on = rig.streams[0].engine;
        let first = match is_fixed {
            true => fixed(&mut rig, 1).0,
            false => {
                let range = rig.take(0, LEN).unwrap();
                rig.fill(0, range, 1);
                rig.engine.adopt(range, "theirs").unwrap()
            }
        };
        evict(&mut rig, &first);
        drop(first);
        let (next, _) = fixed(&mut rig, 2);
        let became = rig.engine.evict(next.id(), on).unwrap();
        assert!(matches!(became, Evict::Moving(_)), "{became:?}, fixed: {is_fixed}");
        until_gone(&mut rig, &next);
        rig.engine.drain().unwrap();
        let back = acquire(&mut rig, &next);
        rig.check(0, back, 2, String::from("the next one"));
        rig.assert_right();
    }
}
