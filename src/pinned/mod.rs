//! Pinned host memory under one budget: arenas, size classes, and blocks lent to engines.
//!
//! What it is not: it copies nothing and records no event. It does not decide what is worth its
//! bytes; it lends, or says at once why not.
//!
//! Invariant: no byte is with two borrowers; no byte is lent to another client while a copy may be
//! touching it; what is page-locked never exceeds the budget; every byte is lent, free, busy or
//! quarantined. What is not page-locked is so by choice, bounded and counted.
//!
//! ```text
//!   engine A            engine B                      one pool per process
//!   Client (quota)      Client (quota)
//!      lend | ^ give_back   |                          lend.rs    doors, events
//!        a few at hand     a few at hand               till.rs, front.rs  without the lock
//!           v | (event)     v        ^ spill.rs        block.rs   one lent range
//!     +----------- one lock: Ledger -----------+       ledger.rs, busy.rs  who has what
//!     |  idle by size | busy by size and age   |
//!     |  Space: |lent|free |busy|  |lent|free| |       space.rs   split, merge, find
//!     +------------------------------------------+     class.rs   sizes
//!        arena 0          arena 1    (grow, trim)      grow.rs, budget.rs
//!        page-locked in pieces through a Pinner        arena.rs   (unsafe is here only)
//! ```
//!
//! The engine uses it, and whoever sets engines up.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod arena;
mod audit;
mod block;
mod budget;
mod busy;
mod class;
mod front;
mod grow;
mod ledger;
mod lend;
mod numa;
mod options;
mod pageable;
mod reservation;
mod reserve;
mod space;
mod spill;
mod stats;
mod sync;
mod till;

pub use block::Block;
pub use budget::Budget;
pub use lend::{Client, Lent, Refused};
pub use numa::Numa;
pub use options::{Growth, PoolOptions};
pub use reservation::{Progress, Reservation, State};
pub use stats::{Counts, LentRow, Report, Stats};

use crate::backend::{Fence, Pinner};
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::Bytes;
use arena::{Arena, Crew, Linux, Pages, System};
use budget::Machine;
use busy::Doubt;
use front::Front;
use ledger::Ledger;
use numa::Node;
use rustix::process::{Pid, getpid};
use space::Use;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use sync::{Condvar, Mutex, MutexGuard};

/// No registration is larger, whatever the options say.
const PIECE_BYTES_MAX: Bytes = Bytes::gib(2);

/// Bytes of all pools of this process that stay page-locked for good: nobody could say that no copy
/// uses them, or the driver refused to let them go.
pub fn leaked_on_purpose() -> Bytes {
    arena::leaked()
}

/// Page-locked host memory, shared by the engines of a process. A clone is the same pool; the
/// memory stays until the last clone and client is gone; what is lent then stays page-locked for
/// good, since nobody can say when it is idle.
#[derive(Clone, Debug)]
pub struct PinnedPool {
    inner: Arc<Inner>,
}

/// What clones, clients and blocks share.
pub(in crate::pinned) struct Inner {
    /// For arenas, which outlive the pool where a block of theirs is still lent.
    me: Weak<Inner>,
    ledger: Mutex<Ledger>,
    /// Somebody who pins has got further, or is done.
    turned: Condvar,
    pinner: Arc<dyn Pinner>,
    machine: Machine,
    /// Where the pinner's device is near, if that matters.
    node: Option<Node>,
    pages: Arc<Pages>,
    /// The process that opened the pool.
    pid: Pid,
    budget: Bytes,
    /// Bytes of arenas that are gone from the books and yet stay page-locked.
    leaked: Arc<AtomicU64>,
    options: PoolOptions,
    /// Who maps the arenas.
    system: Arc<dyn System>,
}

impl PinnedPool {
    /// Opens a pool; nothing is page-locked yet.
    ///
    /// # Errors
    /// `Usage(BadValue)` for options out of their bounds, a budget of zero among them;
    /// `OutOfMemory` where the machine has nothing to spare.
    pub fn new(pinner: Arc<dyn Pinner>, options: PoolOptions) -> Result<PinnedPool> {
        PinnedPool::on(Arc::new(Linux), pinner, options)
    }

    fn on(
        system: Arc<dyn System>,
        pinner: Arc<dyn Pinner>,
        options: PoolOptions,
    ) -> Result<PinnedPool> {
        options.check()?;
        let machine = match pinner.needs_memory() {
            true => Machine::new(&options.machine_root),
            false => Machine::boundless(),
        };
        let budget = machine.budget(options.budget, options.margin_bytes, options.ranks()?)?;
        let closed = options.growth == Growth::Closed;
        let ledger = Ledger::new(options.block_max, options.arena_bytes.get(), closed);
        let inner = |me: &Weak<Inner>| Inner {
            me: me.clone(),
            ledger: Mutex::new(ledger),
            turned: Condvar::new(),
            node: Node::find(options.numa, &options.machine_root, pinner.pci_address().as_deref()),
            pages: Arc::default(),
            pid: getpid(),
            leaked: Arc::default(),
            pinner,
            machine,
            budget,
            options,
            system,
        };
        Ok(PinnedPool { inner: Arc::new_cyclic(inner) })
    }

    /// Opens a door for one engine, whose events `fence` answers for. The client never holds more
    /// than `quota` bytes, lent, busy and quarantined together.
    ///
    /// # Errors
    /// `Usage(BadValue)` for a quota of zero, `Busy` with `client_max` clients.
    pub fn client(&self, fence: Arc<dyn Fence>, quota: Bytes) -> Result<Client> {
        if quota.is_zero() {
            return Err(Error::usage(Misuse::BadValue, "open client").detail("a quota of zero"));
        }
        let mut ledger = self.inner.lock();
        if ledger.accounts.len() >= self.inner.options.client_max {
            let detail = format!("the pool has {} clients", ledger.accounts.len());
            return Err(Error::new(Kind::Busy, "open client").detail(detail));
        }
        let front = Arc::new(Front::default());
        let (slot, tag) = ledger.open(fence, Arc::clone(&front), quota.get());
        drop(ledger);
        Ok(Client::new(Arc::clone(&self.inner), front, slot, tag))
    }

    /// The most that this pool page-locks.
    pub fn budget(&self) -> Bytes {
        self.inner.budget
    }

    /// Allows or closes growth inside `lend`, for all clients: closed, none of them grows the pool,
    /// whatever [`Client::set_growth`] said.
    pub fn set_growth(&self, growth: Growth) {
        self.inner.lock().closed = growth == Growth::Closed;
    }

    /// Page-locks what is missing for `len` bytes to be free, in one arena, now. Works with growth
    /// closed, too. Returns how many bytes were page-locked for it.
    ///
    /// # Errors
    /// `OverBudget`, `OutOfMemory`, or the pinner's error; nothing changed then.
    pub fn reserve(&self, len: Bytes) -> Result<Bytes> {
        grow::reserve(&self.inner, len).map_err(|error| error.during("reserve"))
    }

    /// As [`PinnedPool::reserve`], by a thread of its own: returns at once. Each piece can be lent
    /// as soon as it is page-locked, the first one after some tens of milliseconds. All of it is
    /// taken out of the budget now. A `lend` that may grow the pool waits for a piece rather than
    /// pin itself.
    ///
    /// # Errors
    /// `OverBudget`; `Busy` while another one runs; `Io` where the system gives no thread. What is
    /// refused later is told by [`Reservation::progress`] and [`Reservation::wait`].
    pub fn reserve_in_background(&self, len: Bytes) -> Result<Reservation> {
        reserve::start(&self.inner, len).map_err(|error| error.during("reserve"))
    }

    /// Gives arenas of which no byte is in use back to the system. Returns their bytes.
    pub fn trim(&self) -> Bytes {
        grow::trim(&self.inner)
    }

    /// The figures of this moment. O(1).
    pub fn stats(&self) -> Stats {
        self.inner.stats(&self.inner.lock())
    }

    /// Walks over all the books, under the pool's lock, and stops the program where they are wrong:
    /// for tests, and for whoever suspects it.
    ///
    /// # Panics
    /// With a sentence that says which invariant is broken.
    pub fn audit(&self) {
        self.inner.lock().audit();
    }

    /// The figures, the largest free range, and the `rows_max` largest lent blocks. Walks all
    /// blocks under the pool's lock.
    pub fn report(&self, rows_max: usize) -> Report {
        let mut ledger = self.inner.lock();
        let (largest, mut rows) = ledger.survey();
        rows.sort_by(|a, b| b.lent.cmp(&a.lent).then_with(|| a.name.as_str().cmp(b.name.as_str())));
        rows.truncate(rows_max);
        let stats = self.inner.stats(&ledger);
        Report { stats, largest_free: Bytes(largest), rows }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        #[cfg(test)]
        till::tests::LOCKS.with(|locks| locks.set(locks.get() + 1));
        // No code of others runs under this lock, so a panic under it is a broken invariant, told
        // already; the blocks of others are still to be taken back.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self, ledger: &Ledger) -> Stats {
        let bytes = |used| Bytes(ledger.space.bytes(used));
        let at_hand = ledger.at_hand();
        let (busy, idle) = (Bytes(at_hand.busy), Bytes(at_hand.idle));
        let mut counts = ledger.counts;
        counts.lends_repeated += at_hand.lends;
        Stats {
            budget: self.budget,
            pinned: Bytes(ledger.pinned()),
            pageable: Bytes(ledger.pageable),
            reserving: ledger.job.as_ref().map_or(Bytes::ZERO, |job| job.missing()),
            node: self.node.as_ref().map(|node| node.number),
            lent: bytes(Use::Lent) - busy - idle,
            free: bytes(Use::Free) + bytes(Use::Idle) + idle,
            busy: bytes(Use::Busy) + busy,
            quarantined: bytes(Use::Quarantined),
            requested: Bytes(ledger.requested - at_hand.booked + at_hand.requested),
            arenas: ledger.seats.len(),
            blocks: ledger.blocks - at_hand.idle_blocks,
            leaked_on_purpose: Bytes(self.leaked.load(Ordering::Relaxed)),
            counts,
        }
    }

    /// Who touches the pages of an arena of `len` bytes.
    fn crew(&self, len: u64, threads_max: usize) -> Crew {
        Crew {
            threads_max,
            backed: self.pinner.needs_memory(),
            node: self.node.clone(),
            pages: Arc::clone(&self.pages),
            reserved: self.options.reserved_huge_pages && self.machine.reserved_huge() >= len,
            dumped: self.options.dump,
            system: Arc::clone(&self.system),
        }
    }

    /// Another client, or the owner's drop, learned that the event is done: the block is idle, the
    /// event waits for its owner.
    fn settle_for(&self, doubt: &Doubt) {
        let mut ledger = self.lock();
        let Some((owner, event)) = ledger.claim(doubt.id, doubt.ticket) else { return };
        ledger.accounts[owner as usize].returned.push(event);
        if self.options.scrub {
            drop(ledger);
            self.scrub_claimed(doubt.id);
        } else {
            ledger.shelve(doubt.id);
        }
    }

    /// Zeroes a block that nobody else has and no copy is touching.
    fn scrub(&self, id: u32) -> Result<()> {
        let (arena, offset, size) = self.lock().place(id);
        arena.zero(offset, size)
    }

    /// Zeroes a claimed block outside the lock, then makes it idle. Bytes that cannot be zeroed are
    /// nobody's for good.
    fn scrub_claimed(&self, id: u32) {
        let scrubbed = self.scrub(id);
        let mut ledger = self.lock();
        match scrubbed {
            Ok(()) => ledger.shelve(id),
            Err(_) => ledger.quarantine_claimed(id),
        }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the lock, and without the books: whoever prints a block wants neither.
        let mut pool = f.debug_struct("PinnedPool");
        pool.field("budget", &self.budget).field("options", &self.options).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Clients and blocks hold the pool, so all that may still be in flight is quarantined.
        let ledger = self.ledger.get_mut().unwrap_or_else(PoisonError::into_inner);
        for seat in ledger.drain_seats() {
            match seat {
                (arena, true) => Arena::leak(arena),
                (arena, false) => drop(arena),
            }
        }
    }
}
