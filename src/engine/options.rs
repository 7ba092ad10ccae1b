//! Every bound of an engine, in one plain struct.
//!
//! What it is not: a place for behaviour. The floors below take their part of it.
//!
//! Invariant: nothing in the engine grows without a bound that stands here.
//!
//! ```text
//!   Options { unreleased, prefetch, trunk, transfers, events, storages, streams, policy, ... }
//! ```
//!
//! Users fill it in; the engine reads it.

use crate::copy::LaneLimits;
use crate::error::{Error, Misuse, Result};
use crate::handles::HandleLimits;
use crate::pinned::Growth;
use crate::policy::PolicyLimits;
use crate::prefetch::PrefetchLimits;
use crate::storage::{Inward, StreamSet};
use crate::unit::Bytes;
use std::time::Duration;

/// Bounds and choices of an engine. Start from [`Options::default`].
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Device bytes that were evicted and are not given back yet: below it nothing waits for a
    /// copy-out, above it the caller's stream waits for the oldest one, on the device. Bytes whose
    /// address stays do not count: no wait of a stream would let them go.
    pub unreleased_bytes_max: Bytes,
    /// Device bytes fetched ahead that no reader asked for yet.
    pub prefetch_bytes_max: Bytes,
    /// Storages fetched ahead that no reader asked for yet; 2 is double buffering, 0 is none.
    pub prefetch_count_max: usize,
    /// The last so many storages offered stay on the device.
    pub keep_last_count: usize,
    /// Storages offered with fewer bytes stay on the device.
    pub storage_bytes_min: Bytes,
    /// A copy is enqueued in pieces of at most so many bytes. Where nothing may come between them
    /// (on its way out, and for a reader that waits) cutting it only costs: each piece has a start.
    pub trunk_bytes_max: Bytes,
    /// As `trunk_bytes_max`, of copies ahead. These give way: an urgent copy, of this engine or of
    /// anybody else, waits for at most two such pieces. While copies leave they do so once a reader
    /// came that found others in front of it, for two passes; until then they keep the copies out
    /// at their full rate instead (docs/performance.md).
    pub ahead_trunk_bytes_max: Bytes,
    /// Copies under way in one direction. Behind more than a driver's queue holds whoever enqueues
    /// waits, on the host, until the device has taken some: an H200's held 768, and not 1,024
    /// (docs/performance.md), of copies without sums (`verify`) and without times (`spans_max`),
    /// which are more entries in that queue each: with those, half as many are safe. What finds no
    /// place stays on the device, as `LaneFull`.
    pub transfers_max: usize,
    /// Bytes whose address stays are mapped in pieces of at most so many: each costs the driver's
    /// calls once more, but a piece serves every storage that needs one of its length.
    pub memory_bytes_max: Bytes,
    /// Pieces with fewer bytes go back to the device when they are unmapped. Larger ones, whose
    /// making costs more, are kept.
    pub memory_pooled_bytes_min: Bytes,
    /// So many pieces are kept at most, while nothing is mapped with them; at least 2, as the bytes
    /// of one storage come in while those of another go out. Where room is short they go first.
    pub memory_idle_max: usize,
    /// How long a reader of bytes at a fixed address waits, on the host, for memory that others are
    /// about to give back, before `OutOfMemory` is returned.
    pub memory_wait_max: Duration,
    /// Pinned bytes this engine may hold, within the pool's budget.
    pub pinned_quota_max: Bytes,
    /// Whether evictions may grow the pool. `Allowed` is until the first step is over, so that a
    /// job that reserved nothing gets its memory in that step, and no later one waits for pinning;
    /// `Late` is always, and what comes after the first step is counted apart; `Closed` is never.
    pub pinned_growth: Growth,
    /// Events of the driver this engine may hold, besides those that take times; at least 8. Each
    /// copy under way holds one; so does each stream that is not known past the moment which bytes
    /// wait for, where these go only once all streams are (a framework's with several streams, and
    /// those at fixed addresses): at most one a stream for each stream evicted on, and one a stream
    /// for fixed addresses. What is done is asked about before anything is refused. Where the
    /// device is past none of it, evictions that copy are `Kept(LaneFull)`, other copies `Busy`,
    /// and bytes are named and unmapped later; no verb besides is refused for it.
    pub events_max: usize,
    /// Storages alive at once.
    pub storages_max: usize,
    /// Streams of others it serves; at most 64. One more is refused with `Usage(BadValue)`.
    pub streams_max: usize,
    /// Evictions of one pass whose order can be learned.
    pub pass_len_max: usize,
    /// Copies and blocks asked about in one `step`.
    pub step_queries_max: usize,
    /// How often room is made and an allocation tried again before `OutOfMemory` is returned.
    pub oom_retries_max: u32,
    /// Records kept for diagnosis.
    pub ring_records: usize,
    /// How long a dropped engine waits for copies in flight before it leaks what they need; and a
    /// verb for one copy, where the driver refuses to order a stream behind it and to wait for the
    /// device.
    pub drop_deadline: Duration,
    /// Note for the trace that who evicts wrote the bytes on that stream, and who acquires reads
    /// them there. Off for a framework that notes its own uses, which knows better.
    pub note_uses: bool,
    /// Compare what comes back with what left: each copy of a storage is summed up by a kernel on
    /// its lane, and the sums are compared by [`Engine::step`](super::Engine::step); so are the
    /// bytes of an eviction without a copy, which finds those written by who acquired them to read.
    /// Batches are not compared: each [`Engine::gather`](super::Engine::gather) and each
    /// [`Engine::scatter`](super::Engine::scatter) is counted in `Stats::unverified_count`. Costs
    /// reading the bytes once more on the device, and eight bytes of copy each. The sums that
    /// arrive on the host lie in pinned bytes of the same budget. Copies ahead do not give way to
    /// others then: their sums are made in the order of one stream. A device that cannot load the
    /// kernels is refused by [`Engine::new`](super::Engine::new).
    pub verify: bool,
    /// With `verify`: copies of one lane whose sums were not read yet. More are not compared, and
    /// counted. Each takes eight bytes on the device and eight pinned ones for every lane.
    pub verify_slots_max: usize,
    /// Batches of rows of at most this many bytes each, on average, are moved by a kernel, larger
    /// ones by a copy for each row: a copy engine takes some microseconds to start. Where the
    /// device takes many copies at once, they have less than `batch_row_bytes_min`, too.
    pub pack_row_bytes_max: Bytes,
    /// Blocks of 256 threads that such a kernel may have, and so the multiprocessors it may take
    /// from compute; 0: none is launched, and each row is copied.
    pub pack_blocks_max: u32,
    /// Rows of at least this many bytes each, on average, are left to the driver's call for many
    /// copies at once, where it has one: a kernel queues behind compute, and copies do not. Each
    /// row costs the host 0.4 microseconds there, so smaller ones would be no faster than it is.
    pub batch_row_bytes_min: Bytes,
    /// Rows that no kernel moves go to the driver as one batch, where it has a call for that and
    /// they have at most this many bytes each, on average; zero: each by a call of its own.
    pub batch_row_bytes_max: Bytes,
    /// Name the verbs' time on the host, and the spans that a framework names, to a profiler that
    /// listens through NVTX. [`Engine::listening`](super::Engine::listening) says whether one does.
    pub nvtx: bool,
    /// Measure with timed events how long readers' streams waited for copy-ins.
    pub time_stalls: bool,
    /// Measure with timed events when copies, and spans that a framework names, ran; so many are
    /// kept. Times start at a moment that [`Engine::new`](super::Engine::new) marks, or is refused
    /// with. 0: nothing is measured.
    pub spans_max: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            unreleased_bytes_max: Bytes::mib(512),
            prefetch_bytes_max: Bytes::mib(512),
            prefetch_count_max: 2,
            keep_last_count: 1,
            storage_bytes_min: Bytes::kib(1),
            trunk_bytes_max: Bytes::MAX,
            ahead_trunk_bytes_max: Bytes::mib(32),
            transfers_max: 512,
            memory_bytes_max: Bytes::gib(1),
            memory_pooled_bytes_min: Bytes::mib(64),
            memory_idle_max: 2,
            memory_wait_max: Duration::from_secs(1),
            pinned_quota_max: Bytes::MAX,
            pinned_growth: Growth::Allowed,
            events_max: 8192,
            storages_max: 1 << 20,
            streams_max: 16,
            pass_len_max: 1 << 16,
            step_queries_max: 64,
            oom_retries_max: 2,
            ring_records: 1024,
            drop_deadline: Duration::from_secs(10),
            note_uses: true,
            verify: false,
            verify_slots_max: 1024,
            pack_row_bytes_max: Bytes::mib(2),
            pack_blocks_max: 64,
            batch_row_bytes_min: Bytes::kib(64),
            batch_row_bytes_max: Bytes::mib(1),
            nvtx: false,
            time_stalls: false,
            spans_max: 0,
        }
    }
}

impl Options {
    /// Refuses values that no engine can work with.
    ///
    /// # Errors
    /// `Usage(BadValue)` naming the field.
    pub fn check(&self) -> Result<()> {
        let bad = |detail| Err(Error::usage(Misuse::BadValue, "options").detail(detail));
        if self.trunk_bytes_max.is_zero() {
            return bad("trunk_bytes_max is zero");
        }
        if self.ahead_trunk_bytes_max.is_zero() {
            return bad("ahead_trunk_bytes_max is zero");
        }
        if self.transfers_max == 0 {
            return bad("transfers_max is zero");
        }
        if self.memory_bytes_max.is_zero() {
            return bad("memory_bytes_max is zero");
        }
        if self.memory_idle_max < 2 {
            return bad("memory_idle_max is under 2");
        }
        if self.events_max < 8 {
            return bad("events_max is under 8");
        }
        if self.storages_max == 0 || self.storages_max > u32::MAX as usize {
            return bad("storages_max is zero or over 32 bits");
        }
        if self.streams_max == 0 || self.streams_max > StreamSet::STREAMS_MAX {
            return bad("streams_max is zero or over 64");
        }
        if self.pass_len_max < 2 || self.pass_len_max > u32::MAX as usize {
            return bad("pass_len_max is under 2 or over 32 bits");
        }
        if self.step_queries_max == 0 {
            return bad("step_queries_max is zero");
        }
        if self.ring_records > 1 << 24 {
            return bad("ring_records is over 2^24");
        }
        if self.spans_max > 1 << 24 {
            return bad("spans_max is over 2^24");
        }
        if self.verify_slots_max == 0 || self.verify_slots_max > 1 << 20 {
            return bad("verify_slots_max is zero or over 2^20");
        }
        Ok(())
    }

    /// What becomes of `pinned_growth` once the first step is over.
    pub(super) fn growth_when_warm(&self) -> Growth {
        match self.pinned_growth {
            Growth::Allowed => Growth::Closed,
            other => other,
        }
    }

    pub(super) fn lane(&self) -> LaneLimits {
        LaneLimits {
            trunk_bytes_max: self.trunk_bytes_max,
            turn_bytes_max: self.trunk_bytes_max,
            flights_max: self.transfers_max,
        }
    }

    pub(super) fn lane_in(&self, inward: Inward) -> LaneLimits {
        match inward {
            Inward::Ahead => {
                let trunk_bytes_max = self.trunk_bytes_max.min(self.ahead_trunk_bytes_max);
                LaneLimits { trunk_bytes_max, turn_bytes_max: trunk_bytes_max, ..self.lane() }
            }
            Inward::Urgent => self.lane(),
        }
    }

    pub(super) fn handles(&self) -> HandleLimits {
        HandleLimits {
            bytes_max: self.memory_bytes_max,
            pooled_bytes_min: self.memory_pooled_bytes_min,
            idle_max: self.memory_idle_max,
        }
    }

    pub(super) fn policy(&self) -> PolicyLimits {
        PolicyLimits {
            keep_last_count: self.keep_last_count,
            storage_bytes_min: self.storage_bytes_min,
        }
    }

    pub(super) fn prefetch(&self) -> PrefetchLimits {
        PrefetchLimits {
            bytes_max: self.prefetch_bytes_max,
            count_max: self.prefetch_count_max,
            pass_len_max: self.pass_len_max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_allowed_and_a_bound_of_zero_is_named() {
        assert!(Options::default().check().is_ok());
        for (options, field) in [
            (Options { trunk_bytes_max: Bytes::ZERO, ..Options::default() }, "trunk_bytes_max"),
            (
                Options { ahead_trunk_bytes_max: Bytes::ZERO, ..Options::default() },
                "ahead_trunk_bytes_max",
            ),
            (Options { transfers_max: 0, ..Options::default() }, "transfers_max"),
            (Options { memory_bytes_max: Bytes::ZERO, ..Options::default() }, "memory_bytes_max"),
            (Options { memory_idle_max: 1, ..Options::default() }, "memory_idle_max"),
            (Options { events_max: 7, ..Options::default() }, "events_max"),
            (Options { storages_max: 0, ..Options::default() }, "storages_max"),
            (Options { streams_max: 65, ..Options::default() }, "streams_max"),
            (Options { pass_len_max: 1, ..Options::default() }, "pass_len_max"),
            (Options { step_queries_max: 0, ..Options::default() }, "step_queries_max"),
            (Options { ring_records: usize::MAX, ..Options::default() }, "ring_records"),
            (Options { spans_max: usize::MAX, ..Options::default() }, "spans_max"),
            (Options { verify_slots_max: 0, ..Options::default() }, "verify_slots_max"),
        ] {
            let error = options.check().unwrap_err();
            assert_eq!(error.misuse(), Some(Misuse::BadValue));
            assert!(error.to_string().contains(field), "{error}");
        }
    }
}
