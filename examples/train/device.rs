//! Which device the modes run on, and whether they fit there.
//!
//! What it is not: it keeps no device open between modes; each mode opens its own, so that no
//! mode's memory or time shows in another's figures.
//!
//! Invariant: a plan that exists was checked: the device can be opened, and both its memory and
//! this machine's have room for the largest mode by `Shape`'s estimate.
//!
//! ```text
//!   --device auto -> cuda:0, or the simulated device and the reason
//! ```
//!
//! `main` uses it.

use crate::args::{Device, Mode, Options};
use crate::kernel;
use crate::meter::{Meter, Metered};
use crate::offload;
use crate::simulated::Simulated;
use lightering::backend::{About, Backend};
use lightering::{Bytes, DeviceId, Error, Misuse, Result};

/// The device chosen, and the sizes that follow from it.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) about: About,
    /// Why the simulated device stands in for a real one.
    pub(crate) reason: Option<String>,
    /// The most pinned memory for the layers' inputs.
    pub(crate) pinned: Bytes,
    /// How far to bring them back ahead of use.
    pub(crate) prefetch: Bytes,
    device: Device,
    /// What the simulated device is like.
    simulated: Simulated,
}

/// One device, opened for two users, as a framework and the engine are; a meter counts both.
pub(crate) struct Opened {
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) engine: Box<dyn Backend>,
    pub(crate) meter: Meter,
}

impl Plan {
    /// Opens the device anew, with nothing on it.
    pub(crate) fn open(&self) -> Result<Opened> {
        let [backend, engine] = open(self.device, &self.simulated)?;
        let meter = Meter::default();
        let metered = |backend| Box::new(Metered::new(backend, meter.clone()));
        Ok(Opened { backend: metered(backend), engine: metered(engine), meter: meter.clone() })
    }
}

/// Chooses the device and checks that everything fits; the error is one line.
pub(crate) fn plan(options: &Options) -> std::result::Result<Plan, String> {
    let (device, reason) = choose(options.device);
    let simulated = Simulated::new(options.model.as_deref(), options.times_only)?;
    let [mut backend, _] =
        open(device, &simulated).map_err(|error| refusal(options.device, &error))?;
    let about = backend.about();
    let shape = &options.shape;
    let moved = shape.layers.saturating_sub(options.keep_last);
    let pinned = options.pinned.unwrap_or(Bytes(moved * offload::room(shape.boundary_bytes()).0));
    let prefetch = options.prefetch.unwrap_or(Bytes(2 * shape.boundary_bytes().0));
    let needed = options.modes.iter().map(|mode| peak(options, *mode)).max().unwrap_or_default();
    let memory = backend.memory().map_err(|error| error.to_string())?;
    if needed > memory.free {
        return Err(format!(
            "--layers, --hidden, --tokens: need about {needed}, but {} of the memory of {} is free",
            memory.free, about.name
        ));
    }
    if !simulated.times_only {
        check_machine(&about, needed, pinned, options.pinned.is_some())?;
    }
    Ok(Plan { about, reason, pinned, prefetch, device, simulated })
}

/// Device memory that a mode takes at its peak, about.
fn peak(options: &Options, mode: Mode) -> Bytes {
    let layers = options.shape.layers;
    match mode {
        Mode::None => options.shape.peak_bytes(layers, true),
        Mode::Checkpoint => options.shape.peak_bytes(layers, false),
        // Those kept, those on their way, and those coming back early.
        Mode::Offload => {
            let resident = options.keep_last.saturating_add(4).min(layers);
            options.shape.peak_bytes(resident, false)
        }
    }
}

/// Does this machine have the memory? The simulated device's is this machine's too.
fn check_machine(
    about: &About,
    needed: Bytes,
    pinned: Bytes,
    asked: bool,
) -> std::result::Result<(), String> {
    let Some(available) = available() else { return Ok(()) };
    if asked && pinned > available {
        return Err(format!(
            "--pinned-bytes: {pinned}, but {available} of this machine's memory is available"
        ));
    }
    if about.simulated && needed.saturating_add(pinned) > available {
        return Err(format!(
            "--layers, --hidden, --tokens: the simulated device and the pinned memory need about \
             {}, but {available} of this machine's memory is available",
            needed.saturating_add(pinned)
        ));
    }
    Ok(())
}

/// What the system says it could still give; `None` where it does not say.
fn available() -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes::kib(kib))
}

/// The device to open, and why it is the simulated one where nobody asked for that.
fn choose(wanted: Device) -> (Device, Option<String>) {
    match wanted {
        Device::Auto => match cuda(0).and_then(runnable) {
            Ok(_) => (Device::Cuda(DeviceId(0)), None),
            Err(error) => (Device::Sim, Some(error.to_string())),
        },
        _ => (wanted, None),
    }
}

/// The device for two users.
fn open(device: Device, simulated: &Simulated) -> Result<[Box<dyn Backend>; 2]> {
    match device {
        Device::Cuda(DeviceId(ordinal)) => Ok([cuda(ordinal).and_then(runnable)?, cuda(ordinal)?]),
        Device::Auto | Device::Sim => {
            let world = simulated.world();
            Ok([Box::new(world.device(0)?), Box::new(world.device(0)?)])
        }
    }
}

fn cuda(ordinal: u32) -> Result<Box<dyn Backend>> {
    Ok(lightering::open(&format!("cuda:{ordinal}"))?.backend)
}

/// The backend, if every kernel of the model has a form for it.
fn runnable(backend: Box<dyn Backend>) -> Result<Box<dyn Backend>> {
    match kernel::ALL.iter().find(|kernel| kernel.ptx.is_none()) {
        Some(kernel) => Err(Error::usage(Misuse::BadKernel, "open").detail(kernel.name)),
        None => Ok(backend),
    }
}

fn refusal(device: Device, error: &Error) -> String {
    match device {
        Device::Cuda(id) => format!("--device cuda:{}: {error}", id.0),
        Device::Auto | Device::Sim => error.to_string(),
    }
}
