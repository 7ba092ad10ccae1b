//! The fault guarded against: page-locked memory that is lent twice, lent while a copy runs,
//! leaked, taken beyond its budget, or left behind half made. Each test is one such story.
#![allow(clippy::unwrap_used)]

mod pinned_support;

use lightering::pinned::{Growth, PinnedPool};
use lightering::{Bytes, Kind, Misuse, Name};
use pinned_support::{Hand, Paper, pool, small, trunks};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn name(text: &str) -> Name {
    Name::new(text)
}

fn books_balance(pool: &PinnedPool) {
    let stats = pool.stats();
    assert_eq!(stats.lent + stats.free + stats.busy + stats.quarantined, stats.pinned, "{stats}");
    assert!(stats.pinned <= stats.budget, "{stats}");
}

#[test]
fn a_size_that_repeats_gets_the_same_bytes_again_and_pins_nothing() {
    let (paper, pool) = pool(Bytes::mib(8));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let first = client.lend(Bytes(100 * KIB), name("x")).unwrap().block;
    let at = first.trunk(Bytes(0), Bytes::MAX).unwrap();
    client.give_back(first, None).unwrap();
    for _ in 0..10 {
        let again = client.lend(Bytes(100 * KIB), name("x")).unwrap();
        assert_eq!(again.after, None);
        assert_eq!(again.block.trunk(Bytes(0), Bytes::MAX).unwrap(), at);
        client.give_back(again.block, None).unwrap();
    }
    assert_eq!(paper.registrations(), 1);
    assert_eq!(pool.stats().counts.lends_repeated, 10);
    books_balance(&pool);
}

#[test]
fn a_busy_block_is_lent_to_its_own_client_behind_its_event_only() {
    let (_, pool) = pool(Bytes::mib(2));
    let hand = Hand::new(1);
    let mut client = pool.client(hand.clone(), Bytes::MAX).unwrap();
    let block = client.lend(Bytes::mib(2), name("x")).unwrap().block;
    let event = hand.event(7);
    client.give_back(block, Some(event)).unwrap();
    let lent = client.lend(Bytes::mib(2), name("y")).unwrap();
    assert_eq!(lent.after, Some(event), "the borrower must wait for the last copy");
    assert!(hand.asked.lock().unwrap().is_empty(), "nobody needs to ask: the device waits");
    client.give_back(lent.block, None).unwrap();
    assert_eq!(client.lend(Bytes::mib(2), name("z")).unwrap().after, None);
    assert_eq!(client.events(), 0);
}

#[test]
fn a_busy_block_never_crosses_to_another_client_before_its_fence_is_done() {
    let (_, pool) = pool(Bytes::mib(2));
    let (hand_a, hand_b) = (Hand::new(1), Hand::new(2));
    let mut a = pool.client(hand_a.clone(), Bytes::MAX).unwrap();
    let mut b = pool.client(hand_b, Bytes::MAX).unwrap();
    let block = a.lend(Bytes::mib(2), name("a")).unwrap().block;
    let event = hand_a.event(1);
    a.give_back(block, Some(event)).unwrap();
    let refused = b.lend(Bytes::mib(2), name("b")).unwrap_err();
    assert_eq!(refused.kind(), Kind::OverBudget);
    assert_eq!(hand_a.asked.lock().unwrap().as_slice(), [1]);
    hand_a.finish(event);
    let lent = b.lend(Bytes::mib(2), name("b")).unwrap();
    assert_eq!(lent.after, None, "another client's event is never handed out");
    // The event went home, by the other door.
    let mut home = Vec::new();
    assert_eq!(a.events(), 1);
    assert_eq!(a.settle(&mut |e| Ok(hand_a.is_done(e)), &mut |e| home.push(e)).unwrap(), 1);
    assert_eq!((home, a.events()), (vec![event], 0));
    b.give_back(lent.block, None).unwrap();
    books_balance(&pool);
}

#[test]
fn an_unfinished_copy_does_not_hide_the_finished_ones_behind_it() {
    let (_, pool) = pool(Bytes::mib(2));
    let hand = Hand::new(1);
    let mut a = pool.client(hand.clone(), Bytes::MAX).unwrap();
    let mut b = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    let blocks: Vec<_> =
        (0..32).map(|_| a.lend(Bytes(64 * KIB), name("a")).unwrap().block).collect();
    for (i, block) in blocks.into_iter().enumerate() {
        a.give_back(block, Some(hand.event(i as u32))).unwrap();
    }
    hand.finish(hand.event(31));
    // Sixteen questions a call, half of them to blocks that were not asked about lately.
    let mut calls = 1..=4;
    let lent = loop {
        let call = calls.next().expect("four calls get to every block");
        let lent = b.lend(Bytes(64 * KIB), name("b"));
        assert!(hand.asked.lock().unwrap().len() <= 16 * call, "questions have a bound");
        if let Ok(lent) = lent {
            break lent;
        }
    };
    b.give_back(lent.block, None).unwrap();
    // The owner still takes the block that it gave back first.
    a.settle(&mut |event| Ok(hand.is_done(event)), &mut |_| {}).unwrap();
    let lent = a.lend(Bytes(64 * KIB), name("a")).unwrap();
    assert_eq!(lent.after, None, "an idle block is better than a busy one");
    let behind = a.lend(Bytes(64 * KIB), name("a")).unwrap();
    assert_eq!(behind.after, Some(hand.event(0)));
    a.give_back(behind.block, Some(hand.event(0))).unwrap();
    a.give_back(lent.block, None).unwrap();
}

#[test]
fn a_fence_that_fails_frees_nothing() {
    let (_, pool) = pool(Bytes::mib(2));
    let hand = Hand::new(1);
    let mut a = pool.client(hand.clone(), Bytes::MAX).unwrap();
    let mut b = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    let block = a.lend(Bytes::mib(2), name("a")).unwrap().block;
    a.give_back(block, Some(hand.event(0))).unwrap();
    hand.finish(hand.event(0));
    *hand.broken.lock().unwrap() = true;
    assert_eq!(b.lend(Bytes::mib(1), name("b")).unwrap_err().kind(), Kind::OverBudget);
    assert_eq!(pool.stats().busy, Bytes::mib(2));
}

#[test]
fn a_block_given_to_the_wrong_client_comes_back_in_the_refusal() {
    let (_, pool) = pool(Bytes::mib(2));
    let mut a = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut b = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    let block = a.lend(Bytes(1), name("a")).unwrap().block;
    let refused = b.give_back(block, None).unwrap_err();
    assert_eq!(refused.error.misuse(), Some(Misuse::Foreign));
    a.give_back(refused.block, None).unwrap();
    assert_eq!(pool.stats().free, Bytes::mib(2));
}

#[test]
fn a_dropped_block_is_quarantined_until_its_owner_has_synced() {
    let (_, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    drop(client.lend(Bytes::mib(2), name("x")).unwrap());
    assert_eq!(pool.stats().quarantined, Bytes::mib(2));
    assert_eq!(client.lend(Bytes(1), name("y")).unwrap_err().kind(), Kind::OverBudget);
    books_balance(&pool);
    assert_eq!(client.reclaim_quarantined().unwrap(), Bytes::mib(2));
    let lent = client.lend(Bytes::mib(2), name("y")).unwrap();
    client.give_back(lent.block, None).unwrap();
    assert_eq!(pool.stats().free, Bytes::mib(2));
}

#[test]
fn a_changed_size_strands_nothing() {
    let (paper, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    for len in [4 * KIB, 100 * KIB, 24 * KIB, MIB, 2 * MIB, 4 * KIB] {
        let mut blocks = Vec::new();
        while let Ok(lent) = client.lend(Bytes(len), name("x")) {
            blocks.push(lent.block);
        }
        let lent: u64 = blocks.iter().map(|block| block.room().0).sum();
        assert!(lent + blocks[0].room().0 > 2 * MIB, "{len}: {lent} of 2 MiB");
        for block in blocks {
            client.give_back(block, None).unwrap();
        }
    }
    assert_eq!(paper.registrations(), 1);
}

#[test]
fn a_request_over_the_budget_is_refused_with_the_numbers() {
    let (_, pool) = pool(Bytes::mib(4));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let kept = client.lend(Bytes::mib(3), name("kept")).unwrap().block;
    let error = client.lend(Bytes::mib(3), name("more")).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), Kind::OverBudget);
    for part in ["more", "3.00 MiB", "of 4.00 MiB", "lent", "busy", "largest free range"] {
        assert!(text.contains(part), "{text}");
    }
    client.give_back(kept, None).unwrap();
    books_balance(&pool);
}

#[test]
fn a_quota_binds_its_client_alone() {
    let (_, pool) = pool(Bytes::mib(8));
    let hand = Hand::new(1);
    let mut a = pool.client(hand.clone(), Bytes::mib(1)).unwrap();
    let mut b = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    let block = a.lend(Bytes::mib(1), name("a")).unwrap().block;
    let error = a.lend(Bytes(1), name("a2")).unwrap_err();
    assert!(error.kind() == Kind::OverBudget && error.to_string().contains("quota"), "{error}");
    let other = b.lend(Bytes::mib(1), name("b")).unwrap().block;
    // Busy bytes count, yet the busy block itself may be had again.
    a.give_back(block, Some(hand.event(0))).unwrap();
    assert!(a.lend(Bytes(1), name("a3")).is_err());
    let again = a.lend(Bytes::mib(1), name("a4")).unwrap();
    assert_eq!(again.after, Some(hand.event(0)));
    a.give_back(again.block, None).unwrap();
    b.give_back(other, None).unwrap();
    assert_eq!((a.held(), b.held()), (Bytes(0), Bytes(0)));
}

#[test]
fn a_registration_that_fails_half_way_leaves_nothing_pinned_or_mapped() {
    let paper = Paper::new(Bytes::mib(2));
    let pool = PinnedPool::new(paper.clone(), small(Bytes::mib(64))).unwrap();
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let kept = client.lend(Bytes::mib(2), name("kept")).unwrap().block;
    paper.script.lock().unwrap().refuse.insert(4);
    let error = client.lend(Bytes::mib(16), name("big")).unwrap_err();
    assert_eq!((error.kind(), error.driver_code()), (Kind::OutOfMemory, Some(2)));
    assert_eq!((paper.registrations(), pool.stats().pinned), (1, Bytes::mib(2)));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let script = paper.script.lock().unwrap();
    let (host, _) = script.ever[1];
    let pieces: Vec<usize> = script.ever[1..].iter().map(|(host, _)| *host).collect();
    assert!(pieces.len() == 3 && pieces.is_sorted(), "the fourth piece is refused");
    assert!(pieces.iter().rev().eq(&script.gone), "rolled back in reverse");
    drop(script);
    let mapped = maps.lines().any(|line| {
        let (from, rest) = line.split_once('-').unwrap();
        let to = rest.split_once(' ').unwrap().0;
        let [from, to] = [from, to].map(|text| usize::from_str_radix(text, 16).unwrap());
        from <= host && host < to && line.contains("rw-p")
    });
    // Somebody else may have mapped the address meanwhile; then it is not page-locked at least.
    assert!(!mapped || paper.pinned() == 2 * MIB);
    let big = client.lend(Bytes::mib(16), name("big")).unwrap().block;
    assert_eq!(trunks(&big).len(), 8);
    client.give_back(big, None).unwrap();
    client.give_back(kept, None).unwrap();
}

#[test]
fn closed_growth_pins_nothing_and_reserve_still_does() {
    let (paper, pool) = pool(Bytes::mib(16));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    pool.set_growth(Growth::Closed);
    assert_eq!(client.lend(Bytes(1), name("x")).unwrap_err().kind(), Kind::OverBudget);
    assert_eq!(pool.reserve(Bytes::mib(6)).unwrap(), Bytes::mib(6));
    assert_eq!(pool.reserve(Bytes::mib(6)).unwrap(), Bytes::ZERO);
    let block = client.lend(Bytes::mib(6), name("x")).unwrap().block;
    assert!(client.lend(Bytes(1), name("y")).is_err());
    let counts = pool.stats().counts;
    assert_eq!((counts.growths, counts.grown_after_close, counts.reserves), (0, 0, 1));
    client.give_back(block, None).unwrap();
    assert_eq!(pool.trim(), Bytes::mib(6));
    assert_eq!(paper.pinned(), 0);
    books_balance(&pool);
}

#[test]
fn a_pool_dropped_with_a_block_lent_stays_until_the_block_is_back() {
    let (paper, pool) = pool(Bytes::mib(4));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut block = client.lend(Bytes::mib(1), name("x")).unwrap().block;
    drop(pool);
    block.write(Bytes(0), b"still mapped").unwrap();
    let mut read = [0; 12];
    block.read(Bytes(0), &mut read).unwrap();
    assert_eq!((&read, paper.registrations()), (b"still mapped", 1));
    client.give_back(block, None).unwrap();
    drop(client);
    assert_eq!(paper.registrations(), 0);
}

#[test]
fn bytes_not_written_since_the_block_was_lent_cannot_be_read() {
    let (_, pool) = pool(Bytes::mib(4));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut block = client.lend(Bytes(100), name("x")).unwrap().block;
    let refused = |error: lightering::Error| assert_eq!(error.misuse(), Some(Misuse::OutOfRange));
    refused(block.read(Bytes(0), &mut [0]).unwrap_err());
    refused(block.write(Bytes(1), &[1]).unwrap_err());
    block.write(Bytes(0), &[7; 60]).unwrap();
    block.write(Bytes(60), &[8; 40]).unwrap();
    refused(block.write(Bytes(60), &[8; 41]).unwrap_err());
    refused(block.write(Bytes(u64::MAX), &[8; 41]).unwrap_err());
    let mut read = [0; 100];
    block.read(Bytes(0), &mut read).unwrap();
    assert!(read[..60] == [7; 60] && read[60..] == [8; 40]);
    refused(block.read(Bytes(1), &mut read).unwrap_err());
    refused(block.mark_written(Bytes(101)).unwrap_err());
    client.give_back(block, None).unwrap();
    let block = client.lend(Bytes(100), name("y")).unwrap().block;
    refused(block.read(Bytes(0), &mut [0]).unwrap_err());
    client.give_back(block, None).unwrap();
}
