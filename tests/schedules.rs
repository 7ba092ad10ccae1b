//! Whole runs under chosen orders and faults: whatever the device does, and whatever fails, the
//! bytes are right or an error says what happened, and nothing is left behind.
//!
//! The fault guarded against is the one that no test of one story finds: two or three things going
//! wrong together, in an order that comes up once in a million runs.
//!
//! A million random runs, or as many as `LIGHTERING_SCHEDULES` says, from `LIGHTERING_SEED` on. A
//! run that fails, aborts or does not end prints one line that replays it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "schedules/batches.rs"]
mod batches;
#[path = "schedules/bench.rs"]
mod bench;
#[path = "schedules/canonical.rs"]
mod canonical;
#[path = "schedules/machine.rs"]
mod machine;
#[path = "schedules/parts.rs"]
mod parts;
#[path = "schedules/plan.rs"]
mod plan;
mod support;
#[path = "schedules/tally.rs"]
mod tally;
#[path = "schedules/verbs.rs"]
mod verbs;

use bench::Bench;
use lightering::backend::Backend;
use lightering::trace::Site;
use lightering::{Bytes, Residency, Shared};
use machine::{Go, Item, Lost, Machine, insist};
use parts::Part;
use plan::{End, Kind, Plan};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;
use std::time::Instant;
use support::broken::{self, Fault, is_query};
use tally::{Outcome, Tally};

/// So many steps of the device bound a run: nothing is stuck.
const STEPS_MAX: u64 = 1_000_000;

fn run(seed: u64, is_told: bool) -> Outcome {
    let plan = Plan::new(seed);
    if is_told {
        println!("{plan:?}");
    }
    let bench = Bench::new(&plan, None, is_told);
    let (world, log, wrong) = (bench.world.clone(), bench.log.clone(), bench.wrong.clone());
    let mut happened = [false; Kind::COUNT];
    let is_latched = match Machine::open(&plan, bench) {
        Ok(mut machine) => {
            let went = drive(&mut machine);
            happened = machine.happened;
            happened[Kind::EngineDropped as usize] = went.is_ok() && plan.end == End::Drop;
            happened[Kind::EngineForgotten as usize] = went.is_ok() && plan.end == End::Exit;
            end(machine, went)
        }
        Err(_) => true,
    };
    let log = log.lock().unwrap_or_else(PoisonError::into_inner);
    let wrong = wrong.lock().unwrap();
    assert!(wrong.is_empty(), "wrong bytes: {}", wrong.join("; "));
    assert_eq!(log.checker.total(), 0, "hazards: {}", log.told());
    assert_eq!(world.removals_refused(), 0, "memory was to go that queued work still used");
    let steps = world.now().as_nanos() as u64;
    assert!(steps < STEPS_MAX, "{steps} steps");
    let mut ordered = [false; Kind::COUNT];
    for (kind, has_struck) in plan.kinds().zip(world.faults_met()) {
        ordered[kind as usize] = true;
        happened[kind as usize] |= has_struck;
    }
    happened[Kind::TornCopy as usize] = world.copies_torn() > 0;
    Outcome {
        is_latched,
        faults_struck: world.faults_struck(),
        records: log.records,
        digest: log.digest.0,
        ordered,
        happened,
    }
}

/// What ended a run before its time.
enum Cut {
    Lost(lightering::Error),
    Panic,
}

impl From<Lost> for Cut {
    fn from(Lost(error): Lost) -> Cut {
        Cut::Lost(error)
    }
}

fn drive(machine: &mut Machine<'_>) -> Result<(), Cut> {
    let verbs = |machine: &mut Machine<'_>| -> Result<(), Cut> {
        for _ in 0..machine.plan.verbs {
            machine.verb()?;
        }
        if machine.plan.end == End::Finish {
            finish(machine)?;
        }
        Ok(())
    };
    if !machine.plan.panics {
        return verbs(machine);
    }
    match catch_unwind(AssertUnwindSafe(|| verbs(machine))) {
        Ok(went) => went,
        Err(panic) if panic.downcast_ref() == Some(&bench::BLOWN) => Err(Cut::Panic),
        Err(panic) => resume_unwind(panic),
    }
}

/// Ends a run that did not finish; says whether the device was lost on the way.
fn end(machine: Machine<'_>, went: Result<(), Cut>) -> bool {
    let Machine { plan, bench, engine, items, batches, .. } = machine;
    let is_latched = matches!(went, Err(Cut::Lost(_)));
    match went {
        Ok(()) if plan.end == End::Finish => return false,
        Ok(()) if plan.end == End::Exit => {
            std::mem::forget((engine, items, batches));
            return false;
        }
        Err(Cut::Lost(first)) => latched(&engine, &items, &first),
        _ => {}
    }
    // Handles may outlive their engine.
    drop(engine);
    drop((items, batches));
    let stats = bench.pool.stats();
    assert_eq!(stats.lent, Bytes::ZERO, "a dropped engine's blocks are quarantined or free");
    assert_eq!(stats.busy, Bytes::ZERO, "nobody could ask about them any more");
    is_latched
}

/// After a loss every verb says the same, and every byte is lost by name.
fn latched(engine: &Shared, items: &[Item], first: &lightering::Error) {
    let mut engine = engine.lock();
    // The framework may have been the first to see it.
    let seen = engine.drain().unwrap_err();
    if seen.kind() == lightering::Kind::Closed {
        return;
    }
    for later in [Err(seen), engine.step(), engine.mark_step()] {
        let later = later.unwrap_err();
        assert!(later.is_lost() && later.driver_code() == first.driver_code(), "{later:?}");
    }
    for item in items {
        assert_eq!(engine.residency(item.id()).unwrap(), Residency::Lost);
    }
}

/// Every byte is compared, everything is given back, and nothing is left anywhere.
fn finish(machine: &mut Machine<'_>) -> Go {
    let plan = machine.plan;
    machine.discard_all()?;
    machine.read_all()?;
    for s in 0..machine.bench.streams.len() {
        machine.flush(s)?;
    }
    // Once for the copies, once for the fence behind them, and as often as answers are held back.
    for round in 0..200 {
        if round >= 2 && machine.graves.is_empty() {
            break;
        }
        insist(plan, || machine.bench.sim.sync())?;
        for s in 0..machine.bench.streams.len() {
            machine.pull(s)?;
        }
    }
    assert!(machine.graves.is_empty(), "{} storages were never named", machine.graves.len());
    insist(plan, || machine.engine.lock().drain())?;
    insist(plan, || machine.engine.lock().shutdown())?;
    for (_, range) in std::mem::take(&mut machine.forgotten) {
        if let Some(range) = range {
            insist(plan, || machine.bench.give(0, range.at()))?;
        }
    }
    insist(plan, || machine.bench.sim.sync())?;
    let stats = machine.engine.lock().stats();
    assert_eq!((stats.storages, stats.leaked_on_purpose_bytes), (0, 0));
    let pool = machine.bench.pool.stats();
    assert_eq!((pool.lent, pool.quarantined, pool.busy), (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO));
    let mut log = machine.bench.log();
    log.checker.finish();
    assert_eq!(log.checker.total(), 0, "{}", log.told());
    Ok(())
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Which runs to make: the first, and how many.
fn runs() -> (u64, u64) {
    let count = number("LIGHTERING_SCHEDULES").unwrap_or(RUNS);
    (number("LIGHTERING_SEED").unwrap_or(0), count)
}

#[test]
fn replay() {
    if let (Some(seed), Some(1)) = (number("LIGHTERING_SEED"), number("LIGHTERING_SCHEDULES")) {
        println!("{:?}", run(seed, true));
    }
}

/// So many runs where nobody says how many.
const RUNS: u64 = 1_000_000;
const MILLION: &str = "no_schedule_and_no_fault_loses_a_byte_or_leaves_anything_behind";

#[test]
fn no_schedule_and_no_fault_loses_a_byte_or_leaves_anything_behind() {
    let start = Instant::now();
    let (first, count) = runs();
    let mut tally = Tally::default();
    if let Some(mut part) = Part::here() {
        for seed in first..first + count {
            part.begin(seed);
            tally.add(&run(seed, false));
        }
        return part.hand(&tally.line());
    }
    parts::all(MILLION, first, count, |sums| tally.take_in(sums));
    tally.print(first, start.elapsed());
    assert_eq!(tally.runs, count);
    if tally.runs >= 10_000 {
        tally.insist();
    }
}

/// Whatever ends a run, a panic, the end of its process, or nothing at all, one line names it.
#[cfg(unix)]
#[test]
fn a_run_that_aborts_or_never_ends_is_named_by_the_line_that_replays_it() {
    for (way, says) in [("abort 107", "signal: 6"), ("hang 113", "did not end")] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([MILLION, "--exact"])
            .env("LIGHTERING_SEED", "100")
            .env("LIGHTERING_SCHEDULES", "20")
            .env(parts::PLANTED, way)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{way} went unseen");
        let (_, seed) = way.split_once(' ').unwrap();
        let line = parts::replay(seed.parse().unwrap());
        let (out, err) = (output.stdout, output.stderr);
        let told = [out, err].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        // At once on the error stream; the reason comes when the harness tells of failures.
        assert!(told[1].lines().any(|other| other == line), "{way}: {told:?}");
        assert!(told.concat().contains(says), "{way}: {told:?}");
    }
}

/// A small program's name, and how to go through its orders.
type Program = (&'static str, fn() -> u64);

#[test]
fn six_small_programs_are_right_in_every_order_there_is() {
    parts::alone("six_small_programs_are_right_in_every_order_there_is", six_small_programs);
}

fn six_small_programs() {
    let programs: [Program; 6] = [
        ("there and back, torn", canonical::there_and_back),
        ("two leave", canonical::two_leave),
        ("one block", canonical::one_block),
        ("written while leaving", canonical::written_while_leaving),
        ("two readers", canonical::two_readers),
        ("pulled", canonical::pulled),
    ];
    let mut sum = 0;
    for (name, program) in programs {
        let orders = program();
        println!("{name:<22} {orders:>7} orders");
        assert!(orders > 1, "{name} leaves the device no choice");
        sum += orders;
    }
    println!("{sum} orders of six programs, and no others");
}

#[test]
fn bytes_at_a_fixed_address_are_right_in_every_order_there_is() {
    parts::alone("bytes_at_a_fixed_address_are_right_in_every_order_there_is", fixed_address);
}

fn fixed_address() {
    let (orders, unmapped) = canonical::unmapped();
    println!("{orders} orders; in {unmapped} the bytes are unmapped and come home");
    assert!(0 < unmapped && unmapped < orders, "the device leaves the host no choice");
}

/// Is the loss of a site's order flagged in this run?
fn is_flagged(seed: u64, broken: broken::Plan) -> bool {
    let plan = Plan::without_faults(seed);
    let bench = Bench::new(&plan, Some(broken), false);
    let log = bench.log.clone();
    let is_flagged = || {
        let log = log.lock().unwrap_or_else(PoisonError::into_inner);
        log.checker.total() > 0
    };
    let Ok(mut machine) = Machine::open(&plan, bench) else { return false };
    let went = catch_unwind(AssertUnwindSafe(|| {
        for _ in 0..plan.verbs {
            if machine.verb().is_err() || is_flagged() {
                return;
            }
        }
        let _ = finish(&mut machine);
    }));
    // Wrong bytes may have ended it before its time; the order was wrong before them.
    drop((went, machine));
    is_flagged()
}

#[test]
fn random_runs_find_the_loss_of_every_site() {
    parts::alone("random_runs_find_the_loss_of_every_site", loss_of_every_site);
}

fn loss_of_every_site() {
    const RUNS_MAX: u64 = 10_000;
    // What is found ends its run with a panic now and then; that is no news here.
    let hook = std::panic::take_hook();
    let here = std::thread::current().id();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() != here {
            hook(info);
        }
    }));
    let mut unfound = Vec::new();
    for site in Site::ALL.iter().copied() {
        let fault = if is_query(site) { Fault::EarlyTrue } else { Fault::DropWait };
        let broken = broken::Plan { site, fault };
        match (0..RUNS_MAX).find(|seed| is_flagged(*seed, broken)) {
            Some(seed) => println!("{:<19} found in run {}", format!("{site:?}"), seed + 1),
            None => unfound.push(site),
        }
    }
    let _ = std::panic::take_hook();
    assert!(unfound.is_empty(), "{unfound:?} are lost unseen in {RUNS_MAX} runs");
}

#[test]
#[ignore = "needs the planted fault: LIGHTERING_CANARY=1 cargo test --test schedules canary -- \
            --ignored --nocapture"]
fn the_canary_is_found() {
    const RUNS_MAX: u64 = 1_000_000;
    std::panic::set_hook(Box::new(|_| {}));
    let start = Instant::now();
    let found = |seed: &u64| catch_unwind(|| run(*seed, false)).is_err();
    let first = (0..RUNS_MAX).find(found);
    let _ = std::panic::take_hook();
    let seed = first.expect("the planted fault is found by random schedules");
    println!("the planted fault is found in run {} after {:?}", seed + 1, start.elapsed());
}

#[test]
fn equal_seeds_give_equal_traces() {
    let (first, count) = runs();
    if let Some(mut part) = Part::here() {
        let digest = |seed| {
            part.begin(seed);
            let outcome = run(seed, false);
            assert_eq!(outcome, run(seed, false), "seed {seed}");
            outcome.digest.to_string()
        };
        let digests: Vec<String> = (first..first + count).map(digest).collect();
        return part.hand(&digests.join(" "));
    }
    let mut digests = Vec::new();
    parts::all("equal_seeds_give_equal_traces", 0, 2_000, |line| {
        digests.extend(line.split_whitespace().map(str::to_string));
    });
    assert_eq!(digests.len(), 2_000);
    let mut unlike = digests.clone();
    unlike.sort_unstable();
    unlike.dedup();
    assert!(unlike.len() * 10 > digests.len() * 9, "{} traces differ", unlike.len());
}
