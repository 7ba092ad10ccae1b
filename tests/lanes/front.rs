//! Whom a reader's copy goes behind, and when copies ahead take turns.
//!
//! The faults guarded against: a reader that waits for copies which its stream does not wait for;
//! copies that wait in more streams than they need to, and slow those that leave; and a rule that
//! sticks, so that the one or the other is lost for good.

use super::rig::{COLLECTIVE, Rig, seconds_in, window};
use lightering::backend::sim::{Config, Fault, FaultPlan, Model, Sim, Spot, World};
use lightering::backend::{Arg, Backend, Grid};
use lightering::pack::Strip;
use lightering::{Budget, Bytes, DeviceRange, Engine, Options, PinnedPool, PoolOptions, Storage};

/// Streams that a guess of 256 MiB comes on while a gibibyte leaves.
fn streams_of_a_guess(rig: &mut Rig, guess: &(Storage, DeviceRange)) -> usize {
    rig.came_on();
    rig.engine.prefetch(guess.0.id(), guess.1, rig.streams[0].1).unwrap();
    rig.came_on().len()
}

#[test]
fn what_waits_to_come_in_while_others_leave_waits_in_one_stream() {
    let mut rig = Rig::new(window(8));
    let on = rig.streams[0].1;
    let away: Vec<_> = (0..3).map(|_| rig.away(Bytes::mib(256))).collect();
    let leaving = rig.leaving(Bytes::gib(1));
    // The first reader's copy as well: all that is in front of the others is theirs.
    rig.engine.refill(away[0].0.id(), away[0].1, on).unwrap();
    rig.engine.prefetch(away[1].0.id(), away[1].1, on).unwrap();
    assert_eq!(rig.came_on().len(), 1);
    rig.sim.sync().unwrap();
    rig.engine.prefetch(away[2].0.id(), away[2].1, on).unwrap();
    assert_eq!(rig.came_on().len(), 3, "nothing leaves any more");
    drop(leaving);
    rig.assert_clean();
}

#[test]
fn a_reader_that_found_others_in_front_has_copies_ahead_take_turns_for_two_passes() {
    let mut rig = Rig::new(window(8));
    let on = rig.streams[0].1;
    let mut streams_of_a_guess = |surprise: bool| {
        let [a, b, c] = [256, 1, 256].map(|mib| rig.away(Bytes::mib(mib)));
        let leaving = rig.leaving(Bytes::gib(1));
        rig.engine.prefetch(a.0.id(), a.1, on).unwrap();
        if surprise {
            rig.engine.refill(b.0.id(), b.1, on).unwrap();
        }
        rig.came_on();
        rig.engine.prefetch(c.0.id(), c.1, on).unwrap();
        let streams = rig.came_on().len();
        for (storage, _) in [a, c] {
            rig.engine.acquire(storage.id(), on).unwrap();
        }
        drop((b, leaving));
        rig.sim.sync().unwrap();
        rig.engine.drain().unwrap();
        while rig.engine.releasable(on).unwrap().is_some() {}
        rig.engine.mark_step().unwrap();
        rig.assert_clean();
        streams
    };
    let streams = [false, true, false, false, false].map(&mut streams_of_a_guess);
    assert_eq!(streams, [1, 3, 3, 1, 1]);
}

#[test]
fn a_readers_copy_goes_behind_those_alone_that_its_stream_waits_for() {
    type Front = fn(&mut Rig, &(Storage, DeviceRange));
    let fronts: [(&str, bool, Front); 6] = [
        ("nothing", true, |_, _| {}),
        ("a copy of its own stream's", true, |rig, (front, to)| {
            let on = rig.streams[0].1;
            rig.engine.prefetch(front.id(), *to, on).unwrap();
            rig.engine.acquire(front.id(), on).unwrap();
        }),
        ("a guess", false, |rig, (front, to)| {
            rig.engine.prefetch(front.id(), *to, rig.streams[0].1).unwrap();
        }),
        ("a guess given up", false, |rig, (front, to)| {
            let on = rig.streams[0].1;
            rig.engine.prefetch(front.id(), *to, on).unwrap();
            rig.engine.cancel(front.id(), on).unwrap();
        }),
        ("a guess that another stream asked for", false, |rig, (front, to)| {
            rig.engine.prefetch(front.id(), *to, rig.streams[0].1).unwrap();
            rig.engine.acquire(front.id(), rig.streams[1].1).unwrap();
        }),
        ("another stream's copy", false, |rig, (front, to)| {
            let other = rig.streams[1].1;
            rig.engine.prefetch(front.id(), *to, other).unwrap();
            rig.engine.acquire(front.id(), other).unwrap();
        }),
    ];
    for (name, is_behind, front) in fronts {
        let mut rig = Rig::new(window(8));
        let on = rig.streams[0].1;
        let [before, first, then] = [(); 3].map(|()| rig.away(Bytes::mib(1)));
        rig.engine.prefetch(before.0.id(), before.1, on).unwrap();
        rig.engine.acquire(before.0.id(), on).unwrap();
        let ahead = rig.came_on();
        front(&mut rig, &first);
        rig.came_on();
        rig.engine.refill(then.0.id(), then.1, on).unwrap();
        assert_eq!(rig.came_on() == ahead, is_behind, "{name}");
        rig.assert_clean();
    }
}

#[test]
fn a_copy_that_a_reader_waits_for_is_not_cut_for_the_sake_of_others() {
    // The hops of a gibibyte in trunks cost the host more than the mapping of the bytes.
    let mut rig = Rig::new(Options::default());
    let (on, away) = (rig.streams[0].1, rig.away(Bytes::mib(64)));
    let before = rig.engine.stats().seam;
    rig.engine.refill(away.0.id(), away.1, on).unwrap();
    let after = rig.engine.stats().seam;
    assert_eq!((after.copies_in - before.copies_in, after.records - before.records), (1, 2));
    rig.assert_clean();
}

/// What a batch's reader waits for is in front of it for good: nobody notes that it was overtaken.
#[test]
fn a_batch_that_found_others_in_front_has_copies_ahead_take_turns() {
    let mut rig = Rig::new(window(8));
    let on = rig.streams[0].1;
    let within = rig.take(Bytes::mib(1));
    let strips = [Strip::rows(within, Bytes::ZERO, Bytes::kib(4), 16, Bytes::kib(8)).unwrap()];
    let mut waited = Vec::new();
    for _ in 0..4 {
        let [a, c] = [(); 2].map(|()| rig.away(Bytes::mib(256)));
        let mut batch = rig.engine.gather(&strips, on, "rows").unwrap();
        rig.engine.gathered(&batch, on).unwrap();
        let leaving = rig.leaving(Bytes::gib(1));
        for (storage, range) in [&a, &c] {
            rig.engine.prefetch(storage.id(), *range, on).unwrap();
        }
        let before = rig.mark(1);
        let other = rig.streams[1].1;
        rig.engine.scatter(&mut batch, &strips, other).unwrap();
        let after = rig.mark(1);
        waited.push(rig.between(before, after).as_secs_f64());
        for (storage, _) in [&a, &c] {
            rig.engine.acquire(storage.id(), on).unwrap();
        }
        rig.engine.discard(batch).unwrap();
        drop((a, c, leaving));
        rig.sim.sync().unwrap();
        rig.engine.flush(on).unwrap();
        rig.engine.drain().unwrap();
        while rig.engine.releasable(on).unwrap().is_some() {}
        rig.engine.mark_step().unwrap();
    }
    rig.assert_clean();
    let trunk = seconds_in(Bytes::mib(32));
    assert!(waited[1..].iter().all(|waited| *waited < 2.5 * trunk), "{waited:?} beside {trunk}");
}

/// A guess that arrived long ago is in nobody's way.
#[test]
fn a_reader_behind_a_guess_that_arrived_was_not_overtaken() {
    let mut rig = Rig::new(window(8));
    let on = rig.streams[0].1;
    let [a, b, c] = [256, 1, 256].map(|mib| rig.away(Bytes::mib(mib)));
    rig.engine.prefetch(a.0.id(), a.1, on).unwrap();
    rig.sim.sync().unwrap();
    rig.engine.refill(b.0.id(), b.1, on).unwrap();
    let leaving = rig.leaving(Bytes::gib(1));
    assert_eq!(streams_of_a_guess(&mut rig, &c), 1, "nothing was in the reader's way");
    drop((a, b, c, leaving));
}

/// The same, where the engine was even told that all is done.
#[test]
fn a_guess_that_nobody_asks_for_keeps_no_reader_off_the_lane_once_it_is_done() {
    let mut rig = Rig::new(window(8));
    let on = rig.streams[0].1;
    let [first, never, b, c] = [1, 1, 1, 1].map(|mib| rig.away(Bytes::mib(mib)));
    rig.engine.refill(first.0.id(), first.1, on).unwrap();
    let ahead = rig.came_on();
    rig.engine.prefetch(never.0.id(), never.1, on).unwrap();
    for (storage, range) in [&b, &c] {
        rig.sim.sync().unwrap();
        rig.engine.drain().unwrap();
        rig.engine.mark_step().unwrap();
        rig.came_on();
        rig.engine.refill(storage.id(), *range, on).unwrap();
        assert_eq!(rig.came_on(), ahead, "all that was in front is known done");
    }
}

/// A lane full of copies that are done, which nobody asks about.
#[test]
fn a_lane_that_looks_full_is_asked_before_a_reader_is_sent_past_it() {
    let mut rig =
        Rig::new(Options { transfers_max: 4, prefetch_count_max: 0, ..Options::default() });
    let on = rig.streams[0].1;
    let all: Vec<_> = (0..10).map(|_| rig.away(Bytes::mib(1))).collect();
    let mut on_lane = Vec::new();
    for (storage, range) in &all {
        rig.sim.sync().unwrap();
        rig.came_on();
        rig.engine.refill(storage.id(), *range, on).unwrap();
        on_lane.push(rig.came_on());
    }
    assert!(on_lane.iter().all(|streams| *streams == on_lane[0]), "{on_lane:?}");
}

/// The same of bytes whose address stays: their copies wait for nothing, so that no others get in
/// between. One stream asks for eight, one after the other; the window is two.
#[test]
fn a_reader_waits_for_little_more_than_the_window_where_addresses_stay() {
    let window_bytes = Bytes::mib(512);
    let waits = [false, true].map(|leaves| {
        let mut rig = Rig::new(window(2));
        let [(_, user), (_, other), _] = rig.streams;
        let (b, to_b) = rig.away(Bytes::mib(1));
        let all: Vec<Storage> = (0..8)
            .map(|_| rig.engine.alloc_fixed(Bytes::mib(256), user, "weight").unwrap())
            .collect();
        for storage in &all {
            rig.engine.evict(storage.id(), user).unwrap();
        }
        rig.engine.flush(user).unwrap();
        rig.engine.drain().unwrap();
        assert_eq!(rig.engine.stats().mapped_bytes, 0);
        let leaving = leaves.then(|| rig.leaving(Bytes::gib(1)));
        for storage in all.iter().rev() {
            rig.engine.acquire(storage.id(), user).unwrap();
            assert!(rig.engine.stats().prefetched_bytes <= window_bytes.0);
        }
        let before = rig.mark(1);
        rig.engine.refill(b.id(), to_b, other).unwrap();
        let after = rig.mark(1);
        let waited = rig.between(before, after).as_secs_f64();
        drop(leaving);
        waited / seconds_in(window_bytes)
    });
    println!("waits, in windows (nothing leaves; the same while others do): {waits:?}");
    // And two trunks, as far as others came before.
    assert!(waits.iter().all(|waited| *waited < 1.3), "{waits:?}");
}

/// How many questions a guess of a mebibyte costs while others leave.
#[test]
fn small_guesses_ask_no_question_each_while_copies_leave() {
    let mut rig = Rig::new(Options { prefetch_count_max: 1000, ..Options::default() });
    let on = rig.streams[0].1;
    let all: Vec<_> = (0..200).map(|_| rig.away(Bytes::mib(1))).collect();
    let leaving = rig.leaving(Bytes::gib(2));
    let before = rig.engine.stats().seam.queries;
    for (storage, range) in &all {
        rig.engine.prefetch(storage.id(), *range, on).unwrap();
    }
    let asked = rig.engine.stats().seam.queries - before;
    assert!(asked < 20, "{asked} questions for 200 guesses");
    drop(leaving);
}

/// `verify_slots_max` slots there are for each lane; a reader that rides on a lane without one is
/// not compared, though the other lane has all of its slots.
#[test]
fn a_reader_goes_where_there_is_a_slot_for_its_sum() {
    let world = World::new(Config::timed(Model::default()));
    let mut sim = world.device(0).unwrap();
    let pool = PoolOptions { budget: Budget::Bytes(Bytes::mib(16)), ..PoolOptions::default() };
    let pool = PinnedPool::new(sim.pinner(), pool).unwrap();
    let options = Options {
        verify: true,
        verify_slots_max: 1,
        prefetch_count_max: 2,
        keep_last_count: 0,
        ..Options::default()
    };
    let mut engine = Engine::new(Box::new(world.device(0).unwrap()), &pool, options).unwrap();
    let here = sim.create_stream().unwrap();
    let on = engine.adopt_stream(sim.raw_stream(here).unwrap()).unwrap();
    let away: Vec<_> = (0..2)
        .map(|_| {
            let at = sim.alloc_device(Bytes::mib(1), here).unwrap();
            let range = DeviceRange::new(at, Bytes::mib(1)).unwrap();
            let storage = engine.adopt(range, "x").unwrap();
            engine.evict(storage.id(), on).unwrap();
            engine.flush(on).unwrap();
            engine.drain().unwrap();
            assert_eq!(engine.releasable(on).unwrap(), Some(storage.id()));
            (storage, range)
        })
        .collect();
    engine.prefetch(away[0].0.id(), away[0].1, on).unwrap();
    engine.acquire(away[0].0.id(), on).unwrap();
    engine.refill(away[1].0.id(), away[1].1, on).unwrap();
    engine.drain().unwrap();
    let stats = engine.stats();
    assert_eq!((stats.verified_count, stats.unverified_count), (2, 0));
}

/// A question that the driver refuses is no reason to refuse a reader: whether the lane takes turns
/// is a matter of speed alone.
#[test]
fn a_reader_is_served_where_the_driver_does_not_say_whether_copies_leave() {
    let mut told = Vec::new();
    for nth in 1..12 {
        let faults = FaultPlan::default().at(Spot::Query, nth, Fault::Reject(900));
        let world = World::new(Config { faults, ..Config::timed(Model::default()) });
        let mut sim = world.device(0).unwrap();
        let pool = PoolOptions { budget: Budget::Bytes(Bytes::mib(64)), ..PoolOptions::default() };
        let pool = PinnedPool::new(sim.pinner(), pool).unwrap();
        let options = Options { ahead_trunk_bytes_max: Bytes::mib(1), ..Options::default() };
        let mut engine = Engine::new(Box::new(world.device(0).unwrap()), &pool, options).unwrap();
        let here = sim.create_stream().unwrap();
        let on = engine.adopt_stream(sim.raw_stream(here).unwrap()).unwrap();
        let range = |sim: &mut Sim, len| {
            DeviceRange::new(sim.alloc_device(len, here).unwrap(), len).unwrap()
        };
        let taken = range(&mut sim, Bytes::mib(4));
        let storage = engine.adopt(taken, "x").unwrap();
        engine.evict(storage.id(), on).unwrap();
        engine.flush(on).unwrap();
        if !matches!(engine.releasable(on), Ok(Some(_))) {
            continue;
        }
        if let Err(error) = engine.refill(storage.id(), taken, on) {
            told.push(format!("question {nth}: {error}"));
        }
    }
    assert!(told.is_empty(), "{told:?}");
}

/// A fetch that failed half way goes on in front of readers, whose stream does not wait for it
/// where the address stays.
#[test]
fn a_reader_does_not_go_behind_half_a_copy_that_failed() {
    let mut failed = 0;
    for nth in 1..24 {
        let faults = FaultPlan::default().at(Spot::Copy, nth, Fault::Refuse);
        let config = Config { faults, ..Config::times_only(Model::default()) };
        let mut rig = Rig::over(config, window(0));
        let on = rig.streams[0].1;
        let range = rig.take(Bytes::mib(1));
        let b = rig.engine.adopt(range, "b").unwrap();
        let weight = rig.engine.alloc_fixed(Bytes::mib(256), on, "weight").unwrap();
        if rig.engine.evict(b.id(), on).is_err() || rig.engine.evict(weight.id(), on).is_err() {
            continue;
        }
        rig.engine.flush(on).unwrap();
        rig.engine.drain().unwrap();
        if rig.engine.releasable(on).unwrap().is_none() {
            continue;
        }
        rig.came_on();
        if rig.engine.acquire(weight.id(), on).is_ok() {
            continue;
        }
        let before = rig.came_on();
        if before.is_empty() {
            continue;
        }
        failed += 1;
        rig.engine.refill(b.id(), range, on).unwrap();
        let came = rig.came_on();
        assert!(before.is_disjoint(&came), "copy {nth}: {came:?} behind {before:?}");
    }
    assert!(failed > 0);
}

/// Bytes whose address stays come in beside a kernel; a reader's copy that is behind the kernel, as
/// its target is, holds them up where it goes on their lane.
#[test]
fn a_readers_copy_that_waits_for_its_target_holds_up_no_guess_that_does_not() {
    let mut rig = Rig::new(window(2));
    let (here, on) = rig.streams[0];
    let weight = rig.engine.alloc_fixed(Bytes::mib(256), on, "weight").unwrap();
    let input = rig.engine.alloc(Bytes::mib(1), on, "input").unwrap();
    for storage in [&weight, &input] {
        rig.engine.evict(storage.id(), on).unwrap();
    }
    rig.engine.flush(on).unwrap();
    rig.engine.drain().unwrap();
    rig.engine.step().unwrap();
    assert_eq!(rig.engine.stats().mapped_bytes, 0);
    let start = rig.mark(0);
    let args: [Arg; 0] = [];
    rig.sim.launch(&COLLECTIVE, Grid::row(1, 1), &args, here).unwrap();
    rig.engine.acquire(input.id(), on).unwrap();
    assert_eq!(rig.engine.stats().prefetched_bytes, weight.len().0);
    rig.engine.acquire(weight.id(), on).unwrap();
    let end = rig.mark(0);
    let took = rig.between(start, end).as_secs_f64();
    let copy = seconds_in(weight.len());
    println!("{took} s; the kernel 5e-3, the weight's copy {copy}");
    assert!(took < 1.2 * copy.max(5e-3), "{took} s");
}
