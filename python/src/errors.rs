//! One exception for each kind of error: what a caller can do about it.
//!
//! What it is not: a place for words. The text is the engine's own.
//!
//! Invariant: every exception of this package derives from `lightering.Error`.
//!
//! ```text
//!   Kind::OverBudget -> lightering.OverBudget("evict: over the pinned-memory budget: ...")
//! ```
//!
//! The files of this crate use it.

use lightering::{Error as EngineError, Kind};
use pyo3::create_exception;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

create_exception!(lightering, Error, PyRuntimeError, "Any error of this package.");
create_exception!(lightering, Unavailable, Error, "The device is not to be had.");
create_exception!(lightering, OutOfMemory, Error, "The device's memory ran out.");
create_exception!(lightering, OverBudget, Error, "The pinned budget would be exceeded.");
create_exception!(lightering, Busy, Error, "Not now: something is in flight or full.");
create_exception!(lightering, Lost, Error, "The device context is gone: restart the process.");
create_exception!(lightering, Io, Error, "A file or the operating system refused.");
create_exception!(lightering, Corrupt, Error, "The bytes that came back are not those that left.");
create_exception!(lightering, Usage, Error, "The call itself was wrong; nothing changed.");
create_exception!(lightering, Closed, Error, "The engine was shut down.");

/// Adds the exceptions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    for (name, kind) in [
        ("Error", py.get_type::<Error>()),
        ("Unavailable", py.get_type::<Unavailable>()),
        ("OutOfMemory", py.get_type::<OutOfMemory>()),
        ("OverBudget", py.get_type::<OverBudget>()),
        ("Busy", py.get_type::<Busy>()),
        ("Lost", py.get_type::<Lost>()),
        ("Io", py.get_type::<Io>()),
        ("Corrupt", py.get_type::<Corrupt>()),
        ("Usage", py.get_type::<Usage>()),
        ("Closed", py.get_type::<Closed>()),
    ] {
        module.add(name, kind)?;
    }
    Ok(())
}

/// The exception of an error.
pub(crate) fn raised(error: EngineError) -> PyErr {
    let text = error.to_string();
    match error.kind() {
        Kind::Unavailable(_) => Unavailable::new_err(text),
        Kind::OutOfMemory => OutOfMemory::new_err(text),
        Kind::OverBudget => OverBudget::new_err(text),
        Kind::Busy => Busy::new_err(text),
        Kind::Lost => Lost::new_err(text),
        Kind::Io => Io::new_err(text),
        Kind::Corrupt => Corrupt::new_err(text),
        Kind::Usage(_) => Usage::new_err(text),
        Kind::Closed => Closed::new_err(text),
        _ => Error::new_err(text),
    }
}
