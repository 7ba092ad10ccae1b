//! One engine for several threads: forward and backward run on different ones.
//!
//! What it is not: a queue. Each call takes the lock for one verb; who waits inside of one keeps
//! the others waiting as well (`docs/design.md`, section 6, lists where a verb may).
//!
//! Invariant: nothing goes on with what a panic under the lock left half done. The engine counts as
//! lost from then on: it touches the driver no more, and leaks what copies in flight may need. A
//! thread that has the engine does not wait for itself.
//!
//! ```text
//!   forward thread --.
//!   backward thread --+-- Shared { Arc<Mutex<Engine>> } -- lock() --> Held, until it is dropped
//! ```
//!
//! Frameworks hold this.

use super::Engine;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A clone of a handle to one engine.
#[derive(Clone, Debug)]
pub struct Shared(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    engine: Mutex<Engine>,
    /// The thread that has it, by [`this_thread`]; 0: nobody.
    holder: AtomicUsize,
}

impl Shared {
    /// Shares an engine.
    pub fn new(engine: Engine) -> Shared {
        Shared(Arc::new(Inner { engine: Mutex::new(engine), holder: AtomicUsize::new(0) }))
    }

    /// The engine, for one or a few verbs. Take no other lock while holding it.
    ///
    /// # Panics
    /// Where this thread has it already, as an observer has that is called from inside of a verb
    /// ([`Engine::observe`]): it would wait for itself.
    pub fn lock(&self) -> Held<'_> {
        let Inner { engine, holder } = &*self.0;
        let me = this_thread();
        // Only this thread writes its own name there, and takes it away.
        assert!(holder.load(Ordering::Relaxed) != me, "a verb is called from inside of a verb");
        let engine = engine.lock().unwrap_or_else(|poison: PoisonError<_>| {
            let mut engine = poison.into_inner();
            engine.abandon();
            engine
        });
        holder.store(me, Ordering::Relaxed);
        Held { engine, holder }
    }
}

/// The engine, of this thread alone until this is dropped.
#[derive(Debug)]
pub struct Held<'a> {
    engine: MutexGuard<'a, Engine>,
    holder: &'a AtomicUsize,
}

impl Deref for Held<'_> {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Before the lock goes, which is a field.
        self.holder.store(0, Ordering::Relaxed);
    }
}

/// A number that no other living thread has, and never 0.
fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| std::ptr::from_ref(place).addr())
}
