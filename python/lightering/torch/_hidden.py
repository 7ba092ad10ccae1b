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

from .. import _forks
from ..engine import Engine, Size
from . import _reasons
from ._context import Context
from ._stash import Desk

_WINDOW_BYTES_MAX = 512 << 20

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
    _nothing_offered = (
        "it moved nothing: no checkpoint saved a floating-point input; checkpoint the layers "
        "(gradient_checkpointing_enable), or use SavedTensors to move all that they save"
    )

    def __init__(
        self,
        keep_last: int = 1,
        min_bytes: Size = 1024,
        placement: str = "cpu",
        engine: Engine | None = None,
    ) -> None:
        super().__init__(keep_last, min_bytes, placement, engine)
        self._largest = 0

    def _start(self) -> None:
        if not self._is_off:
            _keywords.start()

    def _stop(self) -> None:
        if not self._is_off:
            _keywords.stop()
        self._largest = 0
        if self._forks == _forks.count:
            for desk, _ in self._modes.values():
                desk.ask_window(self, None)

    def _wants(self, tensor: torch.Tensor, storage: torch.UntypedStorage | None) -> str | None:
        # Whoever saves; on a thread of autograd there may be nobody. Native frames do not show.
        apply = sys._getframe(0).f_back
        saver = None if apply is None else apply.f_back
        if apply is not None and saver is not None and apply.f_code is _APPLY:
            if saver.f_code in _SAVERS:
                return self._wants_input(tensor, saver.f_locals.get("args", ()))
        return ""

    def _wants_input(self, tensor: torch.Tensor, args: tuple[Any, ...]) -> str | None:
        first = next((each for each in args if isinstance(each, torch.Tensor)), None)
        if first is not tensor or not tensor.is_floating_point():
            return ""
        if isinstance(tensor, torch.nn.Parameter):
            return ""
        if torch._C._current_graph_task_id() != -1:
            return _reasons.IN_BACKWARD
        return None

    def _packed(self, desk: Desk, saved: Any) -> None:
        if desk.has_own_windows or saved.largest <= self._largest:
            return
        # Two items: one that leaves or comes, and one more.
        self._largest = saved.largest
        desk.ask_window(self, min(_WINDOW_BYTES_MAX, 2 * self._largest))


class _Keywords:
    """While a context is active, layers of transformers get ``hidden_states`` as an argument."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._layer: Any = None
        self._own: Any = None
        self._ours: Any = None

    def start(self) -> None:
        with self._lock:
            self._count += 1
            module = sys.modules.get("transformers.modeling_layers")
            if self._layer is None and module is not None:
                self._layer = module.GradientCheckpointingLayer
                self._own = self._layer.__dict__.get("__call__")
                self._ours = self._layer.__call__ = _positional(self._layer.__call__)

    def stop(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count or self._layer is None:
                return
            # Somebody else's that came meanwhile is theirs.
            if self._layer.__dict__.get("__call__") is self._ours:
                if self._own is None:
                    del self._layer.__call__
                else:
                    self._layer.__call__ = self._own
            self._layer = self._own = self._ours = None


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
