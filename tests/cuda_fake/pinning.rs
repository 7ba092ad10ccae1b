//! A process that forks while a thread of its own is inside the driver, page-locking memory.
//!
//! The faults guarded against: a child that waits, as it exits, for a thread that only its parent
//! has; and a parent whose page-locking is disturbed by the child.

use crate::fake::{alive, calls, name_of, names, script, story};
use crate::support::quick_pool;
use lightering::backend::Backend;
use lightering::backend::cuda::Cuda;
use lightering::{Bytes, Misuse, Name, PinnedPool};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};

/// Both ends of a pipe: what is read from, what is written to.
fn pipe() -> (File, File) {
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: both were opened above, and belong to nobody else.
    let [read, write] = ends.map(|end| unsafe { File::from_raw_fd(end) });
    (read, write)
}

/// An exit that waits for page-locking sleeps two thousand times; one that does not, hardly ever.
const SLEEPS_MAX: i64 = 200;

/// Exit code of a forked child, and how often it gave its processor away by itself.
fn forked(body: impl FnOnce() -> i32) -> (i32, i64) {
    // SAFETY: the child touches what it inherited as any forked child of a program with threads
    // may: no lock of another thread's is taken on the way.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        std::process::exit(body());
    }
    let mut status = 0;
    // SAFETY: a plain number of fields, for all of which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: our own child; valid pointers.
    assert_eq!(unsafe { libc::wait4(child, &mut status, 0, &mut usage) }, child);
    assert!(libc::WIFEXITED(status), "status {status:#x}");
    (libc::WEXITSTATUS(status), usage.ru_nvcsw)
}

#[test]
fn h42_a_child_does_not_wait_for_what_a_thread_of_its_parents_is_page_locking() {
    let name = name_of!(h42_a_child_does_not_wait_for_what_a_thread_of_its_parents_is_page_locking);
    story(name, "", || {
        let cuda = Cuda::open(0).unwrap();
        let pool = PinnedPool::new(cuda.pinner(), quick_pool(Bytes::mib(1))).unwrap();
        let ((mut told, tell), (wait, go)) = (pipe(), pipe());
        script(&format!("gate:cuMemHostRegister_v2:{}:{}", tell.as_raw_fd(), wait.as_raw_fd()));
        let reservation = pool.reserve_in_background(Bytes::kib(512)).unwrap();
        told.read_exact(&mut [0]).unwrap();
        // The thread is inside the driver, and stays there until it is let go below.
        for is_told in [false, true] {
            let (code, sleeps) = forked(|| {
                if is_told {
                    calls();
                    let refused = [reservation.wait().unwrap_err(), Cuda::open(0).unwrap_err()];
                    let is_refused = |error: &lightering::Error| {
                        let is_forked = error.misuse() == Some(Misuse::Forked);
                        if !is_forked {
                            eprintln!("{error}");
                        }
                        is_forked
                    };
                    if !refused.iter().all(is_refused) || !names().is_empty() {
                        return 1;
                    }
                }
                23
            });
            assert_eq!(code, 23, "the child's own words are above");
            assert!(sleeps < SLEEPS_MAX, "it slept {sleeps} times");
            assert_eq!(
                reservation.progress().ready,
                Bytes::ZERO,
                "the parent's thread is where it was"
            );
        }
        // The gate's reader finds the pipe's end from now on, at every call.
        (&go).write_all(b"!").unwrap();
        drop(go);
        assert_eq!(reservation.wait().unwrap(), Bytes::kib(512));
        let mut client = pool.client(cuda.fence(), Bytes::mib(1)).unwrap();
        let lent = client.lend(Bytes::kib(4), Name::new("x")).unwrap();
        client.give_back(lent.block, None).unwrap();
        drop((client, reservation, pool, cuda));
        let left = alive();
        assert_eq!((left.pinned, left.holds), (0, 0), "{left:?}");
    });
}
