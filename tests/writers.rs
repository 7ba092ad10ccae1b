//! Bytes that were written after they came home are those that come home next.
//!
//! The fault guarded against: an optimizer's step on bytes that were acquired, an eviction that
//! takes the host copy from before to be as good, and a step that is lost without a word.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;
#[path = "verify_support/mod.rs"]
mod verify_support;

use lightering::backend::Backend;
use lightering::backend::sim::Config;
use lightering::storage::Residency;
use lightering::{
    Acquire, Bytes, DeviceRange, Engine, Evict, Kind, Misuse, Options, Result, Storage,
};
use std::sync::Mutex;
use support::{Rig, options, small_pool};
use verify_support::{Crooked, Plan, Refused, Shared};

const LEN: Bytes = Bytes::kib(8);
const SEEDS: u64 = 40;

/// Where the bytes are when their writer comes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    Home,
    Leaving,
    Away,
    /// On their way home, or home, ahead of the writer.
    Ahead,
}

const WHEN: [When; 4] = [When::Home, When::Leaving, When::Away, When::Ahead];

fn rig(seed: u64, options: Options) -> Rig {
    Rig::new(Config::adversary(seed), small_pool(Bytes::mib(1)), options, 1)
}

fn verifying() -> Options {
    Options { verify: true, verify_slots_max: 32, prefetch_count_max: 0, ..options() }
}

fn ready(got: Acquire) -> DeviceRange {
    match got {
        Acquire::Ready(range) => range,
        Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
    }
}

/// Home again once, with a host copy of what `seed` says.
fn with_copy(rig: &mut Rig, is_fixed: bool, seed: u64) -> Storage {
    let on = rig.streams[0].engine;
    let storage = match is_fixed {
        true => rig.engine.alloc_fixed(LEN, on, "w").unwrap(),
        false => rig.engine.alloc(LEN, on, "w").unwrap(),
    };
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, seed);
    assert!(matches!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Moving(_)));
    rig.engine.flush(on).unwrap();
    let range = ready(rig.engine.acquire(storage.id(), on).unwrap());
    rig.check(0, range, seed, "first".into());
    storage
}

#[test]
fn what_a_writer_wrote_comes_home_wherever_the_bytes_were_when_it_came() {
    for (seed, when) in (0..SEEDS).flat_map(|seed| WHEN.map(|when| (seed, when))) {
        for is_fixed in [false, true] {
            let mut rig = rig(seed, options());
            let on = rig.streams[0].engine;
            let storage = with_copy(&mut rig, is_fixed, 1);
            let id = storage.id();
            if when != When::Home {
                assert_eq!(rig.engine.evict(id, on).unwrap(), Evict::Clean);
            }
            if matches!(when, When::Away | When::Ahead) {
                rig.engine.flush(on).unwrap();
            }
            if when == When::Ahead {
                // A reader brought them home; the writer comes second.
                rig.engine.acquire(id, on).unwrap();
            }
            let range = ready(rig.engine.acquire_mut(id, on).unwrap());
            rig.fill(0, range, 2);
            let became = rig.engine.evict(id, on).unwrap();
            assert!(matches!(became, Evict::Moving(_)), "{when:?} fixed {is_fixed}: {became:?}");
            rig.engine.flush(on).unwrap();
            let range = ready(rig.engine.acquire(id, on).unwrap());
            rig.check(0, range, 2, format!("seed {seed} {when:?} fixed {is_fixed}"));
            // A reader's eviction is free still.
            assert_eq!(rig.engine.evict(id, on).unwrap(), Evict::Clean);
            rig.engine.release(storage, on).unwrap();
            rig.assert_right();
            rig.assert_nothing_left();
        }
    }
}

#[test]
fn a_writer_comes_behind_the_copy_out_that_still_reads_the_bytes() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, Options { note_uses: true, ..options() });
        let on = rig.streams[0].engine;
        let storage = rig.engine.alloc(LEN, on, "w").unwrap();
        let range = rig.engine.range(storage.id()).unwrap();
        rig.fill(0, range, 1);
        rig.engine.evict(storage.id(), on).unwrap();
        assert_eq!(ready(rig.engine.acquire_mut(storage.id(), on).unwrap()), range);
        rig.fill(0, range, 2);
        assert!(matches!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Moving(_)));
        rig.engine.flush(on).unwrap();
        let range = ready(rig.engine.acquire(storage.id(), on).unwrap());
        rig.check(0, range, 2, format!("seed {seed}"));
        rig.engine.release(storage, on).unwrap();
        // The checker of order has the engine's own notes of the write as well.
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

/// A framework's bytes, away, with a host copy of pattern 1.
fn adopted(rig: &mut Rig) -> Storage {
    let on = rig.streams[0].engine;
    let range = rig.take(0, LEN).unwrap();
    rig.fill(0, range, 1);
    let storage = rig.engine.adopt(range, "theirs").unwrap();
    rig.engine.evict(storage.id(), on).unwrap();
    rig.engine.flush(on).unwrap();
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(storage.id()));
    rig.give(0, range.at());
    storage
}

#[test]
fn a_writer_who_had_to_make_room_first_is_not_forgotten() {
    for (seed, who) in (0..SEEDS).flat_map(|seed| [0, 1, 2].map(|who| (seed, who))) {
        let mut rig = rig(seed, options());
        let on = rig.streams[0].engine;
        let storage = adopted(&mut rig);
        let id = storage.id();
        assert_eq!(rig.engine.acquire_mut(id, on).unwrap(), Acquire::NeedsRoom(LEN));
        if who == 1 {
            // A reader asks between the writer's question and its refill.
            assert_eq!(rig.engine.acquire(id, on).unwrap(), Acquire::NeedsRoom(LEN));
        }
        let target = rig.take(0, LEN).unwrap();
        if who == 2 {
            // Fetched ahead meanwhile, and claimed by a verb for readers.
            rig.engine.prefetch(id, target, on).unwrap();
            assert_eq!(rig.engine.acquire(id, on).unwrap(), Acquire::Ready(target));
        } else {
            assert_eq!(rig.engine.refill(id, target, on).unwrap(), target);
        }
        rig.check(0, target, 1, "what it writes over".into());
        rig.fill(0, target, 2);
        let became = rig.engine.evict(id, on).unwrap();
        assert!(matches!(became, Evict::Moving(_)), "seed {seed} who {who}: {became:?}");
        rig.engine.flush(on).unwrap();
        assert_eq!(rig.engine.releasable(on).unwrap(), Some(id));
        rig.give(0, target.at());
        let target = rig.take(0, LEN).unwrap();
        assert_eq!(rig.engine.acquire(id, on).unwrap(), Acquire::NeedsRoom(LEN));
        rig.engine.refill(id, target, on).unwrap();
        rig.check(0, target, 2, format!("seed {seed} who {who}"));
        assert_eq!(rig.engine.evict(id, on).unwrap(), Evict::Clean, "read, and not written");
        rig.assert_right();
        rig.engine.release(storage, on).unwrap();
        rig.give(0, target.at());
        rig.assert_nothing_left();
    }
}

#[test]
fn a_writer_of_lost_or_stale_bytes_is_refused_as_a_reader_is() {
    let mut rig = rig(1, options());
    let on = rig.streams[0].engine;
    let storage = with_copy(&mut rig, false, 1);
    let id = storage.id();
    rig.engine.release(storage, on).unwrap();
    let stale = rig.engine.acquire_mut(id, on).unwrap_err();
    assert_eq!(stale.op(), "acquire_mut", "{stale}");
    assert_eq!(stale.misuse(), Some(Misuse::Stale));
    rig.assert_nothing_left();
}

#[test]
fn a_reader_that_writes_is_found_and_named_with_verify() {
    for (seed, is_fixed) in (0..SEEDS).flat_map(|seed| [false, true].map(|fixed| (seed, fixed))) {
        let mut rig = rig(seed, verifying());
        let on = rig.streams[0].engine;
        let other = with_copy(&mut rig, is_fixed, 7);
        let storage = with_copy(&mut rig, is_fixed, 1);
        let range = rig.engine.range(storage.id()).unwrap();
        // Where the copy-out still runs it may take what is written now.
        rig.sim.sync().unwrap();
        rig.fill(0, range, 2);
        assert_eq!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Clean);
        assert_eq!(rig.engine.evict(other.id(), on).unwrap(), Evict::Clean);
        rig.engine.flush(on).unwrap();
        let error = rig.engine.drain().unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt, "seed {seed}: {error}");
        assert_eq!(error.name().unwrap().as_str(), "w");
        assert!(error.to_string().contains("acquire_mut"), "{error}");
        assert_eq!(rig.engine.drain(), Ok(()), "it is named once");
        assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Lost);
        assert_eq!(rig.engine.stats().corrupt_count, 1);
        // Who only read goes on.
        let range = ready(rig.engine.acquire(other.id(), on).unwrap());
        rig.check(0, range, 7, "the other".into());
        rig.engine.release(storage, on).unwrap();
        rig.engine.release(other, on).unwrap();
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn a_writer_that_says_so_raises_no_alarm_with_verify() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, verifying());
        let on = rig.streams[0].engine;
        let storage = with_copy(&mut rig, false, 1);
        for round in 2..5 {
            let range = ready(rig.engine.acquire_mut(storage.id(), on).unwrap());
            rig.fill(0, range, round);
            rig.engine.evict(storage.id(), on).unwrap();
            rig.engine.flush(on).unwrap();
            let range = ready(rig.engine.acquire(storage.id(), on).unwrap());
            rig.check(0, range, round, format!("seed {seed} round {round}"));
            assert_eq!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Clean);
        }
        assert_eq!(rig.engine.drain(), Ok(()), "seed {seed}");
        assert_eq!(rig.engine.stats().clean_unverified_count, 0);
        rig.engine.release(storage, on).unwrap();
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

/// The same call once more, where it was refused the first time.
fn twice<T>(rig: &mut Rig, verb: impl Fn(&mut Engine) -> Result<T>) -> T {
    match verb(&mut rig.engine) {
        Err(error) if error.kind() == Kind::OutOfMemory => verb(&mut rig.engine).unwrap(),
        other => other.unwrap(),
    }
}

fn run_refused(refused: (Refused, u32)) -> (bool, bool) {
    let plan = Plan { refused: Some(refused), ..Plan::default() };
    let plan = Shared::new(Mutex::new(plan));
    let theirs = plan.clone();
    let wrap = |sim| Box::new(Crooked { sim, plan: theirs }) as Box<dyn Backend>;
    let config = Config::adversary(u64::from(refused.1));
    let mut rig = Rig::wrapped(config, small_pool(Bytes::mib(1)), verifying(), 1, wrap);
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, "w").unwrap();
    let id = storage.id();
    let range = rig.engine.range(id).unwrap();
    rig.fill(0, range, 1);
    if rig.engine.evict(id, on).is_err() {
        // The part of it that runs reads the bytes; who writes them anew says so.
        rig.engine.acquire_mut(id, on).unwrap();
        rig.fill(0, range, 1);
        rig.engine.evict(id, on).unwrap();
    }
    rig.engine.flush(on).unwrap();
    twice(&mut rig, |engine| engine.acquire(id, on));
    let first = rig.engine.evict(id, on);
    let was_refused = first.is_err();
    if let Err(error) = first {
        assert_eq!(error.kind(), Kind::OutOfMemory, "{refused:?}: {error}");
        assert_eq!(rig.engine.residency(id).unwrap(), Residency::Resident);
        rig.engine.evict(id, on).unwrap();
    }
    rig.engine.flush(on).unwrap();
    let range = ready(twice(&mut rig, |engine| engine.acquire(id, on)));
    rig.check(0, range, 1, format!("{refused:?}"));
    rig.engine.release(storage, on).unwrap();
    assert_eq!(rig.engine.drain(), Ok(()), "{refused:?}");
    rig.assert_right();
    rig.assert_nothing_left();
    (plan.lock().unwrap().was_refused(), was_refused)
}

#[test]
fn a_refused_sum_of_bytes_that_need_no_copy_loses_nothing() {
    for what in [Refused::Launch, Refused::CopyOut, Refused::Record] {
        // Opening takes six launches.
        let first = if what == Refused::Launch { 7 } else { 1 };
        let runs: Vec<_> =
            (first..).map(|nth| run_refused((what, nth))).take_while(|run| run.0).collect();
        let hit = runs.iter().filter(|run| run.1).count();
        assert!(hit > 0, "{what:?}: no eviction without a copy was refused");
    }
}
