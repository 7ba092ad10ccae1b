//! Hazards of order, H01 to H15: two uses of the same bytes with nothing between them that says
//! which one is first.

use crate::bench::{
    LEN, SEEDS, acquire, adopted, away, bounds, config, evict, flush, lazy, needs, owned, read,
    release, rig,
};
use crate::support::{Rig, first_wrong, quick_pool};
use lightering::backend::Backend;
use lightering::policy::Kept;
use lightering::storage::{Residency, Tier};
use lightering::trace::{Site, Use};
use lightering::{Acquire, Bytes, Evict, Kind, Misuse, Options};

const POOL: Bytes = Bytes::kib(64);
/// The pattern of whoever takes bytes over.
const OTHER: u64 = 99;

#[test]
fn h01_a_copy_out_waits_for_its_producer() {
    needs(Site::ProducerDone, 1, POOL, |rig| {
        let storage = owned(rig, 0, LEN, 1);
        evict(rig, 0, &storage);
        flush(rig, 0);
        read(rig, 0, &storage, 1);
    });
}

#[test]
fn h02_a_lane_is_no_compute_stream() {
    let mut rig = rig(2, POOL, 2);
    // Streams opened one after the other have handles in a row, the engine's lanes in front.
    let [first, second] = [0, 1].map(|s| rig.sim.raw_stream(rig.streams[s].here).unwrap());
    let opened = rig.engine.stats().seam;
    let refused: Vec<usize> = (1..=16)
        .filter(|back| {
            let adopted = rig.engine.adopt_stream(first.wrapping_sub(back * (second - first)));
            adopted.is_err_and(|error| error.misuse() == Some(Misuse::SameStream))
        })
        .collect();
    // Out, ahead and urgent at least, and no other stream between them.
    let lanes = refused.len();
    assert!(lanes >= 3 && refused == (1..=lanes).collect::<Vec<_>>(), "{refused:?}");
    let seam = rig.engine.stats().seam;
    assert_eq!((seam.records, seam.waits), (opened.records, opened.waits), "nothing enqueued");
}

#[test]
fn h03_the_stream_is_the_one_of_each_call_and_none_before() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, POOL, 2);
        for round in 0..6 {
            // The producer's stream changes at every call, and so does the reader's.
            let (s, other) = (round % 2, (round + 1) % 2);
            let storage = owned(&mut rig, s, LEN, round as u64);
            evict(&mut rig, s, &storage);
            flush(&mut rig, s);
            read(&mut rig, other, &storage, round as u64);
            release(&mut rig, other, storage);
        }
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn h04_device_bytes_are_not_freed_under_the_copy_out() {
    needs(Site::ReleaseWait, 1, POOL, |rig| {
        let (storage, range) = adopted(rig, 0, 1);
        evict(rig, 0, &storage);
        flush(rig, 0);
        assert_eq!(rig.engine.releasable(rig.streams[0].engine).unwrap(), Some(storage.id()));
        // The owner drops them; whoever comes next writes.
        rig.give(0, range.at());
        let next = rig.take(0, LEN).unwrap();
        assert_eq!(next, range, "the allocator hands the same bytes out again");
        rig.fill(0, next, OTHER);
        let home = rig.take(0, LEN).unwrap();
        rig.engine.refill(storage.id(), home, rig.streams[0].engine).unwrap();
        rig.check(0, home, 1, "what left".into());
    });
}

#[test]
fn h05_bytes_given_to_another_storage_are_right_for_both() {
    needs(Site::ReleaseWait, 1, POOL, |rig| {
        let first = owned(rig, 0, LEN, 1);
        let old = rig.engine.range(first.id()).unwrap();
        evict(rig, 0, &first);
        flush(rig, 0);
        let second = owned(rig, 0, LEN, 2);
        assert_eq!(rig.engine.range(second.id()).unwrap(), old, "the same bytes");
        evict(rig, 0, &second);
        flush(rig, 0);
        read(rig, 0, &first, 1);
        read(rig, 0, &second, 2);
    });
}

#[test]
fn h06_the_host_reads_no_block_that_is_still_filled() {
    let mut rig = lazy(1);
    let storage = owned(&mut rig, 0, LEN, 1);
    evict(&mut rig, 0, &storage);
    let mut bytes = [0; LEN.0 as usize];
    for _ in 0..3 {
        let early = rig.engine.read_host(storage.id(), Bytes::ZERO, &mut bytes).unwrap_err();
        assert_eq!((early.kind(), bytes), (Kind::Busy, [0; LEN.0 as usize]));
    }
    rig.sim.sync().unwrap();
    rig.engine.read_host(storage.id(), Bytes::ZERO, &mut bytes).unwrap();
    assert_eq!(first_wrong(&bytes, 1), None);
    needs(Site::HostReadQuery, 1, POOL, |rig| {
        let storage = owned(rig, 0, LEN, 1);
        evict(rig, 0, &storage);
        let mut bytes = [0; LEN.0 as usize];
        while rig.engine.read_host(storage.id(), Bytes::ZERO, &mut bytes).is_err() {}
    });
}

#[test]
fn h08_a_refill_is_behind_its_own_copy_out() {
    needs(Site::RefillAfterCopyOut, 2, POOL, |rig| {
        let storage = owned(rig, 0, LEN, 1);
        evict(rig, 0, &storage);
        flush(rig, 0);
        // Others take the bytes: the reader's, on a stream that knows nothing of the copy-out, are
        // new ones.
        let taken = rig.take(0, LEN).unwrap();
        rig.fill(0, taken, OTHER);
        read(rig, 1, &storage, 1);
    });
}

#[test]
fn h09_a_second_reader_causes_no_second_copy() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, POOL, 2);
        let storage = away(&mut rig, 1);
        let (on, other) = (rig.streams[0].engine, rig.streams[1].engine);
        let home = rig.take(0, LEN).unwrap();
        rig.engine.refill(storage.id(), home, on).unwrap();
        let spare = rig.take(0, LEN).unwrap();
        let again = rig.engine.refill(storage.id(), spare, on).unwrap_err();
        assert_eq!(again.misuse(), Some(Misuse::State));
        rig.give(0, spare.at());
        for stream in [on, other, on] {
            assert_eq!(rig.engine.acquire(storage.id(), stream).unwrap(), Acquire::Ready(home));
        }
        rig.check(1, home, 1, "the second reader".into());
        let stats = rig.engine.stats();
        assert_eq!((stats.refilled_count, stats.refilled_bytes), (1, LEN.0));
        rig.assert_right();
    }
}

#[test]
fn h10_what_is_being_refilled_is_not_evicted() {
    let mut rig = lazy(1);
    let storage = away(&mut rig, 1);
    let on = rig.streams[0].engine;
    let home = rig.take(0, LEN).unwrap();
    rig.engine.prefetch(storage.id(), home, on).unwrap();
    assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Refilling);
    let before = rig.engine.stats().seam;
    let refused = rig.engine.evict(storage.id(), on).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::State));
    assert_eq!(rig.engine.stats().seam, before, "refused before anything was enqueued");
    let ready = rig.engine.acquire(storage.id(), on).unwrap();
    assert_eq!(ready, Acquire::Ready(home));
    rig.check(0, home, 1, "home".into());
    rig.assert_right();
}

#[test]
fn h11_a_copy_in_does_not_overwrite_what_is_still_read() {
    needs(Site::TargetFree, 1, POOL, |rig| {
        let storage = away(rig, 1);
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, OTHER);
        // The old reader of the target is enqueued, and the target is free in the stream's order.
        rig.check(0, range, OTHER, "the old reader".into());
        rig.engine.refill(storage.id(), range, rig.streams[0].engine).unwrap();
        rig.check(0, range, 1, "the new bytes".into());
    });
}

#[test]
fn h12_a_reader_is_behind_the_copy_in() {
    needs(Site::ReaderWait, 1, POOL, |rig| {
        let storage = owned(rig, 0, LEN, 1);
        evict(rig, 0, &storage);
        flush(rig, 0);
        read(rig, 0, &storage, 1);
    });
}

#[test]
fn h13_each_reading_stream_waits_for_itself() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, POOL, 3);
        let storage = owned(&mut rig, 0, LEN, 1);
        evict(&mut rig, 0, &storage);
        flush(&mut rig, 0);
        for s in 0..3 {
            read(&mut rig, s, &storage, 1);
        }
        rig.assert_right();
    }
    // A stream that did not ask is not ordered, and the trace shows it.
    let mut rig = rig(1, POOL, 2);
    let storage = owned(&mut rig, 0, LEN, 1);
    evict(&mut rig, 0, &storage);
    flush(&mut rig, 0);
    let range = acquire(&mut rig, 0, &storage);
    rig.check(1, range, 1, "a stream that did not acquire".into());
    assert!(!rig.hazards().is_empty());
}

#[test]
fn h14_a_block_is_lent_again_behind_its_last_copy() {
    // One block for all.
    needs(Site::BlockReuseWait, 2, Bytes::kib(4), |rig| {
        let (first, second) = (owned(rig, 0, LEN, 1), owned(rig, 1, LEN, 2));
        evict(rig, 0, &first);
        flush(rig, 0);
        read(rig, 0, &first, 1);
        release(rig, 0, first);
        assert!(matches!(evict(rig, 1, &second), Evict::Moving(_)), "the pool has one block");
        flush(rig, 1);
        read(rig, 1, &second, 2);
    });
}

/// A window of `depth` storages ahead over `slots` pinned blocks.
fn ring(seed: u64, depth: usize, slots: u64) {
    let bounds = Options { prefetch_count_max: depth, ..bounds() };
    let pool = quick_pool(Bytes(slots * 4096));
    let mut rig = Rig::new(config(seed), pool, bounds, 1);
    for step in 0..3 {
        let storages: Vec<_> = (0..6).map(|n| owned(&mut rig, 0, LEN, 10 * step + n)).collect();
        for storage in &storages {
            let became = evict(&mut rig, 0, storage);
            let pinned = rig.engine.stats().pinned;
            assert!(pinned.pinned <= Bytes(slots * 4096), "{pinned:?}");
            // More storages than blocks: the others stay on the device, and nobody's is reused.
            assert!(matches!(became, Evict::Moving(_) | Evict::Kept(Kept::NoPinnedRoom)));
        }
        flush(&mut rig, 0);
        for (n, storage) in storages.into_iter().enumerate().rev() {
            read(&mut rig, 0, &storage, 10 * step + n as u64);
            release(&mut rig, 0, storage);
        }
        rig.engine.mark_step().unwrap();
    }
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn h15_a_slot_is_not_overwritten_early_whatever_the_window() {
    for depth in 1..=4 {
        for slots in 1..=3 {
            (0..10).for_each(|seed| ring(seed, depth, slots));
        }
    }
}

#[test]
fn an_in_place_write_waits_for_the_running_copy_out() {
    needs(Site::LiveWriteWait, 1, POOL, |rig| {
        let storage = owned(rig, 0, LEN, 1);
        evict(rig, 0, &storage);
        let range = acquire(rig, 0, &storage);
        // Compute writes where the copy-out reads.
        rig.engine.note(rig.streams[0].engine, &[Use::write(range)]).unwrap();
        rig.fill(0, range, 2);
        assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Resident);
        assert!(matches!(evict(rig, 0, &storage), Evict::Moving(_)), "the host copy was stale");
        flush(rig, 0);
        assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Evicted(Tier::Host));
        read(rig, 0, &storage, 2);
    });
}
