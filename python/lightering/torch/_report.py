"""What a context moved, freed and kept, and why.

What it is: plain figures of the steps since the context was entered last, in bytes.
What it is not: a measurement of the device. ``released`` counts storages that died.
Invariant: every storage offered is either moved or kept for a reason, so
``offered == moved + sum(kept.values())``; of those moved, ``released + unreleased == moved``. What
is not even looked at, too small for one, counts each time that it is saved.

    offered --> kept, why                      moved --> released: its device bytes went
            `-> moved to pinned memory               `-> unreleased: somebody keeps them alive

Who may call it: contexts fill it in, everyone reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .. import _native
from ._reasons import NO_PINNED_ROOM


class Counts(_native.Counts):
    """Figures under way. Bytes of storages; each storage counts once, but for those that are not
    taken at all. What moved is counted by the native part."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self.largest_without_room = 0
        """Bytes of the largest storage that found no pinned room."""

    def stay(self, nbytes: int, why: str) -> None:
        """A tensor that was not taken at all: nobody looks whose bytes they are."""
        self.kept[why] = self.kept.get(why, 0) + nbytes

    def keep(self, stash: _native.Stash, why: str) -> None:
        """A storage stays for now."""
        if stash.state:
            self.take_back(stash)
        stash.state = why
        if why == NO_PINNED_ROOM:
            self.largest_without_room = max(self.largest_without_room, stash.nbytes)
        self.kept[why] = self.kept.get(why, 0) + stash.nbytes

    def take_back(self, stash: _native.Stash) -> None:
        """A storage that stayed so far leaves, or stays for another reason."""
        if stash.state in self.kept:
            self.kept[stash.state] -= stash.nbytes
            if self.kept[stash.state] == 0:
                del self.kept[stash.state]


@dataclass(frozen=True)
class Report:
    """What happened since the context was entered last. All sizes are bytes.

    Attributes:
        offered: storages that the mode is about: ``moved`` plus all that were ``kept``.
        moved: sent to pinned host memory.
        released: of those moved: their device bytes were given back to torch's allocator.
        unreleased: of those moved: still on the device, being copied or kept alive by somebody
            else.
        kept: stayed on the device, by reason: python/README.md lists them.
        restored: handed to the backward pass, whether they had to be fetched or not.
        stall_count: readers that came before their bytes were asked for, since the context was
            entered.
        stall_seconds: device time they waited; 0.0 unless the engine was made with
            ``time_stalls=True``. A wait is counted when it is known to be over, which may be in the
            next step.
        prefetch_refused_count: prefetches not issued for want of room on the device, since the
            context was entered.
        pinned: page-locked now, by all engines of the process.
        peak: most device bytes that torch had allocated (0 on a simulated device).
        engine: all of the engine's own figures, since it was made (``Engine.stats``).
    """

    offered: int
    moved: int
    released: int
    unreleased: int
    kept: dict[str, int]
    restored: int
    stall_count: int
    stall_seconds: float
    prefetch_refused_count: int
    pinned: int
    peak: int
    engine: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        kept = ", ".join(f"{why} {_text(nbytes)}" for why, nbytes in sorted(self.kept.items()))
        return (
            f"offered {_text(self.offered)}: moved {_text(self.moved)} "
            f"(released {_text(self.released)}, unreleased {_text(self.unreleased)}), "
            f"kept {kept or 'nothing'}; stalls {self.stall_count}; pinned {_text(self.pinned)}"
        )


def _text(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
