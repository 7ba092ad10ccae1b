//! What the one who asked for a background reservation sees of it.
//!
//! What it is not: the work; the thread in `reserve.rs` does that.
//!
//! Invariant: once it is over it stays so, with the state and time of its end.
//!
//! ```text
//!   Running -> Done | Cancelled | Failed(why)        ready grows by whole pieces, and stays
//! ```
//!
//! Whoever sets engines up may keep one; only [`crate::pinned`] makes one.
#![deny(unsafe_code)]

use super::Inner;
use super::sync::{AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard};
use crate::error::{Error, Misuse, Result};
use crate::unit::Bytes;
use rustix::process::{Pid, getpid};
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Memory that is being page-locked in the background. Dropped, it goes on all the same.
#[derive(Clone, Debug)]
pub struct Reservation {
    pub(super) job: Arc<Job>,
}

/// How far a background reservation is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What has to be page-locked; less than what was asked for where some was free already.
    pub asked: Bytes,
    /// Page-locked by it so far, and in the pool.
    pub ready: Bytes,
    /// How it stands.
    pub state: State,
    /// Since it was asked for, or until it was over.
    pub time: Duration,
    /// From its start until the first piece could be lent.
    pub time_to_first: Option<Duration>,
}

/// How a background reservation stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It is at work, or waits for its turn.
    Running,
    /// All of it is in the pool.
    Done,
    /// It was cancelled; what was ready stays.
    Cancelled,
    /// The system refused a piece; what was ready stays.
    Failed(Error),
}

/// What the thread and the one who asked share.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) asked: u64,
    pub(super) ready: AtomicU64,
    pub(super) cancelled: AtomicBool,
    pub(super) start: Instant,
    /// When the first piece could be lent.
    pub(super) first: OnceLock<Duration>,
    over: Mutex<Option<(State, Duration)>>,
    ended: Condvar,
    /// Where the thread waits for its turn.
    pool: Weak<Inner>,
    /// A child of fork has no such thread.
    pid: Pid,
}

impl Job {
    pub(super) fn new(asked: u64, pool: Weak<Inner>) -> Job {
        Job {
            asked,
            ready: AtomicU64::new(0),
            cancelled: AtomicBool::new(false),
            start: Instant::now(),
            first: OnceLock::new(),
            over: Mutex::new(None),
            ended: Condvar::new(),
            pool,
            pid: getpid(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<(State, Duration)>> {
        self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes still to come.
    pub(super) fn missing(&self) -> Bytes {
        Bytes(self.asked - self.ready.load(Ordering::Relaxed))
    }

    /// It is over.
    pub(super) fn end(&self, state: State) {
        self.lock().get_or_insert((state, self.start.elapsed()));
        self.ended.notify_all();
    }
}

impl Reservation {
    /// How far it is.
    pub fn progress(&self) -> Progress {
        let job = &self.job;
        let over = job.lock().clone();
        let (state, time) = over.unwrap_or_else(|| (State::Running, job.start.elapsed()));
        Progress {
            asked: Bytes(job.asked),
            ready: Bytes(job.ready.load(Ordering::Acquire)),
            state,
            time,
            time_to_first: job.first.get().copied(),
        }
    }

    /// Ends it behind the piece that is being page-locked now, or at once where it still waits for
    /// its turn. What is ready stays in the pool.
    pub fn cancel(&self) {
        self.job.cancelled.store(true, Ordering::Relaxed);
        if self.job.pid != getpid() {
            return;
        }
        if let Some(inner) = self.job.pool.upgrade() {
            // Who looked before and found nothing waits by now, and is woken.
            drop(inner.lock());
            inner.turned.notify_all();
        }
    }

    /// Waits until it is over. Returns what is ready; after a cancel that is less than was asked.
    ///
    /// # Errors
    /// Why a piece could not be page-locked; what was ready before stays in the pool.
    /// `Usage(Forked)` in a child process, which has no such thread.
    pub fn wait(&self) -> Result<Bytes> {
        let job = &self.job;
        if job.pid != getpid() {
            return Err(Error::usage(Misuse::Forked, "reserve"));
        }
        let mut over = job.lock();
        loop {
            match &*over {
                Some((State::Failed(error), _)) => return Err(error.clone()),
                Some(_) => return Ok(Bytes(job.ready.load(Ordering::Acquire))),
                None => over = job.ended.wait(over).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} after {:.3} s", self.ready, self.asked, self.time.as_secs_f64())?;
        match &self.state {
            State::Running => Ok(()),
            State::Done => f.write_str(", done"),
            State::Cancelled => f.write_str(", cancelled"),
            State::Failed(error) => write!(f, ", failed: {error}"),
        }
    }
}
