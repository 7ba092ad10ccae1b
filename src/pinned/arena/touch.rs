//! Makes the system back an arena's pages, on several threads, while earlier ones are registered.
//!
//! What it is not: it registers nothing itself; it says when a piece may be.
//!
//! Invariant: a piece is registered when every page of it has been touched, and pieces in their
//! order. Threads touch no further than a bounded way ahead of what is registered, and have ended
//! when the call returns.
//!
//! ```text
//!   crew       |t1 |t2 |t3 |t1 |t3 |t2 | ..        units, each claimed by one thread
//!   caller             |= register 0 =|==== register 1 ====| ..
//!              first: |huge|small| touched in turn; the slower kind is not used (once per pool)
//! ```
//!
//! The arena uses it.

use super::super::PIECE_BYTES_MAX;
use super::super::class::GRAIN;
use super::super::numa::Node;
use super::mapping::Mapping;
use super::system::System;
use crate::error::{Error, Kind, Result};
use crate::unit::Bytes;
use rustix::mm::Advice;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// What one thread touches in one go.
const UNIT: u64 = 4 << 20;
/// Each thread that touches pages gets at least this much.
const TOUCH_BYTES_MIN: u64 = 8 << 20;
/// How far the crew runs ahead of what is registered: as far as the largest piece, or nobody would
/// ever register it.
const AHEAD_BYTES_MAX: u64 = PIECE_BYTES_MAX.0;
/// What is touched to see which pages are faster, and from which length on it is tried.
const TRIAL: [u64; 2] = [16 << 20, 4 << 20];
const TRIAL_BYTES_MIN: u64 = 64 << 20;

/// Which pages a pool's memory is made of. Learned from its first large piece.
#[derive(Debug, Default)]
pub(in crate::pinned) struct Pages(AtomicU8);

const UNKNOWN: u8 = 0;
const HUGE: u8 = 1;
const SMALL: u8 = 2;

impl Pages {
    fn learn(&self, huge: Duration, small: Duration) {
        let learned = if is_slow(huge, small) { SMALL } else { HUGE };
        self.0.store(learned, Ordering::Relaxed);
    }

    /// Have huge pages been found slow?
    pub(in crate::pinned) fn are_small(&self) -> bool {
        self.0.load(Ordering::Relaxed) == SMALL
    }
}

/// Does a byte in huge pages take a quarter longer than one in small ones? The trials are of
/// different lengths. (Where a system must tidy up its memory to make a huge page, it may.)
fn is_slow(huge: Duration, small: Duration) -> bool {
    let per_byte = |time: Duration, len: u64| time.as_secs_f64() / len as f64;
    per_byte(huge, TRIAL[0]) > 1.25 * per_byte(small, TRIAL[1])
}

/// Who touches pages, and which.
#[derive(Debug)]
pub(in crate::pinned) struct Crew {
    pub(in crate::pinned) threads_max: usize,
    /// Must there be memory behind the pages at all?
    pub(in crate::pinned) backed: bool,
    /// Where the device is near; `None` where that makes no difference.
    pub(in crate::pinned) node: Option<Node>,
    pub(in crate::pinned) pages: Arc<Pages>,
    /// The machine has huge pages set aside.
    pub(in crate::pinned) reserved: bool,
    /// Are the bytes part of a core dump?
    pub(in crate::pinned) dumped: bool,
    pub(in crate::pinned) system: Arc<dyn System>,
}

impl Crew {
    /// Threads for `len` bytes; 0 leaves it to the caller's.
    fn threads(&self, len: u64) -> usize {
        let wanted = self.threads_max.min((len / TOUCH_BYTES_MIN) as usize);
        if wanted <= 1 && self.node.is_none() {
            return 0;
        }
        let cores = thread::available_parallelism().map_or(1, |n| n.get());
        wanted.clamp(1, cores)
    }

    /// Moves this thread to the node's processors, as far as they are allowed to it.
    fn settle(&self) {
        let (Some(node), Ok(allowed)) = (&self.node, sched_getaffinity(None)) else { return };
        let mut set = CpuSet::new();
        let near = |cpu: &usize| *cpu < CpuSet::MAX_CPU && allowed.is_set(*cpu);
        node.cpus.iter().copied().filter(near).for_each(|cpu| set.set(cpu));
        if set.count() > 0 {
            // Refused, the thread stays where it was, and its pages come from where it is.
            let _ = sched_setaffinity(None, &set);
        }
    }
}

/// How far the threads are.
#[derive(Debug, Default)]
struct Progress {
    /// Where the next unit to be claimed starts.
    next: u64,
    /// Units claimed and not touched yet.
    claimed: Vec<u64>,
    registered: u64,
    /// Nobody claims a unit any more.
    is_over: bool,
    /// Why the system has no page, where it can say so.
    refused: Option<Error>,
}

impl Progress {
    fn touched(&self) -> u64 {
        self.claimed.iter().copied().min().unwrap_or(self.next)
    }
}

struct Work<'a> {
    mapping: &'a Mapping,
    len: u64,
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// Touches `len` bytes and has each piece, which ends at the next of `ends`, registered after that;
/// until `register` says that it is enough, or fails.
pub(super) fn pipeline(
    mapping: &Mapping,
    len: u64,
    ends: &mut dyn Iterator<Item = u64>,
    crew: &Crew,
    register: &mut dyn FnMut(u64, u64) -> Result<bool>,
) -> Result<()> {
    let wanted = if crew.backed { crew.threads(len) } else { 0 };
    let work = Work { mapping, len, progress: Mutex::default(), changed: Condvar::new() };
    thread::scope(|scope| {
        // Also where `register` panics: the scope waits for the threads.
        let _over = Over(&work);
        if crew.backed {
            let prepare = || {
                crew.settle();
                work.prepare(crew);
            };
            match (wanted > 0).then(|| thread::Builder::new().spawn_scoped(scope, prepare)) {
                Some(Ok(first)) => drop(first.join()),
                _ => work.prepare(crew),
            }
        }
        let mut threads = 0;
        for _ in 0..wanted {
            let touch = || {
                crew.settle();
                work.touch_units();
            };
            threads += usize::from(thread::Builder::new().spawn_scoped(scope, touch).is_ok());
        }
        let mut from = 0;
        while from < len {
            let to = ends.next().unwrap_or(len);
            if crew.backed {
                work.touched(to, threads > 0)?;
            }
            if !register(from, to)? {
                return Ok(());
            }
            work.lock().registered = to;
            work.changed.notify_all();
            from = to;
        }
        Ok(())
    })
}

/// Ends the work of the threads when it goes.
struct Over<'a>(&'a Work<'a>);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
    }
}

impl Work<'_> {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, progress: MutexGuard<'a, Progress>) -> MutexGuard<'a, Progress> {
        self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner)
    }

    /// Says which pages are wanted, and finds out where nobody knows.
    fn prepare(&self, crew: &Crew) {
        if self.mapping.is_reserved() {
            return;
        }
        let pages = &crew.pages;
        if pages.0.load(Ordering::Relaxed) == UNKNOWN && self.len >= TRIAL_BYTES_MIN {
            let [huge, small] = TRIAL;
            let both = huge + small;
            self.mapping.advise(0, huge, Advice::LinuxHugepage);
            self.mapping.advise(huge, both, Advice::LinuxNoHugepage);
            let timed = |from, to| {
                let start = Instant::now();
                touch_pages(self.mapping, from, to);
                start.elapsed()
            };
            let huge_time = timed(0, huge);
            pages.learn(huge_time, timed(huge, both));
            self.lock().next = both;
        }
        let advice = match pages.are_small() {
            true => Advice::LinuxNoHugepage,
            false => Advice::LinuxHugepage,
        };
        self.mapping.advise(0, self.len, advice);
    }

    /// One thread's share: the next unit, as long as there is one and it is not too far ahead.
    fn touch_units(&self) {
        let mut progress = self.lock();
        loop {
            let from = progress.next;
            if progress.is_over || progress.refused.is_some() || from >= self.len {
                return;
            }
            if from >= progress.registered + AHEAD_BYTES_MAX {
                progress = self.wait(progress);
                continue;
            }
            progress.next = from.saturating_add(UNIT).min(self.len);
            progress.claimed.push(from);
            let to = progress.next;
            drop(progress);
            let touched = self.touch(from, to);
            progress = self.lock();
            progress.claimed.retain(|&unit| unit != from);
            if let Err(error) = touched {
                progress.refused.get_or_insert(error);
            }
            self.changed.notify_all();
        }
    }

    /// Returns when all up to `to` is touched: by the threads, or by this one where there are none.
    fn touched(&self, to: u64, by_threads: bool) -> Result<()> {
        let mut progress = self.lock();
        loop {
            if let Some(error) = &progress.refused {
                return Err(error.clone());
            }
            if progress.touched() >= to {
                return Ok(());
            }
            if by_threads {
                progress = self.wait(progress);
                continue;
            }
            let from = progress.next;
            progress.next = to;
            self.touch(from, to)?;
        }
    }

    fn touch(&self, from: u64, to: u64) -> Result<()> {
        if self.mapping.is_reserved() {
            // Of these there may be too few, and the kernel says so, where a write would end the
            // process.
            return self.mapping.populate(from, to).map_err(|why| {
                let error = Error::new(Kind::OutOfMemory, "pin").bytes(Bytes(self.len));
                error.detail(format!("no more reserved huge pages: {why}"))
            });
        }
        touch_pages(self.mapping, from, to);
        Ok(())
    }
}

/// Writes one byte of every page in `from..to` of a mapping that nobody was told of yet.
fn touch_pages(mapping: &Mapping, from: u64, to: u64) {
    for at in (from..to).step_by(GRAIN as usize) {
        let page = mapping.at(at).as_ptr();
        // SAFETY: the page lies in the mapping, nobody else has been told of it, and no two threads
        // touch the same page.
        unsafe { page.write_volatile(0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_dropped_only_where_they_are_clearly_slow() {
        let [huge, small] = TRIAL.map(|len| Duration::from_nanos(len / 8));
        assert!(!is_slow(huge, small) && !is_slow(huge * 5 / 4, small));
        assert!(is_slow(huge * 4 / 3, small));
        let pages = Pages::default();
        assert!(!pages.are_small());
        pages.learn(huge * 2, small);
        assert!(pages.are_small());
    }
}
