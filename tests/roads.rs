//! Roads that few programs take: bytes that leave on another stream than they were filled or read
//! on, copies that follow each other on one storage, and blocks that come home while others lag.
//!
//! The faults guarded against: a verb that orders its own stream and forgets the one on which the
//! bytes were taken, a copy that is taken for over since another one of the same storage is, and a
//! block that is lent or unpinned while the last copy on it runs.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod support;

use lightering::backend::sim::{Call, Config, Schedule};
use lightering::{Acquire, Bytes, DeviceRange, Evict, Options, Storage};
use support::{Rig, options, quick_pool};

const LEN: Bytes = Bytes::kib(2);
/// Schedules tried; what most tests guard against shows in many of them.
const SEEDS: u64 = 50;

fn bounds() -> Options {
    // The framework notes its own uses: `fill` and `check` do.
    Options { trunk_bytes_max: Bytes::kib(1), prefetch_count_max: 0, note_uses: false, ..options() }
}

fn rig(seed: u64, streams: usize) -> Rig {
    let config = Config { device_bytes: Bytes::kib(64), ..Config::adversary(seed) };
    Rig::new(config, quick_pool(Bytes::mib(1)), bounds(), streams)
}

fn filled(rig: &mut Rig, s: usize, seed: u64) -> Storage {
    let storage = rig.engine.alloc(LEN, rig.streams[s].engine, "x").unwrap();
    fill(rig, s, &storage, seed);
    storage
}

fn fill(rig: &mut Rig, s: usize, storage: &Storage, seed: u64) {
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(s, range, seed);
}

fn ready(acquired: Acquire) -> DeviceRange {
    match acquired {
        Acquire::Ready(range) => range,
        Acquire::NeedsRoom(_) => panic!("the bytes are on their way"),
    }
}

fn read(rig: &mut Rig, s: usize, storage: &Storage, seed: u64) {
    let range = ready(rig.engine.acquire(storage.id(), rig.streams[s].engine).unwrap());
    rig.check(s, range, seed, format!("{seed} on stream {s}"));
}

fn send(rig: &mut Rig, s: usize, storage: &Storage) -> Evict {
    let on = rig.streams[s].engine;
    let evicted = rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    evicted
}

/// Bytes that were given back on stream `s` are somebody else's there.
fn take_over(rig: &mut Rig, s: usize) {
    let range = rig.take(s, LEN).unwrap();
    rig.fill(s, range, 99);
    rig.check(s, range, 99, "taken over".into());
    rig.assert_right();
}

#[test]
fn bytes_that_end_on_another_stream_than_they_were_read_on_outlive_the_reader() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, 2);
        let storage = filled(&mut rig, 0, 1);
        send(&mut rig, 0, &storage);
        read(&mut rig, 0, &storage, 1);
        // Nothing is copied, so that no copy stands for the reader.
        let on = rig.streams[0].engine;
        assert_eq!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Clean);
        rig.engine.release(storage, rig.streams[1].engine).unwrap();
        take_over(&mut rig, 1);
    }
}

#[test]
fn bytes_that_end_on_another_stream_than_they_were_taken_on_outlive_their_writer() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, 2);
        let storage = filled(&mut rig, 0, 5);
        rig.engine.release(storage, rig.streams[1].engine).unwrap();
        take_over(&mut rig, 1);
    }
}

#[test]
fn bytes_that_leave_on_another_stream_than_they_were_taken_on_are_whole() {
    for is_fixed in [false, true] {
        for seed in 0..SEEDS {
            let mut rig = rig(seed, 2);
            let on = rig.streams[0].engine;
            let storage = match is_fixed {
                true => rig.engine.alloc_fixed(LEN, on, "fixed").unwrap(),
                false => rig.engine.alloc(LEN, on, "x").unwrap(),
            };
            fill(&mut rig, 0, &storage, 5);
            send(&mut rig, 1, &storage);
            for _ in 0..50 {
                rig.engine.step().unwrap();
            }
            read(&mut rig, 1, &storage, 5);
            rig.assert_right();
        }
    }
}

/// Fetches a framework's storage ahead.
fn fetch(rig: &mut Rig, storage: &Storage) -> DeviceRange {
    let target = rig.take(0, LEN).unwrap();
    rig.engine.prefetch(storage.id(), target, rig.streams[0].engine).unwrap();
    target
}

#[test]
fn a_copy_in_is_not_over_since_one_before_it_that_was_cancelled_is() {
    // The device must have ended the first copy-in, and not the second, when the engine asks.
    for seed in 0..4 * SEEDS {
        let mut rig = rig(seed, 1);
        let on = rig.streams[0].engine;
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, 1);
        let storage = rig.engine.adopt(range, "y").unwrap();
        send(&mut rig, 0, &storage);
        assert_eq!(rig.engine.releasable(on).unwrap(), Some(storage.id()));
        rig.give(0, range.at());
        let target = fetch(&mut rig, &storage);
        rig.engine.cancel(storage.id(), on).unwrap();
        rig.give(0, target.at());
        fetch(&mut rig, &storage);
        for _ in 0..seed % 4 {
            rig.engine.step().unwrap();
        }
        read(&mut rig, 0, &storage, 1);
        rig.assert_right();
    }
}

#[test]
fn a_block_is_not_idle_when_the_copy_in_before_its_last_copy_out_is_over() {
    for seed in 0..4 * SEEDS {
        let mut rig = rig(seed, 1);
        let on = rig.streams[0].engine;
        let storage = filled(&mut rig, 0, 1);
        send(&mut rig, 0, &storage);
        // A writer: the bytes leave again, into another block, while their copy-in may be running.
        let range = ready(rig.engine.acquire_mut(storage.id(), on).unwrap());
        rig.fill(0, range, 2);
        rig.engine.evict(storage.id(), on).unwrap();
        read(&mut rig, 0, &storage, 2);
        rig.engine.release(storage, on).unwrap();
        for _ in 0..30 {
            rig.engine.step().unwrap();
            rig.pool.trim();
        }
        assert_eq!(rig.world.removals_refused(), 0, "unpinned under the copy-out, seed {seed}");
        rig.assert_right();
    }
}

/// Runs everything at once, but for the streams of copies in, which run when the host waits.
#[derive(Debug)]
struct NothingComesIn;

/// The simulator's numbers of those streams, of a rig with two: the engine opens its lanes first.
const INWARD: std::ops::RangeInclusive<u32> = 3..=6;

impl Schedule for NothingComesIn {
    fn choose(&mut self, _: usize) -> usize {
        0
    }

    fn pace(&mut self, _: Call) -> usize {
        usize::MAX
    }

    fn holds(&mut self, runnable: &[u32]) -> bool {
        runnable.iter().all(|stream| INWARD.contains(stream))
    }

    fn pick(&mut self, runnable: &[u32]) -> usize {
        runnable.iter().position(|stream| !INWARD.contains(stream)).unwrap_or(0)
    }
}

#[test]
fn where_events_are_short_a_block_stays_busy_beside_others_that_come_home() {
    let drop_deadline = std::time::Duration::from_millis(100);
    let bounds = Options { events_max: 8, drop_deadline, ..bounds() };
    let config = Config::scheduled(Box::new(NothingComesIn));
    let mut rig = Rig::new(config, quick_pool(Bytes::mib(1)), bounds, 2);
    // A block of a size of its own, which a copy-in still reads when its storage ends.
    let [lagging, next] = [0, 1].map(|s| {
        let len = Bytes(4 * LEN.0);
        let storage = rig.engine.alloc(len, rig.streams[s].engine, "large").unwrap();
        fill(&mut rig, s, &storage, 1 + s as u64);
        storage
    });
    send(&mut rig, 0, &lagging);
    rig.engine.drain().unwrap();
    read(&mut rig, 0, &lagging, 1);
    rig.engine.release(lagging, rig.streams[0].engine).unwrap();
    // Copies out, all of them done, of which nobody learned yet; their blocks came home, too.
    let done = [3, 4, 5, 6, 7, 8].map(|seed| {
        let storage = filled(&mut rig, 1, seed);
        assert!(matches!(send(&mut rig, 1, &storage), Evict::Moving(_)), "no event is free");
        storage
    });
    for storage in done {
        rig.engine.release(storage, rig.streams[1].engine).unwrap();
    }
    let before = rig.engine.stats().seam.queries;
    assert!(matches!(send(&mut rig, 1, &next), Evict::Moving(_)), "no event is free");
    assert!(rig.engine.stats().seam.queries > before, "events were not short");
    rig.assert_right();
}
