//! One engine served by several threads, as frameworks run forward and backward on different ones;
//! and an engine whose device was lost under it.
//!
//! The faults guarded against: an engine that only its maker's thread may call, handles that cannot
//! be dropped elsewhere, and a lost device after which anything is freed, waited for, or forgotten.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::backend::sim::{Config, Fault, Model, Spot};
use lightering::{Acquire, Bytes, Engine, Kind, Residency, Shared, Storage};
use std::sync::mpsc;
use support::{Rig, options, small_pool};

const LEN: Bytes = Bytes::kib(4);

fn sendable<T: Send>() {}

#[test]
fn an_engine_and_its_handles_may_go_to_another_thread() {
    sendable::<Engine>();
    sendable::<Storage>();
    sendable::<Shared>();
}

#[test]
fn forward_and_backward_run_on_different_threads() {
    let rig = Rig::new(Config::timed(Model::default()), small_pool(Bytes::mib(1)), options(), 1);
    let Rig { engine, streams, pool, sim, .. } = rig;
    let on = streams[0].engine;
    let shared = Shared::new(engine);
    let (hand, handed) = mpsc::sync_channel::<Storage>(4);
    let backward = std::thread::spawn({
        let shared = shared.clone();
        move || {
            let mut served = 0;
            for input in handed {
                let got = shared.lock().acquire(input.id(), on).unwrap();
                assert!(matches!(got, Acquire::Ready(_)));
                shared.lock().release(input, on).unwrap();
                served += 1;
            }
            served
        }
    });
    for _ in 0..200 {
        let input = shared.lock().alloc(LEN, on, "x").unwrap();
        shared.lock().evict(input.id(), on).unwrap();
        hand.send(input).unwrap();
    }
    drop(hand);
    assert_eq!(backward.join().unwrap(), 200);
    shared.lock().shutdown().unwrap();
    assert_eq!(pool.stats().lent, Bytes::ZERO);
    drop(sim);
}

#[test]
fn many_threads_call_and_drop_as_they_like() {
    let rig = Rig::new(Config::timed(Model::default()), small_pool(Bytes::mib(1)), options(), 1);
    let Rig { engine, streams, pool, .. } = rig;
    let on = streams[0].engine;
    let shared = Shared::new(engine);
    let threads: Vec<_> = (0..4u64)
        .map(|thread| {
            let shared = shared.clone();
            std::thread::spawn(move || {
                for round in 0..200u64 {
                    let input = shared.lock().alloc(LEN, on, "x").unwrap();
                    shared.lock().evict(input.id(), on).unwrap();
                    match (thread + round) % 3 {
                        0 => drop(input),
                        1 => shared.lock().release(input, on).unwrap(),
                        _ => {
                            shared.lock().acquire(input.id(), on).unwrap();
                            shared.lock().release(input, on).unwrap();
                        }
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let mut engine = shared.lock();
    engine.drain().unwrap();
    assert_eq!(engine.memory().unwrap().allocated, Bytes::ZERO);
    engine.shutdown().unwrap();
    assert_eq!(pool.stats().lent, Bytes::ZERO);
}

#[test]
fn after_a_fatal_error_every_verb_names_where_it_was_first_seen_and_nothing_is_freed() {
    let mut config = Config::adversary(1);
    config.faults = config.faults.at(Spot::Copy, 3, Fault::Fatal(700));
    let mut rig = Rig::new(config, small_pool(Bytes::mib(1)), options(), 1);
    let on = rig.streams[0].engine;
    let inputs: Vec<_> = (0..4).map(|_| rig.engine.alloc(LEN, on, "x").unwrap()).collect();
    let mut seen = None;
    for input in &inputs {
        match rig.engine.evict(input.id(), on) {
            Ok(_) => {}
            Err(error) => seen = seen.or(Some(error)),
        }
    }
    let first = seen.expect("the third trunk hits the fault");
    assert_eq!((first.kind(), first.driver_code()), (Kind::Lost, Some(700)));
    for error in [
        rig.engine.acquire(inputs[0].id(), on).unwrap_err(),
        rig.engine.flush(on).unwrap_err(),
        rig.engine.step().unwrap_err(),
        rig.engine.alloc(LEN, on, "y").unwrap_err(),
        rig.engine.drain().unwrap_err(),
    ] {
        assert_eq!((error.kind(), error.op()), (Kind::Lost, first.op()), "{error}");
    }
    assert_eq!(rig.engine.residency(inputs[0].id()).unwrap(), Residency::Lost);
    let asked = rig.engine.stats().seam;
    drop(inputs);
    drop(rig.engine);
    // The blocks that copies may still touch were not lent or unpinned: they are in quarantine.
    assert!(rig.pool.stats().quarantined > Bytes::ZERO);
    assert_eq!(rig.pool.stats().lent, Bytes::ZERO);
    assert!(asked.failures > 0);
}
