//! Thin shapes for training frameworks over the engine.
//!
//! What it is not: it holds no copy, stream or event logic; that is the engine's.
//!
//! Invariant: whatever an adapter keeps alive it gives up when it is dropped, in any state.
//!
//! ```text
//!   checkpoint: layer inputs       (saved tensors, frozen weights: later stages)
//!   DeviceMemory: how a framework that owns its memory shrinks and grows it for an adapter
//! ```
//!
//! Frameworks use it.

pub mod checkpoint;

pub use checkpoint::Checkpoint;

use crate::engine::Engine;
use crate::error::Result;
use crate::unit::{Bytes, DeviceRange, StorageId, StreamId};

/// The device memory of a framework that allocates for itself: the pull protocol's other side.
pub trait DeviceMemory {
    /// Takes `len` bytes for a storage in the order of `compute`, or says that there is no room
    /// (`None`): then the storage is fetched when its reader asks.
    ///
    /// # Errors
    /// Whatever the framework's allocator says; the adapter passes it on.
    fn take(
        &mut self,
        storage: StorageId,
        len: Bytes,
        compute: StreamId,
    ) -> Result<Option<DeviceRange>>;

    /// Drops a storage's device bytes in the order of `compute`.
    fn give(&mut self, storage: StorageId, compute: StreamId);
}

/// Runs the pull protocol for one stream: drops what may go, takes room for what is wanted.
///
/// # Errors
/// Those of the engine and of `memory`.
pub fn pull(engine: &mut Engine, compute: StreamId, memory: &mut dyn DeviceMemory) -> Result<()> {
    give_released(engine, compute, memory)?;
    while let Some((storage, len)) = engine.wanted(compute)? {
        let Some(target) = memory.take(storage, len, compute)? else { break };
        if let Err(error) = engine.prefetch(storage, target, compute) {
            // Nothing of it is lost: the storage is evicted as before, and served on demand.
            memory.give(storage, compute);
            return if error.is_retryable() { Ok(()) } else { Err(error) };
        }
    }
    Ok(())
}

/// Drops what may go.
fn give_released(
    engine: &mut Engine,
    compute: StreamId,
    memory: &mut dyn DeviceMemory,
) -> Result<()> {
    while let Some(storage) = engine.releasable(compute)? {
        memory.give(storage, compute);
    }
    Ok(())
}
