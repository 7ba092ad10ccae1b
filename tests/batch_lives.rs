//! Who owns what was gathered: batches that are dropped, refused, or outlive a shutdown; rows that
//! are a storage's; more batches at once than there are tables.
//!
//! The faults guarded against: a pinned block that nobody gives back, a scatter over bytes that the
//! engine holds a host copy of or moves just now, and a driver's queue filled by one batch.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use lightering::backend::sim::{Config, Lazy, Model};
use lightering::backend::{Backend, Cost, Work};
use lightering::engine::Batch;
use lightering::pack::Strip;
use lightering::trace::Counters;
use lightering::{Bytes, DeviceRange, Kind, Misuse, Options, StreamId};
use support::{Rig, quick_pool};

const LEN: Bytes = Bytes::kib(2);

fn options() -> Options {
    // The framework notes its own uses: `fill` and `check` do.
    Options { note_uses: false, ..support::options() }
}

fn rig_of(config: Config) -> Rig {
    Rig::new(config, quick_pool(Bytes::mib(1)), options(), 1)
}

fn gathered(rig: &mut Rig) -> (Batch, DeviceRange) {
    let on = rig.streams[0].engine;
    let range = rig.take(0, LEN).unwrap();
    rig.fill(0, range, 7);
    (rig.engine.gather(&[Strip::whole(range).unwrap()], on, "rows").unwrap(), range)
}

/// What was asked of the device; questions may be more.
fn asked(rig: &Rig) -> Counters {
    Counters { queries: 0, failures: 0, ..rig.engine.stats().seam }
}

fn refuses(rig: &mut Rig, batch: &mut Batch, rows: DeviceRange, on: StreamId, state: &str) {
    let strip = Strip::whole(rows).unwrap();
    let before = asked(rig);
    for refused in [
        rig.engine.gather(&[strip], on, "over").map(drop).unwrap_err(),
        rig.engine.scatter(batch, &[strip], on).unwrap_err(),
    ] {
        assert_eq!(refused.misuse(), Some(Misuse::Overlap), "{state}");
        assert!(refused.to_string().contains("mine"), "{refused}");
    }
    assert_eq!(asked(rig), before, "{state}: something was enqueued first");
}

#[test]
fn rows_of_a_storage_are_refused_in_every_state_of_it() {
    let mut rig = rig_of(Config::scheduled(Box::new(Lazy::default())));
    let on = rig.streams[0].engine;
    let (mut batch, _) = gathered(&mut rig);
    let range = rig.take(0, LEN).unwrap();
    rig.fill(0, range, 5);
    let storage = rig.engine.adopt(range, "mine").unwrap();
    refuses(&mut rig, &mut batch, range, on, "resident");
    rig.engine.evict(storage.id(), on).unwrap();
    refuses(&mut rig, &mut batch, range, on, "leaving");
    rig.engine.flush(on).unwrap();
    while rig.engine.releasable(on).unwrap().is_some() {}
    // The bytes are the framework's again, which puts others there.
    rig.give(0, range.at());
    let range = rig.take(0, LEN).unwrap();
    let strip = Strip::whole(range).unwrap();
    rig.engine.scatter(&mut batch, &[strip], on).unwrap();
    rig.check(0, range, 7, "what was scattered".into());
    rig.engine.prefetch(storage.id(), range, on).unwrap();
    refuses(&mut rig, &mut batch, range, on, "coming");
    rig.engine.acquire(storage.id(), on).unwrap();
    refuses(&mut rig, &mut batch, range, on, "there again");
    rig.check(0, range, 5, "what left and came".into());
    rig.engine.discard(batch).unwrap();
    rig.assert_right();
}

#[test]
fn a_batch_that_another_engine_refuses_goes_home() {
    let [mut mine, mut other] = [1, 2].map(|seed| rig_of(Config::adversary(seed)));
    let (batch, _) = gathered(&mut mine);
    let refused = other.engine.discard(batch).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::Foreign));
    mine.engine.drain().unwrap();
    mine.assert_nothing_left();
}

#[test]
fn a_dropped_batch_gives_its_block_back_whichever_thread_drops_it() {
    let mut rig = rig_of(Config::adversary(3));
    let (first, _) = gathered(&mut rig);
    let (second, range) = gathered(&mut rig);
    drop(first);
    std::thread::spawn(move || drop(second)).join().unwrap();
    // The copies may still run; the blocks are busy until they are known done.
    rig.fill(0, range, 8);
    rig.engine.drain().unwrap();
    assert_eq!(rig.pool.stats().lent, Bytes::kib(64), "but for the table");
    rig.assert_nothing_left();
}

#[test]
fn a_batch_that_outlives_a_shutdown_is_discarded_all_the_same() {
    let mut rig = rig_of(Config::adversary(4));
    let (batch, _) = gathered(&mut rig);
    rig.engine.shutdown().unwrap();
    rig.engine.discard(batch).unwrap();
    let stats = rig.pool.stats();
    assert_eq!((stats.lent, stats.quarantined), (Bytes::ZERO, Bytes::ZERO));
}

#[test]
fn a_batch_of_many_rows_is_busy_while_all_tables_are_read() {
    const ROWS: u64 = 100;
    let bounds = Options { transfers_max: 64, ..options() };
    let pool = quick_pool(Bytes::mib(16));
    let mut rig = Rig::new(Config::timed(Model::default()), pool, bounds, 1);
    let (on, here) = (rig.streams[0].engine, rig.streams[0].here);
    let within = rig.take(0, Bytes(128 * ROWS)).unwrap();
    rig.fill(0, within, 1);
    let strip = Strip::rows(within, Bytes::ZERO, Bytes(64), ROWS, Bytes(128)).unwrap();
    let long = Cost { flops: 1e13, bytes: 0.0, work: Work::Vector };
    rig.sim.inner().launch_fn(here, &[], long, Box::new(|_| Ok(()))).unwrap();
    let mut batches: Vec<Batch> =
        (0..16).map(|_| rig.engine.gather(&[strip], on, "rows").unwrap()).collect();
    let before = asked(&rig);
    let refused = rig.engine.gather(&[strip], on, "rows").unwrap_err();
    assert_eq!(refused.kind(), Kind::Busy, "{refused}");
    assert!(refused.is_retryable() && refused.to_string().contains("16 batches"), "{refused}");
    let refused = rig.engine.scatter(&mut batches[0], &[strip], on).unwrap_err();
    assert_eq!(refused.kind(), Kind::Busy, "{refused}");
    assert_eq!(asked(&rig).copies_out, before.copies_out);
    rig.sim.sync().unwrap();
    batches.push(rig.engine.gather(&[strip], on, "rows").unwrap());
    assert_eq!(rig.engine.stats().seam.copies_out, 0, "a kernel gathers it");
    batches.into_iter().for_each(drop);
    rig.assert_nothing_left();
}
