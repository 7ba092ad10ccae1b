//! Schedules that look for faults of a given depth: priorities, and few moments at which one falls.
//!
//! What it is not: fair. A stream of low priority stands still as long as any other can run; that
//! is what shows an order nobody thought of.
//!
//! Invariant: of those that can run, the one of the highest priority runs. The host is one of them:
//! it goes on as long as its priority is the highest.
//!
//! ```text
//!   actors  host, streams            random priorities, all different
//!   steps   1 ... k                  at `depth - 1` random ones whoever would run falls to the end
//!   a fault that needs `depth` orders between n actors shows in a run with at least the
//!   probability 1 / (n * k^(depth - 1)), whatever else the program does
//! ```
//!
//! Tests use it. (Burckhardt et al., "A randomized scheduler with probabilistic guarantees of
//! finding bugs", 2010.)

use super::schedule::{Call, Dice, Schedule};

/// Chooses by priorities that a seed gives.
#[derive(Clone, Debug)]
pub struct Pct {
    dice: Dice,
    /// Steps at which a priority falls, not yet reached; the earliest last.
    falls: Vec<u64>,
    step: u64,
    host: u64,
    /// Of each stream seen; the numbers are those of `pick`.
    streams: Vec<(u32, u64)>,
    /// Questions since the device's last step.
    polls: u32,
}

/// Priorities from the start are above this; those fallen to are below.
const START: u64 = 1 << 32;

impl Pct {
    /// So many questions with no step of the device between let it make one, whatever the
    /// priorities: a host that polls gets on.
    pub const PATIENCE_POLLS: u32 = 32;

    /// The schedule of `seed` for programs of about `steps` steps of host and device together,
    /// looking for faults that need `depth` orders (at least one).
    pub fn new(seed: u64, depth: usize, steps: u64) -> Pct {
        let mut dice = Dice::new(seed);
        let falls = (1..depth.max(1)).map(|_| 1 + dice.below(steps.max(1) as usize) as u64);
        let mut falls: Vec<u64> = falls.collect();
        falls.sort_unstable_by(|a, b| b.cmp(a));
        let host = START + (dice.roll() >> 1);
        Pct { dice, falls, step: 0, host, streams: Vec::new(), polls: 0 }
    }

    /// One step is about to be made. Must whoever makes it fall behind all others?
    fn falls_now(&mut self) -> Option<u64> {
        self.step += 1;
        if self.falls.last().is_some_and(|at| *at <= self.step) {
            self.falls.pop();
            // Whoever falls later falls lower.
            return Some(self.falls.len() as u64);
        }
        None
    }

    fn priority(&mut self, stream: u32) -> &mut u64 {
        let place = self.streams.iter().position(|(seen, _)| *seen == stream);
        let place = place.unwrap_or_else(|| {
            self.streams.push((stream, START + (self.dice.roll() >> 1)));
            self.streams.len() - 1
        });
        &mut self.streams[place].1
    }

    fn highest(&mut self, runnable: &[u32]) -> usize {
        let places = 0..runnable.len();
        places.max_by_key(|place| *self.priority(runnable[*place])).unwrap_or(0)
    }
}

impl Schedule for Pct {
    fn choose(&mut self, options: usize) -> usize {
        self.dice.below(options)
    }

    fn pace(&mut self, call: Call) -> usize {
        self.polls += u32::from(call == Call::Query);
        if let Some(fallen) = self.falls_now() {
            self.host = fallen;
        }
        usize::MAX
    }

    fn holds(&mut self, runnable: &[u32]) -> bool {
        let is_polling = self.polls >= Pct::PATIENCE_POLLS;
        let best = self.highest(runnable);
        !is_polling && self.host > *self.priority(runnable[best])
    }

    fn pick(&mut self, runnable: &[u32]) -> usize {
        self.polls = 0;
        let best = self.highest(runnable);
        match self.falls_now() {
            None => best,
            Some(fallen) => {
                *self.priority(runnable[best]) = fallen;
                self.highest(runnable)
            }
        }
    }
}
