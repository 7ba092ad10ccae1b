//! The bounds of engines that random programs run on, and how many programs there are.
//!
//! What it is not: every bound. Those that no small program meets stay at their defaults.
//!
//! Invariant: each is small enough that programs of sixty verbs come up against it.
//!
//! ```text
//!   bounds() -> Options     cases() -> 10,000, or LIGHTERING_PROGRAMS
//! ```
//!
//! `tests/programs.rs` and `tests/refused_programs.rs` use it.

use crate::support::options;
use lightering::{Bytes, Options};
use proptest::prelude::*;

pub(crate) fn bounds() -> impl Strategy<Value = Options> {
    let asked = (0..4usize, 0..2usize);
    (0..3usize, 0..4usize, 0..3u64, 1..4u64, 0..4usize, 0..4usize, asked).prop_map(
        |(keep, ahead, open, trunk, lane, slots, (events, queries))| Options {
            keep_last_count: keep,
            prefetch_count_max: ahead,
            unreleased_bytes_max: Bytes(open * 6000),
            trunk_bytes_max: Bytes(trunk * 1000),
            transfers_max: [1, 2, 5, 100][lane],
            events_max: [8, 16, 64, 4096][events],
            step_queries_max: [1, 64][queries],
            pass_len_max: 16,
            note_uses: false,
            verify: slots > 0,
            verify_slots_max: [1, 1, 3, 64][slots],
            ..options()
        },
    )
}

/// How many programs: 10,000, or as many as `LIGHTERING_PROGRAMS` says.
pub(crate) fn cases() -> u32 {
    let asked = std::env::var("LIGHTERING_PROGRAMS").ok();
    asked.and_then(|count| count.parse().ok()).unwrap_or(10_000)
}
