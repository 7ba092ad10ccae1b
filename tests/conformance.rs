//! The driver seam's contract, promise by promise, asked of every backend alike.
//!
//! The fault it guards against: two backends that differ in what they promise. Then the tests on
//! the simulated device prove nothing about a real one. A backend is added with one line in the
//! list at the end: its name, and a function that gives the rigs to ask.

// Helpers outside `#[test]` functions unwrap too: a failed call there is a failed test.
#![allow(clippy::unwrap_used)]

#[macro_use]
#[path = "conformance/promises.rs"]
mod promises;

#[cfg(all(feature = "cuda", target_os = "linux"))]
#[path = "conformance/cuda_rig.rs"]
mod cuda_rig;
#[path = "conformance/mapping.rs"]
mod mapping;
#[path = "conformance/memory.rs"]
mod memory;
#[path = "conformance/order.rs"]
mod order;
#[path = "conformance/refusal.rs"]
mod refusal;
#[path = "conformance/rig.rs"]
mod rig;
#[path = "conformance/threads.rs"]
mod threads;

macro_rules! conformance {
    ($($(#[$when:meta])* $backend:ident: $rigs:path;)*) => {
        $($(#[$when])*
        mod $backend {
            each_promise! { tests! $rigs }
        })*
    };
}

macro_rules! tests {
    ($rigs:path; $($topic:ident::$promise:ident,)*) => {
        $(#[test]
        fn $promise() {
            for rig in $rigs() {
                crate::$topic::$promise(&*rig);
            }
        })*
    };
}

conformance! {
    timed: crate::rig::timed;
    adversary: crate::rig::adversaries;
    #[cfg(all(feature = "cuda", target_os = "linux"))]
    cuda: crate::cuda_rig::cuda;
}
