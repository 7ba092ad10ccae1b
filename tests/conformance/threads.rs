//! Promises across threads: fences, and users that move or run side by side.

use crate::rig::{PAGE, Pages, Rig, alloc, chain, event, part, pattern};
use lightering::Misuse;
use lightering::backend::Backend;

pub(crate) fn a_fence_answers_on_another_thread(rig: &dyn Rig) {
    let backend = &mut *rig.user();
    let (pages, pin) = Pages::pinned(backend, 2 * PAGE);
    let a = backend.create_stream().unwrap();
    let (done, fresh) = (event(backend), event(backend));
    pages.write(0, &pattern(10, PAGE));
    let device = alloc(backend, PAGE, a);
    backend.copy_in(device, part(pin, 0, PAGE), a).unwrap();
    backend.copy_out(part(pin, PAGE, PAGE), device, a).unwrap();
    backend.record(done, a).unwrap();
    let fence = backend.fence();
    let asked = std::thread::spawn(move || {
        let refused = fence.done(fresh).unwrap_err();
        assert_eq!(refused.misuse(), Some(Misuse::FreshEvent));
        while !fence.done(done).unwrap() {}
    });
    asked.join().unwrap();
    assert_eq!(pages.read(PAGE, PAGE), pattern(10, PAGE));
}

pub(crate) fn a_fence_outlives_the_user_it_came_from(rig: &dyn Rig) {
    let (mut gone, keeper) = (rig.user(), rig.user());
    let (pages, pin) = Pages::pinned(&*keeper, 2 * PAGE);
    let a = gone.create_stream().unwrap();
    pages.write(0, &pattern(11, PAGE));
    let device = alloc(&mut *gone, PAGE, a);
    gone.copy_in(device, part(pin, 0, PAGE), a).unwrap();
    gone.copy_out(part(pin, PAGE, PAGE), device, a).unwrap();
    let done = event(&mut *gone);
    gone.record(done, a).unwrap();
    gone.free_device(device.at(), a).unwrap();
    let fence = gone.fence();
    drop(gone);
    while !fence.done(done).unwrap() {}
    assert_eq!(pages.read(PAGE, PAGE), pattern(11, PAGE), "work enqueued still runs");
}

/// In on one stream, out on another, behind a wait.
fn hop(backend: &mut dyn Backend, seed: u8) {
    let (pages, pin) = Pages::pinned(backend, 2 * PAGE);
    let (a, b) = (backend.create_stream().unwrap(), backend.create_stream().unwrap());
    pages.write(0, &pattern(seed, PAGE));
    let device = alloc(backend, PAGE, a);
    backend.copy_in(device, part(pin, 0, PAGE), a).unwrap();
    chain(backend, a, b);
    backend.copy_out(part(pin, PAGE, PAGE), device, b).unwrap();
    backend.free_device(device.at(), b).unwrap();
    backend.sync().unwrap();
    assert_eq!(pages.read(PAGE, PAGE), pattern(seed, PAGE));
    backend.close_stream(a).unwrap();
    backend.close_stream(b).unwrap();
}

pub(crate) fn users_on_several_threads_do_not_disturb_one_another(rig: &dyn Rig) {
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let mut user = rig.user();
            scope.spawn(move || (0..4).for_each(|round| hop(&mut *user, thread * 4 + round)));
        }
    });
}

pub(crate) fn a_user_moves_to_another_thread_with_its_work(rig: &dyn Rig) {
    let mut user = rig.user();
    let (pages, pin) = Pages::pinned(&*user, 2 * PAGE);
    let a = user.create_stream().unwrap();
    pages.write(0, &pattern(12, PAGE));
    let device = alloc(&mut *user, PAGE, a);
    user.copy_in(device, part(pin, 0, PAGE), a).unwrap();
    let moved = std::thread::spawn(move || {
        user.copy_out(part(pin, PAGE, PAGE), device, a).unwrap();
        user.free_device(device.at(), a).unwrap();
        user.sync().unwrap();
    });
    moved.join().unwrap();
    assert_eq!(pages.read(PAGE, PAGE), pattern(12, PAGE));
}
