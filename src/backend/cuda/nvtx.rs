//! The calls of NVTX, in the library that languages other than C use.
//!
//! What it is not: needed. NVTX for C is a header that finds a tool's library by an environment
//! variable; its functions without a header are in `libnvtx3interop.so`, and in the older
//! `libnvToolsExt.so`, either of which does the same.
//!
//! Invariant: a library found is never unloaded. One that lacks a function is as good as none.
//!
//! ```text
//!   libnvtx3interop.so.1 | libnvToolsExt.so.1 -> nvtxRangePushA, PopA, StartA, End -> Calls
//!   push -> its depth, or less than 0 where no tool keeps track
//! ```
//!
//! `backend::ranges` uses it.

use libloading::Library;
use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

const LIBRARIES: [&str; 4] =
    ["libnvtx3interop.so.1", "libnvtx3interop.so", "libnvToolsExt.so.1", "libnvToolsExt.so"];

/// The functions, by the signatures of `nvToolsExt.h`.
#[derive(Debug)]
pub(in crate::backend) struct Calls {
    push: unsafe extern "C" fn(*const c_char) -> c_int,
    pop: unsafe extern "C" fn() -> c_int,
    start: unsafe extern "C" fn(*const c_char) -> u64,
    end: unsafe extern "C" fn(u64),
}

/// The process's calls: looked for once.
pub(in crate::backend) fn find() -> Option<&'static Calls> {
    static CALLS: OnceLock<Option<Calls>> = OnceLock::new();
    CALLS.get_or_init(|| LIBRARIES.into_iter().find_map(open)).as_ref()
}

fn open(name: &str) -> Option<Calls> {
    // SAFETY: loading runs the library's initialisers; NVTX's is made to be loaded at any time, and
    // a file of that name on the library path is the user's choice.
    let library = unsafe { Library::new(name) }.ok()?;
    // A tool behind it may have threads and hooks of its own until the end.
    let library: &'static Library = Box::leak(Box::new(library));
    // SAFETY: each type is the documented signature of the function of that name.
    unsafe {
        Some(Calls {
            push: *library.get("nvtxRangePushA").ok()?,
            pop: *library.get("nvtxRangePop").ok()?,
            start: *library.get("nvtxRangeStartA").ok()?,
            end: *library.get("nvtxRangeEnd").ok()?,
        })
    }
}

impl Calls {
    /// Begins a range of this thread; says whether a tool keeps track of it.
    pub(in crate::backend) fn push(&self, text: &CStr) -> bool {
        // SAFETY: a text with its end, read during the call.
        unsafe { (self.push)(text.as_ptr()) >= 0 }
    }

    /// Ends this thread's last range.
    pub(in crate::backend) fn pop(&self) {
        // SAFETY: it takes nothing; without a range it says so.
        unsafe { (self.pop)() };
    }

    /// Begins a range of the process, and names it.
    pub(in crate::backend) fn start(&self, text: &CStr) -> u64 {
        // SAFETY: as in `push`.
        unsafe { (self.start)(text.as_ptr()) }
    }

    /// Ends it.
    pub(in crate::backend) fn end(&self, range: u64) {
        // SAFETY: named by `start`, and ended once.
        unsafe { (self.end)(range) };
    }
}
