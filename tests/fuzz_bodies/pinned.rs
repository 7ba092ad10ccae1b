//! The pool under two clients that lend, return, drop, grow and reserve in any order, with and
//! without memory that is not page-locked.
//!
//! What it is not: a device. Memory is page-locked on paper, events are done by hand.
//!
//! Invariant: no byte is with two borrowers or with the wrong one too early, none is lost, the
//! budget holds at every step, and at the end nothing stays page-locked.
//!
//! ```text
//!   bytes --> steps --> World { pool, model }      checked after each
//! ```
//!
//! `fuzz/` and `tests/fuzz_replay.rs` run it.

use crate::input::Input;
use crate::model::{BUDGET, Step, World};

/// Longer programs find nothing that shorter ones do not, and take longer.
const STEPS_MAX: usize = 200;
const LENS: [u64; 6] = [1, 4096, 5000, 16 << 10, 33 << 10, 64 << 10];

pub(crate) fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut world = World::new(data.len() % 2 == 1);
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        world.step(&step(&mut input));
        world.check();
    }
    world.end();
}

fn step(input: &mut Input<'_>) -> Step {
    let kind = input.below(16);
    let (who, nth) = (input.below(2), input.below(8));
    match kind {
        0..4 => Step::Lend { who, len: LENS[nth % LENS.len()] },
        4 => Step::Lend { who, len: input.number() },
        5 | 6 => Step::GiveBack { who, nth, busy: true },
        7 => Step::GiveBack { who, nth, busy: false },
        8 => Step::GiveToOther { who, nth },
        9 => Step::Drop { who, nth },
        10 => Step::Finish { who, nth },
        11 => Step::Settle { who },
        12 => Step::Reclaim { who },
        13 => Step::Reserve { len: 1 + input.number() % (2 * BUDGET) },
        14 => match nth {
            0 | 2 => Step::Trim,
            4 | 6 => {
                let len = 1 + input.number() % (2 * BUDGET);
                Step::ReserveBehind { len, cancelled: nth == 6 }
            }
            odd => Step::Growth { allowed: odd % 4 == 1 },
        },
        _ => Step::Refuse { next: nth % 4 },
    }
}
