"""Device bytes from torch's own allocator, and whether there is room to fetch ahead.

What it is: storages allocated on the stream that is current, and a careful guess of free room.
What it is not: a pool. torch's caching allocator is one.
Invariant: a prefetch never makes torch flush its cache: it is tried only where the cache, or the
device, has room to spare.

    room = reserved - allocated (torch's cache)  or, where that is too little,
           free on the device - margin

Who may call it: _stash.py.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _native

_MARGIN_BYTES = 256 << 20
_READS_APART = 16
_READS_APART_WITH_PLENTY = 128
_PLENTY_BYTES = 8 << 30


class Room(_native.Room):
    """Room on one device."""

    def __init__(self, kind: str, index: int) -> None:
        self._is_host = kind == "cpu"
        self._spare = 0
        self._asks = 0
        self.refused_count = 0
        """How often a prefetch was not issued since there was no room."""

    def has(self, nbytes: int) -> bool:
        """Whether ``nbytes`` can be taken without pressing torch's allocator."""
        if self._is_host:
            return True
        if self._asks == 0 or self._spare < nbytes:
            self._read(nbytes)
        self._asks -= 1
        if self._spare < nbytes:
            self.refused_count += 1
            return False
        self._spare -= nbytes
        return True

    def _read(self, nbytes: int) -> None:
        # As it comes: making the flat form of all figures takes longer than a whole pair.
        stats: Any = torch.cuda.memory.memory_stats_as_nested_dict(self.device)
        reserved, allocated = (
            stats[name]["all"]["current"] if stats else 0
            for name in ("reserved_bytes", "allocated_bytes")
        )
        self._spare = reserved - allocated
        if self._spare < nbytes:
            # The driver is asked only where the cache does not do.
            free, _ = torch.cuda.mem_get_info(self.device)
            self._spare = max(self._spare, free - _MARGIN_BYTES)
        # How often it may be asked before others may have taken what was seen here.
        plenty = self._spare >= _PLENTY_BYTES
        self._asks = _READS_APART_WITH_PLENTY if plenty else _READS_APART
