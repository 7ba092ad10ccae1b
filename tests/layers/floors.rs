//! Who may use whom: the picture of `docs/design.md`, section 1, as a table.
//!
//! What it is not: a check of visibility; the compiler does that.
//!
//! Invariant: a path in a file leads to a floor below the file's own, to the file's own room, or
//! is one of the exceptions named here with its reason. Code that only tests compile is free.
//!
//! ```text
//!   src/backend/cuda/order.rs --> room backend::cuda, floor 1
//!   use crate::unit::Bytes;   --> room unit, floor 0             below: fine
//!   use crate::pinned::Block; --> room pinned, floor 3           above: a finding
//! ```
//!
//! The test `layers` uses it.

use crate::rules::Finding;
use crate::source::{Source, find, ident, is_ident, skip_space};

/// Rooms and their floors. A file belongs to the longest of these that its path starts with.
const ROOMS: &[(&str, u32)] = &[
    ("error", 0),
    ("unit", 0),
    ("trace", 0),
    ("backend", 1),
    ("backend::open", 1),
    ("backend::ranges", 1),
    ("backend::traced", 1),
    ("backend::sim", 1),
    ("backend::cuda", 1),
    ("hazard", 1),
    ("stream", 2),
    ("pinned", 3),
    ("handles", 3),
    ("copy", 4),
    ("checksum", 5),
    ("pack", 5),
    ("disk", 5),
    ("storage", 6),
    ("policy", 7),
    ("prefetch", 7),
    ("engine", 8),
    ("adapter", 9),
    ("ffi", 9),
];

/// Uses within one floor that are right, and why.
const SIDEWAYS: &[(&str, &str, &str)] = &[
    ("error", "unit", "an error names the bytes and the storage it is about"),
    ("unit", "error", "a checked word is refused with an error"),
    ("trace", "error", "a record keeps the kind of a failure"),
    ("trace", "unit", "a record is made of the words everyone shares"),
    ("backend::open", "backend", "it gives out the seam's trait"),
    ("backend::open", "backend::cuda", "it is the one place where a name in text picks a backend"),
    ("backend::open", "backend::sim", "it is the one place where a name in text picks a backend"),
    (
        "backend::ranges",
        "backend::cuda",
        "the library it calls is loaded there, where unsafe may be",
    ),
    ("backend::traced", "backend", "it implements the seam's trait, around another backend"),
    ("backend::sim", "backend", "it implements the seam's trait"),
    ("backend::cuda", "backend", "it implements the seam's trait"),
];

/// Every path of the file that leads where it may not.
pub(crate) fn check(source: &Source, root: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    let home = module_of(&source.path);
    let Some((room, floor)) = room_of(&home) else {
        let what = format!("module `{}` has no floor; add it to the picture", home.join("::"));
        return vec![Finding::new(source, 1, "floors", what)];
    };
    for (at, path) in paths(source) {
        if source.in_test(at) {
            continue;
        }
        let path = through_root(path, root);
        let line = source.line(at);
        match room_of(&path) {
            Some((target, below)) if may_use((room, floor), (target, below)) => {}
            Some((target, other)) => {
                let how = if other > floor { "above" } else { "beside" };
                let what =
                    format!("{room} (floor {floor}) uses {target} (floor {other}), {how} it");
                findings.push(Finding::new(source, line, "floors", what));
            }
            None => {
                let what = format!("`crate::{}` leads to no room known", path.join("::"));
                findings.push(Finding::new(source, line, "floors", what));
            }
        }
    }
    findings
}

fn may_use((room, floor): (&str, u32), (target, below): (&str, u32)) -> bool {
    let excepted = || SIDEWAYS.iter().any(|(from, to, _)| (*from, *to) == (room, target));
    below < floor || room == target || (below == floor && excepted())
}

fn room_of(path: &[String]) -> Option<(&'static str, u32)> {
    let path = path.join("::");
    let holds = |room: &str| path == room || path.starts_with(&format!("{room}::"));
    ROOMS.iter().filter(|(room, _)| holds(room)).max_by_key(|(room, _)| room.len()).copied()
}

/// `src/unit/key.rs` is module `unit::key`.
pub(crate) fn module_of(path: &str) -> Vec<String> {
    let path = path.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    path.split('/').map(str::to_string).collect()
}

/// A path that starts with a name which the crate's root re-exports leads to where it came from.
fn through_root(path: Vec<String>, root: &Source) -> Vec<String> {
    if path.first().is_none_or(|name| room_of(std::slice::from_ref(name)).is_some()) {
        return path;
    }
    for at in root.words("use") {
        for origin in expand(&root.code, skip_space(&root.code, at + 3)).0 {
            if origin.last() == path.first() && room_of(&origin).is_some() {
                return origin;
            }
        }
    }
    path
}

/// Every path that starts with `crate`, `super` or `self`, from the crate's root on.
fn paths(source: &Source) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    for head in ["crate", "super", "self"] {
        for at in find(&source.code, &format!("{head}::")) {
            let before = if at == 0 { ' ' } else { source.code[at - 1] };
            if is_ident(before) || before == ':' {
                continue;
            }
            for path in expand(&source.code, at).0 {
                found.push((at, absolute(source, at, path)));
            }
        }
    }
    found.retain(|(_, path)| !path.is_empty());
    found
}

fn absolute(source: &Source, at: usize, path: Vec<String>) -> Vec<String> {
    let mut here = module_of(&source.path);
    let inner = source.inner_modules();
    here.extend(inner.into_iter().filter(|m| m.1 < at && at < m.2).map(|m| m.0));
    for name in path {
        match name.as_str() {
            "crate" => here.clear(),
            "super" => drop(here.pop()),
            "self" | "*" => {}
            _ => here.push(name),
        }
    }
    here
}

/// The paths of the use tree (or plain path) at `at`, and where it ends.
fn expand(code: &[char], at: usize) -> (Vec<Vec<String>>, usize) {
    let at = skip_space(code, at);
    if code.get(at) == Some(&'{') {
        return expand_list(code, at + 1);
    }
    let name = if code.get(at) == Some(&'*') { "*".to_string() } else { ident(code, at) };
    let end = at + name.chars().count();
    if name.is_empty() || !code[end..].starts_with(&[':', ':']) {
        return (vec![vec![name]], end);
    }
    let (tails, end) = expand(code, end + 2);
    let whole = |tail: Vec<String>| {
        let mut path = vec![name.clone()];
        path.extend(tail.into_iter().filter(|part| !part.is_empty()));
        path
    };
    (tails.into_iter().map(whole).collect(), end)
}

fn expand_list(code: &[char], mut at: usize) -> (Vec<Vec<String>>, usize) {
    let mut all = Vec::new();
    loop {
        at = skip_space(code, at);
        match code.get(at) {
            None => return (all, at),
            Some('}') => return (all, at + 1),
            Some(c) if is_ident(*c) || *c == '*' || *c == '{' => {
                let (paths, end) = expand(code, at);
                all.extend(paths);
                at = end;
                // `name as other`: the other name is no path.
                let word = skip_space(code, at);
                if ident(code, word) == "as" {
                    let other = skip_space(code, word + 2);
                    at = other + ident(code, other).chars().count();
                }
            }
            Some(_) => at += 1,
        }
    }
}

#[test]
fn a_use_tree_is_read_branch_by_branch() {
    let code: Vec<char> =
        "crate::{error::Result, unit::{Bytes, Key as K}, trace::*};".chars().collect();
    let flat: Vec<String> = expand(&code, 0).0.iter().map(|path| path.join("::")).collect();
    let expected =
        ["crate::error::Result", "crate::unit::Bytes", "crate::unit::Key", "crate::trace::*"];
    assert_eq!(flat, expected);
}

#[test]
fn a_use_of_a_floor_above_or_beside_is_found() {
    let root = Source::new("src/lib.rs", "pub use unit::{Bytes, Key};\npub use engine::Engine;\n");
    let found = |path: &str, text: &str| check(&Source::new(path, text), &root).len();
    for (path, text, count) in [
        ("src/copy.rs", "use crate::{error::Result, stream::Event, pinned::Block};", 0),
        ("src/copy.rs", "use crate::storage::Storage;", 1),
        ("src/copy.rs", "use super::storage::Storage;", 1),
        ("src/copy.rs", "use crate::{unit::Key,\n    engine::{Engine, Options}};", 2),
        ("src/copy.rs", "fn f() -> crate::Engine {}", 1),
        ("src/copy.rs", "fn f(b: crate::Bytes) {}", 0),
        ("src/copy.rs", "// use crate::engine::Engine;\nconst A: &str = \"crate::engine\";", 0),
        ("src/copy.rs", "#[cfg(test)]\nmod tests { use crate::engine::Engine; }", 0),
        ("src/copy.rs", "mod inner { use super::super::engine::Engine; }", 1),
        ("src/copy.rs", "use crate::nowhere::Thing;", 1),
        ("src/policy.rs", "use crate::prefetch::Window;", 1),
        ("src/hazard.rs", "use crate::backend::Backend;", 1),
        ("src/backend/cuda/order.rs", "use super::super::{About, kernel::Arg};", 0),
        ("src/backend/cuda/order.rs", "use super::driver::Driver;", 0),
        ("src/backend/cuda/order.rs", "use super::super::sim::Sim;", 1),
        ("src/backend/mod.rs", "use self::sim::Sim;", 1),
        ("src/backend/open.rs", "use super::{sim::Sim, cuda::Cuda, Backend};", 0),
        ("src/backend/traced.rs", "use super::open::Opened;", 1),
        ("src/unnamed.rs", "", 1),
    ] {
        assert_eq!(found(path, text), count, "{path}: {text}");
    }
}

#[test]
fn every_exception_lies_within_one_floor_and_has_a_reason() {
    for (from, to, reason) in SIDEWAYS {
        let floor = |room: &str| ROOMS.iter().find(|(name, _)| *name == room).map(|r| r.1);
        assert!(floor(from).is_some() && floor(from) == floor(to), "{from} -> {to}");
        assert!(reason.len() > 10, "{from} -> {to}");
    }
}
