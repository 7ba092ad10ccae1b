//! What the checks of the hot verbs cost against the raw calls, in one run. It prints and decides
//! nothing: `cargo test --test cuda_device -- --ignored --nocapture`.

use crate::device::{Host, cuda, driver, range};
use lightering::Bytes;
use lightering::backend::{Backend, Timing};
use lightering::trace::Site;
use std::ffi::{c_int, c_uint, c_void};
use std::time::Instant;

const ROUNDS: u32 = 20_000;

fn nanoseconds(mut verb: impl FnMut()) -> f64 {
    let rate = |verb: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..ROUNDS).for_each(|_| verb());
        start.elapsed().as_nanos() as f64 / f64::from(ROUNDS)
    };
    rate(&mut verb);
    let mut rates = [(); 5].map(|()| rate(&mut verb));
    rates.sort_by(f64::total_cmp);
    rates[2]
}

type Driver1 = unsafe extern "C" fn(usize) -> c_int;
type Driver2 = unsafe extern "C" fn(usize, usize) -> c_int;

/// The raw calls' own cost: record, wait, query, copy of 4 KiB.
fn of_raw_calls(stream: usize, to: *mut c_void, from: u64) -> [f64; 4] {
    let create: unsafe extern "C" fn(*mut usize, c_uint) -> c_int = driver("cuEventCreate");
    let (record, query): (Driver2, Driver1) = (driver("cuEventRecord"), driver("cuEventQuery"));
    let wait: unsafe extern "C" fn(usize, usize, c_uint) -> c_int = driver("cuStreamWaitEvent");
    let copy: unsafe extern "C" fn(*mut c_void, u64, usize, usize) -> c_int =
        driver("cuMemcpyDtoHAsync_v2");
    let sync: unsafe extern "C" fn() -> c_int = driver("cuCtxSynchronize");
    let mut event = 0;
    // SAFETY: the context is current; valid pointer; live handles; page-locked target.
    unsafe {
        assert_eq!(create(&mut event, 2), 0);
        let of_record = nanoseconds(|| assert_eq!(record(event, stream), 0));
        let of_wait = nanoseconds(|| assert_eq!(wait(stream, event, 0), 0));
        assert_eq!(sync(), 0);
        let of_query = nanoseconds(|| assert_eq!(query(event), 0));
        let of_copy = nanoseconds(|| assert_eq!(copy(to, from, 4096, stream), 0));
        [of_record, of_wait, of_query, of_copy]
    }
}

#[test]
#[ignore = "needs a CUDA device, of which it prints figures"]
fn the_checks_of_a_verb_cost_little_next_to_its_call() {
    let Some(mut cuda) = cuda() else { return };
    let (own, plain) = (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
    let raw = cuda.raw_stream(plain).unwrap();
    let lent = cuda.adopt_stream(raw).unwrap();
    let event = cuda.create_event(Timing::Off).unwrap();
    let host = Host::new(&cuda, 4096);
    let at = cuda.alloc_device(Bytes(4096), own).unwrap();
    let retain: unsafe extern "C" fn(*mut usize, c_int) -> c_int =
        driver("cuDevicePrimaryCtxRetain");
    let set: Driver1 = driver("cuCtxSetCurrent");
    let mut context = 0;
    // SAFETY: device 0; valid pointer. The hold is given back by the end of the process.
    unsafe {
        assert_eq!(retain(&mut context, 0), 0);
        assert_eq!(set(context), 0);
    }
    let [record, wait, query, copy] = of_raw_calls(raw, host.ptr().0 as *mut c_void, at.0);
    for (here, current) in [("the device's context is current", context), ("no context is", 0)] {
        // SAFETY: the context is held above; 0 takes it off this thread.
        assert_eq!(unsafe { set(current) }, 0);
        println!("-- {here}");
        let say = |what: &str, ours: f64, raw: f64| {
            println!("{what:22} ours {ours:6.0} ns  raw {raw:6.0} ns  more {:5.0} ns", ours - raw);
        };
        say("record", nanoseconds(|| cuda.record(event, own).unwrap()), record);
        say("record, lent stream", nanoseconds(|| cuda.record(event, lent).unwrap()), record);
        say("wait", nanoseconds(|| cuda.wait(own, event, Site::Outside).unwrap()), wait);
        cuda.sync().unwrap();
        let mut ask = || assert!(cuda.query(event, Site::Outside).unwrap());
        say("query", nanoseconds(&mut ask), query);
        let mut move_out = || cuda.copy_out(host.range, range(at, 4096), own).unwrap();
        say("copy_out of 4 KiB", nanoseconds(&mut move_out), copy);
        let mut take_and_give = || {
            let at = cuda.alloc_device(Bytes(4096), own).unwrap();
            cuda.free_device(at, own).unwrap();
        };
        println!("alloc + free           ours {:6.0} ns", nanoseconds(&mut take_and_give));
        cuda.sync().unwrap();
    }
}
