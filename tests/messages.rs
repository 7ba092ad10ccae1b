//! The fault guarded against: an error that leaves its reader guessing which of the things passed
//! was wrong, how many there are, or what would help.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, World};
use lightering::{Bytes, Error, Kind, Missing, Misuse, Options};
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
