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
use super::batches::{Batch, Gathered};
use super::events::COPY_IN_URGENT;
use super::tables::Table;
use crate::backend::{Arg, Backend, Piece};
use crate::copy::{CopyFailed, End, Job, Left};
use crate::error::{Error, Kind, Misuse, Result};
use crate::pack::{self, Item, Layout, PACK, Part, Strip, UNPACK};
use crate::pinned::Block;
use crate::storage::Inward;
use crate::stream::{Point, none_free};
use crate::trace::{Access, Actor, Site, Use};
use crate::unit::{Bytes, DeviceRange, Key, Name, PinnedRange, StorageId, StreamId};

/// Room for one batch at a time, and the tables that kernels read.
#[derive(Debug, Default)]
pub(super) struct Packer {
    pub(super) layout: Layout,
    pub(super) cut: Vec<Item>,
    parts: Vec<Part>,
    pinned: Vec<PinnedRange>,
    args: Vec<Arg>,
    pub(super) bytes: Vec<u8>,
    /// Page-locked tables.
    pub(super) tables: Vec<Table>,
    /// Pieces of a batch that no kernel moves.
    pieces: Vec<Piece>,
    /// The driver cannot load the kernels.
    pub(super) has_no_kernels: bool,
}

/// No storage: nobody is told when a batch's copy is done.
const NOBODY: StorageId = StorageId(Key { owner: 0, index: u32::MAX, generation: u32::MAX });

impl Engine {
    /// Copies the strips' bytes into one pinned block, in the order of `compute`. They stay where
    /// they are; before they are written or freed, call [`Engine::gathered`].
    ///
    /// # Errors
    /// `Usage(Empty)`, `Usage(Overlap)` and `Usage(TooLarge)` for strips, and `Usage(OutOfRange)`
    /// and `Usage(WrongDevice)` for rows that leave their allocations or are on another device, as
    /// far as the driver tells; `Usage` for streams;
    /// `OverBudget` where the pool has no room; `Busy` where the lane is full, no event is free, or
    /// sixteen batches are under way and this one has more rows than `transfers_max`;
    /// driver errors.
    /// Nothing was enqueued, or `compute` is ordered behind it.
    pub fn gather(
        &mut self,
        strips: &[Strip],
        compute: StreamId,
        name: impl Into<Name>,
    ) -> Result<Batch> {
        const OP: &str = "gather";
        let name = name.into();
        let _range = self.marks.begin(OP, name);
        self.begin(OP)?;
        let on = self.open_stream(compute, OP)?;
        let named = |error: Error| error.at(name);
        let len = self.packer.layout.plan(strips).map_err(named)?;
        self.check_rows().map_err(named)?;
        if !self.may_go_out()? {
            let is_full = self.out.is_full(self.options.lane());
            let short = if is_full { crate::copy::full(OP) } else { none_free() };
            return self.seen(Err(short.at(name).bytes(len)));
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
            Ok(end) => {
                self.copied_batch(name, None);
                let gathered = Gathered { name, len, shape, out: end.seq };
                Ok(self.batches.begin(block, gathered))
            }
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
        let lane = self.out.stream();
        self.order_behind_one(lane, on, Site::ProducerDone).map_err(refused)?;
        self.after.extend(reused.clone().map(|point| (point, Site::BlockReuseWait)));
        self.packer.cut_for(block).map_err(refused)?;
        // No kernel reaches memory that is not page-locked: its rows are copied one by one.
        let table = match block.is_pageable() {
            true => None,
            false => self.table().map_err(refused)?,
        };
        let (limits, blocks_max) = (self.options.lane(), self.options.pack_blocks_max);
        let Engine { out, backend, events, packer, after, timeline, timers, .. } = self;
        let timers = timeline.has_room().then_some(timers);
        let (stream, bytes) = (out.stream(), packer.layout.bytes());
        let batch_row_bytes_max = self.options.batch_row_bytes_max;
        let Packer { cut, parts, args, tables, pieces, has_no_kernels, .. } = packer;
        let read = table.map(|index| (&tables[index].block, Access::Read));
        let mut work = |backend: &mut dyn Backend| {
            for part in parts.iter() {
                let items = &cut[part.first..part.first + part.count];
                if let (Some((table, access)), false) = (read, *has_no_kernels) {
                    let block = Arg::Pinned(Access::Write, part.pinned);
                    pack::args(entries(table, part)?, block, items, access, args);
                    let grid = pack::grid(items.len(), blocks_max);
                    match backend.launch(&PACK, grid, args, stream) {
                        Err(error) if is_without(&error) => {
                            *has_no_kernels |= error.misuse() == Some(Misuse::BadKernel);
                        }
                        launched => {
                            launched?;
                            continue;
                        }
                    }
                }
                pieces_of(part, items, pieces)?;
                if is_batch(pieces, batch_row_bytes_max) {
                    backend.copy_out_batch(pieces, stream).map_err(|failed| failed.error)?;
                    continue;
                }
                for Piece { pinned, device } in pieces.iter() {
                    backend.copy_out(*pinned, *device, stream)?;
                }
            }
            Ok(())
        };
        let job = Job { storage: NOBODY, after, work: Some(&mut work), timers };
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
        self.own(batch, OP)?;
        self.open_stream(compute, OP)?;
        let Some(end) = self.out.end_of(batch.of.out) else { return Ok(()) };
        let waited = end.point.wait(&mut self.backend, compute, Site::ReleaseWait);
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
        let _range = self.marks.begin(OP, batch.of.name);
        self.begin(OP)?;
        self.own(batch, OP)?;
        let on = self.open_stream(compute, OP)?;
        let name = batch.of.name;
        let named = |error: Error| error.at(name);
        let len = self.packer.layout.plan(strips).map_err(named)?;
        if (len, self.packer.layout.shape()) != (batch.of.len, batch.of.shape) {
            return Err(Error::usage(Misuse::LengthMismatch, OP).at(name).bytes(len));
        }
        self.check_rows().map_err(named)?;
        self.free_events(COPY_IN_URGENT)?;
        if !self.may_come_in(Inward::Urgent)? {
            return Err(crate::copy::full(OP).at(name).bytes(len));
        }
        self.overtakes();
        let submitted = self.submit_scatter(batch, on);
        self.after.clear();
        let (left, error) = match submitted {
            Ok(end) => {
                self.copied_batch(name, Some(Inward::Urgent));
                (Left::Until(end), None)
            }
            Err(CopyFailed { left, error }) => (left, Some(error.at(name).bytes(len))),
        };
        match (left, &error) {
            (Left::Until(end), _) => {
                batch.last_in = Some(end.seq);
                let site = if error.is_some() { Site::FreeAfterCopyIn } else { Site::ReaderWait };
                self.pass(&end.point, compute, site)?;
            }
            (Left::Unmarked, Some(error)) => return Err(self.give_up(error)),
            (Left::Unmarked | Left::Nothing, _) => {}
        }
        match error {
            Some(error) => self.seen(Err(error)),
            None => {
                let noted = self.note_items(compute, Access::Read);
                self.seen(noted)
            }
        }
    }

    fn submit_scatter(&mut self, batch: &Batch, on: usize) -> std::result::Result<End, CopyFailed> {
        let refused = CopyFailed::before;
        let compute = self.ledgers[on].stream;
        let block = self.own(batch, "scatter").map_err(refused)?;
        self.after.clear();
        let free = self.events.mark(&mut self.backend, compute).map_err(refused)?;
        self.after.push((free, Site::TargetFree));
        let out = self.out.end_of(batch.of.out);
        self.after.extend(out.map(|out| (out.point.clone(), Site::RefillAfterCopyOut)));
        // Through the copy engine to the device, and from there by a kernel: a kernel that reads
        // over the link is the slower one.
        self.packer.whole();
        let table = self.table().map_err(refused)?;
        let staging = match table {
            Some(_) => self.staging(batch.of.len).map_err(refused)?,
            None => None,
        };
        let (limits, blocks_max) = (self.options.lane(), self.options.pack_blocks_max);
        let stream = self.urgent.stream();
        let mut is_refused = false;
        let ended = match (table, staging) {
            (Some(index), Some(staging)) => {
                let Engine { urgent, backend, events, packer, after, timeline, timers, .. } = self;
                let timers = timeline.has_room().then_some(timers);
                let Packer { cut, parts, args, tables, has_no_kernels, .. } = packer;
                let table = &tables[index].block;
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
                            is_refused = is_without(&error);
                            return Err(error);
                        }
                    }
                    Ok(())
                };
                let job = Job { storage: NOBODY, after, work: Some(&mut work), timers };
                urgent.copy_in(backend, events, limits, job, staging, block)
            }
            _ => self.scatter_each(block),
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
            Err(failed) if is_refused => {
                // What was enqueued reached the staging bytes alone.
                self.scatter_each(block).map_err(|each| match each.left {
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
        let Engine { urgent, backend, events, packer, after, timeline, timers, .. } = self;
        let timers = timeline.has_room().then_some(timers);
        let (stream, bytes) = (urgent.stream(), packer.layout.bytes());
        let batch_row_bytes_max = self.options.batch_row_bytes_max;
        let Packer { cut, parts, pieces, .. } = packer;
        let mut work = |backend: &mut dyn Backend| {
            for part in parts.iter() {
                let items = &cut[part.first..part.first + part.count];
                pieces_of(part, items, pieces)?;
                if is_batch(pieces, batch_row_bytes_max) {
                    backend.copy_in_batch(pieces, stream).map_err(|failed| failed.error)?;
                    continue;
                }
                for Piece { pinned, device } in pieces.iter() {
                    backend.copy_in(*device, *pinned, stream)?;
                }
            }
            Ok(())
        };
        let job = Job { storage: NOBODY, after, work: Some(&mut work), timers };
        urgent.work(backend, events, limits, job, bytes)
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
    /// Tables whose last kernel is known done are idle, and hold no event.
    pub(super) fn free_events(&mut self) {
        self.tables.iter_mut().for_each(Table::free_event);
    }

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

/// Both ends of the copies that move a part's items. A row is cut into several items for a kernel's
/// sake; those are one copy again.
fn pieces_of(part: &Part, items: &[Item], pieces: &mut Vec<Piece>) -> Result<()> {
    pieces.clear();
    for item in items {
        let pinned = part.pinned.part(Bytes(item.offset), item.range.len())?;
        match pieces.last_mut() {
            Some(Piece { pinned: before, device })
                if before.end() == pinned.at().0 && device.end() == item.range.at().0 =>
            {
                *before = PinnedRange::new(before.at(), before.len() + pinned.len())?;
                *device = DeviceRange::new(device.at(), device.len() + item.range.len())?;
            }
            _ => pieces.push(Piece { pinned, device: item.range }),
        }
    }
    Ok(())
}

/// Is it the refusal of a kernel that cannot be had, for good or for want of device memory?
fn is_without(error: &Error) -> bool {
    error.misuse() == Some(Misuse::BadKernel) || error.kind() == Kind::OutOfMemory
}

/// Are they handed to the driver as one? Of large ones each copy's start is nothing beside it.
fn is_batch(pieces: &[Piece], row_bytes_max: Bytes) -> bool {
    let bytes: u64 = pieces.iter().map(|piece| piece.pinned.len().0).sum();
    pieces.len() > 1 && bytes / pieces.len() as u64 <= row_bytes_max.0
}

/// A part's entries in a table.
fn entries(table: &Block, part: &Part) -> Result<PinnedRange> {
    let bytes = |count: usize| Bytes(pack::ENTRY_BYTES.0 * count as u64);
    table.trunk(bytes(part.first), bytes(part.count))
}
