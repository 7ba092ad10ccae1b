//! The checker of order, over what an engine of a bench does.
//!
//! What it is not: part of what is measured. A bench that is watched measures nothing of use.
//!
//! Invariant: every record of a watched engine is looked at, and a hazard ends the run.
//!
//! ```text
//!   engine --records--> Checker --verdict--> "N records, no hazard", or an error with all of them
//! ```
//!
//! The benches of the engine take it in, and the example that is one.

use lightering::hazard::Checker;
use lightering::{Engine, Error, Kind, Result};
use std::sync::{Arc, Mutex, PoisonError};

/// Watches one engine, or nobody.
pub(crate) struct Watch(Option<Arc<Mutex<(Checker, u64)>>>);

impl Watch {
    pub(crate) fn over(engine: &mut Engine, is_wanted: bool) -> Watch {
        if !is_wanted {
            return Watch(None);
        }
        let seen = Arc::new(Mutex::new((Checker::new(), 0)));
        let looks = seen.clone();
        engine.observe(Some(Box::new(move |record| {
            let (checker, count) = &mut *looks.lock().unwrap_or_else(PoisonError::into_inner);
            checker.push(record);
            *count += 1;
        })));
        Watch(Some(seen))
    }

    /// Does anybody look?
    #[allow(dead_code, reason = "not every program tells the checker of its kernels")]
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// To be asked when the engine is shut down. Returns how many records there were.
    pub(crate) fn verdict(&self) -> Result<u64> {
        let Some(seen) = &self.0 else { return Ok(0) };
        let (checker, count) = &mut *seen.lock().unwrap_or_else(PoisonError::into_inner);
        checker.finish();
        if *count == 0 {
            return Err(Error::new(Kind::Io, "watch").detail("the engine made no record"));
        }
        let said: Vec<String> = checker.hazards().iter().map(ToString::to_string).collect();
        match said.is_empty() {
            true => Ok(*count),
            false => Err(Error::new(Kind::Corrupt, "watch").detail(said.join("\n"))),
        }
    }
}
