//! The device that is measured: its streams, its pinned memory, and two clocks to read.
//!
//! What it is not: it knows no figure. It says how long something took.
//!
//! Invariant: a device's time is one between two events of one stream; the host's time is the
//! simulated host's where the device is simulated.
//!
//! ```text
//!   compute  ..gate..|from| work |to|         span: elapsed(from, to)
//!   out      ==copy==copy==copy==copy==
//!   host     |call|call|call|                 host: now - before
//! ```
//!
//! The measuring files use it.

use crate::work::{axpy, filled};
use lightering::backend::sim::World;
use lightering::backend::{Backend, Timing};
use lightering::pinned::{Block, Budget, Client, PinnedPool, PoolOptions};
use lightering::trace::Site;
use lightering::{Bytes, DeviceRange, Error, EventId, Misuse, Name, PinnedRange, Result, StreamId};
use std::time::{Duration, Instant};

/// Bytes of a long copy.
pub(crate) const LONG: Bytes = Bytes::mib(64);
/// Bytes of a vector of the kernel that memory bounds: several times any cache.
const VECTOR: Bytes = Bytes::mib(512);

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the device.
    Out = 0,
    /// To the device.
    In = 1,
}

/// Where the host's time is read.
pub(crate) enum Clock {
    Real(Instant),
    Simulated(World),
}

impl Clock {
    fn now(&self) -> Duration {
        match self {
            Clock::Real(start) => start.elapsed(),
            Clock::Simulated(world) => world.now(),
        }
    }
}

/// A stream with all that a copy on it needs.
struct Lane {
    stream: StreamId,
    block: Block,
    host: PinnedRange,
    device: DeviceRange,
}

/// One device, with nothing else to do.
pub(crate) struct Rig {
    pub(crate) backend: Box<dyn Backend>,
    clock: Clock,
    pub(crate) compute: StreamId,
    lanes: Vec<Lane>,
    client: Client,
    vectors: [DeviceRange; 2],
    /// With times.
    times: [EventId; 2],
    ends: [EventId; 2],
    /// Without.
    link: EventId,
}

impl Rig {
    /// Takes and pins all memory.
    pub(crate) fn new(mut backend: Box<dyn Backend>, clock: Clock) -> Result<Rig> {
        let compute = backend.create_stream()?;
        // A block is an eighth larger at most.
        let room = Bytes(2 * (LONG.0 + LONG.0 / 8));
        let options = PoolOptions { budget: Budget::Bytes(room), ..PoolOptions::default() };
        let pool = PinnedPool::new(backend.pinner(), options)?;
        pool.reserve(room)?;
        let mut client = pool.client(backend.fence(), Bytes::MAX)?;
        let mut lanes = Vec::new();
        for _ in 0..2 {
            let mut block = client.lend(LONG, Name::new("copy"))?.block;
            block.mark_written(LONG)?;
            let host = block.trunk(Bytes::ZERO, LONG)?;
            if host.len() != LONG {
                let error = Error::usage(Misuse::OutOfRange, "calibrate").bytes(LONG);
                return Err(error.detail("one registration cannot hold a copy"));
            }
            let stream = backend.create_stream()?;
            let device = DeviceRange::new(backend.alloc_device(LONG, stream)?, LONG)?;
            lanes.push(Lane { stream, block, host, device });
        }
        let mut vector = |seed| filled(&mut *backend, compute, VECTOR, (seed, 1.0));
        let vectors = [vector(1)?, vector(2)?];
        let mut event = |timing| backend.create_event(timing);
        let times = [event(Timing::On)?, event(Timing::On)?];
        let ends = [event(Timing::On)?, event(Timing::On)?];
        let link = event(Timing::Off)?;
        backend.sync()?;
        Ok(Rig { backend, clock, compute, lanes, client, vectors, times, ends, link })
    }

    /// The stream of copies that way.
    pub(crate) fn stream(&self, way: Way) -> StreamId {
        self.lanes[way as usize].stream
    }

    /// Enqueues a copy of `len` bytes that way.
    pub(crate) fn copy(&mut self, way: Way, len: Bytes) -> Result<()> {
        let Lane { stream, host, device, .. } = &self.lanes[way as usize];
        let (host, device) = (host.part(Bytes::ZERO, len)?, device.part(Bytes::ZERO, len)?);
        match way {
            Way::Out => self.backend.copy_out(host, device, *stream),
            Way::In => self.backend.copy_in(device, host, *stream),
        }
    }

    /// Enqueues the kernel that memory bounds over the first `len` bytes of its vectors.
    pub(crate) fn vector(&mut self, len: Bytes) -> Result<()> {
        let [x, y] = [self.vectors[0].part(Bytes::ZERO, len)?, self.vectors[1]];
        axpy(&mut *self.backend, [x, y.part(Bytes::ZERO, len)?], self.compute)
    }

    /// Bytes of device memory that a whole such kernel reads and writes.
    pub(crate) fn vector_bytes(&self) -> f64 {
        3.0 * VECTOR.0 as f64
    }

    /// Enqueues it over all of them.
    pub(crate) fn long_vector(&mut self) -> Result<()> {
        self.vector(VECTOR)
    }

    /// Seconds of the device from the end of what is on the stream until the end of `work`.
    pub(crate) fn span(
        &mut self,
        on: StreamId,
        work: impl FnOnce(&mut Rig) -> Result<()>,
    ) -> Result<f64> {
        let [from, to] = self.times;
        self.backend.record(from, on)?;
        work(self)?;
        self.backend.record(to, on)?;
        self.backend.sync()?;
        Ok(self.backend.elapsed(from, to)?.as_secs_f64())
    }

    /// Seconds that both ways need for `count` long copies each, from a common start on.
    pub(crate) fn both_ways(&mut self, count: u32) -> Result<[f64; 2]> {
        let start = self.times[0];
        // The device is kept busy until the host has enqueued everything.
        self.long_vector()?;
        self.backend.record(start, self.compute)?;
        let ways = [Way::Out, Way::In];
        for way in ways {
            let stream = self.stream(way);
            self.backend.wait(stream, start, Site::Outside)?;
        }
        for _ in 0..count {
            ways.into_iter().try_for_each(|way| self.copy(way, LONG))?;
        }
        for way in ways {
            let (end, stream) = (self.ends[way as usize], self.stream(way));
            self.backend.record(end, stream)?;
        }
        self.backend.sync()?;
        let mut end = |way: Way| self.backend.elapsed(start, self.ends[way as usize]);
        Ok([end(Way::Out)?.as_secs_f64(), end(Way::In)?.as_secs_f64()])
    }

    /// Seconds of `work` on the compute stream while copies go `way` from before its start until
    /// after its end; `count` of them to begin with.
    pub(crate) fn beside(
        &mut self,
        way: Way,
        mut count: u32,
        mut work: impl FnMut(&mut Rig) -> Result<()>,
    ) -> Result<f64> {
        loop {
            let (stream, link, end) = (self.stream(way), self.link, self.ends[way as usize]);
            self.copy(way, LONG)?;
            self.backend.record(link, stream)?;
            self.backend.wait(self.compute, link, Site::Outside)?;
            (1..count).try_for_each(|_| self.copy(way, LONG))?;
            self.backend.record(end, stream)?;
            let seconds = self.span(self.compute, &mut work)?;
            // Where the copies were over first, even before the work began, it takes more of them.
            let copies = match self.backend.elapsed(self.times[0], end) {
                Err(error) if error.misuse() == Some(Misuse::BadValue) => Duration::ZERO,
                copies => copies?,
            };
            if copies.as_secs_f64() > seconds {
                return Ok(seconds);
            }
            if count >= COPIES_MAX {
                let error = Error::usage(Misuse::BadValue, "calibrate");
                return Err(error.detail("copies never outlast the kernels beside them"));
            }
            count *= 2;
        }
    }

    /// Seconds of the host for `work`, which starts on an idle device.
    pub(crate) fn host(&mut self, work: impl FnOnce(&mut Rig) -> Result<()>) -> Result<f64> {
        self.backend.sync()?;
        let before = self.clock.now();
        work(self)?;
        let seconds = (self.clock.now() - before).as_secs_f64();
        self.backend.sync()?;
        Ok(seconds)
    }

    /// Gives everything back.
    pub(crate) fn close(mut self) -> Result<()> {
        self.backend.sync()?;
        for lane in self.lanes {
            self.client.give_back(lane.block, None)?;
            self.backend.free_device(lane.device.at(), lane.stream)?;
            self.backend.close_stream(lane.stream)?;
        }
        for vector in self.vectors {
            self.backend.free_device(vector.at(), self.compute)?;
        }
        for event in self.times.into_iter().chain(self.ends).chain([self.link]) {
            self.backend.close_event(event)?;
        }
        self.backend.sync()?;
        self.backend.close_stream(self.compute)
    }
}

/// More copies than this at once fill a driver's queue, and the host would wait in it.
const COPIES_MAX: u32 = 1 << 9;
