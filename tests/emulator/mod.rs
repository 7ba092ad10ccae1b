//! Runs CUDA's form of a kernel on this machine: kernels/*.cu compiled as C++, threads as fibers.
//!
//! What it is not: a GPU. It finds wrong indices, wrong sums, barriers that some threads miss and
//! orders that matter; it knows nothing of speed, caches or the PTX itself.
//!
//! Invariant: nothing is left behind: the library is unlinked as soon as it is loaded. Without a
//! compiler the tests say aloud that they did not run; where CI is set that is a failure.
//!
//! ```text
//!   g++ kernels/*.cu emulator.cpp -> library -> emulate(entry, grid, arguments, order)
//! ```
//!
//! Tests of kernels use it, those of the examples too.
#![allow(clippy::unwrap_used, clippy::expect_used, dead_code, reason = "test support")]
#![allow(unreachable_pub, missing_debug_implementations, reason = "test support")]

use libloading::Library;
use lightering::backend::{Arg, Grid, HostArgs, Kernel};
use lightering::{Error, Misuse, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Which of a block's threads, and which of a grid's blocks, run first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Ascending,
    Descending,
}

/// Says something that the harness does not swallow.
#[allow(clippy::explicit_write, reason = "the harness swallows what eprintln says")]
pub fn aloud(what: &str) {
    let mut stderr = std::io::stderr();
    writeln!(stderr, "{what}").unwrap();
}

/// Can kernels be run here? Says aloud where they cannot.
pub fn is_here() -> bool {
    library().is_some()
}

/// The arguments of a kernel, by kind, in order.
#[derive(Default)]
struct Cells {
    integers: Vec<u64>,
    floats: Vec<f32>,
}

/// Runs the kernel of that name over the arguments that its host form would get.
///
/// # Errors
/// `Usage(BadKernel)` where it misses a barrier, or its arguments are too many or misaligned.
pub fn run(name: &str, grid: &Grid, args: &mut HostArgs<'_>, order: Order) -> Result<()> {
    let cells = cells(args)?;
    let bad = |what: String| Error::usage(Misuse::BadKernel, "emulate").detail(what);
    let library = library().ok_or_else(|| bad(String::from("no compiler")))?;
    let (mut integers, mut floats) = ([0; 8], [0.0; 4]);
    if cells.integers.len() > integers.len() || cells.floats.len() > floats.len() {
        return Err(bad(format!("{name}: too many arguments")));
    }
    integers[..cells.integers.len()].copy_from_slice(&cells.integers);
    floats[..cells.floats.len()].copy_from_slice(&cells.floats);
    let size = [grid.blocks[0], grid.blocks[1], grid.threads[0]];
    let flat = grid.blocks[2] == 1 && grid.threads[1] == 1 && grid.threads[2] == 1;
    assert!(flat && grid.shared == 0, "the emulator knows no other grids");
    // SAFETY: the names are those of functions in kernels/*.cu and emulator.cpp, with the
    // signatures they have there. `args` has exclusive hold of the bytes that the kernel writes,
    // and `guard` keeps another kernel from running at the same time.
    let wrong = unsafe {
        let guard = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = *library.get::<*mut c_void>(name.as_bytes()).unwrap();
        let emulate = library.get::<Emulate>(b"emulate").unwrap();
        let descending = c_int::from(order == Order::Descending);
        let wrong = emulate(entry, size.as_ptr(), integers.as_ptr(), floats.as_ptr(), descending);
        drop(guard);
        (!wrong.is_null()).then(|| CStr::from_ptr(wrong).to_string_lossy().into_owned())
    };
    wrong.map_or(Ok(()), |wrong| Err(bad(format!("{name}: {wrong}"))))
}

type Emulate =
    unsafe extern "C" fn(*mut c_void, *const u32, *const u64, *const f32, c_int) -> *const c_char;
static RUNNING: Mutex<()> = Mutex::new(());

fn cells(args: &mut HostArgs<'_>) -> Result<Cells> {
    let mut cells = Cells::default();
    for index in 0.. {
        let at = if let Ok(bytes) = args.read::<u8>(index) {
            bytes.as_ptr().addr()
        } else if let Ok(number) = args.u32(index) {
            cells.integers.push(u64::from(number));
            continue;
        } else if let Ok(number) = args.u64(index) {
            cells.integers.push(number);
            continue;
        } else if let Ok(number) = args.f32(index) {
            cells.floats.push(number);
            continue;
        } else if let Ok(bytes) = args.write::<u8>(index) {
            // Last, for what is no range is gone after this.
            bytes.as_mut_ptr().addr()
        } else {
            break;
        };
        if !at.is_multiple_of(16) {
            let error = Error::usage(Misuse::BadKernel, "emulate");
            return Err(error.detail(format!("argument {index} is not aligned to 16 bytes")));
        }
        cells.integers.push(at as u64);
    }
    Ok(cells)
}

/// Does the PTX take what a launch gives? One letter a parameter: `l` for 64 bits, `i` for 32, `f`
/// for a float.
pub fn parameters(kernel: &Kernel) -> Option<String> {
    let ptx = kernel.ptx?;
    let (_, rest) = ptx.split_once(&format!(".visible .entry {}(", kernel.name))?;
    let (list, _) = rest.split_once(')')?;
    let letter = |line: &str| match line.split_whitespace().nth(1) {
        Some(".u64") => 'l',
        Some(".u32") => 'i',
        Some(".f32") => 'f',
        _ => '?',
    };
    Some(list.lines().filter(|line| line.contains(".param")).map(letter).collect())
}

/// The same letters for the arguments of a launch.
pub fn letters(args: &[Arg]) -> String {
    let letter = |arg: &Arg| match arg {
        Arg::Read(_) | Arg::Write(_) | Arg::Update(_) | Arg::U64(_) | Arg::Pinned(..) => Some('l'),
        Arg::U32(_) => Some('i'),
        Arg::F32(_) => Some('f'),
        Arg::Reached(..) => None,
    };
    args.iter().filter_map(letter).collect()
}

fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| match compile() {
            Ok(library) => Some(library),
            Err(why) => {
                assert!(std::env::var_os("CI").is_none(), "CI has a compiler: {why}");
                aloud(&format!("CUDA's form of the kernels was NOT tried: {why}"));
                None
            }
        })
        .as_ref()
}

fn compile() -> std::result::Result<Library, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let here = root.join("tests/emulator");
    let name = format!("lightering-kernels-{}.so", std::process::id());
    let made = Made(std::env::temp_dir().join(name));
    let sources = std::fs::read_dir(root.join("kernels")).map_err(|error| error.to_string())?;
    let mut sources: Vec<PathBuf> = sources.map(|entry| entry.unwrap().path()).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "cu"));
    sources.sort();
    let mut compiler = Command::new("g++");
    // Without contraction, so that sums are those of the host forms. Unfortified, as some systems'
    // compilers are not by themselves: a fortified longjmp takes a change of stacks for an attack.
    compiler.args([
        "-std=c++17",
        "-O1",
        "-U_FORTIFY_SOURCE",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Werror",
    ]);
    compiler.args(["-Wno-unknown-pragmas", "-Wno-unused-function", "-x", "c++", "-include"]);
    compiler.arg(here.join("emulator.h")).arg("-o").arg(&made.0);
    compiler.args(&sources).arg(here.join("emulator.cpp"));
    let said = compiler.output().map_err(|error| format!("g++: {error}"))?;
    assert!(said.status.success(), "g++: {}", String::from_utf8_lossy(&said.stderr));
    // SAFETY: the library was made from the sources here, which run nothing when loaded.
    unsafe { Library::new(&made.0) }.map_err(|error| error.to_string())
}

/// A file that goes with this.
struct Made(PathBuf);

impl Drop for Made {
    fn drop(&mut self) {
        // The compiler may have failed before it made it.
        let _ = std::fs::remove_file(&self.0);
    }
}
