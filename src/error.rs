//! The crate's one error type: what kind, in which operation, of which storage, with which driver
//! code.
//!
//! What it is not: a list of driver codes. Kinds are few and stand for what a caller can do; the
//! driver's own code rides along as a number and a name.
//!
//! Invariant: making, printing or storing an error makes no driver call and touches no device.
//!
//! ```text
//!   Unavailable  take another device       OutOfMemory  make room, try again
//!   Busy         try again later           OverBudget   keep the tensor, or raise the budget
//!   Lost         rebuild the process       Io, Corrupt  this storage's bytes are gone
//!   Usage        mend the program          Closed       the engine has been shut down
//! ```
//!
//! Everyone may use it.

use crate::unit::{Bytes, Name};
use std::borrow::Cow;
use std::fmt;

/// The result of every verb of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What a caller can do about an error.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The device is not to be had: use another one, or the simulated one.
    Unavailable(Missing),
    /// The device's memory (or a driver object) ran out; nothing changed. Make room, try again.
    OutOfMemory,
    /// The pinned-memory budget would be exceeded; nothing changed. Keep the tensor on the device.
    OverBudget,
    /// Not now: something is in flight or full. Nothing changed; try again later.
    Busy,
    /// The device context is gone for good; the process must be restarted to use it again.
    Lost,
    /// A file or the operating system refused.
    Io,
    /// The bytes that came back are not those that left.
    Corrupt,
    /// The call itself was wrong, and was refused before anything was enqueued.
    Usage(Misuse),
    /// The engine was shut down.
    Closed,
}

/// Why a device is not to be had.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Missing {
    /// No driver library on this machine.
    Driver,
    /// A driver, but no such device.
    Device,
    /// The library found is a link-time stub, not a driver.
    StubLibrary,
    /// The driver is older than this crate needs.
    OldDriver,
    /// The driver lacks a function this crate needs.
    Symbol,
    /// This build leaves the backend out.
    NotBuilt,
    /// The device, or its driver, cannot map memory at an address that stays.
    Mapping,
}

/// What was wrong with a call.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Misuse {
    /// What the handle named is gone.
    Stale,
    /// The handle belongs to another engine, backend or table.
    Foreign,
    /// The range overlaps that of another storage on the device.
    Overlap,
    /// A range or offset outside its allocation.
    OutOfRange,
    /// A length of zero where bytes are meant.
    Empty,
    /// A length or address that does not fit.
    TooLarge,
    /// Text that is not a size.
    BadSize,
    /// A value that is not allowed, such as an option out of its bounds.
    BadValue,
    /// The state of the storage does not allow the verb.
    State,
    /// An event that was never recorded was to be waited for.
    FreshEvent,
    /// The caller passed one of the engine's own lanes as its stream.
    SameStream,
    /// A stream, event or range of another device.
    WrongDevice,
    /// A per-thread stream used from another thread.
    WrongThread,
    /// The stream is being captured into a graph.
    Capturing,
    /// The process was forked after the device was opened.
    Forked,
    /// A destination whose length differs from the storage's.
    LengthMismatch,
    /// The storage's bytes are not on the device (or not on the host) as the verb needs.
    NotThere,
    /// A kernel that this backend cannot run, or arguments it does not take.
    BadKernel,
}

/// An error: its kind, the operation, the storage's name, bytes and driver code where known.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    // Boxed, so that `Result<()>` stays one word wide on the hot path; errors are rare.
    inner: Box<Inner>,
}

#[derive(Clone, PartialEq, Eq)]
struct Inner {
    kind: Kind,
    op: &'static str,
    /// The call inside of that operation that failed; empty where it is the operation itself.
    call: &'static str,
    /// What kind of thing the call's handle names; empty where none is known.
    noun: &'static str,
    at: Option<Name>,
    bytes: Option<Bytes>,
    code: Option<(u32, &'static str)>,
    detail: Cow<'static, str>,
}

impl Error {
    /// An error of `kind`, met in the operation `op`.
    pub fn new(kind: Kind, op: &'static str) -> Error {
        let detail = Cow::Borrowed("");
        let (noun, call) = ("", "");
        let inner = Inner { kind, op, call, noun, at: None, bytes: None, code: None, detail };
        Error { inner: Box::new(inner) }
    }

    /// A refused call.
    pub fn usage(misuse: Misuse, op: &'static str) -> Error {
        Error::new(Kind::Usage(misuse), op)
    }

    /// Says in which verb it was met: the one that the caller knows. What it was met in until now
    /// is the call that failed. The first verb to say so counts.
    #[must_use]
    pub fn during(mut self, verb: &'static str) -> Error {
        if self.inner.call.is_empty() && self.inner.op != verb {
            self.inner.call = std::mem::replace(&mut self.inner.op, verb);
        }
        self
    }

    /// Adds what the refused handle names: "storage", "stream", "event".
    #[must_use]
    pub fn of(mut self, noun: &'static str) -> Error {
        self.inner.noun = noun;
        self
    }

    /// Adds the name of the storage it is about.
    #[must_use]
    pub fn at(mut self, name: Name) -> Error {
        self.inner.at = Some(name);
        self
    }

    /// Adds how many bytes were asked for.
    #[must_use]
    pub fn bytes(mut self, bytes: Bytes) -> Error {
        self.inner.bytes = Some(bytes);
        self
    }

    /// Adds the driver's code and its name.
    #[must_use]
    pub fn code(mut self, code: u32, name: &'static str) -> Error {
        self.inner.code = Some((code, name));
        self
    }

    /// Adds the cause in words.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<Cow<'static, str>>) -> Error {
        self.inner.detail = detail.into();
        self
    }

    /// What the caller can do about it.
    pub fn kind(&self) -> Kind {
        self.inner.kind
    }

    /// What was wrong with the call, if it was refused.
    pub fn misuse(&self) -> Option<Misuse> {
        match self.inner.kind {
            Kind::Usage(misuse) => Some(misuse),
            _ => None,
        }
    }

    /// The operation it was met in: the verb that was called. For [`Kind::Lost`] it is where the
    /// loss was *first seen*: a driver reports a fault at whichever call comes next.
    pub fn op(&self) -> &'static str {
        self.inner.op
    }

    /// The call inside of that verb that failed, where it was not the verb itself: one of the
    /// driver seam (`alloc_device`, `create_memory`), or of the pool (`lend`).
    pub fn call(&self) -> Option<&'static str> {
        Some(self.inner.call).filter(|call| !call.is_empty())
    }

    /// Name of the storage it is about.
    pub fn name(&self) -> Option<Name> {
        self.inner.at
    }

    /// The driver's code, where a driver call failed.
    pub fn driver_code(&self) -> Option<u32> {
        self.inner.code.map(|(code, _)| code)
    }

    /// Nothing changed, and the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self.inner.kind, Kind::Busy | Kind::OutOfMemory | Kind::OverBudget)
    }

    /// The device is gone for this process.
    pub fn is_lost(&self) -> bool {
        matches!(self.inner.kind, Kind::Lost)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Unavailable(missing) => missing.words(),
            Kind::OutOfMemory => "out of device memory",
            Kind::OverBudget => "over the pinned-memory budget",
            Kind::Busy => "busy, try again later",
            Kind::Lost => "device context lost",
            Kind::Io => "input or output failed",
            Kind::Corrupt => "the bytes that came back are not those that left",
            Kind::Usage(misuse) => misuse.words(),
            Kind::Closed => "the engine was shut down",
        })
    }
}

impl Missing {
    fn words(self) -> &'static str {
        match self {
            Missing::Driver => "no driver",
            Missing::Device => "no such device",
            Missing::StubLibrary => "the driver library found is a stub",
            Missing::OldDriver => "the driver is too old",
            Missing::Symbol => "the driver lacks a function",
            Missing::NotBuilt => "this build leaves the backend out",
            Missing::Mapping => "no virtual-memory mapping",
        }
    }
}

impl Misuse {
    fn words(self) -> &'static str {
        match self {
            Misuse::Stale => "the handle is stale",
            Misuse::Foreign => "the handle belongs to another owner",
            Misuse::Overlap => "the range overlaps another storage",
            Misuse::OutOfRange => "the range leaves its allocation",
            Misuse::Empty => "no bytes",
            Misuse::TooLarge => "too large for this machine's addresses",
            Misuse::BadSize => "not a size",
            Misuse::BadValue => "a value that is not allowed",
            Misuse::State => "the storage's state does not allow this",
            Misuse::FreshEvent => "the event was never recorded",
            Misuse::SameStream => "the stream is one of the engine's own lanes",
            Misuse::WrongDevice => "of another device",
            Misuse::WrongThread => "a per-thread stream on another thread",
            Misuse::Capturing => "the stream is being captured",
            Misuse::Forked => "the process was forked after the device was opened",
            Misuse::LengthMismatch => "the lengths differ",
            Misuse::NotThere => "the bytes are not there",
            Misuse::BadKernel => "a kernel this backend cannot run",
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.inner;
        match (inner.kind, inner.noun) {
            (Kind::Usage(Misuse::Stale), noun) if !noun.is_empty() => {
                write!(f, "{}: the {noun}'s handle is stale", inner.op)?;
            }
            (Kind::Usage(Misuse::Foreign), noun) if !noun.is_empty() => {
                write!(f, "{}: the {noun} belongs to another owner", inner.op)?;
            }
            (kind, _) => write!(f, "{}: {kind}", inner.op)?,
        }
        if !inner.detail.is_empty() {
            write!(f, ": {}", inner.detail)?;
        }
        if let Some(name) = inner.at {
            write!(f, " [storage {name:?}]")?;
        }
        if let Some(bytes) = inner.bytes {
            write!(f, " [{bytes}]")?;
        }
        if !inner.call.is_empty() {
            write!(f, " [in {}]", inner.call)?;
        }
        if let Some((code, name)) = inner.code {
            write!(f, " [driver code {code} {name}]")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {self})", self.inner.kind)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_operation_cause_storage_bytes_and_code() {
        let error = Error::new(Kind::OutOfMemory, "refill")
            .at(Name::new("layer.7"))
            .bytes(Bytes::mib(64))
            .code(2, "CUDA_ERROR_OUT_OF_MEMORY");
        let text = error.to_string();
        for part in ["refill", "out of device memory", "layer.7", "64.00 MiB", "OUT_OF_MEMORY"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains('\n') && error.is_retryable());
    }

    #[test]
    fn an_error_names_the_verb_of_its_caller_and_then_the_call_that_failed() {
        let error = Error::new(Kind::OutOfMemory, "create_memory").during("alloc_fixed");
        assert_eq!((error.op(), error.call()), ("alloc_fixed", Some("create_memory")));
        assert_eq!(error.to_string(), "alloc_fixed: out of device memory [in create_memory]");
        // Neither is lost on the way up, and a verb is no cause of itself.
        let again = error.clone().during("offer");
        assert_eq!(again, error);
        let own = Error::usage(Misuse::Empty, "alloc").during("alloc");
        assert_eq!((own.op(), own.call()), ("alloc", None));
    }

    #[test]
    fn a_result_without_value_is_one_word() {
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }
}
