//! A desk's lock, which a stash that dies never waits for.
//!
//! What it is not: the engine's. It is there so that the books of a desk and the engine's are one
//! step, and taken before that one.
//!
//! Invariant: whoever holds it buries what died meanwhile, once it has left. It is taken and left
//! in native code alone: a signal's handler runs between two steps of Python, and an interrupt
//! there would leave it taken for good.
//!
//! ```text
//!   enter --> ... --> leave --> bury what died
//!   a stash dies: taken by another thread? -> queued, for that one      free -> buried now
//! ```
//!
//! A stash dies anywhere, and so in a collection that runs while its thread holds another desk's
//! lock; threads that waited there for one another's desks would wait for ever.
//!
//! `Books` and Python's `Desk` take it.

use crate::books::Books;
use crate::errors::Error;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyWeakrefReference};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The number of a stash that died, and the weak reference to its storage.
type Dead = (u64, Py<PyWeakrefReference>);

/// The lock.
#[pyclass(frozen, module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct Lock {
    /// Python's own, which a thread may take again that has it; its methods, looked up once.
    acquire: Py<PyAny>,
    release: Py<PyAny>,
    /// Not the desk itself, which has this lock: a weak reference to it. No step of Python lies
    /// between the queue and the burial.
    books: Py<PyAny>,
    dead: Mutex<VecDeque<Dead>>,
}

impl Lock {
    fn dead(&self) -> MutexGuard<'_, VecDeque<Dead>> {
        self.dead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Not held while Python runs: a collection there may queue one more.
    fn has_dead(&self) -> bool {
        !self.dead().is_empty()
    }

    /// Takes it; waits.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<()> {
        self.acquire.bind(py).call0().map(drop)
    }

    /// Takes it, unless another thread has it. Says whether it did.
    pub(crate) fn try_take(&self, py: Python<'_>) -> PyResult<bool> {
        self.acquire.bind(py).call1((false,))?.is_truthy()
    }

    /// Leaves it, and buries.
    pub(crate) fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.release.bind(py).call0()?;
        self.bury_the_dead(py)
    }

    /// A stash has died that could not be buried at once.
    pub(crate) fn queue(
        &self,
        py: Python<'_>,
        number: u64,
        source: Py<PyWeakrefReference>,
    ) -> PyResult<()> {
        self.dead().push_back((number, source));
        self.bury_the_dead(py)
    }

    fn bury_the_dead(&self, py: Python<'_>) -> PyResult<()> {
        while self.has_dead() && self.try_take(py)? {
            let buried = self.bury_one(py);
            self.release.bind(py).call0()?;
            match buried {
                // The engine is lost, as the next verb will tell.
                Err(error) if error.is_instance_of::<Error>(py) => {}
                buried => buried?,
            }
        }
        Ok(())
    }

    fn bury_one(&self, py: Python<'_>) -> PyResult<()> {
        // Somebody else may have been faster.
        let Some((number, source)) = self.dead().pop_front() else { return Ok(()) };
        // Gone with all that it held where there is none.
        let books = self.books.bind(py).call0()?.cast_into::<Books>().ok();
        books.map_or(Ok(()), |books| Books::bury_now(&books, number, source.bind(py)))
    }
}

#[pymethods]
impl Lock {
    /// `books` is a weak reference to the desk whose lock it is.
    #[new]
    fn new(py: Python<'_>, books: Py<PyAny>) -> PyResult<Lock> {
        let lock = py.import("threading")?.getattr("RLock")?.call0()?;
        Ok(Lock {
            acquire: lock.getattr("acquire")?.unbind(),
            release: lock.getattr("release")?.unbind(),
            books,
            dead: Mutex::default(),
        })
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        self.take(py)
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.leave(py)
    }
}
