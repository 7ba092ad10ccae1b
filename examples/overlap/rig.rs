//! The device, the engine, and the runs that are timed.
//!
//! What it is not: it prints nothing.
//!
//! Invariant: raw copies and the engine's move the same bytes in the same order: all out, then all
//! back, last first. A run counts only if the device was held until all of it was enqueued.
//!
//! ```text
//!   busy stream    ..held|gate|========= compute ==========|end
//!   copy streams         |gate|== out ==..|== back ==..|---^
//! ```
//!
//! `main` uses it.

use crate::Wish;
use crate::busy::{BUSY, GRID, THREADS};
use crate::compute::{Compute, Kind, Place};
use crate::watch::Watch;
use lightering::backend::{Arg, Backend, Timing};
use lightering::pinned::{Block, Client};
use lightering::trace::Site;
use lightering::{
    Acquire, Budget, Bytes, DeviceRange, Engine, Error, EventId, Misuse, Name, Options, PinnedPool,
    PinnedRange, PoolOptions, Result, Storage, StreamId,
};
use std::str::FromStr;
use std::time::Instant;

/// Rounds of the kernel at the gate, at first: about a millisecond on devices of today.
const ROUNDS_HELD: u32 = 400_000;
/// The hold is doubled at most so often, where something is enqueued slower than that.
const HOLD_DOUBLINGS_MAX: u32 = 10;

/// Seconds of each kind of run, as medians.
pub(crate) struct Figures {
    /// Raw copies, alone.
    pub(crate) copy: f64,
    /// The compute, alone.
    pub(crate) compute: f64,
    /// Both, copies through the engine.
    pub(crate) both: f64,
    /// Both, raw copies.
    pub(crate) both_raw: f64,
    /// The last but one over the last, of runs that followed one another.
    pub(crate) ratio: f64,
    /// What the host took to enqueue the engine's copies, and the raw ones.
    pub(crate) enqueue: f64,
    pub(crate) enqueue_raw: f64,
}

/// Seconds of one run.
#[derive(Clone, Copy)]
struct Ran {
    device: f64,
    /// The host's, for the copies.
    enqueue: f64,
}

/// Whose device bytes the engine copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Those that the raw copies move.
    Adopted,
    /// Its own.
    Owned,
}

impl Memory {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Memory::Adopted => "adopted",
            Memory::Owned => "owned",
        }
    }
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Memory, String> {
        let known = [Memory::Adopted, Memory::Owned].into_iter().find(|it| it.name() == text);
        known.ok_or_else(|| String::from("must be adopted or owned"))
    }
}

/// Who copies in a run.
#[derive(Clone, Copy)]
enum Copies {
    Nobody,
    Raw,
    Engine,
}

/// One device with two users: this program, and the engine.
pub(crate) struct Rig {
    backend: Box<dyn Backend>,
    engine: Engine,
    watch: Watch,
    client: Client,
    bytes: Bytes,
    memory: Memory,
    rounds_held: u32,
    /// What the kernel at the gate works on.
    numbers: DeviceRange,
    kind: Kind,
    work: Compute,
    /// The stream that computes.
    busy: StreamId,
    out: StreamId,
    back: StreamId,
    /// The stream that the engine's storages are used on, as this program and the engine name it.
    compute: [StreamId; 2],
    /// With times: the gate, the end. Without: one for each stream that others wait for.
    gate: EventId,
    end: EventId,
    links: [EventId; 3],
    raw: Vec<(DeviceRange, Block)>,
}

impl Rig {
    /// Takes all memory, and pins all of it.
    pub(crate) fn new(backends: [Box<dyn Backend>; 2], wish: &Wish, place: Place) -> Result<Rig> {
        let [mut backend, device] = backends;
        let (bytes, count) = (wish.bytes, wish.count);
        // Blocks are rounded up by at most an eighth, or to a page.
        let room = (bytes.0 + bytes.0 / 8).next_multiple_of(4096) * count * 2;
        let budget = Budget::Bytes(Bytes(room));
        let pool =
            PinnedPool::new(backend.pinner(), PoolOptions { budget, ..PoolOptions::default() })?;
        pool.reserve(Bytes(room))?;
        let mut options = Options { prefetch_count_max: count as usize, ..Options::default() };
        if let Some(trunk) = wish.trunk {
            (options.trunk_bytes_max, options.ahead_trunk_bytes_max) = (trunk, trunk);
        }
        let mut engine = Engine::new(device, &pool, options)?;
        let watch = Watch::over(&mut engine, wish.check);
        let mut client = pool.client(backend.fence(), Bytes::MAX)?;
        let [busy, out, back, here] = make(|| backend.create_stream())?;
        let compute = [here, engine.adopt_stream(backend.raw_stream(here)?)?];
        let [gate, end] = make(|| backend.create_event(Timing::On))?;
        let links = make(|| backend.create_event(Timing::Off))?;
        let work = Compute::new(&mut *backend, wish.kind, place, busy)?;
        let mut take = |len| DeviceRange::new(backend.alloc_device(len, busy)?, len);
        let numbers = take(Bytes(THREADS * 4))?;
        let mut raw = Vec::new();
        for _ in 0..count {
            let mut block = client.lend(bytes, Name::new("raw"))?.block;
            block.mark_written(bytes)?;
            raw.push((take(bytes)?, block));
        }
        Ok(Rig {
            backend,
            engine,
            watch,
            client,
            bytes,
            memory: wish.memory,
            rounds_held: ROUNDS_HELD,
            numbers,
            kind: wish.kind,
            work,
            busy,
            out,
            back,
            compute,
            gate,
            end,
            links,
            raw,
        })
    }

    /// Seconds from the gate until compute and copies are both done.
    fn run(&mut self, copies: Copies, amount: u32) -> Result<Ran> {
        for _ in 0..HOLD_DOUBLINGS_MAX {
            if let Some(ran) = self.run_held(copies, amount)? {
                return Ok(ran);
            }
            self.rounds_held *= 2;
        }
        let error = Error::new(lightering::Kind::Busy, "overlap");
        Err(error.detail("the device could not be held until everything was enqueued"))
    }

    /// `None` where the device began before everything was enqueued.
    fn run_held(&mut self, copies: Copies, amount: u32) -> Result<Option<Ran>> {
        let on = self.compute[1];
        let mut storages: Vec<Storage> = Vec::new();
        if let Copies::Engine = copies {
            for (range, _) in &self.raw {
                storages.push(match self.memory {
                    Memory::Adopted => self.engine.adopt(*range, "storage")?,
                    Memory::Owned => self.engine.alloc(self.bytes, on, "storage")?,
                });
            }
        }
        self.backend.sync()?;
        let hold = [Arg::Update(self.numbers), Arg::U32(self.rounds_held)];
        self.backend.launch(&BUSY, GRID, &hold, self.busy)?;
        self.backend.record(self.gate, self.busy)?;
        for stream in [self.out, self.back, self.compute[0]] {
            self.backend.wait(stream, self.gate, Site::Outside)?;
        }
        let began = Instant::now();
        match copies {
            Copies::Nobody => {}
            Copies::Raw => self.copy_raw()?,
            Copies::Engine => self.copy_by_engine(&storages)?,
        }
        let enqueue = began.elapsed().as_secs_f64();
        if amount > 0 {
            self.work.enqueue(&mut *self.backend, amount)?;
        }
        for (stream, link) in [self.back, self.compute[0]].into_iter().zip(self.links) {
            self.backend.record(link, stream)?;
            self.backend.wait(self.busy, link, Site::Outside)?;
        }
        self.backend.record(self.end, self.busy)?;
        let held = !self.backend.query(self.gate, Site::Outside)?;
        self.backend.sync()?;
        for storage in storages {
            self.engine.release(storage, on)?;
        }
        self.engine.mark_step()?;
        let device = self.backend.elapsed(self.gate, self.end)?.as_secs_f64();
        Ok(held.then_some(Ran { device, enqueue }))
    }

    fn copy_raw(&mut self) -> Result<()> {
        for (range, block) in &self.raw {
            trunks(block, *range, |host, device| self.backend.copy_out(host, device, self.out))?;
        }
        self.backend.record(self.links[2], self.out)?;
        self.backend.wait(self.back, self.links[2], Site::Outside)?;
        for (range, block) in self.raw.iter().rev() {
            trunks(block, *range, |host, device| self.backend.copy_in(device, host, self.back))?;
        }
        Ok(())
    }

    fn copy_by_engine(&mut self, storages: &[Storage]) -> Result<()> {
        let on = self.compute[1];
        for storage in storages {
            self.engine.evict(storage.id(), on)?;
        }
        self.engine.flush(on)?;
        while self.engine.releasable(on)?.is_some() {}
        for (storage, (range, _)) in storages.iter().zip(&self.raw).rev() {
            // As a framework does: it has the memory again, and asks for the bytes.
            if let Acquire::NeedsRoom(_) = self.engine.acquire(storage.id(), on)? {
                self.engine.refill(storage.id(), *range, on)?;
            }
        }
        Ok(())
    }

    /// Runs every kind `runs` times, in turn, and takes the medians.
    pub(crate) fn figures(&mut self, runs: u32) -> Result<Figures> {
        // Both once before it counts: what is done the first time only is done then.
        self.run(Copies::Engine, self.kind.trial())?;
        let copy = self.run(Copies::Raw, 0)?.device;
        let amount = self.amount_as_long_as(copy)?;
        let mut seconds: [Vec<f64>; 4] = Default::default();
        let mut enqueues: [Vec<f64>; 2] = Default::default();
        for run in 0..runs {
            seconds[0].push(self.run(Copies::Raw, 0)?.device);
            seconds[1].push(self.run(Copies::Nobody, amount)?.device);
            // The two that are compared take turns in going first.
            let mut pair = [(0, Copies::Engine), (1, Copies::Raw)];
            if run % 2 == 1 {
                pair.reverse();
            }
            for (index, copies) in pair {
                let ran = self.run(copies, amount)?;
                seconds[2 + index].push(ran.device);
                enqueues[index].push(ran.enqueue);
            }
        }
        let ratio = median(seconds[2].iter().zip(&seconds[3]).map(|(a, b)| a / b).collect());
        let [copy, compute, both, both_raw] = seconds.map(median);
        let [enqueue, enqueue_raw] = enqueues.map(median);
        Ok(Figures { copy, compute, both, both_raw, ratio, enqueue, enqueue_raw })
    }

    /// How much compute takes `copy` seconds. Tried twice, the second time about as long as it will
    /// be: a device that has computed for a while may lower its clock.
    fn amount_as_long_as(&mut self, copy: f64) -> Result<u32> {
        let mut amount = self.kind.trial();
        for _ in 0..2 {
            let seconds = self.run(Copies::Nobody, amount)?.device;
            let wanted = f64::from(amount) * copy / seconds;
            amount = wanted.round().clamp(1.0, 4e9) as u32;
        }
        Ok(amount)
    }

    /// Gives everything back. Returns how many records the checker looked at.
    pub(crate) fn close(mut self) -> Result<u64> {
        self.engine.shutdown()?;
        let records = self.watch.verdict()?;
        for (range, block) in self.raw {
            self.client.give_back(block, None)?;
            self.backend.free_device(range.at(), self.busy)?;
        }
        self.backend.free_device(self.numbers.at(), self.busy)?;
        self.work.close(&mut *self.backend)?;
        self.backend.sync()?;
        Ok(records)
    }
}

fn make<T, const N: usize>(mut one: impl FnMut() -> Result<T>) -> Result<[T; N]> {
    let all = (0..N).map(|_| one()).collect::<Result<Vec<T>>>()?;
    all.try_into().map_err(|_| Error::usage(Misuse::BadValue, "make"))
}

/// Calls `copy` for each part of a block that lies in one registration.
fn trunks(
    block: &Block,
    range: DeviceRange,
    mut copy: impl FnMut(PinnedRange, DeviceRange) -> Result<()>,
) -> Result<()> {
    let mut done = Bytes::ZERO;
    while done < range.len() {
        let host = block.trunk(done, range.len() - done)?;
        copy(host, range.part(done, host.len())?)?;
        done += host.len();
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
