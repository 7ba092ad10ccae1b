//! What a block costs: lent and given back again in one size, and replaced at random among 65,000;
//! the system's allocator does the same beside it.
//!
//! `cargo bench --bench pinned`
#![allow(clippy::unwrap_used, missing_docs)]

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use lightering::backend::{Fence, Pinner};
use lightering::pinned::{Block, Budget, Client, PinnedPool, PoolOptions};
use lightering::{Bytes, EventId, Name, PinnedPtr, Result};
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::Arc;

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

fn repeat(c: &mut Criterion) {
    let (_pool, mut client) = client(Bytes::mib(64));
    let name = Name::new("layer.0.input");
    c.bench_function("pinned/lend/repeat", |b| {
        b.iter(|| {
            let lent = client.lend(black_box(Bytes::mib(16)), name).unwrap();
            client.give_back(black_box(lent.block), None).unwrap();
        });
    });
    c.bench_function("malloc/repeat", |b| {
        b.iter(|| drop(black_box(Vec::<u8>::with_capacity(black_box(16 << 20)))));
    });
}

fn churn(c: &mut Criterion) {
    let (pool, mut client) = client(Bytes::gib(2));
    let name = Name::new("layer.0.input");
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let mut live: Vec<Option<Block>> = Vec::with_capacity(LIVE);
    for _ in 0..LIVE {
        live.push(Some(client.lend(Bytes(dice.len()), name).unwrap().block));
    }
    c.bench_function("pinned/lend/churn_65k", |b| {
        b.iter_batched(
            || (dice.slot(), dice.len()),
            |(slot, len)| {
                client.give_back(live[slot].take().unwrap(), None).unwrap();
                live[slot] = Some(client.lend(Bytes(len), name).unwrap().block);
            },
            BatchSize::SmallInput,
        );
    });
    println!("{}", pool.stats());
    for block in live.into_iter().flatten() {
        client.give_back(block, None).unwrap();
    }
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let mut live: Vec<Vec<u8>> = Vec::with_capacity(LIVE);
    for _ in 0..LIVE {
        live.push(Vec::with_capacity(dice.len() as usize));
    }
    c.bench_function("malloc/churn_65k", |b| {
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

criterion_group!(benches, repeat, churn);
criterion_main!(benches);
