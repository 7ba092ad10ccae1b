//! What a verb costs with a million storages alive, beside the same with a thousand.
//!
//! What it is not: a device's time. The device does nothing, at once; what is left is the host's.
//!
//! Invariant: half of all storages are on the host. Each round goes through the next thousand in
//! the order in which they were made, as a training step does, so none of them was used for long;
//! where it says `spread`, through one in a thousand of all, which no training step does. Both
//! numbers take turns, and each figure is the middle ratio of several rounds.
//!
//! ```text
//!   in order  |..........xxxxxxxxxx....................    each x: evict, let go, refill, give up
//!   spread    |x.........x.........x.........x.........
//! ```
//!
//! `cargo bench --bench scale`; `--json` prints the figures for tools/figures.py as well;
//! `--check` looks for hazards in all that the engine does, with fewer storages.

mod nothing;
#[path = "../../examples/common/watch.rs"]
mod watch;

use lightering::{
    Budget, Bytes, DevicePtr, DeviceRange, Engine, Options, PinnedPool, PoolOptions, Result,
    Storage, StreamId,
};
use nothing::Nothing;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use watch::Watch;

/// Storages that verbs are called for in one round.
const BATCH: usize = 1000;
const ROUNDS: usize = 15;
const FEW: usize = 1000;
const MANY: usize = 1_000_000;
/// As many where the checker of order looks on.
const MANY_CHECKED: usize = 10_000;
const LEN: Bytes = Bytes(4096);
const VERBS: [&str; 5] = ["adopt-release", "evict", "releasable", "refill", "take"];

struct Rig {
    engine: Engine,
    on: StreamId,
    /// The engine keeps blocks of it.
    _pool: PinnedPool,
    storages: Vec<Option<Storage>>,
    watch: Watch,
}

fn range(index: usize) -> Result<DeviceRange> {
    DeviceRange::new(DevicePtr((1 << 40) + index as u64 * LEN.0), LEN)
}

impl Rig {
    fn new(count: usize, check: bool) -> Result<Rig> {
        let backend = Box::new(Nothing::default());
        // A block for each storage, and room between them.
        let budget = Budget::Bytes(Bytes(LEN.0 * (count as u64 + 4096)));
        let options = PoolOptions { budget, block_max: 1 << 21, ..PoolOptions::default() };
        let pool = PinnedPool::new(lightering::backend::Backend::pinner(&*backend), options)?;
        let options = Options {
            storages_max: 1 << 21,
            pass_len_max: 1 << 22,
            unreleased_bytes_max: Bytes::MAX,
            ..Options::default()
        };
        let mut engine = Engine::new(backend, &pool, options)?;
        let watch = Watch::over(&mut engine, check);
        let on = engine.adopt_stream(1 << 20)?;
        let mut storages = Vec::with_capacity(count);
        for index in 0..count {
            storages.push(Some(engine.adopt(range(index)?, "x")?));
        }
        let mut rig = Rig { engine, on, _pool: pool, storages, watch };
        // Every other thousand is away.
        for index in (0..count).filter(|index| count > BATCH && index / BATCH % 2 == 1) {
            rig.evict(index)?;
            if index % 512 == 0 {
                rig.let_go()?;
                rig.engine.step()?;
            }
        }
        rig.let_go()?;
        rig.engine.mark_step()?;
        Ok(rig)
    }

    fn evict(&mut self, index: usize) -> Result<()> {
        if let Some(storage) = &self.storages[index] {
            self.engine.evict(storage.id(), self.on)?;
        }
        Ok(())
    }

    fn let_go(&mut self) -> Result<()> {
        self.engine.flush(self.on)?;
        while self.engine.releasable(self.on)?.is_some() {}
        Ok(())
    }

    fn close(mut self) -> Result<()> {
        for storage in self.storages.into_iter().flatten() {
            self.engine.release(storage, self.on)?;
        }
        self.engine.drain()?;
        self.engine.shutdown()?;
        println!("checked: {} records, no hazard", self.watch.verdict()?);
        Ok(())
    }

    /// Nanoseconds for one call of each verb.
    fn round(&mut self, nth: usize, spread: bool) -> Result<[f64; VERBS.len()]> {
        let thousands = self.storages.len() / BATCH;
        let batch: Vec<usize> = match spread {
            // One of each thousand that is not away, twice.
            true => {
                (0..BATCH).map(|at| at / 2 * 2 % thousands * BATCH + at % 2 + 2 * nth).collect()
            }
            false => (0..BATCH).map(|at| 2 * nth % thousands * BATCH + at).collect(),
        };
        let each = |time: Duration| time.as_secs_f64() * 1e9 / batch.len() as f64;
        let start = Instant::now();
        for &index in &batch {
            if let Some(storage) = self.storages[index].take() {
                self.engine.release(storage, self.on)?;
            }
            self.storages[index] = Some(self.engine.adopt(range(index)?, "x")?);
        }
        let adopt = each(start.elapsed());
        let start = Instant::now();
        for &index in &batch {
            self.evict(index)?;
        }
        let evict = each(start.elapsed());
        self.engine.step()?;
        let start = Instant::now();
        self.let_go()?;
        let releasable = each(start.elapsed());
        let start = Instant::now();
        for &index in &batch {
            if let Some(storage) = &self.storages[index] {
                self.engine.refill(storage.id(), range(index)?, self.on)?;
            }
        }
        let refill = each(start.elapsed());
        let start = Instant::now();
        for &index in &batch {
            if let Some(storage) = &self.storages[index] {
                self.engine.take(storage.id())?;
            }
        }
        let take = each(start.elapsed());
        self.engine.drain()?;
        self.engine.mark_step()?;
        Ok([adopt, evict, releasable, refill, take])
    }
}

/// Nanoseconds for one call of each verb: with many storages alive and with few; and with many, for
/// storages that lie far apart, so that each is read from memory.
struct Round {
    many: [f64; VERBS.len()],
    few: [f64; VERBS.len()],
    spread: [f64; VERBS.len()],
}

/// Many and few in turn, after one round that does not count.
fn rounds(count: usize, check: bool) -> Result<Vec<Round>> {
    let (mut few, mut many) = (Rig::new(FEW, check)?, Rig::new(count, check)?);
    let mut rounds = Vec::with_capacity(ROUNDS + 1);
    for nth in 0..=ROUNDS {
        let (mut of_many, mut of_few) = ([0.0; VERBS.len()], [0.0; VERBS.len()]);
        for is_many in [nth % 2 == 0, nth % 2 == 1] {
            match is_many {
                true => of_many = many.round(nth, false)?,
                false => of_few = few.round(nth, false)?,
            }
        }
        let spread = many.round(nth, count == MANY)?;
        rounds.push(Round { many: of_many, few: of_few, spread });
    }
    if check {
        few.close()?;
        many.close()?;
    }
    rounds.remove(0);
    Ok(rounds)
}

fn run(json: bool, check: bool) -> Result<()> {
    let count = if check { MANY_CHECKED } else { MANY };
    let rounds = rounds(count, check)?;
    println!("ns a verb        {count} alive  {FEW} alive    ratio   spread");
    for (nth, verb) in VERBS.iter().enumerate() {
        let mut pairs: Vec<(f64, f64)> =
            rounds.iter().map(|round| (round.many[nth], round.few[nth])).collect();
        let said: Vec<String> =
            pairs.iter().map(|(many, few)| format!("[{many}, {few}]")).collect();
        pairs.sort_unstable_by(|one, two| (one.0 / one.1).total_cmp(&(two.0 / two.1)));
        let (many, few) = pairs[pairs.len() / 2];
        let mut spread: Vec<f64> = rounds.iter().map(|round| round.spread[nth]).collect();
        spread.sort_unstable_by(f64::total_cmp);
        let spread = spread[spread.len() / 2];
        println!("{verb:14} {many:12.1} {few:12.1} {:10.3} {spread:8.1}", many / few);
        if json {
            println!(
                "{{\"figure\": \"scale.{verb}\", \"unit\": \"ns\", \"better\": \"lower\", \
                 \"simulated\": false, \"pairs\": [{}]}}",
                said.join(", ")
            );
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let is_said = |wanted: &str| std::env::args().any(|word| word == wanted);
    match run(is_said("--json"), is_said("--check")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("scale: {error}");
            ExitCode::FAILURE
        }
    }
}
