//! Mapped memory: addresses that stay, and physical memory that is mapped there and taken away.
//!
//! What it is not: stream-ordered. `cuMemMap` and `cuMemUnmap` take effect at once, whatever is
//! enqueued; that nothing uses the bytes is the caller's word.
//!
//! Invariant: a range is mapped as a whole, readable and writable, or nothing is mapped there: what
//! fails half way is undone. Where even that fails nobody knows what is mapped, and the device
//! counts as lost.
//!
//! ```text
//!   reserve  cuMemAddressReserve     create  cuMemCreate (no room: the pool is trimmed, again)
//!   map      cuMemMap each -> cuMemSetAccess over all     fails: cuMemUnmap what was mapped
//! ```
//!
//! `Cuda` alone uses it.

use super::Cuda;
use super::code::{Answer, OUT_OF_MEMORY, SUCCESS};
use super::context::{Entered, lock};
use super::driver::MappingCalls;
use super::memory;
use crate::backend::cannot_map;
use crate::backend::mapping::{Books, check_len};
use crate::error::Result;
use crate::unit::{Bytes, DevicePtr, DeviceRange, MemoryId};
use cudarc::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};
use std::ptr;

/// What one `Cuda` has reserved, taken and mapped.
#[derive(Debug)]
pub(super) struct Mapped {
    books: Books<CUmemGenericAllocationHandle>,
    /// Asked of the driver once.
    granularity: Option<Bytes>,
}

impl Mapped {
    pub(super) fn new() -> Mapped {
        Mapped { books: Books::new(), granularity: None }
    }
}

impl Cuda {
    /// The driver's functions, where device and driver have what it takes.
    fn mapping(&self, op: &'static str) -> Result<&'static MappingCalls> {
        self.context.check(op)?;
        if !self.context.can_map {
            return Err(cannot_map(op).detail("the device does not manage virtual memory"));
        }
        self.context.driver.mapping().map_err(|missing| cannot_map(op).detail(missing.to_string()))
    }

    fn location(&self) -> CUmemLocation {
        let type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        CUmemLocation { type_, id: self.context.about.device.0 as i32 }
    }

    fn properties(&self) -> CUmemAllocationProp {
        CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: self.location(),
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    pub(super) fn granularity(&mut self, op: &'static str) -> Result<Bytes> {
        let calls = self.mapping(op)?;
        if let Some(known) = self.mapped.granularity {
            return Ok(known);
        }
        let entered = self.context.enter_relaxed(op)?;
        let properties = self.properties();
        let which = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        let mut bytes = 0;
        // SAFETY: valid pointers; the properties are filled in whole.
        entered.check(unsafe {
            calls.cuMemGetAllocationGranularity(&mut bytes, &properties, which)
        })?;
        if bytes == 0 {
            return Err(cannot_map(op).detail("the driver names no granularity"));
        }
        let bytes = Bytes(bytes as u64);
        self.mapped.granularity = Some(bytes);
        Ok(bytes)
    }

    pub(super) fn take_range(&mut self, len: Bytes) -> Result<DeviceRange> {
        const OP: &str = "reserve_range";
        let calls = self.mapping(OP)?;
        check_len(len, self.granularity(OP)?, OP)?;
        let size = len.to_usize()?;
        let entered = self.context.enter_relaxed(OP)?;
        let mut at: CUdeviceptr = 0;
        // SAFETY: valid pointer; alignment and wish 0 leave both to the driver; flags must be 0.
        let answer = unsafe { calls.cuMemAddressReserve(&mut at, size, 0, 0, 0) };
        entered.check(answer).map_err(|error| error.bytes(len))?;
        let range = DeviceRange::new(DevicePtr(at), len)?;
        self.mapped.books.reserved(range);
        Ok(range)
    }

    pub(super) fn give_range(&mut self, range: DeviceRange) -> Result<()> {
        const OP: &str = "release_range";
        let calls = self.mapping(OP)?;
        self.mapped.books.check_release(range, OP)?;
        let (at, size) = (range.at().0, range.len().to_usize()?);
        let entered = self.context.enter_relaxed(OP)?;
        // SAFETY: reserved here with this length, nothing is mapped there; out of the books next.
        entered.check(unsafe { calls.cuMemAddressFree(at, size) })?;
        self.mapped.books.released(range);
        Ok(())
    }

    pub(super) fn take_memory(&mut self, len: Bytes) -> Result<MemoryId> {
        const OP: &str = "create_memory";
        let calls = self.mapping(OP)?;
        check_len(len, self.granularity(OP)?, OP)?;
        self.mapped.books.check_room(OP)?;
        let size = len.to_usize()?;
        let entered = self.context.enter_relaxed(OP)?;
        let properties = self.properties();
        let mut handle: CUmemGenericAllocationHandle = 0;
        let mut create = || {
            // SAFETY: valid pointers; the properties are filled in whole; flags must be 0.
            unsafe { calls.cuMemCreate(&mut handle, size, &properties, 0) }
        };
        let mut answer = create();
        let pool = lock(&self.context.pool).made();
        if let (OUT_OF_MEMORY, Some(pool)) = (answer.code, pool) {
            memory::trim(&entered, pool)?;
            answer = create();
        }
        entered.check(answer).map_err(|error| error.bytes(len))?;
        self.account.add_apart(len.0);
        self.mapped.books.created(handle, len, OP)
    }

    pub(super) fn give_memory(&mut self, memory: MemoryId) -> Result<()> {
        const OP: &str = "close_memory";
        let calls = self.mapping(OP)?;
        let (handle, len) = self.mapped.books.idle(memory, OP)?;
        let entered = self.context.enter_relaxed(OP)?;
        // SAFETY: taken here, mapped nowhere, and out of the books right after.
        entered.check(unsafe { calls.cuMemRelease(handle) })?;
        self.account.remove_apart(len.0);
        self.mapped.books.closed(memory, OP)
    }

    pub(super) fn map_all(&mut self, range: DeviceRange, memory: &[MemoryId]) -> Result<()> {
        const OP: &str = "map_memory";
        let calls = self.mapping(OP)?;
        self.mapped.books.check_map(range, memory, OP)?;
        let (at, size) = (range.at().0, range.len().to_usize()?);
        let entered = self.context.enter_relaxed(OP)?;
        let mut done = 0;
        for id in memory {
            let (handle, len) = self.mapped.books.idle(*id, OP)?;
            let len = len.to_usize()?;
            // SAFETY: the handle is alive and has this length; the addresses are reserved here,
            // nothing is mapped there; offset and flags must be 0.
            let answer = unsafe { calls.cuMemMap(at + done as u64, len, 0, handle, 0) };
            if answer.code != SUCCESS {
                return Err(undo(calls, &entered, (at, done), answer).bytes(range.len()));
            }
            done += len;
        }
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let who = CUmemAccessDesc { location: self.location(), flags };
        // SAFETY: all of these bytes were mapped above; one descriptor, read during the call.
        let answer = unsafe { calls.cuMemSetAccess(at, size, &who, 1) };
        if answer.code != SUCCESS {
            return Err(undo(calls, &entered, (at, size), answer).bytes(range.len()));
        }
        self.mapped.books.mapped(range, memory);
        Ok(())
    }

    pub(super) fn unmap_all(&mut self, range: DeviceRange) -> Result<()> {
        const OP: &str = "unmap_memory";
        let calls = self.mapping(OP)?;
        self.mapped.books.check_unmap(range, OP)?;
        let (at, size) = (range.at().0, range.len().to_usize()?);
        let entered = self.context.enter_relaxed(OP)?;
        // SAFETY: all of these bytes are mapped, by mappings that end with the range; that nothing
        // uses them any more is the caller's word, and what breaks it is the device, not this
        // process.
        entered.check(unsafe { calls.cuMemUnmap(at, size) })?;
        self.mapped.books.unmapped(range);
        Ok(())
    }
}

/// Undoes a mapping that failed half way; the error of what failed.
fn undo(
    calls: &MappingCalls,
    entered: &Entered<'_>,
    (at, done): (CUdeviceptr, usize),
    failed: Answer,
) -> crate::error::Error {
    let error = match entered.check(failed) {
        Err(error) => error,
        Ok(()) => entered.lost(failed),
    };
    // A device that is lost is not touched any more.
    if done == 0 || error.is_lost() {
        return error;
    }
    // SAFETY: these bytes were mapped just now, and nobody knows of them.
    let answer = unsafe { calls.cuMemUnmap(at, done) };
    if answer.code == SUCCESS { error } else { entered.lost(answer) }
}
