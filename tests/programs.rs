//! Random programs of every verb, over many storages, several streams and small pools, on a device
//! that runs in any order it likes: no byte is ever wrong, and at the end nothing is left anywhere.
//!
//! The fault guarded against is the one users fear: a loss that still falls over gradients that are
//! wrong, because one wait was missing in one order of events.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "programs/bounds.rs"]
mod bounds;
#[path = "programs/machine.rs"]
mod machine;
mod support;

use bounds::{bounds, cases};
use lightering::Bytes;
use lightering::backend::sim::Config;
use machine::{Machine, with_sums};
use proptest::prelude::*;
use support::{Rig, small_pool};

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        // A failure prints its program; nothing is left behind.
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_program_loses_a_byte_or_leaves_anything_behind(
        seed in any::<u64>(),
        streams in 1..4usize,
        pool in prop::sample::select(vec![4u64, 16, 64, 512]),
        device in prop::sample::select(vec![24u64, 64, 1024]),
        options in bounds(),
        program in prop::collection::vec(any::<(u8, u8, u8)>(), 1..60),
    ) {
        let (pool, device) = (Bytes::kib(pool), Bytes::kib(device));
        let mut config = Config::adversary(seed);
        config.device_bytes = with_sums(device, &options);
        let pool = small_pool(with_sums(pool, &options));
        let mut machine = Machine::new(seed, Rig::new(config, pool, options, streams), None);
        for op in program {
            machine.op(op);
        }
        machine.finish();
    }
}
