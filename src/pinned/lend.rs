//! A client of the pool: blocks out, blocks in, and the events that guard them on their way.
//!
//! What it is not: it records no event and waits for none. It carries events, and says which one
//! the borrower's lane must wait for.
//!
//! Invariant: every event handed in by `give_back` comes home exactly once, by one of two doors: as
//! `after` of a block lent to the same client again, or through `settle`. Until then its owner does
//! not touch it. (Only the drop of the client keeps events back; its owner is going, too.)
//!
//! ```text
//!   owner          | pool                                      | another client
//!   give_back(b,e) | busy: b guarded by e                      |
//!   lend  <- after=e  b, same size: wait for e on the device   |
//!   settle: e? yes | b idle         -> on_done(e)              | lend <- b
//!                  | fence.done(e): b ------------------------>| lend <- b (no event: e is done)
//!   settle: e? yes |  e waits here  -> on_done(e)              |
//! ```
//!
//! The last few blocks stay at hand (`till.rs`): where a size repeats and each event is done when
//! it is asked about, none of the three takes the pool's lock. Whatever else is asked for goes by
//! the books, and so does all the rest of this client until its busy blocks there are settled.
//!
//! Fences are asked without the pool's lock. The answer counts only if the block still has the
//! ticket of that giving-back; so an event that went home in between, and means other work by now,
//! cannot speak for the block. (Asked about an event that is gone, a fence says so with an error.)
//!
//! Engines use it, each its own.
#![deny(unsafe_code)]

use super::block::Block;
use super::busy::Doubt;
use super::class;
use super::front::Front;
use super::ledger::{Ledger, Loan};
use super::space::Use;
use super::till::Till;
use super::{Growth, Inner, grow, pageable};
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::{Bytes, EventId, Name};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A borrower: one engine's door to the pool.
///
/// ```
/// # use lightering::backend::{Fence, Pinner};
/// # use lightering::{Bytes, EventId, Name, Result, pinned::PinnedPool};
/// # fn copy_with(client: &mut lightering::pinned::Client, event: EventId) -> Result<()> {
/// let lent = client.lend(Bytes::mib(64), Name::new("layer.0"))?;
/// // On the lane: wait for `lent.after`, copy into the block's trunks, record `event`. Then:
/// client.give_back(lent.block, Some(event))?;
/// // Some steps later:
/// // (`poll` asks the backend; `on_done` may record the event anew.)
/// client.settle(&mut |event| Ok(true), &mut |event| {})?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Client {
    inner: Arc<Inner>,
    slot: u32,
    tag: u32,
    /// Blocks that come and go without the pool's lock.
    till: Till,
    /// Events taken out of the pool and not handed on yet.
    home: Vec<EventId>,
    /// Busy blocks to ask about next; what the books say of each counts when it is told them.
    doubts: Vec<Doubt>,
    /// The answers to the first of them.
    answers: Vec<bool>,
    /// Empty, and kept for its room.
    spare: Vec<Doubt>,
    growth: Growth,
    /// The fewest bytes that the system refused to page-lock since growth was set last.
    refused_room: u64,
}

/// A block lent.
#[derive(Debug)]
pub struct Lent {
    /// The block.
    pub block: Block,
    /// Before anything is written to the block or read from it, the borrower's lane waits for this
    /// event on the device. The event is the borrower's again. A block that is given back without
    /// that wait (the copy was never enqueued) is given back with this event as `busy`.
    pub after: Option<EventId>,
    /// Events that came home and were not asked for yet. Where a trace is to show why the block may
    /// be written, `settle` them first: one of them may have guarded it.
    pub returned: usize,
}

/// A block not taken back; nothing changed. Made into an [`Error`], it drops the block.
pub struct Refused {
    /// The block.
    pub block: Block,
    /// Its event, which stays its owner's.
    pub busy: Option<EventId>,
    /// Why.
    pub error: Error,
}

impl Client {
    pub(super) fn new(inner: Arc<Inner>, front: Arc<Front>, slot: u32, tag: u32) -> Client {
        Client {
            inner,
            till: Till::new(front, slot),
            slot,
            tag,
            home: Vec::new(),
            doubts: Vec::new(),
            answers: Vec::new(),
            spare: Vec::new(),
            growth: Growth::Allowed,
            refused_room: u64::MAX,
        }
    }

    /// Lends a block of at least `len` bytes: an idle one of that size; one of this client's own
    /// whose last copy may still run (then with `after`); a part of a free range; one that another
    /// client gave back and whose event its fence calls done; a part of a new arena; where the
    /// options allow it, memory that is not page-locked.
    ///
    /// # Errors
    /// `OverBudget` over the pool's budget, the client's quota or the most blocks, and where growth
    /// is closed: settle, or keep the tensor where it is. `OutOfMemory` and the pinner's errors
    /// where an arena cannot be made. `Usage(Empty)`, `Usage(TooLarge)` for lengths that are none.
    pub fn lend(&mut self, len: Bytes, name: Name) -> Result<Lent> {
        let Some(room) = class::room(len.get()) else {
            let misuse = if len.is_zero() { Misuse::Empty } else { Misuse::TooLarge };
            return Err(Error::usage(misuse, "lend").at(name).bytes(len));
        };
        if let Some(loan) = self.till.lend(room, len.get(), name) {
            let block = Block::new(self.tag, len.get(), loan);
            return Ok(Lent { block, after: None, returned: 0 });
        }
        self.lend_by_books(room, len, name)
    }

    #[inline(never)]
    fn lend_by_books(&mut self, room: u64, len: Bytes, name: Name) -> Result<Lent> {
        let max = self.inner.options.settle_calls_max;
        let found = {
            let mut ledger = self.inner.lock();
            self.till.spill(&mut ledger, &mut self.doubts, max);
            ledger.lend(self.slot, room, len.get(), name)
        };
        let loan = match found {
            Some(loan) => loan,
            None => self.lend_slowly(room, len, name)?,
        };
        let (after, returned) = (loan.after, loan.returned);
        if after.is_some() {
            // The event is the borrower's again, so nobody asks about that giving-back any more.
            self.doubts.clear();
        }
        Ok(Lent { block: Block::new(self.tag, len.get(), loan), after, returned })
    }

    /// Takes a block back. `busy` is the event of the last copy on it, recorded already, and of no
    /// other block; `None` says that no copy on it is in flight.
    ///
    /// # Errors
    /// `Usage(Foreign)` for another client's block, which comes back in the refusal.
    pub fn give_back(
        &mut self,
        mut block: Block,
        busy: Option<EventId>,
    ) -> std::result::Result<(), Refused> {
        if !self.lent(&block) {
            let error = Error::usage(Misuse::Foreign, "give back").bytes(block.len());
            return Err(Refused { block, busy, error });
        }
        if let Some(event) = busy
            && !self.inner.options.scrub
            && self.till.give_back(&mut block, event)
        {
            block.returned = true;
            return Ok(());
        }
        self.give_back_to_books(block, busy)
    }

    #[inline(never)]
    fn give_back_to_books(
        &mut self,
        mut block: Block,
        busy: Option<EventId>,
    ) -> std::result::Result<(), Refused> {
        let scrub = busy.is_none() && self.inner.options.scrub;
        if scrub && let Err(error) = self.inner.scrub(block.id) {
            return Err(Refused { block, busy, error });
        }
        let max = self.inner.options.settle_calls_max;
        let doubt = {
            let mut ledger = self.inner.lock();
            self.till.leave(block.id);
            if busy.is_some() {
                // Those that came back before it are the older ones.
                self.till.spill(&mut ledger, &mut self.doubts, max);
            }
            ledger.give_back(block.id, busy, block.arena.take())
        };
        if let Some(doubt) = doubt
            && self.doubts.len() < max
        {
            self.doubts.push(doubt);
        }
        block.returned = true;
        Ok(())
    }

    /// Brings events home. `poll` is asked about the oldest busy blocks' events and about those
    /// that came home by another client's lend, at most `settle_calls_max` in all; each event that
    /// it calls done goes to `on_done` and is the owner's again, and its block is idle. Returns
    /// how many went home.
    ///
    /// # Errors
    /// The first that `poll` gives. Its event, and all not asked about, stay in the pool.
    pub fn settle(
        &mut self,
        poll: &mut impl FnMut(EventId) -> Result<bool>,
        on_done: &mut impl FnMut(EventId),
    ) -> Result<usize> {
        let max = self.inner.options.settle_calls_max;
        if !self.till.is_direct() && self.home.is_empty() {
            return self.till.settle(max, poll, on_done);
        }
        if self.till.has_some() {
            self.till.spill(&mut self.inner.lock(), &mut self.doubts, max);
        }
        if self.doubts.is_empty() {
            let mut ledger = self.inner.lock();
            ledger.doubtful(self.slot, max, &mut self.home, &mut self.doubts);
        }
        let asked = self.doubts.len().min(max - self.home.len().min(max));
        let mut settled = 0;
        if asked > 0 {
            let error = self.ask(asked, poll).err();
            settled = self.fetch(on_done);
            if let Some(error) = error {
                return Err(error);
            }
        }
        for _ in 0..self.home.len().min(max - asked) {
            let at = self.home.len() - 1;
            if poll(self.home[at])? {
                on_done(self.home.swap_remove(at));
                settled += 1;
            } else {
                // Its fence called it done, its owner does not yet: ask again another time.
                self.home.rotate_right(1);
            }
        }
        Ok(settled)
    }

    /// Learns, without the lock, which of the first doubts are done.
    fn ask(&mut self, max: usize, poll: &mut impl FnMut(EventId) -> Result<bool>) -> Result<()> {
        self.answers.clear();
        for doubt in &self.doubts[..max] {
            self.answers.push(poll(doubt.event)?);
        }
        Ok(())
    }

    /// Tells the books what was learned, in one go; the events that are done go to `on_done`.
    fn fetch(&mut self, on_done: &mut impl FnMut(EventId)) -> usize {
        let scrub = self.inner.options.scrub;
        let mut ledger = self.inner.lock();
        let mut done = 0;
        for at in 0..self.answers.len() {
            let doubt = self.doubts[at];
            if !self.answers[at] {
                ledger.postpone(&doubt);
                continue;
            }
            // Unless another client has it by now; then the event is on its way home.
            if ledger.claim(doubt.id, doubt.ticket).is_some() {
                if !scrub {
                    ledger.shelve(doubt.id);
                }
                self.doubts[done] = doubt;
                done += 1;
            }
        }
        let claimed = std::mem::take(&mut self.doubts);
        self.doubts = std::mem::take(&mut self.spare);
        let max = self.inner.options.settle_calls_max;
        ledger.doubtful(self.slot, max, &mut self.home, &mut self.doubts);
        drop(ledger);
        for doubt in &claimed[..done] {
            if scrub {
                self.inner.scrub_claimed(doubt.id);
            }
            on_done(doubt.event);
        }
        self.spare = claimed;
        done
    }

    /// The owner has seen to it that no copy on any of its dropped blocks is in flight (it synced
    /// the device): they can be lent again. Returns their bytes.
    ///
    /// # Errors
    /// `Usage(Forked)` in a child process that scrubs; the blocks stay quarantined.
    pub fn reclaim_quarantined(&mut self) -> Result<Bytes> {
        let quarantined = self.inner.lock().quarantined(self.slot);
        let mut bytes = 0;
        for id in quarantined {
            if self.inner.options.scrub {
                self.inner.scrub(id)?;
            }
            bytes += self.inner.lock().reclaim(id);
        }
        Ok(Bytes(bytes))
    }

    /// Is the block lent to this client?
    pub fn lent(&self, block: &Block) -> bool {
        block.owner == self.tag
    }

    /// Says whether this client's lends may still grow the pool. What the system refused is asked
    /// for again from now on.
    pub fn set_growth(&mut self, growth: Growth) {
        self.growth = growth;
        self.refused_room = u64::MAX;
    }

    /// May a lend of `room` bytes grow the pool? In a job that is warm what the system refused is
    /// not tried again: each try maps and touches memory, and every lend of a step would wait.
    fn growth_for(&self, room: u64) -> Growth {
        match self.growth {
            Growth::Late if room >= self.refused_room => Growth::Closed,
            growth => growth,
        }
    }

    /// Bytes nobody else can have because of this client: lent, busy and quarantined.
    pub fn held(&self) -> Bytes {
        let ledger = self.inner.lock();
        let idle = ledger.at_hand_of(self.slot).idle;
        Bytes(ledger.accounts[self.slot as usize].held - idle)
    }

    /// Events of this client that are in the pool.
    pub fn events(&self) -> usize {
        let ledger = self.inner.lock();
        let account = &ledger.accounts[self.slot as usize];
        let at_hand = ledger.at_hand_of(self.slot).busy_blocks;
        account.busy_blocks + at_hand + account.returned.len() + self.home.len()
    }

    #[cold]
    fn lend_slowly(&mut self, room: u64, len: Bytes, name: Name) -> Result<Loan> {
        let slot = self.slot;
        let lend = |ledger: &mut Ledger| ledger.lend(slot, room, len.get(), name);
        let doubts = {
            let mut ledger = self.inner.lock();
            // What others have at hand and do not use may be all that is missing.
            ledger.spill_all();
            if let Some(error) = self.refusal(&mut ledger, room) {
                return Err(error.at(name).bytes(len));
            }
            ledger.flush();
            if let Some(loan) = lend(&mut ledger) {
                return Ok(loan);
            }
            ledger.doubts(room, self.slot, self.inner.options.fence_calls_max)
        };
        let calls = doubts.len() as u64;
        for (doubt, fence) in doubts {
            match fence.done(doubt.event) {
                Ok(true) => self.inner.settle_for(&doubt),
                // A fence that fails knows nothing: the block stays busy.
                Ok(false) | Err(_) => self.inner.lock().postpone(&doubt),
            }
        }
        {
            let mut ledger = self.inner.lock();
            ledger.counts.fence_calls += calls;
            if let Some(loan) = lend(&mut ledger) {
                return Ok(loan);
            }
            ledger.flush();
            if let Some(loan) = lend(&mut ledger) {
                return Ok(loan);
            }
        }
        let grown = grow::lend(&self.inner, room, self.growth_for(room), lend);
        if grown.as_ref().is_err_and(|error| error.kind() == Kind::OutOfMemory) {
            self.refused_room = self.refused_room.min(room);
        }
        let grown = match grown {
            Err(error) if matches!(error.kind(), Kind::OverBudget | Kind::OutOfMemory) => {
                let enter = |ledger: &mut Ledger, id| ledger.enter(id, self.slot, len.get(), name);
                pageable::lend(&self.inner, room, enter).and_then(|loan| loan.ok_or(error))
            }
            other => other,
        };
        if grown.is_err() {
            self.inner.lock().counts.lends_refused += 1;
        }
        grown.map_err(|error| error.at(name).bytes(len))
    }

    /// Why no room in the world would help.
    fn refusal(&self, ledger: &mut Ledger, room: u64) -> Option<Error> {
        let account = &ledger.accounts[self.slot as usize];
        let detail = if room > account.quota.saturating_sub(account.held) {
            format!(
                "the client holds {} of its quota of {}, {} of that in {} busy blocks",
                Bytes(account.held),
                Bytes(account.quota),
                Bytes(ledger.space.bytes(Use::Busy)),
                account.busy_blocks
            )
        } else if ledger.blocks >= ledger.block_max {
            format!("{} blocks are out, and that is the most", ledger.blocks)
        } else {
            return None;
        };
        ledger.counts.lends_refused += 1;
        Some(Error::new(Kind::OverBudget, "lend").detail(detail))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The events go with their owner, so this is the last time that anybody may ask.
        let mut doubts = Vec::new();
        let fence = {
            let mut ledger = self.inner.lock();
            self.till.spill(&mut ledger, &mut self.doubts, 0);
            ledger.oldest(self.slot, usize::MAX, &mut doubts);
            Arc::clone(&ledger.accounts[self.slot as usize].fence)
        };
        for doubt in doubts {
            // A panic that left a drop would end the process where another one is under way.
            let done = catch_unwind(AssertUnwindSafe(|| fence.done(doubt.event)));
            if let Ok(Ok(true)) = done {
                self.inner.settle_for(&doubt);
            }
        }
        self.inner.lock().close(self.slot);
    }
}

impl fmt::Debug for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).field("busy", &self.busy).finish()
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        refused.error
    }
}
