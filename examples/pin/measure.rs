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
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Rounds of a block taken and given back: by the driver, and by the pool, which is quick.
const ROUNDS: [u32; 2] = [21, 2001];

/// One measurement: a figure of `benches/results`, and what people read.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    name: String,
    /// Ours, and what it stands beside.
    pairs: Vec<[f64; 2]>,
    words: String,
}

impl Figure {
    /// As one line of JSON.
    pub(crate) fn json(&self, simulated: bool) -> String {
        let Figure { name, pairs, .. } = self;
        format!("{{\"figure\": \"{name}\", \"simulated\": {simulated}, \"pairs\": {pairs:?}}}\n")
    }

    /// For people.
    pub(crate) fn words(&self) -> String {
        format!("{}: {}\n", self.name, self.words)
    }
}

/// A length as a figure's name has it.
fn short(bytes: Bytes) -> String {
    const GIB: u64 = 1 << 30;
    match bytes.0 {
        whole if whole.is_multiple_of(GIB) => format!("{}gib", whole / GIB),
        other => format!("{}mib", other >> 20),
    }
}

/// Rates of the pool and of the driver, run for run.
fn rates(head: &str, bytes: Bytes, times: &[[Duration; 2]]) -> Figure {
    let rate = |time: Duration| bytes.0 as f64 / 1e9 / time.as_secs_f64();
    let pairs: Vec<[f64; 2]> = times.iter().map(|pair| pair.map(rate)).collect();
    let one = |[ours, raw]: &[f64; 2]| {
        format!("{ours:.2} GB/s, by the driver {raw:.2}, {:.2} times", ours / raw)
    };
    let words = pairs.iter().map(one).collect::<Vec<_>>().join("; ");
    Figure { name: format!("pinned.{head}-{}", short(bytes)), pairs, words }
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
    pub(crate) fn cold(&self, bytes: Bytes) -> Result<Vec<Figure>> {
        let (ours, _pool, stats) = self.ours(bytes)?;
        let (raw, _taken) = self.raw(bytes)?;
        let mut figures = vec![rates("cold", bytes, &[[ours, raw]])];
        let [told, near] = [stats.counts.pages_asked, stats.counts.pages_near];
        // On a machine with one node nobody is asked.
        if let (Some(node), true) = (stats.node, told > 0) {
            let words = format!("{near} of {told} pages on node {node}");
            let pairs = vec![[near as f64, told as f64]];
            figures.push(Figure { name: String::from("pinned.near"), pairs, words });
        }
        Ok(figures)
    }

    /// Touches a tenth more than `bytes` once, and frees it.
    pub(crate) fn warm_up(&self, bytes: Bytes) -> Result<()> {
        let bytes = Bytes(bytes.0 / 10 * 11);
        let nobody: Arc<dyn Pinner> = Arc::new(Nobody);
        self.pool(&nobody, bytes)?.reserve(bytes)?;
        Ok(())
    }

    /// Driver, pool, pool, driver: the rates of taking, and those of giving back.
    pub(crate) fn pairs(&self, bytes: Bytes) -> Result<[Figure; 2]> {
        let ours = || -> Result<[Duration; 2]> {
            let (time, pool, _) = self.ours(bytes)?;
            Ok([time, timed(|| drop(pool))])
        };
        let raw = || -> Result<[Duration; 2]> {
            let (time, taken) = self.raw(bytes)?;
            Ok([time, timed(|| drop(taken))])
        };
        let (a, b, c, d) = (raw()?, ours()?, ours()?, raw()?);
        let of = |which: usize| [[b[which], a[which]], [c[which], d[which]]];
        Ok([rates("rate", bytes, &of(0)), rates("free", bytes, &of(1))])
    }

    /// A reservation in the background: when can the first block be had, and when is it over?
    pub(crate) fn background(&self, bytes: Bytes) -> Result<Figure> {
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
        let words = format!("{first:.2?} of {}, all of which took {time:.2?}", bytes);
        let pairs = vec![[first.as_secs_f64(), FIRST_BLOCK_MAX.as_secs_f64()]];
        Ok(Figure { name: String::from("pinned.first-block"), pairs, words: ascii(&words) })
    }

    /// One block taken and given back, the middle time of many, in microseconds.
    pub(crate) fn block(&self, bytes: Bytes) -> Result<Figure> {
        let (_, pool, _) = self.ours(bytes)?;
        let mut client = pool.client(Arc::clone(&self.fence), Bytes::MAX)?;
        let raw = middle(ROUNDS[0], || {
            drop(self.host.take(bytes)?);
            Ok(())
        })?;
        let ours = middle(ROUNDS[1], || {
            let lent = client.lend(bytes, Name::new("block"))?;
            Ok(client.give_back(lent.block, None)?)
        })?;
        let words = format!("{bytes} lent and given back in {ours:.2?}, by the driver {raw:.2?}");
        let pairs = vec![[ours, raw].map(|time| time.as_secs_f64() * 1e6)];
        Ok(Figure { name: String::from("pinned.block"), pairs, words: ascii(&words) })
    }
}

/// How long to wait for a block that a reservation promised.
const PATIENCE: Duration = Duration::from_secs(60);
/// How soon it should be there.
const FIRST_BLOCK_MAX: Duration = Duration::from_millis(100);

/// Microseconds without a letter that is not ASCII.
fn ascii(text: &str) -> String {
    text.replace('\u{b5}', "u")
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
