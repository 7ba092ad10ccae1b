//! The verbs of the driver seam, for the simulated device.
//!
//! What it is not: the rules of order; clocks and queues keep those.
//!
//! Invariant: a verb that is refused has enqueued nothing and taken no bytes.
//!
//! ```text
//!   Sim -> lock the world -> enter, check, strike, charge -> change or enqueue -> the device runs
//! ```
//!
//! Reached through [`Backend`] only.

use super::Spot;
use super::launch::{Body, Run, no_form};
use super::machine::{Event, Lane};
use super::memory::device_base;
use super::pin::{SimFence, SimPinner};
use super::queue::{Copy, Mark, Op, Way};
use super::room::{Block, rounded};
use super::schedule::Call;
use super::state::State;
use super::user::{HOST_STREAM, Sim};
use crate::backend::{About, Arg, Backend, Fence, Grid, Kernel, Memory, Pinner, Timing};
use crate::error::{Error, Kind, Misuse, Result};
use crate::trace::{Actor, Site, Use};
use crate::unit::{
    Bytes, DeviceId, DevicePtr, DeviceRange, EventId, MemoryId, PinnedRange, StreamId,
};
use std::sync::Arc;
use std::time::Duration;

pub(super) const FRESH_BYTE: u8 = 0xa1;
const FREED_BYTE: u8 = 0xde;

/// The raw handle of a queue that was created.
fn handle(slot: u32, uid: u32) -> usize {
    ((uid as usize) << 20 | (slot as usize + 1)) << 4
}

impl Sim {
    fn copy(
        &mut self,
        device: DeviceRange,
        pinned: PinnedRange,
        on: StreamId,
        way: Way,
    ) -> Result<()> {
        let op = if way == Way::Out { "copy_out" } else { "copy_in" };
        let mut state = self.seat.lock();
        state.enter(self.seat.device, op)?;
        let slot = state.open_lane(self.seat.user, on, op)?;
        if device.len() != pinned.len() {
            return Err(Error::usage(Misuse::LengthMismatch, op));
        }
        let (near, adopted) = state.machine.device_bytes(self.seat.device, device, op)?;
        let (far, region) = state.machine.pinned_bytes(pinned, op)?;
        let len = device.len().to_usize()?;
        let slow = state.strike(self.seat.device, Spot::Copy, Some(slot), op)?;
        state.charge(|model| model.copy_call_ns);
        let holds = [adopted, region];
        holds.iter().for_each(|region| state.machine.regions.hold(*region));
        let (to, from) = if way == Way::Out { (far, near) } else { (near, far) };
        let mut copy = Copy::new(to, from, len, way, holds);
        copy.slow = slow;
        state.push(slot, Op::Copy(copy), op).map(drop)
    }
}

/// Finds room for a block in stream order; waits for frees that are still to run where it must.
fn take_room(state: &mut State, device: u32, block: Block, slot: u32) -> Result<u64> {
    let uid = state.machine.queues[slot as usize].uid;
    let lane = Mark { slot, uid, seq: 0 };
    loop {
        state.machine.settle_room(device);
        let room = &mut state.machine.device(device).room;
        if let Some(at) = room.take(block, lane) {
            return Ok(at);
        }
        match room.pending() {
            Some(mark) if rounded(block.len) <= room.free() => state.run_until(mark),
            _ => {
                let (free, total) = (Bytes(room.free()), Bytes(room.size()));
                return Err(Error::new(Kind::OutOfMemory, "alloc_device")
                    .bytes(Bytes(block.len))
                    .detail(format!("{free} of {total} are free"))
                    .code(2, "CUDA_ERROR_OUT_OF_MEMORY"));
            }
        }
        state.report(device, "alloc_device")?;
    }
}

impl Backend for Sim {
    fn about(&self) -> About {
        let state = self.seat.lock();
        About {
            device: DeviceId(self.seat.device),
            name: state.model_name().to_string(),
            driver: 0,
            simulated: true,
            memory: Bytes(state.device_bytes),
        }
    }

    fn memory(&mut self) -> Result<Memory> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "memory")?;
        let room = &state.machine.device(self.seat.device).room;
        let (free, total) = (Bytes(room.free()), Bytes(room.size()));
        let user = &state.machine.users[self.seat.user];
        Ok(Memory { free, total, allocated: Bytes(user.allocated), peak: Bytes(user.peak) })
    }

    fn reset_peak(&mut self) {
        let user = &mut self.seat.lock().machine.users[self.seat.user];
        user.peak = user.allocated;
    }

    fn alloc_device(&mut self, len: Bytes, on: StreamId) -> Result<DevicePtr> {
        let (user, device) = (self.seat.user, self.seat.device);
        let mut state = self.seat.lock();
        state.enter(device, "alloc_device")?;
        let slot = state.open_lane(user, on, "alloc_device")?;
        if len.is_zero() {
            return Err(Error::usage(Misuse::Empty, "alloc_device"));
        }
        len.to_usize()?;
        state
            .strike(device, Spot::Alloc, None, "alloc_device")
            .map_err(|error| error.bytes(len))?;
        state.charge(|model| model.alloc_call_ns);
        state.drift(Call::Take);
        let offset = take_room(&mut state, device, Block { len: len.0, user }, slot)?;
        let taker = &mut state.machine.users[user];
        taker.allocated += len.0;
        taker.peak = taker.peak.max(taker.allocated);
        let at = state.machine.device(device).backing.at(offset);
        state.push(slot, Op::Fill(at, rounded(len.0) as usize, FRESH_BYTE), "alloc_device")?;
        Ok(DevicePtr(device_base(device) + offset))
    }

    fn free_device(&mut self, at: DevicePtr, on: StreamId) -> Result<()> {
        let device = self.seat.device;
        let mut state = self.seat.lock();
        state.enter(device, "free_device")?;
        let slot = state.open_lane(self.seat.user, on, "free_device")?;
        let offset = at.0.wrapping_sub(device_base(device));
        let Some(block) = state.machine.device(device).room.block(offset) else {
            return Err(Error::usage(Misuse::OutOfRange, "free_device")
                .detail("no live allocation starts there"));
        };
        state.charge(|model| model.alloc_call_ns);
        if let Some(user) = state.machine.users.get_mut(block.user) {
            user.allocated -= block.len;
        }
        let at = state.machine.device(device).backing.at(offset);
        let fill = Op::Fill(at, rounded(block.len) as usize, FREED_BYTE);
        // The range is marked before the op can run, so that it is never lent too early.
        let queue = &state.machine.queues[slot as usize];
        let mark = Mark { slot, uid: queue.uid, seq: queue.enqueued() + 1 };
        state.machine.device(device).room.give(offset, mark);
        state.push(slot, fill, "free_device").map(drop)
    }

    fn map_granularity(&mut self) -> Result<Bytes> {
        self.granularity("map_granularity")
    }

    fn reserve_range(&mut self, len: Bytes) -> Result<DeviceRange> {
        self.reserve(len)
    }

    fn release_range(&mut self, range: DeviceRange) -> Result<()> {
        self.unreserve(range)
    }

    fn create_memory(&mut self, len: Bytes) -> Result<MemoryId> {
        self.create(len)
    }

    fn close_memory(&mut self, memory: MemoryId) -> Result<()> {
        self.close(memory)
    }

    fn map_memory(&mut self, range: DeviceRange, memory: &[MemoryId]) -> Result<()> {
        self.map(range, memory)
    }

    fn unmap_memory(&mut self, range: DeviceRange) -> Result<()> {
        self.unmap(range)
    }

    fn adopt_stream(&mut self, raw: usize) -> Result<StreamId> {
        const OP: &str = "adopt_stream";
        let mut state = self.seat.lock();
        state.enter(self.seat.device, OP)?;
        let fixed = state.machine.device(self.seat.device).fixed;
        let slot = match raw {
            0 => fixed[0],
            HOST_STREAM => fixed[1],
            _ => ((raw >> 4) & 0xf_ffff).wrapping_sub(1) as u32,
        };
        let queue = state.machine.queues.get(slot as usize).filter(|queue| {
            queue.open && (raw == 0 || raw == HOST_STREAM || raw == handle(slot, queue.uid))
        });
        let queue = queue.ok_or_else(|| Error::usage(Misuse::Foreign, OP))?;
        if queue.device != self.seat.device {
            return Err(Error::usage(Misuse::WrongDevice, OP));
        }
        let lane = Lane { slot, uid: queue.uid, owned: false };
        state.machine.queues[slot as usize].adopted = true;
        let key = state.machine.users[self.seat.user].streams.insert(lane);
        key.map(StreamId).ok_or_else(|| Error::new(Kind::OutOfMemory, OP))
    }

    fn create_stream(&mut self) -> Result<StreamId> {
        const OP: &str = "create_stream";
        let mut state = self.seat.lock();
        state.enter(self.seat.device, OP)?;
        if state.machine.users[self.seat.user].streams.is_full() {
            return Err(Error::new(Kind::OutOfMemory, OP));
        }
        state.strike(self.seat.device, Spot::CreateStream, None, OP)?;
        state.charge(|model| model.object_call_ns);
        let slot = state.machine.open_queue(self.seat.device, false);
        let lane = Lane { slot, uid: state.machine.queues[slot as usize].uid, owned: true };
        let key = state.machine.users[self.seat.user].streams.insert(lane);
        key.map(StreamId).ok_or_else(|| Error::new(Kind::OutOfMemory, OP))
    }

    fn close_stream(&mut self, stream: StreamId) -> Result<()> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "close_stream")?;
        let streams = &mut state.machine.users[self.seat.user].streams;
        let lane = streams.remove(stream.0, "close_stream")?;
        if lane.owned {
            state.machine.close_queue(lane.slot);
        }
        Ok(())
    }

    fn raw_stream(&self, stream: StreamId) -> Result<usize> {
        let mut state = self.seat.lock();
        let lane = state.machine.lane(self.seat.user, stream.0, "raw_stream")?;
        let fixed = state.machine.device(self.seat.device).fixed;
        Ok(match fixed.iter().position(|slot| *slot == lane.slot) {
            Some(0) => 0,
            Some(_) => HOST_STREAM,
            None => handle(lane.slot, lane.uid),
        })
    }

    fn create_event(&mut self, timing: Timing) -> Result<EventId> {
        const OP: &str = "create_event";
        let mut state = self.seat.lock();
        state.enter(self.seat.device, OP)?;
        state.strike(self.seat.device, Spot::CreateEvent, None, OP)?;
        state.charge(|model| model.object_call_ns);
        let event = Event { timed: timing == Timing::On, mark: None, at_ns: None };
        let key = state.machine.users[self.seat.user].events.insert(event);
        key.map(EventId).ok_or_else(|| Error::new(Kind::OutOfMemory, OP))
    }

    fn close_event(&mut self, event: EventId) -> Result<()> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "close_event")?;
        state.machine.users[self.seat.user].events.remove(event.0, "close_event").map(drop)
    }

    fn allocation(&mut self, at: DevicePtr) -> Result<Option<DeviceRange>> {
        const OP: &str = "allocation";
        let mut state = self.seat.lock();
        state.enter(self.seat.device, OP)?;
        state.machine.allocation(self.seat.device, at.0, OP).map(Some)
    }

    fn record(&mut self, event: EventId, stream: StreamId) -> Result<()> {
        let user = self.seat.user;
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "record")?;
        let slot = state.open_lane(user, stream, "record")?;
        let timed = state.machine.users[user].events.get(event.0, "record")?.timed;
        state.strike(self.seat.device, Spot::Record, Some(slot), "record")?;
        state.charge(|model| model.record_call_ns);
        let queue = &state.machine.queues[slot as usize];
        let mark = Mark { slot, uid: queue.uid, seq: queue.enqueued() + 1 };
        let kept = state.machine.users[user].events.get_mut(event.0, "record")?;
        (kept.mark, kept.at_ns) = (Some(mark), None);
        let op = Op::Record(timed.then_some((user, event.0)));
        state.push(slot, op, "record").map(drop)
    }

    fn wait(&mut self, stream: StreamId, event: EventId, _: Site) -> Result<()> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "wait")?;
        let slot = state.open_lane(self.seat.user, stream, "wait")?;
        let mark = state.machine.users[self.seat.user].events.get(event.0, "wait")?.mark;
        let mark = mark.ok_or_else(|| Error::usage(Misuse::FreshEvent, "wait"))?;
        state.strike(self.seat.device, Spot::Wait, Some(slot), "wait")?;
        state.charge(|model| model.wait_call_ns);
        state.push(slot, Op::Wait(mark), "wait").map(drop)
    }

    fn query(&mut self, event: EventId, _: Site) -> Result<bool> {
        self.seat.query(event)
    }

    fn idle(&mut self, stream: StreamId, _: Site) -> Result<bool> {
        const OP: &str = "idle";
        let mut state = self.seat.lock();
        state.enter(self.seat.device, OP)?;
        let slot = state.open_lane(self.seat.user, stream, OP)?;
        state.strike(self.seat.device, Spot::Query, Some(slot), OP)?;
        state.charge(|model| model.query_call_ns);
        state.drift(Call::Query);
        state.report(self.seat.device, OP)?;
        let held_back = state.faults.held_back();
        let queue = &state.machine.queues[slot as usize];
        let all = Mark { slot, uid: queue.uid, seq: queue.enqueued() };
        Ok(!held_back && state.machine.is_done(all))
    }

    fn elapsed(&mut self, from: EventId, to: EventId) -> Result<Duration> {
        const OP: &str = "elapsed";
        let mut state = self.seat.lock();
        state.enter(self.seat.device, OP)?;
        state.charge(|model| model.query_call_ns);
        state.drift(Call::Query);
        let mut times = [0.0; 2];
        for (time, event) in times.iter_mut().zip([from, to]) {
            let event = state.machine.users[self.seat.user].events.get(event.0, OP)?;
            if !event.timed {
                return Err(Error::usage(Misuse::BadValue, OP).detail("made without timing"));
            }
            if event.mark.is_none() {
                return Err(Error::usage(Misuse::FreshEvent, OP));
            }
            *time = event.at_ns.ok_or_else(|| Error::new(Kind::Busy, OP))?;
        }
        if times[1] < times[0] {
            return Err(Error::usage(Misuse::BadValue, OP).detail("the second came first"));
        }
        Ok(Duration::from_nanos((times[1] - times[0]) as u64))
    }

    fn note(&mut self, by: Actor, _: &[Use]) -> Result<()> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "note")?;
        if let Actor::Stream(stream) = by {
            state.machine.lane(self.seat.user, stream.0, "note")?;
        }
        Ok(())
    }

    fn copy_out(&mut self, to: PinnedRange, from: DeviceRange, on: StreamId) -> Result<()> {
        self.copy(from, to, on, Way::Out)
    }

    fn copy_in(&mut self, to: DeviceRange, from: PinnedRange, on: StreamId) -> Result<()> {
        self.copy(to, from, on, Way::In)
    }

    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "launch")?;
        let slot = state.open_lane(self.seat.user, on, "launch")?;
        if kernel.host.is_none() && state.machine.moves_bytes {
            return Err(no_form(kernel));
        }
        let mut run = Run::new(Body::Kernel(kernel, grid), (kernel.cost)(&grid, args));
        for arg in args {
            match arg.uses() {
                Some(one) => run.push(&mut state.machine, self.seat.device, one)?,
                None => run.push_number(*arg),
            }
        }
        self.enqueue_run(state, slot, run)
    }

    fn capturing(&mut self, stream: StreamId) -> Result<bool> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "capturing")?;
        let lane = state.machine.lane(self.seat.user, stream.0, "capturing")?;
        Ok(state.machine.queues[lane.slot as usize].is_capturing())
    }

    fn sync(&mut self) -> Result<()> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "sync")?;
        state.strike(self.seat.device, Spot::Sync, None, "sync")?;
        let ran = state.run_device(self.seat.device, "sync");
        state.machine.settle_room(self.seat.device);
        ran
    }

    fn pinner(&self) -> Arc<dyn Pinner> {
        Arc::new(SimPinner { world: self.seat.world.clone(), device: self.seat.device })
    }

    fn fence(&self) -> Arc<dyn Fence> {
        Arc::new(SimFence { seat: Arc::clone(&self.seat) })
    }
}
