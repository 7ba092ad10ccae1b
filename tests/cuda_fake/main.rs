//! The faults of a driver that is absent, wrong, asked wrongly or failing, shown on a fake driver:
//! no GPU is needed. Each file tells the faults it guards against.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are tests

mod bench;
mod fake;
mod faults;
mod interop;
mod probe;
mod process;
mod refusals;
mod verbs;
