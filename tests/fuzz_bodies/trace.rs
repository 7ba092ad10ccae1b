//! The ring of records and the counters against plain models; the digest against renamed keys.
//!
//! What it is not: a check of order; records here mean nothing together.
//!
//! Invariant: a ring holds exactly the last records, the counters are sums over all of them, and a
//! digest is the same whatever the process-wide tags of the keys are.
//!
//! ```text
//!   bytes --> records --> Ring, Counters, Digest     and, beside them, Vec, sums, the same again
//! ```
//!
//! `fuzz/` and `tests/fuzz_replay.rs` run it.

use crate::input::Input;
use lightering::error::Kind;
use lightering::trace::{Access, Actor, Counters, Digest, Op, Record, Ring, Site, Span, Use};
use lightering::{
    Bytes, DeviceId, DevicePtr, DeviceRange, EventId, Key, PinnedPtr, PinnedRange, StreamId,
};

pub(crate) fn run(data: &[u8]) {
    let mut input = Input(data);
    let capacity = input.below(9);
    let (ours, renamed) = (records(input.0, 1), records(input.0, 2));
    let (mut ring, mut counters) = (Ring::new(capacity), Counters::default());
    let mut digests = [Digest::default(), Digest::default()];
    for (i, record) in ours.iter().enumerate() {
        ring.push(*record);
        counters.count(record);
        let before = digests[0];
        record.digest(&mut digests[0]);
        renamed[i].digest(&mut digests[1]);
        assert_ne!(before, digests[0], "a record leaves no mark");
        let kept: Vec<Record> = ring.iter().copied().collect();
        assert_eq!(kept, ours[(i + 1).saturating_sub(capacity)..=i]);
    }
    assert_eq!(digests[0], digests[1]);
    check(&ours, counters);
}

fn check(records: &[Record], counters: Counters) {
    let worked: Vec<Op> = records.iter().filter(|r| r.failed.is_none()).map(|r| r.op).collect();
    let count = |is: fn(&Op) -> bool| worked.iter().filter(|op| is(op)).count() as u64;
    let out = |op: &Op| if let Op::CopyOut { from, .. } = op { from.len().0 } else { 0 };
    let back = |op: &Op| if let Op::CopyIn { to, .. } = op { to.len().0 } else { 0 };
    let expected = Counters {
        copies_out: count(|op| matches!(op, Op::CopyOut { .. })),
        copies_in: count(|op| matches!(op, Op::CopyIn { .. })),
        bytes_out: worked.iter().map(out).sum(),
        bytes_in: worked.iter().map(back).sum(),
        records: count(|op| matches!(op, Op::Record { .. })),
        waits: count(|op| matches!(op, Op::Wait { .. })),
        queries: count(|op| matches!(op, Op::Query { .. } | Op::Idle { .. })),
        launches: count(|op| matches!(op, Op::Launch { .. })),
        allocs: count(|op| matches!(op, Op::Alloc { .. })),
        frees: count(|op| matches!(op, Op::Free { .. })),
        maps: count(|op| matches!(op, Op::Map { .. })),
        unmaps: count(|op| matches!(op, Op::Unmap { .. })),
        events_opened: count(|op| matches!(op, Op::OpenEvent(_))),
        syncs: count(|op| matches!(op, Op::Sync)),
        failures: records.iter().filter(|r| r.failed.is_some()).count() as u64,
    };
    assert_eq!(counters, expected);
}

/// The records that the bytes spell, with keys of this owner.
fn records(data: &[u8], owner: u32) -> Vec<Record> {
    let (mut input, mut all) = (Input(data), Vec::new());
    while !input.is_empty() {
        let op = op(&mut input, owner);
        let failed = (input.below(4) == 0).then_some(Kind::Busy);
        all.push(Record { seq: all.len() as u64, device: DeviceId(0), op, failed });
    }
    all
}

fn op(input: &mut Input<'_>, owner: u32) -> Op {
    let kind = input.below(17);
    let key = Key { owner, index: u32::from(input.byte()), generation: 0 };
    let (stream, event) = (StreamId(key), EventId(key));
    // Shifted, so that no sum of lengths leaves 64 bits.
    let (at, len) = (input.number() >> 16, Bytes(input.number() >> 16));
    let device = DeviceRange::new(DevicePtr(at), len).unwrap_or_default();
    let pinned = PinnedRange::new(PinnedPtr(at), len).unwrap_or_default();
    let site = Site::ALL[input.below(Site::ALL.len())];
    match kind {
        0 => Op::OpenStream(stream),
        1 => Op::CloseStream(stream),
        2 => Op::OpenEvent(event),
        3 => Op::CloseEvent(event),
        4 => Op::Record { event, stream },
        5 => Op::Wait { stream, event, site },
        6 => Op::Query { event, site, done: at % 2 == 0 },
        7 => Op::Alloc { range: device, stream },
        8 => Op::Free { range: device, stream },
        9 => Op::CopyOut { from: device, to: pinned, stream },
        10 => Op::CopyIn { from: pinned, to: device, stream },
        11 => Op::Launch { kernel: "fuzz", stream },
        12 => {
            let uses = Use { access: Access::Update, span: Span::Device(device) };
            Op::Use { by: Actor::Stream(stream), uses }
        }
        13 => Op::Map { range: device },
        14 => Op::Unmap { range: device },
        15 => Op::Idle { stream, site, done: at % 2 == 0 },
        _ => Op::Sync,
    }
}
