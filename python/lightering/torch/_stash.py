"""Storages that left, and the references that keep device bytes alive while something uses them.

What it is: one ``Desk`` for each engine; one ``Stash`` for each storage that a context moves.
What it is not: an allocator or a copier. torch allocates and frees; the engine copies and says when
a reference may be dropped.
Invariant: while the engine may touch a storage's device bytes, ``Desk._held`` has a reference to
them; it is dropped only when the engine named the storage. A storage has one stash at a time.

    saved tensor a --.
    view of a -------+--> Stash (lease, bytes) --> Desk._held: number -> storage on the device
    alias of a ------'         dropped: the engine hears of it, names it, the reference goes

Who may call it: the contexts of lightering.torch.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from .. import _native
from .._ownership import identity, identity_of
from ..engine import Engine
from . import _reasons
from ._memory import Room
from ._report import Counts

_process = os.getpid()

# So many storages whose readers all came are not looked at: their graph drops them in a moment.
_RESTING_MIN = 2


def _forked() -> None:
    global _process
    _process = -1


# A child has the parent's objects but not its device: it drops them and tells nobody. It takes no
# lock of theirs either: a thread that is not there may hold it.
os.register_at_fork(after_in_child=_forked)


def is_child() -> bool:
    """Whether this process was forked off one that imported this module."""
    return _process < 0


class Stash:
    """One storage that a context moves, with every saved tensor that is of it."""

    __slots__ = (
        "__weakref__",
        "counts",
        "desk",
        "device",
        "lease",
        "nbytes",
        "saved",
        "source",
        "state",
        "version",
        "waiting",
        "was_fetched",
        "was_named",
    )

    def __init__(
        self, desk: Desk, saved: Any, counts: Counts, tensor: torch.Tensor, nbytes: int
    ) -> None:
        self.desk = desk
        self.saved = saved
        self.counts = counts
        self.device = tensor.device
        self.nbytes = nbytes
        self.version = tensor._version
        self.lease: Any = None
        self.source: Any = None
        self.state = "waiting"
        self.waiting = 0
        """Saved tensors of it that nobody asked for yet."""
        self.was_fetched = False
        self.was_named = False

    def __del__(self) -> None:
        if self.lease is None or _process < 0 or sys.is_finalizing():
            return
        number = self.lease.number
        # Gives the storage up, and asks nobody.
        self.lease = None
        self.desk.lock.bury(number, self.source)


class _Lock:
    """A desk's lock, which a stash that dies never waits for.

    A stash dies anywhere, and so in a collection that runs while its thread holds another desk's
    lock; threads that waited there for one another's desks would wait for ever. Whoever holds the
    lock buries what died meanwhile.
    """

    def __init__(self, bury: Callable[[int, Any], None]) -> None:
        self._lock = threading.RLock()
        # Not the desk itself, which has this lock.
        self._bury = weakref.WeakMethod(bury)
        self._dead: deque[tuple[int, Any]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
        if self._dead:
            self._bury_the_dead()

    def bury(self, number: int, source: Any) -> None:
        """A stash of this number and source has died. Does not wait."""
        self._dead.append((number, source))
        self._bury_the_dead()

    def _bury_the_dead(self) -> None:
        while self._dead and self._lock.acquire(blocking=False):
            try:
                dead, bury = self._dead.popleft(), self._bury()
                if bury is not None:
                    bury(*dead)
            except (IndexError, _native.Error):
                # Somebody else was faster; or the engine is lost, as the next verb will tell.
                pass
            finally:
                self._lock.release()


class Desk:
    """What one engine's contexts share: stashes, and references to device bytes."""

    def __init__(self, engine: Engine) -> None:
        # Not the engine itself, which has this desk: they would be collected late.
        self.native = engine._native
        self.has_own_windows = engine._has_own_windows
        self.is_simulated = engine.is_simulated
        self.kind = "cpu" if engine.is_simulated else "cuda"
        self.index = int(engine.device.split(":")[1])
        self.lock = _Lock(self._bury)
        self._held: dict[int, torch.UntypedStorage] = {}
        self._by_number: dict[int, weakref.ref[Stash]] = {}
        self._by_storage: dict[Any, weakref.ref[Stash]] = {}
        self._others: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._finished: deque[weakref.ref[Stash]] = deque()
        self.streams: set[int] = set()
        """Raw handles of the streams that were current in a call so far."""
        self._lingering: list[torch.UntypedStorage] = []
        self._retired: set[int] = set()
        self._early: set[int] = set()
        self._window = self.native.windows()[1]
        self.room = Room(self.kind, self.index)

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

    def stream(self) -> int:
        """The raw handle of the stream that is current now, in this thread."""
        if self.is_simulated:
            return _native.HOST_STREAM
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        self.streams.add(stream)
        return stream

    def figures(self) -> tuple[int, float, int]:
        """Since the engine was made: stalls, seconds of them, prefetches refused for want of room.
        """
        count, seconds = self.native.stalls()
        return count, seconds, self.room.refused_count

    @property
    def live_count(self) -> int:
        """Storages that saved tensors hold now."""
        return len(self._by_number)

    @property
    def held_bytes(self) -> int:
        """Device bytes that the desk keeps alive now."""
        with self.lock:
            return sum(storage.nbytes() for storage in self._held.values())

    def find(self, tensor: torch.Tensor) -> Stash | None:
        """The stash that a tensor's storage has now."""
        found = self._by_storage.get(identity(tensor))
        return found() if found is not None else None

    def pack(self, saved: Any, counts: Counts, tensor: torch.Tensor, name: str) -> Stash:
        """Takes a tensor's storage; it leaves now, later, or not at all, as the policy says.

        Raises:
            lightering.Error: it could not be taken; nothing changed.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        stash = Stash(self, saved, counts, tensor, nbytes)
        with self.lock:
            lease, left, gone = saved.pack(storage.data_ptr(), nbytes, self.stream(), name)
            number = lease.number
            self._held[number] = storage
            stash.lease = lease
            known, key = weakref.ref(stash), identity(tensor)
            stash.source = weakref.ref(storage, lambda _: self._source_died(key, known))
            self._by_number[number] = known
            self._by_storage[key] = known
            counts.keep(stash, _reasons.AMONG_THE_LAST)
            if left is not None:
                self._left(*left)
            self._drop(gone)
        return stash

    def _left(self, number: int, became: str) -> None:
        known = self._by_number.get(number)
        stash = known() if known is not None else None
        if stash is None:
            return
        if became in ("moved", "clean"):
            stash.counts.move(stash)
        else:
            stash.counts.keep(stash, became)

    def _source_died(self, key: Any, known: weakref.ref[Stash]) -> None:
        """The bytes that a stash's tensors were saved with are given back to the allocator."""
        if self._by_storage.get(key) is known:
            del self._by_storage[key]
        stash = known()
        if stash is not None and stash.was_named:
            stash.counts.release(stash)

    def _bury(self, number: int, source: Any) -> None:
        """A stash died: nobody can find it any more, and its bytes go when the engine says so."""
        known = self._by_number.pop(number, None)
        storage = source()
        if storage is not None and self._by_storage.get(identity_of(storage)) is known:
            del self._by_storage[identity_of(storage)]
        self._drop(self.native.sweep())
        if storage is not None and number not in self._held:
            self._others.add(storage)

    def is_of_somebody_else(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage left once, and outlived all that had saved it.

        Such as a data set, a cache of rotary embeddings, or a weight that is no parameter: moving
        it again would free nothing again.
        """
        return bool(self._others) and tensor.untyped_storage() in self._others

    def fetch(self, stash: Stash) -> torch.UntypedStorage:
        """The storage's bytes on the device, for a reader that is enqueued next.

        Raises:
            lightering.Usage: this is a child of the process that has them.
        """
        if is_child():
            raise _native.Usage("unpack: the process was forked after the tensor left its device")
        with self.lock:
            if self._finished:
                self._rest(self._window)
            stream = self.stream()
            is_ready, gone = stash.saved.unpack(stash.lease, stream)
            self._drop(gone)
            number = stash.lease.number
            if not is_ready:
                self._refill(stash, number, stream)
            storage = self._held[number]
            self._prefetch(stream)
            if stash.waiting == 0 and stash.was_fetched:
                self._finished.append(weakref.ref(stash))
            return storage

    def _refill(self, stash: Stash, number: int, stream: int) -> None:
        storage = self._take(stash.nbytes)
        while True:
            try:
                stash.saved.refill(stash.lease, storage.data_ptr(), stream)
                break
            except _native.Busy:
                # Every place in the lane is taken; the oldest copies are done soon.
                self.native.step()
        self._held[number] = storage
        stash.was_fetched = True

    def _take(self, nbytes: int) -> torch.UntypedStorage:
        """Device bytes, on the stream that is current; room is made where there is none."""
        try:
            return self.room.take(nbytes)
        except torch.OutOfMemoryError:
            self._give_up_fetched()
            self._drop(self.native.flush())
            return self.room.take(nbytes)

    def _give_up_fetched(self) -> None:
        """Cancels what was fetched ahead: its readers ask when they come."""
        stream = self.stream()
        for number in list(self._held):
            known = self._by_number.get(number)
            stash = known() if known is not None else None
            if stash is not None and stash.saved.residency(stash.lease) == "refilling":
                stash.saved.cancel(stash.lease, stream)
                del self._held[number]

    def _prefetch(self, stream: int) -> None:
        native = self.native
        while (wanted := native.wanted(stream)) is not None:
            number, nbytes = wanted
            known = self._by_number.get(number)
            stash = known() if known is not None else None
            if stash is None or not self.room.has(nbytes):
                return
            try:
                storage = self.room.take(nbytes)
            except torch.OutOfMemoryError:
                return
            if not stash.saved.prefetch(stash.lease, storage.data_ptr(), stream):
                return
            self._held[number] = storage
            stash.was_fetched = True

    def _rest(self, window: int) -> None:
        """Storages whose readers all came, and whose graph is kept all the same, leave again.

        A graph that is not kept drops them before they are more than the window.
        """
        finished = self._finished
        while finished and finished[0]() is None:
            finished.popleft()
        if window and len(finished) <= _RESTING_MIN:
            return
        alive = [stash for known in finished if (stash := known()) is not None]
        alive = [stash for stash in alive if stash.waiting == 0 and stash.lease is not None]
        total = sum(stash.nbytes for stash in alive)
        count = 0
        while total > window:
            stash = alive[count]
            stash.saved.rest(stash.lease, self.stream())
            total -= stash.nbytes
            count += 1
        self._finished = deque(weakref.ref(stash) for stash in alive[count:])

    def set_windows(self, unreleased: int, prefetch: int) -> None:
        """Sets both of the engine's windows, in bytes."""
        self.native.set_windows(unreleased, prefetch)
        self._window = prefetch

    def _is_capturing(self) -> bool:
        # Whoever asks about an event then ends the capture.
        return not self.is_simulated and torch.cuda.is_current_stream_capturing()

    def begin(self) -> None:
        """A step begins; where nothing is saved any more, the one before it is over."""
        with self.lock:
            if not self._by_number and not self._is_capturing():
                self.native.mark_step()

    def sweep(self) -> None:
        """Drops what may be dropped."""
        with self.lock:
            if not self._is_capturing():
                self._drop(self.native.sweep())

    def flush(self) -> None:
        """Drops all that left: the stream that is current waits for the copies, on the device."""
        with self.lock:
            if not self._is_capturing():
                self._rest(0)
                self._drop(self.native.flush())

    def _drop(self, gone: list[int]) -> None:
        if not gone and not self._lingering:
            return
        for number in gone:
            known = self._by_number.get(number)
            stash = known() if known is not None else None
            if stash is not None:
                stash.was_named = True
            storage = self._held.pop(number, None)
            if number in self._retired:
                self._retired.discard(number)
            elif storage is None and number not in self._by_number:
                # Named while `_retire` was told its number: a stash died just then.
                self._early.add(number)
            elif storage is not None and len(self.streams) > 1:
                self._lingering.append(storage)
            # Not in the next turn of the loop: it may be the last reference.
            del storage
        if self._lingering:
            self._retire()

    def _retire(self) -> None:
        """Of several streams one may still use what others hold a reference to; theirs goes at any
        time, ours only when every stream is past the moment at which it became the last one."""
        lingering, self._lingering = self._lingering, []
        for storage in lingering:
            if torch._C._storage_Use_Count(storage._cdata) > 1:
                self._lingering.append(storage)
                continue
            number = self.native.retire(storage.data_ptr(), storage.nbytes())
            if number in self._early:
                self._early.discard(number)
            else:
                self._retired.add(number)
                self._held[number] = storage
