//! The link: what the engine's copies reach of the driver's own, in one process and in turn.
//!
//! What it is not: a benchmark of a machine. Only the ratio of two figures of one run counts.
//!
//! Invariant: ours and raw alternate (A B B A); every pair is printed, none is left out.
//!
//! ```text
//!   main (words, table, JSON) -> copies  latency  ahead  beside     what is measured
//!                                     \      |      /
//!                                   rig (device, engine, hold) -> driver (raw calls)
//! ```
//!
//! `cargo bench --bench link -- --help`. In a bundle: `run.sh 'bench:link --json'`.

mod ahead;
mod beside;
#[allow(dead_code, unused_imports)] // the examples' own, of which a part is used here
#[path = "../../examples/train/blas/mod.rs"]
mod blas;
#[allow(unused_imports)]
#[path = "../../examples/overlap/busy.rs"]
mod busy;
#[allow(dead_code, unused_imports)]
#[path = "../../examples/overlap/compute.rs"]
mod compute;
mod copies;
mod driver;
#[cfg(test)] // a bench is built with the tests of what it takes in, and runs none of them
#[path = "../../tests/emulator/mod.rs"]
mod emulator;
mod latency;
mod rig;
mod rows;
mod two;

use lightering::backend::sim::{Config, Model, World};
use lightering::backend::{Backend, Spec};
use lightering::{Budget, Bytes, Error, PinnedPool, PoolOptions, Result};
use rig::{Plan, Rig};
use std::process::ExitCode;

const HELP: &str = "\
What the engine's copies reach of the driver's own: one process, in turn, medians of paired ratios.

Usage: link [options] [measure...]

  bandwidth   sustained, each way, pieces of 1 MiB to 1 GiB queued behind a kernel that holds them
  both        both ways at once
  urgent      a copy that a reader waits for, while others are fetched ahead
  cold        one copy with the device idle, from the call to its event (CUDA only)
  latency     the host's time for evict and refill (CUDA only)
  prefetch    a pass over 64 layers whose inputs come back, by depth and by amount of compute
  rows        many small ranges, and rows at a stride, out and back
  two         the next device beside this one, each alone and both at once
  trunks      bandwidth of 256 MiB pieces by the size of trunks
  beside      beside memory-bound kernels and products, in every way that tells why

Without a measure: the first seven.

  --device NAME  auto, sim or cuda:N (default: auto)
  --pairs N      pairs of runs (default: 15)
  --total SIZE   bytes queued at once (default: 2GiB)
  --json         each figure with all its pairs as a line of JSON, besides the table
  --help         this text
";

const PAIRS_MAX: usize = 1000;
const MEASURES: [(&str, Measure); 10] = [
    ("bandwidth", copies::bandwidth),
    ("both", copies::both),
    ("urgent", copies::urgent),
    ("cold", copies::cold),
    ("latency", latency::latency),
    ("prefetch", ahead::ahead),
    ("rows", rows::rows),
    ("two", two::two),
    ("trunks", copies::trunks),
    ("beside", beside::beside),
];
/// Measured where none is named.
const USUAL: usize = 7;

type Measure = fn(&Bench) -> Result<Vec<Row>>;

/// Which of two figures is the better one.
#[derive(Clone, Copy)]
enum Better {
    Higher,
    Lower,
}

/// One figure, with every pair of ours and raw.
struct Row {
    name: String,
    unit: &'static str,
    better: Better,
    pairs: Vec<(f64, f64)>,
    /// Runs in which the device began before all was enqueued.
    unheld: u32,
}

impl Row {
    fn new(name: String, unit: &'static str, better: Better) -> Row {
        Row { name, unit, better, pairs: Vec::new(), unheld: 0 }
    }

    /// The pair in the middle; of two the worse.
    fn middle(&self) -> (f64, f64) {
        let mut sorted = self.pairs.clone();
        sorted.sort_by(|(a, b), (c, d)| (a / b).total_cmp(&(c / d)));
        let at = match self.better {
            Better::Lower => sorted.len() / 2,
            Better::Higher => (sorted.len() - 1) / 2,
        };
        sorted[at]
    }

    fn print(&self) {
        let (ours, raw) = self.middle();
        let ratios = || self.pairs.iter().map(|(ours, raw)| ours / raw);
        let least = ratios().fold(f64::INFINITY, f64::min);
        let most = ratios().fold(0.0, f64::max);
        let unheld = match self.unheld {
            0 => String::new(),
            runs => format!("   {runs} runs not held to the end"),
        };
        println!(
            "{:34} {ours:10.3} {raw:10.3} {:5} {:8.4}   {least:.4} to {most:.4}, {} pairs{unheld}",
            self.name,
            self.unit,
            ours / raw,
            self.pairs.len()
        );
    }

    fn json(&self, simulated: bool) -> String {
        let better = match self.better {
            Better::Higher => "higher",
            Better::Lower => "lower",
        };
        let pairs: Vec<String> =
            self.pairs.iter().map(|(ours, raw)| format!("[{ours}, {raw}]")).collect();
        format!(
            "{{\"figure\": \"{}\", \"unit\": \"{}\", \"better\": \"{better}\", \
             \"simulated\": {simulated}, \"unheld\": {}, \"pairs\": [{}]}}",
            self.name,
            self.unit,
            self.unheld,
            pairs.join(", ")
        )
    }
}

/// Where and how much is measured.
struct Bench {
    spec: Spec,
    simulated: bool,
    ordinal: u32,
    pairs: usize,
    /// Pairs of what is measured in many variants.
    few: usize,
    total: Bytes,
    pool: PinnedPool,
    /// The simulated devices.
    world: World,
}

impl Bench {
    fn new(wish: &Wish) -> Result<Bench> {
        let world = World::new(Config::times_only(Model::default()));
        let (spec, first) = match wish.spec {
            Spec::Auto => match lightering::open("cuda:0") {
                Ok(opened) => (Spec::Cuda(0), opened.backend),
                Err(why) => {
                    println!("no CUDA device, so the simulated one: {why}");
                    (Spec::Sim(0), Box::new(world.device(0)?) as Box<dyn Backend>)
                }
            },
            spec => (spec, device(spec, &world)?),
        };
        let about = first.about();
        let times = if about.simulated { "; all times are simulated" } else { "" };
        println!("device: {}{times}", about.name);
        // Ours and raw, each rounded up by at most an eighth, and room for what lies between.
        let budget = Budget::Bytes(Bytes(wish.total.0 * 3));
        let pool = PinnedPool::new(first.pinner(), PoolOptions { budget, ..Default::default() })?;
        pool.reserve(Bytes(wish.total.0 / 4 * 9))?;
        Ok(Bench {
            spec,
            simulated: about.simulated,
            ordinal: about.device.0,
            pairs: wish.pairs,
            few: wish.pairs.div_ceil(3),
            total: wish.total,
            pool,
            world,
        })
    }

    /// How many pieces are queued at once; `None` where they are larger than all.
    fn count(&self, bytes: Bytes) -> Option<usize> {
        match self.total.0 / bytes.0 {
            0 => None,
            count => Some(count as usize),
        }
    }

    /// The device of that ordinal, of the kind that is measured.
    fn open(&self, ordinal: u32) -> Result<Box<dyn Backend>> {
        let spec = match self.spec {
            Spec::Sim(_) => Spec::Sim(ordinal),
            _ => Spec::Cuda(ordinal),
        };
        device(spec, &self.world)
    }

    fn rig(&self, plan: &Plan) -> Result<Rig> {
        let devices = [device(self.spec, &self.world)?, device(self.spec, &self.world)?];
        Rig::new(devices, &self.pool, plan)
    }
}

fn device(spec: Spec, world: &World) -> Result<Box<dyn Backend>> {
    match spec {
        Spec::Sim(ordinal) => Ok(Box::new(world.device(ordinal)?)),
        spec => Ok(lightering::open(&spec.to_string())?.backend),
    }
}

/// Ours and raw in turn, after one run of each that does not count.
fn pairs<T, R>(
    with: &mut T,
    count: usize,
    mut ours: impl FnMut(&mut T) -> Result<R>,
    mut raw: impl FnMut(&mut T) -> Result<R>,
) -> Result<Vec<(R, R)>> {
    ours(with)?;
    raw(with)?;
    (0..count)
        .map(|nth| {
            if nth % 2 == 0 {
                let ours = ours(with)?;
                Ok((ours, raw(with)?))
            } else {
                let raw = raw(with)?;
                Ok((ours(with)?, raw))
            }
        })
        .collect()
}

struct Wish {
    spec: Spec,
    pairs: usize,
    total: Bytes,
    json: bool,
    measures: Vec<(&'static str, Measure)>,
}

fn parse(mut words: impl Iterator<Item = String>) -> std::result::Result<Option<Wish>, String> {
    let (mut spec, mut pairs, mut total) = (Spec::Auto, 15, Bytes::gib(2));
    let (mut json, mut measures) = (false, Vec::new());
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word}: needs a value"));
        match word.as_str() {
            "--help" | "-h" => return Ok(None),
            // What cargo says to every bench.
            "--bench" => {}
            "--json" => json = true,
            "--device" => {
                let text = value()?;
                spec = text.parse().map_err(|error| format!("--device {text}: {error}"))?;
            }
            "--pairs" => {
                let text = value()?;
                let number = text.parse().ok().filter(|pairs| (1..=PAIRS_MAX).contains(pairs));
                pairs =
                    number.ok_or_else(|| format!("--pairs {text}: must be 1 to {PAIRS_MAX}"))?;
            }
            "--total" => {
                let text = value()?;
                total = text.parse().map_err(|error| format!("--total {text}: {error}"))?;
            }
            name => match MEASURES.iter().find(|(known, _)| *known == name) {
                Some(measure) => measures.push(*measure),
                None => return Err(format!("{name}: no such measure; --help lists them")),
            },
        }
    }
    if total < Bytes::mib(2) || total > Bytes::gib(64) {
        return Err(format!("--total {total}: must be 2 MiB to 64 GiB"));
    }
    if measures.is_empty() {
        measures.extend(&MEASURES[..USUAL]);
    }
    Ok(Some(Wish { spec, pairs, total, json, measures }))
}

fn run(wish: &Wish) -> Result<()> {
    let bench = Bench::new(wish)?;
    let head = ["figure", "ours", "raw", "unit", "ratio", "spread of the ratio"];
    let [name, ours, raw, unit, ratio, spread] = head;
    println!("{name:34} {ours:>10} {raw:>10} {unit:5} {ratio:>8}   {spread}");
    for (name, measure) in &wish.measures {
        let rows = measure(&bench)?;
        if rows.is_empty() {
            println!("{name}: NOT measured here (it needs a CUDA device, or a larger --total)");
        }
        for row in rows {
            row.print();
            if wish.json {
                println!("{}", row.json(bench.simulated));
            }
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let wish = match parse(words) {
        Ok(Some(wish)) => wish,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("link: {why}");
            return ExitCode::from(2);
        }
    };
    let ended: std::result::Result<(), Error> = run(&wish);
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("link: {error}");
            ExitCode::FAILURE
        }
    }
}
