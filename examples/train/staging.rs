//! A little pinned memory for what the host gives the device each step, and reads of it.
//!
//! What it is not: the pool that layers' inputs move to.
//!
//! Invariant: nobody reads or writes it here while a copy of it is in flight; `trainer` sees to that.
//!
//! ```text
//!   slot 0 { text | hash, loss }   slot 1 { text | hash, loss }      steps take turns
//! ```
//!
//! `trainer` uses it.

use lightering::backend::{Backend, Pinner};
use lightering::{Bytes, PinnedPtr, PinnedRange, Result};
use std::ptr::NonNull;
use std::sync::Arc;

/// Pinned memory of the steps in flight.
pub(crate) struct Staging {
    pinner: Arc<dyn Pinner>,
    bytes: Vec<u64>,
    at: PinnedPtr,
}

impl Staging {
    pub(crate) fn new(backend: &mut dyn Backend, len: Bytes) -> Result<Staging> {
        let pinner = backend.pinner();
        let mut bytes = vec![0u64; len.0.div_ceil(8) as usize];
        let start = NonNull::from(&mut bytes[0]).cast();
        // SAFETY: the vector lives until the registration ends, in `drop`.
        let at = unsafe { pinner.register(start, Bytes(bytes.len() as u64 * 8)) }?;
        Ok(Staging { pinner, bytes, at })
    }

    pub(crate) fn range(&self, offset: u64, len: u64) -> Result<PinnedRange> {
        PinnedRange::new(self.at.offset(Bytes(offset))?, Bytes(len))
    }

    pub(crate) fn write(&mut self, offset: u64, from: &[u8]) -> Result<()> {
        let to: &mut [u8] = bytemuck::cast_slice_mut(&mut self.bytes);
        to[offset as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }

    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from: &[u8] = bytemuck::cast_slice(&self.bytes);
        into.copy_from_slice(&from[offset as usize..][..into.len()]);
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = self.pinner.unregister(self.at);
    }
}
