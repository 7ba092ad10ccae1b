//! Stories of machines that few of us have: two nodes, huge pages set aside, and a kernel that lets
//! us have them, or some of them, or says no half way.
//!
//! What it is not: the kernel's word for it. `tests/pinned_huge.rs` asks the real one.
//!
//! Invariant: a made-up machine is one thing in two places: its folders, and what it answers.
//!
//! ```text
//!   folders: sys/devices/system/node/..   free_hugepages        Machine, as the System of a pool:
//!   map_reserved, prefer, populate  -> log, with the processors of whoever asks
//! ```
//!
//! Nobody uses it: these are tests.

use super::{Linux, System};
use crate::backend::Pinner;
use crate::error::{Kind, Result};
use crate::pinned::{Numa, PinnedPool, PoolOptions, Stats};
use crate::unit::{Bytes, PinnedPtr};
use rustix::mm::{self, MapFlags, ProtFlags};
use rustix::thread::sched_getaffinity;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

const HUGE: usize = 2 << 20;

/// What was asked, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Asked {
    Map {
        len: usize,
    },
    /// With how many pages of it taken already.
    Prefer {
        at: usize,
        len: usize,
        node: u32,
        taken: usize,
    },
    Populate {
        at: usize,
        len: usize,
        cpus: Vec<usize>,
    },
    Nodes {
        pages: usize,
    },
}

/// Two nodes, of which the second is the device's.
#[derive(Debug, Default)]
struct Machine {
    root: PathBuf,
    /// Huge pages that the kernel lets us map.
    huge: usize,
    /// Refuse to take pages from this call on.
    refuse_from: Option<usize>,
    /// The node on which every other page ends up.
    other_node: Option<i32>,
    /// The kernel does not say where pages lie.
    is_silent: bool,
    log: Mutex<Vec<Asked>>,
    registered: Mutex<BTreeMap<u64, u64>>,
}

impl Machine {
    fn new() -> Machine {
        Machine::with(|_| {})
    }

    /// One that `change` makes poorer.
    fn with(change: impl FnOnce(&mut Machine)) -> Machine {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("lightering-machine-{}-{nth}", std::process::id());
        let mut machine = Machine::default();
        (machine.root, machine.huge) = (std::env::temp_dir().join(name), 64);
        change(&mut machine);
        machine
    }

    /// Its files, until [`reserve`] is over: a thread on its way out may keep the machine longer.
    fn write_files(&self) {
        let last = *here().last().unwrap();
        for (path, text) in [
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/devices/system/node/node0/cpulist", "100000\n"),
            ("sys/devices/system/node/node1/cpulist", &format!("{last},100001\n")),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "64\n"),
        ] {
            let path = self.root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    fn log(&self) -> Vec<Asked> {
        self.log.lock().unwrap().clone()
    }

    fn populates(&self) -> Vec<(usize, usize, Vec<usize>)> {
        let populate = |asked| match asked {
            Asked::Populate { at, len, cpus } => Some((at, len, cpus)),
            _ => None,
        };
        self.log().into_iter().filter_map(populate).collect()
    }
}

/// The processors that this thread may run on.
fn here() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap();
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

impl System for Machine {
    fn map_reserved(&self, len: usize) -> Option<NonNull<u8>> {
        self.log.lock().unwrap().push(Asked::Map { len });
        if len > self.huge * HUGE {
            return None;
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let wide = len + HUGE;
        // SAFETY: no address is asked for, so no mapping of anybody is replaced.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), wide, prot, MapFlags::PRIVATE) };
        let start = start.unwrap().cast::<u8>();
        // Aligned as huge pages are; what is before and behind stays mapped until the tests end.
        NonNull::new(start.wrapping_add(start.align_offset(HUGE)))
    }

    unsafe fn populate(&self, at: NonNull<u8>, len: usize) -> io::Result<()> {
        let mut log = self.log.lock().unwrap();
        log.push(Asked::Populate { at: at.as_ptr().addr(), len, cpus: here() });
        let calls = log.iter().filter(|asked| matches!(asked, Asked::Populate { .. })).count();
        match self.refuse_from {
            Some(from) if calls > from => Err(io::Error::from_raw_os_error(libc::EFAULT)),
            // Of ordinary pages, which may be refused by an old kernel, and come later then.
            // SAFETY: the caller's promise is passed on.
            _ => unsafe { Linux.populate(at, len) }.or(Ok(())),
        }
    }

    unsafe fn prefer(&self, at: NonNull<u8>, len: usize, node: u32) {
        let mut taken = vec![0u8; len / 4096];
        // SAFETY: the range is mapped, and there is an entry for each of its pages.
        let answer = unsafe { libc::mincore(at.as_ptr().cast(), len, taken.as_mut_ptr().cast()) };
        assert_eq!(answer, 0);
        let taken = taken.iter().filter(|&&page| page & 1 == 1).count();
        let at = at.as_ptr().addr();
        self.log.lock().unwrap().push(Asked::Prefer { at, len, node, taken });
    }

    fn nodes(&self, pages: &[usize], nodes: &mut [i32]) -> bool {
        self.log.lock().unwrap().push(Asked::Nodes { pages: pages.len() });
        for (nth, node) in nodes.iter_mut().enumerate() {
            *node = self.other_node.filter(|_| nth % 2 == 1).unwrap_or(1);
        }
        !self.is_silent
    }
}

/// Page-locks on paper, for the machine's device.
#[derive(Debug)]
struct Paper(Arc<Machine>);

impl Pinner for Paper {
    unsafe fn register(&self, at: NonNull<u8>, len: Bytes) -> Result<PinnedPtr> {
        // Every page of it is there, and can be written to.
        for page in (0..len.get() as usize).step_by(4096) {
            // SAFETY: the caller's promise: the range is mapped, and nobody else's.
            unsafe { at.as_ptr().add(page).write_volatile(1) };
        }
        let at = at.as_ptr().addr() as u64;
        assert!(self.0.registered.lock().unwrap().insert(at, len.get()).is_none());
        Ok(PinnedPtr(at))
    }

    fn unregister(&self, at: PinnedPtr) -> Result<()> {
        assert!(self.0.registered.lock().unwrap().remove(&at.0).is_some());
        Ok(())
    }

    fn registration_max(&self) -> Bytes {
        Bytes::MAX
    }
}

fn pool(machine: &Arc<Machine>) -> PinnedPool {
    let options = PoolOptions {
        budget: crate::pinned::Budget::Bytes(Bytes::mib(64)),
        arena_bytes: Bytes::mib(2),
        piece_bytes: Bytes::mib(4),
        numa: Numa::Node(1),
        machine_root: machine.root.clone(),
        ..PoolOptions::default()
    };
    PinnedPool::on(machine.clone(), Arc::new(Paper(machine.clone())), options).unwrap()
}

/// Reserves 16 MiB of a pool there, in either way, and looks at it; all of it goes again.
fn reserve(machine: &Arc<Machine>, in_background: bool) -> Result<Stats> {
    machine.write_files();
    let pool = pool(machine);
    let reserved = match in_background {
        true => pool.reserve_in_background(Bytes::mib(16)).and_then(|job| job.wait()),
        false => pool.reserve(Bytes::mib(16)),
    };
    pool.audit();
    let stats = pool.stats();
    drop(pool);
    // A thread of the background may be on its way out; what it waits for nobody holds.
    while !machine.registered.lock().unwrap().is_empty() {
        std::thread::yield_now();
    }
    fs::remove_dir_all(&machine.root).unwrap();
    reserved.map(|_| stats)
}

#[test]
fn reserved_huge_pages_are_asked_for_near_the_device_before_the_first_is_taken() {
    for in_background in [false, true] {
        let machine = Arc::new(Machine::new());
        let stats = reserve(&machine, in_background).unwrap();
        let log = machine.log();
        let Asked::Prefer { at, len, node, taken } = log[1] else { panic!("{log:?}") };
        assert_eq!((&log[0], len), (&Asked::Map { len: 16 << 20 }, 16 << 20));
        assert_eq!((node, taken), (1, 0), "a page that is there already stays where it is");
        assert!(matches!(log[2], Asked::Populate { .. }), "{log:?}");
        let preferred = log.iter().filter(|asked| matches!(asked, Asked::Prefer { .. })).count();
        assert_eq!(preferred, 1, "one mapping is enough");
        // All of it was taken, by nobody but those near the device.
        let near = vec![*here().last().unwrap()];
        let populates = machine.populates();
        let mut parts: Vec<_> = populates[1..].iter().map(|&(at, len, _)| (at, len)).collect();
        parts.sort_unstable();
        let mut end = at;
        for (from, len) in parts {
            assert_eq!(from, end, "side by side");
            end = from + len;
        }
        assert_eq!(end, at + (16 << 20));
        assert!(populates[1..].iter().all(|(_, _, cpus)| *cpus == near), "{populates:?}");
        let counts = stats.counts;
        assert_eq!((stats.node, stats.pinned), (Some(1), Bytes::mib(16)));
        assert_eq!((counts.pages_asked, counts.pages_near), (1000, 1000));
    }
}

#[test]
fn the_thread_that_grows_a_pool_stays_where_it_was() {
    let before = here();
    let machine = Arc::new(Machine::new());
    reserve(&machine, false).unwrap();
    assert_eq!(here(), before);
}

#[test]
fn plain_memory_is_asked_for_near_the_device_before_the_first_page_is_touched() {
    for in_background in [false, true] {
        let machine = Arc::new(Machine::with(|it| it.huge = 0));
        let stats = reserve(&machine, in_background).unwrap();
        let log = machine.log();
        let Asked::Prefer { len, node, taken, .. } = log[1] else { panic!("{log:?}") };
        assert_eq!((len, node, taken), (16 << 20, 1, 0));
        assert_eq!(log[2..], [Asked::Nodes { pages: 1000 }], "nothing is left to the kernel");
        assert_eq!((stats.node, stats.pinned), (Some(1), Bytes::mib(16)));
    }
}

#[test]
fn a_control_group_without_huge_pages_costs_a_try_and_plain_memory_does() {
    let machine = Arc::new(Machine::with(|it| it.refuse_from = Some(0)));
    let stats = reserve(&machine, false).unwrap();
    assert_eq!((stats.pinned, machine.populates().len()), (Bytes::mib(16), 1));
    let preferred = machine.log().into_iter().filter_map(|asked| match asked {
        Asked::Prefer { node, taken, .. } => Some((node, taken)),
        _ => None,
    });
    assert_eq!(preferred.collect::<Vec<_>>(), [(1, 0), (1, 0)], "the one that goes, and the other");
}

#[test]
fn huge_pages_that_end_half_way_are_an_error_with_its_cause_and_nothing_stays() {
    for in_background in [false, true] {
        let machine = Arc::new(Machine::with(|it| it.refuse_from = Some(3)));
        let error = reserve(&machine, in_background).unwrap_err();
        assert_eq!(error.kind(), Kind::OutOfMemory, "{error}");
        assert!(error.to_string().contains("no more reserved huge pages"), "{error}");
        assert!(machine.registered.lock().unwrap().is_empty());
    }
}

#[test]
fn pages_that_came_from_the_other_node_are_counted_and_a_silent_kernel_is_believed() {
    let machine = Arc::new(Machine::with(|it| it.other_node = Some(0)));
    let counts = reserve(&machine, false).unwrap().counts;
    assert_eq!((counts.pages_asked, counts.pages_near), (1000, 500));
    let machine = Arc::new(Machine::with(|it| it.other_node = Some(-libc::ENOENT)));
    let counts = reserve(&machine, false).unwrap().counts;
    assert_eq!((counts.pages_asked, counts.pages_near), (500, 500), "what it does not know");
    let machine = Arc::new(Machine::with(|it| it.is_silent = true));
    let counts = reserve(&machine, false).unwrap().counts;
    assert_eq!((counts.pages_asked, counts.pages_near), (0, 0));
}
