//! The driver library: found once, checked, and its functions looked up into one table.
//!
//! What it is not: it links against nothing, and it does not go through cudarc's calls. Those look
//! a function up at its first use and panic where the driver lacks it, and they return the driver's
//! code as a Rust enum, which is undefined behaviour for a code that is not in the enum's list.
//! From cudarc come the types: every signature below is compared with cudarc's binding of the same
//! name when this file is compiled.
//!
//! Invariant: a [`Driver`] exists only once the library is loaded, new enough, complete and
//! started. The library is never unloaded. A probe that failed is not tried again.
//!
//! ```text
//!   libcuda.so.1, libcuda.so -> version >= 12.0? -> every symbol there? -> fork hook -> cuInit(0)
//!     no: Missing::Driver    no: OldDriver, Stub    no: Symbol             -> exit hook -> Driver
//! ```
//!
//! `context` opens devices with it; the files above call its functions.

use super::batch::BatchCall;
use super::code::{self, Answer, SUCCESS};
use super::process;
use crate::error::{Error, Kind, Missing, Result};
use cudarc::driver::sys;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUjit_option,
    CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUmodule,
    CUpointer_attribute, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};
use libloading::Library;
use std::error::Error as _;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ops::Deref;
use std::sync::OnceLock;

/// The oldest driver that is enough: 1000 * major + 10 * minor. CUDA 12.0 is the first whose
/// drivers have every function below under the name used here on every device it serves.
pub const DRIVER_MIN: u32 = 12_000;

const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Asked before the other symbols are looked up, so that an old driver is called old and not
/// incomplete, and is never started.
const VERSION_OF: &str = "cuDriverGetVersion";
const _: unsafe fn(*mut c_int) -> CUresult = sys::cuDriverGetVersion;

macro_rules! functions {
    (
        $(#[$doc:meta])* const $names:ident = [$($first:expr)?];
        $(#[$table_doc:meta])* struct $table:ident;
        $(fn $name:ident($($arg:ident: $ty:ty),*);)*
    ) => {
        $(#[$doc])*
        pub const $names: &[&str] = &[$($first,)? $(stringify!($name)),*];

        // The signatures against cudarc's bindings. Nothing is called, nothing is linked.
        $(const _: unsafe fn($($ty),*) -> CUresult = sys::$name;)*

        $(#[$table_doc])*
        #[allow(non_snake_case)]
        #[derive(Debug)]
        pub(super) struct $table {
            $($name: unsafe extern "C" fn($($ty),*) -> u32,)*
        }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl $table {
            fn resolve(library: &'static Library) -> Result<$table> {
                Ok($table { $($name: symbol(library, stringify!($name))?,)* })
            }

            $(
                #[inline]
                pub(super) unsafe fn $name(&self, $($arg: $ty),*) -> Answer {
                    // SAFETY: the pointer is the library's function of this name and signature, and
                    // the library is never unloaded; the caller keeps the function's contract.
                    let code = unsafe { (self.$name)($($arg),*) };
                    Answer { code, call: stringify!($name) }
                }
            )*
        }
    };
}

functions! {
    /// The driver's functions that this backend needs, by their exact names.
    const SYMBOLS = [VERSION_OF];
    /// Each method is the driver's function of that name; its contract is the driver's, and the
    /// caller keeps it.
    struct Calls;
    fn cuInit(flags: c_uint);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    fn cuDeviceGetAttribute(value: *mut c_int, which: CUdevice_attribute, device: CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    fn cuCtxGetCurrent(context: *mut CUcontext);
    fn cuCtxSetCurrent(context: CUcontext);
    fn cuCtxSynchronize();
    fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuStreamQuery(stream: CUstream);
    fn cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventQuery(event: CUevent);
    fn cuEventElapsedTime(milliseconds: *mut f32, from: CUevent, to: CUevent);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuPointerGetAttributes(
        count: c_uint, which: *mut CUpointer_attribute, values: *mut *mut c_void, at: CUdeviceptr
    );
    fn cuMemPoolCreate(pool: *mut CUmemoryPool, props: *const CUmemPoolProps);
    fn cuMemPoolDestroy(pool: CUmemoryPool);
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, which: CUmemPool_attribute, value: *mut c_void);
    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize);
    fn cuMemAllocFromPoolAsync(
        at: *mut CUdeviceptr, len: usize, pool: CUmemoryPool, stream: CUstream
    );
    fn cuMemFreeAsync(at: CUdeviceptr, stream: CUstream);
    fn cuMemAlloc_v2(at: *mut CUdeviceptr, len: usize);
    fn cuMemFree_v2(at: CUdeviceptr);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, len: usize, stream: CUstream);
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, len: usize, stream: CUstream);
    fn cuMemHostRegister_v2(at: *mut c_void, len: usize, flags: c_uint);
    fn cuMemHostUnregister(at: *mut c_void);
    fn cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, at: *mut c_void, flags: c_uint);
    fn cuModuleLoadDataEx(
        module: *mut CUmodule, image: *const c_void,
        count: c_uint, options: *mut CUjit_option, values: *mut *mut c_void
    );
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuLaunchKernel(
        function: CUfunction,
        blocks_x: c_uint, blocks_y: c_uint, blocks_z: c_uint,
        threads_x: c_uint, threads_y: c_uint, threads_z: c_uint,
        shared: c_uint, stream: CUstream, args: *mut *mut c_void, extra: *mut *mut c_void
    );
}

functions! {
    /// The driver's functions that mapping memory needs. A driver without them does all else.
    const MAPPING_SYMBOLS = [];
    /// As [`Calls`].
    struct MappingCalls;
    fn cuMemGetAllocationGranularity(
        bytes: *mut usize, of: *const CUmemAllocationProp, which: CUmemAllocationGranularity_flags
    );
    fn cuMemAddressReserve(
        at: *mut CUdeviceptr, len: usize, alignment: usize, wish: CUdeviceptr, flags: c_ulonglong
    );
    fn cuMemAddressFree(at: CUdeviceptr, len: usize);
    fn cuMemCreate(
        memory: *mut CUmemGenericAllocationHandle, len: usize,
        of: *const CUmemAllocationProp, flags: c_ulonglong
    );
    fn cuMemRelease(memory: CUmemGenericAllocationHandle);
    fn cuMemMap(
        at: CUdeviceptr, len: usize, offset: usize,
        memory: CUmemGenericAllocationHandle, flags: c_ulonglong
    );
    fn cuMemSetAccess(at: CUdeviceptr, len: usize, who: *const CUmemAccessDesc, count: usize);
    fn cuMemUnmap(at: CUdeviceptr, len: usize);
}

/// The loaded driver.
#[derive(Debug)]
pub(super) struct Driver {
    version: u32,
    calls: Calls,
    batch: BatchCall,
    mapping: Result<MappingCalls>,
}

impl Deref for Driver {
    type Target = Calls;

    #[inline]
    fn deref(&self) -> &Calls {
        &self.calls
    }
}

impl Driver {
    /// The process's driver: probed at the first call, the same answer ever after.
    pub(super) fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(probe).as_ref().map_err(Error::clone)
    }

    /// Its call for many copies at once, which older drivers lack.
    pub(super) fn batch(&self) -> &BatchCall {
        &self.batch
    }

    /// The functions for mapping memory, or the name of one that is missing.
    pub(super) fn mapping(&self) -> std::result::Result<&MappingCalls, &Error> {
        self.mapping.as_ref()
    }

    /// Version as the driver tells it: 1000 * major + 10 * minor.
    pub(super) fn version(&self) -> u32 {
        self.version
    }
}

fn probe() -> Result<Driver> {
    let library = open_library()?;
    let version = version_of(library)?;
    if version < DRIVER_MIN {
        return Err(missing(
            Missing::OldDriver,
            format!("it serves CUDA {}, {} is needed", dotted(version), dotted(DRIVER_MIN)),
        ));
    }
    let calls = Calls::resolve(library)?;
    let batch = BatchCall::find(library, version);
    let mapping = MappingCalls::resolve(library);
    let driver = Driver { version, calls, batch, mapping };
    process::watch_forks()?;
    // SAFETY: cuInit may be called at any time, from any thread; its flags must be 0.
    let answer = unsafe { driver.cuInit(0) };
    if answer.code != SUCCESS {
        return Err(code::unavailable(answer));
    }
    process::watch_exit()?;
    Ok(driver)
}

/// The library, kept loaded for good: the driver's own threads and hooks may run until the end.
fn open_library() -> Result<&'static Library> {
    let mut why = String::new();
    for name in LIBRARIES {
        // SAFETY: loading runs the library's initialisers; libcuda's own are made to be loaded at
        // any time, and a file of that name on the library path is the user's choice of driver.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(Box::leak(Box::new(library))),
            Err(error) => {
                // The loader's own words are in the error's source.
                let said = error.source().map(ToString::to_string).unwrap_or_default();
                let comma = if why.is_empty() { "" } else { "; " };
                why = format!("{why}{comma}{name}: {}", without_prefix(&said, name));
            }
        }
    }
    Err(missing(Missing::Driver, why))
}

/// What the loader said, less the library's name, which it may or may not begin with.
fn without_prefix<'a>(said: &'a str, name: &str) -> &'a str {
    said.strip_prefix(name).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(said)
}

fn version_of(library: &'static Library) -> Result<u32> {
    let get: unsafe extern "C" fn(*mut c_int) -> u32 = symbol(library, VERSION_OF)?;
    let mut version = 0;
    // SAFETY: the function may be called before cuInit; the pointer is valid for one int.
    let code = unsafe { get(&mut version) };
    if code != SUCCESS {
        return Err(code::unavailable(Answer { code, call: VERSION_OF }));
    }
    Ok(u32::try_from(version).unwrap_or(0))
}

fn symbol<F: Copy>(library: &'static Library, name: &'static str) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<usize>(), "a symbol is a function pointer") };
    // SAFETY: F is the signature that the driver documents for this name; `functions!` compares it
    // with cudarc's binding. The copy outlives no library: the driver is never unloaded.
    match unsafe { library.get::<F>(name) } {
        Ok(symbol) => Ok(*symbol),
        Err(_) => Err(missing(Missing::Symbol, format!("it has no {name}"))),
    }
}

fn missing(what: Missing, why: String) -> Error {
    Error::new(Kind::Unavailable(what), "open").detail(why)
}

fn dotted(version: u32) -> String {
    format!("{}.{} ({version})", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::without_prefix;

    #[test]
    fn a_library_is_named_once_whether_or_not_the_loader_names_it() {
        for said in ["libcuda.so: cannot open", "cannot open"] {
            assert_eq!(without_prefix(said, "libcuda.so"), "cannot open");
        }
        assert_eq!(without_prefix("libcuda.so.1: no", "libcuda.so"), "libcuda.so.1: no");
    }
}
