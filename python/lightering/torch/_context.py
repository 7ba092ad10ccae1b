"""What every context does: pack and unpack hooks, entered and left any number of times.

What it is: the hooks of one mode over an engine for each device, its figures, its self-test.
What it is not: a choice of what moves; ``SavedTensors`` and ``HiddenStates`` say that.
Invariant: a tensor that cannot be moved for whatever reason stays, and the reason is counted. What
was packed can be unpacked after the context was left, on any thread.

    enter: push hooks     pack(t) --about?--> Moved | Kept, why     exit: pop, drop what may go

Who may call it: the modes of lightering.torch.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

import torch

from .. import _arguments, _forks, _native
from .._subclass import flatten
from .._version import VersionProbe, share_outer, version_of
from ..engine import Engine, Size
from . import _reasons
from ._packed import Packed, Split, unpack
from ._report import Counts, Report
from ._stash import Desk
from ._warn import warn_once

# For the native part, which gives these reasons.
_WORDS = {
    "AMONG_THE_LAST": _reasons.AMONG_THE_LAST,
    "EDITED": _reasons.EDITED,
    "IN_BACKWARD": _reasons.IN_BACKWARD,
    "INFERENCE": _reasons.INFERENCE,
    "LAZY": _reasons.LAZY,
    "OTHER_DEVICE": _reasons.OTHER_DEVICE,
    "OUTLIVED": _reasons.OUTLIVED,
    "TOO_SMALL": _reasons.TOO_SMALL,
    "WEIGHTS_UNKNOWN": _reasons.WEIGHTS_UNKNOWN,
}


def checked(engine: Any) -> Engine | None:
    """The engine that a caller passes.

    Raises:
        TypeError: it is none.
    """
    if engine is not None and not isinstance(engine, Engine):
        raise TypeError(f"engine={engine!r}: a lightering.Engine, or None for the shared one")
    return engine


class Context(_native.Hooks):
    """Hooks of one mode. Use a mode, not this."""

    _name = "context"
    _nothing_offered = ""
    """What is wrong where tensors were saved, and none was one that the mode is about."""
    _watched: Any = None
    """By thread, what never leaves where all else does; None where ``_saves`` says what may."""
    _saves: tuple[CodeType, frozenset[CodeType]] | None = None
    """Whose frame saves the inputs that may leave, called by one of those; ``_wants_input`` is
    asked about each."""
    _unpack = staticmethod(unpack)

    def __init__(self, keep_last: int, min_bytes: Size, placement: str, engine: Engine | None):
        for name, value in (
            ("keep_last", keep_last), ("min_bytes", min_bytes), ("placement", placement)
        ):
            if isinstance(value, Engine):
                raise TypeError(f"{name}={value!r}: an engine is passed by its name: engine=...")
        self._keep_last = _arguments.count(keep_last, "keep_last")
        self._min_bytes = _arguments.size(min_bytes, "min_bytes")
        self._is_off = _arguments.choice(placement, "placement", ("cpu", "none")) == "none"
        # Not the engine itself, which may go: what moves its tensors is its desk.
        self._has_engine = checked(engine) is not None
        self._forks = _forks.count
        self.rule(self._name, self._min_bytes, _WORDS, self._watched, self._saves)
        self._counts = Counts()
        self._before: dict[Desk, tuple[int, float, int]] = {}
        if engine is not None:
            desk = Desk.of(engine)
            device = torch.device("cpu") if desk.is_simulated else torch.device("cuda", desk.index)
            self._open(device, desk)

    def _open(self, device: torch.device, desk: Desk) -> tuple[Desk, Any]:
        mode = (desk, _native.Saved(desk.native, self._keep_last, self._min_bytes))
        self._before[desk] = desk.figures()
        self._modes[device] = mode
        desk.join(self)
        return mode

    def _mode(self, device: torch.device) -> tuple[Desk, Any] | None:
        """The engine of a device, with this context's part of it; None where it has none."""
        found = self._modes.get(device)
        if found is None and not self._has_engine and device.type == "cuda":
            found = self._open(device, Desk.of(Engine.of(f"cuda:{device.index}")))
        return found

    def _enter(self) -> None:
        """Entered for the first time in this thread; nothing is on yet."""
        self._begin()
        for desk, _ in self._modes.values():
            desk.begin()

    def _end(self, has_raised: bool) -> None:
        """Left for the last time in this thread: drops what may go, and says what is wrong."""
        if self._forks != _forks.count:
            return
        for desk, _ in self._modes.values():
            desk.flush()
        if not has_raised:
            self._test_itself()

    def _begin(self) -> None:
        """Counts from here on."""
        self._counts = Counts()
        self._before = {desk: desk.figures() for desk, _ in self._modes.values()}

    def _start(self) -> None:
        """The hooks are on for the first time in this thread."""

    def _stop(self) -> None:
        """They are off for the last time, or what began was broken off. May be done twice."""

    def _wants_input(self, tensor: torch.Tensor) -> str | None:
        """None for an input that this mode moves; "" for one it is not about; else why not."""
        raise NotImplementedError

    def _pack_apart(self, tensor: torch.Tensor) -> Packed:
        """Packs a tensor that is not plain by those that it is of."""
        flat = flatten(tensor)
        if flat is not None and not flat.names:
            # What a collective gave; nobody can edit what is only waited for.
            parts = [self._take(leaf, leaf.untyped_storage()) for leaf in flat.leaves]
            return Split(parts, flat.detach())
        shared = None if flat is None else share_outer(tensor, flat.names)
        if flat is not None and shared is not None:
            seen = version_of(shared)
            parts = [self._take(leaf, leaf.untyped_storage(), seen) for leaf in flat.leaves]
            return Split(parts, flat.detach(), VersionProbe(tensor, shared), flat.names)
        self._counts.stay(self._extent(tensor), _reasons.UNKNOWN_KIND)
        return self._keep(tensor)

    def _graph_obstacle(self, device: torch.device) -> str | None:
        """Why a CUDA graph keeps a tensor from moving."""
        if torch.cuda.is_current_stream_capturing():
            self._warn("stays out of a capture: tensors of a CUDA graph stay on the device")
            return _reasons.CAPTURE
        if has_cudagraph_trees(device):
            self._warn("stays out of CUDA graph trees: a replay would overwrite what is moved")
            return _reasons.GRAPH_TREES
        return None

    @staticmethod
    def _extent(tensor: torch.Tensor) -> int:
        """Bytes of a tensor of any kind."""
        count = tensor.numel()
        # While a compiler traces, sizes may be symbols, which asking would fix.
        return count * tensor.element_size() if type(count) is int else 0

    @staticmethod
    def _reason(error: Exception) -> str:
        """Why a tensor stays that the engine did not take."""
        text = str(error)
        if "overlaps" in text:
            return _reasons.OVERLAPS
        if "captured" in text:
            return _reasons.CAPTURE
        return f"{_reasons.REFUSED}: " + text.split("[")[0].strip()

    def _packed(self, desk: Desk, saved: Any) -> None:
        """A storage was taken."""

    def bytes_kept(self) -> int:
        """Bytes that stay since there are few of them, of a mode that lets some."""
        return 0

    def _test_itself(self) -> None:
        counts = self._counts
        offered = counts.moved + sum(counts.kept.values())
        if self._is_off:
            return
        if not offered:
            if counts.others and self._nothing_offered:
                self._warn(self._nothing_offered)
            return
        if not counts.moved:
            most = max(counts.kept, key=lambda why: counts.kept[why])
            meaning = _reasons.REASONS.get(most)
            if most == _reasons.NO_PINNED_ROOM:
                meaning = f"{meaning}; {self._room_text()}"
            because = f"{most} ({meaning})" if meaning else most
            self._warn(f"it moved nothing: all {offered} bytes stayed, most of them: {because}")
        elif not counts.released:
            self._warn(
                f"it freed nothing: all {counts.moved} bytes moved were wanted again before their "
                "copies out were done, or are kept alive on the device by somebody else"
            )

    def _room_text(self) -> str:
        """What found no pinned room, beside what there is at most."""
        bounds = [desk.native.stats()["pinned_engine_budget_bytes"]
                  for desk, _ in self._modes.values()]
        largest = self._counts.largest_without_room
        return (f"the largest tensor has {largest} bytes, and `pinned_bytes` of the engine are "
                f"{min(bounds, default=0)}")

    def _warn(self, what: str) -> None:
        warn_once(self._name, what)

    def report(self) -> Report:
        """What happened since the context was entered last.

        Stalls and refused prefetches are the engine's since then, another context's included where
        both share it at the same time.
        """
        counts = self._counts
        desks = [desk for desk, _ in self._modes.values()]
        for desk in desks:
            desk.sweep()
        stats = [desk.native.stats() for desk in desks]
        since = [
            tuple(now - then for now, then in zip(desk.figures(), self._before[desk], strict=True))
            for desk in desks
        ]
        on_gpu = [desk for desk in desks if not desk.is_simulated]
        return Report(
            offered=counts.moved + sum(counts.kept.values()),
            moved=counts.moved,
            released=counts.released,
            unreleased=counts.moved - counts.released,
            kept=dict(counts.kept),
            restored=counts.restored,
            stall_count=sum(int(each[0]) for each in since),
            stall_seconds=sum((float(each[1]) for each in since), 0.0),
            prefetch_refused_count=sum(int(each[2]) for each in since),
            pinned=max((stat["pinned_bytes"] for stat in stats), default=0),
            peak=sum(torch.cuda.max_memory_allocated(desk.index) for desk in on_gpu),
            engine=stats[0] if len(stats) == 1 else {"engines": stats},
        )


def has_cudagraph_trees(device: torch.device) -> bool:
    """Whether torch.compile replays CUDA graphs on a device, whose pool a replay overwrites."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda":
        return False
    try:
        return trees.get_manager(device.index, create_if_none_exists=False) is not None
    except AssertionError:
        # This thread has none, nor a place for them.
        return False
    except AttributeError:
        # Another torch: who knows what its graphs do.
        return True
