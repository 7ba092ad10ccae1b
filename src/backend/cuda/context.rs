//! A device's primary context, and the one way into the driver: [`Context::enter`].
//!
//! What it is not: a context of our own. The primary context is the one that PyTorch, the CUDA
//! runtime and most libraries use, so pointers, streams and events pass freely between them and us.
//! It is retained, never reset, and its flags are left alone.
//!
//! Invariant: no driver call is made on a device's behalf except between `enter` and the drop of
//! what it returns; there the context is current, and the thread is left as it was found. `enter`
//! refuses when the process is exiting or forked or the device is lost.
//!
//! ```text
//!   enter(op): process ok? latch ok? current == ours? -- no: set ours
//!     ... driver calls; check(answer) turns a code into an error, a fatal one trips the latch ...
//!   drop: capture mode back, caller's context back
//! ```
//!
//! All `Cuda`s of one device in a process share one `Context`, one memory pool and one kernel
//! cache; the last one gives the context back. `memory`, `mapping`, `pinned`, `order` and
//! `launch` enter it.

use super::code::{self, Answer, SUCCESS};
use super::driver::Driver;
use super::latch::Latch;
use super::launch::Kernels;
use super::memory::Pool;
use super::process;
use super::sync::Roll;
use crate::backend::About;
use crate::error::{Error, Kind, Missing, Result};
use crate::unit::{Bytes, DeviceId};
use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute, CUstreamCaptureMode};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

#[derive(Debug)]
pub(super) struct Context {
    pub(super) driver: &'static Driver,
    pub(super) about: About,
    pub(super) pci_address: String,
    pub(super) pool: Mutex<Pool>,
    pub(super) kernels: Mutex<Kernels>,
    pub(super) roll: Mutex<Roll>,
    /// Can memory be mapped at addresses of one's own?
    pub(super) can_map: bool,
    device: CUdevice,
    /// The `CUcontext`, as a number: what is a pointer to the driver is a name to us.
    raw: usize,
    latch: &'static Latch,
}

/// Takes a lock whose data stay whole when a holder panics: every one of this backend is such.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the process knows of one device.
struct Known {
    latch: &'static Latch,
    context: Weak<Context>,
}

static DEVICES: Mutex<BTreeMap<u32, Known>> = Mutex::new(BTreeMap::new());

/// How many devices the driver shows to this process.
pub(super) fn count() -> Result<u32> {
    let driver = Driver::get()?;
    process::check("open")?;
    let mut count = 0;
    // SAFETY: the driver is started; the pointer is valid for one int.
    let answer = unsafe { driver.cuDeviceGetCount(&mut count) };
    if answer.code != SUCCESS {
        return Err(code::unavailable(answer));
    }
    Ok(u32::try_from(count).unwrap_or(0))
}

impl Context {
    /// The device's context: the one already open in this process, else a new hold on it.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Context>> {
        let count = count()?;
        if ordinal >= count {
            return Err(Error::new(Kind::Unavailable(Missing::Device), "open")
                .detail(format!("device {ordinal} was asked for, the driver shows {count}")));
        }
        let mut devices = lock(&DEVICES);
        let known = devices.entry(ordinal).or_insert_with(|| Known {
            latch: Box::leak(Box::default()), // a few bytes per device, once: a loss is for good
            context: Weak::new(),
        });
        known.latch.check("open")?;
        if let Some(context) = known.context.upgrade() {
            return Ok(context);
        }
        let context = Arc::new(Context::retain(Driver::get()?, ordinal, known.latch)?);
        known.context = Arc::downgrade(&context);
        Ok(context)
    }

    fn retain(driver: &'static Driver, ordinal: u32, latch: &'static Latch) -> Result<Context> {
        let probe = Probe { driver, latch, device: device(driver, latch, ordinal)? };
        let about = probe.about(ordinal)?;
        // Without one address space for host and devices a pinned address would name different
        // bytes to different callers.
        if probe.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)? == 0 {
            return Err(Error::new(Kind::Unavailable(Missing::Device), "open")
                .detail("it does not share one address space with the host"));
        }
        let pools = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        let pool = Mutex::new(Pool::new(probe.attribute(pools)? != 0));
        let kernels = Mutex::new(Kernels::default());
        let maps = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
        let can_map = probe.attribute(maps)? != 0;
        let roll = Mutex::default();
        let pci_address = probe.pci_address()?;
        let raw = probe.retain()?;
        let device = probe.device;
        Ok(Context { driver, about, pci_address, pool, kernels, roll, can_map, device, raw, latch })
    }

    /// Has the driver a call for many copies at once, and did it not refuse it?
    pub(super) fn has_batches(&self) -> bool {
        self.driver.batch().get().is_some()
    }

    /// Is the handle this context's?
    pub(super) fn is(&self, raw: CUcontext) -> bool {
        raw as usize == self.raw
    }

    /// May the driver be called for this device?
    #[inline]
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        process::check(op)?;
        self.latch.check(op)
    }

    /// Makes the context current on this thread until the returned value is dropped.
    ///
    /// # Errors
    /// `Usage(Forked)`, `Closed` while the process exits, `Lost` once the device is.
    #[inline]
    pub(super) fn enter(&self, op: &'static str) -> Result<Entered<'_>> {
        self.check(op)?;
        let mut entered = Entered { context: self, op, caller: None, mode: None };
        let mut current: CUcontext = ptr::null_mut();
        // SAFETY: the driver is started; valid pointer.
        entered.check(unsafe { self.driver.cuCtxGetCurrent(&mut current) })?;
        if !self.is(current) {
            // SAFETY: this handle is retained for as long as `self` lives.
            entered.check(unsafe { self.driver.cuCtxSetCurrent(self.raw as CUcontext) })?;
            entered.caller = Some(current);
        }
        Ok(entered)
    }

    /// As [`Context::enter`], for calls that the driver counts as unsafe while anybody captures a
    /// graph (an event's query, registrations, module loads): made in the thread's normal mode they
    /// fail and end that capture, which is none of ours. Nothing of what is called so becomes part
    /// of a graph.
    #[inline]
    pub(super) fn enter_relaxed(&self, op: &'static str) -> Result<Entered<'_>> {
        let mut entered = self.enter(op)?;
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        entered.check(entered.exchange(&mut mode))?;
        entered.mode = Some(mode);
        Ok(entered)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        const OP: &str = "drop";
        // The pool goes before the context: a pool destroyed after its context has crashed drivers.
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let (Some(pool), Ok(entered)) = (pool, self.enter_relaxed(OP)) {
            // SAFETY: the pool is ours and used by nobody: allocations hold this context through
            // their `Cuda`. What was never freed keeps its bytes until the context goes.
            let answer = unsafe { entered.driver().cuMemPoolDestroy(pool) };
            entered.check(answer).ok();
        }
        if self.check(OP).is_ok() {
            // SAFETY: gives back the one hold that `retain` took, once: whatever the driver says,
            // nobody asks again.
            let answer = unsafe { self.driver.cuDevicePrimaryCtxRelease_v2(self.device) };
            if code::kind(answer.code) == Kind::Lost {
                // Nothing is left here to lose, but whoever opens the device next is told.
                self.latch.trip(OP, answer);
            }
        }
    }
}

/// The right to call the driver for one device, on this thread, in one operation.
#[derive(Debug)]
pub(super) struct Entered<'a> {
    context: &'a Context,
    op: &'static str,
    /// The context to put back, where another one (or none) was current.
    caller: Option<CUcontext>,
    /// The capture mode to put back.
    mode: Option<u32>,
}

impl Entered<'_> {
    #[inline]
    pub(super) fn driver(&self) -> &'static Driver {
        self.context.driver
    }

    /// Turns the driver's answer into an error; a fatal one trips the latch.
    #[inline]
    pub(super) fn check(&self, answer: Answer) -> Result<()> {
        if answer.code == SUCCESS { Ok(()) } else { Err(self.failed(answer)) }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.context.latch.check(self.op).is_err()
    }

    #[cold]
    fn failed(&self, answer: Answer) -> Error {
        let Answer { code, call } = answer;
        match code::kind(code) {
            Kind::Lost => self.context.latch.trip(self.op, answer),
            kind => Error::new(kind, self.op).code(code, code::name(code)).detail(call),
        }
    }

    /// The loss of a device that will not undo what it did: what is where nobody knows any more.
    #[cold]
    pub(super) fn lost(&self, answer: Answer) -> Error {
        self.context.latch.trip(self.op, answer)
    }

    fn exchange(&self, mode: &mut u32) -> Answer {
        // SAFETY: swaps this thread's mode with the number pointed at, one of the driver's own. It
        // is read back as a number, so a mode that the bindings lack is no bad enum.
        unsafe { self.driver().cuThreadExchangeStreamCaptureMode(ptr::from_mut(mode).cast()) }
    }
}

impl Drop for Entered<'_> {
    /// Leaves the thread as it was found, also after a fatal error in this very verb: the thread's
    /// state is the caller's. What the driver says to it changes no verb's answer.
    #[inline]
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            let _ = self.exchange(&mut mode);
        }
        if let Some(caller) = self.caller {
            // SAFETY: the handle was this thread's current context when the verb began. Where its
            // owner has destroyed it since, the driver refuses, and no context is what is left.
            let _ = unsafe { self.driver().cuCtxSetCurrent(caller) };
        }
    }
}

/// The answer of a call made while a device is opened. Where the device itself is broken that is a
/// loss; everything else means that it is not to be had.
fn opened(latch: &Latch, answer: Answer) -> Result<()> {
    match answer.code {
        SUCCESS => Ok(()),
        code if code::is_broken(code) => Err(latch.trip("open", answer)),
        _ => Err(code::unavailable(answer)),
    }
}

fn device(driver: &Driver, latch: &Latch, ordinal: u32) -> Result<CUdevice> {
    let mut device = 0;
    // SAFETY: the driver is started and the ordinal is below its count; valid pointer.
    opened(latch, unsafe { driver.cuDeviceGet(&mut device, ordinal as c_int) })?;
    Ok(device)
}

/// What is asked of a device before its context is taken.
struct Probe {
    driver: &'static Driver,
    latch: &'static Latch,
    device: CUdevice,
}

impl Probe {
    fn attribute(&self, which: CUdevice_attribute) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: the device is the driver's; the pointer is valid for one int.
        let answer = unsafe { self.driver.cuDeviceGetAttribute(&mut value, which, self.device) };
        opened(self.latch, answer)?;
        Ok(value)
    }

    fn about(&self, ordinal: u32) -> Result<About> {
        let mut text = [0 as c_char; 256];
        // SAFETY: the buffer is longer than the length given, so a terminator stays in it.
        let answer = unsafe { self.driver.cuDeviceGetName(text.as_mut_ptr(), 255, self.device) };
        opened(self.latch, answer)?;
        // SAFETY: the last byte is still zero, so a terminator lies within the buffer.
        let name = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
        let mut memory = 0;
        // SAFETY: the device is the driver's; valid pointer.
        opened(self.latch, unsafe { self.driver.cuDeviceTotalMem_v2(&mut memory, self.device) })?;
        let driver = self.driver.version();
        let device = DeviceId(ordinal);
        Ok(About { device, name, driver, simulated: false, memory: Bytes(memory as u64) })
    }

    /// As the system's folders name it.
    fn pci_address(&self) -> Result<String> {
        let [domain, bus, slot] = [
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
        ]
        .map(|which| self.attribute(which));
        Ok(format!("{:04x}:{:02x}:{:02x}.0", domain?, bus?, slot?))
    }

    /// One hold on the primary context, given back in the context's `Drop`, or never.
    fn retain(&self) -> Result<usize> {
        let mut raw: CUcontext = ptr::null_mut();
        // SAFETY: the device is the driver's; valid pointer.
        opened(self.latch, unsafe { self.driver.cuDevicePrimaryCtxRetain(&mut raw, self.device) })?;
        assert!(!raw.is_null(), "a retained context has a handle");
        Ok(raw as usize)
    }
}
