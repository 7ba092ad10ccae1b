"""What autograd keeps in place of a saved tensor, and how it becomes a tensor again.

What it is: three kinds of packed tensors: kept on the device, moved, and taken apart.
What it is not: a policy; the contexts decide which kind a tensor becomes.
Invariant: what comes back has the size, stride, offset, type and bytes of what was saved, or
RuntimeError is raised where autograd would have raised it. None of them keeps a graph alive.

    Kept: the tensor, detached         Moved: a stash, and a way to look at its bytes
    Split: one of these for each plain tensor of a subclass, and how to put it together

Who may call it: the contexts of lightering.torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._native import Moved, unpack


class Kept:
    """A tensor that stays on its device."""

    __slots__ = ("__weakref__", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Not the tensor itself: it may be the result of the node that keeps it.
        self._tensor = tensor.detach()
        self._version = -1 if tensor.is_inference() else tensor._version

    def unpack(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was edited in place after it was saved.
        """
        tensor = self._tensor
        if self._version >= 0 and tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {tensor.dtype} of shape {list(tensor.shape)} on "
                f"{tensor.device} is at version {tensor._version}; expected version "
                f"{self._version} instead"
            )
        return tensor


class Split:
    """A tensor subclass, as the plain tensors that hold its bytes."""

    __slots__ = ("_build", "_parts")

    def __init__(
        self,
        parts: Sequence[Kept | Moved],
        build: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> None:
        self._parts = parts
        self._build = build

    def unpack(self) -> torch.Tensor:
        """The tensor, put together. Raises as its parts do."""
        return self._build([part.unpack() for part in self._parts])


Packed = Kept | Moved | Split
