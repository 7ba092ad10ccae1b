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
use crate::error::{Error, Kind, Result};

impl Engine {
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
