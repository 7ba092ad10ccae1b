//! A source file as the rules see it: without comments, without the insides of strings, with the
//! lines that only tests compile marked.
//!
//! What it is not: a parser. It reads what rustfmt writes, and needs braces to match.
//!
//! Invariant: every view has the file's lines and columns, so that a finding names the right place.
//!
//! ```text
//!   raw   let a = "b{"; // c        text  let a = "b{";          code  let a = "  ";
//! ```
//!
//! The rules of `layers` use it.

/// One file in its views.
pub(crate) struct Source {
    /// Path from the repository's root, with `/`.
    pub(crate) path: String,
    /// As it is on disk.
    pub(crate) raw: String,
    /// Comments blanked.
    pub(crate) text: Vec<char>,
    /// Comments and the insides of literals blanked.
    pub(crate) code: Vec<char>,
    /// For each line: is it compiled for tests only?
    pub(crate) is_test: Vec<bool>,
}

/// A function with a body, by its first and last line (from 1).
#[derive(Debug, PartialEq)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) first: usize,
    pub(crate) last: usize,
}

impl Source {
    pub(crate) fn new(path: &str, raw: &str) -> Source {
        let (text, code) = mask(raw);
        let lines = raw.lines().count();
        let mut source = Source {
            path: path.to_string(),
            raw: raw.to_string(),
            text,
            code,
            is_test: vec![!path.starts_with("src/"); lines + 2],
        };
        for (from, to) in source.test_items() {
            for line in source.line(from)..=source.line(to) {
                source.is_test[line] = true;
            }
        }
        source
    }

    /// The line (from 1) of a position in `text` or `code`.
    pub(crate) fn line(&self, at: usize) -> usize {
        1 + self.code[..at.min(self.code.len())].iter().filter(|c| **c == '\n').count()
    }

    /// Is this position compiled for tests only?
    pub(crate) fn in_test(&self, at: usize) -> bool {
        self.is_test[self.line(at)]
    }

    /// Positions in `code` where `word` stands as a word of its own.
    pub(crate) fn words(&self, word: &str) -> Vec<usize> {
        find(&self.code, word)
            .into_iter()
            .filter(|&at| {
                let before = at == 0 || !is_ident(self.code[at - 1]);
                let after = self.code.get(at + word.len()).is_none_or(|c| !is_ident(*c));
                before && after
            })
            .collect()
    }

    /// Modules written inside this file, as (name, start, end).
    pub(crate) fn inner_modules(&self) -> Vec<(String, usize, usize)> {
        let mut found = Vec::new();
        for at in self.words("mod") {
            let name = ident(&self.code, skip_space(&self.code, at + 3));
            let (end, body) = self.item_end(at);
            if let (false, Some(open)) = (name.is_empty(), body) {
                found.push((name, open, end));
            }
        }
        found
    }

    /// Names of the modules in files of their own that only tests compile.
    pub(crate) fn test_files(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (from, to) in self.test_items() {
            let item: String = self.code[from..=to].iter().collect();
            let declared = item.split("mod ").nth(1).and_then(|rest| rest.strip_suffix(';'));
            found.extend(declared.map(|name| name.trim().to_string()));
        }
        found
    }

    /// Every function that has a body.
    pub(crate) fn functions(&self) -> Vec<Function> {
        let mut found = Vec::new();
        for at in self.words("fn") {
            let name = ident(&self.code, skip_space(&self.code, at + 2));
            let (end, body) = self.item_end(at);
            if !name.is_empty() && body.is_some() {
                found.push(Function { name, first: self.line(at), last: self.line(end) });
            }
        }
        found
    }

    /// Does this position lie in an `impl` of a trait?
    pub(crate) fn in_trait_impl(&self, at: usize) -> bool {
        self.words("impl").into_iter().take_while(|from| *from < at).any(|from| {
            let (end, body) = self.item_end(from);
            body.is_some_and(|open| {
                let head: String = self.code[from..open].iter().collect();
                open < at && at < end && head.contains(" for ")
            })
        })
    }

    /// Where the item that starts at `at` ends, and where its body opens if it has one.
    pub(crate) fn item_end(&self, at: usize) -> (usize, Option<usize>) {
        let mut depth = 0_i32;
        for (i, c) in self.code.iter().enumerate().skip(at) {
            match c {
                '(' | '[' => depth += 1,
                ')' | ']' => depth -= 1,
                ';' if depth == 0 => return (i, None),
                '{' if depth == 0 => return (self.matching(i), Some(i)),
                _ => {}
            }
        }
        (self.code.len().saturating_sub(1), None)
    }

    fn matching(&self, open: usize) -> usize {
        let mut depth = 0_i32;
        for (i, c) in self.code.iter().enumerate().skip(open) {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return i;
            }
        }
        self.code.len() - 1
    }

    fn test_items(&self) -> Vec<(usize, usize)> {
        let attribute = "#[cfg(test)]";
        let starts = find(&self.code, attribute);
        starts.into_iter().map(|at| (at, self.item_end(at + attribute.len()).0)).collect()
    }
}

/// Positions of `needle`.
pub(crate) fn find(hay: &[char], needle: &str) -> Vec<usize> {
    let needle: Vec<char> = needle.chars().collect();
    let last = hay.len().saturating_sub(needle.len());
    (0..=last).filter(|&at| hay[at..].starts_with(&needle)).collect()
}

pub(crate) fn is_ident(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The identifier that starts at `at`, if any.
pub(crate) fn ident(code: &[char], at: usize) -> String {
    code[at.min(code.len())..].iter().take_while(|c| is_ident(**c)).collect()
}

/// The first position from `at` on that is not white space.
pub(crate) fn skip_space(code: &[char], at: usize) -> usize {
    (at..code.len()).find(|i| !code[*i].is_whitespace()).unwrap_or(code.len())
}

/// What a stretch of source is.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Code,
    Literal,
    Comment,
}

fn mask(raw: &str) -> (Vec<char>, Vec<char>) {
    let chars: Vec<char> = raw.chars().collect();
    let (mut text, mut code) = (chars.clone(), chars.clone());
    let mut at = 0;
    while at < chars.len() {
        let (part, end) = part_at(&chars, at);
        for i in at..end {
            let blank = if chars[i] == '\n' { '\n' } else { ' ' };
            if part == Part::Comment {
                text[i] = blank;
            }
            if part != Part::Code {
                code[i] = blank;
            }
        }
        at = end;
    }
    (text, code)
}

/// The part that starts at `at`, and where it ends.
fn part_at(chars: &[char], at: usize) -> (Part, usize) {
    let rest = &chars[at..];
    let fresh = at == 0 || !is_ident(chars[at - 1]);
    let to_line_end = || at + rest.iter().take_while(|c| **c != '\n').count();
    match rest {
        ['/', '/', ..] => (Part::Comment, to_line_end()),
        ['/', '*', ..] => (Part::Comment, block_comment_end(chars, at)),
        ['"', ..] => (Part::Literal, quoted_end(chars, at, '"')),
        ['\'', '\\', ..] | ['\'', _, '\'', ..] => (Part::Literal, quoted_end(chars, at, '\'')),
        ['r', '"' | '#', ..] if fresh => raw_string(chars, at, at + 1),
        ['b' | 'c', 'r', '"' | '#', ..] if fresh => raw_string(chars, at, at + 2),
        _ => (Part::Code, at + 1),
    }
}

fn block_comment_end(chars: &[char], at: usize) -> usize {
    let (mut i, mut depth) = (at, 0);
    while i < chars.len() {
        match chars[i..] {
            ['/', '*', ..] => (depth, i) = (depth + 1, i + 2),
            ['*', '/', ..] => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    i
}

fn quoted_end(chars: &[char], at: usize, quote: char) -> usize {
    let mut i = at + 1;
    while i < chars.len() && chars[i] != quote {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    (i + 1).min(chars.len())
}

/// A raw string whose hashes start at `from`; a raw name such as `r#type` is code.
fn raw_string(chars: &[char], at: usize, from: usize) -> (Part, usize) {
    let hashes = chars[from..].iter().take_while(|c| **c == '#').count();
    if chars.get(from + hashes) != Some(&'"') {
        return (Part::Code, at + 1);
    }
    let close: String = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let body = from + hashes + 1;
    let end = find(&chars[body..], &close).first().map(|i| body + i + close.len());
    (Part::Literal, end.unwrap_or(chars.len()))
}
