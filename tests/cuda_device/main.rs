//! What only a real device can refute: that bytes arrive, that events order them, that a fault, a
//! fork or an exit leaves the process whole.
//!
//! Without a device each test says aloud that it did not run; with `LIGHTERING_REQUIRE_CUDA` set it
//! fails instead.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are tests

mod apart;
mod basics;
mod control;
mod cost;
#[allow(dead_code, reason = "the helpers serve several test files; each uses its part")]
mod device;
