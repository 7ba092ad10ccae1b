//! How much host memory may be page-locked on this machine, in this container, by this process.
//!
//! What it is not: it reserves nothing. Page-locked memory cannot be reclaimed, so a budget that is
//! too large ends in a killed process, not in an error; hence the care.
//!
//! Invariant: what cannot be read limits nothing; what can be read (`unit/spare.rs`) is never
//! exceeded.
//!
//! ```text
//!   Auto       (min(cgroup limit - usage, MemAvailable) - margin) / ranks on this machine
//!   Bytes(n)    min(cgroup limit - usage, n)
//! ```
//!
//! Only [`crate::pinned`] uses it.

use super::class::GRAIN;
use crate::error::{Error, Kind, Misuse, Result};
use crate::unit::{Bytes, Spare};
use std::fs;
use std::path::Path;

/// The most bytes a pool may keep page-locked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Budget {
    /// What the machine and the container have to spare, shared by the ranks of the machine.
    #[default]
    Auto,
    /// This many, at least 4 KiB, which is the smallest block; less where the container's limit
    /// leaves less.
    Bytes(Bytes),
}

/// What the machine can spare, as far as that bounds a pool.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    /// `None`: what is asked for takes no memory, so none bounds it.
    spare: Option<Spare>,
}

impl Machine {
    pub(super) fn new(root: &Path) -> Machine {
        Machine { spare: Some(Spare::new(root)) }
    }

    /// For pinners that need no memory.
    pub(super) fn boundless() -> Machine {
        Machine { spare: None }
    }

    /// The budget in bytes.
    ///
    /// # Errors
    /// `Usage(BadValue)` for an explicit budget under the smallest block, `OutOfMemory` where
    /// nothing is to spare.
    pub(super) fn budget(&self, budget: Budget, margin: Bytes, ranks: u32) -> Result<Bytes> {
        let bytes = match budget {
            Budget::Bytes(Bytes::ZERO) => {
                return Err(Error::usage(Misuse::BadValue, "open pool").detail("a budget of zero"));
            }
            Budget::Bytes(asked) if asked.get() < GRAIN => {
                return Err(Error::usage(Misuse::BadValue, "open pool")
                    .bytes(asked)
                    .detail("a budget under 4 KiB, which is the smallest block"));
            }
            Budget::Bytes(asked) => asked.get().min(self.cgroup_left().unwrap_or(u64::MAX)),
            Budget::Auto => {
                let left = self.left().ok_or_else(|| {
                    Error::usage(Misuse::BadValue, "open pool")
                        .detail("this system does not say what memory is free: state a budget")
                })?;
                (left - margin.get().min(left / 4)) / u64::from(ranks.max(1))
            }
        };
        if bytes == 0 {
            return Err(Error::new(Kind::OutOfMemory, "open pool")
                .detail("neither the container nor the machine has host memory to spare"));
        }
        Ok(Bytes(bytes))
    }

    /// What the machine and the container can still give; `None` where neither says.
    pub(super) fn left(&self) -> Option<u64> {
        self.spare.as_ref()?.left()
    }

    fn cgroup_left(&self) -> Option<u64> {
        self.spare.as_ref()?.cgroup_left()
    }

    /// Bytes of the huge pages that the machine's owner set aside and nobody uses.
    pub(super) fn reserved_huge(&self) -> u64 {
        let free = "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
        let root = self.spare.as_ref().map(Spare::root);
        let free = root.and_then(|root| fs::read_to_string(root.join(free)).ok());
        free.and_then(|text| text.trim().parse().ok()).map_or(0, |pages: u64| pages << 21)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    const MIB: u64 = 1 << 20;

    /// A directory that stands for `/`, and goes with the test.
    struct Root(PathBuf);

    impl Root {
        fn new(files: &[(&str, &str)]) -> Root {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let nth = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("lightering-budget-{}-{nth}", std::process::id());
            let root = Root(std::env::temp_dir().join(name));
            for (path, text) in files {
                let path = root.0.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            root
        }

        fn budget(&self, budget: Budget, ranks: u32) -> u64 {
            Machine::new(&self.0).budget(budget, Bytes::mib(1), ranks).unwrap().get()
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 1 kB\nMemAvailable:  102400 kB\n");

    #[test]
    fn ranks_of_one_machine_do_not_take_its_memory_twice() {
        let root = Root::new(&[MEMINFO]);
        assert_eq!(root.budget(Budget::Auto, 1), 99 * MIB);
        assert_eq!(root.budget(Budget::Auto, 3), 33 * MIB);
        // What is stated is stated for this process.
        assert_eq!(root.budget(Budget::Bytes(Bytes::mib(700)), 3), 700 * MIB);
    }

    #[test]
    fn h75_the_tightest_group_on_the_way_up_limits_both_kinds_of_budget() {
        let root = Root::new(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/jobs/one\n"),
            ("sys/fs/cgroup/jobs/one/memory.max", "max\n"),
            ("sys/fs/cgroup/jobs/one/memory.current", "1048576\n"),
            ("sys/fs/cgroup/jobs/memory.max", "62914560\n"),
            ("sys/fs/cgroup/jobs/memory.current", "31457280\n"),
            ("sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 10485760\nfile 5\n"),
        ]);
        // 60 MiB, of which 30 are used, of which 10 are cache that can be dropped.
        assert_eq!(root.budget(Budget::Auto, 1), 39 * MIB);
        assert_eq!(root.budget(Budget::Bytes(Bytes::mib(700)), 1), 40 * MIB);
        assert_eq!(root.budget(Budget::Bytes(Bytes::mib(7)), 1), 7 * MIB);
    }

    #[test]
    fn h75_a_container_that_sees_its_group_as_the_root_is_limited_too() {
        let root = Root::new(&[
            MEMINFO,
            ("proc/self/cgroup", "3:cpu:/\n4:memory:/docker/0123\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "52428800\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "10485760\n"),
        ]);
        assert_eq!(root.budget(Budget::Bytes(Bytes::MAX), 1), 40 * MIB);
    }

    #[test]
    fn a_limit_near_two_to_the_sixty_third_is_none() {
        let root = Root::new(&[
            MEMINFO,
            ("proc/self/cgroup", "4:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "10485760\n"),
        ]);
        assert_eq!(root.budget(Budget::Bytes(Bytes::gib(5)), 1), Bytes::gib(5).get());
        assert_eq!(Machine::new(&root.0).left(), Some(100 * MIB));
    }

    #[test]
    fn a_container_with_nothing_left_gets_an_error_and_not_a_pool() {
        let root = Root::new(&[
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "1048576\n"),
            ("sys/fs/cgroup/memory.current", "2097152\n"),
        ]);
        for budget in [Budget::Auto, Budget::Bytes(Bytes::mib(1))] {
            let error = Machine::new(&root.0).budget(budget, Bytes::ZERO, 1).unwrap_err();
            assert_eq!(error.kind(), Kind::OutOfMemory);
        }
    }
}
