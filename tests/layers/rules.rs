//! The house rules that a file can be read for: sizes, notes on unsafe, banned words.
//!
//! What it is not: a linter's rival. What clippy and rustfmt check is left to them.
//!
//! Invariant: a finding names the file, the line and the rule, so that it can be mended unseen.
//!
//! ```text
//!   Source --> sizes | unsafe_notes | module_doc | panics | banned --> Finding
//! ```
//!
//! The test `layers` uses it.

use crate::source::{Source, find, ident, skip_space};
use std::fmt;

pub(crate) const FILE_LINES_MAX: usize = 500;
pub(crate) const FILE_LINES_MEDIAN_MAX: usize = 200;
pub(crate) const FUNCTION_LINES_MAX: usize = 70;
pub(crate) const COLUMNS_MAX: usize = 100;

/// Where unsafe code may live.
const UNSAFE_ROOMS: &[&str] = &[
    "src/backend/cuda/",
    "src/backend/sim/",
    "src/pinned/arena.rs",
    "src/pinned/arena/",
    "src/ffi/",
];

/// What no line of the crate may name, and why.
const BANNED: &[(&str, &str)] = &[
    ("cuLaunchHostFunc", "law 5: completion is learned by asking an event"),
    ("cuStreamAddCallback", "law 5: completion is learned by asking an event"),
    ("record_stream", "law 5: reuse is ordered by events, not by an allocator's guess"),
    ("WRITECOMBINED", "no gain in either direction, and the host reads such memory slowly"),
    ("SRC_ACCESS_ORDER_ANY", "the source may be read before the wait in front of the copy"),
];

/// One breach of a rule.
pub(crate) struct Finding {
    path: String,
    line: usize,
    rule: &'static str,
    what: String,
}

impl Finding {
    pub(crate) fn new(source: &Source, line: usize, rule: &'static str, what: String) -> Finding {
        Finding { path: source.path.clone(), line, rule, what }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: [{}] {}", self.path, self.line, self.rule, self.what)
    }
}

/// Lines, functions, columns, characters.
pub(crate) fn sizes(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut breach = |line, rule, what| findings.push(Finding::new(source, line, rule, what));
    let lines = source.raw.lines().count();
    if lines > FILE_LINES_MAX {
        breach(lines, "file length", format!("{lines} lines, {FILE_LINES_MAX} allowed"));
    }
    for (i, line) in source.raw.lines().enumerate() {
        let columns = line.chars().count();
        if columns > COLUMNS_MAX {
            breach(i + 1, "line length", format!("{columns} columns, {COLUMNS_MAX} allowed"));
        }
        if let Some(c) = line.chars().find(|c| !c.is_ascii() || (c.is_control() && *c != '\t')) {
            breach(i + 1, "ascii", format!("character {c:?}"));
        }
    }
    for function in source.functions() {
        let lines = function.last - function.first + 1;
        if lines > FUNCTION_LINES_MAX {
            let what = format!("`{}` has {lines}, {FUNCTION_LINES_MAX} allowed", function.name);
            breach(function.first, "function length", what);
        }
    }
    findings
}

/// The file opens by saying what it is, itself or with the front page.
pub(crate) fn module_doc(source: &Source) -> Vec<Finding> {
    let opens = ["//!", "#![doc = include_str!("].iter().any(|doc| source.raw.starts_with(doc));
    let what = || "the file does not open with `//!`".to_string();
    (!opens).then(|| Finding::new(source, 1, "module doc", what())).into_iter().collect()
}

/// `unwrap` and `expect` outside tests.
pub(crate) fn panics(source: &Source) -> Vec<Finding> {
    let calls = [".unwrap()", ".expect("].map(|call| (call, find(&source.code, call)));
    let all = calls.into_iter().flat_map(|(call, at)| at.into_iter().map(move |at| (call, at)));
    all.filter(|(_, at)| !source.in_test(*at))
        .map(|(call, at)| {
            let what =
                format!("`{call}` outside tests: return an error, or assert with a sentence");
            Finding::new(source, source.line(at), "panics", what)
        })
        .collect()
}

/// Words that the laws rule out; strings count, comments do not.
pub(crate) fn banned(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (word, why) in BANNED {
        for at in find(&source.text, word) {
            let what = format!("`{word}`: {why}");
            findings.push(Finding::new(source, source.line(at), "banned", what));
        }
    }
    findings
}

/// What the word `unsafe` stands in front of.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Unsafe {
    /// A block, an `impl`, an attribute or a foreign block: takes a `SAFETY` note.
    Claim,
    /// A function or trait: its doc has a `# Safety` section.
    Contract,
    /// A function without a body, in a trait: as above, and allowed in every room.
    Declaration,
    /// A function that a trait asks for: its contract is the trait's.
    Kept,
    /// The type of a function pointer: nothing is claimed.
    Type,
}

/// How often `unsafe` claims or demands something, and where a note or the room is wrong.
pub(crate) fn unsafe_notes(source: &Source) -> (usize, Vec<Finding>) {
    let mut findings = Vec::new();
    let mut count = 0;
    let mut notes_used = Vec::new();
    for at in source.words("unsafe") {
        let kind = unsafe_kind(source, at);
        if kind == Unsafe::Type {
            continue;
        }
        count += 1;
        let line = source.line(at);
        let in_room = UNSAFE_ROOMS.iter().any(|room| source.path.starts_with(room));
        if source.path.starts_with("src/") && !in_room && kind != Unsafe::Declaration {
            let what = format!("only {} may have it", UNSAFE_ROOMS.join(", "));
            findings.push(Finding::new(source, line, "unsafe room", what));
        }
        let (note_line, above) = comment_above(source, line);
        let claimed = above.contains("// SAFETY: ");
        let wrong = match kind {
            Unsafe::Claim if !claimed => "no `// SAFETY:` note directly above",
            Unsafe::Claim if notes_used.contains(&note_line) => "shares another one's note",
            Unsafe::Contract | Unsafe::Declaration
                if !claimed && !above.contains("/// # Safety") =>
            {
                "no `# Safety` section in its doc"
            }
            _ => "",
        };
        notes_used.push(note_line);
        if !wrong.is_empty() {
            findings.push(Finding::new(source, line, "unsafe note", wrong.to_string()));
        }
    }
    (count, findings)
}

fn unsafe_kind(source: &Source, at: usize) -> Unsafe {
    let code = &source.code;
    let mut next = skip_space(code, at + "unsafe".len());
    if ident(code, next) == "extern" {
        // The name of the calling convention is blanked.
        next = skip_space(code, next + "extern".len());
    }
    match ident(code, next).as_str() {
        "fn" if ident(code, skip_space(code, next + 2)).is_empty() => Unsafe::Type,
        "fn" if source.item_end(next).1.is_none() => Unsafe::Declaration,
        "fn" if source.in_trait_impl(at) => Unsafe::Kept,
        "fn" | "trait" => Unsafe::Contract,
        _ => Unsafe::Claim,
    }
}

/// The comment that stands directly above the statement or item of this line, with the line under
/// it.
fn comment_above(source: &Source, line: usize) -> (usize, String) {
    let lines: Vec<&str> = source.raw.lines().map(str::trim).collect();
    let mut top = line - 1;
    // Up over attributes, and over the lines before it of the same statement.
    while top > 0 {
        let above = lines[top - 1];
        let ends = above.is_empty() || above.ends_with([';', '{', '}', ',']);
        if above.starts_with("//") || (ends && !above.starts_with("#[")) {
            break;
        }
        top -= 1;
    }
    let is_comment = |line: &&&str| line.starts_with("//") || line.starts_with("#[");
    let block: Vec<&str> = lines[..top].iter().rev().take_while(is_comment).copied().collect();
    (top, block.into_iter().rev().collect::<Vec<_>>().join("\n"))
}
