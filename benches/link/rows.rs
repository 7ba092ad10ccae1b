//! Many small ranges, and rows at a stride, gathered out and scattered back.
//!
//! What it is not: large copies cut small. Nothing of these can be one copy.
//!
//! Invariant: ours, and a raw copy for each range, move the same ranges, in turn. The reference of
//! `rows.out-*` and `rows.in-*` is what is asked, 50 GB/s out and 45 in; `each.*` stands beside a
//! raw copy for each range, of which the host makes no more in a second however many there are: so
//! of those only a fraction of a batch is made. `rows.gemm-*` is that next to matrix products, and
//! `rows.batch-*` with kernels off, where the driver's own call for batches moves them;
//! `rows.driver-gemm-*` is both.
//!
//! ```text
//!   device  [64k]..[64k]..[64k]..   --gather-->  pinned [64k|64k|64k|..]   --scatter--> and back
//! ```
//!
//! `main` uses it.

use crate::Bench;
use crate::compute::{Compute, Kind, Place};
use crate::figure::{Better, Figures, Row};
use crate::rig::{Plan, Rig, refused};
use lightering::backend::Backend;
use lightering::engine::Batch;
use lightering::pack::Strip;
use lightering::{Bytes, DeviceRange, Result};
use std::time::Duration;

/// Batches queued at once.
const BATCHES: usize = 4;
/// At most so many raw copies at once: the driver's own queue holds some 800, and 1,024 not.
const EACH_MAX: usize = 512;
const ASKED: [f64; 2] = [50.0, 45.0];
const SIZES: [(&str, u64, u64, bool); 4] = [
    ("256x64kib", 256, 64 << 10, false),
    ("4096x16kib", 4096, 16 << 10, false),
    ("16384x4kib", 16_384, 4 << 10, false),
    ("strided-4096x4kib", 4096, 4 << 10, true),
];
/// The host makes a batch's table in less, and enqueues [`EACH_MAX`] copies in less.
const HOLD: Duration = Duration::from_millis(6);
/// Products that last longer than what runs beside them.
const PRODUCTS: u32 = 64;

/// Gigabytes a second, out and in, for each size.
pub(crate) fn rows(bench: &Bench, out: &mut Figures) -> Result<()> {
    let Some(mut rig) = bench.rig_of_rows(true)? else { return Ok(()) };
    for (name, count, len, strided) in SIZES {
        let shape = Shape::new(rig.raw[0].0, count, len, strided)?;
        let new = |what: &str, way: &str| {
            Row::new(format!("{what}.{way}-{name}"), "GB/s", Better::Higher)
        };
        let mut asked = ["out", "in"].map(|way| new("rows", way));
        let mut each = ["out", "in"].map(|way| new("each", way));
        rig.hold_for(HOLD);
        let before = rig.unheld;
        for (ours, raw) in
            crate::pairs(&mut rig, bench.pairs, |rig| rig.batches(&shape), |rig| rig.each(&shape))?
        {
            for way in 0..2 {
                asked[way].pairs.push((ours[way], ASKED[way]));
                each[way].pairs.push((ours[way], raw[way]));
            }
        }
        for row in asked.iter_mut().chain(&mut each) {
            row.unheld = rig.unheld - before;
        }
        out.add(asked.into_iter().chain(each));
    }
    rig.close()
}

/// The same with kernels off: what a driver's call for batches makes of it, beside raw copies.
pub(crate) fn batch(bench: &Bench, out: &mut Figures) -> Result<()> {
    const SIZES: [(&str, u64, u64); 4] = [
        ("16x1mib", 16, 1 << 20),
        ("64x256kib", 64, 256 << 10),
        ("256x64kib", 256, 64 << 10),
        ("4096x16kib", 4096, 16 << 10),
    ];
    let Some(mut rig) = bench.rig_of_rows(false)? else { return Ok(()) };
    for (name, count, len) in SIZES {
        let shape = Shape::new(rig.raw[0].0, count, len, false)?;
        let mut rows = ["out", "in"]
            .map(|way| Row::new(format!("rows.batch-{way}-{name}"), "GB/s", Better::Higher));
        rig.hold_for(HOLD);
        let before = rig.unheld;
        for (ours, raw) in
            crate::pairs(&mut rig, bench.pairs, |rig| rig.batches(&shape), |rig| rig.each(&shape))?
        {
            for (way, row) in rows.iter_mut().enumerate() {
                row.pairs.push((ours[way], raw[way]));
                row.unheld = rig.unheld - before;
            }
        }
        out.add(rows);
    }
    rig.close()
}

/// The same next to back-to-back products, behind whose blocks a kernel queues and a copy does not.
pub(crate) fn gemm(bench: &Bench, out: &mut Figures) -> Result<()> {
    beside_products(bench, out, "gemm", true)
}

/// As `gemm`, with kernels off.
pub(crate) fn gemm_by_the_driver(bench: &Bench, out: &mut Figures) -> Result<()> {
    beside_products(bench, out, "driver-gemm", false)
}

fn beside_products(bench: &Bench, out: &mut Figures, what: &str, kernels: bool) -> Result<()> {
    let Some(mut rig) = bench.rig_of_rows(kernels)? else { return Ok(()) };
    let place = if bench.simulated { Place::Nowhere } else { Place::Cuda(bench.ordinal) };
    let busy = rig.busy;
    let work = Compute::new(&mut *rig.backend, Kind::Gemm, place, busy)?;
    let mut beside = Beside { rig, work };
    for (name, count, len, strided) in SIZES {
        let shape = Shape::new(beside.rig.raw[0].0, count, len, strided)?;
        let mut rows = ["out", "in"]
            .map(|way| Row::new(format!("rows.{what}-{way}-{name}"), "GB/s", Better::Higher));
        let before = beside.rig.unheld;
        for (ours, raw) in crate::pairs(
            &mut beside,
            bench.pairs,
            |beside| beside.run(|rig| rig.batches(&shape)),
            |beside| beside.run(|rig| rig.each(&shape)),
        )? {
            for (way, row) in rows.iter_mut().enumerate() {
                row.pairs.push((ours[way], raw[way]));
                row.unheld = beside.rig.unheld - before;
            }
        }
        out.add(rows);
    }
    let Beside { mut rig, work } = beside;
    work.close(&mut *rig.backend)?;
    rig.close()
}

/// Products, and what runs next to them.
struct Beside {
    rig: Rig,
    work: Compute,
}

impl Beside {
    fn run(&mut self, copies: impl Fn(&mut Rig) -> Result<[f64; 2]>) -> Result<[f64; 2]> {
        let Beside { rig, work } = self;
        work.enqueue(&mut *rig.backend, PRODUCTS)?;
        rig.mark_busy()?;
        rig.unsynced = true;
        let rates = copies(rig);
        rig.unsynced = false;
        rig.backend.sync()?;
        rates
    }
}

impl Bench {
    /// A rig with one range that the largest shape lies in; `None` where that is more than all.
    fn rig_of_rows(&self, has_kernels: bool) -> Result<Option<Rig>> {
        let largest = SIZES.iter().map(|(_, count, len, _)| count * len).max().unwrap_or_default();
        let span = Bytes(2 * largest);
        if self.total.0 < 2 * span.0 {
            return Ok(None);
        }
        let mut plan = Plan::new(span, 1);
        plan.options.events_max = 1 << 15;
        if !has_kernels {
            plan.options.pack_blocks_max = 0;
        }
        // Nobody writes the ranges between two batches, as the engine would suppose.
        plan.options.note_uses = false;
        self.rig(&plan).map(Some)
    }
}

/// Ranges of one batch.
struct Shape {
    strips: Vec<Strip>,
    ranges: Vec<DeviceRange>,
    /// Gigabytes of a batch.
    gigabytes: f64,
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
        Ok(Shape { strips, ranges, gigabytes: (count * len) as f64 / 1e9 })
    }
}

impl Rig {
    /// Gigabytes a second of some gathers, and of as many scatters.
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
        self.look_at_company()?;
        for batch in batches {
            self.engine.discard(batch)?;
        }
        self.engine.drain()?;
        Ok([out, back].map(|seconds| BATCHES as f64 * shape.gigabytes / seconds))
    }

    /// The same by a raw copy for each range.
    fn each(&mut self, shape: &Shape) -> Result<[f64; 2]> {
        let ranges = &shape.ranges[..shape.ranges.len().min(EACH_MAX)];
        let part = ranges.len() as f64 / shape.ranges.len() as f64;
        let mut rates = [0.0; 2];
        for (way, rate) in rates.iter_mut().enumerate() {
            self.hold()?;
            let stream = [self.out, self.back][way];
            let mut at = Bytes::ZERO;
            for range in ranges {
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
            self.follow(self.compute.id, stream.id)?;
            *rate = part * shape.gigabytes / self.let_go_of(self.compute.id)?;
        }
        self.look_at_company()?;
        Ok(rates)
    }
}
