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
use crate::blas::{Cublas, WORKSPACE};
use crate::meter::{Meter, Metered};
use crate::offload;
use crate::products::Products;
use crate::simulated::Simulated;
use lightering::backend::{About, Backend};
use lightering::{Bytes, DeviceId, Error, Result};

/// Opens one device for two users, whose bytes the meter counts.
pub(crate) type Open = Box<dyn Fn(&Meter) -> Result<[Box<dyn Backend>; 2]>>;

/// The device chosen, and the sizes that follow from it.
pub(crate) struct Plan {
    pub(crate) about: About,
    /// Why the simulated device stands in for a real one.
    pub(crate) reason: Option<String>,
    /// The most pinned memory for the layers' inputs.
    pub(crate) pinned: Bytes,
    /// How far to bring them back ahead of use.
    pub(crate) prefetch: Bytes,
    pub(crate) open: Open,
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
        let meter = Meter::default();
        let [backend, engine] = (self.open)(&meter)?;
        Ok(Opened { backend, engine, meter })
    }
}

/// The device for two users, with a meter around both and somebody to multiply for the first.
fn metered(device: Device, simulated: &Simulated, meter: &Meter) -> Result<[Box<dyn Backend>; 2]> {
    let [backend, engine] = open(device, simulated)?
        .map(|backend| -> Box<dyn Backend> { Box::new(Metered::new(backend, meter.clone())) });
    match blas(device)? {
        Some(blas) => Ok([Box::new(Products::new(Box::new(blas), backend)), engine]),
        None => Ok([backend, engine]),
    }
}

/// Chooses the device, gives the shape its element, and checks that everything fits; the error is
/// one line.
pub(crate) fn plan(options: &mut Options) -> std::result::Result<Plan, String> {
    let (device, reason) = choose(options.device);
    let simulated = Simulated::new(options.model.as_deref(), options.times_only)?;
    let refused = |error: Error| refusal(options.device, &error);
    let [mut backend, _] = open(device, &simulated).map_err(refused)?;
    blas(device).map_err(refused)?;
    let about = backend.about();
    // What is predicted is the real device's step.
    options.shape.element = if about.simulated && !simulated.times_only { 4 } else { 2 };
    let shape = &options.shape;
    let moved = shape.layers.saturating_sub(options.keep_last);
    let pinned = options.pinned.unwrap_or(Bytes(moved * offload::room(shape.boundary_bytes()).0));
    let prefetch = options.prefetch.unwrap_or(Bytes(2 * shape.boundary_bytes().0));
    // On a real device keeping everything may be tried: it fails cleanly, and the row says so.
    let tried = |mode: &&Mode| about.simulated || **mode != Mode::None;
    let peaks = options.modes.iter().filter(tried).map(|mode| peak(options, *mode));
    let needed = peaks.max().unwrap_or_default();
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
    let open: Open = Box::new(move |meter| metered(device, &simulated, meter));
    Ok(Plan { about, reason, pinned, prefetch, open })
}

/// Device memory that a mode takes at its peak, about.
fn peak(options: &Options, mode: Mode) -> Bytes {
    let layers = options.shape.layers;
    let peak = match mode {
        Mode::None => options.shape.peak_bytes(layers, true),
        Mode::Checkpoint => options.shape.peak_bytes(layers, false),
        // Those kept, those on their way, and those coming back early.
        Mode::Offload | Mode::Grow => {
            let resident = options.keep_last.saturating_add(4).min(layers);
            options.shape.peak_bytes(resident, false)
        }
        // All inputs, and what is copied back.
        Mode::Raw => options.shape.peak_bytes(layers + 1, false),
    };
    if options.shape.element == 2 { peak.saturating_add(WORKSPACE) } else { peak }
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
        Device::Auto => match cuda(0).and_then(|_| Cublas::open(0)) {
            Ok(_) => (Device::Cuda(DeviceId(0)), None),
            Err(error) => (Device::Sim, Some(error.to_string())),
        },
        _ => (wanted, None),
    }
}

/// The device for two users.
fn open(device: Device, simulated: &Simulated) -> Result<[Box<dyn Backend>; 2]> {
    match device {
        Device::Cuda(DeviceId(ordinal)) => Ok([cuda(ordinal)?, cuda(ordinal)?]),
        Device::Auto | Device::Sim => {
            let world = simulated.world();
            Ok([Box::new(world.device(0)?), Box::new(world.device(0)?)])
        }
    }
}

fn cuda(ordinal: u32) -> Result<Box<dyn Backend>> {
    Ok(lightering::open(&format!("cuda:{ordinal}"))?.backend)
}

/// Who multiplies there; the simulated device does it itself.
fn blas(device: Device) -> Result<Option<Cublas>> {
    match device {
        Device::Cuda(DeviceId(ordinal)) => Ok(Some(Cublas::open(ordinal)?)),
        Device::Auto | Device::Sim => Ok(None),
    }
}

fn refusal(device: Device, error: &Error) -> String {
    match device {
        Device::Cuda(id) => format!("--device cuda:{}: {error}", id.0),
        Device::Auto | Device::Sim => error.to_string(),
    }
}
