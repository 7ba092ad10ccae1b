//! Times of copies and of what a framework names, read off the device.
//!
//! The fault guarded against: times of the host's instead of the device's, spans on axes of their
//! own, a timeline that grows with the run, and a step that is slower because it is timed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

use lightering::backend::sim::{Config, Model, Sim, World};
use lightering::backend::{Backend, Cost, Grid, Kernel, Work};
use lightering::engine::{Span, Track};
use lightering::{Budget, Bytes, Engine, Options, PinnedPool, PoolOptions, StreamId};
use std::time::Duration;

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
        let world = World::new(Config::times_only(Model::default()));
        let mut sim = world.device(0).unwrap();
        let budget = PoolOptions { budget: Budget::Bytes(Bytes::gib(1)), ..PoolOptions::default() };
        let pool = PinnedPool::new(sim.pinner(), budget).unwrap();
        let mut engine = Engine::new(Box::new(world.device(0).unwrap()), &pool, options).unwrap();
        let here = sim.create_stream().unwrap();
        let on = engine.adopt_stream(sim.raw_stream(here).unwrap()).unwrap();
        Rig { sim, engine, here, on }
    }

    /// A second of compute, then a storage out and back.
    fn round(&mut self, name: &str) {
        let on = self.on;
        self.engine.begin_span(on, "compute").unwrap();
        let storage = self.engine.alloc(LEN, on, name).unwrap();
        self.sim.launch(&SECOND, Grid::row(1, 1), &[], self.here).unwrap();
        self.engine.end_span(on).unwrap();
        self.engine.evict(storage.id(), on).unwrap();
        self.engine.flush(on).unwrap();
        self.engine.acquire(storage.id(), on).unwrap();
        self.engine.release(storage, on).unwrap();
        self.engine.step().unwrap();
    }

    fn spans(&self, track: Track) -> Vec<Span> {
        self.engine.spans().filter(|span| span.track == track).copied().collect()
    }
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
