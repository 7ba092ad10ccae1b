//! The driver's own calls for mapped memory, with the handle kept.
//!
//! What it is not: a binding. It maps one piece of memory of one device at one address.
//!
//! Invariant: the device's context is current, as [`Driver::open`](crate::driver::Driver::open)
//! leaves it; between calls the memory is mapped.
//!
//! ```text
//!   new: reserve, create, map, set access      remap: unmap, map, set access      close: all back
//! ```
//!
//! `address` uses it.

use crate::driver::Refused;
use libloading::Library;
use lightering::{Bytes, DevicePtr, DeviceRange, Result};
use std::ffi::c_int;

/// `CUmemAllocationProp` of `cuda.h`: pinned memory (1) with no handle to share (0), of a device.
#[repr(C)]
struct Properties {
    kind: u32,
    shared_as: u32,
    location: Location,
    windows: usize,
    flags: [u8; 8],
}

/// `CUmemLocation`: a device (1), by its ordinal.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: u32,
    id: c_int,
}

/// `CUmemAccessDesc`: to read and write (3).
#[repr(C)]
struct Access {
    location: Location,
    flags: u32,
}

/// Memory that is mapped.
pub(crate) struct Mapping {
    unmap: unsafe extern "C" fn(u64, usize) -> c_int,
    map: unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int,
    set_access: unsafe extern "C" fn(u64, usize, *const Access, usize) -> c_int,
    release: unsafe extern "C" fn(u64) -> c_int,
    free: unsafe extern "C" fn(u64, usize) -> c_int,
    access: Access,
    at: u64,
    len: usize,
    handle: u64,
    /// The functions live in it.
    _library: Library,
}

impl Mapping {
    /// Maps `bytes`, a multiple of 2 MiB.
    pub(crate) fn new(ordinal: u32, bytes: Bytes) -> std::result::Result<Mapping, Refused> {
        let missing = |error: libloading::Error| Refused(error.to_string());
        // SAFETY: the driver's library runs no code of ours when it is loaded.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(missing)?;
        macro_rules! call {
            ($name:literal) => {
                // SAFETY: the type is the documented signature of the function of that name.
                *unsafe { library.get($name) }.map_err(missing)?
            };
        }
        let reserve: unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int =
            call!(b"cuMemAddressReserve\0");
        let create: unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> c_int =
            call!(b"cuMemCreate\0");
        let location = Location { kind: 1, id: ordinal as c_int };
        let of = Properties { kind: 1, shared_as: 0, location, windows: 0, flags: [0; 8] };
        let (mut at, mut handle, len) = (0, 0, bytes.0 as usize);
        // SAFETY: valid pointers; alignment and wish are the driver's choice; no flags.
        check(unsafe { reserve(&mut at, len, 0, 0, 0) }, "cuMemAddressReserve")?;
        // SAFETY: valid pointers, the properties filled in whole; no flags.
        check(unsafe { create(&mut handle, len, &of, 0) }, "cuMemCreate")?;
        let mapping = Mapping {
            unmap: call!(b"cuMemUnmap\0"),
            map: call!(b"cuMemMap\0"),
            set_access: call!(b"cuMemSetAccess\0"),
            release: call!(b"cuMemRelease\0"),
            free: call!(b"cuMemAddressFree\0"),
            access: Access { location, flags: 3 },
            at,
            len,
            handle,
            _library: library,
        };
        mapping.map()?;
        Ok(mapping)
    }

    /// Where it is mapped.
    pub(crate) fn range(&self) -> Result<DeviceRange> {
        DeviceRange::new(DevicePtr(self.at), Bytes(self.len as u64))
    }

    /// Takes the memory away and maps it again.
    pub(crate) fn remap(&self) -> std::result::Result<(), Refused> {
        self.unmap()?;
        self.map()
    }

    /// Gives everything back.
    pub(crate) fn close(self) -> std::result::Result<(), Refused> {
        self.unmap()?;
        // SAFETY: the handle is alive and mapped nowhere; it is not used again.
        check(unsafe { (self.release)(self.handle) }, "cuMemRelease")?;
        // SAFETY: reserved with this length; nothing is mapped there.
        check(unsafe { (self.free)(self.at, self.len) }, "cuMemAddressFree")
    }

    fn map(&self) -> std::result::Result<(), Refused> {
        // SAFETY: reserved addresses where nothing is mapped; a live handle of this length.
        check(unsafe { (self.map)(self.at, self.len, 0, self.handle, 0) }, "cuMemMap")?;
        // SAFETY: mapped just now; one descriptor, read during the call.
        let code = unsafe { (self.set_access)(self.at, self.len, &self.access, 1) };
        check(code, "cuMemSetAccess")
    }

    fn unmap(&self) -> std::result::Result<(), Refused> {
        // SAFETY: mapped; the device was waited for, so nothing uses the bytes.
        check(unsafe { (self.unmap)(self.at, self.len) }, "cuMemUnmap")
    }
}

fn check(code: c_int, call: &str) -> std::result::Result<(), Refused> {
    if code == 0 { Ok(()) } else { Err(Refused(format!("{call}: driver code {code}"))) }
}
