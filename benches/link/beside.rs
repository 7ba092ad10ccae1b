//! Copies beside compute, in every way that could tell why the engine's differ from raw ones.
//!
//! What it is not: the figure that is asked for; the example `overlap` measures that.
//!
//! Invariant: each variant stands beside whole raw copies of the same run, in turn, next to the
//! same amount of compute, which takes as long as the copies.
//!
//! ```text
//!   busy     ..held..|gate|======== compute ========|
//!   copies                |== out ==|== back ==|----|end
//!
//!   raw-cut       raw, cut into trunks               is it the trunks?
//!   raw-marked    and an event after each            is it the events?
//!   ahead-T       the engine, fetching ahead         its lanes
//!   urgent-T      the engine, fetching on demand     and a hop over the compute stream each time
//!   owned-T       the engine, memory of its own      and memory that goes and comes meanwhile
//! ```
//!
//! `main` uses it.

use crate::compute::{Compute, Kind, Place};
use crate::figure::{Better, Figures, Row};
use crate::rig::{Cut, Plan, Rig, WHOLE};
use crate::{Bench, pairs};
use lightering::backend::{Backend, Timing};
use lightering::{Bytes, Result};

/// How the copies of a run are made.
#[derive(Clone, Copy)]
enum Way {
    Nobody,
    Raw(Cut),
    Ahead,
    Urgent,
    Owned,
}

/// Milliseconds until copies out and back are done, and until the compute beside them is, too.
pub(crate) fn beside(bench: &Bench, out: &mut Figures) -> Result<()> {
    let bytes = Bytes::mib(256);
    let Some(count) = bench.count(bytes) else { return Ok(()) };
    for kind in [Kind::Hbm, Kind::Gemm] {
        for trunk in [Bytes::mib(16), Bytes::mib(32), Bytes::mib(64), bytes] {
            of(bench, kind, &Plan::new(bytes, count).trunks(trunk), out)?;
        }
    }
    Ok(())
}

/// One kind of compute and one size of trunks.
fn of(bench: &Bench, kind: Kind, plan: &Plan, out: &mut Figures) -> Result<()> {
    let place = match bench.simulated {
        true => Place::Nowhere,
        false => Place::Cuda(bench.ordinal),
    };
    let mut rig = bench.rig(plan)?;
    let busy = rig.busy;
    let work = Compute::new(&mut *rig.backend, kind, place, busy)?;
    let mark = rig.backend.create_event(Timing::Off)?;
    let mut both = Both { rig, work, amount: 0 };
    both.size(kind)?;
    let trunk = plan.options.trunk_bytes_max;
    for (name, way) in [
        ("raw-cut", Way::Raw(Cut { trunk, mark: None })),
        ("raw-marked", Way::Raw(Cut { trunk, mark: Some(mark) })),
        ("ahead", Way::Ahead),
        ("urgent", Way::Urgent),
        ("owned", Way::Owned),
    ] {
        let name = format!("beside.{}-{name}-{}mib", kind.name(), trunk.0 >> 20);
        let mut two =
            ["copies", "all"].map(|what| Row::new(format!("{name}-{what}"), "ms", Better::Lower));
        let before = both.rig.unheld;
        let whole = |both: &mut Both| both.run(Way::Raw(WHOLE));
        for (ours, raw) in pairs(&mut both, bench.few, |both| both.run(way), whole)? {
            for (row, (ours, raw)) in two.iter_mut().zip(ours.into_iter().zip(raw)) {
                row.pairs.push((ours * 1e3, raw * 1e3));
                row.unheld = both.rig.unheld - before;
            }
        }
        out.add(two);
    }
    let Both { mut rig, work, .. } = both;
    rig.backend.close_event(mark)?;
    work.close(&mut *rig.backend)?;
    rig.close()
}

/// The copies, and what runs beside them.
struct Both {
    rig: Rig,
    work: Compute,
    amount: u32,
}

impl Both {
    /// So much compute as takes as long as raw copies.
    fn size(&mut self, kind: Kind) -> Result<()> {
        self.run(Way::Raw(WHOLE))?;
        let [_, copies] = self.run(Way::Raw(WHOLE))?;
        self.amount = kind.trial();
        // The second time about as long as it will be: a busy device may lower its clock.
        for _ in 0..2 {
            let [_, seconds] = self.run(Way::Nobody)?;
            let wanted = f64::from(self.amount) * copies / seconds;
            self.amount = wanted.round().clamp(1.0, 4e9) as u32;
        }
        Ok(())
    }

    /// Seconds until the copies are done, and until all is.
    fn run(&mut self, way: Way) -> Result<[f64; 2]> {
        let rig = &mut self.rig;
        let all = 0..rig.raw.len();
        let storages = match way {
            Way::Ahead | Way::Urgent => rig.adopt()?,
            Way::Owned => rig.own()?,
            _ => Vec::new(),
        };
        rig.hold()?;
        match way {
            Way::Nobody => {}
            Way::Raw(cut) => {
                rig.raw_out(all.clone(), cut)?;
                rig.follow(rig.back.id, rig.out.id)?;
                rig.raw_in(all, cut)?;
            }
            Way::Ahead | Way::Urgent | Way::Owned => {
                rig.evict(&storages)?;
                rig.flush()?;
                if let Way::Ahead = way {
                    rig.prefetch(&storages, 0)?;
                    rig.acquire(&storages)?;
                } else if let Way::Owned = way {
                    rig.acquire(&storages)?;
                } else {
                    rig.refill(&storages)?;
                }
            }
        }
        if self.amount > 0 {
            self.work.enqueue(&mut *rig.backend, self.amount)?;
        }
        let (copies, last) = (rig.compute.id, rig.busy);
        rig.follow(copies, rig.back.id)?;
        rig.follow(last, copies)?;
        let seconds = rig.let_both_go(copies, last)?;
        rig.release(storages)?;
        Ok(seconds)
    }
}
