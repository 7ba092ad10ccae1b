//! Real bytes behind simulated addresses: a device's memory, pinned registrations, adopted memory.
//!
//! What it is not: an allocator (`room` is) or a mapper of pinned memory (the pinned arena is).
//!
//! Invariant: a region with holds is in use by queued ops and is not taken away. No reference is
//! ever made to any of these bytes here; they are reached by pointer and length. Where the world
//! moves no bytes there are none behind a device's addresses, and no pointer is followed. Of bytes
//! that are nobody's on the device the host keeps no more than [`WARM_BYTES_MAX`] for each kind; of
//! those freed, after each call that takes some or waits for the device.
//!
//! ```text
//!   1 << 60 + (d << 52) + offset   device d      -> its backing; itself where nothing moves
//!   the same + (1 << 51) + offset   mapped         -> a backing of its own, while it is mapped
//!   1 << 61 ...                    pinned        -> the mapping passed to `register`
//!   below 1 << 47                  adopted       -> itself
//! ```
//!
//! The simulated device may use it.

use super::room::GRAIN_BYTES;
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::Bytes;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;

const DEVICE_BASE: u64 = 1 << 60;
const DEVICE_SHIFT: u32 = 52;
/// First simulated address of pinned memory.
pub(super) const PINNED_BASE: u64 = 1 << 61;
const PAGE_BYTES: u64 = 4096;

/// Host memory that a device keeps for bytes that were freed, and as much for bytes that were
/// unmapped: those who take bytes again and again need not be given fresh pages each time.
pub(super) const WARM_BYTES_MAX: u64 = 256 << 20;

/// Where a device's addresses for mapped memory begin, beyond its first one.
pub(super) const MAPPED_OFFSET: u64 = 1 << 51;

/// First simulated address of a device.
pub(super) fn device_base(device: u32) -> u64 {
    DEVICE_BASE + (u64::from(device) << DEVICE_SHIFT)
}

/// Whose address it is, if it is one of a device's own.
pub(super) fn device_of(at: u64) -> Option<u32> {
    let is_own = (DEVICE_BASE..PINNED_BASE).contains(&at);
    is_own.then(|| ((at - DEVICE_BASE) >> DEVICE_SHIFT) as u32)
}

/// Where some simulated bytes really are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostPtr(*mut u8);

// SAFETY: it is an address; the bytes behind it are touched only while the world's lock is held.
unsafe impl Send for HostPtr {}

impl HostPtr {
    pub(super) fn new(at: *mut u8) -> HostPtr {
        HostPtr(at)
    }

    pub(super) fn get(self) -> *mut u8 {
        self.0
    }

    /// The address `offset` bytes on; the caller has checked that it stays in its region.
    pub(super) fn offset(self, offset: u64) -> HostPtr {
        HostPtr(self.0.wrapping_add(offset as usize))
    }

    /// Copies `len` bytes at offset `at` from `source` to the same offset here.
    pub(super) fn copy_from(self, source: HostPtr, at: usize, len: usize) {
        // SAFETY: both ranges were checked when the copy was enqueued to lie in a device's backing,
        // which lives as long as the world, or in a region, which its holds keep in place. They may
        // overlap where adopted memory is also pinned, so this is a move.
        unsafe { std::ptr::copy(source.0.add(at), self.0.add(at), len) }
    }

    /// Sets `len` bytes to `value`.
    pub(super) fn fill(self, len: usize, value: u8) {
        // SAFETY: only a device's own backing is filled, in ranges its allocator handed out.
        unsafe { std::ptr::write_bytes(self.0, value, len) }
    }
}

/// A device's memory. Small ones come from the heap, which keeps a short test short; large ones are
/// mapped without reservation, so that a device as large as a real one costs what is used of it.
#[derive(Debug)]
pub(super) struct Backing {
    at: HostPtr,
    len: usize,
    from: Origin,
}

/// Where a device's memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Heap,
    Mapping,
    /// There is none.
    Nowhere,
}

const HEAP_BYTES_MAX: usize = 128 << 10;

impl Backing {
    pub(super) fn new(len: u64) -> Result<Backing> {
        let len = Bytes(len.max(GRAIN_BYTES)).to_usize()?;
        if len <= HEAP_BYTES_MAX {
            return Backing::on_heap(len);
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh anonymous mapping at an address of the system's choice disturbs nothing.
        let mapped = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)
        };
        match mapped {
            Ok(at) => Ok(Backing { at: HostPtr(at.cast()), len, from: Origin::Mapping }),
            Err(Errno::NOMEM) => Err(no_backing(len, "address space: see ulimit -v")),
            Err(_) => Err(no_backing(len, "the system refused to map it")),
        }
    }

    fn on_heap(len: usize) -> Result<Backing> {
        let layout = heap_layout(len)?;
        // SAFETY: the length is not zero.
        let at = unsafe { alloc_zeroed(layout) };
        if at.is_null() {
            Err(no_backing(len, "the heap is full"))
        } else {
            Ok(Backing { at: HostPtr(at), len, from: Origin::Heap })
        }
    }

    /// Addresses without memory, for a world that moves no bytes: overlaps still show in them, and
    /// the processor refuses them all.
    pub(super) fn none(address: u64) -> Backing {
        let at = std::ptr::without_provenance_mut(address as usize);
        Backing { at: HostPtr(at), len: 0, from: Origin::Nowhere }
    }

    /// Gives the host's memory back for bytes that nobody has, as far as they fill pages.
    pub(super) fn give_back(&self, offset: u64, len: u64) {
        let from = offset.next_multiple_of(PAGE_BYTES);
        let to = (offset + len) / PAGE_BYTES * PAGE_BYTES;
        if self.from != Origin::Mapping || from >= to {
            return;
        }
        assert!(to as usize <= self.len, "what is given back lies in the device");
        let at = self.at(from).get().cast();
        // SAFETY: whole pages of this mapping, which stays: they read as zeros from now on. No
        // reference to them exists, and the device lends their bytes to nobody now. A refusal
        // leaves them as they are.
        let _ = unsafe { madvise(at, (to - from) as usize, Advice::LinuxDontNeed) };
    }

    pub(super) fn at(&self, offset: u64) -> HostPtr {
        self.at.offset(offset)
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        match self.from {
            Origin::Mapping => {
                // SAFETY: the mapping was made by `new` and nobody has it any more: ops go with
                // the world. A refusal would leave it mapped, which is harmless.
                let _ = unsafe { munmap(self.at.0.cast(), self.len) };
            }
            Origin::Heap => {
                if let Ok(layout) = heap_layout(self.len) {
                    // SAFETY: allocated by `on_heap` with this same layout.
                    unsafe { dealloc(self.at.0, layout) }
                }
            }
            Origin::Nowhere => {}
        }
    }
}

fn heap_layout(len: usize) -> Result<Layout> {
    Layout::from_size_align(len, GRAIN_BYTES as usize)
        .map_err(|_| Error::usage(Misuse::TooLarge, "device").bytes(Bytes(len as u64)))
}

fn no_backing(len: usize, what: &'static str) -> Error {
    Error::new(Kind::OutOfMemory, "device")
        .bytes(Bytes(len as u64))
        .detail(format!("the host has no room for the simulated device's memory ({what})"))
}

/// Host memory that devices may reach.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) at: HostPtr,
    pub(super) len: u64,
    /// Uses by queued ops.
    holds: u32,
    /// The device that adopted it; `None` for pinned memory, which all may reach.
    device: Option<u32>,
}

/// Pinned and adopted memory, by the address at which devices see it.
#[derive(Debug, Default)]
pub(super) struct Regions {
    all: BTreeMap<u64, Region>,
    pinned_next: u64,
}

impl Regions {
    /// Adds a registration. Simulated addresses follow one another without a gap, whatever the real
    /// ones are: equal programs see equal addresses, and a range may span two registrations.
    pub(super) fn pin(&mut self, at: HostPtr, len: u64) -> Result<u64> {
        let overlaps = |region: &Region| {
            region.device.is_none()
                && (region.at.0 as u64) < at.0 as u64 + len
                && (at.0 as u64) < region.at.0 as u64 + region.len
        };
        if self.all.values().any(overlaps) {
            return Err(Error::usage(Misuse::Overlap, "register").detail("pinned already"));
        }
        let address = PINNED_BASE + self.pinned_next;
        self.pinned_next += len.next_multiple_of(PAGE_BYTES);
        self.all.insert(address, Region { at, len, holds: 0, device: None });
        Ok(address)
    }

    /// Adds memory of the host as memory of a device.
    pub(super) fn adopt(&mut self, at: HostPtr, len: u64, device: u32) -> Result<u64> {
        let address = at.0 as u64;
        let end = address.checked_add(len).filter(|end| *end <= DEVICE_BASE);
        let end = end.ok_or_else(|| Error::usage(Misuse::TooLarge, "adopt_host"))?;
        let before = self.all.range(..end).next_back();
        if before.is_some_and(|(start, region)| start + region.len > address) {
            return Err(Error::usage(Misuse::Overlap, "adopt_host"));
        }
        self.all.insert(address, Region { at, len, holds: 0, device: Some(device) });
        Ok(address)
    }

    /// Adds memory that was mapped at addresses of a device.
    pub(super) fn map(&mut self, address: u64, at: HostPtr, len: u64, device: u32) {
        let region = Region { at, len, holds: 0, device: Some(device) };
        let before = self.all.insert(address, region);
        assert!(before.is_none(), "a range is mapped once");
    }

    /// Takes what was mapped away, whoever uses it; says whether queued ops did.
    pub(super) fn unmap(&mut self, address: u64) -> bool {
        self.all.remove(&address).is_some_and(|region| region.holds > 0)
    }

    /// Takes a region away; refused while a queued op uses it.
    pub(super) fn remove(&mut self, at: u64, device: Option<u32>, op: &'static str) -> Result<()> {
        match self.all.get(&at) {
            Some(region) if region.device != device => Err(Error::usage(Misuse::Foreign, op)),
            None => Err(Error::usage(Misuse::Stale, op).detail("no such region")),
            Some(region) if region.holds > 0 => {
                Err(Error::new(Kind::Busy, op).detail("queued work uses these bytes"))
            }
            Some(_) => {
                self.all.remove(&at);
                Ok(())
            }
        }
    }

    /// The region in which all these bytes lie, and where they really are.
    pub(super) fn find(&self, at: u64, len: u64, device: Option<u32>) -> Option<(u64, HostPtr)> {
        let (start, region) = self.all.range(..=at).next_back()?;
        let end = at.checked_add(len)?;
        let fits = end <= start + region.len && region.device == device;
        fits.then(|| (*start, region.at.offset(at - start)))
    }

    /// Where the region starts that an address lies in, and how long it is.
    pub(super) fn around(&self, at: u64, device: Option<u32>) -> Option<(u64, u64)> {
        let (start, region) = self.all.range(..=at).next_back()?;
        (at < start + region.len && region.device == device).then_some((*start, region.len))
    }

    pub(super) fn hold(&mut self, region: u64) {
        if let Some(region) = self.all.get_mut(&region) {
            region.holds += 1;
        }
    }

    pub(super) fn release(&mut self, region: u64) {
        if let Some(region) = self.all.get_mut(&region) {
            assert!(region.holds > 0, "a region is released as often as it is held");
            region.holds -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_beyond_the_address_space_says_which_limit_to_look_at() {
        let error = Backing::new(1 << 50).unwrap_err();
        assert_eq!(error.kind(), Kind::OutOfMemory);
        let said = error.to_string();
        assert!(said.contains("address space: see ulimit -v") && !said.contains('\n'), "{said}");
    }
}
