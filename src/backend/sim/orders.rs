//! Every order there is: schedules that enumerate all choices of a small program, one run each.
//!
//! What it is not: a reduction. Two orders that differ in nothing that matters are two runs. For
//! copies of many pieces, or a host that polls without end, there are too many.
//!
//! Invariant: each run takes the choices of the last one up to the last that had an option left,
//! and the next option there. So no two runs are alike, and after the last one there is no other.
//!
//! ```text
//!   run 1:  0 0 0        run 2:  0 0 1        run 3:  0 1        run 4:  1 0 ...
//!   a choice is:  which stream makes the next step
//!                 does the device make one more before the host hears an answer, or takes memory
//!                 how much of a copy of several pieces moves, and in which order of pieces
//! ```
//!
//! What the host enqueues it cannot see run, so the device makes no step there: whatever order it
//! would have run in by then it may still run in later. Recordings pass by themselves.
//!
//! Tests use it.

use super::schedule::{Call, Schedule};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Hands out one schedule for each order of a program, which must ask for the same choices
/// whenever it was given the same answers.
#[derive(Debug, Default)]
pub struct Orders {
    path: Arc<Mutex<Path>>,
    runs: u64,
}

#[derive(Debug, Default)]
struct Path {
    /// Each choice made, and how many options it had.
    choices: Vec<(u32, u32)>,
    /// How many of them this run has made.
    depth: usize,
}

impl Orders {
    /// Every order, the first one first.
    pub fn new() -> Orders {
        Orders::default()
    }

    /// The schedule of the next run; `None` when every order was had. The earlier run is over.
    #[allow(clippy::should_implement_trait, reason = "a run must be over before the next begins")]
    pub fn next(&mut self) -> Option<Box<dyn Schedule>> {
        if self.runs > 0 && !lock(&self.path).advance() {
            return None;
        }
        self.runs += 1;
        Some(Box::new(Order { path: self.path.clone() }))
    }

    /// How many runs there were so far.
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// The choices of the last run: what [`Orders::replay`] takes.
    pub fn path(&self) -> Vec<u32> {
        lock(&self.path).choices.iter().map(|(choice, _)| *choice).collect()
    }

    /// The schedule of one run, by its choices.
    pub fn replay(path: &[u32]) -> Box<dyn Schedule> {
        let choices = path.iter().map(|choice| (*choice, u32::MAX)).collect();
        Box::new(Order { path: Arc::new(Mutex::new(Path { choices, depth: 0 })) })
    }
}

impl Path {
    /// Goes on to the next order; `false` where there is none.
    fn advance(&mut self) -> bool {
        assert!(self.depth == self.choices.len(), "a run makes every choice that led to it");
        while self.choices.last().is_some_and(|(choice, options)| choice + 1 == *options) {
            self.choices.pop();
        }
        self.depth = 0;
        match self.choices.last_mut() {
            Some((choice, _)) => {
                *choice += 1;
                true
            }
            None => false,
        }
    }

    fn choose(&mut self, options: u32) -> u32 {
        if self.depth == self.choices.len() {
            self.choices.push((0, options));
        }
        let (choice, had) = &mut self.choices[self.depth];
        assert!(*had == options || *had == u32::MAX, "a run repeats what led to it");
        assert!(*choice < options, "a path fits its program");
        self.depth += 1;
        *choice
    }
}

fn lock(path: &Mutex<Path>) -> MutexGuard<'_, Path> {
    path.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Order {
    path: Arc<Mutex<Path>>,
}

impl Schedule for Order {
    fn choose(&mut self, options: usize) -> usize {
        if options == 1 { 0 } else { lock(&self.path).choose(options as u32) as usize }
    }

    fn pace(&mut self, call: Call) -> usize {
        if call == Call::Enqueue { 0 } else { usize::MAX }
    }

    fn holds(&mut self, _: &[u32]) -> bool {
        self.choose(2) == 0
    }

    fn passes_records(&self) -> bool {
        true
    }
}
