//! A storage's bytes for a reader, and those of the next ones ahead of theirs.
//!
//! What it is not: the choice of what comes next, or of where. The engine says what it wants, and
//! torch's allocator gives room on the stream that is current.
//!
//! Invariant: the stream is asked for at every call. Device bytes are held from the moment at
//! which the engine was told of them.
//!
//! ```text
//!   fetch --unpack--> ready ------------------------> held, its whole tensor
//!             `-----> take room, refill -----------------^    `-> prefetch what is wanted next
//!   all its readers came, and its graph is kept --rest--> it leaves again
//! ```
//!
//! The unpack hook uses it, and Python's `Desk` when a context is left.

use crate::books::{Books, RESTING_MIN};
use crate::errors::{Busy, Usage};
use crate::process;
use crate::saved::Wanted;
use crate::stash::Stash;
use crate::torch::{self, Torch};
use pyo3::intern;
use pyo3::prelude::*;
use std::sync::{Arc, Weak};

/// Device bytes, and the tensor that is all of them, where there is one.
pub(crate) type Taken<'py> = (Bound<'py, PyAny>, Option<Py<PyAny>>);

/// The storage's bytes on the device, for a reader that is enqueued next; and, where they were
/// fetched and a saved tensor is all of them, that tensor.
pub(crate) fn fetch<'py>(books: &Bound<'py, Books>, stash: &Arc<Stash>) -> PyResult<Taken<'py>> {
    let (py, this) = (books.py(), books.get());
    if this.process != process::number() {
        return Err(Usage::new_err(
            "unpack: the process was forked after the tensor left its device",
        ));
    }
    let _entered = this.enter(py)?;
    if this.tables().finished.len() > RESTING_MIN {
        rest(books, this.window())?;
    }
    let stream = Books::stream_now(books)?;
    let lease = stash.lease()?;
    let (is_ready, gone, mut wanted) = lease.saved.get().unpack(py, lease, stream)?;
    Books::drop_any(books, gone)?;
    if !is_ready {
        wanted = refill(books, stash, stream)?;
    }
    let storage = this.tables().held.get(&stash.number).map(|storage| storage.clone_ref(py));
    let storage = storage.ok_or_else(|| Usage::new_err("unpack: no bytes are held"))?;
    match prefetch(books, wanted, stream) {
        // Of another storage, whose own reader asks again. These bytes are there.
        Err(error) if error.is_instance_of::<Usage>(py) => {}
        fetched => fetched?,
    }
    let mut marks = stash.marks();
    let whole = marks.whole.as_ref().map(|whole| whole.clone_ref(py));
    let is_finished = marks.waiting == 0 && marks.was_fetched;
    // Once, however often a graph that is kept is read.
    if is_finished && !std::mem::replace(&mut marks.is_finished, true) {
        drop(marks);
        this.tables().finished.push(stash);
    }
    Ok((storage.into_bound(py), whole))
}

/// Fetches what a reader waits for; returns what should be fetched next.
fn refill(books: &Bound<'_, Books>, stash: &Arc<Stash>, stream: usize) -> PyResult<Wanted> {
    let (py, this, lease) = (books.py(), books.get(), stash.lease()?);
    let (storage, whole) = match take(books, stash) {
        Err(error) if Torch::of(py)?.is_out_of_memory(py, &error) => {
            give_up_fetched(books)?;
            Books::drop_any(books, this.native.get().flush(py)?)?;
            take(books, stash)?
        }
        taken => taken?,
    };
    let address = torch::address(&storage)?;
    let wanted = loop {
        match lease.saved.get().refill(py, lease, address, stream) {
            // Every place in the lane is taken; the oldest copies are done soon.
            Err(error) if error.is_instance_of::<Busy>(py) => {
                this.native.get().step(py)?;
                // Should they not be, the user can say that it is enough.
                py.check_signals()?;
            }
            refilled => break refilled?,
        }
    };
    hold(this, stash, storage.unbind(), whole);
    Ok(wanted)
}

/// Room on the device, on the stream that is current.
fn take<'py>(books: &Bound<'py, Books>, stash: &Stash) -> PyResult<Taken<'py>> {
    let py = books.py();
    let layout = stash.marks().layout.as_ref().map(|layout| layout.clone_ref(py));
    let room = books.get().parts()?.room.bind(py);
    room.call_method1(intern!(py, "take"), (stash.nbytes, layout))?.extract()
}

fn hold(books: &Books, stash: &Stash, storage: Py<PyAny>, whole: Option<Py<PyAny>>) {
    let before = books.tables().held.insert(stash.number, storage);
    drop(before);
    stash.marks().was_fetched = true;
    stash.set_whole(whole);
}

/// Cancels what was fetched ahead: its readers ask when they come.
fn give_up_fetched(books: &Bound<'_, Books>) -> PyResult<()> {
    let (py, this) = (books.py(), books.get());
    let stream = Books::stream_now(books)?;
    let held: Vec<Arc<Stash>> = {
        let tables = this.tables();
        let stashes = tables.held.keys().filter_map(|number| tables.by_number.get(number));
        stashes.filter_map(Weak::upgrade).collect()
    };
    for stash in &held {
        let lease = stash.lease()?;
        let saved = lease.saved.get();
        if saved.residency(py, lease)? == "refilling" {
            saved.cancel(py, lease, stream)?;
            stash.set_whole(None);
            let dropped = this.tables().held.remove(&stash.number);
            drop(dropped);
        }
    }
    Ok(())
}

/// Fetches what is wanted, ahead of its readers, while there is room.
fn prefetch(books: &Bound<'_, Books>, mut wanted: Wanted, stream: usize) -> PyResult<()> {
    let (py, this) = (books.py(), books.get());
    while let Some((number, nbytes)) = wanted {
        let known = this.tables().by_number.get(&number).and_then(Weak::upgrade);
        let Some(stash) = known else { return Ok(()) };
        let room = this.parts()?.room.bind(py);
        if !room.call_method1(intern!(py, "has"), (nbytes,))?.is_truthy()? {
            return Ok(());
        }
        let (storage, whole) = match take(books, &stash) {
            Err(error) if Torch::of(py)?.is_out_of_memory(py, &error) => return Ok(()),
            taken => taken?,
        };
        let (lease, address) = (stash.lease()?, torch::address(&storage)?);
        let (was_begun, next) = lease.saved.get().prefetch(py, lease, address, stream)?;
        if !was_begun {
            return Ok(());
        }
        hold(this, &stash, storage.unbind(), whole);
        wanted = next;
    }
    Ok(())
}

/// Storages whose readers all came, and whose graph is kept all the same, leave again.
///
/// A graph that is not kept drops them before they are more than the window.
pub(crate) fn rest(books: &Bound<'_, Books>, window: u64) -> PyResult<()> {
    let (py, this) = (books.py(), books.get());
    {
        let mut tables = this.tables();
        tables.finished.drop_oldest_dead();
        if window != 0 && tables.finished.len() <= RESTING_MIN {
            return Ok(());
        }
    }
    loop {
        let oldest = this.tables().finished.pop_over(window);
        let Some(stash) = oldest else { return Ok(()) };
        // Whoever reads it just now comes to its end once more.
        stash.marks().is_finished = false;
        if stash.marks().waiting == 0 {
            let lease = stash.lease()?;
            lease.saved.get().rest(py, lease, Books::stream_now(books)?)?;
        }
    }
}
