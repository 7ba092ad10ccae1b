//! Promises of mapped memory: addresses that stay while the memory behind them comes and goes.

use crate::rig::{Pages, Rig, chain, event, part, pattern, until_done};
use lightering::backend::Backend;
use lightering::{Bytes, DeviceRange, Kind, MemoryId, Misuse, StreamId};

/// The granularity; `None`, said aloud, where the device cannot map memory.
fn granularity(backend: &mut dyn Backend) -> Option<Bytes> {
    match backend.map_granularity() {
        Ok(granularity) => Some(granularity),
        Err(why) => {
            println!("promises of mapping were NOT asked: {why}");
            None
        }
    }
}

/// Writes a pattern into mapped bytes and reads it back, through one end and the other.
fn there_and_back(backend: &mut dyn Backend, range: DeviceRange, on: StreamId, seed: u8) {
    let len = range.len().0 as usize;
    let (pages, pin) = Pages::pinned(backend, 2 * len);
    pages.write(0, &pattern(seed, len));
    backend.copy_in(range, part(pin, 0, len), on).unwrap();
    backend.copy_out(part(pin, len, len), range, on).unwrap();
    let done = event(backend);
    backend.record(done, on).unwrap();
    until_done(backend, done);
    backend.close_event(done).unwrap();
    assert_eq!(pages.read(len, len), pattern(seed, len), "seed {seed}");
}

pub(crate) fn bytes_come_and_go_and_their_address_stays(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let Some(unit) = granularity(backend) else { return };
    let a = backend.create_stream().unwrap();
    let range = backend.reserve_range(unit).unwrap();
    let memory = backend.create_memory(unit).unwrap();
    for seed in 0..3 {
        backend.map_memory(range, &[memory]).unwrap();
        there_and_back(backend, range, a, seed);
        backend.unmap_memory(range).unwrap();
    }
    backend.close_memory(memory).unwrap();
    backend.release_range(range).unwrap();
}

pub(crate) fn mapped_bytes_are_known_as_an_allocation(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let Some(unit) = granularity(backend) else { return };
    let range = backend.reserve_range(Bytes(2 * unit.0)).unwrap();
    let memory = backend.create_memory(Bytes(2 * unit.0)).unwrap();
    let is_none = |backend: &mut dyn Backend| {
        let error = backend.allocation(range.at()).unwrap_err();
        assert_eq!(error.misuse(), Some(Misuse::OutOfRange), "{error}");
    };
    backend.map_memory(range, &[memory]).unwrap();
    match backend.allocation(range.at()).unwrap() {
        Some(whole) => assert!(whole.contains(range)),
        None => return,
    }
    let second = range.at().offset(unit).unwrap();
    assert!(backend.allocation(second).unwrap().is_some_and(|whole| whole.contains(range)));
    backend.unmap_memory(range).unwrap();
    is_none(backend);
    backend.close_memory(memory).unwrap();
    backend.release_range(range).unwrap();
    is_none(backend);
}

pub(crate) fn several_pieces_of_memory_are_one_range(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let Some(unit) = granularity(backend) else { return };
    let a = backend.create_stream().unwrap();
    let range = backend.reserve_range(Bytes(3 * unit.0)).unwrap();
    let other = backend.reserve_range(unit).unwrap();
    assert!(!range.overlaps(other));
    let one = backend.create_memory(unit).unwrap();
    let two = backend.create_memory(Bytes(2 * unit.0)).unwrap();
    backend.map_memory(range, &[two, one]).unwrap();
    there_and_back(backend, range, a, 1);
    backend.unmap_memory(range).unwrap();
    // The same memory serves elsewhere.
    backend.map_memory(other, &[one]).unwrap();
    there_and_back(backend, other, a, 2);
    backend.unmap_memory(other).unwrap();
    for memory in [one, two] {
        backend.close_memory(memory).unwrap();
    }
    for range in [range, other] {
        backend.release_range(range).unwrap();
    }
}

pub(crate) fn mapped_bytes_are_bytes_of_every_stream(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let Some(unit) = granularity(backend) else { return };
    let len = unit.0 as usize;
    let streams = [backend.create_stream().unwrap(), backend.create_stream().unwrap()];
    let (pages, pin) = Pages::pinned(backend, 2 * len);
    pages.write(0, &pattern(7, len));
    let range = backend.reserve_range(unit).unwrap();
    let memory = backend.create_memory(unit).unwrap();
    backend.map_memory(range, &[memory]).unwrap();
    // No order with the mapping is needed: it took effect at once.
    backend.copy_in(range, part(pin, 0, len), streams[0]).unwrap();
    chain(backend, streams[0], streams[1]);
    backend.copy_out(part(pin, len, len), range, streams[1]).unwrap();
    backend.sync().unwrap();
    assert_eq!(pages.read(len, len), pattern(7, len));
    backend.unmap_memory(range).unwrap();
    backend.close_memory(memory).unwrap();
    backend.release_range(range).unwrap();
}

pub(crate) fn what_is_mapped_is_neither_mapped_again_nor_given_back(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let Some(unit) = granularity(backend) else { return };
    let (range, other) =
        (backend.reserve_range(unit).unwrap(), backend.reserve_range(unit).unwrap());
    let (memory, more) =
        (backend.create_memory(unit).unwrap(), backend.create_memory(unit).unwrap());
    let state = Some(Misuse::State);
    assert_eq!(backend.unmap_memory(range).unwrap_err().misuse(), state);
    backend.map_memory(range, &[memory]).unwrap();
    assert_eq!(backend.map_memory(range, &[more]).unwrap_err().misuse(), state);
    assert_eq!(backend.map_memory(other, &[memory]).unwrap_err().misuse(), state);
    assert_eq!(backend.release_range(range).unwrap_err().misuse(), state);
    assert_eq!(backend.close_memory(memory).unwrap_err().misuse(), state);
    backend.unmap_memory(range).unwrap();
    assert_eq!(backend.unmap_memory(range).unwrap_err().misuse(), state);
    for memory in [memory, more] {
        backend.close_memory(memory).unwrap();
        let again = backend.close_memory(memory).unwrap_err();
        assert_eq!(again.misuse(), Some(Misuse::Stale), "{again}");
        let stale = backend.map_memory(range, &[memory]).unwrap_err();
        assert_eq!(stale.misuse(), Some(Misuse::Stale), "{stale}");
    }
    for range in [range, other] {
        backend.release_range(range).unwrap();
        let again = backend.release_range(range).unwrap_err();
        assert_eq!(again.misuse(), Some(Misuse::OutOfRange), "{again}");
    }
    assert_eq!(backend.unmap_memory(range).unwrap_err().misuse(), Some(Misuse::OutOfRange));
}

pub(crate) fn mappings_that_do_not_fit_are_refused(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let Some(unit) = granularity(backend) else { return };
    for len in [Bytes(1), Bytes(unit.0 + 1), Bytes(unit.0 * 3 / 2)] {
        for refused in [backend.reserve_range(len).map(drop), backend.create_memory(len).map(drop)]
        {
            assert_eq!(refused.unwrap_err().misuse(), Some(Misuse::BadValue), "{len}");
        }
    }
    assert_eq!(backend.reserve_range(Bytes::ZERO).unwrap_err().misuse(), Some(Misuse::Empty));
    assert_eq!(backend.create_memory(Bytes::ZERO).unwrap_err().misuse(), Some(Misuse::Empty));
    let range = backend.reserve_range(Bytes(2 * unit.0)).unwrap();
    let memory = backend.create_memory(unit).unwrap();
    let mut map = |range: DeviceRange, memory: &[MemoryId]| {
        backend.map_memory(range, memory).unwrap_err().misuse()
    };
    assert_eq!(map(range, &[memory]), Some(Misuse::LengthMismatch));
    assert_eq!(map(range, &[]), Some(Misuse::LengthMismatch));
    assert_eq!(map(range, &[memory, memory]), Some(Misuse::State));
    let part = range.part(unit, unit).unwrap();
    assert_eq!(map(part, &[memory]), Some(Misuse::OutOfRange));
    let mut other = rig.user();
    let foreign = other.create_memory(Bytes(2 * unit.0)).unwrap();
    assert_eq!(map(range, &[foreign]), Some(Misuse::Foreign));
    let elsewhere = other.map_memory(range, &[foreign]).unwrap_err();
    assert_eq!(elsewhere.misuse(), Some(Misuse::OutOfRange), "{elsewhere}");
    other.close_memory(foreign).unwrap();
    backend.close_memory(memory).unwrap();
    backend.release_range(range).unwrap();
}

pub(crate) fn accounts_follow_memory_and_not_addresses(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let Some(unit) = granularity(backend) else { return };
    let range = backend.reserve_range(Bytes(4 * unit.0)).unwrap();
    assert_eq!(backend.memory().unwrap().allocated, Bytes::ZERO);
    let memory = backend.create_memory(Bytes(4 * unit.0)).unwrap();
    assert_eq!(backend.memory().unwrap().allocated, Bytes(4 * unit.0));
    backend.map_memory(range, &[memory]).unwrap();
    backend.unmap_memory(range).unwrap();
    assert_eq!(backend.memory().unwrap().allocated, Bytes(4 * unit.0));
    let total = backend.memory().unwrap().total;
    let much = Bytes((total.0 / unit.0 + 1) * unit.0);
    let refused = backend.create_memory(much).unwrap_err();
    assert_eq!(refused.kind(), Kind::OutOfMemory, "{refused}");
    backend.close_memory(memory).unwrap();
    let now = backend.memory().unwrap();
    assert_eq!((now.allocated, now.peak), (Bytes::ZERO, Bytes(4 * unit.0)));
    backend.release_range(range).unwrap();
}
