//! Layer inputs under activation checkpointing: each leaves after its layer's forward and is home
//! again for the layer's recompute.
//!
//! What it is not: it recomputes nothing, and does not choose which layers are checkpointed.
//!
//! Invariant: an input handed to `keep` can be had back with `restore` until `done`, byte for byte,
//! whatever the policy did with it in between.
//!
//! ```text
//!   forward    keep(in 0) keep(in 1) .. keep(in n)        [flush]
//!   backward   restore(n) recompute, backward, done(n)  ..  restore(0) .. done(0)   end_step
//! ```
//!
//! Training loops call it.

use super::DeviceMemory;
use crate::engine::{Acquire, Engine};
use crate::error::{Error, Kind, Misuse, Result};
use crate::storage::Storage;
use crate::unit::{Bytes, DeviceRange, StorageId, StreamId};

/// The layer inputs of the steps under way.
#[derive(Debug, Default)]
pub struct Checkpoint {
    inputs: Vec<Option<Storage>>,
    bytes: Bytes,
}

impl Checkpoint {
    /// An adapter that keeps nothing yet.
    pub fn new() -> Checkpoint {
        Checkpoint::default()
    }

    /// Bytes of the inputs kept now, wherever they are.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Takes a layer's input after the layer's forward was enqueued on `compute`, and returns its
    /// number in this step. The engine's policy decides whether it leaves.
    ///
    /// # Errors
    /// Those of [`Engine::offer`]. The input is kept all the same, under the next number.
    pub fn keep(
        &mut self,
        engine: &mut Engine,
        input: Storage,
        compute: StreamId,
    ) -> Result<usize> {
        let id = input.id();
        self.bytes += input.len();
        self.inputs.push(Some(input));
        engine.offer(id, compute)?;
        Ok(self.inputs.len() - 1)
    }

    /// A layer's input for its recompute, which will be enqueued on `compute` next. The engine owns
    /// the device bytes.
    ///
    /// # Errors
    /// `Usage(State)` for a number that was never kept or is done; those of [`Engine::acquire`].
    pub fn restore(
        &mut self,
        engine: &mut Engine,
        layer: usize,
        compute: StreamId,
    ) -> Result<DeviceRange> {
        match engine.acquire(self.id(layer)?, compute)? {
            Acquire::Ready(range) => Ok(range),
            Acquire::NeedsRoom(len) => {
                let error = Error::usage(Misuse::NotThere, "restore").bytes(len);
                Err(error.detail("a framework owns the device bytes: use restore_into"))
            }
        }
    }

    /// As [`Checkpoint::restore`], with device bytes that a framework owns.
    ///
    /// # Errors
    /// Those of [`Checkpoint::restore`]; `OutOfMemory` where the framework has no room, after which
    /// the input is where it was.
    pub fn restore_into(
        &mut self,
        engine: &mut Engine,
        layer: usize,
        compute: StreamId,
        memory: &mut dyn DeviceMemory,
    ) -> Result<DeviceRange> {
        let id = self.id(layer)?;
        let range = match engine.acquire(id, compute)? {
            Acquire::Ready(range) => range,
            Acquire::NeedsRoom(len) => {
                let target = match memory.take(id, len, compute)? {
                    Some(target) => Some(target),
                    None => {
                        // What was evicted already makes room; then once more.
                        engine.flush(compute)?;
                        super::give_released(engine, compute, memory)?;
                        memory.take(id, len, compute)?
                    }
                };
                let Some(target) = target else {
                    return Err(Error::new(Kind::OutOfMemory, "restore").bytes(len));
                };
                match engine.refill(id, target, compute) {
                    Ok(range) => range,
                    Err(error) => {
                        memory.give(id, compute);
                        return Err(error);
                    }
                }
            }
        };
        super::pull(engine, compute, memory)?;
        Ok(range)
    }

    /// The layer's backward was enqueued on `compute`: its input is not needed any more. Device
    /// bytes that a framework owns may be dropped in the order of `compute` afterwards.
    ///
    /// # Errors
    /// Those of [`Engine::release`].
    pub fn done(&mut self, engine: &mut Engine, layer: usize, compute: StreamId) -> Result<()> {
        self.id(layer)?;
        match self.inputs[layer].take() {
            Some(input) => {
                self.bytes -= input.len();
                engine.release(input, compute)
            }
            None => Ok(()),
        }
    }

    /// The step is over: numbers start again from 0. Inputs that were not done (a forward whose
    /// backward never ran) are given up.
    ///
    /// # Errors
    /// Those of [`Engine::mark_step`].
    pub fn end_step(&mut self, engine: &mut Engine) -> Result<()> {
        self.inputs.clear();
        self.bytes = Bytes::ZERO;
        engine.mark_step()
    }

    fn id(&self, layer: usize) -> Result<StorageId> {
        match self.inputs.get(layer) {
            Some(Some(input)) => Ok(input.id()),
            _ => {
                let error = Error::usage(Misuse::State, "restore");
                Err(error.detail(format!("layer {layer} keeps no input now")))
            }
        }
    }
}
