//! The fault guarded against: a step that stands still because memory is being page-locked, or a
//! reservation in the background that overdraws the budget, is lent before it is page-locked,
//! cannot be stopped, or keeps memory after its end.
//!
//! A gate lets one registration through at a time, so nothing here depends on time.
#![allow(clippy::unwrap_used)]

mod pinned_support;

use lightering::backend::Pinner;
use lightering::pinned::{Growth, PinnedPool, PoolOptions, Reservation, State};
use lightering::{Bytes, Error, Kind, Misuse, Name, PinnedPtr, Result};
use pinned_support::{Hand, Paper, small, trunks};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// Registers what it has permits for; waits for more, or panics at the last of its own.
#[derive(Debug)]
struct Gate {
    paper: Arc<Paper>,
    permits: Mutex<usize>,
    /// Registrations that were asked for.
    asked: AtomicUsize,
    changed: Condvar,
    panics: bool,
}

impl Gate {
    fn open(&self, permits: usize) {
        *self.permits.lock().unwrap() += permits;
        self.changed.notify_all();
    }
}

impl Pinner for Gate {
    unsafe fn register(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let permits = self.permits.lock().unwrap();
        let mut permits = self.changed.wait_while(permits, |permits| *permits == 0).unwrap();
        *permits -= 1;
        assert!(!self.panics, "a pinner that panics");
        drop(permits);
        // SAFETY: the caller's promise is passed on.
        unsafe { self.paper.register(at, len) }
    }

    fn unregister(&self, at: PinnedPtr) -> Result<()> {
        self.paper.unregister(at)
    }

    fn registration_max(&self) -> Bytes {
        self.paper.registration_max()
    }
}

/// Pieces of 1 MiB, 2 MiB, 2 MiB ...
fn options(budget: Bytes) -> PoolOptions {
    PoolOptions { piece_bytes: Bytes::mib(1), piece_bytes_max: Bytes::mib(2), ..small(budget) }
}

fn gated(options: PoolOptions) -> (Arc<Gate>, PinnedPool) {
    let gate = Gate {
        paper: Paper::new(Bytes::gib(1)),
        permits: Mutex::new(0),
        asked: AtomicUsize::new(0),
        changed: Condvar::new(),
        panics: false,
    };
    let gate = Arc::new(gate);
    let pool = PinnedPool::new(gate.clone(), options).unwrap();
    (gate, pool)
}

fn ready(reservation: &Reservation, bytes: Bytes) {
    while reservation.progress().ready < bytes {
        std::thread::yield_now();
    }
}

fn books_balance(pool: &PinnedPool) {
    pool.audit();
    let stats = pool.stats();
    assert_eq!(stats.lent + stats.free + stats.busy + stats.quarantined, stats.pinned, "{stats}");
    assert!(stats.pinned + stats.reserving <= stats.budget, "{stats}");
}

#[test]
fn a_piece_is_lent_as_soon_as_it_is_page_locked_and_a_block_may_span_pieces() {
    let (gate, pool) = gated(options(Bytes::mib(16)));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    client.set_growth(Growth::Closed);
    let reservation = pool.reserve_in_background(Bytes::mib(8)).unwrap();
    assert_eq!(pool.stats().reserving, Bytes::mib(8));
    assert!(client.lend(Bytes(1), Name::new("x")).is_err(), "nothing is page-locked yet");
    gate.open(1);
    ready(&reservation, Bytes::mib(1));
    let first = client.lend(Bytes::kib(300), Name::new("first")).unwrap().block;
    assert!(reservation.progress().time_to_first.is_some());
    books_balance(&pool);
    gate.open(1);
    ready(&reservation, Bytes::mib(3));
    let spans = client.lend(Bytes::mib(2), Name::new("spans")).unwrap().block;
    let lens: Vec<u64> = trunks(&spans).iter().map(|trunk| trunk.len().0 >> 10).collect();
    // The first block took 320 KiB of the first piece.
    assert_eq!(lens, [704, 1344]);
    assert!(trunks(&spans).iter().all(|trunk| gate.paper.covers(*trunk)));
    books_balance(&pool);
    assert_eq!(reservation.progress().state, State::Running);
    gate.open(9);
    assert_eq!(reservation.wait().unwrap(), Bytes::mib(8));
    assert_eq!(reservation.progress().state, State::Done);
    let counts = pool.stats().counts;
    assert_eq!((counts.growths, counts.reserves, counts.background_reserves), (0, 0, 1));
    client.give_back(first, None).unwrap();
    client.give_back(spans, None).unwrap();
    assert_eq!(pool.report(0).largest_free, Bytes::mib(8), "the pieces are one range");
    books_balance(&pool);
    assert_eq!(pool.trim(), Bytes::mib(8));
    assert_eq!(gate.paper.registrations(), 0);
}

#[test]
fn what_is_promised_to_a_reservation_is_nobody_elses() {
    let (gate, pool) = gated(options(Bytes::mib(8)));
    let reservation = pool.reserve_in_background(Bytes::mib(8)).unwrap();
    let busy = pool.reserve_in_background(Bytes::mib(1)).unwrap_err();
    assert_eq!(busy.kind(), Kind::Busy, "{busy}");
    gate.open(1);
    ready(&reservation, Bytes::mib(1));
    // Growth waits for the turn, and finds that the budget has room for no second 8 MiB.
    let late = {
        let pool = pool.clone();
        std::thread::spawn(move || pool.reserve(Bytes::mib(9)).unwrap_err())
    };
    gate.open(9);
    assert_eq!(late.join().unwrap().kind(), Kind::OverBudget);
    assert_eq!(reservation.wait().unwrap(), Bytes::mib(8));
    assert_eq!(pool.reserve_in_background(Bytes::mib(9)).unwrap_err().kind(), Kind::OverBudget);
    let none = pool.reserve_in_background(Bytes::mib(6)).unwrap();
    assert_eq!(none.wait().unwrap(), Bytes::ZERO, "so much is free already");
    books_balance(&pool);
}

#[test]
fn a_lend_that_may_grow_the_pool_takes_the_next_piece_and_pins_nothing_itself() {
    let (gate, pool) = gated(options(Bytes::mib(8)));
    let reservation = pool.reserve_in_background(Bytes::mib(8)).unwrap();
    let borrower = {
        let pool = pool.clone();
        std::thread::spawn(move || {
            let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
            let block = client.lend(Bytes::mib(2), Name::new("x")).unwrap().block;
            let pinned = pool.stats().pinned;
            client.give_back(block, None).unwrap();
            pinned
        })
    };
    gate.open(1);
    ready(&reservation, Bytes::mib(1));
    assert!(!borrower.is_finished(), "1 MiB is no room for 2");
    gate.open(1);
    let pinned = borrower.join().unwrap();
    assert_eq!((pinned, pool.stats().counts.growths), (Bytes::mib(3), 0));
    reservation.cancel();
    gate.open(1);
    reservation.wait().unwrap();
}

#[test]
fn a_cancelled_reservation_keeps_what_is_ready_and_gives_the_rest_of_the_budget_back() {
    let (gate, pool) = gated(options(Bytes::mib(8)));
    let reservation = pool.reserve_in_background(Bytes::mib(8)).unwrap();
    gate.open(1);
    while gate.asked.load(Ordering::SeqCst) < 2 {
        std::thread::yield_now();
    }
    reservation.cancel();
    // The piece that is under way comes to its end.
    gate.open(1);
    assert_eq!(reservation.wait().unwrap(), Bytes::mib(3));
    assert_eq!(reservation.progress().state, State::Cancelled);
    books_balance(&pool);
    assert_eq!((pool.stats().pinned, pool.stats().reserving), (Bytes::mib(3), Bytes::ZERO));
    gate.open(9);
    assert_eq!(pool.reserve(Bytes::mib(8)).unwrap(), Bytes::mib(5));
    assert_eq!(pool.trim(), Bytes::mib(8));
    assert_eq!(gate.paper.registrations(), 0);
}

#[test]
fn a_reservation_that_waits_for_its_turn_ends_as_soon_as_it_is_cancelled() {
    let (gate, pool) = gated(options(Bytes::mib(8)));
    let first = {
        let pool = pool.clone();
        std::thread::spawn(move || pool.reserve(Bytes::mib(1)).unwrap())
    };
    while gate.asked.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    // Somebody pins, and does not get on.
    let reservation = pool.reserve_in_background(Bytes::mib(4)).unwrap();
    assert_eq!(pool.stats().reserving, Bytes::mib(4));
    reservation.cancel();
    assert_eq!(reservation.wait().unwrap(), Bytes::ZERO);
    assert_eq!(reservation.progress().state, State::Cancelled);
    assert_eq!((pool.stats().reserving, gate.asked.load(Ordering::SeqCst)), (Bytes::ZERO, 1));
    // Nothing of the budget is gone, nor the turn of the one who has it.
    let again = pool.reserve_in_background(Bytes::mib(7)).unwrap();
    gate.open(99);
    assert_eq!(first.join().unwrap(), Bytes::mib(1));
    assert_eq!(again.wait().unwrap(), Bytes::mib(7));
    books_balance(&pool);
}

#[test]
fn a_piece_that_the_driver_refuses_ends_the_reservation_and_loses_nothing() {
    let (gate, pool) = gated(options(Bytes::mib(16)));
    gate.paper.script.lock().unwrap().refuse.insert(2);
    gate.open(99);
    let reservation = pool.reserve_in_background(Bytes::mib(10)).unwrap();
    let error = reservation.wait().unwrap_err();
    assert_eq!((error.kind(), error.driver_code()), (Kind::OutOfMemory, Some(2)));
    assert!(error.to_string().contains("10.00 MiB"), "{error}");
    let progress = reservation.progress();
    assert_eq!(progress.state, State::Failed(error));
    assert_eq!((progress.ready, pool.stats().pinned), (Bytes::mib(3), Bytes::mib(3)));
    books_balance(&pool);
    // What is left of it is as good as any.
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    client.set_growth(Growth::Closed);
    let mut block = client.lend(Bytes::mib(3), Name::new("x")).unwrap().block;
    block.write(Bytes::mib(3) - Bytes(1), &[1]).unwrap_err();
    block.write(Bytes::ZERO, &vec![7; 3 << 20]).unwrap();
    client.give_back(block, None).unwrap();
    assert_eq!(pool.trim(), Bytes::mib(3));
    assert_eq!(gate.paper.registrations(), 0);
}

#[test]
fn a_pool_that_goes_ends_its_reservation_and_leaves_nothing_page_locked() {
    let (gate, pool) = gated(options(Bytes::mib(16)));
    let reservation = pool.reserve_in_background(Bytes::mib(15)).unwrap();
    gate.open(1);
    ready(&reservation, Bytes::mib(1));
    drop(pool);
    gate.open(1);
    reservation.wait().unwrap();
    // The thread has let go of the arena when it says that it is over, or does so at once.
    while gate.paper.registrations() > 0 {
        std::thread::yield_now();
    }
    assert!(reservation.progress().ready <= Bytes::mib(3));
}

#[test]
fn a_pinner_that_panics_leaves_neither_a_promise_nor_a_turn_behind() {
    let gate = Gate {
        paper: Paper::new(Bytes::gib(1)),
        permits: Mutex::new(9),
        asked: AtomicUsize::new(0),
        changed: Condvar::new(),
        panics: true,
    };
    let pool = PinnedPool::new(Arc::new(gate), options(Bytes::mib(16))).unwrap();
    let reservation = pool.reserve_in_background(Bytes::mib(15)).unwrap();
    let error: Error = reservation.wait().unwrap_err();
    assert_eq!(error.kind(), Kind::Io, "{error}");
    assert_eq!(pool.stats().reserving, Bytes::ZERO);
    books_balance(&pool);
    // The turn is free: this one gets as far as the pinner.
    let again = pool.reserve_in_background(Bytes::mib(15)).unwrap();
    assert!(again.wait().is_err());
}

#[test]
fn a_client_that_is_warm_grows_nothing_unless_it_opted_in_and_that_is_counted() {
    let (gate, pool) = gated(options(Bytes::mib(16)));
    gate.open(99);
    let mut warm = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut cold = pool.client(Hand::new(2), Bytes::MAX).unwrap();
    warm.set_growth(Growth::Closed);
    let refused = warm.lend(Bytes::mib(2), Name::new("warm")).unwrap_err();
    assert_eq!(refused.kind(), Kind::OverBudget);
    let a = cold.lend(Bytes::mib(2), Name::new("cold")).unwrap().block;
    warm.set_growth(Growth::Late);
    let b = warm.lend(Bytes::mib(2), Name::new("late")).unwrap().block;
    let counts = pool.stats().counts;
    assert_eq!((counts.growths, counts.late_growths, counts.grown_after_close), (2, 1, 0));
    // The pool's own word goes before any client's.
    pool.set_growth(Growth::Closed);
    let refused = warm.lend(Bytes::mib(2), Name::new("closed")).unwrap_err();
    assert_eq!(refused.kind(), Kind::OverBudget);
    cold.give_back(a, None).unwrap();
    warm.give_back(b, None).unwrap();
}

#[test]
fn an_odd_reservation_is_refused_or_does_nothing() {
    let (gate, pool) = gated(options(Bytes::mib(2)));
    let nothing = pool.reserve_in_background(Bytes::ZERO).unwrap();
    assert_eq!(nothing.wait().unwrap(), Bytes::ZERO);
    for len in [Bytes::mib(3), Bytes(1 << 63), Bytes::MAX] {
        let error = pool.reserve_in_background(len).unwrap_err();
        assert_eq!(error.kind(), Kind::OverBudget, "{error}");
    }
    let options = PoolOptions { piece_bytes: Bytes(4095), ..small(Bytes::mib(2)) };
    let error = PinnedPool::new(gate, options).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::BadValue));
    assert!(error.to_string().contains("piece_bytes"), "{error}");
    books_balance(&pool);
}
