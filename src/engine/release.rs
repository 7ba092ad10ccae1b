//! Device bytes go: edge E2, and the order in which owners are told.
//!
//! What it is not: it frees nothing a framework owns. It says when the framework may.
//!
//! Invariant: a storage is named, or its bytes freed, only when the copy-out of them (and any
//! copy-in into them) is done, or the stream in whose order they go has been told to wait for it.
//! The storage evicted last on a stream is never named before another one follows, or `flush`: the
//! operator that made the caller evict it may not be enqueued yet.
//!
//! ```text
//!   evicted, not given back:   a  b  c  d     within the bound: only those known done go
//!                              ^oldest  ^latest        above: the stream waits for a, a goes
//!   ended, touched by nothing: ahead of them; ended, touched by a copy: behind, and of the bound
//! ```
//!
//! Part of the engine.

use super::Engine;
use super::ledger::Fence;
use crate::backend::Backend;
use crate::error::Result;
use crate::storage::{Owner, Residency, Slot, Storage};
use crate::trace::{Access, Actor, Site, Use};
use crate::unit::{StorageId, StreamId};

impl Engine {
    /// Places in the queues of those whose device bytes are to go, nobody's among them.
    #[doc(hidden)]
    pub fn places(&self) -> usize {
        self.ledgers.iter().map(|ledger| ledger.places()).sum()
    }

    /// The next storage evicted on `compute` whose device bytes its framework may drop now, in
    /// the order of `compute`; or of any other stream, where several are in use. Call it until it
    /// says `None`. A storage that was dropped by its handle is named here too, once nothing
    /// touches its bytes.
    ///
    /// # Errors
    /// `Usage` for streams; driver errors, after which nothing has changed.
    pub fn releasable(&mut self, compute: StreamId) -> Result<Option<StorageId>> {
        self.begin("releasable")?;
        let on = self.open_stream(compute, "releasable")?;
        while let Some(id) = self.homeless.pop() {
            self.bury(id, on)?;
        }
        // Those hold events while nobody asks; what is refused can go later.
        let released = self.release_fixed();
        self.refusal(released)?;
        self.next_release(on, Owner::Framework)
    }

    /// Are more device bytes not given back than [`Options::unreleased_bytes_max`] allows, of any
    /// stream? Then [`Engine::releasable`] should be called before more is evicted; below the bound
    /// it names what is known done, which takes a question to the driver. No driver call.
    ///
    /// [`Options::unreleased_bytes_max`]: super::Options::unreleased_bytes_max
    pub fn is_over_unreleased(&self) -> bool {
        let max = self.options.unreleased_bytes_max;
        self.ledgers.iter().any(|ledger| ledger.waitable_bytes() > max)
    }

    /// Makes everything evicted on `compute` releasable: `compute` waits, on the device, for the
    /// copies. With several streams in use a framework's bytes go only when all of them are known
    /// past the copy; then those are named by later calls of [`Engine::releasable`]. Bytes whose
    /// address stays go likewise, in later calls of [`Engine::step`] and [`Engine::mark_step`].
    ///
    /// # Errors
    /// `Usage` for streams; driver errors.
    pub fn flush(&mut self, compute: StreamId) -> Result<()> {
        self.begin("flush")?;
        let on = self.open_stream(compute, "flush")?;
        let ledger = &mut self.ledgers[on];
        ledger.latest_may_go();
        // What is unmapped is asked about: for that alone the stream need not wait.
        if ledger.has_any(Owner::Engine) || ledger.has_any(Owner::Framework) {
            self.pass_all(on)?;
            self.release_owned(on)?;
        }
        self.release_fixed()
    }

    /// The stream passes every copy-out enqueued so far.
    pub(super) fn pass_all(&mut self, on: usize) -> Result<()> {
        let Some(end) = self.out.last().cloned() else { return Ok(()) };
        let ledger = &mut self.ledgers[on];
        if ledger.passed_out < end.seq {
            let waited = end.point.wait(&mut self.backend, ledger.stream, Site::ReleaseWait);
            self.seen(waited)?;
            self.ledgers[on].passed_out = end.seq;
        }
        Ok(())
    }

    /// Frees the engine's own bytes that may go.
    pub(super) fn release_owned(&mut self, on: usize) -> Result<()> {
        while self.next_release(on, Owner::Engine)?.is_some() {}
        Ok(())
    }

    pub(super) fn next_release(&mut self, on: usize, owner: Owner) -> Result<Option<StorageId>> {
        let Some(id) = self.head(on, owner)? else { return Ok(None) };
        let is_fenced = self.is_fenced(owner);
        // Behind a fence the bytes go now, for every stream alike.
        let by = if is_fenced { Actor::Host } else { Actor::Stream(self.ledgers[on].stream) };
        // First, as it may be refused: then the storage is still the oldest.
        self.let_go(id, on, by)?;
        self.ledgers[on].pop(owner);
        Ok(Some(id))
    }

    /// The oldest storage, if its bytes may go.
    fn head(&mut self, on: usize, owner: Owner) -> Result<Option<StorageId>> {
        while let Some(&(id, ticket)) = self.ledgers[on].queue(owner).places.front() {
            let slot = self.slots.get(id.0, "releasable");
            if slot.is_ok_and(|slot| slot.ticket == ticket && slot.home == on) {
                return Ok(self.may_go(id, on, owner)?.then_some(id));
            }
            // Taken back by a reader, perhaps evicted on another stream since, or gone.
            self.ledgers[on].pop(owner);
        }
        Ok(None)
    }

    fn may_go(&mut self, id: StorageId, on: usize, owner: Owner) -> Result<bool> {
        let is_dropped = self.slots.get(id.0, "releasable")?.is_dropped;
        if is_dropped && owner == Owner::Engine {
            return self.users_passed(id, on).map(|()| true);
        }
        if self.ledgers[on].latest == Some(id) && !is_dropped {
            return Ok(false);
        }
        if self.is_fenced(owner) {
            return self.fence_passed(on, owner);
        }
        let over = self.ledgers[on].waitable_bytes() > self.options.unreleased_bytes_max;
        self.copies_passed(id, on, over)
    }

    /// Several streams are in use, and a framework's allocator may hand bytes to any of them; or
    /// the bytes are unmapped, which no stream orders.
    fn is_fenced(&self, owner: Owner) -> bool {
        match owner {
            Owner::Engine => false,
            Owner::Framework => self.ledgers.len() > 1,
            Owner::Fixed => true,
        }
    }

    /// Are the copies that touch the device bytes done, or behind a wait of the stream? With
    /// `insist` the stream is told to wait for them.
    fn copies_passed(&mut self, id: StorageId, on: usize, insist: bool) -> Result<bool> {
        let slot = self.slots.get(id.0, "releasable")?;
        let out = slot.out_of_these().cloned();
        // A stream that acquired the storage is behind the copy-in already, and so is a later
        // copy-out.
        let is_reader = slot.readers.has(on) || out.is_some();
        let ready = slot.ready.as_ref().filter(|_| !is_reader).map(|(_, end)| end.point.clone());
        let stream = self.ledgers[on].stream;
        if let Some(end) = out {
            let passed = self.ledgers[on].passed_out >= end.seq || self.out.is_known_done(end.seq);
            if !passed && insist {
                let waited = end.point.wait(&mut self.backend, stream, Site::ReleaseWait);
                self.seen(waited)?;
                self.ledgers[on].passed_out = end.seq;
            } else if !passed {
                let done = end.point.done(&mut self.backend, Site::ReleaseQuery);
                if !self.seen(done)? {
                    return Ok(false);
                }
            }
        }
        if let Some(point) = ready {
            if insist {
                let waited = point.wait(&mut self.backend, stream, Site::FreeAfterCopyIn);
                self.seen(waited)?;
            } else {
                let done = point.done(&mut self.backend, Site::ReleaseQuery);
                return self.seen(done);
            }
        }
        Ok(true)
    }

    /// First the copies must be known done, then a moment on every stream.
    fn fence_passed(&mut self, on: usize, owner: Owner) -> Result<bool> {
        if owner == Owner::Fixed && self.is_idle {
            return Ok(true);
        }
        if self.ledgers[on].queue(owner).fence.is_none() {
            let covers = self.count_copied(on, owner)?;
            if covers == 0 || (owner == Owner::Fixed && self.is_fixed_fenced()) {
                return Ok(false);
            }
            // Where nothing is left to do the moment is passed, and known at once.
            let is_passed = owner == Owner::Fixed && self.are_idle()?;
            let streams = self.ledgers.len();
            let unmarked = if is_passed { streams..streams } else { 0..streams };
            let points = std::mem::take(&mut self.ledgers[on].points);
            self.ledgers[on].queue(owner).fence = Some(Fence { points, unmarked, covers });
        }
        Ok(self.mark_fence(on, owner)? && self.is_fence_passed(on, owner)?)
    }

    /// Has no stream anything left to do? Of one under capture that is not asked.
    fn are_idle(&mut self) -> Result<bool> {
        if self.is_any_captured()? {
            return Ok(false);
        }
        for index in 0..self.ledgers.len() {
            let idle = self.backend.idle(self.ledgers[index].stream, Site::UnmapIdle);
            if !self.seen(idle)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// How many of the oldest storages have their copies known done.
    fn count_copied(&mut self, on: usize, owner: Owner) -> Result<usize> {
        let site = if owner == Owner::Fixed { Site::UnmapQuery } else { Site::ReleaseQuery };
        let len = self.ledgers[on].queue(owner).places.len();
        for count in 0..len {
            let (id, ticket) = self.ledgers[on].queue(owner).places[count];
            let Ok(slot) = self.slots.get(id.0, "releasable") else { continue };
            if slot.ticket != ticket || slot.home != on {
                continue;
            }
            if self.ledgers[on].latest == Some(id) && !slot.is_dropped {
                return Ok(count);
            }
            if !self.copies_done(id, site)? {
                return Ok(count);
            }
        }
        Ok(len)
    }

    /// Are the copies that touch the device bytes known done?
    pub(super) fn copies_done(&mut self, id: StorageId, site: Site) -> Result<bool> {
        let slot = self.slots.get(id.0, "releasable")?;
        let points = [
            slot.out_of_these().map(|end| end.point.clone()),
            slot.ready.as_ref().map(|(_, end)| end.point.clone()),
        ];
        for point in points.into_iter().flatten() {
            let done = point.done(&mut self.backend, site);
            if !self.seen(done)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The device bytes go: freed by the engine in the order of `on`, or named to their owner, who
    /// may drop them in the order of `by`.
    fn let_go(&mut self, id: StorageId, on: usize, by: Actor) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "release")?;
        if slot.owner == Owner::Fixed {
            return self.unmap(id);
        }
        let Some(range) = slot.range else { return Ok(()) };
        let (owner, len, home, is_dropped) = (slot.owner, slot.len, slot.home, slot.is_dropped);
        let was_evicting = slot.residency() == Residency::Evicting;
        let was_buried = is_dropped && slot.ticket != 0 && !was_evicting;
        let stream = self.ledgers[on].stream;
        if owner == Owner::Engine {
            self.free(range, stream)?;
        } else {
            let free = Use { access: Access::Free, span: range.into() };
            let noted = self.backend.note(by, &[free]);
            self.seen(noted)?;
        }
        self.ranges.remove(&range.at().0);
        if was_evicting {
            self.ledgers[home].leave(owner, len);
            self.stats.released_bytes += len.0;
        }
        if was_buried && owner == Owner::Framework {
            self.ledgers[home].unburied(len);
        }
        if is_dropped {
            return self.forget(id);
        }
        let slot = self.slots.get_mut(id.0, "release")?;
        slot.range = None;
        slot.ticket = 0;
        slot.readers = Default::default();
        slot.become_(Residency::Evicted(crate::storage::Tier::Host));
        Ok(())
    }

    /// Ends a storage. A framework may drop its bytes in the order of `compute` when this returns;
    /// the engine frees its own, and those whose address stays once all that uses them is known
    /// done (see [`Engine::alloc_fixed`]). Nothing waits on the host.
    ///
    /// # Errors
    /// `Usage` for handles and streams; driver errors, after which the storage goes on as if its
    /// handle had been dropped: the engine frees its own bytes later, and names a framework's by
    /// [`Engine::releasable`].
    pub fn release(&mut self, storage: Storage, compute: StreamId) -> Result<()> {
        const OP: &str = "release";
        self.begin(OP)?;
        let on = self.open_stream(compute, OP)?;
        self.slot(storage.id(), OP)?;
        let id = storage.disarm();
        self.end(id, on)
    }

    /// A handle was dropped, on whatever thread. Its stream is the one it was last seen on.
    pub(super) fn handle_dropped(&mut self, id: StorageId) -> Result<()> {
        let Ok(slot) = self.slots.get_mut(id.0, "drop") else { return Ok(()) };
        let (owner, home, on_device) = (slot.owner, slot.home, slot.range.is_some());
        if owner == Owner::Framework && on_device {
            // Its bytes are somebody else's: they are named by `releasable` when nothing uses them.
            self.unlist(id)?;
            if home != Slot::NO_HOME {
                return self.bury(id, home);
            }
            self.homeless.push(id);
            return self.give_up_block(id);
        }
        // What could not be ended is buried; this verb was about something else.
        let ended = self.end(id, home);
        self.refusal(ended).map(|_| ())
    }

    /// Lists a storage that ended, whose device bytes are still to go: ahead of the others where
    /// nothing touches them, so that it waits for nobody's copy.
    fn bury(&mut self, id: StorageId, on: usize) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "drop")?;
        let was_evicting = slot.residency() == Residency::Evicting;
        if !was_evicting {
            slot.home = on;
        }
        let (home, owner, len) = (slot.home, slot.owner, slot.len);
        let may_go = match owner {
            Owner::Framework if self.ledgers.len() == 1 => self.copies_passed(id, home, false),
            Owner::Framework => self.copies_done(id, Site::ReleaseQuery),
            // The engine's own go in the order of a stream, whoever is ahead.
            Owner::Engine => Ok(false),
            Owner::Fixed => self.copies_done(id, Site::UnmapQuery),
        };
        let ledger = &mut self.ledgers[home];
        if owner == Owner::Framework && !was_evicting {
            ledger.buried(len);
        }
        let ticket = ledger.list(id, owner, matches!(may_go, Ok(true)));
        self.slots.get_mut(id.0, "drop")?.ticket = ticket;
        self.give_up_block(id)?;
        // What could not be asked is asked again, of the oldest.
        self.refusal(may_go).map(|_| ())
    }

    /// The block of a storage that ended goes back at once, busy while a copy uses it: whoever
    /// takes it next waits for that on the device, and need not wait for the device bytes to go.
    fn give_up_block(&mut self, id: StorageId) -> Result<()> {
        let slot = self.slots.get_mut(id.0, "release")?;
        let Some(block) = slot.block.take() else { return Ok(()) };
        let last_use = slot.last_use();
        self.give_back(block, last_use)
    }

    /// Ends a storage in the order of stream `on`.
    fn end(&mut self, id: StorageId, on: usize) -> Result<()> {
        self.unlist(id)?;
        let slot = self.slots.get(id.0, "release")?;
        if slot.owner == Owner::Fixed && slot.is_mapped() {
            // No stream orders what becomes of them: they go when all that uses them is known done.
            return self.bury(id, on);
        }
        if slot.range.is_none() {
            return self.forget(id);
        }
        let passed = self.users_passed(id, on);
        if let Some(error) = self.refusal(passed)? {
            self.bury(id, on)?;
            return Err(error);
        }
        let by = Actor::Stream(self.ledgers[on].stream);
        self.let_go(id, on, by)
    }

    /// Orders stream `on` behind all that uses the device bytes of a storage that ends.
    fn users_passed(&mut self, id: StorageId, on: usize) -> Result<()> {
        self.copies_passed(id, on, true)?;
        let slot = self.slots.get(id.0, "release")?;
        // An eviction is ordered behind them already: its copy-out is, or the stream it is of.
        let is_behind = slot.residency() == Residency::Evicting && slot.home == on;
        if slot.owner == Owner::Engine && !is_behind {
            let (stream, others) = (self.ledgers[on].stream, Engine::others(slot.readers, on));
            self.order_behind(stream, others, Site::FreeAfterUsers)?;
        }
        Ok(())
    }

    /// The storage is no candidate of policy and prefetch any more.
    fn unlist(&mut self, id: StorageId) -> Result<()> {
        self.policy.forget(id);
        let slot = self.slots.get_mut(id.0, "release")?;
        // Once, though the end may be tried more than once.
        let is_first = !std::mem::replace(&mut slot.is_dropped, true);
        if is_first && slot.residency() == Residency::Refilling {
            self.wasted(id)?;
        }
        let slot = self.slots.get_mut(id.0, "release")?;
        if let Some(place) = slot.place.take() {
            self.prefetcher.gone(place);
        }
        Ok(())
    }

    /// The storage is no more; its block goes back, busy while a copy uses it.
    pub(super) fn forget(&mut self, id: StorageId) -> Result<()> {
        let slot = self.slots.remove(id.0, "release")?;
        let last_use = slot.last_use();
        if let Some(fixed) = slot.fixed {
            self.ranges.remove(&fixed.range().at().0);
            self.handles.release(&mut self.backend, fixed);
        }
        match slot.block {
            Some(block) => self.give_back(block, last_use),
            None => Ok(()),
        }
    }
}
