//! Saved tensors of a framework that owns its memory: what is unpacked is what was packed, however
//! often and in whatever order it is asked for, and whatever is dropped meanwhile.
//!
//! The fault guarded against: device bytes dropped while the copy out still reads them; a graph
//! that is kept and read twice, whose second reader finds nothing; a graph that nobody wants any
//! more, whose blocks stay lent.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::adapter::Saved;
use lightering::backend::Backend;
use lightering::backend::sim::Config;
use lightering::policy::Kept;
use lightering::{Acquire, Bytes, DeviceRange, Evict, Misuse, Options, Storage, StorageId};
use std::collections::HashMap;
use support::{Rig, options, quick_pool};

const LEN: Bytes = Bytes::kib(4);

/// A framework that keeps a reference to the device bytes of what it saved.
struct Frame {
    rig: Rig,
    saved: Saved,
    held: HashMap<StorageId, DeviceRange>,
}

impl Frame {
    fn new(seed: u64, keep_last: usize, budget: Bytes) -> Frame {
        let rig = Rig::new(Config::adversary(seed), quick_pool(budget), options(), 1);
        Frame { rig, saved: Saved::new(keep_last, Bytes(64)), held: HashMap::new() }
    }

    fn pack(&mut self, seed: u64, len: Bytes) -> (Storage, Option<(StorageId, Evict)>) {
        let on = self.rig.streams[0].engine;
        let range = self.rig.take(0, len).unwrap();
        self.rig.fill(0, range, seed);
        let (storage, left) = self.saved.pack(&mut self.rig.engine, range, "x", on).unwrap();
        self.held.insert(storage.id(), range);
        self.sweep();
        (storage, left.unwrap())
    }

    /// Drops what may be dropped; returns how many.
    fn sweep(&mut self) -> usize {
        let on = self.rig.streams[0].engine;
        let mut count = 0;
        while let Some(id) = self.rig.engine.releasable(on).unwrap() {
            let range = self.held.remove(&id).expect("it is named once");
            self.rig.give(0, range.at());
            count += 1;
        }
        count
    }

    fn unpack(&mut self, storage: &Storage, seed: u64) {
        let on = self.rig.streams[0].engine;
        let id = storage.id();
        let range = match self.saved.unpack(&mut self.rig.engine, id, on).unwrap() {
            Acquire::Ready(range) => range,
            Acquire::NeedsRoom(len) => {
                let target = self.rig.take(0, len).unwrap();
                self.held.insert(id, target);
                self.rig.engine.refill(id, target, on).unwrap()
            }
        };
        assert_eq!(self.held[&id], range);
        self.rig.check(0, range, seed, format!("tensor {seed}"));
        while let Some((id, len)) = self.rig.engine.wanted(on).unwrap() {
            let target = self.rig.take(0, len).unwrap();
            self.held.insert(id, target);
            self.rig.engine.prefetch(id, target, on).unwrap();
        }
    }

    fn flush(&mut self) {
        let on = self.rig.streams[0].engine;
        self.rig.engine.flush(on).unwrap();
        self.sweep();
    }

    #[track_caller]
    fn assert_nothing_held(mut self) {
        self.flush();
        self.rig.engine.drain().unwrap();
        self.sweep();
        assert!(self.held.is_empty(), "{} ranges were never named", self.held.len());
        self.rig.assert_right();
        self.rig.assert_nothing_left();
    }
}

#[test]
fn a_lane_that_only_looks_full_does_not_end_the_fetching_ahead() {
    // Nobody asks a lane of prefetches what is done while readers come: it looked full after so
    // many copies, and all readers from then on had to wait for copies of their own.
    let options = Options { transfers_max: 4, prefetch_count_max: 2, ..options() };
    let rig = Rig::new(Config::adversary(3), quick_pool(Bytes::mib(1)), options, 1);
    let mut frame = Frame { rig, saved: Saved::new(0, Bytes(64)), held: HashMap::new() };
    let storages: Vec<_> = (0..32)
        .map(|seed| {
            let (storage, left) = frame.pack(seed, LEN);
            assert!(matches!(left, Some((_, Evict::Moving(_)))));
            frame.rig.engine.drain().unwrap();
            storage
        })
        .collect();
    frame.flush();
    for (seed, storage) in storages.into_iter().enumerate().rev() {
        frame.unpack(&storage, seed as u64);
        // The device is done; the engine has not asked.
        frame.rig.sim.sync().unwrap();
    }
    let guesses = frame.rig.engine.stats().guesses;
    assert_eq!((guesses.hits, guesses.misses), (31, 1));
    frame.assert_nothing_held();
}

#[test]
fn what_is_unpacked_is_what_was_packed_under_any_schedule() {
    for seed in 0..80 {
        let mut frame = Frame::new(seed, seed as usize % 3, Bytes::mib(1));
        for step in 0..3 {
            let packed: Vec<_> = (0..6).map(|n| frame.pack(100 * step + n, LEN).0).collect();
            for (n, storage) in packed.into_iter().enumerate().rev() {
                frame.unpack(&storage, 100 * step + n as u64);
                drop(storage);
            }
        }
        frame.assert_nothing_held();
    }
}

#[test]
fn a_graph_that_is_kept_is_read_again_without_a_second_copy_out() {
    for seed in 0..40 {
        let mut frame = Frame::new(seed, 0, Bytes::mib(1));
        let on = frame.rig.streams[0].engine;
        let packed: Vec<_> = (0..5).map(|n| frame.pack(n, LEN).0).collect();
        frame.flush();
        for _ in 0..3 {
            for (n, storage) in packed.iter().enumerate().rev() {
                frame.unpack(storage, n as u64);
                let rested = frame.saved.rest(&mut frame.rig.engine, storage.id(), on).unwrap();
                assert_eq!(rested, Some(Evict::Clean), "its host copy is as good as ever");
                frame.sweep();
            }
        }
        let first = &packed[0];
        frame.flush();
        assert_eq!(frame.saved.rest(&mut frame.rig.engine, first.id(), on).unwrap(), None);
        drop(packed);
        frame.assert_nothing_held();
    }
}

#[test]
fn later_passes_over_a_graph_that_is_kept_are_fetched_ahead() {
    // What left again was wanted in the reverse order: the window filled with bytes of the pass
    // before, which nobody claimed, and every reader from then on was served on demand.
    let mut frame = Frame::new(3, 0, Bytes::mib(1));
    frame.rig.engine.set_windows(LEN, Bytes(2 * LEN.0));
    let on = frame.rig.streams[0].engine;
    let packed: Vec<_> = (0..24).map(|n| frame.pack(n, LEN).0).collect();
    frame.flush();
    for pass in 0..4 {
        let before = frame.rig.engine.stats().guesses;
        for (n, storage) in packed.iter().enumerate().rev() {
            frame.unpack(storage, n as u64);
            frame.saved.rest(&mut frame.rig.engine, storage.id(), on).unwrap();
            frame.flush();
        }
        let guesses = frame.rig.engine.stats().guesses;
        let (hits, misses) = (guesses.hits - before.hits, guesses.misses - before.misses);
        // A second pass comes unexpected; who came twice is expected to come again.
        let on_demand = u64::from(pass < 2);
        assert_eq!((hits, misses), (24 - on_demand, on_demand), "pass {pass}");
        assert_eq!(guesses.wrong, 0);
        let expected = if pass == 0 { 0 } else { 2 * LEN.0 };
        assert_eq!(frame.rig.engine.stats().prefetched_bytes, expected, "pass {pass}");
    }
    drop(packed);
    frame.assert_nothing_held();
}

#[test]
fn a_window_that_was_made_smaller_is_kept_to() {
    let mut frame = Frame::new(6, 0, Bytes::mib(1));
    for (window, ahead) in [(Bytes::kib(8), 2 * LEN.0), (LEN, LEN.0), (Bytes::ZERO, 0)] {
        frame.rig.engine.set_windows(window, window);
        let packed: Vec<_> = (0..5).map(|n| frame.pack(n, LEN).0).collect();
        frame.flush();
        frame.unpack(&packed[4], 4);
        assert_eq!(frame.rig.engine.stats().prefetched_bytes, ahead, "window of {window}");
        assert_eq!(frame.rig.engine.options().prefetch_bytes_max, window);
        for (n, storage) in packed.iter().enumerate().take(4).rev() {
            frame.unpack(storage, n as u64);
        }
        drop(packed);
        frame.rig.engine.mark_step().unwrap();
    }
    frame.assert_nothing_held();
}

#[test]
fn a_graph_that_nobody_wants_gives_its_blocks_back_and_names_its_bytes() {
    for seed in 0..40 {
        let mut frame = Frame::new(seed, 1, Bytes::mib(1));
        for step in 0..20 {
            let packed: Vec<_> = (0..4).map(|n| frame.pack(10 * step + n, LEN).0).collect();
            drop(packed);
            frame.sweep();
        }
        frame.rig.engine.drain().unwrap();
        frame.sweep();
        assert_eq!(frame.rig.engine.stats().storages, 0);
        assert_eq!(frame.rig.pool.stats().lent, Bytes::ZERO);
        frame.assert_nothing_held();
    }
}

#[test]
fn one_that_was_dropped_while_it_waited_for_its_turn_sends_nobody_off() {
    let mut frame = Frame::new(3, 1, Bytes::mib(1));
    let (first, left) = frame.pack(0, LEN);
    assert_eq!(left, None, "the last one stays");
    drop(first);
    let (second, left) = frame.pack(1, LEN);
    assert_eq!(left, None, "who should have left is gone");
    let (third, left) = frame.pack(2, LEN);
    assert!(matches!(left, Some((id, Evict::Moving(_))) if id == second.id()), "{left:?}");
    frame.unpack(&third, 2);
    frame.unpack(&second, 1);
    drop((second, third));
    frame.assert_nothing_held();
}

#[test]
fn a_small_one_and_one_without_pinned_room_stay_and_say_why() {
    let mut frame = Frame::new(4, 0, Bytes::kib(4));
    let (small, left) = frame.pack(0, Bytes(32));
    assert_eq!(left, Some((small.id(), Evict::Kept(Kept::TooSmall))));
    let (large, left) = frame.pack(1, Bytes::kib(8));
    assert_eq!(left, Some((large.id(), Evict::Kept(Kept::NoPinnedRoom))));
    assert_eq!(frame.saved.largest(), Bytes::kib(8));
    frame.unpack(&large, 1);
    frame.unpack(&small, 0);
    drop((small, large));
    frame.assert_nothing_held();
}

#[test]
fn bytes_that_another_storage_has_already_are_refused_and_stay_whole() {
    let mut frame = Frame::new(5, 0, Bytes::mib(1));
    let on = frame.rig.streams[0].engine;
    let (whole, _) = frame.pack(7, LEN);
    let part = frame.held[&whole.id()].part(Bytes(1024), Bytes(1024)).unwrap();
    let error = frame.saved.pack(&mut frame.rig.engine, part, "part", on).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::Overlap));
    frame.unpack(&whole, 7);
    drop(whole);
    frame.assert_nothing_held();
}
