//! PTX and its sources, and the crate's own kernels in each of their forms.
//!
//! The faults guarded against: PTX that was not made from the source beside it; a kernel whose name
//! or parameters its PTX does not have; a pattern that another device writes or checks otherwise.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[path = "emulator/mod.rs"]
mod emulator;
#[path = "kernels/sha256.rs"]
mod sha256;

use emulator::Order;
use lightering::backend::kernel::HostArg;
use lightering::backend::sim::{Config, World};
use lightering::backend::{Arg, Backend, Grid, HostArgs, Kernel, pattern};
use lightering::checksum::{CHECKSUM, CLEAR, sum_of};
use lightering::pinned::{Block, Client};
use lightering::{
    Budget, Bytes, DeviceRange, Misuse, Name, PinnedPool, PoolOptions, Result, StreamId,
};
use sha256::sha256;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

fn stems(folder: &Path, extension: &str) -> BTreeSet<String> {
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|end| end == extension))
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn every_ptx_file_was_made_from_the_source_beside_it() {
    if !folder().is_dir() {
        return emulator::aloud("PTX was NOT compared: its sources are not on this machine");
    }
    let names = stems(&folder(), "cu");
    assert_eq!(names, stems(&folder().join("ptx"), "ptx"));
    assert!(names.len() >= 4, "{names:?}");
    for name in names {
        let ptx = std::fs::read_to_string(folder().join(format!("ptx/{name}.ptx"))).unwrap();
        let head = |field: &str| {
            let line = ptx.lines().find_map(|line| line.strip_prefix(&format!("// {field}: ")));
            line.unwrap_or_else(|| panic!("{name}.ptx has no {field}")).to_string()
        };
        let source = head("source");
        let files: Vec<&str> = source.split(' ').collect();
        assert_eq!(files[0], format!("{name}.cu"));
        let texts: Vec<Vec<u8>> =
            files.iter().map(|file| std::fs::read(folder().join(file)).unwrap()).collect();
        assert_eq!(
            head("sha256"),
            sha256(&texts.concat()),
            "{name}.ptx is older than its source: run tools/kernels.py"
        );
        for line in String::from_utf8_lossy(&texts[0]).lines() {
            if let Some(file) = line.strip_prefix("#include \"") {
                let file = file.trim_end_matches('"');
                assert!(files.contains(&file), "{name}.ptx does not know of {file}");
            }
        }
        assert!(head("compiler").contains("12.1"), "an old compiler, for old drivers");
        assert!(ptx.contains(".target sm_75") && head("options").contains("compute_75"));
    }
}

#[test]
fn each_of_the_crates_kernels_is_in_its_ptx() {
    let parameters = |kernel: &Kernel| emulator::parameters(kernel);
    assert_eq!(parameters(&pattern::FILL).as_deref(), Some("lll"));
    assert_eq!(parameters(&pattern::CHECK).as_deref(), Some("llll"));
    assert_eq!(parameters(&CLEAR).as_deref(), Some("ll"));
    assert_eq!(parameters(&CHECKSUM).as_deref(), Some("lll"));
}

/// Bytes at an address that every form takes.
fn bytes(words: &mut [u128], len: usize) -> &mut [u8] {
    &mut bytemuck::cast_slice_mut(words)[..len]
}

type Form<'a> = &'a dyn Fn(&Kernel, &mut HostArgs<'_>) -> Result<()>;

/// What the form leaves in `len` bytes between two that it may not touch.
fn filled(form: Form<'_>, len: usize) -> Vec<u8> {
    let mut words = vec![u128::MAX; len / 16 + 2];
    {
        let to = HostArg::Write(bytes(&mut words, len));
        let [seed, len] = [Arg::U64(9), Arg::U64(len as u64)].map(HostArg::Number);
        form(&pattern::FILL, &mut HostArgs::new(vec![to, seed, len])).unwrap();
    }
    assert_eq!(bytemuck::cast_slice::<u128, u8>(&words)[len], 0xff, "wrote past the end");
    bytes(&mut words, len).to_vec()
}

fn wrong_words(form: Form<'_>, from: &[u8]) -> u64 {
    let mut words = vec![0u128; from.len() / 16 + 1];
    let mut bad = [5u128];
    bytes(&mut words, from.len()).copy_from_slice(from);
    let args = vec![
        HostArg::Read(bytes(&mut words, from.len())),
        HostArg::Write(bytes(&mut bad, 8)),
        HostArg::Number(Arg::U64(9)),
        HostArg::Number(Arg::U64(from.len() as u64)),
    ];
    form(&pattern::CHECK, &mut HostArgs::new(args)).unwrap();
    bad[0] as u64 - 5
}

fn host(kernel: &Kernel, args: &mut HostArgs<'_>) -> Result<()> {
    (kernel.host.unwrap())(&Grid::row(1, 256), args)
}

fn emulated(kernel: &Kernel, args: &mut HostArgs<'_>) -> Result<()> {
    // Fewer threads than words, so that each takes several.
    emulator::run(kernel.name, &Grid::row(2, 256), args, Order::Descending)
}

#[test]
fn the_patterns_forms_agree_at_every_length() {
    for len in [1, 7, 8, 9, 15, 16, 17, 4096, 10_003] {
        let pattern = filled(&host, len);
        let forms: &[Form<'_>] = if emulator::is_here() { &[&host, &emulated] } else { &[&host] };
        for form in forms {
            assert_eq!(filled(form, len), pattern, "{len} bytes");
            assert_eq!(wrong_words(form, &pattern), 0);
            let mut changed = pattern.clone();
            changed[len - 1] ^= 1;
            changed[0] ^= 128;
            let wrong = if len > 8 { 2 } else { 1 };
            assert_eq!(wrong_words(form, &changed), wrong, "{len} bytes");
        }
    }
}

#[test]
fn the_sums_forms_agree_at_every_length() {
    for len in [1, 7, 8, 9, 4095, 4096, 70_001] {
        let mut words: Vec<u128> = (0..len as u128 / 16 + 1)
            .map(|i| (i + 3).wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .collect();
        let from = bytes(&mut words, len).to_vec();
        let forms: &[Form<'_>] = if emulator::is_here() { &[&host, &emulated] } else { &[&host] };
        for form in forms {
            let mut sum = [u128::MAX; 2];
            let cleared = HostArg::Write(bytes(&mut sum, 16));
            let mut args = HostArgs::new(vec![cleared, HostArg::Number(Arg::U64(16))]);
            form(&CLEAR, &mut args).unwrap();
            assert_eq!(sum, [0, u128::MAX], "a clear keeps within its bytes");
            for _ in 0..2 {
                let args = vec![
                    HostArg::Read(bytes(&mut words, len)),
                    HostArg::Write(bytes(&mut sum, 8)),
                    HostArg::Number(Arg::U64(len as u64)),
                ];
                form(&CHECKSUM, &mut HostArgs::new(args)).unwrap();
            }
            assert_eq!(sum[0] as u64, sum_of(&from).wrapping_mul(2), "{len} bytes");
        }
    }
}

/// A device with a little pinned memory.
struct Rig {
    backend: Box<dyn Backend>,
    on: StreamId,
    client: Client,
}

impl Rig {
    fn new(mut backend: Box<dyn Backend>) -> Result<Rig> {
        let on = backend.create_stream()?;
        let budget = Budget::Bytes(Bytes::mib(8));
        let pool =
            PinnedPool::new(backend.pinner(), PoolOptions { budget, ..PoolOptions::default() })?;
        let client = pool.client(backend.fence(), Bytes::MAX)?;
        Ok(Rig { backend, on, client })
    }

    fn take(&mut self, len: u64) -> Result<DeviceRange> {
        DeviceRange::new(self.backend.alloc_device(Bytes(len), self.on)?, Bytes(len))
    }

    fn block(&mut self, bytes: &[u8]) -> Result<Block> {
        let mut block = self.client.lend(Bytes(bytes.len() as u64), Name::new("test"))?.block;
        block.write(Bytes::ZERO, bytes)?;
        Ok(block)
    }

    fn write(&mut self, to: DeviceRange, bytes: &[u8]) -> Result<()> {
        let block = self.block(bytes)?;
        self.backend.copy_in(to, block.trunk(Bytes::ZERO, to.len())?, self.on)?;
        self.backend.sync()?;
        self.client.give_back(block, None).map_err(Into::into)
    }

    fn read(&mut self, from: DeviceRange) -> Result<Vec<u8>> {
        let mut bytes = vec![0; from.len().to_usize()?];
        let block = self.block(&bytes)?;
        self.backend.copy_out(block.trunk(Bytes::ZERO, from.len())?, from, self.on)?;
        self.backend.sync()?;
        block.read(Bytes::ZERO, &mut bytes)?;
        self.client.give_back(block, None)?;
        Ok(bytes)
    }
}

/// Fills and checks on a device, changes one byte, checks again.
fn a_changed_byte_is_counted(backend: Box<dyn Backend>) -> Result<()> {
    let mut rig = Rig::new(backend)?;
    let (len, seed) = (1_000_003u64, 9);
    let (at, bad) = (rig.take(len)?, rig.take(pattern::COUNT_BYTES)?);
    pattern::fill(&mut *rig.backend, at, seed, rig.on)?;
    assert_eq!(rig.read(at)?, filled(&host, len as usize));
    let count = |rig: &mut Rig, seed| -> Result<u64> {
        rig.write(bad, &[0; 8])?;
        pattern::check(&mut *rig.backend, at, bad, seed, rig.on)?;
        Ok(u64::from_le_bytes(rig.read(bad)?.try_into().unwrap()))
    };
    assert_eq!(count(&mut rig, seed)?, 0);
    assert_eq!(count(&mut rig, seed + 1)?, len.div_ceil(8), "every word of an older filling");
    let byte = at.part(Bytes(777_777), Bytes(1))?;
    let old = rig.read(byte)?[0];
    rig.write(byte, &[old ^ 4])?;
    assert_eq!(count(&mut rig, seed)?, 1);
    let odd = at.part(Bytes(4), Bytes(16))?;
    let refused = pattern::fill(&mut *rig.backend, odd, seed, rig.on).unwrap_err();
    assert_eq!(refused.misuse(), Some(Misuse::BadKernel));
    for range in [at, bad] {
        rig.backend.free_device(range.at(), rig.on)?;
    }
    rig.backend.sync()
}

#[test]
fn a_changed_byte_is_counted_on_the_simulated_device() {
    let sim = World::new(Config::default()).device(0).unwrap();
    a_changed_byte_is_counted(Box::new(sim)).unwrap();
}

#[test]
fn a_changed_byte_is_counted_on_a_device() {
    match lightering::open("cuda:0") {
        Ok(opened) => a_changed_byte_is_counted(opened.backend).unwrap(),
        Err(error) => emulator::aloud(&format!("NOT tried on a device: {error}")),
    }
}
