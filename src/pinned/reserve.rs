//! A reservation in the background: page-locked by a thread of its own while training runs.
//!
//! What it is not: it is not all or nothing. Each piece can be lent as soon as it is registered; a
//! reservation that fails or is cancelled half way leaves what it has in the pool.
//!
//! Invariant: all of it is promised from the budget before the call returns, so that it cannot fail
//! for want of that. One runs at a time. It ends by itself when the pool goes.
//!
//! ```text
//!   reserve_in_background(32 GiB) -> Reservation       progress: asked, ready, time; cancel; wait
//!     thread:  |== 64 MiB ==|== 128 MiB ==| ...        lends, clients, steps go on meanwhile
//!                           `-> seat, extend: lent from here on
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use super::arena::Arena;
use super::reservation::{Job, Reservation, State};
use super::sync::thread;
use super::{Inner, grow};
use crate::error::{Error, Kind, Result};
use crate::unit::Bytes;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// Starts a thread that pins what is missing for `len` bytes to be free.
pub(super) fn start(inner: &Arc<Inner>, len: Bytes) -> Result<Reservation> {
    const OP: &str = "reserve";
    grow::not_forked(inner, OP)?;
    let mut ledger = inner.lock();
    if let Some(job) = &ledger.job {
        let detail = format!("another reservation still pins {}", job.missing());
        return Err(Error::new(Kind::Busy, OP).bytes(len).detail(detail));
    }
    let missing = grow::missing(inner, &ledger, len)?;
    let size = match missing {
        0 => 0,
        missing => grow::plan(inner, &ledger, missing, missing)?,
    };
    let job = Arc::new(Job::new(size, Arc::downgrade(inner)));
    if size == 0 {
        job.end(State::Done);
        return Ok(Reservation { job });
    }
    ledger.job = Some(Arc::clone(&job));
    ledger.promised += size;
    drop(ledger);
    let pool = Arc::downgrade(inner);
    let end = End { pool, job: Arc::clone(&job), promised: size, turn: false, state: None };
    let work = move || run(end);
    // Where there is no thread, the closure's drop takes everything back.
    match thread::Builder::new().name("lightering-pin".into()).spawn(work) {
        Ok(_) => Ok(Reservation { job }),
        Err(why) => {
            let error = Error::new(Kind::Io, OP).bytes(len);
            Err(error.detail(format!("the system gives no thread: {why}")))
        }
    }
}

/// Takes back what the thread holds of the pool, however it ends.
struct End {
    pool: Weak<Inner>,
    job: Arc<Job>,
    /// Of the budget, and not in the books yet.
    promised: u64,
    turn: bool,
    /// How it ended, if it did so by itself.
    state: Option<State>,
}

impl End {
    /// Bytes of the arena up to `to` can be lent from now on. Says whether to go on.
    fn ready(&mut self, arena: &Arc<Arena>, seat: &mut Option<usize>, to: u64) -> bool {
        let Some(inner) = self.pool.upgrade() else { return false };
        let more = to - self.job.ready.load(Ordering::Relaxed);
        let mut ledger = inner.lock();
        match *seat {
            None => *seat = Some(ledger.seat(arena, to, true)),
            Some(key) => ledger.extend(key, to),
        }
        ledger.promised -= more;
        self.promised -= more;
        self.job.ready.store(to, Ordering::Release);
        drop(ledger);
        self.job.first.get_or_init(|| self.job.start.elapsed());
        inner.turned.notify_all();
        !self.job.cancelled.load(Ordering::Relaxed)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some(inner) = self.pool.upgrade() {
            let mut ledger = inner.lock();
            ledger.promised -= self.promised;
            ledger.job = None;
            ledger.pinning &= !self.turn;
            ledger.counts.background_pin_time += self.job.start.elapsed();
            drop(ledger);
            inner.turned.notify_all();
        }
        // Now that the books are closed: whoever waits is told. Without a state the thread never
        // was, or panicked.
        let why = || Error::new(Kind::Io, "reserve").detail("the thread that pins ended early");
        self.job.end(self.state.take().unwrap_or_else(|| State::Failed(why())));
    }
}

fn run(mut end: End) {
    end.state = Some(match pin(&mut end) {
        Err(error) => State::Failed(error.bytes(Bytes(end.job.asked))),
        Ok(()) if end.job.missing() == Bytes::ZERO => State::Done,
        Ok(()) => State::Cancelled,
    });
}

fn pin(end: &mut End) -> Result<()> {
    let Some(inner) = end.pool.upgrade() else { return Ok(()) };
    let mut ledger = inner.lock();
    loop {
        if end.job.cancelled.load(Ordering::Relaxed) {
            return Ok(());
        }
        if !ledger.pinning {
            break;
        }
        ledger = grow::wait(&inner, ledger);
    }
    ledger.pinning = true;
    end.turn = true;
    drop(ledger);
    let crew = inner.crew(end.job.asked, inner.options.background_threads_max);
    let arena = Arc::new(grow::map(&inner, end.job.asked, &crew)?);
    // From here on without the pool, so that it can go.
    drop(inner);
    let mut seat = None;
    let filled = arena.fill(&crew, &mut |to| end.ready(&arena, &mut seat, to));
    arena.end_here();
    let (told, near) = grow::look(&arena, &crew);
    if let (Some(inner), Some(seat)) = (end.pool.upgrade(), seat) {
        let mut ledger = inner.lock();
        ledger.seats[seat].filling = false;
        ledger.counts.background_reserves += 1;
        ledger.counts.pages_asked += told;
        ledger.counts.pages_near += near;
    }
    filled
}
