//! Kernels on the simulated device: their arguments checked when enqueued, run once when reached.
//!
//! What it is not: a model of threads or warps. A kernel's host form runs whole, as one op.
//!
//! Invariant: slices of an argument's bytes exist only while its kernel runs, and a written argument
//! shares no byte with another one, so no two slices overlap.
//!
//! ```text
//!   launch: check, resolve addresses -> Run { args: [Read(ptr, len), Write(ptr, len), Number] }
//!   reached: Run::run -> HostArgs { &[u8], &mut [u8], .. } -> host form
//! ```
//!
//! The simulated device may use it.

use super::memory::HostPtr;
use crate::backend::kernel::HostArg;
use crate::backend::{Arg, Cost, Grid, HostArgs, Kernel};
use crate::error::{Error, Misuse, Result};
use crate::trace::{Access, Use};

/// A kernel given as a closure.
pub type Closure = Box<dyn FnOnce(&mut HostArgs<'_>) -> Result<()> + Send>;

/// An argument with its bytes found.
#[derive(Debug)]
pub(super) enum Ready {
    Read(HostPtr, usize),
    Write(HostPtr, usize),
    Number(Arg),
}

pub(super) enum Body {
    Kernel(&'static Kernel, Grid),
    Closure(Closure),
}

/// One enqueued kernel.
pub(super) struct Run {
    pub(super) body: Body,
    pub(super) args: Vec<Ready>,
    /// Regions that must stay while it is queued.
    pub(super) holds: Vec<u64>,
    pub(super) cost: Cost,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match &self.body {
            Body::Kernel(kernel, _) => kernel.name,
            Body::Closure(_) => "closure",
        };
        f.debug_struct("Run").field("name", &name).field("args", &self.args).finish()
    }
}

impl Run {
    /// Runs the host form over the bytes as they are now.
    pub(super) fn run(self) -> Result<()> {
        let args = self.args.iter().map(|ready| match *ready {
            Ready::Read(at, len) => {
                // SAFETY: the bytes lie in a live allocation or held region (checked at launch) and
                // were initialised there; no argument that is written overlaps them
                // (`refuse_overlaps`); the world's lock is held, so nothing else runs meanwhile.
                HostArg::Read(unsafe { std::slice::from_raw_parts(at.get(), len) })
            }
            Ready::Write(at, len) => {
                // SAFETY: as above, and no other argument overlaps them at all.
                HostArg::Write(unsafe { std::slice::from_raw_parts_mut(at.get(), len) })
            }
            Ready::Number(arg) => HostArg::Number(arg),
        });
        let mut args = HostArgs::new(args.collect());
        match self.body {
            Body::Kernel(kernel, grid) => match kernel.host {
                Some(host) => host(&grid, &mut args),
                None => Err(no_form(kernel)),
            },
            Body::Closure(body) => body(&mut args),
        }
    }
}

/// The refusal of a kernel that has no form for this device.
pub(super) fn no_form(kernel: &Kernel) -> Error {
    Error::usage(Misuse::BadKernel, "launch")
        .detail(format!("{} has no form for the simulated device", kernel.name))
}

/// Refuses arguments of which a written one shares bytes with another.
pub(super) fn refuse_overlaps(uses: impl Iterator<Item = Use> + Clone) -> Result<()> {
    for (index, one) in uses.clone().enumerate() {
        let (at, len) = one.span.parts();
        let overlapping = uses.clone().take(index).any(|other| {
            let (other_at, other_len) = other.span.parts();
            (one.access.is_write() || other.access.is_write())
                && at < other_at + other_len
                && other_at < at + len
        });
        if overlapping {
            return Err(Error::usage(Misuse::BadKernel, "launch")
                .detail("an argument that is written overlaps another"));
        }
        if matches!(one.access, Access::Alloc | Access::Free) {
            return Err(Error::usage(Misuse::BadKernel, "launch")
                .detail("a kernel neither allocates nor frees"));
        }
    }
    Ok(())
}
