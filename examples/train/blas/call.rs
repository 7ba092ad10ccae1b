//! A row-major product as the column-major call that computes it.
//!
//! What it is not: a call of any library.
//!
//! Invariant: the call reads and writes exactly the numbers that the product names.
//!
//! ```text
//!   row-major C = A B      is, column-major,      C' = B' A'      where X' is X read by columns:
//!   the factors change places, m and n do; a factor's own transposition stays what it was
//! ```
//!
//! `blas` and those who ask it for products use it.

use lightering::backend::Arg;
use lightering::{Error, Misuse, Result};

/// One product in bf16, row-major: `c = a b`, or `c += a b`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Product {
    /// Device addresses.
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) c: u64,
    /// Rows and columns of `c`, and the length of the sums.
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    /// Is the factor stored as its transpose?
    pub(crate) a_transposed: bool,
    pub(crate) b_transposed: bool,
    /// Is it added to what is there?
    pub(crate) add: bool,
}

/// The same, column-major, as cuBLAS takes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) transposed: [bool; 2],
    pub(crate) m: i32,
    pub(crate) n: i32,
    pub(crate) k: i32,
    /// First and second factor, and the result.
    pub(crate) at: [u64; 3],
    /// From one column to the next, of each.
    pub(crate) stride: [i32; 3],
    /// What the result's old numbers count.
    pub(crate) beta: f32,
}

impl Product {
    /// The product that the arguments of the kernel `product` (or `product_add`) stand for.
    pub(crate) fn of_args(args: &[Arg], add: bool) -> Result<Product> {
        let [Arg::Read(a), Arg::Read(b), Arg::Write(c) | Arg::Update(c), sizes @ ..] = args else {
            return Err(bad("arguments"));
        };
        let [Arg::U32(m), Arg::U32(n), Arg::U32(k), Arg::U32(flags)] = *sizes else {
            return Err(bad("sizes"));
        };
        let bytes = |rows: u32, columns: u32| 2 * u64::from(rows) * u64::from(columns);
        if [a.len().0, b.len().0, c.len().0] != [bytes(m, k), bytes(k, n), bytes(m, n)] {
            return Err(bad("a factor's length"));
        }
        let [a, b, c] = [a.at().0, b.at().0, c.at().0];
        let (a_transposed, b_transposed) = (flags & 1 != 0, flags & 2 != 0);
        Ok(Product { a, b, c, m, n, k, a_transposed, b_transposed, add })
    }

    /// As a column-major call.
    pub(crate) fn call(&self) -> Result<Call> {
        let size = |size: u32| i32::try_from(size).map_err(|_| bad("a size over 31 bits"));
        let (m, n, k) = (size(self.m)?, size(self.n)?, size(self.k)?);
        Ok(Call {
            transposed: [self.b_transposed, self.a_transposed],
            m: n,
            n: m,
            k,
            at: [self.b, self.a, self.c],
            stride: [
                if self.b_transposed { k } else { n },
                if self.a_transposed { m } else { k },
                n,
            ],
            beta: if self.add { 1.0 } else { 0.0 },
        })
    }
}

fn bad(what: &'static str) -> Error {
    Error::usage(Misuse::BadKernel, "product").detail(what)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use lightering::{Bytes, DevicePtr, DeviceRange};

    /// The call by its definition: what the library is trusted to do, on `f32`s.
    pub(crate) fn by_columns(call: &Call, a: &[f32], b: &[f32], c: &mut [f32]) {
        let [lda, ldb, ldc] = call.stride.map(|stride| stride as usize);
        let (m, n, k) = (call.m as usize, call.n as usize, call.k as usize);
        for (j, column) in c.chunks_mut(ldc).enumerate().take(n) {
            let column = &mut column[..m];
            for c in &mut *column {
                // The library does not read a result that counts for nothing.
                *c = if call.beta == 0.0 { 0.0 } else { call.beta * *c };
            }
            for p in 0..k {
                let b = if call.transposed[1] { b[j + p * ldb] } else { b[p + j * ldb] };
                if call.transposed[0] {
                    column.iter_mut().enumerate().for_each(|(i, c)| *c += a[p + i * lda] * b);
                } else {
                    column.iter_mut().zip(&a[p * lda..]).for_each(|(c, a)| *c += a * b);
                }
            }
        }
    }

    fn product(flags: u32, add: bool) -> Product {
        let (m, n, k) = (3u32, 5, 7);
        let range = |at: u64, count: u32| {
            DeviceRange::new(DevicePtr(at), Bytes(2 * u64::from(count))).unwrap()
        };
        let args = [
            Arg::Read(range(1 << 10, m * k)),
            Arg::Read(range(2 << 10, k * n)),
            Arg::Write(range(3 << 10, m * n)),
            Arg::U32(m),
            Arg::U32(n),
            Arg::U32(k),
            Arg::U32(flags),
        ];
        let short = [&[Arg::Read(range(1 << 10, m * k - 1))], &args[1..]].concat();
        assert_eq!(Product::of_args(&short, add).unwrap_err().misuse(), Some(Misuse::BadKernel));
        assert!(Product::of_args(&args[..6], add).is_err());
        Product::of_args(&args, add).unwrap()
    }

    #[test]
    fn every_form_of_a_product_survives_the_change_of_order() {
        let (m, n, k) = (3, 5, 7);
        let a: Vec<f32> = (0..m * k).map(|i| (i * i % 11) as f32 - 5.0).collect();
        let b: Vec<f32> = (0..k * n).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
        for flags in 0..4 {
            for add in [false, true] {
                let call = product(flags, add).call().unwrap();
                assert_eq!(call.at, [2 << 10, 1 << 10, 3 << 10], "the factors change places");
                let start = if add { 0.5 } else { f32::NAN };
                let mut c = vec![start; m * n];
                by_columns(&call, &b, &a, &mut c);
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let sum: f32 = (0..k)
                        .map(|p| {
                            let x = if flags & 1 == 0 { a[i * k + p] } else { a[p * m + i] };
                            let y = if flags & 2 == 0 { b[p * n + j] } else { b[j * k + p] };
                            x * y
                        })
                        .sum();
                    let wanted = sum + if add { 0.5 } else { 0.0 };
                    assert_eq!(c[i * n + j], wanted, "flags {flags}, row {i}, column {j}");
                }
            }
        }
    }

    #[test]
    fn a_size_over_31_bits_is_refused() {
        let long = Product { k: 1 << 31, ..product(0, false) };
        assert_eq!(long.call().unwrap_err().misuse(), Some(Misuse::BadKernel));
    }
}
