//! Faults that end a device, a process or both; each in a process of its own.

use crate::device::{Host, MEMORY, POKE, cuda, driver, fill, poll, range, spin};
use lightering::backend::cuda::Cuda;
use lightering::backend::{Arg, Backend, Grid, Timing};
use lightering::trace::Site;
use lightering::{Bytes, Kind, Misuse};
use std::ffi::c_int;
use std::process::Command;
use std::sync::Mutex;

const STORY: &str = "DEVICE_STORY";

/// Runs the body in a child process, which must end with the code given.
fn apart(name: &str, code: i32, body: fn(Cuda)) {
    let name = format!("apart::{name}");
    if std::env::var_os(STORY).is_some_and(|story| story == *name) {
        return body(cuda().expect("the parent had it"));
    }
    if std::env::var_os(STORY).is_some() || cuda().is_none() {
        return;
    }
    let alone = MEMORY.lock();
    let output = child(&name);
    drop(alone);
    let (out, err) = (&output.stdout, &output.stderr);
    let said = format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err));
    assert_eq!(output.status.code(), Some(code), "{name}: {} {said}", output.status);
    assert!(code != 0 || said.contains("1 passed"), "{said}");
}

fn child(name: &str) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(STORY, name)
        .output()
        .unwrap()
}

#[test]
fn h54_a_kernel_that_faults_is_a_loss_from_there_on_and_the_process_ends_well() {
    apart(
        "h54_a_kernel_that_faults_is_a_loss_from_there_on_and_the_process_ends_well",
        0,
        |mut c| {
            let (stream, fence) = (c.create_stream().unwrap(), c.fence());
            let host = Host::new(&c, 4096);
            let event = c.create_event(Timing::Off).unwrap();
            c.launch(&POKE, Grid::row(1, 1), &[Arg::U64(64)], stream).unwrap();
            let first = match c.record(event, stream).and_then(|()| poll(&mut c, event)) {
                Err(error) => error,
                Ok(()) => c.sync().unwrap_err(),
            };
            println!("{first}");
            assert_eq!(first.kind(), Kind::Lost);
            for after in [
                c.record(event, stream),
                c.sync(),
                c.create_stream().map(drop),
                fence.done(event).map(drop),
                c.pinner().unregister(host.ptr()),
                Cuda::open(0).map(drop),
            ] {
                let after = after.unwrap_err();
                assert_eq!((after.kind(), after.op()), (Kind::Lost, first.op()), "{after}");
            }
        },
    );
}

#[test]
fn h59_a_context_reset_by_another_library_is_a_loss() {
    apart("h59_a_context_reset_by_another_library_is_a_loss", 0, |mut c| {
        let stream = c.create_stream().unwrap();
        let event = c.create_event(Timing::Off).unwrap();
        c.record(event, stream).unwrap();
        let reset: unsafe extern "C" fn(c_int) -> c_int = driver("cuDevicePrimaryCtxReset_v2");
        // SAFETY: device 0 is there. That this takes our context away is the point.
        assert_eq!(unsafe { reset(0) }, 0);
        let error = c.query(event, Site::Outside).unwrap_err();
        println!("{error}");
        assert_eq!(error.kind(), Kind::Lost);
    });
}

#[test]
fn h41_h42_a_forked_child_is_refused_and_the_parents_bytes_stay() {
    apart("h41_h42_a_forked_child_is_refused_and_the_parents_bytes_stay", 0, |mut c| {
        let stream = c.create_stream().unwrap();
        let mut host = Host::new(&c, 1 << 20);
        let at = c.alloc_device(Bytes(1 << 20), stream).unwrap();
        let event = c.create_event(Timing::Off).unwrap();
        spin(&mut c, 50, stream).unwrap();
        fill(&mut c, range(at, 1 << 20), 42, stream).unwrap();
        c.copy_out(host.range, range(at, 1 << 20), stream).unwrap();
        c.record(event, stream).unwrap();
        let both = Mutex::new(Some(c));
        // SAFETY: the child leaves by `_exit`, with none of the parent's hooks.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut c = both.lock().unwrap().take().unwrap();
            let refused = c.query(event, Site::Outside).map(drop).unwrap_err().misuse()
                == Some(Misuse::Forked)
                && c.copy_out(host.range, range(at, 1 << 20), stream).is_err()
                && Cuda::open(0).is_err();
            drop(c);
            // SAFETY: leaves at once.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        let mut status = 0;
        // SAFETY: our own child; valid pointer.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child was not refused");
        let mut c = both.into_inner().unwrap().unwrap();
        poll(&mut c, event).unwrap();
        assert!(host.words().iter().all(|word| *word == 42));
        host.close();
    });
}

static HELD: Mutex<Option<Cuda>> = Mutex::new(None);

/// Registered before the driver starts, so run after the driver's own hooks.
extern "C" fn drop_at_exit() {
    drop(HELD.lock().unwrap().take());
}

#[test]
fn h39_an_exit_with_copies_in_flight_keeps_the_programs_exit_code() {
    const NAME: &str = "h39_an_exit_with_copies_in_flight_keeps_the_programs_exit_code";
    for _ in 0..10 {
        apart(NAME, 7, |mut c| {
            let stream = c.create_stream().unwrap();
            let host = Host::new(&c, 256 << 20);
            let at = c.alloc_device(Bytes(256 << 20), stream).unwrap();
            spin(&mut c, 10, stream).unwrap();
            for _ in 0..8 {
                c.copy_out(host.range, range(at, 256 << 20), stream).unwrap();
            }
            *HELD.lock().unwrap() = Some(c);
            std::process::exit(7);
        });
    }
}

#[test]
fn h60_m31_a_device_dropped_after_the_drivers_own_exit_hooks_touches_nothing() {
    const NAME: &str = "h60_m31_a_device_dropped_after_the_drivers_own_exit_hooks_touches_nothing";
    if std::env::var_os(STORY).is_some_and(|story| story == *format!("apart::{NAME}")) {
        // SAFETY: the hook is ours and runs on the exiting thread.
        assert_eq!(unsafe { libc::atexit(drop_at_exit) }, 0);
    }
    apart(NAME, 9, |mut c| {
        let stream = c.create_stream().unwrap();
        spin(&mut c, 50, stream).unwrap();
        *HELD.lock().unwrap() = Some(c);
        std::process::exit(9);
    });
}
