//! A backend that writes down every request on its way to another.
//!
//! What it is not: it changes no request and no answer.
//!
//! Invariant: a record is written for each request, whether it worked or not, in the order asked.
//!
//! ```text
//!   engine -> Traced { ring, counters, observer } -> inner backend
//! ```
//!
//! The engine wraps its backend in it; tests wrap theirs.

use super::{About, Arg, Backend, BatchFailed, Fence, Grid, Kernel, Memory, Piece, Pinner, Timing};
use crate::error::Result;
use crate::trace::{Actor, Counters, Op, Record, Ring, Site, Use};
use crate::unit::{
    Bytes, DeviceId, DevicePtr, DeviceRange, EventId, MemoryId, Name, PinnedRange, StorageId,
    StreamId,
};
use std::sync::Arc;
use std::time::Duration;

/// Sees every record as it is written: a full trace, or the checker itself.
pub type Observer = Box<dyn FnMut(&Record) + Send>;

/// Writes the records of everything asked of the backend inside.
pub struct Traced<B> {
    inner: B,
    device: DeviceId,
    seq: u64,
    ring: Ring,
    counters: Counters,
    observer: Option<Observer>,
}

impl<B: Backend> Traced<B> {
    /// Wraps `inner`; the last `ring` records are kept.
    pub fn new(inner: B, ring: usize) -> Traced<B> {
        let device = inner.about().device;
        let counters = Counters::default();
        Traced { inner, device, seq: 0, ring: Ring::new(ring), counters, observer: None }
    }

    /// Shows every later record to `observer`, in place of an earlier one.
    pub fn observe(&mut self, observer: Option<Observer>) {
        self.observer = observer;
    }

    /// Is there an observer? Then nothing is left out of what it is shown.
    pub fn is_observed(&self) -> bool {
        self.observer.is_some()
    }

    /// The last records.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Counts of everything so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Says that the bytes belong to a storage now, so that reports can name it.
    pub fn name(&mut self, storage: StorageId, name: Name, range: DeviceRange) {
        self.push(Op::Name { storage, name, range }, None);
    }

    /// The backend inside.
    pub fn inner(&mut self) -> &mut B {
        &mut self.inner
    }

    fn push(&mut self, op: Op, failed: Option<crate::error::Kind>) {
        let record = Record { seq: self.seq, device: self.device, op, failed };
        self.seq += 1;
        self.counters.count(&record);
        self.ring.push(record);
        if let Some(observer) = &mut self.observer {
            observer(&record);
        }
    }

    /// A record for each copy of a batch that was enqueued or may have been, and for the one that
    /// was refused.
    fn batch(
        &mut self,
        pieces: &[Piece],
        result: std::result::Result<(), BatchFailed>,
        op: impl Fn(&Piece) -> Op,
    ) -> std::result::Result<(), BatchFailed> {
        let enqueued = result.as_ref().map_or_else(|failed| failed.enqueued, |()| pieces.len());
        for piece in &pieces[..enqueued] {
            self.push(op(piece), None);
        }
        if let (Err(failed), Some(piece)) = (&result, pieces.get(enqueued)) {
            self.push(op(piece), Some(failed.error.kind()));
        }
        result
    }

    fn done<T>(&mut self, op: Op, result: Result<T>) -> Result<T> {
        self.push(op, result.as_ref().err().map(|error| error.kind()));
        result
    }
}

impl<B> std::fmt::Debug for Traced<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Traced").field("seq", &self.seq).field("counters", &self.counters).finish()
    }
}

impl<B: Backend> Backend for Traced<B> {
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
        let result = self.inner.alloc_device(len, on);
        let at = result.as_ref().copied().unwrap_or_default();
        let range = DeviceRange::new(at, len).unwrap_or_default();
        self.done(Op::Alloc { range, stream: on }, result)
    }

    fn free_device(&mut self, at: DevicePtr, on: StreamId) -> Result<()> {
        let result = self.inner.free_device(at, on);
        // The driver knows the length; the checker finds it by the address of the allocation.
        let range = DeviceRange::new(at, Bytes::ZERO).unwrap_or_default();
        self.done(Op::Free { range, stream: on }, result)
    }

    fn map_granularity(&mut self) -> Result<Bytes> {
        self.inner.map_granularity()
    }

    fn reserve_range(&mut self, len: Bytes) -> Result<DeviceRange> {
        self.inner.reserve_range(len)
    }

    fn release_range(&mut self, range: DeviceRange) -> Result<()> {
        self.inner.release_range(range)
    }

    fn create_memory(&mut self, len: Bytes) -> Result<MemoryId> {
        self.inner.create_memory(len)
    }

    fn close_memory(&mut self, memory: MemoryId) -> Result<()> {
        self.inner.close_memory(memory)
    }

    fn map_memory(&mut self, range: DeviceRange, memory: &[MemoryId]) -> Result<()> {
        let result = self.inner.map_memory(range, memory);
        self.done(Op::Map { range }, result)
    }

    fn unmap_memory(&mut self, range: DeviceRange) -> Result<()> {
        let result = self.inner.unmap_memory(range);
        self.done(Op::Unmap { range }, result)
    }

    fn adopt_stream(&mut self, raw: usize) -> Result<StreamId> {
        let stream = self.inner.adopt_stream(raw)?;
        self.push(Op::OpenStream(stream), None);
        Ok(stream)
    }

    fn create_stream(&mut self) -> Result<StreamId> {
        let stream = self.inner.create_stream()?;
        self.push(Op::OpenStream(stream), None);
        Ok(stream)
    }

    fn close_stream(&mut self, stream: StreamId) -> Result<()> {
        let result = self.inner.close_stream(stream);
        self.done(Op::CloseStream(stream), result)
    }

    fn raw_stream(&self, stream: StreamId) -> Result<usize> {
        self.inner.raw_stream(stream)
    }

    fn create_event(&mut self, timing: Timing) -> Result<EventId> {
        let event = self.inner.create_event(timing)?;
        self.push(Op::OpenEvent(event), None);
        Ok(event)
    }

    fn close_event(&mut self, event: EventId) -> Result<()> {
        let result = self.inner.close_event(event);
        self.done(Op::CloseEvent(event), result)
    }

    fn allocation(&mut self, at: DevicePtr) -> Result<Option<DeviceRange>> {
        self.inner.allocation(at)
    }

    fn record(&mut self, event: EventId, stream: StreamId) -> Result<()> {
        let result = self.inner.record(event, stream);
        self.done(Op::Record { event, stream }, result)
    }

    fn wait(&mut self, stream: StreamId, event: EventId, site: Site) -> Result<()> {
        let result = self.inner.wait(stream, event, site);
        self.done(Op::Wait { stream, event, site }, result)
    }

    fn query(&mut self, event: EventId, site: Site) -> Result<bool> {
        let result = self.inner.query(event, site);
        let done = result.as_ref().copied().unwrap_or(false);
        self.done(Op::Query { event, site, done }, result)
    }

    fn idle(&mut self, stream: StreamId, site: Site) -> Result<bool> {
        let result = self.inner.idle(stream, site);
        let done = result.as_ref().copied().unwrap_or(false);
        self.done(Op::Idle { stream, site, done }, result)
    }

    fn elapsed(&mut self, from: EventId, to: EventId) -> Result<Duration> {
        self.inner.elapsed(from, to)
    }

    fn note(&mut self, by: Actor, uses: &[Use]) -> Result<()> {
        self.inner.note(by, uses)?;
        for uses in uses {
            self.push(Op::Use { by, uses: *uses }, None);
        }
        Ok(())
    }

    fn copy_out(&mut self, to: PinnedRange, from: DeviceRange, on: StreamId) -> Result<()> {
        let result = self.inner.copy_out(to, from, on);
        self.done(Op::CopyOut { from, to, stream: on }, result)
    }

    fn copy_in(&mut self, to: DeviceRange, from: PinnedRange, on: StreamId) -> Result<()> {
        let result = self.inner.copy_in(to, from, on);
        self.done(Op::CopyIn { from, to, stream: on }, result)
    }

    fn has_batches(&self) -> bool {
        self.inner.has_batches()
    }

    fn copy_out_batch(
        &mut self,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        let result = self.inner.copy_out_batch(pieces, on);
        self.batch(pieces, result, |piece| Op::CopyOut {
            from: piece.device,
            to: piece.pinned,
            stream: on,
        })
    }

    fn copy_in_batch(
        &mut self,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        let result = self.inner.copy_in_batch(pieces, on);
        self.batch(pieces, result, |piece| Op::CopyIn {
            from: piece.pinned,
            to: piece.device,
            stream: on,
        })
    }

    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        let result = self.inner.launch(kernel, grid, args, on);
        let worked = result.is_ok();
        let result = self.done(Op::Launch { kernel: kernel.name, stream: on }, result);
        if worked {
            // What a kernel reaches by itself may be thousands of ranges: said to who listens.
            let hears_all = self.observer.is_some();
            let heard = args.iter().filter(|arg| hears_all || !matches!(arg, Arg::Reached(..)));
            for uses in heard.filter_map(Arg::uses) {
                self.push(Op::Use { by: Actor::Stream(on), uses }, None);
            }
        }
        result
    }

    fn capturing(&mut self, stream: StreamId) -> Result<bool> {
        self.inner.capturing(stream)
    }

    fn sync(&mut self) -> Result<()> {
        let result = self.inner.sync();
        self.done(Op::Sync, result)
    }

    fn pinner(&self) -> Arc<dyn Pinner> {
        self.inner.pinner()
    }

    fn fence(&self) -> Arc<dyn Fence> {
        self.inner.fence()
    }
}

/// A boxed backend is a backend, so that one engine type serves them all.
impl Backend for Box<dyn Backend> {
    fn about(&self) -> About {
        (**self).about()
    }

    fn memory(&mut self) -> Result<Memory> {
        (**self).memory()
    }

    fn reset_peak(&mut self) {
        (**self).reset_peak();
    }

    fn alloc_device(&mut self, len: Bytes, on: StreamId) -> Result<DevicePtr> {
        (**self).alloc_device(len, on)
    }

    fn free_device(&mut self, at: DevicePtr, on: StreamId) -> Result<()> {
        (**self).free_device(at, on)
    }

    fn map_granularity(&mut self) -> Result<Bytes> {
        (**self).map_granularity()
    }

    fn reserve_range(&mut self, len: Bytes) -> Result<DeviceRange> {
        (**self).reserve_range(len)
    }

    fn release_range(&mut self, range: DeviceRange) -> Result<()> {
        (**self).release_range(range)
    }

    fn create_memory(&mut self, len: Bytes) -> Result<MemoryId> {
        (**self).create_memory(len)
    }

    fn close_memory(&mut self, memory: MemoryId) -> Result<()> {
        (**self).close_memory(memory)
    }

    fn map_memory(&mut self, range: DeviceRange, memory: &[MemoryId]) -> Result<()> {
        (**self).map_memory(range, memory)
    }

    fn unmap_memory(&mut self, range: DeviceRange) -> Result<()> {
        (**self).unmap_memory(range)
    }

    fn adopt_stream(&mut self, raw: usize) -> Result<StreamId> {
        (**self).adopt_stream(raw)
    }

    fn create_stream(&mut self) -> Result<StreamId> {
        (**self).create_stream()
    }

    fn close_stream(&mut self, stream: StreamId) -> Result<()> {
        (**self).close_stream(stream)
    }

    fn raw_stream(&self, stream: StreamId) -> Result<usize> {
        (**self).raw_stream(stream)
    }

    fn create_event(&mut self, timing: Timing) -> Result<EventId> {
        (**self).create_event(timing)
    }

    fn close_event(&mut self, event: EventId) -> Result<()> {
        (**self).close_event(event)
    }

    fn allocation(&mut self, at: DevicePtr) -> Result<Option<DeviceRange>> {
        (**self).allocation(at)
    }

    fn record(&mut self, event: EventId, stream: StreamId) -> Result<()> {
        (**self).record(event, stream)
    }

    fn wait(&mut self, stream: StreamId, event: EventId, site: Site) -> Result<()> {
        (**self).wait(stream, event, site)
    }

    fn query(&mut self, event: EventId, site: Site) -> Result<bool> {
        (**self).query(event, site)
    }

    fn idle(&mut self, stream: StreamId, site: Site) -> Result<bool> {
        (**self).idle(stream, site)
    }

    fn elapsed(&mut self, from: EventId, to: EventId) -> Result<Duration> {
        (**self).elapsed(from, to)
    }

    fn note(&mut self, by: Actor, uses: &[Use]) -> Result<()> {
        (**self).note(by, uses)
    }

    fn copy_out(&mut self, to: PinnedRange, from: DeviceRange, on: StreamId) -> Result<()> {
        (**self).copy_out(to, from, on)
    }

    fn copy_in(&mut self, to: DeviceRange, from: PinnedRange, on: StreamId) -> Result<()> {
        (**self).copy_in(to, from, on)
    }

    fn has_batches(&self) -> bool {
        (**self).has_batches()
    }

    fn copy_out_batch(
        &mut self,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        (**self).copy_out_batch(pieces, on)
    }

    fn copy_in_batch(
        &mut self,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        (**self).copy_in_batch(pieces, on)
    }

    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        (**self).launch(kernel, grid, args, on)
    }

    fn capturing(&mut self, stream: StreamId) -> Result<bool> {
        (**self).capturing(stream)
    }

    fn sync(&mut self) -> Result<()> {
        (**self).sync()
    }

    fn pinner(&self) -> Arc<dyn Pinner> {
        (**self).pinner()
    }

    fn fence(&self) -> Arc<dyn Fence> {
        (**self).fence()
    }
}
