//! The longest time that the host spent in one call of the engine.
//!
//! What it is not: a profile. It is for the question whether a step ever waited on the host.
//!
//! Invariant: of the step under way and of the one before; a step is what `mark_step` ends. Calls
//! that wait because they were asked to are not counted.
//!
//! ```text
//!   call --> took(op, time)        mark_step --> the step before is forgotten
//! ```
//!
//! The engine as Python holds it uses it.

use std::time::Duration;

/// Calls that page-lock, or wait for the device, for whoever asked them to.
const WAITING: [&str; 2] = ["reserve", "drain"];

/// A call, and how long it took.
pub(crate) type Took = (&'static str, Duration);

/// The longest calls.
#[derive(Debug, Default)]
pub(crate) struct Longest {
    now: Took,
    before: Took,
}

impl Longest {
    /// A call is over.
    pub(crate) fn took(&mut self, op: &'static str, time: Duration) {
        if time > self.now.1 && !WAITING.contains(&op) {
            self.now = (op, time);
        }
    }

    /// A step is over.
    pub(crate) fn mark_step(&mut self) {
        self.before = std::mem::take(&mut self.now);
    }

    /// The longest call of the step under way and the one before.
    pub(crate) fn get(&self) -> Took {
        if self.now.1 >= self.before.1 { self.now } else { self.before }
    }
}
