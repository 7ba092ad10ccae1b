//! The pools of the process: one for each kind of device, shared by its engines.
//!
//! What it is not: a budget for one engine; that is the engine's quota.
//!
//! Invariant: engines of one kind share one pool, whose budget is what the machine has to spare.
//!
//! ```text
//!   Engine cuda:0 --quota--.
//!   Engine cuda:1 --quota---+--> pool (CUDA)          Engine sim --quota--> pool (simulated)
//! ```
//!
//! The engine's door uses it.

use lightering::backend::Backend;
use lightering::{Budget, Bytes, PinnedPool, PoolOptions, Result};
use std::sync::{Mutex, PoisonError};

static POOLS: Mutex<[Option<PinnedPool>; 2]> = Mutex::new([None, None]);

/// The pool that serves this device. An engine that asks for more than the machine's automatic
/// budget, and is the first of its kind, gets it, as far as the container allows.
///
/// # Errors
/// Those of [`PinnedPool::new`].
pub(crate) fn of_process(device: &dyn Backend, asked: Option<Bytes>) -> Result<PinnedPool> {
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let place = &mut pools[usize::from(device.about().simulated)];
    if let Some(pool) = place {
        return Ok(pool.clone());
    }
    let mut pool = open(device, Budget::Auto)?;
    if let Some(bytes) = asked.filter(|bytes| *bytes > pool.budget() && *bytes != Bytes::MAX) {
        pool = open(device, Budget::Bytes(bytes))?;
    }
    *place = Some(pool.clone());
    Ok(pool)
}

/// A pool of one engine's own, for a world of its own.
///
/// # Errors
/// Those of [`PinnedPool::new`].
pub(crate) fn open(device: &dyn Backend, budget: Budget) -> Result<PinnedPool> {
    PinnedPool::new(device.pinner(), PoolOptions { budget, ..PoolOptions::default() })
}
