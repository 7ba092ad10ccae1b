//! Times of copies and of what a framework names, read off the device.
//!
//! The fault guarded against: times of the host's instead of the device's, spans on axes of their
//! own or on one that starts somewhere else, copies and spans that are neither there nor counted, a
//! timeline that grows with the run, and a step that is slower because it is timed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "verify_support/mod.rs"]
mod verify_support;

use lightering::backend::sim::{Call, Config, Fault, FaultPlan, Model, Schedule, Sim, Spot, World};
use lightering::backend::{Backend, Cost, Grid, Kernel, Work};
use lightering::engine::{Span, Track};
use lightering::pack::Strip;
use lightering::trace::Op;
use lightering::{
    Budget, Bytes, DeviceRange, Engine, Kind, Options, PinnedPool, PoolOptions, StreamId,
};
use std::sync::Mutex;
use std::time::Duration;
use verify_support::{Crooked, Plan, Refused, Shared};

/// Takes a second.
static SECOND: Kernel = Kernel {
    name: "second",
    ptx: None,
    host: Some(|_, _| Ok(())),
    cost: |_, _| Cost {
        flops: Model::default().vector_flops_per_s,
        bytes: 0.0,
        work: Work::Vector,
    },
};

const LEN: Bytes = Bytes::mib(64);

struct Rig {
    sim: Sim,
    engine: Engine,
    here: StreamId,
    on: StreamId,
}

impl Rig {
    fn new(options: Options) -> Rig {
        Rig::wrapped(Config::times_only(Model::default()), options, |sim| Box::new(sim))
    }

    /// One whose device refuses what `plan` says.
    fn refusing(options: Options, refused: (Refused, u32)) -> Rig {
        Rig::wrapped(Config::times_only(Model::default()), options, |sim| {
            Box::new(crooked(sim, refused))
        })
    }

    fn wrapped(
        config: Config,
        options: Options,
        wrap: impl FnOnce(Sim) -> Box<dyn Backend>,
    ) -> Rig {
        let world = World::new(config);
        let mut sim = world.device(0).unwrap();
        let pool = PinnedPool::new(sim.pinner(), budget()).unwrap();
        let mut engine = Engine::new(wrap(world.device(0).unwrap()), &pool, options).unwrap();
        let here = sim.create_stream().unwrap();
        let on = engine.adopt_stream(sim.raw_stream(here).unwrap()).unwrap();
        Rig { sim, engine, here, on }
    }

    /// A second of compute, then a storage out and back.
    fn round(&mut self, name: &str) {
        let on = self.on;
        self.engine.begin_span(on, "compute").unwrap();
        let storage = self.engine.alloc(LEN, on, name).unwrap();
        self.second();
        self.engine.end_span(on).unwrap();
        self.engine.evict(storage.id(), on).unwrap();
        self.engine.flush(on).unwrap();
        self.engine.acquire(storage.id(), on).unwrap();
        self.engine.release(storage, on).unwrap();
        self.engine.step().unwrap();
    }

    /// Work of a second that belongs to no span of its own.
    fn second(&mut self) {
        self.sim.launch(&SECOND, Grid::row(1, 1), &[], self.here).unwrap();
    }

    fn spans(&self, track: Track) -> Vec<Span> {
        self.engine.spans().filter(|span| span.track == track).copied().collect()
    }
}

fn budget() -> PoolOptions {
    PoolOptions { budget: Budget::Bytes(Bytes::gib(1)), ..PoolOptions::default() }
}

fn crooked(sim: Sim, refused: (Refused, u32)) -> Crooked {
    let plan = Plan { refused: Some(refused), ..Plan::default() };
    Crooked { sim, plan: Shared::new(Mutex::new(plan)) }
}

fn near(time: Duration, seconds: f64) {
    assert!((time.as_secs_f64() / seconds - 1.0).abs() < 0.01, "{time:?} is not {seconds} s");
}

#[test]
fn copies_and_compute_are_on_one_axis_in_device_time() {
    let mut rig = Rig::new(Options { spans_max: 100, ..Options::default() });
    let rounds = 5;
    for _ in 0..rounds {
        rig.round("x");
    }
    rig.engine.drain().unwrap();
    let compute = rig.spans(Track::Stream(0));
    let (out, back) = (rig.spans(Track::Out), rig.spans(Track::Ahead));
    assert_eq!((compute.len(), out.len(), back.len()), (rounds, rounds, rounds));
    let model = Model::default();
    for (compute, (out, back)) in compute.iter().zip(out.iter().zip(&back)) {
        near(compute.time, 1.0);
        near(out.time, LEN.0 as f64 / model.copy_out_bytes_per_s);
        near(back.time, LEN.0 as f64 / model.copy_in_bytes_per_s);
        let end = compute.start + compute.time;
        assert!(out.start >= end && out.start < end + Duration::from_micros(50));
        assert!(back.start >= out.start + out.time);
        assert_eq!((out.bytes, out.name.as_str(), compute.bytes), (LEN, "x", Bytes::ZERO));
    }
    // Seconds apart: each is told from a base that is not far from it.
    assert!(compute[4].start > compute[0].start + Duration::from_secs(4));
    let stats = rig.engine.stats();
    near(stats.out_time, rounds as f64 * LEN.0 as f64 / model.copy_out_bytes_per_s);
    near(stats.in_time, rounds as f64 * LEN.0 as f64 / model.copy_in_bytes_per_s);
    let bytes = rounds as u64 * LEN.0;
    assert_eq!(
        (stats.out_timed_bytes, stats.in_timed_bytes, stats.untimed_count),
        (bytes, bytes, 0)
    );
}

#[test]
fn a_trace_is_json_whatever_a_storage_is_called() {
    let mut rig = Rig::new(Options { spans_max: 100, ..Options::default() });
    rig.round("a \"name\"\\\n\u{e9}");
    rig.engine.drain().unwrap();
    let trace: serde_json::Value = serde_json::from_str(&rig.engine.trace_json()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
    assert_eq!((count("M"), count("X")), (3, 3), "{trace}");
    let copy = events.iter().find(|event| event["args"]["bytes"] == LEN.0).unwrap();
    assert_eq!(copy["name"], "a \"name\"\\\n\u{e9}");
    assert!(copy["ts"].as_f64().unwrap() >= 1e6, "{copy}");
}

#[test]
fn a_timeline_is_bounded_and_counts_what_it_leaves_out() {
    let mut rig = Rig::new(Options { spans_max: 4, ..Options::default() });
    for _ in 0..4 {
        rig.round("x");
    }
    rig.engine.drain().unwrap();
    assert_eq!(rig.engine.spans().count(), 4, "the last ones are kept");
    // Spans that nobody settles: past a bound they are not timed.
    for _ in 0..2000 {
        rig.engine.begin_span(rig.on, "small").unwrap();
    }
    assert!(rig.engine.stats().untimed_count > 900);
    rig.engine.drain().unwrap();
    assert_eq!(rig.engine.spans().count(), 4);
    rig.engine.shutdown().unwrap();
}

#[test]
fn what_nobody_asked_for_is_not_measured() {
    let mut rig = Rig::new(Options::default());
    let before = rig.engine.stats().seam.events_opened;
    rig.engine.begin_span(rig.on, "compute").unwrap();
    rig.engine.end_span(rig.on).unwrap();
    assert_eq!(rig.engine.stats().seam.events_opened, before);
    rig.round("x");
    rig.engine.drain().unwrap();
    assert_eq!((rig.engine.spans().count(), rig.engine.stats().out_timed_bytes), (0, 0));
}

#[test]
fn a_batch_is_timed_as_every_other_copy_is_whether_a_kernel_moves_it_or_not() {
    let (row, rows) = (Bytes::kib(16), 256);
    let bytes = row.0 * rows;
    for pack_blocks_max in [64, 0] {
        let options = Options { spans_max: 100, pack_blocks_max, ..Options::default() };
        let mut rig = Rig::new(options);
        let at = rig.sim.alloc_device(Bytes(2 * bytes), rig.here).unwrap();
        let within = DeviceRange::new(at, Bytes(2 * bytes)).unwrap();
        let strips = [Strip::rows(within, Bytes::ZERO, row, rows, Bytes(2 * row.0)).unwrap()];
        rig.second();
        let mut batch = rig.engine.gather(&strips, rig.on, "rows").unwrap();
        rig.engine.scatter(&mut batch, &strips, rig.on).unwrap();
        rig.engine.drain().unwrap();
        let (out, back) = (rig.spans(Track::Out), rig.spans(Track::Urgent));
        assert_eq!((out.len(), back.len(), rig.engine.spans().count()), (1, 1, 2));
        for span in [out[0], back[0]] {
            assert_eq!((span.name.as_str(), span.bytes), ("rows", Bytes(bytes)));
            assert!(span.time > Duration::ZERO, "{span:?}");
        }
        near(out[0].start, 1.0);
        assert!(back[0].start >= out[0].start + out[0].time);
        let stats = rig.engine.stats();
        assert_eq!(stats.seam.launches, if pack_blocks_max > 0 { 2 } else { 0 });
        let timed = (stats.out_timed_bytes, stats.in_timed_bytes, stats.untimed_count);
        assert_eq!(timed, (bytes, bytes, 0));
        assert_eq!((stats.out_time, stats.in_time), (out[0].time, back[0].time));
        rig.engine.discard(batch).unwrap();
    }
}

#[test]
fn times_start_where_the_engine_did_whichever_span_is_read_first() {
    let mut rig = Rig::new(Options { spans_max: 100, ..Options::default() });
    rig.second();
    rig.engine.begin_span(rig.on, "long").unwrap();
    rig.second();
    // It leaves within the span, and is read before it.
    let storage = rig.engine.alloc(LEN, rig.on, "x").unwrap();
    rig.engine.evict(storage.id(), rig.on).unwrap();
    rig.second();
    rig.engine.end_span(rig.on).unwrap();
    rig.engine.drain().unwrap();
    let (long, out) = (rig.spans(Track::Stream(0)), rig.spans(Track::Out));
    let first = rig.engine.spans().next().unwrap();
    assert_eq!(first.track, Track::Out, "read first, though it began later");
    near(long[0].start, 1.0);
    near(long[0].time, 2.0);
    near(out[0].start, 2.0);
}

/// A device that goes on by a step at each question, on the stream that was opened last.
#[derive(Clone, Debug)]
struct YoungestFirst;

impl Schedule for YoungestFirst {
    fn choose(&mut self, count: usize) -> usize {
        count - 1
    }

    fn pace(&mut self, call: Call) -> usize {
        usize::from(call == Call::Query)
    }
}

#[test]
fn no_span_begins_before_times_do_however_late_the_device_is() {
    let options = Options { spans_max: 100, ..Options::default() };
    let config = Config::scheduled(Box::new(YoungestFirst));
    let mut rig = Rig::wrapped(config, options, |sim| Box::new(sim));
    rig.engine.begin_span(rig.on, "compute").unwrap();
    rig.engine.end_span(rig.on).unwrap();
    for _ in 0..100 {
        rig.engine.step().unwrap();
    }
    let spans = rig.spans(Track::Stream(0));
    assert_eq!((spans.len(), rig.engine.stats().untimed_count), (1, 0));
    assert!(spans[0].start > Duration::ZERO, "it began before the moment that times start at");
}

#[test]
fn an_engine_that_cannot_mark_where_times_start_is_refused_and_leaves_nothing() {
    let world = World::new(Config::times_only(Model::default()));
    let mut sim = world.device(0).unwrap();
    let pool = PinnedPool::new(sim.pinner(), budget()).unwrap();
    let open = |spans_max| {
        let device = Box::new(crooked(world.device(0).unwrap(), (Refused::Record, 1)));
        Engine::new(device, &pool, Options { spans_max, ..Options::default() })
    };
    let error = open(100).unwrap_err();
    assert_eq!(
        (error.kind(), error.op(), error.call()),
        (Kind::OutOfMemory, "new", Some("record"))
    );
    assert_eq!(pool.stats().lent, Bytes::ZERO);
    let memory = sim.memory().unwrap();
    assert_eq!(memory.free, memory.total);
    let mut untimed = open(0).unwrap();
    assert_eq!(untimed.stats().seam.events_opened, 0, "nothing is marked");
    untimed.shutdown().unwrap();
    // One that is made gives the event back.
    let device = Box::new(world.device(0).unwrap());
    let options = Options { spans_max: 100, ..Options::default() };
    let mut timed = Engine::new(device, &pool, options).unwrap();
    timed.shutdown().unwrap();
    let count = |is: fn(Op) -> bool| timed.recent().filter(|record| is(record.op)).count();
    let opened = count(|op| matches!(op, Op::OpenEvent(_)));
    assert_eq!((opened, count(|op| matches!(op, Op::CloseEvent(_)))), (1, 1));
}

#[test]
fn a_span_whose_end_is_not_told_is_asked_about_again() {
    let faults = FaultPlan::default().at(Spot::Query, 1, Fault::Refuse);
    let config = Config { faults, ..Config::times_only(Model::default()) };
    let options = Options { spans_max: 100, ..Options::default() };
    let mut rig = Rig::wrapped(config, options, |sim| Box::new(sim));
    rig.engine.begin_span(rig.on, "compute").unwrap();
    rig.second();
    rig.engine.end_span(rig.on).unwrap();
    let error = rig.engine.step().unwrap_err();
    assert_eq!((error.op(), error.call()), ("step", Some("query")), "{error}");
    rig.engine.drain().unwrap();
    let spans = rig.spans(Track::Stream(0));
    assert_eq!((spans.len(), rig.engine.stats().untimed_count), (1, 0));
    near(spans[0].time, 1.0);
}

#[test]
fn a_span_whose_times_are_refused_is_counted_and_keeps_no_other_from_its_own() {
    let mut rig =
        Rig::refusing(Options { spans_max: 100, ..Options::default() }, (Refused::Elapsed, 1));
    for name in ["first", "second"] {
        rig.engine.begin_span(rig.on, name).unwrap();
        rig.second();
        rig.engine.end_span(rig.on).unwrap();
    }
    let error = rig.engine.drain().unwrap_err();
    assert_eq!((error.op(), error.call()), ("drain", Some("elapsed")), "{error}");
    rig.engine.drain().unwrap();
    let spans = rig.spans(Track::Stream(0));
    assert_eq!((spans.len(), rig.engine.stats().untimed_count), (1, 1));
    assert_eq!(spans[0].name.as_str(), "second");
}
