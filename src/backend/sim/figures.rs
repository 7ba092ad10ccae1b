//! A model's figures as text: a line for each, read over the default model and written whole.
//!
//! What it is not: a format with sections, units or arithmetic. A figure's unit is in its name.
//!
//! Invariant: what is written reads back equal; what is refused is named, with its line.
//!
//! ```text
//!   # measured on an NVIDIA H200
//!   copy_out_bytes_per_s = 55.1e9            one place in Model
//!   matrix_slowdown.out = 0.015
//! ```
//!
//! Whoever measures a device writes such text; whoever predicts its times reads it.

use super::model::Model;
use crate::error::{Error, Misuse, Result};
use std::fmt;
use std::str::FromStr;

/// A figure's name, and where it is.
type Figure = (&'static str, fn(&mut Model) -> &mut f64);

const FIGURES: [Figure; 21] = [
    ("copy_out_bytes_per_s", |model| &mut model.copy_out_bytes_per_s),
    ("copy_in_bytes_per_s", |model| &mut model.copy_in_bytes_per_s),
    ("copy_both_bytes_per_s", |model| &mut model.copy_both_bytes_per_s),
    ("host_bytes_per_s", |model| &mut model.host_bytes_per_s),
    ("copy_out_start_ns", |model| &mut model.copy_out_start_ns),
    ("copy_in_start_ns", |model| &mut model.copy_in_start_ns),
    ("matrix_flops_per_s", |model| &mut model.matrix_flops_per_s),
    ("vector_flops_per_s", |model| &mut model.vector_flops_per_s),
    ("memory_bytes_per_s", |model| &mut model.memory_bytes_per_s),
    ("kernel_floor_ns", |model| &mut model.kernel_floor_ns),
    ("matrix_slowdown.out", |model| &mut model.matrix_slowdown.out),
    ("matrix_slowdown.back", |model| &mut model.matrix_slowdown.back),
    ("vector_slowdown.out", |model| &mut model.vector_slowdown.out),
    ("vector_slowdown.back", |model| &mut model.vector_slowdown.back),
    ("copy_call_ns", |model| &mut model.copy_call_ns),
    ("record_call_ns", |model| &mut model.record_call_ns),
    ("wait_call_ns", |model| &mut model.wait_call_ns),
    ("query_call_ns", |model| &mut model.query_call_ns),
    ("alloc_call_ns", |model| &mut model.alloc_call_ns),
    ("launch_call_ns", |model| &mut model.launch_call_ns),
    ("object_call_ns", |model| &mut model.object_call_ns),
];

impl Model {
    /// Every figure with its name, in the order of the fields.
    pub fn figures(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let mut model = *self;
        FIGURES.iter().map(move |(name, place)| (*name, *place(&mut model)))
    }

    /// Sets the figure of that name.
    ///
    /// # Errors
    /// `Usage(BadValue)` with the name: where there is none such, for a rate that is not above
    /// zero, for anything else below zero, and for what is not finite.
    pub fn set(&mut self, name: &str, value: f64) -> Result<()> {
        self.put(name, value).map_err(bad)
    }

    fn put(&mut self, name: &str, value: f64) -> std::result::Result<(), String> {
        let figure = FIGURES.iter().find(|(known, _)| *known == name);
        let (_, place) = figure.ok_or_else(|| format!("{name}: a model has no such figure"))?;
        let rate = name.ends_with("_per_s");
        if !value.is_finite() || value < 0.0 || (rate && value == 0.0) {
            let least = if rate { "above zero" } else { "from zero up" };
            return Err(format!("{name}: {value} is no number {least}"));
        }
        *place(self) = value;
        Ok(())
    }
}

impl FromStr for Model {
    type Err = Error;

    /// Reads lines of `name = number` over the default model. Empty lines, and what follows a `#`,
    /// say nothing.
    fn from_str(text: &str) -> Result<Model> {
        let mut model = Model::default();
        let mut seen: Vec<&str> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let at = |what: String| bad(format!("line {}: {what}", index + 1));
            let Some((name, value)) = line.split_once('=') else {
                return Err(at(format!("{line:?} is not of the form name = number")));
            };
            let (name, value) = (name.trim(), value.trim());
            if seen.contains(&name) {
                return Err(at(format!("{name}: given twice")));
            }
            seen.push(name);
            let number =
                value.parse().map_err(|_| at(format!("{name}: {value:?} is no number")))?;
            model.put(name, number).map_err(at)?;
        }
        Ok(model)
    }
}

impl fmt::Display for Model {
    /// A line for each figure, as [`Model::from_str`] reads them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.figures().try_for_each(|(name, value)| writeln!(f, "{name} = {value}"))
    }
}

fn bad(what: String) -> Error {
    Error::usage(Misuse::BadValue, "model").detail(what)
}

#[cfg(test)]
mod tests {
    //! The fault guarded against: a figure that is measured and not used, because its name is
    //! misspelt or its line unread.
    use super::*;

    #[test]
    fn every_figure_is_written_and_read_back() {
        let mut model = Model::default();
        // Distinct, and with digits that a short form would lose.
        for (nth, (name, _)) in FIGURES.iter().enumerate() {
            model.set(name, (nth as f64 + 1.0) / 3.0 * 1e9).unwrap();
        }
        assert_eq!(model.to_string().parse::<Model>().unwrap(), model);
        let Model { name: _, copy_in_start_ns, vector_slowdown, object_call_ns, .. } = model;
        assert_eq!(copy_in_start_ns, 2e9);
        assert_eq!(vector_slowdown.back, 14.0 / 3.0 * 1e9);
        assert_eq!(object_call_ns, 7e9, "the last of the figures");
        // A figure added to the model and not here would keep its default for ever.
        let fields = format!("{:?}", Model::default()).matches(": ").count();
        let slowdowns = 2;
        assert_eq!(fields - 1 - slowdowns, FIGURES.len());
    }

    #[test]
    fn what_is_not_said_is_the_default() {
        let text =
            "\n# a note = 3\ncopy_out_bytes_per_s=4e9 # measured\n matrix_slowdown.out = 0\n";
        let model: Model = text.parse().unwrap();
        assert_eq!(model.copy_out_bytes_per_s, 4e9);
        assert_eq!(model.matrix_slowdown.out, 0.0);
        let copy_out_bytes_per_s = Model::default().copy_out_bytes_per_s;
        let matrix_slowdown = Model::default().matrix_slowdown;
        assert_eq!(Model { copy_out_bytes_per_s, matrix_slowdown, ..model }, Model::default());
    }

    #[test]
    fn a_wrong_line_is_named_with_its_figure() {
        for (text, says) in [
            ("copy_out = 1", "line 1: copy_out: a model has no such figure"),
            ("name = 1", "line 1: name: "),
            ("\ncopy_call_ns = fast", "line 2: copy_call_ns: \"fast\""),
            ("copy_call_ns =", "line 1: copy_call_ns: \"\""),
            ("copy_call_ns = 1,5", "copy_call_ns: \"1,5\""),
            ("copy_call_ns = -1", "copy_call_ns: -1 is no number from zero up"),
            ("copy_call_ns = NaN", "copy_call_ns: NaN"),
            ("memory_bytes_per_s = 0", "memory_bytes_per_s: 0 is no number above zero"),
            ("memory_bytes_per_s = inf", "memory_bytes_per_s: inf"),
            ("matrix_slowdown = 1", "matrix_slowdown: "),
            ("wait_call_ns = 1\nwait_call_ns = 1", "line 2: wait_call_ns: given twice"),
            ("wait_call_ns 1", "line 1: \"wait_call_ns 1\" is not of the form"),
        ] {
            let error = text.parse::<Model>().unwrap_err();
            assert_eq!(error.misuse(), Some(Misuse::BadValue));
            let words = error.to_string();
            assert!(words.contains(says) && !words.contains('\n'), "{text}: {words}");
        }
    }
}
