"""The engine: one for each device, shared by every context that moves tensors of that device.

What it is: the Rust engine's bounds and figures, in Python's words.
What it is not: a context. It moves nothing by itself; ``lightering.torch`` has what does.
Invariant: pinned bytes, bytes not yet released, and bytes fetched ahead stay within their bounds.

    Engine("cuda:0", pinned_bytes="40GiB")      an engine of your own, passed as engine=
    Engine.of("cuda:0")                         the one that contexts take by themselves

Who may call it: everyone.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from . import _arguments, _forks, _native

Size = int | str
"""Bytes, as an int or as text such as "512MiB" or "1.5GiB"."""

_STREAMS_MAX = 64

_engines: dict[str, Engine] = {}
_engines_lock = threading.Lock()


def _forked() -> None:
    """A child has no use of its parent's engines, and makes its own; the lock may be held."""
    global _engines_lock
    _engines_lock = threading.Lock()
    _engines.clear()


os.register_at_fork(after_in_child=_forked)


class Engine:
    """Moves bytes between one device and pinned host memory.

    Args:
        device: "cuda:0" ("cuda" is the same), or a ``torch.device`` of that name; "sim" for the
            simulated device, whose tensors are CPU tensors; "auto" for cuda:0 where there is one,
            else the simulated device.
        pinned_bytes: the most that this engine may hold page-locked, a size of at least 4096 (the
            smallest block); "auto" for what the machine and the container have to spare, shared by
            the processes of LOCAL_WORLD_SIZE.
        unreleased_bytes: device bytes that left and are not given back yet, a size. Below it
            nothing ever waits for a copy out; above it the compute stream waits for the oldest.
        prefetch_bytes: device bytes fetched ahead of their readers, a size; 0 fetches none.
        prefetch_count: tensors fetched ahead of their readers, from 0 to 2 ** 20.
        time_stalls: measure how long compute waited for copies in; costs two events for each.
        verify: compare the bytes that came back with those that left: each copy is summed up on
            the device, once when it leaves and once when it is back, and a difference raises
            ``Corrupt`` with the tensor's size when the context is left, or from ``drain``. Costs
            reading the bytes once more on the device for each copy.
        seed: for a simulated device only: every order of copies is chosen by this number, from 0 to
            2 ** 64 - 1.

    Raises:
        Unavailable: there is no such device; ``"sim"`` needs none, ``"auto"`` takes what is there.
        OverBudget: ``pinned_bytes`` has no room for the sums of ``verify``.
        TypeError, ValueError: an argument that is not allowed, with its name and what is.

    A size is an int of bytes, or text such as "512MiB" or "1.5GiB".
    """

    def __init__(
        self,
        device: Any = "cuda:0",
        pinned_bytes: Size = "auto",
        unreleased_bytes: Size = "512MiB",
        prefetch_bytes: Size = "512MiB",
        *,
        prefetch_count: int = 8,
        time_stalls: bool = False,
        verify: bool = False,
        seed: int | None = None,
    ) -> None:
        name = _arguments.device(device)
        least = _arguments.BLOCK_BYTES_MIN
        if seed is not None:
            seed = _arguments.count(seed, "seed", most=2**64 - 1)
            if not name.startswith("sim"):
                raise ValueError(
                    f'seed={seed}: an int for device="sim" only; got device={device!r}'
                )
        self._native = _native.Engine(
            name,
            _arguments.size_or_auto(pinned_bytes, "pinned_bytes", least),
            _arguments.size(unreleased_bytes, "unreleased_bytes"),
            _arguments.size(prefetch_bytes, "prefetch_bytes"),
            prefetch_count=_arguments.count(prefetch_count, "prefetch_count"),
            streams=_STREAMS_MAX,
            time_stalls=_arguments.flag(time_stalls, "time_stalls"),
            verify=_arguments.flag(verify, "verify"),
            seed=seed,
        )
        self._forks = _forks.count
        self._adapter: Any = None
        self._adapter_lock = threading.Lock()
        self._has_own_windows = (unreleased_bytes, prefetch_bytes) != ("512MiB", "512MiB")

    @staticmethod
    def of(device: Any) -> Engine:
        """The engine that contexts of this device share; made at the first call.

        Args:
            device: as of ``Engine``; whatever names the same device gives the same engine.

        Raises:
            Unavailable: there is no such device.
            TypeError, ValueError: no name of a device.
        """
        name = _arguments.device(device)
        with _engines_lock:
            found = _engines.get(name)
            if found is None:
                made = Engine(name)
                # "auto" is the engine of the device that it turned out to be.
                found = _engines[name] = _engines.setdefault(made.device, made)
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

        Without it the pool grows in the first step, and in each that has more than all before: such
        a step waits for the system, some seconds for 100 GiB. The memory is the pool's, which all
        engines of the process share: any of them may use it, and what bounds one engine's share
        of it is its ``pinned_bytes`` (``stats()["pinned_engine_budget_bytes"]``). An engine that
        may hold less than is reserved leaves the rest to others.

        Args:
            bytes: a size.
            background: return at once, and page-lock by and by: ``stats()["reserve"]`` tells how
                far.

        Returns:
            How many bytes are page-locked for it, or will be; 0 where nothing was missing.

        Raises:
            OverBudget: the machine or the container has less to spare; nothing changed.
            TypeError, ValueError: no size; or ``background`` is neither True nor False.
        """
        wanted = _arguments.size(bytes, "bytes")
        return self._native.reserve(wanted, _arguments.flag(background, "background"))

    def trim(self) -> int:
        """Gives pinned memory of which no byte is in use back to the system.

        Returns:
            How many bytes; they are the pool's, whichever engine had them pinned.
        """
        return self._native.trim()

    def stats(self) -> dict[str, Any]:
        """What the engine did since it was made, and what it holds now.

        Returns:
            Figures by name, which ends in the unit.

            Moved: ``evicted_bytes``, ``evicted_count`` (begun to leave), ``clean_bytes`` (of those,
            needed no copy: the host's was as good), ``released_bytes`` (device bytes given back),
            ``refilled_bytes``, ``refilled_count`` (copied back), ``forwarded_count`` (a reader came
            while the bytes were still there), ``kept_bytes`` (by reason, of what the engine was
            asked to move; what contexts let stay is in their reports).

            Fetched ahead: ``hit_count`` and ``miss_count`` (readers whose bytes were on their way
            or there, and those who had to ask), ``wrong_guess_count``, ``wasted_bytes`` (fetched
            for nothing), ``prefetch_refused_count`` (no room on the device), ``stall_count``
            (readers that waited for a copy begun when they came), ``stall_seconds`` (device time;
            with ``time_stalls``).

            Compared, with ``verify``: ``verified_count``, ``corrupt_count``, and
            ``unverified_count`` (not compared: no slot was free for the sum).

            Now: ``storage_count`` (alive), ``unreleased_bytes`` (evicted, not given back yet),
            ``prefetched_bytes`` (fetched, not asked for yet), ``out_in_flight_bytes``,
            ``in_in_flight_bytes``; ``leaked_on_purpose_bytes`` (given up with a lost device).

            Host time: ``longest_verb_seconds``, the longest that one call of the engine took in the
            step under way and the one before, and ``longest_verb``, which it was. Reserving and
            draining, which wait as they were asked to, are not counted.

            Page-locked, of this engine: ``pinned_engine_bytes``, ``pinned_engine_budget_bytes``;
            of the pool that the process's engines share: ``pinned_bytes``,
            ``pinned_budget_bytes``, ``pinned_lent_bytes`` (in use), ``pinned_busy_bytes`` (given
            back, a copy still under way), ``pinned_free_bytes``, ``pinned_quarantined_bytes`` (not
            lent again: it is not known what still writes them), ``pinned_growth_count``,
            ``pin_seconds`` (spent on page-locking); ``reserve``: how far a reservation in the
            background is (asked_bytes, ready_bytes, seconds, state).
        """
        return self._native.stats()

    def drain(self) -> None:
        """Waits until everything enqueued on the device is done. For tests and the end of a run.

        Raises:
            Lost: the device context is gone.
            Corrupt: with ``verify``: bytes came back that are not those that left.
        """
        self._native.drain()

    def __repr__(self) -> str:
        return f"<lightering.Engine on {self.device}>"
