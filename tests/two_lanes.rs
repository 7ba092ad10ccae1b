//! Copies of one storage on two lanes, for two streams: the orders in which a copy still under way
//! could be forgotten, because a later one of the same storage took its place in the books.
//!
//! The fault guarded against: a block lent to somebody else while the first of two copy-ins still
//! reads it, device bytes that go while the part of an eviction that did not fail reads them, and
//! bytes used before they arrived by a stream that never asked for them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Call, Config, Fault, FaultPlan, Lazy, Schedule, Spot};
use lightering::storage::{Residency, Tier};
use lightering::trace::Use;
use lightering::{Acquire, Bytes, DeviceRange, Evict, Options, Result, Storage, StorageId};
use support::{Rig, options, small_pool};

const LEN: Bytes = Bytes::kib(8);

/// Runs nothing until the host waits; then always the stream that comes first in its list.
#[derive(Debug)]
struct Ranked(&'static [u32]);

impl Schedule for Ranked {
    fn choose(&mut self, _: usize) -> usize {
        0
    }

    fn pace(&mut self, _: Call) -> usize {
        0
    }

    fn pick(&mut self, runnable: &[u32]) -> usize {
        let rank = |stream| self.0.iter().position(|one| *one == stream).unwrap_or(usize::MAX);
        (0..runnable.len()).min_by_key(|index| rank(runnable[*index])).unwrap()
    }
}

/// The simulator's numbers of the streams of a rig with two: the engine opens its lanes first.
const OUT: u32 = 2;
const URGENT: u32 = 6;
const FIRST: u32 = 7;
const SECOND: u32 = 8;

fn rig(config: Config) -> Rig {
    // The framework notes its own uses: `fill` and `check` do.
    let bounds = Options { unreleased_bytes_max: Bytes::ZERO, note_uses: false, ..options() };
    Rig::new(config, small_pool(Bytes::mib(1)), bounds, 2)
}

fn ready(acquired: Acquire) -> DeviceRange {
    match acquired {
        Acquire::Ready(range) => range,
        Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
    }
}

/// A storage of the engine's own with the pattern of `seed`.
fn filled(rig: &mut Rig, stream: usize, seed: u64) -> Storage {
    let storage = rig.engine.alloc(LEN, rig.streams[stream].engine, "x").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(stream, range, seed);
    storage
}

#[test]
fn a_block_is_not_lent_while_the_first_of_two_copy_ins_reads_it() {
    let mut rig = rig(Config::scheduled(Box::new(Ranked(&[SECOND, URGENT, OUT]))));
    let (first, second) = (rig.streams[0].engine, rig.streams[1].engine);
    let x = filled(&mut rig, 0, 5);
    let y = filled(&mut rig, 0, 6);
    rig.engine.evict(x.id(), first).unwrap();
    rig.engine.evict(y.id(), first).unwrap();
    rig.engine.flush(first).unwrap();
    rig.sim.sync().unwrap();
    // The reader of one has the other fetched ahead, for the first stream.
    rig.engine.acquire(y.id(), first).unwrap();
    assert_eq!(rig.engine.residency(x.id()).unwrap(), Residency::Refilling);
    let range = ready(rig.engine.acquire(x.id(), first).unwrap());
    rig.check(0, range, 5, "first stream".into());
    assert_eq!(rig.engine.evict(x.id(), first).unwrap(), Evict::Clean);
    rig.engine.flush(first).unwrap();
    assert_eq!(rig.engine.residency(x.id()).unwrap(), Residency::Evicted(Tier::Host));
    // A second copy-in from the same block, on the urgent lane, for the second stream.
    let range = ready(rig.engine.acquire(x.id(), second).unwrap());
    rig.check(1, range, 5, "second stream".into());
    rig.engine.release(x, second).unwrap();
    // The block is lent again and filled with other bytes.
    let z = filled(&mut rig, 1, 90);
    rig.engine.evict(z.id(), second).unwrap();
    rig.assert_right();
    drop((y, z));
    rig.assert_nothing_left();
}

#[test]
fn h61_bytes_stay_until_what_was_enqueued_of_a_failed_eviction_has_read_them() {
    let refused = FaultPlan::default().at(Spot::Copy, 3, Fault::Refuse);
    let config = Config { faults: refused, ..Config::scheduled(Box::new(Lazy::default())) };
    let mut rig = rig(config);
    let on = rig.streams[0].engine;
    for _ in 0..2 {
        let storage = filled(&mut rig, 0, 1);
        // Two of the four trunks are under way when the third is refused; the second time all are.
        let _ = rig.engine.evict(storage.id(), on);
        if let Ok(range) = rig.engine.range(storage.id()) {
            rig.engine.note(on, &[Use::write(range)]).unwrap();
        }
        rig.engine.release(storage, on).unwrap();
    }
    assert_eq!(rig.engine.stats().evicted_count, 1, "one failed, one did not");
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_write_on_a_stream_that_did_not_acquire_is_behind_the_copy_in() {
    let mut rig = rig(Config::scheduled(Box::new(Ranked(&[SECOND]))));
    let (first, second) = (rig.streams[0].engine, rig.streams[1].engine);
    let storage = filled(&mut rig, 0, 5);
    rig.engine.evict(storage.id(), first).unwrap();
    rig.engine.flush(first).unwrap();
    // Acquired on one stream, which does nothing with the bytes, and overwritten on another.
    let range = ready(rig.engine.acquire(storage.id(), first).unwrap());
    rig.engine.note(second, &[Use::write(range)]).unwrap();
    rig.fill(1, range, 6);
    rig.sim.sync().unwrap();
    rig.check(1, range, 6, "second stream".into());
    rig.assert_right();
    rig.engine.release(storage, second).unwrap();
    rig.assert_nothing_left();
}

/// The same call again, where the first was refused.
fn twice<T>(rig: &mut Rig, call: impl Fn(&mut Rig) -> Result<T>) -> T {
    call(rig).or_else(|_| call(rig)).unwrap()
}

/// Evicts and flushes on the first stream, through a refusal.
fn send(rig: &mut Rig, id: StorageId) {
    let on = rig.streams[0].engine;
    let refused = rig.engine.evict(id, on).is_err();
    if refused && rig.engine.residency(id).unwrap() == Residency::Resident {
        rig.engine.evict(id, on).unwrap();
    }
    twice(rig, |rig| rig.engine.flush(on));
}

#[test]
fn bytes_that_no_reader_got_to_wait_for_are_whole_before_they_are_copied_out_again() {
    for nth in 1..24 {
        let faults = FaultPlan::default().at(Spot::Wait, nth, Fault::Refuse);
        let mut rig = rig(Config { faults, ..Config::scheduled(Box::new(Ranked(&[OUT, FIRST]))) });
        let on = rig.streams[0].engine;
        // Two idle blocks: the second copy-out has one that no copy-in guards.
        let others = [filled(&mut rig, 0, 1), filled(&mut rig, 0, 2)];
        for other in &others {
            send(&mut rig, other.id());
        }
        drop(others);
        rig.engine.drain().unwrap();
        let storage = filled(&mut rig, 0, 5);
        let id = storage.id();
        send(&mut rig, id);
        if rig.engine.acquire(id, on).is_err() && rig.engine.take(id).is_ok() {
            // The bytes are coming, and their reader could not be made to wait.
            send(&mut rig, id);
        }
        let range = ready(twice(&mut rig, |rig| rig.engine.acquire(id, on)));
        rig.check(0, range, 5, format!("wait {nth} refused"));
        rig.engine.release(storage, on).unwrap();
        rig.assert_right();
        rig.assert_nothing_left();
    }
}
