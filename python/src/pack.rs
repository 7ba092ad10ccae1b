//! The hook that packs: what becomes of a tensor that autograd saves.
//!
//! What it is not: a choice of what a mode is about, nor words for reasons; Python's contexts have
//! those. Of `SavedTensors` the choice is here, since it is asked of every saved tensor.
//!
//! Invariant: a tensor that cannot be moved for whatever reason stays, and the reason is counted.
//!
//! ```text
//!   tensor --wants?--> stays, why                      `-> of a subclass: Python takes it apart
//!             `-> known storage: its stash --> Moved
//!                 new one: packed under the desk's lock, entered --> Moved
//! ```
//!
//! Python's `Context` is one.

use crate::books::Books;
use crate::counts::Counts;
use crate::entered::{self, Entered};
use crate::errors::{Closed, Corrupt, Error, Lost};
use crate::frames::Frames;
use crate::kept::Kept;
use crate::moved::Moved;
use crate::process;
use crate::saved::{Gone, Lease, Saved};
use crate::stash::{MOVED, Stash};
use crate::torch::{self, Torch};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple, PyWeakrefReference};
use std::borrow::Cow;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// Base of Python's `Context`.
#[pyclass(frozen, subclass, module = "lightering._native")]
#[derive(Debug)]
pub(crate) struct Hooks {
    process: u32,
    modes: Py<PyDict>,
    counts: Mutex<Option<Py<Counts>>>,
    rules: OnceLock<Rules>,
    entered: Entered,
    /// Owned once more by all that stayed and that the mode is about: their graphs are still there.
    kept: Arc<()>,
}

/// What a mode is about.
#[derive(Debug)]
struct Rules {
    name: String,
    bytes_min: u64,
    /// Why tensors stay: words by the names that `Why` has for them.
    reasons: Py<PyDict>,
    about: About,
}

/// Which tensors a mode is about.
#[derive(Debug)]
enum About {
    /// All but those that never leave: who knows them, by thread.
    All(Py<PyAny>),
    /// The inputs of checkpoints. Python is asked about each.
    Inputs(Frames),
}

/// Why a tensor stays: a name of one of the reasons, or words. None: the mode is not about it.
enum Why<'py> {
    Named(&'static str),
    Words(Bound<'py, PyAny>),
    NotAbout,
}

/// What the mode says of a tensor.
type Wish<'py> = Option<Why<'py>>;

impl Hooks {
    fn counts(&self, py: Python<'_>) -> PyResult<Py<Counts>> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let found = counts.as_ref().map(|counts| counts.clone_ref(py));
        found.ok_or_else(|| crate::errors::Usage::new_err("a context without figures"))
    }

    fn rules(&self) -> PyResult<&Rules> {
        let unopened = || crate::errors::Usage::new_err("a context without rules");
        self.rules.get().ok_or_else(unopened)
    }

    /// Does the mode move a tensor? `storage` is None where the tensor is not plain.
    fn wish<'py>(
        slf: &Bound<'py, Hooks>,
        tensor: &Bound<'py, PyAny>,
        storage: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Wish<'py>> {
        let (py, torch) = (slf.py(), Torch::of(slf.py())?);
        let watch = match &slf.get().rules()?.about {
            About::All(watch) => watch,
            About::Inputs(frames) if frames.is_input(tensor)? => {
                let why = slf.call_method1(intern!(py, "_wants_input"), (tensor,))?;
                return Ok(match why.is_none() {
                    true => None,
                    false if why.is_truthy()? => Some(Why::Words(why)),
                    false => Some(Why::NotAbout),
                });
            }
            About::Inputs(_) => return Ok(Some(Why::NotAbout)),
        };
        if torch.is_in_backward(py)? {
            return Ok(Some(Why::Named("IN_BACKWARD")));
        }
        let residents = watch.bind(py).getattr(intern!(py, "residents"))?;
        if torch::truth(&residents, intern!(py, "blind"))? {
            return Ok(Some(Why::Named("WEIGHTS_UNKNOWN")));
        }
        let stays = match storage {
            Some(storage) => residents
                .getattr(intern!(py, "_known"))?
                .contains(PyWeakrefReference::new(storage)?)?,
            None => residents.contains(tensor)?,
        };
        Ok((stays || torch.is_weight(tensor)?).then_some(Why::NotAbout))
    }

    /// The mode wants to move a plain tensor: what becomes of it.
    fn move_or_stay<'py>(
        slf: &Bound<'py, Hooks>,
        tensor: &Bound<'py, PyAny>,
        storage: &Bound<'py, PyAny>,
        extent: u64,
        outer: i64,
    ) -> PyResult<Result<Moved, Why<'py>>> {
        let (py, this) = (slf.py(), slf.get());
        let device = tensor.getattr(intern!(py, "device"))?;
        let mode = match this.modes.bind(py).get_item(&device)? {
            Some(mode) => mode,
            None => slf.call_method1(intern!(py, "_mode"), (&device,))?,
        };
        if mode.is_none() {
            return Ok(Err(Why::Named("OTHER_DEVICE")));
        }
        let mode = mode.cast_into::<PyTuple>()?;
        let (books, saved) = (mode.get_item(0)?.cast_into::<Books>()?, mode.get_item(1)?);
        if let Some(why) = Hooks::obstacle(slf, tensor, &books, &device)? {
            return Ok(Err(why));
        }
        let version = torch::version(tensor)?;
        if let Some(stash) = books.get().find(storage) {
            // However small: who keeps a view keeps the storage that left.
            return Ok(match (stash.version, stash.outer) == (version, outer) {
                true => Ok(Moved::new(tensor, stash, extent)?),
                false => Err(Why::Named("EDITED")),
            });
        }
        let (rules, whole) = (this.rules()?, torch::bytes(storage)?);
        // An expanded tensor has no more bytes than its storage, a view has fewer.
        let nbytes = whole.min(extent);
        if nbytes < rules.bytes_min || nbytes == 0 {
            return Ok(Err(Why::Named("TOO_SMALL")));
        }
        if books.get().is_of_somebody_else(storage)? {
            return Ok(Err(Why::Named("OUTLIVED")));
        }
        let counts = this.counts(py)?;
        match pack(&books, &saved, counts, storage, (version, outer), rules) {
            Ok(stash) => {
                if matches!(rules.about, About::Inputs(_)) {
                    slf.call_method1(intern!(py, "_packed"), (&books, &saved))?;
                }
                Ok(Ok(Moved::new(tensor, stash, extent)?))
            }
            Err(error) if stays_for(py, &error) => {
                let words = slf.call_method1(intern!(py, "_reason"), (error.value(py),))?;
                Ok(Err(Why::Words(words)))
            }
            Err(error) => Err(error),
        }
    }

    /// What about the tensor itself, or about now, keeps it from moving?
    fn obstacle<'py>(
        slf: &Bound<'py, Hooks>,
        tensor: &Bound<'py, PyAny>,
        books: &Bound<'py, Books>,
        device: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Why<'py>>> {
        let py = slf.py();
        if torch::asks(tensor, intern!(py, "is_inference"))? {
            return Ok(Some(Why::Named("INFERENCE")));
        }
        if torch::asks(tensor, intern!(py, "is_conj"))?
            || torch::asks(tensor, intern!(py, "is_neg"))?
        {
            return Ok(Some(Why::Named("LAZY")));
        }
        if books.get().index.is_none() || !Torch::of(py)?.may_have_graphs(py)? {
            return Ok(None);
        }
        let why = slf.call_method1(intern!(py, "_graph_obstacle"), (device,))?;
        Ok((!why.is_none()).then_some(Why::Words(why)))
    }

    /// Counts a tensor that stays.
    fn stay(slf: &Bound<'_, Hooks>, nbytes: u64, why: Why<'_>) -> PyResult<()> {
        let py = slf.py();
        let words = match why {
            Why::NotAbout => return Ok(()),
            Why::Words(words) => words,
            Why::Named(name) => slf.get().rules()?.reasons.bind(py).as_any().get_item(name)?,
        };
        let counts = slf.get().counts(py)?;
        counts.bind(py).call_method1("stay", (nbytes, words)).map(drop)
    }
}

#[pymethods]
impl Hooks {
    #[new]
    #[pyo3(signature = (*_args, **_keywords))]
    fn new(
        py: Python<'_>,
        _args: &Bound<'_, PyTuple>,
        _keywords: Option<&Bound<'_, PyDict>>,
    ) -> Hooks {
        let modes = PyDict::new(py).unbind();
        Hooks {
            process: process::number(),
            modes,
            counts: Mutex::default(),
            rules: OnceLock::new(),
            entered: Entered::default(),
            kept: Arc::default(),
        }
    }

    fn __enter__<'py>(slf: &Bound<'py, Hooks>) -> PyResult<Bound<'py, Hooks>> {
        let py = slf.py();
        let hooks = match slf.getattr(intern!(py, "_is_off"))?.is_truthy()? {
            true => None,
            false => {
                Some((slf.getattr(intern!(py, "_pack"))?, slf.getattr(intern!(py, "_unpack"))?))
            }
        };
        entered::enter(&slf.get().entered, slf, hooks)?;
        Ok(slf.clone())
    }

    fn __exit__(
        slf: &Bound<'_, Hooks>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        entered::leave(&slf.get().entered, slf, !kind.is_none())
    }

    /// Says what the mode is about: all tensors but those that `watch` knows, or the inputs of
    /// those that have one of these code objects and save by a call of that one.
    #[pyo3(signature = (name, min_bytes, reasons, watch, saves))]
    fn rule(
        &self,
        py: Python<'_>,
        name: String,
        min_bytes: u64,
        reasons: Py<PyDict>,
        watch: Option<Py<PyAny>>,
        saves: Option<(Py<PyAny>, Py<PyAny>)>,
    ) -> PyResult<()> {
        let about = match (watch, saves) {
            (Some(watch), _) => About::All(watch),
            (None, Some((apply, savers))) => About::Inputs(Frames::new(py, apply, savers)?),
            (None, None) => {
                return Err(crate::errors::Usage::new_err("a context that is about nothing"));
            }
        };
        let ruled = self.rules.set(Rules { name, bytes_min: min_bytes, reasons, about });
        ruled.map_err(|_| crate::errors::Usage::new_err("a context has its rules for good"))
    }

    /// By device, the desk and this context's part of its engine.
    #[getter]
    fn _modes(&self, py: Python<'_>) -> Py<PyDict> {
        self.modes.clone_ref(py)
    }

    #[getter(_counts)]
    fn counts_now(&self, py: Python<'_>) -> PyResult<Py<Counts>> {
        self.counts(py)
    }

    #[setter(_counts)]
    fn set_counts(&self, counts: Py<Counts>) {
        let mut place = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let before = place.replace(counts);
        drop(place);
        drop(before);
    }

    /// A tensor that stays, and that the mode is about: it is of a step as one that moves is.
    fn _keep<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let kept = Kept::counted(tensor, &self.kept)?;
        Ok(Bound::new(tensor.py(), kept)?.into_any())
    }

    /// Is any of what stayed still there, and so a graph that it is of?
    fn _is_any_kept(&self) -> bool {
        Arc::strong_count(&self.kept) > 1
    }

    /// What autograd calls when it saves a tensor.
    fn _pack<'py>(
        slf: &Bound<'py, Hooks>,
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let keep = || Bound::new(py, Kept::new(tensor)?).map(Bound::into_any);
        if this.process != process::number() {
            return keep();
        }
        let torch = Torch::of(py)?;
        let storage = match torch.is_plain(tensor)? {
            true => Some(torch::storage(tensor)?),
            false => None,
        };
        match (Hooks::wish(slf, tensor, storage.as_ref())?, storage) {
            (None, Some(storage)) => Hooks::_take(slf, tensor, &storage, 0),
            (None, None) => slf.call_method1(intern!(py, "_pack_apart"), (tensor,)),
            (Some(Why::NotAbout), _) => {
                if !torch.is_in_backward(py)? {
                    this.counts(py)?.get().others.add(1);
                }
                keep()
            }
            (Some(why), _) => {
                let extent = slf.call_method1(intern!(py, "_extent"), (tensor,))?;
                Hooks::stay(slf, extent.extract()?, why)?;
                this._keep(tensor)
            }
        }
    }

    /// Packs a plain tensor that the mode wants to move. `outer` is the version of the subclass
    /// that it is a part of: an edit of that one does not count in its own.
    #[pyo3(signature = (tensor, storage, outer = 0))]
    fn _take<'py>(
        slf: &Bound<'py, Hooks>,
        tensor: &Bound<'py, PyAny>,
        storage: &Bound<'py, PyAny>,
        outer: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let extent = tensor.getattr(intern!(py, "nbytes"))?.extract()?;
        match Hooks::move_or_stay(slf, tensor, storage, extent, outer)? {
            Ok(moved) => Ok(Bound::new(py, moved)?.into_any()),
            Err(why) => {
                Hooks::stay(slf, extent.min(torch::bytes(storage)?), why)?;
                slf.get()._keep(tensor)
            }
        }
    }
}

/// Is it an error of the engine's that leaves the tensor where it is?
fn stays_for(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<Error>(py)
        && !error.is_instance_of::<Lost>(py)
        && !error.is_instance_of::<Corrupt>(py)
        && !error.is_instance_of::<Closed>(py)
}

/// A lease and its number, which storage left and how, what may be dropped.
type Packed = (Lease, u64, Option<(u64, Cow<'static, str>)>, Gone);

/// Takes a storage, of a tensor of that version in a subclass of that one; it leaves now, later, or
/// not at all, as the policy says.
fn pack(
    books: &Bound<'_, Books>,
    saved: &Bound<'_, PyAny>,
    counts: Py<Counts>,
    storage: &Bound<'_, PyAny>,
    versions: (i64, i64),
    rules: &Rules,
) -> PyResult<Arc<Stash>> {
    let (py, this, nbytes) = (books.py(), books.get(), torch::bytes(storage)?);
    let _entered = this.enter(py)?;
    // Before the engine knows of it: a collection may run here.
    let source = this.source(storage)?;
    let (address, stream) = (torch::address(storage)?, Books::stream_now(books)?);
    let (lease, number, left, gone) = ask_to_pack(saved, address, nbytes, stream, &rules.name)?;
    let (of, source) = ((address, nbytes), source.unbind());
    let stash = Stash::new(books.clone().unbind(), counts, lease, number, source, of, versions);
    let stash = Arc::new(stash);
    let was_named = this.enter_stash(&stash, storage);
    let counted = count(this, &stash, left, rules, py);
    // Whatever became of the counting, which calls Python: the engine names each once.
    let dropped = match was_named {
        true => Books::drop_any(books, Some(vec![number])),
        false => Ok(()),
    };
    dropped.and(Books::drop_any(books, gone)).and(counted).map(|()| stash)
}

/// Counts what became of a storage that was packed, and of the one that left for it.
fn count(
    books: &Books,
    stash: &Arc<Stash>,
    left: Option<(u64, Cow<'static, str>)>,
    rules: &Rules,
    py: Python<'_>,
) -> PyResult<()> {
    match left {
        Some((left, became)) if left == stash.number && became == MOVED => stash.moved(py),
        left => {
            let words = rules.reasons.bind(py).as_any().get_item("AMONG_THE_LAST")?;
            stash.stays(py, words.extract()?)?;
            left.map_or(Ok(()), |(left, became)| note_left(books, py, left, &became))
        }
    }
}

/// The context's part of the engine, or whatever stands in for it.
fn ask_to_pack(
    saved: &Bound<'_, PyAny>,
    address: u64,
    nbytes: u64,
    stream: usize,
    name: &str,
) -> PyResult<Packed> {
    if let Ok(saved) = saved.cast_exact::<Saved>() {
        let (lease, number, left, gone) = Saved::pack(saved, address, nbytes, stream, name)?;
        return Ok((lease, number, left.map(|(id, became)| (id, Cow::Borrowed(became))), gone));
    }
    let packed = saved.call_method1("pack", (address, nbytes, stream, name))?;
    type Said<'py> =
        (Bound<'py, Lease>, u64, Option<(u64, Bound<'py, PyString>)>, Option<Vec<u64>>);
    let (lease, number, left, gone): Said<'_> = packed.extract()?;
    let left = left.map(|(id, became)| (id, Cow::Owned(became.to_string())));
    Ok((lease.get().share(saved.py()), number, left, gone))
}

/// A storage that was kept so far left, or was refused.
fn note_left(books: &Books, py: Python<'_>, number: u64, became: &str) -> PyResult<()> {
    let known = books.tables().by_number.get(&number).and_then(Weak::upgrade);
    match known {
        Some(stash) if became == MOVED || became == "clean" => stash.moved(py),
        Some(stash) => stash.stays(py, became),
        None => Ok(()),
    }
}
