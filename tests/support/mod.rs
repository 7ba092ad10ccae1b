//! A small framework over the simulated device, for tests: it owns streams and memory, fills and
//! checks bytes with kernels, and keeps the order that frameworks keep for themselves.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]
#![allow(unreachable_pub, missing_debug_implementations, reason = "part of a test binary")]

pub mod broken;
pub mod codes;

use broken::{Broken, Plan, Reach};
use lightering::adapter::DeviceMemory;
use lightering::backend::sim::{Config, Sim, World};
use lightering::backend::traced::{Observer, Traced};
use lightering::backend::{Backend, Cost, HostArgs, Timing, Work};
use lightering::hazard::Checker;
use lightering::pinned::{Budget, PinnedPool, PoolOptions};
use lightering::trace::{Actor, Op, Record, Site, Use};
use lightering::{
    Bytes, DevicePtr, DeviceRange, Engine, EventId, Options, Result, StorageId, StreamId,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A stream as the framework and the engine name it.
#[derive(Clone, Copy, Debug)]
pub struct Both {
    pub here: StreamId,
    pub engine: StreamId,
}

/// One trace of all that framework and engine ask of a device, checked as it is written.
#[derive(Default)]
pub struct Trace {
    pub checker: Checker,
    /// How many records there were.
    pub seq: u64,
    /// The framework's name of each stream, by the engine's.
    pub streams: HashMap<StreamId, StreamId>,
}

impl Trace {
    fn push(&mut self, record: &Record) {
        let op = match record.op {
            Op::OpenStream(stream) if self.streams.contains_key(&stream) => return,
            Op::CloseStream(stream) if self.streams.contains_key(&stream) => return,
            op => self.rename(op),
        };
        if std::env::var_os("LIGHTERING_TRACE").is_some() {
            println!("#{} {op:?} {:?}", self.seq, record.failed);
        }
        self.checker.push(&Record { seq: self.seq, op, ..*record });
        self.seq += 1;
    }

    fn rename(&self, op: Op) -> Op {
        let name = |stream: StreamId| self.streams.get(&stream).copied().unwrap_or(stream);
        match op {
            Op::Record { event, stream } => Op::Record { event, stream: name(stream) },
            Op::Wait { stream, event, site } => Op::Wait { stream: name(stream), event, site },
            Op::Idle { stream, site, done } => Op::Idle { stream: name(stream), site, done },
            Op::Alloc { range, stream } => Op::Alloc { range, stream: name(stream) },
            Op::Free { range, stream } => Op::Free { range, stream: name(stream) },
            Op::Use { by: Actor::Stream(stream), uses } => {
                Op::Use { by: Actor::Stream(name(stream)), uses }
            }
            other => other,
        }
    }
}

/// What checks found wrong.
pub type Wrong = Arc<Mutex<Vec<String>>>;

pub struct Rig {
    pub world: World,
    pub sim: Traced<Sim>,
    pub engine: Engine,
    pub pool: PinnedPool,
    pub streams: Vec<Both>,
    pub wrong: Wrong,
    pub trace: Arc<Mutex<Trace>>,
    order: EventId,
}

/// Pool options of a small pool.
pub fn small_pool(budget: Bytes) -> PoolOptions {
    PoolOptions {
        budget: Budget::Bytes(budget),
        arena_bytes: Bytes::kib(256),
        arena_bytes_max: Bytes::kib(256),
        touch_threads_max: 1,
        ..PoolOptions::default()
    }
}

/// The same for tests that open very many: they do not look at what the machine has to spare.
pub fn quick_pool(budget: Bytes) -> PoolOptions {
    PoolOptions { machine_root: "/nowhere".into(), ..small_pool(budget) }
}

impl Rig {
    pub fn new(config: Config, pool: PoolOptions, options: Options, streams: usize) -> Rig {
        Rig::wrapped(config, pool, options, streams, |device| Box::new(device))
    }

    /// A rig whose engine sees the device through another backend.
    pub fn wrapped(
        config: Config,
        pool: PoolOptions,
        options: Options,
        streams: usize,
        wrap: impl FnOnce(Sim) -> Box<dyn Backend>,
    ) -> Rig {
        let world = World::new(config);
        let trace = Arc::new(Mutex::new(Trace::default()));
        let device = wrap(world.device(0).unwrap());
        let mut rig = Rig::over(world, trace, device, pool, options);
        rig.engine.observe(Some(observer(&rig.trace)));
        rig.open_streams(streams);
        rig
    }

    /// A rig whose engine is lied to by `plan`. The trace has what reached the device: the lies are
    /// told above it.
    pub fn broken(
        config: Config,
        pool: PoolOptions,
        options: Options,
        streams: usize,
        plan: Option<Plan>,
    ) -> (Rig, Reach) {
        let world = World::new(config);
        let trace = Arc::new(Mutex::new(Trace::default()));
        let mut seam = Traced::new(world.device(0).unwrap(), 0);
        seam.observe(Some(observer(&trace)));
        let device = Broken::new(seam, plan, world.device(1).unwrap());
        let reach = device.reach();
        let mut rig = Rig::over(world, trace, Box::new(device), pool, options);
        rig.engine.observe(Some(names(&rig.trace)));
        rig.open_streams(streams);
        (rig, reach)
    }

    fn over(
        world: World,
        trace: Arc<Mutex<Trace>>,
        device: Box<dyn Backend>,
        pool: PoolOptions,
        options: Options,
    ) -> Rig {
        let mut sim = Traced::new(world.device(0).unwrap(), 0);
        sim.observe(Some(observer(&trace)));
        let pool = PinnedPool::new(sim.pinner(), pool).unwrap();
        let engine = Engine::new(device, &pool, options).unwrap();
        let order = sim.create_event(Timing::Off).unwrap();
        let (streams, wrong) = (Vec::new(), Wrong::default());
        Rig { world, sim, engine, pool, streams, wrong, trace, order }
    }

    /// An engine of another device of the same world, with its own streams and events; pool and
    /// trace are the same.
    pub fn beside(&self, ordinal: u32, options: Options, streams: usize) -> Rig {
        let (world, trace, pool) = (self.world.clone(), self.trace.clone(), self.pool.clone());
        let mut sim = Traced::new(world.device(ordinal).unwrap(), 0);
        sim.observe(Some(observer(&trace)));
        let device = Box::new(world.device(ordinal).unwrap());
        let mut engine = Engine::new(device, &pool, options).unwrap();
        engine.observe(Some(observer(&trace)));
        let order = sim.create_event(Timing::Off).unwrap();
        let (streams_of, wrong) = (Vec::new(), Wrong::default());
        let mut rig = Rig { world, sim, engine, pool, streams: streams_of, wrong, trace, order };
        rig.open_streams(streams);
        rig
    }

    fn open_streams(&mut self, count: usize) {
        for _ in 0..count {
            let here = self.sim.create_stream().unwrap();
            self.share(here);
        }
    }

    /// Makes a stream of the framework's known to the engine.
    fn share(&mut self, here: StreamId) {
        let engine = self.engine.adopt_stream(self.sim.raw_stream(here).unwrap()).unwrap();
        self.trace.lock().unwrap().streams.insert(engine, here);
        self.streams.push(Both { here, engine });
    }

    /// One more stream, which somebody else opened: 0 is the device's default one.
    pub fn adopt(&mut self, raw: usize) {
        let here = self.sim.adopt_stream(raw).unwrap();
        self.share(here);
    }

    /// A rig under the adversary that `seed` names, with one stream and default bounds.
    pub fn adversary(seed: u64) -> Rig {
        let pool = small_pool(Bytes::mib(1));
        Rig::new(Config::adversary(seed), pool, options(), 1)
    }

    /// The framework's own order between two of its streams.
    pub fn order(&mut self, first: usize, then: usize) {
        if first != then {
            let (first, then) = (self.streams[first].here, self.streams[then].here);
            self.sim.record(self.order, first).unwrap();
            self.sim.wait(then, self.order, Site::Outside).unwrap();
        }
    }

    /// A kernel that writes the pattern of `seed` into every byte.
    pub fn fill(&mut self, stream: usize, range: DeviceRange, seed: u64) {
        let uses = [Use::write(range)];
        let body = move |args: &mut HostArgs<'_>| {
            fill(args.write::<u8>(0)?, seed);
            Ok(())
        };
        let stream = self.streams[stream].here;
        self.sim.note(Actor::Stream(stream), &uses).unwrap();
        self.sim.inner().launch_fn(stream, &uses, no_cost(), Box::new(body)).unwrap();
    }

    /// A kernel that compares every byte with the pattern of `seed`.
    pub fn check(&mut self, stream: usize, range: DeviceRange, seed: u64, what: String) {
        let uses = [Use::read(range)];
        let wrong = self.wrong.clone();
        let body = move |args: &mut HostArgs<'_>| {
            let bytes = args.read::<u8>(0)?;
            if let Some(at) = first_wrong(bytes, seed) {
                let found = bytes[at];
                wrong.lock().unwrap().push(format!("{what}: byte {at} is {found:#x}"));
            }
            Ok(())
        };
        let stream = self.streams[stream].here;
        self.sim.note(Actor::Stream(stream), &uses).unwrap();
        self.sim.inner().launch_fn(stream, &uses, no_cost(), Box::new(body)).unwrap();
    }

    /// Device memory of the framework's own, in the order of a stream.
    pub fn take(&mut self, stream: usize, len: Bytes) -> Result<DeviceRange> {
        DeviceRange::new(self.sim.alloc_device(len, self.streams[stream].here)?, len)
    }

    /// Gives it back, in the order of a stream.
    pub fn give(&mut self, stream: usize, at: DevicePtr) {
        self.sim.free_device(at, self.streams[stream].here).unwrap();
    }

    /// Everything ran, and nothing was wrong.
    #[track_caller]
    pub fn assert_right(&mut self) {
        self.sim.sync().unwrap();
        let wrong = self.wrong.lock().unwrap();
        assert!(wrong.is_empty(), "{}", wrong.join("; "));
        let trace = self.trace.lock().unwrap();
        assert_eq!(trace.checker.total(), 0, "{}", told(&trace.checker));
    }

    /// What the checker found so far, each in a line.
    pub fn hazards(&self) -> Vec<String> {
        let trace = self.trace.lock().unwrap();
        trace.checker.hazards().iter().map(ToString::to_string).collect()
    }

    /// Shuts the engine down; nothing of it may be left anywhere.
    #[track_caller]
    pub fn assert_nothing_left(&mut self) {
        self.engine.drain().unwrap();
        let memory = self.engine.memory().unwrap();
        self.engine.shutdown().unwrap();
        let stats = self.pool.stats();
        assert_eq!(stats.lent, Bytes::ZERO, "blocks are still lent");
        assert_eq!(stats.quarantined, Bytes::ZERO, "blocks are in quarantine");
        assert_eq!(self.engine.stats().leaked_on_purpose_bytes, 0);
        assert_eq!(self.engine.stats().storages, 0);
        let _ = memory;
    }
}

/// Writes records into the trace that framework and engine share.
pub fn observer(trace: &Arc<Mutex<Trace>>) -> Observer {
    let trace = trace.clone();
    // After a failed assertion the engine is still dropped, and writes records.
    Box::new(move |record| trace.lock().unwrap_or_else(PoisonError::into_inner).push(record))
}

/// Passes on only what bytes are called, which is said above every seam.
fn names(trace: &Arc<Mutex<Trace>>) -> Observer {
    let mut push = observer(trace);
    Box::new(move |record| {
        if let Op::Name { .. } = record.op {
            push(record);
        }
    })
}

/// What the checker found, in words.
pub fn told(checker: &Checker) -> String {
    checker.hazards().iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Bounds small enough that tests meet them.
pub fn options() -> Options {
    Options {
        unreleased_bytes_max: Bytes::kib(16),
        prefetch_bytes_max: Bytes::kib(16),
        keep_last_count: 0,
        storage_bytes_min: Bytes::ZERO,
        trunk_bytes_max: Bytes::kib(2),
        events_max: 4096,
        drop_deadline: std::time::Duration::from_secs(20),
        pinned_growth: lightering::pinned::Growth::Late,
        ..Options::default()
    }
}

fn no_cost() -> Cost {
    Cost { flops: 0.0, bytes: 0.0, work: Work::Vector }
}

pub fn mixed(seed: u64, word: u64) -> u64 {
    let mut x = seed.wrapping_add(word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

pub fn fill(bytes: &mut [u8], seed: u64) {
    for (word, chunk) in bytes.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&mixed(seed, word as u64).to_le_bytes()[..chunk.len()]);
    }
}

pub fn first_wrong(bytes: &[u8], seed: u64) -> Option<usize> {
    bytes.chunks(8).enumerate().find_map(|(word, chunk)| {
        let right = mixed(seed, word as u64).to_le_bytes();
        let at = chunk.iter().zip(right).position(|(found, right)| *found != right)?;
        Some(word * 8 + at)
    })
}

/// The framework's device memory, by storage, for adapters.
#[derive(Default)]
pub struct Memory {
    pub ranges: HashMap<StorageId, DeviceRange>,
    pub given: Vec<StorageId>,
}

/// Lends `Memory` the simulated device for the length of an adapter's call.
pub struct Hands<'a> {
    pub sim: &'a mut Traced<Sim>,
    pub stream: StreamId,
    pub memory: &'a mut Memory,
}

impl DeviceMemory for Hands<'_> {
    fn take(&mut self, storage: StorageId, len: Bytes, _: StreamId) -> Result<Option<DeviceRange>> {
        match self.sim.alloc_device(len, self.stream) {
            Ok(at) => {
                let range = DeviceRange::new(at, len)?;
                self.memory.ranges.insert(storage, range);
                Ok(Some(range))
            }
            Err(error) if error.is_retryable() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn give(&mut self, storage: StorageId, _: StreamId) {
        if let Some(range) = self.memory.ranges.remove(&storage) {
            self.sim.free_device(range.at(), self.stream).unwrap();
            self.memory.given.push(storage);
        }
    }
}
