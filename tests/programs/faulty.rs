//! A device that refuses calls by chance, as if something had run out.
//!
//! What it is not: a device that lies or is lost. A refused call has no effect.
//!
//! Invariant: the same seed and the same calls give the same refusals.
//!
//! ```text
//!   engine -> Faulty { per_mille } -> OutOfMemory | Sim
//! ```
//!
//! `tests/refused_programs.rs` and the fuzz target `storage` use it.

use lightering::backend::sim::Sim;
use lightering::backend::{About, Arg, Backend, Fence, Grid, Kernel, Memory, Pinner, Timing};
use lightering::trace::{Actor, Site, Use};
use lightering::{
    Bytes, DevicePtr, DeviceRange, Error, EventId, Kind, MemoryId, PinnedRange, Result, StreamId,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Refuses calls by chance: so many in a thousand.
pub(crate) struct Faulty {
    inner: Sim,
    state: u64,
    per_mille: Arc<AtomicU32>,
}

impl Faulty {
    pub(crate) fn new(inner: Sim, seed: u64, per_mille: Arc<AtomicU32>) -> Faulty {
        Faulty { inner, state: seed, per_mille }
    }

    fn strike(&mut self, op: &'static str) -> Result<()> {
        self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if (self.state >> 33) % 1000 < u64::from(self.per_mille.load(Ordering::Relaxed)) {
            return Err(Error::new(Kind::OutOfMemory, op).detail("a fault that was ordered"));
        }
        Ok(())
    }
}

impl Backend for Faulty {
    fn about(&self) -> About {
        self.inner.about()
    }
    fn memory(&mut self) -> Result<Memory> {
        self.inner.memory()
    }
    fn reset_peak(&mut self) {
        self.inner.reset_peak();
    }
    fn alloc_device(&mut self, len: Bytes, on: StreamId) -> Result<DevicePtr> {
        self.strike("alloc")?;
        self.inner.alloc_device(len, on)
    }
    fn free_device(&mut self, at: DevicePtr, on: StreamId) -> Result<()> {
        // A free is refused only by a lost device, or under capture.
        self.inner.free_device(at, on)
    }
    fn map_granularity(&mut self) -> Result<Bytes> {
        self.inner.map_granularity()
    }
    fn reserve_range(&mut self, len: Bytes) -> Result<DeviceRange> {
        self.strike("reserve_range")?;
        self.inner.reserve_range(len)
    }
    fn release_range(&mut self, range: DeviceRange) -> Result<()> {
        self.strike("release_range")?;
        self.inner.release_range(range)
    }
    fn create_memory(&mut self, len: Bytes) -> Result<MemoryId> {
        self.strike("create_memory")?;
        self.inner.create_memory(len)
    }
    fn close_memory(&mut self, memory: MemoryId) -> Result<()> {
        self.strike("close_memory")?;
        self.inner.close_memory(memory)
    }
    fn map_memory(&mut self, range: DeviceRange, memory: &[MemoryId]) -> Result<()> {
        self.strike("map_memory")?;
        self.inner.map_memory(range, memory)
    }
    fn unmap_memory(&mut self, range: DeviceRange) -> Result<()> {
        self.strike("unmap_memory")?;
        self.inner.unmap_memory(range)
    }
    fn adopt_stream(&mut self, raw: usize) -> Result<StreamId> {
        self.inner.adopt_stream(raw)
    }
    fn create_stream(&mut self) -> Result<StreamId> {
        self.inner.create_stream()
    }
    fn close_stream(&mut self, stream: StreamId) -> Result<()> {
        self.inner.close_stream(stream)
    }
    fn raw_stream(&self, stream: StreamId) -> Result<usize> {
        self.inner.raw_stream(stream)
    }
    fn create_event(&mut self, timing: Timing) -> Result<EventId> {
        self.strike("create_event")?;
        self.inner.create_event(timing)
    }
    fn close_event(&mut self, event: EventId) -> Result<()> {
        self.inner.close_event(event)
    }
    fn allocation(&mut self, at: DevicePtr) -> Result<Option<DeviceRange>> {
        self.inner.allocation(at)
    }
    fn record(&mut self, event: EventId, stream: StreamId) -> Result<()> {
        self.strike("record")?;
        self.inner.record(event, stream)
    }
    fn wait(&mut self, stream: StreamId, event: EventId, site: Site) -> Result<()> {
        self.strike("wait")?;
        self.inner.wait(stream, event, site)
    }
    fn query(&mut self, event: EventId, site: Site) -> Result<bool> {
        self.strike("query")?;
        self.inner.query(event, site)
    }
    fn idle(&mut self, stream: StreamId, site: Site) -> Result<bool> {
        self.strike("idle")?;
        self.inner.idle(stream, site)
    }
    fn elapsed(&mut self, from: EventId, to: EventId) -> Result<Duration> {
        self.inner.elapsed(from, to)
    }
    fn note(&mut self, by: Actor, uses: &[Use]) -> Result<()> {
        self.inner.note(by, uses)
    }
    fn copy_out(&mut self, to: PinnedRange, from: DeviceRange, on: StreamId) -> Result<()> {
        self.strike("copy_out")?;
        self.inner.copy_out(to, from, on)
    }
    fn copy_in(&mut self, to: DeviceRange, from: PinnedRange, on: StreamId) -> Result<()> {
        self.strike("copy_in")?;
        self.inner.copy_in(to, from, on)
    }
    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        self.strike("launch")?;
        self.inner.launch(kernel, grid, args, on)
    }
    fn capturing(&mut self, stream: StreamId) -> Result<bool> {
        self.inner.capturing(stream)
    }
    fn sync(&mut self) -> Result<()> {
        self.inner.sync()
    }
    fn pinner(&self) -> Arc<dyn Pinner> {
        self.inner.pinner()
    }
    fn fence(&self) -> Arc<dyn Fence> {
        self.inner.fence()
    }
}
