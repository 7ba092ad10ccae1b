//! Copies alone: sustained each way, both ways at once, one at a time, and in trunks of every size.
//!
//! What it is not: copies beside compute; `overlap` has those.
//!
//! Invariant: the engine and the raw calls move the same device bytes, in the same order, in turn.
//!
//! ```text
//!   out    held |evict evict evict ...| flush |end        raw  held |copy copy copy ...|end
//!   in     held |prefetch prefetch ...| acquire ... |end
//! ```
//!
//! `main` uses it.

use crate::figure::{Better, Figures, Row};
use crate::rig::{Plan, Rig, WHOLE, pieces, refused};
use crate::{Bench, pairs};
use lightering::backend::Backend;
use lightering::{Bytes, Evict, Result};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// Sustained, each way, for every size of pieces in that range.
pub(crate) fn bandwidth(
    bench: &Bench,
    within: RangeInclusive<Bytes>,
    out: &mut Figures,
) -> Result<()> {
    let sizes: &[(&str, Bytes)] = &[
        ("1mib", Bytes::mib(1)),
        ("4mib", Bytes::mib(4)),
        ("16mib", Bytes::mib(16)),
        ("64mib", Bytes::mib(64)),
        ("256mib", Bytes::mib(256)),
        ("1gib", Bytes::gib(1)),
    ];
    for (name, bytes) in sizes.iter().filter(|(_, bytes)| within.contains(bytes)) {
        let Some(count) = bench.count(*bytes) else {
            // `main` tells of a measure without a figure, and not of a size that is left out of it.
            println!(
                "link.out-{name}, link.in-{name}: NOT measured here (they need a larger --total)"
            );
            continue;
        };
        let plan = Plan::new(*bytes, count);
        out.add(each_way(bench, &plan, |way| format!("link.{way}-{name}"))?);
    }
    Ok(())
}

/// As `bandwidth`, of one size of pieces, for every size of trunks.
pub(crate) fn trunks(bench: &Bench, out: &mut Figures) -> Result<()> {
    let Some(count) = bench.count(Bytes::mib(256)) else { return Ok(()) };
    for mib in [4, 8, 16, 32, 64, 128, 256] {
        let plan = Plan::new(Bytes::mib(256), count).trunks(Bytes::mib(mib));
        out.add(each_way(bench, &plan, |way| format!("trunks.{way}-{mib}mib"))?);
    }
    Ok(())
}

fn each_way(bench: &Bench, plan: &Plan, name: impl Fn(&str) -> String) -> Result<[Row; 2]> {
    let mut rig = bench.rig(plan)?;
    let gigabytes = rig.all() / 1e9;
    let mut rows = ["out", "in"].map(|way| Row::new(name(way), "GB/s", Better::Higher));
    let pairs = pairs(&mut rig, bench.pairs, Rig::ours_each_way, Rig::raw_each_way)?;
    for (ours, raw) in pairs {
        for (row, (ours, raw)) in rows.iter_mut().zip(ours.into_iter().zip(raw)) {
            row.pairs.push((gigabytes / ours, gigabytes / raw));
        }
    }
    for row in &mut rows {
        row.unheld = rig.unheld;
    }
    rig.close()?;
    Ok(rows)
}

/// Half of the bytes on their way out while the other half are on their way in.
pub(crate) fn both(bench: &Bench, out: &mut Figures) -> Result<()> {
    let bytes = Bytes::mib(64).min(Bytes(bench.total.0 / 2));
    let Some(count) = bench.count(bytes) else { return Ok(()) };
    let mut rig = bench.rig(&Plan::new(bytes, count))?;
    let gigabytes = rig.all() / 1e9;
    let mut row = Row::new(String::from("link.both"), "GB/s", Better::Higher);
    for (ours, raw) in pairs(&mut rig, bench.pairs, Rig::ours_both, Rig::raw_both)? {
        row.pairs.push((gigabytes / ours, gigabytes / raw));
    }
    row.unheld = rig.unheld;
    out.add([row]);
    rig.close()
}

/// One copy with the device idle: from the call until an event says that it is done. The value is
/// the engine's time, the reference the raw calls' and ten microseconds.
pub(crate) fn cold(bench: &Bench, out: &mut Figures) -> Result<()> {
    for (name, bytes) in [("1mib", Bytes::mib(1)), ("64mib", Bytes::mib(64))] {
        let mut rig = bench.rig(&Plan::new(bytes, 1))?;
        if rig.driver.is_none() {
            return rig.close();
        }
        let mut row = Row::new(format!("link.cold-{name}"), "us", Better::Lower);
        for (ours, raw) in pairs(&mut rig, bench.pairs, Rig::ours_cold, Rig::raw_cold)? {
            row.pairs.push((ours * 1e6, raw * 1e6 + 10.0));
        }
        out.add([row]);
        rig.close()?;
    }
    Ok(())
}

/// A copy that a reader waits for, while others are fetched ahead: from the moment it was asked for
/// until the reader may go on; and the same while others leave. The reference is two trunks and the
/// copy, raw, with nothing leaving.
pub(crate) fn urgent(bench: &Bench, out: &mut Figures) -> Result<()> {
    let bytes = Bytes::mib(64).min(Bytes(bench.total.0 / 2));
    let Some(count) = bench.count(bytes) else { return Ok(()) };
    let plan = Plan::new(bytes, count);
    let trunk = plan.options.ahead_trunk_bytes_max;
    let mut rig = bench.rig(&plan)?;
    for (name, leaves) in [("link.urgent", false), ("link.urgent-leaving", true)] {
        let mut row = Row::new(String::from(name), "us", Better::Lower);
        let mut nth = 0;
        let ours = |rig: &mut Rig| {
            nth += 1;
            rig.ours_urgent(Duration::from_micros(nth * 97 % 1000), leaves)
        };
        for (ours, raw) in pairs(&mut rig, bench.pairs, ours, |rig| rig.raw_urgent(trunk))? {
            row.pairs.push((ours * 1e6, raw * 1e6));
        }
        row.unheld = rig.unheld;
        out.add([row]);
    }
    rig.close()
}

impl Rig {
    /// The copy comes at any moment of a trunk: `later` than the first one's start. With `leaves`
    /// half of the storages leave meanwhile.
    fn ours_urgent(&mut self, later: Duration, leaves: bool) -> Result<f64> {
        let storages = self.adopt()?;
        let away = if leaves { storages.len().div_ceil(2) } else { storages.len() };
        self.evict(&storages[..away])?;
        self.flush()?;
        self.engine.drain()?;
        self.evict(&storages[away..])?;
        let (Some(urgent), Some((range, _))) = (storages.first(), self.raw.first()) else {
            return Ok(0.0);
        };
        let (id, range) = (urgent.id(), *range);
        self.prefetch(&storages[1..away], 1)?;
        let start = Instant::now();
        while start.elapsed() < later {}
        self.open_gate()?;
        self.engine.refill(id, range, self.on)?;
        let seconds = self.timed(self.compute.id)?;
        self.acquire(&storages[1..])?;
        self.engine.drain()?;
        self.release(storages)?;
        Ok(seconds)
    }

    /// Two trunks, then the copy.
    fn raw_urgent(&mut self, trunk: Bytes) -> Result<f64> {
        self.hold()?;
        for _ in 0..2 {
            self.raw_part_in(0, trunk)?;
        }
        self.raw_in(0..1, WHOLE)?;
        self.follow(self.compute.id, self.back.id)?;
        self.let_go(self.compute.id)
    }

    pub(crate) fn ours_each_way(&mut self) -> Result<[f64; 2]> {
        let storages = self.adopt()?;
        self.hold()?;
        self.evict(&storages)?;
        self.engine.flush(self.on)?;
        let out = self.let_go(self.compute.id)?;
        self.flush()?;
        self.engine.drain()?;
        self.hold()?;
        self.prefetch(&storages, 0)?;
        self.acquire(&storages)?;
        let back = self.let_go(self.compute.id)?;
        self.release(storages)?;
        Ok([out, back])
    }

    pub(crate) fn raw_each_way(&mut self) -> Result<[f64; 2]> {
        let all = 0..self.raw.len();
        self.hold()?;
        self.raw_out(all.clone(), WHOLE)?;
        self.follow(self.compute.id, self.out.id)?;
        let out = self.let_go(self.compute.id)?;
        self.hold()?;
        self.raw_in(all, WHOLE)?;
        self.follow(self.compute.id, self.back.id)?;
        let back = self.let_go(self.compute.id)?;
        Ok([out, back])
    }

    pub(crate) fn ours_both(&mut self) -> Result<f64> {
        let half = self.raw.len() / 2;
        let storages = self.adopt()?;
        self.evict(&storages[half..])?;
        self.flush()?;
        self.engine.drain()?;
        self.hold()?;
        self.evict(&storages[..half])?;
        self.prefetch(&storages[half..], half)?;
        self.engine.flush(self.on)?;
        self.acquire(&storages[half..])?;
        let seconds = self.let_go(self.compute.id)?;
        self.release(storages)?;
        Ok(seconds)
    }

    pub(crate) fn raw_both(&mut self) -> Result<f64> {
        let (half, all) = (self.raw.len() / 2, self.raw.len());
        self.hold()?;
        self.raw_out(0..half, WHOLE)?;
        self.raw_in(half..all, WHOLE)?;
        self.follow(self.compute.id, self.out.id)?;
        self.follow(self.compute.id, self.back.id)?;
        self.let_go(self.compute.id)
    }

    fn ours_cold(&mut self) -> Result<f64> {
        let storages = self.adopt()?;
        self.backend.sync()?;
        let mut seconds = 0.0;
        for storage in &storages {
            let start = Instant::now();
            if let Evict::Moving(transfer) = self.engine.evict(storage.id(), self.on)? {
                while !self.engine.is_done(transfer)? {}
            }
            seconds += start.elapsed().as_secs_f64();
        }
        self.release(storages)?;
        Ok(seconds)
    }

    fn raw_cold(&mut self) -> Result<f64> {
        let Some(driver) = &self.driver else { return Ok(0.0) };
        let (produced, done) = (driver.create_event(), driver.create_event());
        let (produced, done) = (produced.map_err(refused)?, done.map_err(refused)?);
        self.backend.sync()?;
        let mut seconds = 0.0;
        for (range, block) in &self.raw {
            let start = Instant::now();
            driver.record(produced, self.compute.raw).map_err(refused)?;
            driver.wait(self.out.raw, produced).map_err(refused)?;
            pieces(block, *range, Bytes::MAX, |host, device| {
                driver.copy_out(host, device, self.out.raw).map_err(refused)
            })?;
            driver.record(done, self.out.raw).map_err(refused)?;
            while !driver.query(done).map_err(refused)? {}
            seconds += start.elapsed().as_secs_f64();
        }
        driver.destroy_event(produced).map_err(refused)?;
        driver.destroy_event(done).map_err(refused)?;
        Ok(seconds)
    }
}
