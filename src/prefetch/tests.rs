//! Tests of the window and of the order.

use super::*;
use crate::storage::Place::{Left, Rests};
use crate::unit::Key;

const STREAM: StreamId = StreamId(Key { owner: 9, index: 0, generation: 0 });

fn id(index: u32) -> StorageId {
    StorageId(Key { owner: 1, index, generation: 0 })
}

fn homed(index: u32) -> Homed {
    Homed { storage: id(index), stream: STREAM }
}

fn prefetcher(bytes_max: u64, count_max: usize) -> Prefetcher {
    let bytes_max = Bytes(bytes_max);
    Prefetcher::new(PrefetchLimits { bytes_max, count_max, pass_len_max: 100 })
}

/// Ordinals that would be fetched now, each taking ten bytes, without fetching them.
fn next(prefetcher: &Prefetcher) -> Option<u32> {
    prefetcher.wanted(STREAM, |_| Some(Bytes(10))).map(|(id, _)| id.0.index)
}

fn leave(prefetcher: &mut Prefetcher, count: u32) {
    for index in 0..count {
        assert_eq!(prefetcher.left(homed(index)), Left(index));
    }
}

#[test]
fn a_pass_that_begins_looks_at_what_came_and_went_alone() {
    let mut it = Prefetcher::new(PrefetchLimits {
        bytes_max: Bytes(100),
        count_max: 2,
        pass_len_max: 1 << 20,
    });
    leave(&mut it, 10_000);
    it.asked(Left(9_000));
    it.next_pass(|_, _| {});
    let mut told = Vec::new();
    for index in [20_000, 20_001, 20_002] {
        it.left(homed(index));
    }
    it.asked(Left(10_000));
    it.next_pass(|storage, ordinal| told.push((storage.0.index, ordinal)));
    assert_eq!(told, [(20_000, Some(Left(9_999))), (20_002, Some(Left(10_000)))]);
    assert!((0..10_001).all(|ordinal| it.at(ordinal).is_some()));
}

#[test]
fn nothing_is_fetched_while_storages_are_leaving() {
    let mut it = prefetcher(100, 2);
    leave(&mut it, 3);
    assert_eq!(next(&it), None);
    it.turned();
    assert_eq!(next(&it), Some(2));
    it.left(homed(3));
    assert_eq!(next(&it), None);
}

#[test]
fn the_window_bounds_bytes_and_number() {
    let mut it = prefetcher(25, 8);
    leave(&mut it, 4);
    it.turned();
    it.fetched(Bytes(10));
    it.fetched(Bytes(10));
    assert_eq!(next(&it), None, "thirty bytes would exceed the window");
    it.claimed(Bytes(10));
    assert_eq!(next(&it), Some(3));
    let mut it = prefetcher(1000, 1);
    leave(&mut it, 4);
    it.turned();
    it.fetched(Bytes(10));
    assert_eq!(next(&it), None);
}

#[test]
fn an_order_asked_once_is_expected_the_next_time() {
    let mut it = prefetcher(100, 2);
    let order = [1, 0, 2];
    leave(&mut it, 3);
    for ordinal in order {
        it.asked(Left(ordinal));
    }
    assert!(it.pass_is_over());
    it.next_pass(|_, _| panic!("nothing is away"));
    leave(&mut it, 3);
    it.turned();
    let wrong = it.guesses().wrong;
    for ordinal in order {
        assert_eq!(next(&it), Some(ordinal));
        it.asked(Left(ordinal));
    }
    assert_eq!(it.guesses().wrong, wrong);
}

#[test]
fn the_reverse_order_is_no_wrong_guess_in_the_first_pass() {
    let mut it = prefetcher(100, 2);
    leave(&mut it, 3);
    for ordinal in [2, 1, 0] {
        it.asked(Left(ordinal));
    }
    assert_eq!(it.guesses().wrong, 0);
}

#[test]
fn an_order_that_changed_is_followed_and_learned_anew() {
    let mut it = prefetcher(100, 2);
    for order in [[2, 1, 0], [0, 2, 1]] {
        leave(&mut it, 3);
        for ordinal in order {
            it.asked(Left(ordinal));
        }
        it.next_pass(|_, _| {});
    }
    assert!(it.guesses().wrong > 0);
    leave(&mut it, 3);
    it.turned();
    assert_eq!(next(&it), Some(0));
}

#[test]
fn a_pass_of_another_length_goes_by_the_reverse_order() {
    let mut it = prefetcher(100, 2);
    leave(&mut it, 2);
    it.asked(Left(0));
    it.asked(Left(1));
    it.next_pass(|_, _| {});
    leave(&mut it, 3);
    it.turned();
    assert_eq!(next(&it), Some(2));
}

#[test]
fn what_is_still_away_is_carried_into_the_next_pass() {
    let mut it = prefetcher(100, 2);
    leave(&mut it, 3);
    it.asked(Left(1));
    let mut renumbered = Vec::new();
    it.next_pass(|id, ordinal| renumbered.push((id.0.index, ordinal)));
    assert_eq!(renumbered, [(0, Some(Left(0))), (2, Some(Left(1)))]);
    it.turned();
    assert_eq!(next(&it), Some(2));
}

#[test]
fn a_pass_that_never_ends_stays_bounded() {
    let mut it = prefetcher(100, 2);
    for index in 0..10_000 {
        if it.pass_is_over() {
            it.next_pass(|_, _| {});
        }
        it.left(homed(index));
    }
    assert!(it.evicted.len() <= 100 && it.live_count <= 100);
}

#[test]
fn a_storage_that_is_gone_is_not_fetched() {
    let mut it = prefetcher(100, 2);
    leave(&mut it, 2);
    it.gone(Left(1));
    it.gone(Left(1));
    it.turned();
    assert_eq!(next(&it), Some(0));
}

#[test]
fn storages_of_another_stream_are_left_alone() {
    let mut it = prefetcher(100, 2);
    leave(&mut it, 1);
    it.turned();
    let other = StreamId(Key { owner: 9, index: 1, generation: 0 });
    assert_eq!(it.wanted(other, |_| Some(Bytes(1))), None);
}

#[test]
fn what_rests_is_wanted_in_its_order_once_a_reader_came_again() {
    let mut it = prefetcher(1000, 8);
    leave(&mut it, 4);
    for ordinal in [3, 2, 1, 0] {
        it.asked(Left(ordinal));
        assert_eq!(it.rests(homed(ordinal)), Rests(3 - u64::from(ordinal)));
    }
    assert_eq!(next(&it), None, "nobody knows whether there is another pass");
    for pass in 1..4 {
        for turn in 0..4 {
            it.asked(Rests(4 * pass - 4 + turn));
            it.rests(homed(3 - turn as u32));
            assert_eq!(next(&it), Some((6 - turn as u32) % 4));
        }
    }
    assert_eq!(it.guesses().wrong, 0);
}

#[test]
fn what_rests_does_not_change_the_order_of_a_pass() {
    let mut it = prefetcher(1000, 8);
    leave(&mut it, 3);
    it.asked(Left(2));
    it.rests(homed(2));
    assert_eq!(next(&it), Some(1));
    it.asked(Rests(0));
    it.asked(Left(1));
    it.asked(Left(0));
    assert!(it.pass_is_over());
    it.next_pass(|_, _| panic!("nothing of the pass is away"));
    assert_eq!(it.learned, [2, 1, 0]);
}

#[test]
fn of_those_that_rest_so_many_are_known() {
    let mut it = prefetcher(1000, 8);
    for index in 0..250 {
        it.rests(homed(index));
    }
    it.gone(Rests(250));
    it.asked(Rests(10));
    assert_eq!(next(&it), None, "its place was given up");
    it.gone(Rests(152));
    it.asked(Rests(151));
    assert_eq!(next(&it), Some(153));
}
