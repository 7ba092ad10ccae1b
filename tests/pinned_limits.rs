//! The fault guarded against: a limit of the process or the machine that ends it, or that is told as
//! something else; and memory that stays page-locked behind a refusal.
#![allow(clippy::unwrap_used)]

mod pinned_support;

use lightering::pinned::{Budget, PinnedPool, PoolOptions};
use lightering::{Bytes, Kind, Misuse, Name};
use pinned_support::{Hand, Paper, small};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

/// Set in the child that runs one of these tests under a limit.
const CHILD: &str = "LIGHTERING_TEST_MEMLOCK";

/// The pool asks the driver to page-lock, which the system's limit on locked memory does not bind;
/// so a limit of zero, as containers have it, changes nothing.
#[test]
fn a_limit_on_locked_memory_of_zero_is_no_bound_on_the_pool() {
    if std::env::var_os(CHILD).is_some() {
        let (paper, pool) = pinned_support::pool(Bytes::mib(8));
        assert_eq!(pool.reserve(Bytes::mib(4)).unwrap(), Bytes::mib(4));
        pool.reserve_in_background(Bytes::mib(8)).unwrap().wait().unwrap();
        let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
        let mut block = client.lend(Bytes::mib(4), Name::new("x")).unwrap().block;
        block.write(Bytes::ZERO, &vec![1; 4 << 20]).unwrap();
        client.give_back(block, None).unwrap();
        drop((client, pool));
        assert_eq!(paper.registrations(), 0);
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "a_limit_on_locked_memory_of_zero_is_no_bound_on_the_pool"]);
    child.env(CHILD, "1");
    let limit = || {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a valid limit of this child's own, lowered between fork and exec.
        match unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &none) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure makes one system call and touches no lock or heap of the parent's.
    unsafe { child.pre_exec(limit) };
    let output = child.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_device_that_refuses_every_registration_costs_a_named_error_and_nothing_else() {
    let (paper, pool) = pinned_support::pool(Bytes::mib(64));
    paper.script.lock().unwrap().wall = Some(0);
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let lend = client.lend(Bytes::mib(8), Name::new("layer.3")).unwrap_err();
    let reserve = pool.reserve(Bytes::mib(8)).unwrap_err();
    let behind = pool.reserve_in_background(Bytes::mib(8)).unwrap().wait().unwrap_err();
    for error in [&lend, &reserve, &behind] {
        // Not "over the budget": what the driver said is passed on, with its code.
        assert_eq!((error.kind(), error.driver_code()), (Kind::OutOfMemory, Some(2)), "{error}");
        assert!(error.to_string().contains("8.00 MiB"), "{error}");
    }
    assert_eq!(lend.name(), Some(Name::new("layer.3")));
    let stats = pool.stats();
    assert_eq!((stats.pinned, stats.reserving, paper.registrations()), (Bytes(0), Bytes(0), 0));
    // It serves again when the device does.
    paper.script.lock().unwrap().wall = None;
    let block = client.lend(Bytes::mib(8), Name::new("layer.3")).unwrap().block;
    client.give_back(block, None).unwrap();
    pool.audit();
}

#[test]
fn what_the_budget_has_no_room_for_is_no_want_of_device_memory() {
    let (_, pool) = pinned_support::pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    for error in [
        client.lend(Bytes::mib(3), Name::new("x")).unwrap_err(),
        pool.reserve(Bytes::mib(3)).unwrap_err(),
        pool.reserve_in_background(Bytes::mib(3)).unwrap_err(),
    ] {
        assert_eq!(error.kind(), Kind::OverBudget);
        let text = error.to_string();
        assert!(text.contains("pinned-memory budget") && !text.contains("device memory"), "{text}");
    }
}

#[test]
fn more_than_the_machine_has_is_mapped_by_nobody() {
    let root = std::env::temp_dir().join(format!("lightering-limits-{}", std::process::id()));
    std::fs::create_dir_all(root.join("proc")).unwrap();
    std::fs::write(root.join("proc/meminfo"), "MemAvailable:   6144 kB\n").unwrap();
    let paper = Paper::new(Bytes::gib(1));
    let options = PoolOptions {
        machine_root: root.clone(),
        pageable_bytes_max: Bytes::gib(1),
        ..small(Bytes::gib(1 << 10))
    };
    let pool = PinnedPool::new(paper.clone(), options).unwrap();
    let behind = pool.reserve_in_background(Bytes::gib(1)).unwrap().wait().unwrap_err();
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    // Memory that is not page-locked would come out of the same machine.
    let lend = client.lend(Bytes::mib(16), Name::new("x")).unwrap_err();
    std::fs::remove_dir_all(&root).unwrap();
    assert_eq!((behind.kind(), lend.kind()), (Kind::OutOfMemory, Kind::OutOfMemory));
    assert!(behind.to_string().contains("the host has 6.00 MiB"), "{behind}");
    assert_eq!((paper.registrations(), pool.stats().reserving), (0, Bytes::ZERO));
    pool.audit();
}

#[test]
fn an_automatic_budget_without_anything_to_go_by_is_refused_with_a_way_out() {
    let options = PoolOptions { budget: Budget::Auto, ..small(Bytes::mib(1)) };
    let error = PinnedPool::new(Arc::new(Unsaid), options).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::BadValue));
    assert!(error.to_string().contains("state a budget"), "{error}");
}

/// Needs memory, and that is all that is known of it.
#[derive(Debug)]
struct Unsaid;

impl lightering::backend::Pinner for Unsaid {
    unsafe fn register(
        &self,
        at: std::ptr::NonNull<u8>,
        _len: Bytes,
    ) -> lightering::Result<lightering::PinnedPtr> {
        Ok(lightering::PinnedPtr(at.as_ptr() as u64))
    }

    fn unregister(&self, _at: lightering::PinnedPtr) -> lightering::Result<()> {
        Ok(())
    }

    fn registration_max(&self) -> Bytes {
        Bytes::MAX
    }
}
