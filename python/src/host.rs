//! CPU memory as memory of a simulated device, so that CPU tensors can be moved as GPU ones are.
//!
//! What it is not: a copy. The simulated device reads and writes the tensors' own bytes.
//!
//! Invariant: bytes are entered before the engine hears of them, and taken out when it has said
//! that nothing of it uses them any more; before that nobody frees them.
//!
//! ```text
//!   enter(address) -> engine.adopt, refill, prefetch ... releasable, cancel -> leave(address)
//! ```
//!
//! The engine's door uses it, for simulated devices only.

use lightering::backend::sim::Sim;
use lightering::{DeviceRange, Error, Misuse, Result};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The door by which CPU memory enters a simulated device.
#[derive(Debug)]
pub(crate) struct Host(Mutex<Sim>);

impl Host {
    pub(crate) fn new(device: Sim) -> Host {
        Host(Mutex::new(device))
    }

    fn lock(&self) -> MutexGuard<'_, Sim> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes bytes of the process reachable for the device, at their own address.
    ///
    /// # Errors
    /// As [`Sim::adopt_host`]; `Usage(OutOfRange)` for address 0.
    pub(crate) fn enter(&self, range: DeviceRange) -> Result<()> {
        let at = NonNull::new(range.at().0 as *mut u8);
        let at = at.ok_or_else(|| Error::usage(Misuse::OutOfRange, "adopt_host"))?;
        // SAFETY: the caller passes a tensor's storage and holds a reference to it until `leave`,
        // so the bytes stay valid. Nobody writes them meanwhile: an edit of a saved tensor is an
        // error that is raised before what was copied is used.
        unsafe { self.lock().adopt_host(at, range.len()) }.map(drop)
    }

    /// Ends that.
    ///
    /// # Errors
    /// As [`Sim::forget_host`].
    pub(crate) fn leave(&self, range: DeviceRange) -> Result<()> {
        self.lock().forget_host(range.at())
    }
}
