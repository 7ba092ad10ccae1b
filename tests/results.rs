//! Guards against a figure that nobody can check: one typed by hand, one measured on code that is
//! not of this history, one without the raw figure beside it, and one that fell short unsaid.
//!
//! Every figure measured on a device is an entry of a file in `benches/results/` (its README tells
//! the form); the tables of `docs/performance.md` are made from them. To make the tables anew:
//! `LIGHTERING_BLESS=1 cargo test --test results`.

#![allow(clippy::unwrap_used)]

#[path = "results/figure.rs"]
mod figure;
#[path = "results/page.rs"]
mod page;

use figure::{Asked, Figure, current, read_figures, read_required};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Says something that the harness does not swallow, as it does with `eprintln!`.
fn aloud(what: &str) {
    let mut stderr = std::io::stderr();
    writeln!(stderr, "results: {what}").unwrap();
}

#[track_caller]
fn none(problems: &[String]) {
    assert!(problems.is_empty(), "{} problem(s):\n{}", problems.len(), problems.join("\n"));
}

fn measured() -> Result<Vec<Figure>, Vec<String>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(root().join("benches/results")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.ends_with(".json") && name != "required.json" {
            all.extend(read_figures(&name, &std::fs::read_to_string(&path).unwrap())?);
        }
    }
    Ok(all)
}

fn required() -> Result<Asked, Vec<String>> {
    let text = std::fs::read_to_string(root().join("benches/results/required.json")).unwrap();
    read_required("required.json", &text)
}

/// Runs git here; `None` where there is no git to ask.
fn git(args: &[&str]) -> Option<(bool, String)> {
    let output = Command::new("git").arg("-C").arg(root()).args(args).output().ok()?;
    Some((output.status.success(), String::from_utf8_lossy(&output.stdout).trim().to_string()))
}

/// Why commits cannot be looked up here, if so.
fn no_history() -> Option<&'static str> {
    match git(&["rev-parse", "--is-shallow-repository"]) {
        None => Some("no git on this machine"),
        Some((true, shallow)) if shallow == "true" => Some("a shallow clone"),
        Some((true, _)) if git(&["rev-parse", "--verify", "HEAD"])?.0 => None,
        Some(_) => Some("not a git repository"),
    }
}

fn is_of_this_history(commit: &str) -> bool {
    let name = format!("{commit}^{{commit}}");
    let ask = |args: &[&str]| git(args).is_some_and(|(yes, _)| yes);
    ask(&["cat-file", "-e", &name]) && ask(&["merge-base", "--is-ancestor", commit, "HEAD"])
}

#[test]
fn every_figure_is_whole_and_of_this_history() {
    let figures = measured().unwrap_or_else(|problems| panic!("{}", problems.join("\n")));
    if let Some(why) = no_history() {
        aloud(&format!("{why}: the commits of {} figures are not checked", figures.len()));
        return;
    }
    let strange = figures.iter().filter(|figure| !is_of_this_history(&figure.commit));
    let tell = |figure: &Figure| format!("{}: {} is not behind HEAD", figure.name, figure.commit);
    none(&strange.map(tell).collect::<Vec<_>>());
}

#[test]
fn a_required_figure_is_there_and_a_shortfall_is_owned_up_to() {
    let figures = measured().and_then(|all| current(&all));
    let figures = figures.unwrap_or_else(|problems| panic!("{}", problems.join("\n")));
    let required = required().unwrap_or_else(|problems| panic!("{}", problems.join("\n")));
    let names = required.figures.iter().map(|asked| &asked.name);
    let missing = names.filter(|name| !figures.contains_key(*name) && !required.demands(name));
    match missing.count() {
        0 => {}
        count => aloud(&format!("{count} figures of required.json are not measured yet")),
    }
    let page = std::fs::read_to_string(root().join("docs/performance.md")).unwrap();
    none(&page::judge(&figures, &required, &page));
}

#[test]
fn the_tables_say_what_the_files_say() {
    let path = root().join("docs/performance.md");
    let old = std::fs::read_to_string(&path).unwrap();
    let figures = measured().and_then(|all| current(&all));
    let new = figures.and_then(|figures| page::regenerate(&old, &figures));
    let new = new.unwrap_or_else(|problems| panic!("{}", problems.join("\n")));
    if std::env::var_os("LIGHTERING_BLESS").is_some() && new != old {
        std::fs::write(&path, &new).unwrap();
        aloud("docs/performance.md was made anew");
        return;
    }
    assert!(
        new == old,
        "the tables of docs/performance.md differ from benches/results/; \
         LIGHTERING_BLESS=1 cargo test --test results makes them anew"
    );
}

const GOOD: &str = r#"[{"name": "copy.out", "value": 54.0, "unit": "GB/s", "reference": 55.0,
    "ratio": 0.9818, "threshold": 0.98, "better": "higher", "date": "2026-11-30",
    "hardware": "H200", "driver": "580.159", "command": "run.sh bench:copy",
    "commit": "0123456789abcdef0123456789abcdef01234567"}]"#;

fn good() -> BTreeMap<String, Figure> {
    current(&read_figures("good", GOOD).unwrap()).unwrap()
}

#[test]
fn a_figure_that_lacks_something_is_refused_by_name() {
    for (from, to, says) in [
        ("\"copy.out\"", "\"Copy\"", "name"),
        ("54.0", "\"fast\"", "value"),
        ("54.0", "-1.0", "value"),
        ("55.0", "0.0", "ratio"),
        ("0.9818", "1.0", "ratio"),
        ("\"GB/s\"", "\"\"", "unit"),
        ("\"higher\"", "\"up\"", "better"),
        ("2026-11-30", "2026-13-30", "date"),
        ("2026-11-30", "30 November", "date"),
        ("0123456789abcdef0123456789abcdef01234567", "0123456", "commit"),
        ("0123456789abcdef0123456789abcdef01234567", "main", "commit"),
        ("\"hardware\": \"H200\",", "", "hardware"),
        ("\"H200\"", "\"simulated H200\"", "simulated"),
        ("\"driver\"", "\"diver\"", "unknown"),
        ("run.sh", "a | b", "command"),
        ("[{", "{", ""),
        ("[{", "[3, {", "not an object"),
    ] {
        let text = GOOD.replace(from, to);
        assert_ne!(text, GOOD, "{from} is not there to be broken");
        let problems = read_figures("bad", &text).expect_err(&format!("{from} -> {to}"));
        assert!(problems.iter().any(|p| p.contains(says)), "{from} -> {to}: {problems:?}");
    }
    assert!(read_figures("bad", "{}").is_err_and(|problems| problems[0].contains("not a list")));
}

#[test]
fn a_middle_of_few_pairs_is_refused_where_pairs_are_what_counts() {
    let read = |name: &str, pairs: &str| {
        let text = GOOD.replace("copy.out", name);
        read_figures("made", &text.replace("[{", &format!("[{{\"pairs\": {pairs}, ")))
    };
    let tables = ["seam", "link", "latency", "address", "prefetch", "rows", "two", "overlap"];
    for table in tables {
        let name = format!("{table}.out");
        let problems = read(&name, "14").expect_err(&name);
        assert!(problems.len() == 1 && problems[0].contains("`pairs` is 14"), "{problems:?}");
        assert_eq!(read(&name, "15").unwrap()[0].pairs, Some(15));
        // As entries were before they said so.
        assert_eq!(read_figures("old", &GOOD.replace("copy.out", &name)).unwrap()[0].pairs, None);
    }
    // The longest of all is one, and of other tables one may be all there is.
    for name in ["latency.longest", "link.longest-held", "train.bit_equal", "torch.host.pair"] {
        assert_eq!(read(name, "1").unwrap()[0].pairs, Some(1));
    }
    assert!(read("link.out-longest", "1").is_err(), "only a name that begins so is exempt");
    for wrong in ["0", "-15", "15.5", "\"15\"", "null", "[15]"] {
        let problems = read("link.out", wrong).expect_err(wrong);
        assert!(problems[0].contains("`pairs` is no count"), "{wrong}: {problems:?}");
    }
}

#[test]
fn the_latest_figure_counts_and_two_of_one_day_are_refused() {
    let mut figures = read_figures("good", GOOD).unwrap();
    let older = Figure { date: "2026-11-02".to_string(), value: 1.0, ..figures[0].clone() };
    figures.push(older);
    assert_eq!(current(&figures).unwrap()["copy.out"].value, 54.0);
    figures.push(figures[0].clone());
    assert!(current(&figures).is_err_and(|problems| problems[0].contains("twice")));
}

#[test]
fn a_missing_a_softened_and_a_silent_shortfall_are_found() {
    let asked = |name: &str, threshold: f64| {
        let entry = format!(r#""name": "{name}", "threshold": {threshold}"#);
        let list = format!(r#"[{{{entry}, "unit": "GB/s", "better": "higher"}}]"#);
        let text = format!(r#"{{"demanded": ["copy"], "figures": {list}}}"#);
        read_required("required", &text).unwrap()
    };
    let nothing = Asked { demanded: Vec::new(), figures: Vec::new() };
    let says = |problems: Vec<String>, what: &str| {
        assert!(problems.len() == 1 && problems[0].contains(what), "{what}: {problems:?}");
    };
    let empty = "## Shortfalls\n\nNone.\n";
    none(&page::judge(&good(), &asked("copy.out", 0.98), empty));
    says(page::judge(&good(), &asked("copy.in", 0.98), empty), "never measured");
    says(page::judge(&good(), &asked("copy.out", 0.99), empty), "not the required");
    let later = |name: &str, threshold| Asked { demanded: Vec::new(), ..asked(name, threshold) };
    none(&page::judge(&good(), &later("copy.in", 0.98), empty));
    says(page::judge(&good(), &later("copy.out", 0.99), empty), "not the required");

    let mut short = good();
    short.get_mut("copy.out").unwrap().threshold = 0.99;
    says(page::judge(&short, &nothing, empty), "no shortfall says why");
    says(page::judge(&short, &nothing, "## Other\n### copy.out\nReason: x\n"), "no shortfall");
    let half = "## Shortfalls\n### copy.out\nMeasured: 54.0 of 55.0 GB/s, ten runs\nReason:\n";
    says(page::judge(&short, &nothing, half), "`Reason:`");
    let whole = half.replace("Reason:", "Reason: the engine is shared with the display");
    none(&page::judge(&short, &nothing, &whole));
    says(page::judge(&good(), &nothing, &whole), "no figure of that name is short");

    let mut lower = good();
    let figure = lower.get_mut("copy.out").unwrap();
    (figure.better, figure.threshold) = (figure::Better::Lower, 0.9);
    says(page::judge(&lower, &nothing, empty), "misses");
    // 54 of 55 is 1.8 percent off.
    let mut near = good();
    for (threshold, off) in [(0.02, 0), (0.018, 1)] {
        let figure = near.get_mut("copy.out").unwrap();
        (figure.better, figure.threshold) = (figure::Better::Near, threshold);
        assert_eq!(page::judge(&near, &nothing, empty).len(), off, "{threshold}");
    }
}

#[test]
fn a_list_of_required_figures_that_says_not_whether_they_are_demanded_is_refused() {
    for text in [
        "[]",
        "{}",
        r#"{"figures": []}"#,
        r#"{"demanded": true, "figures": []}"#,
        r#"{"demanded": [1], "figures": []}"#,
        r#"{"demanded": ["copy"], "figures": []}"#,
    ] {
        let problems = read_required("required", text).unwrap_err();
        assert!(problems[0].contains("demanded"), "{text}: {problems:?}");
    }
    let text = r#"{"demanded": [], "figures": {}}"#;
    assert!(read_required("required", text).unwrap_err()[0].contains("not a list"));
    let text = r#"{"demanded": [], "figures": [{"name": "a.b"}]}"#;
    assert!(read_required("required", text).unwrap_err().len() > 2);
}

#[test]
fn a_table_typed_by_hand_is_overwritten() {
    let page = "# A\n<!-- results:begin copy -->\ntyped\n<!-- results:end -->\nafter\n";
    let made = page::regenerate(page, &good()).unwrap();
    assert!(made.contains("| `copy.out` | 54.00 GB/s | 55.00 GB/s | 0.982 | >= 0.98 |"), "{made}");
    assert!(made.contains("Command: `run.sh bench:copy`") && made.ends_with("-->\nafter\n"));
    assert!(!made.contains("typed"));
    assert_eq!(page::regenerate(&made, &good()).unwrap(), made);
    assert!(page::regenerate(page, &BTreeMap::new()).unwrap().contains("Nothing measured yet."));
    for (broken, says) in [
        ("nothing", "in no table"),
        ("<!-- results:begin copy -->\n", "has no end"),
        ("<!-- results:end -->\n", "never began"),
        ("<!-- results:begin copy -->\n<!-- results:begin copy -->\n", "twice"),
    ] {
        let problems = page::regenerate(broken, &good()).unwrap_err();
        assert!(problems.iter().any(|problem| problem.contains(says)), "{broken}: {problems:?}");
    }
}

#[test]
fn a_commit_of_another_history_is_told_from_one_of_ours() {
    if let Some(why) = no_history() {
        aloud(&format!("{why}: telling commits apart is not tried"));
        return;
    }
    let (_, head) = git(&["rev-parse", "HEAD"]).unwrap();
    assert!(is_of_this_history(&head));
    assert!(!is_of_this_history(&"0".repeat(40)));
}
