//! Two devices of one host, each with a process of its own.
//!
//! What it is not: two devices on one pool; `two` has those. They share nothing but the machine.
//!
//! Invariant: both processes are told what to do at the same time, and the next thing only when
//! both have answered; so what one measures alone, the other does nothing beside.
//!
//! ```text
//!   main -- "each" "raw-each" "both" "raw" -->  link --part --device cuda:0
//!        <-------- "= seconds seconds" -------  link --part --device cuda:1
//! ```
//!
//! `main` uses it, and runs as either part.

use crate::Bench;
use crate::figure::Figures;
use crate::rig::Plan;
use crate::two::{BYTES, Round, figures};
use lightering::backend::Spec;
use lightering::{Error, Kind, Result};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// What a part's answers begin with; it prints other lines, too.
const ANSWER: &str = "= ";

/// In two processes.
pub(crate) fn apart(bench: &Bench, out: &mut Figures) -> Result<()> {
    let Some((count, ordinals)) = bench.two() else { return Ok(()) };
    let gigabytes = count as f64 * BYTES.0 as f64 / 1e9;
    let mut parts = Parts { parts: Vec::with_capacity(2) };
    for ordinal in ordinals {
        parts.parts.push(Part::start(bench, ordinal)?);
    }
    let mut rounds = [Vec::new(), Vec::new()];
    let rate = |seconds: [f64; 2]| seconds.map(|seconds| gigabytes / seconds);
    for turn in 0..bench.pairs + 1 {
        let mut round = [Round::default(); 2];
        // What is compared goes first in turn.
        let is_first = turn % 2 == 0;
        let mut order = ["alone", "each", "raw-each"];
        if !is_first {
            order.reverse();
        }
        for what in order {
            let each = match what {
                "alone" => parts.in_turn("each")?,
                _ => parts.together(what)?,
            };
            for (round, each) in round.iter_mut().zip(each) {
                let rates = match what {
                    "alone" => &mut round.alone,
                    "each" => &mut round.together,
                    _ => &mut round.raw,
                };
                *rates = rate(each);
            }
        }
        for raw in [!is_first, is_first] {
            let both = parts.together(if raw { "raw" } else { "both" })?;
            for (round, [seconds, _]) in round.iter_mut().zip(both) {
                round.both[usize::from(raw)] = gigabytes / seconds;
            }
        }
        rounds.iter_mut().zip(round).for_each(|(rounds, round)| rounds.push(round));
    }
    parts.end()?;
    // The first round warms up.
    out.add(figures("apart-", &rounds[0][1..], &rounds[1][1..]));
    Ok(())
}

/// As one of the two: does what it is told until there is nobody who tells.
pub(crate) fn part(bench: &Bench) -> Result<()> {
    let count = (bench.total.0 / 2 / BYTES.0) as usize;
    let mut rig = bench.rig(&Plan::new(BYTES, count))?;
    println!("{ANSWER}0 0");
    for line in std::io::stdin().lines() {
        let [first, second] = match line.map_err(broken)?.as_str() {
            "each" => rig.ours_each_way()?,
            "raw-each" => rig.raw_each_way()?,
            "both" => [rig.ours_both()?, 0.0],
            "raw" => [rig.raw_both()?, 0.0],
            other => return Err(Error::new(Kind::Io, "part").detail(String::from(other))),
        };
        println!("{ANSWER}{first} {second}");
    }
    rig.close()
}

/// A process, and the ways to and from it.
struct Part {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Part {
    fn start(bench: &Bench, ordinal: u32) -> Result<Part> {
        let device = match bench.spec {
            Spec::Sim(_) => Spec::Sim(ordinal),
            _ => Spec::Cuda(ordinal),
        };
        let mut command = Command::new(std::env::current_exe().map_err(broken)?);
        command.args(["--part", "--device", &device.to_string()]);
        command.args(["--total", &format!("{}B", bench.total.0)]);
        if bench.check {
            command.arg("--check");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(broken)?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let Some(answers) = answers else {
            return Err(Error::new(Kind::Io, "part").detail("it has no standard output"));
        };
        let mut part = Part { child, orders, answers: BufReader::new(answers).lines() };
        // It is ready.
        part.answer()?;
        Ok(part)
    }

    fn tell(&mut self, what: &str) -> Result<()> {
        match &mut self.orders {
            Some(orders) => writeln!(orders, "{what}").map_err(broken),
            None => Err(Error::new(Kind::Io, "part").detail("it was told the end")),
        }
    }

    fn answer(&mut self) -> Result<[f64; 2]> {
        for line in &mut self.answers {
            let line = line.map_err(broken)?;
            let Some(numbers) = line.strip_prefix(ANSWER) else { continue };
            let numbers: Vec<f64> =
                numbers.split(' ').filter_map(|number| number.parse().ok()).collect();
            if let [first, second] = numbers[..] {
                return Ok([first, second]);
            }
        }
        Err(Error::new(Kind::Io, "part").detail("it ended without an answer"))
    }
}

/// Both. What goes wrong with one ends the other, too: no process is left behind.
struct Parts {
    parts: Vec<Part>,
}

impl Parts {
    fn together(&mut self, what: &str) -> Result<Vec<[f64; 2]>> {
        self.parts.iter_mut().try_for_each(|part| part.tell(what))?;
        self.parts.iter_mut().map(Part::answer).collect()
    }

    fn in_turn(&mut self, what: &str) -> Result<Vec<[f64; 2]>> {
        let one = |part: &mut Part| part.tell(what).and_then(|()| part.answer());
        self.parts.iter_mut().map(one).collect()
    }

    fn end(&mut self) -> Result<()> {
        for part in &mut self.parts {
            part.orders = None;
            let ended = part.child.wait().map_err(broken)?;
            if !ended.success() {
                return Err(Error::new(Kind::Io, "part").detail(ended.to_string()));
            }
        }
        self.parts.clear();
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Both say that it is over already where it is.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn broken(error: std::io::Error) -> Error {
    Error::new(Kind::Io, "part").detail(error.to_string())
}
