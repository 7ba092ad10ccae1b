//! Bad input at every verb that takes a stream or a range: a lane of the engine's own, a stream of
//! somebody else's, one under capture, a range of no bytes, of the wrong length, or over another
//! storage's, strips that alias or share bytes.
//!
//! The fault guarded against: a verb that enqueues a part of what it does before it looks at what
//! it was given, so that a refusal leaves a record, a wait or a copy behind.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use lightering::backend::Backend;
use lightering::backend::sim::Lazy;
use lightering::engine::Batch;
use lightering::pack::Strip;
use lightering::trace::{Counters, Op, Use};
use lightering::{
    Bytes, DevicePtr, DeviceRange, Evict, Misuse, Options, Result, Storage, StreamId,
};
use support::Rig;

const LEN: Bytes = Bytes::kib(2);

/// One storage in each state that a verb may be asked about, and a batch.
struct Scene {
    rig: Rig,
    on: StreamId,
    resident: Storage,
    away: Storage,
    coming: Storage,
    batch: Batch,
    /// Room of a framework's that nothing is in.
    room: DeviceRange,
    strip: Strip,
}

fn scene() -> Scene {
    let options = Options { spans_max: 16, ring_records: 1 << 12, ..support::options() };
    let config = lightering::backend::sim::Config::adversary(11);
    let mut rig = Rig::new(config, support::quick_pool(Bytes::mib(1)), options, 1);
    let on = rig.streams[0].engine;
    let take = |rig: &mut Rig| {
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, 1);
        range
    };
    let ranges = [0; 5].map(|_| take(&mut rig));
    let [resident, away, coming] = [0, 1, 2].map(|nth| rig.engine.adopt(ranges[nth], "x").unwrap());
    for storage in [&away, &coming] {
        rig.engine.evict(storage.id(), on).unwrap();
    }
    rig.engine.flush(on).unwrap();
    while rig.engine.releasable(on).unwrap().is_some() {}
    rig.engine.prefetch(coming.id(), ranges[2], on).unwrap();
    let strip = Strip::whole(ranges[4]).unwrap();
    let batch = rig.engine.gather(&[strip], on, "rows").unwrap();
    rig.engine.drain().unwrap();
    Scene { rig, on, resident, away, coming, batch, room: ranges[3], strip }
}

type Verb = (&'static str, fn(&mut Scene, StreamId) -> Result<()>);

const VERBS: &[Verb] = &[
    ("alloc", |s, on| s.rig.engine.alloc(LEN, on, "x").map(drop)),
    ("alloc_fixed", |s, on| s.rig.engine.alloc_fixed(LEN, on, "x").map(drop)),
    ("acquire_mut", |s, on| s.rig.engine.acquire_mut(s.coming.id(), on).map(drop)),
    ("rest", |s, on| s.rig.engine.rest(s.resident.id(), on).map(drop)),
    ("offer", |s, on| s.rig.engine.offer(s.resident.id(), on).map(drop)),
    ("evict", |s, on| s.rig.engine.evict(s.resident.id(), on).map(drop)),
    ("acquire", |s, on| s.rig.engine.acquire(s.coming.id(), on).map(drop)),
    ("refill", |s, on| s.rig.engine.refill(s.away.id(), s.room, on).map(drop)),
    ("prefetch", |s, on| s.rig.engine.prefetch(s.away.id(), s.room, on)),
    ("cancel", |s, on| s.rig.engine.cancel(s.coming.id(), on)),
    ("wanted", |s, on| s.rig.engine.wanted(on).map(drop)),
    ("releasable", |s, on| s.rig.engine.releasable(on).map(drop)),
    ("flush", |s, on| s.rig.engine.flush(on)),
    ("give_way", |s, on| s.rig.engine.give_way(on)),
    ("gather", |s, on| s.rig.engine.gather(&[s.strip], on, "x").map(drop)),
    ("gathered", |s, on| s.rig.engine.gathered(&s.batch, on)),
    ("scatter", |s, on| s.rig.engine.scatter(&mut s.batch, &[s.strip], on)),
    ("begin_span", |s, on| s.rig.engine.begin_span(on, "x")),
    ("end_span", |s, on| s.rig.engine.end_span(on)),
];

/// What was asked of the device; questions and refusals may be more.
fn asked(scene: &Scene) -> Counters {
    Counters { queries: 0, failures: 0, ..scene.rig.engine.stats().seam }
}

/// Each verb refuses the stream by that name, and asked the device for nothing.
#[track_caller]
fn each_refuses(scene: &mut Scene, stream: StreamId, misuse: Misuse) {
    for (name, verb) in VERBS {
        let before = asked(scene);
        let refused = verb(scene, stream).err().and_then(|error| error.misuse());
        assert_eq!(refused, Some(misuse), "{name}");
        assert_eq!(asked(scene), before, "{name} enqueued something first");
    }
}

/// After all refusals everything is as it was: each verb works.
#[track_caller]
fn all_is_as_before(mut scene: Scene) {
    let on = scene.on;
    for wanted in ["acquire", "prefetch", "scatter", "evict"] {
        let (_, verb) = VERBS.iter().find(|(name, _)| *name == wanted).unwrap();
        verb(&mut scene, on).unwrap();
    }
    let Scene { mut rig, batch, .. } = scene;
    rig.engine.discard(batch).unwrap();
    rig.engine.drain().unwrap();
    rig.sim.sync().unwrap();
    assert!(rig.hazards().is_empty(), "{:?}", rig.hazards());
}

#[test]
fn no_verb_takes_a_lane_for_a_stream_of_the_frameworks() {
    let mut scene = scene();
    let opened = |op: Op| if let Op::OpenStream(stream) = op { Some(stream) } else { None };
    let on = scene.on;
    let lanes: Vec<StreamId> = scene
        .rig
        .engine
        .recent()
        .filter_map(|record| opened(record.op))
        .filter(|stream| *stream != on)
        .collect();
    assert_eq!(lanes.len(), 5, "out, three for copies ahead, urgent");
    for lane in lanes {
        each_refuses(&mut scene, lane, Misuse::SameStream);
    }
    all_is_as_before(scene);
}

#[test]
fn no_verb_takes_a_stream_it_was_not_told_of() {
    let mut scene = scene();
    let stranger = scene.rig.sim.create_stream().unwrap();
    each_refuses(&mut scene, stranger, Misuse::Foreign);
    all_is_as_before(scene);
}

#[test]
fn no_verb_enqueues_on_a_stream_under_capture() {
    let mut scene = scene();
    let (on, here) = (scene.on, scene.rig.streams[0].here);
    scene.rig.sim.inner().set_capturing(here, true).unwrap();
    each_refuses(&mut scene, on, Misuse::Capturing);
    scene.rig.sim.inner().set_capturing(here, false).unwrap();
    all_is_as_before(scene);
}

#[test]
fn a_stream_of_another_context_is_not_adopted() {
    let mut scene = scene();
    let mut other = scene.rig.world.device(1).unwrap();
    let stream = other.create_stream().unwrap();
    let raw = other.raw_stream(stream).unwrap();
    let before = asked(&scene);
    let refused = scene.rig.engine.adopt_stream(raw).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::WrongDevice));
    assert_eq!(asked(&scene), before);
    all_is_as_before(scene);
}

#[test]
fn ranges_of_no_bytes_of_other_lengths_or_over_others_are_refused() {
    let mut scene = scene();
    let (on, room) = (scene.on, scene.room);
    let part = |from: u64, len: u64| room.part(Bytes(from), Bytes(len)).unwrap();
    let taken = scene.rig.engine.range(scene.resident.id()).unwrap();
    // Half of it is a resident storage's.
    let over = DeviceRange::new(DevicePtr(taken.at().0 + LEN.0 / 2), LEN).unwrap();
    let id = scene.away.id();
    let before = asked(&scene);
    let mut said = Vec::new();
    for target in [part(0, LEN.0 / 2), part(0, 0), over] {
        let engine = &mut scene.rig.engine;
        said.push(engine.refill(id, target, on).unwrap_err().misuse());
        said.push(engine.prefetch(id, target, on).unwrap_err().misuse());
    }
    let [length, overlap] = [Misuse::LengthMismatch, Misuse::Overlap].map(Some);
    assert_eq!(said, [length, length, length, length, overlap, overlap]);
    let engine = &mut scene.rig.engine;
    assert_eq!(engine.adopt(part(0, 0), "x").unwrap_err().misuse(), Some(Misuse::Empty));
    assert_eq!(engine.adopt(over, "x").unwrap_err().misuse(), overlap);
    assert_eq!(engine.alloc(Bytes::ZERO, on, "x").unwrap_err().misuse(), Some(Misuse::Empty));
    let wraps = DeviceRange::new(DevicePtr(u64::MAX - 8), LEN).unwrap_err();
    assert_eq!(wraps.misuse(), Some(Misuse::TooLarge));
    assert_eq!(asked(&scene), before);
    all_is_as_before(scene);
}

#[test]
fn strips_that_alias_leave_their_allocation_or_share_bytes_are_refused() {
    let mut scene = scene();
    let (on, room) = (scene.on, scene.room);
    let rows = |offset: u64, row: u64, count: u64, stride: u64| {
        Strip::rows(room, Bytes(offset), Bytes(row), count, Bytes(stride))
    };
    for (strip, misuse) in [
        (rows(0, 64, 4, 63), Misuse::Overlap),
        (rows(0, 64, 4, 1024), Misuse::OutOfRange),
        (rows(LEN.0 - 8, 64, 1, 0), Misuse::OutOfRange),
        (rows(0, 64, u64::MAX, u64::MAX), Misuse::OutOfRange),
        (rows(0, 0, 4, 64), Misuse::Empty),
        (rows(0, 64, 0, 64), Misuse::Empty),
    ] {
        assert_eq!(strip.unwrap_err().misuse(), Some(misuse));
    }
    let before = asked(&scene);
    let two = [rows(0, 64, 2, 128).unwrap(), rows(96, 64, 1, 0).unwrap()];
    let engine = &mut scene.rig.engine;
    let shared = engine.gather(&two, on, "x").unwrap_err();
    assert_eq!(shared.misuse(), Some(Misuse::Overlap));
    let shared = engine.scatter(&mut scene.batch, &two, on).unwrap_err();
    assert_eq!(shared.misuse(), Some(Misuse::Overlap));
    assert_eq!(engine.gather(&[], on, "x").unwrap_err().misuse(), Some(Misuse::Empty));
    assert_eq!(asked(&scene), before);
    all_is_as_before(scene);
}

/// Nothing can be ordered on a stream under capture: a note of two writes, of which only the second
/// has to be, is refused whole.
#[test]
fn a_note_that_is_refused_leaves_every_host_copy_as_it_was() {
    let config = lightering::backend::sim::Config::scheduled(Box::new(Lazy::default()));
    let mut rig = Rig::new(config, support::quick_pool(Bytes::mib(1)), support::options(), 1);
    let (on, here) = (rig.streams[0].engine, rig.streams[0].here);
    let [kept, leaving] = [1, 2].map(|seed| {
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, seed);
        (rig.engine.adopt(range, "x").unwrap(), range)
    });
    rig.engine.evict(kept.0.id(), on).unwrap();
    rig.engine.acquire(kept.0.id(), on).unwrap();
    rig.engine.drain().unwrap();
    rig.engine.evict(leaving.0.id(), on).unwrap();
    rig.sim.inner().set_capturing(here, true).unwrap();
    let uses = [kept.1, leaving.1].map(Use::write);
    let refused = rig.engine.note(on, &uses).unwrap_err();
    rig.sim.inner().set_capturing(here, false).unwrap();
    assert_eq!(refused.misuse(), Some(Misuse::Capturing));
    assert_eq!(rig.engine.evict(kept.0.id(), on).unwrap(), Evict::Clean);
    rig.engine.drain().unwrap();
    rig.assert_right();
}
