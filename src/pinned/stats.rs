//! What the pool holds, and what it has done: counts kept on the way, read in one go.
//!
//! What it is not: a profiler. No clock is read on the way of a block out or in.
//!
//! Invariant: `lent + free + busy + quarantined == pinned + pageable`, at every moment.
//!
//! ```text
//!   pinned |==== lent ====|=== free ===|= busy =|= quarantined =|         budget
//!          |== requested =|waste|      |<- comes back by settle  `- comes back by reclaim
//! ```
//!
//! Everyone may read it; only the pool makes one.

use crate::unit::{Bytes, Name};
use std::fmt;
use std::time::Duration;

/// Counters of a pool's whole life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks lent out of the idle ones of exactly the size.
    pub lends_repeated: u64,
    /// Blocks lent while their last copy may run: the borrower waits on its device.
    pub lends_behind: u64,
    /// Blocks lent by splitting a free range.
    pub lends_split: u64,
    /// Requests that found idle blocks and none of their size, upon which all of them were merged.
    pub drifts: u64,
    /// Blocks lent that are not page-locked.
    pub lends_pageable: u64,
    /// Requests refused for want of room, quota or numbers.
    pub lends_refused: u64,
    /// Questions put to fences in `lend`.
    pub fence_calls: u64,
    /// Arenas added by `lend`.
    pub growths: u64,
    /// Of these, added though the client was warm: [`Growth::Late`](super::Growth::Late).
    pub late_growths: u64,
    /// Of these, added while growth was closed; stays 0.
    pub grown_after_close: u64,
    /// Arenas added by `reserve`.
    pub reserves: u64,
    /// Arenas begun by background reservations that are over.
    pub background_reserves: u64,
    /// Arenas given back to the system.
    pub trims: u64,
    /// Wall time that callers spent in mapping, touching and page-locking.
    pub pin_time: Duration,
    /// Wall time of background reservations that are over.
    pub background_pin_time: Duration,
    /// Pages of new arenas about which the kernel said on which node they lie.
    pub pages_asked: u64,
    /// Of these, on the device's node.
    pub pages_near: u64,
}

/// A pool at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// The most that may be page-locked.
    pub budget: Bytes,
    /// Page-locked now.
    pub pinned: Bytes,
    /// What a background reservation is still going to page-lock.
    pub reserving: Bytes,
    /// The node whose memory is taken; `None` where all memory is as near, or nobody can say.
    pub node: Option<u32>,
    /// Lent, busy or quarantined, and not page-locked: copies of it make the host wait.
    pub pageable: Bytes,
    /// With borrowers, in rounded sizes.
    pub lent: Bytes,
    /// Neither lent nor busy nor quarantined.
    pub free: Bytes,
    /// Given back while a copy may still run.
    pub busy: Bytes,
    /// Dropped while a copy may still run.
    pub quarantined: Bytes,
    /// What the borrowers asked for; `lent - requested` is waste.
    pub requested: Bytes,
    /// Mappings.
    pub arenas: usize,
    /// Blocks that are lent, busy or quarantined.
    pub blocks: usize,
    /// No longer in the pool and yet page-locked for good: the driver refused to let it go.
    pub leaked_on_purpose: Bytes,
    /// What happened so far.
    pub counts: Counts,
}

/// A lent block in a [`Report`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentRow {
    /// The borrower's name for it.
    pub name: Name,
    /// Length asked for.
    pub requested: Bytes,
    /// Room it has.
    pub lent: Bytes,
}

/// A pool at one moment, with its largest lent blocks. Takes a walk over all blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The figures.
    pub stats: Stats,
    /// The longest range a new block could get without growth or waiting.
    pub largest_free: Bytes,
    /// The largest lent blocks, largest first.
    pub rows: Vec<LentRow>,
}

impl Stats {
    /// Bytes lent beyond what was asked for.
    pub fn waste(&self) -> Bytes {
        self.lent.saturating_sub(self.requested)
    }

    /// What slows the job down, in a sentence, if anything does.
    pub fn warning(&self) -> Option<String> {
        (!self.pageable.is_zero()).then(|| {
            format!(
                "{} of host memory are not page-locked, and the host waits in every copy of them: \
                 raise the pinned budget of {}",
                self.pageable, self.budget
            )
        })
    }
}

/// How long page-locking took; a short time is not said to be none.
struct Took(Duration);

impl fmt::Display for Took {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Duration::ZERO => f.write_str("no time"),
            time if time < Duration::from_millis(1) => f.write_str("under 1 ms"),
            time => write!(f, "{:.3} s", time.as_secs_f64()),
        }
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "pinned {} of {} in {} {} ({}): lent {} (asked {}), free {}, busy {}, \
             quarantined {}",
            self.pinned,
            self.budget,
            self.arenas,
            if self.arenas == 1 { "arena" } else { "arenas" },
            Took(self.counts.pin_time),
            self.lent,
            self.requested,
            self.free,
            self.busy,
            self.quarantined
        )?;
        match self.warning() {
            Some(warning) => write!(f, "; {warning}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, largest free range {}", self.stats, self.largest_free)?;
        for row in &self.rows {
            write!(f, "\n  {:>12}  {}", row.lent.to_string(), row.name)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_arena_is_one_and_a_short_time_is_not_none() {
        let told = |arenas, micros| {
            let counts = Counts { pin_time: Duration::from_micros(micros), ..Counts::default() };
            Stats { arenas, counts, ..Stats::default() }.to_string()
        };
        assert!(told(0, 0).contains("in 0 arenas (no time)"), "{}", told(0, 0));
        assert!(told(1, 20).contains("in 1 arena (under 1 ms)"), "{}", told(1, 20));
        assert!(told(2, 31_000).contains("in 2 arenas (0.031 s)"), "{}", told(2, 31_000));
    }
}
