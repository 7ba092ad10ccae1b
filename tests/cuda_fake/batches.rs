//! A batch of copies that reaches the driver by the wrong signature, reads its sources out of the
//! stream's order, or is lost where a driver has no call for batches: each call is compared, with
//! its arguments, on drivers of every age.

use crate::bench::{Bench, device, pinned};
use crate::fake::{calls, is_child, library_without, name_of, names, run, script, story, text};
use lightering::backend::{Backend, Piece};
use lightering::{Error, Kind, Misuse, StreamId};

const FIRST: &str = "cuMemcpyBatchAsync";
const SECOND: &str = "cuMemcpyBatchAsync_v2";
const COUNT: u64 = 8;

/// Every other piece of the memory of `b`: the host's in order, the device's from the end.
fn pieces(b: &Bench) -> Vec<Piece> {
    let len = Bench::LEN / COUNT / 2;
    let piece = |nth: u64| Piece {
        pinned: pinned(b.host.0 + 2 * nth * len, len),
        device: device(b.at.0 + (2 * (COUNT - nth) - 1) * len, len),
    };
    (0..COUNT).map(piece).collect()
}

/// Both ways; returns the names of the calls that copied.
fn there_and_back(b: &mut Bench, on: StreamId) -> Vec<String> {
    let pieces = pieces(b);
    let values = (1..=251_u8).cycle();
    b.pages.bytes().iter_mut().zip(values).for_each(|(byte, value)| *byte = value);
    let before: Vec<u8> = b.pages.bytes().to_vec();
    calls();
    b.cuda.copy_in_batch(&pieces, on).unwrap();
    b.pages.bytes().fill(0);
    b.cuda.copy_out_batch(&pieces, on).unwrap();
    let names = names().into_iter().filter(|name| name.starts_with("cuMemcpy")).collect();
    let len = (Bench::LEN / COUNT / 2) as usize;
    let nothing = vec![0; len];
    for (nth, bytes) in b.pages.bytes().chunks(len).enumerate() {
        let expected = if nth % 2 == 0 { &before[nth * len..][..len] } else { &nothing };
        assert!(bytes == expected, "chunk {nth}");
    }
    names
}

#[test]
fn a_batch_is_one_call_by_the_signature_of_the_drivers_age() {
    for driver in ["13000", "12080", "12090"] {
        let name = name_of!(a_batch_is_one_call_by_the_signature_of_the_drivers_age);
        story(name, &format!("driver:{driver}"), || {
            let mut b = Bench::new(0);
            let call = if b.cuda.about().driver >= 13_000 { SECOND } else { FIRST };
            let own = b.own;
            assert_eq!(there_and_back(&mut b, own), [call; 2]);
            b.close();
        });
    }
}

#[test]
fn a_driver_from_before_batches_copies_piece_by_piece() {
    story(name_of!(a_driver_from_before_batches_copies_piece_by_piece), "driver:12060", || {
        let mut b = Bench::new(0);
        let own = b.own;
        let names = there_and_back(&mut b, own);
        let each = |name: &str| names.iter().filter(|said| *said == name).count() as u64;
        assert_eq!([each("cuMemcpyHtoDAsync_v2"), each("cuMemcpyDtoHAsync_v2")], [COUNT; 2]);
        assert_eq!(names.len() as u64, 2 * COUNT);
        b.close();
    });
}

#[test]
fn a_driver_without_the_newer_name_is_asked_by_the_older_one() {
    let name = name_of!(a_driver_without_the_newer_name_is_asked_by_the_older_one);
    if is_child(name) {
        let mut b = Bench::new(0);
        let own = b.own;
        assert_eq!(there_and_back(&mut b, own), [FIRST; 2]);
        b.close();
        return;
    }
    let Some(dir) = library_without(SECOND) else { return };
    let output = run(name, &dir, "", &[]);
    assert!(output.status.success(), "{}", text(&output));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_default_stream_gets_single_copies() {
    story(name_of!(a_default_stream_gets_single_copies), "", || {
        let mut b = Bench::new(0);
        for raw in [0, 1, 2] {
            let stream = b.cuda.adopt_stream(raw).unwrap();
            let names = there_and_back(&mut b, stream);
            assert!(names.iter().all(|name| !name.contains("Batch")), "{names:?}");
        }
        b.close();
    });
}

#[test]
fn a_call_that_is_not_supported_here_is_not_made_again() {
    story(name_of!(a_call_that_is_not_supported_here_is_not_made_again), "", || {
        let mut b = Bench::new(0);
        script(&format!("fail:{SECOND}:0:801"));
        let own = b.own;
        let names = there_and_back(&mut b, own);
        let asked = names.iter().filter(|name| name.contains("Batch")).count() as u64;
        assert_eq!((asked, names.len() as u64), (1, 2 * COUNT + 1));
        b.close();
    });
}

/// The refusal of a batch, and how many of its pieces may be under way.
fn refusal(b: &mut Bench, pieces: &[Piece]) -> (Error, usize) {
    let own = b.own;
    let out = b.cuda.copy_out_batch(pieces, own).unwrap_err();
    let back = b.cuda.copy_in_batch(pieces, own).unwrap_err();
    assert_eq!((out.enqueued, out.error.kind()), (back.enqueued, back.error.kind()));
    (back.error, back.enqueued)
}

#[test]
fn one_bad_piece_is_refused_before_anything_is_enqueued() {
    // With the driver's call for batches, and with one that has none.
    for driver in ["driver:13000", "driver:12060"] {
        story(name_of!(one_bad_piece_is_refused_before_anything_is_enqueued), driver, || {
            let mut b = Bench::new(0);
            let good = pieces(&b);
            let (at, host) = (b.at.0, b.host.0);
            for (bad, why) in [
                (Piece { pinned: pinned(host, 8), device: device(at, 4) }, Misuse::LengthMismatch),
                (Piece { pinned: pinned(host, 0), device: device(at, 0) }, Misuse::Empty),
                (
                    Piece { pinned: pinned(host + Bench::LEN - 4, 8), device: device(at, 8) },
                    Misuse::OutOfRange,
                ),
            ] {
                let mut all = good.clone();
                all.push(bad);
                calls();
                let (error, enqueued) = refusal(&mut b, &all);
                assert_eq!((error.misuse(), enqueued), (Some(why), 0));
                assert!(names().iter().all(|name| !name.contains("Memcpy")), "{why:?}");
            }
            b.close();
        });
    }
}

#[test]
fn a_failed_call_says_that_its_pieces_may_run_and_a_fatal_one_is_the_last() {
    let name = name_of!(a_failed_call_says_that_its_pieces_may_run_and_a_fatal_one_is_the_last);
    story(name, "", || {
        let mut b = Bench::new(0);
        let all = pieces(&b);
        let own = b.own;
        script(&format!("fail:{SECOND}:0:1"));
        let (error, enqueued) = refusal(&mut b, &all);
        assert_eq!((error.driver_code(), enqueued), (Some(1), all.len()));
        script(&format!("fail:{SECOND}:0:700"));
        let lost = b.cuda.copy_out_batch(&all, own).unwrap_err();
        assert_eq!((lost.error.kind(), lost.enqueued), (Kind::Lost, all.len()));
        calls();
        let after = b.cuda.copy_out_batch(&all, own).unwrap_err();
        assert_eq!((after.error.kind(), after.enqueued), (Kind::Lost, 0));
        let single = b.cuda.copy_out(all[0].pinned, all[0].device, own);
        assert_eq!(single.unwrap_err().kind(), Kind::Lost);
        assert_eq!(names(), [""; 0]);
        std::mem::forget((b.pages, b.spare));
    });
}
