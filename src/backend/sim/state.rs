//! One world's state: the machine, its clock, and the faults to come; what every verb goes through.
//!
//! What it is not: it knows no ids of users; verbs look those up.
//!
//! Invariant: a verb is let in only while its device is not lost, and an op is enqueued only after
//! everything that could refuse it.
//!
//! ```text
//!   verb:  enter (forked? lost? fatal now?) -> checks -> strike (fault ordered?) -> charge -> push
//! ```
//!
//! The verbs of the simulated device use it.

use super::adversary::Adversary;
use super::fault::{Fault, Faults, Spot, code_name};
use super::machine::Machine;
use super::model::Model;
use super::queue::{Mark, Op};
use super::schedule::Call;
use super::timing::Timeline;
use super::{Clock, Config, process};
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::StreamId;
use std::time::Duration;

#[derive(Debug)]
enum Time {
    Timed(Timeline),
    Adversary(Adversary),
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) devices: u32,
    pub(super) device_bytes: u64,
    pub(super) registration_bytes_max: u64,
    pub(super) map_granularity: u64,
    pub(super) machine: Machine,
    pub(super) faults: Faults,
    pub(super) removals_refused: u64,
    time: Time,
    /// The process that it lives in.
    pid: i32,
}

impl State {
    pub(super) fn new(config: Config) -> State {
        let moves_bytes = !matches!(config.clock, Clock::TimesOnly(_));
        let time = match config.clock {
            Clock::Timed(model) | Clock::TimesOnly(model) => Time::Timed(Timeline::new(model)),
            Clock::Adversary(schedule) => Time::Adversary(Adversary::new(schedule)),
        };
        State {
            devices: config.devices,
            device_bytes: config.device_bytes.0,
            registration_bytes_max: config.registration_bytes_max.0,
            map_granularity: config.map_granularity.0,
            machine: Machine::new(moves_bytes),
            faults: Faults::new(config.faults),
            removals_refused: 0,
            time,
            pid: process::id(),
        }
    }

    /// Is this a child's copy? Then pinned memory is not mapped here, and nothing may run.
    pub(super) fn is_forked(&self) -> bool {
        self.pid != process::id()
    }

    /// Lets a verb in, unless its device is lost or to be lost now, or is a parent process'.
    pub(super) fn enter(&mut self, device: u32, op: &'static str) -> Result<()> {
        if self.is_forked() {
            let error = Error::usage(Misuse::Forked, op);
            return Err(error.detail("a child process needs a world of its own"));
        }
        let fatal = self.faults.meet(Spot::Any);
        let broken = &mut self.machine.device(device).broken;
        if let (None, Some(Fault::Fatal(code))) = (&broken, fatal) {
            *broken = Some((code, String::new()));
        } else if fatal.is_some() {
            self.faults.miss();
        }
        self.report(device, op)
    }

    /// Reports a device's loss: the first to see it leaves its name on it.
    pub(super) fn report(&mut self, device: u32, op: &'static str) -> Result<()> {
        let device = self.machine.device(device);
        if device.lost.is_none() {
            let Some((code, cause)) = &device.broken else { return Ok(()) };
            let error = Error::new(Kind::Lost, op).code(*code, code_name(*code));
            device.lost = Some(error.detail(cause.clone()));
        }
        match &device.lost {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Lets an ordered fault strike a call that is right otherwise. Returns how many times as long
    /// what it enqueues will take.
    pub(super) fn strike(
        &mut self,
        device: u32,
        spot: Spot,
        lane: Option<u32>,
        op: &'static str,
    ) -> Result<u32> {
        let queue = lane.and_then(|slot| self.machine.queues.get_mut(slot as usize));
        match self.faults.meet(spot) {
            None => {}
            Some(Fault::Refuse) => {
                return Err(Error::new(Kind::OutOfMemory, op)
                    .code(2, code_name(2))
                    .detail("a fault that was ordered"));
            }
            Some(Fault::Fatal(code)) => {
                self.machine.device(device).broken = Some((code, String::new()));
                self.report(device, op)?;
            }
            Some(Fault::Reject(code)) => {
                let misuse = match code {
                    712 => Misuse::Overlap,
                    900 => Misuse::Capturing,
                    _ => Misuse::BadValue,
                };
                return Err(Error::usage(misuse, op).code(code, code_name(code)));
            }
            Some(Fault::NotReady(times)) => self.faults.hold_back(times),
            Some(Fault::Stall(steps)) => {
                if let Some(queue) = queue {
                    queue.stalled = queue.stalled.saturating_add(steps);
                }
            }
            Some(Fault::Slow(times)) => return Ok(times.max(1)),
            Some(Fault::Capture(calls)) => {
                if let Some(queue) = queue.filter(|queue| queue.adopted && calls > 0) {
                    queue.captured = calls - 1;
                    return Err(captured(op));
                }
                self.faults.miss();
            }
        }
        Ok(1)
    }

    /// Lets the host pay for a call.
    pub(super) fn charge(&mut self, cost_ns: fn(&Model) -> f64) {
        if let Time::Timed(timeline) = &mut self.time {
            let ns = cost_ns(&timeline.model);
            timeline.pass(&mut self.machine, ns);
        }
    }

    /// Lets an adversary's device run a little.
    pub(super) fn drift(&mut self, call: Call) {
        if let Time::Adversary(adversary) = &mut self.time {
            adversary.pass(&mut self.machine, call);
        }
    }

    /// Enqueues an op. On a host-synchronous stream it is done before this returns.
    pub(super) fn push(&mut self, slot: u32, op: Op, verb: &'static str) -> Result<Mark> {
        let mark = self.machine.enqueue(slot, op);
        let queue = &self.machine.queues[slot as usize];
        let (host, device) = (queue.host, queue.device);
        if host {
            self.run_until(mark);
            self.report(device, verb)?;
        }
        self.drift(Call::Enqueue);
        Ok(mark)
    }

    /// Lets the host wait until the mark is done, or its device is lost.
    pub(super) fn run_until(&mut self, mark: Mark) {
        match &mut self.time {
            Time::Timed(timeline) => timeline.run_until(&mut self.machine, mark),
            Time::Adversary(adversary) => adversary.run_until(&mut self.machine, mark),
        }
    }

    /// Lets the host wait until everything enqueued on the device is done.
    pub(super) fn run_device(&mut self, device: u32, verb: &'static str) -> Result<()> {
        let of_device = self.machine.queues.iter().filter(|(_, queue)| queue.device == device);
        let marks: Vec<Mark> = of_device
            .map(|(slot, queue)| Mark { slot: slot as u32, uid: queue.uid, seq: queue.enqueued() })
            .collect();
        marks.iter().for_each(|mark| self.run_until(*mark));
        self.report(device, verb)?;
        let stuck = marks.iter().any(|mark| !self.machine.is_done(*mark));
        assert!(!stuck, "waits only name marks enqueued before them, so no stream waits for ever");
        Ok(())
    }

    pub(super) fn now(&self) -> Duration {
        Duration::from_nanos(match &self.time {
            Time::Timed(timeline) => timeline.now_ns() as u64,
            Time::Adversary(adversary) => adversary.steps(),
        })
    }

    pub(super) fn host_work(&mut self, time: Duration) {
        if self.is_forked() {
            return;
        }
        match &mut self.time {
            Time::Timed(timeline) => timeline.pass(&mut self.machine, time.as_secs_f64() * 1e9),
            Time::Adversary(_) => self.drift(Call::Enqueue),
        }
    }

    pub(super) fn model_name(&self) -> &'static str {
        match &self.time {
            Time::Timed(timeline) => timeline.model.name,
            Time::Adversary(_) => "simulated device under an adversary",
        }
    }

    /// The queue that a user's stream names, if work may be enqueued on it now.
    pub(super) fn open_lane(
        &mut self,
        user: usize,
        stream: StreamId,
        op: &'static str,
    ) -> Result<u32> {
        let lane = self.machine.lane(user, stream.0, op)?;
        if self.machine.queues[lane.slot as usize].is_capturing() {
            return Err(captured(op));
        }
        Ok(lane.slot)
    }
}

fn captured(op: &'static str) -> Error {
    Error::usage(Misuse::Capturing, op).code(900, code_name(900))
}
