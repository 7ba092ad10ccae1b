//! What a simulated world consists of, and what each op does to it when it runs.
//!
//! What it is not: it has no clock. `adversary` and `timing` decide which op runs next; this file
//! only carries it out.
//!
//! Invariant: an op takes effect once, at the head of its queue; `active` lists exactly the queues
//! that have ops.
//!
//! ```text
//!   Machine { devices: [backing, room, lost?], queues: [ops], regions, users: ids }
//!                 clock: picks a queue -> settle (waits) -> finish (head op)
//! ```
//!
//! The clocks and the simulated backend may use it.

use super::memory::{
    Backing, HostPtr, MAPPED_OFFSET, Regions, WARM_BYTES_MAX, device_base, device_of,
};
use super::queue::{Mark, Op, Queue};
use super::room::Room;
use crate::backend::mapping::Books;
use crate::error::{Error, Misuse, Result};
use crate::unit::{Bytes, DevicePtr, DeviceRange, Key, PinnedRange, Table};
use slab::Slab;
use std::collections::{BTreeMap, VecDeque};

/// One simulated device.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) backing: Backing,
    pub(super) room: Room,
    /// The bytes behind addresses that were reserved for mapping, by first address; none where
    /// nothing is mapped, but for those kept warm.
    pub(super) ranges: BTreeMap<u64, Option<Backing>>,
    /// Addresses where nothing is mapped and whose bytes are kept, unmapped since longest first,
    /// and how many those are.
    pub(super) warm: VecDeque<(u64, u64)>,
    /// Offset of the next such address.
    pub(super) ranges_next: u64,
    /// Its default stream and its host-synchronous one.
    pub(super) fixed: [u32; 2],
    /// A fault that nobody has seen yet: the driver's code, and the cause.
    pub(super) broken: Option<(u32, String)>,
    /// The loss as it was first seen.
    pub(super) lost: Option<Error>,
}

/// A user's name of a queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) slot: u32,
    pub(super) uid: u32,
    /// Created here, so destroyed here.
    pub(super) owned: bool,
}

#[derive(Debug)]
pub(super) struct Event {
    pub(super) timed: bool,
    /// What it stands for; `None` while it is fresh.
    pub(super) mark: Option<Mark>,
    /// When the recording was reached, in nanoseconds.
    pub(super) at_ns: Option<f64>,
}

/// One user of a device: its ids and what it took.
#[derive(Debug)]
pub(super) struct User {
    pub(super) streams: Table<Lane>,
    pub(super) events: Table<Event>,
    pub(super) books: Books<()>,
    pub(super) allocated: u64,
    pub(super) peak: u64,
}

#[derive(Debug, Default)]
pub(super) struct Machine {
    pub(super) devices: Vec<Option<Device>>,
    pub(super) queues: Slab<Queue>,
    pub(super) active: Vec<u32>,
    pub(super) regions: Regions,
    pub(super) users: Slab<User>,
    /// Ops do what they say; else they only take their time.
    pub(super) moves_bytes: bool,
    /// Copies stopped half way so far.
    pub(super) copies_torn: u64,
    uids: u32,
}

/// What stands at the head of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// Nothing that can run: no op, or a wait that is not met, or the device is lost.
    Blocked,
    /// It can run, but its stream stands still.
    Stalled,
    /// It can run.
    Ready,
}

impl Device {
    /// Nothing is mapped at these addresses any more, and no op has them. Their bytes are kept for
    /// the next mapping there, as far as the bound goes.
    pub(super) fn keep_warm(&mut self, at: u64, len: u64) {
        self.warm.push_back((at, len));
        let mut kept: u64 = self.warm.iter().map(|(_, len)| len).sum();
        while kept > WARM_BYTES_MAX
            && let Some((at, len)) = self.warm.pop_front()
        {
            kept -= len;
            if let Some(backing) = self.ranges.get_mut(&at) {
                *backing = None;
            }
        }
    }

    /// The bytes behind these addresses are no longer spare: they are mapped again, or end.
    pub(super) fn no_longer_warm(&mut self, at: u64) {
        self.warm.retain(|(other, _)| *other != at);
    }
}

fn is_done(queues: &Slab<Queue>, mark: Mark) -> bool {
    match queues.get(mark.slot as usize) {
        Some(queue) => queue.uid != mark.uid || queue.done >= mark.seq,
        None => true,
    }
}

impl Machine {
    pub(super) fn new(moves_bytes: bool) -> Machine {
        Machine { moves_bytes, ..Machine::default() }
    }

    pub(super) fn open_queue(&mut self, device: u32, host: bool) -> u32 {
        self.uids += 1;
        self.queues.insert(Queue::new(self.uids, device, host)) as u32
    }

    /// Closes a queue; what is enqueued on it still runs.
    pub(super) fn close_queue(&mut self, slot: u32) {
        if let Some(queue) = self.queues.get_mut(slot as usize) {
            queue.open = false;
            if queue.ops.is_empty() {
                self.queues.remove(slot as usize);
            }
        }
    }

    pub(super) fn device(&mut self, device: u32) -> &mut Device {
        let slot = self.devices.get_mut(device as usize).and_then(Option::as_mut);
        slot.unwrap_or_else(|| panic!("a user's device was opened before the user came"))
    }

    pub(super) fn is_done(&self, mark: Mark) -> bool {
        is_done(&self.queues, mark)
    }

    /// Opens device bytes whose free has run to every stream.
    pub(super) fn settle_room(&mut self, device: u32) {
        let queues = &self.queues;
        if let Some(Some(device)) = self.devices.get_mut(device as usize) {
            let Device { room, backing, .. } = device;
            room.settle(|mark| is_done(queues, mark));
            room.cool(WARM_BYTES_MAX, |at, len| backing.give_back(at, len));
        }
    }

    /// Has the device met a fatal fault, seen or not?
    pub(super) fn is_broken(&self, device: u32) -> bool {
        let device = self.devices.get(device as usize).and_then(Option::as_ref);
        device.is_none_or(|device| device.broken.is_some() || device.lost.is_some())
    }

    /// Puts an op at the tail of a queue.
    pub(super) fn enqueue(&mut self, slot: u32, op: Op) -> Mark {
        let queue = &mut self.queues[slot as usize];
        if queue.ops.is_empty() {
            let index = self.active.partition_point(|other| *other < slot);
            self.active.insert(index, slot);
        }
        queue.ops.push_back(op);
        Mark { slot, uid: queue.uid, seq: queue.enqueued() }
    }

    /// Lets met waits at the head of a queue pass, and says what stands there then. That a wait has
    /// passed cannot be seen by itself, so it is nobody's choice.
    pub(super) fn settle(&mut self, slot: u32) -> Head {
        loop {
            let Some(queue) = self.queues.get(slot as usize) else { return Head::Blocked };
            if self.is_broken(queue.device) {
                return Head::Blocked;
            }
            match queue.ops.front() {
                None => return Head::Blocked,
                Some(Op::Wait(mark)) if self.is_done(*mark) => self.finish(slot, 0.0),
                Some(Op::Wait(_)) => return Head::Blocked,
                Some(_) if queue.stalled > 0 => return Head::Stalled,
                Some(_) => return Head::Ready,
            }
        }
    }

    /// Lets all recordings pass that are reached, and those reached by that.
    pub(super) fn pass_records(&mut self, now_ns: f64) {
        let mut index = 0;
        while let Some(&slot) = self.active.get(index) {
            let is_ready = self.settle(slot) == Head::Ready;
            let head = self.queues.get(slot as usize).and_then(|queue| queue.ops.front());
            if is_ready && matches!(head, Some(Op::Record(_))) {
                self.finish(slot, now_ns);
                // Others may wait for it.
                index = 0;
            } else {
                index += usize::from(self.active.get(index) == Some(&slot));
            }
        }
    }

    /// Runs the op at the head of a queue to its end.
    pub(super) fn finish(&mut self, slot: u32, now_ns: f64) {
        let queue = &mut self.queues[slot as usize];
        let Some(op) = queue.ops.pop_front() else { return };
        queue.done += 1;
        let (device, empty, open) = (queue.device, queue.ops.is_empty(), queue.open);
        let mark = Mark { slot, uid: queue.uid, seq: queue.done };
        if empty {
            self.active.retain(|other| *other != slot);
            if !open {
                self.queues.remove(slot as usize);
            }
        }
        match op {
            Op::Record(None) | Op::Wait(_) => {}
            Op::Record(Some((user, key))) => self.stamp(user, key, mark, now_ns),
            Op::Fill(at, len, value) => {
                if self.moves_bytes {
                    at.fill(len, value);
                }
            }
            Op::Copy(mut copy) => {
                if self.moves_bytes {
                    copy.advance(copy.pieces_left());
                }
                copy.holds.iter().for_each(|region| self.regions.release(*region));
            }
            Op::Run(run) => {
                run.holds.iter().for_each(|region| self.regions.release(*region));
                if self.moves_bytes
                    && let Err(error) = run.run()
                {
                    self.device(device).broken = Some((719, error.to_string()));
                }
            }
        }
    }

    /// Notes when a recording was reached, unless the event was recorded anew or closed since.
    fn stamp(&mut self, user: usize, key: Key, mark: Mark, now_ns: f64) {
        let event = self.users.get_mut(user).and_then(|user| user.events.get_mut(key, "").ok());
        if let Some(event) = event.filter(|event| event.mark == Some(mark)) {
            event.at_ns = Some(now_ns);
        }
    }

    /// The queue a user's stream names.
    pub(super) fn lane(&self, user: usize, stream: Key, op: &'static str) -> Result<Lane> {
        let lane = *self.users[user].streams.get(stream, op)?;
        match self.queues.get(lane.slot as usize) {
            Some(queue) if queue.uid == lane.uid && queue.open => Ok(lane),
            _ => Err(Error::usage(Misuse::Stale, op).detail("its owner has closed the stream")),
        }
    }

    /// Where device bytes really are, and the region to hold for them (0 for a device's own).
    pub(super) fn device_bytes(
        &mut self,
        device: u32,
        range: DeviceRange,
        op: &'static str,
    ) -> Result<(HostPtr, u64)> {
        let (at, len) = (range.at().0, range.len().0);
        if len == 0 {
            return Err(Error::usage(Misuse::Empty, op));
        }
        let base = device_base(device);
        if at < device_base(0) || (base + MAPPED_OFFSET..device_base(device + 1)).contains(&at) {
            if let Some((region, at)) = self.regions.find(at, len, Some(device)) {
                return Ok((at, region));
            }
        } else if at >= base {
            let own = self.device(device);
            if own.room.holds(at - base, len) {
                return Ok((own.backing.at(at - base), 0));
            }
        }
        Err(Error::usage(Misuse::OutOfRange, op)
            .bytes(range.len())
            .detail("device bytes outside one live allocation"))
    }

    /// The allocation that an address lies in.
    pub(super) fn allocation(
        &mut self,
        device: u32,
        at: u64,
        op: &'static str,
    ) -> Result<DeviceRange> {
        if device_of(at).is_some_and(|other| other != device) {
            return Err(Error::usage(Misuse::WrongDevice, op)
                .detail(format!("the bytes at {at:#x} are on another device")));
        }
        let base = device_base(device);
        let found = if (base..base + MAPPED_OFFSET).contains(&at) {
            let own = self.device(device).room.around(at - base);
            own.map(|(start, len)| (base + start, len))
        } else {
            self.regions.around(at, Some(device))
        };
        let (start, len) = found.ok_or_else(|| {
            let error = Error::usage(Misuse::OutOfRange, op);
            error.detail(format!("no device memory is at {at:#x}"))
        })?;
        DeviceRange::new(DevicePtr(start), Bytes(len))
    }

    /// Where pinned bytes really are, and the region to hold for them.
    pub(super) fn pinned_bytes(
        &self,
        range: PinnedRange,
        op: &'static str,
    ) -> Result<(HostPtr, u64)> {
        if range.is_empty() {
            return Err(Error::usage(Misuse::Empty, op));
        }
        let found = self.regions.find(range.at().0, range.len().0, None);
        found.map(|(region, at)| (at, region)).ok_or_else(|| {
            Error::usage(Misuse::OutOfRange, op)
                .bytes(range.len())
                .detail("pinned bytes outside one registration")
        })
    }
}
