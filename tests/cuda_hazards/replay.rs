//! A graph that was captured over bytes at a fixed address, replayed when they are home again.

use crate::bench::{Bench, MIB, name_of, story};
use crate::device::{Host, driver, in_context};
use lightering::backend::Backend;
use lightering::storage::{Residency, Tier};
use lightering::{Bytes, DeviceRange, PinnedRange};
use std::ffi::c_int;

const LEN: u64 = 64 * MIB;
const POOL: Bytes = Bytes::mib(320);

#[test]
#[ignore = "needs a CUDA device"]
fn a_captured_graph_replays_over_bytes_given_back_and_taken_again() {
    story(name_of!(a_captured_graph_replays_over_bytes_given_back_and_taken_again), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        let on = b.streams[0].engine;
        let weights = b.engine.alloc_fixed(Bytes(LEN), on, "weights").unwrap();
        let range = b.acquire_mut(0, &weights);
        b.fill(0, range, 40);
        let mut host = Host::new(&b.cuda, LEN);
        let replay = captured_copy(&mut b, host.range, range);
        for value in 40..44 {
            b.evict(0, &weights);
            b.flush(0);
            while b.engine.residency(weights.id()).unwrap() != Residency::Evicted(Tier::Host) {
                b.engine.step().unwrap();
            }
            assert!(b.engine.stats().seam.unmaps > value - 40, "nothing was given back");
            assert_eq!(b.acquire(0, &weights), range, "the graph knows this address alone");
            replay();
            b.cuda.sync().unwrap();
            assert!(host.words().iter().all(|word| u64::from(*word) == value));
            let again = b.acquire_mut(0, &weights);
            b.fill(0, again, value as u32 + 1);
        }
        drop(weights);
        host.close();
        b.close();
    });
}

/// A graph of one copy, captured on stream 0, as a function that replays it there.
fn captured_copy(b: &mut Bench, to: PinnedRange, from: DeviceRange) -> impl Fn() + use<> {
    let begin: unsafe extern "C" fn(usize, c_int) -> c_int = driver("cuStreamBeginCapture_v2");
    let end: unsafe extern "C" fn(usize, *mut usize) -> c_int = driver("cuStreamEndCapture");
    let copy: unsafe extern "C" fn(u64, u64, usize, usize) -> c_int =
        driver("cuMemcpyDtoHAsync_v2");
    let make: unsafe extern "C" fn(*mut usize, usize, u64) -> c_int =
        driver("cuGraphInstantiateWithFlags");
    let launch: unsafe extern "C" fn(usize, usize) -> c_int = driver("cuGraphLaunch");
    let raw = b.cuda.raw_stream(b.streams[0].here).unwrap();
    let (mut graph, mut exec) = (0, 0);
    // SAFETY: our own live stream; both ranges are live and of this length; valid pointers.
    in_context(|| unsafe {
        assert_eq!(begin(raw, 2), 0);
        assert_eq!(copy(to.at().0, from.at().0, from.len().0 as usize, raw), 0);
        assert_eq!(end(raw, &mut graph), 0);
        assert_eq!(make(&mut exec, graph, 0), 0);
    });
    // SAFETY: an instantiated graph, which lives as long as the process; a live stream.
    move || in_context(|| assert_eq!(unsafe { launch(exec, raw) }, 0))
}
