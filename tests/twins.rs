//! One program, two devices: whatever a framework asks of an engine, wrong calls included, it is
//! told the same on the simulated device as on a real one, and every byte is the same and right.
//!
//! The fault guarded against: a simulated device that is kinder, or stricter, than the real one.
//! Then all that is proved on it is proved of nothing.
//!
//! What a program may be told is made independent of time by the program itself (see
//! `twins/program.rs`); no difference is ever overlooked. Where there is no CUDA device, the twins
//! are the simulated device in two orders, under an adversary and in virtual time, as early or as
//! late as can be; that CUDA was not run is said aloud.
//!
//! `LIGHTERING_TWINS` is the number of programs, `LIGHTERING_TWINS_SEED` the first one's seed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "twins/compare.rs"]
mod compare;
#[cfg(all(feature = "cuda", target_os = "linux"))]
#[allow(dead_code, reason = "the helpers serve several test files; each uses its part")]
#[path = "cuda_device/device.rs"]
mod device;
#[path = "twins/machine.rs"]
mod machine;
#[path = "twins/misuse.rs"]
mod misuse;
#[path = "twins/outcome.rs"]
mod outcome;
#[path = "twins/program.rs"]
mod program;
#[path = "twins/side.rs"]
mod side;
mod support;

use compare::{DEVICE_BYTES, Twin, adversary, compare, run};
use lightering::backend::sim::{Config, Eager, Lazy, Model};
use program::Program;
use side::simulated;
use std::io::Write;

/// The other device, and how many programs it runs where nobody says.
#[cfg(all(feature = "cuda", target_os = "linux"))]
fn twin() -> (Twin, u64) {
    use lightering::backend::cuda::Cuda;
    let Some(kept) = device::cuda() else { return simulated_twin() };
    println!("the twin is {:?}", lightering::backend::Backend::about(&kept));
    let open = move |_| -> side::Opener {
        let _ = &kept; // as long as this is there, so are the context and its memory pool
        Box::new(|| Box::new(Cuda::open(0).unwrap()))
    };
    let can_verify = lightering::checksum::CHECKSUM.ptx.is_some();
    (Twin { name: "CUDA", open: Box::new(open), can_verify }, 1000)
}

#[cfg(not(all(feature = "cuda", target_os = "linux")))]
fn twin() -> (Twin, u64) {
    simulated_twin()
}

fn simulated_twin() -> (Twin, u64) {
    let words = b"the twins are the simulated device in two orders: CUDA was NOT run\n";
    // Straight to the descriptor, past the capture of a passing test's output.
    std::io::stderr().write_all(words).unwrap();
    let open = |seed| {
        let config = match seed % 3 {
            0 => Config::timed(Model::default()),
            1 => Config::scheduled(Box::new(Eager)),
            _ => Config::scheduled(Box::new(Lazy::default())),
        };
        simulated(Config { device_bytes: DEVICE_BYTES, ..config })
    };
    let name = "the simulated device in another order";
    (Twin { name, open: Box::new(open), can_verify: true }, 300)
}

/// The answers that the first programs must have met, or they try too little.
const NEEDED: &[&str] = &[
    "Seen",
    "Moving",
    "Clean",
    "Kept NoPinnedRoom",
    "Kept TooSmall",
    "Named",
    "Wanted",
    "NeedsRoom",
    "At Evicting",
    "At Evicted(Host)",
    "At Refilling",
    "Failed OutOfMemory",
    "Failed Usage(BadValue)",
    "Failed Usage(State)",
    "Failed Usage(Stale)",
    "Failed Usage(Foreign)",
    "Failed Usage(SameStream)",
    "Failed Usage(Overlap)",
    "Failed Usage(LengthMismatch)",
    "Failed Usage(OutOfRange)",
    "Failed Usage(NotThere)",
    "Failed Usage(Empty)",
    "Failed Usage(TooLarge)",
];

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, no number")))
}

#[test]
fn a_program_is_told_the_same_on_both_devices_and_loses_no_byte_on_either() {
    let (twin, programs) = twin();
    let count = number("LIGHTERING_TWINS").unwrap_or(programs);
    let first = number("LIGHTERING_TWINS_SEED").unwrap_or(0);
    let tally = compare(&twin, first..first + count);
    println!("{count} programs, twin {}: all told the same, hazards 0", twin.name);
    println!("answers: {tally:#?}");
    if first == 0 && count >= 300 {
        for needed in NEEDED {
            assert!(tally.contains_key(*needed), "no program was told {needed}");
        }
    }
}

/// Were wrong bytes or a missing order not noticed, the test above would prove nothing.
#[test]
fn a_framework_that_keeps_no_order_of_its_own_is_caught() {
    let (mut hazards, mut wrong) = (0, 0);
    for seed in 0..60 {
        let mut program = Program::new(seed);
        // It might find the wrong bytes first, and refuse them in the middle of the program.
        program.options.verify = false;
        let report = run(&mut adversary(seed), &program, true);
        hazards += usize::from(report.hazards > 0);
        wrong += usize::from(!report.wrong.is_empty());
    }
    println!("of 60 careless programs {hazards} show a hazard, {wrong} wrong bytes");
    assert!(hazards > 5 && wrong > 2, "{hazards} hazards, {wrong} wrong");
}
