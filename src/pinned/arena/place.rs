//! On which node a mapping's pages are to be, and on which they are.
//!
//! What it is not: a promise. Both questions may be refused in a sandbox; then the pages come from
//! the node of whoever touches them first, and nobody is told where they are.
//!
//! Invariant: nothing here moves a page or changes a byte.
//!
//! ```text
//!   mbind(near node, preferred) -> touched -> move_pages(no targets): where does each one lie?
//! ```
//!
//! The arena uses it.

use super::super::class::GRAIN;
use super::mapping::Mapping;
use std::ptr;
use std::sync::atomic::Ordering;

/// Nodes that a mask for the kernel can name.
const NODES_MAX: u32 = 1023;
/// Prefer this node, take another one rather than fail: `<linux/mempolicy.h>`, Linux 6.12.
const MPOL_PREFERRED: usize = 1;

impl Mapping {
    /// Asks for pages of one node; where that has none left others will do, since a refusal would
    /// end the process.
    pub(super) fn prefer(&self, node: u32) {
        let mut mask = [0u64; (NODES_MAX as usize + 1) / 64];
        let Some(word) = mask.get_mut(node as usize / 64) else { return };
        *word = 1 << (node % 64);
        let len = self.len.load(Ordering::Relaxed) as usize;
        // SAFETY: the range is this mapping, no page of which is touched yet; the mask outlives the
        // call and has as many bits as are named. A sandbox may refuse the call: then the pages
        // come from the node of whoever touches them first.
        unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base().addr(),
                len,
                MPOL_PREFERRED,
                mask.as_ptr(),
                NODES_MAX as usize + 1,
                0usize,
            )
        };
    }

    /// Of up to `max` pages of the first `len` bytes: how many the kernel told about, and how many
    /// of those lie on the node.
    pub(super) fn pages_on(&self, len: u64, node: u32, max: usize) -> (u64, u64) {
        let count = ((len / GRAIN) as usize).min(max);
        if count == 0 {
            return (0, 0);
        }
        let stride = len / GRAIN / count as u64 * GRAIN;
        let page = |nth: usize| self.base().wrapping_add(nth * stride as usize).addr();
        let pages: Vec<usize> = (0..count).map(page).collect();
        let mut nodes = vec![-1i32; count];
        // SAFETY: without target nodes nothing is moved; both lists have `count` entries. The pages
        // are this process's own.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0usize,
                count,
                pages.as_ptr(),
                ptr::null::<i32>(),
                nodes.as_mut_ptr(),
                0usize,
            )
        };
        if answer != 0 {
            return (0, 0);
        }
        let told = nodes.iter().filter(|&&node| node >= 0).count();
        let there = nodes.iter().filter(|&&found| u32::try_from(found) == Ok(node)).count();
        (told as u64, there as u64)
    }
}
