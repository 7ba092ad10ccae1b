//! What was asked of a device, in order: records, the ring that keeps the last of them, counters.
//!
//! What it is not: a log of strings, or of times. A record is a plain fixed-size value; whether the
//! order recorded is right is for [`crate::hazard`] to say.
//!
//! Invariant: one record per request at the seam, in the order of the requests; writing one
//! allocates nothing.
//!
//! ```text
//!   engine -> Traced<B> -> B        Record { seq, device, op, failed } -> Ring (last n)
//!                  \________________________________________________/ -> Counters, observer
//! ```
//!
//! [`crate::backend`] writes records; the checker, tests and `Stats` read them.

mod ring;
mod site;

pub use ring::{Counters, Ring};
pub use site::{Edge, Site};

use crate::error::Kind;
use crate::unit::{DeviceId, DeviceRange, EventId, Key, Name, PinnedRange, StorageId, StreamId};

/// How bytes are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read only.
    Read,
    /// Every byte is overwritten, none is read.
    Write,
    /// Read and written.
    Update,
    /// The bytes come into being, undefined.
    Alloc,
    /// The bytes go away.
    Free,
}

impl Access {
    /// Does it change the bytes (allocation and release count)?
    pub fn is_write(self) -> bool {
        !matches!(self, Access::Read)
    }

    /// Does it depend on what the bytes were?
    pub fn is_read(self) -> bool {
        matches!(self, Access::Read | Access::Update)
    }
}

/// Bytes of a device or of pinned host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Span {
    /// Bytes of the record's device.
    Device(DeviceRange),
    /// Bytes of page-locked host memory.
    Pinned(PinnedRange),
}

impl Span {
    /// First address and length.
    pub fn parts(self) -> (u64, u64) {
        match self {
            Span::Device(range) => (range.at().0, range.len().0),
            Span::Pinned(range) => (range.at().0, range.len().0),
        }
    }
}

impl From<DeviceRange> for Span {
    fn from(range: DeviceRange) -> Span {
        Span::Device(range)
    }
}

impl From<PinnedRange> for Span {
    fn from(range: PinnedRange) -> Span {
        Span::Pinned(range)
    }
}

/// One use of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Use {
    /// How they are used.
    pub access: Access,
    /// Which bytes.
    pub span: Span,
}

impl Use {
    /// A read of `span`.
    pub fn read(span: impl Into<Span>) -> Use {
        Use { access: Access::Read, span: span.into() }
    }

    /// A write of all of `span`.
    pub fn write(span: impl Into<Span>) -> Use {
        Use { access: Access::Write, span: span.into() }
    }
}

/// Who uses bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Actor {
    /// The thread that calls, at the time of the call.
    Host,
    /// A stream, when its queue gets there.
    Stream(StreamId),
    /// A worker thread (of the disk tier), by number.
    Worker(u32),
}

/// What was asked of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// A stream came into being here (created, or borrowed from its owner).
    OpenStream(StreamId),
    /// A stream was destroyed or given back.
    CloseStream(StreamId),
    /// An event was created; it is fresh.
    OpenEvent(EventId),
    /// An event was destroyed.
    CloseEvent(EventId),
    /// The event now stands for everything enqueued on the stream so far.
    Record {
        /// The event.
        event: EventId,
        /// The stream.
        stream: StreamId,
    },
    /// The stream's later work waits for the event's current recording.
    Wait {
        /// The stream that waits.
        stream: StreamId,
        /// The event waited for.
        event: EventId,
        /// Who asked.
        site: Site,
    },
    /// The host asked whether the event's recording is done.
    Query {
        /// The event.
        event: EventId,
        /// Who asked.
        site: Site,
        /// The answer.
        done: bool,
    },
    /// The host asked whether all is done that was enqueued on the stream.
    Idle {
        /// The stream.
        stream: StreamId,
        /// Who asked.
        site: Site,
        /// The answer.
        done: bool,
    },
    /// Device bytes were taken from the driver, in the order of a stream. The driver orders this
    /// behind earlier releases of the same bytes.
    Alloc {
        /// The bytes.
        range: DeviceRange,
        /// The stream.
        stream: StreamId,
    },
    /// Device bytes were given back to the driver, in the order of a stream.
    Free {
        /// The bytes.
        range: DeviceRange,
        /// The stream.
        stream: StreamId,
    },
    /// Memory was mapped at device addresses that were reserved, at once and by the host: the bytes
    /// come into being.
    Map {
        /// The bytes.
        range: DeviceRange,
    },
    /// The memory was taken away from the addresses, at once and by the host: the bytes are gone.
    Unmap {
        /// The bytes.
        range: DeviceRange,
    },
    /// A copy from device to pinned memory.
    CopyOut {
        /// The bytes read.
        from: DeviceRange,
        /// The bytes written.
        to: PinnedRange,
        /// The stream.
        stream: StreamId,
    },
    /// A copy from pinned to device memory.
    CopyIn {
        /// The bytes read.
        from: PinnedRange,
        /// The bytes written.
        to: DeviceRange,
        /// The stream.
        stream: StreamId,
    },
    /// A kernel was enqueued; its uses follow as [`Op::Use`] records.
    Launch {
        /// The kernel's name.
        kernel: &'static str,
        /// The stream.
        stream: StreamId,
    },
    /// Somebody's use of bytes: a kernel's argument, what a framework said with `note`, the host.
    Use {
        /// Who uses them.
        by: Actor,
        /// What and how.
        uses: Use,
    },
    /// These device bytes now belong to a storage.
    Name {
        /// The storage.
        storage: StorageId,
        /// Its name.
        name: Name,
        /// Its bytes.
        range: DeviceRange,
    },
    /// The host waited for everything enqueued on the device.
    Sync,
}

/// One request, as it passed the seam.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Position in the trace, from 0.
    pub seq: u64,
    /// The device.
    pub device: DeviceId,
    /// What was asked.
    pub op: Op,
    /// Why it was refused or failed, if so; then it had no effect.
    pub failed: Option<Kind>,
}

impl Record {
    /// Folds the record into a running hash that is the same on every machine and in every run:
    /// the process-wide tags of keys stay out of it.
    pub fn digest(&self, hash: &mut Digest) {
        use std::hash::Hash;
        struct Stable<'a>(&'a mut Digest);
        impl std::hash::Hasher for Stable<'_> {
            fn finish(&self) -> u64 {
                self.0.0
            }
            fn write(&mut self, bytes: &[u8]) {
                self.0.bytes(bytes);
            }
        }
        let mut plain = *self;
        plain.op = plain.op.without_owners();
        plain.device.hash(&mut Stable(hash));
        plain.op.hash(&mut Stable(hash));
        plain.failed.hash(&mut Stable(hash));
    }
}

impl Op {
    fn without_owners(self) -> Op {
        fn bare<T: From<Key> + Into<Key>>(id: T) -> T {
            T::from(Key { owner: 0, ..id.into() })
        }
        match self {
            Op::OpenStream(s) => Op::OpenStream(bare(s)),
            Op::CloseStream(s) => Op::CloseStream(bare(s)),
            Op::OpenEvent(e) => Op::OpenEvent(bare(e)),
            Op::CloseEvent(e) => Op::CloseEvent(bare(e)),
            Op::Record { event, stream } => Op::Record { event: bare(event), stream: bare(stream) },
            Op::Wait { stream, event, site } => {
                Op::Wait { stream: bare(stream), event: bare(event), site }
            }
            Op::Query { event, site, done } => Op::Query { event: bare(event), site, done },
            Op::Idle { stream, site, done } => Op::Idle { stream: bare(stream), site, done },
            Op::Alloc { range, stream } => Op::Alloc { range, stream: bare(stream) },
            Op::Free { range, stream } => Op::Free { range, stream: bare(stream) },
            Op::CopyOut { from, to, stream } => Op::CopyOut { from, to, stream: bare(stream) },
            Op::CopyIn { from, to, stream } => Op::CopyIn { from, to, stream: bare(stream) },
            Op::Launch { kernel, stream } => Op::Launch { kernel, stream: bare(stream) },
            Op::Use { by: Actor::Stream(s), uses } => Op::Use { by: Actor::Stream(bare(s)), uses },
            Op::Name { storage, name, range } => Op::Name { storage: bare(storage), name, range },
            Op::Map { .. } | Op::Unmap { .. } | Op::Use { .. } | Op::Sync => self,
        }
    }
}

/// A 64-bit FNV-1a hash of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(pub u64);

impl Default for Digest {
    fn default() -> Digest {
        Digest(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Folds bytes in.
    pub fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(seq: u64) -> Record {
        Record { seq, device: DeviceId(0), op: Op::Sync, failed: None }
    }

    #[test]
    fn a_full_ring_forgets_the_oldest_first() {
        let mut ring = Ring::new(3);
        for seq in 0..5 {
            ring.push(record(seq));
        }
        assert_eq!(ring.iter().map(|r| r.seq).collect::<Vec<_>>(), [2, 3, 4]);
        let mut none = Ring::new(0);
        none.push(record(0));
        assert_eq!(none.iter().count(), 0);
    }

    #[test]
    fn a_digest_ignores_the_tags_that_differ_between_runs() {
        let of = |owner| {
            let stream = StreamId(Key { owner, index: 1, generation: 0 });
            let mut hash = Digest::default();
            let op = Op::OpenStream(stream);
            Record { op, ..record(0) }.digest(&mut hash);
            hash
        };
        assert_eq!(of(1), of(2));
        assert_ne!(of(1), Digest::default());
    }
}
