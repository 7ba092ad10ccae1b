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

use crate::args::{Mode, Options};
use crate::trainer::Outcome;
use lightering::backend::About;
use std::fmt::Write;
use std::time::Duration;

/// A mode, and what its steps came to; nothing where keeping everything did not fit.
pub(crate) type Row = (Mode, Option<Outcome>);

/// The row as one JSON object. Where there is no outcome its fields are null.
pub(crate) fn json(options: &Options, about: &About, (mode, outcome): &Row) -> String {
    let shape = &options.shape;
    let of = |value: fn(&Outcome) -> String| {
        outcome.as_ref().map_or_else(|| String::from("null"), value)
    };
    let device =
        if about.simulated { String::from("sim") } else { format!("cuda:{}", about.device.0) };
    let mut fields = String::new();
    let mut field = |name: &str, value: String| {
        let comma = if fields.is_empty() { "" } else { ", " };
        // Writing to a string cannot fail.
        let _ = write!(fields, "{comma}\"{name}\": {value}");
    };
    field("mode", quoted(mode.name()));
    field("device", quoted(&device));
    field("simulated", about.simulated.to_string());
    field("layers", shape.layers.to_string());
    field("hidden", shape.hidden.to_string());
    field("tokens", shape.tokens.to_string());
    field("element_bytes", shape.element.to_string());
    field("steps", options.steps.to_string());
    field("keep_last", options.keep_last.to_string());
    field("out_of_memory", outcome.is_none().to_string());
    // Where nothing is computed there is no loss and no gradient.
    let computed = |value: String| if options.times_only { String::from("null") } else { value };
    field("loss", computed(of(|outcome| number(outcome.loss))));
    field("first_loss", computed(of(|outcome| number(outcome.first_loss))));
    field("grad_checksum", computed(of(|outcome| quoted(&hash(outcome.checksum)))));
    field("peak_device_bytes", of(|outcome| outcome.peak.0.to_string()));
    field("after_forward_device_bytes", of(|outcome| outcome.after_forward.0.to_string()));
    field("after_flush_device_bytes", of(|outcome| outcome.after_flush.0.to_string()));
    field("boundary_bytes", shape.boundaries_bytes().0.to_string());
    field("moved_bytes", of(|outcome| outcome.moved.out.0.to_string()));
    field("freed_bytes", of(|outcome| outcome.moved.freed.0.to_string()));
    field("first_moved_bytes", of(|outcome| outcome.first_moved.out.0.to_string()));
    // The host's time, which a simulated device knows nothing of.
    let real = |value: String| if about.simulated { String::from("null") } else { value };
    field("reserve_seconds", real(of(|outcome| seconds(outcome.pinning.reserve))));
    field("pin_seconds", real(of(|outcome| seconds(outcome.pinning.steps))));
    field("first_step_seconds", of(|outcome| number(outcome.first_step.as_secs_f64())));
    field("step_seconds", of(|outcome| number(outcome.step.as_secs_f64())));
    format!("{{{fields}}}")
}

/// All outcomes as a table, with a line that says what the columns are.
pub(crate) fn table(options: &Options, about: &About, rows: &[Row]) -> String {
    let times = match (options.times_only, about.simulated) {
        (true, _) => "simulated times, nothing computed",
        (false, true) => "simulated times",
        (false, false) => "times",
    };
    let mut text = format!(
        "device bytes: most ever, after the forward, after a flush; {times}; \
         layers' inputs a step, moved in the first and in the last; pinned beforehand\n"
    );
    let mut row = |cells: [&str; 12]| {
        let [mode, peak, forward, flush, first, step, loss, hash, inputs, early, moved, pin] =
            cells;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{mode:18} {peak:>10} {forward:>10} {flush:>10} {first:>10} {step:>10} {loss:>6} \
             {hash:>16} {inputs:>10} {early:>10} {moved:>10} {pin:>8}"
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
        "at first",
        "moved",
        "pinned",
    ]);
    let inputs = options.shape.boundaries_bytes().to_string();
    let computed = |value: String| if options.times_only { String::from("-") } else { value };
    for (mode, outcome) in rows {
        let Some(outcome) = outcome else {
            let free = "out of memory";
            row([mode.name(), free, "", "", "", "", "", "", &inputs, "", "", ""]);
            continue;
        };
        row([
            mode.name(),
            &outcome.peak.to_string(),
            &outcome.after_forward.to_string(),
            &outcome.after_flush.to_string(),
            &time(outcome.first_step),
            &time(outcome.step),
            &computed(format!("{:.4}", outcome.loss)),
            &computed(hash(outcome.checksum)),
            &inputs,
            &outcome.first_moved.out.to_string(),
            &outcome.moved.out.to_string(),
            &match about.simulated {
                true => String::from("-"),
                false => time(outcome.pinning.reserve),
            },
        ]);
    }
    text
}

/// The two modes whose gradients differ first, as a sentence.
pub(crate) fn difference(rows: &[Row]) -> Option<String> {
    let ran = |(mode, outcome): &Row| Some((mode.name(), outcome.as_ref()?.checksum));
    let mut ran = rows.iter().filter_map(ran);
    let (a, x) = ran.next()?;
    let (b, y) = ran.find(|(_, other)| *other != x)?;
    Some(format!("the gradients of {a} and {b} differ: {} and {}", hash(x), hash(y)))
}

/// In ASCII, so that columns keep their width everywhere.
fn time(time: Duration) -> String {
    format!("{time:.2?}").replace('\u{b5}', "u")
}

fn hash(checksum: u64) -> String {
    format!("{checksum:016x}")
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.escape_default())
}

fn seconds(time: Duration) -> String {
    number(time.as_secs_f64())
}

/// JSON has no infinities.
fn number(value: f64) -> String {
    if value.is_finite() { value.to_string() } else { String::from("null") }
}
