//! The driver seam: the verbs an engine asks of one device, and what each promises.
//!
//! What it is not: a device abstraction for whole programs. It has the verbs that moving bytes
//! needs, and one `launch` for the small kernels that go with it.
//!
//! Invariant: every verb enqueues in stream order or returns at once; only [`Backend::sync`] may
//! wait. A verb that fails had no effect, unless its error is [`Kind::Lost`].
//!
//! ```text
//!   host     record(e, compute)   wait(lane, e)   copy_out(.., lane)   record(f, lane)   query(f)?
//!   compute  ..kernel.. |e                                                                  no
//!   lane                 `------------> |=====copy=====| f                                  yes
//! ```
//!
//! The ordering contract, the same for every backend:
//!
//! * Work on one stream runs in the order it was enqueued. Work on two streams has no order, except
//!   by events. (Legacy default-stream barriers are never relied on.)
//! * `record(e, s)` makes `e` stand for all work enqueued on `s` until now; a later `record` of the
//!   same event replaces that. `wait(s, e)` orders all *later* work of `s` behind the recording
//!   that `e` has at the time of the call. Waiting for an event that was never recorded is refused
//!   ([`Misuse::FreshEvent`]); a driver would let it pass as a no-op.
//! * A copy reads its source and writes its target at any time between its start and its end, in
//!   any order of pieces. Nobody may touch the target, or write the source, meanwhile.
//! * `free_device(p, s)` takes effect when `s` gets there; the bytes may then be given to anybody.
//! * `map_memory` and `unmap_memory` are in no stream's order: they take effect at once. The bytes
//!   are undefined when mapped; a use of them that the host does not know done is a fault when they
//!   are unmapped, as on an address where nothing is mapped.
//! * A driver fault is reported by whichever verb comes next, and by every verb after that.
//!
//! The engine, examples and tests may use it; nothing below the engine's floors does, except the
//! backends themselves.
//!
//! [`Misuse::FreshEvent`]: crate::Misuse::FreshEvent

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod kernel;
mod mapping;
mod open;
pub mod pattern;
pub(crate) mod ranges;
pub mod sim;
pub mod traced;

pub use kernel::{Arg, Cost, Grid, HostArgs, Kernel, Work};
pub use open::{Opened, Spec, open};
pub use ranges::Listening;

use crate::error::{Error, Kind, Missing, Result};
use crate::trace::{Actor, Site, Use};
use crate::unit::{
    Bytes, DeviceId, DevicePtr, DeviceRange, EventId, MemoryId, PinnedPtr, PinnedRange, StreamId,
};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// What a device is, for messages and reports.
#[derive(Clone, Debug, PartialEq)]
pub struct About {
    /// Ordinal.
    pub device: DeviceId,
    /// The vendor's name of the device, or the simulated model's.
    pub name: String,
    /// Driver version (for CUDA 1000 * major + 10 * minor); 0 where there is none.
    pub driver: u32,
    /// Is it the simulated device? Then times are simulated too.
    pub simulated: bool,
    /// All of the device's memory.
    pub memory: Bytes,
}

/// Memory of a device at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Free now, as the driver sees it: other processes and caching allocators count as used.
    pub free: Bytes,
    /// All there is.
    pub total: Bytes,
    /// Taken through this backend's `alloc_device` and `create_memory` and not given back yet.
    pub allocated: Bytes,
    /// The most that `allocated` ever was, since the start or the last `reset_peak`.
    pub peak: Bytes,
}

/// Whether an event can be read as a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Timing {
    /// Ordering only; cheaper.
    Off,
    /// Its time can be read with [`Backend::elapsed`].
    On,
}

/// Both ends of one copy of a batch, of the same length, greater than zero; the pinned one lies in
/// one registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// On the host.
    pub pinned: PinnedRange,
    /// On the device.
    pub device: DeviceRange,
}

/// What became of a batch that could not be enqueued as a whole.
#[derive(Debug)]
pub struct BatchFailed {
    /// So many of the first pieces were enqueued, or may have been.
    pub enqueued: usize,
    /// The cause.
    pub error: Error,
}

fn each(
    pieces: &[Piece],
    mut copy: impl FnMut(Piece) -> Result<()>,
) -> std::result::Result<(), BatchFailed> {
    for (enqueued, piece) in pieces.iter().enumerate() {
        copy(*piece).map_err(|error| BatchFailed { enqueued, error })?;
    }
    Ok(())
}

/// One device. Object safe; see the module's text for the ordering contract.
///
/// # Errors
/// Every verb: [`Kind::Lost`] once a fatal driver error was seen; `Usage`
/// for handles that are stale or foreign, refused before anything is enqueued.
pub trait Backend: Send {
    /// What the device is.
    fn about(&self) -> About;

    /// The device's memory now. May cost a driver call of some microseconds.
    fn memory(&mut self) -> Result<Memory>;

    /// Sets [`Memory::peak`] to what is allocated now.
    fn reset_peak(&mut self);

    /// Takes `len` bytes of device memory in the order of stream `on`; aligned to 256 bytes.
    ///
    /// # Errors
    /// `OutOfMemory` where the device has no room; `Usage(Empty)` for zero bytes.
    fn alloc_device(&mut self, len: Bytes, on: StreamId) -> Result<DevicePtr>;

    /// Gives the bytes that [`Backend::alloc_device`] returned back, in the order of stream `on`.
    fn free_device(&mut self, at: DevicePtr, on: StreamId) -> Result<()>;

    /// What lengths of [`Backend::reserve_range`] and [`Backend::create_memory`] are multiples of.
    ///
    /// # Errors
    /// `Unavailable(Mapping)` where the device cannot map memory; so do all verbs of mapping.
    fn map_granularity(&mut self) -> Result<Bytes> {
        Err(cannot_map("map_granularity"))
    }

    /// Reserves addresses. Nothing is there until memory is mapped.
    ///
    /// # Errors
    /// `OutOfMemory` where none are left; `Usage` for a length that is no multiple of the
    /// granularity, or zero.
    fn reserve_range(&mut self, len: Bytes) -> Result<DeviceRange> {
        let _ = len;
        Err(cannot_map("reserve_range"))
    }

    /// Gives addresses back; `range` is what [`Backend::reserve_range`] returned.
    ///
    /// # Errors
    /// `Usage(State)` where memory is mapped there.
    fn release_range(&mut self, range: DeviceRange) -> Result<()> {
        let _ = range;
        Err(cannot_map("release_range"))
    }

    /// Takes physical memory of the device, which has no address yet. What was freed in the order
    /// of a stream serves once the stream got there.
    ///
    /// # Errors
    /// As [`Backend::reserve_range`].
    fn create_memory(&mut self, len: Bytes) -> Result<MemoryId> {
        let _ = len;
        Err(cannot_map("create_memory"))
    }

    /// Gives physical memory back to the device.
    ///
    /// # Errors
    /// `Usage(State)` while it is mapped.
    fn close_memory(&mut self, memory: MemoryId) -> Result<()> {
        let _ = memory;
        Err(cannot_map("close_memory"))
    }

    /// Maps memory, one behind the other, over all of a reserved range, at once, for this device to
    /// read and write.
    ///
    /// # Errors
    /// `Usage(State)` where something is mapped there already, or some of the memory elsewhere;
    /// `Usage(LengthMismatch)` where it does not fill the range.
    fn map_memory(&mut self, range: DeviceRange, memory: &[MemoryId]) -> Result<()> {
        let _ = (range, memory);
        Err(cannot_map("map_memory"))
    }

    /// Takes the memory away from a reserved range, at once: it can be mapped anew, there or
    /// elsewhere. Everything that uses the bytes is known done.
    ///
    /// # Errors
    /// `Usage(State)` where nothing is mapped.
    fn unmap_memory(&mut self, range: DeviceRange) -> Result<()> {
        let _ = range;
        Err(cannot_map("unmap_memory"))
    }

    /// Names a stream that somebody else owns, by its raw driver handle. It is never destroyed
    /// here. Its owner keeps it alive until it is closed here: a driver looks behind the number,
    /// and one that is no live stream of this device may end the process.
    fn adopt_stream(&mut self, raw: usize) -> Result<StreamId>;

    /// Makes a stream that has no implicit order with any other (non-blocking).
    fn create_stream(&mut self) -> Result<StreamId>;

    /// Forgets an adopted stream, destroys a created one; work enqueued on it still runs.
    fn close_stream(&mut self, stream: StreamId) -> Result<()>;

    /// The driver's handle of a stream, for handing it to another library.
    fn raw_stream(&self, stream: StreamId) -> Result<usize>;

    /// Makes an event; it is fresh.
    fn create_event(&mut self, timing: Timing) -> Result<EventId>;

    /// Destroys an event. Waits already enqueued for it keep their meaning.
    fn close_event(&mut self, event: EventId) -> Result<()>;

    /// The allocation on this device that an address lies in, or what is known of it; `None` where
    /// the backend cannot tell. Nothing is enqueued.
    ///
    /// # Errors
    /// `Usage(OutOfRange)` where nothing is allocated, `Usage(WrongDevice)` for another device's.
    fn allocation(&mut self, _at: DevicePtr) -> Result<Option<DeviceRange>> {
        Ok(None)
    }

    /// Makes the event stand for all work enqueued on the stream until now.
    fn record(&mut self, event: EventId, stream: StreamId) -> Result<()>;

    /// Orders the stream's later work behind the event's current recording.
    fn wait(&mut self, stream: StreamId, event: EventId, site: Site) -> Result<()>;

    /// Is the work that the event stands for done? An error is an error, never "not yet".
    fn query(&mut self, event: EventId, site: Site) -> Result<bool>;

    /// Is all work done that was enqueued on the stream until now? It may say no where it cannot
    /// tell, as of a driver's default streams; an event tells there.
    fn idle(&mut self, _stream: StreamId, _site: Site) -> Result<bool> {
        Ok(false)
    }

    /// Time between two recordings that are both done, of events made with [`Timing::On`].
    fn elapsed(&mut self, from: EventId, to: EventId) -> Result<Duration>;

    /// Says how somebody outside uses bytes, for the trace: nothing is enqueued.
    fn note(&mut self, by: Actor, uses: &[Use]) -> Result<()>;

    /// Copies `from` to `to` on the stream. Both have the same length, greater than zero, and `to`
    /// lies in one registration.
    fn copy_out(&mut self, to: PinnedRange, from: DeviceRange, on: StreamId) -> Result<()>;

    /// Copies `from` to `to` on the stream. Both have the same length, greater than zero, and
    /// `from` lies in one registration.
    fn copy_in(&mut self, to: DeviceRange, from: PinnedRange, on: StreamId) -> Result<()>;

    /// Do the copies of a batch cost the device less than as many single ones?
    fn has_batches(&self) -> bool {
        false
    }

    /// Copies each piece out, on the stream; the copies have no order among each other, and no two
    /// of them share a byte of a target. It may cost one call of a driver instead of many.
    ///
    /// # Errors
    /// [`BatchFailed`]: the cause, and how many of the first pieces may be under way.
    fn copy_out_batch(
        &mut self,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        each(pieces, |Piece { pinned, device }| self.copy_out(pinned, device, on))
    }

    /// As [`Backend::copy_out_batch`], in.
    ///
    /// # Errors
    /// As there.
    fn copy_in_batch(
        &mut self,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        each(pieces, |Piece { pinned, device }| self.copy_in(device, pinned, on))
    }

    /// Enqueues a kernel.
    ///
    /// # Errors
    /// `Usage(BadKernel)` where the kernel has no form for this backend.
    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()>;

    /// Is the stream being captured into a graph?
    fn capturing(&mut self, stream: StreamId) -> Result<bool>;

    /// Waits until everything enqueued on the device through this backend is done. Other users of
    /// the device may be waited for as well. Tests and shutdown only.
    ///
    /// # Errors
    /// `Usage(Capturing)` where one of its streams is being captured.
    fn sync(&mut self) -> Result<()>;

    /// Who page-locks host memory for this device (and every other of its kind).
    fn pinner(&self) -> Arc<dyn Pinner>;

    /// Who answers, from any thread, whether an event of this backend is done.
    fn fence(&self) -> Arc<dyn Fence>;
}

/// The refusal of a device that cannot map memory.
fn cannot_map(op: &'static str) -> Error {
    Error::new(Kind::Unavailable(Missing::Mapping), op)
}

/// Page-locks host memory for every device of one kind. Shared by the threads of a process.
pub trait Pinner: Send + Sync + std::fmt::Debug {
    /// Page-locks `len` bytes at `at` and returns the address by which devices reach them.
    ///
    /// # Errors
    /// `OutOfMemory` where the driver or the system refuses; nothing is page-locked then.
    ///
    /// # Safety
    /// The memory stays mapped, and nobody else page-locks it, until [`Pinner::unregister`]
    /// returned for it.
    unsafe fn register(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr>;

    /// Who lets copies of memory through that is not page-locked; `None` where nobody does.
    fn pageable(&self) -> Option<&dyn Pageable> {
        None
    }

    /// Ends a registration; `at` is what [`Pinner::register`] returned, or
    /// [`Pageable::register_pageable`]. No copy on the bytes may be
    /// in flight.
    fn unregister(&self, at: PinnedPtr) -> Result<()>;

    /// The most bytes one registration may have.
    fn registration_max(&self) -> Bytes;

    /// The device's address on the PCI bus, such as `0000:3b:00.0`; `None` where it has none. It
    /// says which part of the host's memory is near.
    fn pci_address(&self) -> Option<String> {
        None
    }

    /// Must there be memory behind what is registered? Page-locking says yes, and its memory is
    /// touched first and counts against the machine's. Where devices never reach the bytes, address
    /// space will do.
    fn needs_memory(&self) -> bool {
        true
    }
}

/// Memory that stays as it is, not page-locked, and that copies may use all the same. The host may
/// wait in such a copy until it is done.
pub trait Pageable: Send + Sync {
    /// Takes note of `len` bytes at `at`, and returns the address that copies use. It is ended like
    /// a registration.
    ///
    /// # Errors
    /// `Usage` for no bytes, and for some that are known already.
    ///
    /// # Safety
    /// As for [`Pinner::register`].
    unsafe fn register_pageable(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr>;
}

/// Answers whether an event is done, from any thread and without its engine.
pub trait Fence: Send + Sync + std::fmt::Debug {
    /// Is the work that the event's current recording stands for done?
    fn done(&self, event: EventId) -> Result<bool>;
}
