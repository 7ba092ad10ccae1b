//! The rules: what an access finds wrong with a byte's past, and what it leaves behind.
//!
//! What it is not: order itself. It asks whether an earlier access happened before this one, and
//! the clocks answer.
//!
//! Invariant: after an access, the byte's state tells all that a later access can conflict with:
//! the last write, and those reads since that no other read is ordered behind.
//!
//! ```text
//!   later \ earlier, unordered   Alloc            Write, Update, Free   Read
//!   Read                         UseBeforeAlloc   ReadAfterWrite        -
//!   Update                       UseBeforeAlloc   ReadAfterWrite        WriteAfterRead
//!   Write                        UseBeforeAlloc   WriteAfterWrite       WriteAfterRead
//!   Free                         FreeInFlight     FreeInFlight          FreeInFlight
//!   Alloc, noted or mapped       WriteAfterWrite  WriteAfterWrite       WriteAfterRead
//!   Alloc, by the driver         -                -                     -
//!   and in any order: a use of bytes that are away is UseAfterFree, a Free of them DoubleFree, a
//!   read of bytes nobody wrote is ReadUndefined
//! ```
//!
//! Only the checker may use it.

use super::clock::{Actors, HOST};
use super::report::Kind;
use super::shadow::{Life, Stamp, State};
use crate::trace::Access;

/// What is done to bytes. The driver's own allocations and releases differ from those a framework
/// says it made: the driver keeps order between them by itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deed {
    pub(super) access: Access,
    pub(super) by_driver: bool,
}

/// What one access found wrong, over all the bytes it touched.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// For each actor, its latest access that this one conflicts with: to be ordered behind that
    /// one is to be ordered behind all of them.
    pub(super) pairs: Vec<(Kind, Stamp)>,
    /// Bytes were used, or given back, that are away; with the latest of their releases, unless
    /// all were forgotten.
    pub(super) away: Option<(Kind, Option<Stamp>)>,
    /// Undefined bytes were read; with the allocation of the first of them, unless forgotten.
    pub(super) undefined: Option<Option<Stamp>>,
}

impl Findings {
    /// Was nothing wrong?
    pub(super) fn is_empty(&self) -> bool {
        self.pairs.is_empty() && self.undefined.is_none() && self.away.is_none()
    }

    /// Adds a conflict with `first`.
    pub(super) fn pair(&mut self, kind: Kind, first: Stamp) {
        let mut pairs = self.pairs.iter_mut();
        match pairs.find(|(_, other)| other.touch.same_actor(&first.touch)) {
            Some(pair) if pair.1.position < first.position => *pair = (kind, first),
            Some(_) => {}
            None => self.pairs.push((kind, first)),
        }
    }

    fn away(&mut self, kind: Kind, release: Option<Stamp>) {
        let later = |a: Option<Stamp>, b: Option<Stamp>| if place(a) < place(b) { b } else { a };
        let earlier = self.away.and_then(|(_, release)| release);
        self.away = Some((kind, later(earlier, release)));
    }
}

fn place(stamp: Option<Stamp>) -> Option<u64> {
    stamp.map(|stamp| stamp.position)
}

/// One access on its way over the bytes.
#[derive(Debug)]
pub(super) struct Visit<'a> {
    pub(super) deed: Deed,
    pub(super) stamp: Stamp,
    pub(super) actors: &'a Actors,
    pub(super) found: &'a mut Findings,
}

impl Visit<'_> {
    /// Checks the access against one state, and changes the state accordingly.
    pub(super) fn apply(&mut self, state: &mut State) {
        match self.deed.access {
            Access::Read => self.read(state),
            Access::Write | Access::Update => self.write(state),
            Access::Alloc => self.alloc(state),
            Access::Free => self.free(state),
        }
    }

    fn is_before(&self, first: &Stamp) -> bool {
        first.before(self.stamp.slot, self.actors)
    }

    /// The last write, if nothing orders this access behind it.
    fn unordered_write(&self, state: &State) -> Option<Stamp> {
        state.write.filter(|write| !self.is_before(write))
    }

    /// What is wrong with using the bytes at all. Bytes used while they are away count from then on
    /// as bytes the trace knows nothing of, so that one mistake is told once.
    fn use_bytes(&mut self, state: &mut State) {
        if state.life != Life::Present {
            self.found.away(Kind::UseAfterFree, state.write.take());
            state.life = Life::Present;
        } else if let Some(write) = self.unordered_write(state) {
            let kind = match write.touch.uses.map(|uses| uses.access) {
                Some(Access::Alloc) => Kind::UseBeforeAlloc,
                _ if self.deed.access.is_read() => Kind::ReadAfterWrite,
                _ => Kind::WriteAfterWrite,
            };
            self.found.pair(kind, write);
        } else if self.deed.access.is_read() && !state.is_defined {
            self.found.undefined.get_or_insert(state.write);
            state.is_defined = true;
        }
    }

    fn read(&mut self, state: &mut State) {
        self.use_bytes(state);
        let (slot, actors) = (self.stamp.slot, self.actors);
        state.reads.retain(|read| !read.before(slot, actors));
        // Whatever comes later is ordered behind what the host does now: nothing can conflict.
        if slot != HOST {
            state.reads.push(self.stamp);
        }
    }

    fn write(&mut self, state: &mut State) {
        self.use_bytes(state);
        self.unordered_reads(state, Kind::WriteAfterRead);
        state.is_defined = true;
        self.overwrite(state);
    }

    fn alloc(&mut self, state: &mut State) {
        if !self.deed.by_driver {
            if let Some(write) = self.unordered_write(state) {
                self.found.pair(Kind::WriteAfterWrite, write);
            }
            self.unordered_reads(state, Kind::WriteAfterRead);
        }
        state.life = Life::Present;
        state.is_defined = false;
        state.freed = None;
        self.overwrite(state);
    }

    fn free(&mut self, state: &mut State) {
        // An allocation from the driver may have been cut up by a framework, which says of the
        // pieces that it dropped them before it gives back the whole.
        let is_away = match state.life {
            Life::Present => false,
            Life::Dropped => !self.deed.by_driver,
            Life::Gone => true,
        };
        if is_away {
            self.found.away(Kind::DoubleFree, state.write);
        } else if let Some(write) = self.unordered_write(state) {
            self.found.pair(Kind::FreeInFlight, write);
        }
        self.unordered_reads(state, Kind::FreeInFlight);
        state.life = if self.deed.by_driver { Life::Gone } else { Life::Dropped };
        state.is_defined = true;
        self.overwrite(state);
    }

    fn unordered_reads(&mut self, state: &State, kind: Kind) {
        for read in state.reads.iter() {
            if !self.is_before(read) {
                self.found.pair(kind, *read);
            }
        }
    }

    fn overwrite(&mut self, state: &mut State) {
        state.write = Some(self.stamp);
        state.reads.clear();
    }
}

/// Bytes were named as a storage's: if they were away, their owner has taken them again unseen.
pub(super) fn adopt(state: &mut State) {
    match state.life {
        Life::Present => {}
        // The owner's allocator goes by stream order, so its release still counts as a write.
        Life::Dropped => state.life = Life::Present,
        // They came from the driver, which ordered them behind whatever was before.
        Life::Gone => *state = State::default(),
    }
}
