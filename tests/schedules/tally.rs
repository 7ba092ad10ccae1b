//! Sums of many runs: how many there were, what was ordered to go wrong in them, and what did.
//!
//! What it is not: a fault that was ordered is not one that struck. A rule whose call never came
//! counts as ordered only; what struck is what the simulated world says of its rules.
//!
//! Invariant: sums of parts are sums of the whole, in any order of the parts.
//!
//! ```text
//!   Outcome -> Tally::add   \
//!   a part's line -> parse   > Tally -> print, insist
//! ```

use crate::plan::Kind;
use std::time::Duration;

/// How a run came out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The device was lost on the way.
    pub(crate) is_latched: bool,
    pub(crate) faults_struck: u64,
    pub(crate) records: u64,
    pub(crate) digest: u64,
    /// Ordered of the device.
    pub(crate) ordered: [bool; Kind::COUNT],
    /// Struck, or done by the process.
    pub(crate) happened: [bool; Kind::COUNT],
}

impl Outcome {
    /// Something went wrong in it, ordered of the device or done by the process.
    fn is_faulty(&self) -> bool {
        let process = Kind::OF_PROCESS.iter().any(|kind| self.happened[*kind as usize]);
        self.faults_struck > 0 || process
    }
}

#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) runs: u64,
    faulty: u64,
    latched: u64,
    records: u64,
    ordered: [u64; Kind::COUNT],
    happened: [u64; Kind::COUNT],
}

impl Tally {
    pub(crate) fn add(&mut self, outcome: &Outcome) {
        self.runs += 1;
        self.faulty += u64::from(outcome.is_faulty());
        self.latched += u64::from(outcome.is_latched);
        self.records += outcome.records;
        let of_kinds =
            [(&mut self.ordered, &outcome.ordered), (&mut self.happened, &outcome.happened)];
        for (counts, each) in of_kinds {
            counts.iter_mut().zip(each).for_each(|(count, is)| *count += u64::from(*is));
        }
    }

    fn numbers(&mut self) -> impl Iterator<Item = &mut u64> {
        let sums = [&mut self.runs, &mut self.faulty, &mut self.latched, &mut self.records];
        sums.into_iter().chain(&mut self.ordered).chain(&mut self.happened)
    }

    /// The sums as a line that [`Tally::take_in`] reads.
    pub(crate) fn line(&mut self) -> String {
        self.numbers().map(|number| number.to_string()).collect::<Vec<_>>().join(" ")
    }

    /// Adds the sums of such a line.
    pub(crate) fn take_in(&mut self, line: &str) {
        let sums: Vec<u64> = line.split_whitespace().map(|sum| sum.parse().unwrap()).collect();
        assert_eq!(self.numbers().count(), sums.len());
        self.numbers().zip(sums).for_each(|(number, sum)| *number += sum);
    }

    pub(crate) fn print(&self, first: u64, time: Duration) {
        let each = time.as_secs_f64() * 1e6 / self.runs as f64;
        println!(
            "{} runs from seed {first} in {:.0} s: a run every {each:.0} us, {} records each, \
             {:.1} % with faults, {} lost their device",
            self.runs,
            time.as_secs_f64(),
            self.records / self.runs,
            100.0 * self.faulty as f64 / self.runs as f64,
            self.latched
        );
        for (at, kind) in Kind::ALL.iter().enumerate() {
            let (name, count) = (format!("{kind:?}"), self.happened[at]);
            match kind.is_ordered() {
                true => println!("  {name:<18} ordered in {}, struck in {count}", self.ordered[at]),
                false => println!("  {name:<18} in {count}"),
            }
        }
    }

    /// Enough went wrong, and of each kind something.
    pub(crate) fn insist(&self) {
        assert!(self.faulty * 10 >= self.runs * 7, "{} of {}", self.faulty, self.runs);
        let never = Kind::ALL.iter().zip(self.happened).find(|(_, count)| *count == 0);
        assert!(never.is_none(), "{never:?} never happened");
    }
}
