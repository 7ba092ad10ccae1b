//! Promises of order: streams, events, times.

use crate::rig::{PAGE, Pages, Rig, alloc, chain, event, part, pattern, until_done};
use lightering::backend::Timing;
use lightering::trace::Site;
use lightering::{Kind, Misuse};

pub(crate) fn bytes_come_back_from_another_stream(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, 2 * PAGE);
    let (a, b) = (backend.create_stream().unwrap(), backend.create_stream().unwrap());
    pages.write(0, &pattern(1, PAGE));
    let device = alloc(backend, PAGE, a);
    backend.copy_in(device, part(pin, 0, PAGE), a).unwrap();
    chain(backend, a, b);
    backend.copy_out(part(pin, PAGE, PAGE), device, b).unwrap();
    backend.free_device(device.at(), b).unwrap();
    backend.sync().unwrap();
    assert_eq!(pages.read(PAGE, PAGE), pattern(1, PAGE));
}

pub(crate) fn a_reader_behind_a_wait_sees_no_torn_copy(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let rounds = 8;
    let (pages, pin) = Pages::pinned(backend, 2 * rounds * PAGE);
    let (a, b) = (backend.create_stream().unwrap(), backend.create_stream().unwrap());
    let device = alloc(backend, PAGE, a);
    for round in 0..rounds {
        pages.write(round * PAGE, &pattern(round as u8, PAGE));
        backend.copy_in(device, part(pin, round * PAGE, PAGE), a).unwrap();
        chain(backend, a, b);
        backend.copy_out(part(pin, (rounds + round) * PAGE, PAGE), device, b).unwrap();
        chain(backend, b, a);
    }
    backend.sync().unwrap();
    for round in 0..rounds {
        let read = pages.read((rounds + round) * PAGE, PAGE);
        assert_eq!(read, pattern(round as u8, PAGE), "round {round}");
    }
}

/// Were a wait to mean the event's *latest* recording, `b` would wait for `a`, and `a` for `b`.
pub(crate) fn a_wait_keeps_the_recording_it_saw(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, 2 * PAGE);
    let (a, b) = (backend.create_stream().unwrap(), backend.create_stream().unwrap());
    let shared = event(backend);
    pages.write(0, &pattern(3, PAGE));
    let device = alloc(backend, PAGE, a);
    backend.copy_in(device, part(pin, 0, PAGE), a).unwrap();
    backend.record(shared, a).unwrap();
    backend.wait(b, shared, Site::Outside).unwrap();
    backend.copy_out(part(pin, PAGE, PAGE), device, b).unwrap();
    chain(backend, b, a);
    backend.record(shared, a).unwrap();
    until_done(backend, shared);
    assert_eq!(pages.read(PAGE, PAGE), pattern(3, PAGE));
}

pub(crate) fn a_later_recording_replaces_the_earlier(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let len = 64 * PAGE;
    let (pages, pin) = Pages::pinned(backend, 2 * len);
    let (a, b) = (backend.create_stream().unwrap(), backend.create_stream().unwrap());
    let shared = event(backend);
    backend.record(shared, b).unwrap();
    backend.sync().unwrap();
    assert!(backend.query(shared, Site::Outside).unwrap());
    pages.write(0, &pattern(4, len));
    let device = alloc(backend, len, a);
    backend.copy_in(device, part(pin, 0, len), a).unwrap();
    backend.copy_out(part(pin, len, len), device, a).unwrap();
    backend.record(shared, a).unwrap();
    until_done(backend, shared);
    assert_eq!(pages.read(len, len), pattern(4, len));
}

pub(crate) fn a_done_event_means_the_bytes_are_there(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, 2 * PAGE);
    let a = backend.create_stream().unwrap();
    let done = event(backend);
    let device = alloc(backend, PAGE, a);
    for round in 0..8 {
        pages.write(0, &pattern(round, PAGE));
        backend.copy_in(device, part(pin, 0, PAGE), a).unwrap();
        backend.copy_out(part(pin, PAGE, PAGE), device, a).unwrap();
        backend.record(done, a).unwrap();
        until_done(backend, done);
        assert_eq!(pages.read(PAGE, PAGE), pattern(round, PAGE), "round {round}");
    }
}

/// It may say no for ever; what it may not is say yes too early.
pub(crate) fn an_idle_stream_has_left_its_bytes_there(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, 2 * PAGE);
    let (a, b) = (backend.create_stream().unwrap(), backend.create_stream().unwrap());
    let device = alloc(backend, PAGE, a);
    let mut yes = 0;
    for round in 0..64 {
        pages.write(0, &pattern(round, PAGE));
        backend.copy_in(device, part(pin, 0, PAGE), a).unwrap();
        chain(backend, a, b);
        backend.copy_out(part(pin, PAGE, PAGE), device, b).unwrap();
        let asked = (0..10_000).any(|_| backend.idle(b, Site::Outside).unwrap());
        yes += u32::from(asked);
        if !asked {
            backend.sync().unwrap();
        }
        assert_eq!(pages.read(PAGE, PAGE), pattern(round, PAGE), "round {round}");
    }
    backend.sync().unwrap();
    assert!(backend.idle(a, Site::Outside).unwrap() && yes > 0, "a stream made here can be told");
    // Of a device's default stream it may be unknown: that is no error.
    let default = backend.adopt_stream(0).unwrap();
    backend.idle(default, Site::Outside).unwrap();
}

pub(crate) fn a_closed_event_still_orders_the_waits_enqueued(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, 2 * PAGE);
    let (a, b) = (backend.create_stream().unwrap(), backend.create_stream().unwrap());
    pages.write(0, &pattern(6, PAGE));
    let device = alloc(backend, PAGE, a);
    backend.copy_in(device, part(pin, 0, PAGE), a).unwrap();
    let brief = event(backend);
    backend.record(brief, a).unwrap();
    backend.wait(b, brief, Site::Outside).unwrap();
    backend.close_event(brief).unwrap();
    // The slot's next tenant has nothing to do with the wait.
    let next = event(backend);
    backend.record(next, b).unwrap();
    backend.copy_out(part(pin, PAGE, PAGE), device, b).unwrap();
    backend.sync().unwrap();
    assert_eq!(pages.read(PAGE, PAGE), pattern(6, PAGE));
}

pub(crate) fn a_closed_stream_finishes_its_work(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, 2 * PAGE);
    let (a, b) = (backend.create_stream().unwrap(), backend.create_stream().unwrap());
    pages.write(0, &pattern(7, PAGE));
    let device = alloc(backend, PAGE, a);
    let done = event(backend);
    backend.copy_in(device, part(pin, 0, PAGE), a).unwrap();
    backend.record(done, a).unwrap();
    backend.close_stream(a).unwrap();
    backend.wait(b, done, Site::Outside).unwrap();
    backend.copy_out(part(pin, PAGE, PAGE), device, b).unwrap();
    backend.record(done, b).unwrap();
    backend.close_stream(b).unwrap();
    let c = backend.create_stream().unwrap();
    let other = event(backend);
    backend.record(other, c).unwrap();
    until_done(backend, done);
    assert_eq!(pages.read(PAGE, PAGE), pattern(7, PAGE));
}

pub(crate) fn two_users_share_a_stream_by_its_raw_handle(rig: &dyn Rig) {
    let (one, two) = (&mut *rig.user(), &mut *rig.user());
    let (pages, pin) = Pages::pinned(one, 2 * PAGE);
    let mine = one.create_stream().unwrap();
    let raw = one.raw_stream(mine).unwrap();
    let theirs = two.adopt_stream(raw).unwrap();
    assert_eq!(two.raw_stream(theirs).unwrap(), raw);
    pages.write(0, &pattern(8, PAGE));
    let device = alloc(one, PAGE, mine);
    one.copy_in(device, part(pin, 0, PAGE), mine).unwrap();
    two.copy_out(part(pin, PAGE, PAGE), device, theirs).unwrap();
    // Giving an adopted stream back does not destroy it.
    two.close_stream(theirs).unwrap();
    let done = event(one);
    one.record(done, mine).unwrap();
    until_done(one, done);
    assert_eq!(pages.read(PAGE, PAGE), pattern(8, PAGE));
    one.free_device(device.at(), mine).unwrap();
    one.sync().unwrap();
}

pub(crate) fn the_default_stream_is_there_to_adopt(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, 2 * PAGE);
    let (once, again) = (backend.adopt_stream(0).unwrap(), backend.adopt_stream(0).unwrap());
    assert_ne!(once, again);
    assert_eq!(backend.raw_stream(once).unwrap(), 0);
    pages.write(0, &pattern(9, PAGE));
    let device = alloc(backend, PAGE, once);
    backend.copy_in(device, part(pin, 0, PAGE), once).unwrap();
    backend.copy_out(part(pin, PAGE, PAGE), device, again).unwrap();
    backend.sync().unwrap();
    assert_eq!(pages.read(PAGE, PAGE), pattern(9, PAGE));
}

pub(crate) fn elapsed_wants_two_timed_recordings_that_are_done(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let len = 256 * PAGE;
    let (_pages, pin) = Pages::pinned(backend, len);
    let a = backend.create_stream().unwrap();
    let device = alloc(backend, len, a);
    let plain = event(backend);
    let from = backend.create_event(Timing::On).unwrap();
    let to = backend.create_event(Timing::On).unwrap();
    let refused = backend.elapsed(from, to).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::FreshEvent));
    backend.record(plain, a).unwrap();
    backend.record(from, a).unwrap();
    backend.copy_in(device, pin, a).unwrap();
    backend.record(to, a).unwrap();
    let early = backend.elapsed(from, to);
    assert!(early.is_ok() || early.is_err_and(|error| error.kind() == Kind::Busy));
    backend.sync().unwrap();
    assert!(!backend.elapsed(from, to).unwrap().is_zero());
    assert!(backend.elapsed(from, from).unwrap().is_zero());
    let refused = backend.elapsed(plain, to).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::BadValue));
}
