//! Who saves a tensor: is it the input of a checkpoint?
//!
//! What it is not: a hook in torch's checkpoint. It looks at who called.
//!
//! Invariant: of a checkpoint only the first tensor among its arguments that has bytes is its
//! input. Whoever is not known to save inputs saves none.
//!
//! ```text
//!   checkpoint(layer, hidden, mask)        a saver, by its code
//!     Function.apply(.., hidden, mask)     calls this with all that it saves, its own dummy first
//!       the pack hook                      native, and so without a frame
//! ```
//!
//! The pack hook uses it.

use crate::torch::{Torch, asks};
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyTuple};

/// What is looked for among the callers.
#[derive(Debug)]
pub(crate) struct Frames {
    frame_now: Py<PyAny>,
    apply: Py<PyAny>,
    savers: Py<PyAny>,
}

impl Frames {
    /// Of the code objects of whoever is called to save, and a set of those who call it.
    pub(crate) fn new(py: Python<'_>, apply: Py<PyAny>, savers: Py<PyAny>) -> PyResult<Frames> {
        let frame_now = py.import("sys")?.getattr("_getframe")?.unbind();
        Ok(Frames { frame_now, apply, savers })
    }

    /// Is the tensor that is saved now the input of a checkpoint?
    pub(crate) fn is_input(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        let frame = match self.frame_now.bind(py).call0() {
            Ok(frame) => frame,
            // On a thread of autograd there may be nobody.
            Err(error) if error.is_instance_of::<PyValueError>(py) => return Ok(false),
            Err(error) => return Err(error),
        };
        let code = intern!(py, "f_code");
        if !frame.getattr(code)?.is(&self.apply) {
            return Ok(false);
        }
        let saver = frame.getattr(intern!(py, "f_back"))?;
        if saver.is_none() || !self.savers.bind(py).contains(saver.getattr(code)?)? {
            return Ok(false);
        }
        if !asks(tensor, intern!(py, "is_floating_point"))? {
            return Ok(false);
        }
        // The few locals of this frame: asking for all of the saver's takes longer than all else.
        let args = frame.getattr(intern!(py, "f_locals"))?.get_item(intern!(py, "args"))?;
        let kind = Torch::of(py)?.kind(py);
        for each in args.cast_into::<PyTuple>()? {
            if each.is_instance(kind)? && has_bytes(&each)? {
                return Ok(each.is(tensor));
            }
        }
        Ok(false)
    }
}

/// One that does not say has some: its count is a symbol while a compiler traces, and of a subclass
/// it is anybody's code.
fn has_bytes(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let count = tensor.call_method0(intern!(py, "numel"));
    match count.and_then(|count| count.cast_exact::<PyInt>()?.extract::<u64>()) {
        Ok(count) => Ok(count != 0),
        Err(error) if error.is_instance_of::<PyException>(py) => Ok(true),
        Err(error) => Err(error),
    }
}
