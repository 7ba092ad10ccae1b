//! Byte sizes as Python says them: an int, or text such as "40GiB".
//!
//! What it is not: a size of a tensor; those come as plain ints.
//!
//! Invariant: what is no size is refused with the text and the argument's name.
//!
//! ```text
//!   512, "512MiB", "1.5GiB" -> Bytes        True, -1, 1.5, "many" -> Usage
//! ```
//!
//! The files of this crate use it.

use crate::errors::refused;
use lightering::Bytes;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyString};

/// A size, or `None` for the word "auto".
pub(crate) fn size_or_auto(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<Bytes>> {
    match value.cast::<PyString>() {
        Ok(text) if text.to_cow()?.trim() == "auto" => Ok(None),
        _ => size(value, name).map(Some),
    }
}

/// A size.
pub(crate) fn size(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Bytes> {
    let wrong = || {
        let shown = value.repr().map(|repr| repr.to_string()).unwrap_or_default();
        refused("size", format!("{name}={shown} is no size; say 1073741824 or \"1GiB\""))
    };
    if value.is_instance_of::<PyBool>() {
        return Err(wrong());
    }
    if value.is_instance_of::<PyInt>() {
        return value.extract::<u64>().map(Bytes).map_err(|_| wrong());
    }
    match value.cast::<PyString>() {
        Ok(text) => text.to_cow()?.parse::<Bytes>().map_err(|_| wrong()),
        Err(_) => Err(wrong()),
    }
}
