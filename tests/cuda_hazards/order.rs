//! Hazards of order on a real device: each stream that must come first is held, so that whoever
//! does not wait for it is seen.

use crate::bench::{Bench, MIB, name_of, story};
use crate::device::poll;
use lightering::backend::{Backend, Timing};
use lightering::trace::Use;
use lightering::{Acquire, Bytes, Kind, Options};

const LEN: u64 = MIB;
/// Large enough to keep a lane busy for some milliseconds.
const LARGE: u64 = 256 * MIB;
const POOL: Bytes = Bytes::mib(320);

#[test]
#[ignore = "needs a CUDA device"]
fn h01_a_copy_out_waits_for_its_producer() {
    story(name_of!(h01_a_copy_out_waits_for_its_producer), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        for value in 1..=10 {
            let storage = b.owned(0, LEN, value, 10);
            b.evict(0, &storage);
            b.flush(0);
            let range = b.acquire(0, &storage);
            b.read(0, range).must_be(&mut b, value);
        }
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h03_h13_streams_change_at_every_call_and_each_waits_for_itself() {
    let name = name_of!(h03_h13_streams_change_at_every_call_and_each_waits_for_itself);
    story(name, 1, 0, || {
        let mut b = Bench::new(3, POOL);
        for value in 1..=12 {
            let s = value as usize % 3;
            let storage = b.owned(s, LEN, value, 5);
            b.evict(s, &storage);
            b.flush(s);
            for reader in [(s + 1) % 3, (s + 2) % 3, s] {
                let range = b.acquire(reader, &storage);
                b.read(reader, range).must_be(&mut b, value);
            }
        }
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h04_h05_bytes_are_not_reused_under_the_copy_out() {
    story(name_of!(h04_h05_bytes_are_not_reused_under_the_copy_out), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        for value in 1..=5 {
            // The lane is busy with a large copy when the small one comes.
            let large = b.owned(0, LARGE, 100, 0);
            let range = b.take(0, LEN);
            b.fill(0, range, value);
            let storage = b.engine.adopt(range, "adopted").unwrap();
            b.evict(0, &large);
            b.evict(0, &storage);
            b.flush(0);
            while b.engine.releasable(b.streams[0].engine).unwrap() != Some(storage.id()) {}
            b.give(0, range);
            // The pool hands the same bytes out again, to who writes at once.
            let next = b.take(0, LEN);
            b.fill(0, next, 999);
            let home = b.take(0, LEN);
            b.engine.refill(storage.id(), home, b.streams[0].engine).unwrap();
            b.read(0, home).must_be(&mut b, value);
            b.read(0, next).must_be(&mut b, 999);
            b.engine.release(storage, b.streams[0].engine).unwrap();
            b.give(0, next);
            b.give(0, home);
        }
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h06_the_host_reads_no_block_that_is_still_filled() {
    story(name_of!(h06_the_host_reads_no_block_that_is_still_filled), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        let storage = b.owned(0, LEN, 7, 50);
        b.evict(0, &storage);
        let mut bytes = vec![0; LEN as usize];
        let mut early = 0_u64;
        while let Err(error) = b.engine.read_host(storage.id(), Bytes::ZERO, &mut bytes) {
            assert_eq!(error.kind(), Kind::Busy);
            early += 1;
        }
        println!("refused {early} times while the copy-out ran");
        assert!(early > 0);
        assert!(bytes.chunks(4).all(|word| word == 7_u32.to_ne_bytes()));
        drop(storage);
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h08_h12_a_refill_is_behind_its_own_copy_out_and_its_reader_behind_it() {
    let name = name_of!(h08_h12_a_refill_is_behind_its_own_copy_out_and_its_reader_behind_it);
    story(name, 1, 0, || {
        let mut b = Bench::new(2, POOL);
        for value in 1..=5 {
            let large = b.owned(0, LARGE, value, 5);
            b.evict(0, &large);
            b.flush(0);
            // The copy-out is still held; a stream that knows nothing of it reads.
            let range = b.acquire(1, &large);
            b.read(1, range).must_be(&mut b, value);
            b.engine.release(large, b.streams[1].engine).unwrap();
        }
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h11_a_copy_in_does_not_overwrite_what_is_still_read() {
    story(name_of!(h11_a_copy_in_does_not_overwrite_what_is_still_read), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        for value in 1..=10 {
            let storage = b.away(LEN, value);
            let range = b.take(0, LEN);
            b.fill(0, range, 500);
            b.spin(0, 10);
            // The old reader is enqueued behind the spin, the new owner of the bytes comes at once.
            let old = b.read(0, range);
            b.engine.refill(storage.id(), range, b.streams[0].engine).unwrap();
            let new = b.read(0, range);
            old.must_be(&mut b, 500);
            new.must_be(&mut b, value);
            b.engine.release(storage, b.streams[0].engine).unwrap();
            b.give(0, range);
        }
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h14_h15_one_block_serves_many_and_a_window_of_any_depth() {
    story(name_of!(h14_h15_one_block_serves_many_and_a_window_of_any_depth), 1, 0, || {
        for (depth, slots) in [(0, 1), (1, 1), (2, 1), (2, 2), (4, 3)] {
            let bounds =
                Options { keep_last_count: 0, prefetch_count_max: depth, ..Options::default() };
            let mut b = Bench::with(2, Bytes(slots * LEN), bounds);
            for round in 0..6 {
                let s = round as usize % 2;
                let storages: Vec<_> = (0..4).map(|n| b.owned(s, LEN, 10 * round + n, 1)).collect();
                for storage in &storages {
                    // Where there is no block it stays; nobody's is reused early.
                    b.engine.evict(storage.id(), b.streams[s].engine).unwrap();
                }
                b.flush(s);
                for (n, storage) in storages.into_iter().enumerate().rev() {
                    let range = b.acquire(s, &storage);
                    b.read(s, range).must_be(&mut b, 10 * round + n as u32);
                    b.engine.release(storage, b.streams[s].engine).unwrap();
                }
            }
            b.close();
        }
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h20_h21_the_default_streams_keep_their_order_by_events() {
    story(name_of!(h20_h21_the_default_streams_keep_their_order_by_events), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        for (raw, value) in [(0, 10), (2, 20)] {
            let here = b.cuda.adopt_stream(raw).unwrap();
            let engine = b.engine.adopt_stream(raw).unwrap();
            b.streams.push(crate::bench::Both { here, engine });
            let s = b.streams.len() - 1;
            let storage = b.owned(s, LEN, value, 10);
            b.evict(s, &storage);
            b.flush(s);
            let range = b.acquire(s, &storage);
            b.read(s, range).must_be(&mut b, value);
            b.engine.release(storage, engine).unwrap();
        }
        // The per-thread one serves no other thread.
        let on = b.streams[2].engine;
        std::thread::scope(|scope| {
            let engine = &mut b.engine;
            let refused = scope.spawn(move || engine.flush(on).unwrap_err()).join().unwrap();
            assert!(matches!(refused.kind(), Kind::Usage(_)), "{refused}");
        });
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn h28_a_refill_does_not_queue_behind_the_evictions() {
    story(name_of!(h28_a_refill_does_not_queue_behind_the_evictions), 1, 0, || {
        let mut b = Bench::new(2, Bytes::mib(1100));
        let wanted = b.away(LEN, 5);
        b.cuda.sync().unwrap();
        let large: Vec<_> = (0..4).map(|n| b.owned(0, LARGE, n, 0)).collect();
        for storage in &large {
            b.evict(0, storage);
        }
        let room = b.take(1, LEN);
        b.engine.refill(wanted.id(), room, b.streams[1].engine).unwrap();
        // A copy to the host would queue among the evictions: the reader's stream has an event.
        let served = b.cuda.create_event(Timing::Off).unwrap();
        b.cuda.record(served, b.streams[1].here).unwrap();
        poll(&mut b.cuda, served).unwrap();
        // The reader is served while the copies out, 1 GiB of them, are still under way.
        let moving = b.engine.stats().out_in_flight_bytes;
        b.engine.step().unwrap();
        let left = b.engine.stats().out_in_flight_bytes;
        println!("served with {left} of {moving} bytes still on their way out");
        assert!(left > 0, "a refill waited for the evictions");
        let reader = b.read(1, room);
        reader.must_be(&mut b, 5);
        drop((large, wanted));
        b.give(1, room);
        b.close();
    });
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_in_place_write_waits_for_the_running_copy_out() {
    story(name_of!(an_in_place_write_waits_for_the_running_copy_out), 1, 0, || {
        let mut b = Bench::new(1, POOL);
        let on = b.streams[0].engine;
        for value in 1..=5 {
            let large = b.owned(0, LARGE, value, 2);
            b.evict(0, &large);
            let Acquire::Ready(range) = b.engine.acquire(large.id(), on).unwrap() else { panic!() };
            // The host copy, as it was when it was asked for, is read before it is stale.
            b.cuda.sync().unwrap();
            let mut word = [0; 4];
            b.engine.read_host(large.id(), Bytes(LARGE - 4), &mut word).unwrap();
            assert_eq!(u32::from_ne_bytes(word), value);
            b.engine.release(large, on).unwrap();
            let again = b.owned(0, LARGE, value, 2);
            b.evict(0, &again);
            let range_again = b.acquire(0, &again);
            assert_eq!(range.len(), range_again.len());
            b.engine.note(on, &[Use::write(range_again)]).unwrap();
            b.fill(0, range_again, value + 1000);
            b.evict(0, &again);
            b.flush(0);
            let home = b.acquire(0, &again);
            b.read(0, home).must_be(&mut b, value + 1000);
            b.engine.release(again, on).unwrap();
        }
        b.close();
    });
}
