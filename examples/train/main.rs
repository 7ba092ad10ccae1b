//! Trains a byte-level language model on a text, three times: with everything kept on the device,
//! with each layer's input kept and the rest made anew, and with those inputs moved to the host.
//!
//! What it is not: a framework. Forward and backward are written out for this one model, so that
//! nothing stands between the engine and the steps it is measured on.
//!
//! Invariant: the modes differ in where bytes lie and when, never in a bit of a gradient; a run in
//! which they do ends with an error.
//!
//! ```text
//!   main ---- args, text, device, report, progress          what the user says and sees
//!    |
//!   trainer - inputs (stay | go and come back), staging     the steps
//!    |
//!   model --- layout, kernel/*, queue, shape                the arithmetic
//! ```
//!
//! Run it with `cargo run --release --example train -- --help`.

mod args;
mod blas;
mod device;
#[cfg(test)]
#[path = "../../tests/emulator/mod.rs"]
mod emulator;
mod inputs;
mod kernel;
mod layout;
mod meter;
mod model;
mod offload;
mod passing;
mod products;
mod progress;
mod queue;
mod raw;
#[cfg(test)]
mod reference;
mod report;
mod shape;
#[path = "../common/simulated.rs"]
mod simulated;
mod staging;
#[cfg(test)]
mod tests;
mod text;
mod trainer;
#[cfg(test)]
mod twin;
#[path = "../common/watch.rs"]
mod watch;

use args::{Command, Mode, Options};
use inputs::{Inputs, Resident};
use lightering::backend::About;
use lightering::{Error, Kind};
use offload::{Limits, Offloaded};
use progress::Progress;
use raw::Raw;
use report::Row;
use std::fs::File;
use std::io::{Seek, Write};
use std::process::ExitCode;
use text::Text;
use trainer::{Outcome, Trainer};

/// Spans of a timeline that are kept: some hundred steps of a large model.
const SPANS_MAX: usize = 1 << 16;

/// Why the run ended early. One line each.
#[derive(Debug)]
enum Failure {
    /// What was asked for cannot be done; exit status 2.
    Input(String),
    /// It went wrong on the way; exit status 1.
    Run(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Run(error.to_string())
    }
}

fn main() -> ExitCode {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    let (text, status) = match run(words, &mut out, &mut err) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Input(text)) => (text, 2),
        Err(Failure::Run(text)) => (text, 1),
    };
    // There is nobody left to tell that standard error is gone.
    let _ = writeln!(err, "train: {text}");
    ExitCode::from(status)
}

/// The whole program; results go to `out`, everything else to `err`.
fn run(
    words: impl Iterator<Item = String>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<(), Failure> {
    let mut options = match args::parse(words).map_err(Failure::Input)? {
        Command::Run(options) => options,
        Command::Help => return say(out, args::HELP),
    };
    let text = Text::open(options.text.as_deref()).map_err(Failure::Input)?;
    let plan = device::plan(&mut options).map_err(Failure::Input)?;
    say(err, &greeting(&options, &text, &plan))?;
    let mut rows: Vec<Row> = Vec::new();
    // Now, not after the last step: what cannot be written is told at once.
    let mut timeline = match &options.timeline {
        Some(path) => Some(
            File::create(path)
                .map_err(|error| Failure::Input(format!("--timeline {path}: {error}")))?,
        ),
        None => None,
    };
    for mode in &options.modes {
        rows.push((*mode, train(&options, &plan, &text, *mode, err)?));
        let kept = rows.last().and_then(|(_, outcome)| outcome.as_ref()?.timeline.as_ref());
        if let (Some(file), Some(kept)) = (&mut timeline, kept) {
            write_anew(file, kept).map_err(|error| Failure::Run(format!("--timeline: {error}")))?;
        }
        if let (true, Some(row)) = (options.json, rows.last()) {
            say(out, &format!("{}\n", report::json(&options, &plan.about, row)))?;
        }
    }
    let table = report::table(&options, &plan.about, &rows);
    say(if options.json { err } else { out }, &table)?;
    match report::difference(&rows) {
        _ if options.times_only => Ok(()),
        Some(difference) => Err(Failure::Run(difference)),
        None => Ok(()),
    }
}

/// Runs one mode's steps on a device of its own; `None` where keeping everything did not fit.
fn train(
    options: &Options,
    plan: &device::Plan,
    text: &Text,
    mode: Mode,
    err: &mut dyn Write,
) -> Result<Option<Outcome>, Failure> {
    let outcome = match steps(options, plan, text, mode, err) {
        Ok(outcome) => outcome,
        Err(error) if mode == Mode::None && error.kind() == Kind::OutOfMemory => {
            say(err, &format!("{}: {error}\n", mode.name()))?;
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    if outcome.moved.refused > 0 {
        let words = format!(
            "{}: {} of {} layers' inputs stayed on the device: no room in {} of pinned memory\n",
            mode.name(),
            outcome.moved.refused,
            options.shape.layers,
            plan.pinned
        );
        say(err, &words)?;
    }
    Ok(Some(outcome))
}

/// The last of several timelines is the one kept.
fn write_anew(file: &mut File, text: &str) -> std::io::Result<()> {
    file.rewind()?;
    file.set_len(0)?;
    file.write_all(text.as_bytes())
}

/// As [`train`], where every error is one.
fn steps(
    options: &Options,
    plan: &device::Plan,
    text: &Text,
    mode: Mode,
    err: &mut dyn Write,
) -> lightering::Result<Outcome> {
    let shape = options.shape;
    let (layers, bytes) = (shape.layers as usize, shape.boundary_bytes());
    let opened = plan.open()?;
    let meter = opened.meter.clone();
    let keep_last = options.keep_last.min(shape.layers) as usize;
    let device::Plan { pinned, prefetch, .. } = *plan;
    let spans = if options.timeline.is_some() { SPANS_MAX } else { 0 };
    let check = options.check;
    let limits = Limits { layers, bytes, keep_last, pinned, prefetch, spans, check };
    let mut inputs: Box<dyn Inputs> = match mode {
        Mode::None | Mode::Checkpoint => Box::new(Resident::new(opened.backend, layers, bytes)?),
        Mode::Offload => Box::new(Offloaded::new(opened, limits, true)?),
        Mode::Grow => Box::new(Offloaded::new(opened, limits, false)?),
        Mode::Raw => Box::new(Raw::new(opened.backend, limits)?),
    };
    let mut progress = Progress::new(mode.name(), options.steps, err);
    let mut show = |done, loss| {
        // Of a prediction there is no loss to show.
        if !options.times_only {
            progress.show(done, loss);
        }
    };
    let outcome = Trainer::new(mode, shape, text, &mut *inputs, meter)
        .and_then(|trainer| trainer.run(options.steps, &mut show));
    drop(progress);
    if outcome.is_err() {
        // What was enqueued still uses the memory that goes now. The first error is what is told.
        let _ = inputs.backend().sync();
    } else if check && mode.has_engine() {
        let records = inputs.checked();
        // There is nobody left to tell that standard error is gone.
        let _ = writeln!(err, "{}: checked: {records} records, no hazard", mode.name());
    }
    outcome
}

/// What is said before the first step.
fn greeting(options: &Options, text: &Text, plan: &device::Plan) -> String {
    let About { name, simulated, .. } = &plan.about;
    let shape = &options.shape;
    let mut words = format!(
        "text: {} bytes, unigram entropy {:.3} nats a byte\ndevice: {name}",
        text.len(),
        text.unigram_entropy()
    );
    if let Some(reason) = &plan.reason {
        words += &format!(", because cuda:0 is not to be had ({reason})");
    }
    if *simulated {
        words += match options.times_only {
            true => "; all times are simulated, and nothing is computed",
            false => "; all times are simulated",
        };
    }
    words += &format!(
        "\nmodel: {} layers x {} tokens x {} channels x {} bytes = {} of layers' inputs a step\n",
        shape.layers,
        shape.tokens,
        shape.hidden,
        shape.element,
        shape.boundaries_bytes()
    );
    words
}

fn say(to: &mut dyn Write, text: &str) -> Result<(), Failure> {
    let wrote = to.write_all(text.as_bytes()).and_then(|()| to.flush());
    wrote.map_err(|error| Failure::Run(format!("output: {error}")))
}
