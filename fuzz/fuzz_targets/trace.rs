//! Fuzzes `trace`: the body is `tests/fuzz_bodies/trace.rs`.

#![no_main]

#[path = "../../tests/fuzz_bodies/input.rs"]
mod input;
#[path = "../../tests/fuzz_bodies/trace.rs"]
mod trace;

libfuzzer_sys::fuzz_target!(|data: &[u8]| trace::run(data));
