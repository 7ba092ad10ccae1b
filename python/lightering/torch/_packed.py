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

from .._native import Kept, Moved, unpack
from .._version import VersionProbe


class Split:
    """A tensor subclass, as the plain tensors that hold its bytes."""

    __slots__ = ("_build", "_names", "_parts", "_probe")

    def __init__(
        self,
        parts: Sequence[Kept | Moved],
        build: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        probe: VersionProbe | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """
        Args:
            parts: of its plain tensors.
            build: makes it anew of those.
            probe: follows its edits as a whole, where it has any.
            names: attributes that hold its inner tensors.
        """
        self._parts = parts
        self._build = build
        self._probe = probe
        self._names = names

    def unpack(self) -> torch.Tensor:
        """The tensor, put together. Raises as its parts do, and where it was edited as a whole."""
        if self._probe is not None:
            self._probe.check()
        made = self._build([part.unpack() for part in self._parts])
        return made if self._probe is None else self._probe.lend_outer(made, self._names)


Packed = Kept | Moved | Split
