//! CUDA device 0 as a rig, or the words that there is none.

#[allow(dead_code, reason = "the helpers serve several test files; each uses its part")]
#[path = "../cuda_device/device.rs"]
mod device;

use crate::rig::Rig;
use lightering::backend::Backend;
use lightering::backend::cuda::Cuda;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The driver refuses a wait for a whole context while anybody captures there, and ends the
/// capture: so no two promises are asked at the same time.
static TURN: Mutex<()> = Mutex::new(());

struct Device {
    _turn: MutexGuard<'static, ()>,
}

impl Rig for Device {
    fn user(&self) -> Box<dyn Backend> {
        Box::new(Cuda::open(0).unwrap())
    }

    fn set_capturing(&self, raw: usize, capturing: bool) {
        in_context(|| if capturing { begin_capture(raw) } else { end_capture(raw) });
    }
}

/// Runs the calls of an application, which has the device's context current on its thread.
fn in_context(calls: impl FnOnce()) {
    let retain: unsafe extern "C" fn(*mut usize, c_int) -> c_int =
        device::driver("cuDevicePrimaryCtxRetain");
    let release: unsafe extern "C" fn(c_int) -> c_int =
        device::driver("cuDevicePrimaryCtxRelease_v2");
    let set: unsafe extern "C" fn(usize) -> c_int = device::driver("cuCtxSetCurrent");
    let before = device::current();
    let mut context = 0;
    // SAFETY: device 0 is there; valid pointer.
    assert_eq!(unsafe { retain(&mut context, 0) }, 0);
    // SAFETY: held until it is released below.
    assert_eq!(unsafe { set(context) }, 0);
    calls();
    // SAFETY: it was current before.
    assert_eq!(unsafe { set(before) }, 0);
    // SAFETY: gives back the hold taken above; the users have holds of their own.
    assert_eq!(unsafe { release(0) }, 0);
}

fn begin_capture(raw: usize) {
    let begin: unsafe extern "C" fn(usize, c_int) -> c_int =
        device::driver("cuStreamBeginCapture_v2");
    // SAFETY: the caller's own live stream; 0 is the global mode, the strictest.
    assert_eq!(unsafe { begin(raw, 0) }, 0);
}

fn end_capture(raw: usize) {
    let end: unsafe extern "C" fn(usize, *mut usize) -> c_int =
        device::driver("cuStreamEndCapture");
    let destroy: unsafe extern "C" fn(usize) -> c_int = device::driver("cuGraphDestroy");
    let mut graph = 0;
    // SAFETY: begun on this thread; valid pointer.
    assert_eq!(unsafe { end(raw, &mut graph) }, 0, "the capture is still valid");
    // SAFETY: the graph just made, used by nobody.
    assert_eq!(unsafe { destroy(graph) }, 0);
}

/// CUDA device 0; nothing, said aloud, where there is none.
pub(crate) fn cuda() -> Vec<Box<dyn Rig>> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match device::cuda() {
        Some(_) => vec![Box::new(Device { _turn: turn })],
        None => Vec::new(),
    }
}
