"""Tensor subclasses, as the plain tensors that hold their bytes.

What it is: takes a DTensor or any other wrapper that says how apart, and makes it anew.
What it is not: a list of known subclasses. Who has ``__tensor_flatten__`` is known by it; who has
not, stays as it is.
Invariant: ``flatten`` gives plain tensors only, and ``rebuild`` of the very same ones gives a
tensor of the same type, size, stride and metadata; only the result of a collective comes back as
the plain tensor that it waits for. What is unknown gives None: it has to stay.

    DTensor --_local_tensor--> Tensor            Float8 --data--> Tensor
                                                        --scale-> Tensor

Who may call it: the adapters of lightering.torch, _fsdp.py, and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ._native import is_plain as is_plain

# These have no bytes; or, of a nested one, a length for which only its very offsets stand.
_UNFIT = ("FakeTensor", "FunctionalTensor", "NestedTensor")


class Flattened:
    """A tensor taken apart: its plain tensors in order, and how to make it anew."""

    __slots__ = ("_build", "leaves", "names")

    def __init__(
        self, leaves: list[torch.Tensor], build: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        names: Sequence[str] = (),
    ) -> None:
        self.leaves = leaves
        """The plain tensors that hold the bytes."""
        self.names = names
        """Attributes of the tensor that hold its inner tensors; none of one that has no inner."""
        self._build = build

    def rebuild(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor anew, of plain tensors that take the places of ``self.leaves``.

        Keeps none of the first leaves alive. Raises ValueError where there are more or fewer.
        """
        return self._build(leaves)

    def detach(self) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
        """``rebuild`` alone, which a caller keeps instead of the leaves."""
        return self._build


def flatten(tensor: torch.Tensor) -> Flattened | None:
    """Takes a tensor apart; None where its bytes are not reachable, so that it has to stay."""
    if is_plain(tensor):
        return Flattened([tensor], _the_only)
    kind = type(tensor)
    if kind.__name__ == "AsyncCollectiveTensor":
        return _arrived(tensor)
    if not hasattr(kind, "__tensor_flatten__") or not hasattr(kind, "__tensor_unflatten__"):
        return None
    if any(parent.__name__ in _UNFIT for parent in kind.__mro__):
        return None
    try:
        names, context = cast(Any, tensor).__tensor_flatten__()
    except Exception:
        # Whatever a foreign class says who cannot be taken apart now.
        return None
    parts = [flatten(getattr(tensor, name)) for name in names]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts):
        return None
    lengths = [len(part.leaves) for part in known]
    builds = [part.detach() for part in known]
    size, stride = tensor.size(), tensor.stride()

    def build(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(leaves) != sum(lengths):
            raise ValueError(f"{kind.__name__} is of {sum(lengths)} tensors, got {len(leaves)}")
        inner, first = {}, 0
        for name, length, part in zip(names, lengths, builds, strict=True):
            inner[name] = part(leaves[first : first + length])
            first += length
        made = cast(Any, kind).__tensor_unflatten__(inner, context, size, stride)
        return cast(torch.Tensor, made)

    return Flattened([leaf for part in known for leaf in part.leaves], build, names)


def _arrived(tensor: torch.Tensor) -> Flattened | None:
    """The result of a collective that may be under way: the stream waits, as its reader would."""
    if not hasattr(tensor, "trigger_wait"):
        return None
    with torch.no_grad():
        return flatten(cast(Any, tensor).trigger_wait())


def _the_only(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(leaves) != 1:
        raise ValueError(f"a plain tensor is of itself, got {len(leaves)}")
    return leaves[0]
