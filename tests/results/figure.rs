//! Measured figures as the files in `benches/results/` hold them, and what each must carry.
//!
//! What it is not: a measurement. It reads what a run on a device wrote.
//!
//! Invariant: a figure that was read is complete: a value with its unit, the raw or bound figure
//! of the same run, their ratio, the ratio asked for, and what is needed to measure it again. One
//! that is the middle of paired ratios, and says of how many, is of enough of them.
//!
//! ```text
//!   2026-12-01-h200.json  --read-->  Figure { ratio 0.99, threshold 0.98, better: higher }
//!   required.json         --read-->  Asked { demanded, [Required { name, threshold, .. }] }
//! ```
//!
//! The test `results` uses it.

use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Tables whose figures are the middle one of paired ratios, and of how many at least.
const PAIRED: [&str; 8] =
    ["seam", "link", "latency", "address", "prefetch", "rows", "two", "overlap"];
const PAIRS_MIN: u64 = 15;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Better {
    /// At least the threshold.
    Higher,
    /// At most the threshold.
    Lower,
    /// No further from 1 than the threshold: a prediction beside what was measured.
    Near,
}

#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: String,
    pub(crate) reference: f64,
    pub(crate) ratio: f64,
    pub(crate) threshold: f64,
    pub(crate) better: Better,
    pub(crate) date: String,
    pub(crate) hardware: String,
    pub(crate) driver: String,
    pub(crate) commit: String,
    pub(crate) command: String,
    /// Of how many pairs it is one; none of the first entries says so.
    pub(crate) pairs: Option<u64>,
}

/// A figure that must be there, and the ratio asked of it.
#[derive(Clone, Debug)]
pub(crate) struct Required {
    pub(crate) name: String,
    pub(crate) unit: String,
    pub(crate) better: Better,
    pub(crate) threshold: f64,
}

/// The list of them.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    /// Tables whose figures must be there; of the others only those that are there are held to it.
    pub(crate) demanded: Vec<String>,
    pub(crate) figures: Vec<Required>,
}

impl Asked {
    /// Must a figure of this name be there?
    pub(crate) fn demands(&self, name: &str) -> bool {
        self.demanded.iter().any(|table| table == name.split('.').next().unwrap_or(name))
    }
}

impl Figure {
    /// Is it one of fewer pairs than its middle needs? A longest time is one by nature.
    fn has_few_pairs(&self) -> bool {
        let (table, rest) = self.name.split_once('.').unwrap_or((&self.name, ""));
        PAIRED.contains(&table)
            && !rest.starts_with("longest")
            && self.pairs.is_some_and(|pairs| pairs < PAIRS_MIN)
    }

    /// Is the ratio as good as was asked?
    pub(crate) fn reaches(&self) -> bool {
        // What was measured, not what somebody wrote beside it.
        let ratio = self.value / self.reference;
        match self.better {
            Better::Higher => ratio >= self.threshold,
            Better::Lower => ratio <= self.threshold,
            Better::Near => (ratio - 1.0).abs() <= self.threshold,
        }
    }
}

/// One JSON object, with everything that is wrong with it.
struct Fields<'a> {
    object: &'a Map<String, Value>,
    at: String,
    problems: Vec<String>,
}

impl Fields<'_> {
    fn wrong(&mut self, what: &str) {
        self.problems.push(format!("{}: {what}", self.at));
    }

    fn text(&mut self, field: &str) -> String {
        let text = self.object.get(field).and_then(Value::as_str).unwrap_or("").to_string();
        if text.trim().is_empty() || text.contains(['|', '\n', '`']) {
            self.wrong(&format!("`{field}` is no text, or has a bar, a tick or a line break"));
        }
        text
    }

    fn number(&mut self, field: &str) -> f64 {
        let number = self.object.get(field).and_then(Value::as_f64).unwrap_or(f64::NAN);
        if !number.is_finite() || number < 0.0 {
            self.wrong(&format!("`{field}` is no number from zero up"));
        }
        number
    }

    /// A count from one up, where there is one.
    fn count(&mut self, field: &str) -> Option<u64> {
        let value = self.object.get(field)?;
        let count = value.as_u64().filter(|count| *count > 0);
        if count.is_none() {
            self.wrong(&format!("`{field}` is no count from one up"));
        }
        count
    }

    fn name(&mut self) -> String {
        let name = self.text("name");
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
        if !name.chars().all(plain) || !name.contains('.') {
            self.wrong("`name` is not of the form table.figure in small letters");
        }
        name
    }

    fn better(&mut self) -> Better {
        match self.text("better").as_str() {
            "higher" => Better::Higher,
            "lower" => Better::Lower,
            "near" => Better::Near,
            _ => {
                self.wrong("`better` is neither higher nor lower nor near");
                Better::Higher
            }
        }
    }

    fn no_others(&mut self, known: &[&str]) {
        let unknown: Vec<&String> =
            self.object.keys().filter(|key| !known.contains(&key.as_str())).collect();
        if !unknown.is_empty() {
            self.wrong(&format!("unknown fields {unknown:?}"));
        }
    }
}

fn figure(fields: &mut Fields<'_>) -> Figure {
    let figure = Figure {
        name: fields.name(),
        value: fields.number("value"),
        unit: fields.text("unit"),
        reference: fields.number("reference"),
        ratio: fields.number("ratio"),
        threshold: fields.number("threshold"),
        better: fields.better(),
        date: fields.text("date"),
        hardware: fields.text("hardware"),
        driver: fields.text("driver"),
        commit: fields.text("commit"),
        command: fields.text("command"),
        pairs: fields.count("pairs"),
    };
    fields.no_others(&[
        "name",
        "value",
        "unit",
        "reference",
        "ratio",
        "threshold",
        "better",
        "date",
        "hardware",
        "driver",
        "commit",
        "command",
        "pairs",
    ]);
    let ratio = figure.value / figure.reference;
    if !ratio.is_finite() || (ratio - figure.ratio).abs() > 2e-3 * ratio.abs() {
        fields.wrong(&format!("`ratio` is {}, value by reference is {ratio}", figure.ratio));
    }
    if figure.has_few_pairs() {
        let pairs = figure.pairs.unwrap_or_default();
        fields.wrong(&format!("`pairs` is {pairs}: a middle is of at least {PAIRS_MIN}"));
    }
    if figure.hardware.to_lowercase().contains("simulated") {
        fields.wrong("`hardware` is simulated: its times are no figures");
    }
    if !is_date(&figure.date) {
        fields.wrong("`date` is not of the form 2026-11-29");
    }
    let hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    if figure.commit.len() != 40 || !figure.commit.chars().all(hex) {
        fields.wrong("`commit` is not a full commit id (40 hexadecimal digits)");
    }
    figure
}

fn required(fields: &mut Fields<'_>) -> Required {
    let required = Required {
        name: fields.name(),
        unit: fields.text("unit"),
        better: fields.better(),
        threshold: fields.number("threshold"),
    };
    fields.no_others(&["name", "unit", "better", "threshold"]);
    required
}

fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
    let numbers: Vec<u32> = parts.iter().filter_map(|part| part.parse().ok()).collect();
    lengths == [4, 2, 2]
        && numbers.len() == 3
        && numbers[0] >= 2026
        && (1..=12).contains(&numbers[1])
        && (1..=31).contains(&numbers[2])
}

fn parse(file: &str, text: &str) -> Result<Value, Vec<String>> {
    serde_json::from_str(text).map_err(|error| vec![format!("{file}: {error}")])
}

fn list<T>(
    file: &str,
    value: &Value,
    read: fn(&mut Fields<'_>) -> T,
) -> Result<Vec<T>, Vec<String>> {
    let list = value.as_array().ok_or_else(|| vec![format!("{file}: not a list")])?;
    let (mut all, mut problems) = (Vec::new(), Vec::new());
    for (i, item) in list.iter().enumerate() {
        let name = item.get("name").and_then(Value::as_str).unwrap_or("without a name");
        let at = format!("{file}, entry {i} ({name})");
        match item.as_object() {
            Some(object) => {
                let mut fields = Fields { object, at, problems: Vec::new() };
                all.push(read(&mut fields));
                problems.append(&mut fields.problems);
            }
            None => problems.push(format!("{at}: not an object")),
        }
    }
    if problems.is_empty() { Ok(all) } else { Err(problems) }
}

/// The figures of one file, or everything that is wrong with it.
pub(crate) fn read_figures(file: &str, text: &str) -> Result<Vec<Figure>, Vec<String>> {
    list(file, &parse(file, text)?, figure)
}

/// The list of figures that must be there, or everything that is wrong with it.
pub(crate) fn read_required(file: &str, text: &str) -> Result<Asked, Vec<String>> {
    let value = parse(file, text)?;
    let parts = value.as_object().map(|object| (object.len(), object.get("demanded")));
    let Some((2, Some(Value::Array(tables)))) = parts else {
        return Err(vec![format!("{file}: not an object of `demanded` (tables) and `figures`")]);
    };
    let figures = list(file, &value["figures"], required)?;
    let named = tables.iter().map(|table| table.as_str().map(String::from));
    let Some(demanded) = named.collect::<Option<Vec<_>>>() else {
        return Err(vec![format!("{file}: `demanded` has what is no name of a table")]);
    };
    let asked = Asked { demanded, figures };
    let is_of = |table: &&String| {
        let one = Asked { demanded: vec![table.to_string()], figures: Vec::new() };
        asked.figures.iter().any(|figure| one.demands(&figure.name))
    };
    match asked.demanded.iter().find(|table| !is_of(table)) {
        Some(table) => Err(vec![format!("{file}: demanded {table}, which has no figures")]),
        None => Ok(asked),
    }
}

/// The latest figure of each name; two of one name and date are one too many.
pub(crate) fn current(figures: &[Figure]) -> Result<BTreeMap<String, Figure>, Vec<String>> {
    let mut latest: BTreeMap<String, Figure> = BTreeMap::new();
    let mut problems = Vec::new();
    for figure in figures {
        match latest.get(&figure.name) {
            Some(other) if other.date == figure.date => {
                problems.push(format!("{}: twice on {}", figure.name, figure.date));
            }
            Some(other) if other.date > figure.date => {}
            _ => drop(latest.insert(figure.name.clone(), figure.clone())),
        }
    }
    if problems.is_empty() { Ok(latest) } else { Err(problems) }
}
