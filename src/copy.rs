//! Bytes in motion: one lane per direction, copies cut into trunks, and who is still under way.
//!
//! What it is not: it decides nothing. It does not know why a copy is made or what waits for it.
//!
//! Invariant: whoever asks for a copy gets the [`End`] of whatever was enqueued, even where it
//! failed half way; until that end is passed the block is not idle. A lane's copies end in the
//! order they were given, so their sequence numbers stand for their order.
//!
//! ```text
//!   out     D2H  |trunk|trunk|trunk| point 7 |trunk| point 8      flights: 7, 8
//!   ahead   H2D  |trunk|trunk| point 3                            prefetches
//!   urgent  H2D  |trunk| point 1                                  a reader waits for it
//! ```
//!
//! The engine owns the lanes; nobody else enqueues on them.

use crate::backend::Backend;
use crate::error::{Error, Kind, Misuse, Result};
use crate::pinned::Block;
use crate::stream::{EventPool, Point, Spare};
use crate::trace::Site;
use crate::unit::{Bytes, DeviceRange, StorageId, StreamId};
use std::collections::VecDeque;
use std::fmt;

/// Ticket of one copy in flight. Forgetting it loses nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// Whose bytes move.
    pub storage: StorageId,
    /// Position among the copies of its lane, from 1.
    pub seq: u64,
    /// How many bytes.
    pub bytes: Bytes,
}

/// The end of a copy: where it lies, and its place among the copies of its lane.
#[derive(Clone, Debug)]
pub struct End {
    /// The point its last trunk, and the work that goes with it, has passed.
    pub point: Point,
    /// Its place in the lane, from 1. A lane that passed a later one has passed it.
    pub seq: u64,
}

/// A copy under way.
#[derive(Debug)]
struct Flight {
    storage: StorageId,
    end: End,
    bytes: Bytes,
}

/// Work that goes with a copy: between what the lane waits for and the copy's end.
pub type Work<'a> = &'a mut dyn FnMut(&mut dyn Backend) -> Result<()>;

/// Whose bytes a copy moves, and what else is enqueued for it: in front of the first trunk on the
/// way out, behind the last one on the way in.
pub struct Job<'a> {
    /// The storage.
    pub storage: StorageId,
    /// The work, if any.
    pub work: Option<Work<'a>>,
}

/// Who learns that a copy is done: the storage, and the copy's place in its lane.
pub type Landed<'a> = &'a mut dyn FnMut(StorageId, u64);

/// A stream that carries copies of one direction, and nothing else.
#[derive(Debug)]
pub struct Lane {
    stream: StreamId,
    flights: VecDeque<Flight>,
    bytes_in_flight: Bytes,
    seq_next: u64,
    /// Highest sequence number seen done.
    seq_done: u64,
}

/// Bounds of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneLimits {
    /// A copy is enqueued in pieces of at most this many bytes.
    pub trunk_bytes_max: Bytes,
    /// At most this many copies are under way.
    pub flights_max: usize,
}

/// What went wrong with a copy, and what it leaves behind.
#[derive(Debug)]
pub struct CopyFailed {
    /// The cause.
    pub error: Error,
    /// End of what was enqueued before the failure; `None` where there is nothing.
    pub end: Option<End>,
}

impl Lane {
    /// A lane on a stream of its own.
    ///
    /// # Errors
    /// Those of [`Backend::create_stream`].
    pub fn open(backend: &mut dyn Backend) -> Result<Lane> {
        Ok(Lane {
            stream: backend.create_stream()?,
            flights: VecDeque::new(),
            bytes_in_flight: Bytes::ZERO,
            seq_next: 1,
            seq_done: 0,
        })
    }

    /// Its stream.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// Bytes of copies that were not seen done.
    pub fn bytes_in_flight(&self) -> Bytes {
        self.bytes_in_flight
    }

    /// Copies that were not seen done; each holds an event.
    pub fn flights(&self) -> usize {
        self.flights.len()
    }

    /// Has the copy with this number been seen done? No driver call.
    pub fn is_known_done(&self, seq: u64) -> bool {
        seq <= self.seq_done
    }

    /// Its last copy's end, if any is under way.
    pub fn last(&self) -> Option<&End> {
        self.flights.back().map(|flight| &flight.end)
    }

    /// Is there room for one more copy?
    pub fn is_full(&self, limits: LaneLimits) -> bool {
        self.flights.len() >= limits.flights_max
    }

    /// Orders the lane's later copies behind `point`.
    ///
    /// # Errors
    /// Those of [`Backend::wait`].
    pub fn wait(&self, backend: &mut dyn Backend, point: &Point, site: Site) -> Result<()> {
        point.wait(backend, self.stream, site)
    }

    /// Copies device bytes into a block. Everything is enqueued before it returns.
    ///
    /// # Errors
    /// [`CopyFailed`]: the cause, and the end of what was enqueued.
    pub fn copy_out(
        &mut self,
        backend: &mut dyn Backend,
        events: &mut EventPool,
        limits: LaneLimits,
        job: Job<'_>,
        from: DeviceRange,
        to: &Block,
    ) -> std::result::Result<End, CopyFailed> {
        let stream = self.stream;
        self.run(backend, events, job.storage, |backend, begun| {
            begun.work(backend, job.work)?;
            begun.trunks(backend, from.len(), |backend, at| {
                let trunk = to.trunk(at, limits.trunk_bytes_max.min(from.len() - at))?;
                backend.copy_out(trunk, from.part(at, trunk.len())?, stream)?;
                Ok(trunk.len())
            })
        })
    }

    /// Copies a block's bytes to the device. Everything is enqueued before it returns.
    ///
    /// # Errors
    /// [`CopyFailed`]: the cause, and the end of what was enqueued.
    pub fn copy_in(
        &mut self,
        backend: &mut dyn Backend,
        events: &mut EventPool,
        limits: LaneLimits,
        job: Job<'_>,
        to: DeviceRange,
        from: &Block,
    ) -> std::result::Result<End, CopyFailed> {
        let stream = self.stream;
        self.run(backend, events, job.storage, |backend, begun| {
            begun.trunks(backend, to.len(), |backend, at| {
                let trunk = from.trunk(at, limits.trunk_bytes_max.min(to.len() - at))?;
                backend.copy_in(to.part(at, trunk.len())?, trunk, stream)?;
                Ok(trunk.len())
            })?;
            begun.work(backend, job.work)
        })
    }

    /// Enqueues what `enqueue` does, then the end.
    fn run(
        &mut self,
        backend: &mut dyn Backend,
        events: &mut EventPool,
        storage: StorageId,
        enqueue: impl FnOnce(&mut dyn Backend, &mut Begun) -> Result<()>,
    ) -> std::result::Result<End, CopyFailed> {
        let spare = match events.spare(backend) {
            Ok(spare) => spare,
            Err(error) => return Err(CopyFailed { error, end: None }),
        };
        let mut begun = Begun::default();
        let enqueued = enqueue(backend, &mut begun);
        if !begun.needs_end {
            events.keep(spare);
            let error = enqueued.err().unwrap_or_else(empty);
            return Err(CopyFailed { error, end: None });
        }
        let end = self.end(backend, events, spare, (storage, begun.bytes));
        match (enqueued, end) {
            (Ok(()), Ok(end)) => Ok(end),
            (Err(error), Ok(end)) => Err(CopyFailed { error, end: Some(end) }),
            (enqueued, Err(error)) => {
                let error = enqueued.err().unwrap_or(error);
                self.settle_unmarked(backend);
                Err(CopyFailed { error, end: None })
            }
        }
    }

    fn end(
        &mut self,
        backend: &mut dyn Backend,
        events: &mut EventPool,
        spare: Spare,
        (storage, bytes): (StorageId, Bytes),
    ) -> Result<End> {
        let point = events.mark_with(backend, spare, self.stream)?;
        let end = End { point, seq: self.seq_next };
        self.seq_next += 1;
        self.bytes_in_flight += bytes;
        self.flights.push_back(Flight { storage, end: end.clone(), bytes });
        Ok(end)
    }

    /// Copies run whose end no event marks, since the driver refused to record one. It is the one
    /// place where a verb waits: for a failing driver there is no other proof that the block is
    /// idle. Where even that fails the context is lost, and nothing is touched any more.
    fn settle_unmarked(&mut self, backend: &mut dyn Backend) {
        if backend.sync().is_ok() {
            // Who is told later learns it from the points, which are done now.
            for flight in &self.flights {
                flight.end.point.set_done();
            }
        }
    }

    /// Asks about the oldest copies, at most `asks_max` of them, and forgets those that are done,
    /// each of which `landed` is told.
    ///
    /// # Errors
    /// Those of [`Backend::query`].
    pub fn poll(
        &mut self,
        backend: &mut dyn Backend,
        asks_max: usize,
        landed: Landed<'_>,
    ) -> Result<()> {
        for _ in 0..asks_max {
            match self.flights.front() {
                Some(flight) if flight.end.point.done(backend, Site::TransferQuery)? => {
                    self.pop(landed);
                }
                _ => break,
            }
        }
        Ok(())
    }

    /// Every copy is done: somebody waited for the whole device.
    pub fn set_all_done(&mut self, landed: Landed<'_>) {
        while !self.flights.is_empty() {
            self.pop(landed);
        }
    }

    fn pop(&mut self, landed: Landed<'_>) {
        if let Some(flight) = self.flights.pop_front() {
            flight.end.point.set_done();
            self.seq_done = flight.end.seq;
            self.bytes_in_flight -= flight.bytes;
            landed(flight.storage, flight.end.seq);
        }
    }
}

impl fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_work = self.work.is_some();
        f.debug_struct("Job").field("storage", &self.storage).field("work", &has_work).finish()
    }
}

/// How far a copy came that is being enqueued.
#[derive(Debug, Default)]
struct Begun {
    /// Bytes of the trunks enqueued.
    bytes: Bytes,
    /// Something was enqueued, or may have been.
    needs_end: bool,
}

impl Begun {
    fn work(&mut self, backend: &mut dyn Backend, work: Option<Work<'_>>) -> Result<()> {
        let Some(work) = work else { return Ok(()) };
        // It is of several parts, of which some may be enqueued where it fails.
        self.needs_end = true;
        work(backend)
    }

    fn trunks(
        &mut self,
        backend: &mut dyn Backend,
        len: Bytes,
        mut trunk: impl FnMut(&mut dyn Backend, Bytes) -> Result<Bytes>,
    ) -> Result<()> {
        let mut at = Bytes::ZERO;
        while at < len {
            let moved = trunk(backend, at)?;
            at += moved;
            self.bytes += moved;
            self.needs_end = true;
        }
        Ok(())
    }
}

/// A lane's refusal of one more copy.
pub fn full(op: &'static str) -> Error {
    Error::new(Kind::Busy, op).detail("the lane carries as many copies as it may")
}

fn empty() -> Error {
    Error::usage(Misuse::Empty, "copy")
}
