//! The first fatal error of a device, kept for the life of the process.
//!
//! What it is not: a place for errors in general. An error that leaves the device usable is
//! returned once, from the verb that met it, and is stored nowhere.
//!
//! Invariant: once tripped a latch stays tripped, with the first error; after that nothing of this
//! backend calls the driver for that device, and what the device held is leaked on purpose.
//!
//! ```text
//!   verb -> driver says 700 -> trip(op, call, 700) -> Lost, "first seen in copy_out"
//!   any verb after          -> check(op)           -> the same Lost; no driver call
//! ```
//!
//! A driver reports a fault at whichever call comes next, so the operation kept is where the fault
//! was *seen*. The latch belongs to the device and not to a `Cuda`: two of them share one context.
//!
//! `context` owns one per device.

use super::code::{self, Answer};
use crate::error::{Error, Kind, Result};
use std::sync::OnceLock;

#[derive(Debug, Default)]
pub(super) struct Latch {
    first: OnceLock<Seen>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    op: &'static str,
    answer: Answer,
}

impl Latch {
    /// Keeps a fatal answer, unless an earlier one is kept, and returns the loss as `op` sees it.
    #[cold]
    pub(super) fn trip(&self, op: &'static str, answer: Answer) -> Error {
        self.first.get_or_init(|| Seen { op, answer }).error(op)
    }

    /// Is the device still there, as far as anybody has seen?
    #[inline]
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        match self.first.get() {
            None => Ok(()),
            Some(seen) => Err(seen.error(op)),
        }
    }
}

impl Seen {
    #[cold]
    fn error(&self, op: &'static str) -> Error {
        let Answer { code, call } = self.answer;
        let detail = if op == self.op {
            format!("first seen in {call}; the fault may lie in any earlier work on the device")
        } else {
            format!("first seen in {call}; {op} was refused without asking the driver")
        };
        Error::new(Kind::Lost, self.op).code(code, code::name(code)).detail(detail)
    }
}
