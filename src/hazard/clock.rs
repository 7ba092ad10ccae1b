//! Vector clocks: what each actor's next step is ordered behind.
//!
//! What it is not: time. A tick counts the steps in which an actor used bytes, and says nothing of
//! how long one took. A kernel's uses, or a copy's two, are one step.
//!
//! Invariant: an access by actor `a` at tick `t` happened before whatever actor `b` does next if
//! and only if `b`'s clock has at least `t` in `a`'s slot. A slot is lent to another actor only
//! when nothing can ask about the earlier one any more, and its ticks never run backwards.
//!
//! ```text
//!   clock of b:   slot   0  1  2        host   joined by every step at its enqueue
//!                 tick   7  2  5        lanes  one each for a stream or a worker
//!                        `-- b has seen 7 ticks of the actor in slot 0
//! ```
//!
//! Only the checker may use it.

use crate::unit::{DeviceId, StreamId};
use std::collections::HashMap;

/// The host's place among the slots. It needs no ticks: whatever the host did is ordered before
/// everything that comes later in the trace, because every later step joins the host's clock.
pub(super) const HOST: usize = usize::MAX;

/// Closed streams with work that may still run, beyond which they are looked through.
const CLOSING_MIN: usize = 64;

/// How many ticks of each slot's actor have been seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock {
    ticks: Vec<u64>,
}

impl Clock {
    /// Ticks seen of the actor in `slot`.
    pub(super) fn at(&self, slot: usize) -> u64 {
        self.ticks.get(slot).copied().unwrap_or(0)
    }

    /// Sees `tick` of `slot`; was that news?
    fn raise(&mut self, slot: usize, tick: u64) -> bool {
        if self.at(slot) >= tick {
            return false;
        }
        if self.ticks.len() <= slot {
            self.ticks.resize(slot + 1, 0);
        }
        self.ticks[slot] = tick;
        true
    }

    /// Sees all that `other` saw; was any of it news?
    fn join(&mut self, other: &Clock) -> bool {
        if self.ticks.len() < other.ticks.len() {
            self.ticks.resize(other.ticks.len(), 0);
        }
        let mut news = false;
        for (mine, theirs) in self.ticks.iter_mut().zip(&other.ticks) {
            news |= *mine < *theirs;
            *mine = (*mine).max(*theirs);
        }
        news
    }

    /// Becomes a copy of `other`, in the memory it has.
    pub(super) fn copy_from(&mut self, other: &Clock) {
        self.ticks.clone_from(&other.ticks);
    }

    /// Has it seen all that `other` saw?
    pub(super) fn covers(&self, other: &Clock) -> bool {
        other.ticks.iter().enumerate().all(|(slot, tick)| self.at(slot) >= *tick)
    }
}

/// A stream or a worker.
#[derive(Debug)]
struct Lane {
    clock: Clock,
    device: DeviceId,
    is_stream: bool,
    /// A step began that has used no bytes yet; its first access takes a tick.
    needs_tick: bool,
    /// Version of the host's clock that was joined last.
    joined: u64,
    /// Name of the kernel launched last, and which record would be its next use.
    kernel: Option<(&'static str, u64)>,
}

/// Every actor's clock.
#[derive(Debug, Default)]
pub(super) struct Actors {
    host: Clock,
    /// Changes whenever the host's clock does.
    version: u64,
    lanes: Vec<Lane>,
    /// Slots that may be lent again.
    vacant: Vec<usize>,
    /// Closed streams of whose end the host does not know.
    closing: Vec<usize>,
    closing_max: usize,
    /// What closed streams saw that were forgotten before the host knew of their end: a sync still
    /// waits for them.
    ghosts: HashMap<DeviceId, Clock>,
    streams: HashMap<StreamId, usize>,
    workers: HashMap<(DeviceId, u32), usize>,
}

impl Actors {
    /// Slot of a stream, which is made known at first sight.
    pub(super) fn stream(&mut self, id: StreamId, device: DeviceId) -> usize {
        if let Some(slot) = self.streams.get(&id) {
            return *slot;
        }
        let slot = self.open(device, true);
        self.streams.insert(id, slot);
        slot
    }

    /// Slot of a worker of the engine on `device`.
    pub(super) fn worker(&mut self, number: u32, device: DeviceId) -> usize {
        if let Some(slot) = self.workers.get(&(device, number)) {
            return *slot;
        }
        let slot = self.open(device, false);
        self.workers.insert((device, number), slot);
        slot
    }

    fn open(&mut self, device: DeviceId, is_stream: bool) -> usize {
        let slot = self.vacant.pop().unwrap_or(self.lanes.len());
        // A slot's ticks go on where the earlier actor's ended; all of those are settled.
        let base = self.lanes.get(slot).map_or(0, |lane| lane.clock.at(slot));
        let mut clock = Clock::default();
        clock.raise(slot, base);
        let lane = Lane { clock, device, is_stream, needs_tick: true, joined: 0, kernel: None };
        if slot == self.lanes.len() {
            self.lanes.push(lane);
        } else {
            self.lanes[slot] = lane;
        }
        slot
    }

    /// Forgets a stream's key; its slot is vacant once the host knows that its work is over.
    pub(super) fn close(&mut self, id: StreamId) {
        if let Some(slot) = self.streams.remove(&id) {
            self.closing.push(slot);
            self.retire();
        }
    }

    /// The next step of `slot` is enqueued now: the host's past is its past.
    pub(super) fn enter(&mut self, slot: usize) {
        self.lanes[slot].kernel = None;
        self.lanes[slot].needs_tick = true;
        self.meet_host(slot);
    }

    /// The step just entered, or resumed, is a kernel's; its next use would be record `next`.
    pub(super) fn launch(&mut self, slot: usize, kernel: &'static str, next: u64) {
        self.lanes[slot].kernel = Some((kernel, next));
    }

    /// More of the stream's last step, if that is a kernel's and record `seq` its next use; then
    /// the kernel's name.
    pub(super) fn resume(&mut self, slot: usize, seq: u64) -> Option<&'static str> {
        let (kernel, next) = self.lanes[slot].kernel?;
        if next != seq {
            return None;
        }
        self.launch(slot, kernel, seq + 1);
        self.meet_host(slot);
        Some(kernel)
    }

    fn meet_host(&mut self, slot: usize) {
        let lane = &mut self.lanes[slot];
        if lane.joined != self.version {
            lane.joined = self.version;
            lane.clock.join(&self.host);
        }
    }

    /// Tick of an access that `slot` makes now.
    pub(super) fn tick(&mut self, slot: usize) -> u64 {
        let Some(lane) = self.lanes.get_mut(slot) else { return 0 };
        if lane.needs_tick {
            lane.needs_tick = false;
            lane.clock.raise(slot, lane.clock.at(slot) + 1);
        }
        lane.clock.at(slot)
    }

    /// Did the access at `tick` of `first` happen before what `second` does next?
    pub(super) fn ordered(&self, first: usize, tick: u64, second: usize) -> bool {
        first == HOST || first == second || self.clock(second).at(first) >= tick
    }

    /// Goes on as if the access at `tick` of `first` were ordered before what `second` does next.
    pub(super) fn assume(&mut self, first: usize, tick: u64, second: usize) {
        if first == HOST || first == second {
            return;
        }
        if second == HOST {
            if self.host.raise(first, tick) {
                self.host_moved();
            }
        } else {
            self.lanes[second].clock.raise(first, tick);
        }
    }

    /// All that `slot` did and saw until now.
    pub(super) fn clock(&self, slot: usize) -> &Clock {
        if slot == HOST { &self.host } else { &self.lanes[slot].clock }
    }

    /// `slot` joins a capture.
    pub(super) fn join(&mut self, slot: usize, capture: &Clock) {
        if slot != HOST {
            self.lanes[slot].clock.join(capture);
        } else if self.host.join(capture) {
            self.host_moved();
        }
    }

    /// The host has heard from a worker, or that all of a stream's work is done.
    pub(super) fn answer(&mut self, slot: usize) {
        if self.host.join(&self.lanes[slot].clock) {
            self.host_moved();
        }
    }

    /// The host waited for every stream of `device`.
    pub(super) fn sync(&mut self, device: DeviceId) {
        let mut news = false;
        for lane in self.lanes.iter().filter(|lane| lane.is_stream && lane.device == device) {
            news |= self.host.join(&lane.clock);
        }
        if let Some(ghosts) = self.ghosts.get(&device) {
            news |= self.host.join(ghosts);
        }
        if news {
            self.host_moved();
        }
    }

    /// The device a stream belongs to.
    pub(super) fn device(&self, slot: usize) -> DeviceId {
        self.lanes[slot].device
    }

    /// What the host has seen: whatever it covers can race with nothing that comes later.
    pub(super) fn host(&self) -> &Clock {
        &self.host
    }

    /// Slots lent now.
    pub(super) fn len(&self) -> usize {
        self.lanes.len() - self.vacant.len()
    }

    fn host_moved(&mut self) {
        self.version += 1;
        if !self.closing.is_empty() {
            self.retire();
        }
    }

    /// Every later step joins the host's clock, so a closed stream that it covers, with all that
    /// the stream saw of others, is settled.
    fn retire(&mut self) {
        let (host, lanes, vacant) = (&self.host, &self.lanes, &mut self.vacant);
        self.closing.retain(|slot| {
            let is_over = host.covers(&lanes[*slot].clock);
            if is_over {
                vacant.push(*slot);
            }
            !is_over
        });
    }

    /// Are there so many closed streams that they should be looked through?
    pub(super) fn is_crowded(&self) -> bool {
        self.closing.len() > self.closing_max.max(CLOSING_MIN)
    }

    /// Vacates the slots of closed streams that no access kept anywhere names.
    pub(super) fn sweep(&mut self, is_named: impl Fn(usize) -> bool) {
        let (lanes, ghosts, vacant) = (&self.lanes, &mut self.ghosts, &mut self.vacant);
        self.closing.retain(|slot| {
            let keep = is_named(*slot);
            if !keep {
                let lane = &lanes[*slot];
                ghosts.entry(lane.device).or_default().join(&lane.clock);
                vacant.push(*slot);
            }
            keep
        });
        self.closing_max = 2 * self.closing.len();
    }
}
