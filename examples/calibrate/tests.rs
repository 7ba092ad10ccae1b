//! The fault guarded against: a figure measured that is not the device's, so that everything
//! predicted with it is wrong.

use super::*;
use crate::passing::pass_on;
use lightering::backend::sim::{Config, Model, World};
use lightering::backend::{About, Arg, Fence, Grid, Kernel, Memory, Pinner, Timing};
use lightering::trace::{Actor, Site, Use};
use lightering::{Bytes, DevicePtr, DeviceRange, EventId, PinnedRange, StreamId};
use std::sync::Arc;

fn of(line: &str) -> std::result::Result<String, (String, u8)> {
    let mut out = Vec::new();
    run(line.split_whitespace().map(String::from), &mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

/// Calibrates a device of this model, and compares.
fn found_again(model: &Model) {
    let name = format!("lightering-calibrate-{}-{:p}.txt", std::process::id(), model);
    let file = std::env::temp_dir().join(name);
    std::fs::write(&file, model.to_string()).unwrap();
    let line = "--device sim --hidden 4096 --tokens 8192 --model";
    let text = of(&format!("{line} {}", file.to_str().unwrap()));
    std::fs::remove_file(&file).unwrap();
    let text = text.unwrap();
    let found: Model = text.parse().unwrap();
    let mut compared = 0;
    for ((name, wanted), (_, got)) in model.figures().zip(found.figures()) {
        if text.contains(&format!("{name} = ")) {
            compared += 1;
            let off = (got / wanted - 1.0).abs();
            assert!(off < 0.03, "{name}: found {got}, is {wanted}");
        }
    }
    // All but those that one device alone, or none of the timed kernels, can tell.
    assert_eq!(compared, model.figures().count() - 2, "{text}");
}

#[test]
fn the_figures_of_the_default_device_are_found_again() {
    found_again(&Model::default());
}

#[test]
fn each_figure_is_found_where_it_differs_from_the_default() {
    let default = Model::default();
    for (name, value) in default.figures() {
        for factor in [0.7, 1.4] {
            let mut model = default;
            model.set(name, value * factor).unwrap();
            // Both ways together are faster than one and slower than two, on any link.
            let ways = model.copy_out_bytes_per_s + model.copy_in_bytes_per_s;
            let both = model.copy_both_bytes_per_s.clamp(0.7 * ways, ways);
            let host_bytes_per_s = model.host_bytes_per_s.max(both);
            found_again(&Model { copy_both_bytes_per_s: both, host_bytes_per_s, ..model });
        }
    }
}

#[test]
fn a_link_faster_than_the_default_host_is_not_held_back_by_it() {
    let model = Model {
        copy_out_bytes_per_s: 200e9,
        copy_in_bytes_per_s: 190e9,
        copy_both_bytes_per_s: 350e9,
        host_bytes_per_s: 400e9,
        ..Model::default()
    };
    let file = std::env::temp_dir().join(format!("lightering-fast-{}.txt", std::process::id()));
    std::fs::write(&file, model.to_string()).unwrap();
    let text = of(&format!("--device sim --tokens 8192 --model {}", file.to_str().unwrap()));
    std::fs::remove_file(&file).unwrap();
    let found: Model = text.unwrap().parse().unwrap();
    assert!((found.copy_both_bytes_per_s / 350e9 - 1.0).abs() < 0.03, "{found}");
    assert_eq!(found.host_bytes_per_s, found.copy_both_bytes_per_s);
}

#[test]
fn bad_input_is_one_line_with_its_cause() {
    for (line, cause) in [
        ("--hidden 0", "--hidden 0"),
        ("--hidden 12", "--hidden 12"),
        ("--tokens 99999999999", "--tokens 99999999999"),
        ("--tokens", "--tokens: needs"),
        ("--device tpu", "--device tpu"),
        ("--device sim:99", "--device sim:99"),
        ("--device auto --model a", "--model: only with"),
        ("--device sim --model /nonexistent", "--model /nonexistent"),
        ("--what", "--what"),
    ] {
        let (text, status) = of(line).unwrap_err();
        assert!(text.contains(cause) && !text.contains('\n'), "{line}: {text}");
        assert_eq!(status, 2);
    }
    let (text, status) = of("--device sim --hidden 1048576 --tokens 1048576").unwrap_err();
    assert!(text.contains("memory") && !text.contains('\n'), "{text}");
    assert_eq!(status, 1, "a layer that no device holds");
    assert!(of("--help").unwrap().contains("--tokens"));
}

/// A backend that counts launches whose arguments are those that the kernel's PTX takes.
struct Checked {
    inner: Box<dyn Backend>,
    launches: Arc<std::sync::atomic::AtomicU64>,
}

impl Backend for Checked {
    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        // Products are a library's on a device; all others have PTX.
        if let Some(wanted) = emulator::parameters(kernel) {
            assert_eq!(emulator::letters(args), wanted, "{}", kernel.name);
            self.launches.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        } else {
            assert_eq!(kernel.name, "product");
        }
        self.inner.launch(kernel, grid, args, on)
    }

    pass_on!(memory);
    pass_on!(rest);
}

#[test]
fn every_launch_has_the_arguments_that_its_ptx_takes() {
    let world = World::new(Config::times_only(Model::default()));
    let launches = Arc::default();
    let inner = Box::new(world.device(0).unwrap());
    let checked = Checked { inner, launches: Arc::clone(&launches) };
    let mut rig = Rig::new(Box::new(checked), Clock::Simulated(world)).unwrap();
    measure::all(&mut rig, [512, 1024]).unwrap();
    assert_eq!(rig.backend.memory().unwrap().allocated, Bytes::mib(2 * 64 + 2 * 512));
    rig.close().unwrap();
    assert!(launches.load(std::sync::atomic::Ordering::Relaxed) > 1000);
}
