//! Thin shapes for training frameworks over the engine.
//!
//! What it is not: it holds no copy, stream or event logic; that is the engine's.
//!
//! Invariant: whatever an adapter keeps alive it gives up when it is dropped, in any state.
//!
//! ```text
//!   checkpoint: layer inputs       saved: saved tensors       (frozen weights: a later stage)
//!   DeviceMemory: how a framework that owns its memory shrinks and grows it for an adapter
//! ```
//!
//! Frameworks use it.

pub mod checkpoint;
pub mod saved;

pub use checkpoint::Checkpoint;
pub use saved::Saved;

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
/// A framework that owns its device memory calls it between layers. Here the framework's allocator
/// is the simulated device's own:
///
/// ```
/// use lightering::adapter::{DeviceMemory, pull};
/// use lightering::backend::{Backend, sim::Sim};
/// use lightering::{Acquire, Bytes, DeviceRange, Engine, Options, PinnedPool, PoolOptions};
/// use lightering::{Result, StorageId, StreamId};
/// use std::collections::HashMap;
///
/// /// `on` is the framework's own name of the compute stream.
/// struct Framework { device: Sim, on: StreamId, held: HashMap<StorageId, DeviceRange> }
///
/// impl DeviceMemory for Framework {
///     fn take(&mut self, id: StorageId, len: Bytes, _: StreamId) -> Result<Option<DeviceRange>> {
///         let range = DeviceRange::new(self.device.alloc_device(len, self.on)?, len)?;
///         self.held.insert(id, range);
///         Ok(Some(range))
///     }
///     fn give(&mut self, id: StorageId, _: StreamId) {
///         if let Some(range) = self.held.remove(&id) {
///             let _ = self.device.free_device(range.at(), self.on);
///         }
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let world = lightering::backend::sim::World::process();
/// let (mut device, ours) = (world.device(0)?, Box::new(world.device(0)?));
/// let on = device.create_stream()?;
/// let mut framework = Framework { device, on, held: HashMap::new() };
/// let pool = PinnedPool::new(ours.pinner(), PoolOptions::default())?;
/// let mut engine = Engine::new(ours, &pool, Options::default())?;
/// let compute = engine.adopt_stream(framework.device.raw_stream(on)?)?;
///
/// let len = Bytes::mib(4);
/// let range = DeviceRange::new(framework.device.alloc_device(len, on)?, len)?;
/// let input = engine.adopt(range, "layer.0")?; // the bytes stay the framework's
/// framework.held.insert(input.id(), range);
/// engine.evict(input.id(), compute)?;
/// engine.flush(compute)?; // no later layer reads it
/// while let Some(id) = engine.releasable(compute)? {
///     framework.give(id, compute); // its copy out is ordered before this
/// }
/// assert!(framework.held.is_empty());
/// pull(&mut engine, compute, &mut framework)?; // ahead of the readers, where there is room
/// if let Acquire::NeedsRoom(len) = engine.acquire(input.id(), compute)? {
///     if let Some(target) = framework.take(input.id(), len, compute)? {
///         engine.refill(input.id(), target, compute)?;
///     }
/// }
/// assert_eq!(engine.range(input.id())?, framework.held[&input.id()]);
/// # let id = input.id();
/// engine.release(input, compute)?;
/// # framework.give(id, compute);
/// # engine.shutdown()
/// # }
/// ```
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
