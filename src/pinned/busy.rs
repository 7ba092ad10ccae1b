//! Busy blocks: which event guards which, who may be asked about them, and in what order.
//!
//! What it is not: it asks no fence. It says what to ask, and takes the answers.
//!
//! Invariant: an answer counts for the giving-back it was asked about, or not at all: each has its
//! own ticket. A block that is not done goes behind the others, so one slow copy hides no fast one.
//!
//! ```text
//!   account: busy[shelf] -> b3 b9        by size, for lends      doubts -> (fence asked) -> claim
//!            busy_by_age -> b3 b7 b9     by age, for settle              `- not yet: postpone
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use super::class::shelf;
use super::ledger::{Account, Ledger};
use super::space::{Thread, Use};
use crate::backend::Fence;
use crate::unit::EventId;
use std::sync::Arc;

/// A busy block whose event somebody is about to ask for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    pub(super) id: u32,
    pub(super) ticket: u64,
    pub(super) event: EventId,
}

impl Ledger {
    /// A block is busy until `event` is done; its owner's bytes stay held.
    pub(super) fn put_busy(&mut self, id: u32, event: EventId) {
        self.ticket += 1;
        self.space.reuse(id, Use::Busy);
        let tag = &mut self.tags[id as usize];
        tag.event = Some(event);
        tag.ticket = self.ticket;
        let account = &mut self.accounts[tag.owner as usize];
        account.busy_blocks += 1;
        // Room for every event that may come home, so that sending one home allocates nothing.
        account.returned.reserve(account.busy_blocks);
        let list = &mut account.busy[shelf(self.space.size(id))];
        self.space.push_back(list, Thread::Size, id);
        self.space.push_back(&mut account.busy_by_age, Thread::Age, id);
    }

    /// Busy blocks of others that are worth asking about for a request of `room` bytes, at most
    /// `max` in all: those of that size first, then the oldest. Every account gets its turn.
    pub(super) fn doubts(
        &mut self,
        room: u64,
        except: u32,
        max: usize,
    ) -> Vec<(Doubt, Arc<dyn Fence>)> {
        let others = |(key, a): &(usize, &Account)| *key as u32 != except && a.busy_blocks > 0;
        let others: Vec<&Account> = self.accounts.iter().filter(others).map(|(_, a)| a).collect();
        let mut doubts = Vec::new();
        let Some(share) = max.checked_div(others.len()) else { return doubts };
        self.turn = self.turn.wrapping_add(1);
        for nth in 0..others.len().min(max) {
            let account = others[(self.turn + nth) % others.len()];
            let full = doubts.len() + share.max(1);
            let mut ask = |id: u32| {
                let tag = &self.tags[id as usize];
                if let Some(event) = tag.event.filter(|_| doubts.len() < full) {
                    doubts.push((Doubt { id, ticket: tag.ticket, event }, account.fence.clone()));
                }
            };
            let exact = self.walk(account.busy[shelf(room)], Thread::Size);
            exact.filter(|&id| self.space.size(id) == room).take(max).for_each(&mut ask);
            let aged = self.walk(account.busy_by_age, Thread::Age);
            aged.filter(|&id| self.space.size(id) != room).take(max).for_each(&mut ask);
        }
        doubts
    }

    /// The oldest busy blocks of an account, at most `max`, into `doubts`.
    pub(super) fn oldest(&self, slot: u32, max: usize, doubts: &mut Vec<Doubt>) {
        for id in self.walk(self.accounts[slot as usize].busy_by_age, Thread::Age).take(max) {
            let tag = &self.tags[id as usize];
            doubts.extend(tag.event.map(|event| Doubt { id, ticket: tag.ticket, event }));
        }
    }

    /// The block's event is not done yet: others are asked first next time.
    pub(super) fn postpone(&mut self, doubt: &Doubt) {
        let id = doubt.id;
        let tag = &self.tags[id as usize];
        if tag.ticket != doubt.ticket || self.space.used(id) != Use::Busy {
            return;
        }
        let account = &mut self.accounts[tag.owner as usize];
        self.space.unlink(&mut account.busy_by_age, Thread::Age, id);
        self.space.push_back(&mut account.busy_by_age, Thread::Age, id);
        let list = &mut account.busy[shelf(self.space.size(id))];
        self.space.unlink(list, Thread::Size, id);
        self.space.push_back(list, Thread::Size, id);
    }

    /// Somebody learned that the event of that giving-back is done: the event leaves the books,
    /// the block is the caller's until [`Ledger::shelve`]. `None` where the block went meanwhile.
    pub(super) fn claim(&mut self, id: u32, ticket: u64) -> Option<(u32, EventId)> {
        let tag = self.tags.get(id as usize)?;
        if ticket == 0 || tag.ticket != ticket || self.space.used(id) != Use::Busy {
            return None;
        }
        self.unlist(id);
        let tag = &mut self.tags[id as usize];
        tag.ticket = 0;
        Some((tag.owner, tag.event.take()?))
    }

    /// Takes a busy block out of its owner's lists.
    pub(super) fn unlist(&mut self, id: u32) {
        let account = &mut self.accounts[self.tags[id as usize].owner as usize];
        account.busy_blocks -= 1;
        let list = &mut account.busy[shelf(self.space.size(id))];
        self.space.unlink(list, Thread::Size, id);
        self.space.unlink(&mut account.busy_by_age, Thread::Age, id);
    }
}
