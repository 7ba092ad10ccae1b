//! A one-line progress bar on a terminal.
//!
//! What it is not: output. Where standard error is no terminal, nothing is drawn at all.
//!
//! Invariant: the line is wiped when the bar goes, so what is printed next starts clean.
//!
//! ```text
//!   checkpoint+offload [##########..........] 12/24 loss 2.913
//! ```
//!
//! `main` uses it.

use std::io::{IsTerminal, Write};

const WIDTH: u64 = 20;

/// A bar for one mode's steps.
pub(crate) struct Progress<'a> {
    name: &'static str,
    steps: u64,
    err: &'a mut dyn Write,
    drawn: bool,
}

impl<'a> Progress<'a> {
    /// A bar that is drawn on `err` where standard error is a terminal.
    pub(crate) fn new(name: &'static str, steps: u64, err: &'a mut dyn Write) -> Progress<'a> {
        Progress { name, steps, err, drawn: std::io::stderr().is_terminal() }
    }

    /// `done` steps are done; the last one's loss was `loss`.
    pub(crate) fn show(&mut self, done: u64, loss: f64) {
        if self.drawn {
            let line = line(self.name, done, self.steps, loss);
            // A bar that cannot be drawn is no reason to stop.
            let _ = write!(self.err, "\r{line}\x1b[K").and_then(|()| self.err.flush());
        }
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        if self.drawn {
            let _ = write!(self.err, "\r\x1b[K").and_then(|()| self.err.flush());
        }
    }
}

fn line(name: &str, done: u64, steps: u64, loss: f64) -> String {
    let full = (u128::from(WIDTH) * u128::from(done) / u128::from(steps.max(1))) as usize;
    let bar: String = (0..WIDTH as usize).map(|at| if at < full { '#' } else { '.' }).collect();
    format!("{name} [{bar}] {done}/{steps} loss {loss:.3}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_full_only_at_the_end() {
        assert_eq!(line("none", 1, 40, 2.5), "none [....................] 1/40 loss 2.500");
        assert!(line("none", 39, 40, 2.5).contains("#. ".trim_end()));
        assert!(line("none", 39, 40, 2.5).contains(".]"));
        assert!(line("none", 40, 40, 2.5).contains("[####################]"));
    }
}
