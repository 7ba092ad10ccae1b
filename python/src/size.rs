//! Byte sizes as Python says them: an int, or text such as "40GiB".
//!
//! What it is not: a size of a tensor; those come as plain ints.
//!
//! Invariant: what is no size is refused with the value and the argument's name.
//!
//! ```text
//!   512, "512MiB", "1.5GiB" -> Bytes    True, 1.5, None -> TypeError    -1, "many" -> ValueError
//! ```
//!
//! Python's part of the package uses it, through the crate's root.

use lightering::Bytes;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};

/// A size in bytes.
pub(crate) fn size(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    let text = || {
        let shown = value.repr().map(|repr| repr.to_string()).unwrap_or_default();
        format!(
            "{name}={shown}: a size in bytes: an int of 0 or more, under 2 ** 64, or text such as \
             \"512MiB\" or \"1.5GiB\""
        )
    };
    if value.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(text()));
    }
    if let Ok(said) = value.cast::<PyString>() {
        let parsed = said.to_cow()?.parse::<Bytes>();
        return parsed.map(|bytes| bytes.0).map_err(|_| PyValueError::new_err(text()));
    }
    // Whatever counts as an int: numpy's do, floats do not.
    let Ok(number) = value.call_method0("__index__") else {
        return Err(PyTypeError::new_err(text()));
    };
    number.extract::<u64>().map_err(|_| PyValueError::new_err(text()))
}
