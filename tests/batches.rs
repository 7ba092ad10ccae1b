//! Batches of many ranges whose tables are all taken, and batches that a driver enqueues by half.
//!
//! The faults guarded against: small tables that keep a larger batch from its kernel for good; a
//! batch handed over as one whose copies the checker does not see; and copies of a batch that
//! failed half way, which still read and write bytes that somebody else has by then.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

#[path = "../examples/train/passing.rs"]
mod passing;

use lightering::backend::sim::{Config, Model, Sim};
use lightering::backend::{
    About, Arg, Backend, BatchFailed, Cost, Fence, Grid, Kernel, Memory, Piece, Pinner, Timing,
    Work,
};
use lightering::engine::Batch;
use lightering::pack::Strip;
use lightering::trace::{Actor, Site, Use};
use lightering::{
    Bytes, DevicePtr, DeviceRange, Error, EventId, Kind, Misuse, Options, PinnedRange, Result,
    StreamId,
};
use passing::pass_on;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use support::{Rig, small_pool};

const ROW: Bytes = Bytes(64);

fn options() -> Options {
    // The framework notes its own uses: `fill` and `check` do.
    Options { note_uses: false, ..support::options() }
}

/// `count` rows at a stride of two.
fn rows(within: DeviceRange, count: u64) -> Strip {
    Strip::rows(within, Bytes::ZERO, ROW, count, Bytes(2 * ROW.0)).unwrap()
}

fn gathered(rig: &mut Rig, within: DeviceRange, count: u64) -> Batch {
    let on = rig.streams[0].engine;
    rig.engine.gather(&[rows(within, count)], on, "rows").unwrap()
}

#[test]
fn sixteen_small_tables_do_not_keep_a_larger_batch_from_its_kernel() {
    // A table of at least 64 KiB has 2,730 entries.
    const LARGE: u64 = 3_000;
    let mut rig = Rig::new(
        Config::timed(Model::default()),
        support::quick_pool(Bytes::mib(16)),
        Options { transfers_max: 64, ..options() },
        1,
    );
    let on = rig.streams[0].engine;
    let within = rig.take(0, Bytes(2 * ROW.0 * LARGE)).unwrap();
    rig.fill(0, within, 1);
    // So much is ahead of the gathers that none begins before all are asked for.
    let long = Cost { flops: 1e13, bytes: 0.0, work: Work::Vector };
    let here = rig.streams[0].here;
    rig.sim.inner().launch_fn(here, &[], long, Box::new(|_| Ok(()))).unwrap();
    let small: Vec<Batch> = (0..16).map(|_| gathered(&mut rig, within, 2)).collect();
    assert_eq!(rig.engine.stats().seam.launches, 16, "each has a table of its own");
    let one_more = gathered(&mut rig, within, 2);
    let crowded = rig.engine.stats().seam;
    assert_eq!((crowded.launches, crowded.copies_out), (16, 2), "all tables are being read");
    rig.sim.sync().unwrap();
    let mut large = gathered(&mut rig, within, LARGE);
    let after = rig.engine.stats().seam;
    assert_eq!((after.launches, after.copies_out), (17, 2), "an idle small one made room");
    // That went by the wait of the whole device alone, which the checker does not see.
    rig.engine.gathered(&large, on).unwrap();
    rig.engine.scatter(&mut large, &[rows(within, LARGE)], on).unwrap();
    for batch in small.into_iter().chain([one_more, large]) {
        rig.engine.discard(batch).unwrap();
    }
    rig.give(0, within.at());
    rig.assert_right();
}

/// Passes kernels on, and keeps the most blocks that one of them had.
struct Blocks {
    inner: Sim,
    most: Arc<AtomicUsize>,
}

impl Backend for Blocks {
    pass_on!(memory);

    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        let blocks = grid.blocks.iter().product::<u32>() as usize;
        self.most.fetch_max(blocks, Ordering::Relaxed);
        self.inner.launch(kernel, grid, args, on)
    }

    pass_on!(rest);
}

/// A block runs on one multiprocessor: more of them would take the device from compute.
#[test]
fn no_gather_and_no_scatter_takes_more_blocks_than_it_may() {
    let many = 1000;
    for (pack_blocks_max, count, wanted) in [(1, many, 1), (5, many, 5), (64, many, 64), (64, 6, 3)]
    {
        let most = Arc::new(AtomicUsize::new(0));
        let wrap = |inner: Sim| -> Box<dyn Backend> {
            Box::new(Blocks { inner, most: Arc::clone(&most) })
        };
        let options = Options { pack_blocks_max, ..options() };
        let pool = support::quick_pool(Bytes::mib(1));
        let mut rig = Rig::wrapped(Config::adversary(1), pool, options, 1, wrap);
        let on = rig.streams[0].engine;
        let within = rig.take(0, Bytes(2 * ROW.0 * count)).unwrap();
        rig.fill(0, within, 1);
        let mut batch = gathered(&mut rig, within, count);
        assert_eq!(most.swap(0, Ordering::Relaxed), wanted, "a gather of {count} rows");
        rig.engine.gathered(&batch, on).unwrap();
        rig.engine.scatter(&mut batch, &[rows(within, count)], on).unwrap();
        assert_eq!(most.load(Ordering::Relaxed), wanted, "a scatter of {count} rows");
        rig.engine.discard(batch).unwrap();
        rig.check(0, within, 1, "rows".into());
        rig.give(0, within.at());
        rig.assert_right();
    }
}

/// Has batches, and counts them; the `fails_at`th fails when half of it is enqueued.
struct Half {
    inner: Sim,
    batches: Arc<AtomicUsize>,
    fails_at: usize,
    takes_kernels: bool,
    takes_batches: Arc<AtomicBool>,
}

impl Half {
    fn split<'a>(&self, pieces: &'a [Piece]) -> Option<&'a [Piece]> {
        let nth = self.batches.fetch_add(1, Ordering::Relaxed) + 1;
        (nth == self.fails_at).then(|| &pieces[..pieces.len() / 2])
    }
}

fn failed(enqueued: usize) -> std::result::Result<(), BatchFailed> {
    Err(BatchFailed { enqueued, error: Error::new(Kind::OutOfMemory, "copy_batch") })
}

impl Backend for Half {
    pass_on!(memory);

    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        match self.takes_kernels {
            true => self.inner.launch(kernel, grid, args, on),
            false => Err(Error::usage(lightering::Misuse::BadKernel, "launch")),
        }
    }

    fn has_batches(&self) -> bool {
        self.takes_batches.load(Ordering::Relaxed)
    }

    fn copy_out_batch(
        &mut self,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        match self.split(pieces) {
            Some(half) => self.inner.copy_out_batch(half, on).and_then(|()| failed(half.len())),
            None => self.inner.copy_out_batch(pieces, on),
        }
    }

    fn copy_in_batch(
        &mut self,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        match self.split(pieces) {
            Some(half) => self.inner.copy_in_batch(half, on).and_then(|()| failed(half.len())),
            None => self.inner.copy_in_batch(pieces, on),
        }
    }

    pass_on!(rest);
}

const COUNT: u64 = 8;

fn half(seed: u64, fails_at: usize, options: Options) -> (Rig, Arc<AtomicUsize>) {
    with_batches(seed, options, move |half| Half { fails_at, ..half })
}

fn with_batches(
    seed: u64,
    options: Options,
    as_asked: impl FnOnce(Half) -> Half + 'static,
) -> (Rig, Arc<AtomicUsize>) {
    let batches = Arc::new(AtomicUsize::new(0));
    let counts = batches.clone();
    let pool = support::quick_pool(Bytes::mib(1));
    let wrap = move |inner: Sim| -> Box<dyn Backend> {
        let takes_batches = Arc::new(AtomicBool::new(true));
        let half =
            Half { inner, batches: counts, fails_at: 0, takes_kernels: false, takes_batches };
        Box::new(as_asked(half))
    };
    (Rig::wrapped(Config::adversary(seed), pool, options, 1, wrap), batches)
}

#[test]
fn a_batch_without_a_kernel_is_handed_over_as_one_and_each_copy_is_seen() {
    for (row_bytes_max, expected) in [(Bytes::mib(1), 2), (ROW, 2), (Bytes::ZERO, 0)] {
        let bounds = Options { batch_row_bytes_max: row_bytes_max, ..options() };
        let (mut rig, batches) = half(1, 0, bounds);
        let on = rig.streams[0].engine;
        let within = rig.take(0, Bytes(2 * ROW.0 * COUNT)).unwrap();
        let row = |nth: u64| within.part(Bytes(2 * nth * ROW.0), ROW).unwrap();
        (0..COUNT).for_each(|nth| rig.fill(0, row(nth), nth));
        let mut batch = gathered(&mut rig, within, COUNT);
        rig.engine.gathered(&batch, on).unwrap();
        (0..COUNT).for_each(|nth| rig.fill(0, row(nth), 99));
        rig.engine.scatter(&mut batch, &[rows(within, COUNT)], on).unwrap();
        (0..COUNT).for_each(|nth| rig.check(0, row(nth), nth, format!("row {nth}")));
        rig.engine.discard(batch).unwrap();
        let seam = rig.engine.stats().seam;
        assert_eq!((seam.copies_out, seam.copies_in), (COUNT, COUNT));
        assert_eq!(batches.load(Ordering::Relaxed), expected, "at most {row_bytes_max} each");
        rig.give(0, within.at());
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

/// A kernel queues behind compute; but small rows cost the host more as copies than a kernel does.
#[test]
fn rows_that_a_batch_is_cheap_for_wait_for_no_kernel_and_smaller_ones_take_one() {
    for (batch_row_bytes_min, batched, launched) in [(ROW, 2, 0), (ROW + Bytes(1), 0, 2)] {
        let bounds = Options { batch_row_bytes_min, ..options() };
        let (mut rig, batches) =
            with_batches(1, bounds, |half| Half { takes_kernels: true, ..half });
        let on = rig.streams[0].engine;
        let within = rig.take(0, Bytes(2 * ROW.0 * COUNT)).unwrap();
        let row = |nth: u64| within.part(Bytes(2 * nth * ROW.0), ROW).unwrap();
        (0..COUNT).for_each(|nth| rig.fill(0, row(nth), nth));
        let mut batch = gathered(&mut rig, within, COUNT);
        rig.engine.gathered(&batch, on).unwrap();
        (0..COUNT).for_each(|nth| rig.fill(0, row(nth), 99));
        rig.engine.scatter(&mut batch, &[rows(within, COUNT)], on).unwrap();
        (0..COUNT).for_each(|nth| rig.check(0, row(nth), nth, format!("row {nth}")));
        rig.engine.discard(batch).unwrap();
        let seen = (batches.load(Ordering::Relaxed), rig.engine.stats().seam.launches);
        assert_eq!(seen, (batched, launched), "batches from {batch_row_bytes_min}");
        rig.give(0, within.at());
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

/// A driver that has the call may refuse it at any time: then a kernel scatters what the call
/// gathered, or the other way round.
#[test]
fn rows_come_home_though_another_way_is_taken_than_they_left_by() {
    for (first, seed) in [(true, 1), (false, 2), (true, 3), (false, 4)] {
        let bounds = Options { batch_row_bytes_min: ROW, ..options() };
        let takes_batches = Arc::new(AtomicBool::new(first));
        let shared = takes_batches.clone();
        let (mut rig, batches) = with_batches(seed, bounds, move |half| Half {
            takes_kernels: true,
            takes_batches: shared,
            ..half
        });
        let on = rig.streams[0].engine;
        let within = rig.take(0, Bytes(2 * ROW.0 * COUNT)).unwrap();
        let row = |nth: u64| within.part(Bytes(2 * nth * ROW.0), ROW).unwrap();
        (0..COUNT).for_each(|nth| rig.fill(0, row(nth), nth));
        let mut batch = gathered(&mut rig, within, COUNT);
        rig.engine.gathered(&batch, on).unwrap();
        (0..COUNT).for_each(|nth| rig.fill(0, row(nth), 99));
        takes_batches.store(!first, Ordering::Relaxed);
        rig.engine.scatter(&mut batch, &[rows(within, COUNT)], on).unwrap();
        (0..COUNT).for_each(|nth| rig.check(0, row(nth), nth, format!("row {nth}")));
        rig.engine.discard(batch).unwrap();
        let seen = (batches.load(Ordering::Relaxed), rig.engine.stats().seam.launches);
        assert_eq!(seen, (1, 1), "one way each");
        rig.give(0, within.at());
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn a_row_cut_for_a_kernel_is_one_copy_where_there_is_none() {
    let (mut rig, _) = half(1, 0, options());
    let on = rig.streams[0].engine;
    // A kernel gets it in pieces of 64 KiB.
    let within = rig.take(0, Bytes::kib(400)).unwrap();
    rig.fill(0, within, 1);
    let strips = [Strip::whole(within).unwrap()];
    let mut batch = rig.engine.gather(&strips, on, "row").unwrap();
    rig.engine.gathered(&batch, on).unwrap();
    rig.fill(0, within, 2);
    rig.engine.scatter(&mut batch, &strips, on).unwrap();
    rig.check(0, within, 1, String::from("row"));
    rig.engine.discard(batch).unwrap();
    let seam = rig.engine.stats().seam;
    assert_eq!((seam.copies_out, seam.copies_in), (1, 1));
    rig.give(0, within.at());
    rig.assert_right();
}

#[test]
fn what_a_failed_batch_enqueued_is_behind_nobodys_back() {
    for seed in 0..40 {
        // The gather, or the scatter.
        for fails_at in [1, 2] {
            let (mut rig, _) = half(seed, fails_at, options());
            let on = rig.streams[0].engine;
            let within = rig.take(0, Bytes(2 * ROW.0 * COUNT)).unwrap();
            let row = |nth: u64| within.part(Bytes(2 * nth * ROW.0), ROW).unwrap();
            (0..COUNT).for_each(|nth| rig.fill(0, row(nth), nth));
            let strips = [rows(within, COUNT)];
            let gather = rig.engine.gather(&strips, on, "rows");
            if fails_at == 1 {
                let error = gather.unwrap_err();
                assert_eq!(error.kind(), Kind::OutOfMemory);
                assert!(error.to_string().contains("rows"), "{error}");
            } else {
                let mut batch = gather.unwrap();
                let error = rig.engine.scatter(&mut batch, &strips, on).unwrap_err();
                assert_eq!(error.kind(), Kind::OutOfMemory);
                rig.engine.discard(batch).unwrap();
            }
            // The copies that were enqueued may still run: this is ordered behind them.
            (0..COUNT).for_each(|nth| rig.fill(0, row(nth), 99));
            (0..COUNT).for_each(|nth| rig.check(0, row(nth), 99, format!("row {nth}")));
            rig.give(0, within.at());
            rig.assert_right();
            rig.assert_nothing_left();
        }
    }
}

/// Loads no kernel for now: the device has no memory for it.
struct NoRoom {
    inner: Sim,
    is_short: Arc<AtomicBool>,
}

impl Backend for NoRoom {
    pass_on!(memory);

    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        match self.is_short.load(Ordering::Relaxed) {
            true => Err(Error::new(Kind::OutOfMemory, "launch")),
            false => self.inner.launch(kernel, grid, args, on),
        }
    }

    pass_on!(rest);
}

#[test]
fn a_kernel_without_memory_to_be_loaded_into_is_done_without_until_there_is_some() {
    let is_short = Arc::new(AtomicBool::new(true));
    let short = is_short.clone();
    let wrap =
        |inner: Sim| -> Box<dyn Backend> { Box::new(NoRoom { inner, is_short: short.clone() }) };
    let pool = support::quick_pool(Bytes::mib(1));
    let mut rig = Rig::wrapped(Config::adversary(5), pool, options(), 1, wrap);
    let on = rig.streams[0].engine;
    let within = rig.take(0, Bytes(2 * ROW.0 * 8)).unwrap();
    let row = |nth: u64| within.part(Bytes(2 * nth * ROW.0), ROW).unwrap();
    for launches in [0, 2] {
        (0..8).for_each(|nth| rig.fill(0, row(nth), nth));
        let mut batch = gathered(&mut rig, within, 8);
        rig.engine.gathered(&batch, on).unwrap();
        (0..8).for_each(|nth| rig.fill(0, row(nth), 99));
        rig.engine.scatter(&mut batch, &[rows(within, 8)], on).unwrap();
        (0..8).for_each(|nth| rig.check(0, row(nth), nth, format!("row {nth}")));
        rig.engine.discard(batch).unwrap();
        assert_eq!(rig.engine.stats().seam.launches, launches);
        is_short.store(false, Ordering::Relaxed);
    }
    rig.give(0, within.at());
    rig.assert_right();
    rig.assert_nothing_left();
}

/// A batch is known by its number on a lane, and another engine has one of the same number.
#[test]
fn a_batch_of_another_engine_is_not_taken_for_its_own() {
    let [mut mine, mut other] =
        [1, 2].map(|_| Rig::new(Config::adversary(1), small_pool(Bytes::mib(1)), options(), 1));
    let [ours, theirs] = [&mut mine, &mut other].map(|rig| {
        let within = rig.take(0, Bytes(16 * ROW.0)).unwrap();
        rig.fill(0, within, 1);
        gathered(rig, within, 8)
    });
    let there = other.streams[0].engine;
    let refused = other.engine.gathered(&ours, there).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::Foreign));
    other.engine.gathered(&theirs, there).unwrap();
    other.engine.discard(theirs).unwrap();
    mine.engine.discard(ours).unwrap();
}
