//! One short program for each road to each site of the engine, in which losing that site's order
//! is a fault: clean as it is, and flagged when the site is broken.
//!
//! What it is not: a test of what the verbs return.
//!
//! Invariant: no story calls `step` or waits on the host between what its site orders, so that
//! nothing but the site keeps the order.
//!
//! ```text
//!   Story { site, name, .. , run }     run(rig): allocs, kernels, verbs -> bytes checked on device
//! ```

use crate::plans::{
    bounds, fourth_copy_fails, no_answers, none_unreleased, one_ahead, one_transfer, timed,
};
use crate::support::Rig;
use lightering::backend::sim::FaultPlan;
use lightering::trace::{Site, Use};
use lightering::{Acquire, Bytes, DeviceRange, Evict, Kind, Options, Residency, Storage};

/// A program that ends at one site by one road.
pub(crate) struct Story {
    pub(crate) site: Site,
    /// What is lost with the site.
    pub(crate) name: &'static str,
    pub(crate) streams: usize,
    pub(crate) pool: Bytes,
    pub(crate) options: fn() -> Options,
    pub(crate) faults: fn() -> FaultPlan,
    pub(crate) run: fn(&mut Rig),
    /// Can the loss be seen in bytes? If not, why it is a loss all the same.
    pub(crate) unseen: Option<&'static str>,
}

impl Story {
    pub(crate) const fn new(site: Site, name: &'static str, run: fn(&mut Rig)) -> Story {
        let pool = Bytes::mib(1);
        let faults = FaultPlan::default;
        Story { site, name, streams: 1, pool, options: bounds, faults, run, unseen: None }
    }

    pub(crate) const fn two_streams(self) -> Story {
        Story { streams: 2, ..self }
    }

    pub(crate) const fn with(self, options: fn() -> Options) -> Story {
        Story { options, ..self }
    }
}

/// Every road.
pub(crate) const STORIES: &[Story] = &[
    Story::new(Site::ProducerDone, "a copy-out reads before its producer wrote", reader),
    Story::new(Site::OtherUsersDone, "a copy-out reads before another stream wrote", other_writer)
        .two_streams(),
    Story::new(Site::OtherUsersDone, "bytes go while another stream reads them", other_reader)
        .two_streams(),
    Story::new(Site::ReleaseWait, "flushed bytes are reused under the copy-out", flushed),
    Story::new(Site::ReleaseWait, "bytes over the bound are reused under the copy-out", over)
        .with(none_unreleased),
    Story::new(Site::ReleaseQuery, "bytes under the bound are reused under the copy-out", over),
    Story::new(Site::ReleaseQuery, "a dropped target is reused under the copy-in", dropped_target),
    Story::new(Site::ReleaseQuery, "several streams: reused under the copy-out", |rig| {
        fenced(rig, false)
    })
    .two_streams(),
    Story::new(Site::ReleaseFence, "several streams: reused under a kernel", |rig| {
        fenced(rig, true)
    })
    .two_streams(),
    Story {
        unseen: Some("the host copy is given up, so nobody reads what was torn"),
        ..Story::new(Site::LiveWriteWait, "live bytes are written under the copy-out", live_write)
    },
    Story {
        unseen: Some("the host copy is given up, so nobody reads what was torn"),
        ..Story::new(Site::LiveWriteWait, "bytes acquired to write are copied out", live_writer)
    },
    Story::new(Site::HostReadQuery, "the host reads a block that is still filled", host_read),
    Story::new(Site::RefillAfterCopyOut, "a copy-in overtakes its own copy-out", overtaken)
        .two_streams(),
    Story::new(Site::TargetFree, "a copy-in overwrites what is still read", target),
    Story::new(Site::ReaderWait, "a reader overtakes the copy-in", reader),
    Story::new(Site::ReaderWait, "a timed reader overtakes the copy-in", reader).with(timed),
    Story::new(Site::CopyInBeforeWrite, "a copy-in lands on a later write", unread_write)
        .two_streams(),
    Story {
        faults: no_answers,
        ..Story::new(
            Site::EarlierCopyIn,
            "a block is filled while its first copy-in reads",
            twice_in,
        )
    }
    .two_streams()
    .with(one_ahead),
    Story::new(Site::BlockReuseWait, "a block is filled while it is still read", block_reused)
        .two_streams(),
    Story {
        pool: Bytes::kib(8),
        ..Story::new(Site::BlockIdleQuery, "a busy block is split and filled", block_split)
            .two_streams()
    },
    Story::new(Site::FreeAfterUsers, "a clean copy's bytes go under a reader", clean_reader)
        .two_streams(),
    Story::new(Site::FreeAfterUsers, "a released storage's bytes go under a reader", end_reader)
        .two_streams(),
    Story::new(Site::FreeAfterCopyIn, "a cancelled target is reused under the copy-in", cancelled),
    Story::new(Site::FreeAfterCopyIn, "a released target is reused under the copy-in", ended),
    Story {
        faults: fourth_copy_fails,
        ..Story::new(Site::FreeAfterCopyIn, "half a copy-in lands in reused bytes", half_refilled)
    },
    Story::new(Site::AheadTurn, "a later trunk overwrites what is still read", later_trunk),
    Story::new(Site::AheadJoin, "a reader overtakes a trunk on another stream", other_trunk),
    Story::new(Site::TransferQuery, "a copy-out is forgotten while it runs", forgotten_out),
    Story::new(Site::TransferQuery, "a copy-in is forgotten while it runs", forgotten_in)
        .two_streams()
        .with(one_transfer),
];

pub(crate) const LEN: Bytes = Bytes::kib(2);
/// The pattern of whoever takes bytes over.
const OTHER: u64 = 99;

/// A storage of the engine's own, filled on stream `s`.
pub(crate) fn owned(rig: &mut Rig, s: usize, len: Bytes, seed: u64) -> Storage {
    let on = rig.streams[s].engine;
    let storage = rig.engine.alloc(len, on, "x").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(s, range, seed);
    storage
}

/// A storage of the framework's, filled on stream `s`.
fn adopted(rig: &mut Rig, s: usize, seed: u64) -> (Storage, DeviceRange) {
    adopted_of(rig, s, LEN, seed)
}

fn adopted_of(rig: &mut Rig, s: usize, len: Bytes, seed: u64) -> (Storage, DeviceRange) {
    let range = rig.take(s, len).unwrap();
    rig.fill(s, range, seed);
    (rig.engine.adopt(range, "y").unwrap(), range)
}

/// A storage of the framework's whose bytes are only on the host, and behind its copy-out.
fn away(rig: &mut Rig, seed: u64) -> Storage {
    away_of(rig, LEN, seed)
}

fn away_of(rig: &mut Rig, len: Bytes, seed: u64) -> Storage {
    let (storage, range) = adopted_of(rig, 0, len, seed);
    evict(rig, 0, &storage);
    flush(rig, 0);
    let on = rig.streams[0].engine;
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(storage.id()));
    rig.give(0, range.at());
    storage
}

/// Fetches a storage of the framework's ahead.
fn fetch(rig: &mut Rig, storage: &Storage) -> DeviceRange {
    let target = rig.take(0, storage.len()).unwrap();
    rig.engine.prefetch(storage.id(), target, rig.streams[0].engine).unwrap();
    target
}

pub(crate) fn evict(rig: &mut Rig, s: usize, storage: &Storage) -> Evict {
    rig.engine.evict(storage.id(), rig.streams[s].engine).unwrap()
}

pub(crate) fn flush(rig: &mut Rig, s: usize) {
    rig.engine.flush(rig.streams[s].engine).unwrap();
}

fn acquire(rig: &mut Rig, s: usize, storage: &Storage) -> DeviceRange {
    match rig.engine.acquire(storage.id(), rig.streams[s].engine).unwrap() {
        Acquire::Ready(range) => range,
        Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
    }
}

/// Reads a storage on stream `s`: it must show `seed`.
pub(crate) fn read(rig: &mut Rig, s: usize, storage: &Storage, seed: u64) {
    let range = acquire(rig, s, storage);
    rig.check(s, range, seed, format!("{seed} on stream {s}"));
}

pub(crate) fn release(rig: &mut Rig, s: usize, storage: Storage) {
    rig.engine.release(storage, rig.streams[s].engine).unwrap();
}

/// Takes as many bytes on stream `s`, which are those given back last, and makes them show `OTHER`.
pub(crate) fn take_over(rig: &mut Rig, s: usize, len: Bytes) -> DeviceRange {
    let range = rig.take(s, len).unwrap();
    rig.fill(s, range, OTHER);
    range
}

/// What was taken over still shows it.
pub(crate) fn keeps(rig: &mut Rig, s: usize, range: DeviceRange) {
    rig.check(s, range, OTHER, "taken over".into());
}

/// What the framework writes, in the engine's hearing.
fn overwrite(rig: &mut Rig, s: usize, range: DeviceRange, seed: u64) {
    rig.engine.note(rig.streams[s].engine, &[Use::write(range)]).unwrap();
    rig.fill(s, range, seed);
}

fn other_writer(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    rig.order(0, 1);
    let range = acquire(rig, 1, &a);
    overwrite(rig, 1, range, 2);
    evict(rig, 0, &a);
    flush(rig, 0);
    read(rig, 0, &a, 2);
}

fn other_reader(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    rig.order(0, 1);
    read(rig, 1, &a, 1);
    evict(rig, 0, &a);
    flush(rig, 0);
    take_over(rig, 0, LEN);
}

fn flushed(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    evict(rig, 0, &a);
    flush(rig, 0);
    take_over(rig, 0, LEN);
    read(rig, 0, &a, 1);
}

fn over(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    let b = owned(rig, 0, LEN, 2);
    evict(rig, 0, &a);
    evict(rig, 0, &b);
    take_over(rig, 0, LEN);
    read(rig, 0, &a, 1);
}

fn dropped_target(rig: &mut Rig) {
    let a = away(rig, 1);
    let target = fetch(rig, &a);
    let (id, on) = (a.id(), rig.streams[0].engine);
    drop(a);
    until(|| {
        let named = rig.engine.releasable(on).unwrap();
        assert!(named.is_none_or(|named| named == id));
        named.is_some()
    });
    rig.give(0, target.at());
    let range = take_over(rig, 0, LEN);
    keeps(rig, 0, range);
}

/// Asks again and again; a device that is asked gets on.
fn until(mut done: impl FnMut() -> bool) {
    let asked = (0..100_000).find(|_| done());
    assert!(asked.is_some(), "the device stands still");
}

/// Evicts a storage of the framework's on stream 0, and then another one, or has an operator's
/// kernel behind that; and gives its bytes to stream 1 when the engine lets them go.
fn fenced(rig: &mut Rig, operator: bool) {
    // Taken on the other stream, as an allocator may have it.
    let range = rig.take(1, LEN).unwrap();
    rig.order(1, 0);
    rig.fill(0, range, 1);
    let a = rig.engine.adopt(range, "a").unwrap();
    let (b, _) = adopted(rig, 0, 2);
    evict(rig, 0, &a);
    if operator {
        rig.check(0, range, 1, "the operator's input".into());
        // An eviction would mark a moment behind it that is as good as the fence's own.
        flush(rig, 0);
    } else {
        evict(rig, 0, &b);
    }
    let on = rig.streams[0].engine;
    until(|| rig.engine.releasable(on).unwrap() == Some(a.id()));
    rig.give(1, range.at());
    take_over(rig, 1, LEN);
    let target = rig.take(0, LEN).unwrap();
    rig.engine.refill(a.id(), target, on).unwrap();
    rig.check(0, target, 1, "after its bytes went".into());
}

fn live_write(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    evict(rig, 0, &a);
    let range = acquire(rig, 0, &a);
    overwrite(rig, 0, range, 2);
    rig.check(0, range, 2, "written in place".into());
}

fn live_writer(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    evict(rig, 0, &a);
    let on = rig.streams[0].engine;
    let Acquire::Ready(range) = rig.engine.acquire_mut(a.id(), on).unwrap() else { return };
    rig.fill(0, range, 2);
}

fn host_read(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    evict(rig, 0, &a);
    let mut bytes = vec![0; LEN.0 as usize];
    until(|| match rig.engine.read_host(a.id(), Bytes::ZERO, &mut bytes) {
        Ok(()) => true,
        Err(error) if error.kind() == Kind::Busy => false,
        Err(error) => panic!("{error:?}"),
    });
    if let Some(at) = crate::support::first_wrong(&bytes, 1) {
        rig.wrong.lock().unwrap().push(format!("the host found byte {at} wrong"));
    }
}

fn overtaken(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    evict(rig, 0, &a);
    flush(rig, 0);
    // Otherwise the other stream may take the same bytes, behind their release and the copy-out.
    take_over(rig, 0, LEN);
    read(rig, 1, &a, 1);
}

fn target(rig: &mut Rig) {
    let a = away(rig, 1);
    let used = take_over(rig, 0, LEN);
    keeps(rig, 0, used);
    rig.give(0, used.at());
    let target = rig.take(0, LEN).unwrap();
    rig.engine.refill(a.id(), target, rig.streams[0].engine).unwrap();
    rig.check(0, target, 1, "refilled".into());
}

fn reader(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    evict(rig, 0, &a);
    flush(rig, 0);
    read(rig, 0, &a, 1);
}

fn unread_write(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    evict(rig, 0, &a);
    flush(rig, 0);
    let range = acquire(rig, 0, &a);
    overwrite(rig, 1, range, 2);
    rig.check(1, range, 2, "written by another stream".into());
}

fn twice_in(rig: &mut Rig) {
    let c = owned(rig, 1, LEN, 3);
    let [a, b] = [1, 2].map(|seed| {
        let storage = owned(rig, 0, LEN, seed);
        evict(rig, 0, &storage);
        storage
    });
    flush(rig, 0);
    // The reader of one has the other fetched ahead.
    read(rig, 0, &b, 2);
    assert_eq!(rig.engine.residency(a.id()).unwrap(), Residency::Refilling);
    read(rig, 0, &a, 1);
    assert_eq!(evict(rig, 0, &a), Evict::Clean);
    flush(rig, 0);
    take_over(rig, 0, LEN);
    // The second time it comes by the other lane, for the other stream.
    read(rig, 1, &a, 1);
    release(rig, 1, a);
    evict(rig, 1, &c);
}

fn block_reused(rig: &mut Rig) {
    let b = owned(rig, 1, LEN, 2);
    let a = owned(rig, 0, LEN, 1);
    evict(rig, 0, &a);
    flush(rig, 0);
    read(rig, 0, &a, 1);
    release(rig, 0, a);
    // The copy-in may still be reading the block that this one is copied into.
    evict(rig, 1, &b);
}

fn block_split(rig: &mut Rig) {
    let b = owned(rig, 1, Bytes::kib(4), 2);
    let a = owned(rig, 0, Bytes::kib(8), 1);
    evict(rig, 0, &a);
    flush(rig, 0);
    read(rig, 0, &a, 1);
    release(rig, 0, a);
    // The pool's one block is of another size: it can be split only once it is idle.
    until(|| matches!(evict(rig, 1, &b), Evict::Moving(_)));
}

fn clean_reader(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    evict(rig, 0, &a);
    acquire(rig, 0, &a);
    rig.order(0, 1);
    read(rig, 1, &a, 1);
    assert_eq!(evict(rig, 0, &a), Evict::Clean);
    flush(rig, 0);
    take_over(rig, 0, LEN);
}

fn end_reader(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    rig.order(0, 1);
    read(rig, 1, &a, 1);
    release(rig, 0, a);
    take_over(rig, 0, LEN);
}

/// A target that the engine gives up must not be written any more.
pub(crate) fn given_up(rig: &mut Rig, target: DeviceRange) {
    rig.give(0, target.at());
    let range = take_over(rig, 0, LEN);
    assert_eq!(range, target, "bytes given back last are taken first");
    keeps(rig, 0, range);
}

fn cancelled(rig: &mut Rig) {
    let a = away(rig, 1);
    let target = fetch(rig, &a);
    rig.engine.cancel(a.id(), rig.streams[0].engine).unwrap();
    given_up(rig, target);
}

fn ended(rig: &mut Rig) {
    let a = away(rig, 1);
    let target = fetch(rig, &a);
    release(rig, 0, a);
    given_up(rig, target);
}

fn half_refilled(rig: &mut Rig) {
    let a = away(rig, 1);
    let target = rig.take(0, LEN).unwrap();
    let refused = rig.engine.refill(a.id(), target, rig.streams[0].engine).unwrap_err();
    assert_eq!(refused.kind(), Kind::OutOfMemory);
    given_up(rig, target);
}

/// Beyond doubt: while copies leave, the lane of copies ahead takes no turns.
fn nothing_leaves(rig: &mut Rig) {
    rig.engine.drain().unwrap();
}

/// Four trunks, so that the third is on a stream that waited for nothing itself.
fn later_trunk(rig: &mut Rig) {
    let len = Bytes::kib(4);
    let a = away_of(rig, len, 1);
    nothing_leaves(rig);
    let used = take_over(rig, 0, len);
    keeps(rig, 0, used);
    rig.give(0, used.at());
    fetch(rig, &a);
    read(rig, 0, &a, 1);
}

fn other_trunk(rig: &mut Rig) {
    let a = away(rig, 1);
    nothing_leaves(rig);
    fetch(rig, &a);
    read(rig, 0, &a, 1);
}

fn forgotten_out(rig: &mut Rig) {
    let a = owned(rig, 0, LEN, 1);
    let Evict::Moving(transfer) = evict(rig, 0, &a) else { panic!("it has bytes to move") };
    rig.engine.is_done(transfer).unwrap();
    flush(rig, 0);
    take_over(rig, 0, LEN);
    read(rig, 0, &a, 1);
}

fn forgotten_in(rig: &mut Rig) {
    let [a, b, c] = [1, 2, 3].map(|seed| {
        let storage = owned(rig, 0, LEN, seed);
        until(|| matches!(evict(rig, 0, &storage), Evict::Moving(_)));
        flush(rig, 0);
        storage
    });
    read(rig, 0, &a, 1);
    read(rig, 0, &b, 2);
    // Both lanes are full: the copy-in on the second is asked about.
    until(|| rig.engine.acquire(c.id(), rig.streams[0].engine).is_ok());
    read(rig, 1, &b, 2);
}
