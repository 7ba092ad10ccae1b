//! What a failing driver leaves in doubt: a copy whose end no event marks.
//!
//! What it is not: part of any run that goes well. Here a verb may wait on the host, and for long.
//!
//! Invariant: while it is not proved that a copy ended, what it touches is lent, freed and named to
//! nobody. The engine keeps what is its own, and no verb goes on before the proof: the end, asked
//! for again, or a wait for the whole device. So there is one such copy at most. Where the bytes
//! are a framework's, who was told that they are its own again, the device is given up: the
//! framework hears of a loss, and nothing is touched any more.
//!
//! ```text
//!   |=copy=| record refused -> sync refused -> Unmarked { block or target }
//!   next verb: record on the same lane   -> an end: as after any copy that failed half way
//!              refused: sync             -> all is done
//!              refused: the verb is refused          drop: the block to quarantine, the rest leaks
//! ```
//!
//! Part of the engine.

use super::Engine;
use crate::backend::Backend;
use crate::copy::End;
use crate::error::{Error, Kind, Result};
use crate::pinned::Block;
use crate::storage::Inward;
use crate::stream::Point;
use crate::trace::Site;
use crate::unit::{Bytes, DeviceRange, StorageId, StreamId};
use std::time::{Duration, Instant};

/// A copy without an end, and what the engine keeps for it.
#[derive(Debug)]
pub(super) enum Unmarked {
    /// A copy-out: it fills the block, and reads the storage's device bytes.
    Out { storage: StorageId, on: usize, block: Block },
    /// A copy-in: it reads the storage's block, and writes device bytes of the engine's own.
    In { storage: StorageId, on: usize, inward: Inward, target: DeviceRange },
}

impl Unmarked {
    /// Bytes kept for it alone.
    pub(super) fn len(&self) -> Bytes {
        match self {
            Unmarked::Out { block, .. } => block.len(),
            Unmarked::In { target, .. } => target.len(),
        }
    }
}

/// Between two questions.
const PAUSE: Duration = Duration::from_micros(50);

impl Engine {
    /// A copy was left without an end.
    pub(super) fn in_doubt(&mut self, unmarked: Unmarked) {
        assert!(self.unmarked.is_none(), "no verb goes on while a copy has no end");
        self.unmarked = Some(unmarked);
    }

    /// Proves that the copy without an end is over, or will be at a point that is known.
    pub(super) fn prove(&mut self) -> Result<()> {
        let Some(unmarked) = self.unmarked.take() else { return Ok(()) };
        let (lane, storage) = match &unmarked {
            Unmarked::Out { storage, .. } => (&mut self.out, *storage),
            Unmarked::In { storage, inward: Inward::Ahead, .. } => (&mut self.ahead, *storage),
            Unmarked::In { storage, inward: Inward::Urgent, .. } => (&mut self.urgent, *storage),
        };
        let marked = lane.mark_left(&mut self.backend, &mut self.events, storage);
        let proof = match marked {
            Ok(end) => Ok(Some(end)),
            Err(error) if error.is_lost() => Err(error),
            Err(error) => match lane.wait_for_all(&mut self.backend) {
                Ok(()) => Ok(None),
                Err(lost) if lost.is_lost() => Err(lost),
                Err(_) => Err(error),
            },
        };
        match self.seen(proof) {
            Ok(end) => self.proved(unmarked, end),
            Err(error) => {
                self.unmarked = Some(unmarked);
                Err(error)
            }
        }
    }

    /// The copy ends at `end`, or is over.
    fn proved(&mut self, unmarked: Unmarked, end: Option<End>) -> Result<()> {
        match (unmarked, end) {
            (Unmarked::Out { block, .. }, None) => self.give_back(block, None),
            (Unmarked::Out { storage, on, block }, Some(end)) => {
                self.left_by_copy_out(storage, on, block, end)
            }
            (Unmarked::In { storage, on, inward, target }, end) => {
                let ready = end.map(|end| (inward, end));
                self.undo_target(storage, target, on, ready, true)
            }
        }
    }

    /// Orders a stream behind a point where there is no going back. A driver that refuses is waited
    /// for: it is failing, and there is no other proof.
    pub(super) fn pass(&mut self, point: &Point, stream: StreamId, site: Site) -> Result<()> {
        let waited = point.wait(&mut self.backend, stream, site);
        let Some(refused) = self.refusal(waited)? else { return Ok(()) };
        let synced = self.backend.sync();
        if self.refusal(synced)?.is_none() {
            point.set_done();
            return Ok(());
        }
        // A capture refuses both of them, but not the question.
        let start = Instant::now();
        loop {
            let done = point.done(&mut self.backend, Site::TransferQuery);
            if done == Ok(true) {
                return Ok(());
            }
            self.refusal(done)?;
            if start.elapsed() >= self.options.drop_deadline {
                return Err(self.give_up(&refused));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Bytes that a framework takes for its own again may still be touched, and nothing says until
    /// when: only a loss tells it so.
    pub(super) fn give_up(&mut self, cause: &Error) -> Error {
        let lost = || {
            if cause.is_lost() {
                return cause.clone();
            }
            Error::new(Kind::Lost, cause.op())
                .detail(format!("copies run whose end neither an event nor a wait tells: {cause}"))
        };
        self.lost.get_or_insert_with(lost).clone()
    }
}
