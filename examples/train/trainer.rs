//! The training steps of one mode, and what is measured of them.
//!
//! What it is not: it prints nothing and compares nothing.
//!
//! Invariant: every mode enqueues the same kernels on the same numbers, but for inner results that
//! are kept instead of made anew; so losses and gradients are equal bit for bit.
//!
//! ```text
//!   step s:  text -> tokens -> embed -> layers up -> [memory read, flush: last step] -> head
//!            -> layers down -> update -> hash and loss to the host      event s
//!   the host enqueues step s while the device runs step s - 1, and no further ahead
//! ```
//!
//! `main` uses it.

use crate::args::Mode;
use crate::inputs::{Inputs, Moved, Pinning};
use crate::kernel::tally::STATE_BYTES;
use crate::meter::Meter;
use crate::model::{Model, Slab};
use crate::queue::Queue;
use crate::shape::{Shape, aligned};
use crate::staging::Staging;
use crate::text::Text;
use lightering::backend::Timing;
use lightering::trace::Site;
use lightering::{Bytes, DeviceRange, EventId, Result, StreamId};
use std::time::Duration;

/// What a mode's steps came to.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) first_loss: f64,
    pub(crate) loss: f64,
    /// Hash over all gradients of all steps.
    pub(crate) checksum: u64,
    /// Most device bytes taken at any time.
    pub(crate) peak: Bytes,
    /// Device bytes taken when the last step's forward was enqueued, and after `flush`.
    pub(crate) after_forward: Bytes,
    pub(crate) after_flush: Bytes,
    /// What was moved in one step, the last, and in the first.
    pub(crate) moved: Moved,
    pub(crate) first_moved: Moved,
    /// What page-locking for the inputs took.
    pub(crate) pinning: Pinning,
    pub(crate) first_step: Duration,
    /// Median of the steps that are neither the first nor the last.
    pub(crate) step: Duration,
    /// The timeline of all steps as JSON, where one was kept.
    pub(crate) timeline: Option<String>,
}

/// One mode's model with all it runs on.
pub(crate) struct Trainer<'a> {
    shape: Shape,
    text: &'a Text,
    inputs: &'a mut dyn Inputs,
    stream: StreamId,
    meter: Meter,
    staging: Staging,
    model: Model,
    /// Inner results that the mode keeps, by layer.
    kept: Vec<Option<Slab>>,
    keep_all: bool,
    tokens: DeviceRange,
    losses: DeviceRange,
    /// Recorded behind each step, in turn.
    events: [EventId; 3],
}

/// What the host reads of a step once it is done.
struct Read {
    checksum: u64,
    loss: f64,
    time: Duration,
}

impl<'a> Trainer<'a> {
    /// Makes the model on the device of `inputs`, with its first numbers.
    pub(crate) fn new(
        mode: Mode,
        shape: Shape,
        text: &'a Text,
        inputs: &'a mut dyn Inputs,
        meter: Meter,
    ) -> Result<Trainer<'a>> {
        let staging = Staging::new(inputs.backend(), Bytes(2 * slot_bytes(&shape)))?;
        let stream = inputs.stream();
        let backend = inputs.backend();
        let mut event = || backend.create_event(Timing::On);
        let events = [event()?, event()?, event()?];
        let mut queue = Queue::new(backend, stream);
        let model = Model::new(&mut queue, shape)?;
        let tokens = queue.take(shape.tokens + 1)?;
        let losses = queue.take(shape.tokens * 4)?;
        let kept = (0..shape.layers).map(|_| None).collect();
        let keep_all = mode == Mode::None;
        Ok(Trainer {
            shape,
            text,
            inputs,
            stream,
            meter,
            staging,
            model,
            kept,
            keep_all,
            tokens,
            losses,
            events,
        })
    }

    /// Runs `steps` steps; `progress` is told of each that is done, with its loss.
    pub(crate) fn run(mut self, steps: u64, progress: &mut dyn FnMut(u64, f64)) -> Result<Outcome> {
        // The steps' time is theirs alone: the model's first numbers are made before it.
        self.inputs.backend().sync()?;
        self.record(0)?;
        let mut reads: Vec<Read> = Vec::new();
        let mut memory = (Bytes::ZERO, Bytes::ZERO);
        let mut moved = [Moved::default(); 3];
        for step in 0..steps {
            if step + 1 == steps {
                moved[1] = self.inputs.moved();
            }
            let at_end = self.step(step, step + 1 == steps)?;
            if step == 0 {
                moved[0] = self.inputs.moved();
            }
            memory = at_end.unwrap_or(memory);
            self.record(step + 1)?;
            if step > 0 {
                reads.push(self.finish(step - 1)?);
                progress(step, reads.last().map_or(0.0, |read| read.loss));
            }
        }
        reads.push(self.finish(steps - 1)?);
        progress(steps, reads.last().map_or(0.0, |read| read.loss));
        moved[2] = self.inputs.moved();
        let pinning = self.inputs.pinning();
        let peak = self.meter.peak();
        let timeline = self.close()?;
        Ok(Outcome { timeline, pinning, ..outcome(&reads, memory, moved, peak) })
    }

    /// Enqueues one step. Where `measure` says so, returns the device bytes taken after the
    /// forward, and after a flush: it costs the step a wait, so only the last one has it.
    fn step(&mut self, step: u64, measure: bool) -> Result<Option<(Bytes, Bytes)>> {
        self.upload(step)?;
        let y = self.forward()?;
        self.inputs.span("head")?;
        let mut memory = None;
        if measure {
            let before = self.meter.taken();
            self.inputs.flush()?;
            memory = Some((before, self.meter.taken()));
        }
        self.backward(y, step)?;
        let to =
            self.staging.range(self.slot(step) + aligned(self.shape.tokens + 1), STATE_BYTES)?;
        self.inputs.backend().copy_out(to, self.model.tally, self.stream)?;
        self.inputs.span("between steps")?;
        self.inputs.end_step()?;
        Ok(memory)
    }

    /// Puts the step's stretch of the text on the device.
    fn upload(&mut self, step: u64) -> Result<()> {
        let mut stretch = vec![0; self.shape.tokens as usize + 1];
        self.text.stretch(step, &mut stretch);
        // The slot's last copy belongs to the step before the last, which is done.
        self.staging.write(self.slot(step), &stretch)?;
        let from = self.staging.range(self.slot(step), self.shape.tokens + 1)?;
        self.inputs.backend().copy_in(self.tokens, from, self.stream)
    }

    /// Enqueues the layers' forward; returns the last layer's output.
    fn forward(&mut self) -> Result<DeviceRange> {
        let (stream, layers) = (self.stream, self.kept.len());
        let mut x = self.inputs.take(0)?;
        let mut queue = Queue::new(self.inputs.backend(), stream);
        self.model.embed(&mut queue, self.tokens, x)?;
        for layer in 0..layers {
            self.inputs.span(&format!("forward {layer}"))?;
            let y = if layer + 1 < layers {
                self.inputs.take(layer + 1)?
            } else {
                Queue::new(self.inputs.backend(), stream).take(self.shape.boundary_bytes().0)?
            };
            let mut queue = Queue::new(self.inputs.backend(), stream);
            let keep = self.keep_all;
            self.kept[layer] = self.model.forward(&mut queue, layer as u64, x, y, keep)?;
            self.inputs.keep(layer)?;
            x = y;
        }
        Ok(x)
    }

    /// Enqueues head, backward and update; `y` is given back.
    fn backward(&mut self, y: DeviceRange, step: u64) -> Result<()> {
        let stream = self.stream;
        let mut queue = Queue::new(self.inputs.backend(), stream);
        self.model.head(&mut queue, self.tokens, y, self.losses)?;
        for layer in (0..self.kept.len()).rev() {
            let x = self.inputs.restore(layer)?;
            self.inputs.span(&format!("backward {layer}"))?;
            let kept = self.kept[layer].take();
            let mut queue = Queue::new(self.inputs.backend(), stream);
            self.model.backward(&mut queue, layer as u64, x, kept, y)?;
            self.inputs.done(layer)?;
            self.inputs.span("wait")?;
        }
        self.inputs.span("update")?;
        let mut queue = Queue::new(self.inputs.backend(), stream);
        self.model.finish(&mut queue, self.tokens, y, self.losses, step)?;
        queue.give(y)
    }

    fn record(&mut self, nth: u64) -> Result<()> {
        let event = self.events[(nth % 3) as usize];
        self.inputs.backend().record(event, self.stream)
    }

    /// Waits until the step is done, then reads what it left.
    fn finish(&mut self, step: u64) -> Result<Read> {
        let [from, to] = [step, step + 1].map(|nth| self.events[(nth % 3) as usize]);
        let backend = self.inputs.backend();
        while !backend.query(to, Site::Outside)? {
            std::thread::yield_now();
        }
        let time = backend.elapsed(from, to)?;
        let mut state = [0u64; STATE_BYTES as usize / 8];
        let at = self.slot(step) + aligned(self.shape.tokens + 1);
        self.staging.read(at, bytemuck::cast_slice_mut(&mut state))?;
        Ok(Read { checksum: state[0], loss: f64::from_bits(state[1]), time })
    }

    fn slot(&self, step: u64) -> u64 {
        step % 2 * slot_bytes(&self.shape)
    }

    /// Gives everything back.
    fn close(self) -> Result<Option<String>> {
        let backend = self.inputs.backend();
        let mut queue = Queue::new(backend, self.stream);
        self.model.close(&mut queue)?;
        queue.give(self.tokens)?;
        queue.give(self.losses)?;
        backend.sync()?;
        for event in self.events {
            backend.close_event(event)?;
        }
        self.staging.close()?;
        self.inputs.close()?;
        Ok(self.inputs.timeline())
    }
}

/// Bytes of pinned memory that a step in flight needs: its text, and what is read of it.
fn slot_bytes(shape: &Shape) -> u64 {
    aligned(shape.tokens + 1) + aligned(STATE_BYTES)
}

fn outcome(
    reads: &[Read],
    (after_forward, after_flush): (Bytes, Bytes),
    [first_moved, before_last, all_moved]: [Moved; 3],
    peak: Bytes,
) -> Outcome {
    assert!(!reads.is_empty(), "a run has at least one step");
    let (first, last) = (&reads[0], &reads[reads.len() - 1]);
    let mut times: Vec<Duration> = reads.iter().map(|read| read.time).collect();
    let middle = if times.len() > 2 { 1..times.len() - 1 } else { times.len() - 1..times.len() };
    let times = &mut times[middle];
    times.sort_unstable();
    Outcome {
        first_loss: first.loss,
        loss: last.loss,
        checksum: last.checksum,
        peak,
        after_forward,
        after_flush,
        moved: all_moved.since(&before_last),
        first_moved,
        pinning: Pinning::default(),
        first_step: first.time,
        step: times[times.len() / 2],
        timeline: None,
    }
}
