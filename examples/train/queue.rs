//! One stream of one backend: where the model's kernels and allocations go.
//!
//! What it is not: it keeps no list of what it took; whoever takes device bytes gives them back.
//!
//! Invariant: everything is enqueued on the one stream, so it runs in the order it was asked for.
//!
//! ```text
//!   model, step -> Queue { backend, stream } -> alloc, free, launch
//! ```
//!
//! The kernels' launchers and the model use it.

use crate::shape::aligned;
use lightering::backend::{Arg, Backend, Grid, Kernel};
use lightering::{Bytes, DeviceRange, Result, StreamId};

/// A stream with the backend it belongs to.
pub(crate) struct Queue<'a> {
    backend: &'a mut dyn Backend,
    stream: StreamId,
}

impl<'a> Queue<'a> {
    pub(crate) fn new(backend: &'a mut dyn Backend, stream: StreamId) -> Queue<'a> {
        Queue { backend, stream }
    }

    /// Takes device bytes in the stream's order.
    pub(crate) fn take(&mut self, len: u64) -> Result<DeviceRange> {
        let at = self.backend.alloc_device(Bytes(len), self.stream)?;
        DeviceRange::new(at, Bytes(len))
    }

    /// Gives device bytes back in the stream's order.
    pub(crate) fn give(&mut self, range: DeviceRange) -> Result<()> {
        self.backend.free_device(range.at(), self.stream)
    }

    /// Enqueues a kernel.
    pub(crate) fn run(&mut self, kernel: &'static Kernel, grid: Grid, args: &[Arg]) -> Result<()> {
        self.backend.launch(kernel, grid, args, self.stream)
    }
}

/// Cuts one allocation into pieces, one after the other.
pub(crate) struct Cutter {
    whole: DeviceRange,
    used: u64,
}

impl Cutter {
    pub(crate) fn new(whole: DeviceRange) -> Cutter {
        Cutter { whole, used: 0 }
    }

    /// The next `len` bytes.
    pub(crate) fn cut(&mut self, len: u64) -> Result<DeviceRange> {
        let piece = self.whole.part(Bytes(self.used), Bytes(len))?;
        self.used += aligned(len);
        Ok(piece)
    }
}

/// A row of blocks of 256 threads, one thread for each of `items`; at least one block.
pub(crate) fn threads_for(items: u64) -> Grid {
    Grid::row(blocks(items.div_ceil(256)), 256)
}

/// A row of blocks of 256 threads, one thread for each 16 bytes of `range`.
pub(crate) fn vectors_for(range: DeviceRange) -> Grid {
    threads_for(range.len().0.div_ceil(16))
}

/// One block of 256 threads for each of `items`.
pub(crate) fn blocks_for(items: u64) -> Grid {
    Grid::row(blocks(items), 256)
}

fn blocks(count: u64) -> u32 {
    // A kernel strides over what its grid does not cover.
    count.clamp(1, 1 << 20) as u32
}

/// The length of a range in bytes, for a kernel whose device form gets a bare pointer.
pub(crate) fn length(range: DeviceRange) -> Arg {
    assert!(range.len().0.is_multiple_of(16), "a kernel's rows are whole numbers of 16 bytes");
    Arg::U64(range.len().0)
}

/// A size as a kernel's argument; `Shape` bounds them all far below 32 bits.
pub(crate) fn number(size: u64) -> Arg {
    assert!(size <= u64::from(u32::MAX), "a size fits in a kernel's 32-bit argument");
    Arg::U32(size as u32)
}
