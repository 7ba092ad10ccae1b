//! Which process this is: a number that every fork changes in the child.
//!
//! What it is not: the system's number of a process. Asking for that is a system call, in each of
//! the few verbs that a saved tensor takes.
//!
//! Invariant: what was made before a fork has another number than the child's.
//!
//! ```text
//!   import --> os.register_at_fork(after_in_child=forked)
//!   fork --> in the child: forked() --> number() is another one
//! ```
//!
//! The files of this crate use it. A child made without Python's knowledge is seen by the floors
//! below: the CUDA backend has a hook of the C library's, the simulated device asks for the id.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);

/// This process's number.
pub(crate) fn number() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

#[pyfunction]
fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Has every child of a fork told apart, from now on.
pub(crate) fn watch_forks(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let hooks = PyDict::new(py);
    hooks.set_item("after_in_child", wrap_pyfunction!(forked, module)?)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&hooks)).map(drop)
}
