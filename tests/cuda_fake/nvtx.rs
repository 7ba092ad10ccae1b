//! Ranges for a profiler that are told nobody, told though nobody listens, left open, or that cost
//! a call where they are off. The library that hears them is the fake driver by its other name.

use crate::fake::{is_child, library, name_of, names, run, scratch, text};
use lightering::backend::cuda::Cuda;
use lightering::backend::{Backend, Listening};
use lightering::pack::Strip;
use lightering::{Bytes, DeviceRange, Engine, Options, PinnedPool, PoolOptions};
use std::path::{Path, PathBuf};

const LEN: Bytes = Bytes::kib(4);

/// Two storages out and back, one of them by a verb that fails; a batch, and a span around it all.
fn work(nvtx: bool) -> (Listening, Vec<String>) {
    let mut backend = Cuda::open(0).unwrap();
    let budget = lightering::Budget::Bytes(Bytes::mib(1));
    let options = PoolOptions { budget, ..PoolOptions::default() };
    let pool = PinnedPool::new(backend.pinner(), options).unwrap();
    let here = backend.create_stream().unwrap();
    let at = backend.alloc_device(LEN, here).unwrap();
    let range = DeviceRange::new(at, LEN).unwrap();
    let raw = backend.raw_stream(here).unwrap();
    let device = Box::new(Cuda::open(0).unwrap());
    let mut engine = Engine::new(device, &pool, Options { nvtx, ..Options::default() }).unwrap();
    let on = engine.adopt_stream(raw).unwrap();
    names();
    engine.begin_span(on, "layer 3").unwrap();
    let storage = engine.adopt(range, "input 3").unwrap();
    engine.evict(storage.id(), on).unwrap();
    assert!(engine.evict(storage.id(), on).is_err(), "it left already");
    engine.flush(on).unwrap();
    while engine.releasable(on).unwrap().is_some() {}
    engine.refill(storage.id(), range, on).unwrap();
    engine.acquire(storage.id(), on).unwrap();
    engine.end_span(on).unwrap();
    engine.release(storage, on).unwrap();
    let batch = engine.gather(&[Strip::whole(range).unwrap()], on, "rows").unwrap();
    engine.discard(batch).unwrap();
    let said = names().into_iter().filter(|name| !name.starts_with("cu")).collect();
    let listening = engine.listening();
    engine.shutdown().unwrap();
    backend.free_device(at, here).unwrap();
    (listening, said)
}

/// A folder in which the driver is the NVTX library as well, under that name.
fn with_nvtx(name: &str) -> Option<PathBuf> {
    let driver = library()?.join("libcuda.so.1");
    let dir = scratch().join(format!("nvtx-{name}"));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::copy(driver, dir.join("libcuda.so.1")).unwrap();
    std::fs::hard_link(dir.join("libcuda.so.1"), dir.join("libnvToolsExt.so.1")).unwrap();
    Some(dir)
}

fn story(name: &str, dir: Option<&Path>, script: &str) {
    let Some(dir) = dir else { return };
    let output = run(name, dir, script, &[]);
    let said = text(&output);
    assert!(output.status.success() && said.contains("1 passed"), "{name}: {said}");
}

#[test]
fn a_tool_hears_of_each_verb_by_the_storages_name_and_no_range_stays_open() {
    let name = name_of!(a_tool_hears_of_each_verb_by_the_storages_name_and_no_range_stays_open);
    if is_child(name) {
        let (listening, said) = work(true);
        assert_eq!(listening, Listening::Tool);
        let (start, stop) = (&said[0], &said[said.len() - 3]);
        let number = start.strip_prefix("start:layer_3:").unwrap();
        assert_eq!(*stop, format!("stop:{number}"));
        let verbs: Vec<&str> = said.iter().map(String::as_str).filter(|s| s.len() < 20).collect();
        let (evict, refill, acquire) = ("begin:evict_input_3", "begin:refill_input_3", "end");
        assert_eq!(said[1..7], [evict, "end", evict, "end", refill, acquire].map(String::from));
        assert_eq!(said[7..9], ["begin:acquire_input_3", "end"].map(String::from));
        assert_eq!(said[said.len() - 2..], ["begin:gather_rows", "end"].map(String::from));
        let count = |what: &str| verbs.iter().filter(|said| said.starts_with(what)).count();
        assert_eq!(count("end"), said.iter().filter(|said| said.starts_with("begin")).count());
        return;
    }
    story(name, with_nvtx("heard").as_deref(), "tool:1");
}

#[test]
fn a_library_without_a_tool_is_said_and_not_told_anything() {
    let name = name_of!(a_library_without_a_tool_is_said_and_not_told_anything);
    if is_child(name) {
        let (listening, said) = work(true);
        assert_eq!((listening, said), (Listening::NoTool, Vec::new()));
        assert!(listening.to_string().contains("no tool listens"));
        return;
    }
    story(name, with_nvtx("unheard").as_deref(), "");
}

#[test]
fn a_machine_without_the_library_says_so_and_works_on() {
    let name = name_of!(a_machine_without_the_library_says_so_and_works_on);
    if is_child(name) {
        let (listening, said) = work(true);
        assert_eq!((listening, said), (Listening::NoLibrary, Vec::new()));
        assert!(listening.to_string().contains("libnvtx3interop"));
        return;
    }
    story(name, library(), "tool:1");
}

#[test]
fn ranges_that_are_off_make_no_call_where_a_tool_listens() {
    let name = name_of!(ranges_that_are_off_make_no_call_where_a_tool_listens);
    if is_child(name) {
        assert_eq!(work(false), (Listening::Off, Vec::new()));
        return;
    }
    story(name, with_nvtx("off").as_deref(), "tool:1");
}
