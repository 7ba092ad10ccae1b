//! The engine: one owner per device, where policy, prefetch and storage meet.
//!
//! What it is not: a thread. It acts inside its verbs and nowhere else; no verb calls back, takes a
//! lock besides the pool's, or waits on the host but where `docs/design.md` lists it (section 6):
//! for memory at a fixed address, for page-locking in the first step, for a driver that fails.
//!
//! Invariant: the nine laws at the top of the crate. Each wait and each question names its site. A
//! driver that fails can leave a copy whose end nobody knows; then every verb is refused until it
//! is proved, and has changed nothing.
//!
//! ```text
//!   adopt, alloc -> offer, evict -> releasable, flush -> wanted, prefetch -> acquire
//!                    evict.rs        release.rs           refill.rs           acquire.rs owned.rs
//!   alloc_fixed      fixed.rs        ledger.rs
//!   -> release      step, drain, shutdown: close.rs     note, read_host, take: host.rs
//!   gather, scatter: batch.rs     spans: timeline.rs    sums: verify.rs    events: events.rs
//!   what a failing driver leaves in doubt: unmarked.rs     what each verb goes through: gate.rs
//! ```
//!
//! Adapters, the C ABI and users call it.

mod acquire;
mod batch;
mod batches;
mod close;
mod events;
mod evict;
mod fixed;
mod gate;
mod host;
mod lanes;
mod ledger;
mod options;
mod owned;
mod refill;
mod release;
mod shared;
mod stats;
mod tables;
mod timeline;
mod unmarked;
mod verify;

pub use acquire::Acquire;
pub use batches::Batch;
pub use evict::Evict;
pub use options::Options;
pub use shared::{Held, Shared};
pub use stats::{KeptCount, Stats};
pub use timeline::{Span, Track};

use crate::backend::ranges::Ranges;
use crate::backend::{About, Backend, Memory, Timing, traced::Observer, traced::Traced};
use crate::checksum::Checks;
use crate::copy::Lane;
use crate::error::{Error, Kind, Misuse, Result};
use crate::handles::Handles;
use crate::pinned::{Client, Growth, PinnedPool};
use crate::policy::Policy;
use crate::prefetch::Prefetcher;
use crate::storage::{Owner, Residency, Slot, Storage, StreamSet};
use crate::stream::{EventPool, Point};
use crate::trace::Site;
use crate::unit::{Bytes, DeviceRange, EventId, IdMap, Name, StorageId, StreamId, Table};
use batch::Packer;
use batches::Batches;
use crossbeam_channel::{Receiver, Sender};
use lanes::Front;
use ledger::Ledger;
use std::collections::{BTreeMap, VecDeque};
use timeline::Timeline;
use unmarked::Unmarked;
use verify::Report;

/// Moves storages between one device and pinned host memory. See the crate's front page.
pub struct Engine {
    backend: Traced<Box<dyn Backend>>,
    options: Options,
    events: EventPool,
    /// Of events that nobody holds longer than it takes to order one stream behind another.
    orders: EventPool,
    timers: EventPool,
    timeline: Timeline,
    marks: Ranges,
    pool: PinnedPool,
    client: Client,
    /// Points that the pool holds blocks by, with how many blocks.
    busy: IdMap<EventId, (Point, u32)>,
    /// Events that came home from the pool in one go; kept for its room.
    returned: Vec<EventId>,
    out: Lane,
    ahead: Lane,
    urgent: Lane,
    front: Front,
    packer: Packer,
    batches: Batches,
    /// Memory for bytes whose address stays.
    handles: Handles,
    /// The whole device was waited for, and nothing was enqueued since.
    is_idle: bool,
    /// Storages evicted whose bytes are still mapped, since a fetch of them was given up.
    lingering: Vec<StorageId>,
    /// What the next copy waits for; kept for its room.
    after: Vec<(Point, Site)>,
    slots: Table<Slot>,
    /// Device ranges of storages by first address: end, storage. An address that stays is here as
    /// long as its storage lives, others while there are bytes.
    ranges: BTreeMap<u64, (u64, StorageId)>,
    /// Streams of others, by number, with what was evicted on each.
    ledgers: Vec<Ledger>,
    policy: Policy,
    prefetcher: Prefetcher,
    /// Storages that ended before a verb named a stream for them, whose bytes are a framework's.
    homeless: Vec<StorageId>,
    tell_dropped: Sender<StorageId>,
    dropped: Receiver<StorageId>,
    stalls: VecDeque<(Point, Point)>,
    /// Device bytes that the driver refused to take back, on which stream, and behind which copy;
    /// asked again.
    owed: Vec<(DeviceRange, StreamId, Option<Point>)>,
    /// The copy that ended nowhere, if there is one: it is proved done before any verb goes on.
    unmarked: Option<Unmarked>,
    stats: Stats,
    /// The verb that its caller called last.
    verb: &'static str,
    /// With `verify`: the sums of copies under way.
    checks: Option<Checks>,
    /// Storages found lost that were not reported yet.
    reports: VecDeque<Report>,
    /// The first fatal error; after it nothing touches the driver.
    lost: Option<Error>,
    is_closed: bool,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("about", &self.backend.about())
            .field("options", &self.options)
            .field("stats", &self.stats)
            .field("lost", &self.lost)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine on `backend` whose blocks come from `pool`.
    ///
    /// # Errors
    /// `Usage(BadValue)` for options it cannot work with; those of the driver for its streams. With
    /// `spans_max`, those of marking the moment that times start at. With `verify`,
    /// `Usage(BadKernel)` where the backend runs no kernels, and the want of memory.
    pub fn new(backend: Box<dyn Backend>, pool: &PinnedPool, options: Options) -> Result<Engine> {
        options.check()?;
        let mut backend = Traced::new(backend, options.ring_records);
        let opening = |error: Error| error.during("new");
        let client = pool.client(backend.fence(), options.pinned_quota_max);
        let mut client = client.map_err(opening)?;
        if options.pinned_growth == Growth::Closed {
            client.set_growth(Growth::Closed);
        }
        let out = Lane::open(&mut backend, false).map_err(opening)?;
        // Sums are made in the order of one stream.
        let ahead = Lane::open(&mut backend, !options.verify).map_err(opening)?;
        let urgent = Lane::open(&mut backend, false).map_err(opening)?;
        // At most one message per storage, so `storages_max` bounds it.
        let (tell_dropped, dropped) = crossbeam_channel::unbounded();
        // Two each, and the timeline's start.
        let timers_max = (STALLS_MAX + timeline::PENDING_MAX) * 2 + 1;
        let engine = Engine {
            events: EventPool::new(options.events_max - events::ORDERS, Timing::Off),
            orders: EventPool::new(events::ORDERS, Timing::Off),
            timers: EventPool::new(timers_max, Timing::On),
            timeline: Timeline::new(options.spans_max),
            marks: Ranges::listen(options.nvtx),
            busy: IdMap::with_capacity_and_hasher(
                options.events_max.min(BUSY_ROOM_MAX),
                Default::default(),
            ),
            returned: Vec::new(),
            after: Vec::new(),
            packer: Packer::default(),
            batches: Batches::new(),
            handles: Handles::new(options.handles()),
            lingering: Vec::new(),
            is_idle: false,
            slots: Table::new("storage", options.storages_max),
            ranges: BTreeMap::new(),
            ledgers: Vec::new(),
            policy: Policy::new(options.policy()),
            prefetcher: Prefetcher::new(options.prefetch()),
            stalls: VecDeque::new(),
            owed: Vec::new(),
            unmarked: None,
            homeless: Vec::new(),
            stats: Stats::default(),
            verb: "new",
            checks: None,
            reports: VecDeque::new(),
            lost: None,
            is_closed: false,
            pool: pool.clone(),
            backend,
            options,
            client,
            out,
            ahead,
            urgent,
            front: Front::default(),
            tell_dropped,
            dropped,
        };
        engine.with_base()?.with_checks()
    }

    /// The device it works on.
    pub fn about(&self) -> About {
        self.backend.about()
    }

    /// Its bounds.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Sets the bounds of device bytes that are not given back yet, and of those fetched ahead.
    /// What is over a new bound already is not taken back: it goes as it would have gone.
    pub fn set_windows(&mut self, unreleased_bytes_max: Bytes, prefetch_bytes_max: Bytes) {
        self.options.unreleased_bytes_max = unreleased_bytes_max;
        self.options.prefetch_bytes_max = prefetch_bytes_max;
        self.prefetcher.set_bytes_max(prefetch_bytes_max);
    }

    /// The device's memory now; `allocated` and `peak` count this engine's own storages, and with
    /// `verify` its sums.
    ///
    /// # Errors
    /// Those of [`Backend::memory`].
    pub fn memory(&mut self) -> Result<Memory> {
        self.begin("memory")?;
        let memory = self.backend.memory();
        self.seen(memory)
    }

    /// What it did so far, and what it holds now.
    pub fn stats(&self) -> Stats {
        Stats {
            guesses: self.prefetcher.guesses(),
            storages: self.slots.len() as u64,
            unreleased_bytes: self.ledgers.iter().map(|l| l.unreleased_bytes().0).sum(),
            mapped_bytes: self.handles.mapped_bytes().0,
            idle_memory_bytes: self.handles.idle_bytes().0,
            prefetched_bytes: self.prefetcher.bytes_ahead().0,
            out_in_flight_bytes: self.out.bytes_in_flight().0,
            in_in_flight_bytes: (self.ahead.bytes_in_flight() + self.urgent.bytes_in_flight()).0,
            seam: self.backend.counters(),
            pinned: self.pool.stats(),
            ..self.stats
        }
    }

    /// The pool its blocks come from.
    pub fn pool(&self) -> &PinnedPool {
        &self.pool
    }

    /// Pinned bytes that this engine holds now, and the most that it may: its own bound within the
    /// pool's budget, [`Options::pinned_quota_max`].
    pub fn pinned_quota(&self) -> (Bytes, Bytes) {
        (self.client.held(), self.options.pinned_quota_max)
    }

    /// Shows every later record of the driver seam to `observer`, from inside of the verbs: it has
    /// no engine to call, and [`Shared::lock`] refuses it one.
    pub fn observe(&mut self, observer: Option<Observer>) {
        self.backend.observe(observer);
    }

    /// The last records of the driver seam, oldest first.
    pub fn recent(&self) -> impl Iterator<Item = &crate::trace::Record> {
        self.backend.ring().iter()
    }

    /// Names a stream of somebody else by its raw driver handle; the same handle gives the same
    /// name. Its owner keeps it alive as long as the engine.
    ///
    /// # Errors
    /// `Usage(SameStream)` for one of the engine's own lanes; `Usage(BadValue)` past
    /// [`Options::streams_max`]: the engine never forgets a stream, so trying again cannot help.
    pub fn adopt_stream(&mut self, raw: usize) -> Result<StreamId> {
        self.begin("adopt_stream")?;
        if let Some(known) = self.ledgers.iter().find(|ledger| ledger.raw == raw) {
            return Ok(known.stream);
        }
        let lanes: Vec<StreamId> = self.lane_streams().collect();
        for lane in lanes {
            let of_lane = self.backend.raw_stream(lane);
            if self.seen(of_lane)? == raw {
                return Err(Error::usage(Misuse::SameStream, "adopt_stream")
                    .detail(format!("{raw:#x} is a stream of this engine's own copies")));
            }
        }
        if self.ledgers.len() >= self.options.streams_max {
            let max = self.options.streams_max;
            return Err(Error::usage(Misuse::BadValue, "adopt_stream")
                .detail(format!("{max} streams are served already: raise Options::streams_max")));
        }
        let stream = self.backend.adopt_stream(raw);
        let stream = self.seen(stream)?;
        self.ledgers.push(Ledger::new(stream, raw));
        Ok(stream)
    }

    /// Takes note of device bytes that a framework owns. They are on the device, and stay the
    /// framework's; see the pull protocol in `docs/design.md`.
    ///
    /// # Errors
    /// `Usage` for an empty range, one that overlaps another storage's device bytes, or one that is
    /// not all in one allocation of this device, as far as its driver tells; `Busy` past
    /// `storages_max`.
    pub fn adopt(&mut self, range: DeviceRange, name: impl Into<Name>) -> Result<Storage> {
        self.begin("adopt")?;
        let name = name.into();
        self.check_range(range).map_err(|error| error.at(name))?;
        self.insert(Slot::resident(name, Owner::Framework, range, Slot::NO_HOME), "adopt")
    }

    /// Where a storage's bytes are.
    ///
    /// # Errors
    /// `Usage` for a handle that is stale or of another engine.
    pub fn residency(&self, id: StorageId) -> Result<Residency> {
        let slot = self.slots.get(id.0, "residency")?;
        Ok(if self.lost.is_some() { Residency::Lost } else { slot.residency() })
    }

    /// The device bytes of a storage that is resident, for the streams that acquired it.
    ///
    /// # Errors
    /// `Corrupt` for bytes that are lost; `Usage(NotThere)` in every other state.
    pub fn range(&self, id: StorageId) -> Result<DeviceRange> {
        let slot = self.slots.get(id.0, "range")?;
        match (slot.residency(), slot.range) {
            (Residency::Resident, Some(range)) if self.lost.is_none() => Ok(range),
            (Residency::Lost, _) => Err(slot.refuse("range")),
            _ => Err(Error::usage(Misuse::NotThere, "range").at(slot.name).bytes(slot.len)),
        }
    }

    /// Says that a training step is over: the next eviction begins a new pass, whose order of
    /// readers is expected to be this one's.
    ///
    /// # Errors
    /// Those of [`Engine::step`]; the new pass has begun all the same.
    pub fn mark_step(&mut self) -> Result<()> {
        self.begin_or_report("mark_step")?;
        self.next_pass();
        self.step_for()
    }

    fn next_pass(&mut self) {
        if self.stats.evicted_count > 0 {
            self.client.set_growth(self.options.growth_when_warm());
        }
        let slots = &mut self.slots;
        self.front.next_pass();
        self.prefetcher.next_pass(|storage, place| {
            if let Ok(slot) = slots.get_mut(storage.0, "mark_step") {
                slot.place = place;
            }
        });
    }

    fn lane_streams(&self) -> impl Iterator<Item = StreamId> + '_ {
        let lanes = [&self.out, &self.ahead, &self.urgent];
        lanes.into_iter().flat_map(|lane| lane.streams()).copied()
    }

    /// The number of a stream the engine serves.
    fn stream_index(&self, stream: StreamId, op: &'static str) -> Result<usize> {
        if let Some(index) = self.ledgers.iter().position(|ledger| ledger.stream == stream) {
            return Ok(index);
        }
        let is_lane = self.lane_streams().any(|lane| lane == stream);
        let misuse = if is_lane { Misuse::SameStream } else { Misuse::Foreign };
        Err(Error::usage(misuse, op).of("stream").detail(match misuse {
            Misuse::Foreign => format!("{stream:?} (adopt it first)"),
            _ => format!("{stream:?}"),
        }))
    }

    /// The number of a stream on which work may be enqueued now.
    fn open_stream(&mut self, stream: StreamId, op: &'static str) -> Result<usize> {
        let index = self.stream_index(stream, op)?;
        let capturing = self.backend.capturing(stream);
        if self.seen(capturing)? {
            return Err(Error::usage(Misuse::Capturing, op));
        }
        Ok(index)
    }

    /// A storage whose handle is not dropped.
    fn slot(&self, id: StorageId, op: &'static str) -> Result<&Slot> {
        let slot = self.slots.get(id.0, op)?;
        if slot.is_dropped { Err(Error::usage(Misuse::Stale, op).of("storage")) } else { Ok(slot) }
    }

    fn insert(&mut self, slot: Slot, op: &'static str) -> Result<Storage> {
        let (name, len, range) = (slot.name, slot.len, slot.range);
        let Some(key) = self.slots.insert(slot) else {
            return Err(too_many(name, op));
        };
        let id = StorageId(key);
        if let Some(range) = range {
            self.enter_range(id, name, range);
        }
        Ok(Storage::new(id, len, self.tell_dropped.clone()))
    }

    fn enter_range(&mut self, id: StorageId, name: Name, range: DeviceRange) {
        // What is mapped behind the bytes of a fixed storage is nobody else's.
        let fixed = self.slots.find(id.0).and_then(|slot| slot.fixed.as_ref());
        let end = fixed.map_or(range.end(), |fixed| fixed.range().end());
        self.ranges.insert(range.at().0, (end, id));
        self.backend.name(id, name, range);
    }

    /// The device bytes of a storage went.
    fn leave_range(&mut self, id: StorageId, range: DeviceRange) {
        if self.slots.find(id.0).is_none_or(|slot| slot.owner != Owner::Fixed) {
            self.ranges.remove(&range.at().0);
        }
    }

    /// Gives a block back, busy until the last copy on it is passed.
    fn give_back(&mut self, block: crate::pinned::Block, last_use: Option<Point>) -> Result<()> {
        let busy = last_use.filter(|point| !point.is_known_done());
        if let Some(point) = &busy {
            let entry = self.busy.entry(point.event()).or_insert_with(|| (point.clone(), 0));
            entry.1 += 1;
        }
        match self.client.give_back(block, busy.map(|point| point.event())) {
            Ok(()) => Ok(()),
            Err(refused) => Err(refused.error),
        }
    }

    /// Takes back one of the pool's holds on an event.
    fn unhold(&mut self, event: EventId) -> Option<Point> {
        let (point, count) = self.busy.get_mut(&event)?;
        let point = point.clone();
        *count -= 1;
        if *count == 0 {
            self.busy.remove(&event);
        }
        Some(point)
    }

    /// Streams other than `on` that may have used a storage's device bytes.
    fn others(readers: StreamSet, on: usize) -> StreamSet {
        readers.without(on)
    }
}

fn too_many(name: Name, op: &'static str) -> Error {
    Error::new(Kind::Busy, op).at(name).detail("storages_max storages are alive already")
}

/// Stalls whose times are not known yet; more are counted but not timed.
const STALLS_MAX: usize = 256;

/// Room in the table of busy events from the start. A table more than half full moves to a larger
/// one sooner or later, at a moment that chance chooses: it would be in the middle of a step.
const BUSY_ROOM_MAX: usize = 1 << 12;
