//! On which node a mapping's pages are to be, and on which they are.
//!
//! What it is not: a promise. Both questions may be refused in a sandbox; then the pages come from
//! the node of whoever touches them first, and nobody is told where they are.
//!
//! Invariant: the node is asked for before the first page is taken: later the question moves none.
//!
//! ```text
//!   mbind(near node, preferred) -> touched -> move_pages(no targets): where does each one lie?
//! ```
//!
//! The arena uses it.
#![deny(unsafe_code)]

use super::super::class::GRAIN;
use super::mapping::Mapping;

impl Mapping {
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
        if !self.system.nodes(&pages, &mut nodes) {
            return (0, 0);
        }
        let told = nodes.iter().filter(|&&node| node >= 0).count();
        let there = nodes.iter().filter(|&&found| u32::try_from(found) == Ok(node)).count();
        (told as u64, there as u64)
    }
}
