//! A real device with what the tests need, or the words that there is none.

use lightering::backend::cuda::Cuda;
use lightering::backend::{Arg, Backend, Cost, Grid, Kernel, Pinner};
use lightering::trace::Site;
use lightering::{
    Bytes, DevicePtr, DeviceRange, EventId, Kind, PinnedPtr, PinnedRange, Result, StreamId,
};
use std::alloc::{Layout, alloc_zeroed};
use std::ffi::c_int;
use std::io::Write;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};

const PTX: Option<&str> = Some(include_str!("kernels.ptx"));

pub(crate) static FILL: Kernel =
    Kernel { name: "fill_u32", ptx: PTX, host: None, cost: Cost::of_bytes };
pub(crate) static SPIN: Kernel =
    Kernel { name: "spin", ptx: PTX, host: None, cost: Cost::of_bytes };
pub(crate) static POKE: Kernel =
    Kernel { name: "poke", ptx: PTX, host: None, cost: Cost::of_bytes };

/// Held by who asks for more memory than the device has, and by who needs much of it then: on the
/// way to a refusal the driver may take what is there.
pub(crate) static MEMORY: Mutex<()> = Mutex::new(());

/// Device 0, or `None`, said aloud past the test runner's capture.
pub(crate) fn cuda() -> Option<Cuda> {
    match Cuda::open(0) {
        Ok(cuda) => Some(cuda),
        Err(error) if matches!(error.kind(), Kind::Unavailable(_)) => {
            let required = std::env::var_os("LIGHTERING_REQUIRE_CUDA").is_some();
            assert!(!required, "a CUDA device is required: {error}");
            let words = format!("no CUDA device: NOT run ({error})\n");
            std::io::stderr().write_all(words.as_bytes()).unwrap();
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Page-locked memory for a test. It is never unmapped, so nothing in flight can miss it.
pub(crate) struct Host {
    pinner: Arc<dyn Pinner>,
    at: NonNull<u8>,
    pub(crate) range: PinnedRange,
}

impl Host {
    pub(crate) fn new(cuda: &Cuda, len: u64) -> Host {
        let layout = Layout::from_size_align(len as usize, 4096).unwrap();
        // SAFETY: the callers ask for some bytes.
        let at = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Host::register(cuda, at, len)
    }

    pub(crate) fn register(cuda: &Cuda, at: NonNull<u8>, len: u64) -> Host {
        let pinner = cuda.pinner();
        // SAFETY: the memory is never freed.
        let pinned = unsafe { pinner.register(at, Bytes(len)) }.unwrap();
        Host { pinner, at, range: PinnedRange::new(pinned, Bytes(len)).unwrap() }
    }

    pub(crate) fn ptr(&self) -> PinnedPtr {
        self.range.at()
    }

    /// The 32-bit words, where nothing is in flight.
    pub(crate) fn words(&mut self) -> &mut [u32] {
        let len = self.range.len().0 as usize / 4;
        // SAFETY: allocated, aligned to a page, and the callers have waited for all copies.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr().cast(), len) }
    }

    pub(crate) fn close(self) {
        self.pinner.unregister(self.range.at()).unwrap();
    }
}

pub(crate) fn range(at: DevicePtr, len: u64) -> DeviceRange {
    DeviceRange::new(at, Bytes(len)).unwrap()
}

pub(crate) fn fill(cuda: &mut Cuda, to: DeviceRange, value: u32, on: StreamId) -> Result<()> {
    let count = (to.len().0 / 4) as u32;
    let args = [Arg::Write(to), Arg::U32(value), Arg::U32(count)];
    cuda.launch(&FILL, Grid::row(count.div_ceil(256), 256), &args, on)
}

pub(crate) fn spin(cuda: &mut Cuda, milliseconds: u64, on: StreamId) -> Result<()> {
    cuda.launch(&SPIN, Grid::row(1, 1), &[Arg::U64(milliseconds * 1_000_000)], on)
}

/// Asks until the answer is yes or an error.
pub(crate) fn poll(cuda: &mut Cuda, event: EventId) -> Result<()> {
    while !cuda.query(event, Site::Outside)? {
        std::thread::yield_now();
    }
    Ok(())
}

/// A function of the driver that this crate does not call.
pub(crate) fn driver<F: Copy>(name: &str) -> F {
    static LIBRARY: OnceLock<libloading::Library> = OnceLock::new();
    // SAFETY: the library is loaded already; the callers name the documented signature.
    let library =
        LIBRARY.get_or_init(|| unsafe { libloading::Library::new("libcuda.so.1") }.unwrap());
    // SAFETY: as above.
    *unsafe { library.get::<F>(name) }.unwrap()
}

/// The context that is current on this thread.
pub(crate) fn current() -> usize {
    let get: unsafe extern "C" fn(*mut usize) -> c_int = driver("cuCtxGetCurrent");
    let mut context = 0;
    // SAFETY: valid pointer.
    assert_eq!(unsafe { get(&mut context) }, 0);
    context
}

/// Runs the calls of an application, which has the device's context current on its thread.
pub(crate) fn in_context(calls: impl FnOnce()) {
    let retain: unsafe extern "C" fn(*mut usize, c_int) -> c_int =
        driver("cuDevicePrimaryCtxRetain");
    let release: unsafe extern "C" fn(c_int) -> c_int = driver("cuDevicePrimaryCtxRelease_v2");
    let set: unsafe extern "C" fn(usize) -> c_int = driver("cuCtxSetCurrent");
    let before = current();
    let mut context = 0;
    // SAFETY: device 0 is there; valid pointer.
    assert_eq!(unsafe { retain(&mut context, 0) }, 0);
    // SAFETY: held until it is released below.
    assert_eq!(unsafe { set(context) }, 0);
    calls();
    // SAFETY: it was current before.
    assert_eq!(unsafe { set(before) }, 0);
    // SAFETY: gives back the hold taken above; the users have holds of their own.
    assert_eq!(unsafe { release(0) }, 0);
}
