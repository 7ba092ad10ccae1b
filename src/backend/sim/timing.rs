//! The timed clock: virtual time, in which a device works beside the host.
//!
//! What it is not: it measures nothing, and never sleeps. Equal programs give equal times.
//!
//! Invariant: time never runs backwards, and whenever the host holds the world's lock the device
//! has been brought up to the host's time.
//!
//! ```text
//!   host    |2.6 copy|0.4 record|0.4 wait|2.5 launch|...         each call costs time
//!   way out          |-start-|====== bytes at 55 GB/s ======|    one copy at a time each way,
//!   way in                        |-start-|== both: 46.6 ==      in the order the copies came up
//!   kernels                  |== slower while copies move ==|    any number, each at full rate
//! ```
//!
//! Three choices to know: copies of one way are served strictly one after the other, so their rates
//! never share; a stream whose next copy follows without a wait is served again, before all others,
//! as copy engines do that drain one queue before they look at the next; and kernels of several
//! streams each get the whole device, which flatters programs that overlap large kernels. Real
//! bytes move, and host forms run, when their op ends.
//!
//! The simulated world may use it.

use super::machine::{Head, Machine};
use super::model::Model;
use super::queue::{Mark, Op, Way};
use crate::backend::Work;
use std::collections::VecDeque;

/// What a running op is doing, and how much is left of it.
#[derive(Clone, Copy, Debug)]
enum Doing {
    /// A copy before its first byte; nanoseconds.
    Starting(Way),
    /// A copy; bytes.
    Moving(Way),
    /// A kernel; nanoseconds at full speed.
    Computing(Work),
    /// A stream that a fault holds; nanoseconds.
    Standing,
}

#[derive(Clone, Copy, Debug)]
struct Task {
    slot: u32,
    device: u32,
    doing: Doing,
    left: f64,
    /// Units of `left` per nanosecond, as long as no other task starts or ends.
    speed: f64,
}

impl Task {
    fn span_ns(&self) -> f64 {
        if self.speed > 0.0 { self.left / self.speed } else { f64::INFINITY }
    }
}

/// The copies of one device and way, in the order they came up; the first is running.
#[derive(Debug, Default)]
struct Line {
    slots: VecDeque<u32>,
    /// Whose copy ended last, if it has another one right behind it.
    again: Option<u32>,
}

#[derive(Debug)]
pub(super) struct Timeline {
    pub(super) model: Model,
    now_ns: f64,
    tasks: Vec<Task>,
    lines: Vec<[Line; 2]>,
}

impl Timeline {
    pub(super) fn new(model: Model) -> Timeline {
        Timeline { model, now_ns: 0.0, tasks: Vec::new(), lines: Vec::new() }
    }

    pub(super) fn now_ns(&self) -> f64 {
        self.now_ns
    }

    /// Lets `ns` of the host's time pass; the device works meanwhile.
    pub(super) fn pass(&mut self, machine: &mut Machine, ns: f64) {
        let until = self.now_ns + ns.max(0.0);
        while self.step(machine, until) {}
        self.now_ns = until;
    }

    /// Lets the host wait until the mark is done; stops early where nothing runs (a lost device).
    pub(super) fn run_until(&mut self, machine: &mut Machine, mark: Mark) {
        self.start(machine);
        while !machine.is_done(mark) && self.step(machine, f64::INFINITY) {}
    }

    /// Goes on to the next end of a task, and starts what that lets start. `false` where none ends
    /// before `until`; then time has come to `until`, unless that is never.
    fn step(&mut self, machine: &mut Machine, until: f64) -> bool {
        self.start(machine);
        self.set_speeds(machine);
        let next = self.tasks.iter().map(Task::span_ns).fold(f64::INFINITY, f64::min);
        if self.now_ns + next > until || next == f64::INFINITY {
            if until < f64::INFINITY {
                self.spend(until - self.now_ns);
                self.now_ns = until;
            }
            return false;
        }
        self.spend(next);
        self.now_ns += next;
        for index in (0..self.tasks.len()).rev() {
            if self.tasks[index].left == 0.0 {
                self.end(machine, index);
            }
        }
        self.start(machine);
        true
    }

    fn spend(&mut self, ns: f64) {
        for task in &mut self.tasks {
            // Exactly zero at its end, whatever rounding the product would leave.
            let over = task.span_ns() <= ns;
            task.left = if over { 0.0 } else { (task.left - ns * task.speed).max(0.0) };
        }
    }

    /// A task's phase is over: the next phase, or the op's end.
    fn end(&mut self, machine: &mut Machine, index: usize) {
        let task = &mut self.tasks[index];
        let (slot, device) = (task.slot, task.device as usize);
        match task.doing {
            Doing::Starting(way) => {
                if let Some(Op::Copy(copy)) = machine.queues[slot as usize].ops.front() {
                    let left = copy.len as f64 * f64::from(copy.slow);
                    (task.doing, task.left) = (Doing::Moving(way), left);
                }
                return;
            }
            Doing::Moving(way) => {
                let mut behind = machine.queues[slot as usize].ops.iter().skip(1);
                let next = behind.find(|op| !matches!(op, Op::Record(_)));
                let follows = matches!(next, Some(Op::Copy(copy)) if copy.way == way);
                let line = &mut self.lines[device][way as usize];
                line.slots.pop_front();
                line.again = follows.then_some(slot);
            }
            Doing::Computing(_) => {}
            Doing::Standing => {
                self.tasks.swap_remove(index);
                machine.queues[slot as usize].running = false;
                return;
            }
        }
        self.tasks.swap_remove(index);
        machine.queues[slot as usize].running = false;
        machine.finish(slot, self.now_ns);
    }

    /// Starts every op that can start now. Ops without a duration run at once, which may let
    /// others start, so this goes round until nothing changes.
    fn start(&mut self, machine: &mut Machine) {
        let mut changed = true;
        while changed {
            changed = false;
            let mut index = 0;
            while let Some(&slot) = machine.active.get(index) {
                changed |= self.start_head(machine, slot);
                index += usize::from(machine.active.get(index) == Some(&slot));
            }
        }
        self.start_copies(machine);
    }

    fn start_head(&mut self, machine: &mut Machine, slot: u32) -> bool {
        let mut passed = false;
        loop {
            let before = machine.queues.get(slot as usize).map(|queue| queue.done);
            if machine.queues.get(slot as usize).is_none_or(|queue| queue.running) {
                return passed;
            }
            let head = machine.settle(slot);
            passed |= machine.queues.get(slot as usize).map(|queue| queue.done) != before;
            if head == Head::Blocked {
                return passed;
            }
            let queue = &mut machine.queues[slot as usize];
            let device = queue.device;
            queue.running = true;
            let (doing, left) = match queue.ops.front() {
                _ if head == Head::Stalled => {
                    (Doing::Standing, f64::from(std::mem::take(&mut queue.stalled)) * 1e3)
                }
                Some(Op::Run(run)) => {
                    (Doing::Computing(run.cost.work), self.model.kernel_ns(run.cost))
                }
                Some(Op::Copy(copy)) => {
                    let (device, way) = (device as usize, copy.way as usize);
                    if self.lines.len() <= device {
                        self.lines.resize_with(device + 1, Default::default);
                    }
                    self.lines[device][way].slots.push_back(slot);
                    return passed;
                }
                _ => {
                    queue.running = false;
                    machine.finish(slot, self.now_ns);
                    passed = true;
                    continue;
                }
            };
            self.tasks.push(Task { slot, device, doing, left, speed: 1.0 });
            return passed;
        }
    }

    /// Gives each idle copy engine the first copy of its line, or the one right behind that which
    /// it served last.
    fn start_copies(&mut self, machine: &Machine) {
        for device in 0..self.lines.len() {
            for line in &mut self.lines[device] {
                let Some(&first) = line.slots.front() else { continue };
                if self.tasks.iter().any(|task| task.slot == first) {
                    continue;
                }
                let again = line.again.take();
                let place = line.slots.iter().position(|slot| Some(*slot) == again);
                let again = place.and_then(|place| line.slots.remove(place));
                let slot = again.unwrap_or(first);
                if again.is_some() {
                    line.slots.push_front(slot);
                }
                if let Some(Op::Copy(copy)) = machine.queues[slot as usize].ops.front() {
                    let left = match copy.way {
                        Way::Out => self.model.copy_out_start_ns,
                        Way::In => self.model.copy_in_start_ns,
                    };
                    let doing = Doing::Starting(copy.way);
                    self.tasks.push(Task { slot, device: device as u32, doing, left, speed: 1.0 });
                }
            }
        }
    }

    /// A lost device's tasks stand still for ever.
    fn set_speeds(&mut self, machine: &Machine) {
        let moving = |device: u32, tasks: &[Task]| {
            let way = |wanted: Way| {
                let moves = |task: &Task| matches!(task.doing, Doing::Moving(way) if way == wanted);
                tasks.iter().any(|task| task.device == device && moves(task))
            };
            [way(Way::Out), way(Way::In)]
        };
        let devices = self.lines.len() as u32;
        let sum = |device: u32| self.model.copy_speeds(moving(device, &self.tasks));
        let all: f64 = (0..devices).map(|device| sum(device).iter().sum::<f64>()).sum();
        let share = (self.model.host_bytes_per_s / 1e9 / all).min(1.0);
        for index in 0..self.tasks.len() {
            let task = self.tasks[index];
            self.tasks[index].speed = match task.doing {
                _ if machine.is_broken(task.device) => 0.0,
                Doing::Starting(_) | Doing::Standing => 1.0,
                Doing::Moving(way) => {
                    self.model.copy_speeds(moving(task.device, &self.tasks))[way as usize] * share
                }
                Doing::Computing(work) => {
                    self.model.kernel_speed(work, moving(task.device, &self.tasks))
                }
            };
        }
    }
}
