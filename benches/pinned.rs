//! What a block costs: lent and given back behind an event in one size, by one thread and by
//! several, and replaced at random among 65,000. Beside it stand the system's allocator, and an
//! allocator of bare offsets that keeps no owners, events, budgets or statistics.
//!
//! `cargo bench --bench pinned`
#![allow(clippy::unwrap_used, missing_docs)]

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use lightering::backend::{Fence, Pinner};
use lightering::pinned::{Block, Budget, Client, PinnedPool, PoolOptions};
use lightering::{Bytes, EventId, Key, Name, PinnedPtr, Result};
use offset_allocator::Allocator;
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// Registers nothing: these benches measure the pool's books, not a driver.
#[derive(Debug)]
struct Free;

impl Pinner for Free {
    unsafe fn register(&self, at: NonNull<u8>, _len: Bytes) -> Result<PinnedPtr> {
        Ok(PinnedPtr(at.as_ptr() as u64))
    }

    fn unregister(&self, _at: PinnedPtr) -> Result<()> {
        Ok(())
    }

    fn registration_max(&self) -> Bytes {
        Bytes::MAX
    }
}

impl Fence for Free {
    fn done(&self, _event: EventId) -> Result<bool> {
        Ok(true)
    }
}

const LIVE: usize = 65_000;

/// A pool with `reserved` bytes, and a client of it.
fn client(reserved: Bytes) -> (PinnedPool, Client) {
    let options = PoolOptions { budget: Budget::Bytes(Bytes::gib(4)), ..PoolOptions::default() };
    let pool = PinnedPool::new(Arc::new(Free), options).unwrap();
    pool.reserve(reserved).unwrap();
    let client = pool.client(Arc::new(Free), Bytes::MAX).unwrap();
    (pool, client)
}

/// Lengths drawn evenly over the doublings from 4 KiB to 64 KiB, and slots drawn evenly.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn len(&mut self) -> u64 {
        let at = (self.roll() >> 11) as f64 / (1u64 << 53) as f64;
        (12.0 + 4.0 * at).exp2() as u64
    }

    fn slot(&mut self) -> usize {
        (self.roll() % LIVE as u64) as usize
    }
}

/// One block out and back, with one event that is done when it is asked about.
fn turn(client: &mut Client, name: Name, event: EventId) {
    let lent = client.lend(black_box(Bytes::mib(16)), name).unwrap();
    client.give_back(black_box(lent.block), Some(event)).unwrap();
    let mut done = 0;
    client.settle(&mut |_| Ok(true), &mut |_| done += 1).unwrap();
    assert_eq!(done, 1);
}

fn event(index: u32) -> EventId {
    EventId(Key { owner: 1, index, generation: 0 })
}

fn repeat(c: &mut Criterion) {
    let (pool, mut client) = client(Bytes::mib(64));
    let name = Name::new("layer.0.input");
    c.bench_function("pinned/lend/repeat", |b| b.iter(|| turn(&mut client, name, event(0))));
    c.bench_function("pinned/lend/stats", |b| b.iter(|| black_box(pool.stats())));
    c.bench_function("malloc/repeat", |b| {
        b.iter(|| drop(black_box(Vec::<u8>::with_capacity(black_box(16 << 20)))));
    });
}

/// The time in which each of so many threads, with a client of its own, does `rounds` turns.
fn by_threads(pool: &PinnedPool, threads: u32, rounds: u64) -> Duration {
    let barrier = Barrier::new(threads as usize);
    let longest = std::thread::scope(|scope| {
        let work = |owner: u32| {
            let mut client = pool.client(Arc::new(Free), Bytes::MAX).unwrap();
            let name = Name::new("layer.0.input");
            barrier.wait();
            let start = Instant::now();
            (0..rounds).for_each(|_| turn(&mut client, name, event(owner)));
            start.elapsed()
        };
        let handles: Vec<_> = (0..threads).map(|owner| scope.spawn(move || work(owner))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).max()
    });
    longest.unwrap()
}

fn threads(c: &mut Criterion) {
    let (pool, _client) = client(Bytes::mib(64));
    for threads in [1, 2, 4] {
        c.bench_function(&format!("pinned/lend/threads_{threads}"), |b| {
            b.iter_custom(|rounds| by_threads(&pool, threads, rounds));
        });
    }
}

/// A pool of which 65,000 blocks are lent, of random sizes.
struct Crowd {
    client: Client,
    live: Vec<Option<Block>>,
}

impl Crowd {
    fn new(dice: &mut Dice) -> Crowd {
        let (_, mut client) = client(Bytes::gib(2));
        let name = Name::new("layer.0.input");
        let lend = |_| Some(client.lend(Bytes(dice.len()), name).unwrap().block);
        let live = (0..LIVE).map(lend).collect();
        Crowd { client, live }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for block in self.live.drain(..).flatten() {
            self.client.give_back(block, None).unwrap();
        }
    }
}

fn pages(len: u64) -> u32 {
    len.div_ceil(4096) as u32
}

fn churn(c: &mut Criterion) {
    let name = Name::new("layer.0.input");
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    // Made when first needed: a filter may leave this bench out.
    let mut crowd = None;
    c.bench_function("pinned/lend/churn_65k", |b| {
        let Crowd { client, live } = crowd.get_or_insert_with(|| Crowd::new(&mut dice));
        b.iter_batched(
            || (dice.slot(), dice.len()),
            |(slot, len)| {
                client.give_back(live[slot].take().unwrap(), None).unwrap();
                live[slot] = Some(client.lend(Bytes(len), name).unwrap().block);
            },
            BatchSize::SmallInput,
        );
    });
    drop(crowd);
    let mut offsets = None;
    c.bench_function("offsets/churn_65k", |b| {
        let (allocator, live) = offsets.get_or_insert_with(|| {
            // In pages, as it counts in 32 bits.
            let mut allocator: Allocator = Allocator::with_max_allocs(1 << 19, 4 * LIVE as u32);
            let mut one = || allocator.allocate(pages(dice.len())).unwrap();
            let live: Vec<_> = (0..LIVE).map(|_| one()).collect();
            (allocator, live)
        });
        b.iter_batched(
            || (dice.slot(), dice.len()),
            |(slot, len)| {
                allocator.free(live[slot]);
                live[slot] = allocator.allocate(pages(len)).unwrap();
            },
            BatchSize::SmallInput,
        );
    });
    drop(offsets);
    let mut heap: Option<Vec<Vec<u8>>> = None;
    c.bench_function("malloc/churn_65k", |b| {
        let fill = || (0..LIVE).map(|_| Vec::with_capacity(dice.len() as usize)).collect();
        let live = heap.get_or_insert_with(fill);
        b.iter_batched(
            || (dice.slot(), dice.len()),
            |(slot, len)| {
                live[slot] = Vec::new();
                live[slot] = black_box(Vec::with_capacity(len as usize));
            },
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(benches, repeat, threads, churn);
criterion_main!(benches);
