//! Names of storages, for errors and reports.
//!
//! What it is not: an identity. Two storages may have one name; a key tells them apart.
//!
//! Invariant: the bytes kept are whole characters, and nothing is allocated.
//!
//! ```text
//!   "model.layers.17.mlp.down_proj.weight"  -->  "model.layers.17.mlp.down_proj.w"  (31 bytes)
//! ```
//!
//! Everyone may use it, by way of [`crate::unit`].

use std::borrow::Cow;
use std::fmt;

/// A short name kept in place, so that naming a storage allocates nothing: at most 31 bytes of
/// UTF-8; a longer one is cut at a character's edge.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Name {
    len: u8,
    text: [u8; Name::LEN_MAX],
}

impl Name {
    /// The most bytes a name keeps.
    pub const LEN_MAX: usize = 31;

    /// The name, cut where it is too long.
    pub fn new(text: &str) -> Name {
        let mut len = text.len().min(Name::LEN_MAX);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        let mut name = Name { len: len as u8, text: [0; Name::LEN_MAX] };
        name.text[..len].copy_from_slice(&text.as_bytes()[..len]);
        name
    }

    /// How many words hold a name.
    pub(crate) const WORDS: usize = (Name::LEN_MAX + 1) / 8;

    /// The name as numbers, for whoever keeps it in atomic ones.
    pub(crate) fn to_words(self) -> [u64; Name::WORDS] {
        let mut bytes = [self.len; Name::LEN_MAX + 1];
        bytes[1..].copy_from_slice(&self.text);
        let word = |nth: usize| std::array::from_fn(|at| bytes[8 * nth + at]);
        std::array::from_fn(|nth| u64::from_ne_bytes(word(nth)))
    }

    /// The name that such numbers were made of.
    pub(crate) fn from_words(words: [u64; Name::WORDS]) -> Name {
        let byte = |at: usize| words[at / 8].to_ne_bytes()[at % 8];
        let len = byte(0).min(Name::LEN_MAX as u8);
        Name { len, text: std::array::from_fn(|at| byte(at + 1)) }
    }

    /// The text kept.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.text[..self.len as usize]).unwrap_or("")
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Name {
        Name::new(text)
    }
}

impl From<&String> for Name {
    fn from(text: &String) -> Name {
        Name::new(text)
    }
}

impl From<String> for Name {
    fn from(text: String) -> Name {
        Name::new(&text)
    }
}

impl From<Cow<'_, str>> for Name {
    fn from(text: Cow<'_, str>) -> Name {
        Name::new(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_being_kept_as_numbers() {
        for text in ["", "x", "layer.17.mlp.down_proj.weight.abc"] {
            let name = Name::new(text);
            assert_eq!(Name::from_words(name.to_words()), name);
        }
    }

    #[test]
    fn a_name_is_taken_from_text_however_it_is_held() {
        let text = format!("layer.{}", 7);
        let names: [Name; 4] =
            [text.as_str().into(), (&text).into(), text.clone().into(), Cow::from(&text).into()];
        assert_eq!(names, [Name::new("layer.7"); 4]);
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        let name = Name::new("layer.0123456789.0123456789.\u{e9}\u{e9}\u{e9}");
        assert!(name.as_str().len() <= Name::LEN_MAX && name.as_str().starts_with("layer.0"));
    }
}
