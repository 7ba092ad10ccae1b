//! Byte counts.
//!
//! What it is not: an address or a range.
//!
//! Invariant: plain arithmetic that leaves 64 bits is a bug and panics in tests; where a caller's
//! number may be that large, the checked and saturating forms are used.
//!
//! ```text
//!   "512MiB"  --parse-->  Bytes(536870912)  --Display-->  "512.00 MiB"
//! ```
//!
//! Everyone may use it, by way of [`crate::unit`].

use crate::error::{Error, Misuse, Result};
use std::fmt;

/// A number of bytes.
///
/// ```
/// use lightering::Bytes;
/// assert_eq!("512MiB".parse::<Bytes>().unwrap(), Bytes::mib(512));
/// assert_eq!(Bytes::mib(1536).to_string(), "1.50 GiB");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Bytes = Bytes(0);
    /// As many as 64 bits count: the way to say "no limit".
    pub const MAX: Bytes = Bytes(u64::MAX);

    /// `n` bytes.
    pub const fn new(n: u64) -> Bytes {
        Bytes(n)
    }

    /// `n` times 1,024 bytes; saturates.
    pub const fn kib(n: u64) -> Bytes {
        Bytes(n.saturating_mul(1 << 10))
    }

    /// `n` times 1,048,576 bytes; saturates.
    pub const fn mib(n: u64) -> Bytes {
        Bytes(n.saturating_mul(1 << 20))
    }

    /// `n` times 1,073,741,824 bytes; saturates.
    pub const fn gib(n: u64) -> Bytes {
        Bytes(n.saturating_mul(1 << 30))
    }

    /// The count as a plain number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Is it zero?
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// The sum, or `None` past 64 bits.
    pub const fn checked_add(self, other: Bytes) -> Option<Bytes> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Bytes(sum)),
            None => None,
        }
    }

    /// The sum, at most [`Bytes::MAX`].
    pub const fn saturating_add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }

    /// The difference, at least zero.
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// The count as a length of host memory.
    ///
    /// # Errors
    /// [`Misuse::TooLarge`] where it exceeds the address space.
    pub fn to_usize(self) -> Result<usize> {
        match isize::try_from(self.0) {
            Ok(n) => Ok(n as usize),
            Err(_) => Err(Error::usage(Misuse::TooLarge, "length").bytes(self)),
        }
    }
}

impl std::ops::Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0 + other.0)
    }
}

impl std::ops::AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        self.0 += other.0;
    }
}

impl std::ops::Sub for Bytes {
    type Output = Bytes;
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0 - other.0)
    }
}

impl std::ops::SubAssign for Bytes {
    fn sub_assign(&mut self, other: Bytes) {
        self.0 -= other.0;
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(all: I) -> Bytes {
        all.fold(Bytes::ZERO, |a, b| a + b)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1 << 10 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        write!(f, "{value:.2} {}", UNITS[unit])
    }
}

impl std::str::FromStr for Bytes {
    type Err = Error;

    /// Reads `4096`, `64KiB`, `512 MiB`, `1.5GiB`, `8GB` (decimal units mean powers of 1,000).
    fn from_str(text: &str) -> Result<Bytes> {
        let refuse =
            |misuse, why: &str| Error::usage(misuse, "size").detail(format!("{text:?} {why}"));
        let bad = || refuse(Misuse::BadSize, "is not a size");
        let large = || refuse(Misuse::TooLarge, "exceeds 64 bits");
        let text_trimmed = text.trim();
        let digits = text_trimmed
            .find(|c: char| !(c.is_ascii_digit() || c == '.'))
            .unwrap_or(text_trimmed.len());
        let (number, unit) = text_trimmed.split_at(digits);
        let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(bad()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(Bytes).ok_or_else(large);
        }
        match number.parse::<f64>() {
            Ok(part) if part * (scale as f64) < 9.0e18 => Ok(Bytes((part * scale as f64) as u64)),
            Ok(_) => Err(large()),
            Err(_) => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_in_binary_and_decimal_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64KiB", 64 << 10),
            (" 512 MiB ", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("8gb", 8_000_000_000),
        ] {
            assert_eq!(text.parse::<Bytes>().unwrap(), Bytes(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "1.2.3", "7 parsecs", "99999999999999999999", "1e30GiB"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }
}
