//! What happens to a layer's input between its forward and its backward.
//!
//! What it is not: it knows nothing of the model; an input is some bytes of the device.
//!
//! Invariant: between `restore` and `done` a layer's bytes are those that were there at `keep`.
//!
//! ```text
//!   forward:   take(i)  ->  the model writes and reads it  ->  keep(i)      [flush]
//!   backward:  restore(i)  ->  the model reads it  ->  done(i)              end_step
//! ```
//!
//! `trainer` uses it; `offload` is the other way of doing it.

use lightering::backend::Backend;
use lightering::{Bytes, DeviceRange, Error, Misuse, Result, StreamId};
use std::time::Duration;

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

/// Host time spent on page-locking memory for the inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pinning {
    /// Before the first step.
    pub(crate) reserve: Duration,
    /// In steps.
    pub(crate) steps: Duration,
}

/// Keeper of the layers' inputs, and of the backend and the stream they are used on.
pub(crate) trait Inputs {
    /// The backend, for everything else.
    fn backend(&mut self) -> &mut dyn Backend;

    /// The stream that all work is enqueued on.
    fn stream(&self) -> StreamId;

    /// Takes device memory for the layer's input.
    fn take(&mut self, layer: usize) -> Result<DeviceRange>;

    /// The layer's forward is enqueued: its input is not needed until `restore`.
    fn keep(&mut self, layer: usize) -> Result<()>;

    /// Gives back all device memory that will be given back before the backward.
    fn flush(&mut self) -> Result<()>;

    /// The layer's backward is next on the stream: its input must be there.
    fn restore(&mut self, layer: usize) -> Result<DeviceRange>;

    /// The layer's backward is enqueued: its input is not needed any more.
    fn done(&mut self, layer: usize) -> Result<()>;

    /// The step's last work is enqueued.
    fn end_step(&mut self) -> Result<()>;

    /// What is enqueued from here on is called so, where a timeline is kept.
    fn span(&mut self, _: &str) -> Result<()> {
        Ok(())
    }

    /// The timeline of all steps as JSON, once closed; `None` where none was kept.
    fn timeline(&mut self) -> Option<String> {
        None
    }

    /// Records that the checker of order looked at, once closed; 0 where it was not asked to.
    fn checked(&self) -> u64 {
        0
    }

    /// What was moved so far.
    fn moved(&self) -> Moved;

    /// What page-locking took so far.
    fn pinning(&self) -> Pinning {
        Pinning::default()
    }

    /// Gives everything back; the device has nothing left to do.
    fn close(&mut self) -> Result<()>;
}

/// Inputs stay where they are.
pub(crate) struct Resident {
    backend: Box<dyn Backend>,
    stream: StreamId,
    bytes: Bytes,
    inputs: Vec<Option<DeviceRange>>,
}

impl Resident {
    /// A keeper of `layers` inputs of `bytes` bytes each.
    pub(crate) fn new(
        mut backend: Box<dyn Backend>,
        layers: usize,
        bytes: Bytes,
    ) -> Result<Resident> {
        let stream = backend.create_stream()?;
        Ok(Resident { backend, stream, bytes, inputs: vec![None; layers] })
    }
}

impl Inputs for Resident {
    fn backend(&mut self) -> &mut dyn Backend {
        &mut *self.backend
    }

    fn stream(&self) -> StreamId {
        self.stream
    }

    fn take(&mut self, layer: usize) -> Result<DeviceRange> {
        assert!(self.inputs[layer].is_none(), "a layer's input is taken once a step");
        let at = self.backend.alloc_device(self.bytes, self.stream)?;
        let range = DeviceRange::new(at, self.bytes)?;
        self.inputs[layer] = Some(range);
        Ok(range)
    }

    fn keep(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn restore(&mut self, layer: usize) -> Result<DeviceRange> {
        self.inputs[layer].ok_or_else(|| Error::usage(Misuse::NotThere, "restore"))
    }

    fn done(&mut self, layer: usize) -> Result<()> {
        match self.inputs[layer].take() {
            Some(range) => self.backend.free_device(range.at(), self.stream),
            None => Err(Error::usage(Misuse::NotThere, "done")),
        }
    }

    fn end_step(&mut self) -> Result<()> {
        Ok(())
    }

    fn moved(&self) -> Moved {
        Moved::default()
    }

    fn close(&mut self) -> Result<()> {
        self.backend.close_stream(self.stream)
    }
}
