//! Layers' inputs go to pinned host memory after their forward and come back for their backward.
//!
//! What it is not: it orders no copy and chooses no block. The engine does; this is what a training
//! loop has to say to it.
//!
//! Invariant: all pinned memory that the inputs need is page-locked before the first step, as far
//! as the budget goes, or in it where nothing is to be reserved; an input that finds no room stays
//! on the device.
//!
//! ```text
//!   take: engine.alloc      keep: checkpoint.keep      restore, done: checkpoint's
//!   the compute stream is the model's own; the engine knows it by its raw handle
//! ```
//!
//! `main` makes one for the modes `checkpoint+offload` and `checkpoint+grow`; `trainer` uses it.

use crate::device::Opened;
use crate::inputs::{Inputs, Moved, Pinning};
use crate::watch::Watch;
use lightering::adapter::Checkpoint;
use lightering::backend::Backend;
use lightering::pinned::{Budget, PinnedPool, PoolOptions};
use lightering::policy::Kept;
use lightering::storage::Storage;
use lightering::trace::Use;
use lightering::{Bytes, DeviceRange, Engine, Error, Misuse, Options, Result, StreamId};
use std::time::{Duration, Instant};

/// Memory is pinned in whole pages.
const PAGE: u64 = 4096;

/// Inputs that leave and come back.
pub(crate) struct Offloaded {
    backend: Box<dyn Backend>,
    stream: StreamId,
    engine: Engine,
    /// The engine's name of `stream`.
    compute: StreamId,
    checkpoint: Checkpoint,
    /// Inputs taken and not kept yet, by layer.
    taken: Vec<Option<Storage>>,
    bytes: Bytes,
    /// What the engine timed, once it is closed.
    timeline: Option<String>,
    watch: Watch,
    /// Records that the checker looked at, once it is closed.
    checked: u64,
    reserve: Duration,
}

/// What there is to move, and how far to go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Layers, with one input each.
    pub(crate) layers: usize,
    /// Bytes of an input.
    pub(crate) bytes: Bytes,
    /// The last so many inputs stay on the device.
    pub(crate) keep_last: usize,
    /// The most pinned memory.
    pub(crate) pinned: Bytes,
    /// The most bytes brought back ahead of use.
    pub(crate) prefetch: Bytes,
    /// Spans of a timeline that are kept; 0: none is.
    pub(crate) spans: usize,
    /// The checker of order looks on.
    pub(crate) check: bool,
}

impl Offloaded {
    /// An engine of its own on the device opened. Without `reserves` pinned memory is taken by the
    /// first step's evictions.
    pub(crate) fn new(opened: Opened, limits: Limits, reserves: bool) -> Result<Offloaded> {
        let Opened { mut backend, engine: device, .. } = opened;
        let Limits { layers, bytes, keep_last, pinned, prefetch, spans, check } = limits;
        // A pool has at least a page, which holds no input but the smallest.
        let budget = Bytes(pinned.0.max(PAGE));
        let options = PoolOptions { budget: Budget::Bytes(budget), ..PoolOptions::default() };
        let pool = PinnedPool::new(backend.pinner(), options)?;
        let moved = layers.saturating_sub(keep_last) as u64;
        let needed = moved.saturating_mul(room(bytes).0).min(pool.budget().0 / PAGE * PAGE);
        let start = Instant::now();
        if reserves && needed >= room(bytes).0 {
            pool.reserve(Bytes(needed))?;
        }
        let reserve = start.elapsed();
        let options = Options {
            keep_last_count: keep_last,
            storage_bytes_min: Bytes::ZERO,
            prefetch_bytes_max: prefetch,
            prefetch_count_max: layers,
            // Two inputs on their way out, as two on their way in: double buffering.
            unreleased_bytes_max: Bytes(bytes.0.saturating_mul(2)),
            spans_max: spans,
            ..Options::default()
        };
        let mut engine = Engine::new(device, &pool, options)?;
        let watch = Watch::over(&mut engine, check);
        let stream = backend.create_stream()?;
        let compute = engine.adopt_stream(backend.raw_stream(stream)?)?;
        let taken = (0..layers).map(|_| None).collect();
        let checkpoint = Checkpoint::new();
        Ok(Offloaded {
            backend,
            stream,
            engine,
            compute,
            checkpoint,
            taken,
            bytes,
            timeline: None,
            watch,
            checked: 0,
            reserve,
        })
    }
}

/// What a block of the pool takes for an input, at most: an eighth more, in whole pages.
pub(crate) fn room(bytes: Bytes) -> Bytes {
    Bytes(bytes.saturating_add(Bytes(bytes.0 / 8)).0.div_ceil(PAGE).saturating_mul(PAGE))
}

impl Inputs for Offloaded {
    fn backend(&mut self) -> &mut dyn Backend {
        &mut *self.backend
    }

    fn stream(&self) -> StreamId {
        self.stream
    }

    fn take(&mut self, layer: usize) -> Result<DeviceRange> {
        assert!(self.taken[layer].is_none(), "a layer's input is taken once a step");
        let name = format!("layer.{layer}.input");
        let storage = self.engine.alloc(self.bytes, self.compute, name.as_str())?;
        let range = self.engine.range(storage.id())?;
        self.taken[layer] = Some(storage);
        Ok(range)
    }

    fn keep(&mut self, layer: usize) -> Result<()> {
        let Some(storage) = self.taken[layer].take() else {
            return Err(Error::usage(Misuse::NotThere, "keep"));
        };
        if self.watch.is_on() {
            // What the layer before did: without an engine's eyes on them kernels are told of.
            let range = self.engine.range(storage.id())?;
            self.engine.note(self.compute, &[Use::write(range)])?;
        }
        let number = self.checkpoint.keep(&mut self.engine, storage, self.compute)?;
        assert!(number == layer, "layers are kept in their order");
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.engine.flush(self.compute)
    }

    fn restore(&mut self, layer: usize) -> Result<DeviceRange> {
        self.checkpoint.restore(&mut self.engine, layer, self.compute)
    }

    fn done(&mut self, layer: usize) -> Result<()> {
        self.checkpoint.done(&mut self.engine, layer, self.compute)
    }

    fn end_step(&mut self) -> Result<()> {
        self.checkpoint.end_step(&mut self.engine)
    }

    fn span(&mut self, name: &str) -> Result<()> {
        if self.engine.options().spans_max == 0 {
            return Ok(());
        }
        self.engine.begin_span(self.compute, name)
    }

    fn timeline(&mut self) -> Option<String> {
        self.timeline.take()
    }

    fn checked(&self) -> u64 {
        self.checked
    }

    fn moved(&self) -> Moved {
        let stats = self.engine.stats();
        let refused = [Kept::NoPinnedRoom, Kept::LaneFull].map(|why| stats.kept_for(why).count);
        Moved {
            out: Bytes(stats.seam.bytes_out),
            freed: Bytes(stats.released_bytes),
            refused: refused.iter().sum(),
        }
    }

    fn pinning(&self) -> Pinning {
        let all = self.engine.stats().pinned.counts.pin_time;
        Pinning { reserve: self.reserve, steps: all.saturating_sub(self.reserve) }
    }

    fn close(&mut self) -> Result<()> {
        if self.engine.options().spans_max > 0 {
            self.engine.end_span(self.compute)?;
            self.engine.drain()?;
            self.timeline = Some(self.engine.trace_json());
        }
        self.engine.shutdown()?;
        self.checked = self.watch.verdict()?;
        self.backend.close_stream(self.stream)
    }
}
