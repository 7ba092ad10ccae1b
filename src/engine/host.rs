//! What the host may do with a storage's bytes, and what it must say about them.
//!
//! What it is not: a way to wait. Bytes still on their way out are `Busy`.
//!
//! Invariant: the host reads a block only after its copy-out was seen done (E3). A write that a
//! framework notes makes the host copy stale, and is ordered behind a copy-out that still reads the
//! bytes (E2).
//!
//! ```text
//!   note(write x) -> copy-out of x running? the stream waits -> host copy given back -> Resident
//! ```
//!
//! Part of the engine.

use super::Engine;
use crate::backend::Backend;
use crate::error::{Error, Kind, Misuse, Result};
use crate::storage::Residency;
use crate::trace::{Actor, Site, Span, Use};
use crate::unit::{Bytes, DeviceRange, StorageId, StreamId};

impl Engine {
    /// Says that work about to be enqueued on `stream` uses these bytes. A write of a storage's
    /// bytes makes its host copy stale: it is given back, and an eviction is taken back. For bytes
    /// of storages known by name [`Engine::acquire_mut`] says it besides; this is for who knows
    /// ranges only, and for a trace of uses that the engine does not see.
    ///
    /// # Errors
    /// `Usage(State)` for a write of bytes that are being refilled, and for any use of bytes at a
    /// fixed address while they are away: acquire them first. Nothing was noted.
    pub fn note(&mut self, stream: StreamId, uses: &[Use]) -> Result<()> {
        const OP: &str = "note";
        self.begin(OP)?;
        let on = self.stream_index(stream, OP)?;
        // All are looked at before anything changes: a note that is refused is as if not made.
        for one in uses {
            if let Span::Device(range) = one.span {
                self.check_use(range, one.access.is_write())?;
            }
        }
        let written = || uses.iter().filter_map(written_range);
        for range in written() {
            self.each_within(range, |engine, id| engine.behind_copies(id, on))?;
        }
        for range in written() {
            self.each_within(range, |engine, id| engine.written(id, on))?;
        }
        let noted = self.backend.note(Actor::Stream(stream), uses);
        self.seen(noted)
    }

    /// May every storage that shares bytes with `range` be used so? One whose address stays has it
    /// while its bytes are away.
    fn check_use(&self, range: DeviceRange, is_write: bool) -> Result<()> {
        let below = self.ranges.range(..range.end()).rev();
        for (_, (_, id)) in below.take_while(|(_, (end, _))| *end > range.at().0) {
            let slot = self.slots.get(id.0, "note")?;
            let may_be = match slot.residency() {
                Residency::Resident | Residency::Evicting => true,
                Residency::Refilling => !is_write,
                Residency::Evicted(_) => false,
                Residency::Lost => !is_write,
            };
            if !may_be {
                return Err(slot.refuse("note"));
            }
        }
        Ok(())
    }

    /// Every storage that shares bytes with `range`.
    fn each_within(
        &mut self,
        range: DeviceRange,
        each: impl Fn(&mut Engine, StorageId) -> Result<()>,
    ) -> Result<()> {
        let mut end = range.end();
        while let Some((&start, &(storage_end, id))) = self.ranges.range(..end).next_back() {
            if storage_end <= range.at().0 {
                break;
            }
            each(self, id)?;
            end = start;
        }
        Ok(())
    }

    /// Who writes a storage's bytes on that stream comes behind the copies that use them.
    fn behind_copies(&mut self, id: StorageId, on: usize) -> Result<()> {
        let slot = self.slots.get(id.0, "note")?;
        let unseen = slot.ready.as_ref().filter(|_| !slot.readers.has(on));
        let (unseen, out) = (unseen.map(|(_, end)| end).cloned(), slot.out_of_these().cloned());
        let stream = self.ledgers[on].stream;
        for (end, site) in [(unseen, Site::CopyInBeforeWrite), (out, Site::LiveWriteWait)] {
            if let Some(end) = end {
                let waited = end.point.wait(&mut self.backend, stream, site);
                self.seen(waited)?;
            }
        }
        Ok(())
    }

    /// A storage's bytes are about to be written: what was copied of them is of no use.
    fn written(&mut self, id: StorageId, on: usize) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "note")?;
        slot.readers.insert(on);
        // One that ended is on its way to be named, whatever its bytes are.
        if slot.residency() == Residency::Evicting && !slot.is_dropped {
            slot.become_(Residency::Resident);
            slot.ticket = 0;
            let (home, owner, len) = (slot.home, slot.owner, slot.len);
            if let Some(place) = slot.place.take() {
                self.prefetcher.gone(place);
            }
            self.ledgers[home].leave(owner, len);
        }
        self.drop_copy(id)
    }

    /// The host copy goes back to the pool.
    pub(super) fn drop_copy(&mut self, id: StorageId) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "take")?;
        let last_use = slot.last_use();
        slot.sum = None;
        match slot.block.take() {
            Some(block) => self.give_back(block, last_use),
            None => Ok(()),
        }
    }

    /// Copies bytes of a storage's host copy, from `offset` on, into `target`.
    ///
    /// # Errors
    /// `Busy` while the copy-out runs; `Usage(NotThere)` where there is no host copy;
    /// `Usage(OutOfRange)` past its end; `Corrupt` where the bytes are lost.
    pub fn read_host(&mut self, id: StorageId, offset: Bytes, target: &mut [u8]) -> Result<()> {
        const OP: &str = "read_host";
        self.begin(OP)?;
        let slot = self.slot(id, OP)?;
        let (name, len) = (slot.name, slot.len);
        if slot.residency() == Residency::Lost {
            return Err(slot.refuse(OP));
        }
        if slot.block.is_none() {
            return Err(Error::usage(Misuse::NotThere, OP).at(name).bytes(len));
        }
        let wanted = Bytes(target.len() as u64);
        if offset.checked_add(wanted).is_none_or(|end| end > len) {
            let error = Error::usage(Misuse::OutOfRange, OP).at(name).bytes(wanted);
            return Err(error.detail(format!("from byte {} of {len}", offset.0)));
        }
        if let Some(out) = slot.out.clone() {
            let done = out.point.done(&mut self.backend, Site::HostReadQuery);
            if !self.seen(done)? {
                let error = Error::new(Kind::Busy, OP).at(name).bytes(len);
                return Err(error.detail("the copy-out is still running"));
            }
        }
        let slot = self.slots.get(id.0, OP)?;
        let Some(block) = &slot.block else { return Err(slot.refuse(OP)) };
        let mut at = Bytes::ZERO;
        while at < wanted {
            let piece = block.trunk(offset + at, wanted - at)?;
            let noted = self.backend.note(Actor::Host, &[Use::read(piece)]);
            if let Err(error) = noted {
                return self.seen(Err(error));
            }
            at += piece.len();
        }
        block.read(offset, target)
    }

    /// Asks that copies give way to what was enqueued on `stream` until now, such as a collective
    /// that shares the link: copies out and ahead that are begun later wait for it, on the device.
    /// Copies under way go on; a copy that a reader waits for does not give way.
    ///
    /// # Errors
    /// `Usage` for streams; driver errors, after which some copies may give way.
    pub fn give_way(&mut self, stream: StreamId) -> Result<()> {
        const OP: &str = "give_way";
        self.begin(OP)?;
        self.open_stream(stream, OP)?;
        let point = self.orders.mark(&mut self.backend, stream);
        let point = self.seen(point)?;
        let waited = self.out.give_way(&mut self.backend, &point);
        self.seen(waited)?;
        self.ahead_gave_way();
        let waited = self.ahead.give_way(&mut self.backend, &point);
        self.seen(waited)
    }

    /// Gives a resident storage's host copy up, so that others can have the block. The next
    /// eviction copies again.
    ///
    /// # Errors
    /// `Usage(State)` where the bytes are not resident: the host copy is the only one.
    pub fn take(&mut self, id: StorageId) -> Result<()> {
        const OP: &str = "take";
        self.begin(OP)?;
        self.slot(id, OP)?.must_be(Residency::Resident, OP)?;
        self.drop_copy(id)
    }
}

fn written_range(one: &Use) -> Option<DeviceRange> {
    match one.span {
        Span::Device(range) if one.access.is_write() => Some(range),
        _ => None,
    }
}
