//! Which process this is, without a system call for each verb.
//!
//! What it is not: a hook that somebody has to call. A child that was made behind the C library's
//! back is seen as well.
//!
//! Invariant: `id` is the process's own id, in the process and in every child of it that has its
//! memory copied. A child that shares the memory (`vfork`) runs no verbs.
//!
//! ```text
//!   a page that the system empties in a child:  0 --id--> ask the system, write it down
//!                                               n --id--> n
//!   no such page to be had: the system is asked each time
//! ```
//!
//! The simulated device's state uses it: there are some thirty verbs to a saved tensor.

use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use rustix::process::getpid;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

/// A page of its own.
const PAGE_BYTES: usize = 4096;

/// The system's id of this process.
pub(super) fn id() -> i32 {
    static NOTED: OnceLock<Option<&'static AtomicI32>> = OnceLock::new();
    match NOTED.get_or_init(page) {
        Some(noted) => match noted.load(Ordering::Relaxed) {
            0 => {
                let asked = getpid().as_raw_nonzero().get();
                noted.store(asked, Ordering::Relaxed);
                asked
            }
            known => known,
        },
        None => getpid().as_raw_nonzero().get(),
    }
}

/// A number that is 0 in a child again; never given back.
fn page() -> Option<&'static AtomicI32> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping where the system likes it touches nobody's memory.
    let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), PAGE_BYTES, prot, MapFlags::PRIVATE) };
    let start = start.ok()?;
    // SAFETY: the page is this function's own, private and anonymous, and nothing is in it yet.
    let emptied = unsafe { mm::madvise(start, PAGE_BYTES, Advice::LinuxWipeOnFork) };
    if emptied.is_err() {
        // SAFETY: as above; nobody has heard of the page.
        let _ = unsafe { mm::munmap(start, PAGE_BYTES) };
        return None;
    }
    // SAFETY: it is mapped for good, aligned, zero to begin with, and used as this number alone.
    Some(unsafe { &*start.cast::<AtomicI32>() })
}
