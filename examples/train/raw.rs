//! The control: layers' inputs stay on the device, and as many bytes are copied beside the model.
//!
//! What it is not: a way to save memory. What is copied out is thrown away, and what comes back
//! goes where nobody reads it. A step of it says what the copies themselves cost: what the mode
//! `checkpoint+offload` takes beyond it is the engine's doing.
//!
//! Invariant: the model waits for no copy, but that an input is given back after the copy from it,
//! which started a whole backward ago.
//!
//! ```text
//!   compute  |layer 0|layer 1| ..     .. |layer 1 back|layer 0 back|
//!   out              |== 0 ==|== 1 ==| ..
//!   back                                 |===== 1 =====|===== 0 =====|
//! ```
//!
//! `main` makes one for the mode `checkpoint+raw`; `trainer` uses it.

use crate::inputs::{Inputs, Moved, Resident};
use crate::offload::{self, Limits};
use lightering::backend::{Backend, Timing};
use lightering::pinned::{Block, Budget, Client, PinnedPool, PoolOptions};
use lightering::trace::Site;
use lightering::{Bytes, DeviceRange, EventId, Name, PinnedRange, Result, StreamId};

/// Inputs that stay, with copies beside them.
pub(crate) struct Raw {
    inputs: Resident,
    out: StreamId,
    back: StreamId,
    client: Client,
    /// Where each input that would leave is copied to, and the event behind that copy.
    copies: Vec<(Block, EventId)>,
    /// What is copied back lands here.
    sink: DeviceRange,
    /// A point on the model's stream that copies start behind.
    pace: EventId,
    /// Behind the last copy back of a step.
    all_back: EventId,
    moved: Bytes,
}

impl Raw {
    /// A keeper that copies the inputs which would leave. All pinned memory is taken now.
    pub(crate) fn new(mut backend: Box<dyn Backend>, limits: Limits) -> Result<Raw> {
        let Limits { layers, bytes, keep_last, pinned, .. } = limits;
        let a_block = offload::room(bytes);
        let fit = usize::try_from(pinned.0 / a_block.0).unwrap_or(usize::MAX);
        let count = layers.saturating_sub(keep_last).min(fit);
        let room = Bytes(a_block.0 * count.max(1) as u64);
        let options = PoolOptions { budget: Budget::Bytes(room), ..PoolOptions::default() };
        let pool = PinnedPool::new(backend.pinner(), options)?;
        pool.reserve(room)?;
        let mut client = pool.client(backend.fence(), Bytes::MAX)?;
        let mut copies = Vec::new();
        for _ in 0..count {
            let mut block = client.lend(bytes, Name::new("raw"))?.block;
            block.mark_written(bytes)?;
            copies.push((block, backend.create_event(Timing::Off)?));
        }
        let (out, back) = (backend.create_stream()?, backend.create_stream()?);
        let sink = DeviceRange::new(backend.alloc_device(bytes, back)?, bytes)?;
        let pace = backend.create_event(Timing::Off)?;
        let all_back = backend.create_event(Timing::Off)?;
        backend.record(all_back, back)?;
        let inputs = Resident::new(backend, layers, bytes)?;
        let moved = Bytes::ZERO;
        Ok(Raw { inputs, out, back, client, copies, sink, pace, all_back, moved })
    }

    /// Lets `stream` start what comes next when the model's stream has got here.
    fn start(&mut self, stream: StreamId) -> Result<()> {
        let model = self.inputs.stream();
        let backend = self.inputs.backend();
        backend.record(self.pace, model)?;
        backend.wait(stream, self.pace, Site::Outside)
    }
}

/// Calls `copy` for each part of a block that lies in one registration.
fn trunks(
    block: &Block,
    range: DeviceRange,
    mut copy: impl FnMut(PinnedRange, DeviceRange) -> Result<()>,
) -> Result<()> {
    let mut done = Bytes::ZERO;
    while done < range.len() {
        let host = block.trunk(done, range.len() - done)?;
        copy(host, range.part(done, host.len())?)?;
        done += host.len();
    }
    Ok(())
}

impl Inputs for Raw {
    fn backend(&mut self) -> &mut dyn Backend {
        self.inputs.backend()
    }

    fn stream(&self) -> StreamId {
        self.inputs.stream()
    }

    fn take(&mut self, layer: usize) -> Result<DeviceRange> {
        self.inputs.take(layer)
    }

    fn keep(&mut self, layer: usize) -> Result<()> {
        if layer >= self.copies.len() {
            return Ok(());
        }
        self.start(self.out)?;
        let range = self.inputs.restore(layer)?;
        let (block, copied) = &self.copies[layer];
        let (out, backend) = (self.out, self.inputs.backend());
        trunks(block, range, |host, device| backend.copy_out(host, device, out))?;
        backend.record(*copied, out)?;
        self.moved += range.len();
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn restore(&mut self, layer: usize) -> Result<DeviceRange> {
        if layer < self.copies.len() {
            self.start(self.back)?;
            let (block, copied) = &self.copies[layer];
            let (back, backend) = (self.back, self.inputs.backend());
            backend.wait(back, *copied, Site::Outside)?;
            trunks(block, self.sink, |host, device| backend.copy_in(device, host, back))?;
        }
        self.inputs.restore(layer)
    }

    fn done(&mut self, layer: usize) -> Result<()> {
        if let Some((_, copied)) = self.copies.get(layer) {
            let model = self.inputs.stream();
            self.inputs.backend().wait(model, *copied, Site::Outside)?;
        }
        self.inputs.done(layer)
    }

    fn end_step(&mut self) -> Result<()> {
        // The next step's copies out overwrite what this one's copies back read.
        let (out, back) = (self.out, self.back);
        let backend = self.inputs.backend();
        backend.record(self.all_back, back)?;
        backend.wait(out, self.all_back, Site::Outside)
    }

    fn moved(&self) -> Moved {
        Moved { out: self.moved, ..Moved::default() }
    }

    fn close(&mut self) -> Result<()> {
        for (block, event) in self.copies.drain(..) {
            self.client.give_back(block, None)?;
            self.inputs.backend().close_event(event)?;
        }
        let (out, back, sink) = (self.out, self.back, self.sink);
        let [pace, all_back] = [self.pace, self.all_back];
        let backend = self.inputs.backend();
        backend.free_device(sink.at(), back)?;
        backend.close_event(pace)?;
        backend.close_event(all_back)?;
        backend.close_stream(out)?;
        backend.close_stream(back)?;
        self.inputs.close()
    }
}
