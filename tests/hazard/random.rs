//! The checker against the oracle, on random programs. A failure prints the seed and the program;
//! `LIGHTERING_ORACLE_SEED=n` replays that one, `LIGHTERING_ORACLE_PROGRAMS=n` sets how many run.

use crate::oracle::{self, Mention, Verdict};
use crate::program::{program, show};
use crate::script::Script;
use lightering::hazard::{Checker, Hazard, Kind, Touch};
use lightering::trace::{Actor, Use};
use std::collections::{BTreeMap, HashSet};

const PROGRAMS: u64 = 200_000;

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

#[test]
fn the_naive_oracle_and_the_checker_agree_on_random_programs() {
    let seeds = seeds();
    let (mut clean, mut records, mut kinds) = (0_u64, 0, BTreeMap::<Kind, u64>::new());
    for seed in seeds.clone() {
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
        clean += u64::from(is_clean);
        records += script.records.len();
        expected.iter().for_each(|verdict| *kinds.entry(verdict.kind).or_default() += 1);
    }
    let programs = seeds.end - seeds.start;
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
    for seed in seeds().step_by(4) {
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
