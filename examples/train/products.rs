//! A backend whose matrix products are cuBLAS's; everything else it passes on.
//!
//! What it is not: an order of its own. A product is enqueued on the stream it is launched on, like
//! any kernel.
//!
//! Invariant: one stream has products, so cuBLAS's workspace is used by one at a time.
//!
//! ```text
//!   launch(product, ..) -> Blas::product, and a note of what it reads and writes
//!   launch(any other)   -> the backend below
//! ```
//!
//! `device` puts it around a CUDA backend. Whoever traces the backend below sees the note.

use crate::blas::call::Product;
use crate::blas::{Blas, WORKSPACE};
use crate::kernel::product::{PRODUCT, PRODUCT_ADD};
use crate::passing::pass_on;
use lightering::backend::{About, Arg, Backend, Fence, Grid, Kernel, Memory, Pinner, Timing};
use lightering::trace::{Access, Actor, Site, Use};
use lightering::{
    Bytes, DevicePtr, DeviceRange, Error, EventId, Misuse, PinnedRange, Result, StreamId,
};
use std::sync::Arc;

/// A backend with somebody else's products.
pub(crate) struct Products {
    // Before `inner`: it uses the device until it is dropped.
    blas: Box<dyn Blas>,
    inner: Box<dyn Backend>,
    /// The stream that has products, and their workspace.
    bound: Option<(StreamId, DeviceRange)>,
}

impl Products {
    pub(crate) fn new(blas: Box<dyn Blas>, inner: Box<dyn Backend>) -> Products {
        Products { blas, inner, bound: None }
    }

    /// The workspace, with `blas` bound to the stream.
    fn bind(&mut self, on: StreamId) -> Result<DeviceRange> {
        match self.bound {
            Some((stream, workspace)) if stream == on => Ok(workspace),
            Some(_) => {
                let error = Error::usage(Misuse::BadKernel, "product");
                Err(error.detail("products are on one stream only"))
            }
            None => {
                let at = self.inner.alloc_device(WORKSPACE, on)?;
                let workspace = DeviceRange::new(at, WORKSPACE)?;
                let raw = self.inner.raw_stream(on)?;
                self.bound = Some((on, workspace));
                self.blas.bind(raw, workspace)?;
                Ok(workspace)
            }
        }
    }
}

impl Backend for Products {
    fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: Grid,
        args: &[Arg],
        on: StreamId,
    ) -> Result<()> {
        if !std::ptr::eq(kernel, &PRODUCT) && !std::ptr::eq(kernel, &PRODUCT_ADD) {
            return self.inner.launch(kernel, grid, args, on);
        }
        let product = Product::of_args(args, std::ptr::eq(kernel, &PRODUCT_ADD))?;
        let workspace = self.bind(on)?;
        self.blas.product(&product)?;
        let mut uses: Vec<Use> = args.iter().filter_map(Arg::uses).collect();
        uses.push(Use { access: Access::Write, span: workspace.into() });
        self.inner.note(Actor::Stream(on), &uses)
    }

    pass_on!(memory);
    pass_on!(rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::product::{Size, plain, product, product_add, transposed};
    use crate::queue::Queue;
    use lightering::backend::sim::{Config, World};
    use lightering::backend::traced::Traced;
    use lightering::trace::Op;
    use std::sync::Mutex;

    /// What was asked of it.
    #[derive(Default)]
    struct Said {
        bound: Vec<(usize, Bytes)>,
        products: Vec<Product>,
    }

    struct Fake(Arc<Mutex<Said>>);

    impl Blas for Fake {
        fn bind(&mut self, stream: usize, workspace: DeviceRange) -> Result<()> {
            self.0.lock().unwrap().bound.push((stream, workspace.len()));
            Ok(())
        }

        fn product(&mut self, product: &Product) -> Result<()> {
            self.0.lock().unwrap().products.push(*product);
            Ok(())
        }
    }

    #[test]
    fn a_product_goes_to_cublas_and_is_noted_for_the_trace() {
        let said = Arc::new(Mutex::new(Said::default()));
        let sim = World::new(Config::default()).device(0).unwrap();
        let mut traced = Traced::new(sim, 64);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        traced.observe(Some(Box::new(move |record| log.lock().unwrap().push(*record))));
        let mut backend = Products::new(Box::new(Fake(said.clone())), Box::new(traced));
        let [on, other] = [(); 2].map(|()| backend.create_stream().unwrap());
        let raw = backend.raw_stream(on).unwrap();
        let mut queue = Queue::new(&mut backend, on);
        let [a, b, c] = [2 * 48, 2 * 64, 2 * 48].map(|len| queue.take(len).unwrap());
        let size = Size { m: 6, n: 6, k: 8 };
        let (b, c) = (b.part(Bytes::ZERO, Bytes(96)).unwrap(), c.part(Bytes::ZERO, Bytes(72)));
        let c = c.unwrap();
        product(&mut queue, plain(a), transposed(b), c, size).unwrap();
        product_add(&mut queue, transposed(a), plain(b), c, size).unwrap();
        let mut elsewhere = Queue::new(&mut backend, other);
        let error = product(&mut elsewhere, plain(a), plain(b), c, size).unwrap_err();
        assert_eq!(error.misuse(), Some(Misuse::BadKernel), "one workspace serves one stream");

        let said = said.lock().unwrap();
        assert_eq!(said.bound, [(raw, WORKSPACE)], "bound once");
        let [first, second] = said.products[..] else { panic!("two products") };
        assert_eq!((first.a, first.b, first.c), (a.at().0, b.at().0, c.at().0));
        assert_eq!((first.a_transposed, first.b_transposed, first.add), (false, true, false));
        assert_eq!((second.a_transposed, second.b_transposed, second.add), (true, false, true));
        let seen = seen.lock().unwrap();
        let uses = |range: DeviceRange, access| {
            let wanted = Use { access, span: range.into() };
            let has = |op: &Op| matches!(op, Op::Use { uses, .. } if *uses == wanted);
            seen.iter().filter(|record| has(&record.op)).count()
        };
        assert_eq!((uses(a, Access::Read), uses(b, Access::Read)), (2, 2));
        assert_eq!((uses(c, Access::Write), uses(c, Access::Update)), (1, 1));
    }
}
