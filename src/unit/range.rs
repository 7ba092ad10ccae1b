//! Addresses and byte ranges in the two memories: a device's, and page-locked host memory.
//!
//! What it is not: a pointer that this process could follow.
//!
//! Invariant: a range never wraps: `at + len` fits in 64 bits, checked when it is made. An address
//! of one memory is never taken for one of the other: they are different types.
//!
//! ```text
//!   DeviceRange { at: DevicePtr, len: Bytes }        PinnedRange { at: PinnedPtr, len: Bytes }
//! ```
//!
//! Everyone may use it, by way of [`crate::unit`].

use super::Bytes;
use crate::error::{Error, Misuse, Result};
use std::fmt;

macro_rules! address {
    ($(#[$doc:meta])* $ptr:ident, $(#[$range_doc:meta])* $range:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $ptr(pub u64);

        impl fmt::Debug for $ptr {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:#x})", stringify!($ptr), self.0)
            }
        }

        impl $ptr {
            /// The address `offset` bytes further.
            ///
            /// # Errors
            /// [`Misuse::TooLarge`] where that leaves 64 bits.
            pub fn offset(self, offset: Bytes) -> Result<$ptr> {
                match self.0.checked_add(offset.0) {
                    Some(at) => Ok($ptr(at)),
                    None => Err(Error::usage(Misuse::TooLarge, "address").bytes(offset)),
                }
            }
        }

        $(#[$range_doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $range {
            at: $ptr,
            len: Bytes,
        }

        impl $range {
            /// The range of `len` bytes that starts at `at`.
            ///
            /// # Errors
            /// [`Misuse::TooLarge`] where the end leaves 64 bits.
            pub fn new(at: $ptr, len: Bytes) -> Result<$range> {
                at.offset(len)?;
                Ok($range { at, len })
            }

            /// First byte's address.
            pub fn at(self) -> $ptr {
                self.at
            }

            /// Length in bytes.
            pub fn len(self) -> Bytes {
                self.len
            }

            /// No bytes at all?
            pub fn is_empty(self) -> bool {
                self.len.is_zero()
            }

            /// Address one past the last byte.
            pub fn end(self) -> u64 {
                self.at.0 + self.len.0
            }

            /// Do the two share a byte?
            pub fn overlaps(self, other: $range) -> bool {
                !self.is_empty()
                    && !other.is_empty()
                    && self.at.0 < other.end()
                    && other.at.0 < self.end()
            }

            /// Does every byte of `other` lie in this range?
            pub fn contains(self, other: $range) -> bool {
                self.at.0 <= other.at.0 && other.end() <= self.end()
            }

            /// The `len` bytes that start `offset` bytes into this range.
            ///
            /// # Errors
            /// [`Misuse::OutOfRange`] where they do not all lie in it.
            pub fn part(self, offset: Bytes, len: Bytes) -> Result<$range> {
                match offset.checked_add(len) {
                    Some(end) if end <= self.len => {
                        Ok($range { at: $ptr(self.at.0 + offset.0), len })
                    }
                    _ => Err(Error::usage(Misuse::OutOfRange, "range").bytes(len)),
                }
            }
        }
    };
}

address!(
    /// An address in a device's memory (`CUdeviceptr`).
    DevicePtr,
    /// Bytes in a device's memory; never wraps.
    DeviceRange
);
address!(
    /// The address by which devices reach page-locked host memory.
    PinnedPtr,
    /// Bytes in page-locked host memory; never wraps.
    PinnedRange
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_would_wrap_is_refused() {
        assert!(DeviceRange::new(DevicePtr(u64::MAX - 3), Bytes(4)).is_err());
        let range = DeviceRange::new(DevicePtr(u64::MAX - 4), Bytes(4)).unwrap();
        assert!(range.part(Bytes(2), Bytes(3)).is_err());
        assert!(range.part(Bytes(u64::MAX), Bytes(2)).is_err());
        assert!(range.contains(range.part(Bytes(1), Bytes(3)).unwrap()));
    }

    #[test]
    fn empty_ranges_overlap_nothing() {
        let whole = PinnedRange::new(PinnedPtr(16), Bytes(16)).unwrap();
        let empty = PinnedRange::new(PinnedPtr(20), Bytes(0)).unwrap();
        assert!(!whole.overlaps(empty) && !empty.overlaps(whole));
        assert!(whole.overlaps(whole));
    }
}
