//! Which part of which extent is in what use: split, merged, and found by size in constant time.
//!
//! What it is not: it knows no addresses, owners or events; an extent is a number and a size.
//!
//! Invariant: the chunks of an extent lie side by side and cover it exactly; no two free ones are
//! neighbours; the bytes counted per use add up to the extents' sizes.
//!
//! ```text
//!   extent 0   | lent | free      | idle | lent |        bins[bin(size)] -> free, free, free
//!              chunk 0  chunk 7     3      9             map: one bit per bin that is not empty
//!                 take: split from the front             free: merge with free neighbours
//! ```
//!
//! Only [`crate::pinned`] uses it.
#![deny(unsafe_code)]

use super::class::{self, BINS, GRAIN};

/// No chunk.
pub(super) const NONE: u32 = u32::MAX;

/// What a chunk is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// The number names no chunk now.
    Vacant,
    /// Merged and in a bin: any request may split it.
    Free,
    /// Ready for the next request of exactly its size; not merged yet.
    Idle,
    /// With a borrower.
    Lent,
    /// Given back while a copy may still run.
    Busy,
    /// Dropped while a copy may still run; nobody knows until when.
    Quarantined,
}

/// A doubly linked list of chunks, threaded through the chunks themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    /// First chunk.
    pub(super) head: u32,
    tail: u32,
}

impl List {
    /// A list without chunks.
    pub(super) const EMPTY: List = List { head: NONE, tail: NONE };
}

/// Which of a chunk's two pairs of links a list runs through.
#[derive(Clone, Copy, Debug)]
pub(super) enum Thread {
    /// By size: bins, shelves.
    Size = 0,
    /// By age.
    Age = 1,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

#[derive(Clone, Debug)]
struct Chunk {
    offset: u64,
    size: u64,
    extent: u32,
    /// Neighbours in the extent.
    before: u32,
    after: u32,
    links: [Link; 2],
    used: Use,
}

/// All chunks of all extents.
#[derive(Debug)]
pub(super) struct Space {
    chunks: Vec<Chunk>,
    /// The last chunk of each extent.
    lasts: Vec<u32>,
    vacant: List,
    bins: Box<[List; BINS]>,
    map: [u64; BINS.div_ceil(64)],
    bytes: [u64; 6],
    total: u64,
}

impl Space {
    pub(super) fn new() -> Space {
        Space {
            chunks: Vec::new(),
            lasts: Vec::new(),
            vacant: List::EMPTY,
            bins: Box::new([List::EMPTY; BINS]),
            map: [0; BINS.div_ceil(64)],
            bytes: [0; 6],
            total: 0,
        }
    }

    /// Numbers of chunks are less than this.
    pub(super) fn numbers(&self) -> u32 {
        self.chunks.len() as u32
    }

    pub(super) fn offset(&self, id: u32) -> u64 {
        self.chunks[id as usize].offset
    }

    pub(super) fn size(&self, id: u32) -> u64 {
        self.chunks[id as usize].size
    }

    pub(super) fn extent(&self, id: u32) -> u32 {
        self.chunks[id as usize].extent
    }

    pub(super) fn used(&self, id: u32) -> Use {
        self.chunks[id as usize].used
    }

    /// The neighbour behind, or [`NONE`] at the extent's end.
    pub(super) fn after(&self, id: u32) -> u32 {
        self.chunks[id as usize].after
    }

    /// Bytes in one use.
    pub(super) fn bytes(&self, used: Use) -> u64 {
        self.bytes[used as usize]
    }

    /// Bytes of all extents.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Adds an extent as one free chunk, and names that chunk: it stays the extent's first.
    pub(super) fn add(&mut self, extent: u32, size: u64) -> u32 {
        let id = self.number(Chunk {
            offset: 0,
            size,
            extent,
            before: NONE,
            after: NONE,
            links: [Link { prev: NONE, next: NONE }; 2],
            used: Use::Free,
        });
        if self.lasts.len() <= extent as usize {
            self.lasts.resize(extent as usize + 1, NONE);
        }
        self.lasts[extent as usize] = id;
        self.total += size;
        self.bytes[Use::Free as usize] += size;
        self.shelve(id);
        id
    }

    /// Adds `more` free bytes at an extent's end.
    pub(super) fn extend(&mut self, extent: u32, more: u64) {
        let last = self.lasts[extent as usize];
        self.total += more;
        self.bytes[Use::Free as usize] += more;
        if self.used(last) == Use::Free {
            self.unshelve(last);
            self.chunks[last as usize].size += more;
            return self.shelve(last);
        }
        let whole = self.chunks[last as usize].clone();
        let id = self.number(Chunk {
            offset: whole.offset + whole.size,
            size: more,
            before: last,
            used: Use::Free,
            ..whole
        });
        self.chunks[last as usize].after = id;
        self.lasts[extent as usize] = id;
        self.shelve(id);
    }

    /// Is the extent whose first chunk this is one free chunk?
    pub(super) fn is_whole(&self, first: u32) -> bool {
        let chunk = &self.chunks[first as usize];
        chunk.used == Use::Free && chunk.before == NONE && chunk.after == NONE
    }

    /// Takes out an extent that is one free chunk.
    pub(super) fn remove(&mut self, first: u32) {
        assert!(self.is_whole(first), "an extent goes only when all of it is free");
        self.unshelve(first);
        let size = self.size(first);
        self.total -= size;
        self.bytes[Use::Free as usize] -= size;
        self.forget(first);
    }

    /// A chunk of exactly `room` bytes out of a free one, lent; `None` where no free one has room.
    pub(super) fn take(&mut self, room: u64) -> Option<u32> {
        let bin = class::bin(room);
        // Above 16 MiB the classes are finer than the bins: some chunks of the bin may be smaller.
        let mut id = self.bins[bin].head;
        while id != NONE && self.size(id) < room {
            id = self.next(id, Thread::Size);
        }
        if id == NONE {
            id = self.bins[self.bin_from(bin + 1)?].head;
        }
        self.unshelve(id);
        if self.size(id) > room {
            self.split(id, room);
        }
        self.reuse(id, Use::Lent);
        Some(id)
    }

    /// Lends an extent that is one free chunk, all of it.
    pub(super) fn take_whole(&mut self, first: u32) {
        assert!(self.is_whole(first), "an extent is lent whole when all of it is free");
        self.unshelve(first);
        self.reuse(first, Use::Lent);
    }

    /// Makes a chunk free and merges it with its free neighbours.
    pub(super) fn free(&mut self, id: u32) {
        self.reuse(id, Use::Free);
        let after = self.chunks[id as usize].after;
        if after != NONE && self.used(after) == Use::Free {
            self.unshelve(after);
            self.absorb(id, after);
        }
        let before = self.chunks[id as usize].before;
        let mut merged = id;
        if before != NONE && self.used(before) == Use::Free {
            self.unshelve(before);
            self.absorb(before, id);
            merged = before;
        }
        self.shelve(merged);
    }

    /// Changes a chunk's use and nothing else.
    pub(super) fn reuse(&mut self, id: u32, used: Use) {
        let chunk = &mut self.chunks[id as usize];
        self.bytes[chunk.used as usize] -= chunk.size;
        self.bytes[used as usize] += chunk.size;
        chunk.used = used;
        debug_assert_eq!(
            self.bytes.iter().sum::<u64>(),
            self.total,
            "free, idle, lent, busy and quarantined bytes add up to what is pinned"
        );
    }

    /// Size of the largest free chunk; idle chunks are not merged and do not count.
    pub(super) fn largest_free(&self) -> u64 {
        let Some(word) = self.map.iter().rposition(|&word| word != 0) else { return 0 };
        let bin = word * 64 + 63 - self.map[word].leading_zeros() as usize;
        let mut largest = 0;
        let mut id = self.bins[bin].head;
        while id != NONE {
            largest = largest.max(self.size(id));
            id = self.next(id, Thread::Size);
        }
        largest
    }

    /// The chunk behind `id` in the list it is in.
    pub(super) fn next(&self, id: u32, thread: Thread) -> u32 {
        self.chunks[id as usize].links[thread as usize].next
    }

    pub(super) fn push_front(&mut self, list: &mut List, thread: Thread, id: u32) {
        self.chunks[id as usize].links[thread as usize] = Link { prev: NONE, next: list.head };
        match list.head {
            NONE => list.tail = id,
            head => self.chunks[head as usize].links[thread as usize].prev = id,
        }
        list.head = id;
    }

    pub(super) fn push_back(&mut self, list: &mut List, thread: Thread, id: u32) {
        self.chunks[id as usize].links[thread as usize] = Link { prev: list.tail, next: NONE };
        match list.tail {
            NONE => list.head = id,
            tail => self.chunks[tail as usize].links[thread as usize].next = id,
        }
        list.tail = id;
    }

    pub(super) fn unlink(&mut self, list: &mut List, thread: Thread, id: u32) {
        let Link { prev, next } = self.chunks[id as usize].links[thread as usize];
        match prev {
            NONE => list.head = next,
            prev => self.chunks[prev as usize].links[thread as usize].next = next,
        }
        match next {
            NONE => list.tail = prev,
            next => self.chunks[next as usize].links[thread as usize].prev = prev,
        }
    }

    /// Stops the program where chunks, bins and counts do not fit together.
    pub(super) fn audit(&self) {
        let (mut bytes, mut binned) = ([0; 6], 0);
        for (id, chunk) in self.chunks.iter().enumerate() {
            if chunk.used == Use::Vacant {
                continue;
            }
            bytes[chunk.used as usize] += chunk.size;
            assert!(chunk.size > 0 && chunk.size.is_multiple_of(GRAIN), "a chunk is whole pages");
            if chunk.after != NONE {
                let after = &self.chunks[chunk.after as usize];
                assert_eq!(after.before, id as u32, "neighbours know each other");
                let both_free = chunk.used == Use::Free && after.used == Use::Free;
                assert!(!both_free, "free neighbours are merged");
            }
        }
        assert_eq!(bytes, self.bytes, "the bytes of every use are counted");
        assert_eq!(bytes.iter().sum::<u64>(), self.total, "every byte is in one use");
        for (bin, list) in self.bins.iter().enumerate() {
            let bit = self.map[bin / 64] >> (bin % 64) & 1;
            assert_eq!(bit == 1, list.head != NONE, "a bit says which bins are not empty");
            let mut id = list.head;
            while id != NONE {
                assert_eq!(self.used(id), Use::Free, "only free chunks are in bins");
                assert_eq!(class::bin(self.size(id)), bin, "a chunk is in its size's bin");
                binned += self.size(id);
                id = self.next(id, Thread::Size);
            }
        }
        assert_eq!(binned, self.bytes(Use::Free), "all free chunks are in bins");
    }

    /// The first bin from `bin` on that is not empty.
    fn bin_from(&self, bin: usize) -> Option<usize> {
        let mut word = bin / 64;
        let mut bits = *self.map.get(word)? & (!0 << (bin % 64));
        while bits == 0 {
            word += 1;
            bits = *self.map.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    fn shelve(&mut self, id: u32) {
        let bin = class::bin(self.size(id));
        let mut list = self.bins[bin];
        self.push_front(&mut list, Thread::Size, id);
        self.bins[bin] = list;
        self.map[bin / 64] |= 1 << (bin % 64);
    }

    fn unshelve(&mut self, id: u32) {
        let bin = class::bin(self.size(id));
        let mut list = self.bins[bin];
        self.unlink(&mut list, Thread::Size, id);
        self.bins[bin] = list;
        if list.head == NONE {
            self.map[bin / 64] &= !(1 << (bin % 64));
        }
    }

    /// Leaves `room` bytes in the chunk; the rest becomes a free chunk behind it.
    fn split(&mut self, id: u32, room: u64) {
        let whole = self.chunks[id as usize].clone();
        let rest = self.number(Chunk {
            offset: whole.offset + room,
            size: whole.size - room,
            before: id,
            ..whole
        });
        self.chunks[id as usize].size = room;
        self.chunks[id as usize].after = rest;
        match whole.after {
            NONE => self.lasts[whole.extent as usize] = rest,
            after => self.chunks[after as usize].before = rest,
        }
        self.shelve(rest);
    }

    /// Adds `right` to `left`, its neighbour before; both are free and in no bin.
    fn absorb(&mut self, left: u32, right: u32) {
        let Chunk { size, after, extent, .. } = self.chunks[right as usize];
        self.chunks[left as usize].size += size;
        self.chunks[left as usize].after = after;
        match after {
            NONE => self.lasts[extent as usize] = left,
            after => self.chunks[after as usize].before = left,
        }
        self.forget(right);
    }

    fn number(&mut self, chunk: Chunk) -> u32 {
        let id = self.vacant.head;
        if id == NONE {
            self.chunks.push(chunk);
            return self.chunks.len() as u32 - 1;
        }
        let mut vacant = self.vacant;
        self.unlink(&mut vacant, Thread::Size, id);
        self.vacant = vacant;
        self.chunks[id as usize] = chunk;
        id
    }

    /// Makes the number vacant; the chunk's bytes are counted elsewhere already.
    fn forget(&mut self, id: u32) {
        self.chunks[id as usize].used = Use::Vacant;
        let mut vacant = self.vacant;
        self.push_front(&mut vacant, Thread::Size, id);
        self.vacant = vacant;
    }
}
