//! Memory that guesses and evicted storages keep, while somebody who asks for it is refused.

use crate::support::Rig;
use crate::{
    AWAY, LEN, acquire, assert_all_given_back, bounds, eager, evict, fixed, lazy, rig_of,
    until_gone, with_room,
};
use lightering::backend::Backend;
use lightering::backend::sim::{Config, Fault, FaultPlan, Spot};
use lightering::storage::Residency;
use lightering::trace::{Access, Use};
use lightering::{Acquire, Bytes, Kind, Misuse, Options};
use std::time::Duration;

#[test]
fn a_reader_out_of_turn_gets_the_memory_of_what_was_fetched_ahead() {
    for seed in 0..100 {
        let options =
            Options { prefetch_count_max: 1, memory_wait_max: Duration::from_secs(60), ..bounds() };
        let mut rig = rig_of(with_room(Config::adversary(seed), 2), options, 1);
        let mut all = Vec::new();
        for n in 0..3 {
            let (storage, at) = fixed(&mut rig, n);
            evict(&mut rig, &storage);
            until_gone(&mut rig, &storage);
            all.push((storage, at));
        }
        acquire(&mut rig, &all[2].0);
        assert_eq!(rig.engine.residency(all[1].0.id()).unwrap(), Residency::Refilling);
        // All the memory is in use, and half of it by a guess.
        let range = acquire(&mut rig, &all[0].0);
        rig.check(0, range, 0, format!("seed {seed}"));
        assert_eq!(rig.engine.residency(all[1].0.id()).unwrap(), AWAY);
        evict(&mut rig, &all[0].0);
        until_gone(&mut rig, &all[0].0);
        let range = acquire(&mut rig, &all[1].0);
        rig.check(0, range, 1, format!("seed {seed}: given up"));
        drop(all);
        assert_all_given_back(rig);
    }
}

#[test]
fn evicted_bytes_at_a_fixed_address_make_room_for_those_at_any() {
    let mut rig = rig_of(with_room(eager(), 1), bounds(), 1);
    let on = rig.streams[0].engine;
    let (a, at) = fixed(&mut rig, 1);
    evict(&mut rig, &a);
    // Nobody has asked since, though the device is idle.
    let owned = rig.engine.alloc(LEN, on, "owned").unwrap();
    assert_eq!(rig.engine.residency(a.id()).unwrap(), AWAY);
    rig.engine.release(owned, on).unwrap();
    assert_eq!(acquire(&mut rig, &a), at);
    rig.check(0, at, 1, "home again".into());
    drop(a);
    assert_all_given_back(rig);
}

#[test]
fn a_storage_that_finds_no_room_says_what_there_is_and_keeps_none_of_it() {
    // Room for two of its three pieces; and the same besides a storage that is there.
    for taken in [0, 1] {
        let mut rig =
            rig_of(Config { device_bytes: Bytes::kib(4 + 2 * taken), ..lazy() }, bounds(), 1);
        let on = rig.streams[0].engine;
        let there: Vec<_> = (0..taken)
            .map(|_| rig.engine.alloc_fixed(Bytes::kib(2), on, "there").unwrap())
            .collect();
        let error = rig.engine.alloc_fixed(Bytes::kib(6), on, "too large").unwrap_err();
        assert_eq!((error.kind(), error.driver_code()), (Kind::OutOfMemory, Some(2)));
        let told = error.to_string();
        let total = Bytes::kib(4 + 2 * taken);
        assert!(told.contains(&format!("{} of {total} are free", Bytes::kib(4))), "{told}");
        assert!(told.contains("too large") && told.contains("6.00 KiB"), "{told}");
        let stats = rig.engine.stats();
        assert_eq!((stats.idle_memory_bytes, stats.storages), (0, taken));
        assert_eq!(rig.sim.memory().unwrap().free, Bytes::kib(4), "the rest is everybody's");
        for storage in there {
            rig.engine.release(storage, on).unwrap();
        }
        assert_all_given_back(rig);
    }
}

#[test]
fn memory_that_was_idle_before_a_refused_try_is_idle_after_it() {
    let faults = FaultPlan::default().at(Spot::Map, 2, Fault::Reject(1));
    let mut rig = rig_of(Config { faults, ..eager() }, bounds(), 1);
    let on = rig.streams[0].engine;
    // One piece, which goes idle.
    let first = rig.engine.alloc_fixed(Bytes::kib(2), on, "first").unwrap();
    rig.engine.release(first, on).unwrap();
    rig.engine.drain().unwrap();
    assert_eq!(rig.engine.stats().idle_memory_bytes, 2048);
    // Two pieces, the idle one among them, which the device does not map.
    let refused = rig.engine.alloc_fixed(Bytes::kib(4), on, "refused").unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::BadValue), "{refused}");
    assert_eq!(rig.engine.stats().idle_memory_bytes, 2048, "and not the other one");
    let (storage, range) = fixed(&mut rig, 3);
    rig.check(0, range, 3, "afterwards".into());
    rig.engine.release(storage, on).unwrap();
    assert_all_given_back(rig);
}

/// A kernel there would be a device fault, and the end of the context.
#[test]
fn a_use_of_an_address_whose_bytes_are_away_is_refused_by_name() {
    let mut rig = rig_of(eager(), bounds(), 1);
    let on = rig.streams[0].engine;
    let (storage, range) = fixed(&mut rig, 1);
    let (other, besides) = fixed(&mut rig, 2);
    evict(&mut rig, &storage);
    until_gone(&mut rig, &storage);
    let last = range.part(Bytes(LEN.0 - 1), Bytes(1)).unwrap();
    let update = Use { access: Access::Update, span: last.into() };
    for one in [Use::read(range), Use::write(range), update] {
        let uses = [Use::write(besides), one];
        let error = rig.engine.note(on, &uses).unwrap_err();
        assert_eq!((error.misuse(), error.op()), (Some(Misuse::State), "note"), "{error}");
        assert_eq!(error.name().unwrap().as_str(), "weight");
        assert!(error.to_string().contains("not on the device"), "{error}");
    }
    // Nobody else can have it meanwhile, and its own storage has it again.
    let taken = rig.engine.adopt(range, "thief").unwrap_err();
    assert_eq!(taken.misuse(), Some(Misuse::Overlap));
    assert_eq!(acquire(&mut rig, &storage), range);
    rig.engine.note(on, &[Use::read(range), Use::write(last)]).unwrap();
    for storage in [storage, other] {
        rig.engine.release(storage, on).unwrap();
    }
    assert_all_given_back(rig);
}

/// A reader of bytes at any address, and a guess that holds the memory: one at a fixed address, or
/// another stream's.
#[test]
fn a_guess_of_any_kind_keeps_its_memory_from_no_reader() {
    for (guess_is_fixed, reader_is_fixed, streams) in
        [(true, false, 1), (false, false, 2), (false, true, 2), (true, true, 2)]
    {
        let options = Options {
            prefetch_count_max: 1,
            memory_bytes_max: Bytes::MAX,
            memory_pooled_bytes_min: Bytes::MAX,
            memory_wait_max: Duration::from_secs(60),
            ..bounds()
        };
        let mut rig = rig_of(with_room(eager(), 2), options, streams);
        let (one, other) = (rig.streams[0].engine, rig.streams[streams - 1].engine);
        let away = |rig: &mut Rig, is_fixed: bool, on, who: usize, seed| {
            let storage = match is_fixed {
                true => rig.engine.alloc_fixed(LEN, on, "x").unwrap(),
                false => rig.engine.alloc(LEN, on, "x").unwrap(),
            };
            let range = rig.engine.range(storage.id()).unwrap();
            rig.fill(who, range, seed);
            rig.engine.evict(storage.id(), on).unwrap();
            while rig.engine.residency(storage.id()).unwrap() != AWAY {
                rig.engine.flush(on).unwrap();
                rig.engine.mark_step().unwrap();
            }
            storage
        };
        let wanted = away(&mut rig, reader_is_fixed, other, streams - 1, 9);
        let guess = away(&mut rig, guess_is_fixed, one, 0, 1);
        let read = away(&mut rig, guess_is_fixed, one, 0, 2);
        let Acquire::Ready(range) = rig.engine.acquire(read.id(), one).unwrap() else { panic!() };
        rig.check(0, range, 2, "read".into());
        let story = format!("fixed: guess {guess_is_fixed}, reader {reader_is_fixed}");
        assert_eq!(rig.engine.residency(guess.id()).unwrap(), Residency::Refilling, "{story}");
        let acquired = rig.engine.acquire(wanted.id(), other).expect(&story);
        let Acquire::Ready(range) = acquired else { panic!() };
        rig.check(streams - 1, range, 9, story);
        assert_eq!(rig.engine.residency(guess.id()).unwrap(), AWAY);
        rig.assert_right();
    }
}
