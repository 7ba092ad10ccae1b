//! One user of a simulated device, and what only a simulated device can do for it.
//!
//! What it is not: the verbs of [`Backend`](crate::backend::Backend); `verbs` has those.
//!
//! Invariant: a user's ids live until the last of its `Sim` and fences is dropped; then its streams
//! close, and work enqueued on them still runs.
//!
//! ```text
//!   Sim --.
//!          +--> Seat { world, user } --> State.machine.users[user]
//!   Fence -'
//! ```
//!
//! Whoever opened the device uses it.

use super::launch::{Body, Closure, Run};
use super::memory::HostPtr;
use super::queue::Op;
use super::schedule::Call;
use super::state::State;
use super::{Spot, World};
use crate::backend::Cost;
use crate::error::{Error, Kind, Misuse, Result};
use crate::trace::Use;
use crate::unit::{Bytes, DevicePtr, EventId, StreamId};
use std::ptr::NonNull;
use std::sync::{Arc, MutexGuard};

/// The raw handle of each device's host-synchronous stream: whatever is enqueued on it is done
/// before the call returns. (Handle 0 is the device's default stream.)
pub const HOST_STREAM: usize = 0x8;

/// One user of one simulated device.
#[derive(Debug)]
pub struct Sim {
    pub(super) seat: Arc<Seat>,
}

/// A place at a device; given up by the last who holds it.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) world: World,
    pub(super) user: usize,
    pub(super) device: u32,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.world.lock();
        if let Some(user) = state.machine.users.try_remove(self.user) {
            let owned = user.streams.iter().filter(|(_, lane)| lane.owned);
            owned.for_each(|(_, lane)| state.machine.close_queue(lane.slot));
        }
    }
}

impl Seat {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.world.lock()
    }

    /// Is the event done?
    pub(super) fn query(&self, event: EventId) -> Result<bool> {
        let mut state = self.lock();
        state.enter(self.device, "query")?;
        let mark = state.machine.users[self.user].events.get(event.0, "query")?.mark;
        let mark = mark.ok_or_else(|| Error::usage(Misuse::FreshEvent, "query"))?;
        state.strike(self.device, Spot::Query, None, "query")?;
        state.charge(|model| model.query_call_ns);
        state.drift(Call::Query);
        state.report(self.device, "query")?;
        let held_back = state.faults.held_back();
        Ok(!held_back && state.machine.is_done(mark))
    }
}

impl Sim {
    pub(super) fn new(world: World, user: usize, device: u32) -> Sim {
        Sim { seat: Arc::new(Seat { world, user, device }) }
    }

    /// The world it is part of.
    pub fn world(&self) -> &World {
        &self.seat.world
    }

    /// A name for the host-synchronous stream of this device.
    ///
    /// # Errors
    /// As [`Backend::adopt_stream`](crate::backend::Backend::adopt_stream).
    pub fn host_stream(&mut self) -> Result<StreamId> {
        crate::backend::Backend::adopt_stream(self, HOST_STREAM)
    }

    /// Says that the stream is, or is no longer, being captured into a graph: then verbs that
    /// enqueue on it are refused.
    ///
    /// # Errors
    /// `Usage` for a stale or foreign stream.
    pub fn set_capturing(&mut self, stream: StreamId, capturing: bool) -> Result<()> {
        let mut state = self.seat.lock();
        let lane = state.machine.lane(self.seat.user, stream.0, "set_capturing")?;
        state.machine.queues[lane.slot as usize].capturing = capturing;
        Ok(())
    }

    /// Makes `len` bytes of host memory reachable as bytes of this device, at their own address.
    ///
    /// # Errors
    /// `Usage(Empty)` for no bytes, `Usage(Overlap)` where some are adopted already.
    ///
    /// # Safety
    /// The bytes stay valid for reads and writes, are initialised, and nobody touches them while
    /// work enqueued here may, until [`Sim::forget_host`] returned `Ok` for them.
    pub unsafe fn adopt_host(&mut self, at: NonNull<u8>, len: Bytes) -> Result<DevicePtr> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "adopt_host")?;
        if len.is_zero() {
            return Err(Error::usage(Misuse::Empty, "adopt_host"));
        }
        let at = HostPtr::new(at.as_ptr());
        state.machine.regions.adopt(at, len.0, self.seat.device).map(DevicePtr)
    }

    /// Ends an adoption; `at` is what [`Sim::adopt_host`] returned.
    ///
    /// # Errors
    /// `Busy` while queued work uses the bytes; `Usage` for an address not adopted here.
    pub fn forget_host(&mut self, at: DevicePtr) -> Result<()> {
        let mut state = self.seat.lock();
        let device = Some(self.seat.device);
        let removed = state.machine.regions.remove(at.0, device, "forget_host");
        let busy = removed.as_ref().is_err_and(|error| error.kind() == Kind::Busy);
        state.removals_refused += u64::from(busy);
        removed
    }

    /// Enqueues a closure as a kernel. Its arguments are the bytes of `uses`, in order. It runs
    /// with the world's lock held, so it must neither use nor own anything of this world.
    ///
    /// ```
    /// use lightering::backend::{Backend, Cost, Work, sim::World};
    /// use lightering::trace::Use;
    /// use lightering::{Bytes, DeviceRange};
    /// use std::sync::mpsc;
    ///
    /// # fn main() -> lightering::Result<()> {
    /// let mut device = World::process().device(0)?;
    /// let on = device.create_stream()?;
    /// let len = Bytes::kib(4);
    /// let range = DeviceRange::new(device.alloc_device(len, on)?, len)?;
    /// let cost = Cost { flops: 0.0, bytes: 4096.0, work: Work::Vector };
    /// let fill = Box::new(|args: &mut lightering::backend::HostArgs<'_>| {
    ///     args.write::<u32>(0)?.fill(7);
    ///     Ok(())
    /// });
    /// device.launch_fn(on, &[Use::write(range)], cost, fill)?;
    /// let (tell, told) = mpsc::channel();
    /// let sum = Box::new(move |args: &mut lightering::backend::HostArgs<'_>| {
    ///     let _ = tell.send(args.read::<u32>(0)?.iter().sum::<u32>());
    ///     Ok(())
    /// });
    /// device.launch_fn(on, &[Use::read(range)], cost, sum)?;
    /// device.sync()?; // until then neither has to have run
    /// assert_eq!(told.try_recv(), Ok(7 * 1024));
    /// # device.free_device(range.at(), on)
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Usage(BadKernel)` where a use that writes overlaps another; `Usage(OutOfRange)` for bytes
    /// that are not there.
    pub fn launch_fn(
        &mut self,
        on: StreamId,
        uses: &[Use],
        cost: Cost,
        body: Closure,
    ) -> Result<()> {
        let mut state = self.seat.lock();
        state.enter(self.seat.device, "launch")?;
        let slot = state.open_lane(self.seat.user, on, "launch")?;
        let mut run = Run::new(Body::Closure(body), cost);
        for one in uses {
            run.push(&mut state.machine, self.seat.device, *one)?;
        }
        self.enqueue_run(state, slot, run)
    }

    /// The last steps of a launch, once everything about it is known to be right.
    pub(super) fn enqueue_run(
        &self,
        mut state: MutexGuard<'_, State>,
        slot: u32,
        run: Run,
    ) -> Result<()> {
        state.strike(self.seat.device, Spot::Launch, Some(slot), "launch")?;
        state.charge(|model| model.launch_call_ns);
        run.holds.iter().for_each(|region| state.machine.regions.hold(*region));
        state.push(slot, Op::Run(Box::new(run)), "launch").map(drop)
    }
}
