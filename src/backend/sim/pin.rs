//! Who page-locks memory for simulated devices, and who answers for their events elsewhere.
//!
//! What it is not: it maps no memory; the caller does and keeps it mapped.
//!
//! Invariant: memory that queued work uses is not given up, and a fence answers for as long as it
//! lives, even when the backend it came from has gone.
//!
//! ```text
//!   SimPinner: register(ptr, len) -> simulated address     SimFence: done(event), any thread
//! ```
//!
//! The simulated device hands them out.

use super::memory::HostPtr;
use super::user::Seat;
use super::{Spot, World};
use crate::backend::{Fence, Pageable, Pinner};
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::{Bytes, EventId, PinnedPtr};
use std::ptr::NonNull;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct SimPinner {
    pub(super) world: World,
    pub(super) device: u32,
}

impl Pinner for SimPinner {
    unsafe fn register(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        let mut state = self.world.lock();
        state.enter(self.device, "register")?;
        if len.is_zero() {
            return Err(Error::usage(Misuse::Empty, "register"));
        }
        let wraps = (at.as_ptr() as u64).checked_add(len.0).is_none();
        if wraps || len.0 > state.registration_bytes_max {
            return Err(Error::usage(Misuse::TooLarge, "register").bytes(len));
        }
        state.strike(self.device, Spot::Register, None, "register")?;
        state.machine.regions.pin(HostPtr::new(at.as_ptr()), len.0).map(PinnedPtr)
    }

    fn pageable(&self) -> Option<&dyn Pageable> {
        Some(self)
    }

    fn unregister(&self, at: PinnedPtr) -> Result<()> {
        let mut state = self.world.lock();
        state.enter(self.device, "unregister")?;
        let removed = state.machine.regions.remove(at.0, None, "unregister");
        let busy = removed.as_ref().is_err_and(|error| error.kind() == Kind::Busy);
        state.removals_refused += u64::from(busy);
        removed
    }

    fn needs_memory(&self) -> bool {
        self.world.lock().machine.moves_bytes
    }

    fn registration_max(&self) -> Bytes {
        Bytes(self.world.lock().registration_bytes_max)
    }
}

impl Pageable for SimPinner {
    /// Copies take the time that they take to page-locked memory.
    unsafe fn register_pageable(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.register(at, len) }
    }
}

#[derive(Debug)]
pub(super) struct SimFence {
    pub(super) seat: Arc<Seat>,
}

impl Fence for SimFence {
    fn done(&self, event: EventId) -> Result<bool> {
        self.seat.query(event)
    }
}
