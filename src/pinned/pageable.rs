//! Memory that is not page-locked, for what the budget has no room for: only where options allow.
//!
//! What it is not: pinned memory by another way. In copies of it the host waits, so it is the last
//! resort of a lend, bounded, counted and warned about.
//!
//! Invariant: no more than `pageable_bytes_max` of it is mapped, spare memory included. Each block
//! has a mapping of its own, which leaves the books with it.
//!
//! ```text
//!   lend: refused by the budget -> spare of that size? -- yes: in the books, lent
//!                                  no: map, tell the device, in the books, lent
//!   idle: out of the books, spare                        trim, or want of room: unmapped
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use super::ledger::{Ledger, Loan};
use super::{Inner, grow};
use crate::error::Result;
use std::mem;
use std::sync::Arc;

/// Lends such memory; `None` where there may be no more.
///
/// # Errors
/// `Usage(BadValue)` where the device copies page-locked memory alone, `OutOfMemory` where the
/// system maps no more.
pub(super) fn lend(
    inner: &Inner,
    room: u64,
    enter: impl Fn(&mut Ledger, u32) -> Loan,
) -> Result<Option<Loan>> {
    let max = inner.options.pageable_bytes_max.get();
    if room > max {
        return Ok(None);
    }
    let lend = |ledger: &mut Ledger, arena: &Arc<_>| {
        let key = ledger.seat(arena, room, false);
        let first = ledger.seats[key].first;
        ledger.space.take_whole(first);
        ledger.counts.lends_pageable += 1;
        enter(ledger, first)
    };
    let mut ledger = inner.lock();
    if ledger.blocks >= ledger.block_max || ledger.seats.len() >= inner.options.arena_max {
        return Ok(None);
    }
    if let Some(at) = ledger.spare.iter().position(|arena| arena.len() == room) {
        let arena = ledger.spare.swap_remove(at);
        return Ok(Some(lend(&mut ledger, &arena)));
    }
    let used = ledger.pageable + ledger.pageable_coming;
    if room > max.saturating_sub(used) {
        return Ok(None);
    }
    let spare: u64 = ledger.spare.iter().map(|arena| arena.len()).sum();
    let gone = if room > max - used - spare { mem::take(&mut ledger.spare) } else { Vec::new() };
    ledger.pageable_coming += room;
    drop(ledger);
    drop(gone);
    let mut crew = inner.crew(room, 0);
    // Its pages come when they are written to; none are set aside for it.
    (crew.backed, crew.reserved) = (false, false);
    let made = grow::map(inner, room, &crew).and_then(|arena| {
        let arena = arena.pageable();
        arena.fill(&crew, &mut |_| true)?;
        Ok(Arc::new(arena))
    });
    let mut ledger = inner.lock();
    ledger.pageable_coming -= room;
    Ok(Some(lend(&mut ledger, &made?)))
}
