//! What happens to a layer's input between its forward and its backward.
//!
//! What it is not: it knows nothing of the model; an input is some bytes of the device.
//!
//! Invariant: between `restore` and `done` the bytes of a layer are those that were there at `keep`.
//!
//! ```text
//!   forward:   take(i)  ->  the model writes and reads it  ->  keep(i)
//!   backward:  restore(i)  ->  the model reads it  ->  done(i)
//! ```
//!
//! `trainer` uses it.

use lightering::backend::Backend;
use lightering::{Bytes, DeviceRange, Error, Misuse, Result, StreamId};

/// Counts of what was moved, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Bytes copied from the device.
    pub(crate) out: Bytes,
    /// Bytes given back to the device behind such copies.
    pub(crate) freed: Bytes,
    /// Inputs that should have gone and stayed, for want of pinned memory.
    pub(crate) refused: u64,
}

impl Moved {
    /// What was moved since `earlier`.
    pub(crate) fn since(&self, earlier: &Moved) -> Moved {
        Moved {
            out: self.out - earlier.out,
            freed: self.freed - earlier.freed,
            refused: self.refused - earlier.refused,
        }
    }
}

/// Keeper of the layers' inputs, and of the backend they live on.
pub(crate) trait Inputs {
    /// The backend, for everything else.
    fn backend(&mut self) -> &mut dyn Backend;

    /// Takes device memory for the layer's input.
    fn take(&mut self, layer: usize, on: StreamId) -> Result<DeviceRange>;

    /// The layer's forward is enqueued: its input is not needed until `restore`.
    fn keep(&mut self, layer: usize, on: StreamId) -> Result<()>;

    /// Gives back all device memory that will be given back before the backward.
    fn flush(&mut self, on: StreamId) -> Result<()>;

    /// The layer's backward is next on the stream: its input must be there.
    fn restore(&mut self, layer: usize, on: StreamId) -> Result<DeviceRange>;

    /// The layer's backward is enqueued: its input is not needed any more.
    fn done(&mut self, layer: usize, on: StreamId) -> Result<()>;

    /// What was moved so far.
    fn moved(&self) -> Moved;
}

/// Inputs stay where they are.
pub(crate) struct Resident {
    backend: Box<dyn Backend>,
    bytes: Bytes,
    inputs: Vec<Option<DeviceRange>>,
}

impl Resident {
    /// A keeper of `layers` inputs of `bytes` bytes each.
    pub(crate) fn new(backend: Box<dyn Backend>, layers: usize, bytes: Bytes) -> Resident {
        Resident { backend, bytes, inputs: vec![None; layers] }
    }
}

impl Inputs for Resident {
    fn backend(&mut self) -> &mut dyn Backend {
        &mut *self.backend
    }

    fn take(&mut self, layer: usize, on: StreamId) -> Result<DeviceRange> {
        assert!(self.inputs[layer].is_none(), "a layer's input is taken once a step");
        let range = DeviceRange::new(self.backend.alloc_device(self.bytes, on)?, self.bytes)?;
        self.inputs[layer] = Some(range);
        Ok(range)
    }

    fn keep(&mut self, _: usize, _: StreamId) -> Result<()> {
        Ok(())
    }

    fn flush(&mut self, _: StreamId) -> Result<()> {
        Ok(())
    }

    fn restore(&mut self, layer: usize, _: StreamId) -> Result<DeviceRange> {
        self.inputs[layer].ok_or_else(|| Error::usage(Misuse::NotThere, "restore"))
    }

    fn done(&mut self, layer: usize, on: StreamId) -> Result<()> {
        match self.inputs[layer].take() {
            Some(range) => self.backend.free_device(range.at(), on),
            None => Err(Error::usage(Misuse::NotThere, "done")),
        }
    }

    fn moved(&self) -> Moved {
        Moved::default()
    }
}
