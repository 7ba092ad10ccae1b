//! Calls that are wrong, each of which must be refused by its name and change nothing.

use crate::machine::{Machine, STATE};
use crate::outcome::Outcome;
use crate::program::{Kind as Of, Op};
use lightering::backend::Backend;
use lightering::storage::{Residency, Tier};
use lightering::trace::{Op as Asked, Use};
use lightering::{Bytes, DevicePtr, DeviceRange, Kind, Misuse, Result, StorageId, StreamId};

/// More than any device has.
const HUGE: Bytes = Bytes::gib(1 << 16);

/// The call must be refused for this reason.
#[track_caller]
fn refused<T>(machine: &mut Machine, result: Result<T>, kind: Kind) {
    let error = result.err().expect("a call that is wrong was not refused");
    assert_eq!(error.kind(), kind, "{error}");
    machine.told(Outcome::Failed(kind));
}

/// Every verb on a storage that there is not.
fn on_nobody(m: &mut Machine, id: StorageId, on: StreamId, misuse: Misuse) {
    let target = DeviceRange::new(DevicePtr(1 << 20), Bytes(64)).unwrap();
    let engine = &mut m.side.engine;
    let refusals = [
        engine.evict(id, on).map(drop),
        engine.offer(id, on).map(drop),
        engine.acquire(id, on).map(drop),
        engine.refill(id, target, on).map(drop),
        engine.prefetch(id, target, on),
        engine.cancel(id, on),
        engine.take(id),
        engine.read_host(id, Bytes::ZERO, &mut [0]),
    ];
    for result in refusals {
        refused(m, result, Kind::Usage(misuse));
    }
}

/// Every verb on a stream that the engine does not serve.
fn on_nowhere(m: &mut Machine, id: StorageId, on: StreamId, misuse: Misuse) {
    let range = DeviceRange::new(DevicePtr(1 << 20), Bytes(64)).unwrap();
    let engine = &mut m.side.engine;
    let refusals = [
        engine.alloc(Bytes(64), on, "nowhere").map(drop),
        engine.evict(id, on).map(drop),
        engine.offer(id, on).map(drop),
        engine.acquire(id, on).map(drop),
        engine.refill(id, range, on).map(drop),
        engine.prefetch(id, range, on),
        engine.cancel(id, on),
        engine.releasable(on).map(drop),
        engine.wanted(on).map(drop),
        engine.flush(on),
        engine.note(on, &[Use::read(range)]),
    ];
    for result in refusals {
        refused(m, result, Kind::Usage(misuse));
    }
}

/// One of the engine's own lanes, if it has carried a copy already.
fn lane(m: &Machine) -> Option<StreamId> {
    m.side.engine.recent().find_map(|record| match record.op {
        Asked::CopyOut { stream, .. } | Asked::CopyIn { stream, .. } => Some(stream),
        _ => None,
    })
}

/// Lengths that no allocation and no storage can have.
fn bad_lengths(m: &mut Machine, op: Op, on: StreamId) {
    let engine = &mut m.side.engine;
    let none = engine.alloc(Bytes::ZERO, on, "none");
    let most = engine.alloc(Bytes::MAX, on, "most");
    let empty = engine.adopt(DeviceRange::default(), "empty");
    refused(m, none, Kind::Usage(Misuse::Empty));
    refused(m, most, Kind::Usage(Misuse::TooLarge));
    refused(m, empty, Kind::Usage(Misuse::Empty));
    // Seldom: a device that has no room makes some first.
    if op.c.is_multiple_of(4) {
        let huge = m.side.engine.alloc(HUGE, on, "huge");
        refused(m, huge, Kind::OutOfMemory);
        let huge = m.side.framework.alloc_device(HUGE, m.side.streams[0].here);
        refused(m, huge, Kind::OutOfMemory);
    }
}

/// Ranges that a storage cannot have, or not now.
fn bad_ranges(m: &mut Machine, i: usize, on: StreamId) {
    // Of an item that is away there is more to be said wrongly.
    let is_away = |i: &usize| !m.items[*i].is_owned && m.items[*i].range.is_none();
    let i = (0..m.items.len()).find(is_away).unwrap_or(i);
    let (id, len) = (m.items[i].handle.id(), m.items[i].len);
    if let Some(range) = m.items[i].range {
        // On the device: its bytes are not adopted again, whole or in part.
        let last = range.part(Bytes(len.0 - 1), Bytes(1)).unwrap();
        for taken in [range, last] {
            let adopted = m.side.engine.adopt(taken, "twice");
            refused(m, adopted, Kind::Usage(Misuse::Overlap));
        }
        let refilled = m.side.engine.refill(id, range, on);
        refused(m, refilled, STATE);
    } else if !m.items[i].is_owned && m.residency(i) == Residency::Evicted(Tier::Host) {
        let at = DevicePtr(1 << 20);
        let longer = DeviceRange::new(at, len + Bytes(1)).unwrap();
        let refilled = m.side.engine.refill(id, longer, on);
        refused(m, refilled, Kind::Usage(Misuse::LengthMismatch));
        let other = m.items.iter().find_map(|item| item.range);
        if let Some(other) = other {
            let target = DeviceRange::new(other.at(), len).unwrap();
            let fetched = m.side.engine.prefetch(id, target, on);
            refused(m, fetched, Kind::Usage(Misuse::Overlap));
        }
    }
}

/// Host bytes that are past the storage's end, or there is no host copy at all.
fn bad_host_reads(m: &mut Machine, i: usize) {
    let (id, len) = (m.items[i].handle.id(), m.items[i].len);
    for offset in [len, Bytes::MAX] {
        let read = m.side.engine.read_host(id, offset, &mut [0]);
        let expected = [Kind::Usage(Misuse::OutOfRange), Kind::Usage(Misuse::NotThere)];
        assert!(m.heard(read, &expected).is_none(), "bytes past the end were read");
    }
}

/// A change of bytes that are on their way in.
fn bad_note(m: &mut Machine, i: usize, on: StreamId) {
    if m.residency(i) == Residency::Refilling
        && let Some(range) = m.items[i].range
    {
        let noted = m.side.engine.note(on, &[Use::write(range)]);
        refused(m, noted, STATE);
    }
}

/// One more stream than the engine may serve; a stream known already is no other one.
fn too_many_streams(m: &mut Machine, s: usize) {
    let here = m.side.streams[s].here;
    let raw = m.side.framework.raw_stream(here).unwrap();
    assert_eq!(m.side.engine.adopt_stream(raw).unwrap(), m.on(s));
    if m.of != Of::Free {
        let one_more = m.side.engine.adopt_stream(0);
        refused(m, one_more, Kind::Usage(Misuse::BadValue));
    }
}

/// Makes one wrong call, or a few of one kind.
pub(crate) fn wrong(m: &mut Machine, op: Op, i: usize, s: usize) {
    let (id, on) = (m.items[i].handle.id(), m.on(s));
    match op.c % 9 {
        0 => {
            if let Some(dead) = m.dead.get(op.a % m.dead.len().max(1)).copied() {
                on_nobody(m, dead, on, Misuse::Stale);
            }
        }
        1 => {
            let mut key = id.0;
            key.owner = key.owner.wrapping_add(1);
            on_nobody(m, StorageId(key), on, Misuse::Foreign);
        }
        2 => on_nowhere(m, id, m.side.streams[s].here, Misuse::Foreign),
        3 => {
            if let Some(lane) = lane(m) {
                on_nowhere(m, id, lane, Misuse::SameStream);
            }
        }
        4 => bad_lengths(m, op, on),
        5 => bad_ranges(m, i, on),
        6 => bad_host_reads(m, i),
        7 => bad_note(m, i, on),
        _ => too_many_streams(m, s),
    }
}
