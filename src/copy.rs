//! Bytes in motion: one lane per direction, copies cut into trunks, and who is still under way.
//!
//! What it is not: it decides nothing. It does not know why a copy is made or what waits for it.
//!
//! Invariant: whoever asks for a copy gets the [`End`] of whatever was enqueued, even where it
//! failed half way; until that end is passed the block is not idle. Where the driver refuses both
//! the end and the wait for all, the asker learns that instead, and may ask for the end again. A
//! lane's copies end in the order they were given, so their sequence numbers stand for their order.
//!
//! ```text
//!   out     D2H  |==copy==| point 7 |=copy=| point 8          flights: 7, 8
//!   ahead   H2D  |trunk|trunk|trunk| point 3                  prefetches, on streams in turns, and
//!                                                             readers' copies behind their own
//!   urgent  H2D        |copy| point 1                         a reader waits for it, and for none
//! ```
//!
//! The engine owns the lanes; nobody else enqueues on them.

mod failed;
mod turns;

pub use failed::{CopyFailed, Left, full};
pub use turns::After;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::pinned::Block;
use crate::stream::{EventPool, Point, Spare};
use crate::trace::Site;
use crate::unit::{Bytes, DeviceRange, StorageId, StreamId};
use failed::empty;
use std::collections::VecDeque;
use std::fmt;
use turns::Turns;

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
    /// What all of it waits for.
    pub after: &'a After,
    /// The work, if any.
    pub work: Option<Work<'a>>,
    /// Where its times are wanted: the pool of timed events.
    pub timers: Option<&'a mut EventPool>,
}

/// A copy, as a lane sees it before it looks at the bytes.
struct Task<'a> {
    storage: StorageId,
    after: &'a After,
    timers: Option<&'a mut EventPool>,
    len: Bytes,
    limits: LaneLimits,
}

/// Who learns that a copy is done: the storage, and the copy's place in its lane.
pub type Landed<'a> = &'a mut dyn FnMut(StorageId, u64);

/// Carries copies of one direction, and nothing else.
#[derive(Debug)]
pub struct Lane {
    turns: Turns,
    flights: VecDeque<Flight>,
    bytes_in_flight: Bytes,
    seq_next: u64,
    /// Highest sequence number seen done.
    seq_done: u64,
    /// Timed points around the last copy.
    timed: Option<(Point, Point)>,
}

/// Bounds of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneLimits {
    /// A copy is enqueued in pieces of at most this many bytes.
    pub trunk_bytes_max: Bytes,
    /// On a lane that takes turns, one has no more than this, or than a piece.
    pub turn_bytes_max: Bytes,
    /// At most this many copies are under way.
    pub flights_max: usize,
}

impl Lane {
    /// A lane on a stream of its own; or, if it takes turns, on several.
    ///
    /// # Errors
    /// Those of [`Backend::create_stream`].
    pub fn open(backend: &mut dyn Backend, takes_turns: bool) -> Result<Lane> {
        Ok(Lane {
            turns: Turns::open(backend, takes_turns)?,
            flights: VecDeque::new(),
            bytes_in_flight: Bytes::ZERO,
            seq_next: 1,
            seq_done: 0,
            timed: None,
        })
    }

    /// Its streams: one, if it takes no turns.
    pub fn streams(&self) -> &[StreamId] {
        self.turns.streams()
    }

    /// The stream of its next copy.
    pub fn stream(&self) -> StreamId {
        self.turns.stream()
    }

    /// The timed points around the last copy, where there are both; the first lies where all that
    /// the copy waits for was done.
    pub fn take_times(&mut self) -> Option<(Point, Point)> {
        self.timed.take()
    }

    /// Bytes of copies that were not seen done.
    pub fn bytes_in_flight(&self) -> Bytes {
        self.bytes_in_flight
    }

    /// Has the copy with this number been seen done? No driver call.
    pub fn is_known_done(&self, seq: u64) -> bool {
        seq <= self.seq_done
    }

    /// The end of the copy with this number, unless that was seen done. Who keeps the number holds
    /// no event.
    pub fn end_of(&self, seq: u64) -> Option<&End> {
        let nth = seq.checked_sub(self.flights.front()?.end.seq)?;
        self.flights.get(usize::try_from(nth).ok()?).map(|flight| &flight.end)
    }

    /// Its last copy's end, if any is under way.
    pub fn last(&self) -> Option<&End> {
        self.flights.back().map(|flight| &flight.end)
    }

    /// The number of its next copy.
    pub fn seq_next(&self) -> u64 {
        self.seq_next
    }

    /// Is nothing under way? One question, about the last copy; `landed` is told as by
    /// [`Lane::poll`].
    ///
    /// # Errors
    /// Those of [`Backend::query`].
    pub fn is_idle(&mut self, backend: &mut dyn Backend, landed: Landed<'_>) -> Result<bool> {
        let Some(last) = self.flights.back() else { return Ok(true) };
        let is_done = last.end.point.done(backend, Site::TransferQuery)?;
        if is_done {
            self.set_all_done(landed);
        }
        Ok(is_done)
    }

    /// Would the turn be passed on for a copy of `len` bytes, or within it?
    pub fn would_pass_on(&self, len: Bytes, limits: LaneLimits) -> bool {
        let has_turns = self.streams().len() > 1;
        has_turns && (len > limits.turn_bytes_max || self.turns.is_over(len, limits.turn_bytes_max))
    }

    /// The turn is not passed on, for as many bytes again.
    pub fn go_on(&mut self) {
        self.turns.begin();
    }

    /// Has it as many copies under way as it may?
    pub fn is_full(&self, limits: LaneLimits) -> bool {
        self.flights.len() >= limits.flights_max
    }

    /// Orders the lane's later copies behind `point`, on somebody else's behalf.
    ///
    /// # Errors
    /// Those of [`Backend::wait`].
    pub fn give_way(&self, backend: &mut dyn Backend, point: &Point) -> Result<()> {
        let mut streams = self.streams().iter();
        streams.try_for_each(|stream| point.wait(backend, *stream, Site::Outside))
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
        let Job { storage, after, work, timers } = job;
        let task = Task { storage, after, timers, len: from.len(), limits };
        self.run(backend, events, task, |lane, backend, events, begun| {
            begun.work(backend, work)?;
            while begun.bytes < from.len() {
                let (at, left) = (begun.bytes, from.len() - begun.bytes);
                let trunk = to.trunk(at, limits.trunk_bytes_max.min(left))?;
                let (len, max) = (trunk.len(), limits.turn_bytes_max);
                lane.turns.make_room(backend, events, len, max, after)?;
                backend.copy_out(trunk, from.part(at, len)?, lane.stream())?;
                lane.trunk(begun, len);
            }
            Ok(())
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
        let Job { storage, after, work, timers } = job;
        let task = Task { storage, after, timers, len: to.len(), limits };
        self.run(backend, events, task, |lane, backend, events, begun| {
            while begun.bytes < to.len() {
                let (at, left) = (begun.bytes, to.len() - begun.bytes);
                let trunk = from.trunk(at, limits.trunk_bytes_max.min(left))?;
                let (len, max) = (trunk.len(), limits.turn_bytes_max);
                lane.turns.make_room(backend, events, len, max, after)?;
                backend.copy_in(to.part(at, len)?, trunk, lane.stream())?;
                lane.trunk(begun, len);
            }
            begun.work(backend, work)
        })
    }

    /// Enqueues the job's work alone, which moves `bytes`: a lane without turns.
    ///
    /// # Errors
    /// [`CopyFailed`]: the cause, and the end of what was enqueued.
    pub fn work(
        &mut self,
        backend: &mut dyn Backend,
        events: &mut EventPool,
        limits: LaneLimits,
        job: Job<'_>,
        bytes: Bytes,
    ) -> std::result::Result<End, CopyFailed> {
        let Job { storage, after, work, timers } = job;
        let task = Task { storage, after, timers, len: bytes, limits };
        self.run(backend, events, task, |_, backend, _, begun| {
            begun.bytes = bytes;
            begun.work(backend, work)
        })
    }

    fn trunk(&mut self, begun: &mut Begun, len: Bytes) {
        self.turns.enqueued(len);
        begun.bytes += len;
        begun.needs_end = true;
    }

    /// Enqueues what `enqueue` does, then the end.
    fn run(
        &mut self,
        backend: &mut dyn Backend,
        events: &mut EventPool,
        task: Task<'_>,
        enqueue: impl FnOnce(&mut Lane, &mut dyn Backend, &mut EventPool, &mut Begun) -> Result<()>,
    ) -> std::result::Result<End, CopyFailed> {
        let spare = match events.spare(backend) {
            Ok(spare) => spare,
            Err(error) => return Err(CopyFailed::before(error)),
        };
        let mut begun = Begun::default();
        let ordered = self.enter(backend, events, &task);
        let Task { storage, mut timers, .. } = task;
        let from = timers.as_mut().and_then(|timers| timers.mark(backend, self.stream()).ok());
        let enqueued = ordered.and_then(|()| enqueue(self, backend, events, &mut begun));
        if !begun.needs_end {
            events.keep(spare);
            return Err(CopyFailed::before(enqueued.err().unwrap_or_else(empty)));
        }
        let end = self.end(backend, events, spare, (storage, begun.bytes));
        // A copy is made all the same where it cannot be timed.
        let to = timers.and_then(|timers| timers.mark(backend, self.stream()).ok());
        self.timed = from.zip(to);
        match (enqueued, end) {
            (Ok(()), Ok(end)) => Ok(end),
            (Err(error), Ok(end)) => Err(CopyFailed { error, left: Left::Until(end) }),
            (enqueued, Err(error)) => {
                let error = enqueued.err().unwrap_or(error);
                Err(self.settle_unmarked(backend, error))
            }
        }
    }

    /// Orders a copy of `len` bytes behind `after`, in a turn that has room for its first trunk.
    fn enter(
        &mut self,
        backend: &mut dyn Backend,
        events: &mut EventPool,
        task: &Task<'_>,
    ) -> Result<()> {
        let LaneLimits { trunk_bytes_max: max, turn_bytes_max, .. } = task.limits;
        if self.flights.is_empty() {
            self.turns.begin();
        }
        self.turns.make_room(backend, events, task.len.min(max), turn_bytes_max, &[])?;
        self.turns.wait(backend, task.after)
    }

    fn end(
        &mut self,
        backend: &mut dyn Backend,
        events: &mut EventPool,
        spare: Spare,
        (storage, bytes): (StorageId, Bytes),
    ) -> Result<End> {
        if let Err(error) = self.turns.join(backend) {
            events.keep(spare);
            return Err(error);
        }
        let point = events.mark_with(backend, spare, self.turns.stream())?;
        let end = End { point, seq: self.seq_next };
        self.seq_next += 1;
        self.bytes_in_flight += bytes;
        self.flights.push_back(Flight { storage, end: end.clone(), bytes });
        Ok(end)
    }

    /// Copies run whose end no event marks, since the driver refused to record one: the host waits
    /// for them, as for a failing driver there is no other proof that the block is idle. Where even
    /// that is refused, nothing they touch may be given to anybody.
    fn settle_unmarked(&mut self, backend: &mut dyn Backend, error: Error) -> CopyFailed {
        match self.wait_for_all(backend) {
            Ok(()) => CopyFailed { error, left: Left::Nothing },
            // A loss is what there is to tell.
            Err(lost) if lost.is_lost() => CopyFailed { error: lost, left: Left::Unmarked },
            Err(_) => CopyFailed { error, left: Left::Unmarked },
        }
    }

    /// Waits, on the host, until the whole device is idle.
    ///
    /// # Errors
    /// Those of [`Backend::sync`].
    pub fn wait_for_all(&mut self, backend: &mut dyn Backend) -> Result<()> {
        backend.sync()?;
        // Who is told later learns it from the points, which are done now.
        for flight in &self.flights {
            flight.end.point.set_done();
        }
        Ok(())
    }

    /// Asks once more for the end of what a copy of `storage`'s left unmarked. It stands for all
    /// that was enqueued on the lane.
    ///
    /// # Errors
    /// Those of [`EventPool::mark`]; nothing has changed.
    pub fn mark_left(
        &mut self,
        backend: &mut dyn Backend,
        events: &mut EventPool,
        storage: StorageId,
    ) -> Result<End> {
        let spare = events.spare(backend)?;
        self.end(backend, events, spare, (storage, Bytes::ZERO))
    }

    /// Learns which copies are done, and forgets those, each of which `landed` is told. Asks at
    /// most `asks_max` times: as an end stands for all before it, a few answers settle many.
    ///
    /// # Errors
    /// Those of [`Backend::query`].
    pub fn poll(
        &mut self,
        backend: &mut dyn Backend,
        asks_max: usize,
        landed: Landed<'_>,
    ) -> Result<()> {
        // The oldest, then twice as many at once while they are done; then the halves of what is
        // between. `may_be_done` of the oldest are not known to be under way.
        let (mut may_be_done, mut at_once, mut is_growing) = (self.flights.len(), 1, true);
        for _ in 0..asks_max {
            let count = at_once.min(may_be_done);
            let Some(flight) = count.checked_sub(1).and_then(|last| self.flights.get(last)) else {
                break;
            };
            if flight.end.point.done(backend, Site::TransferQuery)? {
                (0..count).for_each(|_| self.pop(landed));
                may_be_done -= count;
            } else {
                may_be_done = count - 1;
                is_growing = false;
            }
            at_once = if is_growing { 2 * count } else { may_be_done.div_ceil(2) };
        }
        Ok(())
    }

    /// Lets go of the events that it holds, as far as what they stand for is done; `landed` is told
    /// as by [`Lane::poll`]. Some questions more than twice the logarithm of the copies under way.
    ///
    /// # Errors
    /// Those of [`Backend::query`].
    pub fn free_events(&mut self, backend: &mut dyn Backend, landed: Landed<'_>) -> Result<()> {
        self.poll(backend, usize::MAX, landed)?;
        self.turns.free_event(backend)
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
}
