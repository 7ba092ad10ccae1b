//! What the framework of a run does with rows: gathers them, lets theirs go, and has them back.
//!
//! What it is not: it does not say which verb comes when; the run's dice do. No kernel moves the
//! rows: the pools of runs have no room for a table.
//!
//! Invariant: rows are given back as soon as a verb says that they may be.
//!
//! ```text
//!   take, fill -> gather, gathered -> give      take -> scatter -> check -> give      discard
//! ```

use crate::machine::{Go, Machine, insist, is_expected};
use lightering::engine::Batch;
use lightering::pack::Strip;
use lightering::{Bytes, DeviceRange};

/// Rows that are in a block.
pub(crate) struct Rows {
    batch: Batch,
    len: Bytes,
    /// Pattern that they must show wherever they are scattered to.
    seed: u64,
}

/// So many batches at once leave the pool some room for storages.
const BATCHES_MAX: usize = 3;
const LENS: [u64; 4] = [16, 255, 600, 1024];

/// All bytes of a range, as two rows where it has so many: that is two copies.
fn strips(range: DeviceRange) -> ([Strip; 2], usize) {
    let whole = Strip::whole(range).unwrap();
    if range.len().0 < 256 {
        return ([whole; 2], 1);
    }
    let first = Bytes(range.len().0 / 3);
    let part = |at, len| Strip::whole(range.part(at, len).unwrap()).unwrap();
    ([part(Bytes::ZERO, first), part(first, range.len() - first)], 2)
}

impl Machine<'_> {
    pub(crate) fn gather(&mut self, s: usize) -> Go {
        if self.batches.len() == BATCHES_MAX {
            return self.discard();
        }
        let len = Bytes(self.dice.one(&LENS));
        let Some(range) = self.take(s, len)? else { return Ok(()) };
        let (seed, on) = (self.seed(), self.bench.streams[s].engine);
        self.fill(s, range, seed)?;
        let (strips, count) = strips(range);
        let gathered = self.engine.lock().gather(&strips[..count], on, "rows");
        match gathered {
            Ok(batch) => {
                insist(self.plan, || self.engine.lock().gathered(&batch, on))?;
                self.batches.push(Rows { batch, len, seed });
            }
            Err(error) => is_expected(self.plan, error)?,
        }
        // The stream is behind the copies of them, or there are none.
        self.give(s, range)
    }

    pub(crate) fn scatter(&mut self, s: usize) -> Go {
        if self.batches.is_empty() {
            return self.gather(s);
        }
        let i = self.dice.below(self.batches.len() as u64) as usize;
        let Some(range) = self.take(s, self.batches[i].len)? else { return Ok(()) };
        let on = self.bench.streams[s].engine;
        let (strips, count) = strips(range);
        let rows = &mut self.batches[i];
        let (seed, batch) = (rows.seed, &mut rows.batch);
        let scattered = self.engine.lock().scatter(batch, &strips[..count], on);
        match scattered {
            Ok(()) => self.check(s, range, seed)?,
            Err(error) => is_expected(self.plan, error)?,
        }
        self.give(s, range)
    }

    pub(crate) fn discard(&mut self) -> Go {
        let Some(Rows { batch, .. }) = self.batches.pop() else { return Ok(()) };
        if self.dice.rarely(3) {
            drop(batch);
            return Ok(());
        }
        let gone = self.engine.lock().discard(batch);
        self.allowed(gone).map(|_| ())
    }

    pub(crate) fn discard_all(&mut self) -> Go {
        while !self.batches.is_empty() {
            self.discard()?;
        }
        Ok(())
    }
}
