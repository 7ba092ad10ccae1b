//! The ends of storages whose address stays: whatever they were doing, nothing is left.

use crate::support::Rig;
use crate::{acquire, assert_all_given_back, bounds, eager, evict, fixed, rig_of, until_gone};
use lightering::backend::Backend;
use lightering::backend::sim::Config;
use lightering::{Bytes, Options, Storage};

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
