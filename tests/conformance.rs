//! The contract of the driver seam, kept by every backend.
#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]
use lightering::backend::sim::{Config, Model, World};
use lightering::backend::{Backend, Timing};
use lightering::trace::Site;
use lightering::{Bytes, DeviceRange, PinnedRange};
use std::ptr::NonNull;

fn smoke(config: Config) {
    let world = World::new(config);
    let mut sim = world.device(0).unwrap();
    let mut host = vec![7u8; 8192];
    let pinner = sim.pinner();
    let at =
        unsafe { pinner.register(NonNull::new(host.as_mut_ptr()).unwrap(), Bytes(8192)) }.unwrap();
    let pin = PinnedRange::new(at, Bytes(4096)).unwrap();
    let pin2 = PinnedRange::new(at.offset(Bytes(4096)).unwrap(), Bytes(4096)).unwrap();
    let a = sim.create_stream().unwrap();
    let b = sim.create_stream().unwrap();
    let e = sim.create_event(Timing::On).unwrap();
    let f = sim.create_event(Timing::On).unwrap();
    let d = sim.alloc_device(Bytes(4096), a).unwrap();
    let d = DeviceRange::new(d, Bytes(4096)).unwrap();
    sim.copy_in(d, pin, a).unwrap();
    sim.record(e, a).unwrap();
    sim.wait(b, e, Site::Outside).unwrap();
    sim.copy_out(pin2, d, b).unwrap();
    sim.record(f, b).unwrap();
    while !sim.query(f, Site::Outside).unwrap() {}
    println!("{:?} {:?}", sim.elapsed(e, f), world.now());
    sim.free_device(d.at(), b).unwrap();
    sim.sync().unwrap();
    assert_eq!(host[4096..], [7u8; 4096]);
    pinner.unregister(at).unwrap();
    assert_eq!(sim.memory().unwrap().allocated, Bytes(0));
}

#[test]
fn smoke_all() {
    smoke(Config::timed(Model::default()));
    for seed in 0..100 {
        smoke(Config::adversary(seed));
    }
}
