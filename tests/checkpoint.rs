//! Layer inputs under activation checkpointing, step after step: each is home for its recompute,
//! byte for byte, whatever order the readers come in and whoever owns the device memory.
//!
//! The fault guarded against: an adapter that is right in the first step, and hands out another
//! layer's bytes, or grows, once the order changes, a step is abandoned or the lengths differ.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::adapter::Checkpoint;
use lightering::backend::sim::{Config, Model};
use lightering::storage::{Residency, Tier};
use lightering::{Bytes, Error, Kind, Misuse, Options, Storage};
use support::{Hands, Memory, Rig, options, small_pool};

const LEN: Bytes = Bytes::kib(4);

fn keep_one() -> Options {
    Options { keep_last_count: 1, ..options() }
}

/// A forward of `layers` layers whose inputs the engine owns; layer `n` shows pattern `seed + n`.
fn forward(rig: &mut Rig, checkpoint: &mut Checkpoint, layers: u64, seed: u64, len: Bytes) {
    let on = rig.streams[0].engine;
    for n in 0..layers {
        let input = rig.engine.alloc(len, on, format!("layer.{n}").as_str()).unwrap();
        let range = rig.engine.range(input.id()).unwrap();
        rig.fill(0, range, seed + n);
        rig.check(0, range, seed + n, format!("forward of layer {n}"));
        assert_eq!(checkpoint.keep(&mut rig.engine, input, on).unwrap() as u64, n);
    }
}

fn backward(
    rig: &mut Rig,
    checkpoint: &mut Checkpoint,
    order: impl Iterator<Item = u64>,
    seed: u64,
) {
    let on = rig.streams[0].engine;
    for n in order {
        let range = checkpoint.restore(&mut rig.engine, n as usize, on).unwrap();
        rig.check(0, range, seed + n, format!("recompute of layer {n}"));
        checkpoint.done(&mut rig.engine, n as usize, on).unwrap();
    }
    checkpoint.end_step(&mut rig.engine).unwrap();
}

#[test]
fn m03_every_input_is_home_for_its_recompute_under_any_schedule() {
    for seed in 0..100 {
        let mut rig = Rig::new(Config::adversary(seed), small_pool(Bytes::mib(1)), keep_one(), 1);
        let mut checkpoint = Checkpoint::new();
        for step in 0..3 {
            forward(&mut rig, &mut checkpoint, 6, 100 * step, LEN);
            assert_eq!(checkpoint.bytes(), Bytes(6 * LEN.0));
            backward(&mut rig, &mut checkpoint, (0..6).rev(), 100 * step);
            assert_eq!(checkpoint.bytes(), Bytes::ZERO);
        }
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn the_last_inputs_stay_and_all_others_are_off_the_device_after_a_flush() {
    let mut rig =
        Rig::new(Config::timed(Model::default()), small_pool(Bytes::mib(1)), keep_one(), 1);
    let on = rig.streams[0].engine;
    let mut checkpoint = Checkpoint::new();
    forward(&mut rig, &mut checkpoint, 8, 0, LEN);
    rig.engine.flush(on).unwrap();
    assert_eq!(rig.engine.memory().unwrap().allocated, LEN, "the last input stays");
    assert_eq!(rig.engine.stats().released_bytes, 7 * LEN.0);
    backward(&mut rig, &mut checkpoint, (0..8).rev(), 0);
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn h23_orders_and_lengths_that_change_cost_time_and_never_bytes() {
    let orders: [&[u64]; 5] = [
        &[5, 4, 3, 2, 1, 0],
        &[0, 1, 2, 3, 4, 5],
        &[3, 1, 5, 0, 4, 2],
        &[2, 1, 0],
        &[4, 3, 2, 1, 0],
    ];
    for seed in 0..40 {
        let mut rig = Rig::new(Config::adversary(seed), small_pool(Bytes::mib(1)), keep_one(), 1);
        let mut checkpoint = Checkpoint::new();
        for (step, order) in orders.into_iter().cycle().take(12).enumerate() {
            let (layers, base) = (order.len() as u64, 100 * step as u64);
            let len = Bytes([4096, 1000, 6000][step % 3]);
            forward(&mut rig, &mut checkpoint, layers, base, len);
            backward(&mut rig, &mut checkpoint, order.iter().copied(), base);
        }
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn a_learned_order_is_fetched_ahead_from_the_second_step_on() {
    let mut rig =
        Rig::new(Config::timed(Model::default()), small_pool(Bytes::mib(1)), keep_one(), 1);
    let on = rig.streams[0].engine;
    let mut checkpoint = Checkpoint::new();
    // Not the reverse order: the first step guesses wrong, the second knows.
    let order = [2, 5, 0, 4, 1, 3];
    let mut misses = Vec::new();
    for step in 0..4 {
        let before = rig.engine.stats().guesses.misses;
        forward(&mut rig, &mut checkpoint, 6, 10 * step, LEN);
        rig.engine.flush(on).unwrap();
        backward(&mut rig, &mut checkpoint, order.into_iter(), 10 * step);
        misses.push(rig.engine.stats().guesses.misses - before);
    }
    assert!(misses[0] > 1, "{misses:?}");
    assert_eq!(misses[1..], [1, 1, 1], "only the first reader of a step has to wait");
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn a_forward_whose_backward_never_runs_gives_its_copies_back() {
    let mut rig = Rig::new(Config::adversary(8), small_pool(Bytes::mib(1)), keep_one(), 1);
    let mut checkpoint = Checkpoint::new();
    for step in 0..200 {
        forward(&mut rig, &mut checkpoint, 4, 10 * step, LEN);
        checkpoint.end_step(&mut rig.engine).unwrap();
    }
    rig.engine.drain().unwrap();
    assert_eq!(rig.engine.stats().storages, 0);
    assert!(rig.pool.stats().pinned <= Bytes::mib(1));
    assert_eq!(rig.pool.stats().lent, Bytes::ZERO);
    assert_eq!(rig.engine.memory().unwrap().allocated, Bytes::ZERO);
    rig.assert_nothing_left();
}

#[test]
fn a_layer_that_keeps_nothing_now_is_refused_by_number() {
    let mut rig = Rig::new(Config::adversary(9), small_pool(Bytes::mib(1)), keep_one(), 1);
    let on = rig.streams[0].engine;
    let mut checkpoint = Checkpoint::new();
    forward(&mut rig, &mut checkpoint, 2, 0, LEN);
    let check = |error: Error, layer: &str| {
        assert_eq!(error.misuse(), Some(Misuse::State));
        assert!(error.to_string().contains(layer), "{error}");
    };
    check(checkpoint.restore(&mut rig.engine, 2, on).unwrap_err(), "layer 2");
    checkpoint.done(&mut rig.engine, 1, on).unwrap();
    check(checkpoint.done(&mut rig.engine, 1, on).unwrap_err(), "layer 1");
    check(checkpoint.restore(&mut rig.engine, 1, on).unwrap_err(), "layer 1");
}

#[test]
fn without_pinned_room_the_inputs_stay_and_training_goes_on() {
    let mut rig = Rig::new(Config::adversary(10), small_pool(Bytes(4096)), keep_one(), 1);
    let mut checkpoint = Checkpoint::new();
    for step in 0..3 {
        forward(&mut rig, &mut checkpoint, 5, 10 * step, Bytes::kib(8));
        backward(&mut rig, &mut checkpoint, (0..5).rev(), 10 * step);
    }
    let kept = rig.engine.stats().kept_for(lightering::policy::Kept::NoPinnedRoom);
    assert_eq!(kept.count, 12, "all but the last of each step");
    rig.assert_right();
    rig.assert_nothing_left();
}

/// As `forward`, with device memory that a framework owns.
fn forward_adopted(
    rig: &mut Rig,
    checkpoint: &mut Checkpoint,
    memory: &mut Memory,
    layers: u64,
) -> Vec<lightering::StorageId> {
    let on = rig.streams[0];
    let mut ids = Vec::new();
    for n in 0..layers {
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, n);
        let input: Storage = rig.engine.adopt(range, "input").unwrap();
        memory.ranges.insert(input.id(), range);
        ids.push(input.id());
        checkpoint.keep(&mut rig.engine, input, on.engine).unwrap();
        let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory };
        lightering::adapter::pull(&mut rig.engine, on.engine, &mut hands).unwrap();
    }
    ids
}

#[test]
fn a_framework_that_owns_its_memory_is_told_what_to_drop_and_what_to_make_room_for() {
    for seed in 0..60 {
        let mut rig = Rig::new(Config::adversary(seed), small_pool(Bytes::mib(1)), keep_one(), 1);
        let (mut checkpoint, mut memory) = (Checkpoint::new(), Memory::default());
        let on = rig.streams[0];
        let ids = forward_adopted(&mut rig, &mut checkpoint, &mut memory, 6);
        rig.engine.flush(on.engine).unwrap();
        let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory: &mut memory };
        lightering::adapter::pull(&mut rig.engine, on.engine, &mut hands).unwrap();
        assert_eq!(memory.ranges.len(), 1, "all but the last are gone");
        let away = rig.engine.residency(ids[0]).unwrap();
        assert_eq!(away, Residency::Evicted(Tier::Host));
        for n in (0..6).rev() {
            let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory: &mut memory };
            let restored = checkpoint.restore_into(&mut rig.engine, n, on.engine, &mut hands);
            let range = restored.unwrap();
            rig.check(0, range, n as u64, format!("seed {seed} layer {n}"));
            checkpoint.done(&mut rig.engine, n, on.engine).unwrap();
            let range = memory.ranges.remove(&ids[n]).unwrap();
            rig.give(0, range.at());
        }
        checkpoint.end_step(&mut rig.engine).unwrap();
        assert!(memory.ranges.is_empty());
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn a_framework_without_room_is_served_on_demand_and_loses_nothing() {
    let mut config = Config::adversary(12);
    config.device_bytes = Bytes::kib(32);
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), keep_one(), 1);
    let (mut checkpoint, mut memory) = (Checkpoint::new(), Memory::default());
    let on = rig.streams[0];
    let ids = forward_adopted(&mut rig, &mut checkpoint, &mut memory, 6);
    rig.engine.flush(on.engine).unwrap();
    let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory: &mut memory };
    lightering::adapter::pull(&mut rig.engine, on.engine, &mut hands).unwrap();
    let mut hog = Vec::new();
    while let Ok(range) = rig.take(0, LEN) {
        hog.push(range);
    }
    let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory: &mut memory };
    let full = checkpoint.restore_into(&mut rig.engine, 0, on.engine, &mut hands).unwrap_err();
    assert_eq!(full.kind(), Kind::OutOfMemory);
    for range in hog {
        rig.give(0, range.at());
    }
    for n in (0..6).rev() {
        let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory: &mut memory };
        let range = checkpoint.restore_into(&mut rig.engine, n, on.engine, &mut hands).unwrap();
        rig.check(0, range, n as u64, format!("layer {n}"));
        checkpoint.done(&mut rig.engine, n, on.engine).unwrap();
        let range = memory.ranges.remove(&ids[n]).unwrap();
        rig.give(0, range.at());
    }
    rig.assert_right();
}
