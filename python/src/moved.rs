//! What autograd keeps in place of a tensor whose storage moves, and the hook that unpacks it.
//!
//! What it is not: the storage. All saved tensors of one storage share its stash.
//!
//! Invariant: what comes back has the size, stride, offset, type and bytes of what was saved, or
//! the error is raised that autograd would have raised. It keeps neither a graph nor bytes alive.
//!
//! ```text
//!   tensor --> a tensor of no bytes that shares its version counter; size, stride, type, offset
//!   unpack: version as seen? --> stash: bytes on the device --> the tensor anew, same counter
//! ```
//!
//! The pack hook makes it, the unpack hook takes it.

use crate::books::Books;
use crate::fetch::fetch;
use crate::kept::Kept;
use crate::stash::Stash;
use crate::torch;
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A tensor whose storage is a stash's.
#[pyclass(frozen, module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct Moved {
    stash: Arc<Stash>,
    /// A tensor of no bytes with the version counter of the saved one.
    shared: Py<PyAny>,
    /// Size, stride, type.
    layout: Py<PyTuple>,
    offset: Py<PyAny>,
    is_whole: bool,
    was_read: AtomicBool,
}

impl Moved {
    /// Of a plain tensor of so many bytes.
    pub(crate) fn new(
        tensor: &Bound<'_, PyAny>,
        stash: Arc<Stash>,
        nbytes: u64,
    ) -> PyResult<Moved> {
        let py = tensor.py();
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let shared = share(tensor, &dtype, stash.books.get().empties.bind(py))?;
        let size = tensor.call_method0(intern!(py, "size"))?;
        let stride = tensor.call_method0(intern!(py, "stride"))?;
        let offset = tensor.call_method0(intern!(py, "storage_offset"))?;
        let starts = offset.extract::<u64>()? == 0;
        let layout = PyTuple::new(py, [size, stride, dtype])?;
        let first = stash.marks().layout.as_ref().map(|layout| layout.clone_ref(py));
        let is_whole = match first {
            Some(first) => starts && layout.eq(first)?,
            None => starts && nbytes == stash.nbytes,
        };
        let mut marks = stash.marks();
        if is_whole && marks.layout.is_none() {
            marks.layout = Some(layout.clone().unbind());
        }
        marks.waiting += 1;
        drop(marks);
        let (shared, layout, offset) = (shared.unbind(), layout.unbind(), offset.unbind());
        Ok(Moved { stash, shared, layout, offset, is_whole, was_read: AtomicBool::new(false) })
    }

    fn read(&self) {
        if !self.was_read.swap(true, Ordering::Relaxed) {
            self.stash.marks().waiting -= 1;
        }
    }
}

#[pymethods]
impl Moved {
    /// The tensor, on its device, for a reader that is enqueued next.
    pub(crate) fn unpack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (stash, shared) = (&self.stash, self.shared.bind(py));
        if torch::version(shared)? != stash.version {
            return Err(self.edited(py)?);
        }
        if stash.marks().was_resized {
            return Err(PyRuntimeError::new_err(
                "the storage of a saved tensor was resized while it was copied off its device",
            ));
        }
        self.read();
        let books: &Bound<'py, Books> = stash.books.bind(py);
        let (storage, whole) = fetch(books, stash)?;
        stash.counts.get().restored.add(stash.nbytes);
        if self.is_whole
            && let Some(whole) = whole
        {
            return counted(shared, whole.bind(py));
        }
        let layout = self.layout.bind(py);
        let (size, stride) = (layout.get_item(0)?, layout.get_item(1)?);
        let empty = books.get().parts()?.room.get().empty(&layout.get_item(2)?)?;
        let of = (storage, self.offset.bind(py), size, stride);
        counted(shared, &empty.call_method1(intern!(py, "set_"), of)?)
    }

    /// What autograd raises.
    fn edited(&self, py: Python<'_>) -> PyResult<PyErr> {
        let size = self.layout.bind(py).get_item(0)?;
        let words = py.import("lightering._version")?.getattr("edited")?;
        let error = words.call1((&self.shared, self.stash.version, size))?;
        Ok(PyErr::from_value(error))
    }
}

impl Drop for Moved {
    fn drop(&mut self) {
        self.read();
    }
}

/// A tensor with the bytes of one, and the version counter of the saved tensor: whoever edits what
/// came back edits it for all who saved it, and those that ask later are told.
fn counted<'py>(
    shared: &Bound<'py, PyAny>,
    tensor: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let counted = shared.call_method0(intern!(shared.py(), "detach"))?;
    counted.setattr(intern!(shared.py(), "data"), tensor)?;
    Ok(counted)
}

/// A tensor of no bytes that shares the version counter of a plain one, which has one.
fn share<'py>(
    tensor: &Bound<'py, PyAny>,
    dtype: &Bound<'py, PyAny>,
    empties: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let Some(empty) = empties.get_item(dtype)? else {
        let words = py.import("lightering._version")?.getattr("share")?;
        return words.call1((tensor, empties));
    };
    let shared = tensor.call_method0(intern!(py, "detach"))?;
    // Takes the bytes away and leaves the counter, which is the detached tensor's own slot.
    shared.setattr(intern!(py, "data"), empty)?;
    Ok(shared)
}

/// What autograd calls.
#[pyfunction]
pub(crate) fn unpack<'py>(packed: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = packed.py();
    if let Ok(moved) = packed.cast_exact::<Moved>() {
        return moved.get().unpack(py);
    }
    match packed.cast_exact::<Kept>() {
        Ok(kept) => kept.get().unpack(py),
        Err(_) => packed.call_method0(intern!(py, "unpack")),
    }
}
