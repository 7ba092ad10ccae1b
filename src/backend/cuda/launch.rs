//! Kernels: PTX text becomes code once per device, and a launch passes its arguments by address.
//!
//! What it is not: a compiler. PTX is made ahead of time; the driver translates it for the device
//! at the first launch of its module, which costs some tens of milliseconds.
//!
//! Invariant: a launch of a known kernel allocates nothing. A PTX text is loaded once per device,
//! however many kernels it holds and however many `Cuda`s launch them.
//!
//! ```text
//!   Kernel { ptx, name } -> known? -> CUfunction
//!                           no: cuModuleLoadDataEx (log kept on failure) -> cuModuleGetFunction
//!   args -> [u64; 32] cells -> [pointer; 32] -> cuLaunchKernel
//! ```
//!
//! Modules are not unloaded: a kernel may be in flight when the last `Cuda` goes, and `Drop` does
//! not wait or guess. Their code goes with the primary context.
//!
//! `Cuda` alone uses it.

use super::context::{Entered, lock};
use super::{Cuda, pinned};
use crate::backend::{Arg, Grid, Kernel};
use crate::error::{Error, Misuse, Result};
use crate::unit::StreamId;
use cudarc::driver::sys::{CUfunction, CUjit_option, CUmodule};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;

/// The most arguments a kernel may take.
const ARGS_MAX: usize = 32;
/// How many bytes of the translator's complaint are kept.
const LOG_LEN: usize = 2048;
const OP: &str = "launch";

// A number narrower than its 64-bit cell lies in the cell's first bytes.
const _: () = assert!(cfg!(target_endian = "little"), "kernel arguments assume little-endian");

/// The kernels loaded on one device.
#[derive(Debug, Default)]
pub(super) struct Kernels {
    /// Modules by their text.
    modules: HashMap<&'static str, usize>,
    /// Functions by the address of their `Kernel`, which lives as long as the program.
    functions: HashMap<usize, usize>,
}

impl Kernels {
    fn function(&mut self, kernel: &'static Kernel, entered: &Entered<'_>) -> Result<CUfunction> {
        let key = ptr::from_ref(kernel).addr();
        if let Some(raw) = self.functions.get(&key) {
            return Ok(*raw as CUfunction);
        }
        let Some(ptx) = kernel.ptx else {
            return Err(refusal(kernel, "it has no PTX".to_owned()));
        };
        let module = match self.modules.get(ptx) {
            Some(raw) => *raw as CUmodule,
            None => {
                let module = load(kernel, ptx, entered)?;
                self.modules.insert(ptx, module as usize);
                module
            }
        };
        let name = terminated(kernel, kernel.name)?;
        let mut function: CUfunction = ptr::null_mut();
        // SAFETY: the module is loaded and never unloaded; terminated name; valid pointer.
        let answer =
            unsafe { entered.driver().cuModuleGetFunction(&mut function, module, name.as_ptr()) };
        entered.check(answer).map_err(|error| explain(error, kernel, answer.call))?;
        self.functions.insert(key, function as usize);
        Ok(function)
    }
}

/// Adds the kernel's name, except to a loss, whose words are those of its first sight.
fn explain(error: Error, kernel: &Kernel, why: &str) -> Error {
    if error.is_lost() { error } else { error.detail(format!("kernel {:?}: {why}", kernel.name)) }
}

fn refusal(kernel: &Kernel, why: String) -> Error {
    Error::usage(Misuse::BadKernel, OP).detail(format!("kernel {:?}: {why}", kernel.name))
}

fn terminated(kernel: &Kernel, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| refusal(kernel, "a zero byte in its text".to_owned()))
}

fn load(kernel: &Kernel, ptx: &'static str, entered: &Entered<'_>) -> Result<CUmodule> {
    let text = terminated(kernel, ptx)?;
    let mut log = [0_u8; LOG_LEN];
    let mut options =
        [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The second value is the number itself, in a pointer's clothes: the driver's convention.
    let mut values: [*mut c_void; 2] =
        [log.as_mut_ptr().cast(), ptr::without_provenance_mut(LOG_LEN)];
    let mut module: CUmodule = ptr::null_mut();
    // SAFETY: terminated text; both arrays have the count given and are used during the call only,
    // as is the log, whose true length is given.
    let answer = unsafe {
        entered.driver().cuModuleLoadDataEx(
            &mut module,
            text.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    entered.check(answer).map_err(|error| {
        let end = log.iter().position(|byte| *byte == 0).unwrap_or(LOG_LEN);
        let said = String::from_utf8_lossy(&log[..end]).trim().replace('\n', "; ");
        explain(error, kernel, &format!("{}: {said}", answer.call))
    })?;
    Ok(module)
}

/// The bits of an argument, in a cell of 64.
fn cell(arg: &Arg) -> u64 {
    match *arg {
        Arg::Read(range) | Arg::Write(range) | Arg::Update(range) => range.at().0,
        Arg::Reached(_, range) => range.at().0,
        Arg::Pinned(_, range) => range.at().0,
        Arg::U32(number) => u64::from(number),
        Arg::U64(number) => number,
        Arg::F32(number) => u64::from(number.to_bits()),
    }
}

impl Cuda {
    pub(super) fn enqueue_kernel(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        // Relaxed, for the first launch of a kernel loads it.
        let entered = self.context.enter_relaxed(OP)?;
        let stream = self.streams.ready(on, &entered, OP)?;
        let passed = || args.iter().filter(|arg| !matches!(arg, Arg::Reached(..)));
        let count = passed().count();
        if count > ARGS_MAX {
            return Err(refusal(kernel, format!("{count} arguments, {ARGS_MAX} at most")));
        }
        let is_bad = |arg: &&Arg| matches!(arg, Arg::Pinned(_, at) if !pinned::is_reachable(*at));
        if args.iter().any(|arg| is_bad(&arg)) {
            let what = "an argument in host memory that is not page-locked as one";
            return Err(refusal(kernel, what.to_string()));
        }
        let function = lock(&self.context.kernels).function(kernel, &entered)?;
        let mut cells = [0_u64; ARGS_MAX];
        let mut pointers = [ptr::null_mut::<c_void>(); ARGS_MAX];
        for ((arg, cell_of), pointer) in passed().zip(&mut cells).zip(&mut pointers) {
            *cell_of = cell(arg);
            *pointer = ptr::from_mut(cell_of).cast();
        }
        let ([bx, by, bz], [tx, ty, tz]) = (grid.blocks, grid.threads);
        let (params, extra) = (pointers.as_mut_ptr(), ptr::null_mut());
        // SAFETY: the function belongs to the current context, the stream too; each pointer leads
        // to a cell of at least the parameter's size, read during the call. That the kernel takes
        // these arguments is its author's word: `Kernel` is a static of the program.
        let answer = unsafe {
            entered.driver().cuLaunchKernel(
                function,
                bx,
                by,
                bz,
                tx,
                ty,
                tz,
                grid.shared,
                stream,
                params,
                extra,
            )
        };
        entered.check(answer).map_err(|error| explain(error, kernel, answer.call))
    }
}
