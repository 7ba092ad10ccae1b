//! A framework that runs a program over an engine, keeps the order that frameworks keep for
//! themselves, and writes down what it was told.
//!
//! What it is not: a judge of two runs; `twins.rs` compares. Within one run it requires that each
//! answer is the right one, and that every byte is.
//!
//! Invariant: except in a `Free` program, what is written down is a function of the program alone.
//!
//! ```text
//!   Op -> Machine { items, graves } -> Side { framework, engine }
//!            \-> log: (op, Outcome)   the same on every device
//! ```
//!
//! The tests `twins` and `cuda_stress` use it.

use crate::outcome::{Outcome, Report};
use crate::program::{Kind as Of, Op, Program, Verb};
use crate::side::{Opener, Side};
use lightering::backend::Backend;
use lightering::storage::{Residency, Storage, Tier};
use lightering::trace::Use;
use lightering::{
    Acquire, Bytes, DeviceRange, Error, Evict, Kind, Misuse, Result, StorageId, StreamId,
};
use std::collections::HashMap;

/// One storage as the framework sees it.
pub(crate) struct Item {
    pub(crate) handle: Storage,
    /// Which one of the program's it is, from 0.
    pub(crate) number: u32,
    pub(crate) len: Bytes,
    /// Pattern its bytes must show.
    pub(crate) seed: u64,
    /// The stream that wrote the bytes that are on the device; `None` once the engine brought them.
    writer: Option<usize>,
    /// Streams that read since.
    readers: Vec<usize>,
    /// The device bytes, where they are the framework's own.
    pub(crate) range: Option<DeviceRange>,
    pub(crate) is_owned: bool,
}

pub(crate) struct Machine {
    pub(crate) side: Side,
    pub(crate) of: Of,
    pub(crate) items: Vec<Item>,
    pub(crate) items_max: usize,
    /// Handles that are gone.
    pub(crate) dead: Vec<StorageId>,
    pub(crate) log: Vec<(usize, Outcome)>,
    lens: Vec<u64>,
    /// Device bytes whose handles were dropped, until the engine names them.
    graves: HashMap<StorageId, (u32, DeviceRange)>,
    seeds: u64,
    added: u32,
    ops: usize,
}

pub(crate) const STATE: Kind = Kind::Usage(Misuse::State);

impl Machine {
    pub(crate) fn new(open: &mut Opener, program: &Program) -> Machine {
        let Program { pool, options, streams, .. } = program.clone();
        Machine {
            side: Side::new(open, pool, options, streams),
            of: program.kind,
            items: Vec::new(),
            items_max: 24,
            dead: Vec::new(),
            log: Vec::new(),
            lens: program.lens.clone(),
            graves: HashMap::new(),
            seeds: program.seed << 16,
            added: 0,
            ops: 0,
        }
    }

    pub(crate) fn told(&mut self, outcome: Outcome) {
        self.log.push((self.ops, outcome));
    }

    /// Writes a refusal down, which must be of a kind expected here.
    #[track_caller]
    pub(crate) fn heard<T>(&mut self, result: Result<T>, expected: &[Kind]) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                let known = expected.contains(&error.kind());
                assert!(known || (self.of == Of::Free && error.is_retryable()), "{error:?}");
                self.told(Outcome::Failed(error.kind()));
                None
            }
        }
    }

    pub(crate) fn on(&self, s: usize) -> StreamId {
        self.side.streams[s].engine
    }

    fn seed(&mut self) -> u64 {
        self.seeds += 1;
        self.seeds
    }

    fn add(&mut self, s: usize, len: Bytes, is_owned: bool) {
        let (on, seed, number) = (self.on(s), self.seed(), self.added);
        let name = format!("item.{number}");
        let (handle, range) = if is_owned {
            // A third keep their address, where nobody is told when their bytes go.
            let alloc = match seed % 3 {
                0 if self.of != Of::Eager => self.side.engine.alloc_fixed(len, on, name.as_str()),
                _ => self.side.engine.alloc(len, on, name.as_str()),
            };
            let Some(handle) = self.heard(alloc, &[]) else { return };
            (handle, None)
        } else {
            let taken = self.side.take(s, len);
            let Some(range) = self.heard(taken, &[]) else { return };
            (self.side.engine.adopt(range, name.as_str()).unwrap(), Some(range))
        };
        let bytes = self.side.engine.range(handle.id()).unwrap();
        self.side.fill(s, bytes, seed);
        self.added += 1;
        let (writer, readers) = (Some(s), Vec::new());
        let item = Item { handle, number, len, seed, writer, readers, range, is_owned };
        self.items.push(item);
    }

    /// The engine orders what it knows of; the producer's stream is the framework's own affair.
    fn order_after_writer(&mut self, i: usize, s: usize) {
        if let Some(writer) = self.items[i].writer {
            self.side.order(writer, s);
        }
    }

    fn order_after_all(&mut self, i: usize, s: usize) {
        self.order_after_writer(i, s);
        for reader in self.items[i].readers.clone() {
            self.side.order(reader, s);
        }
    }

    fn find(&mut self, id: StorageId) -> Option<&mut Item> {
        self.items.iter_mut().find(|item| item.handle.id() == id)
    }

    fn left(&mut self, id: StorageId, became: Evict) {
        let item = self.find(id).expect("a storage that leaves is the program's");
        let number = item.number;
        self.told(match became {
            Evict::Moving(_) => Outcome::Moving(number),
            Evict::Clean => Outcome::Clean(number),
            Evict::Kept(why) => Outcome::Kept(number, why),
        });
    }

    fn evict(&mut self, i: usize, s: usize, through_policy: bool) {
        self.order_after_writer(i, s);
        let (on, id) = (self.on(s), self.items[i].handle.id());
        let is_resident = self.residency(i) == Residency::Resident;
        let expected: &[Kind] = if is_resident { &[] } else { &[STATE] };
        if through_policy {
            let offered = self.side.engine.offer(id, on);
            match self.heard(offered, expected) {
                Some(Some((id, became))) => self.left(id, became),
                Some(None) => self.told(Outcome::Done),
                None => {}
            }
        } else {
            let evicted = self.side.engine.evict(id, on);
            if let Some(became) = self.heard(evicted, expected) {
                self.left(id, became);
            }
        }
    }

    pub(crate) fn residency(&self, i: usize) -> Residency {
        self.side.engine.residency(self.items[i].handle.id()).unwrap()
    }

    /// What can be said of an item's whereabouts on every device alike: when the engine frees its
    /// own bytes and fetches them ahead hangs on time, unless nothing ever waits for an answer.
    fn whereabouts(&self, i: usize) -> Residency {
        match self.residency(i) {
            Residency::Resident => Residency::Resident,
            _ if self.items[i].is_owned && self.of != Of::Eager => Residency::Evicted(Tier::Host),
            state => state,
        }
    }

    /// Bytes of an item for stream `s`, ordered behind whoever made them.
    fn acquire(&mut self, i: usize, s: usize) -> Option<DeviceRange> {
        let (on, id) = (self.on(s), self.items[i].handle.id());
        let was_away = matches!(self.residency(i), Residency::Evicted(_) | Residency::Refilling);
        if !was_away {
            self.order_after_writer(i, s);
        }
        let acquired = self.side.engine.acquire(id, on);
        let range = match self.heard(acquired, &[])? {
            Acquire::Ready(range) => range,
            Acquire::NeedsRoom(len) => {
                assert!(!self.items[i].is_owned);
                self.told(Outcome::NeedsRoom(len));
                let taken = self.side.take(s, len);
                let target = self.heard(taken, &[])?;
                let refilled = self.side.engine.refill(id, target, on);
                let Some(range) = self.heard(refilled, &[]) else {
                    self.side.give(s, target.at());
                    return None;
                };
                self.items[i].range = Some(target);
                range
            }
        };
        self.told(Outcome::Ready);
        if was_away {
            self.items[i].writer = None;
            self.items[i].readers.clear();
        }
        Some(range)
    }

    fn read(&mut self, i: usize, s: usize) {
        let Some(range) = self.acquire(i, s) else { return };
        let Item { seed, number, .. } = self.items[i];
        self.side.check(s, range, seed, number);
        if !self.items[i].readers.contains(&s) {
            self.items[i].readers.push(s);
        }
    }

    fn write(&mut self, i: usize, s: usize) {
        let Some(range) = self.acquire(i, s) else { return };
        self.order_after_all(i, s);
        let on = self.on(s);
        self.side.engine.note(on, &[Use::write(range)]).unwrap();
        let seed = self.seed();
        self.side.fill(s, range, seed);
        let item = &mut self.items[i];
        (item.seed, item.writer) = (seed, Some(s));
        item.readers.clear();
    }

    /// The host asks about copies: whether they are done hangs on time, so it waits for them first.
    fn settle(&mut self) {
        if self.of != Of::Free {
            self.side.engine.drain().unwrap();
        }
    }

    fn read_host(&mut self, i: usize) {
        self.settle();
        let Item { seed, number, len, .. } = self.items[i];
        let mut bytes = vec![0; len.to_usize().unwrap()];
        let id = self.items[i].handle.id();
        let read = self.side.engine.read_host(id, Bytes::ZERO, &mut bytes);
        if self.heard(read, &[Kind::Usage(Misuse::NotThere)]).is_some() {
            self.side.compare(&bytes, seed, number, "host copy");
        }
    }

    /// The pull protocol. Where the engine answers by asking the device, the device is waited for:
    /// once for the copies, once more for the moment on every stream that it takes then.
    fn pull(&mut self, s: usize) {
        let mut named = Vec::new();
        if matches!(self.of, Of::Eager | Of::Free) {
            self.drop_released(s, &mut named);
        } else {
            let mut idle_rounds = 0;
            while idle_rounds < 2 {
                self.settle();
                let before = named.len();
                self.drop_released(s, &mut named);
                idle_rounds = if named.len() > before { 0 } else { idle_rounds + 1 };
            }
        }
        // What ended goes ahead of others if its copies were done by then, as they were or not.
        named.sort_unstable();
        named.into_iter().for_each(|number| self.told(Outcome::Named(number)));
        let on = self.on(s);
        loop {
            let wanted = self.side.engine.wanted(on).unwrap();
            let Some((id, len)) = wanted else { return };
            let number = self.find(id).expect("only living ones are wanted").number;
            self.told(Outcome::Wanted(number, len));
            if !self.fetch(id, len, s) {
                return;
            }
        }
    }

    /// The numbers of those whose memory is dropped are added to `named`.
    fn drop_released(&mut self, s: usize, named: &mut Vec<u32>) {
        let on = self.on(s);
        loop {
            let released = self.side.engine.releasable(on);
            let Some(id) = self.heard(released, &[]).flatten() else { return };
            let grave = self.graves.remove(&id);
            let gone = grave.or_else(|| {
                let item = self.find(id)?;
                Some((item.number, item.range.take()?))
            });
            let (number, range) = gone.expect("a storage is named once");
            self.side.give(s, range.at());
            named.push(number);
        }
    }

    /// Fetches an item ahead into room that is taken for it; says whether it did.
    fn fetch(&mut self, id: StorageId, len: Bytes, s: usize) -> bool {
        let taken = self.side.take(s, len);
        let Some(target) = self.heard(taken, &[]) else { return false };
        let fetched = self.side.engine.prefetch(id, target, self.on(s));
        let is_fetched = self.heard(fetched, &[STATE]).is_some();
        if !is_fetched {
            self.side.give(s, target.at());
        } else if let Some(item) = self.find(id) {
            item.range = Some(target);
        }
        is_fetched
    }

    fn prefetch(&mut self, i: usize, s: usize) {
        // An item's own range is in the way of nothing: a second one is offered, and refused.
        let Item { len, is_owned, .. } = self.items[i];
        if !is_owned {
            self.fetch(self.items[i].handle.id(), len, s);
        }
    }

    fn cancel(&mut self, i: usize, s: usize) {
        // Whether the engine is fetching bytes of its own ahead hangs on time.
        if self.items[i].is_owned && self.of != Of::Eager && self.of != Of::Free {
            return;
        }
        let (on, id) = (self.on(s), self.items[i].handle.id());
        let is_fetched = self.residency(i) == Residency::Refilling;
        let cancelled = self.side.engine.cancel(id, on);
        let expected: &[Kind] = if is_fetched { &[] } else { &[STATE] };
        if self.heard(cancelled, expected).is_some()
            && let Some(range) = self.items[i].range.take()
        {
            self.side.give(s, range.at());
        }
    }

    fn take_copy(&mut self, i: usize) {
        let is_resident = self.residency(i) == Residency::Resident;
        let taken = self.side.engine.take(self.items[i].handle.id());
        self.heard(taken, if is_resident { &[] } else { &[STATE] });
    }

    /// Ends an item by the verb.
    pub(crate) fn release(&mut self, i: usize, s: usize) {
        self.order_after_all(i, s);
        let item = self.items.swap_remove(i);
        self.dead.push(item.handle.id());
        self.side.engine.release(item.handle, self.side.streams[s].engine).unwrap();
        if let Some(range) = item.range {
            self.side.give(s, range.at());
        }
    }

    /// Ends an item by dropping its handle. When the engine names bytes that no eviction counts
    /// hangs on time, in a program that never syncs: there the verb ends them.
    fn drop_handle(&mut self, i: usize, s: usize) {
        if self.of == Of::Eager && !self.items[i].is_owned {
            return self.release(i, s);
        }
        self.order_after_all(i, s);
        let item = self.items.swap_remove(i);
        let id = item.handle.id();
        self.dead.push(id);
        drop(item.handle);
        if let Some(range) = item.range {
            self.graves.insert(id, (item.number, range));
        }
    }

    pub(crate) fn run(&mut self, op: Op) {
        self.ops += 1;
        let s = op.b % self.side.streams.len();
        let is_full = self.items.len() >= self.items_max;
        if self.items.is_empty() || (op.verb == Verb::Add && !is_full) {
            let len = Bytes(self.lens[op.c % self.lens.len()]);
            let is_owned = match self.of {
                Of::Adopted => false,
                Of::Owned => true,
                Of::Eager | Of::Mixed | Of::Free => op.a.is_multiple_of(2),
            };
            return self.add(s, len, is_owned);
        }
        let i = op.a % self.items.len();
        match op.verb {
            Verb::Add => self.release(i, s),
            Verb::Evict => self.evict(i, s, false),
            Verb::Offer => self.evict(i, s, true),
            Verb::Read => self.read(i, s),
            Verb::Write => self.write(i, s),
            Verb::Pull if op.c.is_multiple_of(2) => self.pull(s),
            Verb::Pull => (0..self.side.streams.len()).for_each(|s| self.pull(s)),
            Verb::Flush => self.side.engine.flush(self.on(s)).unwrap(),
            Verb::Step => self.side.engine.step().unwrap(),
            Verb::MarkStep => self.side.engine.mark_step().unwrap(),
            Verb::ReadHost => self.read_host(i),
            Verb::Cancel => self.cancel(i, s),
            Verb::Prefetch => self.prefetch(i, s),
            Verb::TakeCopy => self.take_copy(i),
            Verb::Release => return self.release(i, s),
            Verb::DropHandle => return self.drop_handle(i, s),
            Verb::Wrong => crate::misuse::wrong(self, op, i, s),
        }
        if i < self.items.len() {
            let at = self.whereabouts(i);
            self.told(Outcome::At(at));
        }
        self.take_seen();
    }

    fn take_seen(&mut self) {
        for seen in std::mem::take(&mut self.side.seen) {
            self.told(Outcome::Seen(seen));
        }
    }

    /// Reads everything back, ends everything, and requires that nothing is left anywhere.
    pub(crate) fn finish(mut self) -> Report {
        self.ops += 1;
        for i in 0..self.items.len() {
            self.read(i, 0);
        }
        self.side.sync();
        self.take_seen();
        let wrong = std::mem::take(&mut self.side.wrong);
        while !self.items.is_empty() {
            self.release(0, 0);
        }
        for s in 0..self.side.streams.len() {
            self.side.engine.flush(self.on(s)).unwrap();
        }
        if self.of == Of::Free {
            self.of = Of::Mixed; // from here on it syncs before it asks
        }
        if self.of == Of::Eager {
            self.settle();
        }
        for s in 0..self.side.streams.len() {
            self.pull(s);
        }
        assert!(self.graves.is_empty(), "{} storages were never named", self.graves.len());
        self.side.engine.drain().unwrap();
        if !self.side.engine.options().verify {
            assert_eq!(self.side.engine.memory().unwrap().allocated, Bytes::ZERO);
        }
        assert_eq!(self.side.framework.memory().unwrap().allocated, Bytes::ZERO);
        self.side.engine.shutdown().unwrap();
        let after: [Result<()>; 3] = [
            self.side.engine.step(),
            self.side.engine.alloc(Bytes(1), self.on(0), "late").map(drop),
            self.side.engine.shutdown(),
        ];
        assert!(after.iter().all(|late| late.as_ref().is_err_and(is_closed)), "{after:?}");
        let (pool, stats) = (self.side.pool.stats(), self.side.engine.stats());
        assert_eq!((pool.lent, pool.quarantined), (Bytes::ZERO, Bytes::ZERO));
        assert_eq!((stats.storages, stats.leaked_on_purpose_bytes), (0, 0));
        assert_eq!(stats.corrupt_count, 0);
        self.side.trace.lock().unwrap().checker.finish();
        let (hazards, words) = self.side.hazards();
        Report { log: self.log, wrong, hazards, words }
    }
}

fn is_closed(error: &Error) -> bool {
    error.kind() == Kind::Closed
}
