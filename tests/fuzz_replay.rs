//! Guards against a fault that a fuzzer found once and that comes back: every input ever kept in
//! `fuzz/corpus/` runs here, on stable and in seconds, and some thousand made-up ones beside them.
//!
//! The bodies are those of the fuzz targets; `fuzz/README.md` tells how to add one.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "programs/faulty.rs"]
mod faulty;
#[path = "fuzz_bodies/input.rs"]
mod input;
#[path = "programs/machine.rs"]
mod machine;
#[path = "pinned_programs/model.rs"]
mod model;
#[path = "fuzz_bodies/pinned.rs"]
mod pinned;
mod pinned_support;
#[path = "fuzz_bodies/storage.rs"]
mod storage;
mod support;
#[path = "fuzz_bodies/trace.rs"]
mod trace;
#[path = "fuzz_bodies/unit.rs"]
mod unit;

use std::path::{Path, PathBuf};

type Body = fn(&[u8]);

const TARGETS: &[(&str, Body)] = &[
    ("pinned", pinned::run),
    ("storage", storage::run),
    ("trace", trace::run),
    ("unit", unit::run),
];
const MADE_UP_COUNT: u64 = 3000;

/// The fuzz package; the published crate comes without it.
fn fuzz_folder() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    folder.is_dir().then_some(folder)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn what_a_fuzzer_found_once_stays_mended() {
    let Some(folder) = fuzz_folder() else {
        return println!("no fuzz/ here: only made-up inputs are run");
    };
    for (name, body) in TARGETS {
        let inputs = files(&folder.join("corpus").join(name));
        assert!(!inputs.is_empty(), "{name} has no corpus");
        for path in inputs {
            println!("{}", path.display());
            body(&std::fs::read(&path).unwrap());
        }
    }
}

#[test]
fn h111_made_up_inputs_run_as_kept_ones_do() {
    for (name, body) in TARGETS {
        for seed in 1..=MADE_UP_COUNT {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 32) as u8
            };
            let input: Vec<u8> = (0..seed % 257).map(|_| next()).collect();
            println!("{name}, made-up input {seed}");
            body(&input);
        }
    }
}

#[test]
fn no_target_is_left_out_of_the_replay() {
    let Some(folder) = fuzz_folder() else {
        return println!("no fuzz/ here: its targets are not compared");
    };
    let stems = |folder: PathBuf| -> Vec<String> {
        let stem = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
        files(&folder).iter().map(stem).collect()
    };
    let names: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
    assert_eq!(stems(folder.join("fuzz_targets")), names);
    assert_eq!(stems(folder.join("corpus")), names);
}
