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

use super::machine::Machine;
use super::memory::{HostPtr, PINNED_BASE};
use crate::backend::kernel::HostArg;
use crate::backend::{Arg, Cost, Grid, HostArgs, Kernel};
use crate::error::{Error, Misuse, Result};
use crate::trace::{Access, Span, Use};
use crate::unit::{Bytes, PinnedPtr, PinnedRange};

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
    args: Vec<Ready>,
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
    pub(super) fn new(body: Body, cost: Cost) -> Run {
        Run { body, args: Vec::new(), holds: Vec::new(), cost }
    }

    /// Adds a number as the next argument.
    pub(super) fn push_number(&mut self, number: Arg) {
        self.args.push(Ready::Number(number));
    }

    /// Adds the bytes of one use as the next argument. A kernel may also reach pinned memory by its
    /// address, as on a real device.
    pub(super) fn push(&mut self, machine: &mut Machine, device: u32, one: Use) -> Result<()> {
        if matches!(one.access, Access::Alloc | Access::Free) {
            return Err(bad("a kernel neither allocates nor frees"));
        }
        let (at, region) = match one.span {
            Span::Device(range) if range.at().0 >= PINNED_BASE => {
                let pinned = PinnedRange::new(PinnedPtr(range.at().0), range.len())?;
                machine.pinned_bytes(pinned, "launch")?
            }
            Span::Device(range) => machine.device_bytes(device, range, "launch")?,
            Span::Pinned(range) => machine.pinned_bytes(range, "launch")?,
        };
        let len = Bytes(one.span.parts().1).to_usize()?;
        let write = one.access.is_write();
        // Real addresses, because two simulated ones can mean the same bytes of the host.
        if self.args.iter().any(|other| other.clashes(at, len, write)) {
            return Err(bad("an argument that is written overlaps another"));
        }
        if region != 0 {
            self.holds.push(region);
        }
        self.args.push(if write { Ready::Write(at, len) } else { Ready::Read(at, len) });
        Ok(())
    }

    /// Runs the host form over the bytes as they are now.
    pub(super) fn run(self) -> Result<()> {
        let args = self.args.iter().map(|ready| match *ready {
            Ready::Read(at, len) => {
                // SAFETY: the bytes lie in a live allocation or held region (checked at launch) and
                // were initialised there; no argument that is written overlaps them
                // (`push`); the world's lock is held, so nothing else runs meanwhile.
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

impl Ready {
    fn clashes(&self, at: HostPtr, len: usize, write: bool) -> bool {
        let (other, other_len, other_write) = match *self {
            Ready::Read(at, len) => (at, len, false),
            Ready::Write(at, len) => (at, len, true),
            Ready::Number(_) => return false,
        };
        (write || other_write)
            && at.get() < other.get().wrapping_add(other_len)
            && other.get() < at.get().wrapping_add(len)
    }
}

fn bad(why: &'static str) -> Error {
    Error::usage(Misuse::BadKernel, "launch").detail(why)
}

/// The refusal of a kernel that has no form for this device.
pub(super) fn no_form(kernel: &Kernel) -> Error {
    Error::usage(Misuse::BadKernel, "launch")
        .detail(format!("{} has no form for the simulated device", kernel.name))
}
