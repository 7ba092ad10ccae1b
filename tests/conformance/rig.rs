//! What every promise needs: users of a device, pinned memory, patterns.

use lightering::backend::sim::{Config, Eager, Lazy, World};
use lightering::backend::{Backend, Pinner, Timing};
use lightering::trace::Site;
use lightering::{Bytes, DeviceRange, EventId, PinnedPtr, PinnedRange, StreamId};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

/// One device to ask.
pub(crate) trait Rig {
    /// One more user of the device.
    fn user(&self) -> Box<dyn Backend>;

    /// Begins or ends a capture on a stream, as its owner would: by its raw handle.
    fn set_capturing(&self, raw: usize, capturing: bool);
}

impl Rig for World {
    fn user(&self) -> Box<dyn Backend> {
        Box::new(self.device(0).unwrap())
    }

    fn set_capturing(&self, raw: usize, capturing: bool) {
        let mut owner = self.device(0).unwrap();
        let stream = owner.adopt_stream(raw).unwrap();
        owner.set_capturing(stream, capturing).unwrap();
        owner.close_stream(stream).unwrap();
    }
}

/// The simulated device in virtual time.
pub(crate) fn timed() -> Vec<Box<dyn Rig>> {
    vec![Box::new(World::new(Config::default()))]
}

/// The simulated device in many orders: by seeds, as late as can be, at once.
pub(crate) fn adversaries() -> Vec<Box<dyn Rig>> {
    let mut configs: Vec<Config> = (0..48).map(Config::adversary).collect();
    configs.push(Config::scheduled(Box::new(Lazy::default())));
    configs.push(Config::scheduled(Box::new(Eager)));
    configs.into_iter().map(|config| Box::new(World::new(config)) as Box<dyn Rig>).collect()
}

pub(crate) const PAGE: usize = 4096;

/// Page-aligned host memory. It goes when dropped, unless a device may still use it.
pub(crate) struct Pages {
    at: NonNull<u8>,
    len: usize,
    pins: Vec<(Arc<dyn Pinner>, PinnedPtr)>,
}

impl Pages {
    pub(crate) fn new(len: usize) -> Pages {
        assert!(len > 0, "pages hold something");
        // SAFETY: the length is not zero.
        let at = unsafe { alloc_zeroed(layout(len)) };
        Pages { at: NonNull::new(at).unwrap(), len, pins: Vec::new() }
    }

    /// Pages that are pinned as a whole, in one registration.
    pub(crate) fn pinned(backend: &dyn Backend, len: usize) -> (Pages, PinnedRange) {
        let mut pages = Pages::new(len);
        let range = pages.pin(backend, 0, len);
        (pages, range)
    }

    /// Pins a part in one registration.
    pub(crate) fn pin(&mut self, backend: &dyn Backend, offset: usize, len: usize) -> PinnedRange {
        assert!(offset + len <= self.len, "a part of the pages");
        let pinner = backend.pinner();
        // SAFETY: the part lies in the allocation, which is given back only once every
        // registration has ended; nobody else pins it.
        let at = unsafe { pinner.register(self.at.add(offset), Bytes(len as u64)) }.unwrap();
        self.pins.push((pinner, at));
        PinnedRange::new(at, Bytes(len as u64)).unwrap()
    }

    /// Ends every registration.
    pub(crate) fn unpin(&mut self) -> lightering::Result<()> {
        while let Some((pinner, at)) = self.pins.last() {
            pinner.unregister(*at)?;
            self.pins.pop();
        }
        Ok(())
    }

    /// Writes a pattern as the host.
    pub(crate) fn write(&self, offset: usize, pattern: &[u8]) {
        assert!(offset + pattern.len() <= self.len, "inside the pages");
        for (index, byte) in pattern.iter().enumerate() {
            // SAFETY: inside the allocation; a raw write, since a device may look at these bytes.
            unsafe { self.at.add(offset + index).write_volatile(*byte) }
        }
    }

    /// Reads bytes as the host.
    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len, "inside the pages");
        // SAFETY: inside the allocation; a raw read, since a device may change these bytes.
        (0..len).map(|index| unsafe { self.at.add(offset + index).read_volatile() }).collect()
    }

    /// Address of the first byte.
    pub(crate) fn at(&self) -> NonNull<u8> {
        self.at
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.unpin().is_ok() {
            // SAFETY: allocated in `new` with this layout, and no longer pinned.
            unsafe { dealloc(self.at.as_ptr(), layout(self.len)) }
        }
    }
}

fn layout(len: usize) -> Layout {
    Layout::from_size_align(len, PAGE).unwrap()
}

/// Bytes that differ from seed to seed and from place to place.
pub(crate) fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index ^ (index >> 8)) as u8 ^ seed.wrapping_mul(37)).collect()
}

pub(crate) fn part(range: PinnedRange, offset: usize, len: usize) -> PinnedRange {
    range.part(Bytes(offset as u64), Bytes(len as u64)).unwrap()
}

pub(crate) fn alloc(backend: &mut dyn Backend, len: usize, on: StreamId) -> DeviceRange {
    let len = Bytes(len as u64);
    DeviceRange::new(backend.alloc_device(len, on).unwrap(), len).unwrap()
}

pub(crate) fn event(backend: &mut dyn Backend) -> EventId {
    backend.create_event(Timing::Off).unwrap()
}

/// Lets `later` wait for everything enqueued on `earlier` until now.
pub(crate) fn chain(backend: &mut dyn Backend, earlier: StreamId, later: StreamId) {
    let event = event(backend);
    backend.record(event, earlier).unwrap();
    backend.wait(later, event, Site::Outside).unwrap();
    backend.close_event(event).unwrap();
}

/// Asks until the event is done.
pub(crate) fn until_done(backend: &mut dyn Backend, event: EventId) {
    for _ in 0..100_000_000_u64 {
        if backend.query(event, Site::Outside).unwrap() {
            return;
        }
    }
    panic!("the event was never done");
}
