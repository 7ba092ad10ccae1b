//! Copies next to compute: each alone, both through the engine, both with raw copies.
//!
//! What it is not: a training step. No kernel reads what is copied, so nothing but the device and
//! the engine's own waits can keep the two apart.
//!
//! Invariant: every figure is a device's time between two events, never the host's.
//!
//! ```text
//!   main (words, device, report) -> rig (streams, engine, runs) -> compute (busy, gemm, hbm)
//! ```
//!
//! Run it with `cargo run --release --example overlap -- --help`.

#[path = "../train/blas/mod.rs"]
mod blas;
mod busy;
mod compute;
#[cfg(test)]
#[path = "../../tests/emulator/mod.rs"]
mod emulator;
mod rig;
#[path = "../common/simulated.rs"]
mod simulated;
#[path = "../common/watch.rs"]
mod watch;

use compute::{Compute, Kind, Place};
use lightering::backend::{Backend, Spec};
use lightering::{Bytes, Error, Result};
use rig::{Figures, Memory, Rig};
use simulated::Simulated;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

const HELP: &str = "\
Copies bytes off the device and back next to compute, with the engine and with raw copies.

Usage: overlap [options]

  --device NAME   auto, sim or cuda:N (default: auto)
  --bytes SIZE    bytes of one storage (default: 16MiB)
  --count N       storages (default: 8)
  --compute KIND  what runs meanwhile, for as long as the copies take: busy (integers, no memory),
                  gemm (matrix products) or hbm (device memory) (default: busy)
  --trunk-bytes SIZE
                  the engine copies in pieces of at most this (default: the engine's own)
  --memory WHOSE  adopted: the engine copies the very device bytes that the raw copies do; owned:
                  bytes that it takes, frees and takes again meanwhile (default: adopted)
  --runs N        runs of each kind, of which the medians count (default: 3)
  --json          one line of JSON on standard output: compute, memory, copy_seconds (raw, alone),
                  compute_seconds (alone), both_seconds (through the engine), both_raw_seconds,
                  ratio: the last but one over the last, run for run; the host's seconds to enqueue
                  the copies: enqueue_seconds, enqueue_raw_seconds; and runs, as asked
  --times-only    with --device sim: no byte moves, so any size costs nothing here
  --model FILE    with --device sim: the device's figures, as the example calibrate prints them
  --check         look for hazards in all that the engine does; the times are worth nothing then
  --help          this text
";

const COUNT_MAX: u64 = 1024;
const RUNS_MAX: u32 = 1000;
/// The most bytes of all storages: they are on the device twice, and in pinned memory twice.
const ALL_MAX: Bytes = Bytes::gib(4);
/// Copies in smaller pieces take longer to enqueue than to run, and a run never ends.
const TRUNK_BYTES_MIN: Bytes = Bytes::kib(64);
/// What the command line says.
struct Wish {
    device: String,
    bytes: Bytes,
    count: u64,
    kind: Kind,
    runs: u32,
    trunk: Option<Bytes>,
    memory: Memory,
    json: bool,
    check: bool,
    times_only: bool,
    model: Option<String>,
}

fn parse(mut words: impl Iterator<Item = String>) -> std::result::Result<Option<Wish>, String> {
    let mut wish = Wish {
        device: String::from("auto"),
        bytes: Bytes::mib(16),
        count: 8,
        kind: Kind::Busy,
        runs: 3,
        trunk: None,
        memory: Memory::Adopted,
        json: false,
        check: false,
        times_only: false,
        model: None,
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word}: needs a value"));
        match word.as_str() {
            "--help" | "-h" => return Ok(None),
            "--json" => wish.json = true,
            "--check" => wish.check = true,
            "--times-only" => wish.times_only = true,
            "--model" => wish.model = Some(value()?),
            "--device" => wish.device = value()?,
            "--bytes" => {
                let text = value()?;
                wish.bytes = text.parse().map_err(|error| format!("--bytes {text}: {error}"))?;
            }
            "--count" => {
                let text = value()?;
                wish.count = text.parse().map_err(|_| format!("--count {text}: not a number"))?;
            }
            "--compute" => {
                let text = value()?;
                wish.kind = text.parse().map_err(|why| format!("--compute {text}: {why}"))?;
            }
            "--trunk-bytes" => {
                let text = value()?;
                let size =
                    text.parse().map_err(|error| format!("--trunk-bytes {text}: {error}"))?;
                wish.trunk = Some(size);
            }
            "--memory" => {
                let text = value()?;
                wish.memory = text.parse().map_err(|why| format!("--memory {text}: {why}"))?;
            }
            "--runs" => {
                let text = value()?;
                wish.runs = text.parse().map_err(|_| format!("--runs {text}: not a number"))?;
            }
            _ => return Err(format!("{word}: no such option; --help lists them")),
        }
    }
    if let Some(size) = wish.trunk.filter(|size| *size < TRUNK_BYTES_MIN) {
        return Err(format!("--trunk-bytes {}: must be at least {TRUNK_BYTES_MIN}", size.0));
    }
    if wish.runs == 0 || wish.runs > RUNS_MAX {
        return Err(format!("--runs {}: must be 1 to {RUNS_MAX}", wish.runs));
    }
    if wish.bytes.is_zero() {
        return Err(String::from("--bytes 0: must be at least 1"));
    }
    if wish.count == 0 || wish.count > COUNT_MAX {
        return Err(format!("--count {}: must be 1 to {COUNT_MAX}", wish.count));
    }
    match wish.bytes.0.checked_mul(wish.count) {
        Some(all) if all <= ALL_MAX.0 => Ok(Some(wish)),
        _ => Err(format!("--bytes {} times --count {}: over {ALL_MAX}", wish.bytes, wish.count)),
    }
}

/// One device for two users.
type Pair = [Box<dyn Backend>; 2];

/// The device, and why it is a simulated one where nobody asked for that.
fn open(spec: Spec, simulated: &Simulated) -> Result<(Pair, Option<Error>)> {
    let simulated = |ordinal| -> Result<Pair> {
        let world = simulated.world();
        Ok([Box::new(world.device(ordinal)?), Box::new(world.device(ordinal)?)])
    };
    let cuda = |ordinal| -> Result<Pair> {
        let one = || -> Result<Box<dyn Backend>> {
            Ok(lightering::open(&Spec::Cuda(ordinal).to_string())?.backend)
        };
        Ok([one()?, one()?])
    };
    match spec {
        Spec::Sim(ordinal) => Ok((simulated(ordinal)?, None)),
        Spec::Cuda(ordinal) => Ok((cuda(ordinal)?, None)),
        Spec::Auto => match cuda(0) {
            Ok(backends) => Ok((backends, None)),
            Err(why) => Ok((simulated(0)?, Some(why))),
        },
    }
}

/// The whole program; an error is one line and an exit status.
fn run(
    words: impl Iterator<Item = String>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> std::result::Result<(), (String, u8)> {
    let bad = |text: String| (text, 2);
    let failed = |error: Error| (error.to_string(), 1);
    let lost = |error: std::io::Error| (format!("output: {error}"), 1);
    let Some(wish) = parse(words).map_err(bad)? else {
        return out.write_all(HELP.as_bytes()).map_err(lost);
    };
    let named = |error: Error| bad(format!("--device {}: {error}", wish.device));
    let spec = wish.device.parse().map_err(named)?;
    for (name, given) in [("--times-only", wish.times_only), ("--model", wish.model.is_some())] {
        if given && !matches!(spec, Spec::Sim(_)) {
            return Err(bad(format!("{name}: only with --device sim")));
        }
    }
    let simulated = Simulated::new(wish.model.as_deref(), wish.times_only).map_err(bad)?;
    let (mut backends, why) = open(spec, &simulated).map_err(named)?;
    let about = backends[0].about();
    let free = backends[0].memory().map_err(failed)?.free;
    let place = match (about.simulated, wish.times_only) {
        (false, _) => Place::Cuda(about.device.0),
        (true, false) => Place::Here,
        (true, true) => Place::Nowhere,
    };
    let needed = Bytes(2 * wish.bytes.0 * wish.count) + Compute::bytes(wish.kind, place);
    if needed > free {
        return Err(bad(format!(
            "--bytes, --count: need {needed}, {} has {free} free",
            about.name
        )));
    }
    let because = why.map(|error| format!(", because cuda:0 is not to be had ({error})"));
    let times = if about.simulated { "; all times are simulated" } else { "" };
    writeln!(err, "device: {}{}{times}", about.name, because.unwrap_or_default()).map_err(lost)?;
    let mut rig = Rig::new(backends, &wish, place).map_err(failed)?;
    let figures = rig.figures(wish.runs).map_err(failed)?;
    let records = rig.close().map_err(failed)?;
    if wish.check {
        writeln!(err, "checked: {records} records, no hazard").map_err(lost)?;
    }
    let text = if wish.json { figures.json(&wish) } else { figures.words(&wish) };
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(lost)
}

impl Figures {
    fn json(&self, wish: &Wish) -> String {
        let Figures { copy, compute, both, both_raw, ratio, enqueue, enqueue_raw } = self;
        format!(
            "{{\"compute\": \"{}\", \"memory\": \"{}\", \"copy_seconds\": {copy}, \
             \"compute_seconds\": {compute}, \
             \"both_seconds\": {both}, \"both_raw_seconds\": {both_raw}, \"ratio\": {ratio}, \
             \"enqueue_seconds\": {enqueue}, \"enqueue_raw_seconds\": {enqueue_raw}, \
             \"runs\": {}}}\n",
            wish.kind.name(),
            wish.memory.name(),
            wish.runs
        )
    }

    fn words(&self, wish: &Wish) -> String {
        let time =
            |seconds: f64| format!("{:?}", Duration::from_secs_f64(seconds)).replace('\u{b5}', "u");
        let compute = format!("compute ({}), alone", wish.kind.name());
        let copies = format!("{} x {}", wish.count, wish.bytes);
        format!(
            "raw copies out and back, alone   {} ({copies})\n\
             {compute:32} {}\n\
             both, copies by the engine       {}\n\
             both, raw copies                 {}\n\
             engine over raw                  {:.4}\n\
             host, to enqueue the copies      {}, raw {}\n",
            time(self.copy),
            time(self.compute),
            time(self.both),
            time(self.both_raw),
            self.ratio,
            time(self.enqueue),
            time(self.enqueue_raw)
        )
    }
}

fn main() -> ExitCode {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    match run(words, &mut out, &mut err) {
        Ok(()) => ExitCode::SUCCESS,
        Err((text, status)) => {
            // There is nobody left to tell that standard error is gone.
            let _ = writeln!(err, "overlap: {text}");
            ExitCode::from(status)
        }
    }
}

#[cfg(test)]
mod tests {
    //! The fault guarded against: waits that keep copies and compute apart, or a figure that does
    //! not measure what it is named after.
    use super::*;

    fn of(line: &str) -> (String, std::result::Result<(), (String, u8)>) {
        let mut out = Vec::new();
        let ended = run(line.split_whitespace().map(String::from), &mut out, &mut Vec::new());
        (String::from_utf8(out).unwrap(), ended)
    }

    fn field(json: &str, name: &str) -> f64 {
        let (_, rest) = json.split_once(&format!("\"{name}\": ")).unwrap();
        rest.split([',', '}']).next().unwrap().parse().unwrap()
    }

    #[test]
    fn copies_hide_behind_the_kernel_through_the_engine_as_raw() {
        let (json, ended) = of("--device sim --bytes 4MiB --count 6 --json");
        ended.unwrap();
        let [copy, compute, both, both_raw] =
            ["copy_seconds", "compute_seconds", "both_seconds", "both_raw_seconds"]
                .map(|name| field(&json, name));
        let link = 6.0 * 4.0 * 1048576.0 * (1.0 / 55.0e9 + 1.0 / 54.3e9);
        assert!(copy > link && copy < 1.1 * link, "{json}");
        assert!((compute / copy - 1.0).abs() < 0.01, "the kernel is as long as the copies: {json}");
        assert!(both_raw < 1.05 * copy && both < 1.05 * both_raw, "{json}");
        assert!((field(&json, "ratio") - both / both_raw).abs() < 1e-9);
        assert_eq!(field(&json, "runs"), 3.0);
    }

    #[test]
    fn copies_hide_behind_every_kind_of_compute() {
        // Products here are small and their launches long; at true sizes only times are kept.
        for (line, near) in [
            ("--device sim --bytes 4MiB --count 6 --compute hbm", 0.1),
            ("--device sim --bytes 4MiB --count 6 --compute gemm", 0.1),
            ("--device sim --bytes 4MiB --count 6 --compute hbm --memory owned", 0.1),
            ("--device sim --times-only --bytes 256MiB --count 16 --compute hbm", 0.01),
            ("--device sim --times-only --bytes 256MiB --count 16 --compute gemm", 0.02),
        ] {
            let (json, ended) = of(&format!("{line} --runs 1 --json"));
            ended.unwrap();
            let [copy, compute, both, ratio] =
                ["copy_seconds", "compute_seconds", "both_seconds", "ratio"]
                    .map(|name| field(&json, name));
            assert!((compute / copy - 1.0).abs() < near, "{line}: {json}");
            assert!(both < 1.15 * copy && ratio < 1.05, "{line}: {json}");
        }
    }

    #[test]
    fn bad_input_is_one_line_with_its_cause() {
        for (line, cause) in [
            ("--bytes 0", "--bytes 0"),
            ("--bytes much", "--bytes much"),
            ("--count 0", "--count 0"),
            ("--count -1", "--count -1"),
            ("--compute all", "--compute all"),
            ("--runs 0", "--runs 0"),
            ("--memory mine", "--memory mine"),
            ("--trunk-bytes 0", "--trunk-bytes 0"),
            ("--trunk-bytes 4095", "--trunk-bytes 4095: must be at least 64.00 KiB"),
            ("--trunk-bytes big", "--trunk-bytes big"),
            ("--bytes 1GiB --count 9", "--count 9"),
            ("--bytes 8000000TiB --count 1024", "--bytes"),
            ("--device tpu", "--device tpu"),
            ("--device sim:99", "--device sim:99"),
            ("--device", "--device: needs"),
            ("--what", "--what"),
            ("--times-only", "--times-only: only with"),
            ("--device cuda:0 --model a", "--model: only with"),
            ("--device sim --model /nonexistent", "--model /nonexistent: "),
            ("--device sim --model", "--model: needs"),
        ] {
            let (out, ended) = of(line);
            let (text, status) = ended.unwrap_err();
            assert!(text.contains(cause) && !text.contains('\n'), "{line}: {text}");
            assert_eq!((status, out.as_str()), (2, ""));
        }
    }
}
