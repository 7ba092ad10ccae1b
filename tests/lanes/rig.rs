//! A framework with three streams, and an engine whose order is checked, on a device with exact
//! times.
//!
//! What it is not: a test.

use lightering::backend::sim::{Config, Model, Sim, World};
use lightering::backend::{Backend, Cost, Kernel, Timing, Work};
use lightering::hazard::Checker;
use lightering::trace::Op;
use lightering::{
    Budget, Bytes, DeviceRange, Engine, EventId, Options, PinnedPool, PoolOptions, Storage,
    StreamId,
};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Takes five milliseconds and moves nothing.
pub(crate) static COLLECTIVE: Kernel = Kernel {
    name: "collective",
    ptx: None,
    host: Some(|_, _| Ok(())),
    cost: |_, _| Cost {
        flops: 5e-3 * Model::default().vector_flops_per_s,
        bytes: 0.0,
        work: Work::Vector,
    },
};

/// A framework with one device, three streams and an engine; the engine's part is checked.
pub(crate) struct Rig {
    pub(crate) sim: Sim,
    pub(crate) engine: Engine,
    checker: Arc<Mutex<Checker>>,
    /// Streams of the engine's that carried copies in, since somebody looked.
    came_on: Arc<Mutex<BTreeSet<String>>>,
    /// Each by the framework's name and by the engine's.
    pub(crate) streams: [(StreamId, StreamId); 3],
}

impl Rig {
    pub(crate) fn new(options: Options) -> Rig {
        Rig::over(Config::times_only(Model::default()), options)
    }

    pub(crate) fn over(config: Config, options: Options) -> Rig {
        let world = World::new(config);
        let mut sim = world.device(0).unwrap();
        let budget = PoolOptions { budget: Budget::Bytes(Bytes::gib(4)), ..PoolOptions::default() };
        let pool = PinnedPool::new(sim.pinner(), budget).unwrap();
        let device = Box::new(world.device(0).unwrap());
        let mut engine = Engine::new(device, &pool, options).unwrap();
        let checker = Arc::new(Mutex::new(Checker::new()));
        let came_on: Arc<Mutex<BTreeSet<String>>> = Arc::default();
        let (seen, came) = (Arc::clone(&checker), Arc::clone(&came_on));
        engine.observe(Some(Box::new(move |record| {
            seen.lock().unwrap().push(record);
            if let (Op::CopyIn { stream, .. }, true) = (record.op, record.failed.is_none()) {
                came.lock().unwrap().insert(format!("{stream:?}"));
            }
        })));
        let streams = [(); 3].map(|()| {
            let here = sim.create_stream().unwrap();
            (here, engine.adopt_stream(sim.raw_stream(here).unwrap()).unwrap())
        });
        Rig { sim, engine, checker, came_on, streams }
    }

    pub(crate) fn take(&mut self, len: Bytes) -> DeviceRange {
        DeviceRange::new(self.sim.alloc_device(len, self.streams[0].0).unwrap(), len).unwrap()
    }

    /// A storage of the framework's whose bytes are on the host, and the range they came from.
    pub(crate) fn away(&mut self, len: Bytes) -> (Storage, DeviceRange) {
        let (range, on) = (self.take(len), self.streams[0].1);
        let storage = self.engine.adopt(range, "x").unwrap();
        self.engine.evict(storage.id(), on).unwrap();
        self.engine.flush(on).unwrap();
        self.sim.sync().unwrap();
        self.engine.drain().unwrap();
        assert_eq!(self.engine.releasable(on).unwrap(), Some(storage.id()));
        (storage, range)
    }

    /// The streams that carried copies in since the last call.
    pub(crate) fn came_on(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.came_on.lock().unwrap())
    }

    /// A storage whose bytes are on their way out, and will be for a while.
    pub(crate) fn leaving(&mut self, len: Bytes) -> Storage {
        let (range, on) = (self.take(len), self.streams[0].1);
        let storage = self.engine.adopt(range, "leaving").unwrap();
        self.engine.evict(storage.id(), on).unwrap();
        self.engine.flush(on).unwrap();
        storage
    }

    pub(crate) fn mark(&mut self, stream: usize) -> EventId {
        let event = self.sim.create_event(Timing::On).unwrap();
        self.sim.record(event, self.streams[stream].0).unwrap();
        event
    }

    pub(crate) fn between(&mut self, from: EventId, to: EventId) -> Duration {
        self.sim.sync().unwrap();
        self.sim.elapsed(from, to).unwrap()
    }

    pub(crate) fn assert_clean(&self) {
        let checker = self.checker.lock().unwrap();
        assert!(checker.hazards().is_empty(), "{:?}", checker.hazards());
    }
}

pub(crate) fn seconds_in(len: Bytes) -> f64 {
    len.0 as f64 / Model::default().copy_in_bytes_per_s
}

/// A window of so many storages.
pub(crate) fn window(count: usize) -> Options {
    Options { prefetch_count_max: count, ..Options::default() }
}
