//! Small device programs, in a form for each backend; their arguments are said as reads and writes.
//!
//! What it is not: a compiler or a cache. A CUDA kernel is PTX text that was made ahead of time.
//!
//! Invariant: an argument says which bytes the kernel touches and how, so the order checker sees
//! kernels and copies alike.
//!
//! ```text
//!   Kernel { name, ptx: CUDA's form, host: the simulated device's form, cost }
//!   launch(&KERNEL, grid, &[Arg::Read(a), Arg::Write(b), Arg::U32(n)], stream)
//! ```
//!
//! Backends, the floors that have kernels of their own, and examples may use it.

mod host;

pub use host::{HostArg, HostArgs};

use crate::error::Result;
use crate::trace::{Access, Use};
use crate::unit::{DeviceRange, PinnedRange};

/// A device program with a form for each backend.
#[derive(Debug)]
pub struct Kernel {
    /// Name; for CUDA also the entry's name in `ptx`.
    pub name: &'static str,
    /// CUDA's form: the text of a PTX module that has `name` as an entry.
    pub ptx: Option<&'static str>,
    /// The simulated device's form.
    pub host: Option<HostFn>,
    /// What a run costs; the simulated device's clock goes by it.
    pub cost: fn(&Grid, &[Arg]) -> Cost,
}

/// A kernel's form on the simulated device: runs once, when its stream gets there.
pub type HostFn = fn(&Grid, &mut HostArgs<'_>) -> Result<()>;

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Blocks in x, y, z.
    pub blocks: [u32; 3],
    /// Threads a block in x, y, z.
    pub threads: [u32; 3],
    /// Dynamic shared memory a block, in bytes.
    pub shared: u32,
}

impl Grid {
    /// A row of `blocks` blocks of `threads` threads.
    pub const fn row(blocks: u32, threads: u32) -> Grid {
        Grid { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared: 0 }
    }
}

/// One argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// Device bytes the kernel reads; passed as a pointer.
    Read(DeviceRange),
    /// Device bytes the kernel overwrites, all of them; passed as a pointer.
    Write(DeviceRange),
    /// Device bytes the kernel reads and writes; passed as a pointer.
    Update(DeviceRange),
    /// Page-locked bytes, and how the kernel uses them; passed as a pointer.
    Pinned(Access, PinnedRange),
    /// Device bytes that the kernel reaches by addresses of its own, and how it uses them; said for
    /// the order checker and the simulated device, and not passed.
    Reached(Access, DeviceRange),
    /// A 32-bit number.
    U32(u32),
    /// A 64-bit number.
    U64(u64),
    /// A single-precision number.
    F32(f32),
}

impl Arg {
    /// The bytes it touches, and how; `None` for a number.
    pub fn uses(&self) -> Option<Use> {
        let (access, range) = match *self {
            Arg::Read(range) => (Access::Read, range),
            Arg::Write(range) => (Access::Write, range),
            Arg::Update(range) => (Access::Update, range),
            Arg::Reached(access, range) => (access, range),
            Arg::Pinned(access, range) => return Some(Use { access, span: range.into() }),
            Arg::U32(_) | Arg::U64(_) | Arg::F32(_) => return None,
        };
        Some(Use { access, span: range.into() })
    }
}

/// Which unit of the device limits a kernel's arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Matrix products (tensor cores).
    Matrix,
    /// Everything else.
    Vector,
}

/// What a kernel's run costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes of device memory read and written.
    pub bytes: f64,
    /// The unit that does the operations.
    pub work: Work,
}

impl Cost {
    /// The cost of a kernel that only moves bytes: those its arguments name.
    pub fn of_bytes(_: &Grid, args: &[Arg]) -> Cost {
        let touched = |arg: &Arg| match arg {
            Arg::Update(range) | Arg::Reached(Access::Update, range) => 2 * range.len().0,
            Arg::Read(range) | Arg::Write(range) | Arg::Reached(_, range) => range.len().0,
            _ => 0,
        };
        let bytes = args.iter().map(touched).sum::<u64>() as f64;
        Cost { flops: 0.0, bytes, work: Work::Vector }
    }
}
