//! Random programs: a device, its bounds, and what is done, all out of one number.
//!
//! What it is not: it knows no engine. That a program's outcome does not hang on time is arranged
//! here by choice of bounds, and in `machine.rs` by syncs in front of questions.
//!
//! Invariant: equal seeds give equal programs. No bound that time could make bind does: lanes,
//! events and device memory are generous, and a small pool has blocks of one size only.
//!
//! ```text
//!   Eager    one stream, nothing evicted stays: waits are enqueued, nobody asks       any owner
//!   Adopted  bytes of the framework's; it syncs before it asks what it may drop
//!   Owned    bytes of the engine's: when they go is its own affair, and shows nowhere
//!   Mixed    both, and nothing fetched ahead but by the framework's own word
//! ```
//!
//! The tests `twins` and `cuda_stress` use it.

use crate::support::options;
use lightering::pinned::{Budget, PoolOptions};
use lightering::{Bytes, Options};

/// What kind of program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Eager,
    Adopted,
    Owned,
    Mixed,
    /// Everything at once and no sync: for a run without a twin.
    Free,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Add,
    Evict,
    Offer,
    Read,
    Write,
    Pull,
    Flush,
    Step,
    MarkStep,
    ReadHost,
    Cancel,
    Prefetch,
    TakeCopy,
    Release,
    DropHandle,
    /// A call that is wrong: number among those that `misuse.rs` knows.
    Wrong,
}

/// One verb; the numbers choose items, streams and lengths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) verb: Verb,
    pub(crate) a: usize,
    pub(crate) b: usize,
    pub(crate) c: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) seed: u64,
    pub(crate) kind: Kind,
    pub(crate) streams: usize,
    pub(crate) lens: Vec<u64>,
    pub(crate) pool: PoolOptions,
    pub(crate) options: Options,
    pub(crate) ops: Vec<Op>,
}

/// Numbers out of a seed (SplitMix64).
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }
}

/// How often each verb comes, out of their sum.
const WEIGHTS: &[(Verb, usize)] = &[
    (Verb::Add, 28),
    (Verb::Evict, 44),
    (Verb::Offer, 20),
    (Verb::Read, 44),
    (Verb::Write, 20),
    (Verb::Pull, 40),
    (Verb::ReadHost, 8),
    (Verb::Flush, 6),
    (Verb::Step, 6),
    (Verb::MarkStep, 4),
    (Verb::Cancel, 6),
    (Verb::Prefetch, 14),
    (Verb::TakeCopy, 6),
    (Verb::Release, 10),
    (Verb::DropHandle, 10),
    (Verb::Wrong, 24),
];

const MIXED_LENS: &[u64] =
    &[1, 7, 255, 256, 1000, 4096, 6000, 4097, 65_536, 65_537, 300_001, 1 << 20];
/// Each needs one block of 4 KiB.
const SMALL_LENS: &[u64] = &[1, 255, 256, 1000, 4095, 4096];
/// Each needs one block of 1 MiB.
const LARGE_LENS: &[u64] = &[(1 << 20) - 1, 1 << 20, (1 << 20) - 4096];

pub(crate) fn op(chance: &mut Chance) -> Op {
    let sum: usize = WEIGHTS.iter().map(|(_, weight)| weight).sum();
    let mut at = chance.below(sum);
    let verb = WEIGHTS.iter().find(|(_, weight)| {
        let hit = at < *weight;
        at = at.wrapping_sub(*weight);
        hit
    });
    let verb = verb.map_or(Verb::Add, |(verb, _)| *verb);
    Op { verb, a: chance.below(1 << 16), b: chance.below(1 << 16), c: chance.below(1 << 16) }
}

fn pool(blocks: u64, block: u64, arena_bytes_max: Bytes) -> PoolOptions {
    let budget = Bytes(blocks * block);
    PoolOptions {
        budget: Budget::Bytes(budget),
        arena_bytes: budget.min(Bytes::mib(4)),
        arena_bytes_max,
        touch_threads_max: 1,
        ..PoolOptions::default()
    }
}

impl Program {
    pub(crate) fn new(seed: u64) -> Program {
        let mut chance = Chance::new(seed);
        let kind = chance.pick(&[Kind::Eager, Kind::Adopted, Kind::Owned, Kind::Mixed]);
        let streams = if kind == Kind::Eager { 1 } else { 1 + chance.below(3) };
        let blocks = 1 + chance.below(6) as u64;
        // Either more room than a program can evict, or a few blocks of one size.
        let (lens, pool) = match chance.below(4) {
            0 => (SMALL_LENS, pool(blocks, 4096, Bytes::mib(4))),
            1 => (LARGE_LENS, pool(blocks, 1 << 20, Bytes(blocks << 20).max(Bytes::mib(4)))),
            _ => (MIXED_LENS, pool(160, 1 << 20, Bytes::mib(32))),
        };
        let is_roomy = lens == MIXED_LENS;
        let options = Options {
            keep_last_count: chance.below(3),
            storage_bytes_min: chance.pick(&[Bytes::ZERO, Bytes(256)]),
            prefetch_count_max: if kind == Kind::Mixed { 0 } else { chance.below(4) },
            prefetch_bytes_max: Bytes::mib(2),
            unreleased_bytes_max: match kind {
                Kind::Eager => Bytes::ZERO,
                _ => chance.pick(&[Bytes::ZERO, Bytes::kib(6), Bytes::mib(1), Bytes::MAX]),
            },
            trunk_bytes_max: chance.pick(&[Bytes(5000), Bytes::kib(64), Bytes::mib(32)]),
            pass_len_max: 16,
            transfers_max: 1 << 16,
            streams_max: streams,
            note_uses: false,
            // Sums take pinned memory of their own.
            verify: is_roomy && chance.below(2) == 0,
            verify_slots_max: 64,
            ..options()
        };
        let len = 1 + chance.below(120);
        let ops = (0..len).map(|_| op(&mut chance)).collect();
        let lens = lens.to_vec();
        Program { seed, kind, streams, lens, pool, options, ops }
    }
}
