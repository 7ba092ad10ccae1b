//! The table of modes, their lines of JSON, and the comparison of their gradients.
//!
//! What it is not: it measures nothing.
//!
//! Invariant: a line of JSON has the same fields in the same order in every mode, and no text from
//! outside but the device's name.
//!
//! ```text
//!   Outcome per mode -> table (people) | a line of JSON (programs) | "the gradients differ"
//! ```
//!
//! `main` uses it.

use crate::args::Options;
use crate::trainer::Outcome;
use lightering::backend::About;
use std::fmt::Write;

/// The outcome as one JSON object.
pub(crate) fn json(options: &Options, about: &About, outcome: &Outcome) -> String {
    let shape = &options.shape;
    let device =
        if about.simulated { String::from("sim") } else { format!("cuda:{}", about.device.0) };
    let mut fields = String::new();
    let mut field = |name: &str, value: String| {
        let comma = if fields.is_empty() { "" } else { ", " };
        // Writing to a string cannot fail.
        let _ = write!(fields, "{comma}\"{name}\": {value}");
    };
    field("mode", quoted(outcome.mode.name()));
    field("device", quoted(&device));
    field("simulated", about.simulated.to_string());
    field("layers", shape.layers.to_string());
    field("hidden", shape.hidden.to_string());
    field("tokens", shape.tokens.to_string());
    field("steps", options.steps.to_string());
    field("keep_last", options.keep_last.to_string());
    // Where nothing is computed there is no loss and no gradient.
    let computed = |value: String| if options.times_only { String::from("null") } else { value };
    field("loss", computed(number(outcome.loss)));
    field("first_loss", computed(number(outcome.first_loss)));
    field("grad_checksum", computed(quoted(&hash(outcome.checksum))));
    for (name, bytes) in [
        ("peak_device_bytes", outcome.peak),
        ("after_forward_device_bytes", outcome.after_forward),
        ("after_flush_device_bytes", outcome.after_flush),
        ("boundary_bytes", shape.boundaries_bytes()),
        ("moved_bytes", outcome.moved.out),
        ("freed_bytes", outcome.moved.freed),
    ] {
        field(name, bytes.0.to_string());
    }
    field("first_step_seconds", number(outcome.first_step.as_secs_f64()));
    field("step_seconds", number(outcome.step.as_secs_f64()));
    format!("{{{fields}}}")
}

/// All outcomes as a table, with a line that says what the columns are.
pub(crate) fn table(options: &Options, about: &About, outcomes: &[Outcome]) -> String {
    let times = match (options.times_only, about.simulated) {
        (true, _) => "simulated times, nothing computed",
        (false, true) => "simulated times",
        (false, false) => "times",
    };
    let mut text = format!(
        "device bytes: most ever, after the forward, after a flush; {times}; \
         layers' inputs a step\n"
    );
    let mut row = |cells: [&str; 10]| {
        let [mode, peak, forward, flush, first, step, loss, hash, inputs, moved] = cells;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{mode:18} {peak:>10} {forward:>10} {flush:>10} {first:>10} {step:>10} {loss:>6} \
             {hash:>16} {inputs:>10} {moved:>10}"
        );
    };
    row([
        "mode",
        "peak",
        "forward",
        "flushed",
        "first step",
        "step",
        "loss",
        "gradients",
        "inputs",
        "moved",
    ]);
    let computed = |value: String| if options.times_only { String::from("-") } else { value };
    for outcome in outcomes {
        row([
            outcome.mode.name(),
            &outcome.peak.to_string(),
            &outcome.after_forward.to_string(),
            &outcome.after_flush.to_string(),
            &format!("{:.2?}", outcome.first_step),
            &format!("{:.2?}", outcome.step),
            &computed(format!("{:.4}", outcome.loss)),
            &computed(hash(outcome.checksum)),
            &options.shape.boundaries_bytes().to_string(),
            &outcome.moved.out.to_string(),
        ]);
    }
    text
}

/// The two modes whose gradients differ first, as a sentence.
pub(crate) fn difference(outcomes: &[Outcome]) -> Option<String> {
    let (first, others) = outcomes.split_first()?;
    let other = others.iter().find(|other| other.checksum != first.checksum)?;
    let (a, b) = (first.mode.name(), other.mode.name());
    let (x, y) = (hash(first.checksum), hash(other.checksum));
    Some(format!("the gradients of {a} and {b} differ: {x} and {y}"))
}

fn hash(checksum: u64) -> String {
    format!("{checksum:016x}")
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.escape_default())
}

/// JSON has no infinities.
fn number(value: f64) -> String {
    if value.is_finite() { value.to_string() } else { String::from("null") }
}
