//! The fault guarded against: huge pages that somebody set aside for this, and that nobody takes;
//! or that are taken, and end the process, or do not go back.
//!
//! The kernel is the real one. Where it has no huge pages set aside, and this user may, a few are
//! set aside for the test and let go again.
#![allow(clippy::unwrap_used)]

mod pinned_support;

use lightering::pinned::{PinnedPool, PoolOptions};
use lightering::{Bytes, Name};
use pinned_support::{Hand, Paper, mapped, small};
use std::fs;
use std::io::Write;
use std::path::PathBuf;

const NUMBER: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
const WANTED: u64 = 4;

fn read(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Huge pages of the machine, as many as are wanted; those that were added go with it.
struct Set(Option<u64>);

impl Set {
    fn aside() -> Option<Set> {
        if read(FREE)? >= WANTED {
            return Some(Set(None));
        }
        let before = read(NUMBER)?;
        fs::write(NUMBER, (before + WANTED).to_string()).ok()?;
        let set = Set(Some(before));
        (read(FREE)? >= WANTED).then_some(set)
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            fs::write(NUMBER, before.to_string()).unwrap();
        }
    }
}

/// The size of the pages behind an address of this process, in KiB; none where nothing is mapped.
fn page_kib(at: usize) -> Option<u64> {
    mapped(at, "KernelPageSize")?.strip_suffix("kB")?.trim().parse().ok()
}

#[test]
fn huge_pages_that_were_set_aside_are_taken_hold_bytes_and_go_back() {
    let Some(set) = Set::aside() else {
        let mut stderr = std::io::stderr();
        let why = "this machine has no huge pages set aside, and this user may set none";
        writeln!(stderr, "pinned_huge: not run: {why}").unwrap();
        return;
    };
    let options = |reserved_huge_pages| PoolOptions {
        machine_root: PathBuf::from("/"),
        reserved_huge_pages,
        piece_bytes: Bytes::mib(2),
        ..small(Bytes::mib(8))
    };
    for reserved in [true, false] {
        let paper = Paper::new(Bytes::gib(1));
        let pool = PinnedPool::new(paper.clone(), options(reserved)).unwrap();
        pool.reserve(Bytes::mib(6)).unwrap();
        let at = paper.script.lock().unwrap().ever[0].0;
        assert_eq!(page_kib(at), Some(if reserved { 2048 } else { 4 }), "reserved: {reserved}");
        let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
        let mut block = client.lend(Bytes::mib(6), Name::new("x")).unwrap().block;
        block.write(Bytes::ZERO, &vec![7; 6 << 20]).unwrap();
        let mut read = vec![0; 6 << 20];
        block.read(Bytes::ZERO, &mut read).unwrap();
        assert!(read.iter().all(|&byte| byte == 7));
        client.give_back(block, None).unwrap();
        assert_eq!((pool.trim(), paper.registrations()), (Bytes::mib(6), 0));
        assert_eq!(page_kib(at).filter(|&kib| kib == 2048), None, "a huge page stays mapped");
    }
    drop(set);
}
