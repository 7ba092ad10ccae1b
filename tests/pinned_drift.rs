//! The fault guarded against: a pool with room enough that refuses a tensor, since a sequence
//! length changed and what is free lies in pieces of the old sizes; or one that wastes what it
//! holds.
//!
//! No memory stands behind these pools: only their books are tried, 10,000 times each.
#![allow(clippy::unwrap_used)]

mod pinned_support;

use lightering::backend::Pinner;
use lightering::pinned::{Block, Budget, Client, Growth, PinnedPool, PoolOptions};
use lightering::{Bytes, Name, PinnedPtr, Result};
use pinned_support::Hand;
use proptest::prelude::*;
use std::ptr::NonNull;
use std::sync::Arc;

/// Page-locks nothing, and needs no memory for it.
#[derive(Debug)]
struct Air;

impl Pinner for Air {
    unsafe fn register(&self, at: NonNull<u8>, _len: Bytes) -> Result<PinnedPtr> {
        Ok(PinnedPtr(at.as_ptr() as u64))
    }

    fn unregister(&self, _at: PinnedPtr) -> Result<()> {
        Ok(())
    }

    fn registration_max(&self) -> Bytes {
        Bytes::MAX
    }

    fn needs_memory(&self) -> bool {
        false
    }
}

fn pool(budget: Bytes) -> PinnedPool {
    let budget = Budget::Bytes(budget);
    let options = PoolOptions { budget, growth: Growth::Closed, ..PoolOptions::default() };
    PinnedPool::new(Arc::new(Air), options).unwrap()
}

#[derive(Clone, Debug)]
struct Job {
    /// Lengths of a step's tensors at first, as powers of two: some a layer, many layers.
    tensors: Vec<f64>,
    /// By how much the sequence length differs from the first step's.
    drift: Vec<f64>,
    /// The pool's size, in those of the largest step.
    room: f64,
    /// In which order a backward returns its blocks: seldom quite the reverse one.
    swaps: usize,
}

fn jobs() -> impl Strategy<Value = Job> {
    let job = (
        prop::collection::vec(16.0..26.0f64, 2..6),
        12..32usize,
        prop::collection::vec(0.5..2.0f64, 2..8),
        0.6..1.3f64,
        0..4usize,
    );
    job.prop_map(|(layer, layers, drift, room, swaps)| {
        let tensors = std::iter::repeat_n(layer, layers).flatten().collect();
        Job { tensors, drift, room, swaps }
    })
}

impl Job {
    /// Lengths of a step's tensors.
    fn lens(&self, drift: f64) -> Vec<u64> {
        self.tensors.iter().map(|log2| (log2.exp2() * drift) as u64).collect()
    }

    /// Bytes of the largest step.
    fn most(&self) -> u64 {
        self.lens(self.drift.iter().copied().fold(0.0, f64::max)).iter().sum()
    }
}

/// Lends what a forward evicts. While `owed`, a request that is refused is a fault where free bytes
/// are 1.15 times it; but for the last of the pool, which may lie in two pieces, each too small for
/// one of the larger tensors.
fn forward(pool: &PinnedPool, client: &mut Client, lens: &[u64], owed: bool) -> Vec<Block> {
    let mut sorted = lens.to_vec();
    sorted.sort_unstable();
    let large = sorted[(sorted.len() * 95).div_ceil(100) - 1];
    let mut blocks = Vec::new();
    for &len in lens {
        let free = pool.stats().free.0;
        let lent = client.lend(Bytes(len), Name::new("x"));
        let enough = free as f64 >= 1.15 * len as f64 && free > large / 4 * 9;
        let owed = owed && len <= large && enough;
        if let (Err(error), true) = (&lent, owed) {
            let largest = pool.report(0).largest_free;
            panic!("{} of {} free, largest {largest}: {error}", Bytes(len), Bytes(free));
        }
        blocks.extend(lent.ok().map(|lent| lent.block));
    }
    blocks
}

/// The steps of a job in a pool of so many bytes.
fn train(job: &Job, room: u64) {
    let pool = pool(Bytes::gib(64));
    pool.reserve(Bytes(room)).unwrap();
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    // That sizes change at all is learned when they do so first; that step is owed nothing.
    for (step, &drift) in job.drift.iter().enumerate() {
        let owed = step == 0 || pool.stats().counts.drifts > 0;
        let mut blocks = forward(&pool, &mut client, &job.lens(drift), owed);
        for swap in 0..job.swaps.min(blocks.len() / 2) {
            blocks.swap(2 * swap, 2 * swap + 1);
        }
        blocks.into_iter().rev().for_each(|block| client.give_back(block, None).unwrap());
    }
    pool.audit();
    assert_eq!(pool.stats().free, pool.stats().pinned);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn a_drifting_size_finds_room_while_enough_is_free(job in jobs()) {
        train(&job, (job.most() as f64 * job.room) as u64);
    }

    #[test]
    fn blocks_overlap_nowhere_and_waste_little(
        lens in prop::collection::vec((12.0..30.0f64).prop_map(|log2| log2.exp2() as u64), 1..60),
    ) {
        let pool = pool(Bytes::gib(128));
        let all: u64 = lens.iter().map(|len| len + len / 8 + 4096).sum();
        pool.reserve(Bytes(all)).unwrap();
        let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
        let mut ranges = Vec::new();
        let mut blocks = Vec::new();
        for &len in &lens {
            let block = client.lend(Bytes(len), Name::new("x")).unwrap().block;
            let room = block.room().0;
            prop_assert!(room >= len && room - len <= (len / 8).max(4095), "{len}: {room}");
            for trunk in pinned_support::trunks(&block) {
                prop_assert!(trunk.at().0.is_multiple_of(4096), "a trunk begins at a page");
                ranges.push((trunk.at().0, trunk.end()));
            }
            blocks.push(block);
        }
        ranges.sort_unstable();
        prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "blocks overlap");
        let stats = pool.stats();
        prop_assert_eq!(stats.requested, Bytes(lens.iter().sum()));
        prop_assert_eq!(stats.waste() + stats.requested, stats.lent);
        for block in blocks {
            client.give_back(block, None).unwrap();
        }
        // Sizes that repeat waste nothing more: each finds the very bytes it had.
        let before = pool.stats().counts;
        for &len in &lens {
            let block = client.lend(Bytes(len), Name::new("x")).unwrap().block;
            client.give_back(block, None).unwrap();
        }
        let after = pool.stats().counts;
        prop_assert_eq!(after.lends_repeated - before.lends_repeated, lens.len() as u64);
    }
}
