//! The same circumstances with the engine between: whatever the schedule, the order is kept.
//!
//! What it is not: a list of what the engine can do.
//!
//! Invariant: each ends with the bytes right, no hazard in the trace, and nothing left.
//!
//! ```text
//!   m06(rig): the handle goes right behind the eviction   -> the block and the bytes stay as long
//! ```

use crate::support::{Rig, first_wrong, options};
use lightering::backend::Backend;
use lightering::trace::Use;
use lightering::{Acquire, Bytes, DeviceRange, Kind, Misuse, Options, Storage};

const LEN: Bytes = Bytes::kib(2);

/// A storage of the engine's own that a kernel on stream `s` has filled.
fn filled(rig: &mut Rig, s: usize, seed: u64) -> Storage {
    let storage = rig.engine.alloc(LEN, rig.streams[s].engine, "x").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(s, range, seed);
    storage
}

/// A framework's own bytes, likewise.
fn adopted(rig: &mut Rig, s: usize, seed: u64) -> (Storage, DeviceRange) {
    let range = rig.take(s, LEN).unwrap();
    rig.fill(s, range, seed);
    (rig.engine.adopt(range, "y").unwrap(), range)
}

fn evict(rig: &mut Rig, s: usize, storage: &Storage) {
    rig.engine.evict(storage.id(), rig.streams[s].engine).unwrap();
}

fn flush(rig: &mut Rig, s: usize) {
    rig.engine.flush(rig.streams[s].engine).unwrap();
}

fn acquire(rig: &mut Rig, s: usize, storage: &Storage) -> DeviceRange {
    match rig.engine.acquire(storage.id(), rig.streams[s].engine).unwrap() {
        Acquire::Ready(range) => range,
        Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
    }
}

fn read(rig: &mut Rig, s: usize, storage: &Storage, seed: u64) {
    let range = acquire(rig, s, storage);
    rig.check(s, range, seed, format!("{seed} on stream {s}"));
}

fn release(rig: &mut Rig, s: usize, storage: Storage) {
    rig.engine.release(storage, rig.streams[s].engine).unwrap();
}

/// Leaves, and is gone from the device.
fn away(rig: &mut Rig, s: usize, seed: u64) -> Storage {
    let storage = filled(rig, s, seed);
    evict(rig, s, &storage);
    flush(rig, s);
    storage
}

pub(crate) fn m01(rig: &mut Rig) {
    let tensor = away(rig, 0, 1);
    // Its copy-out may be running; the reload is on another stream.
    read(rig, 1, &tensor, 1);
    release(rig, 1, tensor);
}

pub(crate) fn m02(rig: &mut Rig) {
    let layers: Vec<Storage> = (0..6).map(|seed| away(rig, 0, seed)).collect();
    for (seed, layer) in layers.into_iter().enumerate().rev() {
        read(rig, 0, &layer, seed as u64);
        release(rig, 0, layer);
    }
}

pub(crate) fn m04(rig: &mut Rig) {
    for (s, seed) in [(0, 1), (1, 2), (0, 3)] {
        let tensor = away(rig, s, seed);
        read(rig, 1 - s, &tensor, seed);
        release(rig, 1 - s, tensor);
    }
}

pub(crate) fn m05(rig: &mut Rig) {
    let source = filled(rig, 0, 1);
    let clone = filled(rig, 0, 2);
    evict(rig, 0, &clone);
    flush(rig, 0);
    read(rig, 0, &clone, 2);
    for storage in [source, clone] {
        release(rig, 0, storage);
    }
}

pub(crate) fn m06(rig: &mut Rig) {
    let tensor = filled(rig, 0, 1);
    evict(rig, 0, &tensor);
    drop(tensor);
    let other = filled(rig, 0, 2);
    read(rig, 0, &other, 2);
    release(rig, 0, other);
}

pub(crate) fn m07(rig: &mut Rig) {
    // The simulated device numbers queues one after the other; the lanes were opened first.
    let raw = rig.sim.raw_stream(rig.streams[0].here).unwrap();
    let lanes = (1..=3).map(|back| raw - back * ((1 << 20 | 1) << 4));
    for lane in lanes {
        let refused = rig.engine.adopt_stream(lane).unwrap_err();
        assert_eq!(refused.misuse(), Some(Misuse::SameStream));
    }
    m05(rig);
}

pub(crate) fn m08(rig: &mut Rig) {
    let layer = away(rig, 0, 1);
    read(rig, 0, &layer, 1);
    release(rig, 0, layer);
}

pub(crate) fn m09(rig: &mut Rig) {
    let whole = filled(rig, 0, 1);
    let range = rig.engine.range(whole.id()).unwrap();
    rig.engine.note(rig.streams[0].engine, &[Use::write(range)]).unwrap();
    rig.fill(0, range, 2);
    evict(rig, 0, &whole);
    flush(rig, 0);
    read(rig, 0, &whole, 2);
    release(rig, 0, whole);
}

/// Drops what the engine names, and uses the bytes again at once.
fn resize(rig: &mut Rig, s: usize, storage: &Storage, range: DeviceRange) {
    let on = rig.streams[s].engine;
    let named = (0..100_000).find_map(|_| rig.engine.releasable(on).unwrap());
    assert_eq!(named, Some(storage.id()));
    rig.give(s, range.at());
    let other = rig.take(s, LEN).unwrap();
    rig.fill(s, other, 99);
    rig.check(s, other, 99, "recycled".into());
    rig.give(s, other.at());
}

pub(crate) fn m10(rig: &mut Rig) {
    let (tensor, range) = adopted(rig, 0, 1);
    evict(rig, 0, &tensor);
    flush(rig, 0);
    resize(rig, 0, &tensor, range);
    let target = rig.take(0, LEN).unwrap();
    rig.engine.refill(tensor.id(), target, rig.streams[0].engine).unwrap();
    rig.check(0, target, 1, "refilled".into());
    release(rig, 0, tensor);
    rig.give(0, target.at());
}

pub(crate) fn m11(rig: &mut Rig) {
    for round in 0..4 {
        let pair =
            [2 * round, 2 * round + 1].map(|seed| (seed, away(rig, round as usize % 2, seed)));
        for (seed, tensor) in pair {
            read(rig, seed as usize % 2, &tensor, seed);
            release(rig, seed as usize % 2, tensor);
        }
    }
}

pub(crate) fn m12(rig: &mut Rig) {
    let bucket = filled(rig, 0, 1);
    rig.order(0, 1);
    let range = acquire(rig, 1, &bucket);
    rig.engine.note(rig.streams[1].engine, &[Use::write(range)]).unwrap();
    rig.fill(1, range, 2);
    rig.check(1, range, 2, "reduced".into());
    release(rig, 0, bucket);
    let other = filled(rig, 0, 3);
    read(rig, 0, &other, 3);
    release(rig, 0, other);
}

pub(crate) fn m13(rig: &mut Rig) {
    let gradient = filled(rig, 0, 1);
    evict(rig, 0, &gradient);
    let mut bytes = vec![0; LEN.0 as usize];
    let read =
        (0..100_000).find(|_| match rig.engine.read_host(gradient.id(), Bytes::ZERO, &mut bytes) {
            Ok(()) => true,
            Err(error) => {
                assert_eq!(error.kind(), Kind::Busy);
                false
            }
        });
    assert!(read.is_some());
    assert_eq!(first_wrong(&bytes, 1), None);
    release(rig, 0, gradient);
}

pub(crate) fn m16(rig: &mut Rig) {
    // The pool has one block.
    for seed in 0..4 {
        let s = seed as usize % 2;
        let tensor = filled(rig, s, seed);
        // A busy block of its size is taken behind its last copy.
        evict(rig, s, &tensor);
        flush(rig, s);
        read(rig, s, &tensor, seed);
        release(rig, s, tensor);
    }
}

pub(crate) fn m17(rig: &mut Rig) {
    let block = away(rig, 0, 1);
    read(rig, 0, &block, 1);
    read(rig, 1, &block, 1);
    evict(rig, 0, &block);
    flush(rig, 0);
    let other = away(rig, 0, 2);
    read(rig, 0, &other, 2);
    for storage in [block, other] {
        release(rig, 0, storage);
    }
}

pub(crate) fn m19(rig: &mut Rig) {
    let block = away(rig, 0, 1);
    let read_now = filled(rig, 0, 2);
    read(rig, 0, &read_now, 2);
    release(rig, 0, read_now);
    // Into the bytes that the kernel may still be reading.
    read(rig, 0, &block, 1);
    release(rig, 0, block);
}

/// Two devices at once, each with an engine, over one pool: every wait is for an event of the
/// device it is on.
pub(crate) fn m22(rig: &mut Rig) {
    let bounds = Options {
        note_uses: false,
        unreleased_bytes_max: Bytes::ZERO,
        trunk_bytes_max: Bytes::kib(1),
        ..options()
    };
    let mut other = rig.beside(1, bounds, 2);
    for round in 0..4 {
        let (s, seed) = (round as usize % 2, 10 * round);
        let here = filled(rig, s, seed);
        let there = filled(&mut other, s, seed + 1);
        evict(rig, s, &here);
        evict(&mut other, s, &there);
        flush(rig, s);
        flush(&mut other, s);
        // On the stream that did not write them: each behind an event of its own device.
        read(rig, 1 - s, &here, seed);
        read(&mut other, 1 - s, &there, seed + 1);
        release(&mut other, 1 - s, there);
        release(rig, 1 - s, here);
    }
    for engine in [&mut rig.engine, &mut other.engine] {
        engine.drain().unwrap();
        assert_eq!(engine.stats().seam.failures, 0, "no event of another device was named");
    }
    other.assert_right();
    other.assert_nothing_left();
}

pub(crate) fn m23(rig: &mut Rig) {
    let (block, range) = adopted(rig, 0, 1);
    evict(rig, 0, &block);
    flush(rig, 0);
    resize(rig, 0, &block, range);
    let used = rig.take(0, LEN).unwrap();
    rig.fill(0, used, 7);
    rig.check(0, used, 7, "still read".into());
    rig.give(0, used.at());
    let target = rig.take(0, LEN).unwrap();
    rig.engine.prefetch(block.id(), target, rig.streams[0].engine).unwrap();
    read(rig, 0, &block, 1);
    release(rig, 0, block);
    rig.give(0, target.at());
}

pub(crate) fn m24(rig: &mut Rig) {
    let buffer = away(rig, 0, 1);
    read(rig, 1, &buffer, 1);
    release(rig, 0, buffer);
    let other = filled(rig, 0, 2);
    read(rig, 0, &other, 2);
    release(rig, 0, other);
}

pub(crate) fn m25(rig: &mut Rig) {
    let weights = away(rig, 0, 1);
    for s in [0, 1, 0] {
        read(rig, s, &weights, 1);
    }
    release(rig, 0, weights);
}

/// A block goes back under a copy-in, and the pool gives back what it can.
pub(crate) fn m26(rig: &mut Rig) {
    let tensor = away(rig, 0, 1);
    let range = acquire(rig, 0, &tensor);
    rig.engine.take(tensor.id()).unwrap();
    rig.pool.trim();
    rig.check(0, range, 1, "its host copy is gone".into());
    release(rig, 0, tensor);
}

/// The same under a copy-out.
pub(crate) fn m27(rig: &mut Rig) {
    let tensor = filled(rig, 0, 1);
    evict(rig, 0, &tensor);
    drop(tensor);
    rig.engine.step().unwrap();
    rig.pool.trim();
}

/// Several at once, whose host copies go as soon as the copies were asked for.
pub(crate) fn m28(rig: &mut Rig) {
    let tensors: Vec<Storage> = (0..2).map(|seed| away(rig, 0, seed)).collect();
    let ranges: Vec<DeviceRange> = tensors.iter().map(|one| acquire(rig, 0, one)).collect();
    for tensor in &tensors {
        rig.engine.take(tensor.id()).unwrap();
    }
    rig.pool.trim();
    for (seed, range) in ranges.into_iter().enumerate() {
        rig.check(0, range, seed as u64, "their host copies are gone".into());
    }
    tensors.into_iter().for_each(|tensor| release(rig, 0, tensor));
}

/// Compute is the device's default stream.
pub(crate) fn m29(rig: &mut Rig) {
    rig.adopt(0);
    let null = rig.streams.len() - 1;
    let tensor = away(rig, null, 1);
    let other = filled(rig, null, 2);
    read(rig, null, &tensor, 1);
    read(rig, null, &other, 2);
    for storage in [tensor, other] {
        release(rig, null, storage);
    }
}
