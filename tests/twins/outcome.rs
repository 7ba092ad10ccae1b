//! What a program is told, in words without addresses, handles or times: equal on equal devices.

use crate::side::Seen;
use lightering::policy::Kept;
use lightering::storage::Residency;
use lightering::{Bytes, Kind};

/// What the program was told.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    Failed(Kind),
    Done,
    Moving(u32),
    Clean(u32),
    Kept(u32, Kept),
    /// May be dropped.
    Named(u32),
    Wanted(u32, Bytes),
    Ready,
    NeedsRoom(Bytes),
    At(Residency),
    Seen(Seen),
}

/// What a run gave.
#[derive(Debug)]
pub(crate) struct Report {
    /// What the program was told, with the number of the op.
    pub(crate) log: Vec<(usize, Outcome)>,
    /// Bytes that were wrong, in words.
    pub(crate) wrong: Vec<String>,
    pub(crate) hazards: u64,
    /// The first hazards in words.
    pub(crate) words: String,
}
