//! Waiting, on the host, for all that was enqueued on a device.
//!
//! What it is not: `cuCtxSynchronize`, except where nothing else will do. While anybody captures a
//! graph on a stream of the context, be it on another thread, that call fails and ends the capture,
//! in whatever mode the thread is (seen on an H200, driver 580).
//!
//! Invariant: all that a `Cuda` enqueued is waited for, and what other `Cuda`s of the device have
//! on streams that this thread can name and nobody captures; no capture is ended. What a `Cuda`
//! itself left on a stream that it closed while it ran, or has on another thread's own default
//! stream, cannot be named here: then, and only then, the whole context is waited for.
//!
//! ```text
//!   stream a   ..work.. |event|
//!   stream b   ..work...........|event|
//!   a stream made for it   wait  wait |<- cuStreamSynchronize, without the lock
//! ```
//!
//! `Cuda` keeps its streams in `Roll`, and waits through it.

use super::Cuda;
use super::code::NOT_READY;
use super::context::{Entered, lock};
use super::order::is_capturing;
use crate::error::{Error, Misuse, Result};
use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream, CUstream_flags};
use std::ptr;
use std::thread::{self, ThreadId};

/// Every stream that a `Cuda` of one device has.
#[derive(Debug, Default)]
pub(super) struct Roll {
    streams: Vec<Known>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) raw: usize,
    /// Which `Cuda` has it.
    pub(super) user: usize,
    /// Whose own default stream it is.
    pub(super) thread: Option<ThreadId>,
}

impl Roll {
    pub(super) fn add(&mut self, known: Known) {
        self.streams.push(known);
    }

    /// Takes a stream off, before it is destroyed.
    pub(super) fn strike(&mut self, known: Known) {
        if let Some(at) = self.streams.iter().position(|each| *each == known) {
            self.streams.swap_remove(at);
        }
    }

    /// Does it hold a stream of this user's that has another meaning on this thread?
    fn is_elsewhere(&self, user: usize) -> bool {
        let here = thread::current().id();
        let is_elsewhere = |it: &Known| it.thread.is_some_and(|thread| thread != here);
        self.streams.iter().any(|it| it.user == user && is_elsewhere(it))
    }

    /// The streams that can be named on this thread.
    fn named(&self) -> impl Iterator<Item = &Known> {
        let here = thread::current().id();
        self.streams.iter().filter(move |it| it.thread.is_none_or(|thread| thread == here))
    }
}

/// Is there work on a stream of ours, which is about to be destroyed? One that is being captured
/// has none to be waited for, and is not asked: that would end the capture.
pub(super) fn is_running(stream: CUstream, entered: &Entered<'_>) -> Result<bool> {
    if is_capturing(stream, entered)? {
        return Ok(false);
    }
    has_work(stream, entered)
}

/// Is there work on a stream that nobody captures?
pub(super) fn has_work(stream: CUstream, entered: &Entered<'_>) -> Result<bool> {
    // SAFETY: the caller's stream, alive.
    let answer = unsafe { entered.driver().cuStreamQuery(stream) };
    if answer.code == NOT_READY {
        return Ok(true);
    }
    entered.check(answer).map(|()| false)
}

/// A stream behind all others, and the event that orders it so. Both go when this does.
struct Behind<'a> {
    entered: &'a Entered<'a>,
    stream: CUstream,
    event: CUevent,
}

impl<'a> Behind<'a> {
    fn new(entered: &'a Entered<'a>) -> Result<Behind<'a>> {
        let mut behind = Behind { entered, stream: ptr::null_mut(), event: ptr::null_mut() };
        let driver = entered.driver();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: valid pointer; the context is current.
        entered.check(unsafe { driver.cuStreamCreate(&mut behind.stream, flags) })?;
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: as above.
        entered.check(unsafe { driver.cuEventCreate(&mut behind.event, flags) })?;
        Ok(behind)
    }

    fn follow(&self, raw: usize) -> Result<()> {
        let driver = self.entered.driver();
        // SAFETY: both alive, the stream since it is on the roll; it is not being captured.
        self.entered.check(unsafe { driver.cuEventRecord(self.event, raw as CUstream) })?;
        // SAFETY: both alive and ours; flags must be 0. The wait is for the record just made.
        self.entered.check(unsafe { driver.cuStreamWaitEvent(self.stream, self.event, 0) })
    }

    fn wait(&self) -> Result<()> {
        // SAFETY: alive and ours.
        self.entered.check(unsafe { self.entered.driver().cuStreamSynchronize(self.stream) })
    }

    /// Gives both back and says what the driver said; what is left after a refusal the drop ends.
    fn close(mut self) -> Result<()> {
        self.end_event()?;
        self.end_stream()
    }

    fn end_event(&mut self) -> Result<()> {
        let event = std::mem::replace(&mut self.event, ptr::null_mut());
        if event.is_null() {
            return Ok(());
        }
        // SAFETY: ours and alive; work that waits for it keeps its meaning.
        self.entered.check(unsafe { self.entered.driver().cuEventDestroy_v2(event) })
    }

    fn end_stream(&mut self) -> Result<()> {
        let stream = std::mem::replace(&mut self.stream, ptr::null_mut());
        if stream.is_null() {
            return Ok(());
        }
        // SAFETY: ours and alive. What is enqueued on it is but waits.
        self.entered.check(unsafe { self.entered.driver().cuStreamDestroy_v2(stream) })
    }
}

impl Drop for Behind<'_> {
    /// Only where something failed before: that is what the caller is told. After a loss nothing is
    /// called any more, be the loss met here.
    fn drop(&mut self) {
        if !self.entered.is_lost() {
            self.end_event().ok();
        }
        if !self.entered.is_lost() {
            self.end_stream().ok();
        }
    }
}

impl Cuda {
    pub(super) fn wait_for_streams(&self) -> Result<()> {
        const OP: &str = "sync";
        // Relaxed: making streams and events counts as unsafe while others capture.
        let entered = self.context.enter_relaxed(OP)?;
        let user = self.streams.user;
        if self.streams.left_behind.get() || lock(&self.context.roll).is_elsewhere(user) {
            // SAFETY: waits for all work of the current context.
            entered.check(unsafe { entered.driver().cuCtxSynchronize() })?;
            self.streams.left_behind.set(false);
            return Ok(());
        }
        let behind = Behind::new(&entered)?;
        let roll = lock(&self.context.roll);
        for known in roll.named() {
            if !is_capturing(known.raw as CUstream, &entered)? {
                behind.follow(known.raw)?;
            } else if known.user == user {
                return Err(Error::usage(Misuse::Capturing, OP));
            }
        }
        drop(roll);
        behind.wait()?;
        behind.close()
    }
}
