//! One engine for several threads: forward and backward run on different ones.
//!
//! What it is not: a queue. Each call takes the lock for one verb; who waits inside of one keeps
//! the others waiting as well (`docs/design.md`, section 6, lists where a verb may).
//!
//! Invariant: nothing goes on with what a panic under the lock left half done. The engine counts as
//! lost from then on: it touches the driver no more, and leaks what copies in flight may need.
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
        self.0.lock().unwrap_or_else(|poison: PoisonError<_>| {
            let mut engine = poison.into_inner();
            engine.abandon();
            engine
        })
    }
}
