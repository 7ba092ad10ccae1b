//! Many small and strided ranges gathered into one block and scattered again.
//!
//! The faults guarded against: a row that lands in another's place, a byte between rows that is
//! touched, a gather that overtakes its producer or a scatter its gather, rows that alias or leave
//! their allocation and are moved all the same, and a device without the kernels.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail")]

#[path = "emulator/mod.rs"]
mod emulator;
mod support;

#[path = "../examples/train/passing.rs"]
mod passing;

use emulator::Order;
use lightering::backend::kernel::HostArg;
use lightering::backend::sim::{Config, Random, Sim, World};
use lightering::backend::{
    About, Arg, Backend, Fence, Grid, HostArgs, Kernel, Memory, Pinner, Timing,
};
use lightering::pack::{self, ITEMS_MAX, Item, Layout, PACK, Strip, UNPACK};
use lightering::trace::{Access, Actor, Site, Use};
use lightering::{
    Budget, Bytes, DevicePtr, DeviceRange, Engine, Error, EventId, Kind, Misuse, Options,
    PinnedPool, PinnedPtr, PinnedRange, PoolOptions, Result, StreamId,
};
use passing::pass_on;
use std::sync::Arc;
use support::Rig;
use support::broken::{Fault, Plan};

fn range(at: u64, len: u64) -> DeviceRange {
    DeviceRange::new(DevicePtr(at), Bytes(len)).unwrap()
}

/// Strips of every kind over one allocation: whole rows, rows with gaps, an odd range, one byte.
fn strips(within: DeviceRange) -> Vec<Strip> {
    vec![
        Strip::rows(within, Bytes(0), Bytes(96), 5, Bytes(160)).unwrap(),
        Strip::rows(within, Bytes(96), Bytes(64), 4, Bytes(160)).unwrap(),
        Strip::whole(within.part(Bytes(1000), Bytes(333)).unwrap()).unwrap(),
        Strip::rows(within, Bytes(1400), Bytes(1), 1, Bytes(1)).unwrap(),
        // Broadcast: a hundred rows that are one.
        Strip::rows(within, Bytes(1408), Bytes(16), 100, Bytes(0)).unwrap(),
    ]
}
const WITHIN: Bytes = Bytes(1600);

#[test]
fn a_broadcast_range_moves_once_and_rows_lie_at_multiples_of_sixteen() {
    let strips = strips(range(4096, WITHIN.0));
    assert_eq!(strips[4].bytes(), Bytes(16));
    let mut layout = Layout::default();
    let len = layout.plan(&strips).unwrap();
    assert_eq!(layout.bytes(), Bytes(5 * 96 + 4 * 64 + 333 + 1 + 16));
    assert!(layout.items().iter().all(|item| item.offset % 16 == 0));
    let last = layout.items().last().unwrap();
    assert_eq!(len, Bytes(last.offset + 16));
    assert_eq!((layout.rows(), last.range), (12, range(4096 + 1408, 16)));
}

#[test]
fn rows_that_alias_wrap_or_leave_their_allocation_are_refused() {
    let within = range(4096, 1000);
    for (offset, row, rows, stride, misuse) in [
        (0, 0, 1, 0, Misuse::Empty),
        (0, 8, 0, 8, Misuse::Empty),
        (0, 16, 2, 15, Misuse::Overlap),
        (0, 16, u64::MAX, 1, Misuse::Overlap),
        (0, 1001, 1, 0, Misuse::OutOfRange),
        (993, 8, 1, 8, Misuse::OutOfRange),
        (0, 100, 11, 100, Misuse::OutOfRange),
        (0, 8, u64::MAX, 8, Misuse::OutOfRange),
        (8, 8, 3, u64::MAX / 2, Misuse::OutOfRange),
        (u64::MAX, 8, 1, 8, Misuse::OutOfRange),
    ] {
        let strip = Strip::rows(within, Bytes(offset), Bytes(row), rows, Bytes(stride));
        assert_eq!(strip.unwrap_err().misuse(), Some(misuse), "{offset} {row} {rows} {stride}");
    }
    let strip = |at, len| Strip::whole(within.part(Bytes(at), Bytes(len)).unwrap()).unwrap();
    let mut layout = Layout::default();
    assert_eq!(layout.plan(&[]).unwrap_err().misuse(), Some(Misuse::Empty));
    let twice = layout.plan(&[strip(0, 100), strip(200, 8), strip(99, 8)]).unwrap_err();
    assert_eq!(twice.misuse(), Some(Misuse::Overlap));
    let woven = Strip::rows(within, Bytes(0), Bytes(10), 10, Bytes(50)).unwrap();
    assert!(layout.plan(&[woven, strip(10, 40)]).is_ok(), "between the rows is not on them");
    let crossed = layout.plan(&[woven, strip(10, 41)]).unwrap_err();
    assert_eq!(crossed.misuse(), Some(Misuse::Overlap));
    let many = Strip::rows(range(0, 1 << 40), Bytes(0), Bytes(1), ITEMS_MAX as u64 + 1, Bytes(2));
    assert_eq!(layout.plan(&[many.unwrap()]).unwrap_err().misuse(), Some(Misuse::TooLarge));
    let long = Strip::whole(range(0, 1 << 40)).unwrap();
    assert_eq!(layout.plan(&[long]).unwrap_err().misuse(), Some(Misuse::TooLarge));
}

#[test]
fn items_are_cut_where_a_registration_ends() {
    let mut layout = Layout::default();
    let len = layout.plan(&strips(range(4096, WITHIN.0))).unwrap();
    let (mut cut, mut parts) = (Vec::new(), Vec::new());
    for piece in [16, 48, 100, 333, 4096] {
        let pinned: Vec<PinnedRange> = (0..len.0)
            .step_by(piece)
            .map(|at| {
                let room = Bytes((len.0 - at).min(piece as u64));
                PinnedRange::new(PinnedPtr((1 << 32) + 2 * at), room).unwrap()
            })
            .collect();
        layout.cut(&pinned, &mut cut, &mut parts).unwrap();
        let moved: Bytes = cut.iter().map(|item: &Item| item.range.len()).sum();
        assert_eq!(moved, layout.bytes(), "pieces of {piece}");
        for part in &parts {
            for item in &cut[part.first..part.first + part.count] {
                part.pinned.part(Bytes(item.offset), item.range.len()).unwrap();
            }
        }
        assert_eq!(parts.iter().map(|part| part.count).sum::<usize>(), cut.len());
    }
}

type Form<'a> = &'a dyn Fn(&Kernel, &mut HostArgs<'_>) -> lightering::Result<()>;

fn host(kernel: &Kernel, args: &mut HostArgs<'_>) -> lightering::Result<()> {
    (kernel.host.unwrap())(&Grid::row(1, 256), args)
}

/// CUDA's form takes no more than the three arguments that are passed.
fn emulated(kernel: &Kernel, args: &mut HostArgs<'_>) -> lightering::Result<()> {
    let block = match kernel.name == PACK.name {
        true => HostArg::Write(args.write::<u8>(1)?),
        false => HostArg::Read(args.read::<u8>(1)?),
    };
    let count = HostArg::Number(Arg::U64(args.u64(2)?));
    let mut passed = HostArgs::new(vec![HostArg::Read(args.read::<u8>(0)?), block, count]);
    emulator::run(kernel.name, &Grid::row(2, 256), &mut passed, Order::Descending)
}

/// A kernel's arguments: the table, the block, the count, and what it reaches.
fn given<'a>(
    table: &'a [u128],
    block: HostArg<'a>,
    items: impl Iterator<Item = HostArg<'a>>,
) -> HostArgs<'a> {
    let items: Vec<HostArg<'a>> = items.collect();
    let bytes = &bytemuck::cast_slice::<u128, u8>(table)[..24 * items.len()];
    let count = HostArg::Number(Arg::U64(items.len() as u64));
    HostArgs::new([HostArg::Read(bytes), block, count].into_iter().chain(items).collect())
}

/// The table of some items, at an address that every form takes.
fn table(items: &[Item]) -> Vec<u128> {
    let mut bytes = Vec::new();
    pack::table(items, &mut bytes);
    let mut words = vec![0u128; bytes.len().div_ceil(16)];
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(&bytes);
    words
}

/// The bytes of each item, in the items' order. They share none.
fn apart<'a>(mut rest: &'a mut [u8], items: &[Item], base: u64) -> Vec<&'a mut [u8]> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|index| items[*index].range.at());
    let mut parts: Vec<Option<&mut [u8]>> = items.iter().map(|_| None).collect();
    let mut at = base;
    for index in order {
        let range = items[index].range;
        let (_, behind) = rest.split_at_mut((range.at().0 - at) as usize);
        let (part, behind) = behind.split_at_mut(range.len().0 as usize);
        parts[index] = Some(part);
        (rest, at) = (behind, range.end());
    }
    parts.into_iter().flatten().collect()
}

/// What is left in the block by a pack of `device`, and in `back` by an unpack of that.
fn through(form: Form<'_>, device: &[u128], back: &mut [u128]) -> Vec<u8> {
    let base = device.as_ptr().expose_provenance() as u64;
    let mut layout = Layout::default();
    let len = layout.plan(&strips(range(base, WITHIN.0))).unwrap().0 as usize;
    let items = layout.items().to_vec();
    let mut block = vec![u128::from_ne_bytes([0xee; 16]); len.div_ceil(16) + 1];
    let bytes = bytemuck::cast_slice::<u128, u8>(device);
    let read = items.iter().map(|item| {
        let from = (item.range.at().0 - base) as usize;
        HostArg::Read(&bytes[from..from + item.range.len().0 as usize])
    });
    let to = HostArg::Write(bytemuck::cast_slice_mut(&mut block));
    form(&PACK, &mut given(&table(&items), to, read)).unwrap();
    let target = back.as_mut_ptr().expose_provenance() as u64;
    let moved: Vec<Item> = items
        .iter()
        .map(|item| {
            let range = range(item.range.at().0 - base + target, item.range.len().0);
            Item { range, ..*item }
        })
        .collect();
    let write = apart(bytemuck::cast_slice_mut(back), &moved, target);
    let from = HostArg::Read(bytemuck::cast_slice(&block));
    let write = write.into_iter().map(HostArg::Write);
    form(&UNPACK, &mut given(&table(&moved), from, write)).unwrap();
    bytemuck::cast_slice(&block).to_vec()
}

#[test]
fn both_forms_move_the_same_bytes_and_no_others() {
    let device: Vec<u128> =
        (0..100u128).map(|i| (i * 77 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_0c96)).collect();
    let mut results = Vec::new();
    let forms: &[Form<'_>] = if emulator::is_here() { &[&host, &emulated] } else { &[&host] };
    for form in forms {
        let mut back = vec![u128::from_ne_bytes([0xcc; 16]); 100];
        let packed = through(form, &device, &mut back);
        results.push((packed, back));
    }
    let (_, back) = &results[0];
    let (from, to) = (bytemuck::cast_slice::<_, u8>(&device), bytemuck::cast_slice::<_, u8>(back));
    let mut layout = Layout::default();
    layout.plan(&strips(range(0, WITHIN.0))).unwrap();
    let mut moved = vec![false; to.len()];
    for item in layout.items() {
        moved[item.range.at().0 as usize..item.range.end() as usize].fill(true);
    }
    for (at, is_moved) in moved.into_iter().enumerate() {
        assert_eq!(to[at], if is_moved { from[at] } else { 0xcc }, "byte {at}");
    }
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "CUDA's form differs");
}

#[test]
fn the_kernels_are_in_their_ptx() {
    for kernel in [&PACK, &UNPACK] {
        assert_eq!(emulator::parameters(kernel).as_deref(), Some("lll"));
    }
    let pinned = PinnedRange::new(PinnedPtr(64), Bytes(24)).unwrap();
    let mut args = Vec::new();
    let item = Item { range: range(4096, 8), offset: 0 };
    pack::args(pinned, Arg::Read(range(0, 16)), &[item], Access::Write, &mut args);
    assert_eq!(emulator::letters(&args), "lll");
}

const ROWS: u64 = 6;
const ROW: Bytes = Bytes(200);
const STRIDE: Bytes = Bytes(320);
const ALL: Bytes = Bytes(STRIDE.0 * ROWS);

fn rows(within: DeviceRange) -> Strip {
    Strip::rows(within, Bytes(64), ROW, ROWS, STRIDE).unwrap()
}

fn row(within: DeviceRange, nth: u64) -> DeviceRange {
    within.part(Bytes(64 + nth * STRIDE.0), ROW).unwrap()
}

/// Fills rows, gathers them, overwrites them, scatters them elsewhere, and checks each there.
fn round_trip(rig: &mut Rig, seed: u64) -> lightering::Result<()> {
    let on = rig.streams[0].engine;
    let source = rig.take(0, ALL)?;
    for nth in 0..ROWS {
        rig.fill(0, row(source, nth), seed + nth);
    }
    let mut batch = rig.engine.gather(&[rows(source)], on, "rows")?;
    rig.engine.gathered(&batch, on)?;
    for nth in 0..ROWS {
        rig.fill(0, row(source, nth), 1000);
    }
    rig.give(0, source.at());
    let target = rig.take(0, ALL)?;
    rig.fill(0, target, 77);
    rig.check(0, row(target, 0), u64::MAX, String::new());
    rig.wrong.lock().unwrap().clear();
    rig.engine.scatter(&mut batch, &[rows(target)], on)?;
    for nth in 0..ROWS {
        rig.check(0, row(target, nth), seed + nth, format!("row {nth}"));
    }
    rig.engine.discard(batch)
}

fn options() -> Options {
    // The framework notes its own uses: `fill` and `check` do.
    Options { note_uses: false, ..support::options() }
}

fn rig(pool: PoolOptions, options: Options, seed: u64) -> Rig {
    Rig::new(Config::adversary(seed), pool, options, 1)
}

fn right(mut rig: Rig) {
    rig.sim.sync().unwrap();
    let wrong = rig.wrong.lock().unwrap().clone();
    // The check that reads what the scatter overwrites is no check.
    let wrong: Vec<_> = wrong.into_iter().filter(|what| what.starts_with("row")).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    assert!(rig.hazards().is_empty(), "{:?}", rig.hazards());
    rig.assert_nothing_left();
}

#[test]
fn rows_come_back_from_a_block_under_every_order() {
    for seed in 0..60 {
        let mut rig = rig(support::quick_pool(Bytes::mib(1)), options(), seed);
        for round in 0..3 {
            round_trip(&mut rig, 10 * round).unwrap();
        }
        right(rig);
    }
}

#[test]
fn rows_come_back_without_kernels_and_across_registrations() {
    let small = PoolOptions {
        piece_bytes_max: Bytes::kib(4),
        arena_bytes: Bytes::kib(64),
        ..support::quick_pool(Bytes::mib(1))
    };
    for seed in 0..20 {
        for pack_blocks_max in [0, 4] {
            let bounds = Options { pack_blocks_max, ..options() };
            let mut rig = rig(small.clone(), bounds, seed);
            for round in 0..8 {
                round_trip(&mut rig, 10 * round).unwrap();
            }
            right(rig);
        }
    }
}

#[test]
fn a_device_that_cannot_load_the_kernels_copies_row_by_row() {
    let pool = support::quick_pool(Bytes::mib(1));
    let wrap = |device: Sim| -> Box<dyn Backend> { Box::new(NoKernels { inner: device }) };
    let mut rig = Rig::wrapped(Config::adversary(3), pool, options(), 1, wrap);
    for round in 0..3 {
        round_trip(&mut rig, 10 * round).unwrap();
    }
    let copies = rig.engine.stats().seam.copies_out;
    assert_eq!(copies, 3 * ROWS, "each row by itself");
    right(rig);
}

#[test]
fn what_is_wrong_with_a_batch_is_said_before_anything_is_enqueued() {
    let mut rig = rig(support::quick_pool(Bytes::mib(1)), options(), 1);
    let on = rig.streams[0].engine;
    let within = rig.take(0, ALL).unwrap();
    let strip = rows(within);
    let mut batch = rig.engine.gather(&[strip], on, "rows").unwrap();
    let before = rig.engine.stats().seam;
    for (strips, misuse) in [(&[][..], Misuse::Empty), (&[strip, strip], Misuse::Overlap)] {
        let refused = rig.engine.gather(strips, on, "x").unwrap_err();
        assert_eq!(refused.misuse(), Some(misuse));
    }
    let whole = Strip::whole(within).unwrap();
    let refused = rig.engine.scatter(&mut batch, &[whole], on).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::LengthMismatch));
    let stranger = rig.sim.create_stream().unwrap();
    let foreign = rig.engine.gather(&[strip], stranger, "x").unwrap_err();
    assert_eq!(foreign.misuse(), Some(Misuse::Foreign));
    assert_eq!(rig.engine.gathered(&batch, stranger).unwrap_err().misuse(), Some(Misuse::Foreign));
    let large = rig.take(0, Bytes::mib(2)).unwrap();
    let refused = rig.engine.gather(&[Strip::whole(large).unwrap()], on, "large").unwrap_err();
    assert_eq!(refused.kind(), Kind::OverBudget);
    let after = rig.engine.stats().seam;
    assert_eq!((after.launches, after.copies_in), (before.launches, before.copies_in));
    assert_eq!((after.records, after.waits), (before.records, before.waits));
    rig.engine.discard(batch).unwrap();
}

#[test]
fn a_batch_of_another_engine_is_refused_and_its_block_is_not_lost() {
    let [mut mine, mut other] = [1, 2].map(|seed| rig(PoolOptions::default(), options(), seed));
    let (here, there) = (mine.streams[0].engine, other.streams[0].engine);
    let strips = [&mut mine, &mut other].map(|rig| [rows(rig.take(0, ALL).unwrap())]);
    let mut batch = mine.engine.gather(&strips[0], here, "rows").unwrap();
    let refused = other.engine.scatter(&mut batch, &strips[1], there).unwrap_err();
    let dropped = other.engine.discard(batch).unwrap_err();
    assert_eq!([refused.misuse(), dropped.misuse()], [Some(Misuse::Foreign); 2], "{refused}");
    mine.assert_nothing_left();
    assert_eq!(other.engine.stats().seam.copies_in, 0, "nothing was enqueued");
}

/// Takes no kernel.
struct NoKernels {
    inner: Sim,
}

impl Backend for NoKernels {
    pass_on!(memory);

    fn launch(&mut self, _: &'static Kernel, _: Grid, _: &[Arg], _: StreamId) -> Result<()> {
        Err(Error::usage(Misuse::BadKernel, "launch"))
    }

    pass_on!(rest);
}

#[test]
fn no_site_of_a_batch_can_be_lost_unseen() {
    for site in [
        Site::ProducerDone,
        Site::ReleaseWait,
        Site::TargetFree,
        Site::RefillAfterCopyOut,
        Site::ReaderWait,
    ] {
        for fault in [Fault::DropWait, Fault::StaleEvent] {
            let shown = (0..200).any(|seed| {
                let config = Config::scheduled(Box::new(Random::new(seed)));
                let pool = support::quick_pool(Bytes::mib(1));
                let plan = Some(Plan { site, fault });
                let (mut rig, reach) = Rig::broken(config, pool, options(), 1, plan);
                overtaken(&mut rig);
                // A gather that was seen done, as its table is looked at, is waited for no more.
                reach.count() > 0 && !rig.hazards().is_empty()
            });
            assert!(shown, "{site:?} {fault:?} was lost unseen");
        }
    }
}

/// As `round_trip`; between gather and scatter nothing waits for the gather but the scatter.
fn overtaken(rig: &mut Rig) {
    let on = rig.streams[0].engine;
    round_trip(rig, 5).unwrap();
    let source = rig.take(0, ALL).unwrap();
    for nth in 0..ROWS {
        rig.fill(0, row(source, nth), nth);
    }
    let mut batch = rig.engine.gather(&[rows(source)], on, "rows").unwrap();
    let target = rig.take(0, ALL).unwrap();
    rig.engine.scatter(&mut batch, &[rows(target)], on).unwrap();
    for nth in 0..ROWS {
        rig.check(0, row(target, nth), nth, format!("row {nth}"));
    }
    rig.engine.discard(batch).unwrap();
}

/// Gathers rows of one pattern each and scatters them, all on whatever device this is.
fn patterns_come_back(mut here: Box<dyn Backend>, device: Box<dyn Backend>) -> Result<()> {
    use lightering::backend::pattern;
    let (count, len, stride) = (3000u64, 4096u64, 6144u64);
    let options = PoolOptions { budget: Budget::Bytes(Bytes::mib(32)), ..PoolOptions::default() };
    let pool = PinnedPool::new(here.pinner(), options)?;
    let mut engine = Engine::new(device, &pool, Options::default())?;
    let stream = here.create_stream()?;
    let on = engine.adopt_stream(here.raw_stream(stream)?)?;
    let all = Bytes(count * stride);
    let mut take = || DeviceRange::new(here.alloc_device(all, stream)?, all);
    let (source, target) = (take()?, take()?);
    let bad = DeviceRange::new(here.alloc_device(Bytes(pattern::COUNT_BYTES), stream)?, Bytes(8))?;
    let row = |within: DeviceRange, nth: u64| within.part(Bytes(nth * stride), Bytes(len));
    for nth in 0..count {
        pattern::fill(&mut *here, row(source, nth)?, nth, stream)?;
    }
    pattern::fill(&mut *here, target, u64::MAX, stream)?;
    let rows = |within| Strip::rows(within, Bytes::ZERO, Bytes(len), count, Bytes(stride));
    let mut batch = engine.gather(&[rows(source)?], on, "rows")?;
    engine.scatter(&mut batch, &[rows(target)?], on)?;
    here.sync()?;
    let mut client = pool.client(here.fence(), Bytes::MAX)?;
    let mut lent = client.lend(Bytes(8), "count".into())?.block;
    lent.write(Bytes::ZERO, &[0; 8])?;
    here.copy_in(bad, lent.trunk(Bytes::ZERO, Bytes(8))?, stream)?;
    for nth in 0..count {
        pattern::check(&mut *here, row(target, nth)?, bad, nth, stream)?;
    }
    here.copy_out(lent.trunk(Bytes::ZERO, Bytes(8))?, bad, stream)?;
    here.sync()?;
    let mut wrong = [1; 8];
    lent.read(Bytes::ZERO, &mut wrong)?;
    assert_eq!(u64::from_ne_bytes(wrong), 0, "words that are not where they belong");
    assert_eq!(engine.stats().seam.launches, 2, "one kernel each way");
    client.give_back(lent, None)?;
    engine.discard(batch)?;
    engine.shutdown()?;
    for range in [source, target, bad] {
        here.free_device(range.at(), stream)?;
    }
    here.sync()
}

#[test]
fn patterns_come_back_on_the_simulated_device() {
    let world = World::new(Config::default());
    let device = || Box::new(world.device(0).unwrap());
    patterns_come_back(device(), device()).unwrap();
}

#[test]
fn patterns_come_back_on_a_device() {
    let open = || lightering::open("cuda:0").map(|opened| opened.backend);
    match (open(), open()) {
        (Ok(here), Ok(device)) => patterns_come_back(here, device).unwrap(),
        (Err(error), _) | (_, Err(error)) => {
            let required = std::env::var_os("LIGHTERING_REQUIRE_CUDA").is_some();
            let is_missing = matches!(error.kind(), Kind::Unavailable(_));
            assert!(is_missing && !required, "a device that cannot be tried: {error}");
            emulator::aloud(&format!("NOT tried on a device: {error}"));
        }
    }
}
