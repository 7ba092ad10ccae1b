//! Memory given back and taken again at an address that stays, beside the raw driver calls.
//!
//! What it is not: a time of copies. The host's time is taken, with the device idle, and the host
//! copy is good: there is nothing to copy out, and of the copy in only the enqueuing counts.
//!
//! Invariant: both sides give the same bytes back and have them mapped again with a copy in behind
//! them; raw keeps the memory's handle, as the engine does. What the mapping calls alone take
//! stands beside it in a row of its own.
//!
//! ```text
//!   ours  evict (clean) -> flush until unmapped -> acquire
//!   raw   cuMemUnmap -> cuMemMap, cuMemSetAccess -> record wait copy record wait
//! ```
//!
//! `main` uses it. On the simulated device the seam's verbs stand in, and times are virtual.

use crate::driver::Driver;
use crate::figure::{Better, Figures, Row};
use crate::mapping::Mapping;
use crate::rig::{Stream, pieces, refused};
use crate::watch::Watch;
use crate::{Bench, pairs};
use lightering::backend::sim::World;
use lightering::backend::{Backend, Timing};
use lightering::pinned::{Block, Client};
use lightering::storage::{Residency, Tier};
use lightering::trace::Site;
use lightering::{
    Acquire, Budget, Bytes, DeviceRange, Engine, Error, EventId, Evict, Kind, MemoryId, Misuse,
    Name, Options, PinnedPool, PoolOptions, Result, Storage, StreamId,
};
use std::time::{Duration, Instant};

/// Microseconds of the host's for both; and, beside that, raw without its copy.
pub(crate) fn address(bench: &Bench, out: &mut Figures) -> Result<()> {
    let (mib, gib) = (Bytes::mib(64), Bytes::gib(1));
    // One piece of memory for each storage; and, to choose by, several.
    for (name, bytes, piece) in [
        ("64mib", mib, gib),
        ("1gib", gib, gib),
        ("1gib-by-256mib", gib, Bytes::mib(256)),
        ("1gib-by-64mib", gib, mib),
    ] {
        let mut place = match Place::new(bench, bytes, piece) {
            Err(error) if matches!(error.kind(), Kind::Unavailable(_)) => {
                println!("address: {error}");
                return Ok(());
            }
            place => place?,
        };
        let row = |name: String| Row::new(format!("address.{name}"), "us", Better::Lower);
        let (mut whole, mut bare) = (row(name.to_string()), row(format!("{name}-mapping")));
        for (ours, raw) in pairs(&mut place, bench.pairs, Place::ours, Place::raw)? {
            whole.pairs.push((ours.whole, raw.whole));
            bare.pairs.push((ours.whole, raw.mapping));
        }
        place.close()?;
        out.add([whole, bare]);
    }
    Ok(())
}

/// Microseconds.
struct Times {
    mapping: f64,
    whole: f64,
}

/// Raw memory of the same size, mapped at an address of its own.
enum Raw {
    Cuda(Driver, Mapping),
    /// The seam's verbs.
    Sim(DeviceRange, MemoryId),
}

/// One storage, and as much raw memory.
struct Place {
    world: Option<World>,
    watch: Watch,
    backend: Box<dyn Backend>,
    engine: Engine,
    on: StreamId,
    storage: Storage,
    client: Client,
    block: Block,
    raw: Raw,
    range: DeviceRange,
    compute: Stream,
    back: Stream,
    events: [EventId; 2],
    raw_events: [usize; 2],
}

impl Place {
    fn new(bench: &Bench, bytes: Bytes, piece: Bytes) -> Result<Place> {
        let (mut backend, device) = (bench.open(bench.ordinal)?, bench.open(bench.ordinal)?);
        // Both blocks in one registration each, so that both sides copy in one call.
        let two = bytes + bytes;
        let pool = PoolOptions {
            budget: Budget::Bytes(two),
            arena_bytes: two,
            arena_bytes_max: two,
            piece_bytes: bytes,
            piece_bytes_max: bytes,
            ..PoolOptions::default()
        };
        let pool = PinnedPool::new(backend.pinner(), pool)?;
        pool.reserve(two)?;
        let options = Options {
            memory_bytes_max: piece,
            // Handles are kept, as raw keeps its own.
            memory_idle_max: bytes.0.div_ceil(piece.0).max(2) as usize,
            prefetch_count_max: 0,
            ..Options::default()
        };
        let mut engine = Engine::new(device, &pool, options)?;
        let watch = Watch::over(&mut engine, bench.check);
        let mut client = pool.client(backend.fence(), Bytes::MAX)?;
        let mut stream = || -> Result<Stream> {
            let id = backend.create_stream()?;
            Ok(Stream { id, raw: backend.raw_stream(id)? })
        };
        let (compute, back) = (stream()?, stream()?);
        let on = engine.adopt_stream(compute.raw)?;
        let storage = engine.alloc_fixed(bytes, on, "address")?;
        let mut block = client.lend(bytes, Name::new("raw"))?.block;
        block.mark_written(bytes)?;
        let events = [backend.create_event(Timing::Off)?, backend.create_event(Timing::Off)?];
        let (raw, range, raw_events) = match bench.simulated {
            true => {
                let range = backend.reserve_range(bytes)?;
                let memory = backend.create_memory(bytes)?;
                backend.map_memory(range, &[memory])?;
                (Raw::Sim(range, memory), range, [0, 0])
            }
            false => {
                let driver = Driver::open(bench.ordinal).map_err(refused)?;
                let mapping = Mapping::new(bench.ordinal, bytes).map_err(refused)?;
                let event = || driver.create_event().map_err(refused);
                let (range, events) = (mapping.range()?, [event()?, event()?]);
                (Raw::Cuda(driver, mapping), range, events)
            }
        };
        let world = bench.simulated.then(|| bench.world.clone());
        let mut place = Place {
            world,
            watch,
            backend,
            engine,
            on,
            storage,
            client,
            block,
            raw,
            range,
            compute,
            back,
            events,
            raw_events,
        };
        // Once there and back: from here on the host copy is good.
        place.ours()?;
        Ok(place)
    }

    fn now(&self, start: Instant) -> Duration {
        self.world.as_ref().map_or_else(|| start.elapsed(), World::now)
    }

    fn ours(&mut self) -> Result<Times> {
        let (id, on) = (self.storage.id(), self.on);
        self.backend.sync()?;
        let clock = Instant::now();
        let before = self.now(clock);
        if let Evict::Kept(why) = self.engine.evict(id, on)? {
            return Err(unexpected("evict", format!("{why:?}")));
        }
        while self.engine.residency(id)? != Residency::Evicted(Tier::Host) {
            self.engine.flush(on)?;
        }
        let Acquire::Ready(_) = self.engine.acquire(id, on)? else {
            return Err(unexpected("acquire", "no room".to_string()));
        };
        let whole = micros(self.now(clock) - before);
        self.backend.sync()?;
        self.engine.mark_step()?;
        Ok(Times { mapping: whole, whole })
    }

    fn raw(&mut self) -> Result<Times> {
        self.backend.sync()?;
        let clock = Instant::now();
        let before = self.now(clock);
        match &self.raw {
            Raw::Cuda(_, mapping) => mapping.remap().map_err(refused)?,
            Raw::Sim(range, memory) => {
                self.backend.unmap_memory(*range)?;
                self.backend.map_memory(*range, &[*memory])?;
            }
        }
        let mapping = micros(self.now(clock) - before);
        self.raw_in()?;
        let whole = micros(self.now(clock) - before);
        self.backend.sync()?;
        Ok(Times { mapping, whole })
    }

    /// The copy in, between the events that order it.
    fn raw_in(&mut self) -> Result<()> {
        let (compute, back, [begin, end]) = (self.compute, self.back, self.raw_events);
        if let Raw::Cuda(driver, _) = &self.raw {
            driver.record(begin, compute.raw).map_err(refused)?;
            driver.wait(back.raw, begin).map_err(refused)?;
            pieces(&self.block, self.range, Bytes::MAX, |host, device| {
                driver.copy_in(device, host, back.raw).map_err(refused)
            })?;
            driver.record(end, back.raw).map_err(refused)?;
            return driver.wait(compute.raw, end).map_err(refused);
        }
        let (backend, [begin, end]) = (&mut self.backend, self.events);
        backend.record(begin, compute.id)?;
        backend.wait(back.id, begin, Site::Outside)?;
        pieces(&self.block, self.range, Bytes::MAX, |host, device| {
            backend.copy_in(device, host, back.id)
        })?;
        backend.record(end, back.id)?;
        backend.wait(compute.id, end, Site::Outside)
    }

    fn close(mut self) -> Result<()> {
        self.engine.release(self.storage, self.on)?;
        self.engine.shutdown()?;
        let records = self.watch.verdict()?;
        if records > 0 {
            println!("checked: {records} records, no hazard");
        }
        self.backend.sync()?;
        match self.raw {
            Raw::Cuda(driver, mapping) => {
                mapping.close().map_err(refused)?;
                for event in self.raw_events {
                    driver.destroy_event(event).map_err(refused)?;
                }
            }
            Raw::Sim(range, memory) => {
                self.backend.unmap_memory(range)?;
                self.backend.close_memory(memory)?;
                self.backend.release_range(range)?;
            }
        }
        self.client.give_back(self.block, None)?;
        Ok(())
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn unexpected(op: &'static str, what: String) -> Error {
    Error::usage(Misuse::State, op).detail(what)
}
