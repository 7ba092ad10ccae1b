//! lightering (skeleton)
pub mod backend;
pub mod error;
pub mod pinned;
pub mod trace;
pub mod unit;

pub use error::{Error, Kind, Misuse, Missing, Result};
pub use unit::{
    Bytes, DeviceId, DevicePtr, DeviceRange, EventId, Key, Name, PinnedPtr, PinnedRange, StorageId,
    StreamId,
};
