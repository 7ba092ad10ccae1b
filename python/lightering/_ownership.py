"""Who owns a tensor's storage, and which storage a tensor is of.

What it is: a proof of sole ownership by three counts (owners of the StorageImpl, owners of the
TensorImpl, Python references), and an identity of storages that no address can forge.
What it is not: a lock. Sole ownership holds because whoever could take another reference would
have to hold one already, and then the counts would say so.
Invariant: ``sole`` says yes only where every reference there is was named by the caller. The
counts are private names of torch's: they are tried on known cases at import, and where one case
disagrees, ``RESIZE`` says never, with the reason, and ``sole`` says no to everything.

    holder -- Tensor (Python) -- TensorImpl -- StorageImpl -- bytes
        "python"         "tensor"        "storage"
                                             +-- canonical UntypedStorage (Python), counted once

Who may call it: the adapters of lightering.torch, and tests.
"""

from __future__ import annotations

import sys
import sysconfig
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch


class Counts(NamedTuple):
    """Owners of a tensor's storage, as three counts; a sole owner has ``SOLE``."""

    storage: int
    """Owners of the StorageImpl; its canonical Python object is one of them."""
    tensor: int
    """Owners of the TensorImpl; its Python object is one of them."""
    python: int
    """References to the Python object, besides those of the counting itself."""


class Resize(NamedTuple):
    """Whether storages may ever be resized to zero in this process."""

    allowed: bool
    reason: str
    """Why not; empty where allowed."""


def identity(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    """The identity of a tensor's storage: one and the same object for all its views.

    It lives exactly as long as the storage (``identity(t)() is None`` afterwards), and no later
    storage is ever equal to it, whereas addresses are lent again. Usable as a key of a dict.
    """
    return identity_of(tensor.untyped_storage())


def identity_of(storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
    """As ``identity``, of the storage itself."""
    reference = weakref.ref(storage)
    # A weak reference takes the hash of what it refers to, which must be alive the first time.
    hash(reference)
    return reference


# What the counting of an object in a living list adds.
_LIST = [object()]
_OVERHEAD = sys.getrefcount(_LIST[0]) - 1


def counts(holder: Sequence[torch.Tensor]) -> Counts:
    """Counts the owners of ``holder[0]``; the holder's own reference is one of ``python``.

    The tensor comes in a holder (a list, or a tuple), since arguments and locals are references
    too, and how many differs among versions of Python. So ``counts([torch.ones(1)]).python`` is 1,
    and a caller who keeps the tensor in a variable besides has 2.
    """
    use_count = cast(Callable[[int], int], torch._C._storage_Use_Count)
    owners_of_tensor = cast(Any, holder[0])._use_count()
    # Not through a local: it would be a reference.
    owners_of_storage = use_count(holder[0].untyped_storage()._cdata)
    return Counts(owners_of_storage, owners_of_tensor, sys.getrefcount(holder[0]) - _OVERHEAD)


def sole(holder: Sequence[torch.Tensor], python_named: int = 1) -> bool:
    """Whether nobody owns the storage of ``holder[0]`` but references that the caller names.

    Args:
        holder: a list or tuple whose first item is the tensor, a plain one.
        python_named: how many Python references the caller can name, the holder's included. Where
            fewer or more are found the answer is no: then the caller's picture is wrong.
    """
    return RESIZE.allowed and _is_sole(counts(holder), python_named)


def _is_sole(found: Counts, python_named: int) -> bool:
    # Python objects of a tensor hold one reference to the TensorImpl in all, however many there
    # are; so naming more Python references leaves the two other counts as they are.
    return found == SOLE._replace(python=SOLE.python - 1 + python_named)


SOLE = Counts(storage=2, tensor=1, python=1)
"""The counts of a sole owner, confirmed at import."""


def _leaf() -> torch.Tensor:
    return torch.empty(4)


def _result() -> torch.Tensor:
    return torch.empty(4, requires_grad=True) * 2


def _beside(
    take: Callable[[torch.Tensor], Any], make: Callable[[], torch.Tensor] = _result
) -> Callable[[], Counts]:
    """The counts of a tensor while something taken from it is alive."""

    def found() -> Counts:
        holder = [make()]
        beside = take(holder[0])
        seen = counts(holder)
        del beside
        return seen

    return found


def _dead_view() -> Counts:
    holder = [_leaf()]
    holder[0][1:].sum()
    return counts(holder)


def _view_of_dead_base() -> Counts:
    return counts([_leaf()[1:]])


_CASES: tuple[tuple[str, Callable[[], Counts], bool], ...] = (
    ("a fresh tensor", lambda: counts([_leaf()]), True),
    ("the result of an operator", lambda: counts([_result()]), True),
    ("a tensor whose view is dead", _dead_view, True),
    ("a tensor with a live view", _beside(lambda it: it[1:]), False),
    ("a detached tensor", _beside(lambda it: it.detach()), False),
    ("the same object in a list", _beside(lambda it: [it]), False),
    ("a tensor that an operator saved", _beside(lambda it: it.sin()), False),
    ("a view that an operator saved", _beside(lambda it: it[1:].sin()), False),
    ("a tensor exported by DLPack", _beside(lambda it: it.__dlpack__(), _leaf), False),
    ("a view whose base is dead", _view_of_dead_base, False),
)


def _calibrate(cases: tuple[tuple[str, Callable[[], Counts], bool], ...] = _CASES) -> Resize:
    """Tries the counts on cases whose owners are known."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Resize(False, "free-threaded Python, whose reference counts are no proof")
    for name in ("_use_count", "untyped_storage"):
        if not hasattr(torch.Tensor, name):
            return Resize(False, f"torch {torch.__version__} has no Tensor.{name}")
    if not hasattr(torch._C, "_storage_Use_Count"):
        return Resize(False, f"torch {torch.__version__} has no torch._C._storage_Use_Count")
    for name, case, wanted in cases:
        try:
            # Importing under no_grad or inference_mode must not change what is tried.
            with torch.inference_mode(False), torch.enable_grad():
                found = case()
        except Exception as error:  # Private names may do anything.
            return Resize(False, f"torch {torch.__version__}: {name}: {error!r}")
        if _is_sole(found, 1) != wanted:
            said = "a sole owner" if not wanted else "not a sole owner"
            return Resize(False, f"torch {torch.__version__}: {name} is counted {found}: {said}")
    whole = _leaf()
    if identity(whole) is not identity(whole[1:]):
        return Resize(False, f"torch {torch.__version__}: a storage has several Python objects")
    return Resize(True, "")


RESIZE = _calibrate()
"""Whether storages may be resized to zero at all here, and why not."""
