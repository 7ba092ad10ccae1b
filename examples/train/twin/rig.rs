//! A device with one stream, for running a case on it.
//!
//! What it is not: a trainer. It runs one kernel and reads what that left.
//!
//! Invariant: every tensor lies between bytes that no kernel may touch, and they are looked at.
//!
//! ```text
//!   values -> bytes of the device's element -> |guard|tensor|guard| -> kernel -> bytes -> values
//! ```
//!
//! `twin` uses it.

use super::cases::{Case, Data, Tensor};
use crate::queue::Queue;
use crate::shape::{Shape, aligned};
use crate::staging::Staging;
use lightering::backend::Backend;
use lightering::backend::sim::{Config, World};
use lightering::{Bytes, DeviceRange, Error, Misuse, Result, StreamId};

/// Bytes before and after each tensor, and what is in them.
const GUARD: u64 = 256;
const FILLING: u8 = 0xa5;

/// A device that a case runs on.
pub(super) struct Rig {
    pub(super) backend: Box<dyn Backend>,
    pub(super) stream: StreamId,
}

impl Rig {
    pub(super) fn new(mut backend: Box<dyn Backend>) -> Result<Rig> {
        let stream = backend.create_stream()?;
        Ok(Rig { backend, stream })
    }

    /// The simulated device.
    pub(super) fn simulated() -> Result<Rig> {
        Rig::new(Box::new(World::new(Config::default()).device(0)?))
    }

    /// Runs the case; its tensors as the kernel left them.
    pub(super) fn run(&mut self, case: &Case, shape: &Shape) -> Result<Vec<Data>> {
        let element = shape.element;
        let data: Vec<Data> = (case.tensors)(shape).iter().map(Tensor::data).collect();
        let mut places = Vec::new();
        for tensor in &data {
            let bytes = tensor.bytes(element);
            let len = aligned(bytes.len() as u64) + 2 * GUARD;
            let whole = Queue::new(&mut *self.backend, self.stream).take(len)?;
            let mut filled = vec![FILLING; len as usize];
            filled[GUARD as usize..][..bytes.len()].copy_from_slice(&bytes);
            self.copy(whole, &mut filled, true)?;
            places.push((whole, whole.part(Bytes(GUARD), Bytes(bytes.len() as u64))?));
        }
        let ranges: Vec<DeviceRange> = places.iter().map(|place| place.1).collect();
        let mut queue = Queue::new(&mut *self.backend, self.stream);
        (case.launch)(&mut queue, shape, &ranges)?;
        self.backend.sync()?;
        let mut results = Vec::new();
        for (index, (tensor, (whole, range))) in data.iter().zip(&places).enumerate() {
            let mut bytes = vec![0; whole.len().0 as usize];
            self.copy(*whole, &mut bytes, false)?;
            let (before, rest) = bytes.split_at(GUARD as usize);
            let (inside, after) = rest.split_at(range.len().0 as usize);
            if before.iter().chain(after).any(|byte| *byte != FILLING) {
                let error = Error::usage(Misuse::OutOfRange, "kernel");
                return Err(error.detail(format!("wrote beside argument {index}")));
            }
            results.push(tensor.of_bytes(inside, element));
            Queue::new(&mut *self.backend, self.stream).give(*whole)?;
        }
        self.backend.sync()?;
        Ok(results)
    }

    /// Takes device memory and puts the bytes there.
    pub(super) fn upload(&mut self, bytes: &[u8]) -> Result<DeviceRange> {
        let range = Queue::new(&mut *self.backend, self.stream).take(bytes.len() as u64)?;
        self.copy(range, &mut bytes.to_vec(), true)?;
        Ok(range)
    }

    /// Copies all bytes of a range from or to the host.
    fn copy(&mut self, range: DeviceRange, bytes: &mut [u8], there: bool) -> Result<()> {
        let mut staging = Staging::new(&mut *self.backend, range.len())?;
        let host = staging.range(0, range.len().0)?;
        if there {
            staging.write(0, bytes)?;
            self.backend.copy_in(range, host, self.stream)?;
            self.backend.sync()?;
        } else {
            self.backend.copy_out(host, range, self.stream)?;
            self.backend.sync()?;
            staging.read(0, bytes)?;
        }
        staging.close()
    }
}
