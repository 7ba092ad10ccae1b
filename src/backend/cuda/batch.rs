//! Many copies in one call of the driver, where it has such a call.
//!
//! What it is not: needed. A driver without it, and a stream that the call refuses, get a copy for
//! each piece, as the seam's default does.
//!
//! Invariant: sources are read in the order of the stream, as by single copies: the one attribute
//! of every batch says so. Everything is checked before the first call.
//!
//! ```text
//!   driver >= 13.0: cuMemcpyBatchAsync_v2      >= 12.8: cuMemcpyBatchAsync      older: none
//!   pieces -> targets, sources, sizes -> at most PIECES_MAX a call -> in the stream's order
//! ```
//!
//! The call was made in CUDA 12.8 with an argument that tells the index of a bad piece; 13.0 has it
//! without that one, under another name. Each name keeps its signature, so the name that is found
//! says how to call it. The copies of one call have no order among each other, which the seam says
//! of every batch.
//!
//! `Driver` finds the call, `Cuda` makes it.

use super::Cuda;
use super::code::{Answer, NOT_SUPPORTED};
use super::pinned::{check_copy, is_registered};
use crate::backend::{BatchFailed, Piece};
use crate::error::Result;
use crate::unit::StreamId;
use cudarc::driver::sys::{
    self, CUdeviceptr, CUmemLocation, CUmemLocationType, CUmemcpyAttributes,
    CUmemcpySrcAccessOrder, CUresult, CUstream,
};
use libloading::Library;
use std::sync::atomic::{AtomicBool, Ordering};

/// With the argument that tells the index of a bad piece.
const FIRST_NAME: &str = "cuMemcpyBatchAsync";
const FIRST_VERSION: u32 = 12_080;
/// Without it.
const SECOND_NAME: &str = "cuMemcpyBatchAsync_v2";
const SECOND_VERSION: u32 = 13_000;

type First = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> u32;
type Second = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CUmemcpyAttributes,
    *mut usize,
    usize,
    CUstream,
) -> u32;

// The first one's signature against cudarc's binding; its second is in no version we build with.
type Bound = unsafe fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> CUresult;
const _: Bound = sys::cuMemcpyBatchAsync;

/// Pieces of one call.
const PIECES_MAX: usize = 1024;
/// The legacy default stream by either name, and the thread's own: the call refuses the first.
const DEFAULT_STREAMS: usize = 2;

/// The call, by its signature.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    First(First),
    Second(Second),
}

/// The driver's call for batches.
#[derive(Debug)]
pub(super) struct BatchCall {
    call: Option<Call>,
    /// The driver has the call and said that it does not support it here.
    is_refused: AtomicBool,
}

impl BatchCall {
    /// Looks for it in a driver of that version.
    pub(super) fn find(library: &'static Library, version: u32) -> BatchCall {
        // SAFETY: the signature is the documented one of the function of that name; it is called
        // with valid arguments alone, and the library is never unloaded.
        let second = unsafe { library.get::<Second>(SECOND_NAME) };
        // SAFETY: as above.
        let first = unsafe { library.get::<First>(FIRST_NAME) };
        let call = match (second, first) {
            (Ok(second), _) if version >= SECOND_VERSION => Some(Call::Second(*second)),
            (_, Ok(first)) if version >= FIRST_VERSION => Some(Call::First(*first)),
            _ => None,
        };
        BatchCall { call, is_refused: AtomicBool::new(false) }
    }

    /// The call, unless it was refused.
    pub(super) fn get(&self) -> Option<Call> {
        self.call.filter(|_| !self.is_refused.load(Ordering::Relaxed))
    }
}

/// The arguments of a batch, kept for their room.
#[derive(Debug, Default)]
pub(super) struct BatchArgs {
    targets: Vec<CUdeviceptr>,
    sources: Vec<CUdeviceptr>,
    sizes: Vec<usize>,
}

impl BatchArgs {
    fn clear(&mut self) {
        self.targets.clear();
        self.sources.clear();
        self.sizes.clear();
    }

    /// Enqueues all of it.
    ///
    /// # Safety
    /// Each source and target is that many bytes, alive until the stream has done the copies; the
    /// stream is alive and of the current context.
    unsafe fn enqueue(&mut self, call: Call, stream: CUstream) -> Answer {
        let nowhere =
            CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = CUmemcpyAttributes {
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            // Hints for managed memory alone.
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        // From the first piece on.
        let mut from = 0_usize;
        let count = self.sizes.len();
        let (targets, sources) = (self.targets.as_mut_ptr(), self.sources.as_mut_ptr());
        let sizes = self.sizes.as_mut_ptr();
        match call {
            Call::Second(call) => {
                // SAFETY: three arrays of `count` values, one attribute for all of them, all read
                // during the call; the rest is the caller's promise.
                let code = unsafe {
                    call(targets, sources, sizes, count, &mut attributes, &mut from, 1, stream)
                };
                Answer { code, call: SECOND_NAME }
            }
            Call::First(call) => {
                let (attributes, mut bad) = (&mut attributes, 0);
                // SAFETY: as above, and a valid pointer for the index of a bad piece.
                let code = unsafe {
                    call(targets, sources, sizes, count, attributes, &mut from, 1, &mut bad, stream)
                };
                Answer { code, call: FIRST_NAME }
            }
        }
    }
}

/// Which way a batch goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Out,
    In,
}

impl Cuda {
    /// Enqueues all pieces, in as few calls as the driver takes.
    pub(super) fn enqueue_batch(
        &mut self,
        way: Way,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        match self.batch(way, pieces, on)? {
            true => Ok(()),
            false => self.one_by_one(way, pieces, on),
        }
    }

    /// Did the driver take them? Where it has no such call nothing was enqueued.
    fn batch(
        &mut self,
        way: Way,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<bool, BatchFailed> {
        const OP: &str = "copy_batch";
        let refused = |error| BatchFailed { enqueued: 0, error };
        let entered = self.context.enter(OP).map_err(refused)?;
        let check = |piece: &Piece| check_copy(piece.pinned, piece.device, OP).map(drop);
        pieces.iter().try_for_each(check).map_err(refused)?;
        let batch = entered.driver().batch();
        let Some(call) = batch.get() else { return Ok(false) };
        let stream = self.streams.ready(on, &entered, OP).map_err(refused)?;
        if (stream as usize) <= DEFAULT_STREAMS {
            return Ok(false);
        }
        if !pieces.iter().all(|piece| is_registered(piece.pinned)) {
            // Memory that is not page-locked: a single copy of it is what the driver describes.
            return Ok(false);
        }
        let mut enqueued = 0;
        for pieces in pieces.chunks(PIECES_MAX) {
            let args = &mut self.batch_args;
            args.clear();
            for Piece { pinned, device } in pieces {
                let (host, device) = (pinned.at().0, device.at().0);
                let (to, from) = if way == Way::Out { (host, device) } else { (device, host) };
                args.targets.push(to);
                args.sources.push(from);
                args.sizes.push(pinned.len().to_usize().map_err(refused)?);
            }
            // SAFETY: the pinned side of each lies in one live registration, whose owner keeps it
            // mapped until no copy is in flight; no reference is made to it. The stream is alive.
            let answer = unsafe { args.enqueue(call, stream) };
            if answer.code == NOT_SUPPORTED && enqueued == 0 {
                batch.is_refused.store(true, Ordering::Relaxed);
                return Ok(false);
            }
            // Of a call that failed nobody says how many of its copies run.
            enqueued += pieces.len();
            entered.check(answer).map_err(|error| BatchFailed { enqueued, error })?;
        }
        Ok(true)
    }

    fn one_by_one(
        &mut self,
        way: Way,
        pieces: &[Piece],
        on: StreamId,
    ) -> std::result::Result<(), BatchFailed> {
        let mut copy = |Piece { pinned, device }: Piece| -> Result<()> {
            match way {
                Way::Out => self.enqueue_out(pinned, device, on),
                Way::In => self.enqueue_in(device, pinned, on),
            }
        };
        for (enqueued, piece) in pieces.iter().enumerate() {
            copy(*piece).map_err(|error| BatchFailed { enqueued, error })?;
        }
        Ok(())
    }
}
