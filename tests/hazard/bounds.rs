//! Guards against a checker that dies of a long run: what it keeps must follow what is live, and a
//! record must cost about as much at the end of the run as at its start.

use crate::script::{Script, device, event, pinned, stream, uses};
use lightering::hazard::{Checker, Footprint, HAZARDS_MAX, Kind};
use lightering::trace::{Access, Actor, Op, Record};
use lightering::{Key, StreamId};
use std::time::Instant;

const LAYERS: u64 = 24;
const LEN: u64 = 0x1000;
const TRUNKS: u64 = 4;

/// One training step: every layer's bytes leave by stream 1 and come back by stream 2.
fn training_step(mut script: Script) -> Script {
    let device_of = |layer: u64| device(0x10_0000 + layer * LEN, LEN);
    let pinned_of = |layer: u64| pinned(0x90_0000 + layer * LEN, LEN);
    let trunks = move |layer: u64| {
        (0..TRUNKS).map(move |trunk| {
            let (at, len) = (layer * LEN + trunk * LEN / TRUNKS, LEN / TRUNKS);
            (device(0x10_0000 + at, len), pinned(0x90_0000 + at, len))
        })
    };
    for layer in 0..LAYERS {
        let (range, done) = (device_of(layer), layer as u32);
        script = script.note(0, Access::Alloc, range).name("layer", range);
        script = script.kernel("forward", &[uses(Access::Write, range)], 0).edge(0, 1, 99);
        for (from, to) in trunks(layer) {
            script = script.copy_out(from, to, 1);
        }
        script = script.edge(1, 0, done).note(0, Access::Free, range);
    }
    script = script.worker(0, Access::Read, pinned_of(0)).query(0, true);
    script = script.worker(0, Access::Read, pinned(0, 0));
    for layer in (0..LAYERS).rev() {
        let (range, done) = (device_of(layer), layer as u32);
        script = script.note(0, Access::Alloc, range).edge(0, 2, 99).wait(2, done);
        for (to, from) in trunks(layer) {
            script = script.copy_in(from, to, 2);
        }
        script = script.edge(2, 0, done + LAYERS as u32);
        script = script.kernel("backward", &[uses(Access::Update, range)], 0);
        script = script.note(0, Access::Free, range);
    }
    script.op(Op::Sync)
}

fn run(checker: &mut Checker, records: &[Record], times: u64) -> Footprint {
    for turn in 0..times {
        for record in records {
            let seq = record.seq + turn * records.len() as u64;
            checker.push(&Record { seq, ..*record });
        }
    }
    checker.footprint()
}

#[test]
fn a_million_records_cost_no_more_memory_than_ten_thousand() {
    let step = training_step(Script::default()).records;
    // The worker's read of the first layer is wrong: nothing says that its copy is done by then.
    let (wrong, right) = {
        let at = step.iter().position(|r| matches!(r.op, Op::Query { .. })).unwrap();
        let mut right = step.clone();
        right.swap(at - 1, at);
        (step, right)
    };
    let mut checker = Checker::new();
    let early = run(&mut checker, &right, 20);
    let turns = 1_000_000 / right.len() as u64;
    let start = Instant::now();
    let late = run(&mut checker, &right, turns);
    let (records, elapsed) = (turns * right.len() as u64, start.elapsed());
    println!("{records} records, {} ns each, {late:?}", elapsed.as_nanos() / u128::from(records));
    assert_eq!(checker.hazards(), [], "the trace is clean");
    assert_eq!(early, late);
    assert!(late.segments as u64 <= LAYERS * (TRUNKS + 1) && late.actors == 4, "{late:?}");

    let mut checker = Checker::new();
    run(&mut checker, &wrong, 1000);
    assert_eq!(checker.hazards().len(), 1, "the same mistake in every step is listed once");
    assert_eq!(checker.hazards()[0].kind, Kind::ReadAfterWrite);
    assert_eq!(checker.total(), 1000, "and counted each time");
}

#[test]
fn streams_that_come_and_go_leave_nothing_behind() {
    let mut checker = Checker::new();
    let mut push = |op| checker.push(&Record { op, ..Script::new(1, 0).records[0] });
    push(Op::OpenEvent(event(0)));
    for generation in 0..100_000 {
        let id = StreamId(Key { owner: 1, index: 1, generation });
        let (from, to) = (device(0x1000, 64), pinned(0x9000, 64));
        push(Op::OpenStream(id));
        push(Op::Wait { stream: id, event: event(0), site: lightering::trace::Site::Outside });
        push(Op::CopyOut { from, to, stream: id });
        push(Op::Record { event: event(0), stream: id });
        // The host never learns of this stream's end; only the next stream does.
        push(Op::CloseStream(id));
    }
    assert_eq!(checker.total(), 1, "the first wait was for nothing; every other copy has its edge");
    let Footprint { actors, events, segments, .. } = checker.footprint();
    assert!(actors < 150 && events == 1 && segments == 2, "{:?}", checker.footprint());
}

#[test]
fn memory_that_never_comes_back_to_the_same_address_is_forgotten_when_settled() {
    let mut checker = Checker::new();
    let mut seq = 0;
    let mut most = 0;
    for turn in 0..200_000_u64 {
        let range = device(0x1000 + turn * 0x100, 0x80);
        let mut script = Script { device: lightering::DeviceId(0), ..Script::default() };
        script = script.alloc(range, 0).note(0, Access::Write, range).name("layer", range);
        script = script.free(range.at().0, 0);
        script = if turn % 64 == 0 { script.record(0, 0).query(0, true) } else { script };
        for record in &script.records {
            checker.push(&Record { seq, ..*record });
            seq += 1;
        }
        most = most.max(checker.footprint().segments);
    }
    assert_eq!(checker.hazards(), []);
    let end = checker.footprint();
    assert!(most < 500_000, "{most}");
    assert!(end.names <= 1 << 14 && end.allocs == 0 && end.actors == 1, "{end:?}");
}

#[test]
fn a_flood_of_different_hazards_is_counted_and_not_kept() {
    let mut script = Script::new(2, 0);
    for at in 0..1000 {
        let range = device(at, 1);
        script = script.note(0, Access::Write, range).note(1, Access::Write, range);
    }
    let mut checker = Checker::new();
    script.records.iter().for_each(|record| checker.push(record));
    assert_eq!((checker.hazards().len(), checker.total()), (HAZARDS_MAX, 1000));
    assert!(matches!(checker.hazards()[0].second.by, Actor::Stream(id) if id == stream(1)));
}
