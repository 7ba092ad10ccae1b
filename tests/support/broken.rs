//! A backend that breaks one named place of its user's order, and nothing else.
//!
//! What it is not: a faulty device. What reaches the backend inside is done as asked; what is
//! broken never reaches it, or reaches it with the wrong event.
//!
//! Invariant: a plan touches the requests of its one site; each that it touched is counted.
//!
//! ```text
//!   engine -> Broken { site: ReaderWait, DropWait } -> Traced -> Sim
//!              wait(.., ReaderWait): "yes", and no more     `-> checker: sees what was asked
//!              everything else ------------------------->       of the device, no lie of it
//! ```
//!
//! The tests of the edges use it.

use lightering::backend::sim::Sim;
use lightering::backend::{About, Arg, Backend, Fence, Grid, Kernel, Memory, Pinner, Timing};
use lightering::trace::{Actor, Site, Use};
use lightering::{
    Bytes, DevicePtr, DeviceRange, Error, EventId, Kind, MemoryId, PinnedRange, Result, StreamId,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How a place is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The wait is never enqueued.
    DropWait,
    /// The question is answered with yes, unasked.
    EarlyTrue,
    /// The event recorded before the right one, on the same stream, takes its place.
    StaleEvent,
    /// An event that was never recorded takes its place.
    FreshEvent,
    /// An event of another device takes its place.
    ForeignEvent,
}

impl Fault {
    /// What can be wrong with a wait.
    pub const OF_WAITS: [Fault; 4] =
        [Fault::DropWait, Fault::StaleEvent, Fault::FreshEvent, Fault::ForeignEvent];
    /// What can be wrong with a question.
    pub const OF_QUERIES: [Fault; 4] =
        [Fault::EarlyTrue, Fault::StaleEvent, Fault::FreshEvent, Fault::ForeignEvent];
}

/// Does the engine ask at this site, or wait?
pub fn is_query(site: Site) -> bool {
    let queries = [
        Site::ReleaseQuery,
        Site::ReleaseFence,
        Site::UnmapQuery,
        Site::UnmapFence,
        Site::UnmapIdle,
        Site::HostReadQuery,
        Site::BlockIdleQuery,
        Site::TransferQuery,
    ];
    queries.contains(&site)
}

/// What can be wrong at this site.
pub fn faults_of(site: Site) -> &'static [Fault] {
    match site {
        // No event is asked about.
        Site::UnmapIdle => &[Fault::EarlyTrue],
        _ if is_query(site) => &Fault::OF_QUERIES,
        _ => &Fault::OF_WAITS,
    }
}

/// Which place is broken, and how.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub site: Site,
    pub fault: Fault,
}

/// How often requests of the plan's site were broken.
#[derive(Clone, Debug, Default)]
pub struct Reach(Arc<AtomicU64>);

impl Reach {
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Breaks what its plan names. With no plan it changes nothing.
pub struct Broken<B> {
    inner: B,
    plan: Option<Plan>,
    reach: Reach,
    /// What each event stands for, the latest recording last.
    recordings: Vec<(EventId, StreamId)>,
    /// Another device, kept for its event, which is done.
    _other: Sim,
    foreign: EventId,
    fresh: Option<EventId>,
}

impl<B: Backend> Broken<B> {
    pub fn new(inner: B, plan: Option<Plan>, mut other: Sim) -> Broken<B> {
        let stream = other.create_stream().unwrap();
        let foreign = other.create_event(Timing::Off).unwrap();
        other.record(foreign, stream).unwrap();
        other.sync().unwrap();
        let (reach, recordings) = (Reach::default(), Vec::new());
        Broken { inner, plan, reach, recordings, _other: other, foreign, fresh: None }
    }

    pub fn reach(&self) -> Reach {
        self.reach.clone()
    }

    fn fault(&self, site: Site, faults: &[Fault]) -> Option<Fault> {
        let plan = self.plan.filter(|plan| plan.site == site && faults.contains(&plan.fault))?;
        self.reach.0.fetch_add(1, Ordering::Relaxed);
        Some(plan.fault)
    }

    /// The event that takes the place of `event`.
    fn swap(&mut self, event: EventId, fault: Fault) -> Result<EventId> {
        Ok(match fault {
            Fault::StaleEvent => self.stale(event),
            Fault::FreshEvent => match self.fresh {
                Some(fresh) => fresh,
                None => *self.fresh.insert(self.inner.create_event(Timing::Off)?),
            },
            _ => self.foreign,
        })
    }

    /// The last event recorded on the same stream before this one was.
    fn stale(&self, event: EventId) -> EventId {
        let place = self.recordings.iter().position(|(other, _)| *other == event).unwrap();
        let stream = self.recordings[place].1;
        let earlier = self.recordings[..place].iter().rev().find(|(_, on)| *on == stream);
        earlier.expect("each stream was recorded when it was opened").0
    }

    /// A recording that is older than any of the user's, and done.
    fn open(&mut self, stream: StreamId) -> Result<StreamId> {
        if self.plan.is_some_and(|plan| plan.fault == Fault::StaleEvent) {
            let event = self.inner.create_event(Timing::Off)?;
            self.record(event, stream)?;
            self.inner.sync()?;
        }
        Ok(stream)
    }
}

/// What a driver makes of the wrong event: it lets a wait for it pass, and calls it done. The
/// backend inside refuses it, so that the trace shows a request without effect.
fn as_driver<T>(result: Result<T>, done: T) -> Result<T> {
    result.or_else(|error: Error| match error.kind() {
        Kind::Usage(_) => Ok(done),
        _ => Err(error),
    })
}

impl<B: Backend> Backend for Broken<B> {
    fn wait(&mut self, stream: StreamId, event: EventId, site: Site) -> Result<()> {
        match self.fault(site, &Fault::OF_WAITS) {
            None => self.inner.wait(stream, event, site),
            Some(Fault::DropWait) => Ok(()),
            Some(fault) => {
                let event = self.swap(event, fault)?;
                as_driver(self.inner.wait(stream, event, site), ())
            }
        }
    }

    fn query(&mut self, event: EventId, site: Site) -> Result<bool> {
        match self.fault(site, &Fault::OF_QUERIES) {
            None => self.inner.query(event, site),
            Some(Fault::EarlyTrue) => Ok(true),
            Some(fault) => {
                let event = self.swap(event, fault)?;
                as_driver(self.inner.query(event, site), true)
            }
        }
    }

    fn idle(&mut self, stream: StreamId, site: Site) -> Result<bool> {
        // It may always say no; the place behind it would be reached too seldom else.
        if self.plan.is_some_and(|plan| plan.site == Site::UnmapFence) {
            return Ok(false);
        }
        match self.fault(site, &[Fault::EarlyTrue]) {
            None => self.inner.idle(stream, site),
            Some(_) => Ok(true),
        }
    }

    fn allocation(&mut self, _at: DevicePtr) -> Result<Option<DeviceRange>> {
        // It may always say that it cannot tell.
        Ok(None)
    }

    fn record(&mut self, event: EventId, stream: StreamId) -> Result<()> {
        self.inner.record(event, stream)?;
        self.recordings.retain(|(other, _)| *other != event);
        self.recordings.push((event, stream));
        Ok(())
    }

    fn create_stream(&mut self) -> Result<StreamId> {
        let stream = self.inner.create_stream()?;
        self.open(stream)
    }

    fn adopt_stream(&mut self, raw: usize) -> Result<StreamId> {
        let stream = self.inner.adopt_stream(raw)?;
        self.open(stream)
    }

    fn close_event(&mut self, event: EventId) -> Result<()> {
        self.recordings.retain(|(other, _)| *other != event);
        self.inner.close_event(event)
    }

    // From here on everything goes through as it is.

    fn about(&self) -> About {
        self.inner.about()
    }

    fn memory(&mut self) -> Result<Memory> {
        self.inner.memory()
    }

    fn reset_peak(&mut self) {
        self.inner.reset_peak();
    }

    fn alloc_device(&mut self, len: Bytes, on: StreamId) -> Result<DevicePtr> {
        self.inner.alloc_device(len, on)
    }

    fn free_device(&mut self, at: DevicePtr, on: StreamId) -> Result<()> {
        self.inner.free_device(at, on)
    }

    fn map_granularity(&mut self) -> Result<Bytes> {
        self.inner.map_granularity()
    }

    fn reserve_range(&mut self, len: Bytes) -> Result<DeviceRange> {
        self.inner.reserve_range(len)
    }

    fn release_range(&mut self, range: DeviceRange) -> Result<()> {
        self.inner.release_range(range)
    }

    fn create_memory(&mut self, len: Bytes) -> Result<MemoryId> {
        self.inner.create_memory(len)
    }

    fn close_memory(&mut self, memory: MemoryId) -> Result<()> {
        self.inner.close_memory(memory)
    }

    fn map_memory(&mut self, range: DeviceRange, memory: &[MemoryId]) -> Result<()> {
        self.inner.map_memory(range, memory)
    }

    fn unmap_memory(&mut self, range: DeviceRange) -> Result<()> {
        self.inner.unmap_memory(range)
    }

    fn close_stream(&mut self, stream: StreamId) -> Result<()> {
        self.inner.close_stream(stream)
    }

    fn raw_stream(&self, stream: StreamId) -> Result<usize> {
        self.inner.raw_stream(stream)
    }

    fn create_event(&mut self, timing: Timing) -> Result<EventId> {
        self.inner.create_event(timing)
    }

    fn elapsed(&mut self, from: EventId, to: EventId) -> Result<Duration> {
        self.inner.elapsed(from, to)
    }

    fn note(&mut self, by: Actor, uses: &[Use]) -> Result<()> {
        self.inner.note(by, uses)
    }

    fn copy_out(&mut self, to: PinnedRange, from: DeviceRange, on: StreamId) -> Result<()> {
        self.inner.copy_out(to, from, on)
    }

    fn copy_in(&mut self, to: DeviceRange, from: PinnedRange, on: StreamId) -> Result<()> {
        self.inner.copy_in(to, from, on)
    }

    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        self.inner.launch(kernel, grid, args, on)
    }

    fn capturing(&mut self, stream: StreamId) -> Result<bool> {
        self.inner.capturing(stream)
    }

    fn sync(&mut self) -> Result<()> {
        self.inner.sync()
    }

    fn pinner(&self) -> Arc<dyn Pinner> {
        self.inner.pinner()
    }

    fn fence(&self) -> Arc<dyn Fence> {
        self.inner.fence()
    }
}
