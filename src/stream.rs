//! Points in streams: events taken from a pool, recorded once, waited for and asked about by name.
//!
//! What it is not: it owns no stream, and it knows nothing of bytes.
//!
//! Invariant: a [`Point`] always stands for one recording of one event. The event is recorded anew
//! only when no `Point` of the old recording is left, so nobody can wait for the wrong one (E8).
//!
//! ```text
//!   EventPool --mark(stream)--> Point --wait(lane)--> later work of the lane is ordered behind it
//!       ^                         |   --done()?-----> asked of the driver until it once says yes
//!       `----- last Point gone ---'
//! ```
//!
//! The copy lanes and the engine use it; one pool per device and context.

mod cells;

use crate::backend::{Backend, Timing};
use crate::error::{Error, Kind, Result};
use crate::trace::Site;
use crate::unit::{EventId, StreamId};
use cells::{Cells, Used, Vacant};
use std::time::Duration;

/// Everything that was enqueued on one stream up to one moment. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Point {
    cell: Used,
    stream: StreamId,
}

impl Point {
    /// The stream it lies on.
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// The event that stands for it.
    pub fn event(&self) -> EventId {
        self.cell.event()
    }

    /// Has it been seen done? No driver call.
    pub fn is_known_done(&self) -> bool {
        self.cell.is_done()
    }

    /// Asks the driver whether it is done, unless that is known.
    ///
    /// # Errors
    /// Those of [`Backend::query`].
    pub fn done(&self, backend: &mut dyn Backend, site: Site) -> Result<bool> {
        if self.is_known_done() {
            return Ok(true);
        }
        let done = backend.query(self.cell.event(), site)?;
        self.cell.set_done(done);
        Ok(done)
    }

    /// Takes it from somebody who knows (a whole-device wait) that it is done.
    pub fn set_done(&self) {
        self.cell.set_done(true);
    }

    /// Orders the later work of `stream` behind it. Nothing is enqueued where it is known done, or
    /// lies on `stream` itself, whose own order says so already.
    ///
    /// # Errors
    /// Those of [`Backend::wait`].
    pub fn wait(&self, backend: &mut dyn Backend, stream: StreamId, site: Site) -> Result<()> {
        if self.stream == stream || self.is_known_done() {
            return Ok(());
        }
        backend.wait(stream, self.cell.event(), site)
    }

    /// Device time from `earlier` to this point; both were made by a timing pool and are done.
    ///
    /// # Errors
    /// Those of [`Backend::elapsed`].
    pub fn since(&self, backend: &mut dyn Backend, earlier: &Point) -> Result<Duration> {
        backend.elapsed(earlier.cell.event(), self.cell.event())
    }
}

/// Nothing can be marked before somebody lets go of an event.
pub fn none_free() -> Error {
    Error::new(Kind::Busy, "record").detail("every event is in use")
}

/// An event of a pool that stands for nothing yet.
#[derive(Debug)]
pub struct Spare(Vacant);

/// The events of one device, reused.
#[derive(Debug)]
pub struct EventPool {
    cells: Cells,
    events_max: usize,
    timing: Timing,
}

impl EventPool {
    /// A pool that never holds more than `events_max` events.
    pub fn new(events_max: usize, timing: Timing) -> EventPool {
        EventPool { cells: Cells::new(), events_max, timing }
    }

    /// How many events it holds.
    pub fn len(&self) -> usize {
        self.cells.len()
    }

    /// Does it hold none?
    pub fn is_empty(&self) -> bool {
        self.cells.len() == 0
    }

    /// Can `count` more be had, while none comes back? No driver call.
    pub fn has(&mut self, count: usize) -> bool {
        let not_made = self.events_max.saturating_sub(self.cells.len());
        count <= not_made || self.cells.has(count - not_made)
    }

    /// The point that all work enqueued on `stream` until now has passed.
    ///
    /// # Errors
    /// [`Kind::Busy`] when all `events_max` events are held; those of [`Backend::record`], after
    /// which nothing has changed.
    pub fn mark(&mut self, backend: &mut dyn Backend, stream: StreamId) -> Result<Point> {
        let spare = self.spare(backend)?;
        self.mark_with(backend, spare, stream)
    }

    /// An event for a later [`EventPool::mark_with`]: taken before work is enqueued whose end it
    /// is to mark, so that a want of events is met while there is nothing to undo.
    ///
    /// # Errors
    /// [`Kind::Busy`] when all `events_max` events are held; those of [`Backend::create_event`].
    pub fn spare(&mut self, backend: &mut dyn Backend) -> Result<Spare> {
        if let Some(vacant) = self.cells.take() {
            return Ok(Spare(vacant));
        }
        if self.cells.len() >= self.events_max {
            return Err(none_free());
        }
        let event = backend.create_event(self.timing)?;
        Ok(Spare(self.cells.add(event)))
    }

    /// As [`EventPool::mark`], with an event taken earlier.
    ///
    /// # Errors
    /// Those of [`Backend::record`]; the event goes back to the pool.
    pub fn mark_with(
        &mut self,
        backend: &mut dyn Backend,
        spare: Spare,
        stream: StreamId,
    ) -> Result<Point> {
        let Spare(vacant) = spare;
        match backend.record(vacant.event(), stream) {
            Ok(()) => Ok(Point { cell: vacant.into_used(), stream }),
            Err(error) => {
                vacant.put_back();
                Err(error)
            }
        }
    }

    /// Takes back an event that was not needed.
    pub fn keep(&mut self, spare: Spare) {
        spare.0.put_back();
    }

    /// Destroys every event; the points that are left must not be used afterwards.
    ///
    /// # Errors
    /// The first error of [`Backend::close_event`]; the others are closed all the same.
    pub fn close(&mut self, backend: &mut dyn Backend) -> Result<()> {
        let mut result = Ok(());
        for event in self.cells.drain() {
            let closed = backend.close_event(event);
            result = result.and(closed);
        }
        result
    }
}
