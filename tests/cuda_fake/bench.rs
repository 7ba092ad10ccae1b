//! A device on the fake driver with one of everything, for the stories to use.

use crate::fake::{Pages, calls, foreign_stream, primary};
use lightering::backend::cuda::Cuda;
use lightering::backend::{Backend, Cost, Kernel, Timing};
use lightering::{
    Bytes, DevicePtr, DeviceRange, EventId, MemoryId, PinnedPtr, PinnedRange, StreamId,
};

/// The fake driver runs this one: `fill_u32(u32 *at, u32 value, u32 count)`.
pub(crate) static FILL: Kernel = Kernel {
    name: "fill_u32",
    ptx: Some(".version 7.5\n.visible .entry fill_u32(...)\n.visible .entry other(...)"),
    host: None,
    cost: Cost::of_bytes,
};

pub(crate) fn device(at: u64, len: u64) -> DeviceRange {
    DeviceRange::new(DevicePtr(at), Bytes(len)).unwrap()
}

pub(crate) fn pinned(at: u64, len: u64) -> PinnedRange {
    PinnedRange::new(PinnedPtr(at), Bytes(len)).unwrap()
}

/// A device with one of everything, and the thread's context set to the device's own or none.
pub(crate) struct Bench {
    pub(crate) cuda: Cuda,
    pub(crate) own: StreamId,
    pub(crate) lent: StreamId,
    pub(crate) event: EventId,
    pub(crate) timed: [EventId; 2],
    pub(crate) at: DevicePtr,
    pub(crate) pages: Pages,
    pub(crate) host: PinnedPtr,
    /// Pages that are not registered.
    pub(crate) spare: Pages,
    /// Addresses where something is mapped, and addresses with memory that is not.
    pub(crate) mapped: (DeviceRange, MemoryId),
    pub(crate) apart: (DeviceRange, [MemoryId; 2]),
}

impl Bench {
    pub(crate) const LEN: u64 = 8192;

    pub(crate) fn new(ordinal: u32) -> Bench {
        let mut cuda = Cuda::open(ordinal).unwrap();
        let own = cuda.create_stream().unwrap();
        let lent = cuda.adopt_stream(foreign_stream(primary(ordinal))).unwrap();
        let event = cuda.create_event(Timing::Off).unwrap();
        let timed = [(); 2].map(|()| cuda.create_event(Timing::On).unwrap());
        for event in [event, timed[0], timed[1]] {
            cuda.record(event, own).unwrap();
        }
        let at = cuda.alloc_device(Bytes(Bench::LEN), own).unwrap();
        let pages = Pages::new(Bench::LEN as usize);
        // SAFETY: `pages` outlives the registration, which `close` ends.
        let host = unsafe { cuda.pinner().register(pages.at(), Bytes(Bench::LEN)) }.unwrap();
        let unit = cuda.map_granularity().unwrap();
        let mut memory = || cuda.create_memory(unit).unwrap();
        let memory = [memory(), memory(), memory()];
        let mapped = (cuda.reserve_range(unit).unwrap(), memory[0]);
        let apart = (cuda.reserve_range(unit + unit).unwrap(), [memory[1], memory[2]]);
        cuda.map_memory(mapped.0, &[mapped.1]).unwrap();
        calls();
        let spare = Pages::new(4096);
        Bench { cuda, own, lent, event, timed, at, pages, host, spare, mapped, apart }
    }

    pub(crate) fn raw(&self, stream: StreamId) -> u64 {
        self.cuda.raw_stream(stream).unwrap() as u64
    }

    pub(crate) fn device(&self) -> DeviceRange {
        device(self.at.0, Bench::LEN)
    }

    pub(crate) fn pinned(&self) -> PinnedRange {
        pinned(self.host.0, Bench::LEN)
    }

    /// Ends what is mapped, if it still is, and the memory behind it.
    pub(crate) fn unmap(&mut self) {
        let (range, [one, two]) = self.apart;
        for range in [self.mapped.0, range] {
            let _ = self.cuda.unmap_memory(range);
            let _ = self.cuda.release_range(range);
        }
        for memory in [self.mapped.1, one, two] {
            let _ = self.cuda.close_memory(memory);
        }
    }

    /// Ends the registrations, if they are still there, and lets everything go.
    pub(crate) fn abandon(mut self) {
        self.unmap();
        let pinner = self.cuda.pinner();
        let first = pinner.unregister(self.host);
        assert!(
            first.is_ok()
                || first.as_ref().unwrap_err().misuse() == Some(lightering::Misuse::Stale),
            "{first:?}"
        );
        let _ = pinner.unregister(PinnedPtr(self.spare.at().addr().get() as u64));
    }

    pub(crate) fn close(mut self) {
        self.unmap();
        self.cuda.pinner().unregister(self.host).unwrap();
    }
}
