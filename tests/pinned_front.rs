//! The fault guarded against: a client that keeps blocks at hand, out of the pool's books, and so
//! withholds them from others, hides them from the figures, or has them twice.
#![allow(clippy::unwrap_used)]

mod pinned_support;

use lightering::pinned::{Client, Growth, PinnedPool};
use lightering::{Bytes, EventId, Kind, Name};
use pinned_support::{Hand, pool};
use std::sync::Arc;

const ALL: Bytes = Bytes::mib(2);

fn name(text: &str) -> Name {
    Name::new(text)
}

/// A pool of 2 MiB with two clients; the first has its only block at hand, busy behind event 1.
fn at_hand() -> (PinnedPool, Arc<Hand>, Client, Client) {
    let (_, pool) = pool(ALL);
    let hand = Hand::new(1);
    let mut a = pool.client(hand.clone(), Bytes::MAX).unwrap();
    let b = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    let block = a.lend(ALL, name("a")).unwrap().block;
    a.give_back(block, Some(hand.event(1))).unwrap();
    (pool, hand, a, b)
}

fn settle(client: &mut Client, hand: &Hand) -> Vec<EventId> {
    let mut home = Vec::new();
    client.settle(&mut |event| Ok(hand.is_done(event)), &mut |event| home.push(event)).unwrap();
    home
}

/// Lent, free, busy, quarantined and requested.
fn figures(pool: &PinnedPool) -> [Bytes; 5] {
    pool.audit();
    let stats = pool.stats();
    let sum = stats.lent + stats.free + stats.busy + stats.quarantined;
    assert_eq!(sum, stats.pinned, "{stats}");
    [stats.lent, stats.free, stats.busy, stats.quarantined, stats.requested]
}

#[test]
fn a_block_at_hand_is_in_the_figures_as_what_it_is() {
    let zero = Bytes::ZERO;
    let (pool, hand, mut a, _b) = at_hand();
    assert_eq!(figures(&pool), [zero, zero, ALL, zero, zero]);
    assert_eq!((a.events(), a.held(), pool.stats().blocks), (1, ALL, 1));
    assert_eq!(settle(&mut a, &hand), [], "the copy runs");
    hand.finish(hand.event(1));
    assert_eq!(settle(&mut a, &hand), [hand.event(1)]);
    assert_eq!(figures(&pool), [zero, ALL, zero, zero, zero]);
    assert_eq!((a.events(), a.held(), pool.stats().blocks), (0, zero, 0));
    // Under another name, and for another length of the same class.
    let len = ALL - Bytes::kib(40);
    let lent = a.lend(len, name("later")).unwrap();
    assert_eq!((lent.after, lent.block.len(), lent.block.room()), (None, len, ALL));
    assert_eq!(figures(&pool), [ALL, zero, zero, zero, len]);
    let rows = pool.report(9).rows;
    let row = |row: &lightering::pinned::LentRow| (row.name, row.requested, row.lent);
    assert_eq!(rows.iter().map(row).collect::<Vec<_>>(), [(name("later"), len, ALL)]);
    assert_eq!(pool.stats().counts.lends_repeated, 1);
    // In the books by now, whose figures are the same.
    assert_eq!(figures(&pool), [ALL, zero, zero, zero, len]);
    a.give_back(lent.block, Some(hand.event(2))).unwrap();
    assert_eq!(figures(&pool), [zero, zero, ALL, zero, zero]);
}

#[test]
fn a_block_at_hand_goes_to_another_client_that_needs_it_once_its_copy_is_done() {
    let (pool, hand, mut a, mut b) = at_hand();
    assert_eq!(b.lend(Bytes(1), name("b")).unwrap_err().kind(), Kind::OverBudget);
    hand.finish(hand.event(1));
    let lent = b.lend(Bytes(1), name("b")).unwrap();
    assert_eq!(lent.after, None, "another client's event");
    // The first one cannot have it, and its event comes home once, by the books.
    assert_eq!(a.lend(ALL, name("a")).unwrap_err().kind(), Kind::OverBudget);
    assert_eq!(settle(&mut a, &hand), [hand.event(1)]);
    assert_eq!(settle(&mut a, &hand), []);
    assert_eq!((a.events(), a.held()), (0, Bytes::ZERO));
    b.give_back(lent.block, None).unwrap();
    // As the second one does with what the first one had settled.
    let block = a.lend(ALL, name("a")).unwrap().block;
    a.give_back(block, Some(hand.event(1))).unwrap();
    assert_eq!(settle(&mut a, &hand), [hand.event(1)]);
    let block = b.lend(ALL, name("b")).unwrap().block;
    assert_eq!(a.lend(ALL, name("a")).unwrap_err().kind(), Kind::OverBudget);
    b.give_back(block, None).unwrap();
    assert_eq!(figures(&pool)[1], ALL);
}

#[test]
fn memory_at_hand_is_given_back_to_the_system_though_its_client_lives() {
    let (paper, pool) = pool(Bytes::mib(4));
    let hand = Hand::new(1);
    let mut client = pool.client(hand.clone(), Bytes::MAX).unwrap();
    for _ in 0..3 {
        let block = client.lend(ALL, name("x")).unwrap().block;
        client.give_back(block, Some(hand.event(1))).unwrap();
        assert_eq!(pool.trim(), Bytes::ZERO, "a copy may be running");
        hand.finish(hand.event(1));
        assert_eq!(settle(&mut client, &hand), [hand.event(1)]);
        // Once from the books, and once more from the client's hand.
        let block = client.lend(ALL, name("x")).unwrap().block;
        client.give_back(block, Some(hand.event(1))).unwrap();
        assert_eq!(settle(&mut client, &hand), [hand.event(1)]);
        assert_eq!((pool.trim(), paper.registrations()), (ALL, 0));
        assert_eq!(pool.stats().pinned, Bytes::ZERO);
        hand.done.lock().unwrap().clear();
    }
}

#[test]
fn a_block_dropped_or_outliving_its_client_after_it_was_at_hand_is_not_lent_again() {
    for outlives in [false, true] {
        let (pool, hand, mut a, mut b) = at_hand();
        hand.finish(hand.event(1));
        settle(&mut a, &hand);
        let block = a.lend(ALL, name("later")).unwrap().block;
        if outlives {
            drop(a);
            assert_eq!(pool.report(1).rows[0].name, name("later"));
            drop(block);
        } else {
            drop(block);
            assert_eq!(a.held(), ALL);
        }
        assert_eq!(figures(&pool), [Bytes::ZERO, Bytes::ZERO, Bytes::ZERO, ALL, Bytes::ZERO]);
        assert_eq!(b.lend(Bytes(1), name("b")).unwrap_err().kind(), Kind::OverBudget);
    }
}

#[test]
fn blocks_that_come_back_busy_are_lent_again_in_that_order_however_many_are_at_hand() {
    let (_, pool) = pool(ALL);
    pool.reserve(ALL).unwrap();
    pool.set_growth(Growth::Closed);
    let hand = Hand::new(1);
    let mut client = pool.client(hand.clone(), Bytes::MAX).unwrap();
    let len = Bytes::kib(128);
    let blocks: Vec<_> = (0..16).map(|_| client.lend(len, name("x")).unwrap().block).collect();
    for (nth, block) in blocks.into_iter().enumerate() {
        client.give_back(block, Some(hand.event(nth as u32))).unwrap();
        pool.audit();
    }
    assert_eq!((client.events(), pool.stats().busy), (16, ALL));
    // The device waits for the copy that was enqueued first.
    for nth in 0..16 {
        let lent = client.lend(len, name("y")).unwrap();
        assert_eq!(lent.after, Some(hand.event(nth)));
        client.give_back(lent.block, Some(hand.event(16 + nth))).unwrap();
        pool.audit();
    }
    (16..32).for_each(|nth| hand.finish(hand.event(nth)));
    // It is asked about a few at a time.
    let home: usize = (0..3).map(|_| settle(&mut client, &hand).len()).sum();
    assert_eq!((home, client.events(), pool.stats().free), (16, 0, ALL));
}

#[test]
fn a_quota_counts_what_is_at_hand_while_it_is_busy_and_not_when_it_is_idle() {
    let (_, pool) = pool(Bytes::mib(8));
    let hand = Hand::new(1);
    let mut client = pool.client(hand.clone(), ALL).unwrap();
    let block = client.lend(ALL, name("x")).unwrap().block;
    client.give_back(block, Some(hand.event(1))).unwrap();
    let error = client.lend(Bytes::kib(4), name("y")).unwrap_err();
    assert!(error.kind() == Kind::OverBudget && error.to_string().contains("quota"), "{error}");
    hand.finish(hand.event(1));
    settle(&mut client, &hand);
    let block = client.lend(ALL, name("x")).unwrap().block;
    client.give_back(block, Some(hand.event(1))).unwrap();
    assert_eq!(settle(&mut client, &hand), [hand.event(1)]);
    let small = client.lend(Bytes::kib(4), name("y")).unwrap().block;
    client.give_back(small, None).unwrap();
    pool.audit();
}
