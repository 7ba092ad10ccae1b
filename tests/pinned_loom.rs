//! The fault guarded against: an order of two or three threads in the pool that nobody thought of,
//! after which a byte has two borrowers, an event is lost, the budget is exceeded, or all wait.
//!
//! Every order of the pool's locks and waits is tried, up to a bound on preemptions, by loom:
//! `RUSTFLAGS="--cfg loom" cargo test --release --test pinned_loom`. Without that there is nothing
//! here; `tests/pinned_edges.rs` has threads in the orders that the system happens to choose.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

use lightering::backend::{Fence, Pinner};
use lightering::pinned::{Budget, Client, Growth, Numa, PinnedPool, PoolOptions, State};
use lightering::{Bytes, EventId, Key, Kind, Name, PinnedPtr, Result};
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const BUDGET: u64 = 64 << 10;

/// Page-locks nothing, and never more than the budget. Its lock is the model's, too.
#[derive(Debug)]
struct Books(Mutex<BTreeMap<u64, u64>>);

impl Pinner for Books {
    unsafe fn register(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        let mut live = self.0.lock().unwrap();
        let address = at.as_ptr() as u64;
        live.insert(address, len.0);
        assert!(live.values().sum::<u64>() <= BUDGET, "over the budget");
        Ok(PinnedPtr(address))
    }

    fn unregister(&self, at: PinnedPtr) -> Result<()> {
        assert!(self.0.lock().unwrap().remove(&at.0).is_some(), "unregistered twice");
        Ok(())
    }

    fn registration_max(&self) -> Bytes {
        Bytes::kib(16)
    }

    fn needs_memory(&self) -> bool {
        false
    }
}

/// Events are done, until the owner records them anew.
#[derive(Debug, Default)]
struct Hand {
    anew: AtomicBool,
}

impl Hand {
    fn is_done(&self) -> bool {
        !self.anew.load(SeqCst)
    }
}

impl Fence for Hand {
    fn done(&self, _event: EventId) -> Result<bool> {
        Ok(self.is_done())
    }
}

fn pool(growth: Growth) -> (Arc<Books>, PinnedPool) {
    let books = Arc::new(Books(Mutex::new(BTreeMap::new())));
    let options = PoolOptions {
        budget: Budget::Bytes(Bytes(BUDGET)),
        arena_bytes: Bytes::kib(16),
        arena_bytes_max: Bytes::kib(16),
        piece_bytes: Bytes::kib(16),
        machine_root: "/nowhere".into(),
        numa: Numa::Any,
        growth,
        ..PoolOptions::default()
    };
    (books.clone(), PinnedPool::new(books, options).unwrap())
}

fn client(pool: &PinnedPool) -> Client {
    pool.client(Arc::new(Hand::default()), Bytes::MAX).unwrap()
}

fn event(owner: u32) -> EventId {
    EventId(Key { owner, index: 0, generation: 0 })
}

/// Tries every order with so many preemptions, and says how many there were.
fn check(name: &str, preemptions: usize, story: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    let orders = Arc::new(AtomicUsize::new(0));
    let counted = orders.clone();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        story();
    });
    let orders = orders.load(Ordering::Relaxed);
    println!("{name}: {orders} orders");
    assert!(orders > 1, "{name}: one order is no search");
}

fn balanced(pool: &PinnedPool) {
    pool.audit();
    let stats = pool.stats();
    assert_eq!(stats.lent + stats.free + stats.busy + stats.quarantined, stats.pinned);
    assert_eq!(stats.reserving, Bytes::ZERO);
}

#[test]
fn an_event_comes_home_once_and_an_old_answer_frees_no_new_copy() {
    check("an event", 3, || {
        let (_, pool) = pool(Growth::Closed);
        pool.reserve(Bytes::kib(16)).unwrap();
        let hand = Arc::new(Hand::default());
        let mut a = pool.client(hand.clone(), Bytes::MAX).unwrap();
        let block = a.lend(Bytes::kib(16), Name::new("a")).unwrap().block;
        a.give_back(block, Some(event(1))).unwrap();
        let other = {
            let (mut b, hand) = (client(&pool), hand.clone());
            loom::thread::spawn(move || {
                let Ok(lent) = b.lend(Bytes::kib(16), Name::new("b")) else { return };
                assert_eq!(lent.after, None, "another client's event");
                assert!(hand.is_done(), "a block whose owner copies into it again");
                b.give_back(lent.block, None).unwrap();
            })
        };
        let mut home = 0;
        let mut settle = |a: &mut Client| {
            let mut done = |came: EventId| {
                assert_eq!(came, event(1));
                home += 1;
            };
            a.settle(&mut |_| Ok(hand.is_done()), &mut done).unwrap();
        };
        settle(&mut a);
        // Behind its own event, or without one where somebody learned that it is done.
        let again = a.lend(Bytes::kib(16), Name::new("a"));
        let flies = match again {
            Ok(lent) if a.events() == 0 => {
                // The owner has its event back, and records it behind the next copy.
                hand.anew.store(true, SeqCst);
                a.give_back(lent.block, Some(event(1))).unwrap();
                true
            }
            Ok(lent) => {
                a.give_back(lent.block, None).unwrap();
                false
            }
            Err(_) => false,
        };
        other.join().unwrap();
        settle(&mut a);
        settle(&mut a);
        assert!(home <= 1, "twice");
        assert_eq!(a.events(), usize::from(flies), "an event is lost");
        balanced(&pool);
        assert_eq!(pool.stats().busy, if flies { Bytes::kib(16) } else { Bytes::ZERO });
    });
}

#[test]
fn a_block_at_hand_has_one_taker_and_is_counted_once_all_the_while() {
    check("a block at hand", 3, || {
        let (_, pool) = pool(Growth::Closed);
        pool.reserve(Bytes::kib(16)).unwrap();
        let mut a = client(&pool);
        let lent = a.lend(Bytes::kib(16), Name::new("a")).unwrap();
        a.give_back(lent.block, Some(event(1))).unwrap();
        assert_eq!(a.settle(&mut |_| Ok(true), &mut |_| {}).unwrap(), 1);
        let other = {
            let (pool, mut b) = (pool.clone(), client(&pool));
            loom::thread::spawn(move || {
                let lent = b.lend(Bytes::kib(8), Name::new("b"));
                let stats = pool.stats();
                let sum = stats.lent + stats.free + stats.busy + stats.quarantined;
                assert_eq!(sum, stats.pinned, "{stats}");
                if let Ok(lent) = lent {
                    assert_eq!(lent.after, None, "another client's event");
                    assert!(stats.lent <= Bytes::kib(8), "a byte has two borrowers: {stats}");
                    b.give_back(lent.block, None).unwrap();
                }
            })
        };
        // Without the lock, unless the other one has been there.
        if let Ok(lent) = a.lend(Bytes::kib(13), Name::new("a")) {
            assert_eq!(lent.after, None);
            drop(lent);
        }
        other.join().unwrap();
        balanced(&pool);
        a.reclaim_quarantined().unwrap();
        assert_eq!((pool.stats().free, a.held()), (Bytes::kib(16), Bytes::ZERO));
    });
}

#[test]
fn threads_that_grow_the_pool_at_once_share_the_budget() {
    check("growth", 3, || {
        let (books, pool) = pool(Growth::Allowed);
        let work = |pool: PinnedPool| {
            move || {
                let mut client = client(&pool);
                for _ in 0..2 {
                    match client.lend(Bytes::kib(40), Name::new("x")) {
                        Ok(lent) => client.give_back(lent.block, None).unwrap(),
                        Err(error) => assert_eq!(error.kind(), Kind::OverBudget, "{error}"),
                    }
                }
            }
        };
        let other = loom::thread::spawn(work(pool.clone()));
        work(pool.clone())();
        other.join().unwrap();
        balanced(&pool);
        let known = books.0.lock().unwrap().values().sum::<u64>();
        assert_eq!(pool.stats().pinned, Bytes(known));
    });
}

#[test]
fn a_reservation_a_lend_and_a_trim_at_once_lose_nothing_and_all_end() {
    check("a reservation", 2, || {
        let (books, pool) = pool(Growth::Allowed);
        let reservation = pool.reserve_in_background(Bytes::kib(48)).unwrap();
        let other = {
            let pool = pool.clone();
            loom::thread::spawn(move || {
                let mut client = client(&pool);
                // More than is reserved: it waits for the end, gives that back, and pins itself.
                let lent = client.lend(Bytes::kib(56), Name::new("x")).unwrap();
                client.give_back(lent.block, None).unwrap();
            })
        };
        pool.trim();
        reservation.wait().unwrap();
        assert_eq!(reservation.progress().state, State::Done);
        other.join().unwrap();
        balanced(&pool);
        pool.trim();
        assert_eq!((pool.stats().pinned, books.0.lock().unwrap().len()), (Bytes::ZERO, 0));
    });
}

#[test]
fn a_reservation_that_is_cancelled_while_somebody_else_pins_ends_and_takes_no_turn() {
    check("a cancel before the turn", 2, || {
        let (books, pool) = pool(Growth::Allowed);
        let other = {
            let pool = pool.clone();
            loom::thread::spawn(move || pool.reserve(Bytes::kib(16)))
        };
        let Ok(reservation) = pool.reserve_in_background(Bytes::kib(32)) else { return };
        reservation.cancel();
        let ready = reservation.wait().unwrap();
        other.join().unwrap().unwrap();
        balanced(&pool);
        assert!(pool.stats().pinned >= ready);
        assert_eq!(pool.stats().pinned, Bytes(books.0.lock().unwrap().values().sum()));
    });
}

#[test]
fn a_reservation_that_is_cancelled_or_whose_pool_goes_ends_and_keeps_nothing() {
    for cancelled in [true, false] {
        let name = if cancelled { "a cancel" } else { "a pool that goes" };
        check(name, 3, move || {
            let (books, pool) = pool(Growth::Allowed);
            let reservation = pool.reserve_in_background(Bytes::kib(64)).unwrap();
            if cancelled {
                reservation.cancel();
                let ready = reservation.wait().unwrap();
                balanced(&pool);
                assert_eq!(pool.stats().pinned, ready);
                // What it did not take is in the budget again.
                assert_eq!(pool.reserve(Bytes(BUDGET)).unwrap(), Bytes(BUDGET) - ready);
                drop(pool);
            } else {
                drop(pool);
                reservation.wait().unwrap();
                // The thread may still be on its way out.
                while !books.0.lock().unwrap().is_empty() {
                    loom::thread::yield_now();
                }
            }
            assert!(books.0.lock().unwrap().is_empty(), "something stays page-locked");
        });
    }
}
