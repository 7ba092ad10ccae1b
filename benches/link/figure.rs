//! One figure: its pairs of ours and raw, what is printed of it, and when.
//!
//! What it is not: a verdict. What is asked of a ratio stands in `benches/results/required.json`.
//!
//! Invariant: a figure is printed with all its pairs, whole, as soon as it is given.
//!
//! ```text
//!   measure -> Row { pairs } -> Figures::add -> a line of the table, a line of JSON
//! ```
//!
//! Everything that is measured uses it.

/// Which of two figures is the better one.
#[derive(Clone, Copy)]
pub(crate) enum Better {
    Higher,
    Lower,
}

/// One figure, with every pair of ours and raw.
pub(crate) struct Row {
    name: String,
    unit: &'static str,
    better: Better,
    pub(crate) pairs: Vec<(f64, f64)>,
    /// Runs in which the device began before all was enqueued.
    pub(crate) unheld: u32,
}

impl Row {
    pub(crate) fn new(name: String, unit: &'static str, better: Better) -> Row {
        Row { name, unit, better, pairs: Vec::new(), unheld: 0 }
    }

    /// The pair in the middle; of two the worse.
    fn middle(&self) -> (f64, f64) {
        let mut sorted = self.pairs.clone();
        sorted.sort_by(|(a, b), (c, d)| (a / b).total_cmp(&(c / d)));
        let at = match self.better {
            Better::Lower => sorted.len() / 2,
            Better::Higher => (sorted.len() - 1) / 2,
        };
        sorted[at]
    }

    fn print(&self) {
        let (ours, raw) = self.middle();
        let ratios = || self.pairs.iter().map(|(ours, raw)| ours / raw);
        let least = ratios().fold(f64::INFINITY, f64::min);
        let most = ratios().fold(0.0, f64::max);
        let unheld = match self.unheld {
            0 => String::new(),
            runs => format!("   {runs} runs not held to the end"),
        };
        println!(
            "{:34} {ours:10.3} {raw:10.3} {:5} {:8.4}   {least:.4} to {most:.4}, {} pairs{unheld}",
            self.name,
            self.unit,
            ours / raw,
            self.pairs.len()
        );
    }

    fn json(&self, simulated: bool) -> String {
        let better = match self.better {
            Better::Higher => "higher",
            Better::Lower => "lower",
        };
        let pairs: Vec<String> =
            self.pairs.iter().map(|(ours, raw)| format!("[{ours}, {raw}]")).collect();
        format!(
            "{{\"figure\": \"{}\", \"unit\": \"{}\", \"better\": \"{better}\", \
             \"simulated\": {simulated}, \"unheld\": {}, \"pairs\": [{}]}}",
            self.name,
            self.unit,
            self.unheld,
            pairs.join(", ")
        )
    }
}

/// Where figures go.
pub(crate) struct Figures {
    simulated: bool,
    json: bool,
    count: usize,
}

impl Figures {
    pub(crate) fn new(simulated: bool, json: bool) -> Figures {
        Figures { simulated, json, count: 0 }
    }

    pub(crate) fn head() {
        let head = ["figure", "ours", "raw", "unit", "ratio", "spread of the ratio"];
        let [name, ours, raw, unit, ratio, spread] = head;
        println!("{name:34} {ours:>10} {raw:>10} {unit:5} {ratio:>8}   {spread}");
    }

    /// Prints them. Standard output is written line by line, into a pipe as well.
    pub(crate) fn add(&mut self, rows: impl IntoIterator<Item = Row>) {
        for row in rows {
            row.print();
            if self.json {
                println!("{}", row.json(self.simulated));
            }
            self.count += 1;
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }
}
