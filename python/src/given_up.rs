//! Checkpoints that were given up: an exception left them while their hooks were on.
//!
//! What it is not: a reading of tracebacks, which may be cut, chained, or another thread's.
//!
//! Invariant: one that still runs is never found; one whose pair is on in this thread, and that
//! nobody runs any more, always is, unless somebody hides it from Python's collector (`gc.freeze`).
//!
//! torch's checkpoint without reentry puts its pair on in a generator, and has it run on once its
//! function is done. Where that raises, the generator stays as it is for as long as the exception
//! does, or whoever has its traceback. Once it dies it takes off the pair that is uppermost then.
//!
//! ```text
//!   pack_hook --closure--> frame <--a local-- generator <--a local-- checkpoint(), on the stack?
//! ```
//!
//! `hooked.rs` asks, where something lies above a pair that is to go.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyString, PyTuple};

/// Its generator; None where that has died, or was interrupted, and left the pair on.
pub(crate) type Checkpoint<'py> = Option<Bound<'py, PyAny>>;

const MODULE: &str = "torch.utils.checkpoint";
const HOOK: &str = "_checkpoint_hook.";
const GENERATOR: &str = "_checkpoint_without_reentrant_generator";

/// Python's own, looked up once.
struct Own {
    function: Py<PyAny>,
    frame: Py<PyAny>,
    generator: Py<PyAny>,
    referrers: Py<PyAny>,
    frame_now: Py<PyAny>,
}

impl Own {
    fn of(py: Python<'_>) -> PyResult<&Own> {
        static OWN: PyOnceLock<Own> = PyOnceLock::new();
        OWN.get_or_try_init(py, || {
            let types = py.import("types")?;
            Ok(Own {
                function: types.getattr("FunctionType")?.unbind(),
                frame: types.getattr("FrameType")?.unbind(),
                generator: types.getattr("GeneratorType")?.unbind(),
                referrers: py.import("gc")?.getattr("get_referrers")?.unbind(),
                frame_now: py.import("sys")?.getattr("_getframe")?.unbind(),
            })
        })
    }
}

/// The checkpoint of a pair, if it was given up. None for one that runs, and for anybody else's.
pub(crate) fn find<'py>(pair: &Bound<'py, PyAny>) -> Option<Checkpoint<'py>> {
    // A torch that is another one inside has none that is known.
    search(pair).ok().flatten()
}

fn search<'py>(pair: &Bound<'py, PyAny>) -> PyResult<Option<Checkpoint<'py>>> {
    let Some(frame) = frame_of(&pair.get_item(0)?)? else { return Ok(None) };
    let mut found = None;
    for generator in generators_of(&frame)? {
        if generator.getattr(intern!(frame.py(), "gi_running"))?.is_truthy()?
            || is_awaited(&generator)?
        {
            return Ok(None);
        }
        found = Some(generator);
    }
    Ok(Some(found))
}

/// What torch's checkpoint knows of one call, by the hook that packs for it; None if it is no such
/// hook. Anybody's may be anything: of a function nothing that is asked here runs Python.
fn frame_of<'py>(pack: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = pack.py();
    if !pack.get_type().is(&Own::of(py)?.function)
        || !pack.getattr(intern!(py, "__module__"))?.eq(MODULE)?
        || !starts(&pack.getattr(intern!(py, "__qualname__"))?, HOOK)?
    {
        return Ok(None);
    }
    let code = pack.getattr(intern!(py, "__code__"))?;
    let names = code.getattr(intern!(py, "co_freevars"))?.cast_into::<PyTuple>()?;
    let cells = pack.getattr(intern!(py, "__closure__"))?.cast_into::<PyTuple>()?;
    let place = names.index("frame")?;
    cells.get_item(place)?.getattr(intern!(py, "cell_contents")).map(Some)
}

/// The generators of torch's checkpoint that have this as a local.
fn generators_of<'py>(what: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let (py, own) = (what.py(), Own::of(what.py())?);
    let mut found = Vec::new();
    for each in own.referrers.bind(py).call1((what,))?.cast_into::<PyList>()? {
        let kind = each.get_type();
        if kind.is(&own.generator) && is_named(&each.getattr("gi_code")?, GENERATOR)? {
            found.push(each);
        } else if kind.is(&own.frame) && is_named(&each.getattr("f_code")?, GENERATOR)? {
            // Before Python 3.11 a generator has its locals by its frame.
            found.extend(generators_of(&each)?);
        }
    }
    Ok(found)
}

/// Is there a call on this thread's stack that is going to have the generator run on?
fn is_awaited(generator: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = generator.py();
    let (code, file) = (intern!(py, "f_code"), intern!(py, "co_filename"));
    let torchs = generator.getattr(intern!(py, "gi_code"))?.getattr(file)?;
    // A thread of autograd may have no frame at all.
    let mut frame = Own::of(py)?.frame_now.bind(py).call0().ok();
    while let Some(now) = frame.filter(|frame| !frame.is_none()) {
        if now.getattr(code)?.getattr(file)?.eq(&torchs)? {
            let locals = now.getattr(intern!(py, "f_locals"))?;
            if locals.get_item("gen").is_ok_and(|found| found.is(generator)) {
                return Ok(true);
            }
        }
        frame = Some(now.getattr(intern!(py, "f_back"))?);
    }
    Ok(false)
}

fn is_named(code: &Bound<'_, PyAny>, name: &str) -> PyResult<bool> {
    code.getattr(intern!(code.py(), "co_name"))?.eq(name)
}

fn starts(text: &Bound<'_, PyAny>, start: &str) -> PyResult<bool> {
    Ok(text.cast::<PyString>()?.to_str()?.starts_with(start))
}
