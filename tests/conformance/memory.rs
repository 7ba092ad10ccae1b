//! Promises of memory: allocation in stream order, accounts, registrations.

use crate::rig::{PAGE, Pages, Rig, alloc, part, pattern};
use lightering::backend::Backend;
use lightering::{Bytes, DevicePtr, Kind, Misuse};

pub(crate) fn freed_bytes_are_not_lent_before_their_readers_are_done(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let rounds = 6;
    let (pages, pin) = Pages::pinned(backend, 2 * rounds * PAGE);
    let a = backend.create_stream().unwrap();
    // On one stream a freed range comes back at once, while its reader may still be queued.
    for round in 0..rounds {
        pages.write(round * PAGE, &pattern(round as u8, PAGE));
        let device = alloc(backend, PAGE, a);
        backend.copy_in(device, part(pin, round * PAGE, PAGE), a).unwrap();
        backend.copy_out(part(pin, (rounds + round) * PAGE, PAGE), device, a).unwrap();
        backend.free_device(device.at(), a).unwrap();
    }
    backend.sync().unwrap();
    for round in 0..rounds {
        let read = pages.read((rounds + round) * PAGE, PAGE);
        assert_eq!(read, pattern(round as u8, PAGE), "round {round}");
    }
}

pub(crate) fn streams_never_share_an_allocation(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let rounds = 12;
    let (pages, pin) = Pages::pinned(backend, 2 * rounds * PAGE);
    let streams = [backend.create_stream().unwrap(), backend.create_stream().unwrap()];
    // No event orders the two streams: the allocator alone keeps their bytes apart.
    for round in 0..rounds {
        let on = streams[round % 2];
        pages.write(round * PAGE, &pattern(round as u8, PAGE));
        let device = alloc(backend, PAGE, on);
        backend.copy_in(device, part(pin, round * PAGE, PAGE), on).unwrap();
        backend.copy_out(part(pin, (rounds + round) * PAGE, PAGE), device, on).unwrap();
        backend.free_device(device.at(), on).unwrap();
    }
    backend.sync().unwrap();
    for round in 0..rounds {
        let read = pages.read((rounds + round) * PAGE, PAGE);
        assert_eq!(read, pattern(round as u8, PAGE), "round {round}");
    }
}

pub(crate) fn accounts_follow_allocations_and_frees(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let a = backend.create_stream().unwrap();
    let one = alloc(backend, 3 * PAGE, a);
    let two = alloc(backend, 1000, a);
    backend.free_device(one.at(), a).unwrap();
    let memory = backend.memory().unwrap();
    assert_eq!(memory.allocated, Bytes(1000));
    assert_eq!(memory.peak, Bytes(3 * PAGE as u64 + 1000));
    assert!(memory.free <= memory.total && !memory.total.is_zero());
    assert!(memory.total <= backend.about().memory);
    backend.reset_peak();
    assert_eq!(backend.memory().unwrap().peak, Bytes(1000));
    backend.free_device(two.at(), a).unwrap();
    assert_eq!(backend.memory().unwrap().allocated, Bytes::ZERO);
    // Another user's account is its own.
    assert_eq!(rig.user().memory().unwrap().peak, Bytes::ZERO);
    backend.sync().unwrap();
}

pub(crate) fn too_large_an_allocation_changes_nothing(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let a = backend.create_stream().unwrap();
    let kept = alloc(backend, PAGE, a);
    let total = backend.memory().unwrap().total;
    for len in [total + total, Bytes(1 << 50)] {
        let refused = backend.alloc_device(len, a).unwrap_err();
        assert_eq!(refused.kind(), Kind::OutOfMemory, "{len}");
        assert!(refused.is_retryable());
        assert_eq!(backend.memory().unwrap().allocated, Bytes(PAGE as u64));
    }
    let next = alloc(backend, PAGE, a);
    assert!(!next.overlaps(kept));
    backend.free_device(kept.at(), a).unwrap();
    backend.free_device(next.at(), a).unwrap();
    backend.sync().unwrap();
}

pub(crate) fn allocations_are_aligned_and_disjoint(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let a = backend.create_stream().unwrap();
    let ranges: Vec<_> =
        [1, 255, 256, 257, PAGE, 3].iter().map(|len| alloc(backend, *len, a)).collect();
    for (index, range) in ranges.iter().enumerate() {
        assert_eq!(range.at().0 % 256, 0);
        assert!(ranges[..index].iter().all(|other| !other.overlaps(*range)));
    }
    for range in ranges {
        backend.free_device(range.at(), a).unwrap();
    }
    backend.sync().unwrap();
}

pub(crate) fn an_allocation_is_known_by_each_of_its_addresses(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let a = backend.create_stream().unwrap();
    let refused = |backend: &mut dyn Backend, at| {
        let error = backend.allocation(at).unwrap_err();
        assert_eq!(error.misuse(), Some(Misuse::OutOfRange), "{error}");
    };
    let range = alloc(backend, PAGE, a);
    let Some(whole) = backend.allocation(range.at()).unwrap() else { return };
    assert!(whole.contains(range));
    for offset in [1, PAGE as u64 / 2, PAGE as u64 - 1] {
        let at = range.at().offset(Bytes(offset)).unwrap();
        assert_eq!(backend.allocation(at).unwrap(), Some(whole), "{offset}");
    }
    for at in [0, 7, 1 << 20, u64::MAX - 64] {
        refused(backend, DevicePtr(at));
    }
    // Page-locked bytes are none of the device's.
    let (_pages, pin) = Pages::pinned(backend, PAGE);
    refused(backend, DevicePtr(pin.at().0));
    backend.free_device(range.at(), a).unwrap();
    backend.sync().unwrap();
    refused(backend, range.at());
}

pub(crate) fn an_unregistered_range_is_gone(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let a = backend.create_stream().unwrap();
    let device = alloc(backend, PAGE, a);
    let (mut pages, pin) = Pages::pinned(backend, PAGE);
    backend.copy_in(device, pin, a).unwrap();
    backend.sync().unwrap();
    let pinner = backend.pinner();
    assert!(pinner.registration_max() >= Bytes(PAGE as u64));
    pages.unpin().unwrap();
    let again = pinner.unregister(pin.at()).unwrap_err();
    assert!(matches!(again.kind(), Kind::Usage(Misuse::Stale | Misuse::OutOfRange)), "{again}");
    // Pinned anew, it works again.
    let pin = pages.pin(backend, 0, PAGE);
    backend.copy_in(device, pin, a).unwrap();
    backend.sync().unwrap();
}
