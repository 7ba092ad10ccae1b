//! Which part of a machine's memory lies near a device, and which processors lie there.
//!
//! What it is not: it places nothing. A copy from far memory is up to three times slower, so the
//! arena asks for near pages, touches them from near processors, and asks the kernel afterwards.
//!
//! Invariant: what cannot be read is no reason for anything: then pages come from wherever.
//!
//! ```text
//!   0000:ab:00.0 -> sys/bus/pci/devices/0000:ab:00.0/numa_node -> 1
//!   sys/devices/system/node/online -> 0-1 (of one node all is near)   node1/cpulist -> 32-63
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use std::fs;
use std::path::Path;

/// Which node's memory a pool takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numa {
    /// That of the node to which the pinner's device is connected, where the machine says so.
    #[default]
    Near,
    /// Whatever the system gives.
    Any,
    /// That of this node.
    Node(u32),
}

/// A node of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) number: u32,
    pub(super) cpus: Vec<usize>,
}

impl Node {
    /// The node that is asked for, where it makes a difference: on a machine with one node none.
    pub(super) fn find(numa: Numa, root: &Path, pci: Option<&str>) -> Option<Node> {
        let read = |path: &str| fs::read_to_string(root.join(path)).ok();
        let nodes = list(&read("sys/devices/system/node/online")?)?;
        let number = match numa {
            Numa::Any => return None,
            Numa::Node(number) => number,
            Numa::Near => {
                let name = pci?.to_ascii_lowercase();
                // -1 where the firmware does not say.
                read(&format!("sys/bus/pci/devices/{name}/numa_node"))?.trim().parse().ok()?
            }
        };
        if nodes.len() < 2 {
            return None;
        }
        let cpus = read(&format!("sys/devices/system/node/node{number}/cpulist"));
        Some(Node { number, cpus: cpus.and_then(|text| list(&text)).unwrap_or_default() })
    }
}

/// Reads a list such as `0-3,8,10-11`.
fn list(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to): (usize, usize) = (from.parse().ok()?, to.parse().ok()?);
        // Longer than any machine's: not such a list.
        if to < from || to - from > 1 << 16 {
            return None;
        }
        all.extend(from..=to);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_processors_is_read_and_nonsense_is_not() {
        assert_eq!(list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(list("\n"), Some(vec![]));
        for text in ["a", "3-1", "1-", "0-99999999", "-1"] {
            assert_eq!(list(text), None, "{text}");
        }
    }

    #[test]
    fn a_device_is_near_the_node_that_its_slot_names() {
        let root = std::env::temp_dir().join(format!("lightering-numa-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let find = |numa, pci| Node::find(numa, &root, pci);
        assert_eq!(find(Numa::Near, Some("0000:AB:00.0")), None, "a machine that says nothing");
        write("sys/devices/system/node/online", "0-1\n");
        write("sys/devices/system/node/node1/cpulist", "2-3\n");
        write("sys/bus/pci/devices/0000:ab:00.0/numa_node", "1\n");
        write("sys/bus/pci/devices/0000:cd:00.0/numa_node", "-1\n");
        let one = Some(Node { number: 1, cpus: vec![2, 3] });
        assert_eq!(find(Numa::Near, Some("0000:AB:00.0")), one);
        assert_eq!(find(Numa::Node(1), None), one);
        for (numa, pci) in [
            (Numa::Near, Some("0000:cd:00.0")),
            (Numa::Near, Some("0000:ef:00.0")),
            (Numa::Near, None),
            (Numa::Any, Some("0000:ab:00.0")),
        ] {
            assert_eq!(find(numa, pci), None, "{numa:?} {pci:?}");
        }
        write("sys/devices/system/node/online", "0\n");
        let alone = find(Numa::Near, Some("0000:ab:00.0"));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(alone, None, "on one node there is nothing to choose");
    }
}
