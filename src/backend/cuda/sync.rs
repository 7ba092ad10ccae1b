//! Waiting, on the host, for all that was enqueued on a device.
//!
//! What it is not: `cuCtxSynchronize`, except where nothing else will do. While anybody captures a
//! graph on a stream of the context, be it on another thread, that call fails and ends the capture,
//! in whatever mode the thread is (seen on an H200, driver 580).
//!
//! Invariant: every stream that a `Cuda` of the device has is waited for, but those of other
//! `Cuda`s that are being captured; no capture is ended. What was left behind on a stream of ours
//! that was closed while it ran, and on another thread's own default stream, has no name any more:
//! then, and only then, the whole context is waited for.
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
use super::context::{Context, Entered, lock};
use super::order::is_capturing;
use crate::error::{Error, Misuse, Result};
use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream, CUstream_flags};
use std::ptr;
use std::thread::{self, ThreadId};

/// Every stream that a `Cuda` of one device has.
#[derive(Debug, Default)]
pub(super) struct Roll {
    streams: Vec<Known>,
    /// A stream was closed with work still to be done.
    left_behind: bool,
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

    /// Takes a stream off, before it is destroyed. One that was borrowed is its owner's to wait
    /// for from now on.
    pub(super) fn strike(
        &mut self,
        known: Known,
        is_ours: bool,
        entered: &Entered<'_>,
    ) -> Result<()> {
        let raw = known.raw as CUstream;
        // Asking a stream that is being captured would end the capture.
        if is_ours && !is_capturing(raw, entered)? {
            // SAFETY: alive: ours, and destroyed after this.
            let answer = unsafe { entered.driver().cuStreamQuery(raw) };
            if answer.code == NOT_READY {
                self.left_behind = true;
            } else {
                entered.check(answer)?;
            }
        }
        self.forget(known);
        Ok(())
    }

    /// Takes a stream off that goes in any case.
    pub(super) fn forget(&mut self, known: Known) {
        if let Some(at) = self.streams.iter().position(|each| *each == known) {
            self.streams.swap_remove(at);
        }
    }

    fn is_nameless(&self) -> bool {
        let here = thread::current().id();
        self.left_behind || self.streams.iter().any(|it| it.thread.is_some_and(|it| it != here))
    }
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
}

impl Behind<'_> {
    /// Gives both back, as the drop does, and says what the driver said.
    fn close(mut self) -> Result<()> {
        self.end_event().and(self.end_stream())
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
    fn drop(&mut self) {
        // Only where something failed before: that is what the caller is told.
        if !self.entered.is_lost() {
            self.end_event().and(self.end_stream()).ok();
        }
    }
}

impl Context {
    /// The whole context. Ends a capture under way; the caller learns of it by the error.
    fn wait_for_context(&self, entered: &Entered<'_>) -> Result<()> {
        lock(&self.roll).left_behind = false;
        // SAFETY: waits for all work of the current context.
        let waited = entered.check(unsafe { entered.driver().cuCtxSynchronize() });
        if waited.is_err() {
            lock(&self.roll).left_behind = true;
        }
        waited
    }
}

impl Cuda {
    pub(super) fn wait_for_streams(&self) -> Result<()> {
        const OP: &str = "sync";
        // Relaxed: making streams and events counts as unsafe while others capture.
        let entered = self.context.enter_relaxed(OP)?;
        if lock(&self.context.roll).is_nameless() {
            return self.context.wait_for_context(&entered);
        }
        let behind = Behind::new(&entered)?;
        let roll = lock(&self.context.roll);
        for known in &roll.streams {
            if !is_capturing(known.raw as CUstream, &entered)? {
                behind.follow(known.raw)?;
            } else if known.user == self.streams.user {
                return Err(Error::usage(Misuse::Capturing, OP));
            }
        }
        drop(roll);
        behind.wait()?;
        behind.close()
    }
}
