//! One context's saved storages, and the leases on them.
//!
//! What it is not: it keeps no tensor. The books keep a reference to each storage's bytes until
//! they are told that nothing uses them.
//!
//! Invariant: a lease that is dropped, on any thread and in any state, gives its storage up; its
//! device bytes are named by a later sweep.
//!
//! ```text
//!   pack(address, bytes, stream) -> Lease, its number, what left, what may be dropped
//!   unpack(lease, stream) -> ready, or take room and refill(lease, address, stream)
//!     `-> wanted: number, bytes -> prefetch(lease, address, stream) -> wanted
//! ```
//!
//! The hooks use it, and Python's part of the package.

use crate::engine::{At, Body, Engine, number, range};
use lightering::adapter::saved;
use lightering::policy::Kept;
use lightering::{Acquire, Bytes, DeviceRange, Evict, Name, Result, Storage, StorageId};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What became of an eviction, as Python is told.
const MOVED: &str = "moved";
const CLEAN: &str = "clean";

/// A hold on one saved storage; dropping it gives the storage up.
#[pyclass(frozen, module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct Lease {
    storage: Arc<Storage>,
    /// What packed it.
    pub(crate) saved: Py<Saved>,
}

impl Lease {
    fn id(&self) -> StorageId {
        self.storage.id()
    }

    /// A second hold on the storage.
    pub(crate) fn share(&self, py: Python<'_>) -> Lease {
        Lease { storage: self.storage.clone(), saved: self.saved.clone_ref(py) }
    }
}

/// What a context packed: its own policy over a shared engine.
#[pyclass(frozen, module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct Saved {
    body: Arc<Body>,
    inner: Mutex<saved::Saved>,
}

impl Saved {
    fn lock(&self) -> MutexGuard<'_, saved::Saved> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lease and its number, which storage left and how, what may be dropped.
pub(crate) type Packed = (Lease, u64, Option<(u64, &'static str)>, Gone);

/// Storages whose device bytes may be dropped; `None` for none, as mostly.
pub(crate) type Gone = Option<Vec<u64>>;

/// The storage that should be fetched next, and its bytes.
pub(crate) type Wanted = Option<(u64, u64)>;

#[pymethods]
impl Saved {
    #[new]
    fn new(engine: &Engine, keep_last: usize, min_bytes: u64) -> Saved {
        let inner = Mutex::new(saved::Saved::new(keep_last, Bytes(min_bytes)));
        Saved { body: engine.body.clone(), inner }
    }

    /// The largest storage packed so far, in bytes.
    #[getter]
    fn largest(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().largest().0)
    }

    /// Takes a storage of `bytes` at `address`, whose producer was enqueued on `stream`.
    pub(crate) fn pack(
        slf: &Bound<'_, Saved>,
        address: u64,
        bytes: u64,
        stream: usize,
        name: &str,
    ) -> PyResult<Packed> {
        let (py, this, name) = (slf.py(), slf.get(), Name::new(name));
        let (storage, number, left, gone) = this.body.call(py, "pack", |at| {
            let compute = at.stream(stream)?;
            let range = range(address, bytes)?;
            at.enter(range)?;
            let packed = this.lock().pack(at.engine, range, name, compute);
            let (storage, left) = match packed {
                Ok(packed) => packed,
                Err(error) => {
                    at.leave(range)?;
                    return Err(error);
                }
            };
            let number = number(storage.id());
            at.keep(storage.id(), range);
            let left = match left {
                Ok(left) => left.map(|(id, became)| (crate::engine::number(id), words(became))),
                Err(error) if error.is_lost() => return Err(error),
                // It stays where it is: nothing is lost but the room it takes.
                Err(_) => Some((number, "refused")),
            };
            let gone = at.sweep_after(bytes)?;
            Ok((storage, number, left, gone))
        })?;
        let lease = Lease { storage: Arc::new(storage), saved: slf.clone().unbind() };
        Ok((lease, number, left, gone))
    }

    /// Are the bytes there for a reader on `stream`? What may be dropped; and, where they are, what
    /// should be fetched next.
    pub(crate) fn unpack(
        &self,
        py: Python<'_>,
        lease: &Lease,
        stream: usize,
    ) -> PyResult<(bool, Gone, Wanted)> {
        self.body.call(py, "unpack", |at| {
            let compute = at.stream(stream)?;
            let acquired = self.lock().unpack(at.engine, lease.id(), compute)?;
            let is_ready = matches!(acquired, Acquire::Ready(_));
            let gone = at.sweep()?;
            let wanted = if is_ready { at.wanted_besides(compute) } else { None };
            Ok((is_ready, gone, wanted))
        })
    }

    /// Brings the bytes to `address`, where room was taken in the order of `stream`. Returns what
    /// should be fetched next.
    pub(crate) fn refill(
        &self,
        py: Python<'_>,
        lease: &Lease,
        address: u64,
        stream: usize,
    ) -> PyResult<Wanted> {
        let (id, len) = (lease.id(), lease.storage.len());
        self.body.call(py, "refill", |at| {
            let compute = at.stream(stream)?;
            let target = range(address, len.0)?;
            into(at, id, target, |at| at.engine.refill(id, target, compute).map(drop))?;
            Ok(at.wanted_besides(compute))
        })
    }

    /// Fetches it to `address`, where room was taken in the order of `stream`. Says whether it did,
    /// and what should be fetched next; where not, nothing is lost: its reader will ask.
    pub(crate) fn prefetch(
        &self,
        py: Python<'_>,
        lease: &Lease,
        address: u64,
        stream: usize,
    ) -> PyResult<(bool, Wanted)> {
        let (id, len) = (lease.id(), lease.storage.len());
        self.body.call(py, "prefetch", |at| {
            let compute = at.stream(stream)?;
            let target = range(address, len.0)?;
            match into(at, id, target, |at| at.engine.prefetch(id, target, compute)) {
                Ok(()) => Ok((true, at.wanted_besides(compute))),
                Err(error) if error.is_retryable() => Ok((false, None)),
                Err(error) => Err(error),
            }
        })
    }

    /// Gives a storage that was fetched ahead up again. Its room may be dropped in the order of
    /// `stream` when this returns.
    pub(crate) fn cancel(&self, py: Python<'_>, lease: &Lease, stream: usize) -> PyResult<()> {
        self.body.call(py, "cancel", |at| {
            let compute = at.stream(stream)?;
            at.engine.cancel(lease.id(), compute)?;
            at.gone(lease.id())
        })
    }

    /// The readers of a storage were enqueued on `stream`, and others may come: it leaves again.
    pub(crate) fn rest(
        &self,
        py: Python<'_>,
        lease: &Lease,
        stream: usize,
    ) -> PyResult<Option<&'static str>> {
        self.body.call(py, "rest", |at| {
            let compute = at.stream(stream)?;
            let rested = self.lock().rest(at.engine, lease.id(), compute)?;
            Ok(rested.map(words))
        })
    }

    /// Where a storage's bytes are: one word.
    pub(crate) fn residency(&self, py: Python<'_>, lease: &Lease) -> PyResult<String> {
        let of = |at: &mut At<'_>| at.engine.residency(lease.id());
        let residency = self.body.call(py, "residency", of)?;
        Ok(format!("{residency:?}").to_lowercase())
    }
}

/// Enters a target, fills it, and keeps it; a target that was refused is not kept.
fn into(
    at: &mut At<'_>,
    id: StorageId,
    target: DeviceRange,
    fill: impl FnOnce(&mut At<'_>) -> Result<()>,
) -> Result<()> {
    at.enter(target)?;
    match fill(at) {
        Ok(()) => {
            at.keep(id, target);
            Ok(())
        }
        Err(error) => {
            at.leave(target)?;
            Err(error)
        }
    }
}

fn words(became: Evict) -> &'static str {
    match became {
        Evict::Moving(_) => MOVED,
        Evict::Clean => CLEAN,
        Evict::Kept(why) => Kept::words(why),
    }
}
