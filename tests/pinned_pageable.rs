//! The fault guarded against: memory that is not page-locked and nobody asked for or knows of, so
//! that copies make the host wait; or such memory that grows without bound, or is not given back.
#![allow(clippy::unwrap_used)]

mod pinned_support;

use lightering::pinned::{Growth, PinnedPool, PoolOptions};
use lightering::{Bytes, Kind, Misuse, Name};
use pinned_support::{Hand, Paper, small, trunks};
use std::sync::Arc;

const MIB: Bytes = Bytes::mib(1);

fn pool(pageable_bytes_max: Bytes) -> (Arc<Paper>, PinnedPool) {
    let paper = Paper::new(Bytes::gib(1));
    let options = PoolOptions { pageable_bytes_max, ..small(Bytes::mib(2)) };
    (paper.clone(), PinnedPool::new(paper, options).unwrap())
}

#[test]
fn nothing_is_pageable_unless_somebody_asked_for_it() {
    let (paper, pool) = pool(Bytes::ZERO);
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let kept = client.lend(Bytes::mib(2), Name::new("x")).unwrap().block;
    assert!(!kept.is_pageable());
    assert_eq!(client.lend(MIB, Name::new("y")).unwrap_err().kind(), Kind::OverBudget);
    assert_eq!((paper.pageable(), pool.stats().warning()), (0, None));
    client.give_back(kept, None).unwrap();
}

#[test]
fn what_the_budget_has_no_room_for_is_pageable_counted_warned_about_and_bounded() {
    let (paper, pool) = pool(Bytes::mib(3));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let pinned = client.lend(Bytes::mib(2), Name::new("pinned")).unwrap().block;
    let mut a = client.lend(MIB, Name::new("a")).unwrap().block;
    let b = client.lend(Bytes::mib(2), Name::new("b")).unwrap().block;
    assert!(!pinned.is_pageable() && a.is_pageable() && b.is_pageable());
    assert!(trunks(&a).iter().all(|trunk| paper.covers(*trunk)), "copies of it are let through");
    a.write(Bytes::ZERO, &vec![9; 1 << 20]).unwrap();
    let error = client.lend(Bytes::kib(4), Name::new("c")).unwrap_err();
    assert_eq!(error.kind(), Kind::OverBudget);
    let stats = pool.stats();
    assert_eq!((stats.pinned, stats.pageable), (Bytes::mib(2), Bytes::mib(3)));
    assert_eq!(stats.lent, Bytes::mib(5), "all bytes add up");
    assert_eq!((stats.counts.lends_pageable, stats.counts.lends_refused), (2, 1));
    for text in [stats.warning().unwrap(), error.to_string(), stats.to_string()] {
        assert!(text.contains("3.00 MiB of host memory are not page-locked"), "{text}");
    }
    pool.audit();
    [pinned, a, b].into_iter().for_each(|block| client.give_back(block, None).unwrap());
    // Out of the books, and kept for the next ones until somebody trims.
    assert_eq!((pool.stats().pageable, paper.pageable()), (Bytes::ZERO, 3 << 20));
    assert_eq!((pool.stats().warning(), pool.stats().free), (None, Bytes::mib(2)));
    assert_eq!(pool.trim(), Bytes::mib(5));
    assert_eq!(paper.registrations(), 0);
}

#[test]
fn pageable_memory_is_taken_again_in_its_size_and_makes_room_for_another() {
    let (paper, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let pinned = client.lend(Bytes::mib(2), Name::new("pinned")).unwrap().block;
    for _ in 0..5 {
        let block = client.lend(MIB, Name::new("x")).unwrap().block;
        assert!(block.is_pageable());
        assert!(block.read(Bytes::ZERO, &mut [0]).is_err(), "an earlier owner's bytes");
        client.give_back(block, None).unwrap();
    }
    assert_eq!(paper.script.lock().unwrap().registers, 2, "one mapping served them all");
    let other = client.lend(Bytes::mib(2), Name::new("y")).unwrap().block;
    assert_eq!(paper.pageable(), 2 << 20, "the spare one made room");
    client.give_back(other, None).unwrap();
    client.give_back(pinned, None).unwrap();
    // Page-locked memory comes first again.
    let block = client.lend(MIB, Name::new("z")).unwrap().block;
    assert!(!block.is_pageable());
    client.give_back(block, None).unwrap();
}

#[test]
fn a_pageable_block_in_flight_is_its_owners_alone() {
    let (_, pool) = pool(Bytes::mib(2));
    let hand = Hand::new(1);
    let mut a = pool.client(hand.clone(), Bytes::MAX).unwrap();
    let mut b = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    b.set_growth(Growth::Closed);
    let pinned = a.lend(Bytes::mib(2), Name::new("pinned")).unwrap().block;
    let block = a.lend(Bytes::mib(2), Name::new("a")).unwrap().block;
    a.give_back(block, Some(hand.event(0))).unwrap();
    assert_eq!(pool.stats().busy, Bytes::mib(2));
    assert!(b.lend(Bytes::mib(2), Name::new("b")).is_err());
    let again = a.lend(Bytes::mib(2), Name::new("a")).unwrap();
    assert_eq!(again.after, Some(hand.event(0)));
    a.give_back(again.block, Some(hand.event(1))).unwrap();
    hand.finish(hand.event(1));
    let lent = b.lend(Bytes::mib(2), Name::new("b")).unwrap();
    assert!(lent.block.is_pageable() && lent.after.is_none());
    pool.audit();
    b.give_back(lent.block, None).unwrap();
    a.give_back(pinned, None).unwrap();
}

#[test]
fn a_device_that_copies_page_locked_memory_alone_says_so() {
    /// Page-locks, and that is all.
    #[derive(Debug)]
    struct Strict(Arc<Paper>);

    impl lightering::backend::Pinner for Strict {
        unsafe fn register(
            &self,
            at: std::ptr::NonNull<u8>,
            len: Bytes,
        ) -> lightering::Result<lightering::PinnedPtr> {
            // SAFETY: the caller's promise is passed on.
            unsafe { self.0.register(at, len) }
        }

        fn unregister(&self, at: lightering::PinnedPtr) -> lightering::Result<()> {
            self.0.unregister(at)
        }

        fn registration_max(&self) -> Bytes {
            self.0.registration_max()
        }
    }

    let paper = Paper::new(Bytes::gib(1));
    let options = PoolOptions { pageable_bytes_max: MIB, ..small(Bytes::mib(2)) };
    let pool = PinnedPool::new(Arc::new(Strict(paper.clone())), options).unwrap();
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let pinned = client.lend(Bytes::mib(2), Name::new("pinned")).unwrap().block;
    let error = client.lend(MIB, Name::new("x")).unwrap_err();
    assert_eq!((error.misuse(), error.name()), (Some(Misuse::BadValue), Some(Name::new("x"))));
    assert_eq!((paper.registrations(), pool.stats().pageable), (1, Bytes::ZERO));
    client.give_back(pinned, None).unwrap();
    pool.audit();
}
