//! Page-locked host memory: registrations with the driver, and copies that respect them.
//!
//! What it is not: it maps and touches no memory. An arena maps anonymous memory and registers it
//! here; memory that the driver allocates itself (`cuMemHostAlloc`) is slower to get, and its
//! write-combined kind is nearly unreadable for the host, so neither is used.
//!
//! Invariant: the table holds exactly the ranges that the driver page-locked for us. A copy runs
//! only within one of them: the driver refuses one that spans two, and memory that is not
//! page-locked would be copied at another time than asked.
//!
//! ```text
//!   register(at, len) -> portable, mapped -> table { at..at+len }   same address for every device
//!   copy(to: pinned part, ..)  part within one entry? -> cuMemcpy*Async, else Usage(OutOfRange)
//!   unregister(at)    -> out of the table, then out of the driver
//! ```
//!
//! The table is the process's: page-locked memory serves all its devices. `Cuda` copies; pinned
//! pools hold the `Pinner`.

use super::context::{Context, Entered};
use super::{Cuda, process};
use crate::backend::{Pageable, Pinner};
use crate::error::{Error, Misuse, Result};
use crate::unit::{Bytes, DeviceRange, PinnedPtr, PinnedRange, StreamId};
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Registrations of half a tebibyte and more have failed in the driver's own bookkeeping.
const REGISTRATION_MAX: Bytes = Bytes::gib(64);

/// Length by address.
type Ranges = BTreeMap<u64, u64>;

static REGISTERED: RwLock<Ranges> = RwLock::new(BTreeMap::new());
/// Memory that is not page-locked and may be copied to and from: the driver stages such a copy, and
/// the host waits in it, but it reads and writes in the stream's order all the same.
static PAGEABLE: RwLock<Ranges> = RwLock::new(BTreeMap::new());

fn pageable_mut() -> RwLockWriteGuard<'static, Ranges> {
    PAGEABLE.write().unwrap_or_else(PoisonError::into_inner)
}

fn is_pageable(range: PinnedRange) -> bool {
    within_one(&PAGEABLE.read().unwrap_or_else(PoisonError::into_inner), range)
}

fn registered() -> RwLockReadGuard<'static, Ranges> {
    REGISTERED.read().unwrap_or_else(PoisonError::into_inner)
}

fn registered_mut() -> RwLockWriteGuard<'static, Ranges> {
    REGISTERED.write().unwrap_or_else(PoisonError::into_inner)
}

/// Does one registration hold the whole range?
fn within_one(ranges: &Ranges, range: PinnedRange) -> bool {
    let below = ranges.range(..=range.at().0).next_back();
    below.is_some_and(|(at, len)| range.end() <= at + len)
}

/// May a kernel use it?
pub(super) fn is_reachable(range: PinnedRange) -> bool {
    within_one(&registered(), range)
}

fn touches_any(ranges: &Ranges, at: u64, len: u64) -> bool {
    let below = ranges.range(..at + len).next_back();
    below.is_some_and(|(first, length)| first + length > at)
}

/// Registers memory for all devices, through one device's context.
#[derive(Debug)]
pub(super) struct CudaPinner {
    context: Arc<Context>,
}

impl CudaPinner {
    pub(super) fn new(context: Arc<Context>) -> CudaPinner {
        CudaPinner { context }
    }
}

impl Pinner for CudaPinner {
    unsafe fn register(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        const OP: &str = "register";
        let _pinning = process::Pinning::begin();
        self.context.check(OP)?;
        if len.is_zero() {
            return Err(Error::usage(Misuse::Empty, OP));
        }
        if len > REGISTRATION_MAX {
            return Err(Error::usage(Misuse::TooLarge, OP).bytes(len));
        }
        // Copies get the address back as a number, so its provenance is exposed here, once.
        let address = at.as_ptr().expose_provenance() as u64;
        PinnedRange::new(PinnedPtr(address), len)?;
        if touches_any(&registered(), address, len.0) {
            return Err(Error::usage(Misuse::Overlap, OP).bytes(len));
        }
        let host = at.as_ptr().cast::<c_void>();
        let entered = self.context.enter_relaxed(OP)?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let size = len.to_usize()?;
        // SAFETY: the caller keeps the memory mapped until `unregister` has returned for it.
        let answer = unsafe { entered.driver().cuMemHostRegister_v2(host, size, flags) };
        entered.check(answer).map_err(|error| error.bytes(len))?;
        if let Err(error) = same_address(&entered, host, OP) {
            if !error.is_lost() {
                // SAFETY: registered above, and known to nobody yet.
                entered.check(unsafe { entered.driver().cuMemHostUnregister(host) })?;
            }
            return Err(error.bytes(len));
        }
        registered_mut().insert(address, len.0);
        Ok(PinnedPtr(address))
    }

    fn pageable(&self) -> Option<&dyn Pageable> {
        Some(self)
    }

    fn unregister(&self, at: PinnedPtr) -> Result<()> {
        const OP: &str = "unregister";
        if pageable_mut().remove(&at.0).is_some() {
            return Ok(());
        }
        let entered = self.context.enter_relaxed(OP)?;
        // Out of the table first, so that no copy starts on it while the driver lets go; not held
        // meanwhile, since that takes milliseconds and other devices copy.
        let Some(len) = registered_mut().remove(&at.0) else {
            return Err(Error::usage(Misuse::Stale, OP).detail("no registration starts there"));
        };
        let host = ptr::with_exposed_provenance_mut::<c_void>(at.0 as usize);
        // SAFETY: the base of a registration of ours, ended once: the table gave it out once.
        let answer = unsafe { entered.driver().cuMemHostUnregister(host) };
        entered.check(answer).inspect_err(|_| {
            registered_mut().insert(at.0, len); // still page-locked, so still ours to end
        })
    }

    fn registration_max(&self) -> Bytes {
        REGISTRATION_MAX
    }

    fn pci_address(&self) -> Option<String> {
        Some(self.context.pci_address.clone())
    }
}

impl Pageable for CudaPinner {
    unsafe fn register_pageable(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        const OP: &str = "register";
        self.context.check(OP)?;
        let address = at.as_ptr().expose_provenance() as u64;
        PinnedRange::new(PinnedPtr(address), len)?;
        let mut pageable = pageable_mut();
        let taken = touches_any(&registered(), address, len.0);
        if len.is_zero() || taken || touches_any(&pageable, address, len.0) {
            let misuse = if len.is_zero() { Misuse::Empty } else { Misuse::Overlap };
            return Err(Error::usage(misuse, OP).bytes(len));
        }
        pageable.insert(address, len.0);
        Ok(PinnedPtr(address))
    }
}

/// Devices must reach the memory by the host's own address: one `PinnedPtr` serves all of them.
fn same_address(entered: &Entered<'_>, host: *mut c_void, op: &'static str) -> Result<()> {
    let mut device = 0;
    // SAFETY: the memory was registered as mapped; valid pointer; flags must be 0.
    let answer = unsafe { entered.driver().cuMemHostGetDevicePointer_v2(&mut device, host, 0) };
    entered.check(answer)?;
    if device == host.addr() as u64 {
        return Ok(());
    }
    Err(Error::usage(Misuse::WrongDevice, op)
        .detail("this device reaches page-locked memory by another address than the host"))
}

/// Does it lie in one registration? Memory that was taken as it is, not page-locked, does not.
pub(super) fn is_registered(pinned: PinnedRange) -> bool {
    within_one(&registered(), pinned)
}

pub(super) fn check_copy(
    pinned: PinnedRange,
    device: DeviceRange,
    op: &'static str,
) -> Result<usize> {
    if pinned.len() != device.len() {
        return Err(Error::usage(Misuse::LengthMismatch, op).detail(format!(
            "{} pinned, {} on the device",
            pinned.len(),
            device.len()
        )));
    }
    if pinned.is_empty() {
        return Err(Error::usage(Misuse::Empty, op));
    }
    if !within_one(&registered(), pinned) && !is_pageable(pinned) {
        return Err(Error::usage(Misuse::OutOfRange, op)
            .bytes(pinned.len())
            .detail("the pinned range does not lie in one registration"));
    }
    pinned.len().to_usize()
}

impl Cuda {
    pub(super) fn enqueue_out(
        &mut self,
        to: PinnedRange,
        from: DeviceRange,
        on: StreamId,
    ) -> Result<()> {
        const OP: &str = "copy_out";
        let entered = self.context.enter(OP)?;
        let len = check_copy(to, from, OP)?;
        let stream = self.streams.ready(on, &entered, OP)?;
        let host = ptr::with_exposed_provenance_mut(to.at().0 as usize);
        // SAFETY: the target lies in one live registration, whose owner keeps it mapped until no
        // copy is in flight; no reference is made to it. The stream is alive and of this context.
        entered
            .check(unsafe { entered.driver().cuMemcpyDtoHAsync_v2(host, from.at().0, len, stream) })
    }

    pub(super) fn enqueue_in(
        &mut self,
        to: DeviceRange,
        from: PinnedRange,
        on: StreamId,
    ) -> Result<()> {
        const OP: &str = "copy_in";
        let entered = self.context.enter(OP)?;
        let len = check_copy(from, to, OP)?;
        let stream = self.streams.ready(on, &entered, OP)?;
        let host = ptr::with_exposed_provenance(from.at().0 as usize);
        // SAFETY: as in `enqueue_out`, with the registration as the source.
        entered
            .check(unsafe { entered.driver().cuMemcpyHtoDAsync_v2(to.at().0, host, len, stream) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(at: u64, len: u64) -> PinnedRange {
        PinnedRange::new(PinnedPtr(at), Bytes(len)).unwrap()
    }

    #[test]
    fn a_range_across_two_neighbouring_registrations_is_in_neither() {
        let ranges = Ranges::from([(0x1000, 0x1000), (0x2000, 0x1000)]);
        assert!(within_one(&ranges, range(0x1000, 0x1000)));
        assert!(within_one(&ranges, range(0x2fff, 1)));
        for (at, len) in [(0x1fff, 2), (0xfff, 2), (0x2fff, 2), (0x3000, 1), (0, 1)] {
            assert!(!within_one(&ranges, range(at, len)), "{at:#x} {len}");
        }
    }

    #[test]
    fn a_registration_that_shares_a_byte_with_another_is_seen() {
        let ranges = Ranges::from([(0x1000, 0x1000)]);
        for (at, len) in [(0x1fff, 1), (0x800, 0x801), (0x1400, 4), (0x800, 0x4000)] {
            assert!(touches_any(&ranges, at, len), "{at:#x} {len}");
        }
        for (at, len) in [(0x2000, 8), (0x800, 0x800), (0, 1)] {
            assert!(!touches_any(&ranges, at, len), "{at:#x} {len}");
        }
    }
}
