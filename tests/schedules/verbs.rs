//! What the framework of a run does with the engine, verb by verb, and what it holds each to.
//!
//! What it is not: it does not say which verb comes when; the run's dice do.
//!
//! Invariant: after a refusal the state is asserted to be what it was.
//!
//! ```text
//!   verb() -> add | evict | read | write | pull | flush | cancel | take | release | gather ..
//! ```

use crate::machine::{Go, Machine, TRIES, insist, is_expected};
use crate::plan::{Kind, Verb};
use crate::support::first_wrong;
use lightering::backend::Backend;
use lightering::storage::{Residency, Tier};
use lightering::trace::Use;
use lightering::{Acquire, Bytes, DeviceRange, Evict, Misuse, StorageId};

impl Machine<'_> {
    fn left(&mut self, became: Evict) {
        if let Evict::Moving(ticket) = became {
            self.tickets.push(ticket);
        }
    }

    fn evict(&mut self, i: usize, s: usize) -> Go {
        self.order_after_writer(i, s)?;
        let on = self.bench.streams[s].engine;
        let id = self.items[i].handle.id();
        let state = self.state(i);
        if self.dice.rarely(3) {
            let offered = self.engine.lock().offer(id, on);
            return match offered {
                Ok(Some((_, became))) => {
                    self.left(became);
                    Ok(())
                }
                Ok(None) => Ok(()),
                // The policy may name one that left meanwhile.
                Err(error) if error.misuse() == Some(Misuse::State) => Ok(()),
                Err(error) => is_expected(self.plan, error),
            };
        }
        let mut engine = self.engine.lock();
        // Of some items every reader may come again.
        let result = if i % 4 == 3 { engine.rest(id, on) } else { engine.evict(id, on) };
        drop(engine);
        match result {
            Ok(became) => self.left(became),
            Err(error) if state != Residency::Resident && !error.is_lost() => {
                let misuse = error.misuse();
                let refused = misuse == Some(Misuse::State) || misuse == Some(Misuse::Capturing);
                assert!(refused || error.is_retryable(), "{error:?}");
                assert_eq!(self.state(i), state, "a refused eviction changes nothing: {error}");
            }
            Err(error) => {
                let told = error.to_string();
                is_expected(self.plan, error)?;
                assert_eq!(self.state(i), state, "a failed eviction changes nothing: {told}");
            }
        }
        Ok(())
    }

    /// Bytes of an item for stream `s`, ordered behind whoever made them.
    fn acquire(&mut self, i: usize, s: usize) -> Go<Option<DeviceRange>> {
        self.acquire_for(i, s, false)
    }

    fn acquire_for(&mut self, i: usize, s: usize, will_write: bool) -> Go<Option<DeviceRange>> {
        let on = self.bench.streams[s].engine;
        let id = self.items[i].handle.id();
        let state = self.state(i);
        let was_away = matches!(state, Residency::Evicted(_) | Residency::Refilling);
        if !was_away {
            self.order_after_writer(i, s)?;
        }
        let acquired = match will_write {
            true => self.engine.lock().acquire_mut(id, on),
            false => self.engine.lock().acquire(id, on),
        };
        let range = match acquired {
            Ok(Acquire::Ready(range)) => range,
            Ok(Acquire::NeedsRoom(len)) => {
                assert!(!self.items[i].is_owned && len == self.items[i].len);
                match self.refill(i, s)? {
                    Some(range) => range,
                    None => return Ok(None),
                }
            }
            Err(error) => {
                let told = error.to_string();
                is_expected(self.plan, error)?;
                assert_eq!(self.state(i), state, "a failed acquire changes nothing: {told}");
                return Ok(None);
            }
        };
        let fixed = self.items[i].fixed;
        assert!(fixed.is_none_or(|fixed| fixed == range), "the address stays");
        if was_away {
            (self.items[i].writer, self.items[i].readers) = (None, 0);
        }
        Ok(Some(range))
    }

    fn refill(&mut self, i: usize, s: usize) -> Go<Option<DeviceRange>> {
        let (id, len) = (self.items[i].handle.id(), self.items[i].len);
        let Some(target) = self.take(s, len)? else { return Ok(None) };
        let result = self.engine.lock().refill(id, target, self.bench.streams[s].engine);
        match result {
            Ok(range) => {
                self.items[i].range = Some(target);
                Ok(Some(range))
            }
            Err(error) => {
                let told = error.to_string();
                is_expected(self.plan, error)?;
                assert_eq!(self.state(i), Residency::Evicted(Tier::Host), "{told}");
                self.give(s, target)?;
                Ok(None)
            }
        }
    }

    fn read(&mut self, i: usize, s: usize) -> Go<bool> {
        let Some(range) = self.acquire(i, s)? else { return Ok(false) };
        self.check(s, range, self.items[i].seed)?;
        self.items[i].readers |= 1 << s;
        Ok(true)
    }

    fn write(&mut self, i: usize, s: usize) -> Go {
        // Whoever overwrites bytes that are there need not have acquired them.
        let is_resident = self.state(i) == Residency::Resident;
        let mut says = false;
        let range = if is_resident && self.dice.rarely(2) {
            self.engine.lock().range(self.items[i].id()).unwrap()
        } else {
            // Half of those that acquire say at once what for.
            says = (self.items[i].seed / 2).is_multiple_of(2);
            let Some(range) = self.acquire_for(i, s, says)? else { return Ok(()) };
            range
        };
        self.order_after_all(i, s)?;
        let on = self.bench.streams[s].engine;
        if !says {
            let noted = self.engine.lock().note(on, &[Use::write(range)]);
            if self.allowed(noted)?.is_none() {
                return Ok(());
            }
        }
        let seed = self.seed();
        self.fill(s, range, seed)?;
        let item = &mut self.items[i];
        (item.seed, item.writer, item.readers) = (seed, Some(s), 0);
        Ok(())
    }

    fn read_host(&mut self, i: usize) -> Go<bool> {
        let item = &self.items[i];
        let mut bytes = [0; 2000];
        let bytes = &mut bytes[..item.len.0 as usize];
        let result = self.engine.lock().read_host(item.handle.id(), Bytes::ZERO, bytes);
        match result {
            Ok(()) => {
                assert_eq!(first_wrong(bytes, item.seed), None, "a host copy");
                Ok(true)
            }
            Err(error) if error.misuse() == Some(Misuse::NotThere) => Ok(false),
            Err(error) => is_expected(self.plan, error).map(|()| false),
        }
    }

    /// The range of a storage that the engine named.
    fn named(&mut self, id: StorageId) -> DeviceRange {
        if let Some(at) = self.graves.iter().position(|(grave, _)| *grave == id) {
            return self.graves.swap_remove(at).1;
        }
        let item = self.items.iter_mut().find(|item| item.handle.id() == id);
        let range = match item {
            Some(item) => item.range.take(),
            None => {
                let forgotten = self.forgotten.iter_mut().find(|(other, _)| *other == id);
                forgotten.and_then(|(_, range)| range.take())
            }
        };
        range.expect("a storage is named once, and only where its bytes are the framework's")
    }

    pub(crate) fn pull(&mut self, s: usize) -> Go {
        let on = self.bench.streams[s].engine;
        loop {
            let named = self.engine.lock().releasable(on);
            let Some(Some(id)) = self.allowed(named)? else { break };
            let range = self.named(id);
            // With several streams its owner may have the bytes used on any of them next.
            let next = self.dice.below(self.bench.streams.len() as u64) as usize;
            self.give(next, range)?;
        }
        for _ in 0..=self.items.len() {
            let wanted = self.engine.lock().wanted(on);
            let Some(Some((id, len))) = self.allowed(wanted)? else { break };
            let item = self.items.iter().position(|item| item.handle.id() == id);
            let Some(i) = item else { break };
            let Some(target) = self.take(s, len)? else { break };
            let result = self.engine.lock().prefetch(id, target, on);
            match result {
                Ok(()) => {
                    self.items[i].range = Some(target);
                }
                Err(error) => {
                    is_expected(self.plan, error)?;
                    assert_eq!(self.state(i), Residency::Evicted(Tier::Host));
                    return self.give(s, target);
                }
            }
        }
        Ok(())
    }

    /// Makes everything of a stream go. Where every event is in use, those of others go first.
    pub(crate) fn flush(&mut self, s: usize) -> Go {
        let on = self.bench.streams[s].engine;
        for _ in 0..TRIES {
            let flushed = self.engine.lock().flush(on);
            if self.allowed(flushed)?.is_some() {
                return Ok(());
            }
            insist(self.plan, || self.bench.sim.sync())?;
            let stepped = self.engine.lock().step();
            self.allowed(stepped)?;
            for s in 0..self.bench.streams.len() {
                self.pull(s)?;
            }
        }
        panic!("nothing goes: {:?}", self.engine);
    }

    /// Fetches an item ahead although nobody expects it. Says whether that was begun.
    fn prefetch(&mut self, i: usize, s: usize) -> Go<bool> {
        let is_away = self.state(i) == Residency::Evicted(Tier::Host);
        if self.items[i].is_owned || !is_away {
            return Ok(false);
        }
        let (id, len) = (self.items[i].handle.id(), self.items[i].len);
        let Some(target) = self.take(s, len)? else { return Ok(false) };
        let result = self.engine.lock().prefetch(id, target, self.bench.streams[s].engine);
        match result {
            Ok(()) => {
                self.items[i].range = Some(target);
                Ok(true)
            }
            Err(error) => {
                is_expected(self.plan, error)?;
                assert_eq!(self.state(i), Residency::Evicted(Tier::Host));
                self.give(s, target).map(|()| false)
            }
        }
    }

    /// Sends an item off and waits until its bytes may go.
    fn send(&mut self, i: usize, s: usize) -> Go {
        self.evict(i, s)?;
        self.flush(s)?;
        // Once for the copy, once for the fence behind it.
        for _ in 0..2 {
            insist(self.plan, || self.bench.sim.sync())?;
            self.pull(s)?;
        }
        Ok(())
    }

    /// A fetch that is given up at once, and a reader on another stream that comes all the same:
    /// two copy-ins from one block on two lanes. Then the block goes, and another storage comes.
    fn again(&mut self, i: usize, s: usize) -> Go {
        let is_there = matches!(self.state(i), Residency::Resident | Residency::Evicting);
        if is_there && !self.items[i].is_owned {
            self.send(i, s)?;
        }
        if !self.prefetch(i, s)? {
            return Ok(());
        }
        self.cancel(i, s)?;
        let next = (s + 1) % self.bench.streams.len();
        if self.state(i) != Residency::Evicted(Tier::Host) {
            return Ok(());
        }
        if self.dice.rarely(4) {
            // Nobody reads; a stream that did not acquire them writes all of the bytes.
            self.acquire(i, next)?;
            return self.write(i, s);
        }
        if !self.read(i, next)? {
            return Ok(());
        }
        self.stream = next;
        if self.dice.rarely(2) {
            self.take_copy(i)?;
        } else {
            self.release(i, next)?;
        }
        if self.items.is_empty() {
            return Ok(());
        }
        let other = self.dice.below(self.items.len() as u64) as usize;
        self.evict(other, next)
    }

    fn cancel(&mut self, i: usize, s: usize) -> Go {
        let on = self.bench.streams[s].engine;
        let id = self.items[i].handle.id();
        let state = self.state(i);
        let result = self.engine.lock().cancel(id, on);
        match result {
            Ok(()) => match self.items[i].range.take() {
                Some(range) => self.give(s, range),
                None => Ok(()),
            },
            Err(error) if error.misuse() == Some(Misuse::State) => {
                assert_ne!(state, Residency::Refilling);
                Ok(())
            }
            Err(error) => {
                is_expected(self.plan, error)?;
                assert_eq!(self.state(i), state);
                Ok(())
            }
        }
    }

    fn take_copy(&mut self, i: usize) -> Go {
        let result = self.engine.lock().take(self.items[i].handle.id());
        match result {
            Ok(()) => Ok(()),
            Err(error) if error.misuse() == Some(Misuse::State) => Ok(()),
            Err(error) => is_expected(self.plan, error),
        }
    }

    /// The device bytes of an item whose handle is gone stay until the engine names them.
    fn bury(&mut self, id: StorageId, range: Option<DeviceRange>) -> Go {
        self.graves.extend(range.map(|range| (id, range)));
        Ok(())
    }

    /// Ends an item by the verb.
    pub(crate) fn release(&mut self, i: usize, s: usize) -> Go {
        self.order_after_all(i, s)?;
        let item = self.items.swap_remove(i);
        let id = item.handle.id();
        let released = self.engine.lock().release(item.handle, self.bench.streams[s].engine);
        match self.allowed(released)? {
            Some(()) => match item.range {
                Some(range) => self.give(s, range),
                None => Ok(()),
            },
            // It ended as if its handle had been dropped.
            None => self.bury(id, item.range),
        }
    }

    fn drop_handle(&mut self, i: usize, s: usize) -> Go {
        self.order_after_all(i, s)?;
        self.happened[Kind::HandleDropped as usize] = true;
        let item = self.items.swap_remove(i);
        let id = item.handle.id();
        drop(item.handle);
        self.bury(id, item.range)
    }

    fn forget_handle(&mut self, i: usize) {
        self.happened[Kind::HandleForgotten as usize] = true;
        let item = self.items.swap_remove(i);
        self.forgotten.push((item.handle.id(), item.range));
        std::mem::forget(item.handle);
    }

    /// Asks about an old ticket, or forgets them all.
    fn ticket(&mut self) -> Go {
        if self.dice.rarely(2) {
            self.happened[Kind::TicketForgotten as usize] |= !self.tickets.is_empty();
            self.tickets.clear();
        }
        for n in 0..self.tickets.len() {
            let done = self.engine.lock().is_done(self.tickets[n]);
            self.allowed(done)?;
        }
        Ok(())
    }

    /// One verb of the framework's.
    pub(crate) fn verb(&mut self) -> Go {
        // What has just been used is likely to be used again.
        if self.dice.rarely(2) {
            self.stream = self.dice.below(self.bench.streams.len() as u64) as usize;
        }
        let s = self.stream;
        let verb = self.plan.verb(&mut self.dice);
        if self.items.is_empty() || (verb == Verb::Add && self.items.len() < 6) {
            return self.add(s);
        }
        if self.item >= self.items.len() || self.dice.rarely(2) {
            self.item = self.dice.below(self.items.len() as u64) as usize;
        }
        let i = self.item;
        match verb {
            Verb::Add | Verb::Evict => self.evict(i, s),
            Verb::Acquire => self.acquire(i, s).map(|_| ()),
            Verb::Read => self.read(i, s).map(|_| ()),
            Verb::Write => self.write(i, s),
            Verb::Pull => self.pull(s),
            Verb::ReadHost => self.read_host(i).map(|_| ()),
            Verb::Flush => {
                let flushed = self.engine.lock().flush(self.bench.streams[s].engine);
                self.allowed(flushed).map(|_| ())
            }
            Verb::Step => {
                let stepped = self.engine.lock().step();
                self.allowed(stepped).map(|_| ())
            }
            Verb::MarkStep => {
                let marked = self.engine.lock().mark_step();
                self.allowed(marked).map(|_| ())
            }
            Verb::Prefetch => self.prefetch(i, s).map(|_| ()),
            Verb::Cancel => self.cancel(i, s),
            Verb::Again => self.again(i, s),
            Verb::Take => self.take_copy(i),
            Verb::Release => self.release(i, s),
            Verb::Drop => self.drop_handle(i, s),
            Verb::Forget => {
                self.forget_handle(i);
                Ok(())
            }
            Verb::Ticket => self.ticket(),
            Verb::Blow if self.plan.panics => {
                self.happened[Kind::PanicInCallback as usize] = true;
                insist(self.plan, || self.bench.blow(s))
            }
            Verb::Blow => Ok(()),
            Verb::Gather => self.gather(s),
            Verb::Scatter => self.scatter(s),
            Verb::Discard => self.discard(),
        }
    }

    /// Reads and compares every item, and ends it.
    pub(crate) fn read_all(&mut self) -> Go {
        // Those on the device first: they make room for the others.
        let mut tries = 0;
        while !self.items.is_empty() {
            let on_device = |i: &usize| self.state(*i).is_on_device();
            let i = (0..self.items.len()).find(on_device).unwrap_or(0);
            // Where forgotten storages fill the device, the host copy is the one to compare.
            let is_full = tries > TRIES / 2 && !self.forgotten.is_empty();
            if self.read(i, 0)? || (is_full && self.read_host(i)?) {
                self.release(i, 0)?;
            } else {
                let stepped = self.engine.lock().step();
                self.allowed(stepped)?;
                self.pull(0)?;
            }
            tries += 1;
            if tries % 50 == 0 {
                insist(self.plan, || self.bench.sim.sync())?;
            }
            assert!(tries < TRIES, "{} storages are stuck: {:?}", self.items.len(), self.engine);
        }
        Ok(())
    }
}
