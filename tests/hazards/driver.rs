//! Hazards of the driver, H47 to H69: calls that fail, devices that are lost, and streams that are
//! somebody else's, seen through the engine. Those that need a driver's own codes are in
//! `tests/cuda_fake/`.

use crate::bench::{
    LEN, acquire, adopted, bounds, evict, flush, lazy, owned, read, release, with_faults,
};
use crate::support::codes::FATAL;
use crate::support::{Rig, first_wrong, quick_pool};
use lightering::backend::sim::{Config, Eager, Fault, FaultPlan, Sim, Spot, World};
use lightering::backend::{Backend, Timing};
use lightering::policy::Kept;
use lightering::storage::{Residency, Tier};
use lightering::{
    Acquire, Bytes, Engine, Error, Evict, Kind, Misuse, Options, PinnedPool, Result, Storage,
    StorageId, StreamId,
};

/// A device that refuses page-locked memory from the `first` to the `last` request on.
fn refusing(first: u64, last: u64) -> (World, Options) {
    let refuse = |plan: FaultPlan, nth| plan.at(Spot::Register, nth, Fault::Refuse);
    let faults = (first..=last).fold(FaultPlan::default(), refuse);
    (World::new(Config { faults, ..Config::scheduled(Box::new(Eager)) }), bounds())
}

#[test]
fn h48_pinned_memory_that_is_refused_leaves_what_there_is_unharmed() {
    // The first arena is there; more are refused for a while.
    let (world, bounds) = refusing(2, 40);
    let mut sim = world.device(0).unwrap();
    let pool = lightering::PoolOptions { arena_bytes: Bytes::kib(8), ..quick_pool(Bytes::mib(1)) };
    let pool = PinnedPool::new(sim.pinner(), pool).unwrap();
    let mut engine = Engine::new(Box::new(world.device(0).unwrap()), &pool, bounds).unwrap();
    let stream = sim.create_stream().unwrap();
    let on = engine.adopt_stream(sim.raw_stream(stream).unwrap()).unwrap();
    let storages: Vec<_> = (0..4).map(|_| engine.alloc(Bytes::kib(8), on, "x").unwrap()).collect();
    let became: Vec<_> = storages.iter().map(|one| engine.evict(one.id(), on).unwrap()).collect();
    assert!(matches!(became[0], Evict::Moving(_)), "{became:?}");
    assert_eq!(became[1..], [Evict::Kept(Kept::NoPinnedRoom); 3]);
    for storage in &storages[1..] {
        assert_eq!(engine.residency(storage.id()).unwrap(), Residency::Resident);
    }
    // What is there goes on serving, and a smaller pool is no error at all.
    let mut bytes = [1; 64];
    engine.read_host(storages[0].id(), Bytes::ZERO, &mut bytes).unwrap();
    assert_eq!(pool.stats().pinned, Bytes::kib(8));
    drop(storages);
    engine.shutdown().unwrap();
    pool.audit();
    assert_eq!(pool.trim(), Bytes::kib(8));
}

#[test]
fn h53_an_engine_without_streams_or_events_leaves_nothing() {
    for nth in 1..=3 {
        let faults = FaultPlan::default().at(Spot::CreateStream, nth, Fault::Refuse);
        let world = World::new(Config { faults, ..Config::adversary(1) });
        let pinner = world.device(0).unwrap().pinner();
        let pool = PinnedPool::new(pinner, quick_pool(Bytes::kib(64))).unwrap();
        let device = Box::new(world.device(0).unwrap());
        let refused = Engine::new(device, &pool, bounds()).unwrap_err();
        assert_eq!(refused.kind(), Kind::OutOfMemory, "lane {nth}: {refused}");
        assert_eq!(pool.stats().lent, Bytes::ZERO);
        // The next one opens.
        let device = Box::new(world.device(0).unwrap());
        Engine::new(device, &pool, bounds()).unwrap().shutdown().unwrap();
    }
    // Each event of a round trip in turn: nothing changed, or what the verb says; then it works.
    // (The first event is the framework's own.)
    for nth in 2..=9 {
        let faults = FaultPlan::default().at(Spot::CreateEvent, nth, Fault::Refuse);
        let mut rig = with_faults(faults, 1);
        let on = rig.streams[0].engine;
        let storage = owned(&mut rig, 0, LEN, 1);
        let id = storage.id();
        again(&mut rig, id, |rig| rig.engine.evict(id, on).map(drop));
        again(&mut rig, id, |rig| rig.engine.flush(on));
        again(&mut rig, id, |rig| rig.engine.acquire(id, on).map(drop));
        let range = acquire(&mut rig, 0, &storage);
        rig.check(0, range, 1, format!("event {nth} refused"));
        release(&mut rig, 0, storage);
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

/// Calls until the one refusal is over; a refused call changes nothing.
#[track_caller]
fn again(rig: &mut Rig, id: StorageId, call: impl Fn(&mut Rig) -> Result<()>) {
    let before = rig.engine.residency(id).unwrap();
    if let Err(error) = call(rig) {
        assert!(error.is_retryable(), "{error}");
        assert_eq!(rig.engine.residency(id).unwrap(), before, "{error}");
        call(rig).unwrap();
    }
}

/// An engine with a stream and three storages, if the device lets it come so far.
struct Opened {
    _sim: Sim,
    pool: PinnedPool,
    engine: Engine,
    on: StreamId,
    storages: Vec<Storage>,
}

fn open(world: &World) -> Result<Opened> {
    let mut sim = world.device(0)?;
    let pool = PinnedPool::new(sim.pinner(), quick_pool(Bytes::kib(64)))?;
    let mut engine = Engine::new(Box::new(world.device(0)?), &pool, bounds())?;
    let stream = sim.create_stream()?;
    let on = engine.adopt_stream(sim.raw_stream(stream)?)?;
    let storages = (0..3).map(|_| engine.alloc(LEN, on, "x")).collect::<Result<_>>()?;
    Ok(Opened { _sim: sim, pool, engine, on, storages })
}

impl Opened {
    /// Goes through round trips until the device is lost; the first error to say so.
    fn until_lost(&mut self) -> Option<Error> {
        let on = self.on;
        self.storages.iter().find_map(|storage| {
            let results = [
                self.engine.evict(storage.id(), on).map(drop),
                self.engine.flush(on),
                self.engine.acquire(storage.id(), on).map(drop),
                self.engine.step(),
            ];
            results.into_iter().find_map(|result| result.err())
        })
    }

    /// After a loss every verb says the same, without a driver call, and nothing is unpinned.
    #[track_caller]
    fn stays_lost(self, first: &Error, code: u32) {
        let Opened { _sim, pool, mut engine, on, storages } = self;
        assert_eq!((first.kind(), first.driver_code()), (Kind::Lost, Some(code)), "{first}");
        let (id, seam) = (storages[0].id(), engine.stats().seam);
        for later in [
            engine.evict(id, on).map(drop),
            engine.acquire(id, on).map(drop),
            engine.releasable(on).map(drop),
            engine.wanted(on).map(drop),
            engine.read_host(id, Bytes::ZERO, &mut [0; 8]),
            engine.take(id),
            engine.step(),
            engine.drain(),
        ] {
            let later = later.unwrap_err();
            let told = (later.kind(), later.op(), later.driver_code());
            assert_eq!(told, (Kind::Lost, first.op(), Some(code)), "{later}");
        }
        assert_eq!(engine.stats().seam, seam, "the driver was called after the loss");
        assert_eq!(engine.residency(id).unwrap(), Residency::Lost);
        drop((engine, storages));
        assert_eq!((pool.stats().lent, pool.stats().busy), (Bytes::ZERO, Bytes::ZERO));
    }
}

#[test]
fn h54_h68_a_device_lost_at_any_call_is_told_once_and_touched_no_more() {
    // Somebody else's kernel faults, or the MPS server goes: at whichever call it is seen.
    for code in [700, 810] {
        let mut seen = Vec::new();
        for nth in 1.. {
            let faults = FaultPlan::default().at(Spot::Any, nth, Fault::Fatal(code));
            let world = World::new(Config { faults, ..Config::adversary(nth) });
            let mut opened = match open(&world) {
                Ok(opened) => opened,
                Err(error) => {
                    assert_eq!((error.kind(), error.driver_code()), (Kind::Lost, Some(code)));
                    continue;
                }
            };
            let Some(first) = opened.until_lost() else { break };
            seen.push(first.call().unwrap_or(first.op()));
            opened.stays_lost(&first, code);
            assert_eq!(world.removals_refused(), 0, "call {nth}: unpinned under a copy");
        }
        seen.sort_unstable();
        seen.dedup();
        println!("{code} was first seen in {seen:?}");
        assert!(seen.len() > 5, "{seen:?}");
    }
}

#[test]
fn h55_every_fatal_code_is_a_loss_and_keeps_its_number() {
    for code in FATAL {
        let faults = FaultPlan::default().at(Spot::Copy, 2, Fault::Fatal(code));
        let world = World::new(Config { faults, ..Config::adversary(u64::from(code)) });
        let mut opened = open(&world).unwrap();
        let first = opened.until_lost().expect("the second copy finds it");
        opened.stays_lost(&first, code);
    }
}

/// The list that tests go by is the engine's own.
#[cfg(feature = "cuda")]
#[test]
fn h55_no_fatal_code_is_missing_from_the_list_of_the_tests() {
    use lightering::backend::cuda::{code_name, is_fatal};
    let is_named = |code: &u32| code_name(*code).starts_with("CUDA_ERROR_");
    let fatal: Vec<u32> = (1..1000).filter(|code| is_named(code) && is_fatal(*code)).collect();
    assert_eq!(fatal, FATAL);
}

#[test]
fn h56_a_loss_first_seen_by_a_poll_ends_the_polling() {
    let faults = FaultPlan::default().at(Spot::Query, 1, Fault::Fatal(719));
    let mut rig = with_faults(faults, 1);
    let storage = owned(&mut rig, 0, LEN, 1);
    evict(&mut rig, 0, &storage);
    let first = rig.engine.step().unwrap_err();
    assert_eq!((first.kind(), first.driver_code()), (Kind::Lost, Some(719)));
    let seam = rig.engine.stats().seam;
    assert_eq!(seam.queries, 0, "the one question was answered by the loss");
    // Nobody asks again, however often the caller polls.
    for _ in 0..10 {
        assert!(rig.engine.step().unwrap_err().is_lost());
        assert!(rig.engine.drain().unwrap_err().is_lost());
    }
    assert_eq!(rig.engine.stats().seam, seam);
}

#[test]
fn h58_a_copy_that_never_ends_holds_up_nobody_and_frees_nothing() {
    let faults = FaultPlan::default().at(Spot::Copy, 1, Fault::Stall(u32::MAX));
    let config = Config { faults, ..Config::adversary(1) };
    let patience = std::time::Duration::ZERO;
    let bounds = Options { drop_deadline: patience, unreleased_bytes_max: Bytes::MAX, ..bounds() };
    let mut rig = Rig::new(config, quick_pool(Bytes::kib(64)), bounds, 1);
    let (stuck, other) = (owned(&mut rig, 0, LEN, 1), owned(&mut rig, 0, LEN, 2));
    let Evict::Moving(ticket) = evict(&mut rig, 0, &stuck) else { panic!() };
    for _ in 0..200 {
        // A step asks, and returns.
        rig.engine.step().unwrap();
        assert!(!rig.engine.is_done(ticket).unwrap());
    }
    assert_eq!(rig.engine.residency(stuck.id()).unwrap(), Residency::Evicting);
    assert_eq!(rig.engine.memory().unwrap().allocated, Bytes(2 * LEN.0), "nothing went");
    let early = rig.engine.read_host(stuck.id(), Bytes::ZERO, &mut [0; 8]).unwrap_err();
    assert_eq!(early.kind(), Kind::Busy);
    // Who wants the bytes has them where they still are; others never left.
    read(&mut rig, 0, &stuck, 1);
    read(&mut rig, 0, &other, 2);
    let Rig { engine, pool, .. } = rig;
    drop(engine);
    assert!(pool.stats().quarantined > Bytes::ZERO, "what it writes is lent to nobody");
    drop((stuck, other));
}

#[test]
fn h62_a_copy_whose_end_cannot_be_recorded_is_waited_for() {
    // The producer's record works, the copy's own is refused.
    for nth in 1..=4 {
        let faults = FaultPlan::default().at(Spot::Record, nth, Fault::Refuse);
        let mut rig = with_faults(faults, 1);
        let storage = owned(&mut rig, 0, LEN, 1);
        let on = rig.streams[0].engine;
        let first = rig.engine.evict(storage.id(), on);
        if let Err(error) = &first {
            assert_eq!(error.kind(), Kind::OutOfMemory, "{error}");
            assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Resident);
            // Its block went back, and nothing writes it any more.
            assert_eq!(rig.pool.stats().lent, Bytes::ZERO);
            let range = acquire(&mut rig, 0, &storage);
            rig.check(0, range, 1, "still there".into());
            assert!(matches!(evict(&mut rig, 0, &storage), Evict::Moving(_)));
        }
        again(&mut rig, storage.id(), |rig| rig.engine.flush(on));
        let id = storage.id();
        again(&mut rig, id, |rig| rig.engine.acquire(id, on).map(drop));
        read(&mut rig, 0, &storage, 1);
        release(&mut rig, 0, storage);
        rig.assert_right();
        rig.assert_nothing_left();
    }
}

#[test]
fn h63_not_yet_a_thousand_times_is_no_spin() {
    let faults = FaultPlan::default().at(Spot::Query, 1, Fault::NotReady(1000));
    let mut rig = with_faults(faults, 1);
    let storage = owned(&mut rig, 0, LEN, 1);
    let Evict::Moving(ticket) = evict(&mut rig, 0, &storage) else { panic!() };
    rig.sim.sync().unwrap();
    let before = rig.engine.stats().seam.queries;
    rig.engine.step().unwrap();
    let asked = rig.engine.stats().seam.queries - before;
    assert!(asked <= 2, "one step asked {asked} times");
    let polls = (0..2000).take_while(|_| !rig.engine.is_done(ticket).unwrap()).count();
    assert!((900..1001).contains(&polls), "{polls}");
}

#[test]
fn h64_nothing_of_the_engine_gets_into_a_capture() {
    let mut rig = lazy(1);
    let on = rig.streams[0].engine;
    let (going, away) = (owned(&mut rig, 0, LEN, 1), owned(&mut rig, 0, LEN, 2));
    evict(&mut rig, 0, &away);
    flush(&mut rig, 0);
    let theirs = rig.streams[0].here;
    rig.sim.inner().set_capturing(theirs, true).unwrap();
    let before = rig.engine.stats().seam;
    for refused in [
        rig.engine.evict(going.id(), on).map(drop),
        rig.engine.acquire(away.id(), on).map(drop),
        rig.engine.alloc(LEN, on, "x").map(drop),
        rig.engine.flush(on),
        rig.engine.releasable(on).map(drop),
        rig.engine.wanted(on).map(drop),
    ] {
        assert_eq!(refused.unwrap_err().misuse(), Some(Misuse::Capturing));
    }
    assert_eq!(rig.engine.stats().seam, before, "nothing was enqueued");
    assert!(rig.sim.capturing(theirs).unwrap(), "the capture is still under way");
    rig.sim.inner().set_capturing(theirs, false).unwrap();
    read(&mut rig, 0, &away, 2);
    read(&mut rig, 0, &going, 1);
    rig.assert_right();
}

#[test]
fn h67_bytes_and_streams_of_another_device_are_refused() {
    let world = World::new(Config::adversary(1));
    let (mut here, mut there) = (world.device(0).unwrap(), world.device(1).unwrap());
    let pool = PinnedPool::new(here.pinner(), quick_pool(Bytes::kib(64))).unwrap();
    let mut engine = Engine::new(Box::new(world.device(0).unwrap()), &pool, bounds()).unwrap();
    let (stream, other) = (here.create_stream().unwrap(), there.create_stream().unwrap());
    engine.adopt_stream(here.raw_stream(stream).unwrap()).unwrap();
    let refused = engine.adopt_stream(there.raw_stream(other).unwrap()).unwrap_err();
    assert!(matches!(refused.kind(), Kind::Usage(_)), "{refused}");
    let at = there.alloc_device(LEN, other).unwrap();
    let range = lightering::DeviceRange::new(at, LEN).unwrap();
    let refused = engine.adopt(range, "of another device").unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::WrongDevice), "{refused}");
    assert!(refused.to_string().contains("of another device"), "{refused}");
    engine.shutdown().unwrap();
    there.free_device(at, other).unwrap();
}

#[test]
fn h69_bytes_that_are_somebody_elses_are_never_freed_by_the_engine() {
    // Such as those that came by IPC: they are adopted like any others, and their owner's to end.
    let mut rig = lazy(1);
    let on = rig.streams[0].engine;
    let timed = rig.sim.create_event(Timing::Off).unwrap();
    let (first, range) = adopted(&mut rig, 0, 1);
    let (second, other) = adopted(&mut rig, 0, 2);
    let (third, last) = adopted(&mut rig, 0, 3);
    let held = rig.sim.memory().unwrap().allocated;
    evict(&mut rig, 0, &first);
    flush(&mut rig, 0);
    assert_eq!(rig.engine.releasable(on).unwrap(), Some(first.id()), "said, and no more");
    assert_eq!(rig.engine.residency(first.id()).unwrap(), Residency::Evicted(Tier::Host));
    assert_eq!(rig.engine.acquire(first.id(), on).unwrap(), Acquire::NeedsRoom(LEN));
    release(&mut rig, 0, second);
    drop(third);
    rig.engine.drain().unwrap();
    let frees = rig.engine.stats().seam.frees;
    drop(first);
    rig.engine.shutdown().unwrap();
    assert_eq!((frees, rig.sim.memory().unwrap().allocated), (0, held));
    for range in [range, other, last] {
        rig.give(0, range.at());
    }
    rig.sim.record(timed, rig.streams[0].here).unwrap();
    rig.sim.sync().unwrap();
}

#[test]
fn h47_bytes_without_room_on_the_device_stay_safe_on_the_host() {
    let mut config = Config::scheduled(Box::new(Eager));
    config.device_bytes = Bytes::kib(16);
    let mut rig = Rig::new(config, quick_pool(Bytes::kib(64)), bounds(), 1);
    let on = rig.streams[0].engine;
    let storage = owned(&mut rig, 0, LEN, 1);
    evict(&mut rig, 0, &storage);
    flush(&mut rig, 0);
    let mut hog = Vec::new();
    while let Ok(range) = rig.take(0, LEN) {
        hog.push(range);
    }
    for _ in 0..3 {
        let full = rig.engine.acquire(storage.id(), on).unwrap_err();
        assert_eq!((full.kind(), full.name()), (Kind::OutOfMemory, Some("owned".into())));
        assert_eq!(rig.engine.residency(storage.id()).unwrap(), Residency::Evicted(Tier::Host));
        let mut bytes = [0; LEN.0 as usize];
        rig.engine.read_host(storage.id(), Bytes::ZERO, &mut bytes).unwrap();
        assert_eq!(first_wrong(&bytes, 1), None);
    }
    rig.give(0, hog.pop().unwrap().at());
    read(&mut rig, 0, &storage, 1);
    rig.assert_right();
}
