//! What an engine did, in numbers.
//!
//! What it is not: timings of single copies (`Engine::spans` has those), or a log.
//!
//! Invariant: plain data, taken at one moment; counts only grow, sizes are those of the moment.
//!
//! ```text
//!   Stats { moved, released, kept[why], guesses, stalls, pinned, seam: Counters }
//! ```
//!
//! Everyone may read it.

use crate::pinned;
use crate::policy::Kept;
use crate::prefetch::Guesses;
use crate::trace::Counters;
use crate::unit::Bytes;
use std::time::Duration;

/// Storages that stayed on the device for one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptCount {
    /// How many.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What the engine did since its start, and what it holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of storages whose eviction was begun.
    pub evicted_bytes: u64,
    /// Storages whose eviction was begun.
    pub evicted_count: u64,
    /// Bytes of evictions that needed no copy, since the host copy was current.
    pub clean_bytes: u64,
    /// Device bytes given back (or named to their owner) after an eviction.
    pub released_bytes: u64,
    /// Bytes copied back for readers and ahead of them.
    pub refilled_bytes: u64,
    /// Storages copied back.
    pub refilled_count: u64,
    /// Evictions taken back since a reader came while the bytes were still on the device.
    pub forwarded_count: u64,
    /// Storages that stayed, by reason; in the order of [`Kept::ALL`].
    pub kept: [KeptCount; Kept::ALL.len()],
    /// Readers served ahead and on demand, wrong guesses, bytes fetched for nothing.
    pub guesses: Guesses,
    /// Readers whose stream was made to wait for a copy-in that was begun only when they came.
    pub stalls: u64,
    /// Times the host waited for memory to map, so that bytes could come to their fixed address.
    pub memory_stalls: u64,
    /// Host time of that.
    pub memory_stall_time: Duration,
    /// Device time that readers' streams waited for copy-ins; only with `Options::time_stalls`.
    pub stall_time: Duration,
    /// With `Options::spans_max`: device time of copies out, from when each could begin; those
    /// of one direction share the link, so their times may overlap.
    pub out_time: Duration,
    /// Their bytes.
    pub out_timed_bytes: u64,
    /// The same of copies in.
    pub in_time: Duration,
    /// Their bytes.
    pub in_timed_bytes: u64,
    /// With `Options::spans_max`: copies and spans that are not timed, since they found no event or
    /// the driver did not tell their times.
    pub untimed_count: u64,
    /// Prefetches not begun since the device had no room.
    pub prefetch_refused_count: u64,
    /// Times room was made on the device for a reader.
    pub made_room_count: u64,
    /// With `verify`: copies back whose bytes were compared and are those that left.
    pub verified_count: u64,
    /// With `verify`: copies back whose bytes are not those that left, and evictions without a copy
    /// of bytes that a reader had written.
    pub corrupt_count: u64,
    /// With `verify`: copies back that are not compared, since there was no slot for them or for
    /// the copy out; and each gather and each scatter of a batch, none of which is.
    pub unverified_count: u64,
    /// With `verify`: evictions without a copy that are not compared, for the same want.
    pub clean_unverified_count: u64,
    /// Bytes leaked on purpose, because the device was lost or a deadline passed.
    pub leaked_on_purpose_bytes: u64,
    /// Now: storages alive.
    pub storages: u64,
    /// Now: device bytes evicted and not given back yet.
    pub unreleased_bytes: u64,
    /// Now: device memory that is mapped at fixed addresses.
    pub mapped_bytes: u64,
    /// Now: device memory that is kept to be mapped, or that the device refused to take back.
    pub idle_memory_bytes: u64,
    /// Now: device bytes fetched ahead that no reader asked for.
    pub prefetched_bytes: u64,
    /// Now: bytes on their way out.
    pub out_in_flight_bytes: u64,
    /// Now: bytes on their way in.
    pub in_in_flight_bytes: u64,
    /// What passed the driver seam.
    pub seam: Counters,
    /// The pinned pool, which other engines may share: pinned, lent, busy, free, waste, pin time.
    pub pinned: pinned::Stats,
}

impl Stats {
    /// What stayed for this reason.
    pub fn kept_for(&self, why: Kept) -> KeptCount {
        self.kept[why as usize]
    }

    pub(super) fn keep(&mut self, why: Kept, len: Bytes) {
        let kept = &mut self.kept[why as usize];
        kept.count += 1;
        // The same bytes may be kept any number of times.
        kept.bytes = kept.bytes.saturating_add(len.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_place_of_its_own() {
        let mut stats = Stats::default();
        for (n, why) in Kept::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, n);
            stats.keep(why, Bytes(n as u64));
            assert_eq!(stats.kept_for(why), KeptCount { count: 1, bytes: n as u64 });
        }
    }
}
