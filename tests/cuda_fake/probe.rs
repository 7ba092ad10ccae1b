//! A driver that is absent, old, incomplete or does not start: each must be a typed error that says
//! which, with no panic, and an answer that does not change from call to call.

use crate::fake::{
    Alive, alive, calls, is_child, library, library_without, name_of, names, run, scratch, story,
    text,
};
use lightering::backend::Backend;
use lightering::backend::cuda::{Cuda, SYMBOLS};
use lightering::{Error, Kind, Missing};
use std::path::Path;

fn refusal() -> Error {
    Cuda::open(0).expect_err("the device must not open")
}

fn unavailable(error: &Error, missing: Missing, words: &[&str]) {
    assert_eq!(error.kind(), Kind::Unavailable(missing), "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error} does not say {word:?}");
    }
}

#[test]
fn h44_a_library_that_does_not_load_is_no_driver() {
    let name = name_of!(h44_a_library_that_does_not_load_is_no_driver);
    if is_child(name) {
        unavailable(&refusal(), Missing::Driver, &["libcuda.so.1: ", "libcuda.so: "]);
        let said = refusal().to_string();
        assert!(!said.contains("libcuda.so.1: libcuda.so.1: "), "named twice: {said}");
        unavailable(&Cuda::count().unwrap_err(), Missing::Driver, &[]);
        return;
    }
    let dir = scratch().join("broken");
    std::fs::create_dir_all(&dir).unwrap();
    for name in ["libcuda.so.1", "libcuda.so"] {
        std::fs::write(dir.join(name), "no library").unwrap();
    }
    let output = run(name, &dir, "", &[]);
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn a_stub_library_is_told_from_a_driver() {
    story(name_of!(a_stub_library_is_told_from_a_driver), "fail:cuDriverGetVersion:0:34", || {
        unavailable(&refusal(), Missing::StubLibrary, &["stub", "34", "cuDriverGetVersion"]);
    });
}

#[test]
fn a_stub_that_tells_a_version_is_found_at_its_start() {
    story(name_of!(a_stub_that_tells_a_version_is_found_at_its_start), "fail:cuInit:0:34", || {
        unavailable(&refusal(), Missing::StubLibrary, &["cuInit"]);
    });
}

#[test]
fn an_old_driver_is_named_with_both_versions_and_never_started() {
    story(
        name_of!(an_old_driver_is_named_with_both_versions_and_never_started),
        "driver:11080",
        || {
            unavailable(&refusal(), Missing::OldDriver, &["11.8 (11080)", "12.0 (12000)"]);
            assert_eq!(names(), ["cuDriverGetVersion"]);
        },
    );
}

#[test]
fn the_oldest_driver_that_is_enough_opens() {
    story(name_of!(the_oldest_driver_that_is_enough_opens), "driver:12000", || {
        assert_eq!(Cuda::open(0).unwrap().about().driver, 12_000);
    });
}

#[test]
fn no_device_is_not_no_driver() {
    story(name_of!(no_device_is_not_no_driver), "devices:0", || {
        unavailable(&refusal(), Missing::Device, &["no CUDA device", "NO_DEVICE"]);
        assert_eq!(Cuda::count().unwrap_err().kind(), Kind::Unavailable(Missing::Device));
    });
}

#[test]
fn a_device_past_the_last_is_named_with_their_number() {
    story(name_of!(a_device_past_the_last_is_named_with_their_number), "devices:2", || {
        assert_eq!(Cuda::count().unwrap(), 2);
        assert_eq!(Cuda::open(1).unwrap().about().name, "Fake 1");
        let error = Cuda::open(2).unwrap_err();
        unavailable(&error, Missing::Device, &["device 2", "shows 2"]);
        unavailable(&Cuda::open(u32::MAX).unwrap_err(), Missing::Device, &["4294967295"]);
    });
}

#[test]
fn a_device_apart_from_the_hosts_addresses_is_refused() {
    story(name_of!(a_device_apart_from_the_hosts_addresses_is_refused), "unified:0", || {
        unavailable(&refusal(), Missing::Device, &["address space"]);
        assert_eq!(alive(), Alive::default());
    });
}

#[test]
fn h45_a_driver_without_a_symbol_is_refused_by_the_symbols_name() {
    let name = name_of!(h45_a_driver_without_a_symbol_is_refused_by_the_symbols_name);
    if is_child(name) {
        let symbol = std::env::var("FAKE_SYMBOL").unwrap();
        unavailable(&refusal(), Missing::Symbol, &[&format!("no {symbol}")]);
        assert!(!names().contains(&"cuInit".to_owned()), "an incomplete driver is never started");
        return;
    }
    for symbol in SYMBOLS {
        let Some(dir) = library_without(symbol) else { return };
        let output = run(name, &dir, "", &[("FAKE_SYMBOL", Path::new(symbol))]);
        assert!(output.status.success(), "{symbol}: {}", text(&output));
        std::fs::remove_dir_all(dir).unwrap();
    }
}

#[test]
fn h46_each_way_not_to_start_is_told_from_the_others() {
    let name = name_of!(h46_each_way_not_to_start_is_told_from_the_others);
    if is_child(name) {
        let first = refusal();
        let before = calls().len();
        assert!(before > 0);
        assert_eq!(refusal(), first, "the answer is the same at every call");
        assert_eq!(calls().len(), 0, "a probe that failed is not tried again");
        println!("[[{:?}|{first}]]", first.kind());
        return;
    }
    let Some(dir) = library() else { return };
    let mut seen = Vec::new();
    for (code, kind) in [
        (2, "OutOfMemory"),
        (34, "Unavailable(StubLibrary)"),
        (46, "Unavailable(Device)"),
        (100, "Unavailable(Device)"),
        (101, "Unavailable(Device)"),
        (802, "Unavailable(Device)"),
        (803, "Unavailable(Driver)"),
        (804, "Unavailable(Device)"),
        (805, "Unavailable(Device)"),
        (999, "Unavailable(Driver)"),
        (4, "Unavailable(Driver)"),
        (12345, "Unavailable(Driver)"),
    ] {
        for call in ["cuDriverGetVersion", "cuInit"] {
            let output = run(name, dir, &format!("fail:{call}:0:{code}"), &[]);
            let said = text(&output);
            let told = said.split("[[").nth(1).and_then(|said| said.split("]]").next());
            let told = told.unwrap_or_else(|| panic!("{call} {code}: {said}"));
            assert!(output.status.success(), "{said}");
            assert!(told.starts_with(kind), "{call} {code}: {told}");
            assert!(told.contains(call) && told.contains(&code.to_string()), "{told}");
            assert!(!seen.contains(&told.to_owned()), "said twice: {told}");
            seen.push(told.to_owned());
        }
    }
}
