//! Matrix products: `C = A B` or `C += A B`, row-major, either side read transposed.
//!
//! What it is not: general. There are no strides besides the rows' own, and no scaling.
//!
//! Invariant: equal inputs give equal bits, with any number of threads: threads share out the rows
//! and columns of `C`, and each element is summed by one of them in the order of `k`.
//!
//! ```text
//!   Side { range, transposed }     A: m x k      B: k x n      C: m x n
//! ```
//!
//! `model` uses it. The file has the example's only `unsafe`: the call into `matrixmultiply`.

use crate::queue::{Queue, number, threads_for};
use lightering::backend::{Arg, Cost, Grid, HostArgs, Kernel, Work};
use lightering::{DeviceRange, Error, Misuse, Result};

/// `C = A B`.
pub(crate) static PRODUCT: Kernel =
    Kernel { name: "product", ptx: None, host: Some(|_, args| host(args, 0.0)), cost };

/// `C += A B`.
pub(crate) static PRODUCT_ADD: Kernel =
    Kernel { name: "product_add", ptx: None, host: Some(|_, args| host(args, 1.0)), cost };

/// One factor.
#[derive(Clone, Copy)]
pub(crate) struct Side {
    range: DeviceRange,
    transposed: bool,
}

/// The factor as it lies in memory.
pub(crate) fn plain(range: DeviceRange) -> Side {
    Side { range, transposed: false }
}

/// The factor's transpose.
pub(crate) fn transposed(range: DeviceRange) -> Side {
    Side { range, transposed: true }
}

/// Rows and columns of the result, and the length of the sums.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) m: u64,
    pub(crate) n: u64,
    pub(crate) k: u64,
}

/// Enqueues `c = a b`.
pub(crate) fn product(
    queue: &mut Queue<'_>,
    a: Side,
    b: Side,
    c: DeviceRange,
    size: Size,
) -> Result<()> {
    launch(queue, &PRODUCT, a, b, Arg::Write(c), size)
}

/// Enqueues `c += a b`.
pub(crate) fn product_add(
    queue: &mut Queue<'_>,
    a: Side,
    b: Side,
    c: DeviceRange,
    size: Size,
) -> Result<()> {
    launch(queue, &PRODUCT_ADD, a, b, Arg::Update(c), size)
}

fn launch(
    queue: &mut Queue<'_>,
    kernel: &'static Kernel,
    a: Side,
    b: Side,
    c: Arg,
    size: Size,
) -> Result<()> {
    let flags = u32::from(a.transposed) | u32::from(b.transposed) << 1;
    let args = [
        Arg::Read(a.range),
        Arg::Read(b.range),
        c,
        number(size.m),
        number(size.n),
        number(size.k),
        Arg::U32(flags),
    ];
    queue.run(kernel, threads_for(size.m * size.n), &args)
}

fn cost(grid: &Grid, args: &[Arg]) -> Cost {
    let size = |index: usize| match args.get(index) {
        Some(Arg::U32(n)) => f64::from(*n),
        _ => 0.0,
    };
    let flops = 2.0 * size(3) * size(4) * size(5);
    Cost { flops, work: Work::Matrix, ..Cost::of_bytes(grid, args) }
}

fn host(args: &mut HostArgs<'_>, beta: f32) -> Result<()> {
    let (a, b) = (args.read::<f32>(0)?, args.read::<f32>(1)?);
    let c = args.write::<f32>(2)?;
    let (m, n, k) = (args.u32(3)? as usize, args.u32(4)? as usize, args.u32(5)? as usize);
    let flags = args.u32(6)?;
    let fits = |len: usize, rows: usize, columns: usize| rows.checked_mul(columns) == Some(len);
    if !fits(a.len(), m, k) || !fits(b.len(), k, n) || !fits(c.len(), m, n) {
        return Err(Error::usage(Misuse::BadKernel, "product").detail("a factor's length"));
    }
    let strides = |transposed: bool, rows: usize, columns: usize| {
        if transposed { (1, rows as isize) } else { (columns as isize, 1) }
    };
    let (rsa, csa) = strides(flags & 1 != 0, m, k);
    let (rsb, csb) = strides(flags & 2 != 0, k, n);
    let (a, b, rsc) = (a.as_ptr(), b.as_ptr(), n as isize);
    // SAFETY: the three slices hold exactly m k, k n and m n numbers (checked above), which is what
    // the strides address; `c` is borrowed mutably, so it overlaps neither factor.
    unsafe {
        matrixmultiply::sgemm(m, k, n, 1.0, a, rsa, csa, b, rsb, csb, beta, c.as_mut_ptr(), rsc, 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::bench::{noise, read, run, size, write};

    /// The definition, in double precision.
    fn plain_loop(
        a: &[f32],
        b: &[f32],
        c: &mut [f64],
        (m, n, k): (usize, usize, usize),
        flags: u32,
    ) {
        for i in 0..m {
            for j in 0..n {
                for p in 0..k {
                    let a = if flags & 1 == 0 { a[i * k + p] } else { a[p * m + i] };
                    let b = if flags & 2 == 0 { b[p * n + j] } else { b[j * k + p] };
                    c[i * n + j] += f64::from(a) * f64::from(b);
                }
            }
        }
    }

    #[test]
    fn a_product_equals_the_plain_loop_in_every_form() {
        for (m, n, k) in [(1, 1, 1), (7, 5, 3), (33, 64, 17), (160, 96, 130)] {
            for flags in 0..4 {
                for (kernel, start) in [(&PRODUCT, f32::NAN), (&PRODUCT_ADD, 0.5)] {
                    let (a, b) = (noise(1, m * k), noise(2, k * n));
                    let mut c = vec![start; m * n];
                    let numbers = [m, n, k, flags as usize].map(size);
                    let mut args = vec![read(&a), read(&b), write(&mut c)];
                    args.extend(numbers);
                    run(kernel, args);
                    let begin = if start.is_nan() { 0.0 } else { 0.5 };
                    let mut wanted = vec![begin; m * n];
                    plain_loop(&a, &b, &mut wanted, (m, n, k), flags);
                    for (got, wanted) in c.iter().zip(&wanted) {
                        let off = (f64::from(*got) - wanted).abs();
                        assert!(off < 1e-5 * k as f64, "{m} {n} {k} {flags}: {got} {wanted}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_product_gives_the_same_bits_every_time() {
        let (m, n, k) = (300, 520, 260);
        let (a, b) = (noise(3, m * k), noise(4, k * n));
        let once = || {
            let mut c = vec![0.0f32; m * n];
            let mut args = vec![read(&a), read(&b), write(&mut c)];
            args.extend([m, n, k, 0].map(size));
            run(&PRODUCT, args);
            c
        };
        let first = once();
        for _ in 0..20 {
            assert!(once().iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    #[test]
    fn a_factor_of_the_wrong_length_is_refused() {
        let (a, b, mut c) = ([0.0f32; 6], [0.0f32; 6], [0.0f32; 3]);
        let mut args = vec![read(&a), read(&b), write(&mut c)];
        args.extend([2, 2, 3, 0].map(size));
        let host = PRODUCT.host.unwrap();
        let error = host(&Grid::row(1, 1), &mut HostArgs::new(args)).unwrap_err();
        assert_eq!(error.misuse(), Some(Misuse::BadKernel));
    }
}
