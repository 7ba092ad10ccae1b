"""Warnings: each once, and with the line of the user's own code.

What it is: the search for that line among the callers, and the memory of what was said.
What it is not: a log. What happens in every step is counted in the report.
Invariant: a reason is told once in a process, whatever the bytes in it were; the line named is the
nearest one that is of neither this package nor of those that call it on the user's behalf.

    train.py:12   with HiddenStates():   <-- named
    torch ..., transformers ...
    lightering.torch._context: _warn

Who may call it: the contexts of lightering.torch.
"""

from __future__ import annotations

import re
import sys
import warnings

_told: set[tuple[str, str]] = set()

# Who stands between a user's line and a hook.
_BETWEEN = frozenset(
    ("lightering", "torch", "transformers", "accelerate", "contextlib", "functools"))


def warn_once(name: str, what: str) -> None:
    """Warns with a mode's name, unless the same was told before."""
    told = (name, re.sub(r"\d+", "", what))
    if told not in _told:
        _told.add(told)
        warnings.warn(f"lightering.torch: {name}: {what}", stacklevel=_level())


def _level() -> int:
    """The ``stacklevel`` that names the user's line, for a ``warn`` in the caller's frame."""
    level, frame = 1, sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN:
            return level
        level, frame = level + 1, frame.f_back
    # On a thread of autograd's there may be nobody else.
    return 2
