//! When bytes go: once the host knows that nothing uses them any more, and then without a wait.

use crate::{
    AWAY, LEN, MAPPED, acquire, assert_all_given_back, bounds, eager, evict, fixed, lazy, rig_of,
    until_gone,
};
use lightering::pack::Strip;
use lightering::storage::Residency;
use lightering::{Bytes, DevicePtr, DeviceRange, Misuse};

#[test]
fn bytes_stay_mapped_until_the_host_knows_their_users_done_and_no_stream_waits() {
    let mut rig = rig_of(lazy(), bounds(), 1);
    let (a, range) = fixed(&mut rig, 1);
    let before = rig.engine.stats().seam;
    evict(&mut rig, &a);
    let on = rig.streams[0].engine;
    rig.engine.flush(on).unwrap();
    rig.engine.mark_step().unwrap();
    assert_eq!(rig.engine.residency(a.id()).unwrap(), Residency::Evicting);
    assert_eq!(rig.engine.stats().unreleased_bytes, LEN.0);
    // The operator whose input it is may come even now.
    rig.check(0, range, 1, "live".into());
    until_gone(&mut rig, &a);
    let after = rig.engine.stats();
    assert_eq!(after.seam.waits - before.waits, 1, "the lane for the producer, and nobody else");
    assert_eq!((after.seam.unmaps, after.seam.syncs), (1, before.syncs));
    assert_eq!((after.unreleased_bytes, after.released_bytes), (0, LEN.0));
    assert_eq!(rig.engine.range(a.id()).unwrap_err().misuse(), Some(Misuse::NotThere));
    drop(a);
    assert_all_given_back(rig);
}

#[test]
fn on_a_device_with_nothing_to_do_bytes_go_in_the_verb_that_asks_and_no_event_is_marked() {
    let mut rig = rig_of(eager(), bounds(), 2);
    let (a, range) = fixed(&mut rig, 1);
    evict(&mut rig, &a);
    until_gone(&mut rig, &a);
    assert_eq!(acquire(&mut rig, &a), range);
    rig.check(0, range, 1, "home again".into());
    let before = rig.engine.stats().seam;
    // The host copy is good: nothing is copied out.
    evict(&mut rig, &a);
    rig.engine.flush(rig.streams[0].engine).unwrap();
    let after = rig.engine.stats().seam;
    assert_eq!(rig.engine.residency(a.id()).unwrap(), AWAY);
    assert_eq!((after.unmaps - before.unmaps, after.records - before.records), (1, 0));
    drop(a);
    assert_all_given_back(rig);
}

#[test]
fn nothing_is_unmapped_while_a_stream_is_captured() {
    let mut rig = rig_of(eager(), bounds(), 2);
    let (a, at) = fixed(&mut rig, 1);
    evict(&mut rig, &a);
    let on = rig.streams[0].engine;
    // Another stream than that of the eviction, and no moment was marked on it yet.
    let captured = rig.streams[1].here;
    rig.sim.inner().set_capturing(captured, true).unwrap();
    for _ in 0..8 {
        rig.engine.flush(on).unwrap();
        rig.engine.mark_step().unwrap();
        assert_eq!(rig.engine.residency(a.id()).unwrap(), Residency::Evicting);
    }
    assert_eq!(rig.engine.stats().seam.unmaps, 0);
    rig.sim.inner().set_capturing(captured, false).unwrap();
    until_gone(&mut rig, &a);
    assert_eq!(rig.engine.stats().seam.unmaps, 1);
    assert_eq!(acquire(&mut rig, &a), at);
    rig.check(0, at, 1, "home again".into());
    drop(a);
    assert_all_given_back(rig);
}

/// Of 5,000 bytes 120 more are mapped. Whoever adopted those would evict what is mapped no more.
#[test]
fn what_is_mapped_behind_the_bytes_is_nobody_elses() {
    let mut rig = rig_of(eager(), bounds(), 1);
    let on = rig.streams[0].engine;
    let (a, at) = fixed(&mut rig, 1);
    let tail = DeviceRange::new(DevicePtr(at.end()), Bytes(MAPPED.0 - LEN.0)).unwrap();
    for round in 0..2 {
        let refused = rig.engine.adopt(tail, "tail").unwrap_err();
        assert_eq!(refused.misuse(), Some(Misuse::Overlap), "round {round}");
        let strip = Strip::whole(tail).unwrap();
        let refused = rig.engine.gather(&[strip], on, "tail").unwrap_err();
        assert_eq!(refused.misuse(), Some(Misuse::Overlap), "round {round}");
        evict(&mut rig, &a);
        until_gone(&mut rig, &a);
        assert_eq!(acquire(&mut rig, &a), at);
    }
    rig.check(0, at, 1, "home again".into());
    drop(a);
    assert_all_given_back(rig);
}
