//! A trace written by hand: a line for each request, the way a test tells a story.

use lightering::hazard::{self, Hazard, Kind};
use lightering::trace::{Access, Actor, Op, Record, Site, Span, Use};
use lightering::{
    Bytes, DeviceId, DevicePtr, DeviceRange, EventId, Key, Name, PinnedPtr, PinnedRange, StorageId,
    StreamId,
};

/// Stream `index`; streams and events come from tables of different owners.
pub(crate) fn stream(index: u32) -> StreamId {
    StreamId(Key { owner: 1, index, generation: 0 })
}

/// Event `index`.
pub(crate) fn event(index: u32) -> EventId {
    EventId(Key { owner: 2, index, generation: 0 })
}

/// Device bytes.
pub(crate) fn device(at: u64, len: u64) -> DeviceRange {
    DeviceRange::new(DevicePtr(at), Bytes(len)).unwrap()
}

/// Pinned bytes.
pub(crate) fn pinned(at: u64, len: u64) -> PinnedRange {
    PinnedRange::new(PinnedPtr(at), Bytes(len)).unwrap()
}

/// A use of the kind `access`.
pub(crate) fn uses(access: Access, span: impl Into<Span>) -> Use {
    Use { access, span: span.into() }
}

#[derive(Clone, Default)]
pub(crate) struct Script {
    pub(crate) records: Vec<Record>,
    /// Device of the lines that follow.
    pub(crate) device: DeviceId,
}

impl Script {
    /// A trace that begins with these streams and events, opened on device 0.
    pub(crate) fn new(streams: u32, events: u32) -> Script {
        let mut script = Script::default();
        (0..streams).for_each(|index| script.add(Op::OpenStream(stream(index))));
        (0..events).for_each(|index| script.add(Op::OpenEvent(event(index))));
        script
    }

    pub(crate) fn add(&mut self, op: Op) {
        let seq = self.records.len() as u64;
        self.records.push(Record { seq, device: self.device, op, failed: None });
    }

    pub(crate) fn on(mut self, device: u32) -> Script {
        self.device = DeviceId(device);
        self
    }

    pub(crate) fn op(mut self, op: Op) -> Script {
        self.add(op);
        self
    }

    pub(crate) fn record(self, e: u32, s: u32) -> Script {
        self.op(Op::Record { event: event(e), stream: stream(s) })
    }

    pub(crate) fn wait(self, s: u32, e: u32) -> Script {
        self.op(Op::Wait { stream: stream(s), event: event(e), site: Site::Outside })
    }

    /// Stream `to` waits for all that stream `from` has now.
    pub(crate) fn edge(self, from: u32, to: u32, e: u32) -> Script {
        self.record(e, from).wait(to, e)
    }

    pub(crate) fn query(self, e: u32, done: bool) -> Script {
        self.op(Op::Query { event: event(e), site: Site::Outside, done })
    }

    pub(crate) fn alloc(self, range: DeviceRange, s: u32) -> Script {
        self.op(Op::Alloc { range, stream: stream(s) })
    }

    pub(crate) fn map(self, range: DeviceRange) -> Script {
        self.op(Op::Map { range })
    }

    pub(crate) fn unmap(self, range: DeviceRange) -> Script {
        self.op(Op::Unmap { range })
    }

    /// As a backend writes it: by address alone.
    pub(crate) fn free(self, at: u64, s: u32) -> Script {
        self.op(Op::Free { range: device(at, 0), stream: stream(s) })
    }

    pub(crate) fn copy_out(self, from: DeviceRange, to: PinnedRange, s: u32) -> Script {
        self.op(Op::CopyOut { from, to, stream: stream(s) })
    }

    pub(crate) fn copy_in(self, from: PinnedRange, to: DeviceRange, s: u32) -> Script {
        self.op(Op::CopyIn { from, to, stream: stream(s) })
    }

    pub(crate) fn kernel(self, kernel: &'static str, args: &[Use], s: u32) -> Script {
        let launched = self.op(Op::Launch { kernel, stream: stream(s) });
        args.iter().fold(launched, |script, arg| script.note(s, arg.access, arg.span))
    }

    pub(crate) fn note(self, s: u32, access: Access, span: impl Into<Span>) -> Script {
        self.op(Op::Use { by: Actor::Stream(stream(s)), uses: uses(access, span) })
    }

    pub(crate) fn host(self, access: Access, span: impl Into<Span>) -> Script {
        self.op(Op::Use { by: Actor::Host, uses: uses(access, span) })
    }

    pub(crate) fn worker(self, number: u32, access: Access, span: impl Into<Span>) -> Script {
        self.op(Op::Use { by: Actor::Worker(number), uses: uses(access, span) })
    }

    pub(crate) fn name(self, name: &str, range: DeviceRange) -> Script {
        let storage = StorageId(Key { owner: 3, index: 0, generation: 0 });
        self.op(Op::Name { storage, name: Name::new(name), range })
    }

    pub(crate) fn check(&self) -> Vec<Hazard> {
        hazard::check(&self.records)
    }

    /// Every hazard's kind.
    pub(crate) fn kinds(&self) -> Vec<Kind> {
        self.check().iter().map(|hazard| hazard.kind).collect()
    }
}
