//! What a process does with an engine that is still at work: it exits, from whatever thread, forks,
//! or ends a thread that held it.
//!
//! The fault guarded against is an exit code that is not the program's own: a destructor that runs
//! after the driver is gone, a wait that never ends, a child that takes its parent's memory and
//! copies for its own. Here on the simulated device; `tests/cuda_fake/process.rs` asks the same of
//! a stand-in driver that aborts when it is called too late, `tests/cuda_device/` of a real one.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

mod support;

use lightering::backend::Backend;
use lightering::backend::sim::{Config, Lazy};
use lightering::{Acquire, Bytes, Evict, Misuse, Options, Shared, Storage};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use support::{Rig, options, quick_pool};

const LEN: Bytes = Bytes::kib(8);
/// Set in a process that is to play the story of this number.
const STORY: &str = "LIGHTERING_STORY";
const EXITS: u64 = 500;
const FORKS: u64 = 200;

fn story() -> Option<u64> {
    std::env::var(STORY).ok()?.parse().ok()
}

/// This test in a process of its own, as the story of this number.
fn child(test: &str, number: u64) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(STORY, number.to_string())
        .output()
        .unwrap()
}

/// A rig with copies in flight in both directions.
fn at_work(seed: u64) -> (Rig, Vec<Storage>) {
    let config = if seed.is_multiple_of(2) {
        Config::adversary(seed)
    } else {
        Config::scheduled(Box::new(Lazy::default()))
    };
    let bounds = Options { note_uses: false, prefetch_count_max: 0, ..options() };
    let mut rig = Rig::new(config, quick_pool(Bytes::mib(1)), bounds, 1);
    let on = rig.streams[0].engine;
    let storages: Vec<_> = (0..3)
        .map(|n| {
            let storage = rig.engine.alloc(LEN, on, "x").unwrap();
            let range = rig.engine.range(storage.id()).unwrap();
            rig.fill(0, range, n);
            assert!(matches!(rig.engine.evict(storage.id(), on).unwrap(), Evict::Moving(_)));
            storage
        })
        .collect();
    rig.engine.flush(on).unwrap();
    assert!(matches!(rig.engine.acquire(storages[0].id(), on).unwrap(), Acquire::Ready(_)));
    (rig, storages)
}

/// What a program that exits may still hold.
type Held = (Shared, Vec<Storage>, lightering::PinnedPool);
static HELD: Mutex<Option<Held>> = Mutex::new(None);

thread_local! {
    static LOCAL: std::cell::RefCell<Option<Held>> = const { std::cell::RefCell::new(None) };
}

fn held(seed: u64) -> Held {
    let (rig, storages) = at_work(seed);
    let Rig { engine, pool, .. } = rig;
    (Shared::new(engine), storages, pool)
}

/// One of five ways to end a program with an engine at work; its exit code is `number % 100`.
fn exit_in_some_way(number: u64) -> ! {
    let code = (number % 100) as i32;
    match number % 5 {
        // A static one: nobody drops it.
        0 => *HELD.lock().unwrap() = Some(held(number)),
        // One that a thread's end drops, while the process lives.
        1 => std::thread::spawn(move || LOCAL.set(Some(held(number)))).join().unwrap(),
        // One of this thread, which never ends.
        2 => LOCAL.set(Some(held(number))),
        // Exit on another thread, in the middle of this one's verbs.
        3 => {
            let (shared, storages, pool) = held(number);
            let on = shared.clone();
            std::thread::spawn(move || {
                let _verb = on.lock();
                std::process::exit(code)
            });
            loop {
                let mut engine = shared.lock();
                let stepped = engine.step();
                assert!(stepped.is_ok());
                std::hint::black_box((&storages, &pool));
            }
        }
        // Everything at once on several threads, one of which exits.
        _ => {
            let held = held(number);
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let shared = held.0.clone();
                    std::thread::spawn(move || {
                        for _ in 0..50 {
                            shared.lock().step().unwrap();
                        }
                    })
                })
                .collect();
            *HELD.lock().unwrap() = Some(held);
            drop(threads);
        }
    }
    std::process::exit(code)
}

#[test]
fn h39_h40_an_exit_with_an_engine_at_work_keeps_its_code_and_raises_no_signal() {
    const NAME: &str = "h39_h40_an_exit_with_an_engine_at_work_keeps_its_code_and_raises_no_signal";
    if let Some(number) = story() {
        exit_in_some_way(number);
    }
    for number in 0..EXITS {
        let output = child(NAME, number);
        let code = output.status.code();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(code, Some((number % 100) as i32), "{number}: {} {said}", output.status);
        assert!(!said.contains("panicked"), "{number}: {said}");
    }
    println!("{EXITS} exits in five ways, no signal");
}

/// What a forked child does with its copy of everything; the number of the first thing wrong.
fn in_child(rig: Rig, storages: Vec<Storage>, way: u64) -> i32 {
    let mut rig = rig;
    let on = rig.streams[0].engine;
    let is_refused = |error: Option<lightering::Error>| {
        error.is_some_and(|error| error.misuse() == Some(Misuse::Forked))
    };
    if way.is_multiple_of(2) {
        let id = storages[1].id();
        let refusals = [
            rig.engine.evict(storages[0].id(), on).err(),
            rig.engine.acquire(id, on).err(),
            rig.engine.alloc(LEN, on, "of the child").err(),
            rig.engine.flush(on).err(),
            rig.engine.step().err(),
            rig.engine.read_host(id, Bytes::ZERO, &mut [0; 8]).err(),
            rig.engine.drain().err(),
            rig.sim.sync().err(),
        ];
        for (number, refusal) in (1..).zip(refusals) {
            if !is_refused(refusal) {
                return number;
            }
        }
    }
    let start = Instant::now();
    if way.is_multiple_of(3) {
        drop(storages);
        drop(rig.engine);
        drop((rig.pool, rig.sim, rig.world));
    } else {
        drop(rig);
        drop(storages);
    }
    // It does not wait for copies that will never end here.
    if start.elapsed() < options().drop_deadline / 2 { 0 } else { 99 }
}

#[test]
fn h41_h42_a_forked_child_is_refused_and_its_drops_do_nothing() {
    const NAME: &str = "h41_h42_a_forked_child_is_refused_and_its_drops_do_nothing";
    let Some(number) = story() else {
        // In processes that run nothing else, so that no lock of another thread is forked.
        for number in 0..FORKS / 20 {
            let output = child(NAME, number);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{number}: {} {said}", output.status);
        }
        return println!("{FORKS} forks, no signal, and the parents' bytes are right");
    };
    for fork in 0..20 {
        let seed = number * 20 + fork;
        let (rig, storages) = at_work(seed);
        let both = std::sync::Arc::new(Mutex::new(Some((rig, storages))));
        let theirs = both.clone();
        let mut command = Command::new("true");
        let child = move || {
            let (rig, storages) =
                theirs.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap();
            match in_child(rig, storages, seed) {
                0 => Ok(()),
                wrong => Err(io::Error::from_raw_os_error(wrong)),
            }
        };
        // SAFETY: no other thread holds a lock that the child takes; it uses its own copies.
        unsafe { command.pre_exec(child) };
        let status = command.status().unwrap_or_else(|error| panic!("seed {seed}: {error:?}"));
        assert!(status.success(), "seed {seed}: {status}");
        let (mut rig, storages) = both.lock().unwrap().take().unwrap();
        let on = rig.streams[0].engine;
        for (n, storage) in storages.iter().enumerate() {
            let Acquire::Ready(range) = rig.engine.acquire(storage.id(), on).unwrap() else {
                panic!("the engine owns the bytes");
            };
            rig.check(0, range, n as u64, format!("seed {seed}, the parent's {n}"));
        }
        drop(storages);
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn a_child_made_behind_the_c_librarys_back_is_refused_as_well() {
    const NAME: &str = "a_child_made_behind_the_c_librarys_back_is_refused_as_well";
    if story().is_none() {
        // In a process that runs nothing else, so that no lock of another thread is copied.
        let output = child(NAME, 1);
        let said = String::from_utf8_lossy(&output.stderr);
        return assert!(output.status.success(), "{} {said}", output.status);
    }
    let (rig, storages) = at_work(2);
    let (mut rig, on) = (rig, storages[0].id());
    let flags = libc::c_long::from(libc::SIGCHLD);
    // SAFETY: the memory is copied, as by a fork; no hook of the C library's runs in the child,
    // which asks one verb and ends without a return.
    let made = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    assert!(made >= 0, "{}", io::Error::last_os_error());
    if made == 0 {
        let stream = rig.streams[0].engine;
        let refused = rig.engine.acquire(on, stream).err().and_then(|error| error.misuse());
        let code = if refused == Some(Misuse::Forked) { 0 } else { 7 };
        // SAFETY: ends the child, and runs nothing of the parent's.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: the child is this process's own, and the status is this frame's.
    let waited = unsafe { libc::waitpid(made as libc::pid_t, &raw mut status, 0) };
    assert_eq!((i64::from(waited), status), (made, 0), "7 << 8: the child was let in");
    drop(storages);
    rig.assert_nothing_left();
}
