//! Many small ranges, and rows at a stride, gathered out and scattered back.
//!
//! What it is not: large copies cut small. Nothing of these can be one copy.
//!
//! Invariant: ours, and a raw copy for each range, move the same ranges; batches are queued four at
//! a time behind the kernel that holds them. The bound of `rows.*` is what is asked, 50 GB/s out
//! and 45 in; `each.*` stands beside a raw copy for each range.
//!
//! ```text
//!   device  [64k]..[64k]..[64k]..   --gather-->  pinned [64k|64k|64k|..]   --scatter--> and back
//! ```
//!
//! `main` uses it.

use crate::compute::{Compute, Kind, Place};
use crate::rig::{Plan, Rig, refused};
use crate::{Bench, Better, Row};
use lightering::backend::Backend;
use lightering::engine::Batch;
use lightering::pack::Strip;
use lightering::{Bytes, DeviceRange, Result};

/// Batches queued at once.
const BATCHES: usize = 4;
const ASKED: [f64; 2] = [50.0, 45.0];
const SIZES: [(&str, u64, u64, bool); 4] = [
    ("256x64kib", 256, 64 << 10, false),
    ("4096x16kib", 4096, 16 << 10, false),
    ("16384x4kib", 16_384, 4 << 10, false),
    ("strided-4096x4kib", 4096, 4 << 10, true),
];

/// Gigabytes a second, out and in, for each size; and beside products.
pub(crate) fn rows(bench: &Bench) -> Result<Vec<Row>> {
    let largest = SIZES.iter().map(|(_, count, len, _)| count * len).max().unwrap_or_default();
    let span = Bytes(2 * largest);
    if bench.total.0 < 2 * span.0 {
        return Ok(Vec::new());
    }
    let mut plan = Plan::new(span, 1);
    plan.options.events_max = 1 << 15;
    let mut rig = bench.rig(&plan)?;
    let mut rows = Vec::new();
    for (name, count, len, strided) in SIZES {
        let within = rig.raw[0].0;
        let shape = Shape::new(within, count, len, strided)?;
        let gigabytes = BATCHES as f64 * (count * len) as f64 / 1e9;
        let new = |what: &str, way: &str| {
            Row::new(format!("{what}.{way}-{name}"), "GB/s", Better::Higher)
        };
        let mut asked = ["out", "in"].map(|way| new("rows", way));
        let mut each = ["out", "in"].map(|way| new("each", way));
        rig.batches(&shape)?;
        rig.each(&shape)?;
        for _ in 0..bench.pairs {
            let ours = rig.batches(&shape)?;
            let raw = rig.each(&shape)?;
            for way in 0..2 {
                asked[way].pairs.push((gigabytes / ours[way], ASKED[way]));
                each[way].pairs.push((gigabytes / ours[way], gigabytes / raw[way]));
            }
        }
        rows.extend(asked.into_iter().chain(each));
    }
    rows.extend(beside(bench, &mut rig)?);
    rig.close()?;
    Ok(rows)
}

/// The same next to back-to-back products, behind whose blocks a kernel queues and a copy does not.
fn beside(bench: &Bench, rig: &mut Rig) -> Result<Vec<Row>> {
    let place = if bench.simulated { Place::Nowhere } else { Place::Cuda(bench.ordinal) };
    let busy = rig.busy;
    let mut work = Compute::new(&mut *rig.backend, Kind::Gemm, place, busy)?;
    let (name, count, len, strided) = SIZES[1];
    let shape = Shape::new(rig.raw[0].0, count, len, strided)?;
    let gigabytes = BATCHES as f64 * (count * len) as f64 / 1e9;
    let mut each =
        ["out", "in"].map(|way| Row::new(format!("gemm.{way}-{name}"), "GB/s", Better::Higher));
    for _ in 0..bench.few {
        let mut both = [[0.0; 2]; 2];
        for (ours, seconds) in [true, false].into_iter().zip(&mut both) {
            // As many as last longer than what runs beside them.
            work.enqueue(&mut *rig.backend, 64)?;
            rig.unsynced = true;
            *seconds = if ours { rig.batches(&shape)? } else { rig.each(&shape)? };
            rig.unsynced = false;
            rig.backend.sync()?;
        }
        for (way, row) in each.iter_mut().enumerate() {
            row.pairs.push((gigabytes / both[0][way], gigabytes / both[1][way]));
        }
    }
    work.close(&mut *rig.backend)?;
    Ok(each.into())
}

/// Ranges of one batch.
struct Shape {
    strips: Vec<Strip>,
    ranges: Vec<DeviceRange>,
}

impl Shape {
    /// Each range is followed by a gap of its length.
    fn new(within: DeviceRange, count: u64, len: u64, strided: bool) -> Result<Shape> {
        let part = |nth: u64| within.part(Bytes(2 * nth * len), Bytes(len));
        let ranges = (0..count).map(part).collect::<Result<Vec<_>>>()?;
        let strips = match strided {
            true => vec![Strip::rows(within, Bytes::ZERO, Bytes(len), count, Bytes(2 * len))?],
            false => ranges.iter().map(|range| Strip::whole(*range)).collect::<Result<_>>()?,
        };
        Ok(Shape { strips, ranges })
    }
}

impl Rig {
    /// Seconds of some gathers, and of as many scatters.
    fn batches(&mut self, shape: &Shape) -> Result<[f64; 2]> {
        let mut batches: Vec<Batch> = Vec::with_capacity(BATCHES);
        self.hold()?;
        for _ in 0..BATCHES {
            batches.push(self.engine.gather(&shape.strips, self.on, "rows")?);
        }
        if let Some(last) = batches.last() {
            self.engine.gathered(last, self.on)?;
        }
        let out = self.let_go_of(self.compute.id)?;
        self.hold()?;
        for batch in &mut batches {
            self.engine.scatter(batch, &shape.strips, self.on)?;
        }
        let back = self.let_go_of(self.compute.id)?;
        self.backend.sync()?;
        for batch in batches {
            self.engine.discard(batch)?;
        }
        self.engine.drain()?;
        Ok([out, back])
    }

    /// The same by a raw copy for each range.
    fn each(&mut self, shape: &Shape) -> Result<[f64; 2]> {
        let mut seconds = [0.0; 2];
        for (way, seconds) in seconds.iter_mut().enumerate() {
            self.hold()?;
            let stream = [self.out, self.back][way];
            for _ in 0..BATCHES {
                let mut at = Bytes::ZERO;
                for range in &shape.ranges {
                    let host = self.raw[0].1.trunk(at, range.len())?;
                    let device = range.part(Bytes::ZERO, host.len())?;
                    match (&self.driver, way) {
                        (Some(driver), 0) => {
                            driver.copy_out(host, device, stream.raw).map_err(refused)?
                        }
                        (Some(driver), _) => {
                            driver.copy_in(device, host, stream.raw).map_err(refused)?
                        }
                        (None, 0) => self.backend.copy_out(host, device, stream.id)?,
                        (None, _) => self.backend.copy_in(device, host, stream.id)?,
                    }
                    at += range.len();
                }
            }
            self.follow(self.compute.id, stream.id)?;
            *seconds = self.let_go_of(self.compute.id)?;
        }
        Ok(seconds)
    }
}
