//! lightering (skeleton)
pub mod backend;
pub mod error;
pub mod trace;
pub mod unit;

pub use error::{Error, Kind, Missing, Misuse, Result};
pub use unit::{
    Bytes, DeviceId, DevicePtr, DeviceRange, EventId, Key, Name, PinnedPtr, PinnedRange, StorageId,
    StreamId,
};
