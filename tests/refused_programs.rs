//! The random programs of every verb, on a device that refuses one call in some: no byte is ever
//! wrong, no verb panics, and at the end nothing is left anywhere.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "programs/bounds.rs"]
mod bounds;
#[path = "programs/faulty.rs"]
mod faulty;
#[path = "programs/machine.rs"]
mod machine;
mod support;

use bounds::{bounds, cases};
use faulty::Faulty;
use lightering::Bytes;
use lightering::backend::sim::Config;
use machine::{Machine, with_sums};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use support::{Rig, small_pool};

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        // A failure prints its program; nothing is left behind.
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_program_on_a_device_that_refuses_calls_loses_a_byte_or_leaves_anything_behind(
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
        // The engine opens in peace.
        let per_mille = Arc::new(AtomicU32::new(0));
        let chance = per_mille.clone();
        let rig = Rig::wrapped(config, pool, options, streams, |device| {
            Box::new(Faulty::new(device, seed, chance))
        });
        per_mille.store([10, 50, 200][seed as usize % 3], Ordering::Relaxed);
        let mut machine = Machine::new(seed, rig, Some(per_mille));
        for op in program {
            machine.op(op);
        }
        machine.finish();
    }
}
