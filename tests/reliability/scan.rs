//! The tests whose names begin with the number of a hazard.
//!
//! What it is not: a parser. It knows an attribute, a name, and a folder.
//!
//! Invariant: a function counts only below `#[test]`.
//!
//! ```text
//!   #[test]  fn h41_h42_a_forked_child(..)  -->  Story { [H41, H42], file::name, device }
//! ```
//!
//! The test `reliability` uses it.

use std::path::{Path, PathBuf};

pub(crate) struct Story {
    /// "H41", "M31".
    pub(crate) ids: Vec<String>,
    /// File and name.
    pub(crate) full: String,
    /// What it is for, by its file's path.
    pub(crate) device: &'static str,
}

/// What the tests of a file or folder are for, by the path alone; the first that fits. Several are
/// parted by a comma.
const DEVICES: &[(&str, &str)] = &[
    ("tests/cuda_fake/", "stand-in driver"),
    ("tests/cuda_device/", "CUDA"),
    ("tests/cuda_hazards/", "CUDA"),
    ("tests/layers.rs", "sources"),
    ("tests/reliability", "sources"),
    ("tests/hazards/pool.rs", "host, simulated"),
    ("tests/fuzz_replay.rs", "host, simulated"),
    ("tests/pinned", "host"),
    ("src/pinned/", "host"),
];

/// Every such test of the crate, in the order of files and lines.
pub(crate) fn stories(root: &Path) -> Vec<Story> {
    let mut files: Vec<PathBuf> = Vec::new();
    let mut folders = vec![root.join("src"), root.join("tests")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => folders.push(path),
                Some(end) if end == "rs" => files.push(path),
                _ => {}
            }
        }
    }
    files.sort();
    let read = |path: &PathBuf| {
        let name = path.strip_prefix(root).unwrap().to_string_lossy().replace('\\', "/");
        of_text(&name, &std::fs::read_to_string(path).unwrap())
    };
    let stories: Vec<Story> = files.iter().flat_map(read).collect();
    assert!(stories.len() > 80, "only {} found: the search itself is broken", stories.len());
    stories
}

/// Those of one file.
pub(crate) fn of_text(path: &str, text: &str) -> Vec<Story> {
    let mut is_test = false;
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        if line == "#[test]" {
            is_test = true;
        } else if let Some(rest) = line.strip_prefix("fn ") {
            let name = rest.split(['(', '<']).next().unwrap_or_default();
            let ids = ids(name);
            if is_test && !ids.is_empty() {
                found.push(Story { ids, full: format!("{path}::{name}"), device: device(path) });
            }
            is_test = false;
        }
    }
    found
}

fn device(path: &str) -> &'static str {
    DEVICES.iter().find(|(start, _)| path.starts_with(start)).map_or("simulated", |(_, on)| on)
}

/// The numbers at the beginning of a name.
fn ids(name: &str) -> Vec<String> {
    let is_id = |word: &&str| {
        let digits = word.strip_prefix(['h', 'm']).unwrap_or_default();
        digits.len() >= 2 && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    name.split('_').take_while(is_id).map(str::to_ascii_uppercase).collect()
}
