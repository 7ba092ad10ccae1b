//! What the checker found: one hazard, in words, and the bounded list of them.
//!
//! What it is not: a judge. It decides nothing about order.
//!
//! Invariant: the list never grows past its bound, and the total counts every hazard, also those
//! that the list leaves out because it has their like already.
//!
//! ```text
//!   Hazard { kind, first: Touch, second: Touch, name }  --Display-->  one line
//!            nothing orders <second> on stream B behind <first> on stream A
//! ```
//!
//! The checker makes them; whoever asked for a verdict reads them.

use crate::trace::{Access, Actor, Span, Use};
use crate::unit::{DeviceId, EventId, Name};
use std::fmt;

/// The most hazards the list keeps.
pub const HAZARDS_MAX: usize = 256;

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A read (or update) that nothing orders behind an earlier write.
    ReadAfterWrite,
    /// A write, or a framework's reuse, that nothing orders behind an earlier read.
    WriteAfterRead,
    /// A write, or a framework's reuse, that nothing orders behind an earlier write or release; or
    /// an allocation of bytes that another one still holds.
    WriteAfterWrite,
    /// A use of bytes that were given back; in whatever order.
    UseAfterFree,
    /// A use that nothing orders behind the allocation of its bytes.
    UseBeforeAlloc,
    /// A read of bytes that nothing wrote since they came into being.
    ReadUndefined,
    /// A release of bytes that were given back already.
    DoubleFree,
    /// A release that nothing orders behind an earlier use.
    FreeInFlight,
    /// A stream waits for an event that was never recorded, is closed or was never opened.
    WaitOnFresh,
    /// An event was recorded on a stream of another device.
    ForeignEvent,
    /// An allocation that was never given back.
    Leak,
}

/// One use of bytes, or one request about an event, as the trace told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// Its record's position in its device's trace.
    pub seq: u64,
    /// Its record's device.
    pub device: DeviceId,
    /// Who did it.
    pub by: Actor,
    /// Which bytes, and how; `None` where it is about an event.
    pub uses: Option<Use>,
    /// A kernel's name, or `copy_out`, `copy_in`, `alloc`, `free`, `map`, `unmap`, `note`, `wait`,
    /// `record`.
    pub word: &'static str,
}

impl Touch {
    /// Do both name the same actor? (Workers are numbered on each device anew.)
    pub(super) fn same_actor(&self, other: &Touch) -> bool {
        let is_worker = matches!(self.by, Actor::Worker(_));
        self.by == other.by && (!is_worker || self.device == other.device)
    }
}

/// One thing that went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hazard {
    /// What.
    pub kind: Kind,
    /// The earlier use; `None` where there is none, or where it was forgotten as long settled.
    pub first: Option<Touch>,
    /// The use that came too early, or the request that was wrong.
    pub second: Touch,
    /// The event it is about.
    pub event: Option<EventId>,
    /// Name of the storage that has the bytes.
    pub name: Option<Name>,
}

impl Hazard {
    /// The two actors between which an edge is missing: work of the second was not ordered behind
    /// work of the first. `None` where no order would have helped.
    pub fn missing_edge(&self) -> Option<(Actor, Actor)> {
        use Kind::*;
        let first = self.first.filter(|first| !first.same_actor(&self.second))?;
        match self.kind {
            ReadAfterWrite | WriteAfterRead | WriteAfterWrite | UseBeforeAlloc | FreeInFlight => {
                Some((first.by, self.second.by))
            }
            UseAfterFree | ReadUndefined | DoubleFree | WaitOnFresh | ForeignEvent | Leak => None,
        }
    }

    /// Would a reader learn nothing from the other that this one does not say? Then the two are the
    /// same mistake, made again.
    fn is_like(&self, other: &Hazard) -> bool {
        fn outline(touch: &Touch) -> (DeviceId, Actor, Option<Use>) {
            (touch.device, touch.by, touch.uses)
        }
        self.kind == other.kind
            && self.event == other.event
            && outline(&self.second) == outline(&other.second)
            && self.first.as_ref().map(outline) == other.first.as_ref().map(outline)
    }
}

impl Kind {
    fn words(self) -> &'static str {
        match self {
            Kind::ReadAfterWrite => "read after write",
            Kind::WriteAfterRead => "write after read",
            Kind::WriteAfterWrite => "write after write",
            Kind::UseAfterFree => "use after free",
            Kind::UseBeforeAlloc => "use before alloc",
            Kind::ReadUndefined => "read of undefined bytes",
            Kind::DoubleFree => "double free",
            Kind::FreeInFlight => "free in flight",
            Kind::WaitOnFresh => "wait on a fresh event",
            Kind::ForeignEvent => "foreign event",
            Kind::Leak => "leak",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

impl fmt::Display for Touch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.word, self.seq)?;
        if let Some(Use { access, span }) = self.uses {
            let verb = match access {
                Access::Read => "reads",
                Access::Write => "writes",
                Access::Update => "updates",
                Access::Alloc => "takes",
                Access::Free => "gives back",
            };
            let (at, len) = span.parts();
            match span {
                Span::Device(_) => write!(f, " ({verb} {} {at:#x}+{len:#x})", self.device)?,
                Span::Pinned(_) => write!(f, " ({verb} pinned {at:#x}+{len:#x})")?,
            }
        }
        match self.by {
            Actor::Host => f.write_str(" on the host"),
            Actor::Stream(id) => write!(f, " on stream {:?}", id.0),
            Actor::Worker(number) => write!(f, " on worker {number}"),
        }
    }
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let second = &self.second;
        write!(f, "{}: ", self.kind)?;
        match (self.kind, &self.first) {
            (Kind::UseAfterFree, Some(first)) => write!(f, "{second} comes after {first}")?,
            (Kind::DoubleFree, Some(first)) => write!(f, "{second} repeats {first}")?,
            (Kind::ReadUndefined, Some(first)) => {
                write!(f, "{second} reads what nothing wrote since {first}")?;
            }
            (Kind::WriteAfterWrite, Some(first)) if matches!(second.word, "alloc" | "map") => {
                write!(f, "{second} takes what {first} still holds")?;
            }
            (Kind::Leak, _) => write!(f, "nothing gave back what {second} took")?,
            (_, Some(first)) => write!(f, "nothing orders {second} behind {first}")?,
            (_, None) => write!(f, "{second}")?,
        }
        if let Some(event) = self.event {
            write!(f, ", event {:?}", event.0)?;
        }
        if let Some(name) = self.name {
            write!(f, " [storage {name:?}]")?;
        }
        Ok(())
    }
}

/// The hazards found so far.
#[derive(Debug, Default)]
pub(super) struct Report {
    list: Vec<Hazard>,
    total: u64,
}

impl Report {
    /// Counts a hazard, and keeps it if it is news and there is room.
    pub(super) fn add(&mut self, hazard: Hazard) {
        self.total += 1;
        if self.list.len() < HAZARDS_MAX && !self.list.iter().any(|other| other.is_like(&hazard)) {
            self.list.push(hazard);
        }
    }

    pub(super) fn list(&self) -> &[Hazard] {
        &self.list
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn into_list(self) -> Vec<Hazard> {
        self.list
    }
}
