//! A device that does one thing wrong: it stands between an engine and the simulated device, and
//! spoils or refuses one request, told which.
#![allow(clippy::unwrap_used, reason = "a test may fail")]
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(unreachable_pub, missing_debug_implementations, reason = "part of a test binary")]

use lightering::backend::sim::Sim;
use lightering::backend::{
    About, Arg, Backend, Cost, Fence, Grid, HostArgs, Kernel, Memory, Pinner, Timing, Work,
};
use lightering::trace::{Access, Actor, Site, Use};
use lightering::{
    Bytes, DevicePtr, DeviceRange, Error, EventId, Kind, Misuse, PinnedRange, Result, StreamId,
};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// The copy-in reads the block of the copy-out before the last.
    Misdirected,
    /// Only the first half of the copy-in is made.
    Halved,
    /// One bit of the copy-out's target flips once it is there.
    Flipped,
    /// The copy-in moves nothing.
    Lost,
}

/// Which kind of request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    Launch,
    CopyOut,
    CopyIn,
    Record,
    /// A span's time.
    Elapsed,
}

#[derive(Debug, Default)]
pub struct Plan {
    /// Spoils the copy in that direction of this number, from 1; sums are not counted.
    pub wrong: Vec<(Wrong, u32)>,
    /// Refuses the request of this number, from 1.
    pub refused: Option<(Refused, u32)>,
    /// The device has no kernels.
    pub without_kernels: bool,
    /// What was asked for so far.
    pub seen: Seen,
}

#[derive(Debug, Default)]
pub struct Seen {
    copies_in: u32,
    copies_out: u32,
    /// Requests of the kind of which one is refused.
    requests: u32,
    /// Targets of copies out.
    blocks: Vec<PinnedRange>,
}

impl Plan {
    fn strikes(&mut self, what: Refused, op: &'static str) -> Result<()> {
        let Some((refused, nth)) = self.refused.filter(|(refused, _)| *refused == what) else {
            return Ok(());
        };
        self.seen.requests += 1;
        if self.seen.requests == nth {
            return Err(Error::new(Kind::OutOfMemory, op).detail(format!("{refused:?} {nth}")));
        }
        Ok(())
    }

    fn spoils(&self, count: u32, is_out: bool) -> Option<Wrong> {
        let fits = |wrong: &Wrong| (*wrong == Wrong::Flipped) == is_out;
        let hit = self.wrong.iter().find(|(wrong, nth)| fits(wrong) && *nth == count);
        hit.map(|(wrong, _)| *wrong)
    }

    /// Was the request to be refused made?
    pub fn was_refused(&self) -> bool {
        self.refused.is_some_and(|(_, nth)| self.seen.requests >= nth)
    }
}

pub type Shared = Arc<Mutex<Plan>>;

pub struct Crooked {
    pub sim: Sim,
    pub plan: Shared,
}

/// A sum, which is not a storage's bytes.
const SUM: Bytes = Bytes(8);

impl Backend for Crooked {
    fn about(&self) -> About {
        self.sim.about()
    }
    fn memory(&mut self) -> Result<Memory> {
        self.sim.memory()
    }
    fn reset_peak(&mut self) {
        self.sim.reset_peak();
    }
    fn alloc_device(&mut self, len: Bytes, on: StreamId) -> Result<DevicePtr> {
        self.sim.alloc_device(len, on)
    }
    fn free_device(&mut self, at: DevicePtr, on: StreamId) -> Result<()> {
        self.sim.free_device(at, on)
    }
    fn adopt_stream(&mut self, raw: usize) -> Result<StreamId> {
        self.sim.adopt_stream(raw)
    }
    fn create_stream(&mut self) -> Result<StreamId> {
        self.sim.create_stream()
    }
    fn close_stream(&mut self, stream: StreamId) -> Result<()> {
        self.sim.close_stream(stream)
    }
    fn raw_stream(&self, stream: StreamId) -> Result<usize> {
        self.sim.raw_stream(stream)
    }
    fn create_event(&mut self, timing: Timing) -> Result<EventId> {
        self.sim.create_event(timing)
    }
    fn close_event(&mut self, event: EventId) -> Result<()> {
        self.sim.close_event(event)
    }
    fn record(&mut self, event: EventId, stream: StreamId) -> Result<()> {
        self.plan.lock().unwrap().strikes(Refused::Record, "record")?;
        self.sim.record(event, stream)
    }
    fn wait(&mut self, stream: StreamId, event: EventId, site: Site) -> Result<()> {
        self.sim.wait(stream, event, site)
    }
    fn query(&mut self, event: EventId, site: Site) -> Result<bool> {
        self.sim.query(event, site)
    }
    fn idle(&mut self, stream: StreamId, site: Site) -> Result<bool> {
        self.sim.idle(stream, site)
    }
    fn elapsed(&mut self, from: EventId, to: EventId) -> Result<Duration> {
        self.plan.lock().unwrap().strikes(Refused::Elapsed, "elapsed")?;
        self.sim.elapsed(from, to)
    }
    fn note(&mut self, by: Actor, uses: &[Use]) -> Result<()> {
        self.sim.note(by, uses)
    }
    fn copy_out(&mut self, to: PinnedRange, from: DeviceRange, on: StreamId) -> Result<()> {
        let mut plan = self.plan.lock().unwrap();
        plan.strikes(Refused::CopyOut, "copy_out")?;
        self.sim.copy_out(to, from, on)?;
        if to.len() == SUM {
            return Ok(());
        }
        plan.seen.copies_out += 1;
        plan.seen.blocks.push(to);
        if plan.spoils(plan.seen.copies_out, true).is_none() {
            return Ok(());
        }
        let uses = [Use { access: Access::Update, span: to.into() }];
        let cost = Cost { flops: 0.0, bytes: 0.0, work: Work::Vector };
        let flip = |args: &mut HostArgs<'_>| {
            let bytes = args.write::<u8>(0)?;
            bytes[bytes.len() / 2] ^= 0x10;
            Ok(())
        };
        self.sim.launch_fn(on, &uses, cost, Box::new(flip))
    }
    fn copy_in(&mut self, to: DeviceRange, from: PinnedRange, on: StreamId) -> Result<()> {
        let mut plan = self.plan.lock().unwrap();
        plan.strikes(Refused::CopyIn, "copy_in")?;
        plan.seen.copies_in += 1;
        match plan.spoils(plan.seen.copies_in, false) {
            Some(Wrong::Misdirected) => {
                let other = plan.seen.blocks.iter().rev().find(|block| **block != from).unwrap();
                self.sim.copy_in(to, *other, on)
            }
            Some(Wrong::Halved) => {
                let half = Bytes(to.len().0 / 2);
                let (to, from) = (to.part(Bytes::ZERO, half)?, from.part(Bytes::ZERO, half)?);
                self.sim.copy_in(to, from, on)
            }
            Some(_) => Ok(()),
            None => self.sim.copy_in(to, from, on),
        }
    }
    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        let mut plan = self.plan.lock().unwrap();
        if plan.without_kernels {
            return Err(Error::usage(Misuse::BadKernel, "launch"));
        }
        plan.strikes(Refused::Launch, "launch")?;
        self.sim.launch(kernel, grid, args, on)
    }
    fn capturing(&mut self, stream: StreamId) -> Result<bool> {
        self.sim.capturing(stream)
    }
    fn sync(&mut self) -> Result<()> {
        self.sim.sync()
    }
    fn pinner(&self) -> Arc<dyn Pinner> {
        self.sim.pinner()
    }
    fn fence(&self) -> Arc<dyn Fence> {
        self.sim.fence()
    }
}
