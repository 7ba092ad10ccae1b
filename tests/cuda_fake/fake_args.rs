//! A driver's arguments, as the fake takes them: places that hold or want values, and texts.
//!
//! What it is not: a check of them. A driver believes its caller too.
//!
//! Invariant: an [`At`] or a [`Text`] is made by a driver's caller, whose promise is that it leads
//! to as much memory as the driver's header asks for in that argument, or by [`At::device`] for
//! bytes that the fake has checked to be its own. Whoever uses one relies on that promise.
//!
//! ```text
//!   caller's *mut T  --the C ABI-->  At<T>   .get(i)  .put(i, value)  .copy(from, len)
//!   caller's *const c_char  ------>  Text    .read()
//! ```
//!
//! `fake_libcuda.rs` uses it.

use std::ffi::{CStr, c_char};

/// Where one value or several lie, or are wanted. A pointer to the caller.
#[repr(transparent)]
pub(crate) struct At<T>(*mut T);

impl<T> Clone for At<T> {
    fn clone(&self) -> At<T> {
        *self
    }
}

impl<T> Copy for At<T> {}

impl<T> At<T> {
    pub(crate) fn addr(self) -> u64 {
        self.0.addr() as u64
    }

    pub(crate) fn cast<U>(self) -> At<U> {
        At(self.0.cast())
    }

    /// Value `index`.
    pub(crate) fn get(self, index: usize) -> T
    where
        T: Copy,
    {
        // SAFETY: the caller's promise; the fake asks for no more than the header says.
        unsafe { self.0.add(index).read_unaligned() }
    }

    /// Sets value `index`.
    pub(crate) fn put(self, index: usize, value: T) {
        // SAFETY: as above.
        unsafe { self.0.add(index).write_unaligned(value) }
    }
}

impl At<u64> {
    /// Where value `index` leads, which is a pointer.
    pub(crate) fn at<U>(self, index: usize) -> At<U> {
        At(std::ptr::with_exposed_provenance_mut(self.get(index) as usize))
    }
}

impl At<u8> {
    /// Bytes of the fake's own device memory, which it has checked to be alive.
    pub(crate) fn device(at: u64) -> At<u8> {
        At(std::ptr::with_exposed_provenance_mut(at as usize))
    }

    /// Copies bytes from elsewhere to here.
    pub(crate) fn copy(self, from: At<u8>, len: usize) {
        // SAFETY: the caller's promise on one side, checked device memory on the other; the two
        // are different allocations.
        unsafe { std::ptr::copy_nonoverlapping(from.0, self.0, len) }
    }

    /// Sets bytes one by one.
    pub(crate) fn put_all(self, bytes: &[u8]) {
        bytes.iter().enumerate().for_each(|(index, byte)| self.put(index, *byte));
    }
}

/// Text up to its terminating zero.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn read(self) -> String {
        // SAFETY: the caller's promise.
        unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned()
    }
}

/// An argument as a number, for the log.
pub(crate) trait Word {
    fn word(&self) -> u64;
}

macro_rules! words {
    ($($type:ty)*) => {$(
        impl Word for $type {
            fn word(&self) -> u64 { *self as u64 }
        }
    )*};
}

words! { u8 u32 i32 u64 usize }

impl<T> Word for At<T> {
    fn word(&self) -> u64 {
        self.addr()
    }
}

impl Word for Text {
    fn word(&self) -> u64 {
        self.0.addr() as u64
    }
}
