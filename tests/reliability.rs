//! Guards against a hazard that no test asks about, and against a page that says otherwise: the
//! table of hazards in `docs/reliability.md` is made from the names of the tests, which begin with
//! the numbers of the hazards that they ask about.
//!
//! `LIGHTERING_BLESS=1 cargo test --test reliability` makes it anew.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "reliability/list.rs"]
mod list;
#[path = "reliability/scan.rs"]
mod scan;

use list::{ABSENT, HAZARDS};
use scan::{Story, stories};
use std::collections::BTreeMap;
use std::path::Path;

const PAGE: &str = "docs/reliability.md";
const BEGIN: &str = "<!-- hazards:begin -->\n";
const END: &str = "<!-- hazards:end -->";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Which tests ask about each hazard.
fn by_id(stories: &[Story]) -> BTreeMap<String, Vec<&Story>> {
    let mut all: BTreeMap<String, Vec<&Story>> = BTreeMap::new();
    for story in stories {
        for id in &story.ids {
            all.entry(id.clone()).or_default().push(story);
        }
    }
    all
}

/// What is wrong with the list and the tests together.
fn problems(all: &BTreeMap<String, Vec<&Story>>) -> Vec<String> {
    let mut wrong = Vec::new();
    let absent = |id: &str| ABSENT.iter().any(|(other, _)| *other == id);
    for (id, _) in HAZARDS {
        match (all.contains_key(*id), absent(id)) {
            (false, false) => wrong.push(format!("{id}: no test's name begins with it")),
            (true, true) => wrong.push(format!("{id}: has a test now; take it out of `ABSENT`")),
            _ => {}
        }
    }
    let unlisted = all.keys().filter(|id| !HAZARDS.iter().any(|(other, _)| other == id));
    wrong.extend(unlisted.map(|id| format!("{id}: a test has it, `HAZARDS` does not")));
    wrong
}

/// The two tables as they must stand on the page.
fn tables(all: &BTreeMap<String, Vec<&Story>>) -> String {
    let mut out = "| id | hazard | tests | on |\n|---|---|---|---|\n".to_string();
    for (id, words) in HAZARDS {
        let Some(stories) = all.get(*id) else { continue };
        let tests: Vec<String> = stories.iter().map(|story| format!("`{}`", story.full)).collect();
        // A file may have several.
        let devices = stories.iter().flat_map(|story| story.device.split(", "));
        let mut devices: Vec<&str> = devices.collect();
        devices.sort_unstable();
        devices.dedup();
        out += &format!("| {id} | {words} | {} | {} |\n", tests.join("<br>"), devices.join(", "));
    }
    out += "\nWithout a test:\n\n| id | hazard | why |\n|---|---|---|\n";
    for (id, why) in ABSENT {
        let (_, words) = HAZARDS.iter().find(|(other, _)| other == id).unwrap();
        out += &format!("| {id} | {words} | {why} |\n");
    }
    out
}

#[test]
fn every_hazard_has_a_test_of_its_number_or_a_reason() {
    let stories = stories(root());
    let all = by_id(&stories);
    let wrong = problems(&all);
    assert!(wrong.is_empty(), "{wrong:#?}");
    let tested = HAZARDS.iter().filter(|(id, _)| all.contains_key(*id)).count();
    println!("{tested} of {} hazards have tests, {} in all", HAZARDS.len(), stories.len());
    assert_eq!(tested + ABSENT.len(), HAZARDS.len());
}

#[test]
fn the_page_has_the_table_that_the_tests_make() {
    let path = root().join(PAGE);
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the page has a place for the table");
    let (_, after) = rest.split_once(END).expect("the table has an end");
    let stories = stories(root());
    let made = format!("{before}{BEGIN}{}{END}{after}", tables(&by_id(&stories)));
    if std::env::var_os("LIGHTERING_BLESS").is_some() && made != page {
        return std::fs::write(&path, made).unwrap();
    }
    assert!(
        made == page,
        "{PAGE} does not say what the tests do: \
         LIGHTERING_BLESS=1 cargo test --test reliability makes it anew"
    );
}

#[test]
fn a_hazard_without_a_test_and_a_test_without_a_hazard_are_found() {
    let text =
        ["#[test]", "fn h01_a() {}", "#[test]", "#[ignore = \"x\"]", "fn h900_m31_b(", ") {}"]
            .join("\n")
            + "\nfn h02_c() {}\n#[test]\nfn hot_d() {}\n";
    let found = scan::of_text("tests/cuda_fake/x.rs", &text);
    let names: Vec<&str> = found.iter().map(|story| story.full.as_str()).collect();
    assert_eq!(names, ["tests/cuda_fake/x.rs::h01_a", "tests/cuda_fake/x.rs::h900_m31_b"]);
    assert_eq!(found[1].ids, ["H900", "M31"]);
    assert_eq!(found[1].device, "stand-in driver");
    let wrong = problems(&by_id(&found));
    assert!(wrong.contains(&"H900: a test has it, `HAZARDS` does not".to_string()));
    assert!(wrong.contains(&"H02: no test's name begins with it".to_string()));
    assert!(!wrong.iter().any(|wrong| wrong.starts_with("H01") || wrong.starts_with("M31")));
}

#[test]
fn a_hazard_whose_tests_share_a_device_names_it_once() {
    let text = "#[test]\nfn h70_a() {}\n";
    let files = ["tests/hazards/pool.rs", "tests/pinned_programs.rs", "tests/hazards/order.rs"];
    let found: Vec<Story> = files.iter().flat_map(|file| scan::of_text(file, text)).collect();
    let table = tables(&by_id(&found));
    let row = table.lines().find(|line| line.starts_with("| H70 ")).unwrap();
    assert!(row.ends_with("h70_a` | host, simulated |"), "{row}");
}
