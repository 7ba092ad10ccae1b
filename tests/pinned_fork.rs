//! The fault guarded against: page-locked memory that is copied into every child and every core
//! dump, though nobody wants it there; and a child process that takes its parent's page-locked
//! memory for its own: it has no such mapping, and ending the registration would reach into a
//! driver that it never opened.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod pinned_support;

use lightering::pinned::{PinnedPool, PoolOptions};
use lightering::{Bytes, Misuse, Name};
use pinned_support::{Hand, Paper, mapped, pool, small};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

#[test]
fn an_arena_is_aligned_goes_into_no_child_and_into_a_dump_only_where_that_is_wanted() {
    for dump in [true, false] {
        let paper = Paper::new(Bytes::gib(1));
        let options = PoolOptions { dump, piece_bytes: Bytes::kib(8), ..small(Bytes::mib(4)) };
        let pool = PinnedPool::new(paper.clone(), options).unwrap();
        pool.reserve(Bytes::kib(24)).unwrap();
        let ever = paper.script.lock().unwrap().ever.clone();
        assert_eq!((ever[0].0 % (2 << 20), ever.len()), (0, 2));
        for (host, _) in ever {
            let flags = mapped(host, "VmFlags").unwrap();
            let has = |flag: &str| flags.split(' ').any(|other| other == flag);
            assert!(has("dc"), "copied into children: {flags}");
            assert_eq!(has("dd"), !dump, "{flags}");
        }
    }
}

#[test]
fn a_forked_child_is_refused_and_unregisters_nothing() {
    let (paper, pool) = pool(Bytes::mib(2));
    let mut client = pool.client(Hand::new(1), Bytes::MAX).unwrap();
    let mut block = client.lend(Bytes(100), Name::new("x")).unwrap().block;
    block.write(Bytes::ZERO, &[1; 100]).unwrap();
    let parent = paper.clone();
    let mut all = Some((pool, client, block));
    let child = move || -> io::Result<()> {
        let failed = |code| Err(io::Error::from_raw_os_error(code));
        let Some((pool, mut client, mut block)) = all.take() else { return failed(1) };
        let read = block.read(Bytes::ZERO, &mut [0; 100]);
        let write = block.write(Bytes::ZERO, &[2; 100]);
        for refused in [read, write] {
            match refused {
                Ok(()) => return failed(2),
                Err(error) if error.misuse() != Some(Misuse::Forked) => return failed(3),
                Err(_) => {}
            }
        }
        if client.give_back(block, None).is_err() {
            return failed(4);
        }
        drop((client, pool));
        if paper.registrations() == 1 { Ok(()) } else { failed(5) }
    };
    let mut command = Command::new("true");
    // SAFETY: the child uses its own copy of the pool, whose locks nobody holds, and the heap.
    unsafe { command.pre_exec(child) };
    let status = command.status().unwrap();
    assert!(status.success());
    assert_eq!(parent.registrations(), 1, "the parent's is as it was");
    drop(command);
    // In the parent the block was dropped, not given back: it stays page-locked.
    assert_eq!(parent.registrations(), 1);
}
