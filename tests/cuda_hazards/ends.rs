//! Hazards of lives and of the driver on a real device: engines that end with copies under way,
//! memory that runs out, contexts that are lost, processes that exit or fork.

use crate::bench::{Bench, MIB, name_of, story};
use crate::device::{POKE, current, driver, in_context};
use lightering::backend::cuda::Cuda;
use lightering::backend::{Arg, Backend, Grid};
use lightering::storage::{Residency, Tier};
use lightering::{Acquire, Budget, Bytes, Error, Kind, Misuse, PinnedPool, PoolOptions, Shared};
use std::ffi::c_int;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const LEN: u64 = MIB;
const POOL: Bytes = Bytes::mib(320);

#[test]
#[ignore = "needs a CUDA device"]
fn h29_h30_h35_what_copies_use_outlives_handles_engine_and_pool() {
    let name = name_of!(h29_h30_h35_what_copies_use_outlives_handles_engine_and_pool);
    story(name, 3, 0, || {
        let mut b = Bench::new(1, POOL);
        let first = b.owned(0, 256 * MIB, 1, 20);
        b.evict(0, &first);
        // The handle, then the engine, then the pool, under a copy-out that has not begun.
        drop(first);
        let storage = b.owned(0, LEN, 2, 0);
        b.evict(0, &storage);
        let Bench { mut cuda, engine, pool, .. } = b;
        let start = Instant::now();
        drop(engine);
        println!("the engine drained for {:?}", start.elapsed());
        assert_eq!((pool.stats().lent, pool.stats().quarantined), (Bytes::ZERO, Bytes::ZERO));
        drop((pool, storage));
        cuda.sync().unwrap();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h47_bytes_without_room_on_the_device_stay_safe_on_the_host() {
    story(name_of!(h47_bytes_without_room_on_the_device_stay_safe_on_the_host), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        let storage = b.owned(0, 64 * MIB, 3, 0);
        b.evict(0, &storage);
        b.flush(0);
        b.cuda.sync().unwrap();
        let on = b.streams[0].here;
        let mut hog = Vec::new();
        for mib in [4096, 512, 64, 16] {
            while let Ok(at) = b.cuda.alloc_device(Bytes::mib(mib), on) {
                hog.push(at);
            }
        }
        let full = b.engine.acquire(storage.id(), b.streams[0].engine).unwrap_err();
        println!("{full}");
        assert_eq!(full.kind(), Kind::OutOfMemory);
        assert_eq!(b.engine.residency(storage.id()).unwrap(), Residency::Evicted(Tier::Host));
        for at in hog {
            b.cuda.free_device(at, on).unwrap();
        }
        let range = b.acquire(0, &storage);
        b.read(0, range).must_be(&mut b, 3);
        drop(storage);
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h48_more_pinned_memory_than_there_is_is_refused_and_harms_nothing() {
    story(
        name_of!(h48_more_pinned_memory_than_there_is_is_refused_and_harms_nothing),
        1,
        0,
        || {
            let mut b = Bench::new(1, POOL);
            let options =
                PoolOptions { budget: Budget::Bytes(Bytes(1 << 50)), ..Default::default() };
            let refused = match PinnedPool::new(b.cuda.pinner(), options) {
                Err(error) => error,
                Ok(pool) => {
                    println!("a pool of {}", pool.budget());
                    pool.reserve(Bytes(1 << 49)).unwrap_err()
                }
            };
            println!("{refused}");
            assert!(matches!(refused.kind(), Kind::OverBudget | Kind::OutOfMemory), "{refused}");
            let storage = b.owned(0, LEN, 4, 0);
            b.evict(0, &storage);
            b.flush(0);
            let range = b.acquire(0, &storage);
            b.read(0, range).must_be(&mut b, 4);
            drop(storage);
            b.close();
        },
    );
}

/// After a loss every verb says where it was first seen, and the process ends well.
fn stays_lost(mut b: Bench, first: &Error, storage: lightering::Storage) {
    println!("{first}");
    assert_eq!(first.kind(), Kind::Lost);
    let on = b.streams[0].engine;
    for later in [
        b.engine.evict(storage.id(), on).map(drop),
        b.engine.acquire(storage.id(), on).map(drop),
        b.engine.step(),
        b.engine.drain(),
    ] {
        let later = later.unwrap_err();
        assert_eq!((later.kind(), later.op()), (Kind::Lost, first.op()), "{later}");
    }
    assert_eq!(b.engine.residency(storage.id()).unwrap(), Residency::Lost);
    let Bench { engine, pool, .. } = b;
    drop((storage, engine));
    assert_eq!(pool.stats().lent, Bytes::ZERO);
}

#[test]
#[ignore = "needs a CUDA device"]
fn h54_h56_somebody_elses_kernel_that_faults_is_a_loss_and_no_hang() {
    story(name_of!(h54_h56_somebody_elses_kernel_that_faults_is_a_loss_and_no_hang), 3, 0, || {
        let mut b = Bench::new(2, POOL);
        let storage = b.owned(0, 64 * MIB, 1, 5);
        b.evict(0, &storage);
        let other = b.streams[1].here;
        b.cuda.launch(&POKE, Grid::row(1, 1), &[Arg::U64(64)], other).unwrap();
        let start = Instant::now();
        let first = loop {
            // A caller that polls: the loop ends with the loss, whoever sees it.
            match b.engine.step() {
                Ok(()) => assert!(start.elapsed() < Duration::from_secs(30), "never seen"),
                Err(error) => break error,
            }
        };
        stays_lost(b, &first, storage);
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h58_a_copy_that_waits_for_long_holds_up_nobody() {
    story(name_of!(h58_a_copy_that_waits_for_long_holds_up_nobody), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        let storage = b.owned(0, LEN, 1, 2000);
        let lightering::Evict::Moving(ticket) =
            b.engine.evict(storage.id(), b.streams[0].engine).unwrap()
        else {
            panic!("it has bytes to move");
        };
        let mut steps = 0_u64;
        while !b.engine.is_done(ticket).unwrap() {
            b.engine.step().unwrap();
            steps += 1;
        }
        println!("{steps} steps while the stream was held");
        assert!(steps > 1000, "a step waited");
        drop(storage);
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h59_a_context_reset_by_another_library_is_a_loss() {
    story(name_of!(h59_a_context_reset_by_another_library_is_a_loss), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        let storage = b.owned(0, LEN, 1, 0);
        b.evict(0, &storage);
        let reset: unsafe extern "C" fn(c_int) -> c_int = driver("cuDevicePrimaryCtxReset_v2");
        // SAFETY: device 0 is there. That this takes our context away is the point.
        assert_eq!(unsafe { reset(0) }, 0);
        // Asked about the copy's end, the device says what became of it.
        let first = b.engine.step().unwrap_err();
        stays_lost(b, &first, storage);
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h64_h66_a_capture_stays_whole_and_a_context_as_it_was() {
    story(name_of!(h64_h66_a_capture_stays_whole_and_a_context_as_it_was), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        let begin: unsafe extern "C" fn(usize, c_int) -> c_int = driver("cuStreamBeginCapture_v2");
        let end: unsafe extern "C" fn(usize, *mut usize) -> c_int = driver("cuStreamEndCapture");
        let before = current();
        let storage = b.owned(0, LEN, 1, 0);
        let away = b.owned(0, LEN, 2, 0);
        b.evict(0, &away);
        b.flush(0);
        assert_eq!(current(), before, "a verb changed this thread's context");
        let (raw, on) = (b.cuda.raw_stream(b.streams[0].here).unwrap(), b.streams[0].engine);
        // SAFETY: our own live stream; 2 is the relaxed mode.
        in_context(|| assert_eq!(unsafe { begin(raw, 2) }, 0));
        for refused in [
            b.engine.evict(storage.id(), on).map(drop),
            b.engine.acquire(away.id(), on).map(drop),
            b.engine.flush(on),
        ] {
            assert_eq!(refused.unwrap_err().misuse(), Some(Misuse::Capturing));
        }
        b.engine.step().unwrap();
        let mut graph = 0;
        // SAFETY: begun on this thread; valid pointer.
        in_context(|| assert_eq!(unsafe { end(raw, &mut graph) }, 0, "the capture is whole"));
        for (storage, value) in [(&storage, 1), (&away, 2)] {
            let range = b.acquire(0, storage);
            b.read(0, range).must_be(&mut b, value);
        }
        assert_eq!(current(), before);
        drop((storage, away));
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h67_bytes_of_another_device_are_never_copied_by_this_one() {
    story(name_of!(h67_bytes_of_another_device_are_never_copied_by_this_one), 1, 0, || {
        if Cuda::count().unwrap() < 2 {
            return println!("one device: NOT run with two");
        }
        let mut b = Bench::new(1, POOL);
        let mut other = Cuda::open(1).unwrap();
        let stream = other.create_stream().unwrap();
        let raw = other.raw_stream(stream).unwrap();
        let refused = b.engine.adopt_stream(raw).unwrap_err();
        assert!(matches!(refused.kind(), Kind::Usage(_)), "{refused}");
        b.close();
    });
}

static HELD: Mutex<Option<(Shared, lightering::Storage, PinnedPool, Cuda)>> = Mutex::new(None);

#[test]
#[ignore = "needs a CUDA device"]
fn h39_h40_an_exit_with_an_engine_at_work_keeps_its_code() {
    story(name_of!(h39_h40_an_exit_with_an_engine_at_work_keeps_its_code), 20, 7, || {
        let mut b = Bench::new(1, POOL);
        let storage = b.owned(0, 256 * MIB, 1, 20);
        b.evict(0, &storage);
        b.flush(0);
        let Bench { engine, pool, cuda, .. } = b;
        let shared = Shared::new(engine);
        *HELD.lock().unwrap() = Some((shared.clone(), storage, pool, cuda));
        // On another thread, with this one in the middle of verbs.
        std::thread::spawn(|| std::process::exit(7));
        loop {
            let stepped = shared.lock().step();
            // While the process exits the device says so, and nothing else happens.
            assert!(stepped.is_ok() || stepped.is_err_and(|error| error.kind() == Kind::Closed));
        }
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h41_h42_a_forked_child_is_refused_and_its_drops_do_nothing() {
    story(name_of!(h41_h42_a_forked_child_is_refused_and_its_drops_do_nothing), 5, 0, || {
        let mut b = Bench::new(1, POOL);
        let storage = b.owned(0, 64 * MIB, 42, 30);
        b.evict(0, &storage);
        b.flush(0);
        let both = Mutex::new(Some((b, storage)));
        // SAFETY: the child leaves by `_exit`, with none of the parent's hooks.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let (mut b, storage) = both.lock().unwrap().take().unwrap();
            let on = b.streams[0].engine;
            let forked = |error: Error| error.misuse() == Some(Misuse::Forked);
            let is_refused = b.engine.step().is_err_and(forked)
                && b.engine.acquire(storage.id(), on).is_err_and(forked)
                && b.engine.flush(on).is_err_and(forked);
            let start = Instant::now();
            drop((b, storage));
            let is_prompt = start.elapsed() < Duration::from_secs(5);
            // SAFETY: leaves at once.
            unsafe { libc::_exit(i32::from(!(is_refused && is_prompt))) };
        }
        let mut status = 0;
        // SAFETY: our own child; valid pointer.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child was not refused, or waited");
        let (mut b, storage) = both.into_inner().unwrap().unwrap();
        let on = b.streams[0].engine;
        let Acquire::Ready(range) = b.engine.acquire(storage.id(), on).unwrap() else { panic!() };
        b.read(0, range).must_be(&mut b, 42);
        drop(storage);
        b.close();
    });
}
