//! The hazards of an offloader, one by one and by their numbers: what can go wrong with the order
//! of copies, the lives of handles, the driver, the pinned pool and the calls themselves, and what
//! must come of it.
//!
//! The fault guarded against is a hazard that everybody knows and no test asks about.
//! `docs/reliability.md` lists them all with their tests, those in other files too.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "hazards/api.rs"]
mod api;
#[path = "hazards/bench.rs"]
mod bench;
#[path = "hazards/driver.rs"]
mod driver;
#[path = "hazards/lives.rs"]
mod lives;
#[path = "hazards/order.rs"]
mod order;
mod pinned_support;
#[path = "hazards/pool.rs"]
mod pool;
#[path = "hazards/reuse.rs"]
mod reuse;
mod support;
