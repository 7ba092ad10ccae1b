//! What a framework does with its own memory while the driver refuses this and that.
//!
//! What it is not: it looks at no order; the trace of the device does.
//!
//! Invariant: the framework keeps to the contract of each verb, whatever the verb says, and gives
//! its memory to somebody else as soon as the contract lets it.
//!
//! ```text
//!   out, named -> dropped, taken anew -> back, compared -> strips out and in -> the end
//! ```
//!
//! `tests/unmarked.rs` tells it under every refusal.

use crate::support::Rig;
use lightering::pack::Strip;
use lightering::{Acquire, Bytes, DeviceRange, Misuse, Result, Storage, StorageId};

pub(crate) const LEN: Bytes = Bytes::kib(4);

pub(crate) fn filled(rig: &mut Rig, seed: u64) -> Storage {
    let storage = rig.engine.alloc(LEN, rig.streams[0].engine, "x").unwrap();
    let range = rig.engine.range(storage.id()).unwrap();
    rig.fill(0, range, seed);
    storage
}

/// Two strips of a range, a gap between them.
pub(crate) fn strips(of: DeviceRange) -> [Strip; 2] {
    let part = |at| Strip::whole(of.part(Bytes::kib(at), Bytes::kib(1)).unwrap()).unwrap();
    [part(0), part(2)]
}

/// What a framework does that keeps to the contract of each verb, whatever the verb says. It ends
/// where the device is lost to the engine.
pub(crate) struct Story<'a> {
    pub(crate) rig: &'a mut Rig,
    /// The device bytes of its own storage, while there are any.
    pub(crate) theirs: Option<DeviceRange>,
    /// Refused verbs.
    pub(crate) refused: u64,
}

pub(crate) const TRIES: u32 = 100;

impl Story<'_> {
    /// The verb's answer, where it had one.
    fn went<T>(&mut self, answer: Result<T>) -> Result<Option<T>> {
        match answer {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_lost() => Err(error),
            Err(error) => {
                let is_capture = error.misuse() == Some(Misuse::Capturing);
                assert!(error.is_retryable() || is_capture, "{error:?}");
                self.refused += 1;
                Ok(None)
            }
        }
    }

    /// Somebody else's bytes, taken where something may have been freed.
    fn reuse(&mut self) {
        let mine = self.rig.take(0, LEN).unwrap();
        self.rig.fill(0, mine, 99);
        self.rig.check(0, mine, 99, "somebody else's".into());
        self.rig.give(0, mine.at());
    }

    fn give(&mut self, range: DeviceRange) {
        self.rig.give(0, range.at());
        self.reuse();
    }

    pub(crate) fn tell(&mut self) -> Result<()> {
        let on = self.rig.streams[0].engine;
        let owned = filled(self.rig, 1);
        let fixed = self.rig.engine.alloc_fixed(LEN, on, "stays");
        let Some(fixed) = self.went(fixed)? else { return Ok(()) };
        let range = self.rig.engine.range(fixed.id()).unwrap();
        self.rig.fill(0, range, 4);
        let range = self.rig.take(0, LEN).unwrap();
        let adopted = self.rig.engine.adopt(range, "theirs").unwrap();
        self.theirs = Some(range);
        self.rig.fill(0, range, 2);
        for id in [owned.id(), adopted.id(), fixed.id()] {
            let evicted = self.rig.engine.evict(id, on);
            self.went(evicted)?;
        }
        let flushed = self.rig.engine.flush(on);
        self.went(flushed)?;
        self.pull(adopted.id())?;
        self.bring(owned.id(), 1)?;
        self.bring(adopted.id(), 2)?;
        let stepped = self.rig.engine.step();
        self.went(stepped)?;
        self.bring(fixed.id(), 4)?;
        self.pack()?;
        for storage in [owned, fixed] {
            let released = self.rig.engine.release(storage, on);
            self.went(released)?;
            self.reuse();
        }
        let id = adopted.id();
        let released = self.rig.engine.release(adopted, on);
        match (self.went(released)?, self.theirs.take()) {
            (Some(()), Some(range)) => self.give(range),
            (None, Some(range)) => {
                self.theirs = Some(range);
                for _ in 0..TRIES {
                    let flushed = self.rig.engine.flush(on);
                    self.went(flushed)?;
                    self.pull(id)?;
                }
                assert_eq!(self.theirs, None, "never named");
            }
            _ => {}
        }
        Ok(())
    }

    /// Drops the device bytes that the engine names.
    fn pull(&mut self, id: StorageId) -> Result<()> {
        let named = self.rig.engine.releasable(self.rig.streams[0].engine);
        if self.went(named)?.flatten() == Some(id)
            && let Some(range) = self.theirs.take()
        {
            self.give(range);
        }
        Ok(())
    }

    /// Has a storage come back, and compares it.
    fn bring(&mut self, id: StorageId, seed: u64) -> Result<()> {
        let on = self.rig.streams[0].engine;
        for _ in 0..TRIES {
            let acquired = self.rig.engine.acquire(id, on);
            let got = match self.went(acquired)? {
                Some(Acquire::Ready(range)) => Some(range),
                Some(Acquire::NeedsRoom(len)) => {
                    let target = self.rig.take(0, len).unwrap();
                    let refilled = self.rig.engine.refill(id, target, on);
                    let refilled = self.went(refilled)?;
                    match refilled {
                        Some(_) => self.theirs = Some(target),
                        None => self.give(target),
                    }
                    refilled
                }
                None => None,
            };
            if let Some(range) = got {
                self.rig.check(0, range, seed, format!("storage {seed}"));
                return Ok(());
            }
            self.reuse();
        }
        panic!("never came back")
    }

    /// Strips out and in; their memory goes at once, as the verbs allow.
    fn pack(&mut self) -> Result<()> {
        let on = self.rig.streams[0].engine;
        let from = self.rig.take(0, LEN).unwrap();
        self.rig.fill(0, from, 3);
        let gathered = self.rig.engine.gather(&strips(from), on, "strips");
        let batch = self.went(gathered)?;
        if let Some(batch) = &batch {
            let passed = self.rig.engine.gathered(batch, on);
            if self.went(passed)?.is_none() {
                self.wait()?;
            }
        }
        self.give(from);
        let Some(mut batch) = batch else { return Ok(()) };
        let to = self.rig.take(0, LEN).unwrap();
        let scattered = self.rig.engine.scatter(&mut batch, &strips(to), on);
        self.went(scattered)?;
        self.give(to);
        let discarded = self.rig.engine.discard(batch);
        self.went(discarded)?;
        Ok(())
    }

    pub(crate) fn wait(&mut self) -> Result<()> {
        for _ in 0..TRIES {
            let drained = self.rig.engine.drain();
            if self.went(drained)?.is_some() {
                return Ok(());
            }
        }
        panic!("never over")
    }
}
