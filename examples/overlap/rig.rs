//! The device, the engine, and the runs that are timed.
//!
//! What it is not: it prints nothing.
//!
//! Invariant: raw copies and the engine's move the same bytes in the same order: all out, then all
//! back, last first.
//!
//! ```text
//!   busy stream    |gate|========== kernel ==========|end
//!   copy streams   |gate|== out ==..|== back ==..|---^
//! ```
//!
//! `main` uses it.

use crate::Wish;
use crate::busy::{BUSY, GRID, THREADS};
use lightering::backend::{Arg, Backend, Timing};
use lightering::pinned::{Block, Client};
use lightering::trace::Site;
use lightering::{
    Budget, Bytes, DeviceRange, Engine, Error, EventId, Misuse, Name, Options, PinnedPool,
    PinnedRange, PoolOptions, Result, Storage, StreamId,
};

/// Runs of each kind; the median counts.
const RUNS: usize = 3;
/// Rounds of the run that tells how long a round takes.
const ROUNDS_TRIAL: u32 = 200_000;

/// Seconds of each kind of run.
pub(crate) struct Figures {
    /// Raw copies, alone.
    pub(crate) copy: f64,
    /// The busy kernel, alone.
    pub(crate) compute: f64,
    /// Both, copies through the engine.
    pub(crate) both: f64,
    /// Both, raw copies.
    pub(crate) both_raw: f64,
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
    client: Client,
    bytes: Bytes,
    /// What the busy kernel works on.
    numbers: DeviceRange,
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
    pub(crate) fn new(backends: [Box<dyn Backend>; 2], wish: &Wish) -> Result<Rig> {
        let [mut backend, device] = backends;
        let (bytes, count) = (wish.bytes, wish.count);
        // Blocks are rounded up by at most an eighth, or to a page.
        let room = (bytes.0 + bytes.0 / 8).next_multiple_of(4096) * count * 2;
        let budget = Budget::Bytes(Bytes(room));
        let pool =
            PinnedPool::new(backend.pinner(), PoolOptions { budget, ..PoolOptions::default() })?;
        pool.reserve(Bytes(room))?;
        let options = Options { prefetch_count_max: count as usize, ..Options::default() };
        let mut engine = Engine::new(device, &pool, options)?;
        let mut client = pool.client(backend.fence(), Bytes::MAX)?;
        let [busy, out, back, here] = make(|| backend.create_stream())?;
        let compute = [here, engine.adopt_stream(backend.raw_stream(here)?)?];
        let [gate, end] = make(|| backend.create_event(Timing::On))?;
        let links = make(|| backend.create_event(Timing::Off))?;
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
            client,
            bytes,
            numbers,
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

    /// Seconds from the gate until the busy kernel and the copies are both done.
    fn run(&mut self, copies: Copies, rounds: u32) -> Result<f64> {
        let on = self.compute[1];
        let mut storages: Vec<Storage> = Vec::new();
        if let Copies::Engine = copies {
            for _ in 0..self.raw.len() {
                storages.push(self.engine.alloc(self.bytes, on, "storage")?);
            }
        }
        self.backend.sync()?;
        self.backend.record(self.gate, self.busy)?;
        for stream in [self.out, self.back, self.compute[0]] {
            self.backend.wait(stream, self.gate, Site::Outside)?;
        }
        if rounds > 0 {
            let args = [Arg::Update(self.numbers), Arg::U32(rounds)];
            self.backend.launch(&BUSY, GRID, &args, self.busy)?;
        }
        match copies {
            Copies::Nobody => {}
            Copies::Raw => self.copy_raw()?,
            Copies::Engine => self.copy_by_engine(&storages)?,
        }
        for (stream, link) in [self.back, self.compute[0]].into_iter().zip(self.links) {
            self.backend.record(link, stream)?;
            self.backend.wait(self.busy, link, Site::Outside)?;
        }
        self.backend.record(self.end, self.busy)?;
        self.backend.sync()?;
        for storage in storages {
            self.engine.release(storage, on)?;
        }
        self.engine.mark_step()?;
        Ok(self.backend.elapsed(self.gate, self.end)?.as_secs_f64())
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
        for storage in storages.iter().rev() {
            self.engine.acquire(storage.id(), on)?;
        }
        Ok(())
    }

    /// Runs every kind, in turn, and takes the medians.
    pub(crate) fn figures(&mut self) -> Result<Figures> {
        let copy = self.run(Copies::Raw, 0)?;
        let trial = self.run(Copies::Nobody, ROUNDS_TRIAL)?;
        // The kernel is to be as long as the copies.
        let rounds = (f64::from(ROUNDS_TRIAL) * copy / trial).clamp(1.0, 4e9) as u32;
        let mut seconds: [Vec<f64>; 4] = Default::default();
        for _ in 0..RUNS {
            let kinds = [
                (Copies::Raw, 0),
                (Copies::Nobody, rounds),
                (Copies::Engine, rounds),
                (Copies::Raw, rounds),
            ];
            for ((copies, rounds), seconds) in kinds.into_iter().zip(&mut seconds) {
                seconds.push(self.run(copies, rounds)?);
            }
        }
        let [copy, compute, both, both_raw] = seconds.map(median);
        Ok(Figures { copy, compute, both, both_raw })
    }

    /// Gives everything back.
    pub(crate) fn close(mut self) -> Result<()> {
        self.engine.shutdown()?;
        for (range, block) in self.raw {
            self.client.give_back(block, None)?;
            self.backend.free_device(range.at(), self.busy)?;
        }
        self.backend.free_device(self.numbers.at(), self.busy)?;
        self.backend.sync()
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
