//! More arenas, fewer arenas: the only places where the pool asks the system for memory.
//!
//! What it is not: it is never on a step's way. Pinning takes milliseconds to seconds; once warm,
//! growth is closed, and what does not fit is refused at once.
//!
//! Invariant: pinned bytes never exceed the budget: one thread pins at a time, and only within what
//! is left of it. Nothing is pinned under the pool's lock; who waited for its turn looks again first.
//!
//! ```text
//!   turn -> look again -> plan: size <= budget - pinned -> pin (no lock) -> seat -> lend
//!                           |  too little left, but unused arenas: trim them first
//!                           `- refused by the system: half the size, down to what is needed
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use super::arena::Arena;
use super::class::{GRAIN, STEP};
use super::ledger::{Ledger, Loan};
use super::space::Use;
use super::{Inner, PoolOptions};
use crate::error::{Error, Kind, Result};
use crate::unit::Bytes;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// Adds an arena with at least `room` bytes and lends out of it.
pub(super) fn lend(
    inner: &Inner,
    room: u64,
    lend: impl Fn(&mut Ledger) -> Option<Loan>,
) -> Result<Loan> {
    let _turn = inner.growing.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut size, unused) = {
        let mut ledger = inner.lock();
        ledger.flush();
        if let Some(loan) = lend(&mut ledger) {
            return Ok(loan);
        }
        if ledger.closed {
            return Err(over(inner, &ledger, "growth is closed"));
        }
        let unused = ledger.unused();
        let left = left(inner, &ledger);
        if room > left.saturating_add(unused) {
            return Err(over(inner, &ledger, "the budget has no room"));
        }
        // Arenas that are unused and yet too small are worth less than one that is large enough.
        let unused = if room > left { ledger.unseat() } else { Vec::new() };
        (ledger.step.max(room), unused)
    };
    drop(unused);
    loop {
        let pinned = pin(inner, room, size)?;
        let mut ledger = inner.lock();
        match pinned {
            Ok(arena) => {
                ledger.counts.growths += 1;
                ledger.counts.grown_after_close += u64::from(ledger.closed);
                ledger.step = (ledger.step * 2).min(inner.options.arena_bytes_max.get());
                ledger.seat(arena);
                return lend(&mut ledger).ok_or_else(|| over(inner, &ledger, "taken meanwhile"));
            }
            Err(error) if error.kind() == Kind::OutOfMemory && size > room => {
                size = (size / 2).max(room);
                ledger.step = inner.options.arena_bytes.get();
            }
            Err(error) => return Err(error),
        }
    }
}

/// Pins one arena so that `len` bytes are free; says how many were pinned for it.
pub(super) fn reserve(inner: &Inner, len: Bytes) -> Result<Bytes> {
    let _turn = inner.growing.lock().unwrap_or_else(PoisonError::into_inner);
    let missing = {
        let ledger = inner.lock();
        let free = ledger.space.bytes(Use::Free) + ledger.space.bytes(Use::Idle);
        let missing = len.get().saturating_sub(free);
        if missing == 0 {
            return Ok(Bytes::ZERO);
        }
        if missing > left(inner, &ledger) {
            return Err(over(inner, &ledger, "the budget has no room").bytes(len));
        }
        missing.next_multiple_of(GRAIN)
    };
    let arena = pin(inner, missing, missing)?.map_err(|error| error.bytes(len))?;
    let size = arena.len();
    let mut ledger = inner.lock();
    ledger.counts.reserves += 1;
    ledger.seat(arena);
    Ok(Bytes(size))
}

/// What the budget still allows.
fn left(inner: &Inner, ledger: &Ledger) -> u64 {
    let taken = ledger.space.total() + inner.leaked.load(Ordering::Relaxed);
    inner.budget.get().saturating_sub(taken) / GRAIN * GRAIN
}

/// Pins between `least` and about `size` bytes. The outer error says that nothing was tried.
fn pin(inner: &Inner, least: u64, size: u64) -> Result<Result<Arena>> {
    let size = {
        let ledger = inner.lock();
        let left = left(inner, &ledger);
        if least > left {
            return Err(over(inner, &ledger, "the budget has no room"));
        }
        if ledger.seats.len() >= inner.options.arena_max {
            return Err(over(inner, &ledger, "there are as many arenas as may be"));
        }
        size.next_multiple_of(STEP).min(left)
    };
    let start = Instant::now();
    let arena = roomy(inner, size).and_then(|()| {
        let PoolOptions { piece_bytes_max, touch_threads_max, .. } = inner.options;
        let size = Bytes(size);
        Arena::new(&inner.pinner, size, piece_bytes_max, touch_threads_max, &inner.leaked)
    });
    inner.lock().counts.pin_time += start.elapsed();
    Ok(arena)
}

/// Touching more memory than there is would end the process, not the call: so ask first.
fn roomy(inner: &Inner, size: u64) -> Result<()> {
    match inner.machine.left() {
        Some(left) if left < size => {
            let detail = format!("an arena of {} where the host has {}", Bytes(size), Bytes(left));
            Err(Error::new(Kind::OutOfMemory, "pin").detail(detail))
        }
        _ => Ok(()),
    }
}

fn over(inner: &Inner, ledger: &Ledger, why: &str) -> Error {
    let stats = inner.stats(ledger);
    let largest = Bytes(ledger.space.largest_free());
    let detail = format!("{why}: {stats}, largest free range {largest}");
    Error::new(Kind::OverBudget, "lend").detail(detail)
}

/// Gives the arenas back of which nothing is in use.
pub(super) fn trim(inner: &Inner) -> Bytes {
    // Nobody pins before these are unpinned: the budget holds for what is really page-locked.
    let _turn = inner.growing.lock().unwrap_or_else(PoisonError::into_inner);
    let arenas: Vec<Arc<Arena>> = inner.lock().unseat();
    Bytes(arenas.iter().map(|arena| arena.len()).sum())
}
