"""What one engine's contexts share: the books of what left, their lock, and room on the device.

What it is: one ``Desk`` for each engine, which asks torch for its streams and its memory.
What it is not: the books. Those are native: which storage has which stash, and the references
that keep device bytes alive while something uses them.
Invariant: the stream that is current is asked for at every call. Whoever holds the lock buries
the stashes that died meanwhile, and a stash that dies waits for nobody.

    saved tensor a --.
    view of a -------+--> stash (lease, bytes) --> books: number -> storage on the device
    alias of a ------'         dropped: the engine hears of it, names it, the reference goes

Who may call it: the contexts of lightering.torch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from .. import _native
from ..engine import Engine
from ._memory import Room

if TYPE_CHECKING:
    from ._context import Context


class Desk(_native.Books):
    """What one engine's contexts share: stashes, and references to device bytes."""

    def __init__(self, engine: Engine) -> None:
        # Not the engine itself, which has this desk: they would be collected late.
        self.native = engine._native
        self.has_own_windows = engine._has_own_windows
        self._own_windows = self.native.windows()
        # Weak: what wrapped modules share asks for as long as it lives.
        self._asked: weakref.WeakKeyDictionary[Context, tuple[int, int]]
        self._asked = weakref.WeakKeyDictionary()
        self.step_bytes_last = 0
        """What the inputs of checkpoints had in all in the step of the context left last."""
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self.is_simulated = engine.is_simulated
        self.kind = "cpu" if engine.is_simulated else "cuda"
        self.index = int(engine.device.split(":")[1])
        # Weak: the lock is the desk's.
        self.lock = _native.Lock(weakref.ref(self))
        self.room = Room(self.kind, self.index)
        self.device = self.room.device
        self.open(self.lock, self.room)

    @staticmethod
    def of(engine: Engine) -> Desk:
        """The desk of an engine; made at the first call."""
        with engine._adapter_lock:
            if engine._adapter is None:
                engine._adapter = Desk(engine)
            return engine._adapter

    def serves(self, device: torch.device) -> bool:
        """Whether tensors of this device are the engine's."""
        return device.type == self.kind and (self.is_simulated or device.index == self.index)

    def figures(self) -> tuple[int, float, int]:
        """Since the engine was made: stalls, seconds of them, prefetches refused for want of room.
        """
        count, seconds = self.native.stalls()
        return count, seconds, self.room.refused_count

    @property
    def held_bytes(self) -> int:
        """Device bytes that the desk keeps alive now."""
        with self.lock:
            return sum(storage.nbytes() for storage in self._held.values())

    def join(self, who: Context) -> None:
        """A context moves tensors of this device from now on."""
        with self.lock:
            self._contexts.add(who)

    def bytes_kept_beside(self, who: Context) -> int:
        """Bytes that other contexts let stay since each has few: together they may be many."""
        with self.lock:
            return sum(each.bytes_kept() for each in self._contexts if each is not who)

    def ask_windows(self, who: Context, windows: tuple[int, int] | None) -> None:
        """Sets each of the engine's windows to the largest that anybody asks for.

        Args:
            who: the context that asks.
            windows: bytes not given back yet, and fetched ahead; None where it asks no more. Where
                nobody does they are the engine's own.
        """
        with self.lock:
            asked = self._asked
            if windows is not None:
                asked[who] = windows
            elif asked.pop(who, None) is None:
                return
            unreleased, prefetch = self._own_windows
            if asked:
                unreleased, prefetch = map(max, zip(*asked.values(), strict=True))
            self.native.set_windows(unreleased, prefetch)
            self._window = prefetch

    def _is_capturing(self) -> bool:
        # Whoever asks about an event then ends the capture.
        return not self.is_simulated and torch.cuda.is_current_stream_capturing()

    def begin(self) -> None:
        """A step begins; where nothing is saved any more, the one before it is over.

        Drops what may be dropped: nothing else does in steps in which nothing leaves.
        """
        with self.lock:
            if self._is_capturing():
                return
            if not self.live_count:
                self.native.mark_step()
            self.sweep_now()

    def sweep(self) -> None:
        """Drops what may be dropped."""
        with self.lock:
            if not self._is_capturing():
                self.sweep_now()

    def flush(self) -> None:
        """Drops all that left: the stream that is current waits for the copies, on the device."""
        with self.lock:
            if not self._is_capturing():
                self.rest(0)
                self.flush_now()
