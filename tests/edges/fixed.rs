//! The roads to the sites that let bytes be unmapped, whose address stays.
//!
//! What it is not: a test of what the verbs return. A site that is broken costs the device here, so
//! every verb behind it may fail.
//!
//! Invariant: as for the other stories: nothing but the site keeps the order.
//!
//! ```text
//!   evict -> [UnmapQuery: copies done?] -> [UnmapIdle: nothing left to do?] ------> unmapped
//!                                          `-> [UnmapFence: every stream past it?] --^
//! ```

use crate::plans::bounds;
use crate::stories::{LEN, Story};
use crate::support::Rig;
use lightering::storage::{Residency, Tier};
use lightering::trace::Site;
use lightering::{Acquire, Bytes, DeviceRange, Options, Storage};

/// Every road.
pub(crate) const STORIES: &[Story] = &[
    Story::new(Site::UnmapQuery, "bytes are unmapped under the copy-out", flushed).with(pooled),
    Story::new(Site::UnmapQuery, "bytes are unmapped for a reader, under the copy-out", pressed)
        .with(pooled),
    Story::new(
        Site::UnmapQuery,
        "bytes fetched for nothing are unmapped under the copy",
        cancelled,
    )
    .with(ahead),
    Story::new(Site::UnmapQuery, "an ended storage's bytes are unmapped under the copy-out", ended)
        .with(pooled),
    Story::new(Site::UnmapFence, "bytes are unmapped under a kernel behind the eviction", behind)
        .with(pooled),
    Story::new(Site::UnmapFence, "bytes are unmapped under another stream's kernel", other_reader)
        .two_streams()
        .with(pooled),
    Story::new(Site::UnmapIdle, "bytes are unmapped under a kernel that still runs", behind)
        .with(pooled),
    Story::new(
        Site::UnmapIdle,
        "bytes are unmapped under a kernel of another stream",
        other_reader,
    )
    .two_streams()
    .with(pooled),
    Story::new(Site::UnmapFence, "an ended storage's bytes are unmapped under a kernel", read_last)
        .with(pooled),
];

fn pooled() -> Options {
    Options { memory_pooled_bytes_min: Bytes::ZERO, memory_bytes_max: Bytes::kib(1), ..bounds() }
}

fn ahead() -> Options {
    Options { prefetch_count_max: 1, ..pooled() }
}

/// A storage whose address stays, filled on stream `s`.
fn fixed(rig: &mut Rig, s: usize, len: Bytes, seed: u64) -> (Storage, DeviceRange) {
    let on = rig.streams[s].engine;
    let storage = rig.engine.alloc_fixed(len, on, "fixed").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(s, range, seed);
    (storage, range)
}

fn evict(rig: &mut Rig, s: usize, storage: &Storage) {
    rig.engine.evict(storage.id(), rig.streams[s].engine).unwrap();
}

/// Asks until the bytes are gone, or the device is.
fn until_gone(rig: &mut Rig, storage: &Storage) -> Option<()> {
    for _ in 0..10_000 {
        if rig.engine.residency(storage.id()).unwrap() == Residency::Evicted(Tier::Host) {
            return Some(());
        }
        rig.engine.flush(rig.streams[0].engine).ok()?;
    }
    panic!("the bytes stay for ever: {:?}", rig.engine);
}

/// Asks until so many were unmapped, or the device is gone.
fn until_unmapped(rig: &mut Rig, count: u64) -> Option<()> {
    for _ in 0..10_000 {
        if rig.engine.stats().seam.unmaps >= count {
            return Some(());
        }
        rig.engine.flush(rig.streams[0].engine).ok()?;
    }
    panic!("the bytes stay for ever: {:?}", rig.engine);
}

/// Reads a storage: it must show `seed`, at its address.
fn read(rig: &mut Rig, s: usize, (storage, range): &(Storage, DeviceRange), seed: u64) {
    if let Ok(Acquire::Ready(at)) = rig.engine.acquire(storage.id(), rig.streams[s].engine) {
        assert_eq!(at, *range, "the address stays");
        check(rig, s, at, seed);
    }
}

/// As the rig's, on a device that may be lost.
fn check(rig: &mut Rig, s: usize, range: DeviceRange, seed: u64) {
    if lightering::backend::Backend::memory(&mut rig.sim).is_ok() {
        rig.check(s, range, seed, format!("{seed} on stream {s}"));
    }
}

fn flushed(rig: &mut Rig) {
    let a = fixed(rig, 0, LEN, 1);
    evict(rig, 0, &a.0);
    if until_gone(rig, &a.0).is_some() {
        read(rig, 0, &a, 1);
    }
}

fn pressed(rig: &mut Rig) {
    let len = Bytes::kib(24);
    let (a, b) = (fixed(rig, 0, len, 1), fixed(rig, 0, len, 2));
    evict(rig, 0, &a.0);
    // There is no room for a third but that of the first.
    let on = rig.streams[0].engine;
    let Ok(c) = rig.engine.alloc_fixed(len, on, "third") else { return };
    let range = rig.engine.range(c.id()).unwrap();
    if lightering::backend::Backend::memory(&mut rig.sim).is_ok() {
        rig.fill(0, range, 3);
    }
    check(rig, 0, b.1, 2);
}

fn cancelled(rig: &mut Rig) {
    let (a, b) = (fixed(rig, 0, LEN, 1), fixed(rig, 0, LEN, 2));
    evict(rig, 0, &a.0);
    evict(rig, 0, &b.0);
    // Both leave beyond doubt: what the story is about comes after.
    rig.engine.drain().unwrap();
    let (Some(()), Some(())) = (until_gone(rig, &a.0), until_gone(rig, &b.0)) else { return };
    read(rig, 0, &b, 2);
    assert_eq!(rig.engine.residency(a.0.id()).unwrap(), Residency::Refilling, "fetched ahead");
    rig.engine.cancel(a.0.id(), rig.streams[0].engine).unwrap();
    if until_unmapped(rig, 3).is_some() {
        read(rig, 0, &a, 1);
    }
}

fn ended(rig: &mut Rig) {
    let (a, b) = (fixed(rig, 0, LEN, 1), fixed(rig, 0, LEN, 2));
    evict(rig, 0, &a.0);
    rig.engine.release(a.0, rig.streams[0].engine).unwrap();
    if until_unmapped(rig, 1).is_some() {
        check(rig, 0, b.1, 2);
    }
}

fn behind(rig: &mut Rig) {
    let a = fixed(rig, 0, LEN, 1);
    evict(rig, 0, &a.0);
    // The operator for whose input it was evicted comes now.
    check(rig, 0, a.1, 1);
    if until_gone(rig, &a.0).is_some() {
        read(rig, 0, &a, 1);
    }
}

fn other_reader(rig: &mut Rig) {
    let a = fixed(rig, 0, LEN, 1);
    evict(rig, 0, &a.0);
    if until_gone(rig, &a.0).is_none() {
        return;
    }
    read(rig, 0, &a, 1);
    read(rig, 1, &a, 1);
    // The host copy is good: there is no copy that would stand for the readers.
    evict(rig, 0, &a.0);
    if until_gone(rig, &a.0).is_some() {
        read(rig, 1, &a, 1);
    }
}

fn read_last(rig: &mut Rig) {
    let a = fixed(rig, 0, LEN, 1);
    check(rig, 0, a.1, 1);
    rig.engine.release(a.0, rig.streams[0].engine).unwrap();
    until_unmapped(rig, 1);
}
