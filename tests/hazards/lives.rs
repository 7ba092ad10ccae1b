//! Hazards of lives, H29 to H43: handles, engines, pools and streams that end at the wrong moment,
//! are forgotten, or are used after their end. What a process does (exit, fork) is in
//! `tests/process.rs`.

use crate::bench::{LEN, SEEDS, acquire, adopted, away, bounds, config, evict, flush, owned, rig};
use crate::pinned_support::{Hand, pool};
use crate::support::{Hands, Memory, Rig, options, quick_pool};
use lightering::adapter::{Checkpoint, DeviceMemory};
use lightering::backend::Backend;
use lightering::backend::sim::{Config, Lazy};
use lightering::storage::{Residency, Tier};
use lightering::trace::Op;
use lightering::{Bytes, Evict, Kind, Misuse, Name, Options, Shared, Storage};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

const POOL: Bytes = Bytes::kib(64);

/// A device that runs nothing before it must, and an engine that does not wait when it is dropped.
fn impatient() -> Rig {
    let config = Config::scheduled(Box::new(Lazy::default()));
    let bounds = Options { drop_deadline: Duration::ZERO, ..bounds() };
    Rig::new(config, quick_pool(POOL), bounds, 1)
}

#[test]
fn h29_a_storage_dropped_in_flight_keeps_its_block_until_its_event() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, Bytes::kib(4), 1);
        let first = owned(&mut rig, 0, LEN, 1);
        evict(&mut rig, 0, &first);
        let syncs = rig.engine.stats().seam.syncs;
        drop(first);
        // The pool's one block is lent again only behind the copy-out that fills it.
        let second = owned(&mut rig, 0, LEN, 2);
        let moved = (0..1000).find(|_| matches!(evict(&mut rig, 0, &second), Evict::Moving(_)));
        assert!(moved.is_some());
        flush(&mut rig, 0);
        let range = acquire(&mut rig, 0, &second);
        rig.check(0, range, 2, "the next one's bytes".into());
        assert_eq!(rig.engine.stats().seam.syncs, syncs, "nobody waited for the device");
        drop(second);
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn h30_an_engine_dropped_in_flight_drains_or_leaks_and_says_so() {
    let mut rig = impatient();
    let storage = owned(&mut rig, 0, LEN, 1);
    evict(&mut rig, 0, &storage);
    let Rig { engine, pool, world, mut sim, .. } = rig;
    drop(engine);
    let stats = pool.stats();
    assert_eq!((stats.lent, stats.busy), (Bytes::ZERO, Bytes::ZERO));
    assert!(stats.quarantined > Bytes::ZERO, "the copy-out may still write the block");
    sim.sync().unwrap();
    assert_eq!(world.removals_refused(), 0);
    drop(storage);
    for seed in 0..SEEDS {
        let mut rig = self::rig(seed, POOL, 1);
        let storage = owned(&mut rig, 0, LEN, 1);
        evict(&mut rig, 0, &storage);
        let Rig { engine, pool, mut sim, .. } = rig;
        // Within the deadline it drains, and nothing is left.
        drop(engine);
        assert_eq!((pool.stats().lent, pool.stats().quarantined), (Bytes::ZERO, Bytes::ZERO));
        let memory = sim.memory().unwrap();
        assert_eq!(memory.free, memory.total);
    }
}

#[test]
fn h31_a_ticket_forgotten_loses_nothing() {
    for seed in 0..SEEDS {
        let mut rig = rig(seed, POOL, 1);
        let storage = owned(&mut rig, 0, LEN, 1);
        let Evict::Moving(ticket) = evict(&mut rig, 0, &storage) else { panic!() };
        // A ticket is a plain copy: nobody has to keep it, ask it, or give it back.
        let _ = ticket;
        flush(&mut rig, 0);
        let range = acquire(&mut rig, 0, &storage);
        rig.check(0, range, 1, "home".into());
        drop(storage);
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn h32_a_block_forgotten_stays_in_the_books() {
    let (paper, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let lent = client.lend(Bytes::mib(1), Name::new("forgotten")).unwrap();
    std::mem::forget(lent.block);
    assert_eq!(pool.stats().lent, Bytes::mib(1));
    assert_eq!(pool.report(4).rows[0].name.as_str(), "forgotten");
    // The bound holds, with it counted.
    let more = client.lend(Bytes::mib(1), Name::new("x")).unwrap();
    let over = client.lend(Bytes(1), Name::new("x")).unwrap_err();
    assert_eq!(over.kind(), Kind::OverBudget);
    assert_eq!(paper.pinned(), Bytes::mib(2).0);
    client.give_back(more.block, None).unwrap();
    pool.audit();
}

#[test]
fn h33_a_pool_dropped_with_blocks_lent_stays_until_they_are_back() {
    let (paper, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut block = client.lend(Bytes(100), Name::new("x")).unwrap().block;
    drop(pool);
    assert_eq!(paper.registrations(), 1, "lent bytes stay page-locked");
    block.write(Bytes::ZERO, &[7; 100]).unwrap();
    client.give_back(block, None).unwrap();
    drop(client);
    assert_eq!(paper.registrations(), 0);
}

#[test]
fn h34_a_stream_closed_with_work_pending_finishes_it() {
    let mut rig = impatient();
    let storage = owned(&mut rig, 0, LEN, 1);
    let Evict::Moving(ticket) = evict(&mut rig, 0, &storage) else { panic!() };
    let on = rig.streams[0].engine;
    // Its owner closes it, with the producer's kernel and the copy-out behind it still to run.
    rig.sim.close_stream(rig.streams[0].here).unwrap();
    let refused = rig.engine.evict(storage.id(), on).unwrap_err();
    assert!(matches!(refused.kind(), Kind::Usage(_)), "{refused}");
    rig.sim.sync().unwrap();
    assert!(rig.engine.is_done(ticket).unwrap(), "its event is reached all the same");
    let mut bytes = [0; LEN.0 as usize];
    rig.engine.read_host(storage.id(), Bytes::ZERO, &mut bytes).unwrap();
    assert_eq!(crate::support::first_wrong(&bytes, 1), None);
}

#[test]
fn h35_memory_is_not_unpinned_under_a_copy() {
    let mut rig = impatient();
    let storage = owned(&mut rig, 0, LEN, 1);
    evict(&mut rig, 0, &storage);
    let Rig { engine, pool, world, mut sim, .. } = rig;
    assert_eq!(pool.trim(), Bytes::ZERO, "the arena is not idle");
    drop((engine, storage));
    drop(pool);
    // Everybody is gone; the copy runs into memory that is still there.
    sim.sync().unwrap();
    assert_eq!(world.removals_refused(), 0, "nobody tried to unpin it");
}

/// An engine whose seam panics right after it passed on a record that fits.
fn blows_after(rig: &mut Rig, fits: fn(&Op) -> bool) {
    rig.engine.observe(Some(Box::new(move |record| {
        if fits(&record.op) {
            resume_unwind(Box::new("between submit and record"));
        }
    })));
}

#[test]
fn h36_a_panic_between_submit_and_record_quarantines_the_block() {
    for way in
        [|op: &Op| matches!(op, Op::CopyOut { .. }), |op: &Op| matches!(op, Op::CopyIn { .. })]
    {
        let mut rig = impatient();
        let storage = owned(&mut rig, 0, LEN, 1);
        let other = owned(&mut rig, 0, LEN, 2);
        let on = rig.streams[0].engine;
        blows_after(&mut rig, way);
        let Rig { engine, pool, world, mut sim, .. } = rig;
        let shared = Shared::new(engine);
        let blown = catch_unwind(AssertUnwindSafe(|| {
            let mut engine = shared.lock();
            engine.evict(storage.id(), on).unwrap();
            engine.flush(on).unwrap();
            engine.acquire(storage.id(), on).unwrap();
        }));
        assert!(blown.is_err(), "a copy was submitted, and its end never recorded");
        // What is half done is not gone on with: the engine counts as lost, and says why.
        for id in [storage.id(), other.id()] {
            let refused = shared.lock().acquire(id, on).unwrap_err();
            assert!(refused.is_lost() && refused.to_string().contains("panicked"), "{refused}");
            assert_eq!(shared.lock().residency(id).unwrap(), Residency::Lost);
        }
        drop(shared);
        let stats = pool.stats();
        let doubt = (stats.lent, stats.busy, stats.quarantined);
        assert_eq!(doubt, (Bytes::ZERO, Bytes::ZERO, Bytes(4096)), "the block is lent to nobody");
        drop(pool);
        sim.sync().unwrap();
        assert_eq!(world.removals_refused(), 0);
        drop((storage, other));
    }
}

/// Takes no room: it panics.
struct Blows;

impl DeviceMemory for Blows {
    fn take(
        &mut self,
        _: lightering::StorageId,
        _: Bytes,
        _: lightering::StreamId,
    ) -> lightering::Result<Option<lightering::DeviceRange>> {
        resume_unwind(Box::new("the framework's allocator"))
    }

    fn give(&mut self, _: lightering::StorageId, _: lightering::StreamId) {
        resume_unwind(Box::new("the framework's allocator"))
    }
}

/// The one callback there is: a framework's memory, called by an adapter between verbs.
#[test]
fn h37_a_panic_in_a_callback_leaves_the_engine_as_it_was() {
    let mut rig = Rig::new(config(1), quick_pool(POOL), options(), 1);
    let on = rig.streams[0];
    let (mut checkpoint, mut memory) = (Checkpoint::new(), Memory::default());
    let range = rig.take(0, LEN).unwrap();
    rig.fill(0, range, 1);
    let input: Storage = rig.engine.adopt(range, "input").unwrap();
    let id = input.id();
    memory.ranges.insert(id, range);
    checkpoint.keep(&mut rig.engine, input, on.engine).unwrap();
    rig.engine.flush(on.engine).unwrap();
    let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory: &mut memory };
    lightering::adapter::pull(&mut rig.engine, on.engine, &mut hands).unwrap();
    let before = rig.engine.stats();
    for _ in 0..2 {
        let blown = catch_unwind(AssertUnwindSafe(|| {
            checkpoint.restore_into(&mut rig.engine, 0, on.engine, &mut Blows)
        }));
        assert!(blown.is_err());
        assert_eq!(rig.engine.residency(id).unwrap(), Residency::Evicted(Tier::Host));
        assert_eq!(rig.engine.stats(), before, "nothing was enqueued or changed");
    }
    let mut hands = Hands { sim: &mut rig.sim, stream: on.here, memory: &mut memory };
    let range = checkpoint.restore_into(&mut rig.engine, 0, on.engine, &mut hands).unwrap();
    rig.check(0, range, 1, "after the panics".into());
    rig.assert_right();
}

#[test]
fn h43_a_handle_used_after_its_end_never_names_another_storage() {
    let mut rig = rig(1, POOL, 1);
    let on = rig.streams[0].engine;
    let mut old = Vec::new();
    for seed in 0..20 {
        let (storage, range) = adopted(&mut rig, 0, seed);
        old.push(storage.id());
        if seed % 2 == 0 {
            rig.engine.release(storage, on).unwrap();
        } else {
            drop(storage);
            assert_eq!(rig.engine.releasable(on).unwrap(), old.last().copied());
        }
        rig.give(0, range.at());
    }
    // The slots have had twenty tenants, and have one more now.
    let (storage, _) = adopted(&mut rig, 0, 99);
    for id in old {
        assert_ne!(id, storage.id());
        let errors = [
            rig.engine.residency(id).map(drop),
            rig.engine.range(id).map(drop),
            rig.engine.evict(id, on).map(drop),
            rig.engine.acquire(id, on).map(drop),
            rig.engine.take(id),
            rig.engine.read_host(id, Bytes::ZERO, &mut [0; 8]),
        ];
        for error in errors {
            assert_eq!(error.unwrap_err().misuse(), Some(Misuse::Stale));
        }
    }
}

/// Every order in which the five kinds of handles can end, with copies in flight.
#[test]
fn handles_may_be_dropped_in_any_order() {
    let orders = permutations(5);
    assert_eq!(orders.len(), 120);
    for (seed, order) in (0..).zip(&orders) {
        let mut rig = rig(seed, POOL, 1);
        let (going, coming) = (owned(&mut rig, 0, LEN, 1), owned(&mut rig, 0, LEN, 2));
        evict(&mut rig, 0, &coming);
        flush(&mut rig, 0);
        acquire(&mut rig, 0, &coming);
        evict(&mut rig, 0, &going);
        let ends = (rig.sim.fence(), rig.sim.pinner());
        // The framework's stream is its own to keep as long as the engine.
        let Rig { engine, pool, world, mut sim, .. } = rig;
        let mut handles: [Option<Box<dyn FnOnce()>>; 5] = [
            Some(Box::new(move || drop(going))),
            Some(Box::new(move || drop(coming))),
            Some(Box::new(move || drop(engine))),
            Some(Box::new(move || drop(pool))),
            Some(Box::new(move || drop(ends))),
        ];
        for index in order {
            handles[*index].take().unwrap()();
        }
        sim.sync().unwrap();
        let memory = sim.memory().unwrap();
        assert_eq!(memory.free, memory.total, "device bytes are left: {order:?}");
        assert_eq!(world.removals_refused(), 0, "unpinned under a copy: {order:?}");
    }
}

fn permutations(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(count - 1);
    let with = |order: &Vec<usize>| -> Vec<Vec<usize>> {
        let put = |at: usize| [&order[..at], &[count - 1], &order[at..]].concat();
        (0..count).map(put).collect()
    };
    shorter.iter().flat_map(with).collect()
}

#[test]
fn a_storage_may_outlive_its_engine_and_end_anywhere() {
    let mut rig = rig(3, POOL, 1);
    let storages: Vec<_> = (0..3).map(|seed| away(&mut rig, seed)).collect();
    let Rig { engine, pool, .. } = rig;
    drop(engine);
    assert_eq!(pool.stats().lent, Bytes::ZERO);
    let threads: Vec<_> =
        storages.into_iter().map(|one| std::thread::spawn(move || drop(one))).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
