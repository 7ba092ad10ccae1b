//! Fuzzes `unit`: the body is `tests/fuzz_bodies/unit.rs`.

#![no_main]

#[path = "../../tests/fuzz_bodies/input.rs"]
mod input;
#[path = "../../tests/fuzz_bodies/unit.rs"]
mod unit;

libfuzzer_sys::fuzz_target!(|data: &[u8]| unit::run(data));
