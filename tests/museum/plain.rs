//! A device used without an engine, as the projects of the museum used theirs, and what the checker
//! says of it.
//!
//! What it is not: an offloader. It keeps no order of its own.
//!
//! Invariant: every request and every use of bytes is in the trace, in the order made.
//!
//! ```text
//!   Plain { compute, side: streams; block(n): pinned } -> Traced<Sim> -> Checker
//! ```

use crate::rig::{Pages, alloc, event, part};
use lightering::backend::Backend;
use lightering::backend::sim::{Config, Sim, World};
use lightering::backend::traced::Traced;
use lightering::hazard::{Checker, Kind};
use lightering::trace::{Access, Actor, Site, Use};
use lightering::{DeviceRange, EventId, PinnedRange, StreamId};
use std::sync::{Arc, Mutex};

pub(crate) const LEN: usize = 1024;

pub(crate) struct Plain {
    pub(crate) sim: Traced<Sim>,
    pub(crate) world: World,
    checker: Arc<Mutex<Checker>>,
    pinned: PinnedRange,
    /// Where the model runs, and where copies do.
    pub(crate) compute: StreamId,
    pub(crate) side: StreamId,
    // Last, as queued work may use it.
    _pages: Pages,
}

impl Plain {
    pub(crate) fn new(seed: u64) -> Plain {
        let world = World::new(Config::adversary(seed));
        let checker = Arc::new(Mutex::new(Checker::new()));
        let mut sim = Traced::new(world.device(0).unwrap(), 0);
        let seen = checker.clone();
        sim.observe(Some(Box::new(move |record| seen.lock().unwrap().push(record))));
        let (pages, pinned) = Pages::pinned(&sim, 4 * LEN);
        let [compute, side] = [0; 2].map(|_| sim.create_stream().unwrap());
        Plain { sim, world, checker, pinned, compute, side, _pages: pages }
    }

    /// What the checker found.
    pub(crate) fn found(&self) -> Vec<Kind> {
        self.checker.lock().unwrap().hazards().iter().map(|hazard| hazard.kind).collect()
    }

    /// One of four pinned blocks.
    pub(crate) fn block(&self, n: usize) -> PinnedRange {
        part(self.pinned, n * LEN, LEN)
    }

    pub(crate) fn bytes(&mut self, on: StreamId) -> DeviceRange {
        alloc(&mut self.sim, LEN, on)
    }

    /// Bytes that a kernel on `compute` has written.
    pub(crate) fn tensor(&mut self) -> DeviceRange {
        let tensor = self.bytes(self.compute);
        self.writes(self.compute, tensor);
        tensor
    }

    pub(crate) fn writes(&mut self, on: StreamId, range: DeviceRange) {
        self.sim.note(Actor::Stream(on), &[Use::write(range)]).unwrap();
    }

    pub(crate) fn reads(&mut self, on: StreamId, range: DeviceRange) {
        self.sim.note(Actor::Stream(on), &[Use::read(range)]).unwrap();
    }

    pub(crate) fn host_writes(&mut self, block: PinnedRange) {
        self.sim.note(Actor::Host, &[Use::write(block)]).unwrap();
    }

    pub(crate) fn host_reads(&mut self, block: PinnedRange) {
        self.sim.note(Actor::Host, &[Use::read(block)]).unwrap();
    }

    /// A caching allocator takes the bytes back in the order of one stream, and gives them to work
    /// of another.
    pub(crate) fn recycle(&mut self, range: DeviceRange, from: StreamId, to: StreamId) {
        for (on, access) in [(from, Access::Free), (to, Access::Alloc)] {
            let one = Use { access, span: range.into() };
            self.sim.note(Actor::Stream(on), &[one]).unwrap();
        }
        self.writes(to, range);
    }

    pub(crate) fn copy_out(&mut self, block: PinnedRange, from: DeviceRange, on: StreamId) {
        self.sim.copy_out(block, from, on).unwrap();
    }

    pub(crate) fn copy_in(&mut self, to: DeviceRange, block: PinnedRange, on: StreamId) {
        self.sim.copy_in(to, block, on).unwrap();
    }

    pub(crate) fn mark(&mut self, on: StreamId) -> EventId {
        let event = event(&mut self.sim);
        self.sim.record(event, on).unwrap();
        event
    }

    pub(crate) fn wait(&mut self, on: StreamId, event: EventId) {
        self.sim.wait(on, event, Site::Outside).unwrap();
    }

    /// What is enqueued on `then` comes after all that was enqueued on `first`.
    pub(crate) fn chain(&mut self, first: StreamId, then: StreamId) {
        let event = self.mark(first);
        self.wait(then, event);
    }

    /// A tensor on the host in block 0, its device bytes given back; the host knows it is there.
    pub(crate) fn evicted(&mut self) -> DeviceRange {
        let tensor = self.tensor();
        self.chain(self.compute, self.side);
        self.copy_out(self.block(0), tensor, self.side);
        self.sim.sync().unwrap();
        tensor
    }
}
