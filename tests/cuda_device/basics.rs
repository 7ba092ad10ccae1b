//! Bytes that do not arrive, or arrive out of order; memory, time and capture told wrongly.

use crate::device::{Host, MEMORY, cuda, current, driver, fill, poll, range, spin};
use lightering::backend::{Arg, Backend, Cost, Grid, Kernel, Timing};
use lightering::trace::Site;
use lightering::{Bytes, DevicePtr, Kind, Misuse, PinnedRange};
use std::ffi::c_int;
use std::time::Duration;

const MIB: u64 = 1 << 20;

#[test]
fn bytes_that_left_come_back_equal() {
    let Some(mut cuda) = cuda() else { return };
    let len = 32 * MIB;
    let (mut source, mut target) = (Host::new(&cuda, len), Host::new(&cuda, len));
    let pattern = |index: usize| (index as u32).wrapping_mul(0x9E37_79B9) ^ 0x5EED;
    source.words().iter_mut().enumerate().for_each(|(index, word)| *word = pattern(index));
    let (inward, outward) = (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
    let (there, back) =
        (cuda.create_event(Timing::Off).unwrap(), cuda.create_event(Timing::Off).unwrap());
    let at = cuda.alloc_device(Bytes(len), inward).unwrap();
    assert_eq!(at.0 % 256, 0);
    cuda.copy_in(range(at, len), source.range, inward).unwrap();
    cuda.record(there, inward).unwrap();
    cuda.wait(outward, there, Site::Outside).unwrap();
    // In pieces of odd lengths, to odd places.
    let mut done = 0;
    for piece in (1..).map(|n| 123_457 * n) {
        let piece = piece.min(len - done);
        let from = range(at, len).part(Bytes(done), Bytes(piece)).unwrap();
        let to = target.range.part(Bytes(done), Bytes(piece)).unwrap();
        cuda.copy_out(to, from, outward).unwrap();
        done += piece;
        if done == len {
            break;
        }
    }
    cuda.record(back, outward).unwrap();
    cuda.free_device(at, outward).unwrap();
    poll(&mut cuda, back).unwrap();
    let wrong = target.words().iter().enumerate().find(|(index, word)| **word != pattern(*index));
    assert_eq!(wrong, None);
    source.close();
    target.close();
}

#[test]
fn h01_h04_a_copy_waits_for_the_kernel_whose_event_its_stream_waits_for() {
    let Some(mut cuda) = cuda() else { return };
    let mut host = Host::new(&cuda, MIB);
    let (compute, lane) = (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
    let at = cuda.alloc_device(Bytes(MIB), compute).unwrap();
    let bytes = range(at, MIB);
    let (made, copied) =
        (cuda.create_event(Timing::Off).unwrap(), cuda.create_event(Timing::Off).unwrap());
    for round in 1..=20_u32 {
        spin(&mut cuda, 5, compute).unwrap();
        fill(&mut cuda, bytes, round, compute).unwrap();
        cuda.record(made, compute).unwrap();
        cuda.wait(lane, made, Site::Outside).unwrap();
        cuda.copy_out(host.range, bytes, lane).unwrap();
        cuda.record(copied, lane).unwrap();
        cuda.wait(compute, copied, Site::Outside).unwrap();
        fill(&mut cuda, bytes, 0xDEAD, compute).unwrap();
        poll(&mut cuda, copied).unwrap();
        assert!(host.words().iter().all(|word| *word == round), "round {round}");
    }
    cuda.free_device(at, compute).unwrap();
    cuda.sync().unwrap();
    host.close();
}

#[test]
fn h20_the_default_streams_serve_as_borrowed_ones() {
    let Some(mut cuda) = cuda() else { return };
    let mut host = Host::new(&cuda, 4096);
    for (raw, value) in [(0, 10), (1, 11), (2, 12)] {
        let stream = cuda.adopt_stream(raw).unwrap();
        assert_eq!(cuda.raw_stream(stream).unwrap(), raw);
        assert!(!cuda.capturing(stream).unwrap());
        let at = cuda.alloc_device(Bytes(4096), stream).unwrap();
        fill(&mut cuda, range(at, 4096), value, stream).unwrap();
        cuda.copy_out(host.range, range(at, 4096), stream).unwrap();
        let event = cuda.create_event(Timing::Off).unwrap();
        cuda.record(event, stream).unwrap();
        cuda.free_device(at, stream).unwrap();
        poll(&mut cuda, event).unwrap();
        assert!(host.words().iter().all(|word| *word == value), "raw {raw}");
        cuda.close_stream(stream).unwrap();
    }
    host.close();
}

#[test]
fn h66_a_thread_without_a_context_is_left_without_one() {
    std::thread::spawn(|| {
        let Some(mut cuda) = cuda() else { return };
        assert_eq!(current(), 0);
        let stream = cuda.create_stream().unwrap();
        let at = cuda.alloc_device(Bytes(4096), stream).unwrap();
        fill(&mut cuda, range(at, 4096), 1, stream).unwrap();
        cuda.free_device(at, stream).unwrap();
        cuda.sync().unwrap();
        Host::new(&cuda, 4096).close();
        assert_eq!(current(), 0);
        drop(cuda);
        assert_eq!(current(), 0);
    })
    .join()
    .unwrap();
}

#[test]
fn time_between_events_is_at_least_what_the_stream_was_held() {
    let Some(mut cuda) = cuda() else { return };
    let stream = cuda.create_stream().unwrap();
    let (from, to) =
        (cuda.create_event(Timing::On).unwrap(), cuda.create_event(Timing::On).unwrap());
    spin(&mut cuda, 1, stream).unwrap(); // loads the module before the clock starts
    cuda.record(from, stream).unwrap();
    spin(&mut cuda, 20, stream).unwrap();
    cuda.record(to, stream).unwrap();
    poll(&mut cuda, to).unwrap();
    assert!(cuda.elapsed(from, to).unwrap() >= Duration::from_millis(19));
    assert_eq!(cuda.elapsed(to, from).unwrap_err().misuse(), Some(Misuse::BadValue));
}

#[test]
fn h47_what_does_not_fit_is_an_error_and_no_loss() {
    let Some(mut cuda) = cuda() else { return };
    let stream = cuda.create_stream().unwrap();
    let memory = cuda.memory().unwrap();
    assert!(memory.free <= memory.total && memory.total <= cuda.about().memory);
    let alone = MEMORY.lock();
    let error = cuda.alloc_device(Bytes(2 * memory.total.0), stream).unwrap_err();
    drop(alone);
    assert_eq!(error.kind(), Kind::OutOfMemory, "{error}");
    let at = cuda.alloc_device(Bytes(MIB), stream).unwrap();
    assert_eq!(cuda.memory().unwrap().allocated, Bytes(MIB));
    cuda.free_device(at, stream).unwrap();
    let stale = cuda.free_device(DevicePtr(at.0), stream).unwrap_err();
    assert_eq!(stale.misuse(), Some(Misuse::Stale));
    assert_eq!(cuda.memory().unwrap().peak, Bytes(MIB));
}

#[test]
fn a_copy_across_two_registrations_is_refused_by_us_and_each_half_runs() {
    let Some(mut cuda) = cuda() else { return };
    let whole = Host::new(&cuda, 2 * MIB);
    let at = std::ptr::NonNull::new(whole.ptr().0 as *mut u8).unwrap();
    whole.close();
    let low = Host::register(&cuda, at, MIB);
    // SAFETY: within the memory of `whole`, which is never freed.
    let high = Host::register(&cuda, unsafe { at.add(MIB as usize) }, MIB);
    let stream = cuda.create_stream().unwrap();
    let device = cuda.alloc_device(Bytes(2 * MIB), stream).unwrap();
    let both = PinnedRange::new(low.ptr(), Bytes(2 * MIB)).unwrap();
    let error = cuda.copy_out(both, range(device, 2 * MIB), stream).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::OutOfRange));
    cuda.copy_out(low.range, range(device, MIB), stream).unwrap();
    cuda.copy_in(range(device, MIB), high.range, stream).unwrap();
    cuda.free_device(device, stream).unwrap();
    cuda.sync().unwrap();
    low.close();
    high.close();
}

#[test]
fn a_kernel_that_does_not_compile_is_named_with_the_compilers_words() {
    static BAD: Kernel = Kernel {
        name: "bad",
        ptx: Some(".version 7.5\n.target sm_75\n.address_size 64\n.entry bad() { nonsense; }"),
        host: None,
        cost: Cost::of_bytes,
    };
    let Some(mut cuda) = cuda() else { return };
    let stream = cuda.create_stream().unwrap();
    let error = cuda.launch(&BAD, Grid::row(1, 1), &[] as &[Arg], stream).unwrap_err();
    assert_eq!(error.misuse(), Some(Misuse::BadKernel), "{error}");
    assert!(error.to_string().contains("nonsense"), "{error}");
    spin(&mut cuda, 1, stream).unwrap();
    cuda.sync().unwrap();
}

#[test]
fn another_thread_learns_when_a_copy_is_done() {
    let Some(mut cuda) = cuda() else { return };
    let stream = cuda.create_stream().unwrap();
    let event = cuda.create_event(Timing::Off).unwrap();
    spin(&mut cuda, 20, stream).unwrap();
    cuda.record(event, stream).unwrap();
    let fence = cuda.fence();
    std::thread::spawn(move || while !fence.done(event).unwrap() {}).join().unwrap();
    assert!(cuda.query(event, Site::Outside).unwrap());
}

#[test]
fn h64_a_graph_capture_is_neither_joined_nor_ended() {
    let Some(mut cuda) = cuda() else { return };
    let begin: unsafe extern "C" fn(usize, c_int) -> c_int = driver("cuStreamBeginCapture_v2");
    let end: unsafe extern "C" fn(usize, *mut usize) -> c_int = driver("cuStreamEndCapture");
    let mut host = Host::new(&cuda, 4096);
    let (captured, lane) = (cuda.create_stream().unwrap(), cuda.create_stream().unwrap());
    let raw = cuda.raw_stream(captured).unwrap();
    let lent = cuda.adopt_stream(raw).unwrap();
    let event = cuda.create_event(Timing::Off).unwrap();
    let at = cuda.alloc_device(Bytes(4096), lane).unwrap();
    cuda.record(event, lane).unwrap();
    // SAFETY: our own live stream; 0 is the global mode, the strictest.
    assert_eq!(unsafe { begin(raw, 0) }, 0);
    assert!(cuda.capturing(lent).unwrap());
    for refused in [
        cuda.record(event, lent),
        cuda.wait(lent, event, Site::Outside),
        cuda.alloc_device(Bytes(4096), lent).map(drop),
        cuda.copy_out(host.range, range(at, 4096), lent),
        fill(&mut cuda, range(at, 4096), 1, lent),
    ] {
        assert_eq!(refused.unwrap_err().misuse(), Some(Misuse::Capturing));
    }
    // Work elsewhere goes on, and so does housekeeping.
    fill(&mut cuda, range(at, 4096), 7, lane).unwrap();
    cuda.copy_out(host.range, range(at, 4096), lane).unwrap();
    cuda.record(event, lane).unwrap();
    poll(&mut cuda, event).unwrap();
    Host::new(&cuda, 4096).close();
    let more = cuda.alloc_device(Bytes(MIB), lane).unwrap();
    cuda.free_device(more, lane).unwrap();
    let second = cuda.create_event(Timing::Off).unwrap();
    cuda.close_event(second).unwrap();
    let stream = cuda.create_stream().unwrap();
    cuda.close_stream(stream).unwrap();
    let mut graph = 0;
    // SAFETY: begun above on this thread; valid pointer.
    assert_eq!(unsafe { end(raw, &mut graph) }, 0, "the capture is still valid");
    assert!(host.words().iter().all(|word| *word == 7));
    assert!(!cuda.capturing(lent).unwrap());
    fill(&mut cuda, range(at, 4096), 8, lent).unwrap();
    cuda.sync().unwrap();
    cuda.free_device(at, lane).unwrap();
    host.close();
}
