//! What the kernel is asked for an arena beside plain memory: reserved huge pages, and nodes.
//!
//! What it is not: a layer over all of memory. Plain mappings are made and ended elsewhere, in one
//! way everywhere; behind this trait is what a machine may lack, so that tests can be a machine.
//!
//! Invariant: none of these moves a page or changes a byte.
//!
//! ```text
//!   Mapping -> System: Linux                     two nodes, huge pages, refusals: a test's
//!              map_reserved -> prefer -> populate        nodes: where does each page lie?
//! ```
//!
//! The arena uses it.

use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::fmt;
use std::io;
use std::ptr::{self, NonNull};

/// Nodes that a mask for the kernel can name.
const NODES_MAX: u32 = 1023;
/// Prefer this node, take another one rather than fail: `<linux/mempolicy.h>`, Linux 6.12.
const MPOL_PREFERRED: usize = 1;

/// The kernel, as far as machines differ.
pub(in crate::pinned) trait System: fmt::Debug + Send + Sync {
    /// Maps huge pages that the machine's owner set aside, aligned to their size; none is taken
    /// yet. `None` where there are too few.
    fn map_reserved(&self, len: usize) -> Option<NonNull<u8>>;

    /// Takes the pages of a part, as writing to it would.
    ///
    /// # Safety
    /// The part is the caller's mapping.
    unsafe fn populate(&self, at: NonNull<u8>, len: usize) -> io::Result<()>;

    /// Asks for pages of one node for a part, for those that are not taken yet; where that node has
    /// none left others will do, since a refusal would end the process.
    ///
    /// # Safety
    /// The part is the caller's mapping.
    unsafe fn prefer(&self, at: NonNull<u8>, len: usize, node: u32);

    /// On which node each page lies, less than zero where that is not known. Says whether the
    /// kernel answers at all. Both lists have one length.
    fn nodes(&self, pages: &[usize], nodes: &mut [i32]) -> bool;
}

/// The kernel that runs this process.
#[derive(Debug)]
pub(in crate::pinned) struct Linux;

impl System for Linux {
    fn map_reserved(&self, len: usize) -> Option<NonNull<u8>> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        // SAFETY: no address is asked for, so no mapping of anybody is replaced.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), len, prot, flags) }.ok()?;
        NonNull::new(start.cast::<u8>())
    }

    unsafe fn populate(&self, at: NonNull<u8>, len: usize) -> io::Result<()> {
        let at = at.as_ptr().cast::<c_void>();
        // SAFETY: the part is the caller's, and its bytes are not changed.
        unsafe { mm::madvise(at, len, Advice::LinuxPopulateWrite) }?;
        Ok(())
    }

    unsafe fn prefer(&self, at: NonNull<u8>, len: usize, node: u32) {
        let mut mask = [0u64; (NODES_MAX as usize + 1) / 64];
        let Some(word) = mask.get_mut(node as usize / 64) else { return };
        *word = 1 << (node % 64);
        // SAFETY: the range is the caller's; the mask outlives the call and has as many bits as are
        // named. A sandbox may refuse the call: then the pages come from the node of whoever
        // touches them first.
        unsafe {
            libc::syscall(
                libc::SYS_mbind,
                at.as_ptr().addr(),
                len,
                MPOL_PREFERRED,
                mask.as_ptr(),
                NODES_MAX as usize + 1,
                0usize,
            )
        };
    }

    fn nodes(&self, pages: &[usize], nodes: &mut [i32]) -> bool {
        assert_eq!(pages.len(), nodes.len(), "one answer for each page");
        // SAFETY: without target nodes nothing is moved; both lists have that many entries. Of a
        // page that is not this process's own the kernel says so.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0usize,
                pages.len(),
                pages.as_ptr(),
                ptr::null::<i32>(),
                nodes.as_mut_ptr(),
                0usize,
            )
        };
        answer == 0
    }
}
