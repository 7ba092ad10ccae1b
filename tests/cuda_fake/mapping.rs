//! Mapping that fails half way, or that the driver or the device does not have: nothing is left
//! mapped, and what is missing is named.

use crate::bench::Bench;
use crate::fake::{
    Alive, alive, is_child, library_without, name_of, names, run, script, story, text,
};
use lightering::backend::Backend;
use lightering::backend::cuda::{Cuda, MAPPING_SYMBOLS};
use lightering::{Bytes, Error, Kind, Missing};
use std::path::Path;

/// What every verb of mapping says where there is none; all else works.
fn refusals() -> Vec<Error> {
    let mut cuda = Cuda::open(0).unwrap();
    let on = cuda.create_stream().unwrap();
    let at = cuda.alloc_device(Bytes(256), on).unwrap();
    cuda.free_device(at, on).unwrap();
    let unit = Bytes(4096);
    let refusals = [
        cuda.map_granularity().map(drop),
        cuda.reserve_range(unit).map(drop),
        cuda.create_memory(unit).map(drop),
    ];
    refusals.into_iter().map(Result::unwrap_err).collect()
}

#[test]
fn a_driver_without_a_call_of_mapping_does_all_else() {
    let name = name_of!(a_driver_without_a_call_of_mapping_does_all_else);
    if is_child(name) {
        let symbol = std::env::var("FAKE_SYMBOL").unwrap();
        for error in refusals() {
            assert_eq!(error.kind(), Kind::Unavailable(Missing::Mapping), "{error}");
            assert!(error.to_string().contains(&symbol), "{error} does not say {symbol}");
        }
        return;
    }
    for symbol in MAPPING_SYMBOLS {
        let Some(dir) = library_without(symbol) else { return };
        let output = run(name, &dir, "", &[("FAKE_SYMBOL", Path::new(symbol))]);
        assert!(output.status.success(), "{symbol}: {}", text(&output));
        std::fs::remove_dir_all(dir).unwrap();
    }
}

#[test]
fn a_device_without_mapping_does_all_else() {
    story(name_of!(a_device_without_mapping_does_all_else), "mapping:0", || {
        for error in refusals() {
            assert_eq!(error.kind(), Kind::Unavailable(Missing::Mapping), "{error}");
        }
        assert!(!names().iter().any(|call| MAPPING_SYMBOLS.contains(&call.as_str())));
    });
}

#[test]
fn a_granularity_of_zero_is_none() {
    story(name_of!(a_granularity_of_zero_is_none), "granularity:0", || {
        for error in refusals() {
            assert_eq!(error.kind(), Kind::Unavailable(Missing::Mapping), "{error}");
        }
    });
}

#[test]
fn a_mapping_that_fails_half_way_is_undone() {
    story(name_of!(a_mapping_that_fails_half_way_is_undone), "", || {
        let mut b = Bench::new(0);
        let before = alive();
        let (range, memory) = b.apart;
        for fault in ["fail:cuMemMap:1:2", "fail:cuMemMap:2:1", "fail:cuMemSetAccess:1:801"] {
            script(fault);
            let error = b.cuda.map_memory(range, &memory).unwrap_err();
            assert!(!error.is_lost(), "{error}");
            assert_eq!(alive(), before, "{error}: left mapped");
            script("");
            b.cuda.map_memory(range, &memory).unwrap();
            b.cuda.unmap_memory(range).unwrap();
            assert_eq!(alive(), before);
        }
        b.close();
        assert_eq!(alive(), Alive { streams: 1, memory: 1, ..Alive::default() });
    });
}

#[test]
fn a_mapping_that_is_not_undone_is_a_loss() {
    story(name_of!(a_mapping_that_is_not_undone_is_a_loss), "", || {
        let mut b = Bench::new(0);
        let (range, memory) = b.apart;
        script("fail:cuMemSetAccess:1:801,fail:cuMemUnmap:1:1");
        let error = b.cuda.map_memory(range, &memory).unwrap_err();
        assert_eq!((error.kind(), error.driver_code()), (Kind::Lost, Some(1)), "{error}");
        assert!(error.to_string().contains("cuMemUnmap"), "{error}");
        names();
        assert!(b.cuda.unmap_memory(range).unwrap_err().is_lost());
        assert_eq!(names(), [""; 0], "the driver was called after the loss");
        std::mem::forget((b.pages, b.spare));
    });
}

#[test]
fn memory_is_asked_for_again_once_the_pool_gave_its_idle_bytes_back() {
    let name = name_of!(memory_is_asked_for_again_once_the_pool_gave_its_idle_bytes_back);
    story(name, "", || {
        let mut b = Bench::new(0);
        script("fail:cuMemCreate:1:2");
        names();
        b.cuda.create_memory(Bytes(4096)).unwrap();
        let calls = names();
        let trimmed = calls.iter().position(|call| call == "cuMemPoolTrimTo");
        assert!(trimmed.is_some_and(|at| calls[at + 1..].iter().any(|call| call == "cuMemCreate")));
        for refused in ["", ",fail:cuMemPoolTrimTo:1:1"] {
            script(&format!("fail:cuMemCreate:0:2{refused}"));
            let error = b.cuda.create_memory(Bytes(4096)).unwrap_err();
            assert_eq!(error.kind(), Kind::OutOfMemory, "{error}");
        }
        script("");
        b.abandon();
    });
}
