//! The driver's own calls, without the crate: what everything else is compared with.
//!
//! What it is not: a binding. It has the calls that a copy needs, with their documented signatures.
//!
//! Invariant: the device's context is current on the thread that measures, from `open` on.
//!
//! ```text
//!   open(ordinal) -> primary context held, current -> copy_out, copy_in, record, wait, query
//! ```
//!
//! The rig uses it; on a simulated device there is none, and the seam's verbs stand in.

use libloading::Library;
use lightering::{DeviceRange, PinnedRange};
use std::ffi::{c_int, c_uint, c_void};

type CopyOut = unsafe extern "C" fn(*mut c_void, u64, usize, usize) -> c_int;
type CopyIn = unsafe extern "C" fn(u64, *const c_void, usize, usize) -> c_int;

/// The calls; streams and events are the driver's own handles.
pub(crate) struct Driver {
    copy_out: CopyOut,
    copy_in: CopyIn,
    record: unsafe extern "C" fn(usize, usize) -> c_int,
    wait: unsafe extern "C" fn(usize, usize, c_uint) -> c_int,
    query: unsafe extern "C" fn(usize) -> c_int,
    create: unsafe extern "C" fn(*mut usize, c_uint) -> c_int,
    destroy: unsafe extern "C" fn(usize) -> c_int,
    /// The functions live in it.
    _library: Library,
}

/// What a call answered, where that is not success.
#[derive(Debug)]
pub(crate) struct Refused(pub(crate) String);

/// `CU_EVENT_DISABLE_TIMING` of `cuda.h`.
const TIMING_OFF: c_uint = 2;
/// `CUDA_ERROR_NOT_READY` of `cuda.h`.
const NOT_READY: c_int = 600;

impl Driver {
    /// Looks the calls up and makes the primary context of device `ordinal` current here. The
    /// process keeps its hold on the context until its end.
    pub(crate) fn open(ordinal: u32) -> Result<Driver, Refused> {
        let missing = |error: libloading::Error| Refused(error.to_string());
        // SAFETY: the driver's library runs no code of ours when it is loaded.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(missing)?;
        macro_rules! call {
            ($name:literal) => {
                // SAFETY: the type is the documented signature of the function of that name.
                *unsafe { library.get($name) }.map_err(missing)?
            };
        }
        let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int = call!(b"cuDeviceGet\0");
        let retain: unsafe extern "C" fn(*mut usize, c_int) -> c_int =
            call!(b"cuDevicePrimaryCtxRetain\0");
        let set: unsafe extern "C" fn(usize) -> c_int = call!(b"cuCtxSetCurrent\0");
        let driver = Driver {
            copy_out: call!(b"cuMemcpyDtoHAsync_v2\0"),
            copy_in: call!(b"cuMemcpyHtoDAsync_v2\0"),
            record: call!(b"cuEventRecord\0"),
            wait: call!(b"cuStreamWaitEvent\0"),
            query: call!(b"cuEventQuery\0"),
            create: call!(b"cuEventCreate\0"),
            destroy: call!(b"cuEventDestroy_v2\0"),
            _library: library,
        };
        let (mut device, mut context) = (0, 0);
        // SAFETY: the crate has initialised the driver; valid pointers.
        unsafe {
            check(get(&mut device, ordinal as c_int), "cuDeviceGet")?;
            check(retain(&mut context, device), "cuDevicePrimaryCtxRetain")?;
            check(set(context), "cuCtxSetCurrent")?;
        }
        Ok(driver)
    }

    pub(crate) fn copy_out(
        &self,
        to: PinnedRange,
        from: DeviceRange,
        on: usize,
    ) -> Result<(), Refused> {
        let (host, len) = (to.at().0 as *mut c_void, to.len().0 as usize);
        // SAFETY: both ranges stay as they are until the stream was waited for; a live stream.
        check(unsafe { (self.copy_out)(host, from.at().0, len, on) }, "cuMemcpyDtoHAsync")
    }

    pub(crate) fn copy_in(
        &self,
        to: DeviceRange,
        from: PinnedRange,
        on: usize,
    ) -> Result<(), Refused> {
        let (host, len) = (from.at().0 as *const c_void, from.len().0 as usize);
        // SAFETY: as above.
        check(unsafe { (self.copy_in)(to.at().0, host, len, on) }, "cuMemcpyHtoDAsync")
    }

    pub(crate) fn create_event(&self) -> Result<usize, Refused> {
        let mut event = 0;
        // SAFETY: valid pointer; the context is current.
        check(unsafe { (self.create)(&mut event, TIMING_OFF) }, "cuEventCreate")?;
        Ok(event)
    }

    pub(crate) fn destroy_event(&self, event: usize) -> Result<(), Refused> {
        // SAFETY: made here, and never used again.
        check(unsafe { (self.destroy)(event) }, "cuEventDestroy")
    }

    pub(crate) fn record(&self, event: usize, on: usize) -> Result<(), Refused> {
        // SAFETY: live handles.
        check(unsafe { (self.record)(event, on) }, "cuEventRecord")
    }

    pub(crate) fn wait(&self, on: usize, event: usize) -> Result<(), Refused> {
        // SAFETY: live handles; the flags must be 0.
        check(unsafe { (self.wait)(on, event, 0) }, "cuStreamWaitEvent")
    }

    pub(crate) fn query(&self, event: usize) -> Result<bool, Refused> {
        // SAFETY: a live handle.
        match unsafe { (self.query)(event) } {
            NOT_READY => Ok(false),
            code => check(code, "cuEventQuery").map(|()| true),
        }
    }
}

fn check(code: c_int, call: &str) -> Result<(), Refused> {
    if code == 0 { Ok(()) } else { Err(Refused(format!("{call}: driver code {code}"))) }
}
