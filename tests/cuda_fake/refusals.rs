//! A wrong call that reaches the driver, where it passes for a no-op, faults, or ends somebody's
//! graph capture: each is refused before anything is enqueued, with the cause named.

use crate::bench::{Bench, FILL, device, pinned};
use crate::fake::{
    Alive, Pages, alive, calls, foreign_stream, function, mode, name_of, names, primary, script,
    story,
};
use crate::process::at_work;
use lightering::backend::cuda::Cuda;
use lightering::backend::{Arg, Backend, Cost, Grid, Kernel, Timing};
use lightering::trace::{Actor, Site};
use lightering::{Bytes, Kind, Misuse, PinnedPtr, Result};
use std::time::Duration;

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, misuse: Misuse) {
    let error = result.expect_err("must be refused");
    assert_eq!(error.misuse(), Some(misuse), "{error}");
}

/// The calls that do something, of those since the last time.
fn acts() -> Vec<String> {
    let asks = [
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
        "cuThreadExchangeStreamCaptureMode",
        "cuStreamIsCapturing",
        "cuDeviceGetCount",
    ];
    names().into_iter().filter(|name| !asks.contains(&name.as_str())).collect()
}

#[test]
fn an_event_never_recorded_does_not_pass_for_done() {
    story(name_of!(an_event_never_recorded_does_not_pass_for_done), "", || {
        let mut b = Bench::new(0);
        let fresh = b.cuda.create_event(Timing::On).unwrap();
        calls();
        refused(b.cuda.wait(b.own, fresh, Site::Outside), Misuse::FreshEvent);
        refused(b.cuda.query(fresh, Site::Outside), Misuse::FreshEvent);
        refused(b.cuda.fence().done(fresh), Misuse::FreshEvent);
        refused(b.cuda.elapsed(fresh, b.timed[0]), Misuse::FreshEvent);
        refused(b.cuda.elapsed(b.timed[0], fresh), Misuse::FreshEvent);
        assert_eq!(acts(), [""; 0]);
        script("fail:cuEventRecord:1:1");
        refused(b.cuda.record(fresh, b.own), Misuse::BadValue);
        refused(b.cuda.query(fresh, Site::Outside), Misuse::FreshEvent);
        b.cuda.record(fresh, b.own).unwrap();
        assert!(b.cuda.query(fresh, Site::Outside).unwrap());
        b.close();
    });
}

#[test]
fn a_handle_of_another_backend_or_of_a_thing_that_is_gone_is_refused() {
    story(
        name_of!(a_handle_of_another_backend_or_of_a_thing_that_is_gone_is_refused),
        "devices:2",
        || {
            let (mut b, mut other, mut twin) =
                (Bench::new(0), Bench::new(1), Cuda::open(0).unwrap());
            let (own, event) = (b.own, b.event);
            refused(other.cuda.record(event, other.own), Misuse::Foreign);
            refused(other.cuda.wait(own, other.event, Site::Outside), Misuse::Foreign);
            refused(other.cuda.fence().done(event), Misuse::Foreign);
            refused(other.cuda.raw_stream(own), Misuse::Foreign);
            refused(twin.query(event, Site::Outside), Misuse::Foreign);
            refused(twin.note(Actor::Stream(own), &[]), Misuse::Foreign);
            refused(b.cuda.free_device(other.at, own), Misuse::Stale);
            b.cuda.close_event(event).unwrap();
            b.cuda.close_stream(own).unwrap();
            calls();
            refused(b.cuda.close_event(event), Misuse::Stale);
            refused(b.cuda.close_stream(own), Misuse::Stale);
            refused(b.cuda.record(b.timed[0], own), Misuse::Stale);
            refused(b.cuda.record(event, b.lent), Misuse::Stale);
            refused(b.cuda.alloc_device(Bytes(1), own), Misuse::Stale);
            refused(b.cuda.capturing(own), Misuse::Stale);
            assert_eq!(acts(), [""; 0]);
            b.close();
            other.close();
        },
    );
}

/// Everything that enqueues on a stream, as results.
fn enqueue_all(b: &mut Bench, on: lightering::StreamId) -> Vec<(&'static str, Result<()>)> {
    let (dev, pin, event, at) = (b.device(), b.pinned(), b.event, b.at);
    let args = [Arg::Write(dev), Arg::U32(0), Arg::U32(0)];
    let cuda = &mut b.cuda;
    vec![
        ("record", cuda.record(event, on)),
        ("wait", cuda.wait(on, event, Site::Outside)),
        ("copy_out", cuda.copy_out(pin, dev, on)),
        ("copy_in", cuda.copy_in(dev, pin, on)),
        ("alloc_device", cuda.alloc_device(Bytes(1), on).map(drop)),
        ("free_device", cuda.free_device(at, on)),
        ("launch", cuda.launch(&FILL, Grid::row(1, 1), &args, on)),
    ]
}

#[test]
fn h64_nothing_of_ours_gets_into_somebodys_graph() {
    story(name_of!(h64_nothing_of_ours_gets_into_somebodys_graph), "", || {
        let mut b = Bench::new(0);
        let legacy = b.cuda.adopt_stream(0).unwrap();
        let (lent, own) = (b.lent, b.own);
        // Captured; captured and already invalid; the legacy stream while another is captured.
        for (on, text) in [
            (lent, format!("capture:{}:1", b.raw(lent))),
            (lent, format!("capture:{}:2", b.raw(lent))),
            (own, format!("capture:{}:1", b.raw(own))), // its raw handle was asked for
            (legacy, "fail:cuStreamIsCapturing:0:906".to_owned()),
        ] {
            script(&text);
            calls();
            for (op, result) in enqueue_all(&mut b, on) {
                let error = result.expect_err(op);
                assert_eq!((error.misuse(), error.op()), (Some(Misuse::Capturing), op));
            }
            assert_eq!(acts(), [""; 0], "{text}");
            assert!(b.cuda.capturing(on).unwrap());
            script("");
            assert!(!b.cuda.capturing(on).unwrap());
        }
        for (op, result) in enqueue_all(&mut b, lent) {
            result.expect(op);
        }
        b.close();
    });
}

#[test]
fn a_capture_elsewhere_is_not_ended_by_our_housekeeping() {
    story(name_of!(a_capture_elsewhere_is_not_ended_by_our_housekeeping), "others-capture", || {
        // The fake refuses calls that are unsafe in a capture, unless made in relaxed mode.
        let mut b = Bench::new(0);
        assert!(b.cuda.query(b.event, Site::Outside).unwrap());
        assert!(b.cuda.fence().done(b.event).unwrap());
        b.cuda
            .launch(
                &FILL,
                Grid::row(1, 1),
                &[Arg::Write(b.device()), Arg::U32(0), Arg::U32(0)],
                b.own,
            )
            .unwrap();
        assert_eq!(mode(), 0, "the thread's own mode is put back");
        let plain: unsafe extern "C" fn(u64) -> u32 = function("cuMemHostUnregister");
        crate::fake::set_current(primary(0));
        // SAFETY: the fake refuses before it looks.
        assert_eq!(unsafe { plain(b.host.0) }, 900, "and a plain call would have been refused");
        b.close();
    });
}

#[test]
fn h21_a_per_thread_stream_serves_its_own_thread_only() {
    story(name_of!(h21_a_per_thread_stream_serves_its_own_thread_only), "", || {
        let mut b = Bench::new(0);
        let mine = b.cuda.adopt_stream(2).unwrap();
        for (op, result) in enqueue_all(&mut b, mine) {
            result.expect(op);
        }
        b.at = b.cuda.alloc_device(Bytes(Bench::LEN), mine).unwrap();
        calls();
        std::thread::scope(|scope| {
            let b = &mut b;
            scope.spawn(move || {
                for (op, result) in enqueue_all(b, mine) {
                    assert_eq!(result.expect_err(op).misuse(), Some(Misuse::WrongThread));
                }
                refused(b.cuda.raw_stream(mine), Misuse::WrongThread);
                refused(b.cuda.capturing(mine), Misuse::WrongThread);
                assert_eq!(acts(), [""; 0]);
                let own = b.cuda.adopt_stream(2).unwrap();
                b.cuda.record(b.event, own).unwrap();
                b.cuda.close_stream(mine).unwrap();
            });
        });
        b.close();
    });
}

#[test]
fn a_stream_of_another_context_is_refused_and_a_borrowed_one_outlives_us() {
    story(
        name_of!(a_stream_of_another_context_is_refused_and_a_borrowed_one_outlives_us),
        "devices:2",
        || {
            let mut cuda = Cuda::open(0).unwrap();
            refused(cuda.adopt_stream(foreign_stream(primary(1))), Misuse::WrongDevice);
            refused(cuda.adopt_stream(foreign_stream(0xC0FFEE)), Misuse::WrongDevice);
            let raw = foreign_stream(primary(0));
            calls();
            for special in [0, 1, 2] {
                let stream = cuda.adopt_stream(special).unwrap();
                assert_eq!(cuda.raw_stream(stream).unwrap(), special);
            }
            assert_eq!(acts(), [""; 0], "there is nothing to ask about these three");
            let borrowed = cuda.adopt_stream(raw).unwrap();
            let created = cuda.create_stream().unwrap();
            assert_eq!(cuda.raw_stream(borrowed).unwrap(), raw);
            assert_ne!(cuda.raw_stream(created).unwrap(), raw);
            assert_eq!(alive().streams, 4);
            drop(cuda);
            assert_eq!(alive(), Alive { streams: 3, ..Alive::default() }, "only ours is destroyed");
        },
    );
}

#[test]
fn no_copy_runs_outside_one_registration() {
    story(name_of!(no_copy_runs_outside_one_registration), "", || {
        let mut b = Bench::new(0);
        let pages = Pages::new(3 * 4096);
        let pinner = b.cuda.pinner();
        let first = pages.at();
        // SAFETY: `pages` outlives both registrations; the third page is never registered.
        let (low, high) = unsafe {
            let second = first.add(4096);
            (
                pinner.register(first, Bytes(4096)).unwrap(),
                pinner.register(second, Bytes(4096)).unwrap(),
            )
        };
        let at = b.at.0;
        calls();
        for (pin, dev, misuse) in [
            (pinned(low.0, 0), device(at, 0), Misuse::Empty),
            (pinned(low.0, 8), device(at, 16), Misuse::LengthMismatch),
            (pinned(low.0, 8192), device(at, 8192), Misuse::OutOfRange),
            (pinned(low.0 + 4095, 2), device(at, 2), Misuse::OutOfRange),
            (pinned(high.0 + 4095, 2), device(at, 2), Misuse::OutOfRange),
            (pinned(high.0 + 4096, 1), device(at, 1), Misuse::OutOfRange),
            (pinned(low.0 - 1, 2), device(at, 2), Misuse::OutOfRange),
            (pinned(0, 1), device(at, 1), Misuse::OutOfRange),
            (pinned(u64::MAX - 8, 8), device(at, 8), Misuse::OutOfRange),
        ] {
            refused(b.cuda.copy_out(pin, dev, b.own), misuse);
            refused(b.cuda.copy_in(dev, pin, b.own), misuse);
        }
        assert_eq!(acts(), [""; 0]);
        b.cuda.copy_in(device(at, 4096), pinned(high.0, 4096), b.own).unwrap();
        b.cuda.copy_out(pinned(low.0 + 4095, 1), device(at + 8191, 1), b.own).unwrap();
        pinner.unregister(high).unwrap();
        refused(b.cuda.copy_in(device(at, 1), pinned(high.0, 1), b.own), Misuse::OutOfRange);
        pinner.unregister(low).unwrap();
        b.close();
    });
}

#[test]
fn h51_a_registration_that_fails_leaves_nothing_page_locked() {
    story(name_of!(h51_a_registration_that_fails_leaves_nothing_page_locked), "", || {
        let cuda = Cuda::open(0).unwrap();
        let (pinner, pages) = (cuda.pinner(), Pages::new(8192));
        // SAFETY: `pages` outlives every registration made here.
        let register = |offset: usize, len: u64| unsafe {
            pinner.register(pages.at().add(offset), Bytes(len))
        };
        refused(register(0, 0), Misuse::Empty);
        refused(register(0, pinner.registration_max().0 + 1), Misuse::TooLarge);
        calls();
        let at = register(0, 4096).unwrap();
        let made: Vec<_> =
            calls().into_iter().filter(|call| call.name.contains("MemHost")).collect();
        assert_eq!(made[0].args, [at.0, 4096, 3], "portable and mapped, and nothing else");
        refused(register(4095, 2), Misuse::Overlap);
        refused(register(0, 4096), Misuse::Overlap);
        for (text, kind) in [
            ("fail:cuMemHostRegister_v2:0:2", Kind::OutOfMemory),
            ("fail:cuMemHostRegister_v2:0:304", Kind::Io),
            ("fail:cuMemHostRegister_v2:0:712", Kind::Usage(Misuse::Overlap)),
            ("fail:cuMemHostRegister_v2:0:801", Kind::Usage(Misuse::BadValue)),
            ("fail:cuMemHostGetDevicePointer_v2:0:1", Kind::Usage(Misuse::BadValue)),
            ("shift:4096", Kind::Usage(Misuse::WrongDevice)),
        ] {
            script(text);
            assert_eq!(register(4096, 4096).unwrap_err().kind(), kind, "{text}");
            assert_eq!(alive().pinned, 1, "{text}");
        }
        script("fail:cuMemHostUnregister:1:1");
        refused(pinner.unregister(at), Misuse::BadValue);
        refused(register(0, 1), Misuse::Overlap);
        pinner.unregister(at).unwrap();
        refused(pinner.unregister(at), Misuse::Stale);
        refused(pinner.unregister(PinnedPtr(at.0 + 1)), Misuse::Stale);
        assert_eq!(alive().pinned, 0);
    });
}

#[test]
fn h52_a_length_that_cannot_be_is_refused_before_the_driver_is_asked() {
    story(name_of!(h52_a_length_that_cannot_be_is_refused_before_the_driver_is_asked), "", || {
        let mut b = Bench::new(0);
        refused(b.cuda.alloc_device(Bytes(0), b.own), Misuse::Empty);
        refused(b.cuda.alloc_device(Bytes(u64::MAX), b.own), Misuse::TooLarge);
        assert_eq!(calls(), []);
        b.close();
    });
}

#[test]
fn a_kernel_that_cannot_run_is_named_with_the_reason() {
    story(name_of!(a_kernel_that_cannot_run_is_named_with_the_reason), "", || {
        static HOST_ONLY: Kernel = Kernel { name: "host", ptx: None, ..BAD };
        static BAD: Kernel =
            Kernel { name: "bad", ptx: Some("gibberish"), host: None, cost: Cost::of_bytes };
        static ZERO: Kernel = Kernel { name: "zero", ptx: Some(".version\0"), ..BAD };
        static ABSENT: Kernel = Kernel { name: "absent", ptx: FILL.ptx, ..BAD };
        let mut b = Bench::new(0);
        for (kernel, words) in [
            (&HOST_ONLY, "no PTX"),
            (&BAD, "line 1: no version; fatal"),
            (&ZERO, "zero byte"),
            (&ABSENT, "cuModuleGetFunction"),
        ] {
            let error = b.cuda.launch(kernel, Grid::row(1, 1), &[], b.own).unwrap_err();
            assert_eq!(error.misuse(), Some(Misuse::BadKernel));
            let text = error.to_string();
            assert!(text.contains(words) && text.contains(kernel.name), "{text}");
        }
        let many = [Arg::U32(0); 33];
        refused(b.cuda.launch(&FILL, Grid::row(1, 1), &many, b.own), Misuse::BadKernel);
        assert!(!acts().contains(&"cuLaunchKernel".to_owned()));
        b.close();
    });
}

#[test]
fn time_is_read_only_between_events_made_for_it() {
    story(name_of!(time_is_read_only_between_events_made_for_it), "", || {
        let mut b = Bench::new(0);
        let [from, to] = b.timed;
        refused(b.cuda.elapsed(b.event, to), Misuse::BadValue);
        assert_eq!(b.cuda.elapsed(from, to).unwrap(), Duration::from_millis(1));
        refused(b.cuda.elapsed(to, from), Misuse::BadValue);
        script("fail:cuEventElapsedTime:0:600");
        assert_eq!(b.cuda.elapsed(from, to).unwrap_err().kind(), Kind::Busy);
        b.close();
    });
}

#[test]
fn the_tables_of_handles_have_a_bound() {
    story(name_of!(the_tables_of_handles_have_a_bound), "", || {
        let mut cuda = Cuda::open(0).unwrap();
        let mut last = cuda.create_stream().unwrap();
        let error = loop {
            match cuda.create_stream() {
                Ok(stream) => last = stream,
                Err(error) => break error,
            }
        };
        assert_eq!((error.kind(), alive().streams), (Kind::Busy, 4096));
        assert_eq!(cuda.adopt_stream(0).unwrap_err().kind(), Kind::Busy);
        cuda.close_stream(last).unwrap();
        cuda.create_stream().unwrap();
        drop(cuda);
        assert_eq!(alive(), Alive::default());
    });
}

/// In a callback of the driver's every call is refused with 800. The engine puts nothing there
/// itself (`tests/layers.rs`); where somebody else's callback calls it, nothing changes.
#[test]
fn h65_what_the_driver_refuses_in_a_callback_changes_nothing() {
    story(name_of!(h65_what_the_driver_refuses_in_a_callback_changes_nothing), "", || {
        let (mut engine, _pool, storage, _cuda, on) = at_work();
        let id = storage.id();
        engine.flush(on).unwrap();
        for call in ["cuStreamIsCapturing", "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery"] {
            let before = engine.residency(id).unwrap();
            script(&format!("fail:{call}:0:800"));
            let refused = [
                engine.acquire(id, on).map(drop),
                engine.alloc(Bytes(64), on, "x").map(drop),
                engine.step(),
            ];
            assert!(refused.iter().any(Result::is_err), "{call} is not asked for");
            for error in refused.into_iter().filter_map(Result::err) {
                assert!(!error.is_lost() && error.driver_code() == Some(800), "{error}");
            }
            script("");
            // What worked all the same is taken back.
            if engine.residency(id).unwrap() != before {
                engine.evict(id, on).unwrap();
                engine.flush(on).unwrap();
            }
        }
        engine.acquire(id, on).unwrap();
        engine.release(storage, on).unwrap();
        engine.drain().unwrap();
        engine.shutdown().unwrap();
    });
}
