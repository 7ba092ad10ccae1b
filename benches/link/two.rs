//! Two devices of one host, each with an engine of its own, on one pool of pinned memory.
//!
//! What it is not: two processes; `apart` has those.
//!
//! Invariant: a device's figures are its own events'; a thread for each starts its copies when the
//! other does. Alone means: while the other device has nothing to do.
//!
//! ```text
//!   thread 0   ..|== out ==|..|== both ways ==|..     barrier before each
//!   thread 1   ..|== out ==|..|== both ways ==|..
//! ```
//!
//! `main` uses it.

use crate::Bench;
use crate::figure::{Better, Figures, Row};
use crate::rig::{Plan, Rig};
use lightering::{Bytes, Error, Kind, Result};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) const BYTES: Bytes = Bytes::mib(64);

/// What one device moved a second, in one round.
#[derive(Clone, Copy, Default)]
pub(crate) struct Round {
    /// Out and in, alone.
    pub(crate) alone: [f64; 2],
    /// The same while the other does so, too.
    pub(crate) together: [f64; 2],
    /// The same raw.
    pub(crate) raw: [f64; 2],
    /// Both ways at once, while the other does so: through the engine, and raw.
    pub(crate) both: [f64; 2],
}

/// Together beside alone, both ways beside raw, and together beside raw, which tells what the host
/// itself gives two: of each round the device that is worse off.
pub(crate) fn figures(kind: &str, first: &[Round], second: &[Round]) -> [Row; 5] {
    let row = |name: &str| Row::new(format!("two.{kind}{name}"), "GB/s", Better::Higher);
    let mut rows = ["out", "in", "both", "raw-out", "raw-in"].map(row);
    for (a, b) in first.iter().zip(second) {
        let worse = |of: fn(&Round, usize) -> (f64, f64), way| -> (f64, f64) {
            let (one, two) = (of(a, way), of(b, way));
            if one.0 / one.1 <= two.0 / two.1 { one } else { two }
        };
        let both = worse(|round, _| (round.both[0], round.both[1]), 0);
        let [out, back] = [0, 1].map(|way| worse(|r, way| (r.together[way], r.alone[way]), way));
        let [raw_out, raw_in] =
            [0, 1].map(|way| worse(|r, way| (r.together[way], r.raw[way]), way));
        for (row, pair) in rows.iter_mut().zip([out, back, both, raw_out, raw_in]) {
            row.pairs.push(pair);
        }
    }
    rows
}

/// Who copies: one device, both, or both by raw calls.
#[derive(Clone, Copy)]
enum Whose {
    Nth(usize),
    Both,
    Raw,
}

impl Bench {
    /// How many copies of [`BYTES`] each device makes, and which two there are; `None` where there
    /// is but one.
    pub(crate) fn two(&self) -> Option<(usize, [u32; 2])> {
        let count = (self.total.0 / 2 / BYTES.0) as usize;
        let ordinals = [self.ordinal, self.ordinal + 1];
        (count >= 2 && self.open(ordinals[1]).is_ok()).then_some((count, ordinals))
    }
}

/// In one process.
pub(crate) fn two(bench: &Bench, out: &mut Figures) -> Result<()> {
    let Some((count, ordinals)) = bench.two() else { return Ok(()) };
    let meeting = Meeting { barrier: Barrier::new(2), is_off: AtomicBool::new(false) };
    let rounds = std::thread::scope(|scope| {
        let threads = [0, 1].map(|nth| {
            let (meeting, ordinal) = (&meeting, ordinals[nth]);
            scope.spawn(move || {
                let rig = bench.rig_on(ordinal, &Plan::new(BYTES, count));
                match (meeting.have_both(&rig), rig?) {
                    (true, rig) => device(bench, rig, nth, &meeting.barrier),
                    // The other one's error says why there are no rounds.
                    (false, rig) => rig.close().map(|()| Vec::new()),
                }
            })
        });
        threads.map(|thread| {
            let gone = |_| Error::new(Kind::Lost, "thread").detail("it panicked");
            thread.join().map_err(gone).and_then(|rounds| rounds)
        })
    });
    let [first, second] = rounds;
    out.add(figures("", &first?, &second?));
    Ok(())
}

/// Where the two threads meet.
struct Meeting {
    barrier: Barrier,
    /// One of them has nothing to go on with.
    is_off: AtomicBool,
}

impl Meeting {
    /// Have both what they need? Waits for the other one, with a rig or without: who left before
    /// that would be waited for at a barrier for ever.
    fn have_both(&self, rig: &Result<Rig>) -> bool {
        // The barrier orders this before the other one's question.
        self.is_off.fetch_or(rig.is_err(), Ordering::Relaxed);
        self.barrier.wait();
        !self.is_off.load(Ordering::Relaxed)
    }
}

/// One device's part. Both go through the same barriers, whatever happens to one.
fn device(bench: &Bench, mut rig: Rig, nth: usize, barrier: &Barrier) -> Result<Vec<Round>> {
    let gigabytes = rig.all() / 1e9;
    let rate = |seconds: [f64; 2]| seconds.map(|seconds| gigabytes / seconds);
    let mut rounds = Vec::with_capacity(bench.pairs);
    let mut failed = None;
    let mut keep = |result: Result<f64>| -> f64 {
        result.unwrap_or_else(|error| {
            failed.get_or_insert(error);
            f64::NAN
        })
    };
    for turn in 0..bench.pairs + 1 {
        let mut round = Round::default();
        // What is compared goes first in turn.
        let is_first = turn % 2 == 0;
        // One alone, then the other, both, and both raw.
        let mut order = [Whose::Nth(0), Whose::Nth(1), Whose::Both, Whose::Raw];
        if !is_first {
            order.reverse();
        }
        for whose in order {
            barrier.wait();
            let (seconds, rates) = match whose {
                Whose::Nth(other) if other != nth => continue,
                Whose::Nth(_) => (rig.ours_each_way(), &mut round.alone),
                Whose::Both => (rig.ours_each_way(), &mut round.together),
                Whose::Raw => (rig.raw_each_way(), &mut round.raw),
            };
            *rates = rate(pair(seconds).map(&mut keep));
        }
        for raw in [!is_first, is_first] {
            barrier.wait();
            let seconds = if raw { rig.raw_both() } else { rig.ours_both() };
            round.both[usize::from(raw)] = gigabytes / keep(seconds);
        }
        rounds.push(round);
    }
    // The first round warms up.
    rounds.remove(0);
    match failed {
        Some(error) => Err(error),
        None => rig.close().map(|()| rounds),
    }
}

fn pair(seconds: Result<[f64; 2]>) -> [Result<f64>; 2] {
    match seconds {
        Ok([out, back]) => [Ok(out), Ok(back)],
        Err(error) => [Err(error.clone()), Err(error)],
    }
}
