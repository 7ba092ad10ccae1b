//! What is measured, and the line that says it.
//!
//! What it is not: it prints nothing.
//!
//! Invariant: a time begins with nothing page-locked for it and ends with the memory ready to be
//! copied to; what is given back is timed apart.
//!
//! ```text
//!   pool:    open -> |reserve| -> |drop|         driver: |take| -> |drop|
//! ```
//!
//! `main` uses it.

use crate::host::{Hold, Host};
use lightering::backend::{Backend, Fence, Pinner};
use lightering::pinned::{Budget, Growth, PinnedPool, PoolOptions, Stats};
use lightering::{Bytes, Kind, Name, PinnedPtr, Result};
use std::fmt::Write;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Rounds of a block taken and given back: by the driver, and by the pool, which is quick.
const ROUNDS: [u32; 2] = [21, 2001];

/// One measurement.
#[derive(Clone, Debug)]
pub(crate) struct Pinned {
    what: &'static str,
    bytes: Bytes,
    cold: bool,
    /// By the pool, and by the driver, where both did it.
    times: [Option<Duration>; 2],
    /// The same, for giving it back.
    frees: [Option<Duration>; 2],
    first_block: Option<Duration>,
    /// Pages that the kernel told about, and those near the device.
    pages: [u64; 2],
}

impl Pinned {
    /// As one line of JSON.
    pub(crate) fn json(&self, simulated: bool) -> String {
        let seconds = |time: Option<Duration>| match time {
            Some(time) => time.as_secs_f64().to_string(),
            None => String::from("null"),
        };
        let Pinned { what, bytes, cold, times, frees, first_block, pages } = self;
        let mut text = format!("{{\"what\": \"{what}\", \"bytes\": {}, \"cold\": {cold}", bytes.0);
        for (name, time) in [
            ("seconds", times[0]),
            ("raw_seconds", times[1]),
            ("free_seconds", frees[0]),
            ("raw_free_seconds", frees[1]),
            ("first_block_seconds", *first_block),
        ] {
            // Writing to a string cannot fail.
            let _ = write!(text, ", \"{name}\": {}", seconds(time));
        }
        let [told, near] = pages;
        let _ = write!(text, ", \"pages_told\": {told}, \"pages_near\": {near}");
        let _ = writeln!(text, ", \"simulated\": {simulated}}}");
        text
    }

    /// For people.
    pub(crate) fn words(&self) -> String {
        let Pinned { what, bytes, cold, times, first_block, .. } = self;
        let rate = |time: &Option<Duration>| match time {
            Some(time) => {
                let rate = bytes.0 as f64 / 1e9 / time.as_secs_f64();
                format!("{:?} ({rate:.2} GB/s)", time).replace('\u{b5}', "u")
            }
            None => String::from("-"),
        };
        let cold = if *cold { ", cold" } else { "" };
        let [ours, raw] = times.each_ref().map(rate);
        let first = first_block.map(|time| format!(", first block after {time:.2?}"));
        format!("{what} {bytes}{cold}: pool {ours}, driver {raw}{}\n", first.unwrap_or_default())
    }
}

/// Page-locks nothing: for touching memory only.
#[derive(Debug)]
struct Nobody;

impl Pinner for Nobody {
    unsafe fn register(&self, at: NonNull<u8>, _len: Bytes) -> Result<PinnedPtr> {
        Ok(PinnedPtr(at.as_ptr() as u64))
    }

    fn unregister(&self, _at: PinnedPtr) -> Result<()> {
        Ok(())
    }

    fn registration_max(&self) -> Bytes {
        Bytes::MAX
    }
}

/// The two ways to page-locked memory.
pub(crate) struct Bench<'a> {
    pinner: Arc<dyn Pinner>,
    fence: Arc<dyn Fence>,
    host: &'a dyn Host,
}

impl<'a> Bench<'a> {
    pub(crate) fn new(backend: &dyn Backend, host: &'a dyn Host) -> Bench<'a> {
        Bench { pinner: backend.pinner(), fence: backend.fence(), host }
    }

    fn pool(&self, pinner: &Arc<dyn Pinner>, bytes: Bytes) -> Result<PinnedPool> {
        // Room for the rounding up to whole huge pages.
        let budget = Budget::Bytes(bytes.saturating_add(Bytes::mib(2)));
        let growth = Growth::Closed;
        PinnedPool::new(Arc::clone(pinner), PoolOptions { budget, growth, ..Default::default() })
    }

    /// Time to page-lock with the pool, the pool, and what it says about itself.
    fn ours(&self, bytes: Bytes) -> Result<(Duration, PinnedPool, Stats)> {
        let pool = self.pool(&self.pinner, bytes)?;
        let start = Instant::now();
        pool.reserve(bytes)?;
        let time = start.elapsed();
        let stats = pool.stats();
        Ok((time, pool, stats))
    }

    fn raw(&self, bytes: Bytes) -> Result<(Duration, Box<dyn Hold + '_>)> {
        let start = Instant::now();
        let taken = self.host.take(bytes)?;
        Ok((start.elapsed(), taken))
    }

    /// Of memory that nobody touched: both hold theirs until both are done.
    pub(crate) fn cold(&self, bytes: Bytes) -> Result<Pinned> {
        let (ours, pool, stats) = self.ours(bytes)?;
        let (raw, taken) = self.raw(bytes)?;
        let frees = [timed(|| drop(pool)), timed(|| drop(taken))];
        Ok(pinned("pin", bytes, true, [ours, raw], frees, stats))
    }

    /// Touches a tenth more than `bytes` once, and frees it.
    pub(crate) fn warm_up(&self, bytes: Bytes) -> Result<()> {
        let bytes = Bytes(bytes.0 / 10 * 11);
        let nobody: Arc<dyn Pinner> = Arc::new(Nobody);
        self.pool(&nobody, bytes)?.reserve(bytes)?;
        Ok(())
    }

    /// Driver, pool, pool, driver.
    pub(crate) fn pairs(&self, bytes: Bytes) -> Result<[Pinned; 2]> {
        let ours = || -> Result<(Duration, Duration, Stats)> {
            let (time, pool, stats) = self.ours(bytes)?;
            Ok((time, timed(|| drop(pool)), stats))
        };
        let raw = || -> Result<(Duration, Duration)> {
            let (time, taken) = self.raw(bytes)?;
            Ok((time, timed(|| drop(taken))))
        };
        let (a, b, c, d) = (raw()?, ours()?, ours()?, raw()?);
        Ok([(b, a), (c, d)].map(|((ours, free, stats), (raw, raw_free))| {
            pinned("pin", bytes, false, [ours, raw], [free, raw_free], stats)
        }))
    }

    /// A reservation in the background: when can the first block be had, and when is it over?
    pub(crate) fn background(&self, bytes: Bytes) -> Result<Pinned> {
        let pool = self.pool(&self.pinner, bytes)?;
        let mut client = pool.client(Arc::clone(&self.fence), Bytes::MAX)?;
        let start = Instant::now();
        let reservation = pool.reserve_in_background(bytes)?;
        let lent = loop {
            match client.lend(Bytes::mib(1), Name::new("first")) {
                Err(error) if error.kind() == Kind::OverBudget && start.elapsed() < PATIENCE => {
                    std::thread::yield_now();
                }
                lent => break lent?,
            }
        };
        let first = start.elapsed();
        reservation.wait()?;
        let time = start.elapsed();
        client.give_back(lent.block, lent.after)?;
        let stats = pool.stats();
        let none = [None; 2];
        let pages = [stats.counts.pages_asked, stats.counts.pages_near];
        let (times, first_block) = ([Some(time), None], Some(first));
        Ok(Pinned {
            what: "background",
            bytes,
            cold: false,
            times,
            frees: none,
            first_block,
            pages,
        })
    }

    /// One block taken and given back, the middle time of many.
    pub(crate) fn block(&self, bytes: Bytes) -> Result<Pinned> {
        let (_, pool, stats) = self.ours(bytes)?;
        let mut client = pool.client(Arc::clone(&self.fence), Bytes::MAX)?;
        let raw = middle(ROUNDS[0], || {
            drop(self.host.take(bytes)?);
            Ok(())
        })?;
        let ours = middle(ROUNDS[1], || {
            let lent = client.lend(bytes, Name::new("block"))?;
            Ok(client.give_back(lent.block, None)?)
        })?;
        let times = [Some(ours), Some(raw)];
        let pages = [stats.counts.pages_asked, stats.counts.pages_near];
        let frees = [None; 2];
        Ok(Pinned { what: "block", bytes, cold: false, times, frees, first_block: None, pages })
    }
}

/// How long to wait for a block that a reservation promised.
const PATIENCE: Duration = Duration::from_secs(60);

fn pinned(
    what: &'static str,
    bytes: Bytes,
    cold: bool,
    times: [Duration; 2],
    frees: [Duration; 2],
    stats: Stats,
) -> Pinned {
    let pages = [stats.counts.pages_asked, stats.counts.pages_near];
    let (times, frees) = (times.map(Some), frees.map(Some));
    Pinned { what, bytes, cold, times, frees, first_block: None, pages }
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn middle(rounds: u32, mut work: impl FnMut() -> Result<()>) -> Result<Duration> {
    let mut times = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        work()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}
