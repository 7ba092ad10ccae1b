//! One world with a framework and an engine on it, and a trace of both, cheap enough for a million.
//!
//! What it is not: it decides nothing. Every call may fail, and says so.
//!
//! Invariant: a byte found wrong is written down, and every request of both passes the checker.
//!
//! ```text
//!   framework -> Traced<Sim> --.
//!                               +--> Log { checker, digest }
//!   Engine ----> Traced<Sim> --'
//! ```

use crate::plan::Plan;
use crate::support::broken::{self, Broken};
use crate::support::{fill, first_wrong, quick_pool};
use lightering::backend::sim::{Sim, World};
use lightering::backend::traced::{Observer, Traced};
use lightering::backend::{Backend, Cost, HostArgs, Timing, Work};
use lightering::hazard::Checker;
use lightering::pinned::{PinnedPool, PoolOptions};
use lightering::trace::{Actor, Digest, Op, Record, Site, Use};
use lightering::{Bytes, DevicePtr, DeviceRange, Engine, EventId, Result, StreamId};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Everything that was asked of the device, in one order.
#[derive(Default)]
pub(crate) struct Log {
    pub(crate) checker: Checker,
    pub(crate) digest: Digest,
    pub(crate) records: u64,
    /// Names of the same stream: the engine's, the framework's.
    streams: Vec<(StreamId, StreamId)>,
    is_told: bool,
}

impl Log {
    fn push(&mut self, record: &Record) {
        let known = |stream| self.streams.iter().any(|(engine, _)| *engine == stream);
        let op = match record.op {
            Op::OpenStream(stream) | Op::CloseStream(stream) if known(stream) => return,
            op => self.rename(op),
        };
        let record = Record { seq: self.records, op, ..*record };
        if self.is_told {
            println!("#{} {op:?} {:?}", self.records, record.failed);
        }
        self.records += 1;
        record.digest(&mut self.digest);
        self.checker.push(&record);
    }

    fn rename(&self, op: Op) -> Op {
        let name = |stream: StreamId| {
            let known = self.streams.iter().find(|(engine, _)| *engine == stream);
            known.map_or(stream, |(_, here)| *here)
        };
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

    pub(crate) fn told(&self) -> String {
        let lines = self.checker.hazards().iter().map(ToString::to_string);
        lines.collect::<Vec<_>>().join("; ")
    }
}

fn observer(log: &Arc<Mutex<Log>>) -> Observer {
    let log = log.clone();
    Box::new(move |record| log.lock().unwrap_or_else(PoisonError::into_inner).push(record))
}

/// A stream by both names.
#[derive(Clone, Copy)]
pub(crate) struct Both {
    pub(crate) here: StreamId,
    pub(crate) engine: StreamId,
}

pub(crate) struct Bench {
    pub(crate) world: World,
    pub(crate) sim: Traced<Sim>,
    pub(crate) pool: PinnedPool,
    pub(crate) streams: Vec<Both>,
    pub(crate) wrong: Arc<Mutex<Vec<String>>>,
    pub(crate) log: Arc<Mutex<Log>>,
    /// Which of the engine's sites is broken, if one is.
    broken: Option<broken::Plan>,
    order: Option<EventId>,
}

impl Bench {
    /// A world and its framework; nothing was asked of the device yet.
    pub(crate) fn new(plan: &Plan, broken: Option<broken::Plan>, is_told: bool) -> Bench {
        let world = World::new(plan.config());
        let log = Arc::new(Mutex::new(Log { is_told, ..Log::default() }));
        let mut sim = Traced::new(world.device(0).unwrap(), 0);
        sim.observe(Some(observer(&log)));
        let options = PoolOptions {
            arena_bytes: plan.pool,
            arena_bytes_max: plan.pool,
            ..quick_pool(plan.pool)
        };
        let pool = PinnedPool::new(sim.pinner(), options).unwrap();
        let (streams, wrong) = (Vec::new(), Arc::default());
        Bench { world, sim, pool, streams, wrong, log, broken, order: None }
    }

    pub(crate) fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An engine on the same device.
    pub(crate) fn engine(&self, plan: &Plan) -> Result<Engine> {
        let device = self.world.device(0)?;
        let Some(broken) = self.broken else {
            let mut engine = Engine::new(Box::new(device), &self.pool, plan.options.clone())?;
            engine.observe(Some(observer(&self.log)));
            return Ok(engine);
        };
        let mut seam = Traced::new(device, 0);
        seam.observe(Some(observer(&self.log)));
        let device = Broken::new(seam, Some(broken), self.world.device(1)?);
        let mut engine = Engine::new(Box::new(device), &self.pool, plan.options.clone())?;
        let mut push = observer(&self.log);
        engine.observe(Some(Box::new(move |record| {
            if let Op::Name { .. } = record.op {
                push(record);
            }
        })));
        Ok(engine)
    }

    /// One more stream, made by the framework.
    pub(crate) fn open(&mut self) -> Result<StreamId> {
        self.sim.create_stream()
    }

    /// Makes it known to the engine.
    pub(crate) fn share(&mut self, engine: &mut Engine, here: StreamId) -> Result<()> {
        let known = engine.adopt_stream(self.sim.raw_stream(here)?)?;
        self.log().streams.push((known, here));
        self.streams.push(Both { here, engine: known });
        Ok(())
    }

    /// The event by which the framework orders its streams; it is there after this.
    pub(crate) fn order_event(&mut self) -> Result<EventId> {
        match self.order {
            Some(event) => Ok(event),
            None => Ok(*self.order.insert(self.sim.create_event(Timing::Off)?)),
        }
    }

    pub(crate) fn record(&mut self, event: EventId, s: usize) -> Result<()> {
        self.sim.record(event, self.streams[s].here)
    }

    pub(crate) fn wait(&mut self, event: EventId, s: usize) -> Result<()> {
        self.sim.wait(self.streams[s].here, event, Site::Outside)
    }

    /// A kernel that writes the pattern of `seed` into every byte.
    pub(crate) fn fill(&mut self, s: usize, range: DeviceRange, seed: u64) -> Result<()> {
        let body = move |args: &mut HostArgs<'_>| {
            fill(args.write::<u8>(0)?, seed);
            Ok(())
        };
        self.launch(s, Use::write(range), Box::new(body))
    }

    /// A kernel that compares every byte with the pattern of `seed`.
    pub(crate) fn check(&mut self, s: usize, range: DeviceRange, seed: u64) -> Result<()> {
        let wrong = self.wrong.clone();
        let body = move |args: &mut HostArgs<'_>| {
            if let Some(at) = first_wrong(args.read::<u8>(0)?, seed) {
                let found = args.read::<u8>(0)?[at];
                wrong.lock().unwrap().push(format!("byte {at} of {seed:#x} is {found:#x}"));
            }
            Ok(())
        };
        self.launch(s, Use::read(range), Box::new(body))
    }

    /// A kernel of the framework's that panics.
    pub(crate) fn blow(&mut self, s: usize) -> Result<()> {
        let stream = self.streams[s].here;
        // As a panic, but without a word.
        let body = |_: &mut HostArgs<'_>| std::panic::resume_unwind(Box::new(BLOWN));
        self.sim.inner().launch_fn(stream, &[], no_cost(), Box::new(body))
    }

    fn launch(
        &mut self,
        s: usize,
        one: Use,
        body: lightering::backend::sim::Closure,
    ) -> Result<()> {
        let stream = self.streams[s].here;
        self.sim.inner().launch_fn(stream, &[one], no_cost(), body)?;
        // Nothing else was asked for meanwhile, so the trace may tell of it now.
        self.sim.note(Actor::Stream(stream), &[one])
    }

    /// Device memory of the framework's own, in the order of a stream.
    pub(crate) fn take(&mut self, s: usize, len: Bytes) -> Result<DeviceRange> {
        DeviceRange::new(self.sim.alloc_device(len, self.streams[s].here)?, len)
    }

    /// Gives it back, in the order of a stream.
    pub(crate) fn give(&mut self, s: usize, at: DevicePtr) -> Result<()> {
        self.sim.free_device(at, self.streams[s].here)
    }
}

/// What a kernel that panics says.
pub(crate) const BLOWN: &str = "a kernel's host form";

fn no_cost() -> Cost {
    Cost { flops: 0.0, bytes: 0.0, work: Work::Vector }
}
