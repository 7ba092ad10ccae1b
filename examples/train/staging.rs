//! A little pinned memory for what the host gives the device each step, and reads of it.
//!
//! What it is not: the pool that layers' inputs move to.
//!
//! Invariant: the host touches no byte of which a copy is in flight; `trainer` sees to that.
//!
//! ```text
//!   slot 0 { text | hash, loss }   slot 1 { text | hash, loss }      steps take turns
//! ```
//!
//! `trainer` uses it.

use lightering::backend::Backend;
use lightering::pinned::{Block, Budget, Client, PinnedPool, PoolOptions};
use lightering::{Bytes, Error, Misuse, Name, PinnedRange, Result};

/// Memory is pinned in multiples of this.
const GRAIN: u64 = 1 << 21;

/// Pinned memory of the steps in flight.
pub(crate) struct Staging {
    client: Client,
    block: Block,
}

impl Staging {
    /// Pins `len` bytes, all zero.
    pub(crate) fn new(backend: &mut dyn Backend, len: Bytes) -> Result<Staging> {
        let bytes = Bytes(len.0.saturating_mul(2).next_multiple_of(GRAIN));
        let options = PoolOptions {
            budget: Budget::Bytes(bytes),
            arena_bytes: bytes,
            arena_bytes_max: bytes,
            ..PoolOptions::default()
        };
        let pool = PinnedPool::new(backend.pinner(), options)?;
        let mut client = pool.client(backend.fence(), Bytes::MAX)?;
        let mut block = client.lend(len, Name::new("staging"))?.block;
        block.write(Bytes::ZERO, &vec![0; len.to_usize()?])?;
        Ok(Staging { client, block })
    }

    /// The device's address of a part.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Result<PinnedRange> {
        let range = self.block.trunk(Bytes(offset), Bytes(len))?;
        if range.len() == Bytes(len) {
            return Ok(range);
        }
        let error = Error::usage(Misuse::OutOfRange, "staging").bytes(Bytes(len));
        Err(error.detail("a part does not lie in one registration"))
    }

    /// Writes a part that no copy is reading.
    pub(crate) fn write(&mut self, offset: u64, from: &[u8]) -> Result<()> {
        self.block.write(Bytes(offset), from)
    }

    /// Reads a part that no copy is writing.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.block.read(Bytes(offset), into)
    }

    /// Gives the memory back; no copy of it is in flight.
    pub(crate) fn close(mut self) -> Result<()> {
        self.client.give_back(self.block, None).map_err(Error::from)
    }
}
