//! An engine under any program of its verbs, over several storages and streams, on a device that
//! runs in any order it likes, and in half of the programs refuses calls.
//!
//! What it is not: a fuzzer of the device. It is the simulated one, and keeps its contract.
//!
//! Invariant: no byte is ever wrong, no verb panics, and at the end nothing is left anywhere.
//!
//! ```text
//!   8 bytes: seed, streams, pool, device, bounds, refusals; then three for each verb --> Machine
//! ```
//!
//! `fuzz/` and `tests/fuzz_replay.rs` run it.

use crate::faulty::Faulty;
use crate::input::Input;
use crate::machine::{Machine, with_sums};
use crate::support::{Rig, options, quick_pool};
use lightering::backend::sim::Config;
use lightering::{Bytes, Options};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Longer programs find nothing that shorter ones do not, and take longer.
const VERBS_MAX: usize = 100;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input(data);
    let seed = u64::from(input.byte()) << 8 | u64::from(input.byte());
    let streams = 1 + input.below(3);
    let pool = Bytes::kib([4, 16, 64, 256][input.below(4)]);
    let device = Bytes::kib([24, 64, 1024][input.below(3)]);
    let options = bounds(&mut input);
    let per_mille = [0, 0, 0, 10, 50, 200][input.below(6)];
    let mut config = Config::adversary(seed);
    config.device_bytes = with_sums(device, &options);
    let pool = quick_pool(with_sums(pool, &options));
    let chance = Arc::new(AtomicU32::new(0));
    let rig = Rig::wrapped(config, pool, options, streams, |device| {
        Box::new(Faulty::new(device, seed, chance.clone()))
    });
    chance.store(per_mille, Ordering::Relaxed);
    let mut machine = Machine::new(seed, rig, (per_mille > 0).then_some(chance));
    for _ in 0..VERBS_MAX {
        if input.is_empty() {
            break;
        }
        machine.op((input.byte(), input.byte(), input.byte()));
    }
    machine.finish();
}

fn bounds(input: &mut Input<'_>) -> Options {
    let (small, more) = (input.below(256), input.below(256));
    let slots = [0, 0, 1, 64][small >> 6];
    Options {
        keep_last_count: small % 3,
        prefetch_count_max: small / 3 % 4,
        unreleased_bytes_max: Bytes((small / 12 % 4) as u64 * 6000),
        trunk_bytes_max: Bytes((1 + more % 4) as u64 * 1000),
        transfers_max: [1, 2, 5, 100][more / 4 % 4],
        events_max: [16, 4096][more / 16 % 2],
        step_queries_max: [1, 64][more / 32 % 2],
        time_stalls: more / 64 % 2 == 1,
        pass_len_max: 16,
        note_uses: false,
        verify: slots > 0,
        verify_slots_max: slots.max(1),
        ..options()
    }
}
