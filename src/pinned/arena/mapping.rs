//! Anonymous memory from the system: mapped, aligned, advised, on one node, given back.
//!
//! What it is not: it touches no page and page-locks none.
//!
//! Invariant: the range from `base` on is this mapping's alone, from its making to its drop; what
//! `keep` cut off is nobody's. All else the system is told is advice, and may be refused.
//!
//! ```text
//!   reserved huge pages, if the machine has some and lets us have them
//!   `- else:  cut| base, a multiple of 2 MiB ............. |cut      near a node, not in a child
//! ```
//!
//! The arena uses it, and whoever touches its pages.

use super::super::class::{GRAIN, STEP};
use super::system::System;
use super::touch::Crew;
use crate::error::{Error, Kind, Result};
use crate::unit::Bytes;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Anonymous private memory, zeroed, at an address that is a multiple of 2 MiB.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    pub(super) len: AtomicU64,
    /// Made of reserved huge pages.
    reserved: bool,
    pub(super) system: Arc<dyn System>,
}

// SAFETY: the mapping is no thread's own; it gives out raw pointers and makes no reference.
unsafe impl Send for Mapping {}
// SAFETY: as above; its length is atomic.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(len: usize, backed: bool, crew: &Crew) -> Result<Mapping> {
        let wants_reserved = backed && crew.reserved && len.is_multiple_of(STEP as usize);
        if let Some(mapping) = wants_reserved.then(|| Mapping::reserved(len, crew)).flatten() {
            return Ok(mapping);
        }
        let mapping = Mapping::plain(len, backed, crew)?;
        mapping.prepare(crew);
        Ok(mapping)
    }

    /// Says what its pages are to be, before the first of them is taken.
    fn prepare(&self, crew: &Crew) {
        let len = self.len.load(Ordering::Relaxed);
        // Advice only: with fork a child would copy it all.
        self.advise(0, len, Advice::LinuxDontFork);
        if !crew.dumped {
            self.advise(0, len, Advice::LinuxDontDump);
        }
        if let Some(node) = &crew.node {
            // SAFETY: the part is all of this mapping.
            unsafe { self.system.prefer(self.base, len as usize, node.number) };
        }
    }

    /// Out of the huge pages that the machine's owner set aside.
    fn reserved(len: usize, crew: &Crew) -> Option<Mapping> {
        let system = Arc::clone(&crew.system);
        let base = system.map_reserved(len)?;
        let mapping = Mapping { base, len: AtomicU64::new(len as u64), reserved: true, system };
        mapping.prepare(crew);
        // A control group may forbid what the machine has: then the first touch would end the
        // process. Asked this way the kernel refuses instead, and the mapping goes again.
        mapping.populate(0, STEP).ok()?;
        Some(mapping)
    }

    fn plain(len: usize, backed: bool, crew: &Crew) -> Result<Mapping> {
        let step = STEP as usize;
        let refused = |detail: String| {
            let error = Error::new(Kind::OutOfMemory, "map").bytes(Bytes(len as u64));
            error.detail(format!("the system maps no more host memory: {detail}"))
        };
        let Some(wide) = len.checked_add(step) else { return Err(refused("too long".into())) };
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = match backed {
            true => MapFlags::PRIVATE,
            false => MapFlags::PRIVATE | MapFlags::NORESERVE,
        };
        // SAFETY: no address is asked for, so no mapping of anybody is replaced.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), wide, prot, flags) }
            .map_err(|e| refused(e.to_string()))?
            .cast::<u8>();
        let head = start.addr().next_multiple_of(step) - start.addr();
        cut(start, head);
        let base = start.wrapping_add(head);
        cut(base.wrapping_add(len), step - head);
        let base = NonNull::new(base).ok_or_else(|| refused("no address".into()))?;
        let system = Arc::clone(&crew.system);
        Ok(Mapping { base, len: AtomicU64::new(len as u64), reserved: false, system })
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(super) fn is_reserved(&self) -> bool {
        self.reserved
    }

    /// The address of a byte of the mapping.
    pub(super) fn at(&self, offset: u64) -> NonNull<u8> {
        let len = self.len.load(Ordering::Relaxed);
        assert!(offset < len, "byte {offset} of a mapping of {len}");
        // SAFETY: the byte lies in the mapping.
        unsafe { self.base.add(offset as usize) }
    }

    /// Unmaps what lies behind the first `len` bytes.
    pub(super) fn keep(&self, len: u64) {
        let unit = if self.reserved { STEP } else { GRAIN };
        let len = len.next_multiple_of(unit);
        let whole = self.len.load(Ordering::Relaxed);
        if len < whole {
            self.len.store(len, Ordering::Relaxed);
            cut(self.base().wrapping_add(len as usize), (whole - len) as usize);
        }
    }

    /// Tells the system about a part. It may refuse: then all is as without the advice.
    pub(super) fn advise(&self, from: u64, to: u64, advice: Advice) {
        let at = self.base().wrapping_add(from as usize).cast::<c_void>();
        // SAFETY: the part is this mapping's; no advice used here changes its bytes.
        let _ = unsafe { mm::madvise(at, (to - from) as usize, advice) };
    }

    /// Has the kernel back a part, as writing to it would.
    pub(super) fn populate(&self, from: u64, to: u64) -> io::Result<()> {
        // SAFETY: the part is this mapping's.
        unsafe { self.system.populate(self.at(from), (to - from) as usize) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        cut(self.base(), self.len.load(Ordering::Relaxed) as usize);
    }
}

/// Unmaps a part of a mapping that its owner no longer uses.
fn cut(at: *mut u8, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: the callers pass parts of their own mapping: the ends cut off for alignment, what
    // nobody was told of, or all of it once it goes; no pointer into it is used afterwards.
    let _ = unsafe { mm::munmap(at.cast::<c_void>(), len) };
}
