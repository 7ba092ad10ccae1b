//! The text to learn, and the stretch of it that each step sees.
//!
//! What it is not: a tokenizer. A byte is a token.
//!
//! Invariant: a text has at least two bytes, so there is always one to guess from another.
//!
//! ```text
//!   file -> bytes, seen as a ring      step s: the T + 1 bytes from s T on
//! ```
//!
//! `main` and `trainer` use it.

use std::fs::File;
use std::io::Read;

/// The text shipped with the example; see examples/data/README.md.
const SHIPPED: &[u8] = include_bytes!("../data/alice.txt");
/// More is refused: the text is kept in memory.
const LEN_MAX: u64 = 1 << 30;

/// A text of at least two bytes.
#[derive(Debug)]
pub(crate) struct Text {
    bytes: Vec<u8>,
}

impl Text {
    /// Reads `path`, or takes the text shipped; the error is one line that names the file.
    pub(crate) fn open(path: Option<&str>) -> Result<Text, String> {
        let Some(path) = path else { return Ok(Text { bytes: SHIPPED.to_vec() }) };
        let unreadable = |error: std::io::Error| format!("--text {path}: {error}");
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(unreadable)?;
        file.take(LEN_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        match bytes.len() {
            0 => Err(format!("--text {path}: is empty")),
            1 => Err(format!("--text {path}: has one byte, so there is none to guess from it")),
            len if len as u64 > LEN_MAX => Err(format!("--text {path}: has more than 1 GiB")),
            _ => Ok(Text { bytes }),
        }
    }

    /// How many bytes it has.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Fills `to` with the stretch of step `step`, whose last byte the next step's begins with.
    pub(crate) fn stretch(&self, step: u64, to: &mut [u8]) {
        let len = self.bytes.len();
        let tokens = to.len() as u128 - 1;
        let start = (u128::from(step) * tokens % len as u128) as usize;
        for (to, byte) in
            to.iter_mut().zip(self.bytes[start..].iter().chain(self.bytes.iter().cycle()))
        {
            *to = *byte;
        }
    }

    /// Entropy of a byte drawn from the text, in nats: the loss of a model that knows how often
    /// each byte comes and nothing else.
    pub(crate) fn unigram_entropy(&self) -> f64 {
        let mut counts = [0u64; 256];
        for byte in &self.bytes {
            counts[usize::from(*byte)] += 1;
        }
        let share = |count: &u64| *count as f64 / self.bytes.len() as f64;
        -counts.iter().filter(|count| **count > 0).map(share).map(|p| p * p.ln()).sum::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_text_goes_round() {
        let text = Text { bytes: b"abc".to_vec() };
        let mut stretch = [0; 6];
        text.stretch(0, &mut stretch);
        assert_eq!(&stretch, b"abcabc");
        text.stretch(1, &mut stretch);
        assert_eq!(&stretch, b"cabcab", "the second step begins with the first one's last byte");
    }

    #[test]
    fn entropy_is_zero_for_one_byte_and_ln_2_for_two() {
        assert_eq!(Text { bytes: vec![7; 9] }.unigram_entropy(), 0.0);
        let two = Text { bytes: b"abab".to_vec() }.unigram_entropy();
        assert!((two - 2f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn a_text_that_cannot_be_learned_is_named() {
        let folder = std::env::temp_dir().join(format!("lightering-text-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name).to_str().unwrap().to_string();
        std::fs::write(path("empty"), "").unwrap();
        std::fs::write(path("one"), "x").unwrap();
        std::fs::write(path("two"), "xy").unwrap();
        for (name, cause) in [
            ("missing", "No such file"),
            ("", "Is a directory"),
            ("empty", "empty"),
            ("one", "one byte"),
        ] {
            let error = Text::open(Some(&path(name))).unwrap_err();
            assert!(error.contains(cause) && !error.contains('\n'), "{error}");
        }
        assert_eq!(Text::open(Some(&path("two"))).unwrap().len(), 2);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
