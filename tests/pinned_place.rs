//! The fault guarded against: page-locked memory far from its device, from which copies are up to
//! three times slower, and nobody who notices.
//!
//! The machine's folders are made up; the kernel that is asked where the pages lie is the real one.
#![allow(clippy::unwrap_used)]

mod pinned_support;

use lightering::backend::Pinner;
use lightering::pinned::{Numa, PinnedPool, PoolOptions, Stats};
use lightering::{Bytes, Name, PinnedPtr, Result};
use pinned_support::{Hand, Paper, small};
use std::io::Write;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

/// Page-locks nothing for a device in a slot.
#[derive(Debug)]
struct Slot(Arc<Paper>);

impl Pinner for Slot {
    unsafe fn register(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.0.register(at, len) }
    }

    fn unregister(&self, at: PinnedPtr) -> Result<()> {
        self.0.unregister(at)
    }

    fn registration_max(&self) -> Bytes {
        self.0.registration_max()
    }

    fn pci_address(&self) -> Option<String> {
        Some(String::from("0000:3B:00.0"))
    }
}

/// A machine with these nodes, whose slot is near one of them; goes with the test.
struct Machine(PathBuf);

impl Machine {
    fn new(name: &str, online: &str, near: &str) -> Machine {
        let name = format!("lightering-place-{name}-{}", std::process::id());
        let machine = Machine(std::env::temp_dir().join(name));
        for (path, text) in [
            ("sys/devices/system/node/online", online),
            ("sys/devices/system/node/node0/cpulist", "0-255\n"),
            ("sys/devices/system/node/node1/cpulist", "100000\n"),
            ("sys/bus/pci/devices/0000:3b:00.0/numa_node", near),
            // More than there are: the kernel refuses, and ordinary pages do.
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "1000000\n"),
        ] {
            let path = machine.0.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        machine
    }

    /// What a pool there says after it has taken 8 MiB and used them.
    fn stats(&self, numa: Numa, in_background: bool) -> Stats {
        let slot = Slot(Paper::new(Bytes::gib(1)));
        let root = self.0.clone();
        let options = PoolOptions {
            numa,
            machine_root: root,
            piece_bytes: Bytes::mib(2),
            ..small(Bytes::mib(8))
        };
        let pool = PinnedPool::new(Arc::new(slot), options).unwrap();
        if in_background {
            pool.reserve_in_background(Bytes::mib(8)).unwrap().wait().unwrap();
        } else {
            pool.reserve(Bytes::mib(8)).unwrap();
        }
        let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
        let mut block = client.lend(Bytes::mib(8), Name::new("x")).unwrap().block;
        block.write(Bytes::ZERO, &vec![3; 8 << 20]).unwrap();
        let mut read = vec![0; 8 << 20];
        block.read(Bytes::ZERO, &mut read).unwrap();
        assert!(read.iter().all(|&byte| byte == 3));
        client.give_back(block, None).unwrap();
        pool.audit();
        pool.stats()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn pages_are_taken_near_the_device_and_the_kernel_is_asked_where_they_lie() {
    let machine = Machine::new("near", "0-1\n", "0\n");
    for in_background in [false, true] {
        let stats = machine.stats(Numa::Near, in_background);
        assert_eq!(stats.node, Some(0));
        let (asked, near) = (stats.counts.pages_asked, stats.counts.pages_near);
        if asked == 0 {
            let mut stderr = std::io::stderr();
            writeln!(stderr, "pinned_place: this system does not say where pages lie").unwrap();
            continue;
        }
        assert_eq!((asked, near), (1000, 1000), "a thousand of 2048 pages");
    }
}

#[test]
fn a_node_without_memory_is_told_and_stops_nothing() {
    // The real machine has no such node, nor such a processor.
    let machine = Machine::new("far", "0-1\n", "1\n");
    let stats = machine.stats(Numa::Near, false);
    assert_eq!((stats.node, stats.counts.pages_near), (Some(1), 0));
    assert_eq!(machine.stats(Numa::Node(9999), true).counts.pages_near, 0);
}

#[test]
fn on_one_node_and_where_nobody_can_say_there_is_nothing_to_do() {
    for (name, online, near, numa) in [
        ("one", "0\n", "0\n", Numa::Near),
        ("silent", "0-1\n", "-1\n", Numa::Near),
        ("any", "0-1\n", "0\n", Numa::Any),
        ("odd", "what\n", "0\n", Numa::Node(0)),
    ] {
        let machine = Machine::new(name, online, near);
        let stats = machine.stats(numa, false);
        assert_eq!((stats.node, stats.counts.pages_asked), (None, 0), "{name}");
    }
}
