//! A pinner and a fence in memory, with failures by script.
//!
//! Registered pieces get device addresses with gaps between them, in an order unlike the host's, so
//! that whoever takes a host address for a device address, or steps over a piece's end, is caught.
#![allow(dead_code, clippy::unwrap_used)]

use lightering::backend::{Fence, Pageable, Pinner};
use lightering::pinned::{Budget, PinnedPool, PoolOptions};
use lightering::{Bytes, Error, EventId, Key, Kind, Misuse, PinnedPtr, PinnedRange, Result};
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// What a scripted pinner is doing.
#[derive(Debug, Default)]
pub(crate) struct Script {
    /// Device address to host address and length, of what is registered.
    pub(crate) live: BTreeMap<u64, (usize, u64)>,
    /// Of these, what is not page-locked.
    pub(crate) pageable: HashSet<u64>,
    /// Every host address and length ever registered.
    pub(crate) ever: Vec<(usize, u64)>,
    /// Of the registrations that were ended, the host addresses, in that order.
    pub(crate) gone: Vec<usize>,
    pub(crate) registers: usize,
    /// Refuse the register calls with these numbers (from 0).
    pub(crate) refuse: HashSet<usize>,
    /// Refuse registrations that would exceed this in sum.
    pub(crate) wall: Option<u64>,
    /// More than this is page-locked at no moment.
    pub(crate) budget: Option<u64>,
    pub(crate) refuse_unregister: bool,
}

impl Script {
    fn pinned(&self) -> u64 {
        let pinned = self.live.iter().filter(|(at, _)| !self.pageable.contains(at));
        pinned.map(|(_, (_, len))| len).sum()
    }
}

/// Page-locks nothing, and keeps the books as a driver would.
#[derive(Debug)]
pub(crate) struct Paper {
    pub(crate) script: Mutex<Script>,
    pub(crate) piece_max: Bytes,
}

impl Paper {
    pub(crate) fn new(piece_max: Bytes) -> Arc<Paper> {
        Arc::new(Paper { script: Mutex::default(), piece_max })
    }

    pub(crate) fn pinned(&self) -> u64 {
        self.script.lock().unwrap().pinned()
    }

    /// Bytes known and not page-locked.
    pub(crate) fn pageable(&self) -> u64 {
        let script = self.script.lock().unwrap();
        script.pageable.iter().map(|at| script.live[at].1).sum()
    }

    pub(crate) fn registrations(&self) -> usize {
        self.script.lock().unwrap().live.len()
    }

    /// Does the range lie in one registration?
    pub(crate) fn covers(&self, range: PinnedRange) -> bool {
        let script = self.script.lock().unwrap();
        let piece = script.live.range(..=range.at().0).next_back();
        piece.is_some_and(|(at, (_, len))| range.end() <= at + len)
    }
}

impl Pinner for Paper {
    unsafe fn register(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        let mut script = self.script.lock().unwrap();
        let nth = script.registers;
        script.registers += 1;
        assert!(!len.is_zero() && len <= self.piece_max, "a piece of {len}");
        let host = at.as_ptr() as usize;
        assert_eq!(host % 4096, 0);
        for (other, other_len) in script.live.values() {
            assert!(host + len.0 as usize <= *other || other + *other_len as usize <= host);
        }
        let sum: u64 = script.live.values().map(|(_, len)| len).sum();
        if script.refuse.contains(&nth) || script.wall.is_some_and(|wall| sum + len.0 > wall) {
            return Err(Error::new(Kind::OutOfMemory, "register").bytes(len).code(2, "REFUSED"));
        }
        assert!(script.budget.is_none_or(|max| script.pinned() + len.0 <= max), "over the budget");
        let device = (1 << 50) - ((nth as u64 + 1) << 36);
        script.live.insert(device, (host, len.0));
        script.ever.push((host, len.0));
        Ok(PinnedPtr(device))
    }

    fn pageable(&self) -> Option<&dyn Pageable> {
        Some(self)
    }

    fn unregister(&self, at: PinnedPtr) -> Result<()> {
        let mut script = self.script.lock().unwrap();
        if script.refuse_unregister {
            return Err(Error::new(Kind::Lost, "unregister"));
        }
        let ended = script.live.remove(&at.0);
        assert!(ended.is_some(), "unregistered twice, or never registered");
        script.gone.extend(ended.map(|(host, _)| host));
        script.pageable.remove(&at.0);
        Ok(())
    }

    fn registration_max(&self) -> Bytes {
        self.piece_max
    }
}

impl Pageable for Paper {
    unsafe fn register_pageable(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        // What is not page-locked is in no budget.
        let budget = self.script.lock().unwrap().budget.take();
        // SAFETY: the caller's promise is passed on.
        let address = unsafe { self.register(at, len) };
        let mut script = self.script.lock().unwrap();
        script.budget = budget;
        script.pageable.extend(address.as_ref().ok().map(|at| at.0));
        address
    }
}

/// Events of one engine: made, recorded and done by hand.
#[derive(Debug, Default)]
pub(crate) struct Hand {
    pub(crate) owner: u32,
    /// Events whose work is done; others are not.
    pub(crate) done: Mutex<HashSet<u32>>,
    pub(crate) asked: Mutex<Vec<u32>>,
    /// Every answer is an error.
    pub(crate) broken: Mutex<bool>,
}

impl Hand {
    pub(crate) fn new(owner: u32) -> Arc<Hand> {
        Arc::new(Hand { owner, ..Hand::default() })
    }

    pub(crate) fn event(&self, index: u32) -> EventId {
        EventId(Key { owner: self.owner, index, generation: 0 })
    }

    pub(crate) fn finish(&self, event: EventId) {
        self.done.lock().unwrap().insert(event.0.index);
    }

    /// As the owner asks, not as the pool does.
    pub(crate) fn is_done(&self, event: EventId) -> bool {
        self.done.lock().unwrap().contains(&event.0.index)
    }
}

impl Fence for Hand {
    fn done(&self, event: EventId) -> Result<bool> {
        assert_eq!(event.0.owner, self.owner, "a fence is asked about its own events only");
        self.asked.lock().unwrap().push(event.0.index);
        if *self.broken.lock().unwrap() {
            return Err(Error::usage(Misuse::Stale, "query"));
        }
        Ok(self.is_done(event))
    }
}

/// Small arenas, and a machine that says nothing about its limits.
pub(crate) fn small(budget: Bytes) -> PoolOptions {
    PoolOptions {
        budget: Budget::Bytes(budget),
        arena_bytes: Bytes::mib(2),
        arena_bytes_max: Bytes::mib(2),
        machine_root: PathBuf::from("/nonexistent"),
        ..PoolOptions::default()
    }
}

pub(crate) fn pool(budget: Bytes) -> (Arc<Paper>, PinnedPool) {
    let paper = Paper::new(Bytes::gib(1));
    let pool = PinnedPool::new(paper.clone(), small(budget)).unwrap();
    (paper, pool)
}

/// What the kernel says under that word of the mapping behind an address of this process; `None`
/// where nothing is mapped.
pub(crate) fn mapped(at: usize, word: &str) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut is_there = false;
    for line in maps.lines() {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        if let Some((from, to)) = range
            && let Ok(from) = usize::from_str_radix(from, 16)
            && let Ok(to) = usize::from_str_radix(to, 16)
        {
            is_there = from <= at && at < to;
        } else if is_there && let Some(said) = line.strip_prefix(word) {
            return Some(said.trim_start_matches(':').trim().to_string());
        }
    }
    None
}

/// Every trunk of a block.
pub(crate) fn trunks(block: &lightering::pinned::Block) -> Vec<PinnedRange> {
    let mut trunks = Vec::new();
    let mut at = Bytes::ZERO;
    while at < block.len() {
        let trunk = block.trunk(at, Bytes::MAX).unwrap();
        trunks.push(trunk);
        at += trunk.len();
    }
    trunks
}
