//! A little pinned memory for what the host gives the device each step, and reads of it.
//!
//! What it is not: the pool that layers' inputs move to.
//!
//! Invariant: nobody reads or writes it here while a copy of it is in flight; `trainer` sees to that.
//!
//! ```text
//!   slot 0 { text | hash, loss }   slot 1 { text | hash, loss }      steps take turns
//! ```
//!
//! `trainer` uses it.
