//! The device, the engine, raw lanes beside it, and the kernel that holds them all.
//!
//! What it is not: it measures nothing by itself.
//!
//! Invariant: while the device is held, everything that is timed is enqueued; so what is timed is
//! the device's work alone. A run in which the hold was too short says so.
//!
//! ```text
//!   busy     ..held..|gate|                      gate, end: timed events
//!   compute         wait(gate)  E1 .. ends |end|      the stream that the storages are used on
//!   lanes                       |== copies ==|
//! ```
//!
//! What is measured uses it.

use crate::busy::{BUSY, GRID, THREADS};
use crate::driver::{Driver, Refused};
use crate::watch::Watch;
use lightering::backend::{Arg, Backend, Timing};
use lightering::pinned::{Block, Client};
use lightering::trace::Site;
use lightering::{
    Acquire, Bytes, DeviceRange, Engine, Error, EventId, Evict, Kind, Misuse, Name, Options,
    PinnedPool, PinnedRange, Result, Storage, StreamId,
};
use std::ops::Range;
use std::time::Duration;

/// A stream by its two names.
#[derive(Clone, Copy)]
pub(crate) struct Stream {
    pub(crate) id: StreamId,
    pub(crate) raw: usize,
}

/// What a rig is made for.
#[derive(Clone)]
pub(crate) struct Plan {
    /// Bytes of a storage, and how many there are.
    pub(crate) bytes: Bytes,
    pub(crate) count: usize,
    pub(crate) options: Options,
    /// Does the checker of order look on?
    pub(crate) is_watched: bool,
}

impl Plan {
    /// Lanes that nothing bounds but the trunks.
    pub(crate) fn new(bytes: Bytes, count: usize) -> Plan {
        let options = Options {
            unreleased_bytes_max: Bytes::MAX,
            prefetch_bytes_max: Bytes::MAX,
            prefetch_count_max: count,
            transfers_max: 4 * count.max(256),
            events_max: 16 * count.max(512),
            ..Options::default()
        };
        Plan { bytes, count, options, is_watched: false }
    }

    pub(crate) fn trunks(mut self, trunk_bytes_max: Bytes) -> Plan {
        self.options.trunk_bytes_max = trunk_bytes_max;
        self.options.ahead_trunk_bytes_max = trunk_bytes_max;
        self
    }
}

/// How raw copies are cut.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    /// Into pieces of at most this many bytes.
    pub(crate) trunk: Bytes,
    /// An event recorded on the lane after each.
    pub(crate) mark: Option<EventId>,
}

/// One call for each copy.
pub(crate) const WHOLE: Cut = Cut { trunk: Bytes::MAX, mark: None };

/// One device with two users: this program, and the engine.
pub(crate) struct Rig {
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) engine: Engine,
    /// The driver's own calls; none on a simulated device.
    pub(crate) driver: Option<Driver>,
    client: Client,
    numbers: DeviceRange,
    pub(crate) busy: StreamId,
    /// The stream the storages are used on, for this program and for the engine.
    pub(crate) compute: Stream,
    pub(crate) on: StreamId,
    pub(crate) out: Stream,
    pub(crate) back: Stream,
    gate: EventId,
    end: EventId,
    copied: EventId,
    link: EventId,
    /// What the raw lanes copy; the storages have the same device bytes.
    pub(crate) raw: Vec<(DeviceRange, Block)>,
    /// Rounds of the holding kernel in a second.
    pub(crate) rounds_a_second: f64,
    /// How long it holds, and the most that it ever does.
    hold: Duration,
    hold_most: Duration,
    watch: Watch,
    /// Other work runs that is not waited for.
    pub(crate) unsynced: bool,
    /// Runs whose gate had opened before all was enqueued.
    pub(crate) unheld: u32,
}

/// How long the device is held for each copy that is enqueued meanwhile, and for all else.
const HOLD_EACH: Duration = Duration::from_micros(8);
const HOLD_LEAST: Duration = Duration::from_millis(2);
/// Where a hold was too short the next ones are longer, up to so many times: what is still not held
/// then waits for room in the driver's own queue, and no hold is long enough for it.
const HOLD_GROWTH: u32 = 4;
/// Rounds of the trial that tells how long one takes.
const ROUNDS_TRIAL: u32 = 100_000;

impl Rig {
    pub(crate) fn new(
        [mut backend, device]: [Box<dyn Backend>; 2],
        pool: &PinnedPool,
        plan: &Plan,
    ) -> Result<Rig> {
        let about = backend.about();
        let mut engine = Engine::new(device, pool, plan.options.clone())?;
        if plan.options.nvtx {
            println!("{}", engine.listening());
        }
        let watch = Watch::over(&mut engine, plan.is_watched);
        let mut client = pool.client(backend.fence(), Bytes::MAX)?;
        let driver = match about.simulated {
            true => None,
            false => Some(Driver::open(about.device.0).map_err(refused)?),
        };
        let mut stream = || -> Result<Stream> {
            let id = backend.create_stream()?;
            Ok(Stream { id, raw: backend.raw_stream(id)? })
        };
        let (busy, compute, out, back) = (stream()?.id, stream()?, stream()?, stream()?);
        let on = engine.adopt_stream(compute.raw)?;
        let gate = backend.create_event(Timing::On)?;
        let end = backend.create_event(Timing::On)?;
        let copied = backend.create_event(Timing::On)?;
        let link = backend.create_event(Timing::Off)?;
        let mut take = |len| DeviceRange::new(backend.alloc_device(len, busy)?, len);
        let numbers = take(Bytes(THREADS * 4))?;
        let mut raw = Vec::with_capacity(plan.count);
        for _ in 0..plan.count {
            let mut block = client.lend(plan.bytes, Name::new("raw"))?.block;
            block.mark_written(plan.bytes)?;
            raw.push((take(plan.bytes)?, block));
        }
        backend.sync()?;
        let mut rig = Rig {
            backend,
            engine,
            driver,
            client,
            numbers,
            busy,
            compute,
            on,
            out,
            back,
            gate,
            end,
            copied,
            link,
            raw,
            rounds_a_second: 0.0,
            hold: Duration::ZERO,
            hold_most: Duration::ZERO,
            watch,
            unsynced: false,
            unheld: 0,
        };
        rig.hold_for(HOLD_LEAST + HOLD_EACH * plan.count as u32);
        // The second time the device's clock is nearer to what it will be.
        for _ in 0..2 {
            rig.open_gate()?;
            rig.spin(ROUNDS_TRIAL)?;
            rig.rounds_a_second = f64::from(ROUNDS_TRIAL) / rig.timed(rig.compute.id)?;
        }
        Ok(rig)
    }

    /// What is enqueued behind a hold takes the host at most about so long.
    pub(crate) fn hold_for(&mut self, hold: Duration) {
        self.hold = hold;
        self.hold_most = hold * HOLD_GROWTH;
    }

    /// Bytes of all storages.
    pub(crate) fn all(&self) -> f64 {
        self.raw.iter().map(|(range, _)| range.len().0 as f64).sum()
    }

    /// Holds the compute stream and the raw lanes until the gate opens.
    pub(crate) fn hold(&mut self) -> Result<()> {
        if self.unsynced {
            // What runs already holds nobody: the gate opens at once.
            self.backend.record(self.gate, self.compute.id)?;
        } else {
            self.backend.sync()?;
            let rounds = (self.hold.as_secs_f64() * self.rounds_a_second) as u32;
            let hold = [Arg::Update(self.numbers), Arg::U32(rounds)];
            self.backend.launch(&BUSY, GRID, &hold, self.busy)?;
            self.backend.record(self.gate, self.busy)?;
        }
        for stream in [self.compute, self.out, self.back] {
            self.backend.wait(stream.id, self.gate, Site::Outside)?;
        }
        Ok(())
    }

    /// So many rounds of a kernel that touches no memory, on the compute stream.
    pub(crate) fn spin(&mut self, rounds: u32) -> Result<()> {
        let args = [Arg::Update(self.numbers), Arg::U32(rounds)];
        self.backend.launch(&BUSY, GRID, &args, self.compute.id)
    }

    /// Remembers all that was enqueued on the busy stream until now.
    pub(crate) fn mark_busy(&mut self) -> Result<()> {
        self.backend.record(self.copied, self.busy)
    }

    /// Was what was remembered done before what ran next to it? Then it was no company to the end.
    pub(crate) fn look_at_company(&mut self) -> Result<()> {
        if self.unsynced && self.backend.query(self.copied, Site::Outside)? {
            self.unheld += 1;
        }
        Ok(())
    }

    /// Opens the gate at once: what is timed begins on the compute stream now.
    pub(crate) fn open_gate(&mut self) -> Result<()> {
        self.backend.record(self.gate, self.compute.id)
    }

    /// Orders a stream behind another's work until now.
    pub(crate) fn follow(&mut self, later: StreamId, earlier: StreamId) -> Result<()> {
        self.backend.record(self.link, earlier)?;
        self.backend.wait(later, self.link, Site::Outside)
    }

    /// Seconds from the gate until all that was enqueued on `last` is done.
    pub(crate) fn let_go(&mut self, last: StreamId) -> Result<f64> {
        self.backend.record(self.end, last)?;
        self.look_at_gate()?;
        self.backend.sync()?;
        Ok(self.backend.elapsed(self.gate, self.end)?.as_secs_f64())
    }

    /// As [`Rig::let_go`], for what nothing held: the gate was opened at once.
    pub(crate) fn timed(&mut self, last: StreamId) -> Result<f64> {
        self.backend.record(self.end, last)?;
        self.backend.sync()?;
        Ok(self.backend.elapsed(self.gate, self.end)?.as_secs_f64())
    }

    /// Was the hold too short? The next one is longer.
    fn look_at_gate(&mut self) -> Result<()> {
        if self.backend.query(self.gate, Site::Outside)? {
            self.unheld += 1;
            self.hold = (2 * self.hold).min(self.hold_most);
        }
        Ok(())
    }

    /// As [`Rig::let_go`], waiting for that stream's work alone.
    pub(crate) fn let_go_of(&mut self, last: StreamId) -> Result<f64> {
        self.backend.record(self.end, last)?;
        if !self.unsynced {
            self.look_at_gate()?;
        }
        while !self.backend.query(self.end, Site::Outside)? {
            std::hint::spin_loop();
        }
        Ok(self.backend.elapsed(self.gate, self.end)?.as_secs_f64())
    }

    /// As [`Rig::let_go`]; and, first, seconds until what was enqueued on `copies` is done.
    pub(crate) fn let_both_go(&mut self, copies: StreamId, last: StreamId) -> Result<[f64; 2]> {
        self.backend.record(self.copied, copies)?;
        let all = self.let_go(last)?;
        Ok([self.backend.elapsed(self.gate, self.copied)?.as_secs_f64(), all])
    }

    /// Enqueues raw copies of what `range` names, as `cut` says.
    pub(crate) fn raw_out(&mut self, range: Range<usize>, cut: Cut) -> Result<()> {
        for (device, block) in &self.raw[range] {
            pieces(block, *device, cut.trunk, |host, device| {
                match &self.driver {
                    Some(driver) => driver.copy_out(host, device, self.out.raw).map_err(refused),
                    None => self.backend.copy_out(host, device, self.out.id),
                }?;
                cut.mark.map_or(Ok(()), |mark| self.backend.record(mark, self.out.id))
            })?;
        }
        Ok(())
    }

    /// As [`Rig::raw_out`], back, the last one first.
    pub(crate) fn raw_in(&mut self, range: Range<usize>, cut: Cut) -> Result<()> {
        for (device, block) in self.raw[range].iter().rev() {
            pieces(block, *device, cut.trunk, |host, device| {
                match &self.driver {
                    Some(driver) => driver.copy_in(device, host, self.back.raw).map_err(refused),
                    None => self.backend.copy_in(device, host, self.back.id),
                }?;
                cut.mark.map_or(Ok(()), |mark| self.backend.record(mark, self.back.id))
            })?;
        }
        Ok(())
    }

    /// The first `len` bytes of one raw copy, back.
    pub(crate) fn raw_part_in(&mut self, at: usize, len: Bytes) -> Result<()> {
        let (device, block) = &self.raw[at];
        let part = device.part(Bytes::ZERO, len.min(device.len()))?;
        pieces(block, part, Bytes::MAX, |host, device| match &self.driver {
            Some(driver) => driver.copy_in(device, host, self.back.raw).map_err(refused),
            None => self.backend.copy_in(device, host, self.back.id),
        })
    }

    /// Storages over the same device bytes as the raw copies'.
    pub(crate) fn adopt(&mut self) -> Result<Vec<Storage>> {
        self.raw.iter().map(|(range, _)| self.engine.adopt(*range, "storage")).collect()
    }

    /// As many storages of the engine's own memory.
    pub(crate) fn own(&mut self) -> Result<Vec<Storage>> {
        let (engine, on) = (&mut self.engine, self.on);
        self.raw.iter().map(|(range, _)| engine.alloc(range.len(), on, "storage")).collect()
    }

    pub(crate) fn evict(&mut self, storages: &[Storage]) -> Result<()> {
        for storage in storages {
            match self.engine.evict(storage.id(), self.on)? {
                Evict::Moving(_) => {}
                other => return Err(unexpected("evict", format!("{other:?}"))),
            }
        }
        Ok(())
    }

    /// Everything evicted is away, as far as the compute stream can tell.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.engine.flush(self.on)?;
        while self.engine.releasable(self.on)?.is_some() {}
        Ok(())
    }

    /// Fetches ahead, the last one first.
    pub(crate) fn prefetch(&mut self, storages: &[Storage], first: usize) -> Result<()> {
        for (storage, (range, _)) in storages.iter().zip(&self.raw[first..]).rev() {
            self.engine.prefetch(storage.id(), *range, self.on)?;
        }
        Ok(())
    }

    pub(crate) fn acquire(&mut self, storages: &[Storage]) -> Result<()> {
        for storage in storages.iter().rev() {
            match self.engine.acquire(storage.id(), self.on)? {
                Acquire::Ready(_) => {}
                other => return Err(unexpected("acquire", format!("{other:?}"))),
            }
        }
        Ok(())
    }

    /// Fetches on demand, the last one first.
    pub(crate) fn refill(&mut self, storages: &[Storage]) -> Result<()> {
        for (storage, (range, _)) in storages.iter().zip(&self.raw).rev() {
            self.engine.refill(storage.id(), *range, self.on)?;
        }
        Ok(())
    }

    pub(crate) fn release(&mut self, storages: Vec<Storage>) -> Result<()> {
        for storage in storages {
            self.engine.release(storage, self.on)?;
        }
        self.engine.drain()?;
        self.engine.mark_step()
    }

    /// Gives everything back.
    pub(crate) fn close(mut self) -> Result<()> {
        self.engine.shutdown()?;
        let records = self.watch.verdict()?;
        if records > 0 {
            println!("checked: {records} records, no hazard");
        }
        self.backend.sync()?;
        for (range, block) in self.raw {
            self.client.give_back(block, None)?;
            self.backend.free_device(range.at(), self.busy)?;
        }
        self.backend.free_device(self.numbers.at(), self.busy)?;
        self.backend.sync()
    }
}

pub(crate) fn refused(Refused(what): Refused) -> Error {
    Error::new(Kind::Io, "raw call").detail(what)
}

fn unexpected(op: &'static str, what: String) -> Error {
    Error::usage(Misuse::State, op).detail(what)
}

/// Calls `copy` for each part of a block that lies in one registration.
pub(crate) fn pieces(
    block: &Block,
    range: DeviceRange,
    trunk: Bytes,
    mut copy: impl FnMut(PinnedRange, DeviceRange) -> Result<()>,
) -> Result<()> {
    let mut done = Bytes::ZERO;
    while done < range.len() {
        let host = block.trunk(done, trunk.min(range.len() - done))?;
        copy(host, range.part(done, host.len())?)?;
        done += host.len();
    }
    Ok(())
}
