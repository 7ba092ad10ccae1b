//! A stream of the simulated device: a first-in first-out queue of ops.
//!
//! What it is not: it does not decide when an op runs; a clock does.
//!
//! Invariant: op number `done + 1` is at the head; a mark is done when its queue's `done` has
//! reached it, or the queue is gone (a queue goes only when it is closed and empty).
//!
//! ```text
//!   enqueued = 7      done = 4
//!   [ 5 copy | 6 record | 7 wait(mark) ]      Mark { slot, uid, seq: 6 }: what an event recorded
//! ```
//!
//! The simulated device may use it.

use super::launch::Run;
use super::memory::HostPtr;
use crate::unit::Key;
use std::collections::VecDeque;

/// A place in a queue: everything up to op `seq`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark {
    pub(super) slot: u32,
    pub(super) uid: u32,
    pub(super) seq: u64,
}

impl Mark {
    /// Are both of one queue?
    pub(super) fn same(self, other: Mark) -> bool {
        (self.slot, self.uid) == (other.slot, other.uid)
    }
}

/// Which way a copy goes; the index of its copy engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Out = 0,
    In = 1,
}

/// Copies move in pieces of this many bytes.
pub(super) const PIECE_BYTES: usize = 256;

/// A copy, perhaps in flight.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) to: HostPtr,
    pub(super) from: HostPtr,
    pub(super) len: usize,
    pub(super) way: Way,
    /// Regions (pinned or adopted) that must stay while it is queued; 0 means none.
    pub(super) holds: [u64; 2],
    /// It takes so many times as long as it should.
    pub(super) slow: u32,
    /// Pieces moved so far, in the order `first`, `first + stride`, ... modulo all pieces.
    moved: usize,
    first: usize,
    stride: usize,
}

impl Copy {
    pub(super) fn new(to: HostPtr, from: HostPtr, len: usize, way: Way, holds: [u64; 2]) -> Copy {
        Copy { to, from, len, way, holds, slow: 1, moved: 0, first: 0, stride: 1 }
    }

    pub(super) fn pieces(&self) -> usize {
        self.len.div_ceil(PIECE_BYTES)
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.moved == 0
    }

    pub(super) fn pieces_left(&self) -> usize {
        self.pieces() - self.moved
    }

    /// Sets the order of the pieces, before the first has moved.
    pub(super) fn shuffle(&mut self, first: usize, stride: usize) {
        assert!(self.is_fresh(), "the order of pieces is set before the first moves");
        let pieces = self.pieces();
        let mut stride = stride % pieces;
        // Only a stride that shares no factor with the number of pieces visits each of them.
        while gcd(stride, pieces) != 1 {
            stride += 1;
        }
        (self.first, self.stride) = (first % pieces, stride);
    }

    /// Moves the next `count` pieces.
    pub(super) fn advance(&mut self, count: usize) {
        if self.is_fresh() && count == self.pieces() {
            self.to.copy_from(self.from, 0, self.len);
            self.moved = count;
            return;
        }
        let pieces = self.pieces();
        for step in self.moved..self.moved + count {
            let piece = (self.first + step * self.stride) % pieces;
            let at = piece * PIECE_BYTES;
            self.to.copy_from(self.from, at, PIECE_BYTES.min(self.len - at));
        }
        self.moved += count;
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// One op of a queue.
#[derive(Debug)]
pub(super) enum Op {
    /// An event's recording; names the event only where its time is wanted.
    Record(Option<(usize, Key)>),
    /// Later ops wait for the mark.
    Wait(Mark),
    /// An allocation or a free: the bytes are set to one value.
    Fill(HostPtr, usize, u8),
    /// A copy.
    Copy(Copy),
    /// A kernel.
    Run(Box<Run>),
}

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) uid: u32,
    pub(super) device: u32,
    /// Everything enqueued is done before the call returns.
    pub(super) host: bool,
    /// Not closed by its owner.
    pub(super) open: bool,
    pub(super) capturing: bool,
    /// Calls that will find it captured by a third party.
    pub(super) captured: u32,
    /// Somebody knows it by its raw handle.
    pub(super) adopted: bool,
    /// Steps, or microseconds, that it stands still for.
    pub(super) stalled: u32,
    /// The head is on the timed device.
    pub(super) running: bool,
    pub(super) done: u64,
    pub(super) ops: VecDeque<Op>,
}

impl Queue {
    pub(super) fn new(uid: u32, device: u32, host: bool) -> Queue {
        Queue {
            uid,
            device,
            host,
            open: true,
            capturing: false,
            captured: 0,
            adopted: false,
            stalled: 0,
            running: false,
            done: 0,
            ops: VecDeque::new(),
        }
    }

    /// Is it being captured? Each time it is asked, a third party's capture comes nearer its end.
    pub(super) fn is_capturing(&mut self) -> bool {
        let captured = self.captured > 0;
        self.captured = self.captured.saturating_sub(1);
        self.capturing || captured
    }

    /// Number of the op enqueued last.
    pub(super) fn enqueued(&self) -> u64 {
        self.done + self.ops.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any order, stopped anywhere: what has moved is as many whole pieces as were counted.
    #[test]
    fn every_order_of_pieces_moves_each_piece_once() {
        for len in [1, 255, 256, 257, 1_000, 4_096, 4_099] {
            let mut source = vec![7_u8; len];
            for (first, stride) in [(0, 1), (3, 2), (5, 4), (1, 16), (7, 0), (2, 12)] {
                let mut target = vec![0_u8; len];
                let (to, from) =
                    (HostPtr::new(target.as_mut_ptr()), HostPtr::new(source.as_mut_ptr()));
                let mut copy = Copy::new(to, from, len, Way::Out, [0; 2]);
                copy.shuffle(first, stride);
                for moved in 1..=copy.pieces() {
                    copy.advance(1);
                    let whole = target.chunks(PIECE_BYTES).filter(|piece| piece.contains(&7));
                    assert_eq!(whole.count(), moved);
                    let torn = |piece: &&[u8]| piece.contains(&7) && piece.contains(&0);
                    assert_eq!(target.chunks(PIECE_BYTES).filter(torn).count(), 0);
                }
                assert_eq!(copy.pieces_left(), 0);
                assert_eq!(target, source);
            }
        }
    }
}
