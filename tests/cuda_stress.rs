//! A real device under load: a million records of a program that never waits where it need not,
//! and as many bytes as are asked for, out and in.
//!
//! The fault guarded against: an order that holds by luck. On an idle device nearly everything is
//! done before anybody looks; so kernels hold streams, lanes are full, pools small. The checker
//! judges the order asked for, whatever the luck; a pattern that tells each word's place finds the
//! byte that went astray all the same.
//!
//! `LIGHTERING_STRESS` is the number of records (1,000,000), `LIGHTERING_VOLUME` the bytes (8GiB).
//! Without a device the two say aloud that they did not run; the same code runs small on the
//! simulated device, on every machine.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[cfg(all(feature = "cuda", target_os = "linux"))]
#[allow(dead_code, reason = "the helpers serve several test files; each uses its part")]
#[path = "cuda_device/device.rs"]
mod device;
#[path = "cuda_stress/kernels.rs"]
mod kernels;
#[path = "cuda_stress/long.rs"]
mod long;
#[allow(dead_code, reason = "twins are compared; here one runs alone")]
#[path = "twins/machine.rs"]
mod machine;
#[path = "twins/misuse.rs"]
mod misuse;
#[allow(dead_code, reason = "twins are compared; here one runs alone")]
#[path = "twins/outcome.rs"]
mod outcome;
#[allow(dead_code, reason = "programs here have no end")]
#[path = "twins/program.rs"]
mod program;
#[path = "twins/side.rs"]
mod side;
mod support;
#[path = "cuda_stress/volume.rs"]
mod volume;

use lightering::Bytes;
use lightering::backend::sim::Config;
use side::{Opener, simulated};
use volume::Load;

fn adversary(seed: u64) -> Opener {
    simulated(Config { device_bytes: Bytes::mib(128), ..Config::adversary(seed) })
}

#[test]
fn a_long_program_is_right_on_the_simulated_device() {
    for seed in 0..3 {
        long::run(&mut adversary(seed), seed, 10_000, seed > 0);
    }
}

#[test]
fn a_pattern_comes_back_on_the_simulated_device() {
    for (seed, verify) in [(1, false), (2, true)] {
        let piece = Bytes(Bytes::kib(256).0 + 3);
        let load = Load { total: Bytes::mib(8), piece, count: 8, verify };
        volume::run(&mut adversary(seed), load);
    }
}

#[cfg(all(feature = "cuda", target_os = "linux"))]
mod cuda {
    use super::*;
    use lightering::backend::Backend;
    use lightering::backend::cuda::Cuda;
    use lightering::checksum::{CHECKSUM, CLEAR};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// A wait for the whole context is one for the other test's work, too: one at a time.
    static TURN: Mutex<()> = Mutex::new(());

    fn turn() -> MutexGuard<'static, ()> {
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device, which stays open as long as what is returned.
    fn opener() -> Option<Opener> {
        let kept = device::cuda()?;
        println!("{:?}", kept.about());
        Some(Box::new(move || {
            let _ = &kept; // and with it the context and its memory pool
            Box::new(Cuda::open(0).unwrap())
        }))
    }

    /// Are there kernels that sum up copies on this device?
    fn can_verify() -> bool {
        let can = CHECKSUM.ptx.is_some() && CLEAR.ptx.is_some();
        println!("the engine sums up its copies here: {can}");
        can
    }

    fn asked(name: &str, usual: &str) -> Bytes {
        let text = std::env::var(name).unwrap_or_else(|_| usual.to_owned());
        text.parse().unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    #[test]
    fn a_million_records_of_a_real_device_show_no_hazard_and_no_wrong_byte() {
        let _turn = turn();
        let Some(mut open) = opener() else { return };
        long::run(&mut open, 7, asked("LIGHTERING_STRESS", "1000000").0, can_verify());
    }

    #[test]
    fn every_word_of_a_volume_comes_back_to_a_real_device() {
        let _turn = turn();
        let Some(mut open) = opener() else { return };
        let total = asked("LIGHTERING_VOLUME", "8GiB");
        let load = Load { total, piece: Bytes::mib(64), count: 16, verify: false };
        volume::run(&mut open, load);
        if can_verify() {
            volume::run(&mut open, Load { total: Bytes(total.0 / 8), verify: true, ..load });
        }
    }
}
