//! The fault guarded against: input at the edge of sense, a driver that refuses, an end in the
//! wrong order, an answer that comes too late; after each, bytes or budget are gone for good.
#![allow(clippy::unwrap_used)]

mod pinned_support;

use lightering::backend::{Fence, Pinner};
use lightering::pinned::{Budget, Client, Growth, PinnedPool, PoolOptions};
use lightering::{Bytes, Error, EventId, Kind, Misuse, Name, PinnedPtr, Result};
use pinned_support::{Hand, Paper, pool, small};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};

fn name(text: &str) -> Name {
    Name::new(text)
}

#[test]
fn a_length_that_is_none_is_refused_by_name() {
    let (_, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut refused = |len: u64| client.lend(Bytes(len), name("odd")).unwrap_err();
    assert_eq!(refused(0).misuse(), Some(Misuse::Empty));
    for len in [(1 << 62) + 1, (1 << 63) - 1, 1 << 63, u64::MAX] {
        assert_eq!(refused(len).misuse(), Some(Misuse::TooLarge), "{len}");
    }
    for len in [1 << 62, 1 << 50, 3 << 20] {
        let error = refused(len);
        assert_eq!((error.kind(), error.name()), (Kind::OverBudget, Some(name("odd"))), "{len}");
    }
    assert_eq!(pool.reserve(Bytes::MAX).unwrap_err().kind(), Kind::OverBudget);
    assert_eq!(pool.reserve(Bytes::ZERO).unwrap(), Bytes::ZERO);
    assert_eq!(pool.stats().pinned, Bytes::ZERO);
}

#[test]
fn an_option_out_of_its_bounds_is_named() {
    let refused = |options: PoolOptions| {
        let error = PinnedPool::new(Paper::new(Bytes::gib(1)), options).unwrap_err();
        assert_eq!(error.misuse(), Some(Misuse::BadValue), "{error}");
        error.to_string()
    };
    let options = || small(Bytes::mib(2));
    assert!(refused(small(Bytes::ZERO)).contains("budget of zero"));
    assert!(refused(small(Bytes(1))).contains("under 4 KiB"));
    assert!(refused(small(Bytes(4095))).contains("under 4 KiB"));
    assert!(PinnedPool::new(Paper::new(Bytes::gib(1)), small(Bytes(4096))).is_ok());
    assert!(refused(PoolOptions { arena_max: 0, ..options() }).contains("arena_max"));
    assert!(refused(PoolOptions { client_max: 0, ..options() }).contains("client_max"));
    let piece_bytes_max = Bytes(4095);
    assert!(refused(PoolOptions { piece_bytes_max, ..options() }).contains("piece_bytes_max"));
    // Larger than what is touched ahead: its registration would wait for ever.
    let large = Bytes::gib(2) + Bytes(1);
    let (first, all) = (PoolOptions { piece_bytes: large, ..options() }, options());
    assert!(refused(first).contains("piece_bytes is over 2 GiB"));
    let all = PoolOptions { piece_bytes_max: large, ..all };
    assert!(refused(all).contains("piece_bytes_max is over 2 GiB"));
    let arena_bytes_max = Bytes::mib(1);
    assert!(refused(PoolOptions { arena_bytes_max, ..options() }).contains("arena_bytes_max"));
    // Nothing under that root says what is free.
    assert!(refused(PoolOptions { budget: Budget::Auto, ..options() }).contains("state a budget"));
    let (_, pool) = pool(Bytes::mib(2));
    let error = pool.client(Hand::new(1), Bytes::ZERO).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::BadValue));
}

#[test]
fn a_request_for_more_than_the_machine_has_is_refused_before_it_is_touched() {
    let root = std::env::temp_dir().join(format!("lightering-machine-{}", std::process::id()));
    std::fs::create_dir_all(root.join("proc")).unwrap();
    std::fs::write(root.join("proc/meminfo"), "MemTotal: 9000 kB\nMemAvailable:   8192 kB\n")
        .unwrap();
    let paper = Paper::new(Bytes::gib(1));
    let options = PoolOptions { machine_root: root.clone(), ..small(Bytes::gib(1 << 10)) };
    let pool = PinnedPool::new(paper.clone(), options).unwrap();
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let error = client.lend(Bytes::mib(10), name("x")).unwrap_err();
    let asked = pool.reserve(Bytes::gib(64)).unwrap_err();
    let fits = client.lend(Bytes::mib(8), name("x"));
    std::fs::remove_dir_all(&root).unwrap();
    assert_eq!((error.kind(), asked.kind()), (Kind::OutOfMemory, Kind::OutOfMemory));
    assert!(error.to_string().contains("8.00 MiB"), "{error}");
    client.give_back(fits.unwrap().block, None).unwrap();
    assert_eq!(paper.script.lock().unwrap().registers, 1);
}

#[test]
fn h50_a_driver_that_refuses_the_large_arena_gets_asked_for_smaller_ones() {
    let paper = Paper::new(Bytes::gib(1));
    let options = PoolOptions {
        arena_bytes: Bytes::mib(32),
        arena_bytes_max: Bytes::mib(32),
        ..small(Bytes::mib(64))
    };
    let pool = PinnedPool::new(paper.clone(), options).unwrap();
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    paper.script.lock().unwrap().wall = Some(5 << 20);
    let block = client.lend(Bytes::mib(3), name("x")).unwrap().block;
    assert!(paper.pinned() >= 3 << 20 && paper.pinned() <= 5 << 20, "{}", paper.pinned());
    let error = client.lend(Bytes::mib(3), name("y")).unwrap_err();
    assert_eq!((error.kind(), error.driver_code()), (Kind::OutOfMemory, Some(2)));
    client.give_back(block, None).unwrap();
    pool.audit();
}

#[test]
fn arenas_too_small_for_a_large_block_make_room_for_one_that_is_not() {
    let (paper, pool) = pool(Bytes::mib(8));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let small: Vec<_> =
        (0..4).map(|_| client.lend(Bytes::mib(2), name("s")).unwrap().block).collect();
    assert_eq!(paper.registrations(), 4);
    assert_eq!(client.lend(Bytes::mib(8), name("l")).unwrap_err().kind(), Kind::OverBudget);
    for block in small {
        client.give_back(block, None).unwrap();
    }
    let large = client.lend(Bytes::mib(8), name("l")).unwrap().block;
    assert_eq!((paper.registrations(), pool.stats().counts.trims), (1, 4));
    client.give_back(large, None).unwrap();
}

#[test]
fn memory_the_driver_will_not_let_go_stays_mapped_and_in_the_budget() {
    let (paper, pool) = pool(Bytes::mib(4));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let block = client.lend(Bytes::mib(2), name("x")).unwrap().block;
    client.give_back(block, None).unwrap();
    paper.script.lock().unwrap().refuse_unregister = true;
    let before = lightering::pinned::leaked_on_purpose();
    pool.trim();
    assert_eq!(pool.stats().leaked_on_purpose, Bytes::mib(2));
    assert!(lightering::pinned::leaked_on_purpose() >= before + Bytes::mib(2));
    let block = client.lend(Bytes::mib(2), name("y")).unwrap().block;
    assert!(client.lend(Bytes::mib(2), name("z")).is_err(), "4 MiB are page-locked by now");
    paper.script.lock().unwrap().refuse_unregister = false;
    client.give_back(block, None).unwrap();
}

#[test]
fn a_pool_that_ends_with_a_block_in_doubt_keeps_its_memory_mapped() {
    for (finished, left) in [(false, 1), (true, 0)] {
        let (paper, pool) = pool(Bytes::mib(4));
        let hand = Hand::new(1);
        let mut client = pool.client(hand.clone(), Bytes::MAX).unwrap();
        let block = client.lend(Bytes::mib(1), name("x")).unwrap().block;
        client.give_back(block, Some(hand.event(0))).unwrap();
        if finished {
            hand.finish(hand.event(0));
        }
        drop(client);
        assert_eq!(pool.stats().quarantined == Bytes::ZERO, finished);
        pool.audit();
        drop(pool);
        assert_eq!(paper.registrations(), left, "finished: {finished}");
    }
    let (paper, pool) = pool(Bytes::mib(4));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let block = client.lend(Bytes::mib(1), name("x")).unwrap().block;
    drop((client, pool));
    drop(block);
    assert_eq!(paper.registrations(), 1);
}

#[test]
fn clients_and_blocks_are_bounded_in_number() {
    let options = PoolOptions { client_max: 1, block_max: 2, ..small(Bytes::mib(2)) };
    let pool = PinnedPool::new(Paper::new(Bytes::gib(1)), options).unwrap();
    let hand = Hand::new(1);
    let mut client = pool.client(hand.clone(), Bytes::MAX).unwrap();
    assert_eq!(pool.client(Hand::new(2), Bytes::MAX).unwrap_err().kind(), Kind::Busy);
    let kept = client.lend(Bytes(1), name("x")).unwrap().block;
    let busy = client.lend(Bytes(1), name("x")).unwrap().block;
    client.give_back(busy, Some(hand.event(0))).unwrap();
    let error = client.lend(Bytes(5000), name("y")).unwrap_err();
    assert!(error.to_string().contains("2 blocks are out"), "{error}");
    let again = client.lend(Bytes(1), name("z")).unwrap();
    assert_eq!(again.after, Some(hand.event(0)));
    client.give_back(again.block, None).unwrap();
    client.give_back(kept, None).unwrap();
    drop(client);
    assert!(pool.client(Hand::new(2), Bytes::MAX).is_ok());
}

#[test]
fn a_late_client_does_not_inherit_the_blocks_of_an_earlier_one() {
    let (_, pool) = pool(Bytes::mib(2));
    let mut first = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let block = first.lend(Bytes::mib(1), name("x")).unwrap().block;
    drop(first);
    let mut second = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    let refused = second.give_back(block, None).unwrap_err();
    assert_eq!(Error::from(refused).misuse(), Some(Misuse::Foreign));
    // The refusal dropped the block; its owner is gone, so nobody can say that it is idle.
    assert_eq!(second.reclaim_quarantined().unwrap(), Bytes::ZERO);
    assert_eq!(pool.stats().quarantined, Bytes::mib(1));
    pool.audit();
}

#[test]
fn a_poll_that_fails_keeps_its_event_in_the_pool() {
    let (_, pool) = pool(Bytes::mib(2));
    let hand = Hand::new(1);
    let mut client = pool.client(hand.clone(), Bytes::MAX).unwrap();
    for index in 0..3 {
        let block = client.lend(Bytes::kib(64 * (index + 1)), name("x")).unwrap().block;
        client.give_back(block, Some(hand.event(index as u32))).unwrap();
    }
    let mut home = Vec::new();
    let mut poll = |event: EventId| match event.0.index {
        1 => Err(Error::new(Kind::Lost, "query")),
        _ => Ok(true),
    };
    let error = client.settle(&mut poll, &mut |event| home.push(event)).unwrap_err();
    assert!(error.is_lost());
    assert_eq!((home.as_slice(), client.events()), ([hand.event(0)].as_slice(), 2));
    client.settle(&mut |_| Ok(true), &mut |event| home.push(event)).unwrap();
    assert_eq!((home.len(), client.events(), pool.stats().busy), (3, 0, Bytes::ZERO));
}

/// While it is asked about an event, its owner takes the event home and records it anew.
#[derive(Debug)]
struct Slow {
    owner: Mutex<Option<Client>>,
    event: EventId,
}

impl Fence for Slow {
    fn done(&self, event: EventId) -> Result<bool> {
        assert_eq!(event, self.event);
        if let Some(client) = &mut *self.owner.lock().unwrap() {
            let lent = client.lend(Bytes::mib(2), name("again"))?;
            assert_eq!(lent.after, Some(event));
            client.give_back(lent.block, Some(event))?;
        }
        // About the recording that was asked for; the new one is not done.
        Ok(true)
    }
}

#[test]
fn an_answer_about_an_earlier_recording_frees_nothing() {
    let (_, pool) = pool(Bytes::mib(2));
    let event = Hand::new(1).event(0);
    let slow = Arc::new(Slow { owner: Mutex::new(None), event });
    let mut owner = pool.client(slow.clone(), Bytes::MAX).unwrap();
    let block = owner.lend(Bytes::mib(2), name("x")).unwrap().block;
    owner.give_back(block, Some(event)).unwrap();
    *slow.owner.lock().unwrap() = Some(owner);
    let mut other = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    assert_eq!(other.lend(Bytes::mib(2), name("y")).unwrap_err().kind(), Kind::OverBudget);
    assert_eq!(pool.stats().busy, Bytes::mib(2));
    let mut owner = slow.owner.lock().unwrap().take().unwrap();
    let mut home = Vec::new();
    owner.settle(&mut |_| Ok(true), &mut |event| home.push(event)).unwrap();
    assert_eq!((home, owner.events()), (vec![event], 0));
}

/// Looks at the pool while it registers and unregisters for it.
#[derive(Debug, Default)]
struct Curious {
    pool: OnceLock<PinnedPool>,
    calls: Mutex<u32>,
}

impl Pinner for Curious {
    unsafe fn register(&self, at: NonNull<u8>, _len: Bytes) -> Result<PinnedPtr> {
        *self.calls.lock().unwrap() += 1;
        self.pool.get().unwrap().audit();
        Ok(PinnedPtr(at.as_ptr() as u64))
    }

    fn unregister(&self, _at: PinnedPtr) -> Result<()> {
        *self.calls.lock().unwrap() += 1;
        self.pool.get().unwrap().audit();
        Ok(())
    }

    fn registration_max(&self) -> Bytes {
        // Not a multiple of anything: pieces are cut to whole pages.
        Bytes(10_000)
    }
}

#[test]
fn nobody_waits_for_the_driver_under_the_pools_lock() {
    let curious = Arc::new(Curious::default());
    let options = PoolOptions { arena_bytes: Bytes::kib(32), ..small(Bytes::mib(2)) };
    let pool = PinnedPool::new(curious.clone(), options).unwrap();
    curious.pool.set(pool.clone()).unwrap();
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let block = client.lend(Bytes::kib(30), name("x")).unwrap().block;
    client.give_back(block, None).unwrap();
    pool.trim();
    assert_eq!(*curious.calls.lock().unwrap(), 8, "four pieces of 8 KiB, in and out");
}

#[test]
fn a_scrubbed_pool_hands_nobody_the_bytes_of_another() {
    let paper = Paper::new(Bytes::gib(1));
    let options = PoolOptions { scrub: true, growth: Growth::Closed, ..small(Bytes::mib(2)) };
    let pool = PinnedPool::new(paper, options).unwrap();
    pool.reserve(Bytes::mib(2)).unwrap();
    let hand = Hand::new(1);
    let mut a = pool.client(hand.clone(), Bytes::MAX).unwrap();
    let mut b = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    let clean = |b: &mut Client| {
        let mut block = b.lend(Bytes::mib(2), name("b")).unwrap().block;
        block.mark_written(block.len()).unwrap();
        let mut bytes = vec![1; 2 << 20];
        block.read(Bytes::ZERO, &mut bytes).unwrap();
        b.give_back(block, None).unwrap();
        bytes.iter().all(|&byte| byte == 0)
    };
    for way in 0..4 {
        let mut block = a.lend(Bytes::mib(2), name("secret")).unwrap().block;
        block.write(Bytes::ZERO, &vec![0xa5; 2 << 20]).unwrap();
        let event = hand.event(way);
        match way {
            0 => a.give_back(block, None).unwrap(),
            1 => {
                drop(block);
                a.reclaim_quarantined().unwrap();
            }
            _ => a.give_back(block, Some(event)).unwrap(),
        }
        hand.finish(event);
        if way == 2 {
            a.settle(&mut |_| Ok(true), &mut |_| {}).unwrap();
        }
        assert!(clean(&mut b), "way {way}");
        a.settle(&mut |_| Ok(true), &mut |_| {}).unwrap();
    }
    pool.audit();
}

#[test]
fn the_report_names_the_largest_blocks_first() {
    let (_, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut lend = |kib, text| client.lend(Bytes::kib(kib), name(text)).unwrap().block;
    let blocks = [lend(8, "small"), lend(512, "large"), lend(100, "middle")];
    let report = pool.report(2);
    let names: Vec<_> = report.rows.iter().map(|row| row.name.as_str().to_owned()).collect();
    assert_eq!(names, ["large", "middle"]);
    assert_eq!(report.largest_free, Bytes::mib(2) - Bytes::kib(8 + 512 + 104));
    assert_eq!(report.stats.requested, Bytes::kib(620));
    assert!(report.to_string().contains("large") && !report.to_string().contains("small"));
    blocks.into_iter().for_each(|block| client.give_back(block, None).unwrap());
}

#[test]
fn printing_a_block_takes_no_lock_and_prints_no_books() {
    let (_, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let block = client.lend(Bytes(10), name("x")).unwrap().block;
    let text = format!("{pool:?} {client:?} {block:?}");
    assert!(text.contains("arena_bytes_max") && text.len() < 4000, "{}", text.len());
    client.give_back(block, None).unwrap();
}

#[test]
fn threads_with_a_client_each_never_see_each_others_bytes() {
    fn shared<T: Send + Sync>() {}
    shared::<PinnedPool>();
    shared::<Client>();
    shared::<lightering::pinned::Block>();
    let options = PoolOptions { arena_bytes: Bytes::kib(256), ..small(Bytes::mib(1)) };
    let pool = PinnedPool::new(Paper::new(Bytes::kib(64)), options).unwrap();
    std::thread::scope(|scope| {
        for owner in 1..=4u32 {
            let pool = pool.clone();
            scope.spawn(move || {
                let hand = Hand::new(owner);
                let mut client = pool.client(hand.clone(), Bytes::kib(512)).unwrap();
                let mut events = 0;
                for round in 0..2_000u64 {
                    let len = 1 + (round * 7919 * u64::from(owner)) % 100_000;
                    let Ok(mut lent) = client.lend(Bytes(len), name("x")) else {
                        client.settle(&mut |_| Ok(true), &mut |_| {}).unwrap();
                        continue;
                    };
                    let mark = [owner as u8 ^ round as u8; 16];
                    let mark = &mark[..len.min(16) as usize];
                    lent.block.write(Bytes::ZERO, mark).unwrap();
                    std::thread::yield_now();
                    let mut read = vec![0; mark.len()];
                    lent.block.read(Bytes::ZERO, &mut read).unwrap();
                    assert_eq!(read, mark, "somebody else wrote to a lent block");
                    let event = hand.event(events);
                    events += 1;
                    hand.finish(event);
                    client.give_back(lent.block, (round % 3 > 0).then_some(event)).unwrap();
                }
                while client.events() > 0 {
                    client.settle(&mut |_| Ok(true), &mut |_| {}).unwrap();
                }
            });
        }
    });
    pool.audit();
    let stats = pool.stats();
    assert_eq!((stats.free, stats.blocks), (stats.pinned, 0));
    // Sizes that never repeat are merged as they come back, so few find their like.
    assert!(stats.counts.lends_behind > 0 && stats.counts.lends_split > 0);
}

#[test]
fn the_default_options_are_within_their_bounds() {
    let options = PoolOptions { budget: Budget::Bytes(Bytes::mib(64)), ..PoolOptions::default() };
    assert_eq!(options.machine_root, PathBuf::from("/"));
    let pool = PinnedPool::new(Paper::new(Bytes::gib(1)), options).unwrap();
    assert!(pool.budget() <= Bytes::mib(64) && !pool.budget().is_zero());
}
