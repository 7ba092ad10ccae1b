//! What the checks of the hot verbs cost beside the raw calls that they make: in turn, in one run.
//! It prints a line of JSON for each verb and decides nothing; `tools/measure.sh seam` keeps them:
//! `cargo test --release --test cuda_device -- --ignored --nocapture cost`.

use crate::device::{Host, cuda, driver, range};
use lightering::backend::{Backend, Timing};
use lightering::trace::Site;
use lightering::{Bytes, EventId, StreamId};
use std::ffi::{c_int, c_uint, c_void};
use std::time::Instant;

const CALLS: u32 = 2_000;
const PAIRS: usize = 15;

type Driver1 = unsafe extern "C" fn(usize) -> c_int;
type Driver2 = unsafe extern "C" fn(usize, usize) -> c_int;

/// Nanoseconds of one call.
fn nanoseconds(call: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    (0..CALLS).for_each(|_| call());
    start.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

/// Measures both in turn, there and back, with the device idle before each, and prints the pairs.
fn compare(name: &str, ours: &mut dyn FnMut(), raw: &mut dyn FnMut(), settle: &dyn Fn()) {
    let mut pairs = Vec::new();
    for turn in 0..=PAIRS {
        let mut pair = [0.0; 2];
        for which in if turn % 2 == 0 { [0, 1] } else { [1, 0] } {
            settle();
            pair[which] = nanoseconds(if which == 0 { ours } else { raw });
        }
        // The first warms up.
        if turn > 0 {
            pairs.push(format!("[{}, {}]", pair[0], pair[1]));
        }
    }
    settle();
    let pairs = pairs.join(", ");
    println!(
        "{{\"figure\": \"seam.{name}\", \"unit\": \"ns\", \"better\": \"lower\", \
         \"simulated\": false, \"pairs\": [{pairs}]}}"
    );
}

/// The driver's own calls.
struct Raw {
    record: Driver2,
    wait: unsafe extern "C" fn(usize, usize, c_uint) -> c_int,
    query: Driver1,
    copy: unsafe extern "C" fn(*mut c_void, u64, usize, usize) -> c_int,
    sync: unsafe extern "C" fn() -> c_int,
    event: usize,
}

impl Raw {
    /// Makes the device's context current on this thread, as the raw calls need it.
    fn new() -> Raw {
        let retain: unsafe extern "C" fn(*mut usize, c_int) -> c_int =
            driver("cuDevicePrimaryCtxRetain");
        let set: Driver1 = driver("cuCtxSetCurrent");
        let create: unsafe extern "C" fn(*mut usize, c_uint) -> c_int = driver("cuEventCreate");
        let (mut context, mut event) = (0, 0);
        // SAFETY: device 0; valid pointers. The hold and the event go with the process.
        unsafe {
            assert_eq!(retain(&mut context, 0), 0);
            assert_eq!(set(context), 0);
            assert_eq!(create(&mut event, 2), 0);
        }
        Raw {
            record: driver("cuEventRecord"),
            wait: driver("cuStreamWaitEvent"),
            query: driver("cuEventQuery"),
            copy: driver("cuMemcpyDtoHAsync_v2"),
            sync: driver("cuCtxSynchronize"),
            event,
        }
    }
}

#[test]
#[ignore = "needs a CUDA device, of which it prints figures"]
fn the_checks_of_a_verb_cost_little_next_to_its_call() {
    let Some(mut cuda) = cuda() else { return };
    let (own, plain): (StreamId, StreamId) =
        (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
    let stream = cuda.raw_stream(plain).unwrap();
    let lent = cuda.adopt_stream(stream).unwrap();
    let event: EventId = cuda.create_event(Timing::Off).unwrap();
    let host = Host::new(&cuda, 4096);
    let to = host.ptr().0 as *mut c_void;
    let at = cuda.alloc_device(Bytes(4096), own).unwrap();
    let raw = Raw::new();
    // SAFETY: the context is current; live handles; page-locked target of 4096 bytes.
    let mut record = || assert_eq!(unsafe { (raw.record)(raw.event, stream) }, 0);
    // SAFETY: as above.
    let mut wait = || assert_eq!(unsafe { (raw.wait)(stream, raw.event, 0) }, 0);
    // SAFETY: as above.
    let mut query = || assert_eq!(unsafe { (raw.query)(raw.event) }, 0);
    // SAFETY: as above.
    let mut copy = || assert_eq!(unsafe { (raw.copy)(to, at.0, 4096, stream) }, 0);
    // SAFETY: as above.
    let settle = || assert_eq!(unsafe { (raw.sync)() }, 0);
    compare("record", &mut || cuda.record(event, own).unwrap(), &mut record, &settle);
    compare("record-lent", &mut || cuda.record(event, lent).unwrap(), &mut record, &settle);
    let mut ours = || cuda.wait(own, event, Site::Outside).unwrap();
    compare("wait", &mut ours, &mut wait, &settle);
    let mut ours = || assert!(cuda.query(event, Site::Outside).unwrap());
    compare("query", &mut ours, &mut query, &settle);
    let mut ours = || cuda.copy_out(host.range, range(at, 4096), own).unwrap();
    compare("copy", &mut ours, &mut copy, &settle);
}
