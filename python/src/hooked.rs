//! torch's stack of saved-tensor hooks in this thread: a pair is put on, and that very one goes.
//!
//! What it is not: a context. torch takes off the uppermost pair, whose it is; here somebody says
//! which.
//!
//! Invariant: no other pair goes, nor do two change places, but for those of checkpoints that were
//! given up. No step of Python lies between what goes and what is put back: what raises while a
//! checkpoint is closed is told when all is as it should be.
//!
//! ```text
//!   | somebody's | ours |                                    the rule: ours is uppermost
//!   | somebody's | ours | a given-up checkpoint's | theirs |   --> | somebody's | theirs |
//! ```
//!
//! Contexts and single calls have their hooks here.

use crate::given_up::{self, Checkpoint};
use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::mem;

/// torch's tuple of what packs and what unpacks.
type Pair<'py> = Bound<'py, PyAny>;

/// Was the pair uppermost, of all that may stay? And what interrupted the closing.
pub(crate) type Taken = (bool, PyResult<()>);

/// Puts a pair on.
pub(crate) fn put(pack: &Bound<'_, PyAny>, unpack: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = pack.py();
    torch_hooks(py)?.call_method1(intern!(py, PUSH), (pack, unpack)).map(drop)
}

/// Takes off the pair that packs with this very object, and what given-up checkpoints left above.
pub(crate) fn take(py: Python<'_>, pack: &Py<PyAny>) -> PyResult<Taken> {
    match top(py)? {
        Some(pair) if pair.get_item(0)?.is(pack) => {
            pop(py)?;
            Ok((true, Ok(())))
        }
        _ => take_from_beneath(py, pack),
    }
}

fn take_from_beneath(py: Python<'_>, pack: &Py<PyAny>) -> PyResult<Taken> {
    let mut below = lift(py)?;
    let is_ours = |pair: &Pair<'_>| pair.get_item(0).is_ok_and(|found| found.is(pack));
    let Some(place) = below.iter().rposition(is_ours) else {
        lay(&below)?;
        return Ok((false, Ok(())));
    };
    let above = below.split_off(place + 1);
    below.truncate(place);
    let (mut kept, mut closed) = (Vec::new(), Ok(()));
    for pair in above.into_iter().rev() {
        match given_up::find(&pair) {
            Some(checkpoint) => closed = closed.and(close(pair, checkpoint, &mut kept)),
            None => kept.insert(0, pair),
        }
    }
    let is_in_order = kept.is_empty();
    below.append(&mut kept);
    lay(&below)?;
    Ok((is_in_order, closed))
}

/// Closes a checkpoint, on a stack that has nothing but its pair and those above. Whatever it takes
/// off, it means its own, and those that its own context put right above: they are kept no more.
fn close<'py>(
    pair: Pair<'py>,
    checkpoint: Checkpoint<'py>,
    kept: &mut Vec<Pair<'py>>,
) -> PyResult<()> {
    let Some(checkpoint) = checkpoint else { return Ok(()) };
    let py = pair.py();
    let whole: Vec<_> = std::iter::once(pair).chain(mem::take(kept)).collect();
    lay(&whole)?;
    let closed = checkpoint.call_method0(intern!(py, "close"));
    let taken = whole.len().saturating_sub(lift(py)?.len());
    kept.extend(whole.into_iter().skip(taken.max(1)));
    match closed {
        // Nobody would have heard of it where the checkpoint had died.
        Err(error) if error.is_instance_of::<PyException>(py) => {
            error.write_unraisable(py, Some(&checkpoint));
            Ok(())
        }
        closed => closed.map(drop),
    }
}

/// Takes all pairs off; the uppermost comes last.
fn lift(py: Python<'_>) -> PyResult<Vec<Pair<'_>>> {
    let mut pairs = Vec::new();
    while let Some(pair) = top(py)? {
        pop(py)?;
        pairs.push(pair);
    }
    pairs.reverse();
    Ok(pairs)
}

/// Puts pairs on, the last one uppermost.
fn lay(pairs: &[Pair<'_>]) -> PyResult<()> {
    pairs.iter().try_for_each(|pair| put(&pair.get_item(0)?, &pair.get_item(1)?))
}

fn top(py: Python<'_>) -> PyResult<Option<Pair<'_>>> {
    let top = torch_hooks(py)?.call_method1(intern!(py, TOP), (true,))?;
    Ok((!top.is_none()).then_some(top))
}

fn pop(py: Python<'_>) -> PyResult<()> {
    torch_hooks(py)?.call_method0(intern!(py, POP)).map(drop)
}

const TOP: &str = "_top_saved_tensors_default_hooks";
const PUSH: &str = "_push_saved_tensors_default_hooks";
const POP: &str = "_pop_saved_tensors_default_hooks";

/// Where torch has the hooks of a thread.
fn torch_hooks(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    static HOOKS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    HOOKS
        .get_or_try_init(py, || {
            Ok(py.import("torch")?.getattr("_C")?.getattr("_autograd")?.unbind())
        })
        .map(|hooks| hooks.bind(py))
}

/// A pair that is on in a `with`: torch's `saved_tensors_hooks`, which an interrupt may leave on,
/// and which takes off whatever is uppermost.
#[pyclass(frozen, module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct Hooked {
    pack: Py<PyAny>,
    unpack: Py<PyAny>,
}

#[pymethods]
impl Hooked {
    /// `pack` is bound anew for each, so that it can be told whose pair it is.
    #[new]
    fn new(pack: Py<PyAny>, unpack: Py<PyAny>) -> Hooked {
        Hooked { pack, unpack }
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        put(self.pack.bind(py), self.unpack.bind(py))
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        let (_, closed) = take(py, &self.pack)?;
        closed
    }
}
