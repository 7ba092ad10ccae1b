//! Two facts about the process that end all driver calls: it is exiting, or it is a forked child.
//!
//! What it is not: a lock. A call that is inside the driver when another thread calls `exit` is
//! the driver's to survive; no new one starts. Only for page-locking, which takes long and which a
//! thread of the pool does by itself, does the exit wait, and not for long.
//!
//! Invariant: a flag, once set, stays set; while one is set no verb and no `Drop` of this backend
//! calls the driver.
//!
//! ```text
//!   pthread_atfork(child) --> FORKED  \
//!                                       STATE --> check(op): one relaxed load per verb
//!   atexit, after cuInit  --> EXITING /
//! ```
//!
//! `atexit` hooks run last in, first out: ours is registered after `cuInit` returned, so it runs
//! before whatever the driver registered there, while the driver is still whole. Fork is seen by a
//! hook in the child and not by comparing process ids: asking for the id is a system call per
//! verb. A child made by a raw `clone` runs no hooks; there the driver itself answers
//! `NOT_INITIALIZED`, which `code` reads as the same thing.
//!
//! `driver` registers the hooks; every verb and every `Drop` here asks.

use crate::error::{Error, Kind, Misuse, Result};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const EXITING: u8 = 1;
const FORKED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(0);

/// Calls that are page-locking memory now.
static PINNING: AtomicUsize = AtomicUsize::new(0);
/// How long an exit waits for them. One takes 2 GiB at most, about a second by the slowest driver.
const PINNING_WAIT_MAX: Duration = Duration::from_secs(2);

/// A call that is page-locking memory: made before it asks whether it may.
#[derive(Debug)]
pub(super) struct Pinning(());

impl Pinning {
    pub(super) fn begin() -> Pinning {
        PINNING.fetch_add(1, Ordering::SeqCst);
        Pinning(())
    }
}

impl Drop for Pinning {
    fn drop(&mut self) {
        PINNING.fetch_sub(1, Ordering::SeqCst);
    }
}

extern "C" fn on_exit() {
    STATE.fetch_or(EXITING, Ordering::SeqCst);
    let start = Instant::now();
    while PINNING.load(Ordering::SeqCst) > 0 && start.elapsed() < PINNING_WAIT_MAX {
        std::thread::sleep(Duration::from_millis(1));
    }
}

extern "C" fn in_child() {
    STATE.fetch_or(FORKED, Ordering::Relaxed);
    // Who was page-locking is a thread of the parent: nobody here will ever be done with it.
    PINNING.store(0, Ordering::SeqCst);
}

/// Sets the flag in every child forked from now on. Once per process, before `cuInit`.
pub(super) fn watch_forks() -> Result<()> {
    // SAFETY: the hook only sets two atomics, which is sound in a forked child; a handler that
    // lives in a shared library is removed by the C library when that library is unloaded.
    let code = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    hooked(code, "the system refused the fork hook")
}

/// Sets the flag when the process starts to exit. Once per process, after `cuInit`.
pub(super) fn watch_exit() -> Result<()> {
    // SAFETY: the hook sets an atomic and reads another for a while; it may run at any time, on
    // any thread.
    let code = unsafe { libc::atexit(on_exit) };
    hooked(code, "the system refused the exit hook")
}

fn hooked(code: i32, refusal: &'static str) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Error::new(Kind::Io, "open").detail(refusal)) }
}

/// May the driver be called?
#[inline]
pub(super) fn check(op: &'static str) -> Result<()> {
    // In one order with `PINNING`, for the exit that waits for it.
    match STATE.load(Ordering::SeqCst) {
        0 => Ok(()),
        state => Err(refusal(state, op)),
    }
}

#[cold]
fn refusal(state: u8, op: &'static str) -> Error {
    if state & FORKED != 0 {
        Error::usage(Misuse::Forked, op).detail("a child process needs its own start of the driver")
    } else {
        Error::new(Kind::Closed, op).detail("the process is exiting")
    }
}
