//! Batches: who owns what was gathered, and how its block goes back.
//!
//! What it is not: how bytes are gathered and scattered; `batch` has that.
//!
//! Invariant: a batch that ends, on any thread and in any state of its engine, gives its block back
//! to the pool, busy while a copy uses it.
//!
//! ```text
//!   gather -> Batch --discard---------------------> give back, after the last copy
//!                `--dropped--> next verb hears ------^
//! ```
//!
//! Part of the engine.

use super::Engine;
use crate::error::{Error, Kind, Misuse, Result};
use crate::pinned::Block;
use crate::unit::{Bytes, Name};
use crossbeam_channel::{Receiver, Sender};

/// Bytes gathered into one pinned block. [`Engine::discard`] gives the block back at once; of a
/// dropped one, on any thread, the engine learns at its next verb. Where the engine is gone by then
/// the block goes into the pool's quarantine.
#[derive(Debug)]
#[must_use = "dropping a batch gives its bytes up"]
pub struct Batch {
    /// None once it is given back.
    block: Option<Block>,
    pub(super) of: Gathered,
    /// The last scatter's number on its lane.
    pub(super) last_in: Option<u64>,
    ended: Sender<Ended>,
}

/// What a batch was made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gathered {
    pub(super) name: Name,
    pub(super) len: Bytes,
    /// Of the rows: batches of one shape can be scattered alike.
    pub(super) shape: u64,
    /// The gather's number on its lane. Who keeps no `End` holds no event.
    pub(super) out: u64,
}

/// A batch that its owner dropped.
#[derive(Debug)]
pub(super) struct Ended {
    block: Block,
    out: u64,
    last_in: Option<u64>,
}

/// Batches that are alive or were dropped unheard, and how the engine hears of those.
#[derive(Debug)]
pub(super) struct Batches {
    count: usize,
    tell: Sender<Ended>,
    ended: Receiver<Ended>,
}

impl Batches {
    pub(super) fn new() -> Batches {
        // At most one message a batch, each of which has a block: the pool's budget bounds it.
        let (tell, ended) = crossbeam_channel::unbounded();
        Batches { count: 0, tell, ended }
    }

    pub(super) fn begin(&mut self, block: Block, of: Gathered) -> Batch {
        self.count += 1;
        Batch { block: Some(block), of, last_in: None, ended: self.tell.clone() }
    }
}

impl Batch {
    /// Pinned bytes that it takes: those gathered, each row at a multiple of 16.
    pub fn len(&self) -> Bytes {
        self.of.len
    }

    /// Never: a batch has bytes.
    pub fn is_empty(&self) -> bool {
        self.of.len.is_zero()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            // The engine may be gone; then the block is dropped with what could not be told.
            let _ = self.ended.send(Ended { block, out: self.of.out, last_in: self.last_in });
        }
    }
}

impl Engine {
    /// A batch's block, of a batch that this engine gathered.
    pub(super) fn own<'a>(&self, batch: &'a Batch, op: &'static str) -> Result<&'a Block> {
        match &batch.block {
            Some(block) if self.client.lent(block) => Ok(block),
            _ => {
                let error = Error::usage(Misuse::Foreign, op).at(batch.of.name);
                Err(error.detail("another engine gathered it"))
            }
        }
    }

    /// Ends a batch; its block goes back, busy while a copy uses it.
    ///
    /// # Errors
    /// `Usage` for a batch of another engine, to whose next verb it is left.
    pub fn discard(&mut self, mut batch: Batch) -> Result<()> {
        const OP: &str = "discard";
        match self.begin(OP) {
            // Everything was waited for.
            Err(error) if error.kind() == Kind::Closed => {}
            begun => begun?,
        }
        self.own(&batch, OP)?;
        match batch.block.take() {
            Some(block) => {
                self.end_batch(Ended { block, out: batch.of.out, last_in: batch.last_in })
            }
            None => Ok(()),
        }
    }

    fn end_batch(&mut self, ended: Ended) -> Result<()> {
        let Ended { block, out, last_in } = ended;
        self.batches.count = self.batches.count.saturating_sub(1);
        // A scatter is behind the gather.
        let last = match last_in {
            Some(seq) => self.urgent.end_of(seq),
            None => self.out.end_of(out),
        };
        let last_use = last.map(|end| end.point.clone());
        self.give_back(block, last_use)
    }

    /// Hears of batches that were dropped.
    pub(super) fn end_batches(&mut self) -> Result<()> {
        while self.batches.count > 0
            && let Ok(ended) = self.batches.ended.try_recv()
        {
            self.end_batch(ended)?;
        }
        Ok(())
    }
}
