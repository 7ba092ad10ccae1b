//! The CUDA backend told apart from the simulated device by an engine's own programs: the twins of
//! `tests/twins.rs`, with the backend on the fake driver. What its tables, accounts and refusals
//! get wrong shows here on any machine; of order, only that the backend asks for it.

use crate::compare::{Twin, compare};
use crate::fake::{Alive, alive, name_of, story};
use lightering::backend::cuda::Cuda;

#[test]
fn an_engines_programs_are_told_the_same_as_on_the_simulated_device() {
    story(name_of!(an_engines_programs_are_told_the_same_as_on_the_simulated_device), "", || {
        let open = |_| -> crate::side::Opener { Box::new(|| Box::new(Cuda::open(0).unwrap())) };
        let twin =
            Twin { name: "CUDA on the fake driver", open: Box::new(open), can_verify: false };
        let tally = compare(&twin, 0..80);
        assert!(tally.values().sum::<u64>() > 5000, "{tally:?}");
        assert_eq!(alive(), Alive::default(), "left behind");
    });
}
