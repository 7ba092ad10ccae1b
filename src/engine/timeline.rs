//! Device times of copies and of what a framework names, on one axis.
//!
//! What it is not: a profiler. It sees what the engine enqueues, and the spans it is told of.
//!
//! Invariant: nothing waits for a time. A span is read when its end is seen done, by `step` or
//! `drain`; how many are under way and how many are kept is bounded. What finds no room, or has
//! times that the driver will not tell, is counted. Times are the device's, between events, and
//! start where the engine did: at a moment marked when it is made, behind which the device puts all
//! that is timed, on whatever stream.
//!
//! ```text
//!   new: |base   begin_span(compute, "layer 3")  |f  kernels  t|  end_span        span = t - f
//!           `--> lane                 waits |f ====copy==== |t    the copy's own  at = f - base
//! ```
//!
//! Part of the engine.

use super::Engine;
use crate::backend::Listening;
use crate::backend::ranges::Range;
use crate::error::Result;
use crate::storage::Inward;
use crate::stream::Point;
use crate::trace::Site;
use crate::unit::{Bytes, Name, StorageId, StreamId};
use std::collections::VecDeque;
use std::fmt::Write;
use std::time::Duration;

/// Where a span ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Track {
    /// A stream of the framework's, by its place among those adopted.
    Stream(u32),
    /// Copies out.
    Out,
    /// Copies in, ahead of their readers.
    Ahead,
    /// Copies in that a reader waits for.
    Urgent,
}

impl Track {
    fn of(inward: Inward) -> Track {
        match inward {
            Inward::Ahead => Track::Ahead,
            Inward::Urgent => Track::Urgent,
        }
    }

    /// A number for a viewer's row, and what it says there.
    fn row(self) -> (u32, String) {
        match self {
            Track::Out => (0, "copies out".into()),
            Track::Ahead => (1, "copies in, ahead".into()),
            Track::Urgent => (2, "copies in, urgent".into()),
            Track::Stream(index) => (3 + index, format!("stream {index}")),
        }
    }
}

/// Some work of the device, with its times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where it ran.
    pub track: Track,
    /// A storage's name, or what the framework called it.
    pub name: Name,
    /// Bytes copied; none for what was not a copy.
    pub bytes: Bytes,
    /// Device time from the engine's start until it could begin.
    pub start: Duration,
    /// Device time until it was done.
    pub time: Duration,
}

/// A span whose times are not known yet.
#[derive(Debug)]
struct Pending {
    track: Track,
    name: Name,
    bytes: Bytes,
    from: Point,
    to: Point,
}

/// Spans under way; each holds two events. More are not timed, and counted.
pub(super) const PENDING_MAX: usize = 1024;
/// A time is read from a moment that is at most about this long ago: the driver tells it in single
/// precision.
const BASE_AGE_MAX: Duration = Duration::from_secs(1);

/// What is timed, and what was.
#[derive(Debug)]
pub(super) struct Timeline {
    spans_max: usize,
    /// A moment whose time is known: the engine's start, later the start of some span. Where
    /// nothing is timed there is none.
    base: Option<(Point, Duration)>,
    open: Vec<(StreamId, Name, Point)>,
    pending: VecDeque<Pending>,
    spans: VecDeque<Span>,
}

impl Timeline {
    pub(super) fn new(spans_max: usize) -> Timeline {
        Timeline {
            spans_max,
            base: None,
            open: Vec::new(),
            pending: VecDeque::new(),
            spans: VecDeque::new(),
        }
    }

    pub(super) fn is_on(&self) -> bool {
        self.spans_max > 0
    }

    pub(super) fn has_room(&self) -> bool {
        self.is_on() && self.pending.len() + self.open.len() < PENDING_MAX
    }

    fn keep(&mut self, span: Span) {
        if self.spans.len() == self.spans_max {
            self.spans.pop_front();
        }
        self.spans.push_back(span);
    }
}

impl Engine {
    /// Marks the moment that times start at, where any are wanted: on the lane of copies out, so
    /// that each of those is behind it, and so is each copy in, which is of bytes that left.
    pub(super) fn with_base(mut self) -> Result<Engine> {
        if self.timeline.is_on() {
            let base = self.timers.mark(&mut self.backend, self.out.stream());
            self.timeline.base = Some((self.seen(base)?, Duration::ZERO));
        }
        Ok(self)
    }

    /// Names the work that is enqueued on `stream` from now until [`Engine::end_span`], or until
    /// the next span of that stream begins. Without [`Options::spans_max`] and [`Options::nvtx`]
    /// it does nothing.
    ///
    /// # Errors
    /// `Usage` for streams; driver errors.
    ///
    /// [`Options::spans_max`]: super::Options::spans_max
    /// [`Options::nvtx`]: super::Options::nvtx
    pub fn begin_span(&mut self, stream: StreamId, name: impl Into<Name>) -> Result<()> {
        self.end_span(stream)?;
        let name = name.into();
        self.marks.start(stream, name);
        if !self.timeline.has_room() {
            self.stats.untimed_count += u64::from(self.timeline.is_on());
            return Ok(());
        }
        if let Some((base, _)) = &self.timeline.base {
            // No edge of anybody's bytes: else the span could begin before times do.
            let waited = base.wait(&mut self.backend, stream, Site::Outside);
            self.seen(waited)?;
        }
        let from = self.timers.mark(&mut self.backend, stream);
        let from = self.seen(from)?;
        self.timeline.open.push((stream, name, from));
        Ok(())
    }

    /// Ends the stream's span, where it has one.
    ///
    /// # Errors
    /// As [`Engine::begin_span`].
    pub fn end_span(&mut self, stream: StreamId) -> Result<()> {
        const OP: &str = "span";
        self.begin(OP)?;
        let on = self.open_stream(stream, OP)?;
        self.marks.end(stream);
        let Some(place) = self.timeline.open.iter().position(|open| open.0 == stream) else {
            return Ok(());
        };
        let to = self.timers.mark(&mut self.backend, stream);
        let to = self.seen(to)?;
        let (_, name, from) = self.timeline.open.swap_remove(place);
        let track = Track::Stream(on as u32);
        self.timeline.pending.push_back(Pending { track, name, bytes: Bytes::ZERO, from, to });
        Ok(())
    }

    /// Does a profiler listen to the ranges that [`Options::nvtx`] asks for?
    ///
    /// [`Options::nvtx`]: super::Options::nvtx
    pub fn listening(&self) -> Listening {
        self.marks.listening()
    }

    /// A range of a verb about a storage, for who listens.
    pub(super) fn mark(&self, verb: &'static str, id: StorageId) -> Range {
        let slot = if self.marks.is_heard() { self.slots.find(id.0) } else { None };
        self.marks.begin(verb, slot.map_or_else(|| Name::new(""), |slot| slot.name))
    }

    /// The spans whose times are known, the oldest first; the last [`Options::spans_max`] of them.
    ///
    /// [`Options::spans_max`]: super::Options::spans_max
    pub fn spans(&self) -> impl Iterator<Item = &Span> {
        self.timeline.spans.iter()
    }

    /// [`Engine::spans`] as a trace that Chrome and Perfetto show: a row for each track.
    pub fn trace_json(&self) -> String {
        let pid = self.about().device.0;
        let mut text = String::from("{\"displayTimeUnit\": \"ns\", \"traceEvents\": [");
        let mut rows: Vec<(u32, String)> = self.spans().map(|span| span.track.row()).collect();
        rows.sort_unstable();
        rows.dedup();
        let mut first = true;
        let mut line = |event: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{}\n{event}", if first { "" } else { "," });
            first = false;
        };
        for (tid, name) in rows {
            line(format_args!(
                "{{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": {pid}, \"tid\": {tid}, \
                 \"args\": {{\"name\": \"{name}\"}}}}"
            ));
        }
        for span in self.spans() {
            let (tid, _) = span.track.row();
            let (start, time) = (micros(span.start), micros(span.time));
            let name = escaped(span.name.as_str());
            line(format_args!(
                "{{\"ph\": \"X\", \"name\": \"{name}\", \"pid\": {pid}, \"tid\": {tid}, \
                 \"ts\": {start:.3}, \"dur\": {time:.3}, \"args\": {{\"bytes\": {}}}}}",
                span.bytes.0
            ));
        }
        text.push_str("\n]}\n");
        text
    }

    /// A copy was enqueued; its times are read later, where it was timed.
    pub(super) fn copied(&mut self, id: StorageId, inward: Option<Inward>, times: Times) {
        if !self.timeline.is_on() {
            return;
        }
        match self.slots.find(id.0) {
            Some(slot) => self.copied_bytes((slot.name, slot.len), inward, times),
            None => self.stats.untimed_count += 1,
        }
    }

    /// The same of the batch whose rows are laid out. Nobody keeps a sum of its bytes.
    pub(super) fn copied_batch(&mut self, name: Name, inward: Option<Inward>) {
        let lane = inward.map_or(&mut self.out, |_| &mut self.urgent);
        let times = lane.take_times();
        self.copied_bytes((name, self.packer.layout.bytes()), inward, times);
        self.sum_missing();
    }

    fn copied_bytes(&mut self, (name, bytes): (Name, Bytes), inward: Option<Inward>, times: Times) {
        let track = inward.map_or(Track::Out, Track::of);
        match times {
            Some((from, to)) => {
                self.timeline.pending.push_back(Pending { track, name, bytes, from, to });
            }
            None => self.stats.untimed_count += u64::from(self.timeline.is_on()),
        }
    }

    /// Reads the times of spans that are done; asks about at most `asks_max`.
    pub(super) fn settle_spans(&mut self, asks_max: usize) -> Result<()> {
        for _ in 0..asks_max.min(self.timeline.pending.len()) {
            let Some(pending) = self.timeline.pending.pop_front() else { break };
            let done = pending.to.done(&mut self.backend, Site::TransferQuery);
            match self.seen(done) {
                Ok(true) => self.settle_span(pending)?,
                Ok(false) => self.timeline.pending.push_back(pending),
                Err(error) => {
                    self.timeline.pending.push_front(pending);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn settle_span(&mut self, pending: Pending) -> Result<()> {
        let Pending { track, name, bytes, from, to } = pending;
        from.set_done();
        let time = to.since(&mut self.backend, &from);
        let times = self.seen(time).and_then(|time| Ok((self.start_of(from)?, time)));
        let (start, time) = match times {
            Ok(times) => times,
            Err(error) => {
                // Kept it could be refused for good, and no later one would be read.
                self.stats.untimed_count += 1;
                return Err(error);
            }
        };
        let stats = &mut self.stats;
        match track {
            Track::Out => {
                stats.out_time += time;
                stats.out_timed_bytes += bytes.0;
            }
            Track::Ahead | Track::Urgent => {
                stats.in_time += time;
                stats.in_timed_bytes += bytes.0;
            }
            Track::Stream(_) => {}
        }
        self.timeline.keep(Span { track, name, bytes, start, time });
        Ok(())
    }

    /// The time of a moment that is done, from the engine's start.
    fn start_of(&mut self, from: Point) -> Result<Duration> {
        let Some((base, at)) = self.timeline.base.clone() else { return Ok(Duration::ZERO) };
        // All that is timed is behind the first one, and a later one is done.
        base.set_done();
        let later = from.since(&mut self.backend, &base);
        let start = match self.refused(later)? {
            Some(later) => at + later,
            None => {
                let earlier = base.since(&mut self.backend, &from);
                at.saturating_sub(self.seen(earlier)?)
            }
        };
        if start.saturating_sub(at) > BASE_AGE_MAX {
            self.timeline.base = Some((from, start));
        }
        Ok(start)
    }

    /// The answer, or nothing where the driver refused to give one.
    fn refused<T>(&mut self, result: Result<T>) -> Result<Option<T>> {
        match self.seen(result) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_lost() => Err(error),
            Err(_) => Ok(None),
        }
    }
}

/// The two ends of a copy that was timed.
pub(super) type Times = Option<(Point, Point)>;

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

/// As it stands in a JSON string.
fn escaped(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for c in name.chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            // Writing to a string cannot fail.
            c if c.is_control() => drop(write!(text, "\\u{:04x}", c as u32)),
            c => text.push(c),
        }
    }
    text
}
