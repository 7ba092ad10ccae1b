//! Copies that stand in each other's way: one that a reader waits for behind prefetches that nobody
//! waits for, prefetches that wait in more streams than they need to while others leave, and copies
//! beside a collective that shares their link.
//!
//! The fault guarded against: a queue of prefetches that a copy engine drains to its end before it
//! looks at anything else, and a request to give way that changes nothing. The simulated device
//! serves a stream again whose next copy follows without a wait, as copy engines do; its times are
//! exact.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

use lightering::backend::sim::{Config, Model, Sim, World};
use lightering::backend::{Arg, Backend, Cost, Grid, Kernel, Timing, Work};
use lightering::hazard::Checker;
use lightering::trace::Op;
use lightering::{
    Acquire, Budget, Bytes, DeviceRange, Engine, EventId, Misuse, Options, PinnedPool, PoolOptions,
    Storage, StreamId,
};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Takes five milliseconds and moves nothing.
static COLLECTIVE: Kernel = Kernel {
    name: "collective",
    ptx: None,
    host: Some(|_, _| Ok(())),
    cost: |_, _| Cost {
        flops: 5e-3 * Model::default().vector_flops_per_s,
        bytes: 0.0,
        work: Work::Vector,
    },
};

/// A framework with one device, two streams and an engine; the engine's part is checked.
struct Rig {
    sim: Sim,
    engine: Engine,
    checker: Arc<Mutex<Checker>>,
    /// Streams of the engine's that carried copies in, since somebody looked.
    came_on: Arc<Mutex<BTreeSet<String>>>,
    /// Each by the framework's name and by the engine's.
    streams: [(StreamId, StreamId); 2],
}

impl Rig {
    fn new(options: Options) -> Rig {
        let world = World::new(Config::times_only(Model::default()));
        let mut sim = world.device(0).unwrap();
        let budget = PoolOptions { budget: Budget::Bytes(Bytes::gib(4)), ..PoolOptions::default() };
        let pool = PinnedPool::new(sim.pinner(), budget).unwrap();
        let device = Box::new(world.device(0).unwrap());
        let mut engine = Engine::new(device, &pool, options).unwrap();
        let checker = Arc::new(Mutex::new(Checker::new()));
        let came_on: Arc<Mutex<BTreeSet<String>>> = Arc::default();
        let (seen, came) = (Arc::clone(&checker), Arc::clone(&came_on));
        engine.observe(Some(Box::new(move |record| {
            seen.lock().unwrap().push(record);
            if let Op::CopyIn { stream, .. } = record.op {
                came.lock().unwrap().insert(format!("{stream:?}"));
            }
        })));
        let streams = [(); 2].map(|()| {
            let here = sim.create_stream().unwrap();
            (here, engine.adopt_stream(sim.raw_stream(here).unwrap()).unwrap())
        });
        Rig { sim, engine, checker, came_on, streams }
    }

    fn take(&mut self, len: Bytes) -> DeviceRange {
        DeviceRange::new(self.sim.alloc_device(len, self.streams[0].0).unwrap(), len).unwrap()
    }

    /// A storage of the framework's whose bytes are on the host, and the range they came from.
    fn away(&mut self, len: Bytes) -> (Storage, DeviceRange) {
        let (range, on) = (self.take(len), self.streams[0].1);
        let storage = self.engine.adopt(range, "x").unwrap();
        self.engine.evict(storage.id(), on).unwrap();
        self.engine.flush(on).unwrap();
        self.sim.sync().unwrap();
        self.engine.drain().unwrap();
        assert_eq!(self.engine.releasable(on).unwrap(), Some(storage.id()));
        (storage, range)
    }

    /// The streams that carried copies in since the last call.
    fn came_on(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.came_on.lock().unwrap())
    }

    /// A storage whose bytes are on their way out, and will be for a while.
    fn leaving(&mut self, len: Bytes) -> Storage {
        let (range, on) = (self.take(len), self.streams[0].1);
        let storage = self.engine.adopt(range, "leaving").unwrap();
        self.engine.evict(storage.id(), on).unwrap();
        self.engine.flush(on).unwrap();
        storage
    }

    fn mark(&mut self, stream: usize) -> EventId {
        let event = self.sim.create_event(Timing::On).unwrap();
        self.sim.record(event, self.streams[stream].0).unwrap();
        event
    }

    fn between(&mut self, from: EventId, to: EventId) -> Duration {
        self.sim.sync().unwrap();
        self.sim.elapsed(from, to).unwrap()
    }

    fn assert_clean(&self) {
        let checker = self.checker.lock().unwrap();
        assert!(checker.hazards().is_empty(), "{:?}", checker.hazards());
    }
}

fn seconds_in(len: Bytes) -> f64 {
    len.0 as f64 / Model::default().copy_in_bytes_per_s
}

/// How long one reader waits for a mebibyte while three storages of a gibibyte are fetched ahead.
fn urgent_wait(options: Options) -> f64 {
    let mut rig = Rig::new(Options { prefetch_count_max: 8, ..options });
    let ahead: Vec<_> = (0..3).map(|_| rig.away(Bytes::gib(1))).collect();
    let (urgent, range) = rig.away(Bytes::mib(1));
    let [(_, first), (_, second)] = rig.streams;
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
    let mut rig = Rig::new(Options { step_queries_max: 24, ..Options::default() });
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
fn what_waits_to_come_in_while_others_leave_waits_in_one_stream() {
    let mut rig = Rig::new(Options { prefetch_count_max: 8, ..Options::default() });
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
    let mut rig = Rig::new(Options { prefetch_count_max: 8, ..Options::default() });
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
        let mut rig = Rig::new(Options { prefetch_count_max: 8, ..Options::default() });
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

#[test]
fn turns_cost_the_link_nothing_but_the_starts_of_trunks() {
    let mut rig = Rig::new(Options { prefetch_count_max: 8, ..Options::default() });
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
        let mut rig = Rig::new(Options { prefetch_count_max: 8, ..Options::default() });
        let [(_, compute), (here, comm)] = rig.streams;
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
