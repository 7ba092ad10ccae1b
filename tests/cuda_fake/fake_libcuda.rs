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
//!   gate:cuMemHostRegister_v2:5:6   such a call writes to pipe 5, then waits for a byte of pipe 6
//!   fake_script(text)   a new script for the calls from now on; counts start anew
//!   fake_log(buffer)    takes the calls written down so far: "name arg arg ..", hexadecimal
//!   fake_alive, fake_mode                                        what is left; the thread's mode
//! ```
//!
//! Compiled by `fake.rs` with nothing but the standard library.

#![allow(non_snake_case, private_interfaces)]

mod fake_args;
mod fake_state;

use fake_args::*;
use fake_state::*;
use std::sync::atomic::Ordering;

macro_rules! export {
    ($(#[$doc:meta])* $name:ident, ($($arg:ident: $type:ty),*) -> $result:ty $body:block) => {
        $(#[$doc])*
        // SAFETY: the process loads this library in the driver's place, and nothing else in it has
        // a function of that name.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $type),*) -> $result $body
    };
}

mod fake_nvtx;

macro_rules! api {
    ($(fn $name:ident($state:ident $(, $arg:ident: $type:ty)*) $body:block)*) => {$(
        export! { $name, ($($arg: $type),*) -> u32 {
            if EXITED.load(Ordering::SeqCst) {
                eprintln!("{} was called after the driver was gone", stringify!($name));
                std::process::abort();
            }
            gate(stringify!($name));
            let $state = &mut *state();
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
        } }
    )*};
}

api! {
    fn cuDriverGetVersion(s, version: At<i32>) {
        version.put(0, s.script().driver);
    }
    fn cuInit(s, _flags: u32) {
        if s.script().devices == 0 {
            return Err(NO_DEVICE);
        }
        if !s.started {
            s.started = true;
            atexit(on_exit);
        }
    }
    fn cuDeviceGetCount(s, count: At<i32>) {
        if !s.started {
            return Err(NOT_INITIALIZED);
        }
        count.put(0, s.script().devices);
    }
    fn cuDeviceGet(s, device: At<i32>, ordinal: i32) {
        if ordinal >= s.script().devices {
            return Err(INVALID_DEVICE);
        }
        device.put(0, ordinal);
    }
    fn cuDeviceGetName(s, name: At<u8>, len: i32, device: i32) {
        let text = format!("Fake {device}\0");
        assert!(s.started && text.len() <= len as usize);
        name.put_all(text.as_bytes());
    }
    fn cuDeviceTotalMem_v2(s, bytes: At<usize>, _device: i32) {
        bytes.put(0, s.script().memory);
    }
    fn cuDeviceGetAttribute(s, value: At<i32>, which: u32, device: i32) {
        let found = match which {
            // Its place on the PCI bus: bus, slot, domain.
            33 => device % 256,
            34 | 50 => 0,
            41 => s.script().unified,
            102 => s.script().mapping,
            115 => s.script().pools,
            _ => return Err(INVALID_VALUE),
        };
        value.put(0, found);
    }
    fn cuDevicePrimaryCtxRetain(s, context: At<u64>, device: i32) {
        let raw = 0x100_0000 + device as u64 * 0x100;
        *s.holds.entry(raw).or_insert(0) += 1;
        context.put(0, raw);
    }
    fn cuDevicePrimaryCtxRelease_v2(s, device: i32) {
        let raw = 0x100_0000 + device as u64 * 0x100;
        let holds = s.holds.get_mut(&raw).filter(|holds| **holds > 0);
        *holds.ok_or(INVALID_CONTEXT)? -= 1;
    }
    fn cuDevicePrimaryCtxReset_v2(s, device: i32) {
        s.destroyed.insert(0x100_0000 + device as u64 * 0x100);
    }
    fn cuCtxGetCurrent(s, context: At<u64>) {
        assert!(s.started);
        context.put(0, CURRENT.get());
    }
    fn cuCtxSetCurrent(s, context: u64) {
        if s.destroyed.contains(&context) {
            return Err(DESTROYED);
        }
        CURRENT.set(context);
    }
    fn cuCtxSynchronize(s) {
        s.current()?;
        if !s.script().captures.is_empty() {
            // As seen on a device: whoever captures finds its graph spoiled.
            s.script().captures.values_mut().for_each(|status| *status = INVALIDATED);
            return Err(CAPTURE_UNSUPPORTED);
        }
    }
    fn cuThreadExchangeStreamCaptureMode(s, mode: At<u32>) {
        assert!(s.started);
        mode.put(0, MODE.replace(mode.get(0)));
    }
    fn cuStreamCreate(s, stream: At<u64>, _flags: u32) {
        let (current, raw) = (s.current()?, s.handle());
        s.streams.insert(raw, current);
        stream.put(0, raw);
    }
    fn cuStreamDestroy_v2(s, stream: u64) {
        s.stream(stream)?;
        s.streams.remove(&stream).ok_or(INVALID_HANDLE)?;
    }
    fn cuStreamGetCtx(s, stream: u64, context: At<u64>) {
        context.put(0, s.stream(stream)?);
    }
    fn cuStreamSynchronize(s, stream: u64) {
        s.stream(stream)?;
        s.uncaptured(stream)?;
    }
    fn cuStreamQuery(s, stream: u64) {
        s.stream(stream)?;
        s.uncaptured(stream)?;
        s.unsafe_call()?;
        if s.script().not_ready > 0 {
            s.script().not_ready -= 1;
            return Err(NOT_READY);
        }
    }
    fn cuStreamIsCapturing(s, stream: u64, status: At<u32>) {
        s.stream(stream)?;
        status.put(0, s.script().captures.get(&stream).copied().unwrap_or(0));
    }
    fn cuStreamBeginCapture_v2(s, stream: u64, _mode: u32) {
        s.stream(stream)?;
        s.script().captures.insert(stream, 1);
    }
    fn cuStreamEndCapture(s, stream: u64, graph: At<u64>) {
        s.stream(stream)?;
        match s.script().captures.remove(&stream) {
            None => return Err(NOT_CAPTURING),
            Some(INVALIDATED) => return Err(CAPTURE_INVALIDATED),
            Some(_) => graph.put(0, s.handle()),
        }
    }
    fn cuGraphDestroy(s, _graph: u64) {
        assert!(s.started);
    }
    fn cuStreamWaitEvent(s, stream: u64, event: u64, _flags: u32) {
        s.stream(stream)?;
        s.event(event)?;
    }
    fn cuEventCreate(s, event: At<u64>, _flags: u32) {
        let (current, raw) = (s.current()?, s.handle());
        s.events.insert(raw, current);
        event.put(0, raw);
    }
    fn cuEventDestroy_v2(s, event: u64) {
        s.current()?;
        s.events.remove(&event).ok_or(INVALID_HANDLE)?;
    }
    fn cuEventRecord(s, event: u64, stream: u64) {
        if s.event(event)? != s.stream(stream)? {
            return Err(INVALID_HANDLE);
        }
        s.moment += 1;
        s.recorded.insert(event, s.moment);
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
    fn cuEventElapsedTime(s, milliseconds: At<f32>, from: u64, to: u64) {
        s.current()?;
        s.event(from)?;
        s.event(to)?;
        // A millisecond from each recording to the next.
        let at = |event: u64| s.recorded.get(&event).copied().ok_or(INVALID_HANDLE);
        milliseconds.put(0, (at(to)? as i64 - at(from)? as i64) as f32);
    }
    fn cuMemGetInfo_v2(s, free: At<usize>, total: At<usize>) {
        s.current()?;
        let used = s.used();
        free.put(0, s.script().memory.saturating_sub(used));
        total.put(0, s.script().memory);
    }
    fn cuPointerGetAttributes(s, count: u32, which: At<u32>, values: At<u64>, at: u64) {
        s.current()?;
        let (kind, device, start, len) = s.allocation(at);
        for index in 0..count as usize {
            match which.get(index) {
                2 => values.at::<u32>(index).put(0, kind),
                9 => values.at::<i32>(index).put(0, device),
                11 => values.at::<u64>(index).put(0, start),
                12 => values.at::<usize>(index).put(0, len),
                _ => return Err(INVALID_VALUE),
            }
        }
    }
    fn cuMemPoolCreate(s, pool: At<u64>, props: At<i32>) {
        s.device_memory(props)?;
        let (current, raw) = (s.current()?, s.handle());
        s.pools.insert(raw, current);
        pool.put(0, raw);
    }
    fn cuMemPoolDestroy(s, pool: u64) {
        s.current()?;
        s.pools.remove(&pool).ok_or(INVALID_HANDLE)?;
    }
    fn cuMemPoolSetAttribute(s, pool: u64, which: u32, value: At<u64>) {
        s.pools.get(&pool).ok_or(INVALID_HANDLE)?;
        assert_eq!((which, value.get(0)), (4, u64::MAX));
    }
    fn cuMemPoolTrimTo(s, pool: u64, _keep: usize) {
        s.pools.get(&pool).ok_or(INVALID_HANDLE)?;
    }
    fn cuMemAllocFromPoolAsync(s, at: At<u64>, len: usize, pool: u64, stream: u64) {
        s.stream(stream)?;
        s.pools.get(&pool).ok_or(INVALID_HANDLE)?;
        at.put(0, s.take(len)?);
    }
    fn cuMemAllocAsync(s, at: At<u64>, len: usize, stream: u64) {
        s.stream(stream)?;
        at.put(0, s.take(len)?);
    }
    fn cuMemFreeAsync(s, at: u64, stream: u64) {
        s.stream(stream)?;
        s.give(at)?;
    }
    fn cuMemAlloc_v2(s, at: At<u64>, len: usize) {
        s.current()?;
        s.unsafe_call()?;
        at.put(0, s.take(len)?);
    }
    fn cuMemFree_v2(s, at: u64) {
        s.current()?;
        s.unsafe_call()?;
        s.give(at)?;
    }
    fn cuMemGetAllocationGranularity(s, bytes: At<usize>, props: At<i32>, _which: u32) {
        s.device_memory(props)?;
        bytes.put(0, s.script().granularity);
    }
    fn cuMemAddressReserve(
        s, at: At<u64>, len: usize, _alignment: usize, _wish: u64, flags: u64
    ) {
        s.current()?;
        s.unsafe_call()?;
        assert_eq!(flags, 0);
        at.put(0, s.reserve(len)?);
    }
    fn cuMemAddressFree(s, at: u64, len: usize) {
        s.unsafe_call()?;
        s.free_range(at, len)?;
    }
    fn cuMemCreate(s, memory: At<u64>, len: usize, props: At<i32>, flags: u64) {
        s.unsafe_call()?;
        s.device_memory(props)?;
        assert_eq!(flags, 0);
        s.check_room(len)?;
        let raw = s.handle();
        s.handles.insert(raw, len);
        memory.put(0, raw);
    }
    fn cuMemRelease(s, memory: u64) {
        s.unsafe_call()?;
        s.handles.remove(&memory).ok_or(INVALID_VALUE)?;
    }
    fn cuMemMap(s, at: u64, len: usize, offset: usize, memory: u64, flags: u64) {
        s.current()?;
        s.unsafe_call()?;
        assert_eq!((offset, flags), (0, 0));
        s.map(at, len, memory)?;
    }
    fn cuMemSetAccess(s, at: u64, len: usize, who: At<i32>, count: usize) {
        s.unsafe_call()?;
        // This device, to read and write.
        let who = [0, 1, 2].map(|index| who.get(index));
        assert_eq!((who[0], who[2], count), (1, 3, 1));
        assert_eq!(0x100_0000 + who[1] as u64 * 0x100, s.current()?);
        for at in s.mappings(at, len)? {
            s.mapped.entry(at).and_modify(|mapping| mapping.2 = true);
        }
    }
    fn cuMemUnmap(s, at: u64, len: usize) {
        s.current()?;
        s.unsafe_call()?;
        for at in s.mappings(at, len)? {
            s.mapped.remove(&at);
        }
    }
    fn cuMemcpyDtoHAsync_v2(s, to: At<u8>, from: u64, len: usize, stream: u64) {
        s.stream(stream)?;
        s.copy(from, to.addr(), len)?;
        to.copy(At::device(from), len);
    }
    fn cuMemcpyHtoDAsync_v2(s, to: u64, from: At<u8>, len: usize, stream: u64) {
        s.stream(stream)?;
        s.copy(to, from.addr(), len)?;
        At::device(to).copy(from, len);
    }
    fn cuMemcpyBatchAsync(
        s, to: At<u64>, from: At<u64>, sizes: At<usize>, count: usize,
        attributes: At<u32>, firsts: At<usize>, kinds: usize, bad: At<usize>, stream: u64
    ) {
        bad.put(0, usize::MAX);
        s.batch([to, from], sizes, count, attributes, [firsts.get(0), kinds], stream)?;
    }
    fn cuMemcpyBatchAsync_v2(
        s, to: At<u64>, from: At<u64>, sizes: At<usize>, count: usize,
        attributes: At<u32>, firsts: At<usize>, kinds: usize, stream: u64
    ) {
        s.batch([to, from], sizes, count, attributes, [firsts.get(0), kinds], stream)?;
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
    fn cuMemHostGetDevicePointer_v2(s, device: At<u64>, at: u64, _flags: u32) {
        s.pinned.get(&at).ok_or(INVALID_VALUE)?;
        device.put(0, at + s.script().shift);
    }
    fn cuModuleLoadDataEx(
        s, module: At<u64>, image: Text,
        count: u32, options: At<u32>, values: At<At<u8>>
    ) {
        s.current()?;
        s.unsafe_call()?;
        let text = image.read();
        if !text.contains(".version") {
            assert_eq!((count, options.get(0), options.get(1)), (2, 5, 6));
            let said = b"line 1: no version\nfatal\0";
            assert!(values.get(1).addr() >= said.len() as u64);
            values.get(0).put_all(said);
            return Err(INVALID_PTX);
        }
        let raw = s.handle();
        s.modules.insert(raw, text);
        module.put(0, raw);
    }
    fn cuModuleGetFunction(s, function: At<u64>, module: u64, name: Text) {
        let name = name.read();
        let text = s.modules.get(&module).ok_or(INVALID_HANDLE)?;
        if !text.contains(&format!(".entry {name}(")) {
            return Err(NOT_FOUND);
        }
        let raw = s.handle();
        s.functions.insert(raw, name);
        function.put(0, raw);
    }
    fn cuLaunchKernel(
        s, function: u64,
        blocks_x: u32, _blocks_y: u32, _blocks_z: u32, threads_x: u32, _threads_y: u32,
        _threads_z: u32, _shared: u32, stream: u64, args: At<At<u32>>, extra: At<u8>
    ) {
        s.stream(stream)?;
        assert_eq!(extra.addr(), 0);
        if s.functions.get(&function).ok_or(INVALID_HANDLE)? != "fill_u32" {
            return Ok(());
        }
        // fill_u32(u32 *at, u32 value, u32 count)
        let at = At::device(args.get(0).cast::<u64>().get(0)).cast::<u32>();
        let (value, count) = (args.get(1).get(0), args.get(2).get(0));
        (0..count.min(blocks_x * threads_x)).for_each(|index| at.put(index as usize, value));
    }
    fn cuMemsetD8Async(s, at: u64, value: u8, len: usize, stream: u64) {
        s.stream(stream)?;
        (0..len).for_each(|index| At::device(at).put(index, value));
    }
}

export! {
    /// A new script for the calls from now on.
    fake_script, (text: Text) -> () {
        state().script = Some(Script::new(&text.read()));
    }
}

export! {
    /// Takes the calls written down so far, one a line; returns how many bytes they are, and
    /// leaves them where the buffer is too small.
    fake_log, (buffer: At<u8>, len: usize) -> usize {
        let state = &mut *state();
        let text = state.log.join("\n");
        if text.len() <= len {
            buffer.put_all(text.as_bytes());
            state.log.clear();
        }
        text.len()
    }
}

export! {
    /// The calling thread's capture mode.
    fake_mode, () -> u32 { MODE.get() }
}

export! {
    /// What is alive: streams, events, pools, device allocations, registrations, holds on contexts,
    /// reserved ranges, memory to be mapped, mappings.
    fake_alive, (counts: At<u64>) -> () {
        let state = &*state();
        let holds: u64 = state.holds.values().sum();
        let lens = [
            state.streams.len() as u64,
            state.events.len() as u64,
            state.pools.len() as u64,
            state.memory.len() as u64,
            state.pinned.len() as u64,
            holds,
            state.ranges.len() as u64,
            state.handles.len() as u64,
            state.mapped.len() as u64,
        ];
        lens.into_iter().enumerate().for_each(|(index, len)| counts.put(index, len));
    }
}
