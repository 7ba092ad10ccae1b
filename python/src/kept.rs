//! What autograd keeps in place of a tensor that stays on its device.
//!
//! What it is not: a copy. It is the tensor's own bytes, detached from the graph.
//!
//! Invariant: it keeps no graph alive; a tensor edited in place since raises what autograd would.
//!
//! ```text
//!   tensor --detach--> Kept, version of then --unpack: still of that version?--> the tensor
//! ```
//!
//! The pack hook makes it, the unpack hook takes it.

use crate::torch;
use pyo3::intern;
use pyo3::prelude::*;
use std::sync::Arc;

/// A tensor that stays.
#[pyclass(frozen, module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct Kept {
    /// Not the tensor itself: it may be the result of the node that keeps it.
    tensor: Py<PyAny>,
    /// None of an inference tensor, which has no counter.
    version: Option<i64>,
    /// One more owner of what the context that made it counts its own by.
    _counted: Option<Arc<()>>,
}

impl Kept {
    /// One of those that a context counts: as long as it is there, there is one owner more.
    pub(crate) fn counted(tensor: &Bound<'_, PyAny>, by: &Arc<()>) -> PyResult<Kept> {
        Ok(Kept { _counted: Some(by.clone()), ..Kept::new(tensor)? })
    }
}

#[pymethods]
impl Kept {
    #[new]
    pub(crate) fn new(tensor: &Bound<'_, PyAny>) -> PyResult<Kept> {
        let py = tensor.py();
        let is_inference = torch::asks(tensor, intern!(py, "is_inference"))?;
        let version = if is_inference { None } else { Some(torch::version(tensor)?) };
        let tensor = tensor.call_method0(intern!(py, "detach"))?.unbind();
        Ok(Kept { tensor, version, _counted: None })
    }

    /// The tensor. Raises ``RuntimeError``: it was edited in place after it was saved.
    pub(crate) fn unpack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let tensor = self.tensor.bind(py);
        match self.version {
            Some(seen) if torch::version(tensor)? != seen => {
                let words = py.import("lightering._version")?.getattr("edited_here")?;
                Err(PyErr::from_value(words.call1((tensor, seen))?))
            }
            _ => Ok(tensor.clone()),
        }
    }
}
