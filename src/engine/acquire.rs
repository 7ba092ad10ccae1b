//! A reader comes: what it gets, and what its stream waits for.
//!
//! What it is not: it copies nothing itself; `refill.rs` does, where the bytes are away.
//!
//! Invariant: no reader gets a range before its stream is ordered behind the copy-in of it (E6). An
//! eviction whose bytes are still there is taken back, and nothing is copied in. Who acquires to
//! write gets bytes whose host copy counts no more (E2: a copy-out that reads them comes first).
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
use crate::storage::{Owner, Residency, Tier};
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
    /// must acquire for itself. Who will *write* the bytes calls [`Engine::acquire_mut`] instead:
    /// a reader's host copy is taken to be as good by the next [`Engine::evict`].
    ///
    /// Storages of [`Engine::alloc`] that were evicted in a known order are fetched ahead from here
    /// as well, within the bounds of [`Options`](super::Options).
    ///
    /// # Errors
    /// `Corrupt` for bytes that are lost; `OutOfMemory` where no room was found; `Busy` where the
    /// lane is full, or no event is free; driver errors. The storage is where it was before.
    pub fn acquire(&mut self, id: StorageId, compute: StreamId) -> Result<Acquire> {
        self.acquire_for(id, compute, false, "acquire")
    }

    /// As [`Engine::acquire`], for work that will **write** the bytes (and may read them): an
    /// optimizer's step, an operator in place. From here on the host copy counts no more: its block
    /// goes back to the pool, and the next eviction copies. What is enqueued on `compute` next
    /// comes behind a copy-out that still reads the bytes; that it comes behind *readers* on other
    /// streams is for their framework to order, as without offload. Each round of writes acquires
    /// for itself: what is written after the next eviction is a new one.
    ///
    /// Where it says [`Acquire::NeedsRoom`] the engine keeps in mind what for: the
    /// [`Engine::refill`] that follows, or whichever verb brings the bytes to a stream, gives the
    /// host copy up.
    ///
    /// # Errors
    /// Those of [`Engine::acquire`].
    pub fn acquire_mut(&mut self, id: StorageId, compute: StreamId) -> Result<Acquire> {
        self.acquire_for(id, compute, true, "acquire_mut")
    }

    fn acquire_for(
        &mut self,
        id: StorageId,
        compute: StreamId,
        will_write: bool,
        op: &'static str,
    ) -> Result<Acquire> {
        let _range = self.mark(op, id);
        self.begin(op)?;
        let on = self.open_stream(compute, op)?;
        self.make_slots()?;
        let slot = self.slot(id, op)?;
        let (state, owner, len) = (slot.residency(), slot.owner, slot.len);
        if let Residency::Evicted(Tier::Disk) | Residency::Lost = state {
            return Err(slot.refuse(op));
        }
        self.policy.forget(id);
        if will_write {
            self.pass_live_copy(id, on)?;
            self.slots.get_mut(id.0, op)?.is_to_be_written = true;
        }
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
                self.claim(id, on, false)?;
            }
            Residency::Evicted(_) | Residency::Lost => {}
        }
        self.writer_came(id, on)?;
        if owner != Owner::Framework {
            self.prefetch_owned(on)?;
        }
        Ok(Acquire::Ready(range))
    }

    /// First of all, as it may be refused: a writer comes behind the copy-out that may still read
    /// the bytes (E2). Those that come home yet have none.
    fn pass_live_copy(&mut self, id: StorageId, on: usize) -> Result<()> {
        let stream = self.ledgers[on].stream;
        match self.slots.get(id.0, self.verb)?.out_of_these().cloned() {
            Some(end) => {
                let waited = end.point.wait(&mut self.backend, stream, Site::LiveWriteWait);
                self.seen(waited)
            }
            None => Ok(()),
        }
    }

    /// The bytes came home. Where somebody asked for them to write them, the host copy goes,
    /// whoever it was that brought them: a copy too many costs time, one too few would cost bytes.
    pub(super) fn writer_came(&mut self, id: StorageId, on: usize) -> Result<()> {
        let slot = self.slots.get_mut(id.0, self.verb)?;
        if !std::mem::take(&mut slot.is_to_be_written) {
            return Ok(());
        }
        let range = slot.range;
        self.drop_copy(id)?;
        if let (true, Some(range)) = (self.options.note_uses, range) {
            let by = Actor::Stream(self.ledgers[on].stream);
            let noted = self.backend.note(by, &[Use::write(range)]);
            self.seen(noted)?;
        }
        Ok(())
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
        self.claim(id, on, true)?;
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
        if let Some(place) = slot.place.take() {
            self.prefetcher.asked(place);
        }
        self.prefetcher.served(was_ahead);
        Ok(())
    }

    /// Refilling to Resident, for the stream that claims it.
    fn claim(&mut self, id: StorageId, on: usize, is_stall: bool) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "acquire")?;
        assert!(slot.readers.has(on), "who claims bytes was ordered behind their arrival");
        slot.become_(Residency::Resident);
        if let (true, Some((inward, end))) = (slot.home != on, &slot.ready) {
            self.front.strays(*inward, end.seq);
        }
        slot.home = on;
        if is_stall {
            self.stats.stalls += 1;
        }
        Ok(())
    }

    /// Orders a stream behind the bytes' arrival, once, and counts it among their users.
    fn join_readers(&mut self, id: StorageId, on: usize) -> Result<DeviceRange> {
        let slot = self.slots.get(id.0, "acquire")?;
        let Some(range) = slot.range else { return Err(slot.refuse(self.verb)) };
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
