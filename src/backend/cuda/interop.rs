//! Streams and slices of cudarc, as arguments of this backend, and the way back.
//!
//! What it is not: it hands nothing over. What cudarc made stays cudarc's, and it destroys it.
//!
//! Invariant: the bytes behind a range made here stay cudarc's business while its guard lives: the
//! guard, when dropped, tells cudarc that the stream has used them.
//!
//! ```text
//!   CudaStream  --adopt_cudarc_stream-->  StreamId  --cudarc_stream-->  CUstream
//!   CudaSlice   --read_range, write_range-->  (DeviceRange, guard)
//! ```
//!
//! The order between two streams is not cudarc's to keep here: it remembers one reader per slice,
//! so of two streams that read the same bytes only the later one holds a later write back. Record
//! and wait for events of this backend.
//!
//! For applications that use cudarc; nothing in this crate calls it.

use super::Cuda;
use crate::backend::Backend;
use crate::error::Result;
use crate::unit::{Bytes, DevicePtr, DeviceRange, StreamId};
use cudarc::driver::{self, CudaStream, DevicePtrMut, DeviceSlice, SyncOnDrop, sys};

impl Cuda {
    /// Borrows a stream of cudarc; the caller keeps it alive until it is closed here.
    ///
    /// # Errors
    /// As [`Backend::adopt_stream`]; `Usage(WrongDevice)` where it is not of this device's primary
    /// context.
    pub fn adopt_cudarc_stream(&mut self, stream: &CudaStream) -> Result<StreamId> {
        self.adopt_stream(stream.cu_stream() as usize)
    }

    /// The handle of a stream, as cudarc's `wrap_borrowed_stream` takes it. One that was created
    /// here lives until it is closed here.
    ///
    /// # Errors
    /// As [`Backend::raw_stream`].
    pub fn cudarc_stream(&self, stream: StreamId) -> Result<sys::CUstream> {
        Ok(self.raw_stream(stream)? as sys::CUstream)
    }
}

/// The bytes of a slice, for reading on `on`: cudarc makes `on` wait for the slice's last write.
/// Keep the guard until the copy or kernel is enqueued.
///
/// # Errors
/// `Usage(TooLarge)` where the range would wrap.
pub fn read_range<'a, T>(
    slice: &'a impl driver::DevicePtr<T>,
    on: &'a CudaStream,
) -> Result<(DeviceRange, SyncOnDrop<'a>)> {
    let len = byte_count(slice);
    let (at, guard) = slice.device_ptr(on);
    Ok((DeviceRange::new(DevicePtr(at), len)?, guard))
}

/// The bytes of a slice, for writing on `on`: cudarc makes `on` wait for the slice's last read and
/// write. Keep the guard until the copy or kernel is enqueued.
///
/// # Errors
/// `Usage(TooLarge)` where the range would wrap.
pub fn write_range<'a, T>(
    slice: &'a mut impl DevicePtrMut<T>,
    on: &'a CudaStream,
) -> Result<(DeviceRange, SyncOnDrop<'a>)> {
    let len = byte_count(slice);
    let (at, guard) = slice.device_ptr_mut(on);
    Ok((DeviceRange::new(DevicePtr(at), len)?, guard))
}

fn byte_count<T>(slice: &impl DeviceSlice<T>) -> Bytes {
    Bytes(slice.num_bytes() as u64)
}
