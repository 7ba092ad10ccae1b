//! Words with units: byte counts, addresses, ranges, and generation-checked keys.
//!
//! What it is not: it holds no memory and makes no driver call.
//!
//! Invariant: a range never wraps (`at + len` fits in 64 bits, checked when it is made), and a key
//! names at most one thing ever: its slot's generation changes when the thing goes.
//!
//! ```text
//!   bytes  Bytes                 range  DevicePtr, DeviceRange, PinnedPtr, PinnedRange
//!   name   Name                  key    Key -> StreamId, EventId, MemoryId, StorageId
//!   spare  what host memory there is to spare
//! ```
//!
//! Everyone may use it.

mod bytes;
mod key;
mod name;
mod near;
mod range;
mod spare;

pub use bytes::Bytes;
pub use key::{EventId, Key, MemoryId, StorageId, StreamId, Table, next_owner};
pub use name::Name;
pub use near::{IdMap, NearHasher};
pub use range::{DevicePtr, DeviceRange, PinnedPtr, PinnedRange};
pub(crate) use spare::Spare;

use std::fmt;

/// Ordinal of a device, as the driver counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}
