//! The naive oracle: sets of nodes for "happens before", a list of all accesses for every byte, and
//! every pair of them looked at. Slow, obvious, and written without a look at the checker's code.
//!
//! A node is one step: a stream's request, a kernel with its uses, a host use, a worker's use. The
//! set of a node holds all nodes before it: those of the step before it on its stream, those of the
//! host so far, and those of whatever it waits for. After a verdict the two steps count as ordered.

use lightering::hazard::Kind;
use lightering::trace::{Access, Actor, Op, Record, Span, Use};
use lightering::{DeviceId, DeviceRange, EventId, StreamId};
use std::collections::HashMap;

/// What a report says of a use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mention {
    pub(crate) seq: u64,
    pub(crate) device: DeviceId,
    pub(crate) by: Actor,
    pub(crate) uses: Option<Use>,
}

/// One hazard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) kind: Kind,
    pub(crate) first: Option<Mention>,
    pub(crate) second: Mention,
    pub(crate) event: Option<EventId>,
}

type Set = u128;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Who {
    Host,
    Stream(StreamId),
    Worker(DeviceId, u32),
}

struct Node {
    who: Who,
    /// Itself and all nodes that happen before it.
    before: Set,
}

/// One access in a byte's history.
#[derive(Clone, Copy)]
struct Past {
    /// Counts accesses.
    order: usize,
    node: usize,
    who: Who,
    access: Access,
    /// What happened before it, before anything was said about it.
    before: Set,
    mention: Mention,
}

#[derive(Clone, Copy, PartialEq)]
enum Life {
    Present,
    Dropped,
    Gone,
}

struct Byte {
    past: Vec<Past>,
    life: Life,
    is_defined: bool,
    /// Node of the driver's last release since the last allocation.
    freed: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Device(DeviceId),
    Pinned,
}

#[derive(Default)]
pub(crate) struct Oracle {
    nodes: Vec<Node>,
    bytes: HashMap<(Place, u64), Byte>,
    events: HashMap<EventId, (DeviceId, Option<usize>)>,
    streams: HashMap<StreamId, DeviceId>,
    /// Live allocations: place, first byte, end, the access.
    allocs: Vec<(Place, u64, u64, Past)>,
    accesses: usize,
    /// Stream and node of the launch whose uses may follow.
    launch: Option<(StreamId, usize)>,
    verdicts: Vec<Verdict>,
}

/// Judges a whole trace.
pub(crate) fn judge(records: &[Record]) -> Vec<Verdict> {
    let mut oracle = Oracle::default();
    records.iter().for_each(|record| oracle.step(record));
    oracle.allocs.sort_by_key(|(place, at, _, _)| match place {
        Place::Device(device) => (device.0, *at),
        Place::Pinned => (u32::MAX, *at),
    });
    for (_, _, _, past) in std::mem::take(&mut oracle.allocs) {
        oracle.say(Kind::Leak, None, past.mention, None);
    }
    oracle.verdicts
}

impl Oracle {
    fn say(&mut self, kind: Kind, first: Option<Mention>, second: Mention, event: Option<EventId>) {
        self.verdicts.push(Verdict { kind, first, second, event });
    }

    fn last(&self, who: Who) -> Set {
        self.nodes.iter().rev().find(|node| node.who == who).map_or(0, |node| node.before)
    }

    /// A new node: after the last one of the same actor, and after the host.
    fn node(&mut self, who: Who) -> usize {
        assert!(self.nodes.len() < Set::BITS as usize, "the program has too many steps");
        let before = self.last(who) | self.last(Who::Host) | 1 << self.nodes.len();
        self.nodes.push(Node { who, before });
        self.nodes.len() - 1
    }

    fn on(&mut self, stream: StreamId, record: &Record) -> usize {
        self.streams.entry(stream).or_insert(record.device);
        self.node(Who::Stream(stream))
    }

    fn step(&mut self, record: &Record) {
        let launch = self.launch.take();
        if record.failed.is_some() {
            return;
        }
        let by_stream = |stream| mention(record, Actor::Stream(stream), None);
        match record.op {
            Op::OpenStream(stream) => {
                self.streams.entry(stream).or_insert(record.device);
            }
            Op::OpenEvent(event) => {
                self.events.entry(event).or_insert((record.device, None));
            }
            Op::CloseEvent(event) => {
                self.events.remove(&event);
            }
            Op::CloseStream(_) => {}
            Op::Record { event, stream } => {
                let node = self.on(stream, record);
                let home = self.events.entry(event).or_insert((record.device, None));
                home.1 = Some(node);
                if home.0 != self.streams[&stream] {
                    self.say(Kind::ForeignEvent, None, by_stream(stream), Some(event));
                }
            }
            Op::Wait { stream, event, .. } => {
                let node = self.on(stream, record);
                match self.events.get(&event) {
                    Some((_, Some(other))) => self.nodes[node].before |= self.nodes[*other].before,
                    _ => self.say(Kind::WaitOnFresh, None, by_stream(stream), Some(event)),
                }
            }
            Op::Query { event, done, .. } => {
                if let (true, Some((_, Some(other)))) = (done, self.events.get(&event)) {
                    let other = *other;
                    let node = self.node(Who::Host);
                    self.nodes[node].before |= self.nodes[other].before;
                }
            }
            Op::Idle { done: false, .. } => {}
            Op::Idle { stream, .. } => {
                let node = self.node(Who::Host);
                self.nodes[node].before |= self.last(Who::Stream(stream));
            }
            Op::Sync => {
                let node = self.node(Who::Host);
                for (stream, device) in &self.streams {
                    if *device == record.device {
                        self.nodes[node].before |= self.last(Who::Stream(*stream));
                    }
                }
            }
            Op::CopyOut { from, to, stream } => {
                self.copy(record, stream, Use::read(from), Use::write(to));
            }
            Op::CopyIn { from, to, stream } => {
                self.copy(record, stream, Use::read(from), Use::write(to));
            }
            Op::Launch { stream, .. } => self.launch = Some((stream, self.on(stream, record))),
            Op::Use { by, uses } => self.noted(record, by, uses, launch),
            Op::Alloc { .. } | Op::Free { .. } | Op::Map { .. } | Op::Unmap { .. } => {
                self.come_or_go(record);
            }
            Op::Name { range, .. } => self.name(record.device, range),
        }
    }

    /// Bytes come into being, or go away.
    fn come_or_go(&mut self, record: &Record) {
        match record.op {
            Op::Alloc { range, stream } => {
                let node = self.on(stream, record);
                self.alloc(node, record, Actor::Stream(stream), range);
            }
            Op::Free { range, stream } => {
                let node = self.on(stream, record);
                self.free(node, record, Actor::Stream(stream), range);
            }
            Op::Map { range } => {
                let node = self.node(Who::Host);
                self.alloc(node, record, Actor::Host, range);
            }
            Op::Unmap { range } => {
                let node = self.node(Who::Host);
                self.free(node, record, Actor::Host, range);
            }
            _ => {}
        }
    }

    fn copy(&mut self, record: &Record, stream: StreamId, read: Use, write: Use) {
        let node = self.on(stream, record);
        self.access(node, mention(record, Actor::Stream(stream), Some(read)), false);
        self.access(node, mention(record, Actor::Stream(stream), Some(write)), false);
    }

    fn noted(&mut self, record: &Record, by: Actor, uses: Use, launch: Option<(StreamId, usize)>) {
        let is_use = !matches!(uses.access, Access::Alloc | Access::Free);
        let node = match (by, launch) {
            (Actor::Stream(stream), Some((launched, node))) if stream == launched && is_use => {
                self.launch = launch;
                node
            }
            (Actor::Stream(stream), _) => self.on(stream, record),
            (Actor::Host, _) => self.node(Who::Host),
            (Actor::Worker(number), _) => self.node(Who::Worker(record.device, number)),
        };
        let (at, len) = uses.span.parts();
        if len == 0 && matches!(by, Actor::Worker(_)) {
            let answer = self.node(Who::Host);
            self.nodes[answer].before |= self.nodes[node].before;
        }
        let past = self.access(node, mention(record, by, Some(uses)), false);
        if let (Span::Pinned(_), Some(past)) = (uses.span, past) {
            let end = at + len;
            let is_pinned = |place: &Place| *place == Place::Pinned;
            match uses.access {
                Access::Alloc => {
                    self.allocs.retain(|a| !(is_pinned(&a.0) && a.1 < end && at < a.2));
                    self.allocs.push((Place::Pinned, at, end, past));
                }
                Access::Free => {
                    self.allocs.retain(|a| !(is_pinned(&a.0) && at <= a.1 && a.1 < end));
                }
                _ => {}
            }
        }
    }

    /// The driver orders what it lends by itself; what the host has mapped nobody does.
    fn alloc(&mut self, node: usize, record: &Record, by: Actor, range: DeviceRange) {
        let uses = Use { access: Access::Alloc, span: range.into() };
        let second = mention(record, by, Some(uses));
        let by_driver = by != Actor::Host;
        let Some(past) = self.access(node, second, by_driver) else { return };
        let (place, at, end) = (Place::Device(record.device), range.at().0, range.end());
        let overlaps = |a: &(Place, u64, u64, Past)| a.0 == place && a.1 < end && at < a.2;
        let held: Vec<Past> = self.allocs.iter().filter(|a| overlaps(a)).map(|a| a.3).collect();
        self.allocs.retain(|a| !overlaps(a));
        self.allocs.push((place, at, end, past));
        let pairs = held.into_iter().map(|held| (Kind::WriteAfterWrite, held)).collect();
        self.conclude(node, second, pairs);
    }

    fn free(&mut self, node: usize, record: &Record, by: Actor, range: DeviceRange) {
        let (place, at) = (Place::Device(record.device), range.at().0);
        let lent = self.allocs.iter().find(|a| a.0 == place && a.1 == at).map(|a| a.2 - at);
        let is_gone = self.bytes.get(&(place, at)).is_some_and(|byte| byte.life == Life::Gone);
        let len = match (lent, range.len().0) {
            (Some(len), _) => len,
            (None, 0) => u64::from(is_gone),
            (None, len) => len,
        };
        self.allocs.retain(|a| !(a.0 == place && a.1 == at));
        let range = DeviceRange::new(range.at(), lightering::Bytes(len)).unwrap();
        let uses = Use { access: Access::Free, span: range.into() };
        self.access(node, mention(record, by, Some(uses)), true);
        for at in range.at().0..range.end() {
            self.byte(place, at).freed = Some(node);
        }
    }

    fn name(&mut self, device: DeviceId, range: DeviceRange) {
        for at in range.at().0..range.end() {
            let byte = self.byte(Place::Device(device), at);
            if byte.life == Life::Gone {
                byte.past.clear();
                byte.freed = None;
            }
            byte.life = Life::Present;
        }
    }

    fn byte(&mut self, place: Place, at: u64) -> &mut Byte {
        self.bytes.entry((place, at)).or_insert_with(|| Byte {
            past: Vec::new(),
            life: Life::Present,
            is_defined: true,
            freed: None,
        })
    }

    /// One access, byte by byte, against everything that was ever done to each byte.
    fn access(&mut self, node: usize, second: Mention, by_driver: bool) -> Option<Past> {
        let Use { access, span } = second.uses?;
        let (at, len) = span.parts();
        if len == 0 {
            return None;
        }
        let place = match span {
            Span::Device(_) => Place::Device(second.device),
            Span::Pinned(_) => Place::Pinned,
        };
        if access == Access::Alloc {
            for at in at..at + len {
                if let Some(free) = self.byte(place, at).freed.take() {
                    self.nodes[node].before |= self.nodes[free].before;
                }
            }
        }
        let (who, before) = (self.nodes[node].who, self.nodes[node].before);
        self.accesses += 1;
        let past = Past { order: self.accesses, node, who, access, before, mention: second };
        let is_clean = self.verdicts.is_empty();
        let mut pairs = Vec::new();
        let mut away: Option<(Kind, Past)> = None;
        let mut undefined = None;
        for at in at..at + len {
            let byte = self.byte(place, at);
            match byte.away(access, by_driver) {
                Some(found) if away.is_some_and(|(_, past)| past.order >= found.1.order) => {}
                Some(found) => away = Some(found),
                None => byte.judge(&past, by_driver, is_clean, &mut pairs, &mut undefined),
            }
            byte.change(&past, by_driver);
        }
        self.conclude(node, second, pairs);
        if let Some((kind, release)) = away {
            self.say(kind, Some(release.mention), second, None);
        }
        if let Some(alloc) = undefined {
            self.say(Kind::ReadUndefined, Some(alloc), second, None);
        }
        Some(past)
    }

    /// One verdict for each actor, about its latest access; and from now on that is in order.
    fn conclude(&mut self, node: usize, second: Mention, mut pairs: Vec<(Kind, Past)>) {
        pairs.sort_by_key(|(_, first)| first.order);
        pairs.dedup_by_key(|(_, first)| first.order);
        let all = pairs.clone();
        pairs.retain(|(_, first)| {
            !all.iter().any(|(_, other)| other.who == first.who && other.order > first.order)
        });
        for (kind, first) in pairs {
            self.say(kind, Some(first.mention), second, None);
            for earlier in 0..=first.node {
                if self.nodes[earlier].who == first.who {
                    self.nodes[node].before |= 1 << earlier;
                }
            }
        }
    }
}

impl Byte {
    fn last_write(&self) -> Option<Past> {
        self.past.iter().rev().find(|past| past.access.is_write()).copied()
    }

    /// What is wrong, if the byte is not there, with the release that took it away.
    fn away(&self, access: Access, by_driver: bool) -> Option<(Kind, Past)> {
        let kind = match access {
            Access::Alloc => return None,
            Access::Free if self.life == Life::Dropped && by_driver => return None,
            Access::Free => Kind::DoubleFree,
            _ => Kind::UseAfterFree,
        };
        if self.life == Life::Present { None } else { self.last_write().map(|past| (kind, past)) }
    }

    fn judge(
        &self,
        second: &Past,
        by_driver: bool,
        is_clean: bool,
        pairs: &mut Vec<(Kind, Past)>,
        undefined: &mut Option<Mention>,
    ) {
        let access = second.access;
        if access == Access::Alloc && by_driver {
            return;
        }
        let conflicts = |first: &&Past| {
            (first.access.is_write() || access.is_write()) && second.before & 1 << first.node == 0
        };
        let racing: Vec<&Past> = self.past.iter().filter(conflicts).collect();
        let plain: Vec<&Past> = racing.iter().copied().filter(|p| !self.is_hidden(p)).collect();
        // As long as nothing was called ordered that is not.
        if is_clean {
            assert_eq!(racing.is_empty(), plain.is_empty(), "the last accesses speak for all");
        }
        let has_racing_write = plain.iter().any(|first| first.access.is_write());
        pairs.extend(plain.into_iter().map(|first| (kind(first.access, access), *first)));
        if access.is_read() && !self.is_defined && !has_racing_write && undefined.is_none() {
            *undefined = self.last_write().map(|alloc| alloc.mention);
        }
    }

    /// Is there a later access that says all that this one could?
    fn is_hidden(&self, first: &Past) -> bool {
        let mut later = self.past.iter().filter(|past| past.order > first.order);
        later.any(|past| {
            let behind = past.before & 1 << first.node != 0;
            past.access.is_write() || (behind && !first.access.is_write())
        })
    }

    fn change(&mut self, past: &Past, by_driver: bool) {
        match past.access {
            Access::Alloc => {
                if by_driver {
                    self.past.clear();
                }
                (self.life, self.is_defined) = (Life::Present, false);
            }
            Access::Free => {
                self.life = if by_driver { Life::Gone } else { Life::Dropped };
                self.is_defined = true;
            }
            Access::Read | Access::Write | Access::Update => {
                if self.life != Life::Present {
                    // Told once: the bytes are now as if the trace had never mentioned them.
                    self.past.clear();
                }
                self.life = Life::Present;
                // A read that may run before the allocation says nothing yet of what it reads.
                let is_behind = |w: Past| past.before & 1 << w.node != 0;
                if past.access != Access::Read || self.last_write().is_none_or(is_behind) {
                    self.is_defined = true;
                }
            }
        }
        self.past.push(*past);
    }
}

fn kind(first: Access, second: Access) -> Kind {
    match (first, second) {
        (_, Access::Free) => Kind::FreeInFlight,
        (Access::Read, _) => Kind::WriteAfterRead,
        (_, Access::Alloc) => Kind::WriteAfterWrite,
        (Access::Alloc, _) => Kind::UseBeforeAlloc,
        (_, Access::Read | Access::Update) => Kind::ReadAfterWrite,
        (_, Access::Write) => Kind::WriteAfterWrite,
    }
}

fn mention(record: &Record, by: Actor, uses: Option<Use>) -> Mention {
    Mention { seq: record.seq, device: record.device, by, uses }
}
