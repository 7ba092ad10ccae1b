#![doc = include_str!("../README.md")]
//!
//! # The picture
//!
//! ```text
//!             adapter             python/  (a C ABI: later)               who uses it
//!   -------------------------------------------------------------------------------------
//!   8  engine                                              one owner: admit, step, drain
//!   7  policy      prefetch                                what leaves; what comes back, when
//!   6  storage                                             resize-to-zero / refill: the states
//!   5  checksum    pack        (disk: a later stage)      sums; small tensors; the spill file
//!   4  copy                                                bytes in motion: the lanes
//!   3  pinned      handles                                 room: arenas, classes, blocks; mapped
//!                                                          device memory
//!   2  stream                                              order: points, the event pool
//!   1  backend/{sim, cuda, traced}    hazard               the only driver calls; the checker
//!   0  error       unit       trace                        words everyone shares
//! ```
//!
//! A file uses floors below its own, never above, never sideways; `engine` is the only place where
//! policy, prefetch and storage meet. `tests/layers.rs` reads the sources and fails otherwise.
//!
//! # The life of one tensor
//!
//! 1. [`Engine::adopt`], [`Engine::alloc`] or [`Engine::alloc_fixed`] gives a [`Storage`]:
//!    resident, nothing owed.
//! 2. [`Engine::offer`] asks the policy, [`Engine::evict`] sends it off: the pool lends a block, an
//!    event is recorded on the caller's stream, the copy-out lane waits for it (E1) and for the
//!    block's last copy (E7), the copy is enqueued in trunks, its end recorded.
//! 3. [`Engine::releasable`] names it, or the engine frees its bytes: behind the copy-out (E2), by
//!    asking below a bound, by a wait of the caller's stream above it.
//! 4. [`Engine::wanted`] names it again in the order readers are expected; [`Engine::prefetch`]
//!    brings it home ahead of its reader, into room taken by its owner (E5), behind the copy-out of
//!    the same block (E4).
//! 5. [`Engine::acquire`] orders the reader's stream behind the copy-in (E6). The host waits for no
//!    copy. Who will write the bytes calls [`Engine::acquire_mut`]: the host copy counts no more.
//! 6. The block stays as a clean host copy until [`Engine::take`], or until the storage ends by
//!    [`Engine::release`] or by dropping its handle; then the pool has it back, tagged with the
//!    event of its last copy.
//!
//! With [`Options::verify`] each copy of a storage is summed up on its lane, the one out in front
//! of its trunks, the one in behind them, and [`Engine::step`] compares: law 8 holds without trust
//! in the driver. What is not compared is counted, every batch among it.

pub mod adapter;
pub mod backend;
pub mod checksum;
pub mod copy;
pub mod engine;
pub mod error;
pub mod handles;
pub mod hazard;
pub mod pack;
pub mod pinned;
pub mod policy;
pub mod prefetch;
pub mod storage;
pub mod stream;
pub mod trace;
pub mod unit;

pub use backend::open;
pub use copy::Transfer;
pub use engine::{Acquire, Engine, Evict, Held, Options, Shared, Stats};
pub use error::{Error, Kind, Missing, Misuse, Result};
pub use pinned::{
    Budget, Growth, PinnedPool, PoolOptions, Progress, Reservation, State as ReservationState,
};
pub use policy::Kept;
pub use storage::{Residency, Storage, Tier};
pub use unit::{
    Bytes, DeviceId, DevicePtr, DeviceRange, EventId, Key, MemoryId, Name, PinnedPtr, PinnedRange,
    StorageId, StreamId,
};
