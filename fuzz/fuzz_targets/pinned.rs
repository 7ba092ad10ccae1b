//! Fuzzes `pinned`: the body is `tests/fuzz_bodies/pinned.rs`.

#![no_main]
#![allow(dead_code, reason = "the helpers serve several tests; this uses its part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "../../tests/fuzz_bodies/input.rs"]
mod input;
#[path = "../../tests/pinned_programs/model.rs"]
mod model;
#[path = "../../tests/fuzz_bodies/pinned.rs"]
mod pinned;
#[path = "../../tests/pinned_support/mod.rs"]
mod pinned_support;

libfuzzer_sys::fuzz_target!(|data: &[u8]| pinned::run(data));
