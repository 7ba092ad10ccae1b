//! A framework that uses an engine as frameworks do, and takes every refusal as the verbs' texts
//! say that it may be taken: nothing changed, nothing is lost, it can be tried again.
//!
//! What it is not: lenient. An error of a kind that nothing ordered, a state that changed where a
//! verb said that nothing did, a byte that differs, a thing left behind: each ends the run.
//!
//! Invariant: it keeps the order that is a framework's own affair, between its own kernels.
//!
//! ```text
//!   verb -> Ok            the books say so
//!        -> Err, alive    asserted: nothing changed     -> tried again, or let be
//!        -> Err(Lost)     asserted: a fatal fault was ordered -> the run ends, latched
//! ```

use crate::batches::Rows;
use crate::bench::Bench;
use crate::plan::{Dice, Kind, Plan};
use lightering::copy::Transfer;
use lightering::storage::{Residency, Storage};
use lightering::{Bytes, DeviceRange, Error, Kind as Cause, Misuse, Result, Shared, StorageId};

/// Why a run cannot go on: the device is lost.
pub(crate) struct Lost(pub(crate) Error);

pub(crate) type Go<T = ()> = std::result::Result<T, Lost>;

/// One storage as the framework sees it.
pub(crate) struct Item {
    pub(crate) handle: Storage,
    pub(crate) len: Bytes,
    /// Pattern its bytes must show.
    pub(crate) seed: u64,
    /// The stream whose kernel wrote the bytes that are on the device; `None` once the engine
    /// brought them there.
    pub(crate) writer: Option<usize>,
    /// Streams that read since, one bit each.
    pub(crate) readers: u8,
    /// The device bytes, where they are the framework's own.
    pub(crate) range: Option<DeviceRange>,
    pub(crate) is_owned: bool,
    /// Where the bytes are whenever they are there, if their address stays.
    pub(crate) fixed: Option<DeviceRange>,
}

impl Item {
    pub(crate) fn id(&self) -> StorageId {
        self.handle.id()
    }
}

pub(crate) struct Machine<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) bench: Bench,
    pub(crate) engine: Shared,
    pub(crate) items: Vec<Item>,
    /// Device bytes whose handles were dropped, until the engine names them.
    pub(crate) graves: Vec<(StorageId, DeviceRange)>,
    /// Device bytes whose handles were forgotten.
    pub(crate) forgotten: Vec<(StorageId, Option<DeviceRange>)>,
    pub(crate) tickets: Vec<Transfer>,
    pub(crate) batches: Vec<Rows>,
    pub(crate) dice: Dice,
    seeds: u64,
    /// The item and the stream of the last verb.
    pub(crate) item: usize,
    pub(crate) stream: usize,
    /// Which kinds of faults of the process happened.
    pub(crate) happened: [bool; Kind::COUNT],
}

/// A call that only ordered faults keep from working works after so many tries.
pub(crate) const TRIES: usize = 400;

const LENS: [u64; 6] = [1, 255, 256, 600, 1024, 2000];

impl<'a> Machine<'a> {
    /// Opens everything, trying again where it was refused.
    pub(crate) fn open(plan: &'a Plan, mut bench: Bench) -> Go<Machine<'a>> {
        let mut engine = insist(plan, || bench.engine(plan))?;
        while bench.streams.len() < plan.streams {
            let here = insist(plan, || bench.open())?;
            insist(plan, || bench.share(&mut engine, here))?;
        }
        insist(plan, || bench.order_event())?;
        let engine = Shared::new(engine);
        let mut dice = Dice::new(!plan.seed);
        let seeds = dice.roll() << 8;
        let (items, graves, forgotten, tickets, batches) = Default::default();
        let happened = [false; Kind::COUNT];
        let seeds = seeds | 1;
        Ok(Machine {
            plan,
            bench,
            engine,
            items,
            graves,
            forgotten,
            tickets,
            batches,
            dice,
            seeds,
            item: 0,
            stream: 0,
            happened,
        })
    }

    /// Passes on errors that a run must be ready for.
    #[track_caller]
    pub(crate) fn allowed<T>(&self, result: Result<T>) -> Go<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) => is_expected(self.plan, error).map(|()| None),
        }
    }

    pub(crate) fn seed(&mut self) -> u64 {
        self.seeds += 2;
        self.seeds
    }

    pub(crate) fn state(&self, i: usize) -> Residency {
        self.engine.lock().residency(self.items[i].handle.id()).unwrap()
    }

    pub(crate) fn fill(&mut self, s: usize, range: DeviceRange, seed: u64) -> Go {
        insist(self.plan, || self.bench.fill(s, range, seed))
    }

    pub(crate) fn check(&mut self, s: usize, range: DeviceRange, seed: u64) -> Go {
        insist(self.plan, || self.bench.check(s, range, seed))
    }

    pub(crate) fn give(&mut self, s: usize, range: DeviceRange) -> Go {
        insist(self.plan, || self.bench.give(s, range.at()))
    }

    pub(crate) fn take(&mut self, s: usize, len: Bytes) -> Go<Option<DeviceRange>> {
        let taken = self.bench.take(s, len);
        self.allowed(taken)
    }

    /// The framework's own order between two of its streams.
    fn order(&mut self, first: usize, then: usize) -> Go {
        if first == then {
            return Ok(());
        }
        let bench = &mut self.bench;
        let event = insist(self.plan, || bench.order_event())?;
        insist(self.plan, || bench.record(event, first))?;
        insist(self.plan, || bench.wait(event, then))
    }

    pub(crate) fn add(&mut self, s: usize) -> Go {
        let len = Bytes(self.dice.one(&LENS));
        let is_owned = self.plan.is_owned.unwrap_or_else(|| self.dice.rarely(2));
        let on = self.bench.streams[s].engine;
        let seed = self.seed();
        let mut fixed = false;
        let (handle, range) = if is_owned {
            let is_fixed = self.dice.rarely(3);
            let got = match is_fixed {
                true => self.engine.lock().alloc_fixed(len, on, "fixed"),
                false => self.engine.lock().alloc(len, on, "owned"),
            };
            fixed = is_fixed;
            match self.allowed(got)? {
                Some(handle) => (handle, None),
                None => return Ok(()),
            }
        } else {
            let Some(range) = self.take(s, len)? else { return Ok(()) };
            let got = self.engine.lock().adopt(range, "adopted");
            match self.allowed(got)? {
                Some(handle) => (handle, Some(range)),
                None => return self.give(s, range),
            }
        };
        let bytes = self.engine.lock().range(handle.id()).unwrap();
        let (writer, readers) = (Some(s), 0);
        let fixed = fixed.then_some(bytes);
        self.items.push(Item { handle, len, seed, writer, readers, range, is_owned, fixed });
        self.fill(s, bytes, seed)
    }

    /// The engine orders what it knows of; the producer's stream is the framework's own affair.
    pub(crate) fn order_after_writer(&mut self, i: usize, s: usize) -> Go {
        match self.items[i].writer {
            Some(writer) => self.order(writer, s),
            None => Ok(()),
        }
    }

    pub(crate) fn order_after_all(&mut self, i: usize, s: usize) -> Go {
        self.order_after_writer(i, s)?;
        for reader in 0..self.bench.streams.len() {
            if self.items[i].readers & 1 << reader != 0 {
                self.order(reader, s)?;
            }
        }
        Ok(())
    }
}

/// An error that a run of this plan must be ready for.
#[track_caller]
pub(crate) fn is_expected(plan: &Plan, error: Error) -> Go {
    if error.is_lost() {
        // A framework's memory that a copy may touch until nobody knows when is a loss as well.
        let is_given_up = plan.has(Kind::SyncFail) && error.driver_code().is_none();
        let is_planned = plan.is_fatal() || plan.panics || is_given_up;
        assert!(is_planned, "nothing fatal was ordered: {error:?}");
        return Err(Lost(error));
    }
    let is_capture = error.misuse() == Some(Misuse::Capturing);
    let is_rejected = matches!(error.driver_code(), Some(712 | 800 | 801));
    let is_expected = error.is_retryable()
        || (is_capture && (plan.has(Kind::CaptureByOthers) || plan.has(Kind::SyncFail)))
        || (is_rejected && plan.has(Kind::RegisterFail));
    assert!(is_expected, "{error:?}");
    assert_ne!(error.kind(), Cause::Corrupt);
    Ok(())
}

/// Calls until it works: only faults that were ordered keep it from working.
#[track_caller]
pub(crate) fn insist<T>(plan: &Plan, mut call: impl FnMut() -> Result<T>) -> Go<T> {
    for _ in 0..TRIES {
        match call() {
            Ok(value) => return Ok(value),
            Err(error) => is_expected(plan, error)?,
        }
    }
    panic!("a call goes on failing after {TRIES} tries");
}
