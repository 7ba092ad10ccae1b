//! The hazards that a real device can show, through the engine: streams are held by a spinning
//! kernel and lanes by large copies, so that a wrong order would show in bytes; and what ends a
//! context, a process or both.
//!
//! The fault guarded against is an order that holds on the simulated device alone. Each test runs
//! in a process of its own, since some end the device's context. They are ignored unless asked for:
//! `cargo test --release --test cuda_hazards -- --ignored --nocapture`, or
//! `run.sh 'test:cuda_hazards --ignored --nocapture'` from the bundle. Without a device each says
//! aloud that it did not run; with `LIGHTERING_REQUIRE_CUDA` set it fails instead.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod bench;
#[allow(dead_code, reason = "the helpers serve several test files; each uses its part")]
#[path = "../cuda_device/device.rs"]
mod device;
mod ends;
mod order;
mod replay;
