//! The engine's figures as a dict.
//!
//! What it is not: a report of one context; Python's part counts those.
//!
//! Invariant: bytes and counts are ints, times are floats in seconds, and names end in their unit.
//!
//! ```text
//!   Stats { evicted_bytes, stall_time, pinned, .. } -> {"evicted_bytes": 0, "stall_seconds": 0.0}
//! ```
//!
//! The engine's door uses it.

use crate::longest::Took;
use lightering::pinned::{Progress, State};
use lightering::policy::Kept;
use lightering::{Bytes, Stats};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Every figure by its name.
pub(crate) fn dict<'py>(
    py: Python<'py>,
    stats: &Stats,
    (held, quota): (Bytes, Bytes),
    reserving: Option<&Progress>,
    (verb, time): Took,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in [
        ("evicted_bytes", stats.evicted_bytes),
        ("evicted_count", stats.evicted_count),
        ("clean_bytes", stats.clean_bytes),
        ("released_bytes", stats.released_bytes),
        ("refilled_bytes", stats.refilled_bytes),
        ("refilled_count", stats.refilled_count),
        ("forwarded_count", stats.forwarded_count),
        ("hit_count", stats.guesses.hits),
        ("miss_count", stats.guesses.misses),
        ("wrong_guess_count", stats.guesses.wrong),
        ("wasted_bytes", stats.guesses.wasted_bytes),
        ("stall_count", stats.stalls),
        ("prefetch_refused_count", stats.prefetch_refused_count),
        ("leaked_on_purpose_bytes", stats.leaked_on_purpose_bytes),
        ("storage_count", stats.storages),
        ("unreleased_bytes", stats.unreleased_bytes),
        ("prefetched_bytes", stats.prefetched_bytes),
        ("out_in_flight_bytes", stats.out_in_flight_bytes),
        ("in_in_flight_bytes", stats.in_in_flight_bytes),
        ("verified_count", stats.verified_count),
        ("corrupt_count", stats.corrupt_count),
        ("unverified_count", stats.unverified_count),
        ("pinned_engine_bytes", held.0),
        ("pinned_engine_budget_bytes", quota.min(stats.pinned.budget).0),
        ("pinned_bytes", stats.pinned.pinned.0),
        ("pinned_budget_bytes", stats.pinned.budget.0),
        ("pinned_lent_bytes", stats.pinned.lent.0),
        ("pinned_busy_bytes", stats.pinned.busy.0),
        ("pinned_free_bytes", stats.pinned.free.0),
        ("pinned_quarantined_bytes", stats.pinned.quarantined.0),
        ("pinned_growth_count", stats.pinned.counts.growths),
    ] {
        dict.set_item(name, value)?;
    }
    dict.set_item("stall_seconds", stats.stall_time.as_secs_f64())?;
    dict.set_item("longest_verb_seconds", time.as_secs_f64())?;
    dict.set_item("longest_verb", verb)?;
    dict.set_item("pin_seconds", stats.pinned.counts.pin_time.as_secs_f64())?;
    let kept = PyDict::new(py);
    for why in Kept::ALL {
        kept.set_item(why.words(), stats.kept_for(why).bytes)?;
    }
    dict.set_item("kept_bytes", kept)?;
    let progress = PyDict::new(py);
    if let Some(found) = reserving {
        progress.set_item("asked_bytes", found.asked.0)?;
        progress.set_item("ready_bytes", found.ready.0)?;
        progress.set_item("seconds", found.time.as_secs_f64())?;
        progress.set_item("state", words(&found.state))?;
    }
    dict.set_item("reserve", progress)?;
    Ok(dict)
}

fn words(state: &State) -> String {
    match state {
        State::Running => "running".to_string(),
        State::Done => "done".to_string(),
        State::Cancelled => "cancelled".to_string(),
        State::Failed(error) => format!("failed: {error}"),
    }
}
