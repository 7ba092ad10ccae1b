//! A framework that does anything with an engine, and holds it to all that its verbs promise.
//!
//! What it is not: a program. `tests/programs.rs` and `tests/refused_programs.rs` make those.
//!
//! Invariant: on a device that refuses nothing, nothing that can only be refused by one is let
//! pass; on one that does, an error may be retried and changes nothing.
//!
//! ```text
//!   (verb, a, b) -> op() -> add | evict | read | write | pull | .. -> finish(): bytes, books
//! ```

use crate::support::{Rig, first_wrong};
use lightering::backend::Backend;
use lightering::storage::{Residency, Storage};
use lightering::trace::Use;
use lightering::{Acquire, Bytes, DeviceRange, Error, Kind, Misuse, Options, Result, StorageId};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// One storage as the framework sees it.
pub(crate) struct Item {
    handle: Storage,
    len: Bytes,
    /// Pattern its bytes must show.
    seed: u64,
    /// The stream whose kernel wrote the bytes that are on the device; `None` once the engine
    /// brought them there.
    writer: Option<usize>,
    /// Streams that read since.
    readers: Vec<usize>,
    /// The device bytes, where they are the framework's own.
    range: Option<DeviceRange>,
    is_owned: bool,
}

pub(crate) struct Machine {
    rig: Rig,
    items: Vec<Item>,
    /// Device bytes whose handles were dropped, until the engine names them.
    graves: HashMap<StorageId, DeviceRange>,
    seeds: u64,
    /// How many calls in a thousand the device refuses, if it refuses any: then every verb may say
    /// "try again".
    refusals: Option<Arc<AtomicU32>>,
}

/// Passes on errors that a program must be ready for on any device.
#[track_caller]
fn allowed<T>(result: Result<T>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) if error.is_retryable() => None,
        Err(error) => panic!("{error:?}"),
    }
}

/// The device's memory, with room for the sums beside what the program has.
pub(crate) fn with_sums(len: Bytes, options: &Options) -> Bytes {
    if options.verify { len + Bytes::kib(4) } else { len }
}

impl Machine {
    pub(crate) fn new(seed: u64, rig: Rig, refusals: Option<Arc<AtomicU32>>) -> Machine {
        Machine { rig, items: Vec::new(), graves: HashMap::new(), seeds: seed << 16, refusals }
    }

    /// Passes on an error that only a device that refuses calls may cause.
    #[track_caller]
    fn done<T>(&self, result: Result<T>) -> Option<T> {
        match self.refusals {
            None => Some(result.unwrap()),
            Some(_) => allowed(result),
        }
    }

    /// May this error be, where its own cause is one of `misuse`?
    #[track_caller]
    fn only(&self, error: &Error, misuse: Misuse) {
        let is_refused = self.refusals.is_some() && error.is_retryable();
        assert!(is_refused || error.misuse() == Some(misuse), "{error}");
    }

    fn seed(&mut self) -> u64 {
        self.seeds += 1;
        self.seeds
    }

    fn add(&mut self, s: usize, len: Bytes, is_owned: bool) {
        let on = self.rig.streams[s].engine;
        let seed = self.seed();
        let name = format!("item.{}", self.items.len());
        let (handle, range) = if is_owned {
            // A third of them keep their address.
            let got = match seed % 3 {
                0 => self.rig.engine.alloc_fixed(len, on, name.as_str()),
                _ => self.rig.engine.alloc(len, on, name.as_str()),
            };
            let Some(handle) = allowed(got) else { return };
            (handle, None)
        } else {
            let Some(range) = allowed(self.rig.take(s, len)) else { return };
            (self.rig.engine.adopt(range, name.as_str()).unwrap(), Some(range))
        };
        let bytes = self.rig.engine.range(handle.id()).unwrap();
        self.rig.fill(s, bytes, seed);
        let (writer, readers) = (Some(s), Vec::new());
        self.items.push(Item { handle, len, seed, writer, readers, range, is_owned });
    }

    /// The engine orders what it knows of; the producer's stream is the framework's own affair.
    fn order_after_writer(&mut self, i: usize, s: usize) {
        if let Some(writer) = self.items[i].writer {
            self.rig.order(writer, s);
        }
    }

    /// What the engine owns it orders by itself, behind everybody who acquired it.
    fn order_its_end(&mut self, i: usize, s: usize) {
        if !self.items[i].is_owned {
            self.order_after_all(i, s);
        }
    }

    fn order_after_all(&mut self, i: usize, s: usize) {
        self.order_after_writer(i, s);
        for reader in self.items[i].readers.clone() {
            self.rig.order(reader, s);
        }
    }

    fn evict(&mut self, i: usize, s: usize, is_again: bool) {
        if !self.items[i].is_owned {
            self.order_after_writer(i, s);
        }
        let on = self.rig.streams[s].engine;
        let id = self.items[i].handle.id();
        let state = self.rig.engine.residency(id).unwrap();
        let engine = &mut self.rig.engine;
        match if is_again { engine.rest(id, on) } else { engine.evict(id, on) } {
            Ok(_) => {}
            Err(error) if self.refusals.is_some() && error.is_retryable() => {}
            Err(error) if state != Residency::Resident => {
                assert_eq!(error.misuse(), Some(Misuse::State));
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    fn offer(&mut self, i: usize, s: usize) {
        if !self.items[i].is_owned {
            self.order_after_writer(i, s);
        }
        match self.rig.engine.offer(self.items[i].handle.id(), self.rig.streams[s].engine) {
            Ok(_) => {}
            Err(error) => self.only(&error, Misuse::State),
        }
    }

    /// Bytes of an item for stream `s`, ordered behind whoever made them.
    fn acquire(&mut self, i: usize, s: usize) -> Option<DeviceRange> {
        self.acquire_for(i, s, false)
    }

    fn acquire_for(&mut self, i: usize, s: usize, will_write: bool) -> Option<DeviceRange> {
        let on = self.rig.streams[s].engine;
        let id = self.items[i].handle.id();
        let was_away = matches!(
            self.rig.engine.residency(id).unwrap(),
            Residency::Evicted(_) | Residency::Refilling
        );
        if !was_away {
            self.order_after_writer(i, s);
        }
        let acquired = match will_write {
            true => self.rig.engine.acquire_mut(id, on),
            false => self.rig.engine.acquire(id, on),
        };
        let range = match allowed(acquired)? {
            Acquire::Ready(range) => range,
            Acquire::NeedsRoom(len) => {
                assert!(!self.items[i].is_owned);
                let target = allowed(self.rig.take(s, len))?;
                match self.rig.engine.refill(id, target, on) {
                    Ok(range) => {
                        self.items[i].range = Some(target);
                        range
                    }
                    Err(error) => {
                        assert!(error.is_retryable(), "{error:?}");
                        self.rig.give(s, target.at());
                        return None;
                    }
                }
            }
        };
        if was_away {
            self.items[i].writer = None;
            self.items[i].readers.clear();
        }
        Some(range)
    }

    fn read(&mut self, i: usize, s: usize) {
        let Some(range) = self.acquire(i, s) else { return };
        let seed = self.items[i].seed;
        self.rig.check(s, range, seed, format!("item {i} on stream {s}"));
        if !self.items[i].readers.contains(&s) {
            self.items[i].readers.push(s);
        }
    }

    fn write(&mut self, i: usize, s: usize) {
        // Half of the writers say at once what they acquire for.
        let says = self.items[i].seed.is_multiple_of(2);
        let Some(range) = self.acquire_for(i, s, says) else { return };
        self.order_after_all(i, s);
        let on = self.rig.streams[s].engine;
        if !says {
            let noted = self.rig.engine.note(on, &[Use::write(range)]);
            if self.done(noted).is_none() {
                return;
            }
        }
        let seed = self.seed();
        self.rig.fill(s, range, seed);
        let item = &mut self.items[i];
        (item.seed, item.writer) = (seed, Some(s));
        item.readers.clear();
    }

    fn read_host(&mut self, i: usize) {
        let item = &self.items[i];
        let mut bytes = vec![0; item.len.0 as usize];
        match self.rig.engine.read_host(item.handle.id(), Bytes::ZERO, &mut bytes) {
            Ok(()) => assert_eq!(first_wrong(&bytes, item.seed), None, "host copy of item {i}"),
            Err(error) if error.kind() == Kind::Busy => {}
            Err(error) => self.only(&error, Misuse::NotThere),
        }
    }

    fn pull(&mut self, s: usize) {
        let on = self.rig.streams[s].engine;
        while let Some(id) = allowed(self.rig.engine.releasable(on)).flatten() {
            let grave = self.graves.remove(&id);
            let item = self.items.iter_mut().find(|item| item.handle.id() == id);
            let range = grave.or_else(|| item.and_then(|item| item.range.take()));
            self.rig.give(s, range.expect("a storage is named once").at());
        }
        loop {
            let wanted = self.rig.engine.wanted(on);
            let Some((id, len)) = self.done(wanted).flatten() else { return };
            let Some(target) = allowed(self.rig.take(s, len)) else { return };
            let item = self.items.iter_mut().find(|item| item.handle.id() == id).unwrap();
            match self.rig.engine.prefetch(id, target, on) {
                Ok(()) => item.range = Some(target),
                Err(error) => {
                    assert!(error.is_retryable(), "{error:?}");
                    return self.rig.give(s, target.at());
                }
            }
        }
    }

    fn cancel(&mut self, i: usize, s: usize) {
        let on = self.rig.streams[s].engine;
        let id = self.items[i].handle.id();
        match self.rig.engine.cancel(id, on) {
            Ok(()) => {
                if let Some(range) = self.items[i].range.take() {
                    self.rig.give(s, range.at());
                }
            }
            Err(error) => self.only(&error, Misuse::State),
        }
    }

    fn take_copy(&mut self, i: usize) {
        let id = self.items[i].handle.id();
        if let Err(error) = self.rig.engine.take(id) {
            self.only(&error, Misuse::State);
        }
    }

    /// Ends an item by the verb.
    fn release(&mut self, i: usize, s: usize) {
        self.order_its_end(i, s);
        let item = self.items.swap_remove(i);
        let id = item.handle.id();
        let ended = self.rig.engine.release(item.handle, self.rig.streams[s].engine);
        match (self.done(ended), item.range) {
            (Some(()), Some(range)) => self.rig.give(s, range.at()),
            // As if the handle had been dropped: `releasable` names it.
            (None, Some(range)) => drop(self.graves.insert(id, range)),
            (_, None) => {}
        }
    }

    /// Ends an item by dropping its handle.
    fn drop_handle(&mut self, i: usize, s: usize) {
        self.order_its_end(i, s);
        let item = self.items.swap_remove(i);
        let id = item.handle.id();
        drop(item.handle);
        if let Some(range) = item.range {
            self.graves.insert(id, range);
        }
    }

    fn flush(&mut self, s: usize) {
        let flushed = self.rig.engine.flush(self.rig.streams[s].engine);
        self.done(flushed);
    }

    pub(crate) fn op(&mut self, (verb, a, b): (u8, u8, u8)) {
        let streams = self.rig.streams.len();
        let s = b as usize % streams;
        if self.items.is_empty() || verb < 40 {
            let len = Bytes([1, 255, 256, 1000, 4096, 6000][a as usize % 6]);
            return self.add(s, len, b & 0x40 != 0);
        }
        let i = a as usize % self.items.len();
        match verb {
            40..80 => self.evict(i, s, b & 0x20 != 0),
            80..100 => self.offer(i, s),
            100..140 => self.read(i, s),
            140..160 => self.write(i, s),
            160..190 => self.pull(s),
            190..200 => self.read_host(i),
            200..206 => self.flush(s),
            206..212 => {
                let stepped = self.rig.engine.step();
                self.done(stepped);
            }
            212..216 => {
                let marked = self.rig.engine.mark_step();
                self.done(marked);
            }
            216..222 => self.cancel(i, s),
            222..228 => self.take_copy(i),
            228..242 => self.release(i, s),
            _ => self.drop_handle(i, s),
        }
    }

    /// Every byte is right, and nothing is left.
    pub(crate) fn finish(mut self) {
        if let Some(per_mille) = &self.refusals {
            per_mille.store(0, Ordering::Relaxed);
            self.rig.engine.step().unwrap();
        }
        for i in 0..self.items.len() {
            self.read(i, 0);
        }
        self.rig.assert_right();
        while !self.items.is_empty() {
            self.release(0, 0);
        }
        for s in 0..self.rig.streams.len() {
            self.rig.engine.flush(self.rig.streams[s].engine).unwrap();
        }
        self.rig.sim.sync().unwrap();
        for s in 0..self.rig.streams.len() {
            // A moment that was begun while events were short covers what was evicted before it;
            // the next one covers the rest.
            for _ in 0..3 {
                self.pull(s);
                self.rig.sim.sync().unwrap();
            }
        }
        assert!(self.graves.is_empty(), "{} storages were never named", self.graves.len());
        self.rig.engine.drain().unwrap();
        let stats = self.rig.engine.stats();
        let compared = stats.verified_count + stats.unverified_count;
        let is_verified = self.rig.engine.options().verify;
        // A copy that was refused half way is counted, and there is nothing to compare.
        if self.refusals.is_none() {
            assert_eq!(compared, if is_verified { stats.refilled_count } else { 0 }, "{stats:?}");
        }
        let slots = self.rig.engine.options().verify_slots_max as u64;
        let sums = if is_verified { Bytes(3 * 8 * (slots + 1)) } else { Bytes::ZERO };
        assert_eq!(self.rig.engine.memory().unwrap().allocated, sums);
        assert_eq!(self.rig.sim.memory().unwrap().allocated, Bytes::ZERO);
        self.rig.assert_nothing_left();
        let memory = self.rig.sim.memory().unwrap();
        assert_eq!(memory.free, memory.total, "device bytes are left");
        self.rig.assert_right();
    }
}
