//! Faults to order: which call fails, and how.
//!
//! What it is not: it breaks no bytes. A copy that is refused was never enqueued; a device that is
//! lost stops where it is.
//!
//! Invariant: only a call that would have worked counts and can be refused, so `nth` means the
//! same thing whatever the program got wrong before.
//!
//! ```text
//!   FaultPlan::default().at(Spot::Copy, 3, Fault::Refuse).at(Spot::Any, 40, Fault::Fatal(700))
//! ```
//!
//! Tests order; the simulated world obeys.

use super::schedule::Dice;

/// Where a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Spot {
    /// Taking device memory.
    Alloc,
    /// Reserving addresses, or taking memory to map there.
    Create,
    /// Mapping memory.
    Map,
    /// Taking mapped memory away.
    Unmap,
    /// Page-locking host memory.
    Register,
    /// Making a stream.
    CreateStream,
    /// Making an event.
    CreateEvent,
    /// Submitting a copy, in either direction.
    Copy,
    /// Recording an event.
    Record,
    /// Making a stream wait.
    Wait,
    /// Asking whether an event is done.
    Query,
    /// Enqueuing a kernel.
    Launch,
    /// Waiting for the whole device. Never by chance: programs wait where they look at the end.
    Sync,
    /// Any verb that can fail, refused ones included; only [`Fault::Fatal`] makes sense here.
    Any,
}

const SPOTS: usize = Spot::Any as usize + 1;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The call fails with `OutOfMemory` (driver code 2) and has no effect.
    Refuse,
    /// The call fails with this driver code, which is no want of memory, and has no effect; 900
    /// says that a stream is being captured.
    Reject(u32),
    /// At a query: it and the following ones, so many in all, answer "not yet".
    NotReady(u32),
    /// At a copy, record, wait or launch: the call works, but its stream stands still for so many
    /// steps of the adversary's clock, or microseconds of the timed one.
    Stall(u32),
    /// At a copy: the call works, and the copy takes so many times as long. Under an adversary it
    /// moves a piece at a time, and stands still for so many steps after each.
    Slow(u32),
    /// At a copy, record, wait or launch on a stream that somebody adopted: a third party begins to
    /// capture it. This call and the next ones that name the stream, so many in all, find it so.
    Capture(u32),
    /// The device is lost, with this driver code; every later verb says so.
    Fatal(u32),
}

#[derive(Clone, Copy, Debug)]
struct Rule {
    spot: Spot,
    nth: u64,
    fault: Fault,
    has_struck: bool,
}

#[derive(Clone, Debug)]
struct Chance {
    dice: Dice,
    per_million: u32,
}

/// The faults of one world. The default has none.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    rules: Vec<Rule>,
    chance: Option<Chance>,
}

impl FaultPlan {
    /// Adds a fault at the `nth` call of a kind, counted from 1 over all devices of the world.
    #[must_use]
    pub fn at(mut self, spot: Spot, nth: u64, fault: Fault) -> FaultPlan {
        self.rules.push(Rule { spot, nth, fault, has_struck: false });
        self
    }

    /// Adds faults by chance: each call has `per_million` in a million to go wrong in a way that
    /// leaves the device alive.
    #[must_use]
    pub fn by_chance(mut self, seed: u64, per_million: u32) -> FaultPlan {
        self.chance = Some(Chance { dice: Dice::new(seed), per_million });
        self
    }
}

/// A plan in progress.
#[derive(Debug)]
pub(super) struct Faults {
    plan: FaultPlan,
    counts: [u64; SPOTS],
    not_ready: u32,
    pub(super) struck: u64,
    /// The rule that struck last.
    last: Option<usize>,
}

impl Faults {
    pub(super) fn new(plan: FaultPlan) -> Faults {
        Faults { plan, counts: [0; SPOTS], not_ready: 0, struck: 0, last: None }
    }

    /// Counts one call and says what strikes it.
    pub(super) fn meet(&mut self, spot: Spot) -> Option<Fault> {
        let count = &mut self.counts[spot as usize];
        *count += 1;
        let is_now = |rule: &Rule| rule.spot == spot && rule.nth == *count;
        self.last = self.plan.rules.iter().position(is_now);
        if let Some(rule) = self.last.and_then(|at| self.plan.rules.get_mut(at)) {
            self.struck += 1;
            rule.has_struck = true;
            return Some(rule.fault);
        }
        let is_by_chance = !matches!(spot, Spot::Any | Spot::Sync);
        let chance = self.plan.chance.as_mut().filter(|_| is_by_chance)?;
        if chance.dice.below(1_000_000) >= chance.per_million as usize {
            return None;
        }
        let times = 1 + chance.dice.below(8) as u32;
        self.struck += 1;
        Some(match spot {
            Spot::Query => Fault::NotReady(times),
            Spot::Copy | Spot::Record | Spot::Wait | Spot::Launch if times > 4 => {
                Fault::Stall(times)
            }
            _ => Fault::Refuse,
        })
    }

    /// What struck last found nothing to take hold of.
    pub(super) fn miss(&mut self) {
        if let Some(rule) = self.last.take().and_then(|at| self.plan.rules.get_mut(at)) {
            self.struck -= 1;
            rule.has_struck = false;
        }
    }

    /// Of each rule, in the order in which they were added: has it struck?
    pub(super) fn have_struck(&self) -> Vec<bool> {
        self.plan.rules.iter().map(|rule| rule.has_struck).collect()
    }

    /// Lets the next `times` queries answer "not yet".
    pub(super) fn hold_back(&mut self, times: u32) {
        self.not_ready = self.not_ready.max(times);
    }

    /// Must this query answer "not yet"?
    pub(super) fn held_back(&mut self) -> bool {
        let held = self.not_ready > 0;
        self.not_ready = self.not_ready.saturating_sub(1);
        held
    }
}

/// The driver's name of a code.
pub(super) fn code_name(code: u32) -> &'static str {
    match code {
        2 => "CUDA_ERROR_OUT_OF_MEMORY",
        4 => "CUDA_ERROR_DEINITIALIZED",
        214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
        700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
        702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
        709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        716 => "CUDA_ERROR_MISALIGNED_ADDRESS",
        712 => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        719 => "CUDA_ERROR_LAUNCH_FAILED",
        800 => "CUDA_ERROR_NOT_PERMITTED",
        801 => "CUDA_ERROR_NOT_SUPPORTED",
        900 => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        999 => "CUDA_ERROR_UNKNOWN",
        _ => "CUDA_ERROR",
    }
}
