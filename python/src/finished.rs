//! Storages whose readers all came, in the order in which the last of them did.
//!
//! What it is not: the choice of what rests; `fetch.rs` makes it.
//!
//! Invariant: what it says of their bytes counts each one alive, and of those that died no more
//! than as many again: a graph that is not kept drops its own in a moment. No call looks at all of
//! them but one in as many.
//!
//! ```text
//!   push --> | oldest .. newest |      pop, while their bytes are more than a window
//! ```
//!
//! The books have one.

use crate::stash::Stash;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

/// A few more than those alive are kept, so that the dead are not looked for at each push.
const DEAD_MIN: usize = 64;

/// Those of one engine.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    /// With their bytes.
    places: VecDeque<(Weak<Stash>, u64)>,
    bytes: u64,
    /// As many places are looked at before the dead are looked for again.
    len_max: usize,
}

impl Finished {
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// Every one, dead or alive.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Weak<Stash>> {
        self.places.iter().map(|(stash, _)| stash)
    }

    pub(crate) fn push(&mut self, stash: &Arc<Stash>) {
        self.drop_oldest_dead();
        if self.places.len() >= self.len_max {
            self.places.retain(|(stash, _)| stash.strong_count() > 0);
            self.bytes = self.places.iter().map(|(_, bytes)| bytes).sum();
            self.len_max = 2 * self.places.len() + DEAD_MIN;
        }
        self.places.push_back((Arc::downgrade(stash), stash.nbytes));
        self.bytes += stash.nbytes;
    }

    /// The oldest one, alive, while they have more bytes than a window.
    pub(crate) fn pop_over(&mut self, window: u64) -> Option<Arc<Stash>> {
        while self.bytes > window {
            let (stash, bytes) = self.places.pop_front()?;
            self.bytes -= bytes;
            if let Some(stash) = stash.upgrade() {
                return Some(stash);
            }
        }
        None
    }

    pub(crate) fn drop_oldest_dead(&mut self) {
        while let Some((stash, bytes)) = self.places.front()
            && stash.strong_count() == 0
        {
            self.bytes -= bytes;
            self.places.pop_front();
        }
    }
}
