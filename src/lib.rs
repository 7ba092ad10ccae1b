//! lightering (skeleton)
pub mod adapter;
pub mod backend;
pub mod copy;
pub mod engine;
pub mod error;
pub mod pinned;
pub mod policy;
pub mod prefetch;
pub mod storage;
pub mod stream;
pub mod trace;
pub mod unit;

pub use engine::{Acquire, Engine, Evict, Options, Shared, Stats};
pub use error::{Error, Kind, Missing, Misuse, Result};
pub use unit::{
    Bytes, DeviceId, DevicePtr, DeviceRange, EventId, Key, Name, PinnedPtr, PinnedRange, StorageId,
    StreamId,
};
