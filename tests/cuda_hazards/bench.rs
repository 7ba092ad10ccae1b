//! An engine on a real device, a framework with streams and memory of its own, and a process for
//! each story.
//!
//! What it is not: a test.
//!
//! Invariant: bytes are compared on the host, where their copy out is known done.
//!
//! ```text
//!   story(name, code, body) -> without a device: said aloud     with one: a child runs the body
//! ```
//!
//! The files beside it use it.

use crate::device::{Host, cuda, fill, poll, range, spin};
use lightering::backend::cuda::Cuda;
use lightering::backend::{Backend, Timing};
use lightering::{
    Acquire, Budget, Bytes, DeviceRange, Engine, EventId, Evict, Options, PinnedPool, PoolOptions,
    Storage, StreamId,
};
use std::process::Command;

const STORY: &str = "HAZARD_STORY";
pub(crate) const MIB: u64 = 1 << 20;

/// The full name of a test of this module, as the test runner takes it.
macro_rules! name_of {
    ($name:ident) => {
        concat!(module_path!(), "::", stringify!($name)).split_once("::").unwrap().1
    };
}
pub(crate) use name_of;

/// Runs the body in a child process, which must end with the code given; as often as told.
pub(crate) fn story(name: &str, times: u32, code: i32, body: fn()) {
    if std::env::var_os(STORY).is_some_and(|story| story == name) {
        return body();
    }
    if cuda().is_none() {
        return;
    }
    for time in 0..times {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture", "--ignored", "--test-threads=1"])
            .env(STORY, name)
            .output()
            .unwrap();
        let (out, err) = (&output.stdout, &output.stderr);
        let said = format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err));
        let status = output.status;
        assert_eq!(status.code(), Some(code), "{name}, time {time}: {status} {said}");
        assert!(code != 0 || said.contains("1 passed"), "{said}");
        if let Some(why) = said.lines().find(|line| line.contains("NOT run")) {
            return println!("{name}: {why}");
        }
    }
    println!("{name}: ran on a device, {times} times");
}

/// A stream as the framework and the engine name it.
#[derive(Clone, Copy)]
pub(crate) struct Both {
    pub(crate) here: StreamId,
    pub(crate) engine: StreamId,
}

/// The engine goes first, also where a test fails: the streams that it uses are the device's.
pub(crate) struct Bench {
    pub(crate) engine: Engine,
    pub(crate) pool: PinnedPool,
    pub(crate) cuda: Cuda,
    pub(crate) streams: Vec<Both>,
}

impl Bench {
    pub(crate) fn new(streams: usize, pool: Bytes) -> Bench {
        let bounds = Options {
            keep_last_count: 0,
            prefetch_count_max: 0,
            trunk_bytes_max: Bytes::mib(4),
            ..Options::default()
        };
        Bench::with(streams, pool, bounds)
    }

    pub(crate) fn with(streams: usize, pool: Bytes, bounds: Options) -> Bench {
        let mut cuda = Cuda::open(0).unwrap();
        let options = PoolOptions {
            budget: Budget::Bytes(pool),
            arena_bytes: pool,
            arena_bytes_max: pool,
            ..PoolOptions::default()
        };
        let pool = PinnedPool::new(cuda.pinner(), options).unwrap();
        let mut engine = Engine::new(Box::new(Cuda::open(0).unwrap()), &pool, bounds).unwrap();
        let streams = (0..streams)
            .map(|_| {
                let here = cuda.create_stream().unwrap();
                let engine = engine.adopt_stream(cuda.raw_stream(here).unwrap()).unwrap();
                Both { here, engine }
            })
            .collect();
        let mut bench = Bench { cuda, engine, pool, streams };
        // Loads the kernels, which may wait for the device.
        bench.spin(0, 0);
        bench.cuda.sync().unwrap();
        bench
    }

    /// Holds a stream for so many milliseconds.
    pub(crate) fn spin(&mut self, s: usize, milliseconds: u64) {
        spin(&mut self.cuda, milliseconds, self.streams[s].here).unwrap();
    }

    pub(crate) fn fill(&mut self, s: usize, range: DeviceRange, value: u32) {
        fill(&mut self.cuda, range, value, self.streams[s].here).unwrap();
    }

    /// A reader on stream `s`: a copy to the host, compared by `Reader::must_be`.
    pub(crate) fn read(&mut self, s: usize, range: DeviceRange) -> Reader {
        let host = Host::new(&self.cuda, range.len().0);
        self.cuda.copy_out(host.range, range, self.streams[s].here).unwrap();
        let event = self.cuda.create_event(Timing::Off).unwrap();
        self.cuda.record(event, self.streams[s].here).unwrap();
        Reader { host, event }
    }

    pub(crate) fn take(&mut self, s: usize, len: u64) -> DeviceRange {
        range(self.cuda.alloc_device(Bytes(len), self.streams[s].here).unwrap(), len)
    }

    pub(crate) fn give(&mut self, s: usize, range: DeviceRange) {
        self.cuda.free_device(range.at(), self.streams[s].here).unwrap();
    }

    /// A storage of the engine's own that shows `value`, written after the stream was held.
    pub(crate) fn owned(&mut self, s: usize, len: u64, value: u32, held: u64) -> Storage {
        let on = self.streams[s].engine;
        let storage = self.engine.alloc(Bytes(len), on, "owned").unwrap();
        let range = self.engine.range(storage.id()).unwrap();
        self.spin(s, held);
        self.fill(s, range, value);
        storage
    }

    pub(crate) fn evict(&mut self, s: usize, storage: &Storage) {
        let became = self.engine.evict(storage.id(), self.streams[s].engine).unwrap();
        assert!(matches!(became, Evict::Moving(_) | Evict::Clean), "{became:?}");
    }

    pub(crate) fn flush(&mut self, s: usize) {
        self.engine.flush(self.streams[s].engine).unwrap();
    }

    pub(crate) fn acquire(&mut self, s: usize, storage: &Storage) -> DeviceRange {
        match self.engine.acquire(storage.id(), self.streams[s].engine).unwrap() {
            Acquire::Ready(range) => range,
            Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
        }
    }

    pub(crate) fn acquire_mut(&mut self, s: usize, storage: &Storage) -> DeviceRange {
        match self.engine.acquire_mut(storage.id(), self.streams[s].engine).unwrap() {
            Acquire::Ready(range) => range,
            Acquire::NeedsRoom(_) => panic!("the engine owns the bytes"),
        }
    }

    /// A storage of the framework's whose bytes are on the host alone.
    pub(crate) fn away(&mut self, len: u64, value: u32) -> Storage {
        let range = self.take(0, len);
        self.fill(0, range, value);
        let storage = self.engine.adopt(range, "away").unwrap();
        self.evict(0, &storage);
        self.flush(0);
        let on = self.streams[0].engine;
        while self.engine.releasable(on).unwrap() != Some(storage.id()) {}
        self.give(0, range);
        storage
    }

    /// Everything is given back.
    pub(crate) fn close(mut self) {
        self.engine.drain().unwrap();
        self.engine.shutdown().unwrap();
        let stats = self.pool.stats();
        assert_eq!((stats.lent, stats.quarantined), (Bytes::ZERO, Bytes::ZERO));
    }
}

/// A copy to the host under way.
pub(crate) struct Reader {
    host: Host,
    event: EventId,
}

impl Reader {
    /// Waits, and compares every word.
    #[track_caller]
    pub(crate) fn must_be(mut self, bench: &mut Bench, value: u32) {
        poll(&mut bench.cuda, self.event).unwrap();
        let wrong = self.host.words().iter().position(|word| *word != value);
        assert_eq!(wrong.map(|at| (at, self.host.words()[at])), None, "{value} is expected");
        self.host.close();
    }
}
