//! Two runs of one program, compared answer by answer.
//!
//! What it is not: tolerant. Every answer counts, and every byte that was read.
//!
//! Invariant: the left side is the simulated device under the adversary that the seed names.
//!
//! ```text
//!   Program(seed) -> run on the adversary -> Report --.
//!                \-> run on the twin      -> Report ---+-> equal? right? no hazard?
//! ```
//!
//! The tests `twins` and `cuda_fake` use it.

use crate::machine::Machine;
use crate::outcome::{Outcome, Report};
use crate::program::Program;
use crate::side::{Opener, simulated};
use lightering::Bytes;
use lightering::backend::sim::Config;
use std::collections::BTreeMap;
use std::ops::Range;

/// The other device: its name, and how it is opened for the program of a seed.
pub(crate) struct Twin {
    pub(crate) name: &'static str,
    pub(crate) open: Box<dyn Fn(u64) -> Opener>,
    /// Has it the kernels that sum up copies?
    pub(crate) can_verify: bool,
}

/// How often each answer was given.
pub(crate) type Tally = BTreeMap<String, u64>;

/// Runs the programs of these seeds on both devices, and requires that nothing differs.
pub(crate) fn compare(twin: &Twin, seeds: Range<u64>) -> Tally {
    let mut tally = Tally::new();
    for seed in seeds {
        let mut program = Program::new(seed);
        program.options.verify &= twin.can_verify;
        let left = {
            let _told = Told(&program, "the simulated device");
            run(&mut adversary(seed), &program, false)
        };
        let _told = Told(&program, twin.name);
        let right = run(&mut (twin.open)(seed), &program, false);
        require_equal(&program, twin.name, &left, &right);
        for (_, outcome) in &left.log {
            *tally.entry(word(outcome)).or_default() += 1;
        }
    }
    tally
}

pub(crate) fn run(open: &mut Opener, program: &Program, is_careless: bool) -> Report {
    let mut machine = Machine::new(open, program);
    machine.side.is_careless = is_careless;
    program.ops.iter().for_each(|op| machine.run(*op));
    machine.finish()
}

/// Says which program was running, should the test fail.
struct Told<'a>(&'a Program, &'static str);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Program { seed, kind, streams, ops, options, .. } = self.0;
            println!("on {}: seed {seed}, {kind:?}, {streams} streams, {options:?}", self.1);
            println!("{ops:?}");
            println!("again: LIGHTERING_TWINS=1 LIGHTERING_TWINS_SEED={seed}");
        }
    }
}

/// More than any program has alive.
pub(crate) const DEVICE_BYTES: Bytes = Bytes::mib(128);

pub(crate) fn adversary(seed: u64) -> Opener {
    simulated(Config { device_bytes: DEVICE_BYTES, ..Config::adversary(seed) })
}

/// An answer without the numbers in it.
fn word(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Failed(kind) => format!("Failed {kind:?}"),
        Outcome::Kept(_, why) => format!("Kept {why:?}"),
        Outcome::At(state) => format!("At {state:?}"),
        other => {
            let text = format!("{other:?}");
            text.split('(').next().unwrap().to_owned()
        }
    }
}

fn require_equal(program: &Program, name: &str, left: &Report, right: &Report) {
    for (side, report) in [("the simulated device", left), (name, right)] {
        assert!(report.wrong.is_empty(), "{side}: {}", report.wrong.join("; "));
        assert_eq!(report.hazards, 0, "{side}: {}", report.words);
    }
    let differ = left.log.iter().zip(&right.log).find(|(left, right)| left != right);
    if let Some(((at, told), (_, other))) = differ {
        let op = program.ops.get(at.wrapping_sub(1));
        panic!("op {at}, {op:?}: the simulated device says {told:?}, {name} {other:?}");
    }
    assert_eq!(left.log.len(), right.log.len(), "one was told more");
}
