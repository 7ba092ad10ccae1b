//! Page-locked memory as the driver itself gives it: what the pool is measured beside.
//!
//! What it is not: a binding. It has the two calls, and what they need of a context.
//!
//! Invariant: memory is given back once, with the context in which it was taken still current.
//!
//! ```text
//!   Host::open(0): the primary context, current on this thread    take(len) -> Taken -> drop
//! ```
//!
//! `main` uses it. Here is `unsafe`: calls of foreign functions.

use libloading::Library;
use lightering::{Bytes, Error, Kind, Missing, Result};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

type Code = c_int;
type GetDevice = unsafe extern "C" fn(*mut c_int, c_int) -> Code;
type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> Code;
type WithPointer = unsafe extern "C" fn(*mut c_void) -> Code;
type Alloc = unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> Code;

/// Host memory that its drop gives back.
pub(crate) trait Hold {}

/// The driver's own allocations of host memory.
pub(crate) trait Host {
    /// Takes memory, and gives it back when the returned value is dropped.
    fn take(&self, len: Bytes) -> Result<Box<dyn Hold + '_>>;
}

/// CUDA's.
#[derive(Debug)]
pub(crate) struct Cuda {
    _library: Library,
    alloc: Alloc,
    free: WithPointer,
}

/// The flags that the pool registers with: portable, mapped.
const FLAGS: c_uint = 1 | 2;

impl Cuda {
    /// Makes the device's primary context current on this thread, and leaves it so.
    pub(crate) fn open(ordinal: u32) -> Result<Cuda> {
        let missing = |why: libloading::Error| {
            Error::new(Kind::Unavailable(Missing::Driver), "open").detail(why.to_string())
        };
        // SAFETY: a driver is made to be loaded at any time.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(missing)?;
        macro_rules! find {
            ($name:literal: $ty:ty) => {
                // SAFETY: the signature is that of cuda.h, version 12, for this name.
                *unsafe { library.get::<$ty>($name) }.map_err(missing)?
            };
        }
        let get = find!("cuDeviceGet": GetDevice);
        let retain = find!("cuDevicePrimaryCtxRetain": Retain);
        let set = find!("cuCtxSetCurrent": WithPointer);
        let alloc = find!("cuMemHostAlloc": Alloc);
        let free = find!("cuMemFreeHost": WithPointer);
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the driver was started by whoever opened the device before; valid pointers.
        check(unsafe { get(&mut device, ordinal as c_int) }, "cuDeviceGet")?;
        // SAFETY: the device is the driver's. The hold is kept for the process's life.
        check(unsafe { retain(&mut context, device) }, "cuDevicePrimaryCtxRetain")?;
        // SAFETY: the context is retained.
        check(unsafe { set(context) }, "cuCtxSetCurrent")?;
        Ok(Cuda { _library: library, alloc, free })
    }
}

fn check(code: Code, call: &'static str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::new(Kind::OutOfMemory, "take").code(code as u32, call))
}

impl Host for Cuda {
    fn take(&self, len: Bytes) -> Result<Box<dyn Hold + '_>> {
        let mut at = ptr::null_mut();
        // SAFETY: valid pointer; a context is current on this thread.
        check(unsafe { (self.alloc)(&mut at, len.to_usize()?, FLAGS) }, "cuMemHostAlloc")?;
        Ok(Box::new(Taken { cuda: self, at }))
    }
}

struct Taken<'a> {
    cuda: &'a Cuda,
    at: *mut c_void,
}

impl Hold for Taken<'_> {}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // SAFETY: taken once, given back once, and nobody was told the address.
        let _ = unsafe { (self.cuda.free)(self.at) };
    }
}

/// For a rehearsal: memory touched by one thread, which is what the driver's call does first.
#[derive(Debug)]
pub(crate) struct Touched;

impl Host for Touched {
    fn take(&self, len: Bytes) -> Result<Box<dyn Hold + '_>> {
        let mut bytes = vec![0u8; len.to_usize()?];
        bytes.iter_mut().step_by(4096).for_each(|byte| *byte = std::hint::black_box(1));
        Ok(Box::new(Kept(bytes)))
    }
}

struct Kept(Vec<u8>);

impl Hold for Kept {}

impl Drop for Kept {
    fn drop(&mut self) {
        std::hint::black_box(&self.0);
    }
}
