//! The driver's codes after which a device is lost, for tests that order such a loss of the
//! simulated one.
//!
//! What it is not: the list that the engine goes by, which comes with the `cuda` feature alone;
//! where that is on, a test of `tests/hazards/driver.rs` compares the two.
//!
//! Invariant: every code is here that has a name and is fatal by
//! `lightering::backend::cuda::is_fatal`, and no other, in ascending order.
//!
//! ```text
//!   CONTEXT: the driver or its context went   the others: the device, or the process beside it
//! ```

/// What the driver says once it, or the context, is no more.
pub const CONTEXT: [u32; 2] = [4, 709];

/// All of them.
pub const FATAL: [u32; 20] = [
    4, 201, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 806, 810, 911,
    999,
];
