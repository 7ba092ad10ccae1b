//! Volume: a pattern that tells each word's place is made on the device, goes out, comes back
//! elsewhere, and is checked on the device.

use crate::side::Opener;
use lightering::backend::{Backend, pattern};
use lightering::pinned::{Budget, Client, PinnedPool, PoolOptions};
use lightering::trace::Use;
use lightering::{
    Acquire, Bytes, DeviceRange, Engine, Evict, Name, Options, Storage, StorageId, StreamId,
};
use std::time::{Duration, Instant};

/// How much moves, in which pieces.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    /// Bytes out, and as many in.
    pub(crate) total: Bytes,
    /// Bytes of one storage.
    pub(crate) piece: Bytes,
    /// Storages alive.
    pub(crate) count: usize,
    /// Does the engine sum up its copies as well?
    pub(crate) verify: bool,
}

struct Rig {
    device: Box<dyn Backend>,
    engine: Engine,
    staging: Client,
    here: StreamId,
    on: StreamId,
    bad: DeviceRange,
}

impl Rig {
    fn new(open: &mut Opener, load: Load) -> Rig {
        let mut device = open();
        let here = device.create_stream().unwrap();
        // A block has up to an eighth more room than was asked for.
        let room = load.piece.0 + load.piece.0 / 8;
        let whole = room * load.count as u64 + Bytes::mib(4).0;
        let whole = Bytes(whole.next_multiple_of(Bytes::mib(2).0));
        let pool = PoolOptions {
            budget: Budget::Bytes(whole),
            arena_bytes: whole,
            arena_bytes_max: whole,
            ..PoolOptions::default()
        };
        let pool = PinnedPool::new(device.pinner(), pool).unwrap();
        pool.reserve(whole).unwrap();
        let options = Options {
            keep_last_count: 0,
            prefetch_count_max: 4,
            prefetch_bytes_max: Bytes(4 * load.piece.0),
            unreleased_bytes_max: Bytes(2 * load.piece.0),
            note_uses: false,
            verify: load.verify,
            ..Options::default()
        };
        let mut engine = Engine::new(open(), &pool, options).unwrap();
        let on = engine.adopt_stream(device.raw_stream(here).unwrap()).unwrap();
        let staging = pool.client(device.fence(), Bytes::MAX).unwrap();
        let at = device.alloc_device(Bytes(8), here).unwrap();
        let bad = DeviceRange::new(at, Bytes(8)).unwrap();
        let mut rig = Rig { device, engine, staging, here, on, bad };
        rig.exchange(Some(0));
        rig
    }

    /// Sets the count of bad words, or reads it.
    fn exchange(&mut self, set: Option<u64>) -> u64 {
        let mut block = self.staging.lend(Bytes(8), Name::new("count")).unwrap().block;
        let trunk = block.trunk(Bytes::ZERO, Bytes(8)).unwrap();
        let mut bytes = set.unwrap_or(0).to_ne_bytes();
        if set.is_some() {
            block.write(Bytes::ZERO, &bytes).unwrap();
            self.device.copy_in(self.bad, trunk, self.here).unwrap();
        } else {
            self.device.copy_out(trunk, self.bad, self.here).unwrap();
            block.mark_written(Bytes(8)).unwrap();
        }
        self.device.sync().unwrap();
        block.read(Bytes::ZERO, &mut bytes).unwrap();
        self.staging.give_back(block, None).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn fill(&mut self, range: DeviceRange, seed: u64) {
        pattern::fill(&mut *self.device, range, seed, self.here).unwrap();
    }

    fn check(&mut self, range: DeviceRange, seed: u64) {
        pattern::check(&mut *self.device, range, self.bad, seed, self.here).unwrap();
    }

    /// A check that cannot fail shows nothing: it must see a wrong seed, and a word out of place.
    fn try_the_check(&mut self, id: StorageId) {
        let range = self.engine.range(id).unwrap();
        let words = range.len().0.div_ceil(8);
        self.fill(range, 1);
        self.check(range, 1);
        assert_eq!(self.exchange(None), 0, "the pattern is not the one that was made");
        self.check(range, 2);
        assert_eq!(self.exchange(None), words, "another seed gives other words");
        self.exchange(Some(0));
        let last = range.part(range.len() - Bytes(1), Bytes(1)).unwrap();
        self.fill(last, 3);
        self.check(range, 1);
        assert_eq!(self.exchange(None), 1, "one byte out of place was not seen");
        self.exchange(Some(0));
    }

    fn out(&mut self, storages: &[Storage]) -> Duration {
        self.device.sync().unwrap();
        let start = Instant::now();
        for storage in storages {
            let became = self.engine.evict(storage.id(), self.on).unwrap();
            assert!(matches!(became, Evict::Moving(_)), "{became:?}");
        }
        self.engine.flush(self.on).unwrap();
        self.engine.drain().unwrap();
        start.elapsed()
    }

    fn home(&mut self, storages: &[Storage], seeds: u64) -> Duration {
        let start = Instant::now();
        for (index, storage) in storages.iter().enumerate().rev() {
            let Acquire::Ready(range) = self.engine.acquire(storage.id(), self.on).unwrap() else {
                panic!("the engine owns the bytes");
            };
            self.check(range, seeds + index as u64);
        }
        self.engine.drain().unwrap();
        start.elapsed()
    }
}

/// Moves the load; requires that every word came back.
pub(crate) fn run(open: &mut Opener, load: Load) {
    let mut rig = Rig::new(open, load);
    let storages: Vec<Storage> =
        (0..load.count).map(|_| rig.engine.alloc(load.piece, rig.on, "piece").unwrap()).collect();
    rig.try_the_check(storages[0].id());
    let round_bytes = load.piece.0 * load.count as u64;
    let rounds = load.total.0.div_ceil(round_bytes);
    let (mut out, mut home) = (Duration::ZERO, Duration::ZERO);
    for round in 0..rounds {
        let seeds = 1000 * (round + 1);
        for (storage, seed) in storages.iter().zip(seeds..) {
            let range = rig.engine.range(storage.id()).unwrap();
            rig.engine.note(rig.on, &[Use::write(range)]).unwrap();
            rig.fill(range, seed);
        }
        out += rig.out(&storages);
        let mut start = vec![0; load.piece.0.min(1 << 16) as usize];
        rig.engine.read_host(storages[0].id(), Bytes::ZERO, &mut start).unwrap();
        assert_eq!(pattern::words_wrong(&start, seeds), 0, "the host copy is not the pattern");
        home += rig.home(&storages, seeds);
        rig.engine.mark_step().unwrap();
    }
    let bad = rig.exchange(None);
    let moved = Bytes(rounds * round_bytes);
    let rate = |time: Duration| moved.0 as f64 / time.as_secs_f64() / 1e9;
    let how = if load.verify { ", each copy summed up" } else { "" };
    println!("{moved} out at {:.1} GB/s, {moved} in at {:.1} GB/s{how}", rate(out), rate(home));
    println!("mismatching words: {bad} of {}", moved.0.div_ceil(8));
    let stats = rig.engine.stats();
    assert_eq!(bad, 0, "words that came back are not those that left");
    assert_eq!(stats.evicted_bytes, moved.0, "every byte left");
    assert_eq!(stats.refilled_bytes, moved.0, "and came back");
    let copies = if load.verify { rounds * load.count as u64 } else { 0 };
    assert_eq!((stats.verified_count, stats.corrupt_count), (copies, 0));
    for storage in storages {
        rig.engine.release(storage, rig.on).unwrap();
    }
    rig.device.free_device(rig.bad.at(), rig.here).unwrap();
    rig.engine.shutdown().unwrap();
    assert_eq!(rig.device.memory().unwrap().allocated, Bytes::ZERO);
}
