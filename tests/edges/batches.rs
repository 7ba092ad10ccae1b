//! The roads to the sites that keep a batch's order: gathered, scattered, given back.
//!
//! What it is not: a test of what the verbs return.
//!
//! Invariant: as for the other stories: nothing but the site keeps the order.
//!
//! ```text
//!   rows --gather: [ProducerDone, BlockReuseWait, a table: BlockIdleQuery]--> block
//!   gathered: [ReleaseWait]   scatter: [TargetFree, RefillAfterCopyOut, ReaderWait]--> rows
//! ```

use crate::plans::{bounds, fourth_copy_fails};
use crate::stories::{LEN, Story, evict, flush, given_up, keeps, owned, read, release, take_over};
use crate::support::Rig;
use lightering::backend::sim::{Fault, FaultPlan, Spot};
use lightering::engine::Batch;
use lightering::pack::Strip;
use lightering::trace::Site;
use lightering::{Bytes, DeviceRange, Options};

/// Every road.
pub(crate) const STORIES: &[Story] = &[
    Story::new(Site::ProducerDone, "a gather reads before its producer wrote", there_and_back),
    Story::new(Site::ProducerDone, "copies gather before their producer wrote", there_and_back)
        .with(no_kernels),
    Story {
        pool: Bytes::kib(4),
        ..Story::new(Site::BlockReuseWait, "rows are gathered over a copy-in's block", over_reader)
    }
    .two_streams(),
    Story {
        pool: Bytes::kib(4),
        ..Story::new(Site::BlockReuseWait, "a block is filled while rows leave it", over_scatter)
    }
    .two_streams(),
    Story::new(Site::ReleaseWait, "gathered rows are written under the gather", written),
    Story {
        faults: second_copy_fails,
        unseen: Some("the block goes back unread, so nobody sees what was torn"),
        ..Story::new(Site::ReleaseWait, "rows are written under half a gather", half_gathered)
    }
    .with(no_kernels),
    Story::new(Site::RefillAfterCopyOut, "a scatter overtakes its own gather", overtaken)
        .two_streams()
        // To be told that no kernel reads a table is to be told that the gather is done.
        .with(no_kernels),
    Story::new(Site::TargetFree, "a scatter overwrites what is still read", target),
    Story::new(Site::TargetFree, "copies scatter over what is still read", target).with(no_kernels),
    Story::new(Site::ReaderWait, "a reader overtakes the scatter", there_and_back),
    Story {
        faults: fourth_copy_fails,
        ..Story::new(Site::FreeAfterCopyIn, "half a scatter lands in reused bytes", half_scattered)
    }
    .with(no_kernels),
    Story::new(Site::BlockIdleQuery, "a table is written while a kernel reads it", two_tables),
];

fn no_kernels() -> Options {
    Options { pack_blocks_max: 0, ..bounds() }
}

fn second_copy_fails() -> FaultPlan {
    FaultPlan::default().at(Spot::Copy, 2, Fault::Refuse)
}

/// Rows with gaps between them: a copy for each, where no kernel moves them.
fn apart(range: DeviceRange) -> [Strip; 1] {
    [Strip::rows(range, Bytes::ZERO, Bytes(512), 2, Bytes::kib(1)).unwrap()]
}

fn filled(rig: &mut Rig, s: usize, seed: u64) -> DeviceRange {
    let range = rig.take(s, LEN).unwrap();
    rig.fill(s, range, seed);
    range
}

fn gather(rig: &mut Rig, s: usize, rows: DeviceRange) -> Batch {
    let strips = [Strip::whole(rows).unwrap()];
    rig.engine.gather(&strips, rig.streams[s].engine, "rows").unwrap()
}

/// Scatters a batch to `rows`, for stream `s`: they must show `seed` there.
fn scatter(rig: &mut Rig, s: usize, batch: &mut Batch, rows: DeviceRange, seed: u64) {
    let strips = [Strip::whole(rows).unwrap()];
    rig.engine.scatter(batch, &strips, rig.streams[s].engine).unwrap();
    rig.check(s, rows, seed, format!("{seed} scattered on stream {s}"));
}

fn there_and_back(rig: &mut Rig) {
    let rows = filled(rig, 0, 1);
    let mut batch = gather(rig, 0, rows);
    let target = rig.take(0, LEN).unwrap();
    scatter(rig, 0, &mut batch, target, 1);
}

fn over_reader(rig: &mut Rig) {
    let rows = filled(rig, 1, 2);
    let a = owned(rig, 0, LEN, 1);
    evict(rig, 0, &a);
    flush(rig, 0);
    read(rig, 0, &a, 1);
    release(rig, 0, a);
    // The copy-in may still be reading the block that these are gathered into.
    let _batch = gather(rig, 1, rows);
}

fn over_scatter(rig: &mut Rig) {
    let other = owned(rig, 1, LEN, 2);
    let rows = filled(rig, 0, 1);
    let mut batch = gather(rig, 0, rows);
    scatter(rig, 0, &mut batch, rows, 1);
    rig.engine.discard(batch).unwrap();
    evict(rig, 1, &other);
}

fn written(rig: &mut Rig) {
    let rows = filled(rig, 0, 1);
    let mut batch = gather(rig, 0, rows);
    rig.engine.gathered(&batch, rig.streams[0].engine).unwrap();
    rig.fill(0, rows, 2);
    let target = rig.take(0, LEN).unwrap();
    scatter(rig, 0, &mut batch, target, 1);
}

fn half_gathered(rig: &mut Rig) {
    let rows = filled(rig, 0, 1);
    rig.engine.gather(&apart(rows), rig.streams[0].engine, "rows").unwrap_err();
    rig.fill(0, rows, 2);
}

fn overtaken(rig: &mut Rig) {
    let rows = filled(rig, 0, 1);
    let mut batch = gather(rig, 0, rows);
    let target = rig.take(1, LEN).unwrap();
    scatter(rig, 1, &mut batch, target, 1);
}

fn target(rig: &mut Rig) {
    let rows = filled(rig, 0, 1);
    let mut batch = gather(rig, 0, rows);
    let used = take_over(rig, 0, LEN);
    keeps(rig, 0, used);
    rig.give(0, used.at());
    let target = rig.take(0, LEN).unwrap();
    scatter(rig, 0, &mut batch, target, 1);
}

fn half_scattered(rig: &mut Rig) {
    let on = rig.streams[0].engine;
    let rows = filled(rig, 0, 1);
    let mut batch = rig.engine.gather(&apart(rows), on, "rows").unwrap();
    let target = rig.take(0, LEN).unwrap();
    rig.engine.scatter(&mut batch, &apart(target), on).unwrap_err();
    given_up(rig, target);
}

fn two_tables(rig: &mut Rig) {
    let [first, second] = [1, 2].map(|seed| filled(rig, 0, seed));
    let mut batch = gather(rig, 0, first);
    let _other = gather(rig, 0, second);
    let target = rig.take(0, LEN).unwrap();
    scatter(rig, 0, &mut batch, target, 1);
}
