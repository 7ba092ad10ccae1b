//! Generation-checked keys, the ids made of them, and the table behind them.
//!
//! What it is not: an allocator of anything but slots, or a map by arbitrary keys.
//!
//! Invariant: a key names at most one thing ever: its slot's generation changes when it goes.
//!
//! ```text
//!   Key { owner, index, generation }  ->  StreamId, EventId, MemoryId, StorageId  ->  Table<T>
//! ```
//!
//! Everyone may use it, by way of [`crate::unit`].

use crate::error::{Error, Misuse, Result};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

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
    /// Physical device memory of one backend, to be mapped at an address.
    MemoryId
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
    /// What its values are called in errors.
    noun: &'static str,
    slots: slab::Slab<(u32, T)>,
    /// Generation the slot's next tenant gets; as long as the most slots ever used at once.
    generations: Vec<u32>,
    len_max: usize,
}

impl<T> Table<T> {
    /// An empty table under its own tag that holds at most `len_max` values. Errors about its keys
    /// call a value by the `noun`: "storage", "stream".
    pub fn new(noun: &'static str, len_max: usize) -> Table<T> {
        let owner = next_owner();
        Table { owner, noun, slots: slab::Slab::new(), generations: Vec::new(), len_max }
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
        self.find(key).ok_or_else(|| self.refusal(key, op))
    }

    /// As [`Table::get`], for changing it.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub fn get_mut(&mut self, key: Key, op: &'static str) -> Result<&mut T> {
        let (misuse, noun) = (self.misuse_of(key), self.noun);
        self.find_mut(key).ok_or_else(|| Error::usage(misuse, op).of(noun))
    }

    /// The value, if the key names one here: for asking after a thing that may be gone, which an
    /// error would be made for in vain.
    pub fn find(&self, key: Key) -> Option<&T> {
        let (generation, value) = self.slots.get(key.index as usize)?;
        (key.owner == self.owner && *generation == key.generation).then_some(value)
    }

    /// As [`Table::find`], for changing it.
    pub fn find_mut(&mut self, key: Key) -> Option<&mut T> {
        let (generation, value) = self.slots.get_mut(key.index as usize)?;
        (key.owner == self.owner && *generation == key.generation).then_some(value)
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

    fn misuse_of(&self, key: Key) -> Misuse {
        if key.owner == self.owner { Misuse::Stale } else { Misuse::Foreign }
    }

    fn refusal(&self, key: Key, op: &'static str) -> Error {
        Error::usage(self.misuse_of(key), op).of(self.noun)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_key_never_names_the_slots_next_tenant() {
        let mut table = Table::new("word", 2);
        let first = table.insert("a").unwrap();
        assert_eq!(table.remove(first, "test").unwrap(), "a");
        let second = table.insert("b").unwrap();
        assert_eq!(second.index, first.index);
        assert_eq!(table.get(first, "test").unwrap_err().misuse(), Some(Misuse::Stale));
        let said = table.get_mut(first, "test").unwrap_err().to_string();
        assert_eq!(said, "test: the word's handle is stale");
        assert_eq!(*table.get(second, "test").unwrap(), "b");
        let mut other: Table<&str> = Table::new("letter", 2);
        other.insert("c").unwrap();
        assert_eq!(other.get(second, "test").unwrap_err().misuse(), Some(Misuse::Foreign));
        let said = other.remove(second, "test").unwrap_err().to_string();
        assert_eq!(said, "test: the letter belongs to another owner");
        assert!(table.insert("d").is_some() && table.insert("e").is_none());
    }
}
