//! A training step in steady state asks the host for nothing: no memory, no lock held over a wait,
//! no event, no wait for the device.
//!
//! The fault guarded against: an offloader whose host work grows with the run, or that stalls on
//! the allocator in the middle of a step. The backend here answers at once and allocates nothing,
//! so what is counted is the engine's own.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use lightering::backend::{
    About, Arg, Backend, Fence, Grid, Kernel, Memory, Pinner, Timing, traced::Traced,
};
use lightering::trace::{Actor, Site, Use};
use lightering::{
    Acquire, Budget, Bytes, DeviceId, DevicePtr, DeviceRange, Engine, EventId, Key, Options,
    PinnedPool, PinnedPtr, PinnedRange, PoolOptions, Result, StreamId,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: as the trait says; the caller's promises are passed on.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: as the trait says; the caller's promises are passed on.
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A device on which everything is done at once.
struct Instant_ {
    next: u64,
    keys: u32,
    free: Vec<u64>,
}

impl Instant_ {
    fn key(&mut self) -> Key {
        self.keys += 1;
        Key { owner: 0, index: self.keys, generation: 0 }
    }
}

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
        Bytes::gib(1)
    }
}

impl Backend for Instant_ {
    fn about(&self) -> About {
        About {
            device: DeviceId(0),
            name: String::new(),
            driver: 0,
            simulated: true,
            memory: Bytes::ZERO,
        }
    }
    fn memory(&mut self) -> Result<Memory> {
        Ok(Memory::default())
    }
    fn reset_peak(&mut self) {}
    fn alloc_device(&mut self, len: Bytes, _: StreamId) -> Result<DevicePtr> {
        // Like a driver's pool, it hands the bytes freed last out again.
        let at = self.free.pop().unwrap_or_else(|| {
            self.next += len.0.next_multiple_of(256);
            self.next
        });
        Ok(DevicePtr(at))
    }
    fn free_device(&mut self, at: DevicePtr, _: StreamId) -> Result<()> {
        self.free.push(at.0);
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

const LAYERS: usize = 48;
const LEN: Bytes = Bytes::kib(64);

fn step(engine: &mut Engine, on: StreamId, inputs: &mut Vec<lightering::Storage>) {
    for _ in 0..LAYERS {
        let input = engine.alloc(LEN, on, "input").unwrap();
        engine.offer(input.id(), on).unwrap();
        inputs.push(input);
        engine.step().unwrap();
    }
    engine.flush(on).unwrap();
    while let Some(input) = inputs.pop() {
        let got = engine.acquire(input.id(), on).unwrap();
        assert!(matches!(got, Acquire::Ready(_)));
        engine.release(input, on).unwrap();
    }
    engine.mark_step().unwrap();
}

/// Steps in steady state under these bounds, and what they asked of host and device.
fn ask_for_nothing(options: Options) -> lightering::Stats {
    let device = Instant_ { next: 1 << 40, keys: 0, free: Vec::with_capacity(1024) };
    let budget = PoolOptions { budget: Budget::Bytes(Bytes::mib(16)), ..PoolOptions::default() };
    let pool = PinnedPool::new(device.pinner(), budget).unwrap();
    let options = Options { unreleased_bytes_max: Bytes::kib(256), ..options };
    let verify = options.verify;
    let mut engine = Engine::new(Box::new(Traced::new(device, 0)), &pool, options).unwrap();
    let on = engine.adopt_stream(1 << 20).unwrap();
    let mut inputs = Vec::with_capacity(LAYERS);
    for _ in 0..4 {
        step(&mut engine, on, &mut inputs);
    }
    let (before, seam) = (COUNT.get(), engine.stats().seam);
    let steps = 16;
    for _ in 0..steps {
        step(&mut engine, on, &mut inputs);
    }
    let asked = COUNT.get() - before;
    let after = engine.stats().seam;
    let evictions = (steps * (LAYERS - 1)) as u64;
    // A sum each way comes with an eviction, if there are sums.
    let copies = if verify { 3 * evictions } else { evictions };
    assert_eq!(after.copies_out - seam.copies_out, copies);
    assert_eq!(after.events_opened, seam.events_opened, "an event was opened");
    assert_eq!(after.syncs, seam.syncs, "the host waited for the device");
    println!("{asked} allocations in {evictions} evictions and refills");
    assert_eq!(asked, 0, "the host's allocator was asked");
    engine.stats()
}

#[test]
fn a_step_in_steady_state_asks_the_allocator_for_nothing() {
    let stats = ask_for_nothing(Options::default());
    assert_eq!((stats.verified_count, stats.unverified_count), (0, 0));
}

#[test]
fn comparing_what_came_back_asks_the_allocator_for_nothing() {
    let stats = ask_for_nothing(Options { verify: true, ..Options::default() });
    assert_eq!((stats.verified_count, stats.unverified_count), (stats.refilled_count, 0));
    assert!(stats.refilled_count > 0);
}
