//! Device bytes from torch's own allocator.
//!
//! What it is not: a pool, nor a guess of free room. torch's caching allocator is the one, Python's
//! `Room` makes the other.
//!
//! Invariant: bytes are taken on the stream that is current. A tensor that comes with them is all
//! of them, and has a version.
//!
//! ```text
//!   take(bytes, layout) --> a tensor of that layout, and its storage
//!              `-- no layout, or one that does not fit --> a storage alone
//! ```
//!
//! The hooks use it, and Python's `Room`, which is one.

use crate::torch::{self, Torch};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// Base of Python's `Room`.
#[pyclass(frozen, subclass, module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct Room {
    device: Py<PyAny>,
    /// By type, the keywords by which torch makes a tensor of it on the device.
    keywords: Py<PyDict>,
}

impl Room {
    fn keywords<'py>(&self, dtype: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
        let (py, known) = (dtype.py(), self.keywords.bind(dtype.py()));
        if let Some(found) = known.get_item(dtype)? {
            return Ok(found.cast_into::<PyDict>()?);
        }
        let made = PyDict::new(py);
        made.set_item(intern!(py, "dtype"), dtype)?;
        made.set_item(intern!(py, "device"), &self.device)?;
        known.set_item(dtype, &made)?;
        Ok(made)
    }

    /// A tensor of no bytes.
    pub(crate) fn empty<'py>(&self, dtype: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let empty = Torch::of(dtype.py())?.empty.bind(dtype.py());
        empty.call((0,), Some(&self.keywords(dtype)?))
    }
}

#[pymethods]
impl Room {
    #[new]
    fn new(py: Python<'_>, kind: &str, index: usize) -> PyResult<Room> {
        let device = py.import("torch")?.getattr("device")?;
        let device =
            if kind == "cpu" { device.call1((kind,)) } else { device.call1((kind, index)) };
        Ok(Room { device: device?.unbind(), keywords: PyDict::new(py).unbind() })
    }

    /// As torch names it.
    #[getter]
    fn device(&self, py: Python<'_>) -> Py<PyAny> {
        self.device.clone_ref(py)
    }

    /// A storage of so many bytes, uninitialised, on the stream that is current; and a tensor of
    /// that layout (size, stride, type) that is all of it, where there is one.
    #[pyo3(signature = (nbytes, layout=None))]
    fn take<'py>(
        &self,
        py: Python<'py>,
        nbytes: u64,
        layout: Option<&Bound<'py, PyTuple>>,
    ) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
        let torch = Torch::of(py)?;
        if let Some(layout) = layout {
            let (shape, dtype) = (layout.get_slice(0, 2), layout.get_item(2)?);
            let keywords = self.keywords(&dtype)?;
            let whole = torch.empty_strided.bind(py).call(shape, Some(&keywords))?;
            let storage = torch::storage(&whole)?;
            if torch::bytes(&storage)? == nbytes {
                let has_version = !torch::asks(&whole, intern!(py, "is_inference"))?;
                return Ok((storage, has_version.then_some(whole)));
            }
            // Such as an expanded one, of as many bytes as its storage by chance.
        }
        let keywords = self.keywords(torch.bytes_type.bind(py))?;
        let taken = torch.empty.bind(py).call((nbytes,), Some(&keywords))?;
        Ok((torch::storage(&taken)?, None))
    }
}
