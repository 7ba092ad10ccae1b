//! What one engine's contexts share: stashes, and references to device bytes.
//!
//! What it is not: an allocator or a copier. torch allocates and frees; the engine copies and says
//! when a reference may be dropped.
//!
//! Invariant: while the engine may touch a storage's device bytes, `held` has a reference to them;
//! it is dropped only when the engine named the storage. A storage has one stash at a time. The
//! lock of `tables` is never held while Python runs, nor while a Python object is dropped.
//!
//! ```text
//!   number ----> stash (weak)      number --> held: the storage on the device
//!   storage --------^              named by the engine: dropped, or, of several streams, lingering
//!   its weak reference, which calls back when it dies --> forgotten
//! ```
//!
//! The hooks use it, and Python's `Desk`, which is one.

use crate::engine::Engine;
use crate::finished::Finished;
use crate::lock::Lock;
use crate::process;
use crate::room::Room;
use crate::stash::Stash;
use crate::torch::{self, Torch};
use lightering::backend::sim::HOST_STREAM;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySet, PyWeakrefMethods, PyWeakrefReference};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// So many storages whose readers all came are not looked at: their graph drops them in a moment.
pub(crate) const RESTING_MIN: usize = 2;

/// Base of Python's `Desk`.
#[pyclass(frozen, subclass, module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct Books {
    pub(crate) native: Py<Engine>,
    pub(crate) process: u32,
    /// Of a CUDA device its number; None of a simulated one.
    pub(crate) index: Option<u32>,
    pub(crate) parts: OnceLock<Parts>,
    /// Raw handles of the streams that were current in a call so far.
    streams: Py<PySet>,
    /// Storages that were saved, and outlived all that had saved them, by weak references.
    pub(crate) others: Py<PySet>,
    /// Tensors of no bytes, by type, for version probes.
    pub(crate) empties: Py<PyDict>,
    window: AtomicU64,
    tables: Mutex<Tables>,
}

/// What Python's part made.
#[derive(Debug)]
pub(crate) struct Parts {
    lock: Py<Lock>,
    pub(crate) room: Py<Room>,
    source_died: Py<SourceDied>,
}

#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) held: FxHashMap<u64, Py<PyAny>>,
    pub(crate) by_number: FxHashMap<u64, Weak<Stash>>,
    /// By the address of the storage's Python object, which is its own while the storage lives; of
    /// one that died the weak reference in `sources` has taken it out.
    by_storage: FxHashMap<usize, (u64, Weak<Stash>)>,
    /// By the address of a weak reference: the storage it is of, and the stash it was made for.
    sources: FxHashMap<usize, (usize, u64)>,
    pub(crate) finished: Finished,
    lingering: Vec<Py<PyAny>>,
    retired: FxHashSet<u64>,
    early: FxHashSet<u64>,
}

/// Its lock, which a stash that dies never waits for. Whoever leaves it buries what died meanwhile.
pub(crate) struct Entered<'a, 'py>(&'a Parts, Python<'py>);

impl Drop for Entered<'_, '_> {
    fn drop(&mut self) {
        let Entered(parts, py) = self;
        if let Err(error) = parts.lock.get().leave(*py) {
            error.write_unraisable(*py, None);
        }
    }
}

impl Books {
    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn parts(&self) -> PyResult<&Parts> {
        let unopened = || crate::errors::Usage::new_err("a desk that was not opened");
        self.parts.get().ok_or_else(unopened)
    }

    pub(crate) fn enter<'a, 'py>(&'a self, py: Python<'py>) -> PyResult<Entered<'a, 'py>> {
        let parts = self.parts()?;
        parts.lock.get().take(py)?;
        Ok(Entered(parts, py))
    }

    /// As `stream`, asked by its name: a test may stand in for it.
    pub(crate) fn stream_now(slf: &Bound<'_, Books>) -> PyResult<usize> {
        slf.call_method0(intern!(slf.py(), "stream"))?.extract()
    }

    pub(crate) fn window(&self) -> u64 {
        self.window.load(Ordering::Relaxed)
    }

    /// The stash that a storage has now.
    pub(crate) fn find(&self, storage: &Bound<'_, PyAny>) -> Option<Arc<Stash>> {
        let tables = self.tables();
        tables.by_storage.get(&(storage.as_ptr() as usize)).and_then(|(_, known)| known.upgrade())
    }

    /// A weak reference to a storage, which calls back when it dies.
    pub(crate) fn source<'py>(
        &self,
        storage: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyWeakrefReference>> {
        let callback = self.parts()?.source_died.bind(storage.py());
        PyWeakrefReference::new_with(storage, callback)
    }

    /// Enters a stash whose storage was packed. Returns whether a sweep named it already.
    pub(crate) fn enter_stash(&self, stash: &Arc<Stash>, storage: &Bound<'_, PyAny>) -> bool {
        let (number, known) = (stash.number, Arc::downgrade(stash));
        let at = storage.as_ptr() as usize;
        let held = storage.clone().unbind();
        let mut tables = self.tables();
        tables.held.insert(number, held);
        tables.by_number.insert(number, known.clone());
        tables.sources.insert(stash.source.as_ptr() as usize, (at, number));
        tables.by_storage.insert(at, (number, known));
        tables.early.remove(&number)
    }

    /// The storage of that weak reference died: its stash, if it is the one it was made for.
    fn forget(&self, source: usize) -> Option<Arc<Stash>> {
        let mut tables = self.tables();
        let (at, number) = tables.sources.remove(&source)?;
        match tables.by_storage.get(&at) {
            Some((found, _)) if *found == number => {
                tables.by_storage.remove(&at).and_then(|(_, known)| known.upgrade())
            }
            _ => None,
        }
    }

    /// A stash of this number and source has died. Does not wait.
    pub(crate) fn bury(
        slf: &Bound<'_, Books>,
        number: u64,
        source: &Bound<'_, PyWeakrefReference>,
    ) {
        if let Err(error) = Books::try_to_bury(slf, number, source) {
            error.write_unraisable(slf.py(), None);
        }
    }

    fn try_to_bury(
        slf: &Bound<'_, Books>,
        number: u64,
        source: &Bound<'_, PyWeakrefReference>,
    ) -> PyResult<()> {
        let (py, books) = (slf.py(), slf.get());
        let parts = books.parts()?;
        if !parts.lock.get().try_take(py)? {
            return parts.lock.get().queue(py, number, source.clone().unbind());
        }
        let _entered = Entered(parts, py);
        match Books::bury_now(slf, number, source) {
            // The engine is lost, as the next verb will tell.
            Err(error) if error.is_instance_of::<crate::errors::Error>(py) => Ok(()),
            buried => buried,
        }
    }

    /// Drops the references to what the engine named, where there is anything to do.
    pub(crate) fn drop_any(slf: &Bound<'_, Books>, gone: Option<Vec<u64>>) -> PyResult<()> {
        let (py, books) = (slf.py(), slf.get());
        let linger = gone.is_some() && books.streams.bind(py).len() > 1;
        let mut dropped = Ok(());
        for number in gone.unwrap_or_default() {
            // Each goes, whatever is wrong with another one.
            dropped = dropped.and(books.drop_one(py, number, linger));
        }
        dropped?;
        if books.tables().lingering.is_empty() {
            return Ok(());
        }
        books.retire(py)
    }

    /// One storage that the engine named.
    fn drop_one(&self, py: Python<'_>, number: u64, linger: bool) -> PyResult<()> {
        let (stash, storage) = {
            let mut tables = self.tables();
            let stash = tables.by_number.get(&number).and_then(Weak::upgrade);
            let storage = tables.held.remove(&number);
            let was_retired = tables.retired.remove(&number);
            match &storage {
                Some(storage) if linger && !was_retired => {
                    tables.lingering.push(storage.clone_ref(py));
                }
                None if !was_retired && !tables.by_number.contains_key(&number) => {
                    // Named while `pack` or `retire` was told its number: a stash died just then.
                    tables.early.insert(number);
                }
                _ => {}
            }
            (stash, storage)
        };
        let Some(stash) = stash else { return Ok(()) };
        stash.set_whole(None);
        stash.named(storage.as_ref().map(|storage| storage.bind(py)))
        // The storage goes now, not with the next one: it may be the last reference.
    }

    /// Of several streams one may still use what others hold a reference to; theirs goes at any
    /// time, ours only when every stream is past the moment at which it became the last one.
    fn retire(&self, py: Python<'_>) -> PyResult<()> {
        let mut lingering = std::mem::take(&mut self.tables().lingering);
        lingering.reverse();
        let mut retired = Ok(());
        while let Some(storage) = lingering.pop() {
            retired = self.retire_one(py, storage);
            if retired.is_err() {
                break;
            }
        }
        // What could not be asked about lingers on.
        self.tables().lingering.append(&mut lingering);
        retired
    }

    fn retire_one(&self, py: Python<'_>, storage: Py<PyAny>) -> PyResult<()> {
        let bound = storage.bind(py);
        let number = match Torch::of(py)?.use_count(bound) {
            Ok(..=1) => torch::address(bound)
                .and_then(|address| Ok((address, torch::bytes(bound)?)))
                .and_then(|(address, bytes)| self.native.get().retire(py, address, bytes))
                .map(Some),
            count => count.map(|_| None),
        };
        let mut tables = self.tables();
        let dropped = match &number {
            Ok(Some(number)) if tables.early.remove(number) => Some(storage),
            Ok(Some(number)) => {
                tables.retired.insert(*number);
                tables.held.insert(*number, storage)
            }
            Ok(None) | Err(_) => {
                tables.lingering.push(storage);
                None
            }
        };
        drop(tables);
        drop(dropped);
        number.map(drop)
    }
}

#[pymethods]
impl Books {
    #[new]
    fn new(py: Python<'_>, engine: &Bound<'_, PyAny>) -> PyResult<Books> {
        let native = engine.getattr("_native")?.cast_into::<Engine>()?;
        let index = native.get().body.index();
        let window = AtomicU64::new(native.get().windows(py)?.1);
        Ok(Books {
            native: native.unbind(),
            process: process::number(),
            index,
            parts: OnceLock::new(),
            streams: PySet::empty(py)?.unbind(),
            others: PySet::empty(py)?.unbind(),
            empties: PyDict::new(py).unbind(),
            window,
            tables: Mutex::default(),
        })
    }

    /// Gives it what Python's part made: its lock, and room on the device.
    fn open(slf: &Bound<'_, Books>, lock: Py<Lock>, room: Py<Room>) -> PyResult<()> {
        let py = slf.py();
        // Weak: whoever waits for a storage's death keeps no desk alive.
        let books = PyWeakrefReference::new(slf)?.unbind();
        let parts = Parts { lock, room, source_died: Py::new(py, SourceDied { books })? };
        let opened = slf.get().parts.set(parts);
        opened.map_err(|_| crate::errors::Usage::new_err("a desk is opened once"))
    }

    /// Nobody can find a stash any more that died; its bytes go when the engine says so.
    pub(crate) fn bury_now(
        slf: &Bound<'_, Books>,
        number: u64,
        source: &Bound<'_, PyWeakrefReference>,
    ) -> PyResult<()> {
        let (py, books) = (slf.py(), slf.get());
        let storage = source.upgrade();
        {
            let mut tables = books.tables();
            tables.by_number.remove(&number);
            if let Some((at, _)) = tables.sources.remove(&(source.as_ptr() as usize))
                && tables.by_storage.get(&at).is_some_and(|(found, _)| *found == number)
            {
                tables.by_storage.remove(&at);
            }
        }
        Books::sweep_now(slf)?;
        if let Some(storage) = storage
            && !books.tables().held.contains_key(&number)
        {
            // Forgotten when it dies.
            let others = books.others.bind(py);
            others.add(PyWeakrefReference::new_with(&storage, others.getattr("discard")?)?)?;
        }
        Ok(())
    }

    /// The raw handle of the stream that is current now, in this thread.
    fn stream<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Some(index) = self.index else {
            return Ok(HOST_STREAM.into_pyobject(py)?.into_any());
        };
        let stream = Torch::of(py)?.stream(py, index)?;
        self.streams.bind(py).add(&stream)?;
        Ok(stream)
    }

    /// Drops what may be dropped now. One call, so that no interrupt comes between what the engine
    /// names and the references that go for it: it names each once.
    fn sweep_now(slf: &Bound<'_, Books>) -> PyResult<()> {
        Books::drop_any(slf, slf.get().native.get().sweep(slf.py())?)
    }

    /// As `sweep_now`, of all that left: the streams wait for the copies.
    fn flush_now(slf: &Bound<'_, Books>) -> PyResult<()> {
        Books::drop_any(slf, slf.get().native.get().flush(slf.py())?)
    }

    /// Storages whose readers all came leave again, down to a window in bytes.
    fn rest(slf: &Bound<'_, Books>, window: u64) -> PyResult<()> {
        crate::fetch::rest(slf, window)
    }

    /// Whether a storage was saved before, and outlived all that had saved it.
    ///
    /// Such as a data set, a cache of rotary embeddings, or a weight that is no parameter: moving
    /// it would free nothing.
    pub(crate) fn is_of_somebody_else(&self, storage: &Bound<'_, PyAny>) -> PyResult<bool> {
        let others = self.others.bind(storage.py());
        Ok(!others.is_empty() && others.contains(PyWeakrefReference::new(storage)?)?)
    }

    #[setter(_window)]
    fn set_window(&self, bytes: u64) {
        self.window.store(bytes, Ordering::Relaxed);
    }

    #[getter]
    fn streams(&self, py: Python<'_>) -> Py<PySet> {
        self.streams.clone_ref(py)
    }

    #[getter]
    fn others(&self, py: Python<'_>) -> Py<PySet> {
        self.others.clone_ref(py)
    }

    #[getter]
    fn _held(&self, py: Python<'_>) -> HashMap<u64, Py<PyAny>> {
        let tables = self.tables();
        tables.held.iter().map(|(number, storage)| (*number, storage.clone_ref(py))).collect()
    }

    /// Storages that saved tensors hold now.
    #[getter]
    fn live_count(&self) -> usize {
        self.tables().by_number.len()
    }

    /// Numbers of the storages whose stash can be found.
    #[getter]
    fn _by_storage(&self) -> Vec<u64> {
        self.tables().by_storage.values().map(|(number, _)| *number).collect()
    }

    /// Numbers of those whose readers all came; 0 for one that died.
    #[getter]
    fn _finished(&self) -> Vec<u64> {
        let finished: Vec<_> = self.tables().finished.each().map(Weak::upgrade).collect();
        finished.iter().map(|stash| stash.as_ref().map_or(0, |stash| stash.number)).collect()
    }

    #[getter]
    fn _lingering(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.tables().lingering.iter().map(|storage| storage.clone_ref(py)).collect()
    }

    #[getter]
    fn _retired(&self) -> FxHashSet<u64> {
        self.tables().retired.clone()
    }

    #[getter]
    fn _early(&self) -> FxHashSet<u64> {
        self.tables().early.clone()
    }
}

/// What is called when a storage dies, with a reference to it: the bytes that a stash's tensors
/// were saved with are given back to the allocator then.
#[pyclass(frozen, module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct SourceDied {
    books: Py<PyWeakrefReference>,
}

#[pymethods]
impl SourceDied {
    fn __call__(&self, source: &Bound<'_, PyAny>) -> PyResult<()> {
        let books = self.books.bind(source.py()).upgrade_as::<Books>()?;
        let stash = books.and_then(|books| books.get().forget(source.as_ptr() as usize));
        if let Some(stash) = stash {
            stash.source_died();
        }
        Ok(())
    }
}
