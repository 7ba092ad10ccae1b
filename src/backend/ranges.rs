//! Named ranges of the host's time, for a profiler that listens through NVTX.
//!
//! What it is not: a measurement. Nothing is kept here; a tool draws the ranges on its own axis,
//! and on the device's, by the calls that were made in them.
//!
//! Invariant: where nobody listens no call is made and no text is put together.
//!
//! ```text
//!   Ranges::listen(wanted) -> library there? -> does its first range find a tool? -> Listening
//!   begin("evict", name) -> push .. drop -> pop          start(stream, name) -> .. -> end(stream)
//! ```
//!
//! The engine uses it.

#[cfg(feature = "cuda")]
use super::cuda::nvtx::{Calls, find};
use crate::unit::{Name, StreamId};
use std::ffi::CStr;
use std::fmt;

/// Does a tool hear of the ranges?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listening {
    /// None were asked for.
    Off,
    /// There is no NVTX library on the library path, or the crate was built without CUDA.
    NoLibrary,
    /// There is one, and no tool behind it.
    NoTool,
    /// Yes.
    Tool,
}

impl fmt::Display for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Listening::Off => "NVTX ranges are off",
            Listening::NoLibrary => {
                "NVTX ranges go nowhere: neither libnvtx3interop.so nor libnvToolsExt.so is found"
            }
            Listening::NoTool => "NVTX ranges go nowhere: no tool listens",
            Listening::Tool => "a tool listens to NVTX ranges",
        })
    }
}

/// Built without CUDA there is nobody to tell.
#[cfg(not(feature = "cuda"))]
#[derive(Debug)]
enum Calls {}

#[cfg(not(feature = "cuda"))]
fn find() -> Option<&'static Calls> {
    None
}

#[cfg(not(feature = "cuda"))]
impl Calls {
    fn push(&self, _: &CStr) -> bool {
        match *self {}
    }

    fn pop(&self) {
        match *self {}
    }

    fn start(&self, _: &CStr) -> u64 {
        match *self {}
    }

    fn end(&self, _: u64) {
        match *self {}
    }
}

/// Where ranges go, and those that are open on streams.
#[derive(Debug)]
pub(crate) struct Ranges {
    calls: Option<&'static Calls>,
    listening: Listening,
    open: Vec<(StreamId, u64)>,
}

/// Ends its range when it goes.
#[derive(Debug)]
#[must_use]
pub(crate) struct Range(Option<&'static Calls>);

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(calls) = self.0 {
            calls.pop();
        }
    }
}

impl Ranges {
    /// Looks for a tool, if ranges are wanted.
    pub(crate) fn listen(is_wanted: bool) -> Ranges {
        let found = if is_wanted { find() } else { None };
        let hears = found.is_some_and(|calls| {
            let hears = calls.push(c"lightering");
            if hears {
                calls.pop();
            }
            hears
        });
        let listening = match (is_wanted, found) {
            (false, _) => Listening::Off,
            (true, None) => Listening::NoLibrary,
            (true, Some(_)) if hears => Listening::Tool,
            (true, Some(_)) => Listening::NoTool,
        };
        Ranges { calls: found.filter(|_| hears), listening, open: Vec::new() }
    }

    pub(crate) fn listening(&self) -> Listening {
        self.listening
    }

    /// Does anybody hear them? Then a name is worth looking up.
    pub(crate) fn is_heard(&self) -> bool {
        self.calls.is_some()
    }

    /// A range of what this thread does, until what is returned goes.
    pub(crate) fn begin(&self, verb: &'static str, name: Name) -> Range {
        if let Some(calls) = self.calls {
            calls.push(Text::new(verb, name).as_c_str());
        }
        Range(self.calls)
    }

    /// A range of a stream's work, until [`Ranges::end`].
    pub(crate) fn start(&mut self, stream: StreamId, name: Name) {
        if let Some(calls) = self.calls {
            let range = calls.start(Text::new("", name).as_c_str());
            self.open.push((stream, range));
        }
    }

    /// Ends the stream's range, where it has one.
    pub(crate) fn end(&mut self, stream: StreamId) {
        let place = self.open.iter().position(|open| open.0 == stream);
        if let (Some(calls), Some(place)) = (self.calls, place) {
            calls.end(self.open.swap_remove(place).1);
        }
    }
}

/// A verb and a name as a C string, without an allocation.
struct Text([u8; Text::LEN]);

impl Text {
    const LEN: usize = 64;

    fn new(verb: &str, name: Name) -> Text {
        let mut text = [0; Text::LEN];
        let words = [verb, if verb.is_empty() { "" } else { " " }, name.as_str()];
        let bytes = words.iter().flat_map(|word| word.bytes());
        // The last byte stays zero.
        text[..Text::LEN - 1].iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        Text(text)
    }

    fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_whatever_the_name() {
        let text = |verb, name: &str| Text::new(verb, Name::new(name)).as_c_str().to_owned();
        assert_eq!(text("evict", "layer 3").as_c_str(), c"evict layer 3");
        assert_eq!(text("", "layer 3").as_c_str(), c"layer 3");
        assert_eq!(text("gather", "a\0b").as_c_str(), c"gather a");
        let long = "x".repeat(100);
        assert_eq!(text("prefetch", &long).to_bytes().len(), "prefetch ".len() + Name::LEN_MAX);
    }

    #[test]
    fn ranges_that_nobody_asked_for_are_off() {
        let ranges = Ranges::listen(false);
        assert_eq!((ranges.listening(), ranges.is_heard()), (Listening::Off, false));
        drop(ranges.begin("evict", Name::new("x")));
    }
}
