//! Saved tensors: storages of a framework that leave when they are saved for the backward pass and
//! are had back when it asks.
//!
//! What it is not: it knows no framework. It resizes nothing and frees nothing: whoever saved a
//! storage holds a reference to its device bytes, and drops it when `Engine::releasable` names it.
//!
//! Invariant: a storage packed can be unpacked any number of times until its handle is dropped,
//! byte for byte. Of those packed and not unpacked since, the last `keep_last_count` stay.
//!
//! ```text
//!   forward    pack(a) pack(b) ..      releasable: drop the reference to a
//!   backward   unpack(b): Ready        unpack(a): NeedsRoom -> take room -> refill(a)
//!              rest(a): used, and wanted again (a graph that is kept): goes without a copy
//! ```
//!
//! Frameworks use it, one for each of their contexts; contexts share an engine.

use crate::engine::{Acquire, Engine, Evict};
use crate::error::{Misuse, Result};
use crate::policy::{Advice, Policy, PolicyLimits};
use crate::storage::{Homed, Residency, Storage};
use crate::unit::{Bytes, DeviceRange, Name, StorageId, StreamId};

/// A storage that a context sent off, and what became of it.
pub type Left = Option<(StorageId, Evict)>;

/// What one context packed.
#[derive(Debug)]
pub struct Saved {
    policy: Policy,
    largest: Bytes,
}

impl Saved {
    /// A context whose last `keep_last_count` storages stay, and those under `storage_bytes_min`.
    pub fn new(keep_last_count: usize, storage_bytes_min: Bytes) -> Saved {
        let limits = PolicyLimits { keep_last_count, storage_bytes_min };
        Saved { policy: Policy::new(limits), largest: Bytes::ZERO }
    }

    /// The largest storage packed so far.
    pub fn largest(&self) -> Bytes {
        self.largest
    }

    /// Takes a storage whose bytes the framework owns and will not write, and sends off the one
    /// whose turn it is, which may be an earlier one. `compute` is the stream on which the bytes
    /// were produced, as it is current now. Where the second part is an error the storage is packed
    /// all the same, and what was to leave stays on the device.
    ///
    /// # Errors
    /// Those of [`Engine::adopt`]; nothing is packed then. The second part: those of
    /// [`Engine::evict`].
    pub fn pack(
        &mut self,
        engine: &mut Engine,
        range: DeviceRange,
        name: impl Into<Name>,
        compute: StreamId,
    ) -> Result<(Storage, Result<Left>)> {
        let storage = engine.adopt(range, name)?;
        self.largest = self.largest.max(range.len());
        let left = self.offer(engine, storage.id(), range.len(), compute);
        Ok((storage, left))
    }

    fn offer(
        &mut self,
        engine: &mut Engine,
        id: StorageId,
        len: Bytes,
        compute: StreamId,
    ) -> Result<Left> {
        match self.policy.offer(Homed { storage: id, stream: compute }, len) {
            Advice::Keep(why) => Ok(Some((id, Evict::Kept(why)))),
            Advice::Evict(None) => Ok(None),
            Advice::Evict(Some(homed)) => match engine.evict(homed.storage, homed.stream) {
                Ok(became) => Ok(Some((homed.storage, became))),
                // Its handle was dropped meanwhile: a graph that nobody wants any more.
                Err(error) if error.misuse() == Some(Misuse::Stale) => Ok(None),
                Err(error) => Err(error),
            },
        }
    }

    /// A storage's bytes for a reader that will be enqueued on `compute` next. On
    /// [`Acquire::NeedsRoom`] take room in the order of `compute`, and call [`Engine::refill`].
    ///
    /// # Errors
    /// Those of [`Engine::acquire`].
    pub fn unpack(
        &mut self,
        engine: &mut Engine,
        id: StorageId,
        compute: StreamId,
    ) -> Result<Acquire> {
        self.policy.forget(id);
        engine.acquire(id, compute)
    }

    /// The readers of a storage were enqueued on `compute`, and others may come: it leaves again.
    /// What left before has its copy, and nothing is moved.
    ///
    /// # Errors
    /// Those of [`Engine::rest`] and [`Engine::residency`].
    pub fn rest(
        &mut self,
        engine: &mut Engine,
        id: StorageId,
        compute: StreamId,
    ) -> Result<Option<Evict>> {
        match engine.residency(id)? {
            Residency::Resident => engine.rest(id, compute).map(Some),
            _ => Ok(None),
        }
    }
}
