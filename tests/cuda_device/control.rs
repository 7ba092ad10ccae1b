//! What NVIDIA's memcheck makes of a free that comes after a copy, in five programs of one driver
//! call a verb: it takes a wait for order, and an answer for none. So it is silent about the first,
//! and reports the other four, of which only the last has a fault. Each is run by itself under the
//! tool: `compute-sanitizer --tool memcheck --track-stream-ordered-races all test-cuda_device
//! --ignored --exact control::a_free_behind_a_wait`.

use crate::device::{Host, cuda, range};
use lightering::backend::{Backend, Timing};
use lightering::trace::Site;
use lightering::{Bytes, EventId, StreamId};

const LEN: u64 = 32 << 10;

#[derive(Clone, Copy, PartialEq)]
enum Behind {
    Wait,
    Answer,
    /// As `Answer`; the event in front of the copy is recorded anew before it.
    AnswerAmongOthers,
    /// As `Answer`; the event that answered is recorded anew, on the other stream, before the free.
    AnswerRecordedAnew,
    Nothing,
}

fn free_after_copy(behind: Behind) {
    let Some(mut cuda) = cuda() else { return };
    let streams: [StreamId; 2] = [(); 2].map(|()| cuda.create_stream().unwrap());
    let [compute, lane] = streams;
    let [taken, end, next]: [EventId; 3] =
        [(); 3].map(|()| cuda.create_event(Timing::Off).unwrap());
    let host = Host::new(&cuda, LEN);
    let at = cuda.alloc_device(Bytes(LEN), compute).unwrap();
    cuda.record(taken, compute).unwrap();
    cuda.wait(lane, taken, Site::Outside).unwrap();
    cuda.copy_out(host.range, range(at, LEN), lane).unwrap();
    cuda.record(end, lane).unwrap();
    match behind {
        Behind::Nothing => {}
        Behind::Wait => cuda.wait(compute, end, Site::Outside).unwrap(),
        Behind::Answer | Behind::AnswerAmongOthers | Behind::AnswerRecordedAnew => {
            if behind == Behind::AnswerAmongOthers {
                cuda.record(taken, compute).unwrap();
                cuda.wait(lane, taken, Site::Outside).unwrap();
                cuda.record(next, lane).unwrap();
            }
            while !cuda.query(end, Site::Outside).unwrap() {}
            if behind == Behind::AnswerRecordedAnew {
                cuda.record(end, compute).unwrap();
            }
        }
    }
    cuda.free_device(at, compute).unwrap();
    cuda.sync().unwrap();
    host.close();
}

#[test]
#[ignore = "needs a CUDA device, and NVIDIA's memcheck around it"]
fn a_free_behind_a_wait() {
    free_after_copy(Behind::Wait);
}

#[test]
#[ignore = "needs a CUDA device, and NVIDIA's memcheck around it"]
fn a_free_behind_an_answer() {
    free_after_copy(Behind::Answer);
}

#[test]
#[ignore = "needs a CUDA device, and NVIDIA's memcheck around it"]
fn a_free_behind_an_answer_among_other_events() {
    free_after_copy(Behind::AnswerAmongOthers);
}

#[test]
#[ignore = "needs a CUDA device, and NVIDIA's memcheck around it"]
fn a_free_behind_an_answer_whose_event_is_recorded_anew() {
    free_after_copy(Behind::AnswerRecordedAnew);
}

#[test]
#[ignore = "needs a CUDA device, and NVIDIA's memcheck around it"]
fn a_free_behind_nothing() {
    free_after_copy(Behind::Nothing);
}
