//! Streams and slices of cudarc that lose their order or their owner when they pass through here.
#![cfg(feature = "interop-cudarc")]

use crate::bench::Bench;
use crate::fake::{alive, calls, name_of, story};
use cudarc::driver::CudaContext;
use lightering::backend::cuda::{Cuda, interop};
use lightering::backend::{Backend, Timing};
use lightering::trace::Site;
use lightering::{Bytes, Misuse};

#[test]
fn a_cudarc_stream_is_borrowed_and_a_slice_keeps_its_bytes() {
    story(name_of!(a_cudarc_stream_is_borrowed_and_a_slice_keeps_its_bytes), "devices:2", || {
        let context = CudaContext::new(0).unwrap();
        let (stream, other) = (context.new_stream().unwrap(), CudaContext::new(1).unwrap());
        let mut b = Bench::new(0);
        let lane = b.cuda.adopt_cudarc_stream(&stream).unwrap();
        assert_eq!(b.cuda.cudarc_stream(lane).unwrap(), stream.cu_stream());
        let foreign = other.new_stream().unwrap();
        let error = b.cuda.adopt_cudarc_stream(&foreign).unwrap_err();
        assert_eq!(error.misuse(), Some(Misuse::WrongDevice));

        let mut slice = stream.alloc_zeros::<u32>(16).unwrap();
        let pin = crate::bench::pinned(b.host.0, 64);
        b.pages.bytes()[..64].fill(0xA5);
        let event = b.cuda.create_event(Timing::Off).unwrap();
        {
            let (range, _guard) = interop::write_range(&mut slice, &stream).unwrap();
            assert_eq!(range.len(), Bytes(64));
            b.cuda.copy_in(range, pin, lane).unwrap();
            b.cuda.record(event, lane).unwrap();
        }
        b.pages.bytes()[..64].fill(0);
        {
            let (range, _guard) = interop::read_range(&slice, &stream).unwrap();
            b.cuda.wait(lane, event, Site::Outside).unwrap();
            b.cuda.copy_out(pin, range, lane).unwrap();
        }
        assert!(b.pages.bytes()[..64].iter().all(|byte| *byte == 0xA5));
        let streams = alive().streams;
        b.cuda.close_stream(lane).unwrap();
        assert_eq!(alive().streams, streams, "cudarc's stream is cudarc's to destroy");
        b.close();
        calls();
        drop((slice, stream));
        assert!(calls().iter().any(|call| call.name == "cuStreamDestroy_v2"));
        assert!(Cuda::open(0).is_ok());
    });
}
