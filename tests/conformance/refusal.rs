//! Promises of refusal: what is wrong with a call is said before anything is enqueued.

use crate::rig::{PAGE, Pages, Rig, alloc, event, part, pattern};
use lightering::backend::{Backend, Cost, Grid, Kernel};
use lightering::trace::{Actor, Site};
use lightering::{Bytes, DevicePtr, Error, Kind, Misuse, Result};

fn misuse<T: std::fmt::Debug>(result: Result<T>) -> Option<Misuse> {
    result.unwrap_err().misuse()
}

pub(crate) fn lengths_that_differ_are_refused(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, PAGE);
    pages.write(0, &pattern(1, PAGE));
    let a = backend.create_stream().unwrap();
    let device = alloc(backend, PAGE, a);
    let short = device.part(Bytes(0), Bytes(100)).unwrap();
    assert_eq!(misuse(backend.copy_out(pin, short, a)), Some(Misuse::LengthMismatch));
    assert_eq!(misuse(backend.copy_in(short, pin, a)), Some(Misuse::LengthMismatch));
    backend.sync().unwrap();
    assert_eq!(pages.read(0, PAGE), pattern(1, PAGE), "nothing was enqueued");
}

pub(crate) fn empty_requests_are_refused(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, PAGE);
    let a = backend.create_stream().unwrap();
    let device = alloc(backend, PAGE, a);
    let none = device.part(Bytes(8), Bytes(0)).unwrap();
    assert_eq!(misuse(backend.copy_out(part(pin, 8, 0), none, a)), Some(Misuse::Empty));
    assert_eq!(misuse(backend.copy_in(none, part(pin, 8, 0), a)), Some(Misuse::Empty));
    assert_eq!(misuse(backend.alloc_device(Bytes(0), a)), Some(Misuse::Empty));
    // SAFETY: no byte is to be pinned.
    let refused = unsafe { backend.pinner().register(pages.at(), Bytes(0)) };
    assert_eq!(misuse(refused), Some(Misuse::Empty));
}

pub(crate) fn a_copy_over_two_registrations_is_refused(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let mut pages = Pages::new(2 * PAGE);
    pages.write(0, &pattern(2, 2 * PAGE));
    let (one, two) = (pages.pin(backend, 0, PAGE), pages.pin(backend, PAGE, PAGE));
    assert_eq!(one.end(), two.at().0, "neighbours on the host are neighbours for the device");
    let a = backend.create_stream().unwrap();
    let device = alloc(backend, PAGE, a);
    let half = Bytes(PAGE as u64 / 2);
    let both = lightering::PinnedRange::new(one.at().offset(half).unwrap(), Bytes(PAGE as u64));
    let both = both.unwrap();
    assert_eq!(misuse(backend.copy_out(both, device, a)), Some(Misuse::OutOfRange));
    assert_eq!(misuse(backend.copy_in(device, both, a)), Some(Misuse::OutOfRange));
    backend.sync().unwrap();
    assert_eq!(pages.read(0, 2 * PAGE), pattern(2, 2 * PAGE), "nothing was enqueued");
}

pub(crate) fn a_fresh_event_is_neither_waited_for_nor_asked(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let a = backend.create_stream().unwrap();
    let fresh = event(backend);
    assert_eq!(misuse(backend.wait(a, fresh, Site::Outside)), Some(Misuse::FreshEvent));
    assert_eq!(misuse(backend.query(fresh, Site::Outside)), Some(Misuse::FreshEvent));
    assert_eq!(misuse(backend.fence().done(fresh)), Some(Misuse::FreshEvent));
    backend.record(fresh, a).unwrap();
    backend.wait(a, fresh, Site::Outside).unwrap();
    backend.sync().unwrap();
    assert!(backend.query(fresh, Site::Outside).unwrap());
}

pub(crate) fn stale_names_are_refused(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, PAGE);
    let (a, gone) = (backend.create_stream().unwrap(), backend.create_stream().unwrap());
    let (kept, closed) = (event(backend), event(backend));
    let device = alloc(backend, PAGE, a);
    backend.close_stream(gone).unwrap();
    backend.close_event(closed).unwrap();
    // New tenants of the same slots, if slots are reused.
    let (_, _) = (backend.create_stream().unwrap(), event(backend));
    let stale = Some(Misuse::Stale);
    assert_eq!(misuse(backend.close_stream(gone)), stale);
    assert_eq!(misuse(backend.raw_stream(gone)), stale);
    assert_eq!(misuse(backend.capturing(gone)), stale);
    assert_eq!(misuse(backend.record(kept, gone)), stale);
    assert_eq!(misuse(backend.alloc_device(Bytes(8), gone)), stale);
    assert_eq!(misuse(backend.free_device(device.at(), gone)), stale);
    assert_eq!(misuse(backend.copy_out(pin, device, gone)), stale);
    assert_eq!(misuse(backend.copy_in(device, pin, gone)), stale);
    assert_eq!(misuse(backend.note(Actor::Stream(gone), &[])), stale);
    assert_eq!(misuse(backend.close_event(closed)), stale);
    assert_eq!(misuse(backend.record(closed, a)), stale);
    assert_eq!(misuse(backend.wait(a, closed, Site::Outside)), stale);
    assert_eq!(misuse(backend.query(closed, Site::Outside)), stale);
    assert_eq!(misuse(backend.fence().done(closed)), stale);
    assert_eq!(misuse(backend.elapsed(closed, closed)), stale);
    backend.sync().unwrap();
    assert_eq!(pages.read(0, PAGE), vec![0; PAGE], "nothing was enqueued");
    assert_eq!(backend.memory().unwrap().allocated, Bytes(PAGE as u64));
}

pub(crate) fn names_of_another_user_are_refused(rig: &dyn Rig) {
    let (one, two) = (&mut *rig.user(), &mut *rig.user());
    let (stream, done) = (one.create_stream().unwrap(), event(one));
    one.record(done, stream).unwrap();
    let (mine, fresh) = (two.create_stream().unwrap(), event(two));
    let foreign = Some(Misuse::Foreign);
    assert_eq!(misuse(two.record(fresh, stream)), foreign);
    assert_eq!(misuse(two.record(done, mine)), foreign);
    assert_eq!(misuse(two.wait(mine, done, Site::Outside)), foreign);
    assert_eq!(misuse(two.query(done, Site::Outside)), foreign);
    assert_eq!(misuse(two.fence().done(done)), foreign);
    assert_eq!(misuse(two.close_event(done)), foreign);
    assert_eq!(misuse(two.close_stream(stream)), foreign);
    assert_eq!(misuse(two.alloc_device(Bytes(8), stream)), foreign);
    assert_eq!(misuse(two.note(Actor::Stream(stream), &[])), foreign);
    // `fresh` is fresh still: nothing was recorded.
    assert_eq!(misuse(two.query(fresh, Site::Outside)), Some(Misuse::FreshEvent));
    one.sync().unwrap();
    assert!(one.query(done, Site::Outside).unwrap());
}

pub(crate) fn a_free_of_no_allocation_is_refused(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let a = backend.create_stream().unwrap();
    let device = alloc(backend, PAGE, a);
    let refused = |result: Result<()>| {
        let error: Error = result.unwrap_err();
        assert!(matches!(error.kind(), Kind::Usage(_)), "{error}");
    };
    refused(backend.free_device(device.at().offset(Bytes(256)).unwrap(), a));
    refused(backend.free_device(DevicePtr(0), a));
    backend.free_device(device.at(), a).unwrap();
    refused(backend.free_device(device.at(), a));
    backend.sync().unwrap();
    assert_eq!(backend.memory().unwrap().allocated, Bytes::ZERO);
}

static FORMLESS: Kernel = Kernel { name: "formless", ptx: None, host: None, cost: Cost::of_bytes };

pub(crate) fn a_kernel_without_a_form_is_refused(rig: &dyn Rig) {
    let backend: &mut dyn Backend = &mut *rig.user();
    let a = backend.create_stream().unwrap();
    let refused = backend.launch(&FORMLESS, Grid::row(1, 32), &[], a);
    assert_eq!(misuse(refused), Some(Misuse::BadKernel));
    backend.sync().unwrap();
}

pub(crate) fn a_captured_stream_takes_no_work(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, PAGE);
    let (a, b) = (backend.create_stream().unwrap(), backend.create_stream().unwrap());
    let device = alloc(backend, PAGE, a);
    let (done, other) = (event(backend), event(backend));
    pages.write(0, &pattern(3, PAGE));
    backend.copy_in(device, pin, a).unwrap();
    backend.record(done, a).unwrap();
    backend.wait(b, done, Site::Outside).unwrap();
    backend.sync().unwrap();
    let raw = backend.raw_stream(a).unwrap();
    rig.set_capturing(raw, true);
    assert!(backend.capturing(a).unwrap() && !backend.capturing(b).unwrap());
    let refusals = [
        backend.copy_in(device, pin, a),
        backend.copy_out(pin, device, a),
        backend.record(done, a),
        backend.wait(a, done, Site::Outside),
        backend.alloc_device(Bytes(8), a).map(drop),
        backend.free_device(device.at(), a),
    ];
    let refusals: Vec<_> = refusals.into_iter().map(misuse).collect();
    // Elsewhere work and housekeeping go on, and end nobody's capture.
    backend.copy_out(pin, device, b).unwrap();
    backend.record(other, b).unwrap();
    crate::rig::until_done(backend, other);
    let small = alloc(backend, 8, b);
    backend.free_device(small.at(), b).unwrap();
    let brief = event(backend);
    backend.close_event(brief).unwrap();
    let (_more, _) = Pages::pinned(backend, PAGE);
    rig.set_capturing(raw, false);
    assert_eq!(refusals, [Some(Misuse::Capturing); 6]);
    assert!(!backend.capturing(a).unwrap());
    // The copy is known done; the wait says so to tools that see only the device's own order.
    backend.wait(a, other, Site::Outside).unwrap();
    backend.free_device(device.at(), a).unwrap();
    backend.sync().unwrap();
    assert_eq!(pages.read(0, PAGE), pattern(3, PAGE));
}
