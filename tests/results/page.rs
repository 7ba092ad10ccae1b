//! The page of figures: its tables are made from the files, its shortfalls are owned up to.
//!
//! What it is not: a place where a number is typed by hand.
//!
//! Invariant: between a table's markers stands what the files say and nothing else; every figure
//! is in one table; the shortfalls listed are exactly the figures under their thresholds.
//!
//! ```text
//!   <!-- results:begin copy -->     all figures named copy.*
//!   | figure | value | ...
//!   <!-- results:end -->
//! ```
//!
//! The test `results` uses it.

use crate::figure::{Asked, Better, Figure};
use std::collections::BTreeMap;

type Figures = BTreeMap<String, Figure>;

const BEGIN: &str = "<!-- results:begin ";
const END: &str = "<!-- results:end -->";

/// The page with every table made anew, or what is wrong with its markers.
pub(crate) fn regenerate(page: &str, figures: &Figures) -> Result<String, Vec<String>> {
    let (mut out, mut problems, mut shown) = (String::new(), Vec::new(), Vec::new());
    let mut inside = None;
    for line in page.lines() {
        if let Some(table) = line.strip_prefix(BEGIN).and_then(|rest| rest.strip_suffix(" -->")) {
            if inside.is_some() || shown.contains(&table) {
                problems.push(format!("table {table}: begun twice, or inside another"));
            }
            inside = Some(table);
            shown.push(table);
            out += &format!("{line}\n{}", render(table, figures));
        } else if line == END && inside.take().is_none() {
            problems.push("a table ends that never began".to_string());
        }
        if inside.is_none() {
            out += &format!("{line}\n");
        }
    }
    if let Some(table) = inside {
        problems.push(format!("table {table} has no end"));
    }
    let homeless = |name: &&String| !shown.contains(&table_of(name));
    problems.extend(figures.keys().filter(homeless).map(|name| format!("{name}: in no table")));
    if problems.is_empty() { Ok(out) } else { Err(problems) }
}

fn table_of(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

fn render(table: &str, figures: &Figures) -> String {
    let rows: Vec<&Figure> =
        figures.values().filter(|figure| table_of(&figure.name) == table).collect();
    if rows.is_empty() {
        return "Nothing measured yet.\n".to_string();
    }
    let mut out = "| figure | value | raw or bound | ratio | asked | measured |\n".to_string();
    out += "|---|---|---|---|---|---|\n";
    for row in &rows {
        let sign = match row.better {
            Better::Higher => ">=",
            Better::Lower => "<=",
            Better::Near => "1 +-",
        };
        let short = if row.reaches() { "" } else { " **short**" };
        let cells = [
            format!("`{}`", row.name),
            format!("{} {}", digits(row.value), row.unit),
            format!("{} {}", digits(row.reference), row.unit),
            format!("{}{short}", digits(row.ratio)),
            format!("{sign} {}", row.threshold),
            format!(
                "{} on {}, driver {}, at `{}`",
                row.date,
                row.hardware,
                row.driver,
                commit(row)
            ),
        ];
        out += &format!("| {} |\n", cells.join(" | "));
    }
    let mut commands: Vec<&str> = rows.iter().map(|row| row.command.as_str()).collect();
    commands.sort_unstable();
    commands.dedup();
    out += "\n";
    for command in commands {
        out += &format!("Command: `{command}`\n");
    }
    out
}

fn commit(figure: &Figure) -> &str {
    figure.commit.get(..12).unwrap_or(&figure.commit)
}

/// Four digits, or all before the point.
fn digits(value: f64) -> String {
    let places = match value {
        v if v >= 1000.0 => 0,
        v if v >= 100.0 => 1,
        v if v >= 10.0 => 2,
        _ => 3,
    };
    format!("{value:.places$}")
}

/// Figures that are missing, asked less than was agreed, or short without a word about it; and
/// words about figures that are not short.
pub(crate) fn judge(figures: &Figures, required: &Asked, page: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for asked in &required.figures {
        match figures.get(&asked.name) {
            None if !required.demands(&asked.name) => {}
            None => problems.push(format!("{}: required, but never measured", asked.name)),
            Some(figure) => {
                let same = figure.unit == asked.unit
                    && figure.better == asked.better
                    && figure.threshold == asked.threshold;
                if !same {
                    let name = &asked.name;
                    problems.push(format!("{name}: unit or threshold is not the required one"));
                }
            }
        }
    }
    let shortfalls = shortfalls(page);
    for figure in figures.values().filter(|figure| !figure.reaches()) {
        match shortfalls.get(figure.name.as_str()) {
            None => problems.push(format!(
                "{}: ratio {} misses {}, and no shortfall says why",
                figure.name, figure.ratio, figure.threshold
            )),
            Some(text) => {
                for word in ["Measured:", "Reason:"] {
                    let said = |line: &str| {
                        line.strip_prefix(word).is_some_and(|rest| rest.trim().len() >= 20)
                    };
                    if !text.lines().any(said) {
                        problems.push(format!("shortfall {}: no `{word}` line", figure.name));
                    }
                }
            }
        }
    }
    let is_short = |name: &str| figures.get(name).is_some_and(|figure| !figure.reaches());
    let stale = shortfalls.keys().filter(|name| !is_short(name));
    problems.extend(stale.map(|name| format!("shortfall {name}: no figure of that name is short")));
    problems
}

/// The entries of the section `## Shortfalls`, by name.
fn shortfalls(page: &str) -> BTreeMap<&str, String> {
    let mut found: BTreeMap<&str, String> = BTreeMap::new();
    let (mut in_section, mut entry) = (false, None);
    for line in page.lines() {
        if line.starts_with("## ") {
            (in_section, entry) = (line.trim() == "## Shortfalls", None);
        } else if let (true, Some(name)) = (in_section, line.strip_prefix("### ")) {
            entry = Some(name.trim());
            found.entry(name.trim()).or_default();
        } else if let Some(text) = entry.and_then(|name| found.get_mut(name)) {
            *text += &format!("{line}\n");
        }
    }
    found
}
