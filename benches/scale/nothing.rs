//! A device on which everything is done at once, and that costs hardly any time.
//!
//! What it is not: a device that bytes survive on. None are moved.
//!
//! Invariant: each verb answers at once and allocates nothing, so what is timed is the engine's.
//!
//! ```text
//!   engine -> Nothing: addresses from a counter, every event done
//! ```
//!
//! `main` uses it.

use lightering::backend::{About, Arg, Backend, Fence, Grid, Kernel, Memory, Pinner, Timing};
use lightering::trace::{Actor, Site, Use};
use lightering::{
    Bytes, DeviceId, DevicePtr, DeviceRange, EventId, Key, PinnedPtr, PinnedRange, Result, StreamId,
};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// The device.
#[derive(Default)]
pub(crate) struct Nothing {
    keys: u32,
    at: u64,
}

impl Nothing {
    fn key(&mut self) -> Key {
        self.keys += 1;
        Key { owner: 0, index: self.keys, generation: 0 }
    }
}

/// Registers address space, and answers yes.
#[derive(Debug)]
struct Always;

impl Fence for Always {
    fn done(&self, _: EventId) -> Result<bool> {
        Ok(true)
    }
}

impl Pinner for Always {
    // SAFETY: nothing is done with the memory.
    unsafe fn register(&self, at: NonNull<u8>, _: Bytes) -> Result<PinnedPtr> {
        Ok(PinnedPtr(at.as_ptr() as u64))
    }

    fn unregister(&self, _: PinnedPtr) -> Result<()> {
        Ok(())
    }

    fn registration_max(&self) -> Bytes {
        Bytes::gib(64)
    }

    fn needs_memory(&self) -> bool {
        false
    }
}

impl Backend for Nothing {
    fn about(&self) -> About {
        let (device, memory) = (DeviceId(0), Bytes::ZERO);
        About { device, name: String::from("nothing"), driver: 0, simulated: true, memory }
    }
    fn memory(&mut self) -> Result<Memory> {
        Ok(Memory::default())
    }
    fn reset_peak(&mut self) {}
    fn alloc_device(&mut self, len: Bytes, _: StreamId) -> Result<DevicePtr> {
        self.at += len.0.next_multiple_of(256);
        Ok(DevicePtr(self.at))
    }
    fn free_device(&mut self, _: DevicePtr, _: StreamId) -> Result<()> {
        Ok(())
    }
    fn adopt_stream(&mut self, _: usize) -> Result<StreamId> {
        Ok(StreamId(self.key()))
    }
    fn create_stream(&mut self) -> Result<StreamId> {
        Ok(StreamId(self.key()))
    }
    fn close_stream(&mut self, _: StreamId) -> Result<()> {
        Ok(())
    }
    fn raw_stream(&self, stream: StreamId) -> Result<usize> {
        Ok(stream.0.index as usize)
    }
    fn create_event(&mut self, _: Timing) -> Result<EventId> {
        Ok(EventId(self.key()))
    }
    fn close_event(&mut self, _: EventId) -> Result<()> {
        Ok(())
    }
    fn record(&mut self, _: EventId, _: StreamId) -> Result<()> {
        Ok(())
    }
    fn wait(&mut self, _: StreamId, _: EventId, _: Site) -> Result<()> {
        Ok(())
    }
    fn query(&mut self, _: EventId, _: Site) -> Result<bool> {
        Ok(true)
    }
    fn elapsed(&mut self, _: EventId, _: EventId) -> Result<Duration> {
        Ok(Duration::ZERO)
    }
    fn note(&mut self, _: Actor, _: &[Use]) -> Result<()> {
        Ok(())
    }
    fn copy_out(&mut self, _: PinnedRange, _: DeviceRange, _: StreamId) -> Result<()> {
        Ok(())
    }
    fn copy_in(&mut self, _: DeviceRange, _: PinnedRange, _: StreamId) -> Result<()> {
        Ok(())
    }
    fn launch(&mut self, _: &'static Kernel, _: Grid, _: &[Arg], _: StreamId) -> Result<()> {
        Ok(())
    }
    fn capturing(&mut self, _: StreamId) -> Result<bool> {
        Ok(false)
    }
    fn sync(&mut self) -> Result<()> {
        Ok(())
    }
    fn pinner(&self) -> Arc<dyn Pinner> {
        Arc::new(Always)
    }
    fn fence(&self) -> Arc<dyn Fence> {
        Arc::new(Always)
    }
}
