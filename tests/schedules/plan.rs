//! One run, as its seed says: sizes, bounds, who runs next, what fails, how it ends.
//!
//! What it is not: the run. Nothing here touches a device.
//!
//! Invariant: a plan is a pure function of its seed, and so is its run.
//!
//! ```text
//!   seed -> Dice -> Plan { streams, pool, device, options, schedule, faults, verbs, end }
//! ```

use crate::support::codes::{CONTEXT, FATAL};
use lightering::backend::sim::{Config, Fault, FaultPlan, Pct, Random, Schedule, Spot};
use lightering::{Bytes, Options};
use std::time::Duration;

/// A small generator of pseudo-random numbers (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed ^ 0x5851_f42d_4c95_7f2d)
    }

    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.roll() % bound
    }

    pub(crate) fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// True once in `times`.
    pub(crate) fn rarely(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// What can go wrong, by the words of the list of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    DeviceOom,
    PinnedOom,
    RegisterFail,
    StreamCreateFail,
    EventCreateFail,
    CopySubmitFail,
    RecordFail,
    WaitFail,
    QueryFail,
    QueryNotReady,
    LaunchFail,
    SyncFail,
    StreamStall,
    SlowCopy,
    TornCopy,
    FatalCode,
    ContextDestroyed,
    Deinitialized,
    CaptureByOthers,
    HandleDropped,
    HandleForgotten,
    TicketForgotten,
    PanicInCallback,
    EngineDropped,
    EngineForgotten,
}

impl Kind {
    /// Those that an ordered fault of the simulated device makes.
    const ORDERED: [Kind; 18] = [
        Kind::DeviceOom,
        Kind::PinnedOom,
        Kind::RegisterFail,
        Kind::StreamCreateFail,
        Kind::EventCreateFail,
        Kind::CopySubmitFail,
        Kind::RecordFail,
        Kind::WaitFail,
        Kind::QueryFail,
        Kind::QueryNotReady,
        Kind::LaunchFail,
        Kind::SyncFail,
        Kind::StreamStall,
        Kind::SlowCopy,
        Kind::FatalCode,
        Kind::ContextDestroyed,
        Kind::Deinitialized,
        Kind::CaptureByOthers,
    ];

    pub(crate) const COUNT: usize = Kind::EngineForgotten as usize + 1;

    pub(crate) const ALL: [Kind; Kind::COUNT] = [
        Kind::DeviceOom,
        Kind::PinnedOom,
        Kind::RegisterFail,
        Kind::StreamCreateFail,
        Kind::EventCreateFail,
        Kind::CopySubmitFail,
        Kind::RecordFail,
        Kind::WaitFail,
        Kind::QueryFail,
        Kind::QueryNotReady,
        Kind::LaunchFail,
        Kind::SyncFail,
        Kind::StreamStall,
        Kind::SlowCopy,
        Kind::TornCopy,
        Kind::FatalCode,
        Kind::ContextDestroyed,
        Kind::Deinitialized,
        Kind::CaptureByOthers,
        Kind::HandleDropped,
        Kind::HandleForgotten,
        Kind::TicketForgotten,
        Kind::PanicInCallback,
        Kind::EngineDropped,
        Kind::EngineForgotten,
    ];

    /// Those that the process does; what its handles do counts where it is out of the ordinary.
    pub(crate) const OF_PROCESS: [Kind; 6] = [
        Kind::HandleDropped,
        Kind::HandleForgotten,
        Kind::TicketForgotten,
        Kind::PanicInCallback,
        Kind::EngineDropped,
        Kind::EngineForgotten,
    ];

    pub(crate) fn is_ordered(self) -> bool {
        Kind::ORDERED.contains(&self)
    }

    /// Is the device lost by it?
    pub(crate) fn is_fatal(self) -> bool {
        matches!(self, Kind::FatalCode | Kind::ContextDestroyed | Kind::Deinitialized)
    }
}

/// What the framework of a run does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Add,
    Evict,
    Acquire,
    Read,
    Write,
    Pull,
    ReadHost,
    Flush,
    Step,
    MarkStep,
    Prefetch,
    Cancel,
    Again,
    Take,
    Release,
    Drop,
    Forget,
    Ticket,
    Blow,
    Gather,
    Scatter,
    Discard,
}

/// Each verb, and how often it comes beside the others where a run does not prefer any.
const VERBS: [(Verb, u64); 22] = [
    (Verb::Add, 44),
    (Verb::Evict, 56),
    (Verb::Acquire, 20),
    (Verb::Read, 24),
    (Verb::Write, 20),
    (Verb::Pull, 30),
    (Verb::ReadHost, 8),
    (Verb::Flush, 14),
    (Verb::Step, 6),
    (Verb::MarkStep, 4),
    (Verb::Prefetch, 8),
    (Verb::Cancel, 8),
    (Verb::Again, 6),
    (Verb::Take, 6),
    (Verb::Release, 14),
    (Verb::Drop, 8),
    (Verb::Forget, 3),
    (Verb::Ticket, 5),
    (Verb::Blow, 4),
    (Verb::Gather, 10),
    (Verb::Scatter, 10),
    (Verb::Discard, 6),
];

/// How a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Every byte is read and compared, everything is given back.
    Finish,
    /// The engine is dropped in the middle.
    Drop,
    /// The process exits in the middle: nobody drops anything.
    Exit,
}

#[derive(Clone, Copy, Debug)]
struct Ordered {
    kind: Kind,
    spot: Spot,
    nth: u64,
    fault: Fault,
}

/// One run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) streams: usize,
    pub(crate) pool: Bytes,
    pub(crate) device: Bytes,
    pub(crate) options: Options,
    pub(crate) verbs: u64,
    pub(crate) end: End,
    /// Does the engine own the device bytes? `None`: of some storages.
    pub(crate) is_owned: Option<bool>,
    /// How often each verb comes.
    weights: [u64; VERBS.len()],
    /// A kernel's host form panics now and then.
    pub(crate) panics: bool,
    depth: Option<usize>,
    faults: Vec<Ordered>,
}

impl Plan {
    pub(crate) fn new(seed: u64) -> Plan {
        let mut dice = Dice::new(seed);
        let streams = dice.one(&[1, 2, 2, 3, 3]);
        let is_owned = dice.one(&[None, None, Some(true), Some(false)]);
        let pool = Bytes::kib(dice.one(&[4, 8, 16, 32]));
        let device = Bytes::kib(dice.one(&[6, 12, 64, 64]));
        let options = bounds(&mut dice);
        let end = match dice.below(1024) {
            // Nobody gives its memory back in this process either: few of them.
            0 | 1 => End::Exit,
            2..64 => End::Drop,
            _ => End::Finish,
        };
        let mut faults = Vec::new();
        // A quarter of the runs is meant to go as well as any can.
        let count = dice.one(&[0, 1, 1, 2, 2, 3, 3, 4]);
        for _ in 0..count {
            order(&mut dice, &mut faults);
        }
        let depth = dice.one(&[None, None, Some(1), Some(2), Some(3)]);
        let panics = count > 0 && dice.rarely(64);
        let verbs = 8 + dice.below(20);
        // Runs that do little but a few things come to states that an even mix hardly sees.
        let is_even = dice.rarely(2);
        let weights = VERBS
            .map(|(_, weight)| if is_even { weight } else { weight * dice.one(&[0, 1, 1, 6]) });
        Plan {
            seed,
            streams,
            pool,
            device,
            options,
            verbs,
            end,
            is_owned,
            weights,
            panics,
            depth,
            faults,
        }
    }

    /// The next verb, by the run's own dice.
    pub(crate) fn verb(&self, dice: &mut Dice) -> Verb {
        let sum: u64 = self.weights.iter().sum();
        let mut at = dice.below(sum.max(1));
        for ((verb, _), weight) in VERBS.iter().zip(self.weights) {
            if at < weight {
                return *verb;
            }
            at -= weight;
        }
        Verb::Add
    }

    /// The same, on a device that does all it is asked.
    pub(crate) fn without_faults(seed: u64) -> Plan {
        Plan { end: End::Finish, panics: false, faults: Vec::new(), ..Plan::new(seed) }
    }

    pub(crate) fn config(&self) -> Config {
        let schedule: Box<dyn Schedule> = match self.depth {
            None => Box::new(Random::new(self.seed)),
            // About as many steps as a run has.
            Some(depth) => Box::new(Pct::new(self.seed, depth, 150)),
        };
        let mut config = Config::scheduled(schedule);
        config.device_bytes = self.device;
        let ordered = self.faults.iter();
        config.faults = ordered.fold(FaultPlan::default(), |plan, ordered| {
            plan.at(ordered.spot, ordered.nth, ordered.fault)
        });
        config
    }

    /// The kinds of faults ordered, in the order of the rules.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = Kind> {
        self.faults.iter().map(|ordered| ordered.kind)
    }

    pub(crate) fn has(&self, kind: Kind) -> bool {
        self.kinds().any(|other| other == kind)
    }

    pub(crate) fn is_fatal(&self) -> bool {
        self.kinds().any(Kind::is_fatal)
    }
}

fn bounds(dice: &mut Dice) -> Options {
    Options {
        unreleased_bytes_max: Bytes(dice.below(4) * 1500),
        prefetch_bytes_max: Bytes(dice.below(4) * 2048),
        prefetch_count_max: dice.below(3) as usize,
        keep_last_count: dice.below(3) as usize,
        storage_bytes_min: Bytes(dice.below(2) * 256),
        trunk_bytes_max: Bytes(dice.one(&[256, 512, 1000, 4096])),
        memory_bytes_max: Bytes(dice.one(&[512, 1024, 4096])),
        memory_pooled_bytes_min: Bytes(dice.one(&[0, 1024])),
        memory_idle_max: dice.one(&[2, 4]),
        // A run is a pure function of its seed: no clock of the host's decides in it.
        memory_wait_max: Duration::from_secs(3600),
        transfers_max: dice.one(&[1, 2, 4, 100]),
        events_max: dice.one(&[8, 16, 64]),
        storages_max: 12,
        streams_max: 3,
        pass_len_max: 16,
        step_queries_max: dice.one(&[1, 3, 64]),
        ring_records: 0,
        drop_deadline: Duration::ZERO,
        note_uses: false,
        verify: dice.rarely(8),
        verify_slots_max: 4,
        time_stalls: dice.rarely(8),
        ..Options::default()
    }
}

/// A wait for the device is refused by a driver that fails, and by a capture of somebody's.
const REFUSED: [Fault; 2] = [Fault::Refuse, Fault::Reject(900)];

/// A code after which a device is lost; those of a lost context have kinds of their own.
fn fatal(dice: &mut Dice) -> u32 {
    let of_device = || FATAL.into_iter().filter(|code| !CONTEXT.contains(code));
    let at = dice.below(of_device().count() as u64) as usize;
    of_device().nth(at).unwrap_or(FATAL[0])
}

/// Orders one fault, or several at calls in a row.
fn order(dice: &mut Dice, faults: &mut Vec<Ordered>) {
    let kind = dice.one(&Kind::ORDERED);
    // Fatal ones end a run: few of them.
    let kind = if kind.is_fatal() && !dice.rarely(3) { Kind::CopySubmitFail } else { kind };
    let times = 1 + dice.below(8) as u32;
    let (spot, within, fault) = match kind {
        Kind::DeviceOom => {
            let spots = [Spot::Alloc, Spot::Alloc, Spot::Create, Spot::Map, Spot::Unmap];
            (dice.one(&spots), 16, Fault::Refuse)
        }
        Kind::PinnedOom => (Spot::Register, 2, Fault::Refuse),
        Kind::RegisterFail => (Spot::Register, 2, Fault::Reject(dice.one(&[712, 800, 801]))),
        Kind::StreamCreateFail => (Spot::CreateStream, 6, Fault::Refuse),
        Kind::EventCreateFail => (Spot::CreateEvent, 10, Fault::Refuse),
        Kind::CopySubmitFail => (Spot::Copy, 14, Fault::Refuse),
        Kind::RecordFail => (Spot::Record, 40, Fault::Refuse),
        Kind::WaitFail => (Spot::Wait, 40, Fault::Refuse),
        Kind::QueryFail => (Spot::Query, 30, Fault::Refuse),
        Kind::QueryNotReady => (Spot::Query, 30, Fault::NotReady(times * times)),
        Kind::LaunchFail => (Spot::Launch, 20, Fault::Refuse),
        Kind::SyncFail => (Spot::Sync, 3, dice.one(&REFUSED)),
        Kind::StreamStall => {
            let spot = dice.one(&[Spot::Record, Spot::Wait, Spot::Launch]);
            (spot, 30, Fault::Stall(times * times * times))
        }
        Kind::SlowCopy => (Spot::Copy, 12, Fault::Slow(dice.one(&[2, 10, 100, 1000]))),
        Kind::ContextDestroyed => (Spot::Any, 250, Fault::Fatal(709)),
        Kind::Deinitialized => (Spot::Any, 250, Fault::Fatal(4)),
        Kind::CaptureByOthers => {
            let spot = dice.one(&[Spot::Record, Spot::Wait, Spot::Launch]);
            (spot, 30, Fault::Capture(times))
        }
        _ => (Spot::Any, 250, Fault::Fatal(fatal(dice))),
    };
    let nth = 1 + dice.below(within);
    let in_a_row = if kind.is_fatal() { 1 } else { dice.one(&[1, 1, 1, 2, 3]) };
    faults.extend((nth..nth + in_a_row).map(|nth| Ordered { kind, spot, nth, fault }));
    // What keeps an engine from ordering has it wait for the device: often in vain.
    if matches!(kind, Kind::RecordFail | Kind::WaitFail) && dice.rarely(3) {
        let (kind, spot, fault) = (Kind::SyncFail, Spot::Sync, dice.one(&REFUSED));
        faults.extend((1..2 + dice.below(4)).map(|nth| Ordered { kind, spot, nth, fault }));
    }
}
