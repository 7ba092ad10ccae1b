//! A context's hooks on the threads that entered it.
//!
//! What it is not: a context. Python's part says what happens when one is entered first and left
//! last; here is what must not be done by halves.
//!
//! Invariant: an interrupt comes between two steps of Python. There are none between the hooks that
//! torch has and what is known of them here, nor, in a `with`, between these and its block. What an
//! entry put on a thread is taken off again whatever is raised meanwhile.
//!
//! ```text
//!   enter  _enter (nothing is on yet) --> hooks on, known --> _start     raised: all off again
//!   leave  known no more, hooks off --> _stop (twice if it raised) --> _end
//!          `-- its own, wherever they lie in torch's stack (hooked.rs)
//! ```
//!
//! `Hooks` has one.

use crate::errors::Usage;
use crate::hooked;
use pyo3::intern;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// What torch calls to pack: a method bound anew for each entry, so that its hooks can be told from
/// all others. None where the context is turned off.
type Pack = Option<Py<PyAny>>;

/// The entries of one context that were not left yet, by thread, the last one last.
#[derive(Debug, Default)]
pub(crate) struct Entered(Mutex<HashMap<ThreadId, Vec<Pack>>>);

impl Entered {
    fn threads(&self) -> MutexGuard<'_, HashMap<ThreadId, Vec<Pack>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn depth(&self) -> usize {
        self.threads().get(&std::thread::current().id()).map_or(0, Vec::len)
    }

    fn push(&self, pack: Pack) {
        self.threads().entry(std::thread::current().id()).or_default().push(pack);
    }

    fn pop(&self) -> Option<Pack> {
        let (me, mut threads) = (std::thread::current().id(), self.threads());
        let packs = threads.get_mut(&me)?;
        let last = packs.pop();
        if packs.is_empty() {
            threads.remove(&me);
        }
        last
    }
}

/// Enters a context on this thread; with a pair of its hooks, unless it is turned off.
pub(crate) fn enter(
    entered: &Entered,
    context: &Bound<'_, PyAny>,
    hooks: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
) -> PyResult<()> {
    let py = context.py();
    let is_first = entered.depth() == 0;
    if is_first {
        context.call_method0(intern!(py, "_enter"))?;
    }
    let pack = match hooks {
        Some((pack, unpack)) => {
            hooked::put(&pack, &unpack)?;
            Some(pack.unbind())
        }
        None => None,
    };
    entered.push(pack);
    if !is_first {
        return Ok(());
    }
    context.call_method0(intern!(py, "_start")).map(drop).inspect_err(|_| {
        // The first error is what is told. Whoever is not in the context never leaves it.
        let _ = take_off(entered, context);
    })
}

/// Leaves a context on this thread.
pub(crate) fn leave(
    entered: &Entered,
    context: &Bound<'_, PyAny>,
    has_raised: bool,
) -> PyResult<()> {
    let py = context.py();
    let Some((is_in_order, is_last, stopped)) = take_off(entered, context)? else {
        return Err(misused(context, "in a thread that has not entered it"));
    };
    stopped?;
    if is_last {
        context.call_method1(intern!(py, "_end"), (has_raised,))?;
    }
    if !is_in_order && !has_raised {
        return Err(misused(context, "before what was entered after it"));
    }
    Ok(())
}

fn misused(context: &Bound<'_, PyAny>, left: &str) -> PyErr {
    match context.get_type().name() {
        Ok(name) => Usage::new_err(format!("{name}: left {left}; use `with`")),
        Err(error) => error,
    }
}

/// Were the hooks uppermost, was it the last entry, and what became of the stop?
type Off = (bool, bool, PyResult<()>);

/// Takes off what the last entry put on this thread; None where there is no entry.
fn take_off(entered: &Entered, context: &Bound<'_, PyAny>) -> PyResult<Option<Off>> {
    let py = context.py();
    let Some(pack) = entered.pop() else { return Ok(None) };
    let (is_in_order, closed) = match pack {
        // Whatever became of them: Python's part ends.
        Some(pack) => hooked::take(py, &pack).unwrap_or_else(|error| (false, Err(error))),
        None => (true, Ok(())),
    };
    let is_last = entered.depth() == 0;
    let stopped = if is_last { stop(context) } else { Ok(()) };
    Ok(Some((is_in_order, is_last, closed.and(stopped))))
}

/// Python's part, which may be interrupted half way: all of it may be done twice.
fn stop(context: &Bound<'_, PyAny>) -> PyResult<()> {
    let name = intern!(context.py(), "_stop");
    context.call_method0(name).map(drop).inspect_err(|_| {
        // The first error is what is told.
        let _ = context.call_method0(name);
    })
}
