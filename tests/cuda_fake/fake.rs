//! Runs tests on a fake driver: compiles it, and runs each test's body in a process that loads it.
//!
//! What it is not: a test. A driver is probed once per process, so each story needs its own.
//!
//! Invariant: nothing is left behind: the folder with the compiled library goes when the test
//! process exits. Without a compiler on the machine the stories say aloud that they did not run.
//!
//! ```text
//!   story() -> parent: rustc -> dir/libcuda.so.1 -> itself again on that -> exit code?
//!              child:  FAKE_STORY is set -> body, with script(), calls(), alive() on the library
//! ```
//!
//! The `cuda_fake*` tests use it.

use libloading::Library;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::CString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr::NonNull;
use std::sync::OnceLock;

const STORY: &str = "FAKE_STORY";
const PAGE: usize = 4096;

/// The full name of a test of this module, as the test runner takes it.
macro_rules! name_of {
    ($name:ident) => {
        concat!(module_path!(), "::", stringify!($name)).split_once("::").unwrap().1
    };
}
pub(crate) use name_of;

/// Runs a test's body in a process of its own, on the fake driver with the script given, and
/// requires that it passed there.
pub(crate) fn story(name: &str, script: &str, body: fn()) {
    if is_child(name) {
        return body();
    }
    let Some(dir) = library() else { return };
    let output = run(name, dir, script, &[]);
    let said = text(&output);
    assert!(output.status.success() && said.contains("1 passed"), "{name}: {said}");
}

/// Is this the process that is to run the body of the story?
pub(crate) fn is_child(name: &str) -> bool {
    std::env::var_os(STORY).is_some_and(|story| story == name)
}

/// Runs one test of this binary in a child process, on the library in `dir`.
pub(crate) fn run(name: &str, dir: &Path, script: &str, more: &[(&str, &Path)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(STORY, name)
        .env("FAKE_CUDA", script)
        .env("LD_LIBRARY_PATH", dir)
        .envs(more.iter().copied())
        .output()
        .unwrap()
}

/// What a child said.
pub(crate) fn text(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}\n{}{}", output.status, String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}

/// The folder with the compiled fake, made once per process; `None` where there is no compiler.
pub(crate) fn library() -> Option<&'static Path> {
    static DIR: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = scratch();
        let source = dir.join("fake_libcuda.rs");
        for (name, text) in [
            ("fake_libcuda.rs", include_str!("fake_libcuda.rs")),
            ("fake_args.rs", include_str!("fake_args.rs")),
            ("fake_state.rs", include_str!("fake_state.rs")),
            ("fake_nvtx.rs", include_str!("fake_nvtx.rs")),
        ] {
            std::fs::write(dir.join(name), text).unwrap();
        }
        let Some(rustc) = rustc() else {
            // Straight to the descriptor, past the capture of a passing test's output.
            let words = b"no rustc here: the fake-driver tests did NOT run\n";
            std::io::stderr().write_all(words).unwrap();
            return None;
        };
        let output = Command::new(rustc)
            .args(["--edition", "2024", "--crate-type", "cdylib", "-C", "opt-level=1", "-o"])
            .arg(dir.join("libcuda.so.1"))
            .arg(&source)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output));
        Some(dir.clone())
    })
    .as_deref()
}

fn rustc() -> Option<PathBuf> {
    let named = std::env::var_os("RUSTC").map(PathBuf::from);
    let beside_cargo = Path::new(env!("CARGO")).with_file_name("rustc");
    let works = |path: &PathBuf| {
        Command::new(path).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    named.into_iter().chain([beside_cargo, "rustc".into()]).find(works)
}

/// A folder of this process, gone when it exits.
pub(crate) fn scratch() -> &'static PathBuf {
    static SCRATCH: OnceLock<PathBuf> = OnceLock::new();
    extern "C" fn sweep() {
        if let Some(dir) = SCRATCH.get() {
            let _ = std::fs::remove_dir_all(dir);
        }
    }
    SCRATCH.get_or_init(|| {
        let name = format!("lightering-fake-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        // SAFETY: the hook touches only its own static and the file system.
        assert_eq!(unsafe { libc::atexit(sweep) }, 0);
        dir
    })
}

/// A folder whose library lacks one symbol: the name is overwritten where the loader looks it up.
pub(crate) fn library_without(symbol: &str) -> Option<PathBuf> {
    let mut bytes = std::fs::read(library()?.join("libcuda.so.1")).unwrap();
    let name = format!("\0{symbol}\0");
    let name = name.as_bytes();
    let at = |bytes: &[u8]| bytes.windows(name.len()).position(|window| window == name);
    let mut found = 0;
    while let Some(at) = at(&bytes) {
        bytes[at + 1] = b'X';
        found += 1;
    }
    assert!(found > 0, "the fake has no {symbol}");
    let dir = scratch().join(format!("without-{symbol}"));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("libcuda.so.1"), bytes).unwrap();
    Some(dir)
}

fn fake() -> &'static Library {
    static FAKE: OnceLock<Library> = OnceLock::new();
    // SAFETY: the fake has no initialisers of its own.
    FAKE.get_or_init(|| unsafe { Library::new("libcuda.so.1") }.unwrap())
}

/// A function of the fake library.
pub(crate) fn function<F: Copy>(name: &str) -> F {
    // SAFETY: the callers name the signature that the fake gives the function.
    *unsafe { fake().get::<F>(name) }.unwrap()
}

/// A new script for the calls from now on; the counts of calls start anew.
pub(crate) fn script(text: &str) {
    let set: unsafe extern "C" fn(*const i8) = function("fake_script");
    let text = CString::new(text).unwrap();
    // SAFETY: terminated text.
    unsafe { set(text.as_ptr()) };
}

/// One call that the driver got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) args: Vec<u64>,
}

/// Takes the calls since the last time.
pub(crate) fn calls() -> Vec<Call> {
    let take: unsafe extern "C" fn(*mut u8, usize) -> usize = function("fake_log");
    let mut buffer = vec![0; 1 << 16];
    loop {
        // SAFETY: the buffer has the length given.
        let len = unsafe { take(buffer.as_mut_ptr(), buffer.len()) };
        if len <= buffer.len() {
            buffer.truncate(len);
            break;
        }
        buffer.resize(len, 0);
    }
    let call = |line: &str| {
        let mut words = line.split(' ');
        let name = words.next().unwrap().to_owned();
        Call { name, args: words.map(|word| u64::from_str_radix(word, 16).unwrap()).collect() }
    };
    String::from_utf8(buffer).unwrap().lines().map(call).collect()
}

/// The names of the calls since the last time.
pub(crate) fn names() -> Vec<String> {
    calls().into_iter().map(|call| call.name).collect()
}

/// What is alive in the fake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Alive {
    pub(crate) streams: u64,
    pub(crate) events: u64,
    pub(crate) pools: u64,
    pub(crate) memory: u64,
    pub(crate) pinned: u64,
    pub(crate) holds: u64,
    pub(crate) ranges: u64,
    pub(crate) handles: u64,
    pub(crate) mapped: u64,
}

pub(crate) fn alive() -> Alive {
    let get: unsafe extern "C" fn(*mut Alive) = function("fake_alive");
    let mut alive = Alive::default();
    // SAFETY: nine numbers, as the fake writes them.
    unsafe { get(&mut alive) };
    alive
}

/// This thread's capture mode in the fake: 0 unless somebody changed it.
pub(crate) fn mode() -> u32 {
    let get: unsafe extern "C" fn() -> u32 = function("fake_mode");
    // SAFETY: takes and touches nothing.
    unsafe { get() }
}

/// The context that is current on this thread.
pub(crate) fn current() -> u64 {
    let get: unsafe extern "C" fn(*mut u64) -> u32 = function("cuCtxGetCurrent");
    let mut current = 0;
    // SAFETY: valid pointer.
    assert_eq!(unsafe { get(&mut current) }, 0);
    current
}

/// Makes a context current on this thread, as an application would.
pub(crate) fn set_current(context: u64) {
    let set: unsafe extern "C" fn(u64) -> u32 = function("cuCtxSetCurrent");
    // SAFETY: the fake takes any number.
    assert_eq!(unsafe { set(context) }, 0);
}

/// The primary context of a device, as the fake numbers them.
pub(crate) fn primary(device: u32) -> u64 {
    0x100_0000 + u64::from(device) * 0x100
}

/// A stream that somebody else made in a context.
pub(crate) fn foreign_stream(context: u64) -> usize {
    let before = current();
    set_current(context);
    let create: unsafe extern "C" fn(*mut u64, u32) -> u32 = function("cuStreamCreate");
    let mut stream = 0;
    // SAFETY: valid pointer.
    assert_eq!(unsafe { create(&mut stream, 1) }, 0);
    set_current(before);
    stream as usize
}

/// Host memory on pages of its own.
#[derive(Debug)]
pub(crate) struct Pages {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the allocation belongs to this value alone and is tied to no thread.
unsafe impl Send for Pages {}

impl Pages {
    pub(crate) fn new(len: usize) -> Pages {
        let layout = Layout::from_size_align(len, PAGE).unwrap();
        // SAFETY: the callers ask for some bytes.
        let at = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Pages { at, layout }
    }

    pub(crate) fn at(&self) -> NonNull<u8> {
        self.at
    }

    /// The bytes, where nothing is in flight.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the allocation has this length; the fake's copies are done when the call returns.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.at.as_ptr(), self.layout) };
    }
}
