//! The fault guarded against: an error that leaves its reader guessing which of the things passed
//! was wrong, how many there are, or what would help.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, Fault, FaultPlan, Spot, World};
use lightering::pinned::PinnedPool;
use lightering::{Bytes, Engine, Error, Evict, Kind, Missing, Misuse, Options, StreamId};
use support::{Rig, options, small_pool};

const LEN: Bytes = Bytes::kib(8);

fn says(error: &Error, words: &[&str]) {
    let said = error.to_string();
    assert!(!said.contains('\n'), "{said}");
    for word in words {
        assert!(said.contains(word), "{said:?} does not say {word:?}");
    }
}

#[test]
fn a_stale_handle_is_called_a_storages() {
    let mut rig = Rig::adversary(1);
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, "x").unwrap();
    let id = storage.id();
    rig.engine.release(storage, on).unwrap();
    let stale = rig.engine.acquire(id, on).unwrap_err();
    assert_eq!(stale.misuse(), Some(Misuse::Stale));
    says(&stale, &["acquire: the storage's handle is stale"]);
}

#[test]
fn a_stream_that_was_not_adopted_is_named_with_the_remedy() {
    let mut rig = Rig::adversary(2);
    let on = rig.streams[0].engine;
    let storage = rig.engine.alloc(LEN, on, "x").unwrap();
    let theirs = rig.streams[0].here;
    let foreign = rig.engine.evict(storage.id(), theirs).unwrap_err();
    assert_eq!(foreign.misuse(), Some(Misuse::Foreign));
    let named = format!("{theirs:?} (adopt it first)");
    says(&foreign, &["evict: the stream belongs to another owner: ", &named]);
}

#[test]
fn a_stream_and_an_event_of_another_device_are_told_apart() {
    let world = World::new(Config::adversary(3));
    let (mut one, mut two) = (world.device(0).unwrap(), world.device(0).unwrap());
    let stream = one.create_stream().unwrap();
    let event = one.create_event(lightering::backend::Timing::Off).unwrap();
    let foreign = two.record(event, stream).unwrap_err();
    says(&foreign, &["belongs to another owner"]);
    let mine = two.create_stream().unwrap();
    says(&two.record(event, mine).unwrap_err(), &["the event belongs to another owner"]);
    let event = two.create_event(lightering::backend::Timing::Off).unwrap();
    says(&two.record(event, stream).unwrap_err(), &["the stream belongs to another owner"]);
}

#[test]
fn an_overlapping_range_names_both_storages() {
    let mut rig = Rig::adversary(4);
    let range = rig.take(0, LEN).unwrap();
    let _first = rig.engine.adopt(range, "layer.3").unwrap();
    let error = rig.engine.adopt(range, "layer.4").unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::Overlap));
    says(&error, &["that of storage \"layer.3\"", "[storage \"layer.4\"]"]);
}

#[test]
fn a_simulated_device_past_the_last_is_named_with_their_number() {
    let error = lightering::open("sim:99").unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable(Missing::Device));
    says(&error, &["simulated device 99", "shows 8"]);
}

#[test]
fn a_simulated_device_out_of_memory_tells_what_is_free() {
    let config = Config { device_bytes: Bytes::kib(64), ..Config::adversary(5) };
    let mut sim = World::new(config).device(0).unwrap();
    let on = sim.create_stream().unwrap();
    let held = sim.alloc_device(Bytes::kib(48), on).unwrap();
    let error = sim.alloc_device(Bytes::kib(32), on).unwrap_err();
    assert_eq!(error.kind(), Kind::OutOfMemory);
    says(&error, &["16.00 KiB of 64.00 KiB are free", "[32.00 KiB]"]);
    sim.free_device(held, on).unwrap();
}

#[test]
fn a_stream_too_many_is_no_reason_to_try_again_later() {
    let narrow = Options { streams_max: 1, ..options() };
    let mut rig = Rig::new(Config::adversary(6), small_pool(Bytes::mib(1)), narrow, 1);
    let second = rig.sim.create_stream().unwrap();
    let raw = rig.sim.raw_stream(second).unwrap();
    let error = rig.engine.adopt_stream(raw).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::BadValue));
    assert!(!error.is_retryable());
    says(&error, &["1 streams are served already", "raise Options::streams_max"]);
    let first = rig.sim.raw_stream(rig.streams[0].here).unwrap();
    assert_eq!(rig.engine.adopt_stream(first).unwrap(), rig.streams[0].engine);
}

fn small_device(spot: Spot, nth: u64, fault: Fault) -> (Rig, StreamId) {
    let faults = FaultPlan::default().at(spot, nth, fault);
    let config = Config { faults, device_bytes: Bytes::kib(64), ..Config::adversary(7) };
    let rig = Rig::new(config, small_pool(Bytes::kib(64)), options(), 1);
    let on = rig.streams[0].engine;
    (rig, on)
}

/// The verb that was called, and then which call of it failed.
fn is_told_as(error: &Error, verb: &'static str, call: &'static str) {
    assert_eq!((error.op(), error.call()), (verb, Some(call)), "{error}");
    says(error, &[&format!("{verb}: "), &format!("[in {call}]")]);
}

#[test]
fn a_caller_reads_the_verb_it_called_and_which_call_of_the_driver_failed() {
    let (mut rig, on) = small_device(Spot::Any, u64::MAX, Fault::Refuse);
    let large = Bytes::kib(80);
    is_told_as(&rig.engine.alloc(large, on, "x").unwrap_err(), "alloc", "alloc_device");
    is_told_as(
        &rig.engine.alloc_fixed(large, on, "x").unwrap_err(),
        "alloc_fixed",
        "create_memory",
    );
    // A reader of bytes whose room was taken by others meanwhile, by either verb.
    let storage = rig.engine.alloc(Bytes::kib(48), on, "x").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, 1);
    assert!(matches!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Moving(_)));
    rig.engine.flush(on).unwrap();
    let _thief = rig.take(0, Bytes::kib(40)).unwrap();
    let read = rig.engine.acquire(storage.id(), on).unwrap_err();
    is_told_as(&read, "acquire", "alloc_device");
    let write = rig.engine.acquire_mut(storage.id(), on).unwrap_err();
    is_told_as(&write, "acquire_mut", "alloc_device");
    says(&write, &["out of device memory", "[storage \"x\"]", "[48.00 KiB]", "driver code 2"]);
}

#[test]
fn an_engine_that_cannot_be_made_says_so_and_which_call_failed() {
    let config = Config { device_bytes: Bytes::kib(4), ..Config::adversary(7) };
    let sim = World::new(config).device(0).unwrap();
    let pool = PinnedPool::new(sim.pinner(), small_pool(Bytes::mib(1))).unwrap();
    // Its sums take more than the device has.
    let verify = Options { verify: true, verify_slots_max: 4096, ..options() };
    let refused = Engine::new(Box::new(sim), &pool, verify).unwrap_err();
    is_told_as(&refused, "new", "alloc_device");
}

#[test]
fn a_verb_inside_of_a_verb_is_not_named_for_the_one_that_was_called() {
    let leaving = |offers: bool| {
        let (mut rig, on) = small_device(Spot::Copy, 1, Fault::Refuse);
        let storage = rig.engine.alloc(LEN, on, "x").unwrap();
        let range = rig.engine.range(storage.id()).unwrap();
        rig.fill(0, range, 1);
        match offers {
            true => rig.engine.offer(storage.id(), on).unwrap_err(),
            false => rig.engine.evict(storage.id(), on).unwrap_err(),
        }
    };
    is_told_as(&leaving(false), "evict", "copy_out");
    is_told_as(&leaving(true), "offer", "copy_out");
    let asking = |marks: bool| {
        let (mut rig, on) = small_device(Spot::Query, 1, Fault::Fatal(700));
        let storage = rig.engine.alloc(LEN, on, "x").unwrap();
        rig.engine.evict(storage.id(), on).unwrap();
        let lost = match marks {
            true => rig.engine.mark_step().unwrap_err(),
            false => rig.engine.step().unwrap_err(),
        };
        // Where it was seen first stays what later verbs say.
        assert_eq!(rig.engine.flush(on).unwrap_err(), lost);
        assert!(lost.is_lost());
        lost
    };
    is_told_as(&asking(false), "step", "query");
    is_told_as(&asking(true), "mark_step", "query");
}
