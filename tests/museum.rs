//! Faults of order that other projects shipped, met or just caught, each twice: as it was made
//! there, where the order checker must flag it; and in its circumstances through the engine, where
//! nothing may be wrong.
//!
//! The fault guarded against is the next one of their kind. The entries are named by where they
//! were met; each is one missing edge of the eight.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "museum/apart.rs"]
mod apart;
#[path = "museum/broken.rs"]
mod broken;
#[path = "museum/ours.rs"]
mod ours;
#[path = "museum/plain.rs"]
mod plain;
#[allow(dead_code, reason = "the helpers serve several test files; each uses its part")]
#[path = "conformance/rig.rs"]
mod rig;
mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, World};
use lightering::hazard::Kind;
use lightering::pinned::PinnedPool;
use lightering::trace::Edge;
use lightering::{Acquire, Bytes, Engine, Evict, Options};
use plain::Plain;
use support::{Rig, options, quick_pool};

struct Entry {
    id: &'static str,
    at: &'static str,
    edge: Edge,
    kind: Kind,
    broken: fn(&mut Plain),
    ours: fn(&mut Rig),
}

const fn entry(
    id: &'static str,
    at: &'static str,
    edge: Edge,
    kind: Kind,
    broken: fn(&mut Plain),
    ours: fn(&mut Rig),
) -> Entry {
    Entry { id, at, edge, kind, broken, ours }
}

use Kind::{FreeInFlight, ReadAfterWrite, WriteAfterRead};

const MUSEUM: &[Entry] = &[
    entry("M01", "Megatron-LM 7398", Edge::E4, ReadAfterWrite, broken::m01, ours::m01),
    entry("M02", "TransformerEngine 2341", Edge::E5, WriteAfterRead, broken::m02, ours::m02),
    entry("M04", "trl 7195", Edge::E1, ReadAfterWrite, broken::m04, ours::m04),
    entry("M05", "trl 7195", Edge::E1, ReadAfterWrite, broken::m05, ours::m05),
    entry("M06", "torchtune 1867", Edge::E2, FreeInFlight, broken::m06, ours::m06),
    entry("M07", "torchtitan 2581", Edge::E1, ReadAfterWrite, broken::m07, ours::m07),
    entry("M08", "axolotl 3512", Edge::E6, ReadAfterWrite, broken::m08, ours::m08),
    entry("M09", "keys_values 138", Edge::E1, ReadAfterWrite, broken::m09, ours::m09),
    entry("M10", "torchrec 4231", Edge::E2, FreeInFlight, broken::m10, ours::m10),
    entry("M11", "DeepSpeed 7371", Edge::E7, WriteAfterRead, broken::m11, ours::m11),
    entry("M12", "DeepSpeed 7965", Edge::E2, FreeInFlight, broken::m12, ours::m12),
    entry("M13", "pytorch 180666", Edge::E3, ReadAfterWrite, broken::m13, ours::m13),
    entry("M14", "pytorch 185252", Edge::E3, ReadAfterWrite, broken::m14, ours::m13),
    entry("M15", "fairscale 496", Edge::E3, ReadAfterWrite, broken::m15, ours::m13),
    entry("M16", "TensorRT-LLM 15546", Edge::E7, WriteAfterRead, broken::m16, ours::m16),
    entry("M17", "TensorRT-LLM 9056", Edge::E5, WriteAfterRead, broken::m17, ours::m17),
    entry("M18", "vllm 46278", Edge::E1, ReadAfterWrite, broken::m18, ours::m05),
    entry("M19", "vllm 47324", Edge::E5, WriteAfterRead, broken::m19, ours::m19),
    entry("M20", "vllm 39306", Edge::E1, ReadAfterWrite, broken::m20, ours::m09),
    entry("M21", "cuCascade 158", Edge::E7, WriteAfterRead, broken::m21, ours::m16),
    entry("M22", "cuCascade 189", Edge::E8, ReadAfterWrite, broken::m22, ours::m22),
    entry("M23", "LMCache, rtx6kpro 47", Edge::E5, WriteAfterRead, broken::m23, ours::m23),
    entry("M24", "ai-toolkit 1002", Edge::E2, FreeInFlight, broken::m24, ours::m24),
    entry("M25", "ik_llama.cpp 2083", Edge::E6, ReadAfterWrite, broken::m25, ours::m25),
    entry("M26", "cudf 22321", Edge::E7, FreeInFlight, broken::m26, ours::m26),
    entry("M27", "xla 46093", Edge::E7, FreeInFlight, broken::m27, ours::m27),
    entry("M28", "vllm-ascend 13894", Edge::E7, FreeInFlight, broken::m28, ours::m28),
    entry("M29", "quadrants 407", Edge::E2, FreeInFlight, broken::m29, ours::m29),
];

#[test]
fn each_fault_is_flagged_as_it_was_made() {
    assert_eq!(MUSEUM.len(), 28);
    for entry in MUSEUM {
        for seed in 0..20 {
            let mut plain = Plain::new(seed);
            (entry.broken)(&mut plain);
            let found = plain.found();
            // Nothing else is wrong with it.
            let only = found.iter().all(|kind| *kind == entry.kind) && !found.is_empty();
            assert!(only, "{} ({}): {found:?}", entry.id, entry.at);
            plain.sim.sync().unwrap();
        }
        println!("{} {:<24} {:?} flagged as {:?}", entry.id, entry.at, entry.edge, entry.kind);
    }
}

#[test]
fn in_the_same_circumstances_the_engine_keeps_the_order() {
    for entry in MUSEUM {
        for seed in 0..40 {
            let mut config = Config::adversary(seed);
            config.device_bytes = Bytes::kib(64);
            // Of a double buffer two blocks, where blocks matter one.
            let blocks = if entry.id == "M11" { 8 } else { 4 };
            let is_tight = entry.edge == Edge::E7;
            let pool = quick_pool(Bytes::kib(if is_tight { blocks } else { 64 }));
            let bounds = Options {
                note_uses: false,
                prefetch_count_max: 2,
                unreleased_bytes_max: Bytes(seed % 3 * 2048),
                trunk_bytes_max: Bytes::kib(1),
                ..options()
            };
            let mut rig = Rig::new(config, pool, bounds, 2);
            (entry.ours)(&mut rig);
            rig.assert_right();
            rig.assert_nothing_left();
            assert_eq!(rig.world.removals_refused(), 0, "{}", entry.id);
        }
    }
}

/// Engines of two devices share a pool of one block: each has events of its own, and a block
/// crosses only when the other's event is done.
#[test]
fn h18_engines_of_two_devices_share_blocks_and_no_events() {
    for seed in 0..40 {
        let world = World::new(Config::adversary(seed));
        let pinner = world.device(0).unwrap().pinner();
        let pool = PinnedPool::new(pinner, quick_pool(Bytes::kib(4))).unwrap();
        let mut engines: Vec<_> = (0..2)
            .map(|ordinal| {
                let mut user = world.device(ordinal).unwrap();
                let stream = user.create_stream().unwrap();
                let raw = user.raw_stream(stream).unwrap();
                let device = Box::new(world.device(ordinal).unwrap());
                let mut engine = Engine::new(device, &pool, options()).unwrap();
                let on = engine.adopt_stream(raw).unwrap();
                (user, engine, on)
            })
            .collect();
        for round in 0..6 {
            let (_, engine, on) = &mut engines[round % 2];
            let storage = engine.alloc(Bytes::kib(4), *on, "x").unwrap();
            let left = (0..100_000).find(|_| {
                // Where the other one's copy still runs there is no room.
                !matches!(engine.evict(storage.id(), *on).unwrap(), Evict::Kept(_))
            });
            assert!(left.is_some(), "seed {seed} round {round}");
            engine.flush(*on).unwrap();
            let acquired = engine.acquire(storage.id(), *on).unwrap();
            assert!(matches!(acquired, Acquire::Ready(_)));
            engine.release(storage, *on).unwrap();
        }
        for (_, mut engine, _) in engines {
            engine.drain().unwrap();
            assert_eq!(engine.stats().seam.failures, 0, "no event of another device was named");
            engine.shutdown().unwrap();
        }
        assert_eq!(pool.stats().lent, Bytes::ZERO);
        assert_eq!(world.removals_refused(), 0);
    }
}
