//! Matrix products by cuBLAS, which is found when the program runs.
//!
//! What it is not: a binding. It has the one product the examples need: bf16 in and out, summed up
//! in single precision.
//!
//! Invariant: equal products on one device give equal bits: one stream uses the handle, with one
//! workspace of fixed size, and no sum is split over numbers narrower than single precision.
//!
//! ```text
//!   find -> libcublas.so.13 | .12      driver -> the primary context, current
//!   call -> row-major product as a column-major call      Cublas::product -> cublasGemmEx
//! ```
//!
//! Both examples use it. Here, in `find` and in `driver` is `unsafe`: calls of foreign functions.

pub(crate) mod call;
mod driver;
mod find;

use call::Product;
use driver::{Primary, symbol};
use libloading::Library;
use lightering::{Bytes, DeviceRange, Error, Kind, Misuse, Result};
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

/// Bytes of the workspace: what NVIDIA recommends for its newest devices.
pub(crate) const WORKSPACE: Bytes = Bytes::mib(32);

/// Who multiplies.
pub(crate) trait Blas: Send {
    /// All later products are enqueued on this stream of the driver, and use this workspace alone.
    fn bind(&mut self, stream: usize, workspace: DeviceRange) -> Result<()>;

    /// Enqueues a product.
    fn product(&mut self, product: &Product) -> Result<()>;
}

// Numbers of cublas_api.h and library_types.h, the same in versions 12 and 13.
const CUDA_R_16BF: c_int = 14;
const CUBLAS_COMPUTE_32F: c_int = 68;
const CUBLAS_GEMM_DEFAULT: c_int = -1;
const CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: c_int = 16;

type Handle = *mut c_void;
type Code = c_int;

/// The library's functions that are called here.
#[derive(Clone, Copy, Debug)]
struct Functions {
    create: unsafe extern "C" fn(*mut Handle) -> Code,
    destroy: unsafe extern "C" fn(Handle) -> Code,
    set_stream: unsafe extern "C" fn(Handle, *mut c_void) -> Code,
    set_workspace: unsafe extern "C" fn(Handle, *mut c_void, usize) -> Code,
    set_math_mode: unsafe extern "C" fn(Handle, c_int) -> Code,
    #[allow(clippy::type_complexity, reason = "the function's own signature")]
    gemm: unsafe extern "C" fn(
        Handle,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
        *const f32,
        *const c_void,
        c_int,
        c_int,
        *const c_void,
        c_int,
        c_int,
        *const f32,
        *mut c_void,
        c_int,
        c_int,
        c_int,
        c_int,
    ) -> Code,
}

impl Functions {
    /// The library, searched for once per process.
    fn get() -> std::result::Result<Functions, String> {
        static FOUND: OnceLock<std::result::Result<Functions, String>> = OnceLock::new();
        FOUND.get_or_init(|| Functions::of(find::load()?)).clone()
    }

    fn of(library: &'static Library) -> std::result::Result<Functions, String> {
        // SAFETY: each name has the signature of its field in cublas_api.h, with handles and
        // numbers of enumerations as what they are in C.
        unsafe {
            Ok(Functions {
                create: symbol(library, "cublasCreate_v2")?,
                destroy: symbol(library, "cublasDestroy_v2")?,
                set_stream: symbol(library, "cublasSetStream_v2")?,
                set_workspace: symbol(library, "cublasSetWorkspace_v2")?,
                set_math_mode: symbol(library, "cublasSetMathMode")?,
                gemm: symbol(library, "cublasGemmEx")?,
            })
        }
    }
}

/// cuBLAS on one device.
#[derive(Debug)]
pub(crate) struct Cublas {
    functions: Functions,
    /// The library's handle, as a number, so that it may go to another thread with its owner.
    handle: usize,
    context: Primary,
}

impl Cublas {
    /// Finds the library and opens it on the device.
    ///
    /// # Errors
    /// `Usage(BadKernel)`, saying where it was looked for or what the library answered.
    pub(crate) fn open(ordinal: u32) -> Result<Cublas> {
        let missing = |why: String| Error::usage(Misuse::BadKernel, "cublas").detail(why);
        let functions = Functions::get().map_err(missing)?;
        let context = Primary::hold(ordinal).map_err(missing)?;
        context.enter().map_err(missing)?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: a context is current; valid pointer.
        check("cublasCreate_v2", unsafe { (functions.create)(&mut handle) })?;
        let mut cublas = Cublas { functions, handle: handle as usize, context };
        let mode = CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        let handle = cublas.enter()?;
        // SAFETY: the handle is alive, its context current.
        check("cublasSetMathMode", unsafe { (functions.set_math_mode)(handle, mode) })?;
        Ok(cublas)
    }

    /// The handle, with its context current on this thread.
    fn enter(&mut self) -> Result<Handle> {
        let lost = |why: String| Error::usage(Misuse::BadKernel, "cublas").detail(why);
        self.context.enter().map_err(lost)?;
        Ok(self.handle as Handle)
    }
}

impl Blas for Cublas {
    fn bind(&mut self, stream: usize, workspace: DeviceRange) -> Result<()> {
        let handle = self.enter()?;
        // SAFETY: the handle is alive, its context current; the stream is the caller's and lives.
        let code = unsafe { (self.functions.set_stream)(handle, stream as *mut c_void) };
        check("cublasSetStream_v2", code)?;
        // After the stream: setting that one takes the workspace away again.
        let (at, len) = (workspace.at().0 as *mut c_void, workspace.len().to_usize()?);
        // SAFETY: as above; the workspace is device memory of that length, and the caller's until
        // the handle's last product is done.
        let code = unsafe { (self.functions.set_workspace)(handle, at, len) };
        check("cublasSetWorkspace_v2", code)
    }

    fn product(&mut self, product: &Product) -> Result<()> {
        let call = product.call()?;
        let handle = self.enter()?;
        let [trans_a, trans_b] = call.transposed.map(c_int::from);
        let [a, b, c] = call.at.map(|at| at as *mut c_void);
        let [lda, ldb, ldc] = call.stride;
        let alpha = 1.0f32;
        // SAFETY: the handle is alive, its context current. The addresses are device memory of the
        // sizes given (`Product::of_args` compares them with the ranges), ordered on the stream.
        // alpha and beta are read on the host during the call.
        let code = unsafe {
            (self.functions.gemm)(
                handle,
                trans_a,
                trans_b,
                call.m,
                call.n,
                call.k,
                &alpha,
                a,
                CUDA_R_16BF,
                lda,
                b,
                CUDA_R_16BF,
                ldb,
                &call.beta,
                c,
                CUDA_R_16BF,
                ldc,
                CUBLAS_COMPUTE_32F,
                CUBLAS_GEMM_DEFAULT,
            )
        };
        check("cublasGemmEx", code).map_err(|error| {
            let kind = error.kind();
            let Product { m, n, k, .. } = *product;
            Error::new(kind, "cublas").detail(format!("{m} x {n} x {k}: {error}"))
        })
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        if let Ok(handle) = self.enter() {
            // SAFETY: the handle is alive and used no more. There is nobody to tell its answer.
            let _ = unsafe { (self.functions.destroy)(handle) };
        }
    }
}

fn check(name: &'static str, code: Code) -> Result<()> {
    let (kind, word) = match code {
        0 => return Ok(()),
        1 => (None, "NOT_INITIALIZED"),
        3 => (Some(Kind::OutOfMemory), "ALLOC_FAILED"),
        7 => (None, "INVALID_VALUE"),
        8 => (None, "ARCH_MISMATCH"),
        11 => (None, "MAPPING_ERROR"),
        13 => (None, "EXECUTION_FAILED"),
        14 => (None, "INTERNAL_ERROR"),
        15 => (None, "NOT_SUPPORTED"),
        _ => (None, "unknown"),
    };
    let kind = kind.unwrap_or(Kind::Usage(Misuse::BadKernel));
    Err(Error::new(kind, "cublas").detail(format!("{name} answered {code} ({word})")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_an_error_that_names_the_function_and_the_code() {
        assert!(check("cublasGemmEx", 0).is_ok());
        let error = check("cublasGemmEx", 13).unwrap_err().to_string();
        assert!(error.contains("cublasGemmEx") && error.contains("13 (EXECUTION_FAILED)"));
        assert_eq!(check("cublasCreate_v2", 3).unwrap_err().kind(), Kind::OutOfMemory);
    }
}
