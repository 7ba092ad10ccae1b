//! A wait for the device that spoils the graph which somebody else captures just then; or one that
//! forgets work whose stream is gone.

use crate::bench::Bench;
use crate::fake::{calls, name_of, names, script, story};
use lightering::Misuse;
use lightering::backend::Backend;
use lightering::backend::cuda::Cuda;

fn waits_for_context() -> bool {
    names().iter().any(|name| name == "cuCtxSynchronize")
}

#[test]
fn a_wait_for_the_device_spoils_nobodys_capture() {
    story(name_of!(a_wait_for_the_device_spoils_nobodys_capture), "", || {
        let (mut b, other) = (Bench::new(0), Bench::new(0));
        let raw = other.raw(other.lent);
        script(&format!("capture:{raw}:1"));
        names();
        b.cuda.sync().unwrap();
        assert!(!waits_for_context());
        let Bench { mut cuda, lent, .. } = other;
        let refused = cuda.sync().unwrap_err();
        assert_eq!(refused.misuse(), Some(Misuse::Capturing), "{refused}");
        assert!(!waits_for_context());
        assert!(cuda.capturing(lent).unwrap(), "it goes on");
        b.cuda.close_stream(b.lent).unwrap();
        script("");
        cuda.sync().unwrap();
    });
}

#[test]
fn each_stream_of_the_device_is_waited_for_and_by_its_own_name() {
    story(name_of!(each_stream_of_the_device_is_waited_for_and_by_its_own_name), "", || {
        let (mut b, other) = (Bench::new(0), Bench::new(0));
        let mut all = vec![b.raw(b.own), b.raw(b.lent), other.raw(other.own)];
        all.push(other.raw(other.lent));
        calls();
        b.cuda.sync().unwrap();
        let calls = calls();
        let args = |name: &str| -> Vec<Vec<u64>> {
            let named = calls.iter().filter(|call| call.name == name);
            named.map(|call| call.args.clone()).collect()
        };
        let [behind] = &args("cuStreamSynchronize")[..] else { panic!("{calls:?}") };
        let mut recorded: Vec<u64> = Vec::new();
        let pairs = args("cuEventRecord").into_iter().zip(args("cuStreamWaitEvent"));
        for (record, wait) in pairs {
            assert_eq!(wait, [behind[0], record[0], 0], "the event of that stream's moment");
            recorded.push(record[1]);
        }
        recorded.sort_unstable();
        all.sort_unstable();
        assert_eq!(recorded, all);
        assert!(!all.contains(&behind[0]), "a stream of its own");
        // The wait comes after all of them.
        let last = calls.iter().rposition(|call| call.name == "cuStreamWaitEvent");
        assert!(last < calls.iter().position(|call| call.name == "cuStreamSynchronize"));
    });
}

#[test]
fn work_on_a_stream_that_was_closed_is_waited_for_all_the_same() {
    story(name_of!(work_on_a_stream_that_was_closed_is_waited_for_all_the_same), "", || {
        let mut cuda = Cuda::open(0).unwrap();
        for is_idle in [true, false] {
            let stream = cuda.create_stream().unwrap();
            script(if is_idle { "" } else { "notready:1" });
            cuda.close_stream(stream).unwrap();
            names();
            cuda.sync().unwrap();
            assert_eq!(waits_for_context(), !is_idle);
            cuda.sync().unwrap();
            assert!(!waits_for_context(), "once is enough");
        }
    });
}

#[test]
fn only_who_has_another_threads_default_stream_waits_for_the_whole_context() {
    story(
        name_of!(only_who_has_another_threads_default_stream_waits_for_the_whole_context),
        "",
        || {
            let mut cuda = Cuda::open(0).unwrap();
            let theirs = std::thread::spawn(|| {
                let mut cuda = Cuda::open(0).unwrap();
                cuda.adopt_stream(2).unwrap();
                cuda
            });
            let mut theirs = theirs.join().unwrap();
            names();
            cuda.sync().unwrap();
            assert!(!waits_for_context());
            theirs.sync().unwrap();
            assert!(waits_for_context());
        },
    );
}

#[test]
fn what_somebody_left_running_at_its_end_makes_nobody_else_wait_for_the_context() {
    story(
        name_of!(what_somebody_left_running_at_its_end_makes_nobody_else_wait_for_the_context),
        "",
        || {
            let (mut cuda, mut other) = (Cuda::open(0).unwrap(), Cuda::open(0).unwrap());
            let closed = other.create_stream().unwrap();
            other.create_stream().unwrap();
            script("notready:1000");
            other.close_stream(closed).unwrap();
            drop(other);
            names();
            cuda.sync().unwrap();
            assert!(!waits_for_context());
        },
    );
}

#[test]
fn a_loss_met_while_a_wait_tidies_up_is_its_last_call() {
    story(name_of!(a_loss_met_while_a_wait_tidies_up_is_its_last_call), "", || {
        let mut cuda = Cuda::open(0).unwrap();
        script("fail:cuEventDestroy_v2:1:700");
        names();
        assert!(cuda.sync().unwrap_err().is_lost());
        let all = names();
        let at = all.iter().position(|name| name == "cuEventDestroy_v2").unwrap();
        let later = |name: &String| {
            !["cuThreadExchangeStreamCaptureMode", "cuCtxSetCurrent"].contains(&name.as_str())
        };
        assert!(!all[at + 1..].iter().any(later), "{all:?}");
    });
}
