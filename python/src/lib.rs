//! The engine's door for Python: module `lightering._native`.
//!
//! What it is not: it holds no copy, stream or event logic. Addresses, lengths and raw streams come
//! in as numbers. Its hooks know of torch what they ask a saved tensor for, by name; nothing of
//! torch is linked. What is asked once a step, and the words, are Python's.
//!
//! Invariant: the interpreter's lock is let go before the engine's is taken, and nothing under the
//! engine's lock calls Python. No panic crosses into Python: it arrives as an exception.
//!
//! ```text
//!   Engine --open--> backend, pool of the process     Saved.pack(address, bytes, stream) -> Lease
//!   errors: one exception for each kind               host: CPU memory as simulated device memory
//!   Hooks._pack(tensor) -> Moved (pack.rs, moved.rs)  unpack(Moved) -> tensor (fetch.rs)
//!      `--> Stash, one for each storage (stash.rs) --> Books of one engine (books.rs)
//! ```
//!
//! Python imports it.

mod books;
mod counts;
mod engine;
mod entered;
mod errors;
mod fetch;
mod finished;
mod frames;
mod given_up;
mod hooked;
mod host;
mod kept;
mod lock;
mod longest;
mod moved;
mod pack;
mod pool;
mod process;
mod room;
mod saved;
mod size;
mod stash;
mod stats;
mod torch;

use lightering::backend::Spec;
use lightering::policy::Kept;
use pyo3::prelude::*;

/// What Python imports.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("HOST_STREAM", lightering::backend::sim::HOST_STREAM)?;
    module.add("KEPT", Kept::ALL.map(Kept::words))?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<saved::Saved>()?;
    module.add_class::<saved::Lease>()?;
    module.add_class::<books::Books>()?;
    module.add_class::<counts::Counts>()?;
    module.add_class::<hooked::Hooked>()?;
    module.add_class::<kept::Kept>()?;
    module.add_class::<lock::Lock>()?;
    module.add_class::<moved::Moved>()?;
    module.add_class::<pack::Hooks>()?;
    module.add_class::<room::Room>()?;
    module.add_class::<stash::Shown>()?;
    module.add_function(wrap_pyfunction!(moved::unpack, module)?)?;
    module.add_function(wrap_pyfunction!(torch::is_plain, module)?)?;
    module.add_function(wrap_pyfunction!(torch::is_weight, module)?)?;
    module.add_function(wrap_pyfunction!(bytes_of, module)?)?;
    module.add_function(wrap_pyfunction!(device, module)?)?;
    process::watch_forks(module)?;
    errors::register(module)
}

/// A size in bytes, from an int or text; `name` is the argument's.
#[pyfunction(name = "size")]
fn bytes_of(size: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    crate::size::size(size, name)
}

/// A device's name in full, such as "cuda:0" for "cuda".
#[pyfunction]
fn device(name: &str) -> PyResult<String> {
    let spec: Spec = name.parse().map_err(errors::raised)?;
    Ok(spec.to_string())
}
