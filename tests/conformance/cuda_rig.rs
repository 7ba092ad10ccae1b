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
        device::in_context(|| if capturing { begin_capture(raw) } else { end_capture(raw) });
    }
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
