//! Sums of bytes, made where the bytes are: of those that leave, and of those that came back.
//!
//! What it is not: a hash against malice, or a repair. It keeps no order of its own: a sum is made
//! between the copy and the end of the copy, so the edges that guard the copy guard it (E1, E2, E5,
//! E6).
//!
//! Invariant: a slot belongs to one copy at a time, and to one lane for good; what it says is read
//! by the host only when the end of its copy is known done (E3). Two sums are compared only where
//! they are of the same bytes: those copied into a block, and those copied out of it.
//!
//! ```text
//!   out lane   clear s, sum source -> s, s -> mirror |==trunks==| end 7
//!   in lane              |==trunks==| clear t, sum target -> t, t -> mirror | end 3
//!   host                                         3 known done?  mirror[s] == mirror[t]?
//! ```
//!
//! Why slots are lent again without a wait: each lane has its own. A copy that is given the slot of
//! an earlier one comes behind it on the same stream, and so behind all that was enqueued for it,
//! even where that failed half way. The host gives a slot back when it has read it, or needs it no
//! more, so what it reads is what it asked for. A copy-out's slot is kept as long as a copy-in that
//! began before its sum was read wants to be compared with it; after that the sum is a number.
//!
//! The engine uses it.

mod kernels;

pub use kernels::{CHECKSUM, CLEAR, sum_of};

use crate::backend::Backend;
use crate::copy::Lane;
use crate::error::{Error, Misuse, Result};
use crate::pinned::{Block, Client};
use crate::trace::{Actor, Use};
use crate::unit::{Bytes, DeviceRange, Name, StorageId, StreamId};
use std::collections::VecDeque;

/// How a copy goes: which lane's slots it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Out of the device.
    Out,
    /// In, and nobody waits for it yet.
    Ahead,
    /// In, and a reader waits for it.
    Urgent,
}

impl Way {
    /// Every way, in the order of their numbers.
    pub const ALL: [Way; 3] = [Way::Out, Way::Ahead, Way::Urgent];
}

/// A slot lent to one copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumSlot {
    way: Way,
    index: u32,
}

/// What the bytes in a block add up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// This.
    Known(u64),
    /// What the slot of their copy-out says, once that is done.
    Coming(SumSlot),
}

/// A copy-out whose sum was not read yet.
#[derive(Debug)]
struct Leaving {
    storage: StorageId,
    at: SumSlot,
    seq: u64,
}

/// Bytes that were not compared yet, of a copy-in or of an eviction that copies nothing; it says
/// all that a report needs.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Whose bytes.
    pub storage: StorageId,
    /// Its name.
    pub name: Name,
    /// How many bytes.
    pub len: Bytes,
    /// What they have to add up to.
    pub sum: Sum,
}

#[derive(Debug)]
struct Arriving {
    arrival: Arrival,
    at: SumSlot,
    seq: u64,
}

/// One lane's sums on the device.
#[derive(Debug)]
struct Scratch {
    range: DeviceRange,
    stream: StreamId,
    free: Vec<u32>,
}

/// Sums under way, and the memory they are made in.
#[derive(Debug)]
pub struct Checks {
    scratch: Vec<Scratch>,
    /// All slots of the first lane, then those of the second, the third.
    mirror: Block,
    slots_max: usize,
    /// How many want to read the slot of a copy-out: it itself, and copies in to be compared.
    uses: Vec<u32>,
    leaving: VecDeque<Leaving>,
    /// By way; nothing arrives on the way out.
    arriving: [VecDeque<Arriving>; 3],
}

const SUM_BYTES: Bytes = Bytes(8);

impl Checks {
    /// Takes the memory for `slots_max` sums of each lane: device memory in the order of `streams`
    /// (as in [`Way::ALL`]), and a pinned block.
    ///
    /// # Errors
    /// `Usage(BadKernel)` where the backend runs no kernels; `OutOfMemory` and `OverBudget` where
    /// there is no room. Nothing is kept then.
    pub fn open(
        backend: &mut dyn Backend,
        client: &mut Client,
        slots_max: usize,
        streams: [StreamId; 3],
    ) -> Result<Checks> {
        let mut scratch = Vec::with_capacity(streams.len());
        let mirror = Checks::take(backend, client, slots_max, streams, &mut scratch);
        let mirror = match mirror {
            Ok(mirror) => mirror,
            Err(error) => {
                for Scratch { range, stream, .. } in scratch {
                    // The first error is the one to tell.
                    let _ = backend.free_device(range.at(), stream);
                }
                return Err(error);
            }
        };
        Ok(Checks {
            scratch,
            mirror,
            slots_max,
            uses: vec![0; slots_max],
            leaving: VecDeque::with_capacity(slots_max),
            arriving: Way::ALL.map(|_| VecDeque::with_capacity(slots_max)),
        })
    }

    fn take(
        backend: &mut dyn Backend,
        client: &mut Client,
        slots_max: usize,
        streams: [StreamId; 3],
        scratch: &mut Vec<Scratch>,
    ) -> Result<Block> {
        // One more than are lent: the kernels are tried on it.
        let len = Bytes((slots_max as u64 + 1) * SUM_BYTES.0);
        for stream in streams {
            let range = DeviceRange::new(backend.alloc_device(len, stream)?, len)?;
            let free = (0..slots_max as u32).rev().collect();
            scratch.push(Scratch { range, stream, free });
            let (first, rest) = (range.part(Bytes::ZERO, SUM_BYTES)?, len - SUM_BYTES);
            let others = range.part(SUM_BYTES, rest)?;
            kernels::clear(backend, range, stream).map_err(no_kernels)?;
            kernels::checksum(backend, others, first, stream).map_err(no_kernels)?;
        }
        let len = Bytes((slots_max * streams.len()) as u64 * SUM_BYTES.0);
        let lent = client.lend(len, Name::new("verify"))?;
        assert!(lent.after.is_none(), "an engine that is being opened gave no block back yet");
        let mut block = lent.block;
        block.mark_written(len)?;
        Ok(block)
    }

    /// Gives everything back. Nothing that was enqueued for it is under way any more.
    ///
    /// # Errors
    /// The first of the driver's or the pool's.
    pub fn close(self, backend: &mut dyn Backend, client: &mut Client) -> Result<()> {
        let mut result = client.give_back(self.mirror, None).map_err(Error::from);
        for Scratch { range, stream, .. } in self.scratch {
            result = result.and(backend.free_device(range.at(), stream));
        }
        result
    }

    /// Bytes it holds, on the device and pinned.
    pub fn bytes(&self) -> Bytes {
        self.scratch.iter().map(|scratch| scratch.range.len()).sum::<Bytes>() + self.mirror.len()
    }

    /// Is some lane's last slot lent?
    pub fn is_short(&self) -> bool {
        self.scratch.iter().any(|scratch| scratch.free.is_empty())
    }

    /// Is a slot free, and one more for whom they are meant?
    pub fn has_spare(&self, way: Way) -> bool {
        self.scratch[way as usize].free.len() > 1
    }

    /// A slot for a copy that is about to be enqueued, if one is free.
    pub fn lend(&mut self, way: Way) -> Option<SumSlot> {
        let index = self.scratch[way as usize].free.pop()?;
        Some(SumSlot { way, index })
    }

    /// Takes back the slot of a copy that failed.
    pub fn take_back(&mut self, at: SumSlot) {
        self.scratch[at.way as usize].free.push(at.index);
    }

    /// Enqueues the sum of `range` on the at's lane, and its way to the host.
    ///
    /// # Errors
    /// Those of [`Backend::launch`] and [`Backend::copy_out`]; a part may have been enqueued.
    pub fn enqueue(
        &self,
        backend: &mut dyn Backend,
        at: SumSlot,
        range: DeviceRange,
    ) -> Result<()> {
        let scratch = &self.scratch[at.way as usize];
        let sum = scratch.range.part(Bytes(u64::from(at.index) * SUM_BYTES.0), SUM_BYTES)?;
        let mirrored = self.mirror.trunk(self.place(at), SUM_BYTES)?;
        assert!(mirrored.len() == SUM_BYTES, "a registration ends between two sums");
        kernels::clear(backend, sum, scratch.stream)?;
        kernels::checksum(backend, range, sum, scratch.stream)?;
        backend.copy_out(mirrored, sum, scratch.stream)
    }

    /// A copy-out was enqueued with its sum; `seq` is its end's number. Returns the sum to keep
    /// with the block.
    pub fn left(&mut self, at: SumSlot, storage: StorageId, seq: u64) -> Sum {
        self.uses[at.index as usize] = 1;
        self.leaving.push_back(Leaving { storage, at, seq });
        Sum::Coming(at)
    }

    /// A copy-in, or an eviction without a copy, was enqueued with its sum; `seq` is its end's
    /// number.
    pub fn arrived(&mut self, at: SumSlot, arrival: Arrival, seq: u64) {
        if let Sum::Coming(left) = arrival.sum {
            self.uses[left.index as usize] += 1;
        }
        self.arriving[at.way as usize].push_back(Arriving { arrival, at, seq });
    }

    /// The oldest copy-out on `lane`, if it is known done: whose it was, the sum that was to come,
    /// and the sum.
    ///
    /// # Errors
    /// Those of [`Backend::note`].
    pub fn next_left(
        &mut self,
        backend: &mut dyn Backend,
        lane: &Lane,
    ) -> Result<Option<(StorageId, Sum, Sum)>> {
        let Some(front) = self.leaving.front() else { return Ok(None) };
        if !lane.is_known_done(front.seq) {
            return Ok(None);
        }
        let (storage, at) = (front.storage, front.at);
        let sum = self.read(backend, at)?;
        self.leaving.pop_front();
        self.unuse(at);
        Ok(Some((storage, Sum::Coming(at), Sum::Known(sum))))
    }

    /// The oldest copy-in on `lane`, if it is known done, and whether what arrived is what left. On
    /// the way out: the oldest eviction that copies nothing.
    ///
    /// # Errors
    /// Those of [`Backend::note`].
    pub fn next_arrived(
        &mut self,
        backend: &mut dyn Backend,
        way: Way,
        lane: &Lane,
    ) -> Result<Option<(Arrival, bool)>> {
        let Some(front) = self.arriving[way as usize].front() else { return Ok(None) };
        if !lane.is_known_done(front.seq) {
            return Ok(None);
        }
        let (arrival, at) = (front.arrival, front.at);
        let arrived = self.read(backend, at)?;
        // The copy-in came behind the copy-out of its block (E4), and a sum without a copy on the
        // same lane, so that is done as well.
        let left = match arrival.sum {
            Sum::Known(sum) => sum,
            Sum::Coming(left) => self.read(backend, left)?,
        };
        self.arriving[way as usize].pop_front();
        self.take_back(at);
        if let Sum::Coming(left) = arrival.sum {
            self.unuse(left);
        }
        Ok(Some((arrival, arrived == left)))
    }

    fn unuse(&mut self, at: SumSlot) {
        let uses = &mut self.uses[at.index as usize];
        *uses -= 1;
        if *uses == 0 {
            self.take_back(at);
        }
    }

    /// Where a slot lies in the mirror.
    fn place(&self, at: SumSlot) -> Bytes {
        let slot = at.way as u64 * self.slots_max as u64 + u64::from(at.index);
        Bytes(slot * SUM_BYTES.0)
    }

    /// What a slot says; the end of its copy is known done.
    fn read(&self, backend: &mut dyn Backend, at: SumSlot) -> Result<u64> {
        let place = self.place(at);
        let mirrored = self.mirror.trunk(place, SUM_BYTES)?;
        backend.note(Actor::Host, &[Use::read(mirrored)])?;
        let mut sum = [0; 8];
        self.mirror.read(place, &mut sum)?;
        Ok(u64::from_ne_bytes(sum))
    }
}

fn no_kernels(error: Error) -> Error {
    if error.misuse() != Some(Misuse::BadKernel) {
        return error;
    }
    Error::usage(Misuse::BadKernel, "verify")
        .detail("checksums are made by kernels, and this backend cannot run them")
}
