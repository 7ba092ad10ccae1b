//! What leaves the device: a storage offered is too small, kept for now, or to be evicted.
//!
//! What it is not: it moves nothing, and it does not know whether there is room on the host.
//!
//! Invariant: of the storages offered and not used again, the last `keep_last_count` are never
//! named for eviction: those are wanted first in the backward pass.
//!
//! ```text
//!   offer(a) -> wait   offer(b) -> evict a   offer(c) -> evict b        keep_last_count = 1
//! ```
//!
//! The engine asks it.

use crate::storage::Homed;
use crate::unit::{Bytes, StorageId};
use std::collections::VecDeque;

/// Why a storage offered stays on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kept {
    /// It has fewer bytes than are worth a copy.
    TooSmall,
    /// It is among the last ones offered.
    AmongLast,
    /// The pinned-memory budget has no room for it.
    NoPinnedRoom,
    /// The copy-out lane has no room for another copy now, or no event is free.
    LaneFull,
}

impl Kept {
    /// Every reason.
    pub const ALL: [Kept; 4] =
        [Kept::TooSmall, Kept::AmongLast, Kept::NoPinnedRoom, Kept::LaneFull];

    /// The reason in words.
    pub fn words(self) -> &'static str {
        match self {
            Kept::TooSmall => "too small",
            Kept::AmongLast => "among the last",
            Kept::NoPinnedRoom => "no pinned room",
            Kept::LaneFull => "lane full",
        }
    }
}

/// Bounds of what leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyLimits {
    /// The last so many storages offered stay.
    pub keep_last_count: usize,
    /// Storages with fewer bytes stay.
    pub storage_bytes_min: Bytes,
}

/// The storages offered last.
#[derive(Debug)]
pub struct Policy {
    limits: PolicyLimits,
    last: VecDeque<Homed>,
}

/// What to do about an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// The storage offered stays, for good.
    Keep(Kept),
    /// The storage offered stays for now; evict the other one if there is one.
    Evict(Option<Homed>),
}

impl Policy {
    /// A policy that has been offered nothing yet.
    pub fn new(limits: PolicyLimits) -> Policy {
        Policy { limits, last: VecDeque::with_capacity(limits.keep_last_count.min(1024) + 1) }
    }

    /// A storage that will not be used for a while.
    pub fn offer(&mut self, offered: Homed, len: Bytes) -> Advice {
        if len < self.limits.storage_bytes_min {
            return Advice::Keep(Kept::TooSmall);
        }
        // Offered twice, it counts as offered last.
        self.forget(offered.storage);
        self.last.push_back(offered);
        if self.last.len() <= self.limits.keep_last_count {
            return Advice::Evict(None);
        }
        Advice::Evict(self.last.pop_front())
    }

    /// The storage is used again, or gone: it is not among the last any more.
    pub fn forget(&mut self, storage: StorageId) {
        // The one used next is the one offered last, so the search is short.
        if let Some(at) = self.last.iter().rposition(|kept| kept.storage == storage) {
            self.last.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::{Key, StreamId};

    fn homed(index: u32) -> Homed {
        let key = Key { owner: 1, index, generation: 0 };
        Homed { storage: StorageId(key), stream: StreamId(key) }
    }

    fn policy(keep_last_count: usize) -> Policy {
        Policy::new(PolicyLimits { keep_last_count, storage_bytes_min: Bytes(16) })
    }

    #[test]
    fn the_last_ones_stay_and_the_others_leave_in_order() {
        let mut policy = policy(2);
        let advice: Vec<_> = (0..4).map(|i| policy.offer(homed(i), Bytes(16))).collect();
        let evict = |i| Advice::Evict(Some(homed(i)));
        assert_eq!(advice, [Advice::Evict(None), Advice::Evict(None), evict(0), evict(1)]);
    }

    #[test]
    fn small_ones_stay_and_push_nobody_out() {
        let mut policy = policy(1);
        policy.offer(homed(0), Bytes(16));
        assert_eq!(policy.offer(homed(1), Bytes(15)), Advice::Keep(Kept::TooSmall));
        assert_eq!(policy.offer(homed(2), Bytes(16)), Advice::Evict(Some(homed(0))));
    }

    #[test]
    fn one_that_is_used_again_is_not_evicted_later() {
        let mut policy = policy(1);
        policy.offer(homed(0), Bytes(16));
        policy.forget(homed(0).storage);
        assert_eq!(policy.offer(homed(1), Bytes(16)), Advice::Evict(None));
    }

    #[test]
    fn one_that_is_offered_twice_is_among_the_last_once() {
        let mut policy = policy(2);
        policy.offer(homed(0), Bytes(16));
        policy.offer(homed(1), Bytes(16));
        assert_eq!(policy.offer(homed(0), Bytes(16)), Advice::Evict(None));
        policy.forget(homed(0).storage);
        assert_eq!(policy.offer(homed(2), Bytes(16)), Advice::Evict(None));
    }

    #[test]
    fn keeping_none_evicts_at_once() {
        assert_eq!(policy(0).offer(homed(5), Bytes(99)), Advice::Evict(Some(homed(5))));
    }
}
