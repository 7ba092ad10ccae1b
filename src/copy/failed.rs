//! Copies that fail: the cause, and what they leave running.
//!
//! What it is not: it waits for nothing and undoes nothing.
//!
//! Invariant: whoever is told of a failure learns whether anything still touches the bytes.
//!
//! Part of the lanes.

use super::End;
use crate::error::{Error, Kind, Misuse};

/// What went wrong with a copy, and what it leaves behind.
#[derive(Debug)]
pub struct CopyFailed {
    /// The cause.
    pub error: Error,
    /// What was enqueued before the failure.
    pub left: Left,
}

/// What a copy that failed left on its lane.
#[derive(Clone, Debug)]
pub enum Left {
    /// Nothing that runs: nothing was enqueued, or all of it was waited for.
    Nothing,
    /// Something, and this is its end.
    Until(End),
    /// Something, and nothing says when it is done: [`super::Lane::mark_left`] may, later.
    Unmarked,
}

impl CopyFailed {
    /// A copy of which nothing was enqueued.
    pub fn before(error: Error) -> CopyFailed {
        CopyFailed { error, left: Left::Nothing }
    }
}

/// A lane's refusal of one more copy.
pub fn full(op: &'static str) -> Error {
    Error::new(Kind::Busy, op).detail("the lane carries as many copies as it may")
}

pub(super) fn empty() -> Error {
    Error::usage(Misuse::Empty, "copy")
}
