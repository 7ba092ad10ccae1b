//! Measures a device's figures, in the form in which the simulated device takes them.
//!
//! What it is not: a benchmark of the engine. It asks the device alone, and the host's calls.
//!
//! Invariant: what it prints is read back by `--model` of the other examples; asked of the
//! simulated device, it finds that device's own figures.
//!
//! ```text
//!   main (words, device, report) -> measure (figures) -> rig (copies, clocks), work (kernels)
//! ```
//!
//! Run it with `cargo run --release --example calibrate -- --help`.

#[path = "../train/blas/mod.rs"]
mod blas;
#[cfg(test)]
#[path = "../../tests/emulator/mod.rs"]
mod emulator;
mod measure;
#[cfg(test)]
#[path = "../train/passing.rs"]
mod passing;
mod rig;
#[path = "../common/simulated.rs"]
mod simulated;
#[cfg(test)]
mod tests;
mod work;

use lightering::backend::sim::Model;
use lightering::backend::{Backend, Spec};
use lightering::{Error, Result};
use measure::Figure;
use rig::{Clock, Rig};
use simulated::Simulated;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

const HELP: &str = "\
Measures how fast a device copies and computes, and what calls cost, as a model's figures.

Usage: calibrate [options] > FILE      then: train --device sim --times-only --model FILE

  --device NAME   auto, sim or cuda:N (default: auto)
  --hidden N      channels of the layer whose products are timed, a multiple of 8 (default: 4096)
  --tokens N      its tokens, a multiple of 8 (default: 32768)
  --model FILE    with --device sim: the figures to find again
  --help          this text
";

/// The most channels and tokens: products of these fit no device's memory.
const SIZE_MAX: u32 = 1 << 20;

/// What the command line says.
struct Wish {
    device: String,
    layer: [u32; 2],
    model: Option<String>,
}

fn parse(mut words: impl Iterator<Item = String>) -> std::result::Result<Option<Wish>, String> {
    let mut wish = Wish { device: String::from("auto"), layer: [4096, 32768], model: None };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word}: needs a value"));
        match word.as_str() {
            "--help" | "-h" => return Ok(None),
            "--device" => wish.device = value()?,
            "--hidden" => wish.layer[0] = size(&word, &value()?)?,
            "--tokens" => wish.layer[1] = size(&word, &value()?)?,
            "--model" => wish.model = Some(value()?),
            _ => return Err(format!("{word}: no such option; --help lists them")),
        }
    }
    Ok(Some(wish))
}

fn size(name: &str, text: &str) -> std::result::Result<u32, String> {
    let fits = |size: &u32| (8..=SIZE_MAX).contains(size) && size.is_multiple_of(8);
    let size = text.parse().ok().filter(fits);
    size.ok_or_else(|| format!("{name} {text}: must be a multiple of 8, 8 to {SIZE_MAX}"))
}

/// The device with the clock of its host.
fn open(spec: Spec, simulated: &Simulated) -> Result<(Box<dyn Backend>, Clock)> {
    let Spec::Sim(ordinal) = spec else {
        let backend = lightering::open(&spec.to_string())?.backend;
        if !backend.about().simulated {
            return Ok((backend, Clock::Real(Instant::now())));
        }
        return open(Spec::Sim(0), simulated);
    };
    let world = simulated.world();
    Ok((Box::new(world.device(ordinal)?), Clock::Simulated(world)))
}

/// The figures as a model's text.
fn text(about: &lightering::backend::About, figures: &[Figure]) -> String {
    let lines = figures.iter().map(|(name, value)| match name {
        name if name.ends_with("_per_s") => format!("{name} = {value:.4e}\n"),
        name if name.ends_with("_ns") => format!("{name} = {value:.1}\n"),
        name => format!("{name} = {value:.5}\n"),
    });
    let name = about.name.replace(char::is_control, " ");
    let times = if about.simulated { ", simulated" } else { "" };
    format!("# {name}{times}\n") + &lines.collect::<String>()
}

/// The whole program; an error is one line and an exit status.
fn run(
    words: impl Iterator<Item = String>,
    out: &mut dyn Write,
) -> std::result::Result<(), (String, u8)> {
    let bad = |text: String| (text, 2);
    let failed = |error: Error| (error.to_string(), 1);
    let lost = |error: std::io::Error| (format!("output: {error}"), 1);
    let Some(wish) = parse(words).map_err(bad)? else {
        return out.write_all(HELP.as_bytes()).map_err(lost);
    };
    let named = |error: Error| bad(format!("--device {}: {error}", wish.device));
    let spec = wish.device.parse().map_err(named)?;
    if wish.model.is_some() && !matches!(spec, Spec::Sim(_)) {
        return Err(bad(String::from("--model: only with --device sim")));
    }
    let simulated = Simulated::new(wish.model.as_deref(), true).map_err(bad)?;
    let (backend, clock) = open(spec, &simulated).map_err(named)?;
    let about = backend.about();
    let mut rig = Rig::new(backend, clock).map_err(failed)?;
    let mut figures = measure::all(&mut rig, wish.layer).map_err(failed)?;
    rig.close().map_err(failed)?;
    // Several devices share what the host gives. One alone tells that it is not less than this.
    let host = Model::default().host_bytes_per_s;
    let both = figures.iter().find(|(name, _)| *name == "copy_both_bytes_per_s");
    if let Some((_, rate)) = both.filter(|(_, rate)| *rate > host) {
        figures.push(("host_bytes_per_s", *rate));
    }
    let text = text(&about, &figures);
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(lost)
}

fn main() -> ExitCode {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    match run(words, &mut std::io::stdout()) {
        Ok(()) => ExitCode::SUCCESS,
        Err((text, status)) => {
            // There is nobody left to tell that standard error is gone.
            let _ = writeln!(std::io::stderr(), "calibrate: {text}");
            ExitCode::from(status)
        }
    }
}
