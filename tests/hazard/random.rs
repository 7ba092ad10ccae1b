//! The checker against the oracle, on random programs. A failure prints the seed and the program;
//! `LIGHTERING_ORACLE_SEED=n` replays that one, `LIGHTERING_ORACLE_PROGRAMS=n` sets how many run.

use crate::oracle::{self, Mention, Verdict};
use crate::program::{program, show};
use crate::script::Script;
use lightering::hazard::{Checker, Hazard, Kind, Touch};
use lightering::trace::{Actor, Use};
use std::collections::{BTreeMap, HashSet};

const PROGRAMS: u64 = 1_000_000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

fn seeds() -> std::ops::Range<u64> {
    match number("LIGHTERING_ORACLE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("LIGHTERING_ORACLE_PROGRAMS").unwrap_or(PROGRAMS),
    }
}

/// The checker's list leaves out what looks like an earlier hazard; so does this.
fn listed(verdicts: &[Verdict]) -> Vec<Verdict> {
    let plain = |mention: Mention| Mention { seq: 0, ..mention };
    let looks = |verdict: &Verdict| Verdict {
        first: verdict.first.map(plain),
        second: plain(verdict.second),
        ..*verdict
    };
    let mut list: Vec<Verdict> = Vec::new();
    for verdict in verdicts {
        if !list.iter().any(|other| looks(other) == looks(verdict)) {
            list.push(*verdict);
        }
    }
    list
}

fn verdict(hazard: &Hazard) -> Verdict {
    let mention = |touch: Touch| {
        let Touch { seq, device, by, uses, .. } = touch;
        Mention { seq, device, by, uses }
    };
    Verdict {
        kind: hazard.kind,
        first: hazard.first.map(mention),
        second: mention(hazard.second),
        event: hazard.event,
    }
}

fn disagree(seed: u64, script: &Script, expected: &[Verdict], found: &[Hazard]) -> String {
    let mut text = format!("seed {seed}\n{}oracle:\n", show(script));
    for Verdict { kind, first, second, .. } in expected {
        let first = first.map(|first| first.seq);
        text += &format!("  {kind}: #{} behind {first:?}\n", second.seq);
    }
    text += "checker:\n";
    found.iter().for_each(|hazard| text += &format!("  {hazard}\n"));
    text
}

/// Sums of many programs.
#[derive(Default)]
struct Tally {
    clean: u64,
    records: usize,
    kinds: BTreeMap<Kind, u64>,
}

/// One program before both: they agree on every hazard.
fn compare(seed: u64, tally: &mut Tally) {
    let script = program(seed);
    let expected = oracle::judge(&script.records);
    let mut checker = Checker::new();
    for record in &script.records {
        checker.push(record);
    }
    checker.finish();
    let found: Vec<Verdict> = checker.hazards().iter().map(verdict).collect();
    assert!(
        found == listed(&expected) && checker.total() == expected.len() as u64,
        "{}",
        disagree(seed, &script, &expected, checker.hazards())
    );
    let is_clean = expected.iter().all(|verdict| verdict.kind == Kind::Leak);
    tally.clean += u64::from(is_clean);
    tally.records += script.records.len();
    expected.iter().for_each(|verdict| *tally.kinds.entry(verdict.kind).or_default() += 1);
}

#[test]
fn the_naive_oracle_and_the_checker_agree_on_random_programs() {
    let seeds = seeds();
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let mut sum = Tally::default();
    std::thread::scope(|scope| {
        let work = |worker: usize| {
            let mine = seeds.clone().skip(worker).step_by(workers);
            scope.spawn(move || {
                let mut tally = Tally::default();
                mine.for_each(|seed| compare(seed, &mut tally));
                tally
            })
        };
        for worker in (0..workers).map(work).collect::<Vec<_>>() {
            let part = worker.join().expect("its own words are above");
            sum.clean += part.clean;
            sum.records += part.records;
            part.kinds.into_iter().for_each(|(kind, n)| *sum.kinds.entry(kind).or_default() += n);
        }
    });
    let (programs, Tally { clean, records, kinds }) = (seeds.end - seeds.start, sum);
    println!("{programs} programs, {records} records, {clean} clean, hazards: {kinds:?}");
    if programs >= 10_000 {
        assert!(clean > programs / 20 && clean < programs / 2, "a mix of clean and not: {clean}");
        assert_eq!(kinds.len(), 11, "every kind of hazard came up");
    }
}

#[test]
fn forgetting_what_is_settled_changes_no_verdict() {
    type Said = HashSet<(Kind, Actor, Option<Use>)>;
    let said = |checker: &Checker| -> Said {
        let outline = |h: &Hazard| (h.kind, h.second.by, h.second.uses);
        checker.hazards().iter().map(outline).collect()
    };
    for seed in seeds().step_by(20) {
        let script = program(seed);
        let (mut plain, mut tidy) = (Checker::new(), Checker::new());
        for record in &script.records {
            plain.push(record);
            tidy.push(record);
            tidy.tidy();
        }
        assert_eq!(said(&plain), said(&tidy), "seed {seed}\n{}", show(&script));
        assert!(tidy.footprint().segments <= plain.footprint().segments);
        assert!(tidy.footprint().actors <= plain.footprint().actors);
    }
}
