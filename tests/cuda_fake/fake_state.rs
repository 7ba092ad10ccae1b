//! What the fake driver knows: its script, what is alive, which calls it got.
//!
//! What it is not: the driver's functions; those are in `fake_libcuda.rs`.
//!
//! Invariant: one lock guards all of it, so the calls of several threads have one order.
//!
//! ```text
//!   FAKE_CUDA or fake_script -> Script: what to fail and what to pretend
//!   State { script, log, streams, events, pools, memory, pinned, holds }   alive, by handle
//! ```
//!
//! `fake_libcuda.rs` uses it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const NO_DEVICE: u32 = 100;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const INVALID_PTX: u32 = 218;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const DESTROYED: u32 = 709;
pub(crate) const ALREADY_REGISTERED: u32 = 712;
pub(crate) const NOT_REGISTERED: u32 = 713;
pub(crate) const CAPTURE_UNSUPPORTED: u32 = 900;
pub(crate) const NOT_CAPTURING: u32 = 401;

pub(crate) const MEMORY: usize = 1 << 30;
pub(crate) const RELAXED: u32 = 2;

pub(crate) struct Fail {
    pub(crate) name: String,
    pub(crate) nth: u64,
    pub(crate) code: u32,
}

#[derive(Default)]
pub(crate) struct Script {
    pub(crate) driver: i32,
    pub(crate) devices: i32,
    pub(crate) pools: i32,
    pub(crate) unified: i32,
    pub(crate) memory: usize,
    pub(crate) shift: u64,
    pub(crate) not_ready: u64,
    pub(crate) others_capture: bool,
    /// Does a tool listen to ranges?
    pub(crate) tool: u64,
    pub(crate) captures: HashMap<u64, u32>,
    pub(crate) fails: Vec<Fail>,
    pub(crate) counts: HashMap<String, u64>,
}

impl Script {
    pub(crate) fn new(text: &str) -> Script {
        let mut script =
            Script { driver: 13_000, devices: 1, pools: 1, unified: 1, ..Script::default() };
        script.memory = MEMORY;
        for directive in text.split(',').filter(|directive| !directive.is_empty()) {
            let parts: Vec<&str> = directive.split(':').collect();
            let number = |index: usize| parts[index].parse::<u64>().expect(directive);
            match parts[0] {
                "driver" => script.driver = number(1) as i32,
                "devices" => script.devices = number(1) as i32,
                "pools" => script.pools = number(1) as i32,
                "unified" => script.unified = number(1) as i32,
                "memory" => script.memory = number(1) as usize,
                "shift" => script.shift = number(1),
                "notready" => script.not_ready = number(1),
                "tool" => script.tool = number(1),
                "others-capture" => script.others_capture = true,
                "capture" => drop(script.captures.insert(number(1), number(2) as u32)),
                "fail" => script.fails.push(Fail {
                    name: parts[1].to_owned(),
                    nth: number(2),
                    code: number(3) as u32,
                }),
                other => panic!("no such directive: {other}"),
            }
        }
        script
    }

    /// The code that this call is to fail with, if any; 0 as the count means every call.
    pub(crate) fn failure(&mut self, name: &str) -> Option<u32> {
        let count = self.counts.entry(name.to_owned()).or_insert(0);
        *count += 1;
        let hit = |fail: &&Fail| fail.name == name && (fail.nth == 0 || fail.nth == *count);
        self.fails.iter().find(hit).map(|fail| fail.code)
    }
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) script: Option<Script>,
    pub(crate) log: Vec<String>,
    pub(crate) started: bool,
    pub(crate) next: u64,
    /// Holds on each device's primary context.
    pub(crate) holds: HashMap<u64, u64>,
    pub(crate) destroyed: BTreeSet<u64>,
    /// Streams, events, pools and modules: context they belong to.
    pub(crate) streams: HashMap<u64, u64>,
    pub(crate) events: HashMap<u64, u64>,
    /// When each event was recorded last, by the count of recordings.
    pub(crate) recorded: HashMap<u64, u64>,
    pub(crate) moment: u64,
    pub(crate) pools: HashMap<u64, u64>,
    pub(crate) modules: HashMap<u64, String>,
    pub(crate) functions: HashMap<u64, String>,
    /// Ranges that are open, the last one begun last.
    pub(crate) ranges: Vec<String>,
    /// Device memory and page-locked memory: length by address.
    pub(crate) memory: BTreeMap<u64, usize>,
    pub(crate) pinned: BTreeMap<u64, usize>,
}

static STATE: LazyLock<Mutex<State>> =
    LazyLock::new(|| Mutex::new(State { next: 1, ..State::default() }));
pub(crate) static EXITED: AtomicBool = AtomicBool::new(false);

thread_local! {
    pub(crate) static CURRENT: Cell<u64> = const { Cell::new(0) };
    pub(crate) static MODE: Cell<u32> = const { Cell::new(0) };
}

// SAFETY: the C library's function, by its standard signature; any hook may be registered.
unsafe extern "C" {
    pub(crate) safe fn atexit(hook: extern "C" fn()) -> i32;
}

pub(crate) extern "C" fn on_exit() {
    EXITED.store(true, Ordering::SeqCst);
}

pub(crate) fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    pub(crate) fn script(&mut self) -> &mut Script {
        self.script
            .get_or_insert_with(|| Script::new(&std::env::var("FAKE_CUDA").unwrap_or_default()))
    }

    pub(crate) fn note(&mut self, name: &str, args: &[u64]) {
        let mut line = name.to_owned();
        args.iter().for_each(|arg| line.push_str(&format!(" {arg:x}")));
        self.log.push(line);
    }

    pub(crate) fn handle(&mut self) -> u64 {
        self.next += 1;
        0x1000_0000 + self.next * 0x10
    }

    /// The context that calls of this thread go to.
    pub(crate) fn current(&self) -> Result<u64, u32> {
        let current = CURRENT.get();
        match current {
            0 => Err(INVALID_CONTEXT),
            _ if self.destroyed.contains(&current) => Err(DESTROYED),
            _ => Ok(current),
        }
    }

    pub(crate) fn stream(&self, stream: u64) -> Result<u64, u32> {
        let current = self.current()?;
        match stream {
            0..=2 => Ok(current),
            _ => self.streams.get(&stream).copied().ok_or(INVALID_HANDLE),
        }
    }

    pub(crate) fn event(&self, event: u64) -> Result<u64, u32> {
        self.events.get(&event).copied().ok_or(INVALID_HANDLE)
    }

    /// Calls that a driver refuses while anybody captures, unless the thread's mode is relaxed.
    pub(crate) fn unsafe_call(&mut self) -> Result<(), u32> {
        if self.script().others_capture && MODE.get() != RELAXED {
            return Err(CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<u64, u32> {
        let used: usize = self.memory.values().sum();
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        if used.saturating_add(len) > self.script().memory {
            return Err(OUT_OF_MEMORY);
        }
        let layout = Layout::from_size_align(len, 256).map_err(|_| INVALID_VALUE)?;
        // SAFETY: the length is not zero.
        let at = unsafe { alloc_zeroed(layout) };
        assert!(!at.is_null());
        let at = at.expose_provenance() as u64;
        self.memory.insert(at, len);
        Ok(at)
    }

    pub(crate) fn give(&mut self, at: u64) -> Result<(), u32> {
        let len = self.memory.remove(&at).ok_or(INVALID_VALUE)?;
        let layout = Layout::from_size_align(len, 256).map_err(|_| INVALID_VALUE)?;
        // SAFETY: allocated in `take` with this layout; the map lets it go once.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(at as usize), layout) };
        Ok(())
    }

    pub(crate) fn copy(&self, device: u64, host: u64, len: usize) -> Result<(), u32> {
        let within = |ranges: &BTreeMap<u64, usize>, at: u64| {
            let below = ranges.range(..=at).next_back();
            below.is_some_and(|(start, size)| at + len as u64 <= start + *size as u64)
        };
        let fits = len > 0 && within(&self.memory, device) && within(&self.pinned, host);
        if fits { Ok(()) } else { Err(INVALID_VALUE) }
    }
}
