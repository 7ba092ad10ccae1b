"""What callers pass, checked before anything happens.

What it is: one function for each kind of argument; each names the argument, the value and what is
allowed.
What it is not: a conversion. Besides sizes, what comes out is what came in.
Invariant: a value of the wrong type is a TypeError, one of the right type that is not allowed is a
ValueError, and then nothing was changed.

    min_bytes="many" --> ValueError: min_bytes='many': a size in bytes: an int ..., or text ...
    engine=3         --> TypeError:  engine=3: a lightering.Engine, or None

Who may call it: the package's public callables.
"""

from __future__ import annotations

import operator
from typing import Any

from . import _native

COUNT_MAX = 1 << 20
BLOCK_BYTES_MIN = 4096
DEVICES = (
    'text: "auto", "sim", "sim:N", "cuda" or "cuda:N"; or a torch.device of CUDA; "sim" for CPU '
    "tensors"
)


def size(value: Any, name: str, least: int = 0) -> int:
    """A size in bytes, from an int or text such as "1.5GiB".

    Raises:
        TypeError, ValueError: it is none, or under ``least``.
    """
    found = _native.size(value, name)
    if found < least:
        raise ValueError(f"{name}={value!r}: a size of at least {least} bytes")
    return found


def size_or_auto(value: Any, name: str, least: int = 0) -> int | None:
    """As ``size``; None for the word "auto"."""
    if isinstance(value, str) and value.strip() == "auto":
        return None
    try:
        return size(value, name, least)
    except (TypeError, ValueError) as error:
        raise type(error)(f'{error}; or "auto"') from None


def count(value: Any, name: str, least: int = 0, most: int = COUNT_MAX) -> int:
    """A whole number from ``least`` to ``most``.

    Raises:
        TypeError, ValueError: it is none, or out of these bounds.
    """
    allowed = f"{name}={value!r}: an int from {least} to {most}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(allowed)
    found = operator.index(value)
    if not least <= found <= most:
        raise ValueError(allowed)
    return found


def flag(value: Any, name: str) -> bool:
    """True or False, and nothing else that is true or false.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: True or False")
    return value


def choice(value: Any, name: str, words: tuple[str, ...]) -> str:
    """One of a few words.

    Raises:
        TypeError, ValueError: it is no text, or another word.
    """
    allowed = f"{name}={value!r}: " + " or ".join(f'"{word}"' for word in words)
    if not isinstance(value, str):
        raise TypeError(allowed)
    if value not in words:
        raise ValueError(allowed)
    return value


def device(value: Any, name: str = "device") -> str:
    """A device's name in full, such as "cuda:0" for "cuda".

    Raises:
        TypeError, ValueError: it is no text, or names no device.
    """
    text = value
    if type(value).__module__ == "torch" and type(value).__name__ == "device":
        # By its name: nothing here imports torch.
        text = str(value)
    if not isinstance(text, str):
        raise TypeError(f"{name}={value!r}: {DEVICES}")
    try:
        return _native.device(text)
    except _native.Usage:
        raise ValueError(f"{name}={value!r}: {DEVICES}") from None
