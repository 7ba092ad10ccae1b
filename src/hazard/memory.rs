//! Every byte that any device reaches: where an access meets the bytes' past.
//!
//! What it is not: the rules or the clocks. It finds the bytes, lets the rules look at them, and
//! reports what they found.
//!
//! Invariant: an access is checked against all of its bytes before it counts as ordered behind any
//! of the accesses it conflicts with; so a report does not depend on how the bytes were cut up.
//!
//! ```text
//!   Step + Use --> Space::visit(rules) --> Findings --> Report
//!                                              `------> Actors::assume: as if it had been ordered
//! ```
//!
//! Only the checker may use it.

use super::clock::Actors;
use super::lives::{Names, Place, Ranges};
use super::report::{Hazard, Kind, Report, Touch};
use super::rules::{self, Deed, Findings, Visit};
use super::shadow::{Life, Space, Stamp};
use crate::trace::{Access, Actor, Span, Use};
use crate::unit::{Bytes, DeviceId, DevicePtr, DeviceRange, Name};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One step of an actor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) seq: u64,
    pub(super) device: DeviceId,
    pub(super) by: Actor,
    pub(super) slot: usize,
    pub(super) word: &'static str,
}

impl Step {
    /// The step as a report tells it.
    pub(super) fn touch(&self, uses: Option<Use>) -> Touch {
        Touch { seq: self.seq, device: self.device, by: self.by, uses, word: self.word }
    }
}

/// All address spaces.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// Accesses so far, over all devices.
    position: u64,
    spaces: BTreeMap<Place, Space>,
    pub(super) allocs: Ranges<Stamp>,
    pub(super) names: Names,
    pub(super) report: Report,
    /// Empty between accesses; here to keep its memory.
    found: Findings,
}

impl Memory {
    /// A read, write or update; or an allocation or release that somebody noted.
    pub(super) fn noted(&mut self, actors: &mut Actors, step: Step, uses: Use) {
        let Some(stamp) = self.access(actors, step, uses, false) else { return };
        // The pool says what pinned memory it takes and gives back, and can leak it. A framework
        // need not say when it is done with device memory.
        if let (Place::Pinned, at, end) = placed(step.device, uses.span) {
            match uses.access {
                Access::Alloc => drop(self.allocs.insert(Place::Pinned, at, end, stamp)),
                Access::Free => self.allocs.remove(Place::Pinned, at, end),
                Access::Read | Access::Write | Access::Update => {}
            }
        }
    }

    /// The driver lends bytes.
    pub(super) fn alloc(&mut self, actors: &mut Actors, step: Step, range: DeviceRange) {
        self.lend(actors, step, range, true);
    }

    /// The host has memory mapped; the driver orders that behind nothing.
    pub(super) fn map(&mut self, actors: &mut Actors, step: Step, range: DeviceRange) {
        self.lend(actors, step, range, false);
    }

    fn lend(&mut self, actors: &mut Actors, step: Step, range: DeviceRange, is_ordered: bool) {
        let uses = Use { access: Access::Alloc, span: range.into() };
        let Some(stamp) = self.access(actors, step, uses, is_ordered) else { return };
        let place = Place::Device(step.device);
        for held in self.allocs.insert(place, range.at().0, range.end(), stamp) {
            self.found.pair(Kind::WriteAfterWrite, held);
        }
        self.tell(actors, &stamp);
    }

    /// The driver takes bytes back. It knows the length of what it lent; a trace may leave it out.
    pub(super) fn free(&mut self, actors: &mut Actors, step: Step, range: DeviceRange) {
        let place = Place::Device(step.device);
        let at = range.at();
        let len = match self.allocs.end_of(place, at.0) {
            Some(end) => Bytes(end - at.0),
            // Freed twice by address alone: its first byte says so.
            None if range.is_empty() && self.is_gone(place, at) => Bytes(1),
            None => range.len(),
        };
        let range = DeviceRange::new(at, len).unwrap_or(range);
        let uses = Use { access: Access::Free, span: range.into() };
        if self.access(actors, step, uses, true).is_none() {
            return;
        }
        self.allocs.remove(place, at.0, at.0 + 1);
        let capture = Arc::new(actors.clock(step.slot).clone());
        if let Some(space) = self.spaces.get_mut(&place) {
            space.visit(at.0, range.end(), |state| state.freed = Some(Arc::clone(&capture)));
        }
    }

    fn is_gone(&self, place: Place, at: DevicePtr) -> bool {
        let mut is_gone = false;
        if let Some(space) = self.spaces.get(&place) {
            space.peek(at.0, at.0.saturating_add(1), |state| is_gone = state.life == Life::Gone);
        }
        is_gone
    }

    /// The bytes belong to a storage: they have a name, and exist.
    pub(super) fn name(&mut self, device: DeviceId, name: Name, range: DeviceRange) {
        if range.is_empty() {
            return;
        }
        let (place, at, end) = placed(device, range.into());
        self.names.give(place, at, end, name);
        if let Some(space) = self.spaces.get_mut(&place) {
            let mut is_away = false;
            space.peek(at, end, |state| is_away |= state.life != Life::Present);
            if is_away {
                space.visit(at, end, rules::adopt);
            }
        }
    }

    /// What is still allocated has leaked.
    pub(super) fn leaks(&mut self) {
        for second in self.allocs.drain().map(|alloc| alloc.touch) {
            self.report.add(self.hazard(Kind::Leak, None, second));
        }
    }

    /// Forgets what can no longer matter.
    pub(super) fn settle(&mut self, actors: &Actors) {
        self.spaces.values_mut().for_each(|space| space.settle(actors.host()));
    }

    /// How many byte ranges have a state of their own.
    pub(super) fn segments(&self) -> usize {
        self.spaces.values().map(Space::len).sum()
    }

    /// Shows the slot of every access kept to `each`.
    pub(super) fn slots(&self, mut each: impl FnMut(usize)) {
        self.spaces.values().for_each(|space| space.slots(&mut each));
    }

    /// One access to one range: what it conflicts with, and what it leaves behind. `None` where it
    /// touches no bytes.
    fn access(
        &mut self,
        actors: &mut Actors,
        step: Step,
        uses: Use,
        by_driver: bool,
    ) -> Option<Stamp> {
        let (place, at, end) = placed(step.device, uses.span);
        if at == end {
            return None;
        }
        let space = self.spaces.entry(place).or_default();
        if uses.access == Access::Alloc {
            space.peek(at, end, |state| {
                if let Some(capture) = &state.freed {
                    actors.join(step.slot, capture);
                }
            });
        }
        self.position += 1;
        let stamp = Stamp {
            position: self.position,
            slot: step.slot,
            tick: actors.tick(step.slot),
            touch: step.touch(Some(uses)),
        };
        let deed = Deed { access: uses.access, by_driver };
        let mut visit = Visit { deed, stamp, actors, found: &mut self.found };
        space.visit(at, end, |state| visit.apply(state));
        if space.is_crowded() {
            space.settle(actors.host());
        }
        self.tell(actors, &stamp);
        Some(stamp)
    }

    /// Reports what was found about `second`, and goes on as if all of it had been in order.
    fn tell(&mut self, actors: &mut Actors, second: &Stamp) {
        if self.found.is_empty() {
            return;
        }
        let mut found = std::mem::take(&mut self.found);
        found.pairs.sort_by_key(|(_, first)| first.position);
        for (kind, first) in &found.pairs {
            self.report.add(self.hazard(*kind, Some(first.touch), second.touch));
            actors.assume(first.slot, first.tick, second.slot);
        }
        if let Some((kind, release)) = found.away {
            let release = release.map(|release| release.touch);
            self.report.add(self.hazard(kind, release, second.touch));
        }
        if let Some(alloc) = found.undefined {
            let alloc = alloc.map(|alloc| alloc.touch);
            self.report.add(self.hazard(Kind::ReadUndefined, alloc, second.touch));
        }
    }

    fn hazard(&self, kind: Kind, first: Option<Touch>, second: Touch) -> Hazard {
        let name = second.uses.and_then(|uses| {
            let (place, at, end) = placed(second.device, uses.span);
            match first.and_then(|first| Some(placed(first.device, first.uses?.span))) {
                Some((_, from, to)) => self.names.of(place, at.max(from), end.min(to)),
                None => self.names.of(place, at, end),
            }
        });
        Hazard { kind, first, second, event: None, name }
    }
}

/// Address space, first byte and end of a span.
fn placed(device: DeviceId, span: Span) -> (Place, u64, u64) {
    match span {
        Span::Device(range) => (Place::Device(device), range.at().0, range.end()),
        Span::Pinned(range) => (Place::Pinned, range.at().0, range.end()),
    }
}
