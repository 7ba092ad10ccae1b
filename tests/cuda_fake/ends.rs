//! The calls by which bytes, pools and contexts go: a driver that refuses them, with any code.
//!
//! The faults guarded against: a want of memory that is told as a misuse since the trim that should
//! have helped was refused; a fatal code that nobody keeps, so that the next one to open the device
//! works on a broken one; a pool or a context that goes twice, or a context that goes after a loss;
//! a panic in a drop.

use crate::bench::Bench;
use crate::fake::{Alive, alive, calls, current, mode, name_of, names, script, story};
use crate::faults::{codes, must_be_lost};
use lightering::backend::Backend;
use lightering::backend::cuda::{Cuda, is_fatal};
use lightering::{Bytes, Kind, StreamId};

const DEVICES: &str = "devices:1000000";

/// An open device that has a pool, and a stream of its own.
fn with_pool(ordinal: u32) -> (Cuda, StreamId) {
    script(DEVICES);
    let mut cuda = Cuda::open(ordinal).unwrap();
    let on = cuda.create_stream().unwrap();
    let at = cuda.alloc_device(Bytes(8), on).unwrap();
    cuda.free_device(at, on).unwrap();
    calls();
    (cuda, on)
}

fn count(names: &[String], name: &str) -> usize {
    names.iter().filter(|call| *call == name).count()
}

/// Nothing of a device is left but what the driver refused to take.
fn left(pools: u64, holds: u64) -> Alive {
    Alive { pools, holds, ..Alive::default() }
}

#[test]
fn a_trim_that_is_refused_hides_no_want_of_memory() {
    story(name_of!(a_trim_that_is_refused_hides_no_want_of_memory), DEVICES, || {
        let mut ordinal = 0;
        for code in codes() {
            let trim = format!("{DEVICES},fail:cuMemPoolTrimTo:1:{code}");
            for (nth, is_short) in [(1, false), (0, true)] {
                script(DEVICES);
                let mut b = Bench::new(ordinal);
                let before = b.cuda.memory().unwrap().allocated;
                calls();
                script(&format!("{trim},fail:cuMemAllocFromPoolAsync:{nth}:2"));
                let taken = b.cuda.alloc_device(Bytes(8), b.own);
                let names = names();
                assert_eq!((current(), mode()), (0, 0), "{code}");
                assert_eq!(count(&names, "cuMemPoolTrimTo"), 1, "{code}");
                if is_fatal(code) {
                    assert_eq!(count(&names, "cuMemAllocFromPoolAsync"), 1, "{code}: after a loss");
                    must_be_lost(b, &taken.unwrap_err(), "alloc_device", code);
                    ordinal += 1;
                    continue;
                }
                let at = match taken {
                    Ok(at) => {
                        assert!(!is_short, "{code}");
                        at
                    }
                    Err(error) => {
                        assert!(is_short, "{code}: {error}");
                        assert_eq!(error.kind(), Kind::OutOfMemory, "{code}: {error}");
                        script(DEVICES);
                        b.cuda.alloc_device(Bytes(8), b.own).unwrap()
                    }
                };
                b.cuda.free_device(at, b.own).unwrap();
                assert_eq!(b.cuda.memory().unwrap().allocated, before, "{code}");
                b.abandon();
            }
        }
    });
}

#[test]
fn a_pool_whose_end_is_refused_goes_once_and_a_loss_is_the_last_call() {
    story(
        name_of!(a_pool_whose_end_is_refused_goes_once_and_a_loss_is_the_last_call),
        DEVICES,
        || {
            let (mut pools, mut holds) = (0, 0);
            for (ordinal, code) in (0..).zip(codes()) {
                let (cuda, _) = with_pool(ordinal);
                script(&format!("{DEVICES},fail:cuMemPoolDestroy:1:{code}"));
                drop(cuda);
                let names = names();
                assert_eq!((current(), mode()), (0, 0), "{code}");
                assert_eq!(count(&names, "cuMemPoolDestroy"), 1, "{code}");
                pools += 1;
                let released = count(&names, "cuDevicePrimaryCtxRelease_v2");
                if is_fatal(code) {
                    holds += 1;
                    assert_eq!(released, 0, "{code}: the driver was called after the loss");
                    let error = Cuda::open(ordinal).unwrap_err();
                    let told = (error.kind(), error.op(), error.driver_code());
                    assert_eq!(told, (Kind::Lost, "drop", Some(code)), "{error}");
                } else {
                    assert_eq!(released, 1, "{code}");
                    drop(with_pool(ordinal));
                }
                assert_eq!(alive(), left(pools, holds), "{code}");
            }
            assert!(holds > 20 && pools > holds, "{pools} {holds}");
        },
    );
}

#[test]
fn a_pool_that_cannot_be_set_up_is_not_used_and_a_loss_on_its_way_back_is_told() {
    story(
        name_of!(a_pool_that_cannot_be_set_up_is_not_used_and_a_loss_on_its_way_back_is_told),
        DEVICES,
        || {
            for (ordinal, code) in (0..).zip(codes()) {
                script(DEVICES);
                let mut cuda = Cuda::open(ordinal).unwrap();
                let on = cuda.create_stream().unwrap();
                let before = alive();
                let set = format!("{DEVICES},fail:cuMemPoolSetAttribute:1:1");
                script(&format!("{set},fail:cuMemPoolDestroy:1:{code}"));
                let error = cuda.alloc_device(Bytes(8), on).unwrap_err();
                calls();
                script(DEVICES);
                let again = cuda.alloc_device(Bytes(8), on);
                if is_fatal(code) {
                    assert_eq!((error.kind(), error.driver_code()), (Kind::Lost, Some(code)));
                    assert_eq!(again, Err(error), "{code}");
                    drop(cuda);
                    assert_eq!(names(), [""; 0], "{code}: the driver was called after the loss");
                    continue;
                }
                assert_eq!(error.driver_code(), Some(1), "{code}: the first cause: {error}");
                cuda.free_device(again.unwrap(), on).unwrap();
                drop(cuda);
                // The one that the driver would not take; the next one went.
                assert_eq!(alive().pools, before.pools + 1, "{code}");
                assert_eq!(alive().holds, before.holds - 1, "{code}");
            }
        },
    );
}

#[test]
fn a_context_whose_end_is_refused_goes_once_and_a_loss_is_told_to_the_next() {
    story(
        name_of!(a_context_whose_end_is_refused_goes_once_and_a_loss_is_told_to_the_next),
        DEVICES,
        || {
            let mut holds = 0;
            for (ordinal, code) in (0..).zip(codes()) {
                let (cuda, _) = with_pool(ordinal);
                let fence = cuda.fence();
                script(&format!("{DEVICES},fail:cuDevicePrimaryCtxRelease_v2:1:{code}"));
                drop(cuda);
                let names_before = names();
                assert_eq!(count(&names_before, "cuDevicePrimaryCtxRelease_v2"), 0, "{code}");
                // The last one that holds the context.
                drop(fence);
                let names = names();
                assert_eq!(names.last().unwrap(), "cuDevicePrimaryCtxRelease_v2", "{code}");
                assert_eq!(count(&names, "cuDevicePrimaryCtxRelease_v2"), 1, "{code}");
                assert_eq!((current(), mode()), (0, 0), "{code}");
                holds += 1;
                assert_eq!(alive(), left(0, holds), "{code}");
                if is_fatal(code) {
                    let error = Cuda::open(ordinal).unwrap_err();
                    let told = (error.kind(), error.op(), error.driver_code());
                    assert_eq!(told, (Kind::Lost, "drop", Some(code)), "{error}");
                } else {
                    // A hold of its own, which goes.
                    drop(with_pool(ordinal));
                    assert_eq!(alive(), left(0, holds), "{code}");
                }
            }
        },
    );
}
