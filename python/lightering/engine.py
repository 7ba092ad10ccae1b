"""The engine: one for each device, shared by every context that moves tensors of that device.

What it is: the Rust engine's bounds and figures, in Python's words.
What it is not: a context. It moves nothing by itself; ``lightering.torch`` has what does.
Invariant: pinned bytes, bytes not yet released, and bytes fetched ahead stay within their bounds.

    Engine("cuda:0", pinned_bytes="40GiB")      an engine of your own, passed as engine=
    Engine.of("cuda:0")                         the one that contexts take by themselves

Who may call it: everyone.
"""

from __future__ import annotations

import threading
from typing import Any

from . import _native

Size = int | str
"""Bytes, as an int or as text such as "512MiB" or "1.5GiB"."""

_engines: dict[str, Engine] = {}
_engines_lock = threading.Lock()


class Engine:
    """Moves bytes between one device and pinned host memory.

    Args:
        device: "cuda:0"; "sim" for the simulated device, whose tensors are CPU tensors; "auto"
            for cuda:0 where there is one, else the simulated device.
        pinned_bytes: the most that this engine may hold page-locked, a size; "auto" for what the
            machine and the container have to spare, shared by the processes of LOCAL_WORLD_SIZE.
        unreleased_bytes: device bytes that left and are not given back yet, a size. Below it
            nothing ever waits for a copy out; above it the compute stream waits for the oldest.
        prefetch_bytes: device bytes fetched ahead of their readers, a size.
        prefetch_count: tensors fetched ahead of their readers.
        time_stalls: measure how long compute waited for copies in; costs two events for each.
        seed: for a simulated device only: every order of copies is chosen by this number.

    Raises:
        Unavailable: there is no such device.
        Usage: a value that is not allowed, with its name.
    """

    def __init__(
        self,
        device: str = "auto",
        pinned_bytes: Size = "auto",
        unreleased_bytes: Size = "512MiB",
        prefetch_bytes: Size = "512MiB",
        *,
        prefetch_count: int = 8,
        time_stalls: bool = False,
        seed: int | None = None,
    ) -> None:
        self._native = _native.Engine(
            device,
            pinned_bytes,
            unreleased_bytes,
            prefetch_bytes,
            prefetch_count=prefetch_count,
            time_stalls=time_stalls,
            seed=seed,
        )
        self._adapter: Any = None
        self._adapter_lock = threading.Lock()
        self._has_own_windows = (unreleased_bytes, prefetch_bytes) != ("512MiB", "512MiB")

    @staticmethod
    def of(device: str) -> Engine:
        """The engine that contexts of this device share; made at the first call.

        Args:
            device: "cuda:0" or "sim".
        """
        with _engines_lock:
            found = _engines.get(device)
            if found is None:
                found = _engines[device] = Engine(device)
            return found

    @property
    def device(self) -> str:
        """The device, as "cuda:0" or "sim:0"."""
        return self._native.device

    @property
    def is_simulated(self) -> bool:
        """Whether its device is the simulated one, whose tensors are CPU tensors."""
        return self._native.is_simulated

    def reserve(self, bytes: Size, background: bool = False) -> int:
        """Page-locks what is missing for ``bytes`` to be free, before training starts.

        Without it the pool grows in the first steps. Returns how many bytes are page-locked for it:
        when it returns, or, with ``background``, by and by: ``stats()["reserve"]`` tells how far.
        The memory is the process's pool: other engines may use it, and this one no more of it than
        its ``pinned_bytes``.

        Raises:
            OverBudget: the machine or the container has less to spare; nothing changed.
        """
        return self._native.reserve(bytes, background)

    def trim(self) -> int:
        """Gives pinned memory of which no byte is in use back to the system; returns its bytes."""
        return self._native.trim()

    def stats(self) -> dict[str, Any]:
        """What the engine did and holds: names end in their unit (bytes, count, seconds)."""
        return self._native.stats()

    def drain(self) -> None:
        """Waits until everything enqueued on the device is done. For tests and the end of a run."""
        self._native.drain()

    def __repr__(self) -> str:
        return f"<lightering.Engine on {self.device}>"
