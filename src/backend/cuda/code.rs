//! The driver's result codes: their names, which of them are the end, what each means to a caller.
//!
//! What it is not: it asks the driver nothing. `cuGetErrorString` may not be there to be called
//! when an error has to be told.
//!
//! Invariant: a code that is in no list here counts as fatal. The seam promises that a verb that
//! failed had no effect unless the device is lost; for a code nobody has described only the second
//! half can be promised.
//!
//! ```text
//!   u32 from the driver -> name(code)                    for people
//!                       -> kind(code): Lost, Busy, ...   for callers, from any verb
//!                       -> unavailable(call, code)       from probing and opening
//! ```
//!
//! The numbers come from cudarc's constants. Its `CUresult` type is never made from a number: an
//! enum that holds a code which its version does not list is undefined behaviour.
//!
//! The files of this backend use it; `name` and `is_fatal` are public.

use crate::error::{Error, Kind, Missing, Misuse};
use cudarc::driver::sys::CUresult;

/// What a driver call said: its code, and which call it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) struct Answer {
    pub(super) code: u32,
    pub(super) call: &'static str,
}

macro_rules! numbers {
    ($($short:ident = $name:ident;)*) => {
        $(pub(super) const $short: u32 = CUresult::$name as u32;)*
    };
}

numbers! {
    SUCCESS = CUDA_SUCCESS;
    OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY;
    NOT_INITIALIZED = CUDA_ERROR_NOT_INITIALIZED;
    STUB_LIBRARY = CUDA_ERROR_STUB_LIBRARY;
    DEVICE_UNAVAILABLE = CUDA_ERROR_DEVICE_UNAVAILABLE;
    NO_DEVICE = CUDA_ERROR_NO_DEVICE;
    INVALID_DEVICE = CUDA_ERROR_INVALID_DEVICE;
    OPERATING_SYSTEM = CUDA_ERROR_OPERATING_SYSTEM;
    NOT_READY = CUDA_ERROR_NOT_READY;
    NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED;
    ALREADY_REGISTERED = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    SYSTEM_NOT_READY = CUDA_ERROR_SYSTEM_NOT_READY;
    SYSTEM_DRIVER_MISMATCH = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    COMPAT_NOT_SUPPORTED = CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE;
    MPS_FIRST = CUDA_ERROR_MPS_CONNECTION_FAILED;
    MPS_LAST = CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED;
    CAPTURE_FIRST = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    CAPTURE_IMPLICIT = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    CAPTURE_LAST = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    UNKNOWN = CUDA_ERROR_UNKNOWN;
}

/// Codes after which the device is lost to this process.
///
/// Of the first group `cuda.h` 12.9 says that they leave "the process in an inconsistent state" and
/// that it "must be terminated and relaunched". Of the second it does not say so, but the device's
/// memory, its links or a kernel's own check failed: nobody vouches for what is in memory now.
/// After those of the third there is no context left to call.
const FATAL: &[CUresult] = &[
    CUresult::CUDA_ERROR_CONTAINED,
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUresult::CUDA_ERROR_INVALID_PC,
    CUresult::CUDA_ERROR_LAUNCH_FAILED,
    CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK,
    CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
    CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
    //
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUresult::CUDA_ERROR_ASSERT,
    CUresult::CUDA_ERROR_MPS_RPC_FAILURE,
    CUresult::CUDA_ERROR_UNKNOWN,
    //
    CUresult::CUDA_ERROR_DEINITIALIZED,
    CUresult::CUDA_ERROR_INVALID_CONTEXT,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
];

/// Codes that come from a kernel's text or its launch alone.
const BAD_KERNEL: &[CUresult] = &[
    CUresult::CUDA_ERROR_INVALID_IMAGE,
    CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
    CUresult::CUDA_ERROR_INVALID_PTX,
    CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
    CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED,
    CUresult::CUDA_ERROR_INVALID_SOURCE,
    CUresult::CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND,
    CUresult::CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
    CUresult::CUDA_ERROR_NOT_FOUND,
    CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
];

/// Is the device lost to this process after this code? True for codes that nobody has described.
pub fn is_fatal(code: u32) -> bool {
    code != SUCCESS
        && (FATAL.iter().any(|fatal| *fatal as u32 == code) || known_name(code).is_none())
}

/// Does the code say that the device itself is broken, and not merely that it did not start?
pub(super) fn is_broken(code: u32) -> bool {
    code != UNKNOWN && known_name(code).is_some() && is_fatal(code)
}

/// What a code from a verb means to its caller.
pub(super) fn kind(code: u32) -> Kind {
    match code {
        code if is_fatal(code) => Kind::Lost,
        OUT_OF_MEMORY => Kind::OutOfMemory,
        NOT_READY => Kind::Busy,
        OPERATING_SYSTEM => Kind::Io,
        // The driver was started when the device was opened, so this process is a child that no
        // fork hook ran in.
        NOT_INITIALIZED => Kind::Usage(Misuse::Forked),
        ALREADY_REGISTERED => Kind::Usage(Misuse::Overlap),
        CAPTURE_FIRST..=CAPTURE_LAST => Kind::Usage(Misuse::Capturing),
        code if BAD_KERNEL.iter().any(|bad| *bad as u32 == code) => Kind::Usage(Misuse::BadKernel),
        _ => Kind::Usage(Misuse::BadValue),
    }
}

/// The error for a code met while looking for a driver or opening a device.
#[cold]
pub(super) fn unavailable(answer: Answer) -> Error {
    let Answer { code, call } = answer;
    let (missing, why) = match code {
        OUT_OF_MEMORY => {
            return Error::new(Kind::OutOfMemory, "open").code(code, name(code)).detail(call);
        }
        STUB_LIBRARY => (Missing::StubLibrary, "a toolkit's stubs folder is on the library path"),
        NO_DEVICE => (Missing::Device, "the driver sees no CUDA device"),
        INVALID_DEVICE => (Missing::Device, "the driver has no device of that ordinal"),
        DEVICE_UNAVAILABLE => (Missing::Device, "it is held by another process"),
        SYSTEM_NOT_READY => (Missing::Device, "the fabric or a system service is not up yet"),
        SYSTEM_DRIVER_MISMATCH => {
            (Missing::Driver, "the library and the kernel module are of different versions")
        }
        COMPAT_NOT_SUPPORTED => {
            (Missing::Device, "the compatibility library does not serve this device")
        }
        MPS_FIRST..=MPS_LAST => (Missing::Device, "the multi-process service refused"),
        UNKNOWN => (Missing::Driver, "the driver did not start; is its kernel module loaded?"),
        _ => (Missing::Driver, "the driver did not start"),
    };
    Error::new(Kind::Unavailable(missing), "open")
        .code(code, name(code))
        .detail(format!("{why} ({call})"))
}

/// The driver's name of a code.
pub fn name(code: u32) -> &'static str {
    known_name(code).unwrap_or("a code this crate does not know")
}

fn known_name(code: u32) -> Option<&'static str> {
    let found = NAMES.iter().chain(NEWER).find(|(known, _)| *known == code);
    found.map(|(_, name)| *name)
}

/// Codes of drivers newer than the bindings: named, so that they do not count as fatal.
const NEWER: &[(u32, &str)] = &[
    (36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"),
    (47, "CUDA_ERROR_MULTICAST_RESOURCE_FULL"),
    (227, "CUDA_ERROR_INSUFFICIENT_LOADER_VERSION"),
    (917, "CUDA_ERROR_STREAM_DETACHED"),
    (918, "CUDA_ERROR_GRAPH_RECAPTURE_FAILURE"),
    (919, "CUDA_ERROR_FABRIC_NOT_READY"),
];

macro_rules! names {
    ($($name:ident)*) => {
        const NAMES: &[(u32, &str)] = &[$((CUresult::$name as u32, stringify!($name)),)*];
    };
}

names! {
    CUDA_SUCCESS
    CUDA_ERROR_INVALID_VALUE
    CUDA_ERROR_OUT_OF_MEMORY
    CUDA_ERROR_NOT_INITIALIZED
    CUDA_ERROR_DEINITIALIZED
    CUDA_ERROR_PROFILER_DISABLED
    CUDA_ERROR_PROFILER_NOT_INITIALIZED
    CUDA_ERROR_PROFILER_ALREADY_STARTED
    CUDA_ERROR_PROFILER_ALREADY_STOPPED
    CUDA_ERROR_STUB_LIBRARY
    CUDA_ERROR_DEVICE_UNAVAILABLE
    CUDA_ERROR_NO_DEVICE
    CUDA_ERROR_INVALID_DEVICE
    CUDA_ERROR_DEVICE_NOT_LICENSED
    CUDA_ERROR_INVALID_IMAGE
    CUDA_ERROR_INVALID_CONTEXT
    CUDA_ERROR_CONTEXT_ALREADY_CURRENT
    CUDA_ERROR_MAP_FAILED
    CUDA_ERROR_UNMAP_FAILED
    CUDA_ERROR_ARRAY_IS_MAPPED
    CUDA_ERROR_ALREADY_MAPPED
    CUDA_ERROR_NO_BINARY_FOR_GPU
    CUDA_ERROR_ALREADY_ACQUIRED
    CUDA_ERROR_NOT_MAPPED
    CUDA_ERROR_NOT_MAPPED_AS_ARRAY
    CUDA_ERROR_NOT_MAPPED_AS_POINTER
    CUDA_ERROR_ECC_UNCORRECTABLE
    CUDA_ERROR_UNSUPPORTED_LIMIT
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    CUDA_ERROR_INVALID_PTX
    CUDA_ERROR_INVALID_GRAPHICS_CONTEXT
    CUDA_ERROR_NVLINK_UNCORRECTABLE
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    CUDA_ERROR_JIT_COMPILATION_DISABLED
    CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY
    CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC
    CUDA_ERROR_CONTAINED
    CUDA_ERROR_INVALID_SOURCE
    CUDA_ERROR_FILE_NOT_FOUND
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND
    CUDA_ERROR_SHARED_OBJECT_INIT_FAILED
    CUDA_ERROR_OPERATING_SYSTEM
    CUDA_ERROR_INVALID_HANDLE
    CUDA_ERROR_ILLEGAL_STATE
    CUDA_ERROR_LOSSY_QUERY
    CUDA_ERROR_NOT_FOUND
    CUDA_ERROR_NOT_READY
    CUDA_ERROR_ILLEGAL_ADDRESS
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    CUDA_ERROR_LAUNCH_TIMEOUT
    CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE
    CUDA_ERROR_CONTEXT_IS_DESTROYED
    CUDA_ERROR_ASSERT
    CUDA_ERROR_TOO_MANY_PEERS
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    CUDA_ERROR_HARDWARE_STACK_ERROR
    CUDA_ERROR_ILLEGAL_INSTRUCTION
    CUDA_ERROR_MISALIGNED_ADDRESS
    CUDA_ERROR_INVALID_ADDRESS_SPACE
    CUDA_ERROR_INVALID_PC
    CUDA_ERROR_LAUNCH_FAILED
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    CUDA_ERROR_TENSOR_MEMORY_LEAK
    CUDA_ERROR_NOT_PERMITTED
    CUDA_ERROR_NOT_SUPPORTED
    CUDA_ERROR_SYSTEM_NOT_READY
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
    CUDA_ERROR_MPS_CONNECTION_FAILED
    CUDA_ERROR_MPS_RPC_FAILURE
    CUDA_ERROR_MPS_SERVER_NOT_READY
    CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
    CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED
    CUDA_ERROR_MPS_CLIENT_TERMINATED
    CUDA_ERROR_CDP_NOT_SUPPORTED
    CUDA_ERROR_CDP_VERSION_MISMATCH
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    CUDA_ERROR_STREAM_CAPTURE_MERGE
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    CUDA_ERROR_CAPTURED_EVENT
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    CUDA_ERROR_TIMEOUT
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
    CUDA_ERROR_EXTERNAL_DEVICE
    CUDA_ERROR_INVALID_CLUSTER_SIZE
    CUDA_ERROR_FUNCTION_NOT_LOADED
    CUDA_ERROR_INVALID_RESOURCE_TYPE
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION
    CUDA_ERROR_KEY_ROTATION
    CUDA_ERROR_UNKNOWN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_nobody_described_is_fatal_and_success_is_not() {
        assert!(!is_fatal(SUCCESS) && !is_fatal(NOT_READY) && !is_fatal(OUT_OF_MEMORY));
        assert!(is_fatal(12_345) && is_fatal(u32::MAX) && is_fatal(UNKNOWN));
        assert_eq!(kind(12_345), Kind::Lost);
        assert!(!is_broken(12_345) && !is_broken(UNKNOWN) && is_broken(700));
    }

    #[test]
    fn every_code_has_one_name() {
        let mut codes: Vec<u32> = NAMES.iter().chain(NEWER).map(|(code, _)| *code).collect();
        codes.sort_unstable();
        let len = codes.len();
        codes.dedup();
        assert_eq!((codes.len(), len), (NAMES.len() + NEWER.len(), len));
        assert_eq!(name(719), "CUDA_ERROR_LAUNCH_FAILED");
    }
}
