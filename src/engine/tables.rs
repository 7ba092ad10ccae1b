//! The tables that say to a kernel what lies where in a batch: page-locked, written by the host.
//!
//! What it is not: the batch's bytes, which are in a block of their own.
//!
//! Invariant: the host writes a table only once the last kernel that read it is known done; there
//! are at most [`TABLES_MAX`].
//!
//! ```text
//!   batch 1  |host writes table 1|  kernel reads it ......... done? -> batch 3 may have it
//!   batch 2  |host writes table 2|  kernel reads it ..
//! ```
//!
//! Part of the engine.

use super::Engine;
use super::batch::Packer;
use crate::backend::Backend;
use crate::copy::{CopyFailed, End, Left};
use crate::error::{Error, Kind, Result};
use crate::pack;
use crate::pinned::Block;
use crate::stream::Point;
use crate::trace::{Actor, Site, Use};
use crate::unit::{Bytes, Name};

/// The most tables; of more batches at once small ones are copied item by item.
const TABLES_MAX: usize = 16;
const TABLE_BYTES_MIN: u64 = 64 << 10;

/// A table, and the end of the last kernel that reads it.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) block: Block,
    last: Option<Point>,
}

impl Table {
    pub(super) fn free_event(&mut self) {
        self.last.take_if(|point| point.is_known_done());
    }
}

impl Engine {
    /// Writes the table of the items that were cut; `None` where they are better copied one by one,
    /// or no table can be had. `Busy` where that is only for now and the copies would be more than
    /// may be under way: a driver whose queue is full keeps its caller.
    pub(super) fn table(&mut self) -> Result<Option<usize>> {
        let rows = self.packer.layout.rows().max(1);
        if !self.packs(Bytes(self.packer.layout.bytes().0 / rows as u64)) {
            return Ok(None);
        }
        let len = pack::ENTRY_BYTES.0 * self.packer.cut.len() as u64;
        let Some(index) = self.idle_table(Bytes(len))? else {
            let are_all_read = self.packer.tables.len() == TABLES_MAX;
            if are_all_read && rows > self.options.transfers_max {
                let error = Error::new(Kind::Busy, self.verb);
                return Err(error.detail(format!("{TABLES_MAX} batches are under way")));
            }
            return Ok(None);
        };
        let Packer { cut, bytes, tables, .. } = &mut self.packer;
        pack::table(cut, bytes);
        let block = &mut tables[index].block;
        let pinned = block.trunk(Bytes::ZERO, Bytes(len))?;
        let noted = self.backend.note(Actor::Host, &[Use::write(pinned)]);
        block.write(Bytes::ZERO, bytes)?;
        self.seen(noted)?;
        Ok(Some(index))
    }

    /// Is a kernel the best way for rows of that length?
    fn packs(&self, row: Bytes) -> bool {
        let options = &self.options;
        let has_kernels = options.pack_blocks_max > 0 && !self.packer.has_no_kernels;
        let range = options.batch_row_bytes_min..=options.batch_row_bytes_max;
        let goes_as_batch = range.contains(&row) && self.backend.has_batches();
        has_kernels && row <= options.pack_row_bytes_max && !goes_as_batch
    }

    /// A table that no kernel reads, in one registration. Where there are as many as there may be,
    /// an idle one that is too small makes room for a larger one.
    fn idle_table(&mut self, len: Bytes) -> Result<Option<usize>> {
        let mut small = None;
        for index in 0..self.packer.tables.len() {
            let Table { block, last } = &self.packer.tables[index];
            let fits = block.len() >= len;
            if !fits && small.is_some() {
                continue;
            }
            let idle = match last {
                Some(point) => point.done(&mut self.backend, Site::BlockIdleQuery),
                None => Ok(true),
            };
            match (self.seen(idle)?, fits) {
                (true, true) => return Ok(Some(index)),
                (true, false) => small = Some(index),
                (false, _) => {}
            }
        }
        if self.packer.tables.len() == TABLES_MAX {
            let Some(small) = small else { return Ok(None) };
            let Table { block, last } = self.packer.tables.swap_remove(small);
            self.give_back(block, last)?;
        }
        self.new_table(len)
    }

    fn new_table(&mut self, len: Bytes) -> Result<Option<usize>> {
        let room = Bytes(len.0.next_power_of_two().max(TABLE_BYTES_MIN));
        let lent = match self.lend(room, Name::new("table")) {
            Ok(lent) => lent,
            Err(error) if error.is_retryable() => return Ok(None),
            Err(error) => return self.seen(Err(error)),
        };
        let busy = lent.after.and_then(|event| self.unhold(event));
        let is_whole = lent.block.trunk(Bytes::ZERO, room)?.len() == room;
        if busy.is_some() || !is_whole || lent.block.is_pageable() {
            // The host may not write it yet, or a kernel not read it, or not as one.
            self.give_back(lent.block, busy)?;
            return Ok(None);
        }
        self.packer.tables.push(Table { block: lent.block, last: None });
        Ok(Some(self.packer.tables.len() - 1))
    }

    pub(super) fn table_used(
        &mut self,
        table: Option<usize>,
        ended: &std::result::Result<End, CopyFailed>,
    ) {
        let end = match ended {
            Ok(end) | Err(CopyFailed { left: Left::Until(end), .. }) => end,
            // No kernel reads it, or none that anybody comes after: the device is given up.
            Err(_) => return,
        };
        if let Some(index) = table {
            self.packer.tables[index].last = Some(end.point.clone());
        }
    }

    /// At the end, when nothing is under way.
    pub(super) fn end_tables(&mut self) -> Result<()> {
        while let Some(Table { block, .. }) = self.packer.tables.pop() {
            self.give_back(block, None)?;
        }
        Ok(())
    }
}
