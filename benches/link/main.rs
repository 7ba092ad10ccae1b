//! The link: what the engine's copies reach of the driver's own, in one process and in turn.
//!
//! What it is not: a benchmark of a machine. Only the ratio of two figures of one run counts.
//!
//! Invariant: ours and raw alternate (A B B A); every pair is printed, none is left out, and of
//! longest times the longest of all; and each figure as soon as it is known, so that a run cut
//! short keeps what it measured. What is not measured is said.
//!
//! ```text
//!   main (words) -> copies latency address ahead rows two apart beside -> figure (table, JSON)
//!                        \____________|_____________/
//!                   rig (device, engine, hold) -> driver (raw calls)
//! ```
//!
//! `cargo bench --bench link -- --help`. In a bundle: `run.sh 'bench:link --json'`.

mod address;
mod ahead;
mod apart;
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
mod figure;
mod latency;
mod mapping;
mod rig;
mod rows;
mod two;
#[path = "../../examples/common/watch.rs"]
mod watch;

use figure::Figures;
use lightering::backend::sim::{Config, Model, World};
use lightering::backend::{Backend, Spec};
use lightering::{Budget, Bytes, Error, PinnedPool, PoolOptions, Result};
use rig::{Plan, Rig};
use std::process::ExitCode;
use std::time::Instant;

const HELP: &str = "\
What the engine's copies reach of the driver's own: one process, in turn, medians of paired ratios.

Usage: link [options] [measure...]

  bandwidth   sustained, each way, pieces of 1 MiB to 1 GiB queued behind a kernel that holds them:
              bandwidth-small to 16 MiB, bandwidth-large from 64 MiB
  both        both ways at once
  cold        one copy with the device idle, from the call to its event (CUDA only)
  latency     the host's time for evict and refill, and the longest of all (CUDA only)
  address     the host's time to give memory back and take it again where the address stays
  urgent      a copy that a reader waits for, while others are fetched ahead
  prefetch    a pass over 64 layers whose inputs come back, by amount of compute, and by how many
              are on their way: prefetch-0, prefetch-1, prefetch-2, prefetch-4
  rows        many small ranges, and rows at a stride, out and back
  gemm        the same beside matrix products
  batch       the same with kernels off, by the driver's call for batches
  two         the next device beside this one, each alone and both at once
  apart       the same in two processes that share nothing but the machine
  trunks      bandwidth of 256 MiB pieces by the size of trunks
  beside      beside memory-bound kernels and products, in every way that tells why
  held        the longest evict of all while the device is held, by how many copies may be under
              way
  driver-gemm as gemm, by the driver's call for batches

Without a measure: all but the last six. On an H200 each name without a number is meant to take at
most 20 s at the usual --pairs and --total, but those.

  --device NAME  auto, sim or cuda:N (default: auto)
  --only A,B     the same as naming those measures
  --pairs N      pairs of runs (default: 15)
  --total SIZE   bytes queued at once (default: 2GiB)
  --json         each figure with all its pairs as a line of JSON, besides the table
  --check        look for hazards in all that the engine does; the times are worth nothing then
  --nvtx         name the engine's verbs to a profiler, such as nsys, and say whether one listens
  --help         this text
";

const PAIRS_MAX: usize = 1000;
/// A name that goes on behind a dash is one of several; the first part alone means all of them.
const MEASURES: [(&str, Measure); 17] = [
    ("bandwidth-small", |bench, out| copies::bandwidth(bench, Bytes::mib(1)..=Bytes::mib(16), out)),
    ("bandwidth-large", |bench, out| copies::bandwidth(bench, Bytes::mib(64)..=Bytes::gib(1), out)),
    ("both", copies::both),
    ("cold", copies::cold),
    ("latency", latency::latency),
    ("address", address::address),
    ("urgent", copies::urgent),
    ("prefetch-0", |bench, out| ahead::ahead(bench, 0, out)),
    ("prefetch-1", |bench, out| ahead::ahead(bench, 1, out)),
    ("prefetch-2", |bench, out| ahead::ahead(bench, 2, out)),
    ("prefetch-4", |bench, out| ahead::ahead(bench, 4, out)),
    ("rows", rows::rows),
    ("gemm", rows::gemm),
    ("batch", rows::batch),
    ("two", two::two),
    ("apart", apart::apart),
    ("trunks", copies::trunks),
];
/// Besides; their figures are not asked for.
const BESIDES: [(&str, Measure); 3] = [
    ("beside", beside::beside),
    ("held", latency::held),
    ("driver-gemm", rows::gemm_by_the_driver),
];
/// Measured where none is named.
const USUAL: usize = 14;

type Measure = fn(&Bench, &mut Figures) -> Result<()>;

/// The measures of that name.
fn named(name: &str) -> Vec<(&'static str, Measure)> {
    let is_meant = |known: &str| {
        known.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    MEASURES.into_iter().chain(BESIDES).filter(|(known, _)| is_meant(known)).collect()
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
    /// The checker of order looks on.
    check: bool,
    /// Ranges for a profiler.
    nvtx: bool,
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
            check: wish.check,
            nvtx: wish.nvtx,
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
        self.rig_on(self.ordinal, plan)
    }

    /// A rig on a device of that ordinal, of the same kind.
    fn rig_on(&self, ordinal: u32, plan: &Plan) -> Result<Rig> {
        let mut plan = Plan { is_watched: self.check, ..plan.clone() };
        plan.options.nvtx = self.nvtx;
        Rig::new([self.open(ordinal)?, self.open(ordinal)?], &self.pool, &plan)
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
    is_part: bool,
    check: bool,
    nvtx: bool,
    measures: Vec<(&'static str, Measure)>,
}

fn parse(mut words: impl Iterator<Item = String>) -> std::result::Result<Option<Wish>, String> {
    let (mut spec, mut pairs, mut total) = (Spec::Auto, 15, Bytes::gib(2));
    let (mut json, mut check, mut nvtx, mut is_part) = (false, false, false, false);
    let mut measures = Vec::new();
    let known = |name: &str| match named(name) {
        none if none.is_empty() => Err(format!("{name}: no such measure; --help lists them")),
        some => Ok(some),
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word}: needs a value"));
        match word.as_str() {
            "--help" | "-h" => return Ok(None),
            // What cargo says to every bench.
            "--bench" => {}
            "--json" => json = true,
            "--check" => check = true,
            "--nvtx" => nvtx = true,
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
            "--only" => {
                for name in value()?.split(',') {
                    measures.extend(known(name)?);
                }
            }
            // One of two processes of `apart`.
            "--part" => is_part = true,
            "--total" => {
                let text = value()?;
                total = text.parse().map_err(|error| format!("--total {text}: {error}"))?;
            }
            name => measures.extend(known(name)?),
        }
    }
    if total < Bytes::mib(2) || total > Bytes::gib(64) {
        return Err(format!("--total {total}: must be 2 MiB to 64 GiB"));
    }
    if measures.is_empty() {
        measures.extend(&MEASURES[..USUAL]);
    }
    Ok(Some(Wish { spec, pairs, total, json, is_part, check, nvtx, measures }))
}

fn run(wish: &Wish) -> Result<()> {
    let bench = Bench::new(wish)?;
    if wish.is_part {
        return apart::part(&bench);
    }
    Figures::head();
    for (name, measure) in &wish.measures {
        let started = Instant::now();
        let mut figures = Figures::new(bench.simulated, wish.json);
        measure(&bench, &mut figures)?;
        if figures.is_empty() {
            println!(
                "{name}: NOT measured here (it needs a CUDA device, two, or a larger --total)"
            );
        }
        println!("-- {name}: {:.1} s", started.elapsed().as_secs_f64());
    }
    let is_asked = |name: &str| wish.measures.iter().any(|(asked, _)| *asked == name);
    let all = MEASURES.iter().chain(&BESIDES).map(|(name, _)| *name);
    let left_out: Vec<&str> = all.filter(|name| !is_asked(name)).collect();
    if !left_out.is_empty() {
        println!("NOT asked for: {}; and `overlap`, an example", left_out.join(", "));
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
