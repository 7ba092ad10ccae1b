//! The bounds of a pool, and what they are unless somebody says otherwise.
//!
//! What it is not: it measures nothing; [`Budget::Auto`] is worked out when a pool is opened.
//!
//! Invariant: every bound of the pool is here, with its unit in its name, and is checked once.
//!
//! ```text
//!   PoolOptions --check--> PinnedPool::new --Machine--> budget
//! ```
//!
//! Whoever sets engines up fills it in.
#![deny(unsafe_code)]

use super::PIECE_BYTES_MAX;
use super::budget::Budget;
use super::numa::Numa;
use crate::error::{Error, Misuse, Result};
use crate::unit::Bytes;
use std::path::PathBuf;

/// Whether `lend` may page-lock more memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Growth {
    /// It may: while a job warms up.
    #[default]
    Allowed,
    /// It may, though the job is warm, and that is counted apart. What the system refuses is not
    /// asked for again before growth is set anew, as each step does.
    Late,
    /// It may not: what does not fit is refused at once. `reserve` still grows.
    Closed,
}

/// Every bound of a pool.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// The most that is page-locked.
    pub budget: Budget,
    /// [`Budget::Auto`] leaves this to others, or a quarter of what there is if that is less.
    pub margin_bytes: Bytes,
    /// How many processes share the machine under [`Budget::Auto`]; `None` reads
    /// `LOCAL_WORLD_SIZE`, and means 1 where it is not set.
    pub local_world_size: Option<u32>,
    /// Bytes of memory that is not page-locked, for what the budget has no room for. The host waits
    /// in copies of it until they are done: device memory for speed. 0 unless set.
    pub pageable_bytes_max: Bytes,
    /// Size of the first arena; each further one is twice as large.
    pub arena_bytes: Bytes,
    /// Where the doubling ends. Larger blocks and reserves still get an arena of their size.
    pub arena_bytes_max: Bytes,
    /// The most arenas.
    pub arena_max: usize,
    /// Bytes of an arena's first registration; each further one is twice as large.
    pub piece_bytes: Bytes,
    /// The most bytes of one registration; the pinner may allow less.
    pub piece_bytes_max: Bytes,
    /// The most threads that touch a new arena's pages while somebody waits for it.
    pub touch_threads_max: usize,
    /// The most that do so in the background.
    pub background_threads_max: usize,
    /// Which node's memory to take.
    pub numa: Numa,
    /// Take huge pages that the machine's owner set aside, where there are enough of them.
    pub reserved_huge_pages: bool,
    /// Are the pool's bytes part of a core dump?
    pub dump: bool,
    /// The most clients at a time.
    pub client_max: usize,
    /// The most blocks that are lent, busy or quarantined at a time.
    pub block_max: usize,
    /// The most fence questions of one `lend`.
    pub fence_calls_max: usize,
    /// The most questions of one `settle`.
    pub settle_calls_max: usize,
    /// Set a block's bytes to zero before anybody else can have them.
    pub scrub: bool,
    /// Whether `lend` may grow the pool at first.
    pub growth: Growth,
    /// Under it `proc` and `sys` tell the limits; tests say another one.
    pub machine_root: PathBuf,
}

impl Default for PoolOptions {
    fn default() -> PoolOptions {
        PoolOptions {
            budget: Budget::Auto,
            margin_bytes: Bytes::gib(1),
            local_world_size: None,
            pageable_bytes_max: Bytes::ZERO,
            arena_bytes: Bytes::mib(64),
            arena_bytes_max: Bytes::gib(1),
            arena_max: 4096,
            piece_bytes: Bytes::mib(64),
            piece_bytes_max: Bytes::gib(1),
            touch_threads_max: 16,
            background_threads_max: 4,
            numa: Numa::Near,
            reserved_huge_pages: true,
            dump: true,
            client_max: 64,
            block_max: 1 << 20,
            fence_calls_max: 16,
            settle_calls_max: 64,
            scrub: false,
            growth: Growth::Allowed,
            machine_root: PathBuf::from("/"),
        }
    }
}

impl PoolOptions {
    /// # Errors
    /// `Usage(BadValue)` naming the first option that is out of its bounds.
    pub(super) fn check(&self) -> Result<()> {
        let wrong = [
            (self.local_world_size == Some(0), "local_world_size is zero"),
            (self.arena_bytes.is_zero(), "arena_bytes is zero"),
            (self.arena_bytes_max < self.arena_bytes, "arena_bytes_max is below arena_bytes"),
            (self.arena_bytes_max > Bytes::gib(1 << 20), "arena_bytes_max is over 1 PiB"),
            (self.arena_max == 0, "arena_max is zero"),
            (self.piece_bytes < Bytes::kib(4), "piece_bytes is below 4 KiB"),
            (self.piece_bytes_max < Bytes::kib(4), "piece_bytes_max is below 4 KiB"),
            (self.piece_bytes > PIECE_BYTES_MAX, "piece_bytes is over 2 GiB"),
            (self.piece_bytes_max > PIECE_BYTES_MAX, "piece_bytes_max is over 2 GiB"),
            (self.client_max == 0, "client_max is zero"),
            (self.block_max == 0, "block_max is zero"),
            (self.block_max > 1 << 30, "block_max is over 2^30"),
            (self.settle_calls_max == 0, "settle_calls_max is zero"),
        ];
        match wrong.iter().find(|(is_wrong, _)| *is_wrong) {
            Some((_, why)) => Err(Error::usage(Misuse::BadValue, "open pool").detail(*why)),
            None => Ok(()),
        }
    }

    /// How many processes share the machine.
    ///
    /// # Errors
    /// `Usage(BadValue)` where `LOCAL_WORLD_SIZE` is no number above zero.
    pub(super) fn ranks(&self) -> Result<u32> {
        if let Some(ranks) = self.local_world_size {
            return Ok(ranks);
        }
        match std::env::var("LOCAL_WORLD_SIZE") {
            Err(_) => Ok(1),
            Ok(text) => match text.trim().parse() {
                Ok(ranks) if ranks > 0 => Ok(ranks),
                _ => Err(Error::usage(Misuse::BadValue, "open pool")
                    .detail(format!("LOCAL_WORLD_SIZE is {text:?}"))),
            },
        }
    }
}
