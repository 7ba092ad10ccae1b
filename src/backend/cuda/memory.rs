//! Device memory: a pool of our own, and the account of what was taken from it.
//!
//! What it is not: an allocator. The driver's stream-ordered pool is one, and it knows which freed
//! bytes a stream may have again.
//!
//! Invariant: an address is in the account from the moment the driver gave it until the moment the
//! driver took it back; nothing else is ever freed here.
//!
//! ```text
//!   alloc(len, stream) -> pool has room? -> address                         account: + len
//!                         no: give cached bytes back to the device, once more, else OutOfMemory
//!   free(at, stream)   -> in the account? -> takes effect when the stream gets there  - len
//! ```
//!
//! The pool keeps every freed byte for the next allocation (its release threshold is unlimited), so
//! that a step in its steady state maps no memory; it gives bytes back when memory runs out, and
//! when the last `Cuda` of the device goes. It is ours and not the device's default pool, whose
//! settings belong to the application. It is made at the first allocation: who only moves storages
//! of a framework never has one, and who scatters rows has one for the longest batch, which comes
//! in whole before a kernel spreads it. `Memory::free` counts what the pool keeps as used.
//!
//! A device without pools gets `cuMemAlloc` and `cuMemFree`, which know no streams: there a free
//! waits until the device is idle.
//!
//! `Cuda` alone uses it.

use super::Cuda;
use super::code::OUT_OF_MEMORY;
use super::context::{Entered, lock};
use crate::backend::Memory;
use crate::error::{Error, Misuse, Result};
use crate::unit::{Bytes, DevicePtr, DeviceRange, StreamId};
use cudarc::driver::sys::{
    CUdeviceptr, CUmemAllocationHandleType, CUmemAllocationType, CUmemLocation, CUmemLocationType,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUmemorytype, CUpointer_attribute, CUstream,
};
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

/// A device's pool, once something was allocated.
#[derive(Debug)]
pub(super) struct Pool {
    supported: bool,
    raw: Option<usize>,
}

impl Pool {
    pub(super) fn new(supported: bool) -> Pool {
        Pool { supported, raw: None }
    }

    pub(super) fn take(&mut self) -> Option<CUmemoryPool> {
        self.raw.take().map(|raw| raw as CUmemoryPool)
    }

    /// The pool, where there is one by now.
    pub(super) fn made(&self) -> Option<CUmemoryPool> {
        self.raw.map(|raw| raw as CUmemoryPool)
    }

    /// The pool, made now where there is none; `None` on a device that has no pools.
    fn get(&mut self, entered: &Entered<'_>, device: u32) -> Result<Option<CUmemoryPool>> {
        if !self.supported {
            return Ok(None);
        }
        if let Some(raw) = self.raw {
            return Ok(Some(raw as CUmemoryPool));
        }
        let props = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: device as i32,
            },
            win32SecurityAttributes: ptr::null_mut(),
            maxSize: 0, // as large as the device
            usage: 0,
            reserved: [0; 54],
        };
        let mut pool: CUmemoryPool = ptr::null_mut();
        // SAFETY: the properties are filled in whole; valid pointers; the context is current.
        entered.check(unsafe { entered.driver().cuMemPoolCreate(&mut pool, &props) })?;
        let keep = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let mut all = u64::MAX;
        let value = (&raw mut all).cast();
        // SAFETY: this attribute's value is one 64-bit number, read during the call.
        let answer = unsafe { entered.driver().cuMemPoolSetAttribute(pool, keep, value) };
        if let Err(error) = entered.check(answer) {
            if error.is_lost() {
                return Err(error);
            }
            // SAFETY: the pool was made above and nothing was taken from it.
            let destroyed = entered.check(unsafe { entered.driver().cuMemPoolDestroy(pool) });
            // What the driver keeps of it then is nothing. A loss is what there is to tell.
            return Err(destroyed.err().filter(Error::is_lost).unwrap_or(error));
        }
        self.raw = Some(pool as usize);
        Ok(Some(pool))
    }
}

/// What one `Cuda` took and did not give back yet.
#[derive(Debug, Default)]
pub(super) struct Account {
    lens: HashMap<u64, u64>,
    allocated: u64,
    peak: u64,
}

impl Account {
    fn add(&mut self, at: u64, len: u64) {
        let before = self.lens.insert(at, len);
        assert!(before.is_none(), "the driver gave out an address that it had not got back");
        self.add_apart(len);
    }

    /// Counts memory that has no address of its own.
    pub(super) fn add_apart(&mut self, len: u64) {
        self.allocated += len;
        self.peak = self.peak.max(self.allocated);
    }

    /// Such memory was given back.
    pub(super) fn remove_apart(&mut self, len: u64) {
        self.allocated -= len;
    }

    fn remove(&mut self, at: u64) {
        self.allocated -= self.lens.remove(&at).unwrap_or(0);
    }
}

impl Cuda {
    pub(super) fn take_bytes(&mut self, len: Bytes, on: StreamId) -> Result<DevicePtr> {
        const OP: &str = "alloc_device";
        self.context.check(OP)?;
        if len.is_zero() {
            return Err(Error::usage(Misuse::Empty, OP));
        }
        let size = len.to_usize()?;
        let entered = self.context.enter_relaxed(OP)?;
        let stream = self.streams.ready(on, &entered, OP)?;
        let pool = lock(&self.context.pool).get(&entered, self.context.about.device.0)?;
        let taken = match pool {
            Some(pool) => from_pool(&entered, pool, size, stream),
            None => from_device(&entered, size),
        };
        let at = taken.map_err(|error| error.bytes(len))?;
        self.account.add(at, len.0);
        Ok(DevicePtr(at))
    }

    pub(super) fn give_bytes(&mut self, at: DevicePtr, on: StreamId) -> Result<()> {
        const OP: &str = "free_device";
        self.context.check(OP)?;
        if !self.account.lens.contains_key(&at.0) {
            return Err(Error::usage(Misuse::Stale, OP)
                .detail(format!("{at:?} is no allocation of this backend")));
        }
        let entered = self.context.enter_relaxed(OP)?;
        let stream = self.streams.ready(on, &entered, OP)?;
        if lock(&self.context.pool).supported {
            // SAFETY: the address came from our pool and is freed once (the account drops it
            // below); the stream is alive and of this context.
            entered.check(unsafe { entered.driver().cuMemFreeAsync(at.0, stream) })?;
        } else {
            // Not for the whole context: that would end a capture of somebody else's.
            // SAFETY: the stream is alive, and not being captured.
            entered.check(unsafe { entered.driver().cuStreamSynchronize(stream) })?;
            // SAFETY: the address came from cuMemAlloc and is freed once; what used the bytes was
            // before this point of the stream.
            entered.check(unsafe { entered.driver().cuMemFree_v2(at.0) })?;
        }
        self.account.remove(at.0);
        Ok(())
    }

    /// What the driver knows of an address. Of mapped memory that is all that was reserved there.
    pub(super) fn allocation_at(&self, at: DevicePtr) -> Result<DeviceRange> {
        const OP: &str = "allocation";
        let entered = self.context.enter(OP)?;
        let mut kind = 0 as c_uint;
        let mut device: c_int = -1;
        let mut start: CUdeviceptr = 0;
        let mut len: usize = 0;
        let mut which = [
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ];
        let mut values: [*mut c_void; 4] = [
            (&raw mut kind).cast(),
            (&raw mut device).cast(),
            (&raw mut start).cast(),
            (&raw mut len).cast(),
        ];
        let count = which.len() as c_uint;
        // SAFETY: as many attributes as places; each place is valid, and of its attribute's type as
        // cuda.h has it (an enum of 32 bits, an int, an address, a size). Any address may be asked
        // about: of one that is nobody's the driver says that it is of no kind.
        let answer = unsafe {
            let (which, values) = (which.as_mut_ptr(), values.as_mut_ptr());
            entered.driver().cuPointerGetAttributes(count, which, values, at.0)
        };
        entered.check(answer)?;
        if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint {
            return Err(Error::usage(Misuse::OutOfRange, OP)
                .detail(format!("no device memory is at {:#x}", at.0)));
        }
        if i64::from(device) != i64::from(self.context.about.device.0) {
            return Err(Error::usage(Misuse::WrongDevice, OP)
                .detail(format!("the bytes at {:#x} are on device {device}", at.0)));
        }
        DeviceRange::new(DevicePtr(start), Bytes(len as u64))
    }

    pub(super) fn memory_now(&self) -> Result<Memory> {
        let entered = self.context.enter_relaxed("memory")?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid pointers; the context is current.
        entered.check(unsafe { entered.driver().cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(Memory {
            free: Bytes(free as u64),
            total: Bytes(total as u64),
            allocated: Bytes(self.account.allocated),
            peak: Bytes(self.account.peak),
        })
    }

    pub(super) fn forget_peak(&mut self) {
        self.account.peak = self.account.allocated;
    }
}

fn from_pool(
    entered: &Entered<'_>,
    pool: CUmemoryPool,
    size: usize,
    stream: CUstream,
) -> Result<CUdeviceptr> {
    let driver = entered.driver();
    let mut at: CUdeviceptr = 0;
    // SAFETY: the pool and the stream are alive and of the current context; valid pointer.
    let mut answer = unsafe { driver.cuMemAllocFromPoolAsync(&mut at, size, pool, stream) };
    if answer.code == OUT_OF_MEMORY {
        trim(entered, pool)?;
        // SAFETY: as above.
        answer = unsafe { driver.cuMemAllocFromPoolAsync(&mut at, size, pool, stream) };
    }
    entered.check(answer)?;
    Ok(at)
}

/// What lies free in the pool in pieces goes back to the device, to be asked for as one. Only a
/// loss is an error: a trim that was refused frees nothing, and the want of memory is still what
/// there is to tell. The pool is alive.
pub(super) fn trim(entered: &Entered<'_>, pool: CUmemoryPool) -> Result<()> {
    // SAFETY: the pool is alive, says the caller; bytes in use are not touched by a trim.
    let trimmed = entered.check(unsafe { entered.driver().cuMemPoolTrimTo(pool, 0) });
    trimmed.or_else(|error| if error.is_lost() { Err(error) } else { Ok(()) })
}

fn from_device(entered: &Entered<'_>, size: usize) -> Result<CUdeviceptr> {
    let mut at: CUdeviceptr = 0;
    // SAFETY: valid pointer; the context is current.
    entered.check(unsafe { entered.driver().cuMemAlloc_v2(&mut at, size) })?;
    Ok(at)
}
