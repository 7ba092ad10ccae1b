//! The fault guarded against: a lend that allocates, and so takes the heap's lock and time, on
//! every step of a job that has long been warm.
#![allow(clippy::unwrap_used, missing_docs)]

mod pinned_support;

use lightering::{Bytes, Name};
use pinned_support::{Hand, pool};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes on to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_warm_step_of_lends_returns_and_settles_allocates_nothing() {
    let (_, pool) = pool(Bytes::mib(2));
    let hand = Hand::new(1);
    let mut client = pool.client(hand.clone(), Bytes::MAX).unwrap();
    let mut blocks = Vec::with_capacity(8);
    let mut allocations = 0;
    for step in 0..100 {
        let before = ALLOCATIONS.get();
        for layer in 0..8 {
            let lent = client.lend(Bytes::kib(40 + 8 * layer), Name::new("layer")).unwrap();
            blocks.push(lent.block);
        }
        for (layer, block) in blocks.drain(..).enumerate() {
            let event = hand.event(layer as u32);
            client.give_back(block, (layer % 2 == 0).then_some(event)).unwrap();
        }
        // Every other step, so that blocks are also lent again while busy.
        if step % 2 == 0 {
            client.settle(&mut |_| Ok(true), &mut |_| {}).unwrap();
        }
        allocations = ALLOCATIONS.get() - before;
        assert!(step < 10 || allocations == 0, "{allocations} allocations in step {step}");
    }
    assert_eq!(allocations, 0);
    assert!(ALLOCATIONS.get() > 0, "the counter counts");
    assert!(pool.stats().counts.lends_behind > 0);
}
