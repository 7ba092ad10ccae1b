//! One engine for several threads: forward and backward run on different ones.
//!
//! What it is not: a queue. Each call takes the lock for one verb, and no verb blocks.
//!
//! Invariant: a panic under the lock does not silently go on: the engine it leaves is still asked
//! through its own state table, which refuses what does not fit.
//!
//! ```text
//!   forward thread --.
//!   backward thread --+-- Shared { Arc<Mutex<Engine>> }
//! ```
//!
//! Frameworks hold this.

use super::Engine;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A clone of a handle to one engine.
#[derive(Clone, Debug)]
pub struct Shared(Arc<Mutex<Engine>>);

impl Shared {
    /// Shares an engine.
    pub fn new(engine: Engine) -> Shared {
        Shared(Arc::new(Mutex::new(engine)))
    }

    /// The engine, for one or a few verbs. Take no other lock while holding it.
    pub fn lock(&self) -> MutexGuard<'_, Engine> {
        // A verb that panicked left every storage in a state of the table; those go on.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
