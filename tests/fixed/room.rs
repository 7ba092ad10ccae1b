//! Memory that guesses and evicted storages keep, while somebody who asks for it is refused.

use crate::{
    AWAY, LEN, acquire, assert_all_given_back, bounds, eager, evict, fixed, rig_of, until_gone,
    with_room,
};
use lightering::Options;
use lightering::backend::sim::Config;
use lightering::storage::Residency;
use std::time::Duration;

#[test]
fn a_reader_out_of_turn_gets_the_memory_of_what_was_fetched_ahead() {
    for seed in 0..100 {
        let options =
            Options { prefetch_count_max: 1, memory_wait_max: Duration::from_secs(60), ..bounds() };
        let mut rig = rig_of(with_room(Config::adversary(seed), 2), options, 1);
        let mut all = Vec::new();
        for n in 0..3 {
            let (storage, at) = fixed(&mut rig, n);
            evict(&mut rig, &storage);
            until_gone(&mut rig, &storage);
            all.push((storage, at));
        }
        acquire(&mut rig, &all[2].0);
        assert_eq!(rig.engine.residency(all[1].0.id()).unwrap(), Residency::Refilling);
        // All the memory is in use, and half of it by a guess.
        let range = acquire(&mut rig, &all[0].0);
        rig.check(0, range, 0, format!("seed {seed}"));
        assert_eq!(rig.engine.residency(all[1].0.id()).unwrap(), AWAY);
        evict(&mut rig, &all[0].0);
        until_gone(&mut rig, &all[0].0);
        let range = acquire(&mut rig, &all[1].0);
        rig.check(0, range, 1, format!("seed {seed}: given up"));
        drop(all);
        assert_all_given_back(rig);
    }
}

#[test]
fn evicted_bytes_at_a_fixed_address_make_room_for_those_at_any() {
    let mut rig = rig_of(with_room(eager(), 1), bounds(), 1);
    let on = rig.streams[0].engine;
    let (a, at) = fixed(&mut rig, 1);
    evict(&mut rig, &a);
    // Nobody has asked since, though the device is idle.
    let owned = rig.engine.alloc(LEN, on, "owned").unwrap();
    assert_eq!(rig.engine.residency(a.id()).unwrap(), AWAY);
    rig.engine.release(owned, on).unwrap();
    assert_eq!(acquire(&mut rig, &a), at);
    rig.check(0, at, 1, "home again".into());
    drop(a);
    assert_all_given_back(rig);
}
