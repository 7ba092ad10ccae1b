//! Streams and events: whose they are, whether they may be used here and now, and the three verbs
//! of order (record, wait, query).
//!
//! What it is not: a pool of events, or a policy. It asks the driver what the seam says, plus the
//! questions whose answer the driver would give too late.
//!
//! Invariant: no event is waited for or asked about before it was recorded (the driver would take
//! it for done); nothing is enqueued on a stream that is being captured; a per-thread stream is
//! used by its own thread alone; what was borrowed is never destroyed.
//!
//! ```text
//!   Streams: id -> { raw, Created | Borrowed | PerThread(thread) }      one Cuda's, one thread's
//!   Events:  id -> { raw, timing, recorded? }                           shared with its fences
//!   ready(stream): id ours? -> right thread? -> known to others: cuStreamIsCapturing?
//! ```
//!
//! Raw handle 0 is the legacy default stream and 1 its explicit name; 2 is the calling thread's own
//! default stream, so it means another stream on every thread. A program built for per-thread
//! default streams that has a 0 in its hands means 2. None of the three is ever taken to be ordered
//! with our own streams: those are non-blocking.
//!
//! Streams that others can reach (borrowed ones, and ours once their raw handle was asked for) are
//! asked about capture at each use: a capture may begin on them at any time, and an event recorded
//! into one is no event of the outside world. While another thread captures, a plain `cuEventQuery`
//! fails and ends that capture; queries here are made in the thread's relaxed mode, which does
//! neither.
//!
//! `Cuda` uses both tables, `CudaFence` the events.

use super::Cuda;
use super::code::{CAPTURE_IMPLICIT, NOT_READY, SUCCESS};
use super::context::{Context, Entered, lock};
use super::sync::{Known, has_work, is_running};
use crate::backend::{Fence, Timing};
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::{EventId, StreamId, Table};
use cudarc::driver::sys::{CUcontext, CUevent, CUevent_flags, CUstream, CUstream_flags};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// The most streams one `Cuda` knows at once.
const STREAMS_MAX: usize = 1 << 12;
/// The most events one `Cuda` has at once.
const EVENTS_MAX: usize = 1 << 16;
/// `CU_STREAM_PER_THREAD` of `cuda.h`.
const PER_THREAD: usize = 2;

#[derive(Debug)]
struct Stream {
    raw: usize,
    origin: Origin,
    /// Can somebody else reach it, and so begin a capture on it?
    shared: Cell<bool>,
}

#[derive(Debug, PartialEq, Eq)]
enum Origin {
    Created,
    Borrowed,
    PerThread(ThreadId),
}

/// The streams of one `Cuda`.
#[derive(Debug)]
pub(super) struct Streams {
    table: Table<Stream>,
    /// What tells their `Cuda` from the others of its device.
    pub(super) user: usize,
    /// A stream was closed with work still to be done.
    pub(super) left_behind: Cell<bool>,
}

impl Streams {
    pub(super) fn new(user: usize) -> Streams {
        let left_behind = Cell::new(false);
        Streams { table: Table::new("stream", STREAMS_MAX), user, left_behind }
    }

    fn known(&self, id: StreamId, op: &'static str) -> Result<Known> {
        self.table.get(id.0, op).map(|stream| self.name(stream))
    }

    /// As others of the device know it.
    fn name(&self, stream: &Stream) -> Known {
        let thread = match stream.origin {
            Origin::PerThread(owner) => Some(owner),
            Origin::Created | Origin::Borrowed => None,
        };
        Known { raw: stream.raw, user: self.user, thread }
    }

    fn get(&self, id: StreamId, op: &'static str) -> Result<&Stream> {
        let stream = self.table.get(id.0, op)?;
        match stream.origin {
            Origin::PerThread(owner) if owner != thread::current().id() => {
                Err(Error::usage(Misuse::WrongThread, op)
                    .detail("the per-thread default stream was adopted on another thread"))
            }
            _ => Ok(stream),
        }
    }

    /// The handle of a stream on which something may be enqueued now.
    #[inline]
    pub(super) fn ready(
        &self,
        id: StreamId,
        entered: &Entered<'_>,
        op: &'static str,
    ) -> Result<CUstream> {
        let stream = self.get(id, op)?;
        let raw = stream.raw as CUstream;
        if stream.shared.get() && is_capturing(raw, entered)? {
            return Err(Error::usage(Misuse::Capturing, op));
        }
        Ok(raw)
    }

    fn keep(&mut self, raw: usize, origin: Origin, op: &'static str) -> Result<StreamId> {
        let shared = Cell::new(origin != Origin::Created);
        let kept = self.table.insert(Stream { raw, origin, shared });
        kept.map(StreamId).ok_or_else(|| full(op, "streams"))
    }
}

fn full(op: &'static str, what: &str) -> Error {
    Error::new(Kind::Busy, op).detail(format!("as many {what} as one backend keeps; close some"))
}

pub(super) fn is_capturing(stream: CUstream, entered: &Entered<'_>) -> Result<bool> {
    let mut status = 0_u32;
    // SAFETY: the stream is alive: ours, or kept so by its owner. The status is read as a number.
    let answer =
        unsafe { entered.driver().cuStreamIsCapturing(stream, ptr::from_mut(&mut status).cast()) };
    if answer.code == CAPTURE_IMPLICIT {
        return Ok(true); // the legacy stream, while a blocking stream of the context is captured
    }
    entered.check(answer)?;
    Ok(status != 0)
}

#[derive(Debug)]
struct Event {
    raw: usize,
    timing: Timing,
    /// Was it ever recorded? The driver does not tell.
    recorded: AtomicBool,
}

impl Event {
    fn recorded(&self, op: &'static str) -> Result<CUevent> {
        if self.recorded.load(Ordering::Acquire) {
            Ok(self.raw as CUevent)
        } else {
            Err(Error::usage(Misuse::FreshEvent, op))
        }
    }
}

/// The events of one `Cuda`, which its fences keep alive: a pinned block may be waited for after
/// the engine that used it is gone. Using an event takes the lock for reading only.
#[derive(Debug)]
pub(super) struct Events {
    context: Arc<Context>,
    table: RwLock<Table<Event>>,
}

impl Events {
    pub(super) fn new(context: Arc<Context>) -> Events {
        Events { context, table: RwLock::new(Table::new("event", EVENTS_MAX)) }
    }

    fn read(&self) -> RwLockReadGuard<'_, Table<Event>> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table<Event>> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn create(&self, timing: Timing) -> Result<EventId> {
        const OP: &str = "create_event";
        let entered = self.context.enter_relaxed(OP)?;
        let mut table = self.write();
        if table.is_full() {
            return Err(full(OP, "events"));
        }
        let flags = match timing {
            Timing::Off => CUevent_flags::CU_EVENT_DISABLE_TIMING,
            Timing::On => CUevent_flags::CU_EVENT_DEFAULT,
        };
        let mut raw: CUevent = ptr::null_mut();
        // SAFETY: valid pointer; the context is current.
        entered.check(unsafe { entered.driver().cuEventCreate(&mut raw, flags as u32) })?;
        let event = Event { raw: raw as usize, timing, recorded: AtomicBool::new(false) };
        table.insert(event).map(EventId).ok_or_else(|| full(OP, "events"))
    }

    pub(super) fn close(&self, id: EventId) -> Result<()> {
        const OP: &str = "close_event";
        let entered = self.context.enter_relaxed(OP)?;
        let mut table = self.write();
        let raw = table.get(id.0, OP)?.raw as CUevent;
        // SAFETY: alive, and out of the table right after; the write lock keeps other users off.
        // Work that waits for it keeps its meaning.
        entered.check(unsafe { entered.driver().cuEventDestroy_v2(raw) })?;
        table.remove(id.0, OP)?;
        Ok(())
    }

    pub(super) fn query(&self, id: EventId, op: &'static str) -> Result<bool> {
        let entered = self.context.enter_relaxed(op)?;
        let table = self.read();
        let raw = table.get(id.0, op)?.recorded(op)?;
        // SAFETY: alive: the read lock keeps it in the table.
        let answer = unsafe { entered.driver().cuEventQuery(raw) };
        match answer.code {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            _ => entered.check(answer).map(|()| false),
        }
    }

    pub(super) fn elapsed(&self, from: EventId, to: EventId) -> Result<Duration> {
        const OP: &str = "elapsed";
        let entered = self.context.enter_relaxed(OP)?;
        let table = self.read();
        let timed =
            |id: EventId| {
                let event = table.get(id.0, OP)?;
                match event.timing {
                    Timing::On => event.recorded(OP),
                    Timing::Off => Err(Error::usage(Misuse::BadValue, OP)
                        .detail("the event was not made for timing")),
                }
            };
        let (from, to) = (timed(from)?, timed(to)?);
        let mut milliseconds = 0.0;
        // SAFETY: both alive, recorded and made for timing; valid pointer.
        let answer = unsafe { entered.driver().cuEventElapsedTime(&mut milliseconds, from, to) };
        entered.check(answer)?;
        Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).map_err(|_| {
            Error::usage(Misuse::BadValue, OP)
                .detail(format!("{milliseconds} ms: the second event is the earlier one"))
        })
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let Ok(entered) = self.context.enter_relaxed("drop") else { return };
        let table = self.table.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, event) in table.iter() {
            // SAFETY: alive, and never used again. Work that waits for it keeps its meaning.
            let answer = unsafe { entered.driver().cuEventDestroy_v2(event.raw as CUevent) };
            if entered.check(answer).is_err_and(|error| error.is_lost()) {
                return;
            }
        }
    }
}

/// Answers for one `Cuda`'s events, from any thread.
#[derive(Debug)]
pub(super) struct CudaFence {
    events: Arc<Events>,
}

impl CudaFence {
    pub(super) fn new(events: Arc<Events>) -> CudaFence {
        CudaFence { events }
    }
}

impl Fence for CudaFence {
    fn done(&self, event: EventId) -> Result<bool> {
        self.events.query(event, "fence")
    }
}

impl Cuda {
    pub(super) fn borrow_stream(&mut self, raw: usize) -> Result<StreamId> {
        const OP: &str = "adopt_stream";
        let entered = self.context.enter(OP)?;
        let origin = match raw {
            0 | 1 => Origin::Borrowed,
            PER_THREAD => Origin::PerThread(thread::current().id()),
            _ => {
                let mut owner: CUcontext = ptr::null_mut();
                // SAFETY: the stream's owner keeps it alive; valid pointer.
                entered.check(unsafe {
                    entered.driver().cuStreamGetCtx(raw as CUstream, &mut owner)
                })?;
                if !self.context.is(owner) {
                    return Err(Error::usage(Misuse::WrongDevice, OP)
                        .detail("the stream is not of this device's primary context"));
                }
                Origin::Borrowed
            }
        };
        let known = self.streams.keep(raw, origin, OP)?;
        lock(&self.context.roll).add(self.streams.known(known, OP)?);
        Ok(known)
    }

    pub(super) fn make_stream(&mut self) -> Result<StreamId> {
        const OP: &str = "create_stream";
        let entered = self.context.enter_relaxed(OP)?;
        if self.streams.table.is_full() {
            return Err(full(OP, "streams"));
        }
        let mut raw: CUstream = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: valid pointer; the context is current.
        entered.check(unsafe { entered.driver().cuStreamCreate(&mut raw, flags) })?;
        let known = self.streams.keep(raw as usize, Origin::Created, OP)?;
        lock(&self.context.roll).add(self.streams.known(known, OP)?);
        Ok(known)
    }

    pub(super) fn end_stream(&mut self, id: StreamId) -> Result<()> {
        const OP: &str = "close_stream";
        let entered = self.context.enter_relaxed(OP)?;
        let stream = self.streams.table.get(id.0, OP)?;
        let known = self.streams.name(stream);
        let is_ours = stream.origin == Origin::Created;
        if is_ours && is_running(stream.raw as CUstream, &entered)? {
            self.streams.left_behind.set(true);
        }
        lock(&self.context.roll).strike(known);
        if is_ours {
            let raw = stream.raw as CUstream;
            // SAFETY: ours, alive, out of the table right after. Work enqueued on it still runs.
            let answer = unsafe { entered.driver().cuStreamDestroy_v2(raw) };
            entered.check(answer).inspect_err(|_| lock(&self.context.roll).add(known))?;
        }
        self.streams.table.remove(id.0, OP)?;
        Ok(())
    }

    pub(super) fn stream_handle(&self, id: StreamId) -> Result<usize> {
        const OP: &str = "raw_stream";
        self.context.check(OP)?;
        let stream = self.streams.get(id, OP)?;
        stream.shared.set(true);
        Ok(stream.raw)
    }

    pub(super) fn enqueue_record(&mut self, event: EventId, on: StreamId) -> Result<()> {
        const OP: &str = "record";
        let entered = self.context.enter(OP)?;
        let stream = self.streams.ready(on, &entered, OP)?;
        let table = self.events.read();
        let event = table.get(event.0, OP)?;
        // SAFETY: both alive and of the current context.
        entered.check(unsafe { entered.driver().cuEventRecord(event.raw as CUevent, stream) })?;
        event.recorded.store(true, Ordering::Release);
        Ok(())
    }

    pub(super) fn enqueue_wait(&mut self, on: StreamId, event: EventId) -> Result<()> {
        const OP: &str = "wait";
        let entered = self.context.enter(OP)?;
        let stream = self.streams.ready(on, &entered, OP)?;
        let table = self.events.read();
        let event = table.get(event.0, OP)?.recorded(OP)?;
        // SAFETY: both alive; flags must be 0.
        entered.check(unsafe { entered.driver().cuStreamWaitEvent(stream, event, 0) })
    }

    /// The default streams are not asked: what stands before a moment on the legacy one is also
    /// work of other streams, and the driver does not say whether it answers for that.
    pub(super) fn is_idle(&self, on: StreamId) -> Result<bool> {
        const OP: &str = "idle";
        let entered = self.context.enter_relaxed(OP)?;
        let stream = self.streams.ready(on, &entered, OP)?;
        if stream as usize <= PER_THREAD {
            return Ok(false);
        }
        has_work(stream, &entered).map(|has| !has)
    }

    pub(super) fn ask_capturing(&self, id: StreamId) -> Result<bool> {
        const OP: &str = "capturing";
        let entered = self.context.enter(OP)?;
        is_capturing(self.streams.get(id, OP)?.raw as CUstream, &entered)
    }

    pub(super) fn is_stream(&self, id: StreamId, op: &'static str) -> Result<()> {
        self.streams.get(id, op).map(|_| ())
    }

    /// Destroys the streams made here, as the `Cuda` goes; work enqueued on them still runs.
    pub(super) fn end_streams(&mut self) {
        let mut roll = lock(&self.context.roll);
        for (_, stream) in self.streams.table.iter() {
            roll.strike(self.streams.name(stream));
        }
        drop(roll);
        let Ok(entered) = self.context.enter_relaxed("drop") else { return };
        for (_, stream) in self.streams.table.iter() {
            if stream.origin != Origin::Created {
                continue;
            }
            let raw = stream.raw as CUstream;
            // SAFETY: ours, alive, and never used again.
            let answer = unsafe { entered.driver().cuStreamDestroy_v2(raw) };
            if entered.check(answer).is_err_and(|error| error.is_lost()) {
                return;
            }
        }
    }
}
