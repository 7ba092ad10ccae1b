//! What a context moved so far, in bytes.
//!
//! What it is not: a report. Python's part adds what stayed, by reason.
//!
//! Invariant: each storage counts once: it is moved, or it is not; of those moved, it is released
//! or not yet.
//!
//! ```text
//!   pack --> moved          the storage died, and the engine had named it --> released
//!   unpack --> restored     tensors that the mode is not about --> others
//! ```
//!
//! The hooks fill it in, Python reads it.

use pyo3::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Figures under way.
#[pyclass(frozen, subclass, module = "lightering._native")]
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) moved: Count,
    pub(crate) released: Count,
    pub(crate) restored: Count,
    pub(crate) others: Count,
}

/// One figure.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[pymethods]
impl Counts {
    #[new]
    fn new() -> Counts {
        Counts::default()
    }

    /// Sent to pinned memory.
    #[getter]
    fn moved(&self) -> u64 {
        self.moved.get()
    }

    /// Of those moved: their device bytes went.
    #[getter]
    fn released(&self) -> u64 {
        self.released.get()
    }

    /// Handed to the backward pass.
    #[getter]
    fn restored(&self) -> u64 {
        self.restored.get()
    }

    /// Tensors saved in a forward that the mode is not about.
    #[getter]
    fn others(&self) -> u64 {
        self.others.get()
    }
}
