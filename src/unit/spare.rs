//! What host memory this machine, and this container, can still give.
//!
//! What it is not: a promise. Others may take it the moment after.
//!
//! Invariant: what cannot be read limits nothing; of what can be read the least counts.
//!
//! ```text
//!   left   min(MemAvailable, limit - usage of each group that this process is in)
//!   /proc/self/cgroup:  4:memory:/a/b (v1)   0::/a/b (v2)   each of /a/b, /a, / may set a limit
//! ```
//!
//! The pool of pinned memory and the simulated device use it.

use std::fs;
use std::path::{Path, PathBuf};

/// Files that tell the limits, under a root that tests replace.
#[derive(Clone, Debug)]
pub(crate) struct Spare {
    root: PathBuf,
}

/// Limits of 2^60 bytes and more mean "none" (v1 writes a number near 2^63).
const UNLIMITED: u64 = 1 << 60;

impl Spare {
    pub(crate) fn new(root: &Path) -> Spare {
        Spare { root: root.to_path_buf() }
    }

    /// Where the files are looked for.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// What the machine and the container can still give; `None` where neither says.
    pub(crate) fn left(&self) -> Option<u64> {
        self.available().into_iter().chain(self.cgroup_left()).min()
    }

    /// `MemAvailable` in bytes.
    fn available(&self) -> Option<u64> {
        let text = fs::read_to_string(self.root.join("proc/meminfo")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    }

    /// The least that a limit of this process' control groups leaves.
    pub(crate) fn cgroup_left(&self) -> Option<u64> {
        let root = &self.root;
        let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let memberships = text.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            match controllers {
                "" => Some((Files::V2, path)),
                list if list.split(',').any(|name| name == "memory") => Some((Files::V1, path)),
                _ => None,
            }
        });
        memberships.filter_map(|(files, path)| group_left(root, files, path)).min()
    }
}

/// The least that the group or one of its ancestors leaves. A container may see its own group as
/// the root while its path is the host's: directories that are not there are passed over.
fn group_left(root: &Path, files: Files, path: &str) -> Option<u64> {
    let mount = root.join(files.mount());
    let group = mount.join(path.trim_start_matches('/'));
    let groups = group.ancestors().take_while(|dir| dir.starts_with(&mount));
    groups.filter_map(|dir| files.left(dir)).min()
}

/// The two layouts of control groups.
#[derive(Clone, Copy)]
enum Files {
    V1,
    V2,
}

impl Files {
    fn mount(self) -> &'static str {
        match self {
            Files::V1 => "sys/fs/cgroup/memory",
            Files::V2 => "sys/fs/cgroup",
        }
    }

    /// Limit less what is used and cannot be dropped at need, as file cache can.
    fn left(self, dir: &Path) -> Option<u64> {
        let (limit, used, cache) = match self {
            Files::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
            Files::V2 => ("memory.max", "memory.current", "inactive_file "),
        };
        let read = |name| fs::read_to_string(dir.join(name)).ok();
        let limit: u64 = read(limit)?.trim().parse().ok()?;
        if limit >= UNLIMITED {
            return None;
        }
        let used: u64 = read(used).and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        let stat = read("memory.stat").unwrap_or_default();
        let cache = stat.lines().find_map(|line| line.strip_prefix(cache)?.trim().parse().ok());
        Some(limit.saturating_sub(used.saturating_sub(cache.unwrap_or(0))))
    }
}
