"""Moves training tensors between GPU memory and pinned host memory while compute runs.

What it is: the engine, and one exception for each kind of error. The adapters for PyTorch are in
``lightering.torch``; nothing here imports torch.
What it is not: a place of copies, streams and events; those are the engine's, in Rust.
Invariant: a byte that comes back is the byte that left, or the caller gets an exception.

    lightering.Engine --> lightering.torch: HiddenStates, SavedTensors, offload_wrapper, checkpoint

Who may call it: everyone.
"""

try:
    from . import _native  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != f"{__name__}._native":
        raise
    raise ModuleNotFoundError(
        f"{error}: {__path__[0]} has the sources alone, and hides the package that is installed, "
        "if one is: run from another folder, or `pip install ./python`", name=error.name) from None

from ._native import (
    Busy,
    Closed,
    Corrupt,
    Error,
    Io,
    Lost,
    OutOfMemory,
    OverBudget,
    Unavailable,
    Usage,
    __version__,
)
from .engine import Engine

__all__ = [
    "Busy",
    "Closed",
    "Corrupt",
    "Engine",
    "Error",
    "Io",
    "Lost",
    "OutOfMemory",
    "OverBudget",
    "Unavailable",
    "Usage",
    "__version__",
]
