//! One device with a framework and an engine on it, of either kind: the framework moves its bytes
//! with copies, so that a device without kernels for it serves as well.
//!
//! What it is not: the framework's rules of ordering; `machine.rs` keeps those.
//!
//! Invariant: a staging block is given back, and a byte that came out compared, only after a sync.
//!
//! ```text
//!   fill:  pattern -> block --copy_in on the stream--> device      block kept until the next sync
//!   check: device --copy_out on the stream--> block                compared after the next sync
//! ```
//!
//! The tests `twins` and `cuda_stress` use it.

use crate::support::{Both, Trace, fill, first_wrong, observer, told};
use lightering::backend::sim::{Config, World};
use lightering::backend::traced::Traced;
use lightering::backend::{Backend, Timing};
use lightering::pinned::{Block, Budget, Client, PinnedPool, PoolOptions};
use lightering::trace::{Actor, Digest, Site, Use};
use lightering::{
    Bytes, DevicePtr, DeviceRange, Engine, EventId, Name, Options, PinnedRange, Result,
};
use std::sync::{Arc, Mutex};

/// Gives one more user of one device.
pub(crate) type Opener = Box<dyn FnMut() -> Box<dyn Backend>>;

/// A simulated device of its own.
pub(crate) fn simulated(config: Config) -> Opener {
    let world = World::new(config);
    Box::new(move || Box::new(world.device(0).unwrap()))
}

/// Staging bytes in flight beyond which the framework waits for the device.
const STAGED_MAX: Bytes = Bytes::mib(16);

/// A read that is on its way to the host.
struct Read {
    block: Block,
    item: u32,
    seed: u64,
}

/// What was read of an item: a digest of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) item: u32,
    pub(crate) digest: Digest,
}

pub(crate) struct Side {
    pub(crate) engine: Engine,
    pub(crate) framework: Traced<Box<dyn Backend>>,
    pub(crate) pool: PinnedPool,
    pub(crate) streams: Vec<Both>,
    pub(crate) trace: Arc<Mutex<Trace>>,
    /// What was wrong, in words.
    pub(crate) wrong: Vec<String>,
    /// Reads that arrived since somebody took them.
    pub(crate) seen: Vec<Seen>,
    /// Does the framework forget the order between its own streams?
    pub(crate) is_careless: bool,
    staging: Client,
    sources: Vec<Block>,
    reads: Vec<Read>,
    staged: Bytes,
    order: EventId,
}

impl Side {
    pub(crate) fn new(
        open: &mut Opener,
        pool: PoolOptions,
        options: Options,
        streams: usize,
    ) -> Side {
        let trace = Arc::new(Mutex::new(Trace::default()));
        let mut framework = Traced::new(open(), 0);
        framework.observe(Some(observer(&trace)));
        let pool = PinnedPool::new(framework.pinner(), pool).unwrap();
        let mut engine = Engine::new(open(), &pool, options).unwrap();
        engine.observe(Some(observer(&trace)));
        let streams = (0..streams)
            .map(|_| {
                let here = framework.create_stream().unwrap();
                let engine = engine.adopt_stream(framework.raw_stream(here).unwrap()).unwrap();
                trace.lock().unwrap().streams.insert(engine, here);
                Both { here, engine }
            })
            .collect();
        let staging = PinnedPool::new(framework.pinner(), staging_pool()).unwrap();
        let staging = staging.client(framework.fence(), Bytes::MAX).unwrap();
        let order = framework.create_event(Timing::Off).unwrap();
        Side {
            engine,
            framework,
            pool,
            streams,
            trace,
            wrong: Vec::new(),
            seen: Vec::new(),
            is_careless: false,
            staging,
            sources: Vec::new(),
            reads: Vec::new(),
            staged: Bytes::ZERO,
            order,
        }
    }

    /// The framework's own order between two of its streams.
    pub(crate) fn order(&mut self, first: usize, then: usize) {
        if first != then && !self.is_careless {
            let (first, then) = (self.streams[first].here, self.streams[then].here);
            self.framework.record(self.order, first).unwrap();
            self.framework.wait(then, self.order, Site::Outside).unwrap();
        }
    }

    /// Writes the pattern of `seed` into every byte, in the order of the stream.
    pub(crate) fn fill(&mut self, stream: usize, range: DeviceRange, seed: u64) {
        let mut bytes = vec![0; range.len().to_usize().unwrap()];
        fill(&mut bytes, seed);
        let mut block = self.stage(range.len());
        block.write(Bytes::ZERO, &bytes).unwrap();
        let on = self.streams[stream].here;
        for (trunk, part) in trunks(&block, range) {
            self.framework.note(Actor::Host, &[Use::write(trunk)]).unwrap();
            self.framework.copy_in(part, trunk, on).unwrap();
        }
        self.sources.push(block);
    }

    /// Compares every byte with the pattern of `seed`, as they are in the order of the stream.
    pub(crate) fn check(&mut self, stream: usize, range: DeviceRange, seed: u64, item: u32) {
        let mut block = self.stage(range.len());
        let on = self.streams[stream].here;
        for (trunk, part) in trunks(&block, range) {
            self.framework.copy_out(trunk, part, on).unwrap();
        }
        block.mark_written(range.len()).unwrap();
        self.reads.push(Read { block, item, seed });
    }

    fn stage(&mut self, len: Bytes) -> Block {
        if self.staged + len > STAGED_MAX {
            self.sync();
        }
        self.staged += len;
        self.staging.lend(len, Name::new("staging")).unwrap().block
    }

    /// Waits for the device, and looks at everything that was read.
    pub(crate) fn sync(&mut self) {
        self.framework.sync().unwrap();
        for Read { block, item, seed } in std::mem::take(&mut self.reads) {
            let mut bytes = vec![0; block.len().to_usize().unwrap()];
            for trunk in walk(&block) {
                self.framework.note(Actor::Host, &[Use::read(trunk)]).unwrap();
            }
            block.read(Bytes::ZERO, &mut bytes).unwrap();
            self.compare(&bytes, seed, item, "device bytes");
            self.staging.give_back(block, None).unwrap();
        }
        for block in std::mem::take(&mut self.sources) {
            self.staging.give_back(block, None).unwrap();
        }
        self.staged = Bytes::ZERO;
    }

    /// Bytes of an item came to the host.
    pub(crate) fn compare(&mut self, bytes: &[u8], seed: u64, item: u32, what: &str) {
        let mut digest = Digest::default();
        digest.bytes(bytes);
        self.seen.push(Seen { item, digest });
        if let Some(at) = first_wrong(bytes, seed) {
            let found = bytes[at];
            self.wrong.push(format!("{what} of item {item}: byte {at} is {found:#x}"));
        }
    }

    /// Device memory of the framework's own, in the order of a stream.
    pub(crate) fn take(&mut self, stream: usize, len: Bytes) -> Result<DeviceRange> {
        DeviceRange::new(self.framework.alloc_device(len, self.streams[stream].here)?, len)
    }

    /// Gives it back, in the order of a stream.
    pub(crate) fn give(&mut self, stream: usize, at: DevicePtr) {
        self.framework.free_device(at, self.streams[stream].here).unwrap();
    }

    /// How many hazards the checker found, and the first ones in words.
    pub(crate) fn hazards(&self) -> (u64, String) {
        let checker = &self.trace.lock().unwrap().checker;
        (checker.total(), told(checker))
    }
}

fn staging_pool() -> PoolOptions {
    PoolOptions {
        budget: Budget::Bytes(Bytes::mib(64)),
        arena_bytes: Bytes::mib(4),
        arena_bytes_max: Bytes::mib(32),
        touch_threads_max: 1,
        ..PoolOptions::default()
    }
}

/// The pinned parts of a block, each in one registration.
fn walk(block: &Block) -> impl Iterator<Item = PinnedRange> {
    let mut at = Bytes::ZERO;
    std::iter::from_fn(move || {
        let trunk = (at < block.len()).then(|| block.trunk(at, block.len() - at).unwrap())?;
        at += trunk.len();
        Some(trunk)
    })
}

fn trunks(block: &Block, range: DeviceRange) -> Vec<(PinnedRange, DeviceRange)> {
    let mut at = Bytes::ZERO;
    let pair = |trunk: PinnedRange| {
        let part = range.part(at, trunk.len()).unwrap();
        at += trunk.len();
        (trunk, part)
    };
    walk(block).map(pair).collect()
}
