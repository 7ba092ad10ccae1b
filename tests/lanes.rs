//! Copies that stand in each other's way: one that a reader waits for behind prefetches that nobody
//! waits for, prefetches that wait in more streams than they need to while others leave, and copies
//! beside a collective that shares their link.
//!
//! The fault guarded against: a queue of prefetches that a copy engine drains to its end before it
//! looks at anything else, and a request to give way that changes nothing. The simulated device
//! serves a stream again whose next copy follows without a wait, as copy engines do; its times are
//! exact.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "lanes/front.rs"]
mod front;
#[path = "lanes/rig.rs"]
mod rig;

use lightering::backend::{Arg, Backend, Grid};
use lightering::{Acquire, Bytes, Misuse, Options, Storage};
use rig::{COLLECTIVE, Rig, seconds_in, window};

/// How long one reader waits for a mebibyte while three storages of a gibibyte are fetched ahead.
fn urgent_wait(options: Options) -> f64 {
    let mut rig = Rig::new(Options { prefetch_count_max: 8, ..options });
    let ahead: Vec<_> = (0..3).map(|_| rig.away(Bytes::gib(1))).collect();
    let (urgent, range) = rig.away(Bytes::mib(1));
    let [(_, first), (_, second), _] = rig.streams;
    rig.sim.sync().unwrap();
    for (storage, range) in &ahead {
        rig.engine.prefetch(storage.id(), *range, first).unwrap();
    }
    let before = rig.mark(1);
    rig.engine.refill(urgent.id(), range, second).unwrap();
    let after = rig.mark(1);
    let waited = rig.between(before, after).as_secs_f64();
    for (storage, _) in &ahead {
        assert!(matches!(rig.engine.acquire(storage.id(), first).unwrap(), Acquire::Ready(_)));
    }
    rig.assert_clean();
    waited
}

#[test]
fn a_few_questions_tell_of_many_copies_that_are_done() {
    // As many as were asked about were learned of before: a lane that got far behind stayed there.
    let mut rig =
        Rig::new(Options { step_queries_max: 24, transfers_max: 1024, ..Options::default() });
    let (len, on) = (Bytes::mib(1), rig.streams[0].1);
    let evict = |rig: &mut Rig, count: usize| -> Vec<Storage> {
        let each = (0..count).map(|_| {
            let range = rig.take(len);
            let storage = rig.engine.adopt(range, "x").unwrap();
            rig.engine.evict(storage.id(), on).unwrap();
            storage
        });
        each.collect()
    };
    let done = evict(&mut rig, 600);
    rig.sim.sync().unwrap();
    // Behind five milliseconds of a kernel on the stream that made their bytes.
    let args = [Arg::Write(rig.take(len))];
    rig.sim.launch(&COLLECTIVE, Grid::row(1, 1), &args, rig.streams[0].0).unwrap();
    let under_way = evict(&mut rig, 37);
    assert_eq!(rig.engine.stats().out_in_flight_bytes, 637 * len.0);
    rig.engine.step().unwrap();
    assert_eq!(rig.engine.stats().out_in_flight_bytes, under_way.len() as u64 * len.0);
    drop((done, under_way));
    rig.assert_clean();
}

#[test]
fn an_urgent_copy_waits_for_at_most_two_trunks_of_prefetches() {
    let trunk = Bytes::mib(16);
    let waited = urgent_wait(Options { ahead_trunk_bytes_max: trunk, ..Options::default() });
    let most = 2.0 * seconds_in(trunk) + seconds_in(Bytes::mib(1)) + 50e-6;
    assert!(waited < most, "{waited} s, and two trunks take {most}");
    // Whole copies leave no place to get in between.
    let whole = urgent_wait(Options { ahead_trunk_bytes_max: Bytes::MAX, ..Options::default() });
    assert!(whole > 0.9 * seconds_in(Bytes::gib(1)), "{whole} s");
}

#[test]
fn turns_cost_the_link_nothing_but_the_starts_of_trunks() {
    let mut rig = Rig::new(window(8));
    let all: Vec<_> = (0..2).map(|_| rig.away(Bytes::gib(1))).collect();
    let on = rig.streams[0].1;
    let before = rig.mark(0);
    for (storage, range) in &all {
        rig.engine.prefetch(storage.id(), *range, on).unwrap();
    }
    for (storage, _) in &all {
        rig.engine.acquire(storage.id(), on).unwrap();
    }
    let after = rig.mark(0);
    let took = rig.between(before, after).as_secs_f64();
    let bare = seconds_in(Bytes::gib(2));
    assert!(took < 1.01 * bare, "{took} s for what takes {bare} at the least");
    rig.assert_clean();
}

#[test]
fn copies_out_and_ahead_give_way_to_a_collective_and_urgent_ones_do_not() {
    for asked in [true, false] {
        let mut rig = Rig::new(window(8));
        let [(_, compute), (here, comm), _] = rig.streams;
        let (ahead, to_ahead) = rig.away(Bytes::mib(64));
        let (urgent, to_urgent) = rig.away(Bytes::mib(1));
        let leaving = rig.take(Bytes::mib(64));
        let leaving = rig.engine.adopt(leaving, "leaving").unwrap();
        let start = rig.mark(0);
        let args: [Arg; 0] = [];
        rig.sim.launch(&COLLECTIVE, Grid::row(1, 1), &args, here).unwrap();
        let collective = rig.mark(1);
        if asked {
            rig.engine.give_way(comm).unwrap();
        }
        rig.engine.refill(urgent.id(), to_urgent, compute).unwrap();
        let fetched = rig.mark(0);
        rig.engine.evict(leaving.id(), compute).unwrap();
        rig.engine.flush(compute).unwrap();
        let left = rig.mark(0);
        rig.engine.prefetch(ahead.id(), to_ahead, compute).unwrap();
        rig.engine.acquire(ahead.id(), compute).unwrap();
        let arrived = rig.mark(0);
        let [collective, fetched, left, arrived] =
            [collective, fetched, left, arrived].map(|mark| rig.between(start, mark));
        assert!(fetched < collective, "a reader waits for nobody's collective");
        assert_eq!(left > collective, asked, "{left:?} beside {collective:?}");
        assert_eq!(arrived > collective, asked, "{arrived:?} beside {collective:?}");
        rig.assert_clean();
    }
}

#[test]
fn a_lane_is_no_stream_to_give_way_to() {
    let mut rig = Rig::new(Options::default());
    let stranger = rig.sim.create_stream().unwrap();
    let error = rig.engine.give_way(stranger).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::Foreign));
}
