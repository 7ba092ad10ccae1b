//! CUDA devices: the driver's verbs, asked through the driver's own library.
//!
//! What it is not: it holds no policy and no memory of its own beyond tables of handles. It builds
//! where no CUDA is installed, and on a machine without a driver opening a device is an error like
//! any other, never a panic.
//!
//! Invariant: the driver is called only between `Context::enter` and the drop of what that returns;
//! after a fatal error, in a forked child and once the process exits it is not called at all. No
//! type of cudarc is public, except with the feature `interop-cudarc`.
//!
//! ```text
//!   Cuda ---- streams, account    memory   mapping   pinned   order   launch     verbs
//!     |   \-- Events --- CudaFence   \        \        |       |       /
//!     v                                       `---- Context::enter --'         the one way in
//!   Context (one per device, shared) -- pool, kernels, latch -- code           what codes mean
//!     v
//!   Driver (one per process) -- table of functions            process          exit, fork
//! ```
//!
//! Of cudarc this uses the bindings' types, constants and signatures (compared with ours when this
//! is compiled), and with `interop-cudarc` its streams and slices as arguments. It uses none of its
//! calls: they panic where the library or a function is missing, return codes as an enum that newer
//! codes do not fit, and its own tracking of streams, events and pinned slices is not what the
//! engine's order rests on.
//!
//! The engine, examples and tests may use it, as a [`Backend`].

mod batch;
mod code;
mod context;
mod driver;
#[cfg(feature = "interop-cudarc")]
pub mod interop;
mod latch;
mod launch;
mod mapping;
mod memory;
pub(super) mod nvtx;
mod order;
mod pinned;
mod process;
mod sync;

pub use code::{is_fatal, name as code_name};
pub use driver::{DRIVER_MIN, MAPPING_SYMBOLS, SYMBOLS};

use self::batch::{BatchArgs, Way};
use self::context::Context;
use self::mapping::Mapped;
use self::memory::Account;
use self::order::{CudaFence, Events, Streams};
use self::pinned::CudaPinner;
use super::{About, Arg, Backend, BatchFailed, Fence, Grid, Kernel, Memory, Piece, Pinner, Timing};
use crate::error::Result;
use crate::trace::{Actor, Site, Use};
use crate::unit::{Bytes, DevicePtr, DeviceRange, EventId, MemoryId, PinnedRange, StreamId};
use std::sync::Arc;
use std::time::Duration;

/// One CUDA device, through its primary context.
///
/// It may move between threads; each verb leaves the calling thread's current context as it was.
/// Dropping it destroys the streams and events made here (work enqueued on them still runs) and
/// never waits; device memory that was taken and not given back stays taken until the primary
/// context goes.
#[derive(Debug)]
pub struct Cuda {
    context: Arc<Context>,
    events: Arc<Events>,
    streams: Streams,
    account: Account,
    batch_args: BatchArgs,
    mapped: Mapped,
}

impl Cuda {
    /// How many devices the driver shows to this process (`CUDA_VISIBLE_DEVICES` counts).
    ///
    /// # Errors
    /// `Unavailable`, saying whether the driver is missing, a stub, too old, incomplete or did not
    /// start.
    pub fn count() -> Result<u32> {
        context::count()
    }

    /// Opens the device of that ordinal.
    ///
    /// # Errors
    /// As [`Cuda::count`]; `Unavailable(Device)` where there is no such device or it is held by
    /// another process; `OutOfMemory` where its context does not fit; `Lost` where the device was
    /// lost to this process before; `Usage(Forked)` in a child of a process that started the
    /// driver.
    pub fn open(ordinal: u32) -> Result<Cuda> {
        let context = Context::open(ordinal)?;
        let events = Arc::new(Events::new(context.clone()));
        let streams = Streams::new(Arc::as_ptr(&events) as usize);
        let (account, batch_args) = (Account::default(), BatchArgs::default());
        let mapped = Mapped::new();
        Ok(Cuda { context, events, streams, account, batch_args, mapped })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.end_streams();
    }
}

impl Backend for Cuda {
    fn about(&self) -> About {
        self.context.about.clone()
    }

    fn memory(&mut self) -> Result<Memory> {
        self.memory_now()
    }

    fn reset_peak(&mut self) {
        self.forget_peak();
    }

    fn alloc_device(&mut self, len: Bytes, on: StreamId) -> Result<DevicePtr> {
        self.take_bytes(len, on)
    }

    fn free_device(&mut self, at: DevicePtr, on: StreamId) -> Result<()> {
        self.give_bytes(at, on)
    }

    fn map_granularity(&mut self) -> Result<Bytes> {
        self.granularity("map_granularity")
    }

    fn reserve_range(&mut self, len: Bytes) -> Result<DeviceRange> {
        self.take_range(len)
    }

    fn release_range(&mut self, range: DeviceRange) -> Result<()> {
        self.give_range(range)
    }

    fn create_memory(&mut self, len: Bytes) -> Result<MemoryId> {
        self.take_memory(len)
    }

    fn close_memory(&mut self, memory: MemoryId) -> Result<()> {
        self.give_memory(memory)
    }

    fn map_memory(&mut self, range: DeviceRange, memory: &[MemoryId]) -> Result<()> {
        self.map_all(range, memory)
    }

    fn unmap_memory(&mut self, range: DeviceRange) -> Result<()> {
        self.unmap_all(range)
    }

    fn adopt_stream(&mut self, raw: usize) -> Result<StreamId> {
        self.borrow_stream(raw)
    }

    fn create_stream(&mut self) -> Result<StreamId> {
        self.make_stream()
    }

    fn close_stream(&mut self, stream: StreamId) -> Result<()> {
        self.end_stream(stream)
    }

    fn raw_stream(&self, stream: StreamId) -> Result<usize> {
        self.stream_handle(stream)
    }

    fn create_event(&mut self, timing: Timing) -> Result<EventId> {
        self.events.create(timing)
    }

    fn close_event(&mut self, event: EventId) -> Result<()> {
        self.events.close(event)
    }

    fn allocation(&mut self, at: DevicePtr) -> Result<Option<DeviceRange>> {
        self.allocation_at(at).map(Some)
    }

    fn record(&mut self, event: EventId, stream: StreamId) -> Result<()> {
        self.enqueue_record(event, stream)
    }

    fn wait(&mut self, stream: StreamId, event: EventId, _: Site) -> Result<()> {
        self.enqueue_wait(stream, event)
    }

    fn query(&mut self, event: EventId, _: Site) -> Result<bool> {
        self.events.query(event, "query")
    }

    fn idle(&mut self, stream: StreamId, _: Site) -> Result<bool> {
        self.is_idle(stream)
    }

    fn elapsed(&mut self, from: EventId, to: EventId) -> Result<Duration> {
        self.events.elapsed(from, to)
    }

    fn note(&mut self, by: Actor, _: &[Use]) -> Result<()> {
        const OP: &str = "note";
        self.context.check(OP)?;
        match by {
            Actor::Stream(stream) => self.is_stream(stream, OP),
            Actor::Host | Actor::Worker(_) => Ok(()),
        }
    }

    fn copy_out(&mut self, to: PinnedRange, from: DeviceRange, on: StreamId) -> Result<()> {
        self.enqueue_out(to, from, on)
    }

    fn copy_in(&mut self, to: DeviceRange, from: PinnedRange, on: StreamId) -> Result<()> {
        self.enqueue_in(to, from, on)
    }

    fn has_batches(&self) -> bool {
        self.context.has_batches()
    }

    fn copy_out_batch(
        &mut self,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        self.enqueue_batch(Way::Out, pieces, on)
    }

    fn copy_in_batch(
        &mut self,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        self.enqueue_batch(Way::In, pieces, on)
    }

    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        self.enqueue_kernel(kernel, grid, args, on)
    }

    fn capturing(&mut self, stream: StreamId) -> Result<bool> {
        self.ask_capturing(stream)
    }

    fn sync(&mut self) -> Result<()> {
        self.wait_for_streams()
    }

    fn pinner(&self) -> Arc<dyn Pinner> {
        Arc::new(CudaPinner::new(self.context.clone()))
    }

    fn fence(&self) -> Arc<dyn Fence> {
        Arc::new(CudaFence::new(self.events.clone()))
    }
}
