//! Faults ordered on the simulated device strike where and how they were ordered.
//!
//! The fault it guards against: a fault plan that does nothing, or does more than it says. A call
//! that is refused has no effect; a device that is lost says so to all its users, for good.

// Helpers outside `#[test]` functions unwrap too: a failed call there is a failed test.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)] // The helpers serve several test files; each uses its part.
#[path = "conformance/rig.rs"]
mod rig;

use lightering::backend::sim::{Config, Eager, Fault, FaultPlan, Lazy, Model, Sim, Spot, World};
use lightering::backend::{Backend, Cost, Timing};
use lightering::trace::Site;
use lightering::{Bytes, Error, Kind, Misuse, Result};
use rig::{PAGE, Pages, alloc, event, pattern, until_done};
use std::time::Duration;

fn open(config: Config, faults: FaultPlan) -> Sim {
    World::new(Config { faults, ..config }).device(0).unwrap()
}

fn eager() -> Config {
    Config::scheduled(Box::new(Eager))
}

fn refused<T: std::fmt::Debug>(result: Result<T>) {
    let error: Error = result.unwrap_err();
    assert_eq!((error.kind(), error.driver_code()), (Kind::OutOfMemory, Some(2)), "{error}");
}

#[test]
fn a_refused_call_has_no_effect_and_the_next_one_works() {
    let spots = [
        Spot::Alloc,
        Spot::Register,
        Spot::CreateStream,
        Spot::CreateEvent,
        Spot::Copy,
        Spot::Record,
        Spot::Wait,
        Spot::Query,
        Spot::Launch,
    ];
    let plan =
        spots.iter().fold(FaultPlan::default(), |plan, spot| plan.at(*spot, 1, Fault::Refuse));
    let sim = &mut open(eager(), plan);
    let pages = &mut Pages::new(PAGE);
    let pinner = sim.pinner();
    // SAFETY: refused, so nothing is pinned.
    refused(unsafe { pinner.register(pages.at(), Bytes(PAGE as u64)) });
    let pin = pages.pin(sim, 0, PAGE);
    refused(sim.create_stream());
    let a = sim.create_stream().unwrap();
    refused(sim.create_event(Timing::Off));
    let done = event(sim);
    let before = sim.memory().unwrap();
    refused(sim.alloc_device(Bytes(PAGE as u64), a));
    assert_eq!(sim.memory().unwrap(), before);
    let device = alloc(sim, PAGE, a);
    pages.write(0, &pattern(1, PAGE));
    refused(sim.copy_out(pin, device, a));
    sim.sync().unwrap();
    assert_eq!(pages.read(0, PAGE), pattern(1, PAGE), "the refused copy was not enqueued");
    sim.copy_out(pin, device, a).unwrap();
    refused(sim.record(done, a));
    let fresh = sim.query(done, Site::Outside).unwrap_err();
    assert_eq!(fresh.misuse(), Some(Misuse::FreshEvent), "the refused recording never was");
    sim.record(done, a).unwrap();
    refused(sim.wait(a, done, Site::Outside));
    sim.wait(a, done, Site::Outside).unwrap();
    refused(sim.query(done, Site::Outside));
    assert!(sim.query(done, Site::Outside).unwrap());
    let cost = Cost { flops: 0.0, bytes: 0.0, work: lightering::backend::Work::Vector };
    refused(sim.launch_fn(a, &[], cost, Box::new(|_| Ok(()))));
    sim.launch_fn(a, &[], cost, Box::new(|_| Ok(()))).unwrap();
    sim.sync().unwrap();
}

#[test]
fn a_call_that_is_wrong_by_itself_does_not_use_a_fault_up() {
    let sim = &mut open(eager(), FaultPlan::default().at(Spot::Alloc, 1, Fault::Refuse));
    let a = sim.create_stream().unwrap();
    let empty = sim.alloc_device(Bytes(0), a).unwrap_err();
    assert_eq!(empty.misuse(), Some(Misuse::Empty));
    refused(sim.alloc_device(Bytes(8), a));
    alloc(sim, 8, a);
}

#[test]
fn a_query_is_held_back_as_often_as_ordered() {
    let sim = &mut open(eager(), FaultPlan::default().at(Spot::Query, 2, Fault::NotReady(3)));
    let a = sim.create_stream().unwrap();
    let done = event(sim);
    sim.record(done, a).unwrap();
    let answers = [0; 6].map(|_| sim.query(done, Site::Outside).unwrap());
    assert_eq!(answers, [true, false, false, false, true, true]);
}

#[test]
fn a_stalled_stream_stands_still_while_others_go_on() {
    for config in [eager(), Config::timed(Model::default())] {
        let timed = matches!(config.clock, lightering::backend::sim::Clock::Timed(_));
        let sim = &mut open(config, FaultPlan::default().at(Spot::Record, 1, Fault::Stall(500)));
        let [slow, quick] = [0; 2].map(|_| sim.create_stream().unwrap());
        let [late, early] = [0; 2].map(|_| event(sim));
        let start = sim.world().now();
        sim.record(late, slow).unwrap();
        sim.record(early, quick).unwrap();
        until_done(sim, early);
        let waited = sim.world().now() - start;
        until_done(sim, late);
        let stalled = sim.world().now() - start;
        // Microseconds of the timed clock, steps of the other.
        let unit = if timed { 1_000 } else { 1 };
        assert!(stalled.as_nanos() >= 500 * unit, "{stalled:?}");
        assert!(!timed || waited.as_nanos() < 5_000, "{waited:?}");
    }
}

#[test]
fn a_stall_ends_for_a_host_that_waits() {
    for config in [eager(), Config::adversary(3), Config::scheduled(Box::new(Lazy::default()))] {
        let sim = &mut open(config, FaultPlan::default().at(Spot::Copy, 1, Fault::Stall(10_000)));
        let (pages, pin) = Pages::pinned(sim, PAGE);
        let a = sim.create_stream().unwrap();
        let device = alloc(sim, PAGE, a);
        sim.copy_out(pin, device, a).unwrap();
        sim.sync().unwrap();
        assert_eq!(pages.read(0, PAGE), vec![0xa1; PAGE]);
    }
}

#[test]
fn a_lost_device_says_so_with_the_name_of_the_first_verb_to_see_it() {
    for call in 1..12 {
        let plan = FaultPlan::default().at(Spot::Any, call, Fault::Fatal(700));
        let world = World::new(Config { faults: plan, ..Config::adversary(call) });
        let (mut one, mut two) = (world.device(0).unwrap(), world.device(0).unwrap());
        let first = lose(&mut one).unwrap_err();
        assert_eq!((first.kind(), first.driver_code()), (Kind::Lost, Some(700)));
        let names = [
            "create_stream",
            "alloc_device",
            "create_event",
            "record",
            "wait",
            "query",
            "memory",
            "free_device",
            "elapsed",
            "capturing",
            "sync",
        ];
        assert_eq!(first.op(), names[call as usize - 1]);
        for later in [two.sync(), two.memory().map(drop), one.adopt_stream(0).map(drop)] {
            assert_eq!(later.unwrap_err(), first);
        }
        assert_eq!(two.fence().done(event_of_nobody(&world)).unwrap_err(), first);
        assert_eq!(one.pinner().unregister(Default::default()).unwrap_err(), first);
    }
}

/// Eleven verbs in a fixed order.
fn lose(sim: &mut Sim) -> Result<()> {
    let a = sim.create_stream()?;
    let device = sim.alloc_device(Bytes(8), a)?;
    let done = sim.create_event(Timing::On)?;
    sim.record(done, a)?;
    sim.wait(a, done, Site::Outside)?;
    sim.query(done, Site::Outside)?;
    sim.memory()?;
    sim.free_device(device, a)?;
    match sim.elapsed(done, done) {
        Err(error) if error.kind() != Kind::Busy => return Err(error),
        _ => {}
    }
    sim.capturing(a)?;
    sim.sync()
}

fn event_of_nobody(world: &World) -> lightering::EventId {
    event(&mut world.device(1).unwrap())
}

#[test]
fn a_copy_in_flight_when_the_device_is_lost_stays_torn() {
    let mut torn = 0;
    for seed in 0..100 {
        let plan = FaultPlan::default().at(Spot::Record, 1, Fault::Fatal(700));
        let sim = &mut open(Config::adversary(seed), plan);
        let (pages, pin) = Pages::pinned(sim, PAGE);
        let a = sim.create_stream().unwrap();
        let device = alloc(sim, PAGE, a);
        let done = event(sim);
        sim.copy_out(pin, device, a).unwrap();
        for _ in 0..3 {
            sim.world().host_work(std::time::Duration::from_micros(1));
        }
        assert!(sim.record(done, a).unwrap_err().is_lost());
        let before = pages.read(0, PAGE);
        assert!(sim.sync().unwrap_err().is_lost());
        assert_eq!(pages.read(0, PAGE), before, "a lost device moves nothing");
        let moved = before.iter().filter(|byte| **byte == 0xa1).count();
        torn += usize::from(moved > 0 && moved < PAGE);
    }
    assert!(torn > 5, "{torn} of 100");
}

#[test]
fn faults_by_chance_replay_and_leave_the_device_alive() {
    let run = |seed: u64| {
        let plan = FaultPlan::default().by_chance(seed, 200_000);
        let sim = &mut open(Config::adversary(1), plan);
        let streams: Vec<_> = (0..8).filter_map(|_| sim.create_stream().ok()).collect();
        let failures: Vec<bool> = (0..40)
            .map(|round| {
                let taken = sim.alloc_device(Bytes(256), streams[round % streams.len()]);
                taken.is_err_and(|error| {
                    assert!(error.is_retryable(), "{error}");
                    true
                })
            })
            .collect();
        sim.sync().unwrap();
        failures
    };
    let counts: Vec<usize> =
        (0..20).map(|seed| run(seed).iter().filter(|bad| **bad).count()).collect();
    let sum: usize = counts.iter().sum();
    assert!((80..260).contains(&sum), "about a fifth of 800 fail: {sum}");
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn a_call_rejected_with_another_code_is_no_want_of_memory() {
    for (code, misuse) in [(712, Misuse::Overlap), (800, Misuse::BadValue), (801, Misuse::BadValue)]
    {
        let plan = FaultPlan::default().at(Spot::Register, 1, Fault::Reject(code));
        let sim = open(eager(), plan);
        let mut pages = Pages::new(PAGE);
        let pinner = sim.pinner();
        // SAFETY: rejected, so nothing is pinned.
        let error = unsafe { pinner.register(pages.at(), Bytes(PAGE as u64)) }.unwrap_err();
        assert_eq!((error.misuse(), error.driver_code()), (Some(misuse), Some(code)));
        pages.pin(&sim, 0, PAGE);
        assert_eq!(sim.world().faults_struck(), 1);
    }
}

#[test]
fn a_slow_copy_takes_as_many_times_as_long_and_holds_up_nobody_else() {
    for config in [eager(), Config::timed(Model::default())] {
        let timed = matches!(config.clock, lightering::backend::sim::Clock::Timed(_));
        let plan = FaultPlan::default().at(Spot::Copy, 2, Fault::Slow(100));
        let sim = &mut open(config, plan);
        let (_pages, pin) = Pages::pinned(sim, PAGE);
        let [a, b] = [0; 2].map(|_| sim.create_stream().unwrap());
        let device = alloc(sim, PAGE, a);
        let [plain, slow, other] = [0; 3].map(|_| event(sim));
        let start = sim.world().now();
        sim.copy_out(pin, device, a).unwrap();
        sim.record(plain, a).unwrap();
        until_done(sim, plain);
        let once = sim.world().now() - start;
        let start = sim.world().now();
        sim.copy_out(pin, device, a).unwrap();
        sim.record(slow, a).unwrap();
        sim.record(other, b).unwrap();
        until_done(sim, other);
        assert!(!timed || !sim.query(slow, Site::Outside).unwrap());
        until_done(sim, slow);
        let long = sim.world().now() - start;
        // 4 KiB take 74 ns at 55 GB/s; the start takes no longer than before. Or: one stop a piece.
        let least =
            if timed { once + Duration::from_micros(7) } else { Duration::from_nanos(1500) };
        assert!(long >= least, "{once:?}, then {long:?}");
    }
}

#[test]
fn a_third_partys_capture_ends_by_itself_and_spares_streams_nobody_else_knows() {
    let plan = FaultPlan::default().at(Spot::Record, 1, Fault::Capture(3));
    let plan = plan.at(Spot::Record, 2, Fault::Capture(3));
    let sim = &mut open(eager(), plan);
    let own = sim.create_stream().unwrap();
    let known = sim.create_stream().unwrap();
    let raw = sim.raw_stream(known).unwrap();
    let known = sim.adopt_stream(raw).unwrap();
    let done = event(sim);
    sim.record(done, own).unwrap();
    assert_eq!(sim.record(done, known).unwrap_err().misuse(), Some(Misuse::Capturing));
    assert!(sim.capturing(known).unwrap());
    assert_eq!(sim.wait(known, done, Site::Outside).unwrap_err().misuse(), Some(Misuse::Capturing));
    assert!(!sim.capturing(known).unwrap());
    sim.record(done, known).unwrap();
    // The one on a stream that nobody else knows struck nothing.
    assert_eq!((sim.world().faults_met(), sim.world().faults_struck()), (vec![false, true], 1));
}

#[test]
fn a_fault_whose_call_never_came_has_not_struck() {
    let rules = [(Spot::Record, 2), (Spot::CreateStream, 1), (Spot::Record, 1)];
    let plan = rules
        .into_iter()
        .fold(FaultPlan::default(), |plan, (spot, nth)| plan.at(spot, nth, Fault::Refuse));
    let sim = &mut open(eager(), plan);
    let done = event(sim);
    sim.create_stream().unwrap_err();
    let stream = sim.create_stream().unwrap();
    sim.record(done, stream).unwrap_err();
    assert_eq!(
        (sim.world().faults_met(), sim.world().faults_struck()),
        (vec![false, true, true], 2)
    );
    // A device that is lost already is not lost again.
    let plan = FaultPlan::default().at(Spot::Any, 1, Fault::Fatal(700));
    let sim = &mut open(eager(), plan.at(Spot::Any, 2, Fault::Fatal(719)));
    for _ in 0..2 {
        assert_eq!(sim.create_stream().unwrap_err().driver_code(), Some(700));
    }
    assert_eq!(sim.world().faults_met(), [true, false]);
}
