//! What two clients of a pool do to it, and a model that knows which copies are in flight where.
//!
//! What it is not: a program. Those who use it make the steps.
//!
//! Invariant: the model never asks the pool what it should know by itself.
//!
//! ```text
//!   Step -> World::step() -> pool, model    check(): budget, sums, events    end(): nothing left
//! ```
//!
//! `tests/pinned_programs.rs` and the fuzz target `pinned` use it.

use crate::pinned_support::{Hand, Paper, small, trunks};
use lightering::pinned::{Block, Budget, Client, Growth, PinnedPool, PoolOptions, State};
use lightering::{Bytes, EventId, Kind, Misuse, Name, PinnedRange};
use std::collections::HashSet;
use std::sync::Arc;

pub(crate) const BUDGET: u64 = 256 << 10;
const QUOTA: u64 = 160 << 10;
const PAGEABLE: u64 = 64 << 10;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Lend { who: usize, len: u64 },
    GiveBack { who: usize, nth: usize, busy: bool },
    GiveToOther { who: usize, nth: usize },
    Drop { who: usize, nth: usize },
    Finish { who: usize, nth: usize },
    Settle { who: usize },
    Reclaim { who: usize },
    Reserve { len: u64 },
    ReserveBehind { len: u64, cancelled: bool },
    Trim,
    Growth { allowed: bool },
    Refuse { next: usize },
}

/// One client, and what the model knows of its blocks and events.
struct Side {
    client: Client,
    hand: Arc<Hand>,
    events: u32,
    /// Blocks lent, with the event that their borrower's lane waits for.
    lent: Vec<(Block, Option<EventId>)>,
    /// Ranges with copies that nobody but the event knows the end of.
    flying: Vec<(Vec<PinnedRange>, EventId)>,
    /// Ranges of dropped blocks.
    lost: Vec<PinnedRange>,
    in_pool: HashSet<EventId>,
}

pub(crate) struct World {
    paper: Arc<Paper>,
    pool: PinnedPool,
    sides: [Side; 2],
}

fn meet(a: &[PinnedRange], b: &[PinnedRange]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.overlaps(*b)))
}

impl Side {
    fn new(pool: &PinnedPool, owner: u32) -> Side {
        let hand = Hand::new(owner);
        Side {
            client: pool.client(hand.clone(), Bytes(QUOTA)).unwrap(),
            hand,
            events: 0,
            lent: Vec::new(),
            flying: Vec::new(),
            lost: Vec::new(),
            in_pool: HashSet::new(),
        }
    }

    fn settle(&mut self) {
        let Side { client, hand, in_pool, .. } = self;
        let done = |event: EventId| {
            assert!(hand.is_done(event), "an event comes home before it is done");
            assert!(in_pool.remove(&event), "an event comes home once, to its owner");
        };
        let mut done = done;
        client.settle(&mut |event| Ok(hand.is_done(event)), &mut done).unwrap();
        let hand = &self.hand;
        self.flying.retain(|(_, event)| !hand.is_done(*event));
    }

    fn finish(&mut self, event: EventId) {
        self.hand.finish(event);
        self.flying.retain(|(_, other)| *other != event);
    }

    fn give_back(&mut self, nth: usize, busy: bool) {
        let (block, after) = self.lent.swap_remove(nth);
        if !busy {
            // Idle means that all copies are done, the one waited for among them.
            after.into_iter().for_each(|event| self.finish(event));
            return self.client.give_back(block, None).unwrap();
        }
        self.events += 1;
        let event = self.hand.event(self.events);
        let ranges = trunks(&block);
        // The new copy runs behind the old one.
        self.flying.retain(|(_, old)| Some(*old) != after);
        self.flying.push((ranges, event));
        self.in_pool.insert(event);
        self.client.give_back(block, Some(event)).unwrap();
    }
}

impl World {
    /// With or without memory that is not page-locked.
    pub(crate) fn new(pageable: bool) -> World {
        let paper = Paper::new(Bytes::kib(24));
        paper.script.lock().unwrap().budget = Some(BUDGET);
        let options = PoolOptions {
            arena_bytes: Bytes::kib(32),
            arena_bytes_max: Bytes::kib(128),
            fence_calls_max: 3,
            settle_calls_max: 4,
            piece_bytes: Bytes::kib(8),
            pageable_bytes_max: if pageable { Bytes(PAGEABLE) } else { Bytes::ZERO },
            ..small(Bytes(BUDGET))
        };
        assert_eq!(options.budget, Budget::Bytes(Bytes(BUDGET)));
        let pool = PinnedPool::new(paper.clone(), options).unwrap();
        let sides = [Side::new(&pool, 1), Side::new(&pool, 2)];
        World { paper, pool, sides }
    }

    fn lend(&mut self, who: usize, len: u64) {
        let side = &mut self.sides[who];
        let lent = match side.client.lend(Bytes(len), Name::new("x")) {
            Ok(lent) => lent,
            Err(error) => {
                let is_allowed = match error.kind() {
                    Kind::OverBudget | Kind::OutOfMemory => len > 0,
                    Kind::Usage(Misuse::Empty) => len == 0,
                    Kind::Usage(Misuse::TooLarge) => len > BUDGET,
                    _ => false,
                };
                assert!(is_allowed, "{error}");
                return;
            }
        };
        let ranges = trunks(&lent.block);
        assert_eq!(ranges.iter().map(|range| range.len().0).sum::<u64>(), len);
        assert!(lent.block.room().0 - len <= (len / 8).max(4095), "waste");
        assert!(ranges[0].at().0.is_multiple_of(4096), "alignment");
        for range in &ranges {
            assert!(self.paper.covers(*range), "a trunk spans two registrations");
        }
        if let Some(event) = lent.after {
            assert!(side.in_pool.remove(&event), "an event comes home once, to its owner");
        }
        for (nth, side) in self.sides.iter().enumerate() {
            assert!(!meet(&ranges, &side.lost), "a dropped block was lent again");
            for (block, _) in &side.lent {
                assert!(!meet(&ranges, &trunks(block)), "bytes are with two borrowers");
            }
            for (flying, event) in &side.flying {
                if meet(&ranges, flying) && !side.hand.is_done(*event) {
                    assert_eq!(nth, who, "a busy block crossed to the other client");
                    assert_eq!(lent.after, Some(*event), "a busy block was lent without its event");
                }
            }
        }
        self.sides[who].lent.push((lent.block, lent.after));
    }

    pub(crate) fn step(&mut self, step: &Step) {
        let side = |who: usize| &self.sides[who];
        match *step {
            Step::Lend { who, len } => self.lend(who, len),
            Step::GiveBack { who, nth, busy } if nth < side(who).lent.len() => {
                self.sides[who].give_back(nth, busy);
            }
            Step::GiveToOther { who, nth } if nth < side(who).lent.len() => {
                let (block, after) = self.sides[who].lent.swap_remove(nth);
                let refused = self.sides[1 - who].client.give_back(block, None).unwrap_err();
                self.sides[who].lent.push((refused.block, after));
            }
            Step::Drop { who, nth } if nth < side(who).lent.len() => {
                let side = &mut self.sides[who];
                let (block, after) = side.lent.swap_remove(nth);
                side.lost.extend(trunks(&block));
                side.flying.retain(|(_, old)| Some(*old) != after);
            }
            Step::Finish { who, nth } if nth < side(who).flying.len() => {
                let event = side(who).flying[nth].1;
                self.sides[who].finish(event);
            }
            Step::Settle { who } => self.sides[who].settle(),
            Step::Reclaim { who } => {
                let side = &mut self.sides[who];
                side.client.reclaim_quarantined().unwrap();
                side.lost.clear();
            }
            Step::Reserve { len } => {
                let pinned = self.paper.pinned();
                match self.pool.reserve(Bytes(len)) {
                    Ok(more) => assert_eq!(self.paper.pinned(), pinned + more.0),
                    Err(_) => assert_eq!(self.paper.pinned(), pinned, "half a reserve is left"),
                }
            }
            Step::ReserveBehind { len, cancelled } => self.reserve_behind(len, cancelled),
            Step::Trim => drop(self.pool.trim()),
            Step::Growth { allowed } => {
                self.pool.set_growth(if allowed { Growth::Allowed } else { Growth::Closed });
            }
            Step::Refuse { next } => {
                let mut script = self.paper.script.lock().unwrap();
                let nth = script.registers + next;
                script.refuse.insert(nth);
            }
            _ => {}
        }
    }

    /// In the background, and over before anybody else does anything.
    fn reserve_behind(&mut self, len: u64, cancelled: bool) {
        let pinned = self.paper.pinned();
        let Ok(reservation) = self.pool.reserve_in_background(Bytes(len)) else {
            assert_eq!(self.paper.pinned(), pinned, "a refusal pins nothing");
            return;
        };
        if cancelled {
            reservation.cancel();
        }
        let ended = reservation.wait();
        let progress = reservation.progress();
        assert_eq!(self.paper.pinned(), pinned + progress.ready.0);
        match ended {
            Ok(ready) => assert_eq!(ready, progress.ready),
            Err(error) => assert_eq!(error.kind(), Kind::OutOfMemory, "{error}"),
        }
        assert!(cancelled || progress.state != State::Cancelled);
        assert_eq!(progress.ready == progress.asked, progress.state == State::Done);
    }

    pub(crate) fn check(&self) {
        self.pool.audit();
        let stats = self.pool.stats();
        assert_eq!(stats.pinned.0, self.paper.pinned(), "the driver and the pool count alike");
        assert!(stats.pinned.0 <= BUDGET, "the budget is exceeded");
        let sum = stats.lent + stats.free + stats.busy + stats.quarantined;
        assert_eq!(sum, stats.pinned + stats.pageable, "bytes are lost");
        assert!(stats.pageable.0 <= self.paper.pageable());
        assert!(self.paper.pageable() <= PAGEABLE, "too much is not page-locked");
        assert_eq!(stats.reserving, Bytes::ZERO);
        assert_eq!(stats.counts.grown_after_close, 0);
        let blocks = || self.sides.iter().flat_map(|side| &side.lent).map(|(block, _)| block);
        assert_eq!(stats.lent, blocks().map(Block::room).sum(), "what is lent");
        assert_eq!(stats.requested, blocks().map(Block::len).sum(), "what was asked for");
        for side in &self.sides {
            assert_eq!(side.client.events(), side.in_pool.len(), "events are lost");
            assert!(side.client.held().0 <= QUOTA);
        }
    }

    /// Everything comes back, and nothing is left.
    pub(crate) fn end(mut self) {
        for side in &mut self.sides {
            while !side.lent.is_empty() {
                side.give_back(0, true);
            }
            while let Some((_, event)) = side.flying.first() {
                let event = *event;
                side.finish(event);
            }
            for _ in 0..100 {
                side.settle();
            }
            side.client.reclaim_quarantined().unwrap();
            assert!(side.in_pool.is_empty() && side.client.events() == 0, "events are lost");
            assert_eq!(side.client.held(), Bytes::ZERO);
        }
        let known = self.paper.pinned() + self.paper.pageable();
        assert_eq!(self.pool.stats().pageable, Bytes::ZERO);
        assert_eq!(self.pool.report(9).rows, []);
        assert_eq!(self.pool.trim(), Bytes(known), "idle arenas are not given back");
        assert_eq!(self.paper.registrations(), 0, "something stays page-locked");
        self.pool.audit();
    }
}
