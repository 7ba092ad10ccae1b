//! Guards against pages that say what the code does not: the sites of the eight edges and the
//! states of a storage stand in tables of `docs/design.md` and are compared here; a test or page
//! that any page names must be there; and a row of PyTorch's has a test of Python's.

#![allow(clippy::unwrap_used)]

use lightering::storage::{Residency, Tier};
use lightering::trace::Site;
use std::collections::BTreeSet;
use std::path::Path;

/// The rows of the first table under this heading whose head line starts with `head`.
fn table(heading: &str, head: &str) -> Vec<Vec<String>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/design.md");
    let page = std::fs::read_to_string(path).unwrap();
    let section = page.split("\n## ").find(|section| section.starts_with(heading)).unwrap();
    let mut lines = section.lines().skip_while(|line| !line.starts_with(head)).skip(2);
    let mut rows = Vec::new();
    while let Some(row) = lines.next().and_then(|line| line.strip_prefix("| ")) {
        rows.push(row.split(" | ").map(|cell| cell.trim_matches('`').to_string()).collect());
    }
    assert!(rows.len() > 5, "no table {head} under {heading}");
    rows
}

#[test]
fn the_page_lists_every_site_with_its_edge() {
    let rows = table("5.", "| site |");
    let listed: BTreeSet<(String, String)> =
        rows.iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    assert_eq!(listed.len(), rows.len(), "a site is listed twice");
    let name = |site: &Site| (format!("{site:?}"), format!("{:?}", site.edge().unwrap()));
    assert_eq!(listed, Site::ALL.iter().map(name).collect());
}

#[test]
fn the_page_allows_the_transitions_that_the_code_allows() {
    let state = |name: &str| -> Vec<Residency> {
        match name {
            "Resident" => vec![Residency::Resident],
            "Evicting" => vec![Residency::Evicting],
            "Evicted(Host)" => vec![Residency::Evicted(Tier::Host)],
            "Evicted(Disk)" => vec![Residency::Evicted(Tier::Disk)],
            "Refilling" => vec![Residency::Refilling],
            "Lost" => vec![Residency::Lost],
            "any" => Residency::ALL.to_vec(),
            other => panic!("{other} is no state"),
        }
    };
    let rows = table("8.", "| from | to |");
    for from in Residency::ALL {
        for to in Residency::ALL {
            let says =
                |row: &Vec<String>| state(&row[0]).contains(&from) && state(&row[1]).contains(&to);
            assert_eq!(rows.iter().any(says), from.may_become(to), "{from:?} -> {to:?}");
        }
    }
}

/// Names in back ticks that start with a folder of this repository.
fn named(page: &str) -> Vec<&str> {
    let folders = ["tests/", "docs/", "benches/", "python/"];
    let starts = |name: &&str| folders.iter().any(|folder| name.starts_with(folder));
    page.split('`').skip(1).step_by(2).filter(starts).collect()
}

/// Is `tests/file.rs`, `tests/file.rs::story`, the same of Python, or the folder there?
fn is_there(name: &str) -> bool {
    let (path, story) = name.split_once("::").unwrap_or((name, ""));
    let full = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    match std::fs::read_to_string(&full) {
        Ok(text) => {
            let heads = [format!("fn {story}("), format!("def {story}(")];
            story.is_empty() || heads.iter().any(|head| text.contains(head))
        }
        Err(_) => story.is_empty() && full.is_dir(),
    }
}

#[test]
fn what_a_page_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut count = 0;
    for folder in [root.to_path_buf(), root.join("docs")] {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.extension().is_some_and(|end| end == "md") {
                let page = std::fs::read_to_string(&path).unwrap();
                let missing: Vec<&str> =
                    named(&page).into_iter().filter(|name| !is_there(name)).collect();
                assert!(missing.is_empty(), "{} names {missing:?}", path.display());
                count += named(&page).len();
            }
        }
    }
    assert!(count > 20, "only {count} names found: the search itself is broken");
    assert!(is_there("tests/design.rs::what_a_page_names_is_there") && is_there("docs"));
    assert!(!is_there("python/tests/test_lives.py::test_no_such_story"));
    assert!(!is_there("tests/design.rs::no_such_story") && !is_there("tests/no_such_file.rs"));
}

#[test]
fn every_file_of_the_python_package_has_its_line_on_the_page() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/design.md")).unwrap();
    let section = page.split("\n## ").find(|section| section.starts_with("2.")).unwrap();
    let words: BTreeSet<&str> = section.split([' ', ',', '\n', '/']).collect();
    let mut count = 0;
    for folder in ["python/src", "python/lightering", "python/lightering/torch"] {
        for path in std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path())
        {
            if path.extension().is_some_and(|end| end == "rs" || end == "py") {
                let stem = path.file_stem().unwrap().to_str().unwrap();
                assert!(words.contains(stem), "{} has no line", path.display());
                count += 1;
            }
        }
    }
    assert!(count > 30, "only {count} files found: the search itself is broken");
}

/// The rows of PyTorch, which `python/` is for.
fn rows_of_pytorch() -> Vec<String> {
    let rows = |letter, numbers: std::ops::RangeInclusive<u8>| {
        numbers.map(move |number| format!("{letter}{number}"))
    };
    rows('A', 1..=12).chain(rows('C', 1..=4)).chain(rows('D', 2..=7)).collect()
}

#[test]
fn every_row_of_pytorch_names_a_test_of_python_and_where_it_ran() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/systems.md")).unwrap();
    for id in rows_of_pytorch() {
        let found: Vec<&str> =
            page.lines().filter(|line| line.starts_with(&format!("| {id} | "))).collect();
        let [row] = found[..] else { panic!("{id} stands in {} rows", found.len()) };
        let cells: Vec<&str> = row.split(" | ").collect();
        let [_, _, tests, ran] = cells[..] else { panic!("{id} has {} cells", cells.len()) };
        let is_story = |name: &&str| name.starts_with("python/tests/") && name.contains("::");
        assert!(named(tests).iter().any(is_story), "{id} names no test of Python");
        assert!(ran.contains("CPU tensors") && ran.contains("H200"), "{id} ran on {ran}");
    }
}
