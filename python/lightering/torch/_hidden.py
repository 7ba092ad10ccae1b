"""The inputs of checkpointed layers leave the device.

What it is: the mode for models that recompute their layers: one tensor a layer moves.
What it is not: a checkpointer. torch's own runs as it is; this sees what it saves.
Invariant: of each checkpoint only the first positional tensor moves: the hidden states. Masks,
rotary embeddings and everything saved outside of a checkpoint stay, and so does the layer's code.

    checkpoint(layer, hidden, mask) --saves--> hidden: moves     mask: stays
    layer(hidden_states=h)  --rebound--> layer(h): hooks see positional tensors only

Who may call it: everyone, as ``lightering.torch.HiddenStates``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from typing import Any, cast

import torch
import torch.utils.checkpoint as torch_checkpoint

from .. import _arguments, _forks
from .._subclass import is_plain
from ..engine import Engine, Size
from . import _reasons
from ._context import Context
from ._stash import Desk

_WINDOW_BYTES_MAX = 512 << 20
# What a step may keep on a device by min_step_bytes="auto": this part of its memory.
_STEPS_IN_MEMORY = 256

# Whose frames say that a checkpoint is saving its inputs.
_APPLY = cast(Any, torch.autograd.Function.apply).__func__.__code__
_SAVERS = frozenset(
    inspect.unwrap(function).__code__
    for function in (
        torch_checkpoint.checkpoint,
        torch_checkpoint._checkpoint_without_reentrant_generator,
    )
)


class HiddenStates(Context):
    """Moves the hidden states that enter each checkpointed layer, reentrant or not.

    ::

        model.gradient_checkpointing_enable()
        with HiddenStates():
            loss = model(**batch)
            loss.backward()          # inside or outside of the context

    Args:
        keep_last: inputs of the last so many layers stay: the backward pass wants them at once.
        min_bytes: smaller tensors stay, a size.
        placement: "cpu" for pinned host memory; "none" turns it off.
        engine: a ``lightering.Engine``; None for the one that contexts of a device share. Tensors
            of the CPU are moved only for an engine of the simulated device.
        min_step_bytes: where the inputs of a whole step have fewer bytes than that, those of the
            next one stay, until they have more, those that stay by other contexts of the device
            included; a size. Moving them costs the host some tenths of a millisecond a layer, and
            frees next to nothing. "auto" for a 256th of the device's
            memory; for none where the engine was made with windows of its own, or is simulated.

    Raises:
        TypeError, ValueError: an argument that is not allowed, with its name and what is.

    What moves is the storage of the first positional tensor of each checkpoint, of any shape, where
    it is floating-point; it comes back with its size, stride and offset.

    Source: torch's own ``saved_tensors_hooks`` around torch's own ``checkpoint``; copies and their
    order are the Rust engine's, by its adapter ``saved``.

    Layers of transformers that are called with ``hidden_states=`` as a keyword are called with it
    as a positional argument while a context is active: hooks do not see keywords.
    """

    _name = "hidden states"
    _saves = (_APPLY, _SAVERS)
    _nothing_offered = (
        "it moved nothing: no checkpoint saved a floating-point input; checkpoint the layers "
        "(gradient_checkpointing_enable), pass them their input as the first positional argument, "
        "not by a keyword, and have checkpoints around compiled code, not in it; or use "
        "SavedTensors to move all that they save"
    )

    def __init__(
        self,
        keep_last: int = 1,
        min_bytes: Size = 1024,
        placement: str = "cpu",
        engine: Engine | None = None,
        *,
        min_step_bytes: Size = "auto",
    ) -> None:
        super().__init__(keep_last, min_bytes, placement, engine)
        self._step_least = _arguments.size_or_auto(min_step_bytes, "min_step_bytes")
        self._step_bytes = 0
        self._is_step_small: bool | None = None
        """None where this context saw no input yet."""
        self._largest: dict[Desk, int] = {}
        self._was_just_entered = False
        """No input came since, and the step was begun then: the engine counts each once."""

    def _start(self) -> None:
        self._was_just_entered = True
        if not self._is_off:
            _keywords.start(self)

    def _stop(self) -> None:
        if not self._is_off:
            _keywords.stop(self)
        self._largest.clear()
        if self._forks == _forks.count:
            for desk, _ in self._modes.values():
                desk.ask_windows(self, None)
                # For the next step's context, where each has one of its own.
                desk.step_bytes_last = self._step_bytes or desk.step_bytes_last

    def _wants_input(self, tensor: torch.Tensor) -> str | None:
        if isinstance(tensor, torch.nn.Parameter):
            return ""
        if torch._C._current_graph_task_id() != -1:
            return _reasons.IN_BACKWARD
        if self._is_step_small is None:
            self._is_step_small = self._was_last_step_small(tensor.device)
        if self._step_bytes and not self._is_anything_saved():
            self._next_step(self._least_of_step(tensor.device))
        self._was_just_entered = False
        self._step_bytes += self._bytes_with(tensor)
        return _reasons.TOO_LITTLE if self._is_step_small and self._is_little(tensor) else None

    def _was_last_step_small(self, device: torch.device) -> bool:
        mode = self._mode(device)
        last = 0 if mode is None else mode[0].step_bytes_last
        return 0 < last < self._least_of_step(device)

    def _is_little(self, tensor: torch.Tensor) -> bool:
        """Whether what came so far is, with what stays of the device's other contexts."""
        desk = self._desk_of(tensor.device)
        others = 0 if desk is None else desk.bytes_kept_beside(self)
        return self._step_bytes + others < self._least_of_step(tensor.device)

    def bytes_kept(self) -> int:
        """At least the bytes of this step's inputs that are still on the device since they stay."""
        return self._step_bytes if self._is_any_kept() else 0

    def _desk_of(self, device: torch.device) -> Desk | None:
        return next((desk for on, (desk, _) in self._modes.items() if on == device), None)

    def _bytes_with(self, tensor: torch.Tensor) -> int:
        """Bytes that stay where a tensor does: of a part of a storage, all of that."""
        return tensor.untyped_storage().nbytes() if is_plain(tensor) else self._extent(tensor)

    def _is_anything_saved(self) -> bool:
        # What stays is saved, too: the graph that keeps it is of this step. Each counts, since the
        # one that stayed last may be of a graph that is gone before the others'.
        return self._is_any_kept() or any(desk.live_count for desk, _ in self._modes.values())

    def _next_step(self, least: int) -> None:
        """Nothing is saved any more of what was: a step is over, and an input of the next comes."""
        self._is_step_small = self._step_bytes < least
        self._step_bytes = 0
        if not self._was_just_entered:
            for desk, _ in self._modes.values():
                desk.begin()

    def _least_of_step(self, device: torch.device) -> int:
        if self._step_least is None:
            desk = self._desk_of(device)
            if desk is None or desk.is_simulated or desk.has_own_windows:
                return 0
            memory = torch.cuda.get_device_properties(device).total_memory
            self._step_least = memory // _STEPS_IN_MEMORY
        return self._step_least

    def _packed(self, desk: Desk, saved: Any) -> None:
        if desk.has_own_windows or saved.largest <= self._largest.get(desk, 0):
            return
        # Two items: one that leaves or comes, and one more.
        largest = self._largest[desk] = saved.largest
        window = min(_WINDOW_BYTES_MAX, 2 * largest)
        # What stays as the last is on the device as well, beside what has not left yet.
        unreleased = max(window - self._keep_last * largest, min(window, largest))
        desk.ask_windows(self, (unreleased, window))


class _Keywords:
    """While a context is active, layers of transformers get ``hidden_states`` as an argument."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[tuple[HiddenStates, int]] = set()
        """Contexts, and the threads in which they are active."""
        self._patch: tuple[Any, Any, Any] | None = None
        """The class, its own ``__call__`` if it has one, and ours; known before ours is there."""

    def start(self, user: HiddenStates) -> None:
        with self._lock:
            self._users.add((user, threading.get_ident()))
            module = sys.modules.get("transformers.modeling_layers")
            if self._patch is None and module is not None:
                layer: Any = module.GradientCheckpointingLayer
                ours = _positional(layer.__call__)
                self._patch = layer, layer.__dict__.get("__call__"), ours
                layer.__call__ = ours

    def stop(self, user: HiddenStates) -> None:
        """No more for this user in this thread, if it was. May be broken off and done again."""
        with self._lock:
            self._users.discard((user, threading.get_ident()))
            if self._users or self._patch is None:
                return
            layer, own, ours = self._patch
            # Somebody else's that came meanwhile is theirs.
            if layer.__dict__.get("__call__") is ours:
                if own is None:
                    del layer.__call__
                else:
                    layer.__call__ = own
            self._patch = None


_keywords = _Keywords()


def _positional(call: Any) -> Any:
    @functools.wraps(call)
    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:
        kind: Any = type(layer)
        if not args and "hidden_states" in kwargs and first_is_hidden_states(kind):
            args = (kwargs.pop("hidden_states"),)
        return call(layer, *args, **kwargs)

    return __call__


@functools.cache
def first_is_hidden_states(kind: Any) -> bool:
    """Whether a module's ``forward`` takes ``hidden_states`` as its first argument."""
    try:
        names = list(inspect.signature(kind.forward).parameters)
    except (TypeError, ValueError):
        return False
    return names[1:2] == ["hidden_states"]
