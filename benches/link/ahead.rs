//! A backward pass whose layers' inputs are on the host: how much of the copies hides behind the
//! layers' compute, by how far ahead they are fetched.
//!
//! What it is not: copies that share anything with the compute. The kernels touch no memory.
//!
//! Invariant: the reference is what no schedule can beat: the first copy, of each other layer the
//! longer of its copy and the compute beside it, and the last compute; all measured alone in the
//! same run.
//!
//! ```text
//!   depth 0   copy|compute|copy|compute|..       the copy starts when the layer is asked for
//!   depth 2   copy|copy   |copy   |copy   |..    two layers' inputs are on their way
//!                 |compute|compute|compute|
//! ```
//!
//! `main` uses it.

use crate::Bench;
use crate::figure::{Better, Figures, Row};
use crate::rig::{Plan, Rig, WHOLE};
use lightering::{Acquire, Bytes, Result};
use std::collections::HashMap;

const LAYERS: usize = 64;
/// From here on something is asked of the figures, and they get all their pairs.
const DEPTH_ASKED: usize = 2;
/// A layer's compute, in copies of its input.
const FACTORS: [f64; 5] = [0.2, 0.5, 1.0, 2.0, 5.0];

/// Milliseconds of the whole pass, for each amount of compute.
pub(crate) fn ahead(bench: &Bench, depth: usize, out: &mut Figures) -> Result<()> {
    let bytes = Bytes(bench.total.0 / LAYERS as u64);
    let mut plan = Plan::new(bytes, LAYERS);
    plan.options.prefetch_count_max = depth;
    let mut rig = bench.rig(&plan)?;
    let pairs = if depth < DEPTH_ASKED { bench.few } else { bench.pairs };
    for factor in FACTORS {
        let mut row = Row::new(format!("prefetch.d{depth}-x{factor}"), "ms", Better::Lower);
        let before = rig.unheld;
        let rounds = (rig.raw_copy()? * factor * rig.rounds_a_second) as u32;
        // The engine learns the order of readers, and the device its clock.
        rig.backward(rounds)?;
        for nth in 0..pairs {
            let ours_first = nth % 2 == 0;
            let early = if ours_first { rig.backward(rounds)? } else { 0.0 };
            let (copy, compute) = (rig.raw_copy()?, rig.compute_alone(rounds)?);
            let ours = if ours_first { early } else { rig.backward(rounds)? };
            let bound = copy + (LAYERS - 1) as f64 * copy.max(compute) + compute;
            row.pairs.push((ours * 1e3, bound * 1e3));
        }
        row.unheld = rig.unheld - before;
        out.add([row]);
    }
    rig.close()
}

impl Rig {
    /// Seconds of one of eight kernels, alone.
    fn compute_alone(&mut self, rounds: u32) -> Result<f64> {
        const COUNT: usize = 8;
        self.hold()?;
        for _ in 0..COUNT {
            self.spin(rounds)?;
        }
        Ok(self.let_go(self.compute.id)? / COUNT as f64)
    }

    /// Seconds of one raw copy back, of all in a row.
    fn raw_copy(&mut self) -> Result<f64> {
        let all = self.raw.len();
        self.hold()?;
        self.raw_in(0..all, WHOLE)?;
        self.follow(self.compute.id, self.back.id)?;
        Ok(self.let_go(self.compute.id)? / all as f64)
    }

    /// Everything goes out, then comes back for its layer, the last one first.
    fn backward(&mut self, rounds: u32) -> Result<f64> {
        let storages = self.adopt()?;
        self.evict(&storages)?;
        self.flush()?;
        self.engine.drain()?;
        let ranges = self.raw.iter().map(|(range, _)| *range);
        let rooms: HashMap<_, _> =
            storages.iter().map(|storage| storage.id()).zip(ranges).collect();
        self.hold()?;
        for storage in storages.iter().rev() {
            if let Acquire::NeedsRoom(_) = self.engine.acquire(storage.id(), self.on)? {
                self.engine.refill(storage.id(), rooms[&storage.id()], self.on)?;
            }
            while let Some((id, _)) = self.engine.wanted(self.on)? {
                self.engine.prefetch(id, rooms[&id], self.on)?;
            }
            self.spin(rounds)?;
        }
        let seconds = self.let_go(self.compute.id)?;
        self.release(storages)?;
        Ok(seconds)
    }
}
