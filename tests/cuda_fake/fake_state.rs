//! What the fake driver knows: its script, what is alive, which calls it got.
//!
//! What it is not: the driver's functions; those are in `fake_libcuda.rs`.
//!
//! Invariant: one lock guards all of it, so the calls of several threads have one order.
//!
//! ```text
//!   FAKE_CUDA or fake_script -> Script: what to fail and what to pretend
//!   State { script, log, streams, events, pools, memory, pinned, holds }   alive,
//!   by handle; ranges, handles, mapped: memory that is mapped
//! ```
//!
//! `fake_libcuda.rs` uses it.

use crate::fake_args::At;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
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
pub(crate) const CAPTURE_INVALIDATED: u32 = 901;
/// What `cuStreamIsCapturing` says of a capture that somebody spoiled.
pub(crate) const INVALIDATED: u32 = 2;
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
    pub(crate) mapping: i32,
    pub(crate) granularity: usize,
    pub(crate) memory: usize,
    pub(crate) shift: u64,
    pub(crate) not_ready: u64,
    pub(crate) others_capture: bool,
    /// Does a tool listen to ranges?
    pub(crate) tool: u64,
    pub(crate) captures: HashMap<u64, u32>,
    pub(crate) fails: Vec<Fail>,
    pub(crate) counts: HashMap<String, u64>,
    /// By the name of a call: a pipe to tell who waits for it, and one to wait at.
    pub(crate) gates: HashMap<String, [i32; 2]>,
}

impl Script {
    pub(crate) fn new(text: &str) -> Script {
        let mut script =
            Script { driver: 13_000, devices: 1, pools: 1, unified: 1, ..Script::default() };
        (script.mapping, script.granularity) = (1, 4096);
        script.memory = MEMORY;
        for directive in text.split(',').filter(|directive| !directive.is_empty()) {
            let parts: Vec<&str> = directive.split(':').collect();
            let number = |index: usize| parts[index].parse::<u64>().expect(directive);
            match parts[0] {
                "driver" => script.driver = number(1) as i32,
                "devices" => script.devices = number(1) as i32,
                "pools" => script.pools = number(1) as i32,
                "unified" => script.unified = number(1) as i32,
                "mapping" => script.mapping = number(1) as i32,
                "granularity" => script.granularity = number(1) as usize,
                "memory" => script.memory = number(1) as usize,
                "shift" => script.shift = number(1),
                "notready" => script.not_ready = number(1),
                "tool" => script.tool = number(1),
                "others-capture" => script.others_capture = true,
                "capture" => drop(script.captures.insert(number(1), number(2) as u32)),
                "gate" => drop(
                    script.gates.insert(parts[1].to_owned(), [number(2) as i32, number(3) as i32]),
                ),
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
    /// Ranges that are open for a profiler, the last one begun last.
    pub(crate) marks: Vec<String>,
    /// Device memory and page-locked memory: length by address.
    pub(crate) memory: BTreeMap<u64, usize>,
    pub(crate) pinned: BTreeMap<u64, usize>,
    /// Whose device memory it is, by address; kept of what was freed.
    pub(crate) devices: BTreeMap<u64, i32>,
    /// Reserved addresses: length by address.
    pub(crate) ranges: BTreeMap<u64, usize>,
    /// Memory to be mapped: length by handle.
    pub(crate) handles: BTreeMap<u64, usize>,
    /// What is mapped: length and handle by address; and whether the device may use it.
    pub(crate) mapped: BTreeMap<u64, (usize, u64, bool)>,
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

/// Says that the call has come, and stays in it until somebody lets it go on or closes the pipe.
/// The lock is not held meanwhile: other threads' calls go on.
pub(crate) fn gate(name: &str) {
    let gate = state().script().gates.get(name).copied();
    if let Some([told, wait]) = gate {
        // SAFETY: the script's author keeps the pipes open; they are not closed here.
        let file = |fd| ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
        file(told).write_all(b"!").expect("somebody hears of the call");
        let _ = file(wait).read(&mut [0]).expect("a pipe to wait at");
    }
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

    /// Waiting for a stream, or asking it, while it is being captured spoils the capture.
    pub(crate) fn uncaptured(&mut self, stream: u64) -> Result<(), u32> {
        match self.script().captures.get_mut(&stream) {
            None => Ok(()),
            Some(status) => {
                *status = INVALIDATED;
                Err(CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Calls that a driver refuses while anybody captures, unless the thread's mode is relaxed.
    pub(crate) fn unsafe_call(&mut self) -> Result<(), u32> {
        if self.script().others_capture && MODE.get() != RELAXED {
            return Err(CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    /// The properties of pinned memory of the current device, for a pool or by itself: allocation
    /// type 1, no handle type, location type 1.
    pub(crate) fn device_memory(&self, props: At<i32>) -> Result<(), u32> {
        let props = [0, 1, 2, 3].map(|index| props.get(index));
        assert_eq!(props[..3], [1, 0, 1]);
        assert_eq!(0x100_0000 + props[3] as u64 * 0x100, self.current()?);
        Ok(())
    }

    /// Bytes of the device that are taken.
    pub(crate) fn used(&self) -> usize {
        self.memory.values().chain(self.handles.values()).sum()
    }

    pub(crate) fn check_room(&mut self, len: usize) -> Result<(), u32> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        if self.used().saturating_add(len) > self.script().memory {
            return Err(OUT_OF_MEMORY);
        }
        Ok(())
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<u64, u32> {
        self.check_room(len)?;
        let at = Self::bytes(len, 256)?;
        self.memory.insert(at, len);
        let device = (self.current()? - 0x100_0000) / 0x100;
        self.devices.insert(at, device as i32);
        Ok(at)
    }

    /// Bytes of the host that stand for a device's, or for its addresses.
    fn bytes(len: usize, alignment: usize) -> Result<u64, u32> {
        let layout = Layout::from_size_align(len, alignment).map_err(|_| INVALID_VALUE)?;
        // SAFETY: the length is not zero.
        let at = unsafe { alloc_zeroed(layout) };
        assert!(!at.is_null());
        Ok(at.expose_provenance() as u64)
    }

    pub(crate) fn reserve(&mut self, len: usize) -> Result<u64, u32> {
        let granularity = self.script().granularity;
        if len == 0 || !len.is_multiple_of(granularity) {
            return Err(INVALID_VALUE);
        }
        let at = Self::bytes(len, granularity)?;
        self.ranges.insert(at, len);
        Ok(at)
    }

    pub(crate) fn free_range(&mut self, at: u64, len: usize) -> Result<(), u32> {
        let is_whole = self.ranges.get(&at) == Some(&len);
        if !is_whole || self.mapped.range(at..at + len as u64).next().is_some() {
            return Err(INVALID_VALUE);
        }
        self.ranges.remove(&at);
        let granularity = self.script().granularity;
        let layout = Layout::from_size_align(len, granularity).map_err(|_| INVALID_VALUE)?;
        // SAFETY: allocated in `reserve` with this layout; the map lets it go once.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(at as usize), layout) };
        Ok(())
    }

    pub(crate) fn map(&mut self, at: u64, len: usize, handle: u64) -> Result<(), u32> {
        let end = at + len as u64;
        let below = self.ranges.range(..=at).next_back();
        let is_reserved = below.is_some_and(|(start, size)| end <= start + *size as u64);
        let before = self.mapped.range(..end).next_back();
        let is_taken = before.is_some_and(|(start, (size, ..))| start + *size as u64 > at);
        // A driver maps memory as often as it is asked; nobody here asks twice.
        let is_elsewhere = self.mapped.values().any(|(_, other, _)| *other == handle);
        let fits = self.handles.get(&handle) == Some(&len);
        if !is_reserved || is_taken || is_elsewhere || !fits {
            return Err(INVALID_VALUE);
        }
        self.mapped.insert(at, (len, handle, false));
        Ok(())
    }

    /// The mappings that cover these bytes exactly.
    pub(crate) fn mappings(&self, at: u64, len: usize) -> Result<Vec<u64>, u32> {
        let found: Vec<u64> = self.mapped.range(at..at + len as u64).map(|(at, _)| *at).collect();
        let sum: usize = found.iter().map(|at| self.mapped[at].0).sum();
        if found.first() == Some(&at) && sum == len { Ok(found) } else { Err(INVALID_VALUE) }
    }

    /// Are all of these bytes mapped, for the device to use?
    fn is_mapped(&self, mut at: u64, len: usize) -> bool {
        let end = at + len as u64;
        while at < end {
            match self.mapped.range(..=at).next_back() {
                Some((start, (size, _, true))) if start + *size as u64 > at => {
                    at = start + *size as u64;
                }
                _ => return false,
            }
        }
        true
    }

    /// The kind of memory at an address (2: a device's), its device, and where it starts and how
    /// long it is; of mapped memory what was reserved.
    pub(crate) fn allocation(&self, at: u64) -> (u32, i32, u64, usize) {
        let around = |start: u64, len: usize| (start..start + len as u64).contains(&at);
        if let Some((start, len)) = self.memory.range(..=at).next_back() {
            if around(*start, *len) {
                return (2, self.devices[start], *start, *len);
            }
        }
        let is_mapped = |(start, (len, ..)): (&u64, &(usize, u64, bool))| around(*start, *len);
        let mapped = self.mapped.range(..=at).next_back().is_some_and(is_mapped);
        match self.ranges.range(..=at).next_back() {
            Some((start, len)) if mapped => (2, 0, *start, *len),
            _ => (0, -1, 0, 0),
        }
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
        let is_device = within(&self.memory, device) || self.is_mapped(device, len);
        let fits = len > 0 && is_device && within(&self.pinned, host);
        if fits { Ok(()) } else { Err(INVALID_VALUE) }
    }
}
