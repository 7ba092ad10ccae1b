//! Fuzzes `storage`: the body is `tests/fuzz_bodies/storage.rs`.

#![no_main]
#![allow(dead_code, reason = "the helpers serve several tests; this uses its part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "../../tests/programs/faulty.rs"]
mod faulty;
#[path = "../../tests/fuzz_bodies/input.rs"]
mod input;
#[path = "../../tests/programs/machine.rs"]
mod machine;
#[path = "../../tests/fuzz_bodies/storage.rs"]
mod storage;
#[path = "../../tests/support/mod.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|data: &[u8]| storage::run(data));
