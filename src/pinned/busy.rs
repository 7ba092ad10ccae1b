//! Busy blocks: which event guards which, who may be asked about them, and in what order.
//!
//! What it is not: it asks no fence. It says what to ask, and takes the answers.
//!
//! Invariant: an answer counts for the giving-back it was asked about, or not at all: each has its
//! own ticket. A block that is not done goes behind the others, so one slow copy hides no fast one.
//!
//! ```text
//!   account: busy[shelf] -> b3 b9      by size, first back first: for lends
//!            busy_by_age -> b9 b7 b3   longest not asked first: for settle, and for others' lends
//!   doubts -> (fence, without the lock) -- done: claim     -- not yet: postpone (to the end)
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
    pub(super) fn put_busy(&mut self, id: u32, event: EventId) -> Doubt {
        self.ticket += 1;
        self.space.reuse(id, Use::Busy);
        let tag = &mut self.tags[id as usize];
        tag.event = Some(event);
        tag.ticket = self.ticket;
        let account = &mut self.accounts[tag.owner as usize];
        account.busy_blocks += 1;
        account.front.set_direct(true);
        // Room for every event that may come home, so that sending one home allocates nothing.
        account.returned.reserve(account.busy_blocks);
        let list = &mut account.busy[shelf(self.space.size(id))];
        self.space.push_back(list, Thread::Size, id);
        self.space.push_back(&mut account.busy_by_age, Thread::Age, id);
        Doubt { id, ticket: self.ticket, event }
    }

    /// Busy blocks of others that are worth asking about for a request of `room` bytes, at most
    /// `max` in all. Every account gets its turn, and in it the oldest blocks of that size share
    /// the questions with those that were not asked about for the longest time.
    pub(super) fn doubts(
        &mut self,
        room: u64,
        except: u32,
        max: usize,
    ) -> Vec<(Doubt, Arc<dyn Fence>)> {
        self.turn = self.turn.wrapping_add(1);
        let others = |(key, a): &(usize, &Account)| *key as u32 != except && a.busy_blocks > 0;
        let others: Vec<&Account> = self.accounts.iter().filter(others).map(|(_, a)| a).collect();
        let mut doubts = Vec::new();
        let Some(share) = max.checked_div(others.len()).map(|share| share.max(1)) else {
            return doubts;
        };
        let exact_max = (share + self.turn % 2) / 2;
        for nth in 0..others.len().min(max) {
            let account = others[(self.turn + nth) % others.len()];
            let exact = self.walk(account.busy[shelf(room)], Thread::Size);
            let exact = exact.filter(|&id| self.space.size(id) == room).take(exact_max);
            let mut ids: Vec<u32> = exact.collect();
            for id in self.walk(account.busy_by_age, Thread::Age) {
                if ids.len() == share {
                    break;
                }
                if !ids.contains(&id) {
                    ids.push(id);
                }
            }
            let doubt = |id: u32| Some((self.doubt(id)?, Arc::clone(&account.fence)));
            doubts.extend(ids.into_iter().filter_map(doubt));
        }
        doubts
    }

    /// Events that came home, and the oldest busy blocks: what an account may ask about next.
    pub(super) fn doubtful(
        &mut self,
        slot: u32,
        max: usize,
        home: &mut Vec<EventId>,
        doubts: &mut Vec<Doubt>,
    ) {
        home.append(&mut self.accounts[slot as usize].returned);
        self.direct(&self.accounts[slot as usize]);
        doubts.clear();
        self.oldest(slot, max, doubts);
    }

    /// The oldest busy blocks of an account, at most `max`, into `doubts`.
    pub(super) fn oldest(&self, slot: u32, max: usize, doubts: &mut Vec<Doubt>) {
        let aged = self.walk(self.accounts[slot as usize].busy_by_age, Thread::Age);
        doubts.extend(aged.take(max).filter_map(|id| self.doubt(id)));
    }

    fn doubt(&self, id: u32) -> Option<Doubt> {
        let tag = &self.tags[id as usize];
        tag.event.map(|event| Doubt { id, ticket: tag.ticket, event })
    }

    /// The block's event is not done yet: others are asked first next time. By size it keeps its
    /// place: there its owner takes the one that was given back first.
    pub(super) fn postpone(&mut self, doubt: &Doubt) {
        let id = doubt.id;
        let tag = &self.tags[id as usize];
        if tag.ticket != doubt.ticket || self.space.used(id) != Use::Busy {
            return;
        }
        let account = &mut self.accounts[tag.owner as usize];
        self.space.unlink(&mut account.busy_by_age, Thread::Age, id);
        self.space.push_back(&mut account.busy_by_age, Thread::Age, id);
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
