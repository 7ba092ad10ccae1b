//! The faults of other projects that are no missing edge, M32 to M34, each in its circumstances
//! through the engine or the pool. M03 is in `tests/checkpoint.rs`, M30 in `tests/layers.rs`, M31
//! and M35 in `tests/cuda_fake/`.
//!
//! What it is not: a copy of those faults. Where the engine has no such code there is nothing to
//! break; what must hold is asserted.
//!
//! Invariant: the numbers are those of the list, `docs/reliability.md` shows them.
//!
//! ```text
//!   M32 books after every question     M33 a length that differs     M34 many, and large, arenas
//! ```
//!
//! The museum's tests.

use crate::support::{Rig, options, quick_pool};
use lightering::backend::sim::{Config, Eager, Fault, FaultPlan, Model, Spot, World};
use lightering::backend::{Backend, Pinner};
use lightering::pinned::{Budget, PinnedPool, PoolOptions};
use lightering::storage::{Residency, Tier};
use lightering::{Bytes, Evict, Misuse, Name, Options, PinnedPtr, Result};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

const LEN: Bytes = Bytes::kib(2);

fn rig(seed: u64, faults: FaultPlan) -> Rig {
    let config = Config { faults, ..Config::adversary(seed) };
    let bounds = Options { note_uses: false, trunk_bytes_max: Bytes::kib(1), ..options() };
    Rig::new(config, quick_pool(Bytes::kib(64)), bounds, 1)
}

/// hip-ep 1068: an eviction that succeeded returned early, and leaked what it evicted, 200 MB a
/// question.
#[test]
fn m32_what_was_evicted_with_success_is_not_forgotten() {
    let mut rig = rig(1, FaultPlan::default());
    let on = rig.streams[0].engine;
    let mut after_first = None;
    for question in 0..200_u64 {
        let cached: Vec<_> = (0..8)
            .map(|n| {
                let storage = rig.engine.alloc(LEN, on, "cached").unwrap();
                let range = rig.engine.range(storage.id()).unwrap();
                rig.fill(0, range, question + n);
                let became = rig.engine.evict(storage.id(), on).unwrap();
                assert!(matches!(became, Evict::Moving(_)), "question {question}: {became:?}");
                storage
            })
            .collect();
        rig.engine.flush(on).unwrap();
        // Half are asked for again; all end, in the three ways there are.
        for (n, storage) in cached.into_iter().enumerate() {
            match n % 4 {
                0 => rig.engine.release(storage, on).unwrap(),
                1 => drop(storage),
                _ => {
                    rig.engine.acquire(storage.id(), on).unwrap();
                    rig.engine.release(storage, on).unwrap();
                }
            }
        }
        rig.engine.mark_step().unwrap();
        let stats = rig.engine.stats();
        let held = (stats.storages, stats.pinned.lent, stats.pinned.pinned, rig.engine.places());
        assert_eq!((held.0, held.1), (0, Bytes::ZERO), "question {question}");
        assert_eq!(rig.engine.memory().unwrap().allocated, Bytes::ZERO);
        assert_eq!(*after_first.get_or_insert(held), held, "question {question} left something");
    }
    rig.assert_right();
    rig.assert_nothing_left();
}

/// DeepSpeed 1070: what was kept had another length than what it was read into.
#[test]
fn m33_a_copy_is_never_shorter_than_its_storage() {
    for seed in 0..20 {
        // The second trunk of the way home is refused: half of the bytes are there.
        let faults = FaultPlan::default().at(Spot::Copy, 4, Fault::Refuse);
        let mut rig = rig(seed, faults);
        let on = rig.streams[0].engine;
        let range = rig.take(0, LEN).unwrap();
        rig.fill(0, range, 1);
        let storage = rig.engine.adopt(range, "kept").unwrap();
        rig.engine.evict(storage.id(), on).unwrap();
        rig.engine.flush(on).unwrap();
        assert_eq!(rig.engine.releasable(on).unwrap(), Some(storage.id()));
        rig.give(0, range.at());
        let room = rig.take(0, Bytes(LEN.0 + 256)).unwrap();
        for len in [0, 1, LEN.0 - 1, LEN.0 + 1, LEN.0 + 256] {
            let other = room.part(Bytes::ZERO, Bytes(len)).unwrap();
            let refused = rig.engine.refill(storage.id(), other, on).unwrap_err();
            assert_eq!(refused.misuse(), Some(Misuse::LengthMismatch), "{len}: {refused}");
        }
        let home = room.part(Bytes(256), LEN).unwrap();
        let half = rig.engine.refill(storage.id(), home, on).unwrap_err();
        assert!(half.is_retryable() && half.to_string().contains("kept"), "{half}");
        assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Evicted(Tier::Host));
        let mut bytes = vec![0; LEN.0 as usize + 1];
        let long = rig.engine.read_host(storage.id(), Bytes::ZERO, &mut bytes).unwrap_err();
        assert_eq!(long.misuse(), Some(Misuse::OutOfRange));
        rig.engine.refill(storage.id(), home, on).unwrap();
        rig.check(0, home, 1, "all of it".into());
        rig.engine.release(storage, on).unwrap();
        rig.give(0, room.at());
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

/// Writes down what is registered.
#[derive(Debug)]
struct Counting {
    inner: Arc<dyn Pinner>,
    lens: Mutex<Vec<Bytes>>,
}

impl Pinner for Counting {
    unsafe fn register(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        self.lens.lock().unwrap().push(len);
        // SAFETY: the caller's promise is passed on.
        unsafe { self.inner.register(at, len) }
    }

    fn unregister(&self, at: PinnedPtr) -> Result<()> {
        self.inner.unregister(at)
    }

    fn registration_max(&self) -> Bytes {
        self.inner.registration_max()
    }

    fn needs_memory(&self) -> bool {
        self.inner.needs_memory()
    }
}

/// A pool of so many bytes on a device that takes at most `piece_max` in one registration: the
/// lengths it registered for one block of all of them.
fn registered(config: Config, budget: Bytes, block: Bytes) -> Vec<Bytes> {
    let world = World::new(config);
    let device = world.device(0).unwrap();
    let (inner, fence) = (device.pinner(), device.fence());
    let pinner = Arc::new(Counting { inner, lens: Mutex::default() });
    let pool = PoolOptions {
        budget: Budget::Bytes(budget),
        arena_bytes: block,
        arena_bytes_max: budget,
        machine_root: "/nowhere".into(),
        ..PoolOptions::default()
    };
    let pool = PinnedPool::new(pinner.clone(), pool).unwrap();
    let mut client = pool.client(fence, Bytes::MAX).unwrap();
    let lent = client.lend(block, Name::new("all")).unwrap();
    client.give_back(lent.block, None).unwrap();
    std::mem::take(&mut *pinner.lens.lock().unwrap())
}

/// LMCache 2952, vllm 51081: one registration of 512 GiB fails; QMCPACK 5557: so does the
/// 65,537th.
#[test]
fn m34_large_memory_is_registered_in_pieces_few_and_not_too_large() {
    // As much as a large host has, of addresses alone: no byte of it is there.
    let (budget, block) = (Bytes::gib(1200), Bytes::gib(600));
    let lens = registered(Config::times_only(Model::default()), budget, block);
    println!("600 GiB are {} registrations, the largest of {}", lens.len(), lens[0]);
    assert!(lens.iter().all(|len| *len <= Bytes::gib(64)), "{lens:?}");
    assert!(lens.iter().map(|len| len.0).sum::<u64>() >= block.0);
    // Room for twenty times as much before a driver refuses one more.
    assert!(lens.len() < 65_536 / 20, "{}", lens.len());
    // On a device with small pieces, too.
    let config =
        Config { registration_bytes_max: Bytes::kib(64), ..Config::scheduled(Box::new(Eager)) };
    let lens = registered(config, Bytes::mib(4), Bytes::mib(2));
    assert!(lens.iter().all(|len| *len <= Bytes::kib(64)) && lens.len() <= 40, "{lens:?}");
}
