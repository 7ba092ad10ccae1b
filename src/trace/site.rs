//! The eight edges of order, and the places in the engine that keep them.
//!
//! What it is not: the checker. It says where the engine waits or asks, and why; whether that is
//! enough is for [`crate::hazard`] to say.
//!
//! Invariant: every wait and every question of the engine names a site, and every site keeps one
//! edge. A site is a purpose, not a line: several places name it that wait for the same reason, as
//! `evict` and `gather` do for a producer.
//!
//! ```text
//!   wait(stream, event, Site::ReaderWait)  ->  Edge::E6  ->  a directed test that breaks it
//! ```
//!
//! Everyone may use it, by way of [`crate::trace`].

/// The eight edges of order; the card is in `docs/design.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Edge {
    /// Producer finished, before the copy-out starts.
    E1,
    /// Copy-out finished, before the device bytes are freed, resized or written.
    E2,
    /// Copy-out finished, before the host or a disk reads the block.
    E3,
    /// Copy-out finished, before a copy-in from the same block.
    E4,
    /// Last old reader finished, before a copy-in overwrites the range.
    E5,
    /// Copy-in finished, before the reader starts.
    E6,
    /// Any copy on a block finished, before the block is lent again or unpinned.
    E7,
    /// The event asked about is that event: right device, right recording, recorded at all.
    E8,
}

macro_rules! sites {
    ($($(#[$doc:meta])* $site:ident => $edge:ident,)*) => {
        /// The places in the engine that wait for an event or ask about one. Each names the edge
        /// it keeps, so that a test can break just that place.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Site {
            $($(#[$doc])* $site,)*
            /// Outside the engine: tests, examples, a framework.
            Outside,
        }

        impl Site {
            /// Every site of the engine.
            pub const ALL: &'static [Site] = &[$(Site::$site,)*];

            /// The edge the site keeps; `None` outside the engine.
            pub fn edge(self) -> Option<Edge> {
                match self {
                    $(Site::$site => Some(Edge::$edge),)*
                    Site::Outside => None,
                }
            }
        }
    };
}

sites! {
    /// `evict`: the copy-out lane waits for the caller's stream.
    ProducerDone => E1,
    /// `evict`: the copy-out lane waits for other streams that used the storage.
    OtherUsersDone => E1,
    /// `releasable` over its bound, and `flush`: the caller's stream waits for the copy-out.
    ReleaseWait => E2,
    /// `releasable` under its bound: is the copy-out done?
    ReleaseQuery => E2,
    /// `releasable` with several streams: are all of them past their last use?
    ReleaseFence => E2,
    /// Before bytes are unmapped, whose address stays: are the copies of them done?
    UnmapQuery => E2,
    /// The same: are all streams past their last use?
    UnmapFence => E2,
    /// The same, asked first: is there nothing left to do on any stream?
    UnmapIdle => E2,
    /// `acquire` for writing, of bytes that are still being copied out.
    LiveWriteWait => E2,
    /// `read_host`: is the copy-out done?
    HostReadQuery => E3,
    /// `refill` of bytes whose copy-out may be running.
    RefillAfterCopyOut => E4,
    /// `refill`: the copy-in lane waits for the caller's stream, on which the target was taken.
    TargetFree => E5,
    /// `acquire`: the reader's stream waits for the copy-in.
    ReaderWait => E6,
    /// A change of bytes whose copy-in may be running, by a stream that did not acquire them: as
    /// `ReaderWait`.
    CopyInBeforeWrite => E6,
    /// `evict` into a block whose last copy-in may be running.
    BlockReuseWait => E7,
    /// `refill` from a block that an earlier copy-in, on the other lane, may still read: a block is
    /// given back busy until its last copy, so that has to be the last one to end.
    EarlierCopyIn => E7,
    /// Is a returned block idle, so that others may have it?
    BlockIdleQuery => E7,
    /// Release of owned device bytes: the stream that frees waits for other users.
    FreeAfterUsers => E2,
    /// Release of owned device bytes that a copy-in may still be writing.
    FreeAfterCopyIn => E2,
    /// A copy ahead goes on, on the lane's next stream, behind what it did two turns before: with
    /// that it is behind all that its first trunk waited for.
    AheadTurn => E5,
    /// The end of a copy ahead waits for the turn before, on another of the lane's streams.
    AheadJoin => E6,
    /// The engine's own bookkeeping of copies in flight.
    TransferQuery => E7,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_site_names_its_edge() {
        for site in Site::ALL {
            assert!(site.edge().is_some(), "{site:?}");
        }
    }
}
