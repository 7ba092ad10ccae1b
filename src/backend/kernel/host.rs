//! A kernel's arguments on the simulated device: the bytes themselves.
//!
//! What it is not: a view that outlives the run.
//!
//! Invariant: bytes to be written are handed out once per run, so no two references to them exist.
//!
//! ```text
//!   launch -> each Arg resolved -> HostArgs -> read::<f32>(0), write::<f32>(1), u32(2)
//! ```
//!
//! The simulated device makes them; the kernels' host forms read them.

use super::Arg;
use crate::error::{Error, Misuse, Result};
use crate::unit::Bytes;

/// An argument as a kernel's host form sees it.
#[derive(Debug)]
pub enum HostArg<'a> {
    /// Bytes to read.
    Read(&'a [u8]),
    /// Bytes to write or update.
    Write(&'a mut [u8]),
    /// A number, as given.
    Number(Arg),
    /// Bytes already taken by [`HostArgs::write`].
    Taken,
}

/// The arguments of one run on the simulated device. The slices live as long as the run: while a
/// kernel runs there the device does nothing else, and the simulator refuses arguments of which a
/// written one overlaps another.
#[derive(Debug)]
pub struct HostArgs<'a> {
    args: Vec<HostArg<'a>>,
}

impl<'a> HostArgs<'a> {
    /// The arguments in order.
    pub fn new(args: Vec<HostArg<'a>>) -> HostArgs<'a> {
        HostArgs { args }
    }

    /// Argument `index` for reading, seen as `T`s.
    ///
    /// # Errors
    /// `Usage(BadKernel)` where it is no [`Arg::Read`], or its length or alignment is not `T`'s.
    pub fn read<T: bytemuck::Pod>(&self, index: usize) -> Result<&'a [T]> {
        match self.args.get(index) {
            Some(HostArg::Read(bytes)) => {
                bytemuck::try_cast_slice(bytes).map_err(|_| bad("argument's length or alignment"))
            }
            _ => Err(bad("argument is not a Read")),
        }
    }

    /// Takes argument `index` for writing, seen as `T`s; once per run.
    ///
    /// # Errors
    /// `Usage(BadKernel)` where it is no `Write` or `Update`, was taken already, or its length or
    /// alignment is not `T`'s.
    pub fn write<T: bytemuck::Pod>(&mut self, index: usize) -> Result<&'a mut [T]> {
        let slot = self.args.get_mut(index).ok_or_else(|| bad("no such argument"))?;
        match std::mem::replace(slot, HostArg::Taken) {
            HostArg::Write(bytes) => bytemuck::try_cast_slice_mut(bytes)
                .map_err(|_| bad("argument's length or alignment")),
            _ => Err(bad("argument is not a Write or Update")),
        }
    }

    /// Argument `index` as a 32-bit number.
    ///
    /// # Errors
    /// `Usage(BadKernel)` where it is something else.
    pub fn u32(&self, index: usize) -> Result<u32> {
        match self.args.get(index) {
            Some(HostArg::Number(Arg::U32(n))) => Ok(*n),
            _ => Err(bad("argument is not a u32")),
        }
    }

    /// Argument `index` as a 64-bit number.
    ///
    /// # Errors
    /// `Usage(BadKernel)` where it is something else.
    pub fn u64(&self, index: usize) -> Result<u64> {
        match self.args.get(index) {
            Some(HostArg::Number(Arg::U64(n))) => Ok(*n),
            _ => Err(bad("argument is not a u64")),
        }
    }

    /// Argument `index` as a single-precision number.
    ///
    /// # Errors
    /// `Usage(BadKernel)` where it is something else.
    pub fn f32(&self, index: usize) -> Result<f32> {
        match self.args.get(index) {
            Some(HostArg::Number(Arg::F32(x))) => Ok(*x),
            _ => Err(bad("argument is not an f32")),
        }
    }

    /// Bytes of argument `index`, without taking it.
    pub fn len(&self, index: usize) -> Bytes {
        match self.args.get(index) {
            Some(HostArg::Read(bytes)) => Bytes(bytes.len() as u64),
            Some(HostArg::Write(bytes)) => Bytes(bytes.len() as u64),
            _ => Bytes::ZERO,
        }
    }
}

fn bad(what: &'static str) -> Error {
    Error::usage(Misuse::BadKernel, "launch").detail(what)
}
