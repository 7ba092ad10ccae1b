//! Hazards of the pinned pool, H70 to H79: room that is there and cannot be had, bytes past an end,
//! sizes that nobody has, and books that do not add up.

use crate::bench::{LEN, acquire, bounds, evict, flush, owned, release};
use crate::pinned_support::{Hand, Paper, pool, small, trunks};
use crate::support::{Rig, quick_pool};
use lightering::backend::sim::Config;
use lightering::pinned::{Client, Growth, PinnedPool, PoolOptions};
use lightering::{Bytes, DevicePtr, DeviceRange, Kind, Misuse, Name, Options, PinnedRange};

fn name(text: &str) -> Name {
    Name::new(text)
}

fn meet(a: &[PinnedRange], b: &[PinnedRange]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.overlaps(*b)))
}

#[test]
fn h70_room_in_pieces_is_refused_in_numbers_and_comes_together_again() {
    let (_, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let lend = |client: &mut Client| client.lend(Bytes::kib(256), name("x")).map(|lent| lent.block);
    let mut blocks: Vec<_> = (0..8).map(|_| Some(lend(&mut client).unwrap())).collect();
    for nth in [1, 3, 5] {
        client.give_back(blocks[nth].take().unwrap(), None).unwrap();
    }
    // 768 KiB are free, and no 512 of them in a row.
    let refused = client.lend(Bytes::kib(512), name("large")).unwrap_err();
    assert_eq!((refused.kind(), refused.name()), (Kind::OverBudget, Some(name("large"))));
    assert_eq!(pool.stats().free, Bytes::kib(768));
    assert_eq!(pool.report(1).largest_free, Bytes::kib(256));
    client.give_back(blocks[2].take().unwrap(), None).unwrap();
    let large = client.lend(Bytes::kib(768), name("large")).unwrap().block;
    for block in blocks.into_iter().flatten().chain([large]) {
        client.give_back(block, None).unwrap();
    }
    pool.audit();
    assert_eq!(pool.stats().free, Bytes::mib(2));
}

#[test]
fn h71_no_size_wastes_more_than_an_eighth_or_a_page() {
    let (_, pool) = pool(Bytes::mib(64));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut worst = 0.0_f64;
    for doubling in 0..24 {
        for part in 0..16_u64 {
            let len = (1 << doubling) + (part << doubling) / 16 + part % 2;
            let block = client.lend(Bytes(len), name("x")).unwrap().block;
            let waste = block.room().0 - len;
            assert!(waste <= (len / 8).max(4095), "{len} takes {}", block.room());
            if len >= 1 << 16 {
                worst = worst.max(waste as f64 / len as f64);
            }
            client.give_back(block, None).unwrap();
        }
    }
    println!("from 64 KiB to 32 MiB at most {:.1} % are wasted", 100.0 * worst);
    assert!(worst > 0.0 && worst <= 0.125);
}

#[test]
fn h72_the_budget_is_never_exceeded_and_full_is_told() {
    let paper = Paper::new(Bytes::mib(1));
    let options = PoolOptions { arena_bytes: Bytes::kib(256), ..small(Bytes::mib(1)) };
    let pool = PinnedPool::new(paper.clone(), options).unwrap();
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let (mut blocks, mut refused) = (Vec::new(), 0);
    for round in 0..200_u64 {
        match client.lend(Bytes(1 + round * 977 % 100_000), name("x")) {
            Ok(lent) => blocks.push(lent.block),
            Err(error) => {
                assert_eq!(error.kind(), Kind::OverBudget, "{error}");
                assert!(error.to_string().contains("1.00 MiB"), "{error}");
                refused += 1;
                client.give_back(blocks.remove(0), None).unwrap();
            }
        }
        assert!(paper.pinned() <= Bytes::mib(1).0 && pool.stats().pinned <= pool.budget());
    }
    assert!(refused > 10, "{refused}");
    blocks.into_iter().for_each(|block| client.give_back(block, None).unwrap());
}

#[test]
fn h73_a_block_is_given_back_once_and_to_its_own() {
    let (_, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut other = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    let block = client.lend(Bytes(100), name("x")).unwrap().block;
    // It moves into the call: a second time cannot be written down. The wrong client's call gives
    // it back to the caller.
    let refused = other.give_back(block, None).unwrap_err();
    assert_eq!(refused.error.misuse(), Some(Misuse::Foreign));
    assert_eq!(pool.stats().blocks, 1);
    client.give_back(refused.block, None).unwrap();
    assert_eq!((pool.stats().blocks, pool.stats().lent), (0, Bytes::ZERO));
}

#[test]
fn h74_nothing_is_written_or_copied_past_a_blocks_end() {
    let (paper, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut block = client.lend(Bytes(5000), name("x")).unwrap().block;
    let mut neighbour = client.lend(Bytes(5000), name("neighbour")).unwrap().block;
    neighbour.write(Bytes::ZERO, &[7; 5000]).unwrap();
    for (offset, len) in [(0, 5001), (4999, 2), (5000, 1), (u64::MAX, 1), (1 << 63, 8)] {
        let past = block.write(Bytes(offset), &vec![9; len]).unwrap_err();
        assert_eq!(past.misuse(), Some(Misuse::OutOfRange), "{offset} + {len}");
    }
    // The room of its class is larger; neither the host nor a copy gets at it.
    assert!(block.room() > block.len());
    assert_eq!(block.trunk(Bytes(5000), Bytes(1)).unwrap_err().misuse(), Some(Misuse::OutOfRange));
    assert_eq!(block.mark_written(Bytes(5001)).unwrap_err().misuse(), Some(Misuse::OutOfRange));
    let all = trunks(&block);
    assert_eq!(all.iter().map(|trunk| trunk.len().0).sum::<u64>(), 5000);
    assert!(all.iter().all(|trunk| paper.covers(*trunk)) && !meet(&all, &trunks(&neighbour)));
    let mut bytes = [0; 5000];
    neighbour.read(Bytes::ZERO, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
    client.give_back(block, None).unwrap();
    client.give_back(neighbour, None).unwrap();
}

#[test]
fn h76_no_step_pins_memory_once_growth_is_closed() {
    let pool = PoolOptions { arena_bytes: Bytes::kib(16), ..quick_pool(Bytes::mib(1)) };
    let mut rig = Rig::new(Config::adversary(1), pool, bounds(), 1);
    rig.pool.reserve(Bytes::kib(32)).unwrap();
    rig.pool.set_growth(Growth::Closed);
    let before = rig.pool.stats();
    for step in 0..10 {
        let storages: Vec<_> = (0..16).map(|_| owned(&mut rig, 0, Bytes::kib(4), step)).collect();
        storages.iter().for_each(|storage| {
            evict(&mut rig, 0, storage);
        });
        flush(&mut rig, 0);
        for storage in storages {
            acquire(&mut rig, 0, &storage);
            release(&mut rig, 0, storage);
        }
        rig.engine.mark_step().unwrap();
    }
    let after = rig.pool.stats();
    assert_eq!((after.pinned, after.counts.growths), (before.pinned, before.counts.growths));
    assert_eq!(after.counts.grown_after_close, 0);
    assert!(after.counts.lends_refused > 0, "it ran short, and did without: {after:?}");
    rig.assert_right();
    rig.assert_nothing_left();
}

#[test]
fn h77_odd_lengths_at_odd_addresses_come_home() {
    let lens = [1, 2, 3, 5, 7, 255, 257, 511, 1023, 1025, 2047, 4095, 4097, 6001];
    for (seed, len) in (0..).zip(lens) {
        for offset in [0, 1, 3, 255, 257] {
            let pool = quick_pool(Bytes::kib(64));
            let mut rig = Rig::new(Config::adversary(seed), pool, bounds(), 1);
            let on = rig.streams[0].engine;
            // A part of a larger buffer, as a view of a tensor is.
            let whole = rig.take(0, Bytes(8192)).unwrap();
            let range = whole.part(Bytes(offset), Bytes(len)).unwrap();
            let end = offset + len;
            let mut neighbours = [(0, offset), (end, 8192 - end)]
                .map(|(at, len)| whole.part(Bytes(at), Bytes(len)).unwrap())
                .to_vec();
            neighbours.retain(|part| !part.is_empty());
            neighbours.iter().for_each(|part| rig.fill(0, *part, 50));
            rig.fill(0, range, seed);
            let storage = rig.engine.adopt(range, "a view").unwrap();
            evict(&mut rig, 0, &storage);
            flush(&mut rig, 0);
            assert_eq!(rig.engine.releasable(on).unwrap(), Some(storage.id()));
            let home = rig.take(0, Bytes(len + 9)).unwrap();
            let target = home.part(Bytes(9), Bytes(len)).unwrap();
            rig.engine.refill(storage.id(), target, on).unwrap();
            rig.check(0, target, seed, format!("{len} bytes at {offset}"));
            neighbours.iter().for_each(|part| rig.check(0, *part, 50, "a neighbour".into()));
            rig.assert_right();
        }
    }
}

#[test]
fn h78_lengths_and_sums_of_lengths_never_wrap() {
    let (_, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut rig = Rig::adversary(1);
    let on = rig.streams[0].engine;
    let held = rig.engine.memory().unwrap().allocated;
    for len in [u64::MAX, u64::MAX - 4095, 1 << 63, i64::MAX as u64, 1 << 62, 1 << 48] {
        let refused = client.lend(Bytes(len), name("x")).unwrap_err();
        let is_told = refused.misuse() == Some(Misuse::TooLarge)
            || matches!(refused.kind(), Kind::OverBudget | Kind::OutOfMemory);
        assert!(is_told, "{len}: {refused}");
        let refused = rig.engine.alloc(Bytes(len), on, "x").unwrap_err();
        let is_told =
            refused.misuse() == Some(Misuse::TooLarge) || refused.kind() == Kind::OutOfMemory;
        assert!(is_told, "{len}: {refused}");
        assert!(pool.reserve(Bytes(len)).is_err(), "{len} bytes were reserved");
        let wraps = DeviceRange::new(DevicePtr(4096), Bytes(len));
        assert_eq!(wraps.is_err(), len > u64::MAX - 4096, "{len}");
    }
    assert_eq!(Bytes(u64::MAX).checked_add(Bytes(1)), None);
    assert_eq!(rig.engine.memory().unwrap().allocated, held);
    pool.audit();
    let absurd = Options { unreleased_bytes_max: Bytes::MAX, ..bounds() };
    let mut rig = Rig::new(Config::adversary(1), quick_pool(Bytes::kib(64)), absurd, 1);
    let storage = owned(&mut rig, 0, Bytes::kib(1), 1);
    evict(&mut rig, 0, &storage);
    rig.assert_right();
}

#[test]
fn h79_every_pinned_byte_is_lent_free_busy_or_in_doubt_at_every_step() {
    for seed in 0..40 {
        let pool = quick_pool(Bytes::kib(32));
        let bounds = Options { prefetch_count_max: 2, ..bounds() };
        let mut rig = Rig::new(Config::adversary(seed), pool, bounds, 1);
        let books = |rig: &Rig| {
            let stats = rig.pool.stats();
            let sum = stats.lent + stats.free + stats.busy + stats.quarantined;
            assert_eq!(sum, stats.pinned, "{stats:?}");
            stats.lent
        };
        for step in 0..20 {
            let storages: Vec<_> =
                (0..6).map(|n| owned(&mut rig, 0, Bytes(1000 * (1 + (step + n) % 5)), n)).collect();
            for storage in &storages {
                // What moved out successfully, too, is in somebody's books.
                evict(&mut rig, 0, storage);
                books(&rig);
            }
            flush(&mut rig, 0);
            for storage in storages {
                acquire(&mut rig, 0, &storage);
                books(&rig);
                release(&mut rig, 0, storage);
                books(&rig);
            }
            rig.engine.mark_step().unwrap();
            // A step's storages are gone: none of their bytes is lent any more.
            assert_eq!(books(&rig), Bytes::ZERO, "seed {seed} step {step}");
        }
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn h49_memory_that_is_not_page_locked_is_told_of_and_its_bytes_are_right() {
    for seed in 0..20 {
        let options =
            PoolOptions { pageable_bytes_max: Bytes::mib(1), ..quick_pool(Bytes::kib(4)) };
        let mut rig = Rig::new(Config::adversary(seed), options, bounds(), 1);
        let storages: Vec<_> = (0..6).map(|n| owned(&mut rig, 0, LEN, n)).collect();
        for storage in &storages {
            evict(&mut rig, 0, storage);
        }
        flush(&mut rig, 0);
        let stats = rig.engine.stats().pinned;
        assert!(stats.pinned <= Bytes::kib(4) && stats.pageable > Bytes::ZERO, "{stats}");
        assert!(stats.warning().unwrap().contains("not page-locked"));
        for (n, storage) in (0..).zip(&storages) {
            let range = acquire(&mut rig, 0, storage);
            rig.check(0, range, n, format!("storage {n}"));
        }
        drop(storages);
        rig.assert_right();
    }
}
