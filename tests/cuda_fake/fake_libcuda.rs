//! A stand-in for `libcuda.so.1`: the functions that the CUDA backend calls, over host memory.
//!
//! What it is not: a model of time or of order; the simulated device is that. Work is done at once,
//! in the call. It checks what a driver checks (is a context current, is the handle alive, is the
//! range one registration) and writes every call down.
//!
//! Invariant: a call after the process's exit hooks have run aborts the process, as drivers have.
//!
//! ```text
//!   FAKE_CUDA=driver:13000,devices:2,fail:cuEventRecord:1:700    script, read at the first call
//!   fake_script(text)   a new script for the calls from now on; counts start anew
//!   fake_log(buffer)    takes the calls written down so far: "name arg arg ..", hexadecimal
//!   fake_alive, fake_mode                                        what is left; the thread's mode
//! ```
//!
//! Compiled by `fake.rs` with nothing but the standard library.

#![allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]

mod fake_state;

use fake_state::*;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::Ordering;

macro_rules! api {
    ($(fn $name:ident($state:ident $(, $arg:ident: $type:ty)*) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
            if EXITED.load(Ordering::SeqCst) {
                eprintln!("{} was called after the driver was gone", stringify!($name));
                std::process::abort();
            }
            let mut guard = state();
            let $state = guard.as_mut().expect("made above");
            $state.note(stringify!($name), &[$($arg.word()),*]);
            if let Some(code) = $state.script().failure(stringify!($name)) {
                return code;
            }
            let work = || -> Result<(), u32> { $body Ok(()) };
            #[allow(clippy::redundant_closure_call)]
            match { work }() {
                Ok(()) => 0,
                Err(code) => code,
            }
        }
    )*};
}

api! {
    fn cuDriverGetVersion(s, version: *mut i32) {
        unsafe { *version = s.script().driver };
    }
    fn cuInit(s, _flags: u32) {
        if s.script().devices == 0 {
            return Err(NO_DEVICE);
        }
        if !s.started {
            s.started = true;
            unsafe { atexit(on_exit) };
        }
    }
    fn cuDeviceGetCount(s, count: *mut i32) {
        if !s.started {
            return Err(NOT_INITIALIZED);
        }
        unsafe { *count = s.script().devices };
    }
    fn cuDeviceGet(s, device: *mut i32, ordinal: i32) {
        if ordinal >= s.script().devices {
            return Err(INVALID_DEVICE);
        }
        unsafe { *device = ordinal };
    }
    fn cuDeviceGetName(s, name: *mut c_char, len: i32, device: i32) {
        let text = format!("Fake {device}");
        assert!(s.started && text.len() < len as usize);
        for (index, byte) in text.bytes().chain([0]).enumerate() {
            unsafe { *name.add(index) = byte as c_char };
        }
    }
    fn cuDeviceTotalMem_v2(s, bytes: *mut usize, _device: i32) {
        unsafe { *bytes = s.script().memory };
    }
    fn cuDeviceGetAttribute(s, value: *mut i32, which: u32, _device: i32) {
        let found = match which {
            41 => s.script().unified,
            115 => s.script().pools,
            _ => return Err(INVALID_VALUE),
        };
        unsafe { *value = found };
    }
    fn cuDevicePrimaryCtxRetain(s, context: *mut u64, device: i32) {
        let raw = 0x100_0000 + device as u64 * 0x100;
        *s.holds.entry(raw).or_insert(0) += 1;
        unsafe { *context = raw };
    }
    fn cuDevicePrimaryCtxRelease_v2(s, device: i32) {
        let raw = 0x100_0000 + device as u64 * 0x100;
        let holds = s.holds.get_mut(&raw).filter(|holds| **holds > 0);
        *holds.ok_or(INVALID_CONTEXT)? -= 1;
    }
    fn cuDevicePrimaryCtxReset_v2(s, device: i32) {
        s.destroyed.insert(0x100_0000 + device as u64 * 0x100);
    }
    fn cuCtxGetCurrent(s, context: *mut u64) {
        assert!(s.started);
        unsafe { *context = CURRENT.get() };
    }
    fn cuCtxSetCurrent(s, context: u64) {
        if s.destroyed.contains(&context) {
            return Err(DESTROYED);
        }
        CURRENT.set(context);
    }
    fn cuCtxSynchronize(s) {
        s.current()?;
    }
    fn cuThreadExchangeStreamCaptureMode(s, mode: *mut u32) {
        assert!(s.started);
        unsafe { *mode = MODE.replace(*mode) };
    }
    fn cuStreamCreate(s, stream: *mut u64, _flags: u32) {
        let (current, raw) = (s.current()?, s.handle());
        s.streams.insert(raw, current);
        unsafe { *stream = raw };
    }
    fn cuStreamDestroy_v2(s, stream: u64) {
        s.stream(stream)?;
        s.streams.remove(&stream).ok_or(INVALID_HANDLE)?;
    }
    fn cuStreamGetCtx(s, stream: u64, context: *mut u64) {
        unsafe { *context = s.stream(stream)? };
    }
    fn cuStreamIsCapturing(s, stream: u64, status: *mut u32) {
        s.stream(stream)?;
        unsafe { *status = s.script().captures.get(&stream).copied().unwrap_or(0) };
    }
    fn cuStreamWaitEvent(s, stream: u64, event: u64, _flags: u32) {
        s.stream(stream)?;
        s.event(event)?;
    }
    fn cuEventCreate(s, event: *mut u64, _flags: u32) {
        let (current, raw) = (s.current()?, s.handle());
        s.events.insert(raw, current);
        unsafe { *event = raw };
    }
    fn cuEventDestroy_v2(s, event: u64) {
        s.current()?;
        s.events.remove(&event).ok_or(INVALID_HANDLE)?;
    }
    fn cuEventRecord(s, event: u64, stream: u64) {
        if s.event(event)? != s.stream(stream)? {
            return Err(INVALID_HANDLE);
        }
    }
    fn cuEventQuery(s, event: u64) {
        s.current()?;
        s.event(event)?;
        s.unsafe_call()?;
        if s.script().not_ready > 0 {
            s.script().not_ready -= 1;
            return Err(NOT_READY);
        }
    }
    fn cuEventElapsedTime(s, milliseconds: *mut f32, from: u64, to: u64) {
        s.current()?;
        s.event(from)?;
        s.event(to)?;
        unsafe { *milliseconds = (to.wrapping_sub(from) as i64 / 16) as f32 };
    }
    fn cuMemGetInfo_v2(s, free: *mut usize, total: *mut usize) {
        s.current()?;
        let used: usize = s.memory.values().sum();
        unsafe { (*free, *total) = (s.script().memory.saturating_sub(used), s.script().memory) };
    }
    fn cuMemPoolCreate(s, pool: *mut u64, props: *const i32) {
        let (current, raw) = (s.current()?, s.handle());
        // Pinned memory of a device: allocation type 1, no handle type, location type 1.
        let props = unsafe { std::slice::from_raw_parts(props, 4) };
        assert_eq!(props[..3], [1, 0, 1]);
        assert_eq!(0x100_0000 + props[3] as u64 * 0x100, current);
        s.pools.insert(raw, current);
        unsafe { *pool = raw };
    }
    fn cuMemPoolDestroy(s, pool: u64) {
        s.current()?;
        s.pools.remove(&pool).ok_or(INVALID_HANDLE)?;
    }
    fn cuMemPoolSetAttribute(s, pool: u64, which: u32, value: *mut c_void) {
        s.pools.get(&pool).ok_or(INVALID_HANDLE)?;
        assert_eq!((which, unsafe { *value.cast::<u64>() }), (4, u64::MAX));
    }
    fn cuMemPoolTrimTo(s, pool: u64, _keep: usize) {
        s.pools.get(&pool).ok_or(INVALID_HANDLE)?;
    }
    fn cuMemAllocFromPoolAsync(s, at: *mut u64, len: usize, pool: u64, stream: u64) {
        s.stream(stream)?;
        s.pools.get(&pool).ok_or(INVALID_HANDLE)?;
        unsafe { *at = s.take(len)? };
    }
    fn cuMemAllocAsync(s, at: *mut u64, len: usize, stream: u64) {
        s.stream(stream)?;
        unsafe { *at = s.take(len)? };
    }
    fn cuMemFreeAsync(s, at: u64, stream: u64) {
        s.stream(stream)?;
        s.give(at)?;
    }
    fn cuMemAlloc_v2(s, at: *mut u64, len: usize) {
        s.current()?;
        s.unsafe_call()?;
        unsafe { *at = s.take(len)? };
    }
    fn cuMemFree_v2(s, at: u64) {
        s.current()?;
        s.unsafe_call()?;
        s.give(at)?;
    }
    fn cuMemcpyDtoHAsync_v2(s, to: *mut u8, from: u64, len: usize, stream: u64) {
        s.stream(stream)?;
        s.copy(from, to.addr() as u64, len)?;
        let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
    fn cuMemcpyHtoDAsync_v2(s, to: u64, from: *const u8, len: usize, stream: u64) {
        s.stream(stream)?;
        s.copy(to, from.addr() as u64, len)?;
        let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
    fn cuMemHostRegister_v2(s, at: u64, len: usize, _flags: u32) {
        s.current()?;
        s.unsafe_call()?;
        let below = s.pinned.range(..at + len as u64).next_back();
        if below.is_some_and(|(start, size)| start + *size as u64 > at) {
            return Err(ALREADY_REGISTERED);
        }
        s.pinned.insert(at, len);
    }
    fn cuMemHostUnregister(s, at: u64) {
        s.current()?;
        s.unsafe_call()?;
        s.pinned.remove(&at).ok_or(NOT_REGISTERED)?;
    }
    fn cuMemHostGetDevicePointer_v2(s, device: *mut u64, at: u64, _flags: u32) {
        s.pinned.get(&at).ok_or(INVALID_VALUE)?;
        unsafe { *device = at + s.script().shift };
    }
    fn cuModuleLoadDataEx(
        s, module: *mut u64, image: *const c_char,
        count: u32, options: *mut u32, values: *mut *mut c_void
    ) {
        s.current()?;
        s.unsafe_call()?;
        let text = unsafe { CStr::from_ptr(image) }.to_string_lossy().into_owned();
        if !text.contains(".version") {
            let options = unsafe { std::slice::from_raw_parts(options, count as usize) };
            let values = unsafe { std::slice::from_raw_parts(values, count as usize) };
            assert_eq!(options, [5, 6]);
            let said = b"line 1: no version\nfatal\0";
            assert!(values[1].addr() >= said.len());
            unsafe { std::ptr::copy_nonoverlapping(said.as_ptr(), values[0].cast(), said.len()) };
            return Err(INVALID_PTX);
        }
        let raw = s.handle();
        s.modules.insert(raw, text);
        unsafe { *module = raw };
    }
    fn cuModuleGetFunction(s, function: *mut u64, module: u64, name: *const c_char) {
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let text = s.modules.get(&module).ok_or(INVALID_HANDLE)?;
        if !text.contains(&format!(".entry {name}(")) {
            return Err(NOT_FOUND);
        }
        let raw = s.handle();
        s.functions.insert(raw, name);
        unsafe { *function = raw };
    }
    fn cuLaunchKernel(
        s, function: u64,
        blocks_x: u32, _blocks_y: u32, _blocks_z: u32, threads_x: u32, _threads_y: u32,
        _threads_z: u32, _shared: u32, stream: u64, args: *mut *mut c_void, extra: *mut *mut c_void
    ) {
        s.stream(stream)?;
        assert!(extra.is_null());
        if s.functions.get(&function).ok_or(INVALID_HANDLE)? != "fill_u32" {
            return Ok(());
        }
        // fill_u32(u32 *at, u32 value, u32 count)
        let args = unsafe { std::slice::from_raw_parts(args, 3) };
        let at = unsafe { *args[0].cast::<u64>() };
        let (value, count) = unsafe { (*args[1].cast::<u32>(), *args[2].cast::<u32>()) };
        let at = std::ptr::with_exposed_provenance_mut::<u32>(at as usize);
        for index in 0..count.min(blocks_x * threads_x) {
            unsafe { *at.add(index as usize) = value };
        }
    }
    fn cuMemsetD8Async(s, at: u64, value: u8, len: usize, stream: u64) {
        s.stream(stream)?;
        let at = std::ptr::with_exposed_provenance_mut::<u8>(at as usize);
        unsafe { std::ptr::write_bytes(at, value, len) };
    }
}

/// A new script for the calls from now on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_script(text: *const c_char) {
    let text = unsafe { CStr::from_ptr(text) }.to_str().expect("ASCII");
    state().as_mut().expect("made").script = Some(Script::new(text));
}

/// Takes the calls written down so far, one a line; returns how many bytes they are, and leaves
/// them where the buffer is too small.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_log(buffer: *mut u8, len: usize) -> usize {
    let mut guard = state();
    let state = guard.as_mut().expect("made");
    let text = state.log.join("\n");
    if text.len() <= len {
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, text.len()) };
        state.log.clear();
    }
    text.len()
}

/// The calling thread's capture mode.
#[unsafe(no_mangle)]
pub extern "C" fn fake_mode() -> u32 {
    MODE.get()
}

/// What is alive: streams, events, pools, device allocations, registrations, holds on contexts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_alive(counts: *mut u64) {
    let mut guard = state();
    let state = guard.as_mut().expect("made");
    let holds: u64 = state.holds.values().sum();
    let lens = [
        state.streams.len() as u64,
        state.events.len() as u64,
        state.pools.len() as u64,
        state.memory.len() as u64,
        state.pinned.len() as u64,
        holds,
    ];
    unsafe { std::ptr::copy_nonoverlapping(lens.as_ptr(), counts, lens.len()) };
}
