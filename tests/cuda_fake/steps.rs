//! A training step that makes the driver wait: a synchronize call, a free that waits for the whole
//! device, memory that is page-locked or unlocked, or a stream or event made anew, anywhere between
//! two step marks. Each call that reaches the driver is counted.

use crate::fake::{name_of, names, story};
use lightering::backend::Backend;
use lightering::backend::cuda::Cuda;
use lightering::pack::Strip;
use lightering::{
    Acquire, Budget, Bytes, DeviceRange, Engine, Options, PinnedPool, PoolOptions, Storage,
    StreamId,
};

/// What waits, or makes others wait: the driver serialises these with everything else.
const NEVER: &[&str] = &[
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuModuleUnload",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemGetInfo_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuModuleLoadDataEx",
    "cuMemPoolTrimTo",
];

const LAYERS: usize = 12;
const LEN: Bytes = Bytes::kib(64);

/// One step: half of the layers' inputs are the engine's own, half a framework's. Weights whose
/// address stays leave at its begin, and come back at its end.
fn step(engine: &mut Engine, backend: &mut Cuda, on: [StreamId; 2], weights: &[Storage]) {
    let [here, on] = on;
    for weight in weights {
        // As after an optimizer's step: the host copy is stale.
        engine.acquire_mut(weight.id(), on).unwrap();
        engine.evict(weight.id(), on).unwrap();
    }
    let mut inputs: Vec<(Storage, bool)> = Vec::new();
    for layer in 0..LAYERS {
        let is_ours = layer % 2 == 0;
        let input = if is_ours {
            engine.alloc(LEN, on, "ours").unwrap()
        } else {
            let at = backend.alloc_device(LEN, here).unwrap();
            engine.adopt(DeviceRange::new(at, LEN).unwrap(), "theirs").unwrap()
        };
        engine.evict(input.id(), on).unwrap();
        // What the framework does with its bytes is not looked at here: it keeps them.
        while engine.releasable(on).unwrap().is_some() {}
        inputs.push((input, is_ours));
        engine.step().unwrap();
    }
    // Rows of a framework's, there and back by a kernel.
    let at = backend.alloc_device(LEN, here).unwrap();
    let within = DeviceRange::new(at, LEN).unwrap();
    let rows = [Strip::rows(within, Bytes::ZERO, Bytes(64), 100, Bytes(128)).unwrap()];
    let mut batch = engine.gather(&rows, on, "rows").unwrap();
    engine.gathered(&batch, on).unwrap();
    engine.begin_span(on, "backward").unwrap();
    engine.scatter(&mut batch, &rows, on).unwrap();
    engine.discard(batch).unwrap();
    backend.free_device(at, here).unwrap();
    engine.flush(on).unwrap();
    while engine.releasable(on).unwrap().is_some() {}
    while let Some((input, is_ours)) = inputs.pop() {
        match engine.acquire(input.id(), on).unwrap() {
            Acquire::Ready(_) => assert!(is_ours),
            Acquire::NeedsRoom(len) => {
                let at = backend.alloc_device(len, here).unwrap();
                let target = DeviceRange::new(at, len).unwrap();
                engine.refill(input.id(), target, on).unwrap();
            }
        }
        engine.give_way(on).unwrap();
        engine.release(input, on).unwrap();
    }
    for weight in weights {
        engine.acquire(weight.id(), on).unwrap();
    }
    engine.end_span(on).unwrap();
    engine.mark_step().unwrap();
}

#[test]
fn no_call_between_two_step_marks_makes_the_driver_wait() {
    story(name_of!(no_call_between_two_step_marks_makes_the_driver_wait), "", || {
        let mut backend = Cuda::open(0).unwrap();
        let budget = PoolOptions { budget: Budget::Bytes(Bytes::mib(8)), ..PoolOptions::default() };
        let pool = PinnedPool::new(backend.pinner(), budget).unwrap();
        pool.reserve(Bytes::mib(4)).unwrap();
        let options = Options {
            unreleased_bytes_max: Bytes::kib(128),
            ahead_trunk_bytes_max: Bytes::kib(16),
            spans_max: 64,
            ..Options::default()
        };
        let mut engine = Engine::new(Box::new(Cuda::open(0).unwrap()), &pool, options).unwrap();
        let here = backend.create_stream().unwrap();
        let on = engine.adopt_stream(backend.raw_stream(here).unwrap()).unwrap();
        let weights = [(); 2].map(|()| engine.alloc_fixed(LEN, on, "weight").unwrap());
        // The first step makes what the others use again.
        for _ in 0..2 {
            step(&mut engine, &mut backend, [here, on], &weights);
        }
        names();
        for _ in 0..8 {
            step(&mut engine, &mut backend, [here, on], &weights);
        }
        let names = names();
        let copies = names.iter().filter(|name| name.starts_with("cuMemcpyDtoHAsync")).count();
        let out = LAYERS + weights.len();
        assert_eq!(copies, 8 * out, "each input and each weight went out, in one copy");
        let unmapped = names.iter().filter(|name| *name == "cuMemUnmap").count();
        assert_eq!(unmapped, 8 * weights.len(), "each weight's memory was given back");
        let trunks = names.iter().filter(|name| name.starts_with("cuMemcpyHtoDAsync")).count();
        assert!(trunks > 8 * LAYERS, "{trunks} trunks: nothing was fetched ahead");
        let launches = names.iter().filter(|name| *name == "cuLaunchKernel").count();
        assert_eq!(launches, 2 * 8, "rows went out and came back by a kernel");
        let waits: Vec<_> = names.iter().filter(|name| NEVER.contains(&name.as_str())).collect();
        assert!(waits.is_empty(), "{waits:?}");
    });
}
