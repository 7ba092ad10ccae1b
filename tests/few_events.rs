//! An engine whose events are all held: by copies that nobody asks about, by moments on every
//! stream, by batches that somebody keeps.
//!
//! The faults guarded against: a verb that is refused although the device is past what holds the
//! events, as nobody asks; one that is refused for want of an event and needs none for longer than
//! the call; and bytes that are never named, since a moment on every stream takes more events than
//! are ever free at once.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, Lazy};
use lightering::engine::Batch;
use lightering::pack::Strip;
use lightering::policy::Kept;
use lightering::{
    Acquire, Bytes, DeviceRange, Error, Evict, Kind, Options, Residency, Storage, Tier,
};
use support::{Rig, options, small_pool};

const LEN: Bytes = Bytes::kib(2);
const AWAY: Residency = Residency::Evicted(Tier::Host);
const ROW: Bytes = Bytes(64);
/// The fewest there may be.
const EVENTS: usize = 8;
/// One is the engine's own, to order streams.
const COPIES_MAX: usize = EVENTS - 1;
/// A verb that is short of events asks no more than about each of them once, and three lanes.
const QUESTIONS_MAX: u64 = 2 * EVENTS as u64;

/// A rig on a device that runs nothing until it must, with the fewest events there can be.
fn rig(streams: usize) -> Rig {
    let bounds = Options {
        events_max: EVENTS,
        step_queries_max: 1,
        note_uses: false,
        prefetch_count_max: 0,
        ahead_trunk_bytes_max: Bytes::kib(1),
        ..options()
    };
    Rig::new(
        Config::scheduled(Box::new(Lazy::default())),
        small_pool(Bytes::mib(1)),
        bounds,
        streams,
    )
}

/// Owned bytes that were filled, and are resident for each of `streams`.
fn owned(rig: &mut Rig, streams: &[usize], seed: u64) -> Storage {
    let storage = rig.engine.alloc(LEN, rig.streams[streams[0]].engine, "owned").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(streams[0], range, seed);
    for s in streams {
        rig.order(streams[0], *s);
        rig.engine.acquire(storage.id(), rig.streams[*s].engine).unwrap();
    }
    storage
}

/// A framework's bytes.
fn adopted(rig: &mut Rig, s: usize, seed: u64) -> (Storage, DeviceRange) {
    let range = rig.take(s, LEN).unwrap();
    rig.fill(s, range, seed);
    (rig.engine.adopt(range, "adopted").unwrap(), range)
}

fn evict(rig: &mut Rig, s: usize, storage: &Storage) -> Evict {
    rig.engine.evict(storage.id(), rig.streams[s].engine).unwrap()
}

fn flush(rig: &mut Rig, s: usize) {
    rig.engine.flush(rig.streams[s].engine).unwrap();
}

/// The device does all it was asked for, and it is asked for some rounds what may go on a stream.
fn until_named(rig: &mut Rig, s: usize, storage: &Storage) {
    let named = (0..=rig.streams.len()).any(|_| {
        rig.sim.sync().unwrap();
        rig.engine.releasable(rig.streams[s].engine).unwrap() == Some(storage.id())
    });
    assert!(named, "its bytes are never named");
}

/// What verbs are asked for below, made while events were free.
struct Things {
    /// Owned, and not evicted yet.
    fresh: Storage,
    /// Owned, with a current host copy, and read on two streams.
    clean: Storage,
    /// Owned, and read on two streams.
    ended: Option<Storage>,
    /// Owned, and on the host.
    away: Storage,
    /// A framework's, on the host, and room for it.
    theirs: Storage,
    target: DeviceRange,
    rows: DeviceRange,
    batch: Batch,
    more: Vec<Batch>,
}

fn things(rig: &mut Rig) -> Things {
    let on = rig.streams[0].engine;
    let (fresh, clean) = (owned(rig, &[0], 1), owned(rig, &[0], 2));
    let (ended, away) = (Some(owned(rig, &[0, 1], 3)), owned(rig, &[0], 4));
    let (theirs, range) = adopted(rig, 0, 5);
    for storage in [&clean, &away, &theirs] {
        assert!(matches!(evict(rig, 0, storage), Evict::Moving(_)));
        flush(rig, 0);
        rig.engine.drain().unwrap();
    }
    until_named(rig, 0, &theirs);
    rig.give(0, range.at());
    for s in 0..2 {
        rig.engine.acquire(clean.id(), rig.streams[s].engine).unwrap();
    }
    let target = rig.take(0, LEN).unwrap();
    let rows = rig.take(0, LEN).unwrap();
    rig.fill(0, rows, 6);
    let batch = rig.engine.gather(&strips(rows), on, "rows").unwrap();
    rig.engine.drain().unwrap();
    Things { fresh, clean, ended, away, theirs, target, rows, batch, more: Vec::new() }
}

fn strips(within: DeviceRange) -> [Strip; 1] {
    [Strip::rows(within, Bytes::ZERO, ROW, 8, Bytes(2 * ROW.0)).unwrap()]
}

/// A framework's storages, evicted on streams.
type Crowd = Vec<(usize, Storage)>;

/// Moments on every stream, of two streams' evictions, and copies out hold every event. None of it
/// is passed before the device is waited for.
fn crowd(rig: &mut Rig) -> Crowd {
    let mut evicted = Vec::new();
    for s in 0..2 {
        let (storage, _) = adopted(rig, s, 7);
        assert!(matches!(evict(rig, s, &storage), Evict::Moving(_)));
        flush(rig, s);
        evicted.push((s, storage));
    }
    rig.engine.drain().unwrap();
    for s in 0..rig.streams.len() {
        let scratch = rig.take(s, LEN).unwrap();
        rig.fill(s, scratch, 8);
    }
    for s in 0..2 {
        assert_eq!(rig.engine.releasable(rig.streams[s].engine), Ok(None));
    }
    let is_kept = (0..EVENTS).any(|_| {
        let (storage, _) = adopted(rig, 2, 9);
        let became = evict(rig, 2, &storage);
        evicted.push((2, storage));
        became == Evict::Kept(Kept::LaneFull)
    });
    assert!(is_kept, "there are events left");
    evicted
}

/// A verb, and what it is done with.
type Verb = fn(&mut Rig, &mut Things) -> bool;

/// Was it done? It may be refused for the want of events alone.
fn is_done<T>(result: Result<T, Error>) -> bool {
    match result {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.kind(), Kind::Busy, "{error}");
            assert!(error.to_string().contains("every event is in use"), "{error}");
            false
        }
    }
}

/// Those that need an event for as long as a copy runs.
const COPIES: &[(&str, Verb)] = &[
    ("evict", |rig, things| match evict(rig, 0, &things.fresh) {
        Evict::Moving(_) => true,
        Evict::Kept(Kept::LaneFull) => false,
        other => panic!("{other:?}"),
    }),
    ("acquire", |rig, things| {
        let got = is_done(rig.engine.acquire(things.away.id(), rig.streams[1].engine));
        assert_eq!(rig.engine.residency(things.away.id()).unwrap() == AWAY, !got);
        got
    }),
    ("refill", |rig, things| {
        let on = rig.streams[0].engine;
        let got = is_done(rig.engine.refill(things.theirs.id(), things.target, on));
        assert_eq!(rig.engine.residency(things.theirs.id()).unwrap() == AWAY, !got);
        got
    }),
    ("prefetch", |rig, things| {
        let on = rig.streams[0].engine;
        is_done(rig.engine.prefetch(things.theirs.id(), things.target, on))
    }),
    ("gather", |rig, things| {
        let on = rig.streams[0].engine;
        let gathered = rig.engine.gather(&strips(things.rows), on, "rows");
        is_done(gathered.map(|batch| things.more.push(batch)))
    }),
    ("scatter", |rig, things| {
        let on = rig.streams[0].engine;
        is_done(rig.engine.scatter(&mut things.batch, &strips(things.rows), on))
    }),
];

/// Those that need one for the call alone, or can do later what they need one for.
const OTHERS: &[(&str, Verb)] = &[
    ("evict, clean", |rig, things| evict(rig, 0, &things.clean) == Evict::Clean),
    ("release", |rig, things| {
        let ended = things.ended.take().unwrap();
        rig.engine.release(ended, rig.streams[0].engine).is_ok()
    }),
    ("give_way", |rig, _| rig.engine.give_way(rig.streams[0].engine).is_ok()),
    ("releasable", |rig, _| rig.engine.releasable(rig.streams[2].engine).is_ok()),
    ("flush", |rig, _| rig.engine.flush(rig.streams[2].engine).is_ok()),
    ("step", |rig, _| rig.engine.step().is_ok()),
    ("mark_step", |rig, _| rig.engine.mark_step().is_ok()),
];

/// Everything that was evicted is named, and every byte was right.
fn end(mut rig: Rig, things: Things, crowd: Crowd) {
    let Things { batch, more, .. } = things;
    for batch in more.into_iter().chain([batch]) {
        rig.engine.discard(batch).unwrap();
    }
    for s in 0..rig.streams.len() {
        flush(&mut rig, s);
    }
    for (s, storage) in &crowd {
        if rig.engine.residency(storage.id()) == Ok(Residency::Evicting) {
            until_named(&mut rig, *s, storage);
        }
    }
    rig.assert_right();
}

#[test]
fn what_the_device_is_past_keeps_no_event_from_any_verb() {
    for (name, verb) in COPIES.iter().chain(OTHERS) {
        let mut rig = rig(3);
        let mut things = things(&mut rig);
        let crowd = crowd(&mut rig);
        rig.sim.sync().unwrap();
        assert!(verb(&mut rig, &mut things), "{name}: refused, and all is done");
        end(rig, things, crowd);
    }
}

#[test]
fn where_the_device_is_past_nothing_copies_are_refused_and_nothing_else() {
    for (nth, (name, verb)) in COPIES.iter().chain(OTHERS).enumerate() {
        let is_copy = nth < COPIES.len();
        let mut rig = rig(3);
        let mut things = things(&mut rig);
        let crowd = crowd(&mut rig);
        let before = rig.engine.stats().seam;
        assert_eq!(verb(&mut rig, &mut things), !is_copy, "{name}");
        let after = rig.engine.stats().seam;
        let asked = after.queries - before.queries;
        assert!(asked <= QUESTIONS_MAX, "{name}: {asked} questions");
        assert_eq!(after.syncs, before.syncs, "{name}: the host waited");
        if is_copy {
            rig.sim.sync().unwrap();
            assert!(verb(&mut rig, &mut things), "{name}: refused, and all is done");
        }
        end(rig, things, crowd);
    }
}

/// Begins copies out until no event is left. Says how many.
fn begun(rig: &mut Rig) -> usize {
    let is_begun = |_: &usize| {
        let storage = owned(rig, &[0], 9);
        matches!(evict(rig, 0, &storage), Evict::Moving(_))
    };
    (0..2 * EVENTS).take_while(is_begun).count()
}

#[test]
fn a_copy_that_is_done_is_learned_of_at_once_however_few_questions_a_step_has() {
    let mut rig = rig(1);
    let away = owned(&mut rig, &[0], 1);
    evict(&mut rig, 0, &away);
    flush(&mut rig, 0);
    rig.engine.drain().unwrap();
    assert_eq!(begun(&mut rig), COPIES_MAX);
    rig.sim.sync().unwrap();
    // It takes two, and a copy holds one.
    let got = rig.engine.acquire(away.id(), rig.streams[0].engine).unwrap();
    let Acquire::Ready(range) = got else { panic!("{got:?}") };
    rig.check(0, range, 1, "what came back".into());
    assert!(rig.engine.stats().seam.events_opened <= EVENTS as u64);
    drop(away);
    rig.assert_right();
    rig.assert_nothing_left();
}

/// Has events held.
type Holder = fn(&mut Rig, &mut Things);

const HOLDERS: &[(&str, Holder)] = &[
    ("nobody", |_, _| {}),
    ("copies out", |rig, _| assert_eq!(begun(rig), COPIES_MAX)),
    ("tables", |rig, things| {
        let before = rig.engine.stats().seam.launches;
        while COPIES[4].1(rig, things) {}
        assert_eq!(rig.engine.stats().seam.launches - before, COPIES_MAX as u64);
    }),
    ("a lane's turn", |rig, things| {
        let before = rig.engine.stats().seam.records;
        assert!(COPIES[3].1(rig, things));
        // Room was taken, a turn ended, and the copy.
        assert_eq!(rig.engine.stats().seam.records - before, 3);
    }),
    ("a moment that bytes wait for", |rig, _| {
        let (storage, _) = adopted(rig, 0, 7);
        evict(rig, 0, &storage);
        flush(rig, 0);
        rig.engine.drain().unwrap();
        let scratch = rig.take(1, LEN).unwrap();
        rig.fill(1, scratch, 8);
        assert_eq!(rig.engine.releasable(rig.streams[0].engine), Ok(None));
    }),
    ("a moment that a mapping waits for", |rig, _| {
        let on = rig.streams[0].engine;
        let weights = rig.engine.alloc_fixed(LEN, on, "weights").unwrap();
        let at = rig.engine.range(weights.id()).unwrap();
        rig.fill(0, at, 7);
        evict(rig, 0, &weights);
        flush(rig, 0);
        rig.sim.sync().unwrap();
        let scratch = rig.take(1, LEN).unwrap();
        rig.fill(1, scratch, 8);
        rig.engine.step().unwrap();
        assert!(rig.engine.stats().mapped_bytes > 0);
    }),
];

#[test]
fn whoever_held_events_holds_none_once_the_device_is_past_it() {
    for (name, holder) in HOLDERS {
        let mut rig = rig(3);
        let mut things = things(&mut rig);
        holder(&mut rig, &mut things);
        rig.sim.sync().unwrap();
        assert_eq!(begun(&mut rig), COPIES_MAX, "{name}");
        end(rig, things, Vec::new());
    }
}

#[test]
fn a_batch_that_somebody_keeps_holds_no_event() {
    let mut rig = rig(1);
    let on = rig.streams[0].engine;
    let rows = rig.take(0, LEN).unwrap();
    rig.fill(0, rows, 1);
    let mut kept: Vec<Batch> = Vec::new();
    for nth in 0..3 * EVENTS {
        let mut batch = rig.engine.gather(&strips(rows), on, "rows").unwrap();
        rig.engine.scatter(&mut batch, &strips(rows), on).unwrap();
        kept.push(batch);
        if nth % 2 == 1 {
            rig.sim.sync().unwrap();
        }
    }
    for mut batch in kept {
        rig.engine.gathered(&batch, on).unwrap();
        rig.engine.scatter(&mut batch, &strips(rows), on).unwrap();
        rig.engine.discard(batch).unwrap();
        rig.sim.sync().unwrap();
    }
    rig.check(0, rows, 1, "what was gathered and scattered".into());
    rig.give(0, rows.at());
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_moment_on_more_streams_than_there_are_events_is_marked_in_parts() {
    let mut rig = rig(2 * EVENTS);
    let all: Vec<usize> = (0..2 * EVENTS).collect();
    let everybodys = owned(&mut rig, &all, 1);
    let (theirs, range) = adopted(&mut rig, 0, 2);
    assert!(matches!(evict(&mut rig, 0, &everybodys), Evict::Moving(_)), "all streams used it");
    assert!(matches!(evict(&mut rig, 0, &theirs), Evict::Moving(_)));
    flush(&mut rig, 0);
    until_named(&mut rig, 0, &theirs);
    rig.give(0, range.at());
    rig.assert_right();
}

#[test]
fn bytes_at_a_fixed_address_are_unmapped_though_others_hold_the_events() {
    let mut rig = rig(3);
    let on = rig.streams[0].engine;
    let weights = rig.engine.alloc_fixed(LEN, on, "weights").unwrap();
    let at = rig.engine.range(weights.id()).unwrap();
    rig.fill(0, at, 1);
    assert!(matches!(evict(&mut rig, 0, &weights), Evict::Moving(_)));
    let things = things(&mut rig);
    let crowd = crowd(&mut rig);
    flush(&mut rig, 0);
    for _ in 0..3 {
        rig.sim.sync().unwrap();
        rig.engine.step().unwrap();
    }
    assert_eq!(rig.engine.residency(weights.id()).unwrap(), AWAY);
    rig.engine.acquire(weights.id(), on).unwrap();
    rig.check(0, at, 1, "the weights".into());
    end(rig, things, crowd);
}
