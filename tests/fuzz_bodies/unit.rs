//! The words of `unit` against models that are too plain to be wrong: keys against a map, ranges
//! against 128-bit arithmetic, sizes against exact products.
//!
//! What it is not: a generator. The bytes come from a fuzzer, a corpus, or a seed.
//!
//! Invariant: whatever the bytes, the crate answers as the model does and never panics.
//!
//! ```text
//!   first byte --> tables | ranges | sizes, on the rest
//! ```
//!
//! `fuzz/` and `tests/fuzz_replay.rs` run it.

use crate::input::Input;
use lightering::unit::Table;
use lightering::{Bytes, DevicePtr, DeviceRange, Key, Misuse};
use std::collections::HashMap;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.below(3) {
        0 => tables(&mut input),
        1 => ranges(&mut input),
        _ => sizes(input.0),
    }
}

/// Two tables, so that keys of one are tried on the other.
fn tables(input: &mut Input<'_>) {
    let len_max = input.below(6);
    let mut tables = [Table::new("left", len_max), Table::new("right", len_max)];
    let mut model: HashMap<Key, u64> = HashMap::new();
    let mut ever: Vec<Key> = Vec::new();
    while !input.is_empty() {
        let which = input.below(2);
        let owner = tables[which].owner();
        let action = input.below(3);
        if action == 0 {
            let value = input.number();
            let live = model.keys().filter(|key| key.owner == owner).count();
            let key = tables[which].insert(value);
            assert_eq!(key.is_none(), live == len_max, "full when, and only when, it is");
            if let Some(key) = key {
                assert!(!ever.contains(&key), "{key:?} names a second thing");
                ever.push(key);
                model.insert(key, value);
            }
        } else if !ever.is_empty() {
            let key = ever[input.below(ever.len())];
            let expected = match model.get(&key) {
                _ if key.owner != owner => Err(Some(Misuse::Foreign)),
                None => Err(Some(Misuse::Stale)),
                Some(value) => Ok(*value),
            };
            let got = tables[which].get(key, "fuzz").copied().map_err(|error| error.misuse());
            assert_eq!(got, expected);
            let got = tables[which].get_mut(key, "fuzz").copied().map_err(|error| error.misuse());
            assert_eq!(got, expected);
            if action == 1 {
                let got = tables[which].remove(key, "fuzz").map_err(|error| error.misuse());
                assert_eq!(got, expected);
                if got.is_ok() {
                    model.remove(&key);
                }
            }
        }
        let listed: HashMap<Key, u64> = tables
            .iter()
            .flat_map(|table| table.iter())
            .map(|(key, value)| (key, *value))
            .collect();
        assert_eq!(listed, model);
        assert_eq!(tables.iter().map(Table::len).sum::<usize>(), model.len());
    }
}

fn ranges(input: &mut Input<'_>) {
    let mut made = || -> Option<DeviceRange> {
        let (at, len) = (input.number(), input.number());
        let range = DeviceRange::new(DevicePtr(at), Bytes(len));
        let fits = u128::from(at) + u128::from(len) <= u128::from(u64::MAX);
        assert_eq!(range.is_ok(), fits, "{at} + {len}");
        range.ok()
    };
    let (Some(a), Some(b)) = (made(), made()) else { return };
    let (first, end) = (a.at().0.max(b.at().0), a.end().min(b.end()));
    assert_eq!(a.overlaps(b), first < end, "{a:?} {b:?}");
    assert_eq!(a.overlaps(b), b.overlaps(a));
    assert_eq!(a.contains(b), a.at() <= b.at() && b.end() <= a.end());
    let (offset, len) = (input.number(), input.number());
    let inside = u128::from(offset) + u128::from(len) <= u128::from(a.len().0);
    match a.part(Bytes(offset), Bytes(len)) {
        Ok(part) => {
            assert!(inside && a.contains(part) && part.len().0 == len);
            assert_eq!(part.at().0 - a.at().0, offset);
        }
        Err(error) => assert!(!inside && error.misuse() == Some(Misuse::OutOfRange)),
    }
}

fn sizes(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    let answer = text.parse::<Bytes>();
    let digits: String = text.trim().chars().take_while(char::is_ascii_digit).collect();
    let unit = text.trim()[digits.len()..].trim().to_ascii_lowercase();
    let scale: Option<u128> = match unit.as_str() {
        "" | "b" => Some(1),
        "k" | "kib" => Some(1 << 10),
        "m" | "mib" => Some(1 << 20),
        "g" | "gib" => Some(1 << 30),
        "t" | "tib" => Some(1 << 40),
        "kb" => Some(1_000),
        "mb" => Some(1_000_000),
        "gb" => Some(1_000_000_000),
        "tb" => Some(1_000_000_000_000),
        _ => None,
    };
    if let (Some(scale), Ok(whole)) = (scale, digits.parse::<u64>()) {
        let exact = u128::from(whole) * scale;
        match answer {
            Ok(bytes) => assert_eq!(u128::from(bytes.0), exact, "{text:?}"),
            Err(error) => {
                assert!(exact > u128::from(u64::MAX), "{text:?}: {error}");
                assert_eq!(error.misuse(), Some(Misuse::TooLarge));
            }
        }
    } else if let Ok(bytes) = answer {
        // A fraction, or digits that start with zeros past 64 bits' worth.
        assert!(text.contains('.') || digits.starts_with('0'), "{text:?} is {bytes}");
    }
    if let Ok(bytes) = text.parse::<Bytes>() {
        assert_eq!(bytes.0.to_string().parse::<Bytes>().ok(), Some(bytes));
    }
}
