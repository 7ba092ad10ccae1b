//! Verbs that a backend around another one passes on unchanged.
//!
//! What it is not: a backend.
//!
//! Invariant: `memory`, `launch` and `rest` together are all of a backend's verbs, so that a
//! wrapper leaves out the group it changes and can forget no other.
//!
//! ```text
//!   impl Backend for Wrapper { pass_on!(memory); fn launch(..) { its own } pass_on!(rest); }
//! ```
//!
//! `meter` and `products` use it.

macro_rules! pass_on {
    (memory) => {
        fn alloc_device(&mut self, len: Bytes, on: StreamId) -> Result<DevicePtr> {
            self.inner.alloc_device(len, on)
        }

        fn free_device(&mut self, at: DevicePtr, on: StreamId) -> Result<()> {
            self.inner.free_device(at, on)
        }
    };
    (launch) => {
        fn launch(
            &mut self,
            kernel: &'static Kernel,
            grid: Grid,
            args: &[Arg],
            on: StreamId,
        ) -> Result<()> {
            self.inner.launch(kernel, grid, args, on)
        }
    };
    (rest) => {
        fn about(&self) -> About {
            self.inner.about()
        }

        fn raw_stream(&self, stream: StreamId) -> Result<usize> {
            self.inner.raw_stream(stream)
        }

        fn pinner(&self) -> Arc<dyn Pinner> {
            self.inner.pinner()
        }

        fn fence(&self) -> Arc<dyn Fence> {
            self.inner.fence()
        }

        pass_on! { verbs
            memory() -> Result<Memory>;
            reset_peak() -> ();
            adopt_stream(raw: usize) -> Result<StreamId>;
            create_stream() -> Result<StreamId>;
            close_stream(stream: StreamId) -> Result<()>;
            create_event(timing: Timing) -> Result<EventId>;
            close_event(event: EventId) -> Result<()>;
            allocation(at: DevicePtr) -> Result<Option<DeviceRange>>;
            record(event: EventId, stream: StreamId) -> Result<()>;
            wait(stream: StreamId, event: EventId, site: Site) -> Result<()>;
            query(event: EventId, site: Site) -> Result<bool>;
            elapsed(from: EventId, to: EventId) -> Result<std::time::Duration>;
            note(by: Actor, uses: &[Use]) -> Result<()>;
            copy_out(to: PinnedRange, from: DeviceRange, on: StreamId) -> Result<()>;
            copy_in(to: DeviceRange, from: PinnedRange, on: StreamId) -> Result<()>;
            capturing(stream: StreamId) -> Result<bool>;
            sync() -> Result<()>;
        }
    };
    (verbs $($verb:ident($($arg:ident: $kind:ty),*) -> $answer:ty;)*) => {
        $(fn $verb(&mut self, $($arg: $kind),*) -> $answer {
            self.inner.$verb($($arg),*)
        })*
    };
}

pub(crate) use pass_on;
