//! One story for each hazard: with the fault it is reported, as just that; mended it is silent.
//!
//! Stream 0 is the compute stream, 1 the lane out, 2 the lane in.

use crate::script::{Script, device, event, pinned, stream, uses};
use lightering::hazard::{Checker, Hazard, Kind};
use lightering::trace::{Access, Actor, Op};
use lightering::{DeviceRange, Name, PinnedRange};

fn bytes() -> DeviceRange {
    device(0x1000, 0x400)
}

fn block() -> PinnedRange {
    pinned(0x9000, 0x400)
}

fn start() -> Script {
    Script::new(3, 4)
}

#[track_caller]
fn silent(script: &Script) {
    assert_eq!(script.check(), []);
}

/// Exactly one hazard of this kind, between these records.
#[track_caller]
fn only(script: &Script, kind: Kind, first: Option<u64>, second: u64) -> Hazard {
    let hazards = script.check();
    assert_eq!(hazards.len(), 1, "{hazards:#?}");
    let found = hazards[0];
    let seqs = (found.first.map(|first| first.seq), found.second.seq);
    assert_eq!((found.kind, seqs), (kind, (first, second)), "{found}");
    found
}

fn last(script: &Script) -> u64 {
    script.records.len() as u64 - 1
}

#[test]
fn a_copy_out_before_its_producer_is_done_reads_too_early() {
    let made = start().kernel("produce", &[uses(Access::Write, bytes())], 0);
    let wrote = last(&made);
    let torn = made.clone().copy_out(bytes(), block(), 1);
    let hazard = only(&torn, Kind::ReadAfterWrite, Some(wrote), last(&torn));
    let (from, to) = (Actor::Stream(stream(0)), Actor::Stream(stream(1)));
    assert_eq!(hazard.missing_edge(), Some((from, to)));
    assert_eq!((hazard.first.unwrap().word, hazard.second.word), ("produce", "copy_out"));
    silent(&made.edge(0, 1, 0).copy_out(bytes(), block(), 1));
}

#[test]
fn an_event_recorded_before_the_producer_covers_nothing_of_it() {
    let early = start().record(0, 0).note(0, Access::Write, bytes());
    let wrote = last(&early);
    let torn = early.clone().wait(1, 0).copy_out(bytes(), block(), 1);
    only(&torn, Kind::ReadAfterWrite, Some(wrote), last(&torn));
    silent(&early.edge(0, 1, 0).copy_out(bytes(), block(), 1));
}

#[test]
fn a_wait_takes_the_recording_of_its_own_time() {
    let made = start().record(0, 0).note(0, Access::Write, bytes());
    let late = made.clone().wait(1, 0).record(0, 0).copy_out(bytes(), block(), 1);
    only(&late, Kind::ReadAfterWrite, Some(last(&made)), last(&late));
    // Recorded anew on an idle stream, the event no longer stands for the write.
    let moved = made.clone().record(0, 0).record(0, 2).wait(1, 0).copy_out(bytes(), block(), 1);
    only(&moved, Kind::ReadAfterWrite, Some(last(&made)), last(&moved));
    silent(&made.record(0, 0).wait(1, 0).record(0, 2).copy_out(bytes(), block(), 1));
}

#[test]
fn an_edge_reaches_through_a_third_stream() {
    let made = start().note(0, Access::Write, bytes()).edge(0, 2, 0);
    silent(&made.clone().edge(2, 1, 1).copy_out(bytes(), block(), 1));
    let cut = start().note(0, Access::Write, bytes()).record(1, 2).edge(0, 2, 0).wait(1, 1);
    let cut = cut.copy_out(bytes(), block(), 1);
    assert_eq!(cut.kinds(), [Kind::ReadAfterWrite]);
}

#[test]
fn bytes_written_while_they_are_copied_out_are_a_write_after_read() {
    let copying = start().copy_out(bytes(), block(), 1);
    let torn = copying.clone().note(0, Access::Write, device(0x13ff, 1));
    only(&torn, Kind::WriteAfterRead, Some(last(&copying)), last(&torn));
    silent(&copying.clone().note(0, Access::Read, bytes()));
    silent(&copying.clone().note(0, Access::Write, device(0x1400, 1)));
    silent(&copying.edge(1, 0, 0).note(0, Access::Write, bytes()));
}

#[test]
fn every_reader_must_be_done_before_a_write_not_only_the_last() {
    let read = start().note(0, Access::Read, bytes()).note(1, Access::Read, bytes());
    let one = read.clone().edge(1, 2, 0).copy_in(block(), bytes(), 2);
    only(&one, Kind::WriteAfterRead, Some(last(&read) - 1), last(&one));
    silent(&read.edge(1, 2, 0).edge(0, 2, 1).copy_in(block(), bytes(), 2));
}

#[test]
fn a_copy_in_over_a_running_copy_in_is_a_write_after_write() {
    let first = start().copy_in(block(), bytes(), 2);
    let torn = first.clone().copy_in(pinned(0x9400, 0x400), bytes(), 1);
    only(&torn, Kind::WriteAfterWrite, Some(last(&first)), last(&torn));
    silent(&first.edge(2, 1, 0).copy_in(pinned(0x9400, 0x400), bytes(), 1));
}

#[test]
fn a_block_is_read_by_the_host_or_sent_back_only_after_the_copy_out() {
    let copying = start().copy_out(bytes(), block(), 1);
    let copy = last(&copying);
    let host = copying.clone().host(Access::Read, block());
    only(&host, Kind::ReadAfterWrite, Some(copy), last(&host));
    let unsure = copying.clone().record(0, 1).query(0, false).host(Access::Read, block());
    only(&unsure, Kind::ReadAfterWrite, Some(copy), last(&unsure));
    let chained = copying.clone().copy_in(block(), device(0x5000, 0x400), 2);
    only(&chained, Kind::ReadAfterWrite, Some(copy), last(&chained));
    silent(&copying.clone().record(0, 1).query(0, true).host(Access::Read, block()));
    silent(&copying.clone().op(Op::Sync).host(Access::Read, block()));
    silent(&copying.edge(1, 2, 0).copy_in(block(), device(0x5000, 0x400), 2));
}

#[test]
fn what_the_host_knows_done_all_later_work_is_behind() {
    let copying = start().copy_in(block(), bytes(), 2).record(0, 2);
    let blind = copying.clone().note(0, Access::Read, bytes()).query(0, true);
    assert_eq!(blind.kinds(), [Kind::ReadAfterWrite], "enqueued before the host knew");
    silent(&copying.query(0, true).note(0, Access::Read, bytes()));
}

#[test]
fn a_worker_spills_a_block_between_the_copy_out_and_the_next_one() {
    let copied = start().copy_out(bytes(), block(), 1).record(0, 1);
    let early = copied.clone().worker(3, Access::Read, block());
    assert_eq!(early.kinds(), [Kind::ReadAfterWrite], "handed over while it was being filled");
    let handed = copied.query(0, true).worker(3, Access::Read, block());
    let reused = handed.clone().copy_out(bytes(), block(), 1);
    only(&reused, Kind::WriteAfterRead, Some(last(&handed)), last(&reused));
    // The worker's use of no bytes is its answer.
    silent(&handed.worker(3, Access::Read, pinned(0, 0)).copy_out(bytes(), block(), 1));
}

#[test]
fn a_sync_is_for_the_streams_of_its_own_device() {
    let two = start().on(1).op(Op::OpenStream(stream(8))).copy_out(bytes(), block(), 8);
    silent(&two.clone().op(Op::Sync).host(Access::Read, block()));
    let other = two.on(0).op(Op::Sync).host(Access::Read, block());
    assert_eq!(other.kinds(), [Kind::ReadAfterWrite]);
}

#[test]
fn the_same_address_on_two_devices_is_two_places() {
    let one = start().note(0, Access::Write, bytes());
    silent(&one.clone().on(1).note(1, Access::Write, bytes()));
    assert_eq!(one.note(1, Access::Write, bytes()).kinds(), [Kind::WriteAfterWrite]);
}

#[test]
fn bytes_freed_while_they_are_copied_out_are_free_in_flight() {
    let copying = start().alloc(bytes(), 0).note(0, Access::Write, bytes()).edge(0, 1, 0);
    let copying = copying.copy_out(bytes(), block(), 1);
    let freed = copying.clone().free(0x1000, 0);
    let hazard = only(&freed, Kind::FreeInFlight, Some(last(&copying)), last(&freed));
    let whole = uses(Access::Free, bytes());
    assert_eq!(hazard.second.uses, Some(whole), "a free by address finds its length");
    silent(&copying.edge(1, 0, 1).free(0x1000, 0));
    let noted = start().copy_out(bytes(), block(), 1);
    let dropped = noted.clone().note(0, Access::Free, bytes());
    only(&dropped, Kind::FreeInFlight, Some(last(&noted)), last(&dropped));
    silent(&noted.edge(1, 0, 1).note(0, Access::Free, bytes()));
}

#[test]
fn a_pinned_slab_is_unpinned_only_when_the_host_knows_its_copies_done() {
    let copying = start().host(Access::Alloc, block()).copy_out(bytes(), block(), 1).record(0, 1);
    let early = copying.clone().host(Access::Free, block());
    assert_eq!(early.kinds(), [Kind::FreeInFlight]);
    let late = copying.query(0, true).host(Access::Free, block());
    silent(&late);
    assert_eq!(late.copy_in(block(), bytes(), 2).kinds(), [Kind::UseAfterFree]);
}

#[test]
fn a_freed_range_is_not_used_again_whatever_the_order() {
    let freed = start().alloc(bytes(), 0).note(0, Access::Write, bytes()).free(0x1000, 0);
    let used = freed.clone().note(0, Access::Read, device(0x1200, 8));
    let hazard = only(&used, Kind::UseAfterFree, Some(last(&freed)), last(&used));
    assert_eq!(hazard.missing_edge(), None, "no order would help");
    let told =
        used.note(0, Access::Read, device(0x1200, 8)).note(1, Access::Read, device(0x1200, 8));
    assert_eq!(told.kinds(), [Kind::UseAfterFree], "one mistake is told once");
    silent(&freed.clone().note(0, Access::Read, device(0x1400, 8)));
    silent(&freed.alloc(bytes(), 0).note(0, Access::Write, bytes()).free(0x1000, 0));
}

#[test]
fn adopted_bytes_exist_until_their_owner_says_they_are_gone_and_again_once_named() {
    let used = start().note(0, Access::Read, bytes());
    silent(&used);
    let gone = used.note(0, Access::Free, bytes());
    assert_eq!(gone.clone().note(0, Access::Read, bytes()).kinds(), [Kind::UseAfterFree]);
    let named = gone.name("layer.3", bytes());
    silent(&named.clone().note(0, Access::Read, bytes()));
    let elsewhere = named.clone().copy_in(block(), bytes(), 2);
    assert_eq!(elsewhere.kinds(), [Kind::WriteAfterWrite], "its release goes by stream order");
    silent(&named.edge(0, 2, 0).copy_in(block(), bytes(), 2));
}

#[test]
fn bytes_of_one_streams_allocation_are_not_there_yet_for_another() {
    let taken = start().alloc(bytes(), 0);
    let early = taken.clone().copy_in(block(), bytes(), 2).edge(2, 0, 1).free(0x1000, 0);
    only(&early, Kind::UseBeforeAlloc, Some(last(&taken)), last(&taken) + 1);
    silent(&taken.edge(0, 2, 0).copy_in(block(), bytes(), 2).edge(2, 0, 1).free(0x1000, 0));
    let noted = start().note(0, Access::Alloc, bytes());
    let early = noted.clone().copy_in(block(), bytes(), 2);
    only(&early, Kind::UseBeforeAlloc, Some(last(&noted)), last(&early));
    silent(&noted.edge(0, 2, 0).copy_in(block(), bytes(), 2));
}

#[test]
fn bytes_nobody_wrote_are_not_read() {
    let taken = start().note(0, Access::Alloc, bytes());
    let half = taken.clone().note(0, Access::Write, device(0x1000, 0x200));
    let read = half.clone().note(0, Access::Read, bytes());
    only(&read, Kind::ReadUndefined, Some(last(&taken)), last(&read));
    assert_eq!(read.note(0, Access::Read, bytes()).kinds().len(), 1, "told once for a range");
    silent(&half.clone().note(0, Access::Read, device(0x1000, 0x200)));
    silent(&half.note(0, Access::Write, device(0x1200, 0x200)).note(0, Access::Read, bytes()));
    let updated = taken.note(0, Access::Update, bytes());
    assert_eq!(updated.kinds(), [Kind::ReadUndefined]);
    silent(&start().note(0, Access::Read, bytes()).host(Access::Read, block()));
}

#[test]
fn a_range_is_given_back_once() {
    let freed = start().alloc(bytes(), 0).free(0x1000, 0);
    let twice = freed.clone().free(0x1000, 0);
    only(&twice, Kind::DoubleFree, Some(last(&freed)), last(&twice));
    silent(&freed.alloc(bytes(), 0).free(0x1000, 0));
    let dropped = start().note(0, Access::Free, bytes()).note(0, Access::Free, bytes());
    assert_eq!(dropped.kinds(), [Kind::DoubleFree]);
    silent(&start().free(0x1000, 0).free(0x1000, 0));
}

#[test]
fn the_driver_orders_its_own_reuse_and_a_framework_does_not() {
    let other = device(0x5000, 8);
    let wrote = start().alloc(bytes(), 0).note(0, Access::Write, other);
    let again = wrote.clone().free(0x1000, 0).alloc(bytes(), 1).note(1, Access::Write, bytes());
    // Having the bytes, stream 1 is behind all that came before their release.
    silent(&again.note(1, Access::Read, other).free(0x1000, 1));
    let apart = wrote.free(0x1000, 0).alloc(device(0x2000, 8), 1).note(1, Access::Read, other);
    assert_eq!(apart.free(0x2000, 1).kinds(), [Kind::ReadAfterWrite], "other bytes, no order");
    let dropped = start().note(0, Access::Write, bytes()).note(0, Access::Free, bytes());
    let reused = dropped.clone().note(1, Access::Alloc, bytes());
    only(&reused, Kind::WriteAfterWrite, Some(last(&dropped)), last(&reused));
    silent(&dropped.clone().edge(0, 1, 0).note(1, Access::Alloc, bytes()));
    silent(&dropped.note(0, Access::Alloc, bytes()));
}

#[test]
fn a_release_orders_the_next_allocation_and_no_later_one() {
    let other = device(0x5000, 8);
    let freed = start().alloc(bytes(), 0).note(0, Access::Write, other).free(0x1000, 0);
    let stolen = freed.alloc(bytes(), 1).note(2, Access::Alloc, bytes());
    let kinds = stolen.note(2, Access::Read, other).kinds();
    assert_eq!(kinds, [Kind::WriteAfterWrite, Kind::ReadAfterWrite, Kind::Leak]);
}

#[test]
fn a_sync_waits_for_what_a_closed_stream_waited_for() {
    let two = start().on(1).op(Op::OpenStream(stream(8))).op(Op::OpenEvent(event(9)));
    let copied = two.copy_out(bytes(), block(), 8).record(9, 8).on(0).wait(1, 9);
    let mut checker = Checker::new();
    let closed = copied.op(Op::CloseStream(stream(1)));
    closed.records.iter().for_each(|record| checker.push(record));
    checker.tidy();
    assert_eq!(checker.footprint().actors, 3, "the closed stream was forgotten");
    let read = closed.op(Op::Sync).host(Access::Read, block());
    silent(&read);
    read.records[read.records.len() - 2..].iter().for_each(|record| checker.push(record));
    assert_eq!(checker.hazards(), [], "and yet is waited for");
}

#[test]
fn a_framework_reuses_bytes_only_behind_a_copy_that_reads_them() {
    let copying = start().copy_out(bytes(), block(), 1);
    let reused = copying.clone().note(0, Access::Alloc, bytes());
    only(&reused, Kind::WriteAfterRead, Some(last(&copying)), last(&reused));
    silent(&copying.edge(1, 0, 0).note(0, Access::Alloc, bytes()));
}

#[test]
fn bytes_are_lent_to_one_allocation_at_a_time() {
    let taken = start().alloc(bytes(), 0);
    let overlap = taken.clone().alloc(device(0x1200, 0x400), 0).free(0x1200, 0);
    only(&overlap, Kind::WriteAfterWrite, Some(last(&taken)), last(&taken) + 1);
    let beside = taken.alloc(device(0x1400, 0x400), 0);
    silent(&beside.free(0x1400, 0).free(0x1000, 0));
}

#[test]
fn a_framework_may_cut_up_what_the_driver_lent_it() {
    let slab = start().alloc(bytes(), 0);
    let (left, right) = (device(0x1000, 0x200), device(0x1200, 0x200));
    let cut = slab.note(0, Access::Alloc, left).note(0, Access::Alloc, right);
    let cut = cut.note(0, Access::Write, left).note(0, Access::Free, left);
    silent(&cut.clone().note(0, Access::Alloc, left).free(0x1000, 0));
    silent(&cut.clone().free(0x1000, 0));
    let early = cut.free(0x1000, 1);
    assert_eq!(early.kinds(), [Kind::FreeInFlight], "on a stream that is not behind the pieces");
}

#[test]
fn an_event_is_recorded_before_it_is_waited_for() {
    let fresh = start().wait(1, 0);
    let hazard = only(&fresh, Kind::WaitOnFresh, None, last(&fresh));
    assert_eq!(hazard.event, Some(event(0)));
    silent(&start().record(0, 0).wait(1, 0));
    let failed = {
        let mut script = start().record(0, 0);
        script.records.last_mut().unwrap().failed = Some(lightering::Kind::Busy);
        script.wait(1, 0)
    };
    assert_eq!(failed.kinds(), [Kind::WaitOnFresh], "a record that failed recorded nothing");
    let closed = start().record(0, 0).op(Op::CloseEvent(event(0))).wait(1, 0);
    assert_eq!(closed.kinds(), [Kind::WaitOnFresh]);
    assert_eq!(start().wait(1, 77).kinds(), [Kind::WaitOnFresh], "never opened");
}

#[test]
fn an_event_is_recorded_on_its_own_device_and_waited_for_on_any() {
    let two = start().on(1).op(Op::OpenStream(stream(8)));
    let wrong = two.clone().record(0, 8);
    let hazard = only(&wrong, Kind::ForeignEvent, None, last(&wrong));
    assert_eq!(hazard.event, Some(event(0)));
    silent(&two.clone().on(0).record(0, 0).on(1).wait(8, 0));
    silent(&two.op(Op::OpenEvent(event(9))).record(9, 8).on(0).wait(0, 9));
}

#[test]
fn what_is_allocated_at_the_end_has_leaked() {
    let taken = start().alloc(bytes(), 0);
    only(&taken, Kind::Leak, None, last(&taken));
    silent(&taken.free(0x1000, 0));
    let slab = start().host(Access::Alloc, block());
    only(&slab, Kind::Leak, None, last(&slab));
    silent(&slab.host(Access::Free, block()));
    silent(&start().note(0, Access::Alloc, bytes()));
}

#[test]
fn a_missing_edge_is_told_once_and_hides_no_other() {
    let torn = start().note(0, Access::Write, bytes()).copy_out(bytes(), block(), 1);
    let again =
        torn.clone().copy_out(bytes(), pinned(0xa000, 0x400), 1).note(1, Access::Write, bytes());
    assert_eq!(again.kinds(), [Kind::ReadAfterWrite], "as if it had been ordered");
    let more =
        torn.note(0, Access::Write, device(0x5000, 8)).note(1, Access::Read, device(0x5000, 8));
    assert_eq!(more.kinds(), [Kind::ReadAfterWrite, Kind::ReadAfterWrite], "a later write");
}

#[test]
fn a_kernels_uses_are_one_step_and_a_note_after_a_gap_another() {
    let left = uses(Access::Write, bytes());
    let right = uses(Access::Write, device(0x5000, 8));
    let both = start().kernel("scatter", &[left, right], 0).note(1, Access::Read, bytes());
    assert_eq!(both.clone().note(1, Access::Read, device(0x5000, 8)).kinds().len(), 1);
    let apart = start().kernel("scatter", &[left], 0).op(Op::Sync).note(
        0,
        Access::Write,
        device(0x5000, 8),
    );
    let apart = apart.note(1, Access::Read, device(0x5000, 8)).check();
    assert_eq!(apart.len(), 1);
    assert_eq!(apart[0].first.unwrap().word, "note");
}

#[test]
fn a_report_is_one_line_that_names_the_storage_both_uses_and_the_edge() {
    let script = start().name("stale", bytes()).name("layer.7", bytes());
    let script = script.kernel("produce", &[uses(Access::Write, bytes())], 0);
    let hazards = script.copy_out(bytes(), block(), 1).check();
    assert_eq!(hazards[0].name, Some(Name::new("layer.7")), "the latest name wins");
    assert_eq!(
        hazards[0].to_string(),
        "read after write: nothing orders copy_out #11 (reads device 0 0x1000+0x400) on stream 1.0 \
         behind produce #10 (writes device 0 0x1000+0x400) on stream 0.0 [storage \"layer.7\"]"
    );
    let scripts = [
        start().wait(1, 0),
        start().alloc(bytes(), 0),
        start().alloc(bytes(), 0).free(0x1000, 0).free(0x1000, 0),
        start().host(Access::Free, block()).worker(2, Access::Read, block()),
        start().note(0, Access::Alloc, bytes()).note(0, Access::Read, bytes()),
    ];
    for hazard in scripts.iter().flat_map(|script| script.check()) {
        let text = hazard.to_string();
        assert!(
            !text.contains('\n') && text.contains(&format!("#{}", hazard.second.seq)),
            "{text}"
        );
    }
}

#[test]
fn a_reused_stream_key_is_another_stream() {
    let reopened = |script: Script| {
        let mut next = stream(1);
        next.0.generation = 1;
        let script = script.op(Op::CloseStream(stream(1))).op(Op::OpenStream(next));
        script.op(Op::CopyOut { from: bytes(), to: block(), stream: next })
    };
    let wrote = start().note(1, Access::Write, bytes());
    assert_eq!(
        reopened(wrote.clone()).kinds(),
        [Kind::ReadAfterWrite],
        "closing waits for nothing"
    );
    silent(&reopened(wrote.record(0, 1).query(0, true)));
}

#[test]
fn memory_is_mapped_and_unmapped_by_the_host_and_in_no_streams_order() {
    let range = device(0x100, 16);
    let mapped = || Script::new(2, 2).map(range).note(0, Access::Write, range);
    // What comes after the mapping is ordered behind it; the stream's work is not known done.
    assert_eq!(mapped().unmap(range).kinds(), [Kind::FreeInFlight]);
    assert_eq!(mapped().record(0, 0).query(0, false).unmap(range).kinds(), [Kind::FreeInFlight]);
    assert_eq!(mapped().record(0, 0).wait(1, 0).unmap(range).kinds(), [Kind::FreeInFlight]);
    let known = || mapped().record(0, 0).query(0, true).unmap(range);
    assert_eq!(known().kinds(), []);
    assert_eq!(known().note(0, Access::Read, range).kinds(), [Kind::UseAfterFree]);
    assert_eq!(known().unmap(range).kinds(), [Kind::DoubleFree]);
    let again = || known().map(range).note(1, Access::Write, range);
    assert_eq!(again().record(1, 1).query(1, true).unmap(range).kinds(), []);
    // The write is still under way, and the first mapping is still there.
    let twice = again().map(range).kinds();
    assert_eq!(twice, [Kind::WriteAfterWrite, Kind::WriteAfterWrite, Kind::Leak]);
    assert_eq!(again().record(1, 1).query(1, true).kinds(), [Kind::Leak]);
}
