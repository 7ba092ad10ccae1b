//! Many small or strided ranges of a framework's at once: out into one block, and back.
//!
//! What it is not: a storage. The engine keeps no books of the ranges; whoever gathers them says
//! where they are to go again.
//!
//! Invariant: the same edges as for a storage: a gather is ordered behind what the caller's stream
//! was asked to do (E1), a scatter behind the gather (E4) and behind the caller's stream (E5), the
//! reader behind the scatter (E6). Where no kernel can be had each item is copied by itself.
//!
//! ```text
//!   compute  ..producer..|E1|                            |E5|        wait(E6) |==reader==|
//!   out      wait |=pack=| end           urgent    wait(E4) |=copy=|=unpack=| end --^
//! ```
//!
//! Part of the engine.

use super::Engine;
use crate::backend::{Arg, Backend};
use crate::copy::{CopyFailed, End, Job, Left};
use crate::error::{Error, Kind, Misuse, Result};
use crate::pack::{self, Item, Layout, PACK, Part, Strip, UNPACK};
use crate::pinned::Block;
use crate::stream::Point;
use crate::trace::{Access, Actor, Site, Use};
use crate::unit::{Bytes, DeviceRange, Key, Name, PinnedRange, StorageId, StreamId};

/// Bytes gathered into one pinned block. Give it to [`Engine::discard`] in the end: a dropped one
/// puts its block into the pool's quarantine.
#[derive(Debug)]
#[must_use = "discard it in the end"]
pub struct Batch {
    block: Block,
    name: Name,
    len: Bytes,
    shape: u64,
    out: End,
    last_in: Option<Point>,
}

impl Batch {
    /// Pinned bytes that it takes: those gathered, each row at a multiple of 16.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// Never: a batch has bytes.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }
}

/// Room for one batch at a time, and the tables that kernels read.
#[derive(Debug, Default)]
pub(super) struct Packer {
    layout: Layout,
    cut: Vec<Item>,
    parts: Vec<Part>,
    pinned: Vec<PinnedRange>,
    args: Vec<Arg>,
    bytes: Vec<u8>,
    /// Page-locked tables, each with the end of the last kernel that reads it.
    tables: Vec<(Block, Option<Point>)>,
    /// The driver cannot load the kernels.
    has_no_kernels: bool,
}

/// The most tables; more batches at once are copied item by item.
const TABLES_MAX: usize = 16;
const TABLE_BYTES_MIN: u64 = 64 << 10;
/// No storage: nobody is told when a batch's copy is done.
const NOBODY: StorageId = StorageId(Key { owner: 0, index: u32::MAX, generation: u32::MAX });

impl Engine {
    /// Copies the strips' bytes into one pinned block, in the order of `compute`. They stay where
    /// they are; before they are written or freed, call [`Engine::gathered`].
    ///
    /// # Errors
    /// `Usage(Empty)`, `Usage(Overlap)` and `Usage(TooLarge)` for strips; `Usage` for streams;
    /// `OverBudget` where the pool has no room; `Busy` where the lane is full; driver errors.
    /// Nothing was enqueued, or `compute` is ordered behind it.
    pub fn gather(
        &mut self,
        strips: &[Strip],
        compute: StreamId,
        name: impl Into<Name>,
    ) -> Result<Batch> {
        const OP: &str = "gather";
        self.begin(OP)?;
        let (on, name) = (self.open_stream(compute, OP)?, name.into());
        let named = |error: Error| error.at(name);
        let len = self.packer.layout.plan(strips).map_err(named)?;
        self.free_events()?;
        if self.out.is_full(self.options.lane()) {
            self.poll_out()?;
        }
        if self.out.is_full(self.options.lane()) {
            return Err(crate::copy::full(OP).at(name).bytes(len));
        }
        let lent = self.lend(len, name);
        let lent = self.seen(lent)?;
        let reused = lent.after.and_then(|event| self.unhold(event));
        let mut block = lent.block;
        block.mark_written(len)?;
        let (shape, submitted) =
            (self.packer.layout.shape(), self.submit_gather(&block, on, &reused));
        self.after.clear();
        match submitted {
            Ok(out) => Ok(Batch { block, name, len, shape, out, last_in: None }),
            Err(CopyFailed { error, left }) => {
                let error = error.at(name).bytes(len);
                match left {
                    Left::Nothing => self.give_back(block, reused)?,
                    Left::Until(end) => {
                        self.give_back(block, Some(end.point.clone()))?;
                        self.pass(&end.point, compute, Site::ReleaseWait)?;
                    }
                    Left::Unmarked => {
                        // The block is dropped, and so in quarantine.
                        self.stats.leaked_on_purpose_bytes += len.0;
                        return Err(self.give_up(&error));
                    }
                }
                self.seen(Err(error))
            }
        }
    }

    fn submit_gather(
        &mut self,
        block: &Block,
        on: usize,
        reused: &Option<Point>,
    ) -> std::result::Result<End, CopyFailed> {
        let refused = CopyFailed::before;
        let compute = self.ledgers[on].stream;
        self.after.clear();
        self.note_items(compute, Access::Write).map_err(refused)?;
        let produced = self.events.mark(&mut self.backend, compute).map_err(refused)?;
        self.after.push((produced, Site::ProducerDone));
        self.after.extend(reused.clone().map(|point| (point, Site::BlockReuseWait)));
        self.packer.cut_for(block).map_err(refused)?;
        // No kernel reaches memory that is not page-locked: its rows are copied one by one.
        let table = match block.is_pageable() {
            true => None,
            false => self.table().map_err(refused)?,
        };
        let (limits, blocks_max) = (self.options.lane(), self.options.pack_blocks_max);
        let Engine { out, backend, events, packer, after, .. } = self;
        let (stream, bytes) = (out.stream(), packer.layout.bytes());
        let Packer { cut, parts, args, tables, has_no_kernels, .. } = packer;
        let read = table.map(|index| (&tables[index].0, Access::Read));
        let mut work = |backend: &mut dyn Backend| {
            for part in parts.iter() {
                let items = &cut[part.first..part.first + part.count];
                if let (Some((table, access)), false) = (read, *has_no_kernels) {
                    let block = Arg::Pinned(Access::Write, part.pinned);
                    pack::args(entries(table, part)?, block, items, access, args);
                    let grid = pack::grid(items.len(), blocks_max);
                    match backend.launch(&PACK, grid, args, stream) {
                        Err(error) if error.misuse() == Some(Misuse::BadKernel) => {
                            *has_no_kernels = true;
                        }
                        launched => {
                            launched?;
                            continue;
                        }
                    }
                }
                for item in items {
                    let to = part.pinned.part(Bytes(item.offset), item.range.len())?;
                    backend.copy_out(to, item.range, stream)?;
                }
            }
            Ok(())
        };
        let job = Job { storage: NOBODY, after, work: Some(&mut work), timers: None };
        let ended = out.work(backend, events, limits, job, bytes);
        self.table_used(table, &ended);
        ended
    }

    /// Orders `compute` behind a batch's gather, on the device: what it does next may write or free
    /// the bytes gathered.
    ///
    /// # Errors
    /// `Usage` for streams, and for a batch of another engine; driver errors.
    pub fn gathered(&mut self, batch: &Batch, compute: StreamId) -> Result<()> {
        const OP: &str = "gathered";
        self.begin(OP)?;
        self.open_stream(compute, OP)?;
        let waited = batch.out.point.wait(&mut self.backend, compute, Site::ReleaseWait);
        self.seen(waited)
    }

    /// Copies a batch's bytes to strips of the same shape, for a reader that will be enqueued on
    /// `compute` next; what they overwrite was used last in the order of `compute`. The batch stays
    /// as it is, and may be scattered again.
    ///
    /// # Errors
    /// As [`Engine::gather`]; `Usage(LengthMismatch)` for rows of other lengths than were gathered.
    pub fn scatter(
        &mut self,
        batch: &mut Batch,
        strips: &[Strip],
        compute: StreamId,
    ) -> Result<()> {
        const OP: &str = "scatter";
        self.begin(OP)?;
        self.must_own(batch, OP)?;
        let on = self.open_stream(compute, OP)?;
        let name = batch.name;
        let named = |error: Error| error.at(name);
        let len = self.packer.layout.plan(strips).map_err(named)?;
        if (len, self.packer.layout.shape()) != (batch.len, batch.shape) {
            return Err(Error::usage(Misuse::LengthMismatch, OP).at(name).bytes(len));
        }
        self.free_events()?;
        if self.urgent.is_full(self.options.lane()) {
            self.poll_in(crate::storage::Inward::Urgent)?;
        }
        if self.urgent.is_full(self.options.lane()) {
            return Err(crate::copy::full(OP).at(name).bytes(len));
        }
        let submitted = self.submit_scatter(batch, on);
        self.after.clear();
        let (left, error) = match submitted {
            Ok(end) => (Left::Until(end), None),
            Err(CopyFailed { left, error }) => (left, Some(error.at(name).bytes(len))),
        };
        match (left, &error) {
            (Left::Until(end), _) => {
                batch.last_in = Some(end.point.clone());
                let site = if error.is_some() { Site::FreeAfterCopyIn } else { Site::ReaderWait };
                self.pass(&end.point, compute, site)?;
            }
            (Left::Unmarked, Some(error)) => return Err(self.give_up(error)),
            (Left::Unmarked | Left::Nothing, _) => {}
        }
        match error {
            Some(error) => self.seen(Err(error)),
            None => self.note_items(compute, Access::Read),
        }
    }

    fn submit_scatter(&mut self, batch: &Batch, on: usize) -> std::result::Result<End, CopyFailed> {
        let refused = CopyFailed::before;
        let compute = self.ledgers[on].stream;
        self.after.clear();
        let free = self.events.mark(&mut self.backend, compute).map_err(refused)?;
        self.after.push((free, Site::TargetFree));
        self.after.push((batch.out.point.clone(), Site::RefillAfterCopyOut));
        // Through the copy engine to the device, and from there by a kernel: a kernel that reads
        // over the link is the slower one.
        self.packer.whole();
        let table = self.table().map_err(refused)?;
        let staging = match table {
            Some(_) => self.staging(batch.len).map_err(refused)?,
            None => None,
        };
        let (limits, blocks_max) = (self.options.lane(), self.options.pack_blocks_max);
        let stream = self.urgent.stream();
        let ended = match (table, staging) {
            (Some(index), Some(staging)) => {
                let Engine { urgent, backend, events, packer, after, .. } = self;
                let Packer { cut, parts, args, tables, has_no_kernels, .. } = packer;
                let table = &tables[index].0;
                let mut work = |backend: &mut dyn Backend| {
                    for part in parts.iter() {
                        pack::args(
                            entries(table, part)?,
                            Arg::Read(staging),
                            cut,
                            Access::Write,
                            args,
                        );
                        let grid = pack::grid(cut.len(), blocks_max);
                        let launched = backend.launch(&UNPACK, grid, args, stream);
                        if let Err(error) = launched {
                            *has_no_kernels |= error.misuse() == Some(Misuse::BadKernel);
                            return Err(error);
                        }
                    }
                    Ok(())
                };
                let job = Job { storage: NOBODY, after, work: Some(&mut work), timers: None };
                urgent.copy_in(backend, events, limits, job, staging, &batch.block)
            }
            _ => self.scatter_each(&batch.block),
        };
        self.table_used(table, &ended);
        if let Some(staging) = staging {
            // The copy into them is on the same stream, with an end or without.
            let freed = self.free(staging, stream);
            if let Err(error) = freed {
                return Err(CopyFailed { error, left: Left::Unmarked });
            }
        }
        match ended {
            Err(failed) if failed.error.misuse() == Some(Misuse::BadKernel) => {
                // What was enqueued reached the staging bytes alone.
                self.scatter_each(&batch.block).map_err(|each| match each.left {
                    // It still reads the block.
                    Left::Nothing => CopyFailed { left: failed.left, ..each },
                    _ => each,
                })
            }
            ended => ended,
        }
    }

    /// A copy for each item.
    fn scatter_each(&mut self, block: &Block) -> std::result::Result<End, CopyFailed> {
        self.packer.cut_for(block).map_err(CopyFailed::before)?;
        let limits = self.options.lane();
        let Engine { urgent, backend, events, packer, after, .. } = self;
        let (stream, bytes) = (urgent.stream(), packer.layout.bytes());
        let Packer { cut, parts, .. } = packer;
        let mut work = |backend: &mut dyn Backend| {
            for part in parts.iter() {
                for item in &cut[part.first..part.first + part.count] {
                    let from = part.pinned.part(Bytes(item.offset), item.range.len())?;
                    backend.copy_in(item.range, from, stream)?;
                }
            }
            Ok(())
        };
        let job = Job { storage: NOBODY, after, work: Some(&mut work), timers: None };
        urgent.work(backend, events, limits, job, bytes)
    }

    fn must_own(&self, batch: &Batch, op: &'static str) -> Result<()> {
        if self.client.lent(&batch.block) {
            return Ok(());
        }
        let error = Error::usage(Misuse::Foreign, op).at(batch.name);
        Err(error.detail("another engine gathered it"))
    }

    /// Ends a batch; its block goes back, busy while a copy uses it.
    ///
    /// # Errors
    /// `Usage` for a batch of another engine.
    pub fn discard(&mut self, batch: Batch) -> Result<()> {
        self.begin("discard")?;
        self.must_own(&batch, "discard")?;
        let Batch { block, out, last_in, .. } = batch;
        // A scatter is behind the gather.
        self.give_back(block, Some(last_in.unwrap_or(out.point)))
    }

    /// Device bytes in the order of the urgent lane; `None` where there is no room.
    fn staging(&mut self, len: Bytes) -> Result<Option<DeviceRange>> {
        let taken = self.backend.alloc_device(len, self.urgent.stream());
        match self.seen(taken) {
            Ok(at) => DeviceRange::new(at, len).map(Some),
            Err(error) if error.kind() == Kind::OutOfMemory => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the table of the items that were cut; `None` where they are better copied one by one.
    fn table(&mut self) -> Result<Option<usize>> {
        let rows = self.packer.layout.rows().max(1);
        let average = self.packer.layout.bytes().0 / rows as u64;
        let is_off = self.options.pack_blocks_max == 0 || self.packer.has_no_kernels;
        if is_off || average > self.options.pack_row_bytes_max.0 {
            return Ok(None);
        }
        let len = pack::ENTRY_BYTES.0 * self.packer.cut.len() as u64;
        let Some(index) = self.idle_table(Bytes(len))? else { return Ok(None) };
        let Packer { cut, bytes, tables, .. } = &mut self.packer;
        pack::table(cut, bytes);
        let block = &mut tables[index].0;
        let pinned = block.trunk(Bytes::ZERO, Bytes(len))?;
        let noted = self.backend.note(Actor::Host, &[Use::write(pinned)]);
        block.write(Bytes::ZERO, bytes)?;
        self.seen(noted)?;
        Ok(Some(index))
    }

    /// A table that no kernel reads, in one registration.
    fn idle_table(&mut self, len: Bytes) -> Result<Option<usize>> {
        for index in 0..self.packer.tables.len() {
            let (block, last) = &self.packer.tables[index];
            if block.len() < len {
                continue;
            }
            let idle = match last {
                Some(point) => point.done(&mut self.backend, Site::BlockIdleQuery),
                None => Ok(true),
            };
            if self.seen(idle)? {
                return Ok(Some(index));
            }
        }
        if self.packer.tables.len() == TABLES_MAX {
            return Ok(None);
        }
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
        self.packer.tables.push((lent.block, None));
        Ok(Some(self.packer.tables.len() - 1))
    }

    fn table_used(&mut self, table: Option<usize>, ended: &std::result::Result<End, CopyFailed>) {
        let end = match ended {
            Ok(end) | Err(CopyFailed { left: Left::Until(end), .. }) => end,
            // No kernel reads it, or none that anybody comes after: the device is given up.
            Err(_) => return,
        };
        if let Some(index) = table {
            self.packer.tables[index].1 = Some(end.point.clone());
        }
    }

    /// At the end, when nothing is under way.
    pub(super) fn end_tables(&mut self) -> Result<()> {
        while let Some((block, _)) = self.packer.tables.pop() {
            self.give_back(block, None)?;
        }
        Ok(())
    }

    fn note_items(&mut self, compute: StreamId, access: Access) -> Result<()> {
        // Thousands of notes that nobody hears would be most of what a verb costs.
        if !self.options.note_uses || !self.backend.is_observed() {
            return Ok(());
        }
        let uses = |item: &Item| Use { access, span: item.range.into() };
        let items = self.packer.layout.items().iter().map(uses);
        for one in items {
            self.backend.note(Actor::Stream(compute), &[one])?;
        }
        Ok(())
    }
}

impl Packer {
    /// Cuts the items where the block's registrations end.
    fn cut_for(&mut self, block: &Block) -> Result<()> {
        self.pinned.clear();
        let mut at = Bytes::ZERO;
        while at < block.len() {
            let part = block.trunk(at, block.len() - at)?;
            self.pinned.push(part);
            at += part.len();
        }
        self.layout.cut(&self.pinned, &mut self.cut, &mut self.parts)
    }

    /// All items as one part, whose block is on the device.
    fn whole(&mut self) {
        self.cut.clear();
        self.cut.extend(self.layout.items());
        self.parts.clear();
        let count = self.cut.len();
        self.parts.push(Part { pinned: PinnedRange::default(), first: 0, count });
    }
}

/// A part's entries in a table.
fn entries(table: &Block, part: &Part) -> Result<PinnedRange> {
    let bytes = |count: usize| Bytes(pack::ENTRY_BYTES.0 * count as u64);
    table.trunk(bytes(part.first), bytes(part.count))
}
