//! The host's time for one `evict` and one `refill`, beside the raw driver calls that they make.
//!
//! What it is not: a device's time. The copies are small, and the device keeps up.
//!
//! Invariant: everything a verb does is in its time, and nothing else is; the raw calls are those
//! that the verb makes, in the same order, on the same kinds of streams and events. A longest time
//! is one pair: the longest of all runs.
//!
//! ```text
//!   evict    record(compute) wait(lane) copy record(lane)
//!   refill   record(compute) wait(lane) copy record(lane) wait(compute)
//! ```
//!
//! `main` uses it.

use crate::figure::{Better, Figures, Row};
use crate::rig::{Plan, Rig, pieces, refused};
use crate::{Bench, pairs};
use lightering::backend::Backend;
use lightering::{Bytes, Error, Misuse, Options, Result};
use std::time::{Duration, Instant};

/// Copies of one batch: few enough that no queue of the driver is full.
const BATCH: usize = 128;
const BYTES: Bytes = Bytes::kib(64);

/// Microseconds a call; and, beside one millisecond, the longest call of all batches that count.
pub(crate) fn latency(bench: &Bench, out: &mut Figures) -> Result<()> {
    let mut rig = bench.rig(&Plan::new(BYTES, BATCH))?;
    if rig.driver.is_none() {
        return rig.close();
    }
    let row = |name: &str| Row::new(format!("latency.{name}"), "us", Better::Lower);
    let (mut evict, mut refill, mut longest) = (row("evict"), row("refill"), Duration::ZERO);
    let each = |time: Duration| time.as_secs_f64() * 1e6 / BATCH as f64;
    for (ours, raw) in pairs(&mut rig, bench.pairs, Rig::ours_calls, Rig::raw_calls)? {
        evict.pairs.push((each(ours.evict), each(raw.evict)));
        refill.pairs.push((each(ours.refill), each(raw.refill)));
        longest = longest.max(ours.longest);
    }
    out.add([evict, refill, row("longest").longest(longest)]);
    rig.close()?;
    let most = Options::default().transfers_max;
    out.add([longest_held(bench, String::from("link.longest-held"), most)?]);
    Ok(())
}

/// The same by how many copies may be under way: to choose `transfers_max` by.
pub(crate) fn held(bench: &Bench, out: &mut Figures) -> Result<()> {
    if bench.simulated {
        return Ok(());
    }
    for transfers_max in [128, 256, 320, 384, 512, 768, 1024] {
        out.add([longest_held(bench, format!("held.{transfers_max}"), transfers_max)?]);
    }
    Ok(())
}

/// The longest call of all runs while the device does nothing and all that a lane may have under
/// way is enqueued: a driver's queue that is full makes its caller wait. Beside one millisecond.
fn longest_held(bench: &Bench, name: String, transfers_max: usize) -> Result<Row> {
    let mut plan = Plan::new(BYTES, HELD);
    plan.options.transfers_max = transfers_max;
    let mut rig = bench.rig(&plan)?;
    rig.hold_for(HELD_TIME);
    let mut longest = Duration::ZERO;
    for _ in 0..bench.few.max(1) {
        longest = longest.max(rig.longest_held()?);
    }
    let mut row = Row::new(name, "us", Better::Lower).longest(longest);
    row.unheld = rig.unheld;
    rig.close()?;
    Ok(row)
}

impl Row {
    /// Its one pair. What each call must keep to is judged by the longest of all: a middle of
    /// several longest ones would let nearly half of them be longer.
    fn longest(mut self, time: Duration) -> Row {
        self.pairs.push((time.as_secs_f64() * 1e6, 1000.0));
        self
    }
}

/// More storages than may be under way at once.
const HELD: usize = 1536;
/// The host takes less to ask for all of them, where it does not wait.
const HELD_TIME: Duration = Duration::from_millis(50);

/// Times of a batch.
#[derive(Default)]
struct Calls {
    evict: Duration,
    refill: Duration,
    longest: Duration,
}

impl Rig {
    fn ours_calls(&mut self) -> Result<Calls> {
        let mut calls = Calls::default();
        let storages = self.adopt()?;
        self.backend.sync()?;
        let batch = Instant::now();
        let mut before = batch.elapsed();
        for storage in &storages {
            self.engine.evict(storage.id(), self.on)?;
            let after = batch.elapsed();
            calls.longest = calls.longest.max(after - before);
            before = after;
        }
        calls.evict = before;
        self.flush()?;
        self.engine.drain()?;
        let batch = Instant::now();
        let mut before = batch.elapsed();
        for (storage, (range, _)) in storages.iter().zip(&self.raw) {
            self.engine.refill(storage.id(), *range, self.on)?;
            let after = batch.elapsed();
            calls.longest = calls.longest.max(after - before);
            before = after;
        }
        calls.refill = before;
        self.release(storages)?;
        Ok(calls)
    }

    fn longest_held(&mut self) -> Result<Duration> {
        let storages = self.adopt()?;
        self.hold()?;
        let mut longest = Duration::ZERO;
        for storage in &storages {
            let start = Instant::now();
            // Those past the lane's bound are kept on the device.
            self.engine.evict(storage.id(), self.on)?;
            longest = longest.max(start.elapsed());
        }
        self.let_go(self.compute.id)?;
        self.flush()?;
        self.release(storages)?;
        Ok(longest)
    }

    fn raw_calls(&mut self) -> Result<Calls> {
        let missing = || Error::usage(Misuse::State, "latency");
        let driver = self.driver.as_ref().ok_or_else(missing)?;
        let mut events = Vec::with_capacity(2 * BATCH);
        for _ in 0..2 * BATCH {
            events.push(driver.create_event().map_err(refused)?);
        }
        let (compute, out, back) = (self.compute.raw, self.out.raw, self.back.raw);
        self.backend.sync()?;
        let start = Instant::now();
        for ((range, block), event) in self.raw.iter().zip(events.chunks_exact(2)) {
            driver.record(event[0], compute).map_err(refused)?;
            driver.wait(out, event[0]).map_err(refused)?;
            pieces(block, *range, Bytes::MAX, |host, device| {
                driver.copy_out(host, device, out).map_err(refused)
            })?;
            driver.record(event[1], out).map_err(refused)?;
        }
        let evict = start.elapsed();
        self.backend.sync()?;
        let start = Instant::now();
        for ((range, block), event) in self.raw.iter().zip(events.chunks_exact(2)) {
            driver.record(event[0], compute).map_err(refused)?;
            driver.wait(back, event[0]).map_err(refused)?;
            pieces(block, *range, Bytes::MAX, |host, device| {
                driver.copy_in(device, host, back).map_err(refused)
            })?;
            driver.record(event[1], back).map_err(refused)?;
            driver.wait(compute, event[1]).map_err(refused)?;
        }
        let refill = start.elapsed();
        self.backend.sync()?;
        for event in events {
            driver.destroy_event(event).map_err(refused)?;
        }
        Ok(Calls { evict, refill, longest: Duration::ZERO })
    }
}
