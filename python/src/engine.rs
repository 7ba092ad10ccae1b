//! The engine as Python holds it.
//!
//! What it is not: an engine. Every method is one call of the engine's own, or a few in a row.
//!
//! Invariant: the interpreter's lock is let go first, then the desk's lock is taken, then the
//! engine's, and none is taken while a later one is held. In a forked child every call is refused,
//! and nothing is freed.
//!
//! ```text
//!   Python thread --let go of the GIL--> desk --> engine --> backend
//!                                         `-- which CPU memory the simulated device may reach
//! ```
//!
//! Python's part of the package uses it.

use crate::errors::raised;
use crate::host::Host;
use crate::longest::Longest;
use crate::{pool, process, stats};
use lightering::backend::sim::{Config, World};
use lightering::backend::{Backend, Spec};
use lightering::pinned::{Growth, Reservation};
use lightering::{
    Budget, Bytes, DevicePtr, DeviceRange, Engine as Inner, Error, Kind, Misuse, Options, Result,
    Shared, StorageId, StreamId,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// How often packing asks which copies are done, while the bytes of one window are packed.
const SWEEPS_A_WINDOW: u64 = 16;

/// At the latest it asks after so many bytes: a wide window is leave to run ahead, not to keep what
/// is done.
const UNSWEPT_BYTES_MAX: u64 = 32 << 20;

/// What is kept beside the engine.
#[derive(Debug)]
pub(crate) struct Desk {
    entered: Entered,
    /// Bytes packed since the last sweep.
    unswept_bytes: u64,
    /// Streams of others that were named so far.
    streams: Vec<(usize, StreamId)>,
    /// What is being page-locked, or was last.
    reservation: Option<Reservation>,
    longest: Longest,
}

/// CPU memory that the simulated device may reach, by the storage it belongs to.
#[derive(Debug, Default)]
struct Entered {
    host: Option<Arc<Host>>,
    ranges: HashMap<StorageId, DeviceRange>,
    process: u32,
}

impl Drop for Entered {
    fn drop(&mut self) {
        // A child has no such device, and may wait for ever for a lock of it.
        if let Some(host) = self.host.as_ref().filter(|_| self.process == process::number()) {
            // What an engine that was leaked still uses is refused.
            self.ranges.values().for_each(|range| drop(host.leave(*range)));
        }
    }
}

/// One engine and what goes with it, shared by its contexts and their leases.
#[derive(Debug)]
pub(crate) struct Body {
    shared: Shared,
    /// Goes after the engine, which ends what is under way.
    desk: Mutex<Desk>,
    host: Option<Arc<Host>>,
    device: String,
    process: u32,
}

impl Body {
    /// Runs verbs under the engine's lock, without the interpreter's.
    ///
    /// # Errors
    /// Those of the verbs; `Usage(Forked)` in a child; `Lost` where a verb panicked.
    pub(crate) fn call<T: Send>(
        &self,
        py: Python<'_>,
        op: &'static str,
        verbs: impl FnOnce(&mut At<'_>) -> Result<T> + Send,
    ) -> PyResult<T> {
        let outcome = py.detach(|| {
            catch_unwind(AssertUnwindSafe(|| {
                self.check_process(op)?;
                let begun = Instant::now();
                let mut desk = self.desk.lock().unwrap_or_else(PoisonError::into_inner);
                let mut engine = self.shared.lock();
                let host = self.host.as_deref();
                let done = verbs(&mut At { engine: &mut engine, desk: &mut desk, host });
                desk.longest.took(op, begun.elapsed());
                done
            }))
        });
        let panicked = || Err(Error::new(Kind::Lost, op).detail("a verb panicked"));
        outcome.unwrap_or_else(|_| panicked()).map_err(raised)
    }

    /// Are its bytes those of CPU tensors?
    pub(crate) fn is_simulated(&self) -> bool {
        self.host.is_some()
    }

    /// Of a CUDA device its number.
    pub(crate) fn index(&self) -> Option<u32> {
        self.device.strip_prefix("cuda:").and_then(|index| index.parse().ok())
    }

    fn check_process(&self, op: &'static str) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(Error::usage(Misuse::Forked, op)) }
    }

    fn is_here(&self) -> bool {
        self.process == process::number()
    }
}

/// The engine under its lock, with what is kept beside it.
pub(crate) struct At<'a> {
    pub(crate) engine: &'a mut Inner,
    desk: &'a mut Desk,
    host: Option<&'a Host>,
}

impl At<'_> {
    /// Makes device bytes reachable where they are CPU memory.
    pub(crate) fn enter(&mut self, range: DeviceRange) -> Result<()> {
        self.host.map_or(Ok(()), |host| host.enter(range))
    }

    /// Keeps what was entered under its storage.
    pub(crate) fn keep(&mut self, id: StorageId, range: DeviceRange) {
        if self.host.is_some() {
            self.desk.entered.ranges.insert(id, range);
        }
    }

    /// The opposite of `enter`.
    pub(crate) fn leave(&mut self, range: DeviceRange) -> Result<()> {
        self.host.map_or(Ok(()), |host| host.leave(range))
    }

    /// The engine's name of a stream.
    pub(crate) fn stream(&mut self, raw: usize) -> Result<StreamId> {
        if let Some((_, known)) = self.desk.streams.iter().find(|(known, _)| *known == raw) {
            return Ok(*known);
        }
        let stream = self.engine.adopt_stream(raw)?;
        self.desk.streams.push((raw, stream));
        Ok(stream)
    }

    /// Every storage whose device bytes may be dropped now. Of one stream alone, in its order;
    /// where there are several the engine names only what is done for all of them.
    pub(crate) fn sweep(&mut self) -> Result<Option<Vec<u64>>> {
        self.desk.unswept_bytes = 0;
        // Takes no memory while it is empty.
        let mut gone = Vec::new();
        for index in 0..self.desk.streams.len() {
            loop {
                match self.engine.releasable(self.desk.streams[index].1) {
                    Ok(Some(id)) => {
                        self.gone(id)?;
                        gone.push(number(id));
                    }
                    // Somebody captures the stream: later.
                    Err(error) if error.misuse() == Some(Misuse::Capturing) => break,
                    Err(error) => return Err(error),
                    Ok(None) => break,
                }
            }
        }
        Ok((!gone.is_empty()).then_some(gone))
    }

    /// As `sweep`, after a verb that is done: only a lost device is an error, what else went wrong
    /// the next sweep meets again.
    pub(crate) fn sweep_besides(&mut self) -> Result<Option<Vec<u64>>> {
        match self.sweep() {
            Err(error) if !error.is_lost() => Ok(None),
            swept => swept,
        }
    }

    /// As `sweep_besides`, after so many bytes were packed. Within the engine's bound only every
    /// now and then: each sweep asks the driver about the oldest copy.
    pub(crate) fn sweep_after(&mut self, bytes: u64) -> Result<Option<Vec<u64>>> {
        let window = self.engine.options().unreleased_bytes_max.0;
        self.desk.unswept_bytes = self.desk.unswept_bytes.saturating_add(bytes);
        let unswept_max = (window / SWEEPS_A_WINDOW).min(UNSWEPT_BYTES_MAX);
        let is_time = self.desk.unswept_bytes >= unswept_max;
        if !is_time && !self.engine.is_over_unreleased() {
            return Ok(None);
        }
        self.sweep_besides()
    }

    /// As `wanted`, after a verb that is done: nobody may take its outcome for the verb's.
    pub(crate) fn wanted_besides(&mut self, compute: StreamId) -> Option<(u64, u64)> {
        self.wanted(compute).unwrap_or_default()
    }

    /// The storage that should be fetched next for readers on a stream, and its bytes.
    pub(crate) fn wanted(&mut self, compute: StreamId) -> Result<Option<(u64, u64)>> {
        Ok(self.engine.wanted(compute)?.map(|(id, len)| (number(id), len.0)))
    }

    /// A storage's device bytes are used by nothing any more.
    pub(crate) fn gone(&mut self, id: StorageId) -> Result<()> {
        match self.desk.entered.ranges.remove(&id) {
            Some(range) => self.leave(range),
            None => Ok(()),
        }
    }
}

/// A storage's name in Python: one number, never given twice by an engine.
pub(crate) fn number(id: StorageId) -> u64 {
    u64::from(id.0.generation) << 32 | u64::from(id.0.index)
}

/// Device bytes from numbers.
pub(crate) fn range(at: u64, len: u64) -> Result<DeviceRange> {
    DeviceRange::new(DevicePtr(at), Bytes(len))
}

/// Moves bytes between one device and pinned host memory.
#[pyclass(frozen, module = "lightering")]
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) body: Arc<Body>,
}

#[pymethods]
impl Engine {
    /// Values that were checked: Python's part of the package says which are allowed.
    #[new]
    #[pyo3(signature = (device, pinned_bytes, unreleased_bytes, prefetch_bytes, *, prefetch_count,
                        streams, time_stalls, verify, seed))]
    #[allow(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        device: &str,
        pinned_bytes: Option<u64>,
        unreleased_bytes: u64,
        prefetch_bytes: u64,
        prefetch_count: usize,
        streams: usize,
        time_stalls: bool,
        verify: bool,
        seed: Option<u64>,
    ) -> PyResult<Engine> {
        let asked = pinned_bytes.map(Bytes);
        let options = Options {
            unreleased_bytes_max: Bytes(unreleased_bytes),
            prefetch_bytes_max: Bytes(prefetch_bytes),
            prefetch_count_max: prefetch_count,
            // Each context has a policy of its own.
            keep_last_count: 0,
            storage_bytes_min: Bytes::ZERO,
            // A longer batch is what memory is short for: what finds no block stays on the device.
            pinned_growth: Growth::Late,
            pinned_quota_max: asked.unwrap_or(Bytes::MAX),
            streams_max: streams,
            time_stalls,
            verify,
            ..Options::default()
        };
        let spec: Spec = device.parse().map_err(raised)?;
        let opened = py.detach(|| open(spec, asked, options, seed));
        opened.map(|body| Engine { body: Arc::new(body) }).map_err(raised)
    }

    /// The device, as "cuda:0" or "sim:0".
    #[getter]
    fn device(&self) -> &str {
        &self.body.device
    }

    /// Are its bytes those of CPU tensors?
    #[getter]
    fn is_simulated(&self) -> bool {
        self.body.is_simulated()
    }

    /// Page-locks what is missing for `bytes` to be free; in the background it returns at once.
    /// Returns how many bytes were, or will be, page-locked.
    fn reserve(&self, py: Python<'_>, bytes: u64, background: bool) -> PyResult<u64> {
        let len = Bytes(bytes);
        // Page-locking takes seconds: not under the engine's lock.
        let pool = self.body.call(py, "reserve", |at| Ok(at.engine.pool().clone()))?;
        if !background {
            return py.detach(|| pool.reserve(len)).map(|bytes| bytes.0).map_err(raised);
        }
        let begun = py.detach(|| pool.reserve_in_background(len)).map_err(raised)?;
        let asked = begun.progress().asked;
        self.body.call(py, "reserve", |at| {
            at.desk.reservation = Some(begun);
            Ok(asked.0)
        })
    }

    /// What the engine did and holds, by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, quota, progress, longest) = self.body.call(py, "stats", |at| {
            let progress = at.desk.reservation.as_ref().map(Reservation::progress);
            Ok((at.engine.stats(), at.engine.pinned_quota(), progress, at.desk.longest.get()))
        })?;
        stats::dict(py, &stats, quota, progress.as_ref(), longest)
    }

    /// Readers that had to wait so far, and for how many seconds.
    fn stalls(&self, py: Python<'_>) -> PyResult<(u64, f64)> {
        self.body.call(py, "stats", |at| {
            let stats = at.engine.stats();
            Ok((stats.stalls, stats.stall_time.as_secs_f64()))
        })
    }

    /// Sets both windows, in bytes.
    fn set_windows(&self, py: Python<'_>, unreleased: u64, prefetch: u64) -> PyResult<()> {
        self.body.call(py, "enter", |at| {
            at.engine.set_windows(Bytes(unreleased), Bytes(prefetch));
            Ok(())
        })
    }

    /// Both windows, in bytes: not yet released, fetched ahead.
    pub(crate) fn windows(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        self.body.call(py, "enter", |at| {
            let options = at.engine.options();
            Ok((options.unreleased_bytes_max.0, options.prefetch_bytes_max.0))
        })
    }

    /// Storages whose device bytes may be dropped now.
    pub(crate) fn sweep(&self, py: Python<'_>) -> PyResult<Option<Vec<u64>>> {
        self.body.call(py, "sweep", |at| at.sweep())
    }

    /// Takes device bytes of which the caller has the only reference left. A sweep names them once
    /// every stream is past what it was asked to do until now. Returns their number.
    pub(crate) fn retire(&self, py: Python<'_>, address: u64, bytes: u64) -> PyResult<u64> {
        self.body.call(py, "retire", |at| {
            let range = range(address, bytes)?;
            at.enter(range)?;
            let storage = at.engine.adopt(range, "retired")?;
            at.keep(storage.id(), range);
            Ok(number(storage.id()))
        })
    }

    /// The streams named so far wait for every copy out; then as `sweep`.
    pub(crate) fn flush(&self, py: Python<'_>) -> PyResult<Option<Vec<u64>>> {
        self.body.call(py, "flush", |at| {
            at.engine.step()?;
            for index in 0..at.desk.streams.len() {
                match at.engine.flush(at.desk.streams[index].1) {
                    // Somebody captures the stream: later.
                    Err(error) if error.misuse() == Some(Misuse::Capturing) => {}
                    flushed => flushed?,
                }
            }
            at.sweep()
        })
    }

    /// The storage that should be fetched next for readers on `stream`, and its bytes.
    fn wanted(&self, py: Python<'_>, stream: usize) -> PyResult<Option<(u64, u64)>> {
        self.body.call(py, "wanted", |at| {
            let compute = at.stream(stream)?;
            at.wanted(compute)
        })
    }

    /// Says that a training step is over.
    fn mark_step(&self, py: Python<'_>) -> PyResult<()> {
        self.body.call(py, "mark_step", |at| {
            at.desk.longest.mark_step();
            at.engine.mark_step()
        })
    }

    /// Learns what is done, without waiting.
    pub(crate) fn step(&self, py: Python<'_>) -> PyResult<()> {
        self.body.call(py, "step", |at| at.engine.step())
    }

    /// Waits, on the host, until everything enqueued on the device is done.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        self.body.call(py, "drain", |at| at.engine.drain())
    }

    /// Gives arenas of which no byte is in use back to the system. Returns their bytes.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        let pool = self.body.call(py, "trim", |at| Ok(at.engine.pool().clone()))?;
        Ok(py.detach(|| pool.trim()).0)
    }

    fn __repr__(&self) -> String {
        format!("<lightering.Engine on {}>", self.body.device)
    }
}

fn open(spec: Spec, asked: Option<Bytes>, options: Options, seed: Option<u64>) -> Result<Body> {
    let (backend, host, pool) = match seed {
        Some(seed) => {
            let world = world_of(spec, seed)?;
            let backend: Box<dyn Backend> = Box::new(world.device(0)?);
            let budget = asked.map_or(Budget::Auto, Budget::Bytes);
            let pool = pool::open(&*backend, budget)?;
            (backend, Some(Arc::new(Host::new(world.device(0)?))), pool)
        }
        None => {
            let backend = lightering::open(&spec.to_string())?.backend;
            let about = backend.about();
            let host = match about.simulated {
                true => Some(Arc::new(Host::new(World::process().device(about.device.0)?))),
                false => None,
            };
            let pool = pool::of_process(&*backend, asked)?;
            (backend, host, pool)
        }
    };
    let about = backend.about();
    let kind = if about.simulated { "sim" } else { "cuda" };
    let device = format!("{kind}:{}", about.device.0);
    let shared = Shared::new(Inner::new(backend, &pool, options)?);
    let process = process::number();
    let entered = Entered { host: host.clone(), ranges: HashMap::new(), process };
    let desk = Mutex::new(Desk {
        entered,
        unswept_bytes: 0,
        streams: Vec::new(),
        reservation: None,
        longest: Longest::default(),
    });
    Ok(Body { shared, desk, host, device, process })
}

/// A world of its own, in which the seed chooses every order.
fn world_of(spec: Spec, seed: u64) -> Result<World> {
    match spec {
        Spec::Sim(_) => Ok(World::new(Config::adversary(seed))),
        other => Err(Error::usage(Misuse::BadValue, "open")
            .detail(format!("seed= chooses the orders of a simulated device, not of {other}"))),
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if !self.is_here() {
            // What a child drops nobody ends: one more owner each keeps them alive.
            std::mem::forget((self.shared.clone(), self.host.clone()));
        }
    }
}
