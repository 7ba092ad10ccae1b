//! CUDA's form of every kernel against its host form, on the same numbers.
//!
//! The faults guarded against: a CUDA kernel that computes something else, misses the last rows or
//! channels, writes past its range, or depends on the order of its threads; arguments in another
//! order than the PTX has them; and a model that does not learn in bf16 though it does in f32.
//!
//! ```text
//!   case (numbers, launcher) -> simulated device, f32 -> wanted
//!                            -> emulated: kernels/*.cu as C++, bf16 -> got      no GPU needed
//!                            -> a real device, PTX and cuBLAS, bf16 -> got      where there is one
//! ```

mod cases;
mod emulated;
mod real;
mod rig;

use cases::{Case, Data};
use rig::Rig;

/// Sizes that leave a remainder at every loop of the kernels: tokens and channels.
const SHAPES: [(u64, u64); 5] = [(1, 8), (19, 24), (35, 1032), (4203, 8), (130, 256)];

/// How far a case's results are off, relative to their own size or the results' mean size.
fn off(wanted: &[Data], got: &[Data]) -> f64 {
    let pairs = wanted.iter().zip(got);
    pairs.map(|(wanted, got)| wanted.off(got)).fold(0.0, f64::max)
}

/// One line a case: name, sizes, how far off; the lines of those too far off are returned.
fn compare(rig: &mut Rig, cases: &[Case], say: &mut dyn FnMut(&str)) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut simulated = Rig::simulated().unwrap();
    for case in cases {
        let shape = |element| cases::shape(case.tokens, case.hidden, element);
        let wanted = simulated.run(case, &shape(4)).unwrap();
        let got = rig.run(case, &shape(2));
        let name = format!("{:14} {:5} x {:4}", case.name, case.tokens, case.hidden);
        let line = match got {
            Ok(got) => {
                let off = off(&wanted, &got);
                let verdict = if off <= case.allowed { "" } else { "  WRONG" };
                format!("{name}  off by {off:.1e}, {:.1e} allowed{verdict}", case.allowed)
            }
            Err(error) => format!("{name}  WRONG: {error}"),
        };
        say(&line);
        if line.contains("WRONG") {
            wrong.push(line);
        }
    }
    wrong
}
