//! The order checker: reads what was asked of devices, and reports what nothing kept in order.
//!
//! What it is not: it runs nothing, waits for nothing and knows no times. It judges the order that
//! was *asked for*, together with what the device answered: its verdict does not depend on who was
//! how fast, but it does on the answers, below.
//!
//! Invariant: a hazard is reported if and only if some execution that keeps the order asked for,
//! and gets the same answers, could go wrong there (`tests/hazard.rs` compares with a naive
//! oracle). Memory stays within what is live: streams, events, names and distinct byte ranges, not
//! records.
//!
//! ```text
//!   Record -> Checker::push --> clock    who is ordered behind whom     \
//!                           \-> shadow   who used these bytes last       > rules -> Hazard
//!                           \-> lives    what is allocated, and its name/
//! ```
//!
//! Anybody may use it: tests, examples, and engines that check themselves as they run.
//!
//! # What orders what
//!
//! * Work of one stream is ordered as it was enqueued. Each step also comes after everything the
//!   host did or learned before it enqueued that step.
//! * A wait comes after what its event captured; a query answered "done" puts the host there, a
//!   sync puts it behind all streams of that device. A query answered "not yet" orders nothing.
//! * An allocation by the driver ([`Op::Alloc`]) comes after the driver's last release of those
//!   bytes. One that a framework noted ([`Alloc`](Access::Alloc)) has no order of its own, since a
//!   caching allocator goes by stream order, except behind a release to the driver.
//! * A mapping ([`Op::Map`]) is an allocation and an unmapping a release, both by the host and at
//!   once: they come after what the host did and learned, and after nothing else.
//! * A worker's use comes after all that the host did before it was noted: note it when the bytes
//!   are handed over. A worker's use of *no* bytes stands for its answer: the host is then behind
//!   all that was noted of that worker, so give each job in flight a number of its own.
//! * A launch and the uses recorded right behind it, on its stream and without a gap in the
//!   sequence, are one step. So is a copy, which reads its source and then writes its target.
//! * Records that say they failed had no effect.
//!
//! # Where luck comes in
//!
//! Two kinds of answers order something, and another run may get others. A query that says "done"
//! orders the host; a program that does one thing then and another otherwise is judged by what it
//! did. And an allocation that gets bytes which another stream gave back is behind *all* that came
//! before their release, since the driver then orders the streams; getting other bytes it is behind
//! none of it. So an access to something else that relies on such an order unawares is flagged only
//! in a run in which the addresses differ.
//!
//! # Which bytes exist
//!
//! Bytes that the trace never saw allocated exist and are defined: adopted and pinned memory raise
//! no alarm. After a release they are away, until they are allocated, or named as a storage's.
//! Allocated bytes are undefined until written. The driver may lend bytes that only a framework
//! held (it gave them back unseen), but not what it lent itself. [`Checker::finish`] reports as
//! leaked what the driver lent, and noted pinned allocations; not a framework's device memory.
//!
//! # After a report
//!
//! The checker goes on as if the two accesses were ordered, so one missing edge is told once. An
//! access is reported once for each actor it is unordered with, against that actor's latest
//! conflicting access. Repeats with the same bytes, actors and kind are counted, not listed.
//!
//! A closed stream is forgotten once the host is ordered behind its work, or once no byte's state
//! names it. Traces of several devices may be merged, each in its own order.

mod clock;
mod lives;
mod memory;
mod report;
mod rules;
mod shadow;

pub use report::{HAZARDS_MAX, Hazard, Kind, Touch};

use crate::trace::{Access, Actor, Op, Record, Use};
use crate::unit::{DeviceId, EventId, StreamId};
use clock::{Actors, Clock, HOST};
use memory::{Memory, Step};
use std::collections::{HashMap, HashSet};

/// Checks a whole trace, leaks included.
pub fn check(records: &[Record]) -> Vec<Hazard> {
    let mut checker = Checker::new();
    records.iter().for_each(|record| checker.push(record));
    checker.finish();
    checker.memory.report.into_list()
}

/// Checks a trace record by record.
#[derive(Debug, Default)]
pub struct Checker {
    actors: Actors,
    events: HashMap<EventId, Event>,
    memory: Memory,
}

#[derive(Debug)]
struct Event {
    device: DeviceId,
    is_recorded: bool,
    capture: Clock,
}

/// How much a checker keeps; none of it grows with the length of a trace alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Byte ranges with a state of their own.
    pub segments: usize,
    /// Streams and workers.
    pub actors: usize,
    /// Events.
    pub events: usize,
    /// Named ranges.
    pub names: usize,
    /// Allocations.
    pub allocs: usize,
}

impl Checker {
    /// A checker that has seen nothing.
    pub fn new() -> Checker {
        Checker::default()
    }

    /// The first [`HAZARDS_MAX`] hazards that differ, in the order found.
    pub fn hazards(&self) -> &[Hazard] {
        self.memory.report.list()
    }

    /// How many hazards there were, with all repeats.
    pub fn total(&self) -> u64 {
        self.memory.report.total()
    }

    /// How much the checker keeps now.
    pub fn footprint(&self) -> Footprint {
        Footprint {
            segments: self.memory.segments(),
            actors: self.actors.len(),
            events: self.events.len(),
            names: self.memory.names.len(),
            allocs: self.memory.allocs.len(),
        }
    }

    /// Looks at the next record.
    pub fn push(&mut self, record: &Record) {
        if record.failed.is_some() {
            return;
        }
        match record.op {
            Op::OpenStream(id) => {
                self.actors.stream(id, record.device);
            }
            Op::CloseStream(id) => self.close_stream(id),
            Op::OpenEvent(id) => {
                self.event(id, record.device);
            }
            Op::CloseEvent(id) => {
                self.events.remove(&id);
            }
            Op::Record { event, stream } => self.record(record, event, stream),
            Op::Wait { stream, event, .. } => self.wait(record, event, stream),
            Op::Query { done: false, .. } => {}
            Op::Query { event, .. } => self.learn(event),
            Op::Idle { done: false, .. } => {}
            Op::Idle { stream, .. } => {
                let slot = self.actors.stream(stream, record.device);
                self.actors.answer(slot);
            }
            Op::Alloc { range, stream } => {
                let step = self.enter(record, stream, "alloc");
                self.memory.alloc(&mut self.actors, step, range);
            }
            Op::Free { range, stream } => {
                let step = self.enter(record, stream, "free");
                self.memory.free(&mut self.actors, step, range);
            }
            Op::Map { range } => {
                let step = self.by_host(record, "map");
                self.memory.map(&mut self.actors, step, range);
            }
            Op::Unmap { range } => {
                let step = self.by_host(record, "unmap");
                self.memory.free(&mut self.actors, step, range);
            }
            Op::CopyOut { from, to, stream } => {
                let step = self.enter(record, stream, "copy_out");
                self.memory.noted(&mut self.actors, step, Use::read(from));
                self.memory.noted(&mut self.actors, step, Use::write(to));
            }
            Op::CopyIn { from, to, stream } => {
                let step = self.enter(record, stream, "copy_in");
                self.memory.noted(&mut self.actors, step, Use::read(from));
                self.memory.noted(&mut self.actors, step, Use::write(to));
            }
            Op::Launch { kernel, stream } => {
                let step = self.enter(record, stream, kernel);
                self.actors.launch(step.slot, kernel, record.seq + 1);
            }
            Op::Use { by, uses } => self.noted(record, by, uses),
            Op::Name { name, range, .. } => self.memory.name(record.device, name, range),
            Op::Sync => self.actors.sync(record.device),
        }
    }

    /// The trace is over: what is still allocated has leaked.
    pub fn finish(&mut self) {
        self.memory.leaks();
    }

    /// Forgets now what can no longer matter, as happens by itself from time to time. No verdict
    /// changes; but where a release is forgotten, a later use of its bytes is told without it.
    pub fn tidy(&mut self) {
        self.memory.settle(&self.actors);
        self.sweep();
    }

    /// A step of a stream is enqueued.
    fn enter(&mut self, record: &Record, stream: StreamId, word: &'static str) -> Step {
        let slot = self.actors.stream(stream, record.device);
        self.actors.enter(slot);
        let by = Actor::Stream(stream);
        Step { seq: record.seq, device: record.device, by, slot, word }
    }

    /// A step of the host.
    fn by_host(&self, record: &Record, word: &'static str) -> Step {
        let Record { seq, device, .. } = *record;
        Step { seq, device, by: Actor::Host, slot: HOST, word }
    }

    fn noted(&mut self, record: &Record, by: Actor, uses: Use) {
        let Record { seq, device, .. } = *record;
        let step = match by {
            Actor::Host => self.by_host(record, "note"),
            Actor::Stream(stream) => {
                let slot = self.actors.stream(stream, device);
                let is_use = !matches!(uses.access, Access::Alloc | Access::Free);
                match self.actors.resume(slot, seq).filter(|_| is_use) {
                    Some(word) => Step { seq, device, by, slot, word },
                    None => self.enter(record, stream, "note"),
                }
            }
            Actor::Worker(number) => {
                let slot = self.actors.worker(number, device);
                self.actors.enter(slot);
                if uses.span.parts().1 == 0 {
                    self.actors.answer(slot);
                }
                Step { seq, device, by, slot, word: "note" }
            }
        };
        self.memory.noted(&mut self.actors, step, uses);
    }

    fn close_stream(&mut self, id: StreamId) {
        self.actors.close(id);
        if self.actors.is_crowded() {
            self.sweep();
        }
    }

    fn sweep(&mut self) {
        let mut named = HashSet::new();
        self.memory.slots(|slot| {
            named.insert(slot);
        });
        self.actors.sweep(|slot| named.contains(&slot));
    }

    fn event(&mut self, id: EventId, device: DeviceId) -> &mut Event {
        let fresh = || Event { device, is_recorded: false, capture: Clock::default() };
        self.events.entry(id).or_insert_with(fresh)
    }

    fn record(&mut self, record: &Record, id: EventId, stream: StreamId) {
        let step = self.enter(record, stream, "record");
        let home = self.event(id, record.device).device;
        if home != self.actors.device(step.slot) {
            self.event_hazard(Kind::ForeignEvent, step, id);
        }
        if let Some(event) = self.events.get_mut(&id) {
            event.capture.copy_from(self.actors.clock(step.slot));
            event.is_recorded = true;
        }
    }

    fn wait(&mut self, record: &Record, id: EventId, stream: StreamId) {
        let step = self.enter(record, stream, "wait");
        match self.events.get(&id) {
            Some(event) if event.is_recorded => self.actors.join(step.slot, &event.capture),
            _ => self.event_hazard(Kind::WaitOnFresh, step, id),
        }
    }

    /// The host learned that what the event stands for is done.
    fn learn(&mut self, id: EventId) {
        if let Some(event) = self.events.get(&id) {
            self.actors.join(HOST, &event.capture);
        }
    }

    fn event_hazard(&mut self, kind: Kind, step: Step, event: EventId) {
        let second = step.touch(None);
        let hazard = Hazard { kind, first: None, second, event: Some(event), name: None };
        self.memory.report.add(hazard);
    }
}
