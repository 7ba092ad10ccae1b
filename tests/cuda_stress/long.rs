//! One long program that never waits where it need not, with kernels that hold its streams at
//! times, so that what runs too early has the time to do harm.

use crate::kernels::{ONE_THREAD, SPIN};
use crate::machine::Machine;
use crate::program::{Chance, Kind, Program, op};
use crate::side::Opener;
use crate::support::{options, small_pool};
use lightering::backend::{Arg, Backend};
use lightering::{Bytes, Options};
use std::time::Instant;

const LENS: &[u64] =
    &[1, 255, 256, 1000, 4096, 6000, 16_384, 65_536, 65_537, 100_000, 262_144, 1 << 20];

fn program(seed: u64, verify: bool) -> Program {
    let options = Options {
        keep_last_count: 1,
        prefetch_count_max: 3,
        prefetch_bytes_max: Bytes::mib(2),
        unreleased_bytes_max: Bytes::mib(1),
        trunk_bytes_max: Bytes::kib(64),
        transfers_max: 8,
        note_uses: false,
        verify,
        verify_slots_max: 64,
        ..options()
    };
    let lens = LENS.to_vec();
    let pool = small_pool(Bytes::mib(2));
    Program { seed, kind: Kind::Free, streams: 3, lens, pool, options, ops: Vec::new() }
}

/// Runs until that many records were checked; requires that no byte and no order was wrong.
pub(crate) fn run(open: &mut Opener, seed: u64, records: u64, verify: bool) {
    let start = Instant::now();
    let mut machine = Machine::new(open, &program(seed, verify));
    let mut chance = Chance::new(seed);
    let (mut ops, mut holds) = (0_u64, 0_u64);
    while machine.side.trace.lock().unwrap().seq < records {
        if chance.below(30) == 0 {
            let on = machine.side.streams[chance.below(3)].here;
            let nanoseconds = [Arg::U64(10_000 + chance.next() % 300_000)];
            machine.side.framework.launch(&SPIN, ONE_THREAD, &nanoseconds, on).unwrap();
            holds += 1;
        }
        machine.run(op(&mut chance));
        machine.log.clear();
        ops += 1;
        assert!(machine.side.wrong.is_empty(), "op {ops}: {}", machine.side.wrong.join("; "));
        if ops.is_multiple_of(1000) {
            let (hazards, words) = machine.side.hazards();
            assert_eq!(hazards, 0, "by op {ops}: {words}");
        }
    }
    let (stats, pool) = (machine.side.engine.stats(), machine.side.pool.stats());
    let checked = machine.side.trace.lock().unwrap().seq;
    let report = machine.finish();
    println!(
        "{checked} records of {ops} ops, {holds} streams held, in {:.1} s",
        start.elapsed().as_secs_f64()
    );
    println!("{stats:?}");
    println!("{pool}");
    println!("hazards {}, wrong reads {}", report.hazards, report.wrong.len());
    assert_eq!(report.hazards, 0, "{}", report.words);
    assert!(report.wrong.is_empty(), "{}", report.wrong.join("; "));
    assert!(stats.corrupt_count == 0 && (stats.verified_count > 50) == verify, "it compares");
    assert!(stats.evicted_count > 100 && stats.refilled_count > 50, "it moves something");
    assert!(stats.forwarded_count > 0 && stats.clean_bytes > 0, "and takes back, and goes clean");
}
