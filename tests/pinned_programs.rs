//! The fault guarded against: a sequence of lends and returns, by two clients, that nobody thought
//! of, after which bytes are with two borrowers, with the wrong one too early, or with none.
//!
//! Random programs run against a model that knows which copies are in flight where.
#![allow(clippy::unwrap_used)]

#[path = "pinned_programs/model.rs"]
mod model;
mod pinned_support;

use model::{BUDGET, Step, World};
use proptest::prelude::*;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let who = 0..2usize;
    let nth = 0..8usize;
    // Few sizes, so that blocks are reused, and some of any size.
    let len = prop_oneof![
        4 => prop::sample::select(vec![1u64, 4096, 5000, 16 << 10, 33 << 10, 64 << 10]),
        1 => 1u64..200 << 10,
    ];
    let step = prop_oneof![
        12 => (who.clone(), len).prop_map(|(who, len)| Step::Lend { who, len }),
        8 => (who.clone(), nth.clone(), any::<bool>())
            .prop_map(|(who, nth, busy)| Step::GiveBack { who, nth, busy }),
        1 => (who.clone(), nth.clone()).prop_map(|(who, nth)| Step::GiveToOther { who, nth }),
        1 => (who.clone(), nth.clone()).prop_map(|(who, nth)| Step::Drop { who, nth }),
        4 => (who.clone(), nth).prop_map(|(who, nth)| Step::Finish { who, nth }),
        2 => who.clone().prop_map(|who| Step::Settle { who }),
        1 => who.prop_map(|who| Step::Reclaim { who }),
        1 => (1u64..BUDGET * 2).prop_map(|len| Step::Reserve { len }),
        1 => (1u64..BUDGET * 2, any::<bool>())
            .prop_map(|(len, cancelled)| Step::ReserveBehind { len, cancelled }),
        1 => Just(Step::Trim),
        1 => any::<bool>().prop_map(|allowed| Step::Growth { allowed }),
        1 => (0..4usize).prop_map(|next| Step::Refuse { next }),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn h70_h79_no_program_of_two_clients_shares_loses_or_leaks_a_byte_or_an_event(
        program in steps(),
        pageable in any::<bool>(),
    ) {
        let mut world = World::new(pageable);
        for step in &program {
            world.step(step);
            world.check();
        }
        world.end();
    }
}
