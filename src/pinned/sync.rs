//! What the pool's threads meet at: locks, waiting, threads of its own.
//!
//! What it is not: a layer. The names are the standard library's, and so is what stands behind
//! them; under `--cfg loom` it is the model checker's, so that `tests/pinned_loom.rs` can try every
//! order.
//!
//! Invariant: whatever orders two threads of the pool goes through here.
//!
//! ```text
//!   ledger, reservation -> sync -> std::sync, std::thread    (cfg(loom): loom's)
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

#[cfg(loom)]
pub(super) use loom::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64},
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
#[cfg(not(loom))]
pub(super) use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64},
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
