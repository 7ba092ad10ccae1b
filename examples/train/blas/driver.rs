//! A hold on a device's primary context, made current for a library that needs one.
//!
//! What it is not: a second backend. The backend makes the context current for its own verbs and
//! puts back what was there; a library such as cuBLAS expects it to be there when it is called.
//!
//! Invariant: the context lives as long as the hold.
//!
//! ```text
//!   libcuda.so.1 -> cuInit -> cuDeviceGet -> cuDevicePrimaryCtxRetain    enter: cuCtxSetCurrent
//! ```
//!
//! `blas` uses it.

use libloading::Library;
use std::ffi::{c_int, c_uint, c_void};

/// The driver's functions that are called here, with their signatures of cuda.h.
#[derive(Clone, Copy, Debug)]
struct Functions {
    init: unsafe extern "C" fn(c_uint) -> u32,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> u32,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> u32,
    release: unsafe extern "C" fn(c_int) -> u32,
    set_current: unsafe extern "C" fn(*mut c_void) -> u32,
}

impl Functions {
    fn get() -> Result<Functions, String> {
        // SAFETY: the driver's library, by its own name; it stays loaded.
        let loaded = unsafe { Library::new("libcuda.so.1") };
        let library = Box::leak(Box::new(loaded.map_err(|error| one_line(&error))?));
        // SAFETY: each name has the signature of its field in cuda.h.
        unsafe {
            Ok(Functions {
                init: symbol(library, "cuInit")?,
                device: symbol(library, "cuDeviceGet")?,
                retain: symbol(library, "cuDevicePrimaryCtxRetain")?,
                release: symbol(library, "cuDevicePrimaryCtxRelease_v2")?,
                set_current: symbol(library, "cuCtxSetCurrent")?,
            })
        }
    }
}

/// The primary context of one device.
#[derive(Debug)]
pub(super) struct Primary {
    functions: Functions,
    device: c_int,
    /// The driver's handle, as a number: what is a pointer to the driver is a name here.
    context: usize,
}

impl Primary {
    /// Takes hold of the device's context; the error is one line.
    pub(super) fn hold(ordinal: u32) -> Result<Primary, String> {
        let functions = Functions::get()?;
        // SAFETY: takes no pointer; a second call does nothing.
        answer("cuInit", unsafe { (functions.init)(0) })?;
        let mut device = 0;
        let wanted = c_int::try_from(ordinal).map_err(|error| error.to_string())?;
        // SAFETY: the driver is started; valid pointer.
        answer("cuDeviceGet", unsafe { (functions.device)(&mut device, wanted) })?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the device is the driver's; valid pointer. Given back in `Drop`.
        let code = unsafe { (functions.retain)(&mut context, device) };
        answer("cuDevicePrimaryCtxRetain", code)?;
        Ok(Primary { functions, device, context: context as usize })
    }

    /// Makes it this thread's current context, and leaves it so.
    pub(super) fn enter(&self) -> Result<(), String> {
        // SAFETY: the context is retained while `self` lives.
        let code = unsafe { (self.functions.set_current)(self.context as *mut c_void) };
        answer("cuCtxSetCurrent", code)
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: no context is always a valid choice; this thread keeps none that may go now.
        let _ = unsafe { (self.functions.set_current)(std::ptr::null_mut()) };
        // SAFETY: gives back the one hold that `hold` took. There is nobody to tell its answer.
        let _ = unsafe { (self.functions.release)(self.device) };
    }
}

/// The library's function of that name.
///
/// # Safety
/// `T` is the function pointer type that the library's header has for the name.
pub(super) unsafe fn symbol<T: Copy>(library: &'static Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller's word for `T`; the library stays loaded.
    let found = unsafe { library.get::<T>(name) };
    found.map(|symbol| *symbol).map_err(|error| one_line(&error))
}

/// An error's words without a line's end.
pub(super) fn one_line(error: &libloading::Error) -> String {
    error.to_string().replace('\n', "; ")
}

fn answer(name: &str, code: u32) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{name} answered {code}")) }
}
