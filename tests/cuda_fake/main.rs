//! The faults of a driver that is absent, wrong, asked wrongly or failing, shown on a fake driver:
//! no GPU is needed. Each file tells the faults it guards against.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are tests

#[macro_use]
#[path = "../conformance/promises.rs"]
mod promises;

mod batches;
mod bench;
mod conformance;
mod ends;
mod fake;
mod faults;
mod interop;
mod nvtx;
mod pinning;
mod probe;
mod process;
mod refusals;
mod steps;
mod sync;
mod twins;
mod verbs;

#[path = "../conformance/cuda_rig.rs"]
mod cuda_rig;
#[path = "../conformance/mapping.rs"]
mod mapping;
#[path = "mapping.rs"]
mod mapping_faults;
#[path = "../conformance/memory.rs"]
mod memory;
#[path = "../conformance/order.rs"]
mod order;
#[path = "../conformance/refusal.rs"]
mod refusal;
#[allow(dead_code)] // the simulated device's part
#[path = "../conformance/rig.rs"]
mod rig;
#[path = "../conformance/threads.rs"]
mod threads;

#[path = "../twins/compare.rs"]
mod compare;
#[path = "../twins/machine.rs"]
mod machine;
#[path = "../twins/misuse.rs"]
mod misuse;
#[path = "../twins/outcome.rs"]
mod outcome;
#[path = "../twins/program.rs"]
mod program;
#[path = "../twins/side.rs"]
mod side;
#[path = "../support/mod.rs"]
mod support;
