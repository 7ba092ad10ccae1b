"""Every tensor that autograd saves leaves the device.

What it is: the mode for models that do not recompute.
What it is not: a cure for a peak that something else sets; ``report`` says what was released.
Invariant: parameters, buffers and gathered weights never move; nothing is ever resized.

    forward: each storage leaves once, whatever saved it     backward: comes back ahead of its use

Who may call it: everyone, as ``lightering.torch.SavedTensors``.
"""

from __future__ import annotations

import threading

from .._fsdp import ResidentStorages
from ..engine import Engine, Size
from ._context import Context


class _Watch(threading.local):
    """What never leaves, of the modules called in one thread: its contexts share the watch."""

    def __init__(self) -> None:
        self.residents = ResidentStorages()
        self.users: set[SavedTensors] = set()

    def start(self, user: SavedTensors) -> None:
        is_first = not self.users
        self.users.add(user)
        if is_first:
            self.residents.start()

    def stop(self, user: SavedTensors) -> None:
        """No more for this user, if it was."""
        self.users.discard(user)
        if not self.users:
            self.residents.stop()


_watch = _Watch()


class SavedTensors(Context):
    """Moves every tensor that autograd saves inside, however large the graph.

    ::

        with SavedTensors():
            loss = model(**batch)
            loss.backward()          # inside or outside of the context

    Args:
        min_bytes: smaller tensors stay, a size.
        placement: "cpu" for pinned host memory; "none" turns it off.
        engine: a ``lightering.Engine``; None for the one that contexts of a device share. Tensors
            of the CPU are moved only for an engine of the simulated device.

    Raises:
        TypeError, ValueError: an argument that is not allowed, with its name and what is.

    What moves are storages, of tensors of any shape and type; each comes back with its size, stride
    and offset, and once, however many saved tensors are of it.

    Source: torch's own ``saved_tensors_hooks``; copies and their order are the Rust engine's, by
    its adapter ``saved``.

    A tensor that stays is counted with its reason in ``report()``. In-place edits of a tensor
    after it was saved raise in the backward pass what autograd raises.
    """

    _name = "saved tensor"
    _watched = _watch

    def __init__(
        self,
        min_bytes: Size = 1 << 20,
        placement: str = "cpu",
        engine: Engine | None = None,
    ) -> None:
        super().__init__(0, min_bytes, placement, engine)

    def _start(self) -> None:
        if not self._is_off:
            _watch.start(self)

    def _stop(self) -> None:
        if not self._is_off:
            _watch.stop(self)
