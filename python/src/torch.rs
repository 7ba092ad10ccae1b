//! What the hooks ask of torch: names of attributes, and objects looked up once.
//!
//! What it is not: a binding to torch. Nothing is linked; tensors are Python objects here.
//!
//! Invariant: everything is asked anew of the very tensor; what is kept here never changes while
//! the process lives.
//!
//! ```text
//!   tensor --is_plain?--> storage (one Python object for all views) --> address, bytes, version
//! ```
//!
//! The files of this crate that know tensors use it.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// torch's own objects.
#[derive(Debug)]
pub(crate) struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    strided: Py<PyAny>,
    is_wrapped: Py<PyAny>,
    graph_task: Py<PyAny>,
    /// None in a torch that does not say.
    use_count: Option<Py<PyAny>>,
    pub(crate) empty: Py<PyAny>,
    pub(crate) empty_strided: Py<PyAny>,
    /// The type of plain bytes.
    pub(crate) bytes_type: Py<PyAny>,
    /// Asks for the raw handle of a device's stream; None in a torch without CUDA.
    stream: Option<Py<PyAny>>,
    /// Is the stream that is current captured? None in a torch that does not say.
    is_capturing: Option<Py<PyAny>>,
    modules: Py<PyAny>,
    out_of_memory: Py<PyType>,
    is_finalizing: Py<PyAny>,
}

const CAPTURING: &str = "_cuda_isCurrentStreamCapturing";

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    /// torch, which is imported at the first call.
    pub(crate) fn of(py: Python<'_>) -> PyResult<&Torch> {
        TORCH.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            let inner = torch.getattr("_C")?;
            let parameter = torch.getattr("nn")?.getattr("Parameter")?;
            let transforms = inner.getattr("_functorch")?;
            Ok(Torch {
                tensor: torch.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
                parameter: parameter.cast_into::<PyType>()?.unbind(),
                strided: torch.getattr("strided")?.unbind(),
                is_wrapped: transforms.getattr("is_functorch_wrapped_tensor")?.unbind(),
                graph_task: inner.getattr("_current_graph_task_id")?.unbind(),
                use_count: inner.getattr_opt("_storage_Use_Count")?.map(Bound::unbind),
                empty: torch.getattr("empty")?.unbind(),
                empty_strided: torch.getattr("empty_strided")?.unbind(),
                bytes_type: torch.getattr("uint8")?.unbind(),
                stream: inner.getattr_opt("_cuda_getCurrentRawStream")?.map(Bound::unbind),
                is_capturing: inner.getattr_opt(CAPTURING)?.map(Bound::unbind),
                modules: py.import("sys")?.getattr("modules")?.unbind(),
                out_of_memory: torch.getattr("OutOfMemoryError")?.cast_into::<PyType>()?.unbind(),
                is_finalizing: py.import("sys")?.getattr("is_finalizing")?.unbind(),
            })
        })
    }

    /// The type of tensors.
    pub(crate) fn kind<'py>(&self, py: Python<'py>) -> &Bound<'py, PyType> {
        self.tensor.bind(py)
    }

    /// Does the tensor itself hold its bytes: dense, strided, no subclass, no transform's?
    pub(crate) fn is_plain(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        let kind = tensor.get_type();
        if !kind.is(&self.tensor) && !kind.is(&self.parameter) {
            return Ok(false);
        }
        // Inside vmap and grad a tensor is a wrapper without a storage.
        Ok(tensor.getattr(intern!(py, "layout"))?.is(&self.strided)
            && !truth(tensor, intern!(py, "is_quantized"))?
            // One of several lengths is of other tensors; one of zeros has no bytes.
            && !truth(tensor, intern!(py, "is_nested"))?
            && !asks(tensor, intern!(py, "_is_zerotensor"))?
            && !self.is_wrapped.bind(py).call1((tensor,))?.is_truthy()?)
    }

    /// Is a tensor, or does it view, a parameter or one that gradients are accumulated into?
    pub(crate) fn is_weight(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        let base = match asks(tensor, intern!(py, "_is_view"))? {
            true => tensor.getattr(intern!(py, "_base"))?,
            false => tensor.clone(),
        };
        if base.is_none() {
            return Ok(false);
        }
        if truth(&base, intern!(py, "requires_grad"))? && truth(&base, intern!(py, "is_leaf"))? {
            return Ok(true);
        }
        // Asking whether a plain tensor is a parameter calls Python, and it never is one.
        Ok(!base.get_type().is(&self.tensor) && base.is_instance(self.parameter.bind(py))?)
    }

    /// Does autograd run a backward pass in this thread?
    pub(crate) fn is_in_backward(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.graph_task.bind(py).call0()?.extract::<i64>()? != -1)
    }

    /// The raw handle of the stream that is current now, in this thread, on a CUDA device.
    pub(crate) fn stream<'py>(&self, py: Python<'py>, index: u32) -> PyResult<Bound<'py, PyAny>> {
        let asked = self.stream.as_ref();
        let asked =
            asked.ok_or_else(|| crate::errors::Unavailable::new_err("torch has no CUDA"))?;
        asked.bind(py).call1((index,))
    }

    /// May a CUDA graph have a say in this thread: is one captured, or are there trees of them?
    pub(crate) fn may_have_graphs(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(is_capturing) = &self.is_capturing else { return Ok(true) };
        let trees = intern!(py, "torch._inductor.cudagraph_trees");
        Ok(is_capturing.bind(py).call0()?.is_truthy()? || self.modules.bind(py).contains(trees)?)
    }

    /// Owners of a storage, its Python object being one of them.
    pub(crate) fn use_count(&self, storage: &Bound<'_, PyAny>) -> PyResult<u64> {
        // Where torch does not say, somebody else may always be there.
        let Some(use_count) = &self.use_count else { return Ok(u64::MAX) };
        let of = storage.getattr(intern!(storage.py(), "_cdata"))?;
        use_count.bind(storage.py()).call1((of,))?.extract()
    }

    /// Did torch's allocator say that it has no room?
    pub(crate) fn is_out_of_memory(&self, py: Python<'_>, error: &PyErr) -> bool {
        error.is_instance(py, self.out_of_memory.bind(py))
    }

    /// Does the interpreter end? Then nobody is told of anything any more.
    pub(crate) fn is_finalizing(&self, py: Python<'_>) -> bool {
        let said = self.is_finalizing.bind(py).call0();
        said.and_then(|said| said.is_truthy()).unwrap_or(true)
    }
}

/// Whether the tensor itself holds its bytes: dense, strided, no subclass, no transform's.
#[pyfunction]
pub(crate) fn is_plain(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    Torch::of(tensor.py())?.is_plain(tensor)
}

/// Whether a tensor is, or views, a parameter or one that gradients are accumulated into.
///
/// Needs no root module, and so knows weights inside of compiled functions too. Views that FSDP
/// makes of what it gathered are no views to autograd; `ResidentStorages` knows those.
#[pyfunction]
pub(crate) fn is_weight(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    Torch::of(tensor.py())?.is_weight(tensor)
}

/// An attribute that is true or false.
pub(crate) fn truth(
    of: &Bound<'_, PyAny>,
    name: &Bound<'_, pyo3::types::PyString>,
) -> PyResult<bool> {
    of.getattr(name)?.is_truthy()
}

/// A method that says true or false.
pub(crate) fn asks(
    of: &Bound<'_, PyAny>,
    name: &Bound<'_, pyo3::types::PyString>,
) -> PyResult<bool> {
    of.call_method0(name)?.is_truthy()
}

/// The storage of a plain tensor: one Python object for all tensors of it.
pub(crate) fn storage<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    tensor.call_method0(intern!(tensor.py(), "untyped_storage"))
}

/// A storage's first byte.
pub(crate) fn address(storage: &Bound<'_, PyAny>) -> PyResult<u64> {
    storage.call_method0(intern!(storage.py(), "data_ptr"))?.extract()
}

/// A storage's bytes.
pub(crate) fn bytes(storage: &Bound<'_, PyAny>) -> PyResult<u64> {
    storage.call_method0(intern!(storage.py(), "nbytes"))?.extract()
}

/// A tensor's version: how often it, its views and its base were edited in place.
pub(crate) fn version(tensor: &Bound<'_, PyAny>) -> PyResult<i64> {
    tensor.getattr(intern!(tensor.py(), "_version"))?.extract()
}
