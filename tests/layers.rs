//! Guards against a crate that grows crooked: a file that uses a floor above its own, unsafe code
//! outside its rooms or without a reason, files and functions too long to be seen at a glance, and
//! words the laws rule out. Each finding names file, line and rule.
//!
//! The rules are those of `docs/design.md`; every one of them is tried here on text that breaks it.

#![allow(clippy::unwrap_used)]

#[path = "layers/floors.rs"]
mod floors;
#[path = "layers/rules.rs"]
mod rules;
#[path = "layers/source.rs"]
mod source;

use rules::Finding;
use source::{Function, Source};
use std::path::{Path, PathBuf};

/// Folders whose Rust files all rules for files apply to.
const FOLDERS: &[&str] = &["src", "tests", "examples", "benches", "fuzz", "python"];
/// Folders whose other sources are held to columns and characters.
const OTHERS: &[&str] = &["kernels", "tools", ".ci", "python"];
/// Folders of files that nobody writes by hand.
const MADE: &[&str] = &["target", "corpus", "artifacts", "__pycache__"];

fn files(folder: &str, wanted: fn(&str) -> bool) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found: Vec<PathBuf> = Vec::new();
    let mut folders = vec![root.join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for path in entries.map(|entry| entry.unwrap().path()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !name.starts_with('.') && !MADE.contains(&name.as_str()) {
                folders.push(path);
            } else if path.is_file() && wanted(&name) {
                found.push(path);
            }
        }
    }
    found.sort();
    let read = |path: &PathBuf| {
        let name = path.strip_prefix(root).unwrap().to_string_lossy().replace('\\', "/");
        Source::new(&name, &std::fs::read_to_string(path).unwrap())
    };
    found.iter().map(read).collect()
}

fn is_rust(name: &str) -> bool {
    name.ends_with(".rs")
}

/// The files of `src/`; those that only tests compile are marked so from end to end.
fn crate_sources() -> Vec<Source> {
    let mut sources = files("src", is_rust);
    assert!(sources.len() > 5, "src/ is not where this test looks for it");
    let mut tests = Vec::new();
    for source in &sources {
        let home = floors::module_of(&source.path);
        let home = if source.path == "src/lib.rs" { Vec::new() } else { home };
        tests.extend(
            source.test_files().into_iter().map(|name| [home.clone(), vec![name]].concat()),
        );
    }
    for source in &mut sources {
        if tests.contains(&floors::module_of(&source.path)) {
            source.is_test.fill(true);
        }
    }
    sources
}

fn all_sources() -> Vec<Source> {
    FOLDERS.iter().flat_map(|folder| files(folder, is_rust)).collect()
}

#[track_caller]
fn none(findings: Vec<Finding>) {
    let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
    assert!(lines.is_empty(), "{} finding(s):\n{}", lines.len(), lines.join("\n"));
}

#[test]
fn a_file_uses_only_floors_below_its_own() {
    let sources = crate_sources();
    let root = sources.iter().find(|source| source.path == "src/lib.rs").unwrap();
    let others = sources.iter().filter(|source| source.path != "src/lib.rs");
    none(others.flat_map(|source| floors::check(source, root)).collect());
}

#[test]
fn a_file_and_a_function_are_seen_at_a_glance() {
    let other: fn(&str) -> bool =
        |name| name == "run" || [".cu", ".cuh", ".py", ".sh"].iter().any(|end| name.ends_with(end));
    let mut sources = all_sources();
    sources.extend(OTHERS.iter().flat_map(|folder| files(folder, other)));
    none(sources.iter().flat_map(rules::sizes).collect());

    let mut lines: Vec<usize> =
        crate_sources().iter().map(|source| source.raw.lines().count()).collect();
    lines.sort_unstable();
    let median = (lines[(lines.len() - 1) / 2] + lines[lines.len() / 2]) / 2;
    println!("src/: {} files, median {median} lines, longest {:?}", lines.len(), lines.last());
    assert!(median <= rules::FILE_LINES_MEDIAN_MAX, "median of src/ is {median} lines");
}

#[test]
fn unsafe_code_stays_in_its_rooms_and_says_why_it_is_sound() {
    let results: Vec<_> = all_sources().iter().map(rules::unsafe_notes).collect();
    println!("unsafe: {} places", results.iter().map(|(count, _)| count).sum::<usize>());
    none(results.into_iter().flat_map(|(_, findings)| findings).collect());
}

#[test]
fn a_file_opens_by_saying_what_it_is() {
    none(all_sources().iter().flat_map(rules::module_doc).collect());
}

#[test]
fn nothing_outside_tests_unwraps() {
    none(crate_sources().iter().flat_map(rules::panics).collect());
}

#[test]
fn h22_h65_m30_what_the_laws_rule_out_is_nowhere() {
    none(crate_sources().iter().flat_map(rules::banned).collect());
}

fn found(check: fn(&Source) -> Vec<Finding>, path: &str, text: &str) -> Vec<String> {
    check(&Source::new(path, text)).iter().map(Finding::to_string).collect()
}

#[test]
fn the_scanner_is_not_fooled_by_comments_and_literals() {
    let text = r####"
fn a<'a>(x: &'a str) -> char { let _ = ("} fn b() {", 'x', '{', '\'', r#"} " }"#, b"}"); '}' }
/* fn no() {} /* nested } */ } */
fn declared(n: [u8; 4]);
fn r#type() { // }
}
"####;
    let source = Source::new("src/a.rs", text);
    let code: String = source.code.iter().collect();
    assert_eq!(code.lines().count(), text.lines().count());
    assert!(
        !code.contains("nested") && !code.contains("fn b") && code.contains("&'a str"),
        "{code}"
    );
    let name = |name: &str, first, last| Function { name: name.to_string(), first, last };
    assert_eq!(source.functions(), [name("a", 2, 2), name("r", 5, 6)]);
}

#[test]
fn a_file_too_long_too_wide_or_not_ascii_is_found() {
    let long = |lines: usize| format!("fn f() {{\n{}}}\n", "    a();\n".repeat(lines - 2));
    assert!(found(rules::sizes, "src/a.rs", &long(70)).is_empty());
    let one = found(rules::sizes, "src/a.rs", &long(71));
    assert_eq!(one, ["src/a.rs:1: [function length] `f` has 71, 70 allowed"]);
    assert_eq!(found(rules::sizes, "src/a.rs", &"\n".repeat(501)).len(), 1);
    assert_eq!(found(rules::sizes, "src/a.rs", &format!("// {}", "x".repeat(98))).len(), 1);
    assert_eq!(found(rules::sizes, "src/a.rs", "// caf\u{e9}\n").len(), 1);
}

#[test]
fn unsafe_code_out_of_its_room_or_without_a_reason_is_found() {
    let notes: fn(&Source) -> Vec<Finding> = |source| rules::unsafe_notes(source).1;
    let noted = "// SAFETY: the range is ours.\nlet a = unsafe { f() };\n";
    let broken = "// SAFETY: ours.\nlet a =\n    unsafe { f() };\n";
    let shared = "// SAFETY: ours.\nlet a = g(unsafe { f() }, unsafe { f() });\n";
    let item = "/// Does.\n///\n/// # Safety\n/// Never twice.\n#[inline]\npub unsafe fn f() {}\n";
    let arena = "src/pinned/arena.rs";
    for (path, text, count) in [
        (arena, noted, 0),
        (arena, broken, 0),
        (arena, item, 0),
        (arena, shared, 1),
        (arena, "let a = unsafe { f() };\n", 1),
        (arena, "// SAFETY: ours.\n\nlet a = unsafe { f() };\n", 1),
        (arena, "// SAFETY: ours.\nlet b = 1;\nlet a = unsafe { f() };\n", 1),
        (arena, "/// Does.\npub unsafe fn f() {}\n", 1),
        (arena, "impl A for B {\n    unsafe fn f() {}\n}\n", 0),
        (arena, "impl B {\n    unsafe fn f() {}\n}\n", 1),
        (arena, "unsafe impl Send for A {}\n", 1),
        (arena, "type F = unsafe extern \"C\" fn(u32);\n", 0),
        ("src/copy.rs", noted, 1),
        ("src/copy.rs", "/// # Safety\n/// Once.\nunsafe fn f();\n", 0),
        ("src/copy.rs", "let a = \"unsafe { }\"; // unsafe { }\n", 0),
        ("tests/a.rs", noted, 0),
    ] {
        assert_eq!(found(notes, path, text).len(), count, "{path}: {text}");
    }
}

#[test]
fn an_unwrap_a_banned_word_and_a_silent_file_are_found() {
    let tests_only = "#[cfg(test)]\nmod tests {\n    fn f() { a().unwrap() }\n}\n";
    assert!(found(rules::panics, "src/a.rs", tests_only).is_empty());
    let after = format!("{tests_only}fn g() {{ a().unwrap() }}\n");
    let one = found(rules::panics, "src/a.rs", &after);
    assert!(one.len() == 1 && one[0].starts_with("src/a.rs:5: [panics]"), "{one:?}");
    assert_eq!(found(rules::panics, "src/a.rs", "fn g() { a().expect(\"b\") }").len(), 1);
    assert!(
        found(rules::panics, "src/a.rs", "fn g() { a().unwrap_or(1) } // .unwrap()").is_empty()
    );

    let declared = Source::new("src/a.rs", "#[cfg(test)]\n#[path = \"x\"]\nmod tests;\nmod b;\n");
    assert_eq!(declared.test_files(), ["tests"]);

    assert_eq!(found(rules::banned, "src/a.rs", "let f = \"cuLaunchHostFunc\";").len(), 1);
    assert!(found(rules::banned, "src/a.rs", "// never cuLaunchHostFunc").is_empty());
    assert_eq!(found(rules::module_doc, "src/a.rs", "// a comment\n").len(), 1);
    assert!(found(rules::module_doc, "src/a.rs", "//! A file.\n").is_empty());
}
