//! What the stories' engines may do, and what their devices refuse.
//!
//! What it is not: a story.

use crate::support::options;
use lightering::backend::sim::{Fault, FaultPlan, Spot};
use lightering::{Bytes, Options};

pub(crate) fn bounds() -> Options {
    Options { trunk_bytes_max: Bytes::kib(1), prefetch_count_max: 0, note_uses: false, ..options() }
}

pub(crate) fn none_unreleased() -> Options {
    Options { unreleased_bytes_max: Bytes::ZERO, ..bounds() }
}

pub(crate) fn timed() -> Options {
    Options { time_stalls: true, ..bounds() }
}

pub(crate) fn one_transfer() -> Options {
    Options { transfers_max: 1, ..bounds() }
}

pub(crate) fn one_ahead() -> Options {
    Options { prefetch_count_max: 1, ..bounds() }
}

/// Nobody learns that a copy is done.
pub(crate) fn no_answers() -> FaultPlan {
    (1..99).fold(FaultPlan::default(), |plan, nth| plan.at(Spot::Query, nth, Fault::Reject(900)))
}

/// Two trunks go out, one comes in, the next is refused.
pub(crate) fn fourth_copy_fails() -> FaultPlan {
    FaultPlan::default().at(Spot::Copy, 4, Fault::Refuse)
}
