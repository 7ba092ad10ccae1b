//! More arenas, fewer arenas: the only places where the pool asks the system for memory.
//!
//! What it is not: it is never on a step's way. Pinning takes milliseconds to seconds; once warm,
//! growth is closed, and what does not fit is refused at once.
//!
//! Invariant: pinned bytes never exceed the budget: what somebody is going to pin is promised to it
//! first, and what left the books counts until it is really gone. One thread pins at a time, and
//! nothing is pinned under the pool's lock; who waited for its turn looks again.
//!
//! ```text
//!   turn -> look again -> plan: size <= budget - pinned - promised - leaving
//!     ^                     |     -> pin (no lock) -> seat -> lend
//!     |                     |  too little left, but unused arenas: trim them first
//!     |                     `- refused by the system: half the size, down to what is needed
//!     `- a background reservation has the turn: each of its pieces may be what is waited for
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use super::arena::{Arena, Crew, Pieces};
use super::class::{GRAIN, STEP};
use super::ledger::{Ledger, Loan};
use super::space::Use;
use super::sync::MutexGuard;
use super::{Growth, Inner};
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::Bytes;
use rustix::process::getpid;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// Pages of a new arena about which the kernel is asked where they are.
const PAGES_ASKED_MAX: usize = 1000;

/// The right to pin, and bytes of the budget that nobody else may take meanwhile.
struct Turn<'a> {
    inner: &'a Inner,
    promised: u64,
}

impl Turn<'_> {
    /// Promises `bytes` instead of what was promised until now.
    fn promise(&mut self, ledger: &mut Ledger, bytes: u64) {
        ledger.promised = ledger.promised - self.promised + bytes;
        self.promised = bytes;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut ledger = self.inner.lock();
        ledger.promised -= self.promised;
        ledger.pinning = false;
        drop(ledger);
        self.inner.turned.notify_all();
    }
}

/// Adds an arena with at least `room` bytes and lends out of it.
pub(super) fn lend(
    inner: &Inner,
    room: u64,
    growth: Growth,
    lend: impl Fn(&mut Ledger) -> Option<Loan>,
) -> Result<Loan> {
    not_forked(inner, "grow")?;
    let mut ledger = inner.lock();
    loop {
        ledger.flush();
        if let Some(loan) = lend(&mut ledger) {
            return Ok(loan);
        }
        // What is refused anyway does not wait for somebody else's pinning.
        if ledger.closed || growth == Growth::Closed {
            return Err(over(inner, &ledger, "growth is closed"));
        }
        if !ledger.is_changing() {
            break;
        }
        ledger = wait(inner, ledger);
    }
    let left = left(inner, &ledger);
    if room > left.saturating_add(ledger.unused()) {
        return Err(over(inner, &ledger, ""));
    }
    // Arenas that are unused and yet too small are worth less than one that is large enough.
    let unused = if room > left { ledger.unseat() } else { Vec::new() };
    let mut size = ledger.step.max(room);
    ledger.pinning = true;
    drop(ledger);
    let mut turn = Turn { inner, promised: 0 };
    give_up(inner, unused);
    loop {
        let pinned = pin(&mut turn, room, size)?;
        let mut ledger = inner.lock();
        match pinned {
            Ok(arena) => {
                turn.promise(&mut ledger, 0);
                ledger.counts.growths += 1;
                ledger.counts.late_growths += u64::from(growth == Growth::Late);
                ledger.counts.grown_after_close += u64::from(ledger.closed);
                ledger.step = (ledger.step * 2).min(inner.options.arena_bytes_max.get());
                ledger.seat(&arena, arena.len(), false);
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
    not_forked(inner, "reserve")?;
    let mut ledger = inner.lock();
    while ledger.is_changing() {
        ledger = wait(inner, ledger);
    }
    let missing = missing(inner, &ledger, len)?;
    if missing == 0 {
        return Ok(Bytes::ZERO);
    }
    ledger.pinning = true;
    drop(ledger);
    let mut turn = Turn { inner, promised: 0 };
    let arena = pin(&mut turn, missing, missing)?.map_err(|error| error.bytes(len))?;
    let mut ledger = inner.lock();
    turn.promise(&mut ledger, 0);
    ledger.counts.reserves += 1;
    ledger.seat(&arena, arena.len(), false);
    Ok(Bytes(arena.len()))
}

/// What has to be pinned for `len` bytes to be free.
///
/// # Errors
/// `OverBudget` where the budget has no room for it.
pub(super) fn missing(inner: &Inner, ledger: &Ledger, len: Bytes) -> Result<u64> {
    let idle = ledger.space.bytes(Use::Idle) + ledger.at_hand().idle;
    let free = ledger.space.bytes(Use::Free) + idle;
    let missing = len.get().saturating_sub(free);
    if missing > left(inner, ledger) {
        return Err(over(inner, ledger, "").bytes(len));
    }
    Ok(missing.next_multiple_of(GRAIN))
}

/// A child of fork pins nothing: whoever had the turn is not there to give it up.
pub(super) fn not_forked(inner: &Inner, op: &'static str) -> Result<()> {
    if inner.pid == getpid() { Ok(()) } else { Err(Error::usage(Misuse::Forked, op)) }
}

/// Waits until somebody who pins has got further.
pub(super) fn wait<'a>(inner: &Inner, ledger: MutexGuard<'a, Ledger>) -> MutexGuard<'a, Ledger> {
    inner.turned.wait(ledger).unwrap_or_else(PoisonError::into_inner)
}

/// What the budget still allows.
fn left(inner: &Inner, ledger: &Ledger) -> u64 {
    let taken = ledger.pinned() + ledger.promised + ledger.leaving;
    let taken = taken.saturating_add(inner.leaked.load(Ordering::Relaxed));
    inner.budget.get().saturating_sub(taken) / GRAIN * GRAIN
}

/// How much of `size` bytes an arena gets: whole huge pages, unless somebody wants arenas smaller
/// than one, and no more than the budget allows.
///
/// # Errors
/// `OverBudget` where that is less than `least`, and with as many arenas as may be.
pub(super) fn plan(inner: &Inner, ledger: &Ledger, least: u64, size: u64) -> Result<u64> {
    let left = left(inner, ledger);
    if least > left {
        return Err(over(inner, ledger, ""));
    }
    if ledger.seats.len() >= inner.options.arena_max {
        return Err(over(inner, ledger, "there are as many arenas as may be"));
    }
    let unit = if size < STEP { GRAIN } else { STEP };
    Ok(size.next_multiple_of(unit).min(left))
}

/// Pins between `least` and about `size` bytes. The outer error says that nothing was tried.
fn pin(turn: &mut Turn<'_>, least: u64, size: u64) -> Result<Result<Arc<Arena>>> {
    let inner = turn.inner;
    let size = {
        let mut ledger = inner.lock();
        turn.promise(&mut ledger, 0);
        let size = plan(inner, &ledger, least, size)?;
        turn.promise(&mut ledger, size);
        size
    };
    let start = Instant::now();
    let crew = inner.crew(size, inner.options.touch_threads_max);
    let arena = map(inner, size, &crew).and_then(|arena| {
        arena.fill(&crew, &mut |_| true)?;
        Ok(Arc::new(arena))
    });
    let (told, near) = arena.as_ref().map_or((0, 0), |arena| look(arena, &crew));
    let mut ledger = inner.lock();
    ledger.counts.pin_time += start.elapsed();
    ledger.counts.pages_asked += told;
    ledger.counts.pages_near += near;
    Ok(arena)
}

/// An arena of `size` bytes, none of them page-locked yet.
///
/// # Errors
/// `OutOfMemory` where the machine has less.
pub(super) fn map(inner: &Inner, size: u64, crew: &Crew) -> Result<Arena> {
    roomy(inner, size)?;
    let max = inner.pinner.registration_max().min(inner.options.piece_bytes_max);
    let pieces = Pieces::new(inner.options.piece_bytes, max)?;
    Arena::map(&inner.pinner, Bytes(size), pieces, crew, &inner.leaked, inner.me.clone())
}

/// Asks the kernel where an arena's pages are: how many it told about, and how many are near.
pub(super) fn look(arena: &Arena, crew: &Crew) -> (u64, u64) {
    crew.node.as_ref().map_or((0, 0), |node| arena.pages_on(node.number, PAGES_ASKED_MAX))
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

/// `why` is empty where the budget has no room: the error's kind says that already.
pub(super) fn over(inner: &Inner, ledger: &Ledger, why: &str) -> Error {
    let stats = inner.stats(ledger);
    let largest = Bytes(ledger.space.largest_free());
    let colon = if why.is_empty() { "" } else { ": " };
    let detail = format!("{why}{colon}{stats}, largest free range {largest}");
    Error::new(Kind::OverBudget, "grow").detail(detail)
}

/// Gives the arenas back of which nothing is in use.
pub(super) fn trim(inner: &Inner) -> Bytes {
    let (unused, spare) = {
        let mut ledger = inner.lock();
        (ledger.unseat(), std::mem::take(&mut ledger.spare))
    };
    let spare: u64 = spare.iter().map(|arena| arena.len()).sum();
    give_up(inner, unused) + Bytes(spare)
}

/// Unpins and unmaps arenas that have left the books. Until they are gone they count.
fn give_up(inner: &Inner, arenas: Vec<Arc<Arena>>) -> Bytes {
    let bytes: u64 = arenas.iter().map(|arena| arena.len()).sum();
    // A client may still know an arena of a block that others took from it.
    arenas.iter().for_each(|arena| arena.end());
    inner.lock().leaving -= bytes;
    inner.turned.notify_all();
    Bytes(bytes)
}
