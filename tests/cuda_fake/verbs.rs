//! A verb that asks the driver for more, less or something else than the seam promises: the calls
//! of each verb are compared one by one, with the handles and flags they carry.

use crate::bench::{Bench, FILL};
use crate::fake::{
    Alive, alive, calls, current, mode, name_of, names, primary, script, set_current, story,
};
use lightering::backend::cuda::Cuda;
use lightering::backend::{Arg, Backend, Grid, Kernel, Memory, Timing};
use lightering::trace::{Actor, Site};
use lightering::{Bytes, DevicePtr, EventId, Kind, Misuse};

#[test]
fn opening_takes_one_hold_and_the_last_drop_gives_it_back() {
    story(name_of!(opening_takes_one_hold_and_the_last_drop_gives_it_back), "", || {
        let first = Cuda::open(0).unwrap();
        assert_eq!(
            names(),
            [
                "cuDriverGetVersion",
                "cuInit",
                "cuDeviceGetCount",
                "cuDeviceGet",
                "cuDeviceGetName",
                "cuDeviceTotalMem_v2",
                "cuDeviceGetAttribute",
                "cuDeviceGetAttribute",
                "cuDeviceGetAttribute",
                "cuDeviceGetAttribute",
                "cuDeviceGetAttribute",
                "cuDeviceGetAttribute",
                "cuDevicePrimaryCtxRetain",
            ]
        );
        let about = first.about();
        assert_eq!(
            (about.name.as_str(), about.driver, about.memory),
            ("Fake 0", 13_000, Bytes::gib(1))
        );
        let second = Cuda::open(0).unwrap();
        assert_eq!(names(), ["cuDeviceGetCount"], "two of one device share its context");
        let fence = second.fence();
        drop((first, second));
        assert_eq!(alive().holds, 1, "a fence keeps the context");
        drop(fence);
        assert_eq!(alive(), Alive::default());
        assert_eq!(Cuda::open(0).unwrap().about(), about, "and it can be taken again");
    });
}

/// Runs a verb, and compares its calls with those expected: behind a look at the current context,
/// and within the thread's relaxed mode where they start with "relaxed".
#[track_caller]
fn check(cuda: &mut Cuda, what: &str, verb: &mut dyn FnMut(&mut Cuda), expected: &[&str]) {
    calls();
    verb(cuda);
    let mode = "cuThreadExchangeStreamCaptureMode";
    let mut all = vec!["cuCtxGetCurrent"];
    match expected.strip_prefix(&["relaxed"]) {
        Some(inner) => all.extend([&[mode], inner, &[mode]].concat()),
        None => all.extend(expected),
    }
    assert_eq!(names(), all, "{what}");
}

#[test]
fn each_verb_of_order_makes_its_calls_and_no_others() {
    story(name_of!(each_verb_of_order_makes_its_calls_and_no_others), "", || {
        let Bench { mut cuda, own, lent, event, timed: [from, to], .. } = Bench::new(0);
        set_current(primary(0));
        let c = &mut cuda;
        let asks = "cuStreamIsCapturing";
        check(c, "record", &mut |c| c.record(event, own).unwrap(), &["cuEventRecord"]);
        let mut record = |c: &mut Cuda| c.record(event, lent).unwrap();
        check(c, "record on a lent stream", &mut record, &[asks, "cuEventRecord"]);
        let mut wait = |c: &mut Cuda| c.wait(own, event, Site::Outside).unwrap();
        check(c, "wait", &mut wait, &["cuStreamWaitEvent"]);
        let mut query = |c: &mut Cuda| assert!(c.query(event, Site::Outside).unwrap());
        check(c, "query", &mut query, &["relaxed", "cuEventQuery"]);
        let mut idle = |c: &mut Cuda| assert!(c.idle(own, Site::Outside).unwrap());
        check(c, "idle", &mut idle, &["relaxed", "cuStreamQuery"]);
        let mut idle = |c: &mut Cuda| assert!(c.idle(lent, Site::Outside).unwrap());
        check(c, "idle of a lent stream", &mut idle, &["relaxed", asks, "cuStreamQuery"]);
        let mut fence = |c: &mut Cuda| assert!(c.fence().done(event).unwrap());
        check(c, "fence", &mut fence, &["relaxed", "cuEventQuery"]);
        let mut elapsed = |c: &mut Cuda| assert!(c.elapsed(from, to).is_ok());
        check(c, "elapsed", &mut elapsed, &["relaxed", "cuEventElapsedTime"]);
        check(c, "capturing", &mut |c| assert!(!c.capturing(own).unwrap()), &[asks]);
        let mut sync = |c: &mut Cuda| c.sync().unwrap();
        let behind = [asks, "cuEventRecord", "cuStreamWaitEvent"];
        let mut all = vec!["relaxed", "cuStreamCreate", "cuEventCreate"];
        all.extend(behind.iter().chain(&behind));
        all.extend(["cuStreamSynchronize", "cuEventDestroy_v2", "cuStreamDestroy_v2"]);
        check(c, "sync", &mut sync, &all);
        let mut close = |c: &mut Cuda| c.close_event(event).unwrap();
        check(c, "close_event", &mut close, &["relaxed", "cuEventDestroy_v2"]);
        let mut close = |c: &mut Cuda| c.close_stream(own).unwrap();
        let all = ["relaxed", asks, "cuStreamQuery", "cuStreamDestroy_v2"];
        check(c, "close_stream", &mut close, &all);
        check(c, "close of a lent stream", &mut |c| c.close_stream(lent).unwrap(), &["relaxed"]);
    });
}

#[test]
fn each_verb_of_memory_makes_its_calls_and_no_others() {
    story(name_of!(each_verb_of_memory_makes_its_calls_and_no_others), "", || {
        let mut b = Bench::new(0);
        set_current(primary(0));
        let (dev, pin, own, lent, host) = (b.device(), b.pinned(), b.own, b.lent, b.host);
        let c = &mut b.cuda;
        let mut copy = |c: &mut Cuda| c.copy_out(pin, dev, own).unwrap();
        check(c, "copy_out", &mut copy, &["cuMemcpyDtoHAsync_v2"]);
        let mut copy = |c: &mut Cuda| c.copy_in(dev, pin, lent).unwrap();
        check(c, "copy_in", &mut copy, &["cuStreamIsCapturing", "cuMemcpyHtoDAsync_v2"]);
        let mut memory = |c: &mut Cuda| assert!(c.memory().is_ok());
        check(c, "memory", &mut memory, &["relaxed", "cuMemGetInfo_v2"]);
        let mut made = Vec::new();
        let mut alloc = |c: &mut Cuda| made.push(c.alloc_device(Bytes(4), own).unwrap());
        check(c, "alloc", &mut alloc, &["relaxed", "cuMemAllocFromPoolAsync"]);
        let mut free = |c: &mut Cuda| c.free_device(made[0], own).unwrap();
        check(c, "free", &mut free, &["relaxed", "cuMemFreeAsync"]);
        let args = [Arg::Write(dev), Arg::U32(7), Arg::U32(2048)];
        let mut launch = |c: &mut Cuda| c.launch(&FILL, Grid::row(8, 256), &args, own).unwrap();
        let loads = ["relaxed", "cuModuleLoadDataEx", "cuModuleGetFunction", "cuLaunchKernel"];
        check(c, "first launch", &mut launch, &loads);
        check(c, "launch", &mut launch, &["relaxed", "cuLaunchKernel"]);
        let mut unregister = |c: &mut Cuda| c.pinner().unregister(host).unwrap();
        check(c, "unregister", &mut unregister, &["relaxed", "cuMemHostUnregister"]);
        calls();
        c.reset_peak();
        c.note(Actor::Host, &[]).unwrap();
        let _ = (c.about(), c.pinner().registration_max());
        assert_eq!(names(), [""; 0], "these ask the driver nothing");
    });
}

#[test]
fn h66_the_callers_context_is_put_back_after_every_verb() {
    story(name_of!(h66_the_callers_context_is_put_back_after_every_verb), "devices:2", || {
        let mut b = Bench::new(1);
        for before in [0, primary(0), primary(1)] {
            set_current(before);
            calls();
            b.cuda.record(b.event, b.own).unwrap();
            assert!(b.cuda.query(b.event, Site::Outside).unwrap());
            let set: Vec<_> = calls().into_iter().filter(|c| c.name == "cuCtxSetCurrent").collect();
            assert_eq!(current(), before);
            assert_eq!(mode(), 0);
            let expected: &[u64] = match before == primary(1) {
                true => &[],
                false => &[primary(1), before, primary(1), before],
            };
            assert_eq!(set.iter().map(|c| c.args[0]).collect::<Vec<_>>(), expected);
            assert!(b.cuda.wait(b.own, EventId(b.own.0), Site::Outside).is_err());
            assert_eq!(current(), before, "also after a refusal");
        }
        b.close();
        assert_eq!(current(), primary(1));
    });
}

#[test]
fn streams_are_non_blocking_and_events_without_timing() {
    story(name_of!(streams_are_non_blocking_and_events_without_timing), "", || {
        let mut cuda = Cuda::open(0).unwrap();
        calls();
        cuda.create_stream().unwrap();
        cuda.create_event(Timing::Off).unwrap();
        cuda.create_event(Timing::On).unwrap();
        let flags: Vec<_> = calls()
            .into_iter()
            .filter(|call| call.name.ends_with("Create"))
            .map(|call| (call.name, call.args[1]))
            .collect();
        let expected = [("cuStreamCreate", 1), ("cuEventCreate", 2), ("cuEventCreate", 0)];
        assert_eq!(flags, expected.map(|(name, flags)| (name.to_owned(), flags)));
    });
}

#[test]
fn handles_reach_the_driver_in_the_right_places() {
    story(name_of!(handles_reach_the_driver_in_the_right_places), "", || {
        let mut b = Bench::new(0);
        let (own, lent) = (b.raw(b.own), b.raw(b.lent));
        let (dev, pin) = (b.device(), b.pinned());
        calls();
        b.cuda.copy_out(pin, dev, b.own).unwrap();
        b.cuda.copy_in(dev, pin, b.lent).unwrap();
        b.cuda.record(b.event, b.own).unwrap();
        b.cuda.wait(b.lent, b.event, Site::Outside).unwrap();
        let calls = calls();
        let args = |name: &str| calls.iter().find(|call| call.name == name).unwrap().args.clone();
        assert_eq!(args("cuMemcpyDtoHAsync_v2"), [b.host.0, b.at.0, Bench::LEN, own]);
        assert_eq!(args("cuMemcpyHtoDAsync_v2"), [b.at.0, b.host.0, Bench::LEN, lent]);
        let event = args("cuEventRecord")[0];
        assert_eq!(args("cuEventRecord"), [event, own]);
        assert_eq!(args("cuStreamWaitEvent"), [lent, event, 0]);
        b.close();
    });
}

#[test]
fn a_kernel_gets_its_arguments_and_its_module_is_loaded_once() {
    story(name_of!(a_kernel_gets_its_arguments_and_its_module_is_loaded_once), "", || {
        static OTHER: Kernel = Kernel { name: "other", ptx: FILL.ptx, host: None, cost: FILL.cost };
        let mut b = Bench::new(0);
        let (dev, pin, own) = (b.device(), b.pinned(), b.own);
        let args = [Arg::Write(dev), Arg::U32(0xABCD_0123), Arg::U32(2048)];
        let grid = Grid { blocks: [8, 2, 3], threads: [256, 4, 5], shared: 64 };
        b.cuda.launch(&FILL, grid, &args, own).unwrap();
        let mut second = Cuda::open(0).unwrap();
        let stream = second.create_stream().unwrap();
        second.launch(&OTHER, Grid::row(1, 1), &[], stream).unwrap();
        let calls = calls();
        let count = |name: &str| calls.iter().filter(|call| call.name == name).count();
        assert_eq!((count("cuModuleLoadDataEx"), count("cuModuleGetFunction")), (1, 2));
        let launch = calls.iter().find(|call| call.name == "cuLaunchKernel").unwrap();
        assert_eq!(launch.args[1..9], [8, 2, 3, 256, 4, 5, 64, b.raw(own)]);
        b.cuda.copy_out(pin, dev, own).unwrap();
        let word = 0xABCD_0123_u32.to_le_bytes();
        assert!(b.pages.bytes().chunks(4).all(|bytes| bytes == word));
        b.close();
    });
}

#[test]
fn out_of_memory_is_tried_once_more_with_the_pools_bytes_given_back() {
    story(name_of!(out_of_memory_is_tried_once_more_with_the_pools_bytes_given_back), "", || {
        let mut b = Bench::new(0);
        script("fail:cuMemAllocFromPoolAsync:1:2");
        calls();
        let at = b.cuda.alloc_device(Bytes(64), b.own).unwrap();
        let trimmed = ["cuMemAllocFromPoolAsync", "cuMemPoolTrimTo", "cuMemAllocFromPoolAsync"];
        assert_eq!(names()[3..6], trimmed);
        script("fail:cuMemAllocFromPoolAsync:0:2");
        let error = b.cuda.alloc_device(Bytes::kib(64), b.own).unwrap_err();
        assert_eq!(error.kind(), Kind::OutOfMemory);
        assert!(error.is_retryable() && error.to_string().contains("64.00 KiB"), "{error}");
        script("");
        b.cuda.free_device(at, b.own).unwrap();
        b.close();
    });
}

#[test]
fn the_account_of_device_memory_follows_every_byte() {
    story(name_of!(the_account_of_device_memory_follows_every_byte), "memory:1048576", || {
        let mut cuda = Cuda::open(0).unwrap();
        let stream = cuda.create_stream().unwrap();
        let memory = |cuda: &mut Cuda| {
            let Memory { free, total, allocated, peak } = cuda.memory().unwrap();
            [free, total, allocated, peak].map(Bytes::get)
        };
        assert_eq!(memory(&mut cuda), [1 << 20, 1 << 20, 0, 0]);
        let big = cuda.alloc_device(Bytes(1 << 19), stream).unwrap();
        let small = cuda.alloc_device(Bytes(100), stream).unwrap();
        assert_eq!(
            cuda.alloc_device(Bytes(1 << 20), stream).unwrap_err().kind(),
            Kind::OutOfMemory
        );
        cuda.free_device(big, stream).unwrap();
        let whole = 1 << 20;
        assert_eq!(memory(&mut cuda), [whole - 100, whole, 100, (1 << 19) + 100]);
        cuda.reset_peak();
        assert_eq!(memory(&mut cuda)[3], 100);
        cuda.free_device(small, stream).unwrap();
        for stale in [small, DevicePtr(big.0 + 1), DevicePtr(0)] {
            let error = cuda.free_device(stale, stream).unwrap_err();
            assert_eq!(error.misuse(), Some(Misuse::Stale));
        }
        assert_eq!(memory(&mut cuda)[2..], [0, 100]);
        drop(cuda);
        assert_eq!(alive(), Alive::default());
    });
}

#[test]
fn a_device_without_pools_frees_only_when_it_is_idle() {
    story(name_of!(a_device_without_pools_frees_only_when_it_is_idle), "pools:0", || {
        let mut cuda = Cuda::open(0).unwrap();
        let stream = cuda.create_stream().unwrap();
        set_current(primary(0));
        calls();
        let at = cuda.alloc_device(Bytes(64), stream).unwrap();
        cuda.free_device(at, stream).unwrap();
        let all = names();
        let inner: Vec<_> = all
            .iter()
            .filter(|name| name.starts_with("cuMem") || name.ends_with("Synchronize"))
            .collect();
        assert_eq!(inner, ["cuMemAlloc_v2", "cuStreamSynchronize", "cuMemFree_v2"]);
    });
}
