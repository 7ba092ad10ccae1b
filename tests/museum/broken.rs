//! Faults that other projects met, each as it was made there: one missing edge of order.
//!
//! What it is not: their code. Each function does on a plain device what theirs did, in the fewest
//! requests that show it.
//!
//! Invariant: whoever runs one has the checker flag it, under any schedule.
//!
//! ```text
//!   m06(plain): the tensor is deleted on compute while the side stream copies it -> FreeInFlight
//! ```

use crate::plain::Plain;
use lightering::backend::{Backend, Timing};
use lightering::trace::{Access, Actor, Site, Use};

/// An inline reload copies in while its own copy-out is in flight.
pub(crate) fn m01(p: &mut Plain) {
    let tensor = p.tensor();
    p.chain(p.compute, p.side);
    p.copy_out(p.block(0), tensor, p.side);
    // The tensor is popped again at once, into fresh bytes on another stream.
    let fresh = p.bytes(p.compute);
    p.copy_in(fresh, p.block(0), p.compute);
}

/// A slot of a double buffer is reloaded before its reader used it.
pub(crate) fn m02(p: &mut Plain) {
    let slot = p.evicted();
    p.copy_in(slot, p.block(0), p.side);
    p.chain(p.side, p.compute);
    p.reads(p.compute, slot);
    p.copy_in(slot, p.block(1), p.side);
}

/// The compute stream is taken when the offloader is made, not when it is used.
pub(crate) fn m04(p: &mut Plain) {
    let cached = p.compute;
    let today = p.sim.create_stream().unwrap();
    let tensor = p.bytes(today);
    p.writes(today, tensor);
    p.chain(cached, p.side);
    p.copy_out(p.block(0), tensor, p.side);
}

/// A clone is enqueued after the moment that should cover it.
pub(crate) fn m05(p: &mut Plain) {
    let source = p.tensor();
    let clone = p.bytes(p.compute);
    let moment = p.mark(p.compute);
    p.reads(p.compute, source);
    p.writes(p.compute, clone);
    p.wait(p.side, moment);
    p.copy_out(p.block(0), clone, p.side);
}

/// The tensor is deleted while the side stream reads it.
pub(crate) fn m06(p: &mut Plain) {
    let tensor = p.tensor();
    p.chain(p.compute, p.side);
    p.copy_out(p.block(0), tensor, p.side);
    p.sim.free_device(tensor.at(), p.compute).unwrap();
}

/// The "current stream" is asked for inside the side stream's context: it waits for itself.
pub(crate) fn m07(p: &mut Plain) {
    let tensor = p.tensor();
    let current = p.side;
    p.chain(current, p.side);
    p.copy_out(p.block(0), tensor, p.side);
}

/// A layer is marked resident before its copy has arrived.
pub(crate) fn m08(p: &mut Plain) {
    let layer = p.evicted();
    p.copy_in(layer, p.block(0), p.side);
    let is_resident = true;
    if is_resident {
        p.reads(p.compute, layer);
    }
}

/// The event is recorded before the concatenation that makes the source.
pub(crate) fn m09(p: &mut Plain) {
    let whole = p.bytes(p.compute);
    let moment = p.mark(p.compute);
    p.writes(p.compute, whole);
    p.wait(p.side, moment);
    p.copy_out(p.block(0), whole, p.side);
}

/// Storage is resized to zero after a copy-out that its allocator was not told of.
pub(crate) fn m10(p: &mut Plain) {
    let tensor = p.tensor();
    p.chain(p.compute, p.side);
    p.copy_out(p.block(0), tensor, p.side);
    p.recycle(tensor, p.compute, p.compute);
}

/// The pinned double buffer is swapped without waiting for its copy.
pub(crate) fn m11(p: &mut Plain) {
    let (tensor, other) = (p.tensor(), p.tensor());
    let third = p.sim.create_stream().unwrap();
    p.copy_out(p.block(0), tensor, p.compute);
    p.copy_out(p.block(1), other, p.compute);
    p.chain(p.compute, p.side);
    p.copy_in(tensor, p.block(0), p.side);
    p.chain(p.compute, third);
    p.copy_out(p.block(0), other, third);
}

/// Buffers that a side stream reduces are recycled by the allocator.
pub(crate) fn m12(p: &mut Plain) {
    let bucket = p.tensor();
    p.chain(p.compute, p.side);
    p.writes(p.side, bucket);
    p.recycle(bucket, p.compute, p.compute);
}

/// A hook reads the pinned gradient before the copy has drained.
pub(crate) fn m13(p: &mut Plain) {
    let gradient = p.tensor();
    p.copy_out(p.block(0), gradient, p.compute);
    p.host_reads(p.block(0));
}

/// Generated code reads the result of a copy-out that did not block.
pub(crate) fn m14(p: &mut Plain) {
    let result = p.tensor();
    p.chain(p.compute, p.side);
    p.copy_out(p.block(0), result, p.side);
    // It waits for compute, which is not where the copy runs.
    let moment = p.mark(p.compute);
    while !p.sim.query(moment, Site::Outside).unwrap() {}
    p.host_reads(p.block(0));
}

/// An optimizer on the host reads gradients that a stream of their own still brings, and sends the
/// parameters that it makes of them back.
pub(crate) fn m15(p: &mut Plain) {
    let (gradient, parameter) = (p.tensor(), p.tensor());
    p.chain(p.compute, p.side);
    p.copy_out(p.block(0), gradient, p.side);
    p.host_reads(p.block(0));
    p.host_writes(p.block(1));
    p.copy_in(parameter, p.block(1), p.compute);
}

/// One pinned source is used again in place while the copy from it is pending.
pub(crate) fn m16(p: &mut Plain) {
    let target = p.bytes(p.compute);
    p.host_writes(p.block(0));
    p.copy_in(target, p.block(0), p.compute);
    p.host_writes(p.block(0));
}

/// Of a block's pending reads and writes only the writes are waited for.
pub(crate) fn m17(p: &mut Plain) {
    let block = p.evicted();
    p.copy_in(block, p.block(0), p.side);
    let written = p.mark(p.side);
    p.wait(p.compute, written);
    p.reads(p.compute, block);
    let third = p.sim.create_stream().unwrap();
    p.wait(third, written);
    p.copy_in(block, p.block(1), third);
}

/// A store reads the block before compute wrote it.
pub(crate) fn m18(p: &mut Plain) {
    let block = p.tensor();
    p.copy_out(p.block(0), block, p.side);
}

/// A load overwrites a block that is still read.
pub(crate) fn m19(p: &mut Plain) {
    let block = p.evicted();
    p.reads(p.compute, block);
    p.copy_in(block, p.block(1), p.side);
}

/// The source may be read in any order: before the waits in front of the copy.
pub(crate) fn m20(p: &mut Plain) {
    let source = p.tensor();
    let moment = p.mark(p.compute);
    // What such a copy is: its read comes before the wait.
    p.reads(p.side, source);
    p.wait(p.side, moment);
    p.copy_out(p.block(0), source, p.side);
}

/// A freed pinned slab is handed out again at once.
pub(crate) fn m21(p: &mut Plain) {
    let (tensor, other) = (p.tensor(), p.tensor());
    p.chain(p.compute, p.side);
    p.host_writes(p.block(0));
    p.copy_in(tensor, p.block(0), p.compute);
    // "Freed", and lent to whoever asks next.
    p.copy_out(p.block(0), other, p.side);
}

/// One pool of events serves all devices: the wait is for an event of another one.
pub(crate) fn m22(p: &mut Plain) {
    let tensor = p.tensor();
    let mut other = p.world.device(1).unwrap();
    let there = other.create_stream().unwrap();
    let event = other.create_event(Timing::Off).unwrap();
    other.record(event, there).unwrap();
    // The driver may refuse it; nobody looks.
    assert!(p.sim.wait(p.side, event, Site::Outside).is_err());
    p.copy_out(p.block(0), tensor, p.side);
}

/// An imported event was never opened: the copy-in is unordered against the reader.
pub(crate) fn m23(p: &mut Plain) {
    let block = p.evicted();
    p.reads(p.compute, block);
    let never = p.sim.create_event(Timing::Off).unwrap();
    assert!(p.sim.wait(p.side, never, Site::Outside).is_err());
    p.copy_in(block, p.block(1), p.side);
}

/// A buffer is taken on the transfer stream, and saved for backward on compute.
pub(crate) fn m24(p: &mut Plain) {
    let buffer = p.bytes(p.side);
    p.host_writes(p.block(0));
    p.copy_in(buffer, p.block(0), p.side);
    p.chain(p.side, p.compute);
    p.reads(p.compute, buffer);
    p.recycle(buffer, p.side, p.side);
}

/// A wait is left out because the copy is "surely" done by then.
pub(crate) fn m25(p: &mut Plain) {
    let weights = p.evicted();
    p.copy_in(weights, p.block(0), p.side);
    let other = p.tensor();
    p.reads(p.compute, other);
    p.reads(p.compute, weights);
}

/// The pinned resource ignores its stream: the host vector goes under a copy.
pub(crate) fn m26(p: &mut Plain) {
    let target = p.bytes(p.compute);
    p.host_writes(p.block(0));
    p.copy_in(target, p.block(0), p.compute);
    free_pinned(p);
}

/// Pinned memory is freed under a copy that fills it.
pub(crate) fn m27(p: &mut Plain) {
    let tensor = p.tensor();
    p.copy_out(p.block(0), tensor, p.compute);
    free_pinned(p);
}

/// The list of what to copy is read when the copies run; it is released in `finally`, as soon as
/// they were asked for. What they copy stays.
pub(crate) fn m28(p: &mut Plain) {
    let target = p.tensor();
    let (list, payload) = (p.block(0), p.block(1));
    p.host_writes(list);
    p.host_writes(payload);
    p.chain(p.compute, p.side);
    p.sim.note(Actor::Stream(p.side), &[Use::read(list)]).unwrap();
    p.copy_in(target, payload, p.side);
    free_pinned(p);
}

/// The copy-out is on a stream without implicit order, the free on the default stream.
pub(crate) fn m29(p: &mut Plain) {
    let null = p.sim.adopt_stream(0).unwrap();
    let tensor = p.bytes(null);
    p.writes(null, tensor);
    p.chain(null, p.side);
    p.copy_out(p.block(0), tensor, p.side);
    p.sim.free_device(tensor.at(), null).unwrap();
}

fn free_pinned(p: &mut Plain) {
    let free = Use { access: Access::Free, span: p.block(0).into() };
    p.sim.note(Actor::Host, &[free]).unwrap();
}
