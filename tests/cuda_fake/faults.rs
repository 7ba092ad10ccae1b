//! A driver call that fails, at any place and with any code: the error must say what a caller can
//! do; a fatal one must be the last the driver hears of that device; another must change nothing.

use crate::bench::{Bench, FILL};
use crate::fake::{
    Alive, alive, calls, current, function, mode, name_of, names, primary, script, set_current,
    story,
};
use lightering::backend::cuda::{Cuda, code_name, is_fatal};
use lightering::backend::{Arg, Backend, Fence, Grid, Timing};
use lightering::trace::Site;
use lightering::{Bytes, Error, Kind, Missing, Misuse, Result, StreamId};
use std::sync::Arc;

/// The codes after which the driver's header says the process must restart, those that say the
/// device's memory is in doubt, those that say the context is gone, and some that nobody knows.
const FATAL: &[u32] = &[
    226,
    700,
    702,
    714,
    715,
    716,
    717,
    718,
    719,
    721,
    810,
    911,
    214,
    220,
    710,
    806,
    999,
    4,
    201,
    709,
    9,
    1234,
    998,
    1000,
    u32::MAX,
];

/// What the other codes mean.
fn meaning(code: u32) -> Kind {
    match code {
        2 => Kind::OutOfMemory,
        3 => Kind::Usage(Misuse::Forked),
        304 => Kind::Io,
        600 => Kind::Busy,
        712 => Kind::Usage(Misuse::Overlap),
        900..=908 => Kind::Usage(Misuse::Capturing),
        200 | 209 | 218 | 221 | 222 | 223 | 300 | 302 | 303 | 500 | 701 => {
            Kind::Usage(Misuse::BadKernel)
        }
        _ => Kind::Usage(Misuse::BadValue),
    }
}

/// Every code that has a name, and the fatal ones that have none.
pub(crate) fn codes() -> Vec<u32> {
    let named = (1..1000).filter(|code| code_name(*code).starts_with("CUDA_ERROR_"));
    let mut codes: Vec<u32> = named.chain(FATAL.iter().copied()).collect();
    codes.sort_unstable();
    codes.dedup();
    assert!(codes.len() > 100, "{}", codes.len());
    codes
}

type Verb = (&'static str, fn(&mut Bench) -> Result<()>);

const VERBS: &[Verb] = &[
    ("record", |b| b.cuda.record(b.event, b.lent)),
    ("wait", |b| b.cuda.wait(b.lent, b.event, Site::Outside)),
    ("query", |b| b.cuda.query(b.event, Site::Outside).map(drop)),
    ("idle", |b| b.cuda.idle(b.lent, Site::Outside).map(drop)),
    ("fence", |b| b.cuda.fence().done(b.event).map(drop)),
    ("elapsed", |b| b.cuda.elapsed(b.timed[0], b.timed[1]).map(drop)),
    ("copy_out", |b| b.cuda.copy_out(b.pinned(), b.device(), b.lent)),
    ("copy_in", |b| b.cuda.copy_in(b.device(), b.pinned(), b.lent)),
    ("alloc_device", |b| b.cuda.alloc_device(Bytes(8), b.lent).map(drop)),
    ("free_device", |b| b.cuda.free_device(b.at, b.lent)),
    ("reserve_range", |b| b.cuda.reserve_range(Bytes(4096)).map(drop)),
    ("release_range", |b| b.cuda.release_range(b.apart.0)),
    ("create_memory", |b| b.cuda.create_memory(Bytes(4096)).map(drop)),
    ("close_memory", |b| b.cuda.close_memory(b.apart.1[0])),
    ("map_memory", |b| b.cuda.map_memory(b.apart.0, &b.apart.1)),
    ("unmap_memory", |b| b.cuda.unmap_memory(b.mapped.0)),
    ("memory", |b| b.cuda.memory().map(drop)),
    ("launch", |b| b.cuda.launch(&FILL, Grid::row(1, 1), &fill_args(b), b.lent)),
    ("capturing", |b| b.cuda.capturing(b.lent).map(drop)),
    ("sync", |b| b.cuda.sync()),
    ("create_stream", |b| b.cuda.create_stream().map(drop)),
    ("create_event", |b| b.cuda.create_event(Timing::Off).map(drop)),
    ("adopt_stream", |b| {
        let raw = b.cuda.raw_stream(b.lent)?;
        b.cuda.adopt_stream(raw).map(drop)
    }),
    ("close_stream", |b| b.cuda.close_stream(b.own)),
    ("close_event", |b| b.cuda.close_event(b.event)),
    ("unregister", |b| b.cuda.pinner().unregister(b.host)),
    // SAFETY: the pages outlive the registration.
    ("register", |b| unsafe { b.cuda.pinner().register(b.spare.at(), Bytes(4096)).map(drop) }),
];

fn fill_args(b: &Bench) -> [Arg; 3] {
    [Arg::Write(b.device()), Arg::U32(0), Arg::U32(1)]
}

/// The driver calls of a verb on a thread with no context, each name once.
fn calls_of(verb: Verb) -> Vec<String> {
    let mut b = Bench::new(0);
    (verb.1)(&mut b).unwrap();
    let names = names();
    b.abandon();
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

/// After a loss: the same error from every verb, and not one driver call, to the last drop.
pub(crate) fn must_be_lost(mut b: Bench, first: &Error, op: &str, code: u32) {
    assert_eq!((first.kind(), first.op(), first.driver_code()), (Kind::Lost, op, Some(code)));
    assert!(first.to_string().contains("first seen in"), "{first}");
    calls();
    let ordinal = b.cuda.about().device.0;
    for (name, verb) in VERBS {
        let after =
            if *name == "adopt_stream" { b.cuda.adopt_stream(0).map(drop) } else { verb(&mut b) };
        let after = after.expect_err(name);
        assert_eq!((after.kind(), after.op(), after.driver_code()), (Kind::Lost, op, Some(code)));
    }
    drop(b.cuda.fence());
    // Still page-locked as far as anybody knows, so never to be unmapped: as an arena would do.
    std::mem::forget((b.pages, b.spare));
    drop(b.cuda);
    assert_eq!(names(), [""; 0], "{op} {code}: the driver was called after the loss");
    assert_eq!(Cuda::open(ordinal).unwrap_err().kind(), Kind::Lost);
    assert_eq!(names(), ["cuDeviceGetCount"]);
}

#[test]
fn h55_every_code_at_every_call_of_every_verb_is_an_error_that_says_what_to_do() {
    story(
        name_of!(h55_every_code_at_every_call_of_every_verb_is_an_error_that_says_what_to_do),
        "devices:1000000",
        || {
            let (mut ordinal, mut tried) = (1, 0);
            for verb in VERBS {
                let (op, act) = *verb;
                for call in calls_of(*verb) {
                    for code in codes() {
                        let mut b = Bench::new(ordinal);
                        script(&format!("devices:1000000,fail:{call}:1:{code}"));
                        let result = act(&mut b);
                        tried += 1;
                        assert_eq!((current(), mode()), (0, 0), "{op} {call} {code}");
                        let answers = match (op, call.as_str(), code) {
                            ("query" | "fence", "cuEventQuery", 600) => true, // not yet: an answer
                            // Trimmed, tried once more.
                            (_, "cuMemAllocFromPoolAsync" | "cuMemCreate", 2) => true,
                            ("capturing" | "close_stream", "cuStreamIsCapturing", 906) => true,
                            ("close_stream" | "idle", "cuStreamQuery", 600) => true,
                            _ => false,
                        };
                        if answers {
                            result.unwrap();
                            b.abandon();
                            continue;
                        }
                        let error = result.expect_err(&format!("{op} {call} {code}"));
                        let implicit = call == "cuStreamIsCapturing" && code == 906;
                        assert!(implicit || error.driver_code() == Some(code), "{error}");
                        assert_eq!(FATAL.contains(&code), is_fatal(code), "{code}");
                        if is_fatal(code) {
                            must_be_lost(b, &error, op, code);
                            ordinal += 1;
                            continue;
                        }
                        let text = error.to_string();
                        assert!(implicit || text.contains(code_name(code)), "{text}");
                        assert!(implicit || text.contains(&call), "{call}: {text}");
                        assert_eq!(
                            (error.kind(), error.op()),
                            (meaning(code), op),
                            "{call} {code}"
                        );
                        act(&mut b)
                            .unwrap_or_else(|error| panic!("{op} {call} {code}: then {error}"));
                        b.abandon();
                    }
                }
            }
            assert!(tried > 5_000, "{tried}");
        },
    );
}

#[test]
fn every_code_at_every_call_of_opening_is_an_error_and_takes_no_hold() {
    story(
        name_of!(every_code_at_every_call_of_opening_is_an_error_and_takes_no_hold),
        "devices:1000000",
        || {
            let mut ordinal = 0;
            drop(Cuda::open(0).unwrap());
            let all = names();
            let at = |name: &str| all.iter().position(|call| call == name).unwrap();
            let opening = &all[at("cuDeviceGetCount")..=at("cuDevicePrimaryCtxRetain")];
            assert!(opening.len() >= 6);
            for call in opening {
                for code in codes() {
                    ordinal += 1;
                    script(&format!("devices:1000000,fail:{call}:1:{code}"));
                    let error = Cuda::open(ordinal).expect_err(call);
                    assert_eq!(error.driver_code(), Some(code));
                    let text = error.to_string();
                    assert!(
                        text.contains(code_name(code)) && text.contains(call.as_str()),
                        "{text}"
                    );
                    assert_eq!(alive(), Alive::default(), "{text}");
                    script("devices:1000000");
                    match error.kind() {
                        Kind::Lost => {
                            assert!(is_fatal(code) && call != "cuDeviceGetCount", "{text}");
                            assert_eq!(Cuda::open(ordinal).unwrap_err().kind(), Kind::Lost);
                        }
                        Kind::OutOfMemory => assert_eq!(code, 2),
                        Kind::Unavailable(Missing::StubLibrary) => assert_eq!(code, 34),
                        Kind::Unavailable(Missing::Driver | Missing::Device) => {
                            drop(Cuda::open(ordinal).unwrap());
                        }
                        kind => panic!("{kind:?}: {text}"),
                    }
                }
            }
        },
    );
}

/// Takes the device's first bytes and gives them back.
fn first_bytes(cuda: &mut Cuda, on: StreamId) -> Result<()> {
    let at = cuda.alloc_device(Bytes(8), on)?;
    cuda.free_device(at, on)
}

#[test]
fn every_code_at_every_call_for_the_first_bytes_is_an_error_with_pools_and_without() {
    story(
        name_of!(every_code_at_every_call_for_the_first_bytes_is_an_error_with_pools_and_without),
        "devices:1000000",
        || {
            let mut ordinal = 0;
            for device in ["devices:1000000", "devices:1000000,pools:0"] {
                let mut fresh = || {
                    ordinal += 1;
                    script(device);
                    let mut cuda = Cuda::open(ordinal).unwrap();
                    let on = cuda.create_stream().unwrap();
                    names();
                    (cuda, on)
                };
                let (mut cuda, on) = fresh();
                first_bytes(&mut cuda, on).unwrap();
                let mut all = names();
                drop(cuda);
                all.sort();
                all.dedup();
                let seen = |name: &str| all.iter().any(|call| call == name);
                assert!(seen("cuMemPoolCreate") || seen("cuMemAlloc_v2"), "{all:?}");
                for call in &all {
                    for code in codes() {
                        let before = alive();
                        let (mut cuda, on) = fresh();
                        script(&format!("{device},fail:{call}:1:{code}"));
                        let result = first_bytes(&mut cuda, on);
                        script(device);
                        let Err(error) = result else {
                            // Trimmed, and tried once more.
                            let again = call == "cuMemAllocFromPoolAsync" && code == 2;
                            assert!(again, "{call} {code}: no error");
                            continue;
                        };
                        assert_eq!(error.driver_code(), Some(code), "{call}: {error}");
                        if error.is_lost() {
                            assert!(is_fatal(code), "{call}: {error}");
                            continue;
                        }
                        first_bytes(&mut cuda, on).unwrap();
                        drop(cuda);
                        let left = alive();
                        assert_eq!(
                            (left.pools, left.holds),
                            (before.pools, before.holds),
                            "{error}"
                        );
                    }
                }
            }
        },
    );
}

#[test]
fn a_device_that_is_lost_takes_no_other_with_it() {
    story(name_of!(a_device_that_is_lost_takes_no_other_with_it), "devices:2", || {
        let (mut lost, mut twin) = (Bench::new(0), Cuda::open(0).unwrap());
        let (mut well, fence) = (Bench::new(1), lost.cuda.fence());
        let (stream, pinner) = (twin.create_stream().unwrap(), lost.cuda.pinner());
        script("devices:2,fail:cuMemcpyDtoHAsync_v2:1:700");
        let (pin, dev) = (lost.pinned(), lost.device());
        let first = lost.cuda.copy_out(pin, dev, lost.own).unwrap_err();
        assert!(first.is_lost());
        let text = twin.close_stream(stream).unwrap_err().to_string();
        for word in ["copy_out", "cuMemcpyDtoHAsync_v2", "ILLEGAL_ADDRESS", "close_stream", "700"] {
            assert!(text.contains(word), "{text}");
        }
        assert!(fence.done(lost.event).unwrap_err().is_lost());
        assert!(pinner.unregister(lost.host).unwrap_err().is_lost());
        well.cuda.copy_out(well.pinned(), well.device(), well.own).unwrap();
        assert!(well.cuda.query(well.event, Site::Outside).unwrap());
        well.close();
        drop((lost, twin, fence));
        drop(pinner);
        let left = alive();
        assert_eq!((left.holds, left.pools, left.events, left.pinned), (1, 1, 3, 1), "{left:?}");
    });
}

#[test]
fn h57_m35_a_fault_met_in_a_drop_is_told_as_such_and_blamed_on_no_other_verb() {
    story(
        name_of!(h57_m35_a_fault_met_in_a_drop_is_told_as_such_and_blamed_on_no_other_verb),
        "",
        || {
            let (first, mut second) = (Bench::new(0), Cuda::open(0).unwrap());
            script("fail:cuStreamDestroy_v2:1:719");
            drop(first);
            let error = second.create_stream().unwrap_err();
            assert_eq!(
                (error.kind(), error.op(), error.driver_code()),
                (Kind::Lost, "drop", Some(719))
            );
            calls();
            drop(second);
            assert_eq!(names(), [""; 0]);
        },
    );
}

#[test]
fn a_failure_in_a_drop_that_is_not_fatal_stays_there() {
    story(name_of!(a_failure_in_a_drop_that_is_not_fatal_stays_there), "", || {
        let (first, mut second) = (Bench::new(0), Cuda::open(0).unwrap());
        script("fail:cuStreamDestroy_v2:0:400,fail:cuEventDestroy_v2:0:400");
        drop(first);
        script("");
        second.create_stream().unwrap();
    });
}

#[test]
fn h59_a_context_reset_by_another_library_is_a_loss_and_not_a_double_free() {
    story(
        name_of!(h59_a_context_reset_by_another_library_is_a_loss_and_not_a_double_free),
        "",
        || {
            let mut b = Bench::new(0);
            let reset: unsafe extern "C" fn(i32) -> u32 = function("cuDevicePrimaryCtxReset_v2");
            // SAFETY: the fake takes any ordinal.
            assert_eq!(unsafe { reset(0) }, 0);
            let error = b.cuda.query(b.event, Site::Outside).unwrap_err();
            must_be_lost(b, &error, "query", 709);
        },
    );
}

#[test]
fn h56_h63_not_yet_is_an_answer_and_an_error_is_not() {
    story(name_of!(h56_h63_not_yet_is_an_answer_and_an_error_is_not), "notready:3", || {
        let mut b = Bench::new(0);
        let fence: Arc<dyn Fence> = b.cuda.fence();
        assert!(!b.cuda.query(b.event, Site::Outside).unwrap());
        assert!(!fence.done(b.event).unwrap());
        assert!(!b.cuda.query(b.event, Site::Outside).unwrap());
        assert!(fence.done(b.event).unwrap());
        script("fail:cuEventQuery:0:700");
        assert!(fence.done(b.event).unwrap_err().is_lost());
        assert!(b.cuda.query(b.event, Site::Outside).unwrap_err().is_lost());
    });
}

#[test]
fn a_thread_is_left_as_found_even_by_the_verb_that_loses_the_device() {
    story(
        name_of!(a_thread_is_left_as_found_even_by_the_verb_that_loses_the_device),
        "devices:2",
        || {
            let mut b = Bench::new(0);
            set_current(primary(1));
            script("devices:2,fail:cuEventQuery:1:700");
            assert!(b.cuda.query(b.event, Site::Outside).unwrap_err().is_lost());
            assert_eq!((current(), mode()), (primary(1), 0));
        },
    );
}
