//! Hazards of order, H16 to H28: events used twice, streams that are not what they seem, orders
//! that change, and engines that wait for each other.

use crate::bench::{
    LEN, SEEDS, adopted, away, bounds, config, evict, flush, owned, read, release, rig,
};
use crate::support::broken::{Fault, Plan};
use crate::support::{Rig, quick_pool};
use lightering::backend::sim::{Config, FaultPlan, Model, Spot, World};
use lightering::backend::{Backend, Timing};
use lightering::hazard::{Checker, Kind as Hazard};
use lightering::policy::Kept;
use lightering::storage::{Residency, Tier};
use lightering::trace::{Op, Record, Site};
use lightering::{Acquire, Bytes, DeviceId, Evict, Misuse, Options};

const POOL: Bytes = Bytes::kib(64);

#[test]
fn h16_an_event_is_recorded_anew_only_when_nobody_stands_for_it() {
    // The fewest events there can be: each is used again and again.
    for seed in 0..SEEDS {
        let bounds = Options { events_max: 8, ..bounds() };
        let mut rig = Rig::new(config(seed), quick_pool(POOL), bounds, 2);
        for round in 0..30 {
            let s = round as usize % 2;
            let storage = owned(&mut rig, s, LEN, round);
            evict(&mut rig, s, &storage);
            flush(&mut rig, s);
            read(&mut rig, 1 - s, &storage, round);
            release(&mut rig, 1 - s, storage);
            rig.engine.step().unwrap();
        }
        assert!(rig.engine.stats().seam.events_opened <= 8);
        rig.assert_right();
        rig.assert_nothing_left();
    }
    // The recording before the right one in its place is seen.
    let plan = Plan { site: Site::ReaderWait, fault: Fault::StaleEvent };
    let (mut rig, _) = Rig::broken(config(1), quick_pool(POOL), bounds(), 1, Some(plan));
    let storage = owned(&mut rig, 0, LEN, 1);
    evict(&mut rig, 0, &storage);
    flush(&mut rig, 0);
    read(&mut rig, 0, &storage, 1);
    assert!(!rig.hazards().is_empty());
}

#[test]
fn h17_an_event_that_was_never_recorded_orders_nothing_and_is_refused() {
    let mut rig = rig(1, POOL, 1);
    let here = rig.streams[0].here;
    let fresh = rig.sim.create_event(Timing::Off).unwrap();
    let waited = rig.sim.wait(here, fresh, Site::Outside).unwrap_err();
    let asked = rig.sim.query(fresh, Site::Outside).unwrap_err();
    assert_eq!([waited.misuse(), asked.misuse()], [Some(Misuse::FreshEvent); 2]);
    assert!(rig.hazards().is_empty(), "what was refused is no use of it");
    // A driver would let it pass; the checker does not.
    let mut checker = Checker::default();
    let ops = [
        Op::OpenStream(here),
        Op::OpenEvent(fresh),
        Op::Wait { stream: here, event: fresh, site: Site::Outside },
    ];
    for (seq, op) in (0..).zip(ops) {
        checker.push(&Record { seq, device: DeviceId(0), op, failed: None });
    }
    let kinds: Vec<Hazard> = checker.hazards().iter().map(|hazard| hazard.kind).collect();
    assert_eq!(kinds, [Hazard::WaitOnFresh]);
}

#[test]
fn h18_an_event_of_another_device_is_refused() {
    let world = World::new(Config::adversary(1));
    let (mut here, mut there) = (world.device(0).unwrap(), world.device(1).unwrap());
    let (stream, other) = (here.create_stream().unwrap(), there.create_stream().unwrap());
    let event = there.create_event(Timing::Off).unwrap();
    there.record(event, other).unwrap();
    for refused in [
        here.wait(stream, event, Site::Outside).unwrap_err(),
        here.record(event, stream).unwrap_err(),
        here.query(event, Site::Outside).map(drop).unwrap_err(),
    ] {
        let misuse = refused.misuse();
        assert!(matches!(misuse, Some(Misuse::Foreign | Misuse::WrongDevice)), "{refused}");
    }
}

#[test]
fn h19_a_wait_outlives_its_event() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, POOL, 2);
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, 1);
        let (first, then) = (rig.streams[0].here, rig.streams[1].here);
        let event = rig.sim.create_event(Timing::Off).unwrap();
        rig.sim.record(event, first).unwrap();
        rig.sim.wait(then, event, Site::Outside).unwrap();
        rig.sim.close_event(event).unwrap();
        rig.check(1, range, 1, "behind an event that is gone".into());
        rig.assert_right();
    }
}

#[test]
fn h20_edges_are_kept_by_events_on_the_default_stream_too() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, POOL, 0);
        // 0 is the device's default stream, with which lanes have no order.
        rig.adopt(0);
        let storage = owned(&mut rig, 0, LEN, 1);
        evict(&mut rig, 0, &storage);
        flush(&mut rig, 0);
        let other = owned(&mut rig, 0, LEN, 2);
        read(&mut rig, 0, &storage, 1);
        read(&mut rig, 0, &other, 2);
        rig.assert_right();
    }
}

#[test]
fn h24_a_storage_dropped_in_the_window_is_skipped() {
    for seed in 0..SEEDS {
        let bounds = Options { prefetch_count_max: 2, ..bounds() };
        let mut rig = Rig::new(config(seed), quick_pool(POOL), bounds, 1);
        let on = rig.streams[0].engine;
        let mut storages: Vec<_> = (0..6).map(|seed| away(&mut rig, seed)).collect();
        // The backward pass begins; the next two are expected. One of them is dropped, another
        // while it is being fetched.
        let last = storages.pop().unwrap();
        let home = rig.take(0, LEN).unwrap();
        rig.engine.refill(last.id(), home, on).unwrap();
        let (next, _) = rig.engine.wanted(on).unwrap().expect("a window is open");
        let at = storages.iter().position(|storage| storage.id() == next).unwrap();
        drop(storages.remove(at));
        let (fetched, len) = rig.engine.wanted(on).unwrap().expect("the others are still there");
        assert_ne!(fetched, next, "what is gone is not fetched");
        let target = rig.take(0, len).unwrap();
        rig.engine.prefetch(fetched, target, on).unwrap();
        let at = storages.iter().position(|storage| storage.id() == fetched).unwrap();
        drop(storages.remove(at));
        rig.sim.sync().unwrap();
        assert_eq!(rig.engine.releasable(on).unwrap(), Some(fetched), "its target is given back");
        rig.give(0, target.at());
        for _ in 0..4 {
            let wanted = rig.engine.wanted(on).unwrap();
            assert!(wanted.is_none_or(|(id, _)| id != next && id != fetched));
        }
        drop(storages);
        release(&mut rig, 0, last);
        rig.give(0, home.at());
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn h25_crossing_requests_for_one_block_get_on_or_are_refused() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, Bytes::kib(4), 2);
        let mut storages = [0, 1].map(|s| Some(owned(&mut rig, s, LEN, s as u64)));
        let mut moved = 0;
        for round in 0..40 {
            let s = round % 2;
            let storage = storages[s].take().unwrap();
            match evict(&mut rig, s, &storage) {
                Evict::Moving(_) => moved += 1,
                became => assert_eq!(became, Evict::Kept(Kept::NoPinnedRoom)),
            }
            // The other stream reads; then the block is up for whoever comes.
            rig.order(s, 1 - s);
            read(&mut rig, 1 - s, &storage, s as u64);
            rig.order(1 - s, s);
            rig.engine.take(storage.id()).unwrap();
            storages[s] = Some(storage);
        }
        assert!(moved > 10, "seed {seed}: {moved} of 40");
        let steps = rig.world.now().as_nanos();
        assert!(steps < 100_000, "{steps} steps");
        rig.assert_right();
        drop(storages);
        rig.assert_nothing_left();
    }
}

#[test]
fn h26_ranges_that_share_a_byte_are_not_two_storages() {
    let mut rig = rig(1, POOL, 1);
    let (first, range) = adopted(&mut rig, 0, 1);
    for (offset, len) in [(0, LEN.0), (0, 1), (LEN.0 - 1, 1), (256, 256)] {
        let part = range.part(Bytes(offset), Bytes(len)).unwrap();
        let refused = rig.engine.adopt(part, "second").unwrap_err();
        assert_eq!(refused.misuse(), Some(Misuse::Overlap));
        assert!(refused.to_string().contains("adopted"), "{refused}");
    }
    // Behind it, or once the bytes went, there is room.
    evict(&mut rig, 0, &first);
    flush(&mut rig, 0);
    assert!(rig.engine.releasable(rig.streams[0].engine).unwrap().is_some());
    let second = rig.engine.adopt(range, "second").unwrap();
    assert_eq!(rig.engine.range(second.id()).unwrap(), range);
}

#[test]
fn h27_a_torn_copy_is_never_resident() {
    for seed in 0..SEEDS {
        // Copies move a piece at a time, and stand still in between.
        let slow = lightering::backend::sim::Fault::Slow(100);
        let faults = (1..20).fold(FaultPlan::default(), |plan, nth| plan.at(Spot::Copy, nth, slow));
        let mut rig = Rig::new(
            Config { faults, ..config(seed) },
            quick_pool(POOL),
            Options { prefetch_count_max: 2, ..bounds() },
            1,
        );
        let storages: Vec<_> = (0..3).map(|n| owned(&mut rig, 0, Bytes::kib(4), n)).collect();
        for storage in &storages {
            evict(&mut rig, 0, storage);
        }
        flush(&mut rig, 0);
        for (n, storage) in storages.iter().enumerate().rev() {
            let state = rig.engine.residency(storage.id()).unwrap();
            assert!(matches!(state, Residency::Evicted(Tier::Host) | Residency::Refilling));
            if state == Residency::Refilling {
                let early = rig.engine.range(storage.id()).unwrap_err();
                assert_eq!(early.misuse(), Some(Misuse::NotThere));
            }
            read(&mut rig, 0, storage, n as u64);
        }
        assert!(rig.world.faults_struck() > 0);
        rig.assert_right();
    }
}

#[test]
fn h28_a_refill_does_not_queue_behind_the_evictions() {
    // In virtual time: 16 copies of 4 MiB are on their way out when a reader comes for what left
    // before them.
    let (trunk_bytes_max, unreleased_bytes_max) = (Bytes::mib(4), Bytes::mib(256));
    let bounds = Options { trunk_bytes_max, unreleased_bytes_max, ..bounds() };
    let pool = quick_pool(Bytes::mib(80));
    let pool = lightering::PoolOptions {
        arena_bytes: Bytes::mib(80),
        arena_bytes_max: Bytes::mib(80),
        ..pool
    };
    let mut rig = Rig::new(Config::timed(Model::default()), pool, bounds, 1);
    let (on, here) = (rig.streams[0].engine, rig.streams[0].here);
    let wanted = owned(&mut rig, 0, Bytes::mib(1), 1);
    evict(&mut rig, 0, &wanted);
    flush(&mut rig, 0);
    rig.sim.sync().unwrap();
    let [from, to, end] = [(); 3].map(|()| rig.sim.create_event(Timing::On).unwrap());
    let others: Vec<_> = (0..16).map(|n| owned(&mut rig, 0, Bytes::mib(4), n)).collect();
    rig.sim.record(from, here).unwrap();
    for other in &others {
        assert!(matches!(evict(&mut rig, 0, other), Evict::Moving(_)));
    }
    let Acquire::Ready(range) = rig.engine.acquire(wanted.id(), on).unwrap() else { panic!() };
    rig.sim.record(to, here).unwrap();
    rig.check(0, range, 1, "the reader's".into());
    flush(&mut rig, 0);
    rig.sim.record(end, here).unwrap();
    rig.assert_right();
    let (served, all) = (rig.sim.elapsed(from, to).unwrap(), rig.sim.elapsed(from, end).unwrap());
    println!("the reader was served after {served:?}, the last copy-out was done after {all:?}");
    assert!(served * 4 < all, "{served:?} of {all:?}");
}
