//! Guards against figures that are not what was measured: simulated times among them, a pair picked
//! because it is good, a threshold softened on the way, a line lost unsaid.
//!
//! The runs here are made up; `tools/figures.py` makes figures of them, and the readers of
//! `tests/results.rs` judge those. Without Python each test says aloud that it was not tried.

#![allow(clippy::unwrap_used)]

#[path = "results/figure.rs"]
mod figure;
#[path = "results/page.rs"]
mod page;

use figure::{Asked, Figure, current, read_figures, read_required};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

const MACHINE: &str = "commit 0123456789abcdef0123456789abcdef01234567\n\
    date 2026-12-01T10:00:00Z\ndevice cuda:0\nLinux\nNVIDIA H200, 580.159.04, 143771 MiB\n";

/// A folder as tools/measure.sh leaves it; it goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(machine: &str, runs: &[String]) -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("lightering-figures-{}-{nth}", std::process::id());
        let folder = Folder(std::env::temp_dir().join(name));
        fs::create_dir_all(&folder.0).unwrap();
        for (name, text) in
            [("machine.txt", machine), ("runs.jsonl", &runs.join("\n")), ("all.log", "said\n")]
        {
            fs::write(folder.0.join(name), text).unwrap();
        }
        folder
    }

    /// What the tool printed, and what it complained of where it failed; `None` without Python.
    fn figures(&self, more: &[&str]) -> Option<Result<String, String>> {
        let tool = root().join("tools/figures.py");
        let Ok(output) = Command::new("python3").arg(tool).arg(&self.0).args(more).output() else {
            let mut stderr = std::io::stderr();
            writeln!(stderr, "figures: no python3 on this machine: not tried").unwrap();
            return None;
        };
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Some(match output.status.success() {
            true => Ok(text(output.stdout)),
            false => Err(text(output.stderr)),
        })
    }

    fn read(&self, name: &str) -> Vec<Figure> {
        read_figures(name, &fs::read_to_string(self.0.join(name)).unwrap()).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn line(part: &str, kind: &str, run: u32, said: &str) -> String {
    let head = format!(r#""part": "{part}", "kind": "{kind}", "run": {run}"#);
    format!(r#"{{{head}, "command": "{part} --run {run}", "said": {{{said}}}}}"#)
}

/// A mode's line; `held` GB are on the device after a flush, of 25 that the inputs have.
fn mode(part: &str, run: u32, name: &str, step: f64, held: f64) -> String {
    let bytes = held * 1e9;
    let simulated = part == "predict";
    let said = format!(
        r#""mode": "{name}", "simulated": {simulated}, "layers": 25, "keep_last": 1,
        "step_seconds": {step}, "grad_checksum": "00ff", "boundary_bytes": 25e9,
        "after_flush_device_bytes": {bytes}"#
    );
    line(part, if simulated { "train" } else { "" }, run, &said.replace('\n', " "))
}

fn overlap(part: &str, kind: &str, run: u32, both: f64, raw: f64) -> String {
    let ratio = both / raw;
    let said = format!(r#""both_seconds": {both}, "both_raw_seconds": {raw}, "ratio": {ratio}"#);
    line(part, kind, run, &format!(r#"{said}, "runs": 15"#))
}

/// Everything that a whole session leaves.
fn session() -> Vec<String> {
    let mut runs = Vec::new();
    let (checkpoint, raw, offload) = ("checkpoint", "checkpoint+raw", "checkpoint+offload");
    // Per run: what is compared in turn, there and back.
    for (run, steps) in [(1, [2.0, 2.01, 2.012, 2.02, 2.0, 1.9]), (2, [2.0; 6])] {
        let modes = [checkpoint, raw, offload, offload, raw, checkpoint];
        for (name, step) in modes.into_iter().zip(steps) {
            runs.push(mode("train", run, name, step, if name == offload { 6.0 } else { 30.0 }));
        }
    }
    for (name, step) in [(checkpoint, 1.0), ("checkpoint+grow", 1.25), (offload, 1.02)] {
        let said = format!(
            r#""mode": "{name}", "first_step_seconds": {step}, "first_moved_bytes": 2e9,
            "moved_bytes": 2e9"#
        );
        runs.push(line("first", "", 20, &said.replace('\n', " ")));
    }
    runs.push(overlap("overlap", "gemm", 3, 0.1, 0.1));
    runs.push(overlap("overlap", "gemm-owned", 3, 0.1, 0.1));
    runs.push(overlap("overlap", "hbm-owned", 3, 0.1, 0.1));
    runs.push(overlap("overlap", "hbm", 4, 0.2, 0.2));
    runs.push(overlap("overlap", "hbm", 5, 0.202, 0.2));
    runs.push(mode("predict", 6, checkpoint, 1.0, 30.0));
    runs.push(mode("predict", 6, offload, 1.9, 6.0));
    runs.push(overlap("predict", "gemm", 7, 0.099, 0.1));
    runs.push(overlap("predict", "hbm", 8, 0.19, 0.2));
    for figure in demanded().figures {
        let just = format!("[{:?}, 1.0]", figure.threshold);
        let (part, pairs) = match figure.name.split('.').next().unwrap() {
            "link" | "latency" | "address" | "prefetch" | "rows" | "two" | "scale" => (
                "link",
                ["[1.0, 1.0]", "[2.0, 2.0]", "[30.0, 30.0]"].map(|pair| [pair; 5]).concat(),
            ),
            "seam" => ("seam", vec![just.as_str(); 15]),
            part @ ("pinned" | "torch") => (part, vec![just.as_str()]),
            _ => continue,
        };
        let (name, pairs) = (&figure.name, format!("[{}]", pairs.join(", ")));
        let said = format!(r#""figure": "{name}", "simulated": false, "pairs": {pairs}"#);
        // A measure of the link is a run of its own.
        let kind = if part == "link" { "rows" } else { "" };
        runs.push(line(part, kind, 30, &said));
    }
    // Beside the pool's figures above: 8 GB/s of ours, and one nanosecond.
    for (gib, rate) in [(8u64, 8.0), (32, 4.0)] {
        let said = format!(r#""what": "torch", "bytes": {}, "gb_per_second": {rate}"#, gib << 30);
        runs.push(line("allocator", "", 31, &said));
    }
    runs.push(line("allocator", "", 31, r#""what": "torch-block", "nanoseconds": 4.0"#));
    // What torch's figures are made of.
    runs.push(line("torch", "inputs-8b", 30, r#""mode": "ours", "step_seconds": 2.0"#));
    // Nothing is asked of it.
    runs.push(line("link", "", 30, r#""figure": "trunks.out-4mib", "pairs": [[1.0, 2.0]]"#));
    runs.push(line("conformance", "", 9, r#""passed": 39, "failed": 0"#));
    for (run, tool) in (10..).zip(["memcheck", "racecheck", "initcheck", "synccheck"]) {
        runs.push(line("sanitizer", tool, run, r#""clean": true"#));
        runs.push(line("sanitizer", tool, run, r#""clean": true"#));
    }
    runs
}

fn demanded() -> Asked {
    let text = fs::read_to_string(root().join("benches/results/required.json")).unwrap();
    let mut asked = read_required("required.json", &text).unwrap();
    let tables = asked.figures.iter().map(|figure| figure.name.split('.').next().unwrap());
    asked.demanded = tables.map(String::from).collect();
    // Those are entered from the tests' own words, which the tool does not read.
    asked.demanded.retain(|table| table != "proof");
    asked.figures.retain(|figure| !figure.name.starts_with("proof."));
    asked
}

#[test]
fn a_whole_session_gives_every_figure_that_is_asked_for() {
    let folder = Folder::new(MACHINE, &session());
    let Some(said) = folder.figures(&[]) else { return };
    let said = said.unwrap();
    assert!(!said.contains("SHORT") && !said.contains("not measured"), "{said}");
    let figures = current(&folder.read("figures.json")).unwrap();
    let page = fs::read_to_string(root().join("docs/performance.md")).unwrap();
    let empty = "## Shortfalls\n";
    let problems = page::judge(&figures, &demanded(), empty);
    assert!(problems.is_empty(), "{problems:?}");
    page::regenerate(&page, &figures).unwrap();
    let figure = |name: &str| &figures[name];
    let machine = figure("predict.overlap");
    assert_eq!((machine.date.as_str(), machine.hardware.as_str()), ("2026-12-01", "NVIDIA H200"));
    assert_eq!((machine.driver.as_str(), machine.ratio), ("580.159.04", 0.9405941));
    assert_eq!(machine.command, "predict --run 8");
    assert_eq!((figure("train.freed_share").value, figure("train.freed_share").ratio), (24.0, 1.0));
    assert_eq!(figure("train.bit_equal").value, 12.0);
    assert_eq!((figure("predict.train_step").value, figure("predict.train_step").reference), {
        (1.9, 2.012)
    });
    // 2 GB at 8 GB/s on top of one second.
    assert_eq!(figure("first.grown_step").reference, 1.25);
    let beside = |name: &str| (figure(name).value, figure(name).reference);
    assert_eq!(beside("torch.pinned.rate-32gib"), (8.0, 4.0));
    assert_eq!(beside("torch.pinned.block"), (1.0, 4.0));
    assert_eq!(figure("torch.pinned.block").command, "allocator --run 31");
    assert_eq!(figure("sanitizer.memcheck").value, 2.0);
    assert_eq!((figure("link.both").value, figure("link.both").reference), (2.0, 2.0));
}

#[test]
fn the_middle_pair_counts_and_of_two_the_worse() {
    let folder = Folder::new(MACHINE, &session());
    let Some(said) = folder.figures(&[]) else { return };
    said.unwrap();
    let figures = current(&folder.read("figures.json")).unwrap();
    // Pairs 2.012 / 2.01, 2.02 / 2.0, 2 / 2, 2 / 2: the middle two are 1 and 1.000995.
    let raw = &figures["train.step_over_raw"];
    assert_eq!((raw.value, raw.reference, raw.command.as_str()), (2.012, 2.01, "train --run 1"));
    // 2.012 / 2.0, 2.02 / 1.9, 1, 1.
    let checkpoint = &figures["train.step_over_checkpoint"];
    assert_eq!((checkpoint.value, checkpoint.reference), (2.012, 2.0));
    let hbm = &figures["overlap.hbm_over_raw"];
    assert_eq!((hbm.ratio, hbm.threshold), (1.01, 1.01));
}

#[test]
fn the_longest_of_all_counts_and_a_figure_says_of_how_many_pairs_it_is_one() {
    let mut runs = session();
    runs.retain(|line| !line.contains("latency.longest"));
    // Two runs, the first as they were before a run said only its longest.
    for (run, pairs) in [(40, "[[21.0, 1000], [1100.0, 1000], [9.0, 1000]]"), (41, "[[8.0, 1000]]")]
    {
        let said = format!(r#""figure": "latency.longest", "simulated": false, "pairs": {pairs}"#);
        runs.push(line("link", "latency", run, &said));
    }
    runs.push(overlap("overlap", "gemm", 42, 0.1, 0.1).replace(r#""runs": 15"#, r#""runs": 21"#));
    // As it said it before it told how many runs.
    runs.push(overlap("overlap", "hbm-owned", 43, 0.1, 0.1).replace(r#", "runs": 15"#, ""));
    let folder = Folder::new(MACHINE, &runs);
    let Some(said) = folder.figures(&[]) else { return };
    said.unwrap();
    let figures = current(&folder.read("figures.json")).unwrap();
    let longest = &figures["latency.longest"];
    assert_eq!((longest.value, longest.reference, longest.pairs), (1100.0, 1000.0, Some(4)));
    assert_eq!(longest.command, "link --run 40");
    for (name, pairs) in [
        ("link.both", Some(15)),
        ("train.step_over_raw", Some(4)),
        ("pinned.block", Some(1)),
        ("overlap.gemm_over_raw", Some(15)),
        ("overlap.hbm-owned_over_raw", None),
    ] {
        assert_eq!(figures[name].pairs, pairs, "{name}");
    }
    let few = |line: String| match line.contains("link.both") {
        true => line.replace(", [30.0, 30.0]", ""),
        false => line,
    };
    let folder = Folder::new(MACHINE, &session().into_iter().map(few).collect::<Vec<_>>());
    folder.figures(&[]).unwrap().unwrap();
    let text = fs::read_to_string(folder.0.join("figures.json")).unwrap();
    let problems = read_figures("few", &text).unwrap_err();
    assert!(problems.len() == 1 && problems[0].contains("link.both"), "{problems:?}");
}

#[test]
fn a_shortfall_and_a_gap_are_said_and_written_as_they_are() {
    let mut runs = session();
    runs.retain(|line| !line.contains("racecheck"));
    let worse = mode("train", 20, "checkpoint+offload", 2.5, 29.0).replace("00ff", "00fe");
    runs.extend([worse.clone(), mode("train", 20, "checkpoint+raw", 2.0, 30.0)]);
    runs.extend([line("sanitizer", "memcheck", 21, r#""clean": false"#)]);
    // Out of memory: a line without an outcome, which is no pair of anything.
    runs.push(line("train", "", 22, r#""mode": "checkpoint+offload", "step_seconds": null"#));
    runs.push(mode("train", 22, "checkpoint+raw", 2.0, 30.0));
    let folder = Folder::new(MACHINE, &runs);
    let Some(said) = folder.figures(&[]) else { return };
    let said = said.unwrap();
    let row = |name: &str| said.lines().find(|line| line.starts_with(name)).unwrap();
    assert!(row("sanitizer.racecheck").contains("not measured"), "{said}");
    assert!(row("train.bit_equal").contains("SHORT") && row("sanitizer.memcheck").contains("2 p"));
    let figures = current(&folder.read("figures.json")).unwrap();
    assert_eq!(figures["train.bit_equal"].value, 14.0);
    assert_eq!(figures["train.bit_equal"].reference, 15.0);
    assert!(!figures.contains_key("sanitizer.racecheck"));
    let problems = page::judge(&figures, &demanded(), "## Shortfalls\n");
    assert!(problems.iter().any(|problem| problem.contains("racecheck: required, but never")));
    assert!(problems.iter().any(|problem| problem.contains("train.bit_equal: ratio")));
}

#[test]
fn what_is_simulated_or_of_no_commit_is_refused_in_one_line() {
    let simulated = vec![mode("train", 1, "checkpoint", 1.0, 1.0).replace("false", "true")];
    for (machine, runs, more, says) in [
        (MACHINE.replace("cuda:0", "sim"), session(), &[][..], "sim are simulated"),
        (MACHINE.to_string(), simulated, &[], "line 1: simulated times"),
        (MACHINE.replace("4567\n", "4567-changed\n"), session(), &[], "is no commit"),
        (MACHINE.replace("NVIDIA H200, ", ""), session(), &[], "no line of nvidia-smi's"),
        (MACHINE.replace("date", "day"), session(), &[], "no date"),
        (MACHINE.to_string(), vec![String::from("{}")], &[], "line 1: not what a run leaves"),
        (MACHINE.to_string(), vec![line("a", "", 1, ""), String::from("[")], &[], "line 2"),
        (MACHINE.to_string(), session(), &["--rehearsal", "--into", "/tmp"], "no result"),
    ] {
        let folder = Folder::new(&machine, &runs);
        let Some(said) = folder.figures(more) else { return };
        let error = said.unwrap_err();
        assert!(error.contains(says) && error.lines().count() == 1, "{says}: {error}");
        assert!(!folder.0.join("figures.json").exists());
    }
    let rehearsed = Folder::new(&MACHINE.replace("cuda:0", "sim"), &session());
    let Some(said) = rehearsed.figures(&["--rehearsal"]) else { return };
    said.unwrap();
    let text = fs::read_to_string(rehearsed.0.join("figures.json")).unwrap();
    let problems = read_figures("rehearsed", &text).unwrap_err();
    assert!(problems.iter().all(|problem| problem.contains("simulated")), "{problems:?}");
}

#[test]
fn a_second_session_of_a_day_replaces_what_it_measured_and_no_more() {
    let folder = Folder::new(MACHINE, &session());
    let into = ["--into", folder.0.to_str().unwrap()];
    let Some(said) = folder.figures(&into) else { return };
    said.unwrap();
    let first = folder.read("2026-12-01-h200.json");
    assert_eq!(first.len(), demanded().figures.len());
    let again = overlap("overlap", "gemm", 1, 0.5, 0.5);
    fs::write(folder.0.join("runs.jsonl"), again).unwrap();
    folder.figures(&into).unwrap().unwrap();
    let both = current(&folder.read("2026-12-01-h200.json")).unwrap();
    assert_eq!((both.len(), both["overlap.gemm_over_raw"].value), (first.len(), 0.5));
    assert_eq!(both["overlap.hbm_over_raw"].value, 0.202);
    let log = fs::read_to_string(folder.0.join("2026-12-01-h200.log")).unwrap();
    assert_eq!(log.matches("said").count(), 2, "the logs of both are kept");
}

/// Runs the tool that draws; `None` without Python.
fn draw(folder: &Path, more: &[&str]) -> Option<(bool, String)> {
    let tool = root().join("tools/picture.py");
    let into = folder.join("bandwidth.svg");
    let mut command = Command::new("python3");
    command.arg(tool).arg("--results").arg(folder).arg("--into").arg(into).args(more);
    let Ok(output) = command.output() else {
        let mut stderr = std::io::stderr();
        writeln!(stderr, "figures: no python3 on this machine: not tried").unwrap();
        return None;
    };
    let text = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8(text).unwrap()))
}

#[test]
fn a_picture_shows_every_size_measured_and_is_made_anew_when_figures_change() {
    let folder = Folder::new(MACHINE, &session());
    fs::remove_file(folder.0.join("runs.jsonl")).unwrap();
    let Some((_, said)) = draw(&folder.0, &[]) else { return };
    assert!(said.contains("nothing to draw"), "{said}");
    let figure = |name: &str, value: f64| {
        format!(
            r#"{{"name": "{name}", "value": {value}, "reference": 54.0, "date": "2026-12-01",
            "hardware": "NVIDIA H200", "driver": "580"}}"#
        )
    };
    let write = |value: f64| {
        let all = [
            figure("link.out-1mib", 47.0),
            figure("link.out-16mib", value),
            figure("link.out-1gib", 54.0),
            figure("link.in-16mib", 53.0),
            figure("link.both", 92.0),
        ];
        fs::write(folder.0.join("2026-12-01-h200.json"), format!("[{}]", all.join(", "))).unwrap();
    };
    write(53.0);
    assert!(draw(&folder.0, &[]).unwrap().0);
    let picture = fs::read_to_string(folder.0.join("bandwidth.svg")).unwrap();
    assert_eq!(picture.matches("<polyline").count(), 4, "two ways, ours and raw");
    for label in ["1 MiB", "16 MiB", "1 GiB", "out, raw", "in, lightering", "NVIDIA H200"] {
        assert!(picture.contains(label), "{label}: {picture}");
    }
    assert!(draw(&folder.0, &["--check"]).unwrap().0);
    write(51.0);
    let (same, said) = draw(&folder.0, &["--check"]).unwrap();
    assert!(!same && said.contains("tools/picture.py"), "{said}");
}

#[test]
fn the_picture_in_the_docs_says_what_the_files_say() {
    let tool = root().join("tools/picture.py");
    let Ok(output) = Command::new("python3").arg(tool).arg("--check").output() else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
