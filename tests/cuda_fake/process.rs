//! A process that forks, exits or ends a thread while a device is open: no call may reach a driver
//! that is gone or not ours, the exit code must be the program's own, and no bytes of the parent
//! may suffer.

use crate::bench::{Bench, FILL};
use crate::fake::{
    Alive, alive, calls, is_child, library, name_of, names, primary, run, script, set_current,
    story, text,
};
use crate::support::quick_pool;
use lightering::backend::cuda::Cuda;
use lightering::backend::{Arg, Backend, Fence, Grid, Pinner, Timing};
use lightering::trace::{Actor, Site};
use lightering::{Bytes, Engine, Misuse, Options, PinnedPool, Storage, StreamId};
use std::os::unix::process::ExitStatusExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Runs the body in a forked child and returns its exit code.
fn forked(body: impl FnOnce() + std::panic::UnwindSafe) -> i32 {
    // SAFETY: the test process runs this one thread; the child leaves by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let code = i32::from(std::panic::catch_unwind(body).is_err());
        // SAFETY: leaves at once, with none of the parent's hooks.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: our own child; valid pointer.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "status {status:#x}");
    libc::WEXITSTATUS(status)
}

#[test]
fn h41_h42_a_forked_child_is_refused_by_every_verb_and_its_drop_does_nothing() {
    story(
        name_of!(h41_h42_a_forked_child_is_refused_by_every_verb_and_its_drop_does_nothing),
        "devices:2",
        || {
            let bench = Mutex::new(Some(Bench::new(0)));
            let code = forked(|| {
                calls();
                let mut b = bench.lock().unwrap().take().unwrap();
                let (dev, pin, own, event) = (b.device(), b.pinned(), b.own, b.event);
                let (fence, pinner) = (b.cuda.fence(), b.cuda.pinner());
                let cuda = &mut b.cuda;
                let args = [Arg::Write(dev)];
                let refusals = [
                    cuda.memory().map(drop),
                    cuda.alloc_device(Bytes(1), own).map(drop),
                    cuda.free_device(b.at, own),
                    cuda.adopt_stream(0).map(drop),
                    cuda.create_stream().map(drop),
                    cuda.close_stream(own),
                    cuda.raw_stream(own).map(drop),
                    cuda.create_event(Timing::Off).map(drop),
                    cuda.close_event(event),
                    cuda.record(event, own),
                    cuda.wait(own, event, Site::Outside),
                    cuda.query(event, Site::Outside).map(drop),
                    cuda.elapsed(event, event).map(drop),
                    cuda.note(Actor::Host, &[]),
                    cuda.copy_out(pin, dev, own),
                    cuda.copy_in(dev, pin, own),
                    cuda.launch(&FILL, Grid::row(1, 1), &args, own),
                    cuda.capturing(own).map(drop),
                    cuda.sync(),
                    fence.done(event).map(drop),
                    pinner.unregister(b.host),
                    // SAFETY: refused, so nothing is page-locked.
                    unsafe { pinner.register(b.spare.at(), Bytes(4096)) }.map(drop),
                    Cuda::open(0).map(drop),
                    Cuda::open(1).map(drop),
                    Cuda::count().map(drop),
                ];
                for (index, refusal) in refusals.into_iter().enumerate() {
                    let error = refusal.unwrap_err();
                    assert_eq!(error.misuse(), Some(Misuse::Forked), "{index}: {error}");
                }
                drop((b, fence, pinner));
                assert_eq!(names(), [""; 0], "the child called the parent's driver");
            });
            assert_eq!(code, 0, "the child's own words are above");
            let mut b = bench.into_inner().unwrap().unwrap();
            b.cuda.copy_out(b.pinned(), b.device(), b.own).unwrap();
            assert!(b.cuda.query(b.event, Site::Outside).unwrap());
            b.close();
            assert_eq!(alive().holds, 0);
        },
    );
}

#[test]
fn a_child_forked_before_the_driver_was_started_may_start_it() {
    story(name_of!(a_child_forked_before_the_driver_was_started_may_start_it), "", || {
        assert_eq!(forked(|| drop(Cuda::open(0).unwrap())), 0);
        Cuda::open(0).unwrap().create_stream().unwrap();
    });
}

/// Everything of a device that a program may still hold when its exit hooks run.
type Held = (Bench, Arc<dyn Fence>, Arc<dyn Pinner>);
static HELD: Mutex<Option<Held>> = Mutex::new(None);

/// Registered before the driver starts, so run after the driver's own hook.
extern "C" fn drop_at_exit() {
    let (mut bench, fence, pinner) = HELD.lock().unwrap().take().unwrap();
    let refused = bench.cuda.record(bench.event, bench.own).unwrap_err();
    println!("at exit: {refused}, {}", fence.done(bench.event).unwrap_err());
    println!("at exit: {}", pinner.unregister(bench.host).unwrap_err());
    drop((bench.cuda, fence, pinner));
    println!("dropped at exit");
}

extern "C" fn call_at_exit() {
    set_current(primary(0));
}

fn exit_with(hook: extern "C" fn()) -> ! {
    // SAFETY: the hooks are ours and run on the exiting thread.
    assert_eq!(unsafe { libc::atexit(hook) }, 0);
    let mut bench = Bench::new(0);
    let (fence, pinner) = (bench.cuda.fence(), bench.cuda.pinner());
    bench.cuda.copy_out(bench.pinned(), bench.device(), bench.own).unwrap();
    *HELD.lock().unwrap() = Some((bench, fence, pinner));
    std::process::exit(7);
}

#[test]
fn h60_m31_what_is_dropped_after_the_driver_is_gone_touches_it_no_more() {
    let name = name_of!(h60_m31_what_is_dropped_after_the_driver_is_gone_touches_it_no_more);
    if is_child(name) {
        exit_with(drop_at_exit);
    }
    let Some(dir) = library() else { return };
    let output = run(name, dir, "", &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert!(said.contains("dropped at exit") && said.contains("is exiting"), "{said}");
}

/// The story above can fail: a call made at that moment does end the process.
#[test]
fn the_fake_driver_aborts_when_it_is_called_after_its_end() {
    let name = name_of!(the_fake_driver_aborts_when_it_is_called_after_its_end);
    if is_child(name) {
        exit_with(call_at_exit);
    }
    let Some(dir) = library() else { return };
    let output = run(name, dir, "", &[]);
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{}", text(&output));
}

/// An engine at work on the fake driver, whose copies are never seen done.
pub(crate) type AtWork = (Engine, PinnedPool, Storage, Cuda, StreamId);
static ENGINE: Mutex<Option<AtWork>> = Mutex::new(None);
/// Longer than any test takes: who waits for it is found out.
const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn at_work() -> AtWork {
    let mut cuda = Cuda::open(0).unwrap();
    let pool = PinnedPool::new(cuda.pinner(), quick_pool(Bytes::kib(64))).unwrap();
    let bounds = Options { drop_deadline: DEADLINE, keep_last_count: 0, ..Options::default() };
    let mut engine = Engine::new(Box::new(Cuda::open(0).unwrap()), &pool, bounds).unwrap();
    let stream = cuda.create_stream().unwrap();
    let on = engine.adopt_stream(cuda.raw_stream(stream).unwrap()).unwrap();
    let storage = engine.alloc(Bytes::kib(4), on, "x").unwrap();
    engine.evict(storage.id(), on).unwrap();
    calls();
    (engine, pool, storage, cuda, on)
}

fn drop_promptly(at_work: AtWork) {
    let start = Instant::now();
    drop(at_work);
    assert!(start.elapsed() < DEADLINE / 2, "it waited for a driver that is not there");
}

extern "C" fn drop_engine_at_exit() {
    drop_promptly(ENGINE.lock().unwrap().take().unwrap());
    println!("dropped at exit");
}

#[test]
fn h39_m31_an_engine_dropped_after_the_driver_is_gone_waits_for_nothing() {
    let name = name_of!(h39_m31_an_engine_dropped_after_the_driver_is_gone_waits_for_nothing);
    if is_child(name) {
        // SAFETY: the hook is ours and runs on the exiting thread.
        assert_eq!(unsafe { libc::atexit(drop_engine_at_exit) }, 0);
        *ENGINE.lock().unwrap() = Some(at_work());
        std::process::exit(11);
    }
    let Some(dir) = library() else { return };
    let output = run(name, dir, "notready:1000000000", &[]);
    let said = text(&output);
    assert!(output.status.code() == Some(11) && said.contains("dropped at exit"), "{said}");
}

#[test]
fn h41_an_engine_dropped_in_a_forked_child_waits_for_nothing() {
    let name = name_of!(h41_an_engine_dropped_in_a_forked_child_waits_for_nothing);
    story(name, "notready:1000000", || {
        let both = Mutex::new(Some(at_work()));
        let code = forked(|| {
            drop_promptly(both.lock().unwrap().take().unwrap());
            assert_eq!(names(), [""; 0], "the child called the parent's driver");
        });
        assert_eq!(code, 0, "the child's own words are above");
        script("");
        let (mut engine, pool, storage, _cuda, _) = both.into_inner().unwrap().unwrap();
        drop(storage);
        engine.drain().unwrap();
        engine.shutdown().unwrap();
        assert_eq!((pool.stats().lent, pool.stats().quarantined), (Bytes::ZERO, Bytes::ZERO));
    });
}

#[test]
fn a_program_that_exits_with_a_device_open_keeps_its_exit_code() {
    let name = name_of!(a_program_that_exits_with_a_device_open_keeps_its_exit_code);
    if is_child(name) {
        let bench = Bench::new(0);
        *HELD.lock().unwrap() = Some((Bench::new(0), bench.cuda.fence(), bench.cuda.pinner()));
        std::process::exit(3);
    }
    let Some(dir) = library() else { return };
    let output = run(name, dir, "", &[]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output));
}

#[test]
fn a_device_moves_between_threads_and_dies_with_one() {
    story(name_of!(a_device_moves_between_threads_and_dies_with_one), "", || {
        thread_local! {
            static LOCAL: Mutex<Option<Cuda>> = const { Mutex::new(None) };
        }
        let mut b = Bench::new(0);
        let fence = b.cuda.fence();
        let event = b.event;
        std::thread::scope(|scope| {
            let (b, fence) = (&mut b, &fence);
            scope
                .spawn(move || {
                    b.cuda.copy_in(b.device(), b.pinned(), b.own).unwrap();
                    b.cuda.record(event, b.own).unwrap();
                })
                .join()
                .unwrap();
            scope.spawn(move || assert!(fence.done(event).unwrap())).join().unwrap();
        });
        b.unmap();
        let Bench { cuda, host, .. } = b;
        let pinner = cuda.pinner();
        std::thread::spawn(move || {
            pinner.unregister(host).unwrap();
            LOCAL.with(|local| *local.lock().unwrap() = Some(cuda));
        })
        .join()
        .unwrap();
        let before = alive();
        assert_eq!(
            (before.streams, before.events, before.pinned),
            (1, 3, 0),
            "the lent one is left"
        );
        assert!(fence.done(event).unwrap(), "a fence outlives the device's owner");
        drop(fence);
        assert_eq!(alive(), Alive { streams: 1, memory: 1, ..Alive::default() });
    });
}

#[test]
fn what_crosses_threads_may() {
    fn send<T: Send>() {}
    fn share<T: Send + Sync + ?Sized>() {}
    send::<Cuda>();
    share::<dyn Pinner>();
    share::<dyn Fence>();
}
