//! Two devices in one process: an engine for each, on threads of their own, one pool for both.
//!
//! The faults guarded against: a block lent to one device while the other's copy still uses it, an
//! address of one device taken for the other's, and a budget that one engine can eat alone.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

use lightering::backend::sim::{Config, Sim, World};
use lightering::backend::{Backend, pattern};
use lightering::hazard::Checker;
use lightering::policy::Kept;
use lightering::trace::Use;
use lightering::{
    Acquire, Budget, Bytes, DeviceRange, Engine, Evict, Kind, Misuse, Options, PinnedPool,
    PoolOptions, StreamId,
};
use std::sync::{Arc, Mutex};

const LEN: Bytes = Bytes::kib(24);

struct Device {
    here: Sim,
    engine: Engine,
    stream: StreamId,
    on: StreamId,
    /// Counts words that are wrong.
    bad: DeviceRange,
    checker: Arc<Mutex<Checker>>,
}

fn pool(world: &World, budget: Bytes) -> PinnedPool {
    let options = PoolOptions {
        budget: Budget::Bytes(budget),
        arena_bytes: Bytes::kib(256),
        arena_bytes_max: Bytes::kib(256),
        machine_root: "/nowhere".into(),
        ..PoolOptions::default()
    };
    PinnedPool::new(world.device(0).unwrap().pinner(), options).unwrap()
}

/// Each device's records go to a checker of its own. Whether a block is idle on the other device
/// the pool asks by a fence, of which no trace tells: there the bytes are the proof.
fn device(world: &World, ordinal: u32, pool: &PinnedPool) -> Device {
    let mut here = world.device(ordinal).unwrap();
    let bounds = Options {
        unreleased_bytes_max: Bytes::kib(64),
        keep_last_count: 0,
        storage_bytes_min: Bytes::ZERO,
        ..Options::default()
    };
    let mut engine = Engine::new(Box::new(world.device(ordinal).unwrap()), pool, bounds).unwrap();
    let checker = Arc::new(Mutex::new(Checker::new()));
    let seen = Arc::clone(&checker);
    engine.observe(Some(Box::new(move |record| seen.lock().unwrap().push(record))));
    let stream = here.create_stream().unwrap();
    let on = engine.adopt_stream(here.raw_stream(stream).unwrap()).unwrap();
    let at = here.alloc_device(Bytes(pattern::COUNT_BYTES), stream).unwrap();
    let bad = DeviceRange::new(at, Bytes(pattern::COUNT_BYTES)).unwrap();
    Device { here, engine, stream, on, bad, checker }
}

impl Device {
    /// Steps whose storages are more than the pool holds: some stay on the device.
    fn steps(&mut self, seed: u64) {
        for step in 0..12 {
            let mut storages = Vec::new();
            for layer in 0..8 {
                let storage = self.engine.alloc(LEN, self.on, "layer").unwrap();
                let range = self.engine.range(storage.id()).unwrap();
                let word = seed + 100 * step + layer;
                self.engine.note(self.on, &[Use::write(range)]).unwrap();
                pattern::fill(&mut self.here, range, word, self.stream).unwrap();
                match self.engine.evict(storage.id(), self.on).unwrap() {
                    Evict::Moving(_) | Evict::Kept(Kept::NoPinnedRoom) => {}
                    other => panic!("{other:?}"),
                }
                storages.push((storage, word));
                self.engine.step().unwrap();
            }
            self.engine.flush(self.on).unwrap();
            while let Some((storage, word)) = storages.pop() {
                let Acquire::Ready(range) = self.engine.acquire(storage.id(), self.on).unwrap()
                else {
                    panic!("the engine owns the bytes");
                };
                pattern::check(&mut self.here, range, self.bad, word, self.stream).unwrap();
                self.engine.release(storage, self.on).unwrap();
            }
            self.engine.mark_step().unwrap();
        }
    }

    fn wrong_words(&mut self, pool: &PinnedPool) -> u64 {
        let mut client = pool.client(self.here.fence(), Bytes::MAX).unwrap();
        let mut block = client.lend(Bytes(8), "count".into()).unwrap().block;
        block.write(Bytes::ZERO, &[0; 8]).unwrap();
        let pinned = block.trunk(Bytes::ZERO, Bytes(8)).unwrap();
        self.here.copy_out(pinned, self.bad, self.stream).unwrap();
        self.here.sync().unwrap();
        let mut bytes = [0; 8];
        block.read(Bytes::ZERO, &mut bytes).unwrap();
        client.give_back(block, None).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn zero(&mut self, pool: &PinnedPool) {
        let mut client = pool.client(self.here.fence(), Bytes::MAX).unwrap();
        let mut block = client.lend(Bytes(8), "zero".into()).unwrap().block;
        block.write(Bytes::ZERO, &[0; 8]).unwrap();
        let pinned = block.trunk(Bytes::ZERO, Bytes(8)).unwrap();
        self.here.copy_in(self.bad, pinned, self.stream).unwrap();
        self.here.sync().unwrap();
        client.give_back(block, None).unwrap();
    }
}

#[test]
fn two_devices_on_two_threads_share_one_pool_and_no_byte() {
    for seed in 0..8 {
        let world = World::new(Config::adversary(seed));
        // Not enough for both, so that blocks go from one device to the other.
        let pool = pool(&world, Bytes::kib(256));
        let mut devices = [0, 1].map(|ordinal| device(&world, ordinal, &pool));
        for device in &mut devices {
            device.zero(&pool);
        }
        let done = std::thread::scope(|scope| {
            // Patterns of their own, so that a byte of the other device is a wrong one.
            let threads = devices.each_mut().map(|device| {
                let first = (seed << 32) + (u64::from(device.here.about().device.0) << 24);
                scope.spawn(move || device.steps(first))
            });
            threads.map(|thread| thread.join().is_ok())
        });
        assert_eq!(done, [true, true], "seed {seed}");
        let mut moved = 0;
        for device in &mut devices {
            assert_eq!(device.wrong_words(&pool), 0, "seed {seed}");
            moved += device.engine.stats().refilled_count;
            device.engine.shutdown().unwrap();
            let checker = device.checker.lock().unwrap();
            assert!(checker.hazards().is_empty(), "seed {seed}: {:?}", checker.hazards());
        }
        assert!(moved > 50, "{moved} storages came back");
        let stats = pool.stats();
        assert_eq!((stats.lent, stats.quarantined), (Bytes::ZERO, Bytes::ZERO));
    }
}

#[test]
fn what_is_another_devices_is_refused_by_name() {
    let world = World::new(Config::adversary(1));
    let pool = pool(&world, Bytes::mib(1));
    let [mut one, mut two] = [0, 1].map(|ordinal| device(&world, ordinal, &pool));
    let theirs = two.engine.alloc(LEN, two.on, "theirs").unwrap();
    let misuse = |error: lightering::Error| error.misuse();
    let refused = one.engine.evict(theirs.id(), one.on).map_err(misuse).unwrap_err();
    assert_eq!(refused, Some(Misuse::Foreign));
    let refused = two.engine.evict(theirs.id(), one.on).map_err(misuse).unwrap_err();
    assert_eq!(refused, Some(Misuse::Foreign));
    let raw = two.here.raw_stream(two.stream).unwrap();
    let refused = one.engine.adopt_stream(raw).map_err(misuse).unwrap_err();
    assert_eq!(refused, Some(Misuse::WrongDevice));
}

#[test]
fn one_devices_quota_is_left_to_it_by_the_other() {
    let world = World::new(Config::adversary(2));
    let pool = pool(&world, Bytes::kib(256));
    let quota = Bytes::kib(128);
    let mut engines = [0, 1].map(|ordinal| {
        let bounds = Options { pinned_quota_max: quota, keep_last_count: 0, ..Options::default() };
        let mut here = world.device(ordinal).unwrap();
        let device = Box::new(world.device(ordinal).unwrap());
        let mut engine = Engine::new(device, &pool, bounds).unwrap();
        let stream = here.create_stream().unwrap();
        let on = engine.adopt_stream(here.raw_stream(stream).unwrap()).unwrap();
        (engine, on, here)
    });
    for (engine, on, _) in &mut engines {
        let mut moved = Bytes::ZERO;
        let mut storages = Vec::new();
        for _ in 0..12 {
            let storage = engine.alloc(LEN, *on, "x").unwrap();
            match engine.evict(storage.id(), *on) {
                Ok(Evict::Moving(transfer)) => moved += transfer.bytes,
                Ok(Evict::Kept(Kept::NoPinnedRoom)) => {}
                Err(error) if error.kind() == Kind::OverBudget => {}
                other => panic!("{other:?}"),
            }
            storages.push(storage);
        }
        assert!(moved >= Bytes::kib(96) && moved <= quota, "{moved} went out");
    }
}
