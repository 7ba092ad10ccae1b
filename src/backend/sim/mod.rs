//! The simulated device: a complete second device, for machines without one and for tests.
//!
//! What it is not: a mock. Streams are queues, events capture, copies move real bytes in pieces,
//! and a freed range is poisoned and handed out again. It is no emulator of GPU code either: a
//! kernel runs its host form.
//!
//! Invariant: whatever it does, the ordering contract of [`crate::backend`] allows; and a run is a
//! pure function of the program and the [`Config`].
//!
//! ```text
//!   World --- device(0) -> Sim (user A: ids) --.
//!     |  `--- device(0) -> Sim (user B: ids) ---+--> State { machine, clock, faults }   one lock
//!     `------ device(1) -> Sim (user C: ids) --'
//!
//!   user verbs pin -> state -> adversary (schedule) | timing (model) -> machine: queue room memory
//! ```
//!
//! A world of [`Clock::TimesOnly`] keeps time and books alone: everything above holds but that no
//! byte moves. It tells how long a program takes on a device that is not there, however large.
//!
//! Devices of one world share pinned memory and the clock. Several users of one device are like
//! several libraries in one process that share a CUDA primary context: a stream's raw handle means
//! the same queue to all of them. A world lives in the process that made it: in a forked child
//! every verb is `Usage(Forked)`. Tests, examples and the adapters for plain host memory use it.
//!
//! ```
//! use lightering::Bytes;
//! use lightering::backend::Backend;
//! use lightering::backend::sim::{Config, World};
//!
//! let world = World::new(Config::adversary(7)); // seed 7 names one order of everything
//! let mut device = world.device(0)?;
//! let stream = device.create_stream()?;
//! let at = device.alloc_device(Bytes::kib(4), stream)?;
//! device.free_device(at, stream)?;
//! device.sync()?;
//! assert_eq!(device.memory()?.allocated, Bytes::ZERO);
//! # Ok::<(), lightering::Error>(())
//! ```

mod adversary;
mod fault;
mod figures;
mod launch;
mod machine;
mod mapping;
mod memory;
mod model;
mod orders;
mod pct;
mod pin;
mod process;
mod queue;
mod room;
mod schedule;
mod state;
mod timing;
mod user;
mod verbs;

pub use fault::{Fault, FaultPlan, Spot};
pub use launch::Closure;
pub use model::{Model, Slowdown};
pub use orders::Orders;
pub use pct::Pct;
pub use schedule::{Call, Eager, Lazy, Random, Schedule};
pub use user::{HOST_STREAM, Sim};

use super::mapping::Books;
use crate::error::{Error, Kind, Missing, Result};
use crate::unit::{Bytes, Spare, Table};
use machine::{Device, User};
use memory::{Backing, MAPPED_OFFSET, device_base};
use room::Room;
use state::State;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How a world's devices get on with their work.
#[derive(Debug)]
pub enum Clock {
    /// In virtual time, after a model.
    Timed(Model),
    /// In the same virtual time, and nothing else: what is refused, in which order work runs, what
    /// memory it takes and when it ends are those of `Timed`, but **bytes are undefined**. No copy
    /// moves one, no kernel's form runs (a kernel needs none), device memory takes none of the
    /// host's, and pinned memory is mapped but never touched by the device.
    TimesOnly(Model),
    /// In any order the contract allows, as a schedule chooses.
    Adversary(Box<dyn Schedule>),
}

/// What a world is made of.
#[derive(Debug)]
pub struct Config {
    /// How many devices there are.
    pub devices: u32,
    /// Memory of each device, and no more: a device that has lent it all says `OutOfMemory`. Costs
    /// the host what is used of it, and at most some hundred MiB of what was and is not any more;
    /// nothing under [`Clock::TimesOnly`]. A device larger than its host can bear ends in a killed
    /// process.
    pub device_bytes: Bytes,
    /// The most bytes one registration of pinned memory may have.
    pub registration_bytes_max: Bytes,
    /// What lengths of mapped memory are multiples of; zero: no device can map memory.
    pub map_granularity: Bytes,
    /// The clock.
    pub clock: Clock,
    /// Faults to happen.
    pub faults: FaultPlan,
}

impl Config {
    /// Eight devices like the model's, in virtual time.
    pub fn timed(model: Model) -> Config {
        Config {
            devices: 8,
            device_bytes: Bytes(141_000_000_000),
            registration_bytes_max: Bytes::gib(64),
            map_granularity: Bytes::mib(2),
            clock: Clock::Timed(model),
            faults: FaultPlan::default(),
        }
    }

    /// The same eight devices, times only: no byte moves. See [`Clock::TimesOnly`].
    pub fn times_only(model: Model) -> Config {
        Config { clock: Clock::TimesOnly(model), ..Config::timed(model) }
    }

    /// With devices no larger than the host can bear, whose files lie under `root`.
    fn within(mut self, root: &Path) -> Config {
        if let Some(left) = Spare::new(root).left() {
            self.device_bytes = self.device_bytes.min(Bytes(left / 2));
        }
        self
    }

    /// Two small devices under the adversary that `seed` names.
    pub fn adversary(seed: u64) -> Config {
        Config::scheduled(Box::new(Random::new(seed)))
    }

    /// Two small devices under this schedule.
    pub fn scheduled(schedule: Box<dyn Schedule>) -> Config {
        Config {
            devices: 2,
            device_bytes: Bytes::mib(64),
            map_granularity: Bytes(512),
            clock: Clock::Adversary(schedule),
            ..Config::timed(Model::default())
        }
    }
}

impl Default for Config {
    fn default() -> Config {
        Config::timed(Model::default())
    }
}

/// A set of simulated devices that share one clock and one pinned memory. Clones are the same
/// world.
///
/// Every call takes the world's one lock, kernels run under it, and each call costs time of the one
/// host clock: a program whose threads race for it has no reproducible times.
#[derive(Clone)]
pub struct World {
    state: Arc<Mutex<State>>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl World {
    /// A world of its own.
    pub fn new(config: Config) -> World {
        World { state: Arc::new(Mutex::new(State::new(config))) }
    }

    /// The process's own world: timed, like one host of eight H200. Each device has as much memory
    /// as an H200, or half of what this machine and this container can spare when the world is
    /// made, if that is less: the other half is for what leaves the device.
    pub fn process() -> World {
        static WORLD: OnceLock<World> = OnceLock::new();
        WORLD.get_or_init(|| World::new(Config::default().within(Path::new("/")))).clone()
    }

    /// One more user of a device.
    ///
    /// # Errors
    /// `Unavailable` where the world has no such device; `OutOfMemory` where the host has no room
    /// for its memory.
    pub fn device(&self, ordinal: u32) -> Result<Sim> {
        let mut state = self.lock();
        if ordinal >= state.devices {
            let shown = state.devices;
            return Err(Error::new(Kind::Unavailable(Missing::Device), "device").detail(format!(
                "simulated device {ordinal} was asked for, this world shows {shown}"
            )));
        }
        let machine = &mut state.machine;
        if machine.devices.len() <= ordinal as usize {
            machine.devices.resize_with(ordinal as usize + 1, || None);
        }
        if state.machine.devices[ordinal as usize].is_none() {
            let room = Room::new(state.device_bytes);
            let backing = match state.machine.moves_bytes {
                true => Backing::new(room.size())?,
                false => Backing::none(device_base(ordinal)),
            };
            let fixed = [false, true].map(|host| state.machine.open_queue(ordinal, host));
            let device = Device {
                backing,
                room,
                ranges: BTreeMap::new(),
                warm: VecDeque::new(),
                ranges_next: MAPPED_OFFSET,
                fixed,
                broken: None,
                lost: None,
            };
            state.machine.devices[ordinal as usize] = Some(device);
        }
        let user = state.machine.users.insert(User {
            streams: Table::new("stream", 1 << 15),
            events: Table::new("event", 1 << 20),
            books: Books::new(),
            allocated: 0,
            peak: 0,
        });
        drop(state);
        Ok(Sim::new(self.clone(), user, ordinal))
    }

    /// The time of the host's clock: virtual, from 0. Under an adversary a nanosecond is a step.
    pub fn now(&self) -> Duration {
        self.lock().now()
    }

    /// Lets the host be busy elsewhere for a while, as a framework's own code is; the devices go
    /// on. Under an adversary they may make some steps.
    pub fn host_work(&self, time: Duration) {
        self.lock().host_work(time);
    }

    /// How often memory was to be unpinned or forgotten that queued work still used.
    pub fn removals_refused(&self) -> u64 {
        self.lock().removals_refused
    }

    /// How many ordered faults have struck.
    pub fn faults_struck(&self) -> u64 {
        self.lock().faults.struck
    }

    /// Of each fault that [`FaultPlan::at`] ordered, in that order: has it struck? A fault whose
    /// call never came has not, and neither has one that changed nothing there.
    pub fn faults_met(&self) -> Vec<bool> {
        self.lock().faults.have_struck()
    }

    /// How many copies an adversary has stopped half way, for a while.
    pub fn copies_torn(&self) -> u64 {
        self.lock().machine.copies_torn
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A kernel's host form that panicked leaves the state whole: its op was taken off first.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_the_process_is_no_larger_than_its_host_can_bear() {
        let root = std::env::temp_dir().join(format!("lightering-sim-{}", std::process::id()));
        std::fs::create_dir_all(root.join("proc")).unwrap();
        let meminfo = root.join("proc/meminfo");
        std::fs::write(&meminfo, "MemTotal: 9 kB\nMemAvailable: 4096 kB\n").unwrap();
        let small = Config::default().within(&root).device_bytes;
        std::fs::write(&meminfo, "MemAvailable: 1000000000 kB\n").unwrap();
        let large = Config::default().within(&root).device_bytes;
        std::fs::remove_dir_all(&root).unwrap();
        let unknown = Config::default().within(&root).device_bytes;
        assert_eq!(small, Bytes::mib(2));
        assert_eq!([large, unknown], [Config::default().device_bytes; 2]);
    }
}
