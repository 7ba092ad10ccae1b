//! Words with units: byte counts, addresses, ranges, and generation-checked keys.
//!
//! What it is not: it holds no memory and makes no driver call.
//!
//! Invariant: a range never wraps (`at + len` fits in 64 bits, checked when it is made), and a key
//! names at most one thing ever: its slot's generation changes when the thing goes.
//!
//! ```text
//!   DeviceRange { at: DevicePtr, len: Bytes }        PinnedRange { at: PinnedPtr, len: Bytes }
//!   Key { owner, index, generation }  ->  StreamId, EventId, StorageId  ->  Table<T> slot
//! ```
//!
//! Everyone may use it.

use crate::error::{Error, Misuse, Result};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

/// A number of bytes.
///
/// ```
/// use lightering::Bytes;
/// assert_eq!("512MiB".parse::<Bytes>().unwrap(), Bytes::mib(512));
/// assert_eq!(Bytes::mib(1536).to_string(), "1.50 GiB");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Bytes = Bytes(0);
    /// As many as 64 bits count: the way to say "no limit".
    pub const MAX: Bytes = Bytes(u64::MAX);

    /// `n` bytes.
    pub const fn new(n: u64) -> Bytes {
        Bytes(n)
    }

    /// `n` times 1,024 bytes; saturates.
    pub const fn kib(n: u64) -> Bytes {
        Bytes(n.saturating_mul(1 << 10))
    }

    /// `n` times 1,048,576 bytes; saturates.
    pub const fn mib(n: u64) -> Bytes {
        Bytes(n.saturating_mul(1 << 20))
    }

    /// `n` times 1,073,741,824 bytes; saturates.
    pub const fn gib(n: u64) -> Bytes {
        Bytes(n.saturating_mul(1 << 30))
    }

    /// The count as a plain number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Is it zero?
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// The sum, or `None` past 64 bits.
    pub const fn checked_add(self, other: Bytes) -> Option<Bytes> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Bytes(sum)),
            None => None,
        }
    }

    /// The sum, at most [`Bytes::MAX`].
    pub const fn saturating_add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }

    /// The difference, at least zero.
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// The count as a length of host memory.
    ///
    /// # Errors
    /// [`Misuse::TooLarge`] where it exceeds the address space.
    pub fn to_usize(self) -> Result<usize> {
        match isize::try_from(self.0) {
            Ok(n) => Ok(n as usize),
            Err(_) => Err(Error::usage(Misuse::TooLarge, "length").bytes(self)),
        }
    }
}

impl std::ops::Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0 + other.0)
    }
}

impl std::ops::AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        self.0 += other.0;
    }
}

impl std::ops::Sub for Bytes {
    type Output = Bytes;
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0 - other.0)
    }
}

impl std::ops::SubAssign for Bytes {
    fn sub_assign(&mut self, other: Bytes) {
        self.0 -= other.0;
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(all: I) -> Bytes {
        all.fold(Bytes::ZERO, |a, b| a + b)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1 << 10 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        write!(f, "{value:.2} {}", UNITS[unit])
    }
}

impl std::str::FromStr for Bytes {
    type Err = Error;

    /// Reads `4096`, `64KiB`, `512 MiB`, `1.5GiB`, `8GB` (decimal units mean powers of 1,000).
    fn from_str(text: &str) -> Result<Bytes> {
        let bad =
            || Error::usage(Misuse::BadSize, "size").detail(format!("{text:?} is not a size"));
        let text_trimmed = text.trim();
        let digits = text_trimmed
            .find(|c: char| !(c.is_ascii_digit() || c == '.'))
            .unwrap_or(text_trimmed.len());
        let (number, unit) = text_trimmed.split_at(digits);
        let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(bad()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(Bytes).ok_or_else(|| {
                Error::usage(Misuse::TooLarge, "size").detail(format!("{text:?} exceeds 64 bits"))
            });
        }
        match number.parse::<f64>() {
            Ok(part) if part * (scale as f64) < 9.0e18 => Ok(Bytes((part * scale as f64) as u64)),
            Ok(_) => {
                Err(Error::usage(Misuse::TooLarge, "size")
                    .detail(format!("{text:?} exceeds 64 bits")))
            }
            Err(_) => Err(bad()),
        }
    }
}

/// Ordinal of a device, as the driver counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

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

/// Names one thing of one owner, once: a used slot's generation changes when the thing goes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Tag of the table it came from; unique in the process.
    pub owner: u32,
    /// Slot in that table.
    pub index: u32,
    /// How often that slot was filled before.
    pub generation: u32,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub Key);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:?})", stringify!($name), self.0)
            }
        }

        impl From<Key> for $name {
            fn from(key: Key) -> $name {
                $name(key)
            }
        }

        impl From<$name> for Key {
            fn from(id: $name) -> Key {
                id.0
            }
        }
    };
}

id!(
    /// A stream of one backend.
    StreamId
);
id!(
    /// An event of one backend.
    EventId
);
id!(
    /// A storage of one engine.
    StorageId
);

/// A tag no other table of this process has.
pub fn next_owner() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Values behind generation-checked keys: O(1), and a key of another table or of a thing that is
/// gone is an error, never somebody else's value.
#[derive(Debug)]
pub struct Table<T> {
    owner: u32,
    slots: slab::Slab<(u32, T)>,
    /// Generation the slot's next tenant gets; as long as the most slots ever used at once.
    generations: Vec<u32>,
    len_max: usize,
}

impl<T> Table<T> {
    /// An empty table under its own tag that holds at most `len_max` values.
    pub fn new(len_max: usize) -> Table<T> {
        Table { owner: next_owner(), slots: slab::Slab::new(), generations: Vec::new(), len_max }
    }

    /// Tag that this table's keys carry.
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// How many values it holds.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Does it hold none?
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Is there no room for one more?
    pub fn is_full(&self) -> bool {
        self.slots.len() >= self.len_max
    }

    /// Keeps `value` and names it; `None` when the table is full.
    pub fn insert(&mut self, value: T) -> Option<Key> {
        if self.is_full() {
            return None;
        }
        let entry = self.slots.vacant_entry();
        let index = entry.key();
        if index == self.generations.len() {
            self.generations.push(0);
        }
        let generation = self.generations[index];
        entry.insert((generation, value));
        Some(Key { owner: self.owner, index: index as u32, generation })
    }

    /// The value, or why the key names none here.
    ///
    /// # Errors
    /// [`Misuse::Foreign`] for a key of another table, [`Misuse::Stale`] for a thing that is gone.
    pub fn get(&self, key: Key, op: &'static str) -> Result<&T> {
        match self.slots.get(key.index as usize) {
            Some((generation, value))
                if key.owner == self.owner && *generation == key.generation =>
            {
                Ok(value)
            }
            _ => Err(self.refusal(key, op)),
        }
    }

    /// As [`Table::get`], for changing it.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub fn get_mut(&mut self, key: Key, op: &'static str) -> Result<&mut T> {
        let refusal = self.refusal_of(key);
        match self.slots.get_mut(key.index as usize) {
            Some((generation, value))
                if key.owner == self.owner && *generation == key.generation =>
            {
                Ok(value)
            }
            _ => Err(Error::usage(refusal, op)),
        }
    }

    /// Takes the value out; its key is stale from now on.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub fn remove(&mut self, key: Key, op: &'static str) -> Result<T> {
        self.get(key, op)?;
        let index = key.index as usize;
        self.generations[index] = self.generations[index].wrapping_add(1);
        Ok(self.slots.remove(index).1)
    }

    /// Every value with its key, in slot order.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        let owner = self.owner;
        self.slots.iter().map(move |(index, (generation, value))| {
            (Key { owner, index: index as u32, generation: *generation }, value)
        })
    }

    fn refusal_of(&self, key: Key) -> Misuse {
        if key.owner == self.owner { Misuse::Stale } else { Misuse::Foreign }
    }

    fn refusal(&self, key: Key, op: &'static str) -> Error {
        Error::usage(self.refusal_of(key), op)
    }
}

/// A short name kept in place, so that naming a storage allocates nothing: at most 31 bytes of
/// UTF-8; a longer one is cut at a character's edge.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Name {
    len: u8,
    text: [u8; Name::LEN_MAX],
}

impl Name {
    /// The most bytes a name keeps.
    pub const LEN_MAX: usize = 31;

    /// The name, cut where it is too long.
    pub fn new(text: &str) -> Name {
        let mut len = text.len().min(Name::LEN_MAX);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        let mut name = Name { len: len as u8, text: [0; Name::LEN_MAX] };
        name.text[..len].copy_from_slice(&text.as_bytes()[..len]);
        name
    }

    /// The text kept.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.text[..self.len as usize]).unwrap_or("")
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Name {
        Name::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_in_binary_and_decimal_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64KiB", 64 << 10),
            (" 512 MiB ", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("8gb", 8_000_000_000),
        ] {
            assert_eq!(text.parse::<Bytes>().unwrap(), Bytes(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "1.2.3", "7 parsecs", "99999999999999999999", "1e30GiB"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

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

    #[test]
    fn a_stale_key_never_names_the_slots_next_tenant() {
        let mut table = Table::new(2);
        let first = table.insert("a").unwrap();
        assert_eq!(table.remove(first, "test").unwrap(), "a");
        let second = table.insert("b").unwrap();
        assert_eq!(second.index, first.index);
        assert_eq!(table.get(first, "test").unwrap_err().misuse(), Some(Misuse::Stale));
        assert_eq!(*table.get(second, "test").unwrap(), "b");
        let mut other: Table<&str> = Table::new(2);
        other.insert("c").unwrap();
        assert_eq!(other.get(second, "test").unwrap_err().misuse(), Some(Misuse::Foreign));
        assert!(table.insert("d").is_some() && table.insert("e").is_none());
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        let name = Name::new("layer.0123456789.0123456789.\u{e9}\u{e9}\u{e9}");
        assert!(name.as_str().len() <= Name::LEN_MAX && name.as_str().starts_with("layer.0"));
    }
}
