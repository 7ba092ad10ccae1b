//! A reader comes: what it gets, and what its stream waits for.
//!
//! What it is not: it copies nothing itself; `refill.rs` does, where the bytes are away.
//!
//! Invariant: no reader gets a range before its stream is ordered behind the copy-in of it (E6). An
//! eviction whose bytes are still there is taken back, and nothing is copied in.
//!
//! ```text
//!   Resident             the bytes; a stream that did not read them yet waits for their arrival
//!   Evicting             the bytes, live: the eviction is taken back
//!   Refilling            the bytes, behind the copy-in that was begun ahead
//!   Evicted              fetched now (the engine's), or NeedsRoom (a framework's)
//! ```
//!
//! Part of the engine.

use super::Engine;
use crate::backend::Backend;
use crate::copy::End;
use crate::error::Result;
use crate::storage::{Inward, Owner, Residency, Tier};
use crate::trace::{Actor, Site, Use};
use crate::unit::{Bytes, DeviceRange, StorageId, StreamId};

/// What a reader gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquire {
    /// The bytes; the reader's stream is ordered behind their arrival.
    Ready(DeviceRange),
    /// They are not on the device, whose memory is the framework's: take this many bytes and call
    /// [`Engine::refill`].
    NeedsRoom(Bytes),
}

impl Engine {
    /// A storage's bytes for a reader that will be enqueued on `compute` next. Bytes that are still
    /// on the device are used as they are, and their eviction is taken back; bytes fetched ahead
    /// are waited for on the device; those the engine owns are fetched now. Every stream that reads
    /// must acquire for itself. Who will *write* the bytes says so by [`Engine::note`] besides, or
    /// a later [`Engine::evict`] takes the host copy to be as good and the write is lost.
    ///
    /// Storages of [`Engine::alloc`] that were evicted in a known order are fetched ahead from here
    /// as well, within the bounds of [`Options`](super::Options).
    ///
    /// # Errors
    /// `Corrupt` for bytes that are lost; `OutOfMemory` where no room was found; `Busy` where the
    /// lane is full; driver errors. The storage is where it was before.
    pub fn acquire(&mut self, id: StorageId, compute: StreamId) -> Result<Acquire> {
        const OP: &str = "acquire";
        let _range = self.mark(OP, id);
        self.begin(OP)?;
        let on = self.open_stream(compute, OP)?;
        self.make_slots()?;
        let slot = self.slot(id, OP)?;
        let (state, owner, len) = (slot.residency(), slot.owner, slot.len);
        if let Residency::Evicted(Tier::Disk) | Residency::Lost = state {
            return Err(slot.refuse(OP));
        }
        self.policy.forget(id);
        let range = match (state, owner) {
            (Residency::Evicted(_), Owner::Framework) => return Ok(Acquire::NeedsRoom(len)),
            (Residency::Evicted(_), Owner::Engine | Owner::Fixed) => {
                self.refill_owned(id, on)?;
                self.serve(id, on)?
            }
            _ => self.join_readers(id, on)?,
        };
        match state {
            Residency::Resident => self.prefetcher.turned(),
            Residency::Evicting => self.take_back(id)?,
            Residency::Refilling => {
                self.note_asked(id, true)?;
                self.prefetcher.claimed(len);
                self.claim(id, on)?;
            }
            Residency::Evicted(_) | Residency::Lost => {}
        }
        if owner != Owner::Framework {
            self.prefetch_owned(on)?;
        }
        Ok(Acquire::Ready(range))
    }

    /// Refilling to Resident for the reader that asked for the copy-in; back to evicted where its
    /// stream cannot be made to wait.
    pub(super) fn serve(&mut self, id: StorageId, on: usize) -> Result<DeviceRange> {
        let range = match self.join_readers(id, on) {
            Ok(range) => range,
            Err(error) if error.is_lost() => return Err(error),
            Err(error) => {
                self.undo_refill(id, on, true)?;
                return Err(error);
            }
        };
        self.note_asked(id, false)?;
        self.claim(id, on)?;
        Ok(range)
    }

    /// A reader came while the bytes were still there: the eviction is taken back. The copy-out
    /// goes on, and leaves a current host copy behind.
    fn take_back(&mut self, id: StorageId) -> Result<()> {
        self.note_asked(id, true)?;
        let slot = self.slots.get_mut(id.0, "acquire")?;
        slot.become_(Residency::Resident);
        slot.ticket = 0;
        let (home, owner, len) = (slot.home, slot.owner, slot.len);
        self.ledgers[home].leave(owner, len);
        self.stats.forwarded_count += 1;
        Ok(())
    }

    fn note_asked(&mut self, id: StorageId, was_ahead: bool) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "acquire")?;
        if let Some(ordinal) = slot.ordinal.take() {
            self.prefetcher.asked(ordinal);
        }
        self.prefetcher.served(was_ahead);
        Ok(())
    }

    /// Refilling to Resident, for the stream that claims it.
    fn claim(&mut self, id: StorageId, on: usize) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "acquire")?;
        let was_urgent = matches!(slot.ready, Some((Inward::Urgent, _)));
        assert!(slot.readers.has(on), "who claims bytes was ordered behind their arrival");
        slot.become_(Residency::Resident);
        slot.home = on;
        if was_urgent {
            self.stats.stalls += 1;
        }
        Ok(())
    }

    /// Orders a stream behind the bytes' arrival, once, and counts it among their users.
    fn join_readers(&mut self, id: StorageId, on: usize) -> Result<DeviceRange> {
        let slot = self.slots.get(id.0, "acquire")?;
        let Some(range) = slot.range else { return Err(slot.refuse("acquire")) };
        let stream = self.ledgers[on].stream;
        if !slot.readers.has(on)
            && let Some((_, end)) = slot.ready.clone()
        {
            self.wait_timed(stream, &end)?;
        }
        let slot = self.slots.get_mut(id.0, "acquire")?;
        slot.readers.insert(on);
        if self.options.note_uses {
            let noted = self.backend.note(Actor::Stream(stream), &[Use::read(range)]);
            self.seen(noted)?;
        }
        Ok(range)
    }

    /// E6; with `time_stalls` the wait is put between two timed events.
    fn wait_timed(&mut self, stream: StreamId, end: &End) -> Result<()> {
        let timed = self.options.time_stalls && self.stalls.len() < super::STALLS_MAX;
        if !timed || end.point.is_known_done() {
            let waited = end.point.wait(&mut self.backend, stream, Site::ReaderWait);
            return self.seen(waited);
        }
        let before = self.timers.mark(&mut self.backend, stream);
        let waited = end.point.wait(&mut self.backend, stream, Site::ReaderWait);
        self.seen(waited)?;
        let after = self.timers.mark(&mut self.backend, stream);
        // A reader waits all the same where its wait cannot be timed.
        if let (Ok(before), Ok(after)) = (self.seen(before), self.seen(after)) {
            self.stalls.push_back((before, after));
        }
        Ok(())
    }
}
