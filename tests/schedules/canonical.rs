//! Six small programs in every order of everything that the device and the host's view of it allow.
//!
//! What it is not: a sample. The number of runs printed is the number of orders there are.
//!
//! Invariant: a program asks the device the same things whenever it was given the same answers.
//!
//! ```text
//!   program x orders: which stream next, how far before an answer is heard or memory is taken,
//!                     which pieces of a copy -> bytes right, no hazard, nothing left, each time
//! ```

use crate::support::{Rig, first_wrong, options, quick_pool};
use lightering::backend::Backend;
use lightering::backend::sim::{Config, Orders, Schedule};
use lightering::trace::Use;
use lightering::{Acquire, Bytes, DeviceRange, Kind, Options, Storage};
use std::cell::Cell;

/// One piece of a copy; the torn one has two.
const LEN: Bytes = Bytes(256);

fn bounds() -> Options {
    Options {
        note_uses: false,
        prefetch_count_max: 0,
        storages_max: 8,
        events_max: 64,
        ring_records: 0,
        ..options()
    }
}

fn rig(schedule: Box<dyn Schedule>, pool: Bytes, streams: usize) -> Rig {
    let config = Config { device_bytes: Bytes::kib(4), ..Config::scheduled(schedule) };
    Rig::new(config, quick_pool(pool), bounds(), streams)
}

/// Runs a program in every order; says in how many.
fn enumerate(pool: Bytes, streams: usize, program: impl Fn(&mut Rig)) -> u64 {
    let mut orders = Orders::new();
    while let Some(schedule) = orders.next() {
        let mut rig = rig(schedule, pool, streams);
        program(&mut rig);
        rig.assert_right();
        rig.assert_nothing_left();
        let memory = rig.sim.memory().unwrap();
        assert_eq!(memory.free, memory.total, "device bytes are left: {:?}", orders.path());
        assert!(orders.runs() < 1_000_000, "too many orders to go through");
    }
    orders.runs()
}

fn filled(rig: &mut Rig, s: usize, len: Bytes, seed: u64) -> Storage {
    let storage = rig.engine.alloc(len, rig.streams[s].engine, "x").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(s, range, seed);
    storage
}

fn evict(rig: &mut Rig, storage: &Storage) {
    rig.engine.evict(storage.id(), rig.streams[0].engine).unwrap();
}

fn flush(rig: &mut Rig) {
    rig.engine.flush(rig.streams[0].engine).unwrap();
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

/// Out and in again, with copies that are torn in every way.
pub(crate) fn there_and_back() -> u64 {
    enumerate(Bytes::kib(8), 1, |rig| {
        let a = filled(rig, 0, Bytes(2 * LEN.0), 1);
        evict(rig, &a);
        flush(rig);
        read(rig, 0, &a, 1);
        release(rig, 0, a);
    })
}

/// Two storages leave and come back in the other order.
pub(crate) fn two_leave() -> u64 {
    enumerate(Bytes::kib(8), 1, |rig| {
        let (a, b) = (filled(rig, 0, LEN, 1), filled(rig, 0, LEN, 2));
        evict(rig, &a);
        evict(rig, &b);
        flush(rig);
        read(rig, 0, &b, 2);
        read(rig, 0, &a, 1);
        release(rig, 0, b);
        release(rig, 0, a);
    })
}

/// Two storages share the pool's one block, and two streams the device.
pub(crate) fn one_block() -> u64 {
    enumerate(Bytes::kib(4), 2, |rig| {
        let (a, b) = (filled(rig, 0, LEN, 1), filled(rig, 1, LEN, 2));
        evict(rig, &a);
        flush(rig);
        read(rig, 0, &a, 1);
        release(rig, 0, a);
        rig.engine.evict(b.id(), rig.streams[1].engine).unwrap();
        rig.engine.flush(rig.streams[1].engine).unwrap();
        read(rig, 1, &b, 2);
        release(rig, 1, b);
    })
}

/// Bytes are written in place while they are leaving, and leave again.
pub(crate) fn written_while_leaving() -> u64 {
    enumerate(Bytes::kib(8), 1, |rig| {
        let a = filled(rig, 0, LEN, 1);
        evict(rig, &a);
        let range = acquire(rig, 0, &a);
        rig.engine.note(rig.streams[0].engine, &[Use::write(range)]).unwrap();
        rig.fill(0, range, 2);
        evict(rig, &a);
        flush(rig);
        read(rig, 0, &a, 2);
        release(rig, 0, a);
    })
}

/// Two streams read; the bytes go, and others take their place.
pub(crate) fn two_readers() -> u64 {
    enumerate(Bytes::kib(8), 2, |rig| {
        let a = filled(rig, 0, LEN, 1);
        rig.order(0, 1);
        read(rig, 1, &a, 1);
        evict(rig, &a);
        flush(rig);
        let other = filled(rig, 0, LEN, 9);
        read(rig, 0, &a, 1);
        read(rig, 0, &other, 9);
        release(rig, 0, other);
        release(rig, 0, a);
    })
}

/// Bytes whose address stays go if the host hears in time that they may, and come home there.
pub(crate) fn unmapped() -> (u64, u64) {
    let unmapped = Cell::new(0);
    let orders = enumerate(Bytes::kib(8), 1, |rig| {
        let a = rig.engine.alloc_fixed(LEN, rig.streams[0].engine, "x").unwrap();
        let home = rig.engine.range(a.id()).unwrap();
        rig.fill(0, home, 1);
        evict(rig, &a);
        // The operator for whose input it was evicted.
        rig.check(0, home, 1, "live".into());
        (0..3).for_each(|_| flush(rig));
        assert_eq!(acquire(rig, 0, &a), home);
        rig.check(0, home, 1, "home".into());
        unmapped.set(unmapped.get() + rig.engine.stats().seam.unmaps);
        release(rig, 0, a);
        flush(rig);
    });
    (orders, unmapped.get())
}

/// A framework's bytes go when they may, are fetched into room that is then given up, and are read
/// by the host, if it may.
pub(crate) fn pulled() -> u64 {
    enumerate(Bytes::kib(8), 1, |rig| {
        let on = rig.streams[0].engine;
        let range = rig.take(0, LEN).unwrap();
        let a = rig.engine.adopt(range, "a").unwrap();
        rig.fill(0, range, 1);
        evict(rig, &a);
        let early = rig.engine.releasable(on).unwrap();
        assert_eq!(early, None, "what was evicted last may still be read");
        let mut bytes = [0; LEN.0 as usize];
        match rig.engine.read_host(a.id(), Bytes::ZERO, &mut bytes) {
            Ok(()) => assert_eq!(first_wrong(&bytes, 1), None),
            Err(error) => assert_eq!(error.kind(), Kind::Busy),
        }
        flush(rig);
        assert_eq!(rig.engine.releasable(on).unwrap(), Some(a.id()));
        rig.give(0, range.at());
        let target = rig.take(0, LEN).unwrap();
        rig.engine.prefetch(a.id(), target, on).unwrap();
        rig.engine.cancel(a.id(), on).unwrap();
        rig.give(0, target.at());
        let other = rig.take(0, LEN).unwrap();
        rig.fill(0, other, 9);
        rig.check(0, other, 9, "given up".into());
        rig.give(0, other.at());
        let home = rig.take(0, LEN).unwrap();
        rig.engine.refill(a.id(), home, on).unwrap();
        rig.check(0, home, 1, "home".into());
        rig.engine.release(a, on).unwrap();
        rig.give(0, home.at());
    })
}
