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

import sys
import threading
import weakref
from collections import deque
from typing import Any

import torch

from .. import _forks, _native
from ..engine import Engine
from . import _reasons
from ._memory import Layout, Room
from ._report import Counts

# So many storages whose readers all came are not looked at: their graph drops them in a moment.
_RESTING_MIN = 2

_ref = weakref.ref


class Stash:
    """One storage that a context moves, with every saved tensor that is of it."""

    __slots__ = (
        "__weakref__",
        "counts",
        "desk",
        "layout",
        "lease",
        "nbytes",
        "number",
        "saved",
        "source",
        "state",
        "version",
        "waiting",
        "was_fetched",
        "was_named",
        "whole",
    )

    def __init__(
        self, desk: Desk, saved: Any, counts: Counts, version: int, nbytes: int
    ) -> None:
        self.desk = desk
        self.saved = saved
        self.counts = counts
        self.nbytes = nbytes
        self.version = version
        self.lease: Any = None
        self.state = ""
        self.waiting = 0
        """Saved tensors of it that nobody asked for yet."""
        self.was_fetched = False
        self.was_named = False
        self.layout: Layout | None = None
        """Of a saved tensor that is all of the storage, where the first one is."""
        self.whole: torch.Tensor | None = None
        """That tensor, while the bytes that were fetched are on the device."""

    def __del__(self) -> None:
        desk = self.desk
        if self.lease is None or desk.forks != _forks.count or sys.is_finalizing():
            # A child has the parent's objects but not its device: it drops them and tells nobody.
            # It takes no lock of theirs either: a thread that is not there may hold it.
            return
        # Gives the storage up, and asks nobody. The bytes are nobody's else when they are named.
        self.lease = self.whole = None
        desk.bury(self.number, self.source)


class _Lock:
    """A desk's lock, which a stash that dies never waits for.

    A stash dies anywhere, and so in a collection that runs while its thread holds another desk's
    lock; threads that waited there for one another's desks would wait for ever. Whoever holds the
    lock buries what died meanwhile.
    """

    def __init__(self, bury: Any) -> None:
        lock = threading.RLock()
        # Looked up once: they are called for each saved tensor.
        self.acquire, self.leave = lock.acquire, lock.release
        # Not the desk itself, which has this lock.
        self._bury = weakref.WeakMethod(bury)
        self.dead: deque[tuple[int, Any]] = deque()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.leave()
        if self.dead:
            self.bury_the_dead()

    def queue(self, number: int, source: Any) -> None:
        """A stash has died that could not be buried at once."""
        self.dead.append((number, source))
        self.bury_the_dead()

    def bury_the_dead(self) -> None:
        """Whoever has left the lock does."""
        dead = self.dead
        while dead and self.acquire(False):
            try:
                number, source = dead.popleft()
                bury = self._bury()
                if bury is not None:
                    bury(number, source)
            except (IndexError, _native.Error):
                # Somebody else was faster; or the engine is lost, as the next verb will tell.
                pass
            finally:
                self.leave()


class Desk:
    """What one engine's contexts share: stashes, and references to device bytes."""

    def __init__(self, engine: Engine) -> None:
        # Not the engine itself, which has this desk: they would be collected late.
        self.native = engine._native
        self.forks = engine._forks
        """How many forks this process was made by when the engine was: a child's is another."""
        self.has_own_windows = engine._has_own_windows
        self.is_simulated = engine.is_simulated
        self.kind = "cpu" if engine.is_simulated else "cuda"
        self.index = int(engine.device.split(":")[1])
        self.lock = _Lock(self._bury)
        self._held: dict[int, torch.UntypedStorage] = {}
        self._by_number: dict[int, weakref.ref[Stash]] = {}
        # By a weak reference that calls back: equal to every other one while the storage lives.
        self._by_storage: dict[Any, weakref.ref[Stash]] = {}
        self._source_died = _forgetting(_ref(self))
        self.others: set[weakref.ref[torch.UntypedStorage]] = set()
        """Storages that left once, and outlived all that had saved them."""
        self._finished: deque[weakref.ref[Stash]] = deque()
        self.streams: set[int] = set()
        """Raw handles of the streams that were current in a call so far."""
        self._lingering: list[torch.UntypedStorage] = []
        self._retired: set[int] = set()
        self._early: set[int] = set()
        self._window = self.native.windows()[1]
        self.room = Room(self.kind, self.index)
        self.device = self.room.device
        self.empties: dict[torch.dtype, torch.Tensor] = {}
        """Tensors of no bytes, for version probes."""

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

    def find(self, storage: torch.UntypedStorage) -> Stash | None:
        """The stash that a storage has now."""
        found = self._by_storage.get(_ref(storage))
        return found() if found is not None else None

    def pack(
        self,
        saved: Any,
        counts: Counts,
        storage: torch.UntypedStorage,
        version: int,
        nbytes: int,
        name: str,
    ) -> Stash:
        """Takes a storage of so many bytes, of a tensor of that version; it leaves now, later, or
        not at all, as the policy says.

        Raises:
            lightering.Error: it could not be taken; nothing changed.
        """
        stash = Stash(self, saved, counts, version, nbytes)
        lock = self.lock
        lock.acquire()
        try:
            lease, number, left, gone = saved.pack(
                storage.data_ptr(), nbytes, self.stream(), name
            )
            self._held[number] = storage
            stash.lease, stash.number = lease, number
            known = self._by_number[number] = _ref(stash)
            source = stash.source = _ref(storage, self._source_died)
            # Its own reference as the key, also where a stash that is dead has an equal one.
            self._by_storage.pop(source, None)
            self._by_storage[source] = known
            if left is not None and left[0] == number and left[1] == "moved":
                counts.move(stash)
            else:
                counts.keep(stash, _reasons.AMONG_THE_LAST)
                if left is not None:
                    self._left(*left)
            if number in self._early:
                # Named by a sweep before its number was known here: a stash died just then.
                self._early.discard(number)
                self._drop([number])
            if gone is not None or self._lingering:
                self._drop(gone)
        finally:
            lock.leave()
            if lock.dead:
                lock.bury_the_dead()
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

    def bury(self, number: int, source: Any) -> None:
        """A stash of this number and source has died. Does not wait."""
        lock = self.lock
        if not lock.acquire(False):
            lock.queue(number, source)
            return
        try:
            self._bury(number, source)
        except _native.Error:
            # The engine is lost, as the next verb will tell.
            pass
        finally:
            lock.leave()
        if lock.dead:
            lock.bury_the_dead()

    def _bury(self, number: int, source: Any) -> None:
        """Nobody can find a stash any more that died; its bytes go when the engine says so."""
        known = self._by_number.pop(number, None)
        storage = source()
        if storage is not None and self._by_storage.get(source) is known:
            del self._by_storage[source]
        gone = self.native.sweep()
        if gone is not None or self._lingering:
            self._drop(gone)
        if storage is not None and number not in self._held:
            # Forgotten when it dies.
            self.others.add(_ref(storage, self.others.discard))

    def is_of_somebody_else(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage left once, and outlived all that had saved it.

        Such as a data set, a cache of rotary embeddings, or a weight that is no parameter: moving
        it again would free nothing again.
        """
        return _ref(storage) in self.others

    def fetch(self, stash: Stash) -> tuple[torch.UntypedStorage, torch.Tensor | None]:
        """The storage's bytes on the device, for a reader that is enqueued next; and, where they
        were fetched and a saved tensor is all of them, that tensor.

        Raises:
            lightering.Usage: this is a child of the process that has them.
        """
        if self.forks != _forks.count:
            raise _native.Usage("unpack: the process was forked after the tensor left its device")
        lock = self.lock
        lock.acquire()
        try:
            if len(self._finished) > _RESTING_MIN:
                self._rest(self._window)
            stream = self.stream()
            is_ready, gone, wanted = stash.saved.unpack(stash.lease, stream)
            if gone is not None or self._lingering:
                self._drop(gone)
            number = stash.number
            if not is_ready:
                wanted = self._refill(stash, number, stream)
            storage = self._held[number]
            if wanted is not None:
                self._prefetch(wanted, stream)
            if stash.waiting == 0 and stash.was_fetched:
                self._finished.append(_ref(stash))
            return storage, stash.whole
        finally:
            lock.leave()
            if lock.dead:
                lock.bury_the_dead()

    def _refill(self, stash: Stash, number: int, stream: int) -> Any:
        """Fetches what a reader waits for; returns what should be fetched next."""
        storage, whole = self._take(stash)
        while True:
            try:
                wanted = stash.saved.refill(stash.lease, storage.data_ptr(), stream)
                break
            except _native.Busy:
                # Every place in the lane is taken; the oldest copies are done soon.
                self.native.step()
        self._held[number] = storage
        stash.was_fetched, stash.whole = True, whole
        return wanted

    def _take(self, stash: Stash) -> tuple[torch.UntypedStorage, torch.Tensor | None]:
        """Device bytes, on the stream that is current; room is made where there is none."""
        try:
            return self.room.take(stash.nbytes, stash.layout)
        except torch.OutOfMemoryError:
            self._give_up_fetched()
            self._drop(self.native.flush())
            return self.room.take(stash.nbytes, stash.layout)

    def _give_up_fetched(self) -> None:
        """Cancels what was fetched ahead: its readers ask when they come."""
        stream = self.stream()
        for number in list(self._held):
            known = self._by_number.get(number)
            stash = known() if known is not None else None
            if stash is not None and stash.saved.residency(stash.lease) == "refilling":
                stash.saved.cancel(stash.lease, stream)
                stash.whole = None
                del self._held[number]

    def _prefetch(self, wanted: Any, stream: int) -> None:
        while wanted is not None:
            number, nbytes = wanted
            known = self._by_number.get(number)
            stash = known() if known is not None else None
            if stash is None or not self.room.has(nbytes):
                return
            try:
                storage, whole = self.room.take(nbytes, stash.layout)
            except torch.OutOfMemoryError:
                return
            was_begun, wanted = stash.saved.prefetch(stash.lease, storage.data_ptr(), stream)
            if not was_begun:
                return
            self._held[number] = storage
            stash.was_fetched, stash.whole = True, whole

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
        self._finished = deque(_ref(stash) for stash in alive[count:])

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

    def _drop(self, gone: list[int] | None) -> None:
        for number in gone or ():
            known = self._by_number.get(number)
            stash = known() if known is not None else None
            if stash is not None:
                stash.was_named = True
                stash.whole = None
            storage = self._held.pop(number, None)
            if number in self._retired:
                self._retired.discard(number)
            elif storage is None and number not in self._by_number:
                # Named while `pack` or `_retire` was told its number: a stash died just then.
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


def _forgetting(desk: weakref.ref[Desk]) -> Any:
    """What is called when a storage dies, with a reference to it; keeps no desk alive.

    The bytes that a stash's tensors were saved with are given back to the allocator then.
    """

    def source_died(source: Any) -> None:
        found = desk()
        known = None if found is None else found._by_storage.pop(source, None)
        stash = known() if known is not None else None
        if stash is not None and stash.was_named:
            stash.counts.release(stash)

    return source_died
