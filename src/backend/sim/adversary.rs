//! The adversary's clock: every order of steps that the contract allows, by a schedule's choice.
//!
//! What it is not: it has no times. Its "nanoseconds" count steps.
//!
//! Invariant: each step is made by the head of one stream whose waits are met; nothing else moves.
//!
//! ```text
//!   stream 3  [copy ##.#..] [record]     a step: more pieces of the copy, or all of them
//!   stream 5  [kernel]                   a step: the whole kernel
//! ```
//!
//! The simulated world may use it.

use super::machine::{Head, Machine};
use super::queue::{Mark, Op};
use super::schedule::{Call, Schedule};

#[derive(Debug)]
pub(super) struct Adversary {
    schedule: Box<dyn Schedule>,
    /// Scratch.
    runnable: Vec<u32>,
    steps: u64,
}

impl Adversary {
    pub(super) fn new(schedule: Box<dyn Schedule>) -> Adversary {
        Adversary { schedule, runnable: Vec::new(), steps: 0 }
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// Lets the device run a little, as the schedule likes.
    pub(super) fn pass(&mut self, machine: &mut Machine, call: Call) {
        let mut left = self.schedule.pace(call);
        while left > 0 && self.step(machine, true) {
            left -= 1;
        }
    }

    /// Runs until the mark is done; stops early where nothing can run (a device is lost).
    pub(super) fn run_until(&mut self, machine: &mut Machine, mark: Mark) {
        while !machine.is_done(mark) && self.step(machine, false) {}
    }

    /// One step of one stream; `false` where none can make one, or a host that `may_hold` goes on
    /// instead.
    fn step(&mut self, machine: &mut Machine, may_hold: bool) -> bool {
        if self.schedule.passes_records() {
            machine.pass_records(self.steps as f64);
        }
        let stalled = self.gather(machine);
        if self.runnable.is_empty() && !stalled {
            return false;
        }
        if may_hold && !self.runnable.is_empty() && self.schedule.holds(&self.runnable) {
            return false;
        }
        self.steps += 1;
        if self.runnable.is_empty() {
            return true;
        }
        let slot = self.runnable[self.schedule.pick(&self.runnable)];
        self.progress(machine, slot);
        true
    }

    /// Lists the streams that can run, and lets a step of time pass for those that stand still.
    fn gather(&mut self, machine: &mut Machine) -> bool {
        self.runnable.clear();
        let mut stalled = false;
        let mut index = 0;
        while let Some(&slot) = machine.active.get(index) {
            match machine.settle(slot) {
                Head::Ready => self.runnable.push(slot),
                Head::Stalled => {
                    stalled = true;
                    machine.queues[slot as usize].stalled -= 1;
                }
                Head::Blocked => {}
            }
            // A queue whose last op was a met wait has left the list.
            index += usize::from(machine.active.get(index) == Some(&slot));
        }
        stalled
    }

    fn progress(&mut self, machine: &mut Machine, slot: u32) {
        if let Some(Op::Copy(copy)) = machine.queues[slot as usize].ops.front_mut() {
            let (left, slow) = (copy.pieces_left(), copy.slow);
            let count = match if left > 1 && slow == 1 { self.schedule.choose(3) } else { 0 } {
                _ if slow > 1 => 1,
                0 => left,
                1 => left.div_ceil(2),
                _ => 1,
            };
            if count < left {
                if copy.is_fresh() {
                    machine.copies_torn += 1;
                    let first = self.schedule.choose(left);
                    copy.shuffle(first, 1 + self.schedule.choose(left));
                }
                copy.advance(count);
                if slow > 1 {
                    machine.queues[slot as usize].stalled += slow;
                }
                return;
            }
        }
        machine.finish(slot, self.steps as f64);
    }
}
