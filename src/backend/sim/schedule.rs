//! Who runs next: the choices of the adversary's clock, behind one small trait.
//!
//! What it is not: it knows no streams, ops or bytes. It is asked to pick one of a few options.
//!
//! Invariant: a schedule is a pure function of its own state, so equal seeds and equal programs
//! give equal runs.
//!
//! ```text
//!   verb -> pace(call): how many steps?   each step: holds(runnable): rather the host?
//!                                                    pick(runnable): which stream?
//!                                         a copy:    choose(3): all, half of the rest, one piece?
//! ```
//!
//! The simulated world asks; tests bring their own.

/// What kind of call the host made; the device may run a little after each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// Something was enqueued.
    Enqueue,
    /// The host asked whether something is done.
    Query,
    /// The host takes device memory, and sees by its address what has been freed.
    Take,
}

/// Decides what the device does next.
pub trait Schedule: Send + std::fmt::Debug {
    /// One of `options` (at least one): a number below it.
    fn choose(&mut self, options: usize) -> usize;

    /// The most steps that the device makes at this call of the host.
    fn pace(&mut self, call: Call) -> usize {
        if call == Call::Take { 0 } else { self.choose(3) }
    }

    /// Does the host go on instead of one of these streams? Asked before each step at a call, but
    /// not while the host waits.
    fn holds(&mut self, runnable: &[u32]) -> bool {
        let _ = runnable;
        false
    }

    /// Which of the streams that can run makes the next step, as an index into `runnable`. Each
    /// number there names its stream for the stream's life.
    fn pick(&mut self, runnable: &[u32]) -> usize {
        self.choose(runnable.len())
    }

    /// Do events' recordings pass as soon as they are reached? Then they are nobody's choice, and
    /// there are fewer orders; none of those left out differs in a byte.
    fn passes_records(&self) -> bool {
        false
    }
}

/// A small generator of pseudo-random numbers (SplitMix64), the same on every machine.
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    pub(super) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; the bias of the multiplication is below 2^-32 for small bounds.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.roll()) * bound as u128) >> 64) as usize
    }
}

/// Chooses by a seed. Seeds differ in haste too: under some the device lags far behind the host,
/// under others it is mostly idle. Under all of them it stands still now and then, and catches up.
#[derive(Clone, Debug)]
pub struct Random {
    dice: Dice,
    haste: usize,
    /// Calls for which it still stands still.
    rest: usize,
}

impl Random {
    /// The schedule that `seed` names.
    pub fn new(seed: u64) -> Random {
        let mut dice = Dice::new(seed);
        let haste = [2, 3, 5, 9][dice.below(4)];
        Random { dice, haste, rest: 0 }
    }
}

impl Schedule for Random {
    fn choose(&mut self, options: usize) -> usize {
        self.dice.below(options)
    }

    fn pace(&mut self, call: Call) -> usize {
        if call == Call::Take {
            // What it does at other calls lets it be anywhere by now.
            return 0;
        }
        if self.rest == 0 && self.dice.below(8) == 0 {
            self.rest = self.dice.below(16);
        }
        if self.rest > 0 {
            self.rest -= 1;
            return if self.rest == 0 { self.dice.below(24) } else { 0 };
        }
        self.dice.below(self.haste)
    }
}

/// Runs nothing until the host waits, or has polled for long.
#[derive(Clone, Debug, Default)]
pub struct Lazy {
    polls: u32,
}

impl Lazy {
    /// So many questions in a row let the device make one step: a host that polls gets on.
    pub const PATIENCE_POLLS: u32 = 64;
}

impl Schedule for Lazy {
    fn choose(&mut self, _: usize) -> usize {
        0
    }

    fn pace(&mut self, call: Call) -> usize {
        self.polls = if call == Call::Query { self.polls + 1 } else { 0 };
        usize::from(call == Call::Query && self.polls >= Lazy::PATIENCE_POLLS)
    }
}

/// Runs everything at once, at every call.
#[derive(Clone, Debug, Default)]
pub struct Eager;

impl Schedule for Eager {
    fn choose(&mut self, _: usize) -> usize {
        0
    }

    fn pace(&mut self, _: Call) -> usize {
        usize::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_always_one_of_the_options_and_each_comes_up() {
        let mut random = Random::new(1);
        for options in 1..9 {
            let mut seen = vec![0; options];
            (0..1_000).for_each(|_| seen[random.choose(options)] += 1);
            assert!(seen.iter().all(|count| *count > 500 / options), "{seen:?}");
        }
    }

    #[test]
    fn every_seed_lets_the_device_go_on() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let steps: usize = (0..200).map(|_| random.pace(Call::Query)).sum();
            assert!(steps > 50, "seed {seed} made {steps} steps in 200 calls");
        }
    }
}
