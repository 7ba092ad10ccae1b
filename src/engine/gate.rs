//! What every verb goes through: may it begin, and what becomes of what the driver says.
//!
//! What it is not: it decides nothing about storages, and enqueues nothing but what is owed.
//!
//! Invariant: a verb begins only while the engine is open and the device not lost; the first fatal
//! error is kept, and no later one takes its place.
//!
//! ```text
//!   verb -> begin: lost? closed? in doubt? dropped handles, debts
//!        -> what it is for -> seen(what the driver said) -> the caller
//! ```
//!
//! Part of the engine.

use super::Engine;
use crate::backend::Backend;
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::DeviceRange;

impl Engine {
    /// Refuses a range that is empty, shares bytes with a storage on the device, or is not all in
    /// one allocation of this device.
    pub(super) fn check_range(&mut self, range: DeviceRange) -> Result<()> {
        if range.is_empty() {
            return Err(Error::usage(Misuse::Empty, self.verb));
        }
        self.between_storages(range)?;
        self.check_allocated(range, &mut None)
    }

    /// The addresses around `range` that are no storage's, from and to. Refuses a range that shares
    /// bytes with a storage on the device.
    fn between_storages(&self, range: DeviceRange) -> Result<(u64, u64)> {
        let from = match self.ranges.range(..range.end()).next_back() {
            Some((_, (end, other))) if *end > range.at().0 => {
                let error = Error::usage(Misuse::Overlap, self.verb).bytes(range.len());
                return Err(match self.slots.find(other.0) {
                    Some(slot) => error.detail(format!("that of storage {:?}", slot.name)),
                    None => error,
                });
            }
            before => before.map_or(0, |(_, (end, _))| *end),
        };
        let to = self.ranges.range(range.end()..).next().map_or(u64::MAX, |(start, _)| *start);
        Ok((from, to))
    }

    /// Refuses device bytes that are not all in one allocation of this device, as far as its driver
    /// can tell. `known` is the allocation that was found last.
    pub(super) fn check_allocated(
        &mut self,
        range: DeviceRange,
        known: &mut Option<DeviceRange>,
    ) -> Result<()> {
        if known.is_some_and(|whole| whole.contains(range)) {
            return Ok(());
        }
        let found = self.backend.allocation(range.at());
        *known = self.seen(found)?;
        match *known {
            Some(whole) if !whole.contains(range) => {
                let (at, len) = (whole.at().0, whole.len());
                Err(Error::usage(Misuse::OutOfRange, self.verb)
                    .bytes(range.len())
                    .detail(format!("the allocation at {at:#x} has {len}")))
            }
            _ => Ok(()),
        }
    }

    /// The same of the rows that are laid out, which are nobody's whose bytes leave and come:
    /// most lie in the allocation of the one before, and between the same storages.
    pub(super) fn check_rows(&mut self) -> Result<()> {
        let (mut known, mut free) = (None, (0, 0));
        for index in 0..self.packer.layout.items().len() {
            let range = self.packer.layout.items()[index].range;
            if range.at().0 < free.0 || range.end() > free.1 {
                free = self.between_storages(range)?;
            }
            self.check_allocated(range, &mut known)?;
        }
        Ok(())
    }

    /// Passes where the engine is open and the device not lost, and hears of dropped handles.
    pub(super) fn begin(&mut self, op: &'static str) -> Result<()> {
        self.verb = op;
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        if self.is_closed {
            return Err(Error::new(Kind::Closed, op));
        }
        if self.unmarked.is_some() {
            self.prove()?;
        }
        while let Ok(id) = self.dropped.try_recv() {
            self.handle_dropped(id)?;
        }
        self.end_batches()?;
        self.pay()
    }

    /// Keeps the first fatal error; passes every result on. What failed inside of a verb is told as
    /// that verb's failure: its caller called no other.
    pub(super) fn seen<T>(&mut self, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            let error = error.during(self.verb);
            if error.is_lost() && self.lost.is_none() {
                self.lost = Some(error.clone());
            }
            error
        })
    }

    /// A verb panicked, and may have left things half done.
    pub(super) fn abandon(&mut self) {
        let lost = || Error::new(Kind::Lost, "lock").detail("a verb panicked");
        self.lost.get_or_insert_with(lost);
    }

    /// A refusal that the device survived, if it is one; a loss is passed on.
    pub(super) fn refusal<T>(&mut self, result: Result<T>) -> Result<Option<Error>> {
        match self.seen(result) {
            Ok(_) => Ok(None),
            Err(error) if error.is_lost() => Err(error),
            Err(error) => Ok(Some(error)),
        }
    }
}
