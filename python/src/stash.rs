//! One storage that a context moves, with every saved tensor that is of it.
//!
//! What it is not: the storage. The books of its engine keep the bytes alive while something uses
//! them.
//!
//! Invariant: it lives as long as a saved tensor of it does. When it dies, on whatever thread, it
//! gives its storage up and has itself buried; nobody is waited for.
//!
//! ```text
//!   saved tensor a --.
//!   view of a -------+--> Stash (lease, marks) --dies--> Books.bury(number, source)
//!   alias of a ------'
//! ```
//!
//! The files of this crate that know tensors use it. Its fields that change do so under the
//! interpreter's lock; the one of `marks` is never held while Python runs.

use crate::books::Books;
use crate::counts::Counts;
use crate::process;
use crate::saved::Lease;
use crate::torch::{self, Torch};
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyWeakrefReference};
use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What became of a storage; else it is the reason why it stays, or empty.
pub(crate) const MOVED: &str = "moved";
const RELEASED: &str = "released";

/// One storage that left, or is to leave.
#[derive(Debug)]
pub(crate) struct Stash {
    pub(crate) books: Py<Books>,
    pub(crate) counts: Py<Counts>,
    pub(crate) lease: Option<Lease>,
    /// The storage's name, as the engine gave it.
    pub(crate) number: u64,
    /// A weak reference to the storage it was saved with, which calls back when that one dies.
    pub(crate) source: Py<PyWeakrefReference>,
    /// Where the storage's bytes were when it was saved.
    pub(crate) address: u64,
    pub(crate) nbytes: u64,
    pub(crate) version: i64,
    /// The version of the subclass that it was saved as a part of; 0 of a plain tensor.
    pub(crate) outer: i64,
    marks: Mutex<Marks>,
}

/// What changes.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    pub(crate) state: Cow<'static, str>,
    /// Saved tensors of it that nobody asked for yet.
    pub(crate) waiting: usize,
    pub(crate) was_fetched: bool,
    pub(crate) was_named: bool,
    /// Its owner resized it while it was copied: what was copied is anybody's.
    pub(crate) was_resized: bool,
    /// It is among those whose readers all came.
    pub(crate) is_finished: bool,
    /// Size, stride and type of a saved tensor that is all of the storage, where the first one is.
    pub(crate) layout: Option<Py<PyTuple>>,
    /// That tensor, while the bytes that were fetched are on the device.
    pub(crate) whole: Option<Py<PyAny>>,
}

impl Stash {
    pub(crate) fn new(
        books: Py<Books>,
        counts: Py<Counts>,
        lease: Lease,
        number: u64,
        source: Py<PyWeakrefReference>,
        (address, nbytes): (u64, u64),
        (version, outer): (i64, i64),
    ) -> Stash {
        let (lease, marks) = (Some(lease), Mutex::default());
        Stash { books, counts, lease, number, source, address, nbytes, version, outer, marks }
    }

    /// What changes. Not to be held while Python runs: a collection may want it.
    pub(crate) fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What unpacks it.
    pub(crate) fn lease(&self) -> PyResult<&Lease> {
        let gone = || crate::errors::Usage::new_err("unpack: the storage was given up");
        self.lease.as_ref().ok_or_else(gone)
    }

    /// The storage left.
    pub(crate) fn moved(self: &Arc<Stash>, py: Python<'_>) -> PyResult<()> {
        if !self.marks().state.is_empty() {
            let shown = Shown(self.clone());
            self.counts.bind(py).call_method1("take_back", (shown,))?;
        }
        self.marks().state = Cow::Borrowed(MOVED);
        self.counts.get().moved.add(self.nbytes);
        Ok(())
    }

    /// The storage stays for now.
    pub(crate) fn stays(self: &Arc<Stash>, py: Python<'_>, why: &str) -> PyResult<()> {
        let shown = Shown(self.clone());
        self.counts.bind(py).call_method1("keep", (shown, why)).map(drop)
    }

    /// The bytes that it was saved with were given back to their allocator.
    pub(crate) fn source_died(&self) {
        let mut marks = self.marks();
        if marks.was_named && marks.state == MOVED {
            marks.state = Cow::Borrowed(RELEASED);
            self.counts.get().released.add(self.nbytes);
        }
    }

    /// The engine named it: first with the storage that it was saved with, later with ones that
    /// were fetched.
    pub(crate) fn named(&self, storage: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let is_first = !std::mem::replace(&mut self.marks().was_named, true);
        if is_first && let Some(storage) = storage {
            let found = (torch::address(storage)?, torch::bytes(storage)?);
            self.marks().was_resized = found != (self.address, self.nbytes);
        }
        Ok(())
    }

    /// Takes its marks for device bytes that are there, or that are not there any more.
    pub(crate) fn set_whole(&self, whole: Option<Py<PyAny>>) {
        // Dropped when the marks are free again.
        let before = std::mem::replace(&mut self.marks().whole, whole);
        drop(before);
    }
}

impl Stash {
    /// It dies: gives the storage up, and has itself buried.
    fn end(&mut self, py: Python<'_>) {
        let lease = self.lease.take();
        // A child has the parent's objects but not its device: it drops them and tells nobody.
        // It takes no lock of theirs either: a thread that is not there may hold it.
        let books = self.books.bind(py);
        if books.get().process != process::number() {
            return;
        }
        if Torch::of(py).is_ok_and(|torch| torch.is_finalizing(py)) {
            return;
        }
        // Gives the storage up, and asks nobody. The bytes are nobody's else when named.
        drop(lease);
        self.set_whole(None);
        Books::bury(books, self.number, self.source.bind(py));
    }
}

impl Drop for Stash {
    fn drop(&mut self) {
        let told = Python::try_attach(|py| {
            // The last reference may go while an exception is on its way through whoever had it.
            // It is not ours, and Python takes no result of a call that finds one.
            let on_its_way = PyErr::take(py);
            self.end(py);
            if let Some(error) = on_its_way {
                error.restore(py);
            }
        });
        // Where the interpreter is gone there is nobody to tell.
        told.unwrap_or_default();
    }
}

/// A stash as Python sees it, while a figure of it changes.
#[pyclass(frozen, name = "Stash", module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct Shown(Arc<Stash>);

#[pymethods]
impl Shown {
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes
    }

    /// "moved", "released", or why it stays; empty before it is known.
    #[getter]
    fn state(&self) -> String {
        self.0.marks().state.to_string()
    }

    #[setter]
    fn set_state(&self, state: String) {
        self.0.marks().state = Cow::Owned(state);
    }
}
