//! The records kept, and the counts derived from them.
//!
//! What it is not: a trace. A ring forgets the oldest; whoever wants all of them observes the seam.
//!
//! Invariant: neither grows: pushing a record allocates nothing.
//!
//! ```text
//!   Record -> Ring (the last n) ; Record -> Counters (copies, bytes, waits, queries, ...)
//! ```
//!
//! `Traced` fills both; reports read them.

use super::{Op, Record};

/// The last records, in a buffer that never grows.
#[derive(Debug)]
pub struct Ring {
    records: Vec<Record>,
    capacity: usize,
    next: usize,
}

impl Ring {
    /// A ring that keeps the last `capacity` records (none where that is zero).
    pub fn new(capacity: usize) -> Ring {
        Ring { records: Vec::with_capacity(capacity), capacity, next: 0 }
    }

    /// Keeps the record, in place of the oldest where the ring is full.
    pub fn push(&mut self, record: Record) {
        if self.capacity == 0 {
            return;
        }
        if self.records.len() < self.capacity {
            self.records.push(record);
        } else {
            self.records[self.next] = record;
        }
        self.next = (self.next + 1) % self.capacity;
    }

    /// The records kept, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Record> {
        let split = if self.records.len() < self.capacity { 0 } else { self.next };
        self.records[split..].iter().chain(&self.records[..split])
    }
}

/// Counts of what passed the seam; derived from the records alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Copies from the device.
    pub copies_out: u64,
    /// Copies to the device.
    pub copies_in: u64,
    /// Bytes of the copies from the device.
    pub bytes_out: u64,
    /// Bytes of the copies to the device.
    pub bytes_in: u64,
    /// Event recordings.
    pub records: u64,
    /// Waits enqueued on streams.
    pub waits: u64,
    /// Questions whether an event is done.
    pub queries: u64,
    /// Kernels.
    pub launches: u64,
    /// Device allocations.
    pub allocs: u64,
    /// Device releases.
    pub frees: u64,
    /// Memory mapped at reserved addresses.
    pub maps: u64,
    /// Memory taken away from them.
    pub unmaps: u64,
    /// Events created; none in a steady state.
    pub events_opened: u64,
    /// Waits of the host for the whole device; none between steps.
    pub syncs: u64,
    /// Requests refused or failed.
    pub failures: u64,
}

impl Counters {
    /// Counts one record.
    pub fn count(&mut self, record: &Record) {
        if record.failed.is_some() {
            self.failures += 1;
            return;
        }
        match record.op {
            Op::CopyOut { from, .. } => {
                self.copies_out += 1;
                self.bytes_out += from.len().0;
            }
            Op::CopyIn { to, .. } => {
                self.copies_in += 1;
                self.bytes_in += to.len().0;
            }
            Op::Record { .. } => self.records += 1,
            Op::Wait { .. } => self.waits += 1,
            Op::Query { .. } | Op::Idle { .. } => self.queries += 1,
            Op::Launch { .. } => self.launches += 1,
            Op::Alloc { .. } => self.allocs += 1,
            Op::Free { .. } => self.frees += 1,
            Op::Map { .. } => self.maps += 1,
            Op::Unmap { .. } => self.unmaps += 1,
            Op::OpenEvent(_) => self.events_opened += 1,
            Op::Sync => self.syncs += 1,
            Op::OpenStream(_)
            | Op::CloseStream(_)
            | Op::CloseEvent(_)
            | Op::Use { .. }
            | Op::Name { .. } => {}
        }
    }
}
