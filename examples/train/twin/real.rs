//! CUDA's form of the kernels on a real device, where there is one.
//!
//! What it is not: a benchmark of the example. It says what each kernel moves a second at the
//! largest sizes, so that a slow one is seen alone.
//!
//! Invariant: without a device, or without cuBLAS, it says aloud that nothing was tried.
//!
//! ```text
//!   LIGHTERING_CUDA=0 (the default) -> cuda:0 -> every case, every shape -> a table, then an error
//! ```
//!
//! `twin` has the cases.

use super::rig::Rig;
use super::{SHAPES, cases, compare};
use crate::blas::Cublas;
use crate::emulator::aloud;
use crate::products::Products;
use crate::queue::Queue;
use lightering::Result;
use lightering::backend::{Arg, Backend, Grid, Kernel, Timing};

/// The real device; `None`, said aloud, where there is none.
fn device() -> Option<Box<dyn Backend>> {
    let ordinal = std::env::var("LIGHTERING_CUDA").ok().and_then(|text| text.parse().ok());
    let ordinal = ordinal.unwrap_or(0);
    match open(ordinal) {
        Ok(backend) => Some(backend),
        Err(error) => {
            aloud(&format!("CUDA's kernels were NOT tried on a device: {error}"));
            None
        }
    }
}

fn open(ordinal: u32) -> Result<Box<dyn Backend>> {
    let inner = lightering::open(&format!("cuda:{ordinal}"))?.backend;
    Ok(Box::new(Products::new(Box::new(Cublas::open(ordinal)?), inner)))
}

#[test]
fn every_kernel_agrees_with_its_host_form_on_the_device() {
    let Some(backend) = device() else { return };
    aloud(&format!("on {}", backend.about().name));
    drop(backend);
    let mut wrong = Vec::new();
    for (tokens, hidden) in SHAPES {
        let mut rig = || Rig::new(device().unwrap());
        wrong.extend(compare(&mut rig, &cases::all(tokens, hidden), &mut aloud));
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
