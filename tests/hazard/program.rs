//! Random traces: a few streams, events and workers that use a handful of overlapping ranges.
//!
//! Left alone nearly every such trace is full of races. So most are mended as they are made: before
//! a step, its stream may be put behind the other actors, by events, queries, answers or syncs, now
//! and then with a gap. What comes out is a mix of clean traces and of traces with one or two
//! holes.

use crate::script::{self, Script, uses};
use lightering::trace::{Access, Actor, Op, Site, Span, Use};
use lightering::{DeviceId, DeviceRange, EventId, Key, Kind, PinnedRange, StreamId};

/// A small random generator (splitmix64), so that a seed alone replays a program.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// Offsets and lengths, chosen to overlap in every way.
const RANGES: [(u64, u64); 6] = [(0, 4), (4, 4), (0, 8), (2, 4), (6, 2), (0, 4)];

struct Maker {
    rng: Rng,
    script: Script,
    streams: Vec<(StreamId, DeviceId)>,
    events: Vec<(EventId, DeviceId)>,
    /// Of ten steps that need mending, how many are.
    mended: u64,
}

/// The program of a seed.
pub(crate) fn program(seed: u64) -> Script {
    let mut rng = Rng::new(seed);
    let devices = if rng.one_in(4) { 2 } else { 1 };
    let (streams, events) = (1 + rng.below(3), 3);
    let mended = rng.pick(&[0, 7, 9, 10, 10, 10]);
    let steps = 6 + rng.below(11);
    let (streams_open, events_open) = (Vec::new(), Vec::new());
    let script = Script::default();
    let mut maker = Maker { rng, script, streams: streams_open, events: events_open, mended };
    for index in 0..streams {
        let device = DeviceId((index % devices) as u32);
        let id = StreamId(Key { owner: 1 + device.0, index: index as u32, generation: 0 });
        maker.add(device, Op::OpenStream(id));
        maker.streams.push((id, device));
    }
    for index in 0..events {
        let device = DeviceId((index % devices) as u32);
        let id = EventId(Key { owner: 11 + device.0, index: index as u32, generation: 0 });
        if !maker.rng.one_in(20) {
            maker.add(device, Op::OpenEvent(id));
        }
        maker.events.push((id, device));
    }
    for _ in 0..steps {
        maker.step();
    }
    maker.script
}

impl Maker {
    fn add(&mut self, device: DeviceId, op: Op) {
        self.script.device = device;
        self.script.add(op);
    }

    fn device_range(&mut self) -> DeviceRange {
        let (at, len) = self.rng.pick(&RANGES);
        script::device(0x100 + at, len)
    }

    fn pinned_range(&mut self) -> PinnedRange {
        let (at, len) = self.rng.pick(&RANGES);
        script::pinned(0x900 + at, len)
    }

    fn access(&mut self) -> Access {
        use Access::*;
        self.rng.pick(&[Read, Read, Read, Write, Write, Update, Alloc, Free])
    }

    fn some_use(&mut self, access: Access) -> Use {
        if self.rng.one_in(2) {
            uses(access, self.device_range())
        } else {
            uses(access, self.pinned_range())
        }
    }

    /// Puts what `to` does next (or the host, for `None`) behind all the others.
    fn mend(&mut self, to: Option<(StreamId, DeviceId)>) {
        for index in 0..self.streams.len() {
            let (from, device) = self.streams[index];
            if self.rng.below(10) >= self.mended || Some(from) == to.map(|(id, _)| id) {
                continue;
            }
            let event = self.events[self.rng.below(self.events.len() as u64) as usize];
            self.add(device, Op::Record { event: event.0, stream: from });
            match to {
                Some((stream, device)) if !self.rng.one_in(6) => {
                    let wait = Op::Wait { stream, event: event.0, site: Site::Outside };
                    self.add(device, wait);
                }
                _ => {
                    self.add(device, Op::Query { event: event.0, site: Site::Outside, done: true })
                }
            }
        }
        if self.rng.below(10) < self.mended {
            self.answer();
        }
    }

    fn worker(&mut self) -> (u32, DeviceId) {
        (self.rng.below(2) as u32, self.streams[0].1)
    }

    fn answer(&mut self) {
        for number in 0..2 {
            let uses = uses(Access::Read, script::pinned(0x900, 0));
            self.add(self.streams[0].1, Op::Use { by: Actor::Worker(number), uses });
        }
    }

    fn step(&mut self) {
        let room = self.script.records.len() < 90;
        let on = self.rng.pick(&self.streams.clone());
        let (stream, device) = on;
        match self.rng.below(25) {
            0..=2 => {
                self.mend_if(room, Some(on));
                let (from, to) = (self.device_range(), self.pinned_range());
                self.add(device, Op::CopyOut { from, to, stream });
            }
            3..=5 => {
                self.mend_if(room, Some(on));
                let (from, to) = (self.pinned_range(), self.device_range());
                self.add(device, Op::CopyIn { from, to, stream });
            }
            6..=7 => {
                self.mend_if(room, Some(on));
                self.add(device, Op::Launch { kernel: "kernel", stream });
                for _ in 0..1 + self.rng.below(3) {
                    let access = self.rng.pick(&[Access::Read, Access::Write, Access::Update]);
                    let uses = uses(access, self.device_range());
                    self.add(device, Op::Use { by: Actor::Stream(stream), uses });
                }
            }
            8..=11 => {
                self.mend_if(room, Some(on));
                self.note(on);
            }
            12..=13 => {
                self.mend_if(room, None);
                let access = self.access();
                let uses = self.some_use(access);
                self.add(device, Op::Use { by: Actor::Host, uses });
            }
            14 => {
                self.mend_if(room, None);
                let (number, device) = self.worker();
                let access = self.rng.pick(&[Access::Read, Access::Write]);
                let uses = uses(access, self.pinned_range());
                self.add(device, Op::Use { by: Actor::Worker(number), uses });
            }
            15..=16 => {
                self.mend_if(room, Some(on));
                let range = self.device_range();
                self.add(device, Op::Alloc { range, stream });
            }
            17 => {
                self.mend_if(room, Some(on));
                let (at, len) = self.rng.pick(&[(0, 0), (4, 0), (0, 4), (0, 8), (2, 0)]);
                self.add(device, Op::Free { range: script::device(0x100 + at, len), stream });
            }
            18 if self.rng.one_in(2) => {
                self.mend_if(room, None);
                let range = self.device_range();
                self.add(device, Op::Map { range });
            }
            18 => {
                self.mend_if(room, None);
                let range = self.device_range();
                self.add(device, Op::Unmap { range });
            }
            _ => self.order(on),
        }
    }

    fn mend_if(&mut self, room: bool, to: Option<(StreamId, DeviceId)>) {
        if room {
            self.mend(to);
        }
    }

    fn note(&mut self, (stream, device): (StreamId, DeviceId)) {
        let access = self.access();
        let uses = self.some_use(access);
        self.add(device, Op::Use { by: Actor::Stream(stream), uses });
    }

    fn order(&mut self, (stream, device): (StreamId, DeviceId)) {
        let slot = self.rng.below(self.events.len() as u64) as usize;
        let (event, home) = self.events[slot];
        match self.rng.below(12) {
            0..=2 => self.add(device, Op::Record { event, stream }),
            3..=5 => self.add(device, Op::Wait { stream, event, site: Site::Outside }),
            6 => {
                let (done, site) = (self.rng.one_in(2), Site::Outside);
                match self.rng.one_in(3) {
                    true => self.add(device, Op::Idle { stream, site, done }),
                    false => self.add(home, Op::Query { event, site, done }),
                }
            }
            7 => self.add(device, Op::Sync),
            8 => {
                let storage = lightering::StorageId(Key { owner: 21, index: 0, generation: 0 });
                let range = self.device_range();
                self.add(device, Op::Name { storage, name: "layer".into(), range });
            }
            9 => self.reopen_stream(stream),
            10 => {
                self.add(home, Op::CloseEvent(event));
                let fresh = EventId(Key { generation: event.0.generation + 1, ..event.0 });
                self.add(home, Op::OpenEvent(fresh));
                self.events[slot].0 = fresh;
            }
            _ => {
                let op = Op::CopyIn { from: self.pinned_range(), to: self.device_range(), stream };
                self.add(device, op);
                if let Some(record) = self.script.records.last_mut() {
                    record.failed = Some(Kind::Busy);
                }
            }
        }
    }

    fn reopen_stream(&mut self, stream: StreamId) {
        let fresh = StreamId(Key { generation: stream.0.generation + 1, ..stream.0 });
        for slot in 0..self.streams.len() {
            let (id, device) = self.streams[slot];
            if id == stream {
                self.add(device, Op::CloseStream(stream));
                self.add(device, Op::OpenStream(fresh));
                self.streams[slot].0 = fresh;
            }
        }
    }
}

/// A span's bytes, to show a program.
pub(crate) fn show(script: &Script) -> String {
    let line = |record: &lightering::trace::Record| match record.op {
        Op::Use { by, uses: Use { access, span } } => {
            let (at, len) = span.parts();
            let space = if matches!(span, Span::Pinned(_)) { "pinned" } else { "device" };
            format!("{by:?} {access:?} {space} {at:#x}+{len}")
        }
        op => format!("{op:?}"),
    };
    let lines = script.records.iter().map(|record| {
        let failed = if record.failed.is_some() { " (failed)" } else { "" };
        format!("  #{} {}: {}{failed}\n", record.seq, record.device, line(record))
    });
    lines.collect()
}
