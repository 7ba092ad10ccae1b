"""One module, or one call, whose checkpointed input leaves the device.

What it is: torch's ``offload_wrapper`` and ``checkpoint``, with the same call.
What it is not: a context; the figures of all of them are in ``report()``.
Invariant: parameter names and ``state_dict`` keys are those of the module that is wrapped.

    offload_wrapper(checkpoint_wrapper(layer))     checkpoint(function, hidden, mask)
             `---------- one shared mode for each engine: keep_last counts over layers

Who may call it: everyone, from ``lightering.torch``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointWrapper,
)

from .. import _arguments, _forks
from .._fsdp import is_fsdp1
from .._native import Hooked, Usage
from .._subclass import is_plain
from ..engine import Engine
from ._context import checked
from ._hidden import HiddenStates, first_is_hidden_states
from ._packed import Packed, unpack
from ._report import Report
from ._warn import warn_once


_COMPILED = (
    "offload_wrapper moves nothing of what is compiled around it: its checkpoint is a part of the "
    "compiler's graph then; wrap the compiled layer, "
    "offload_wrapper(checkpoint_wrapper(torch.compile(layer))), or use SavedTensors"
)
_BY_KEYWORD = (
    "it moved nothing of a call: its checkpoint saved no floating-point input, and tensors came by "
    "a keyword; pass the layer its input as the first positional argument, not by a keyword; or "
    "use SavedTensors to move all that it saves"
)


@torch.compiler.assume_constant_result
def _tell_of_compiling() -> bool:
    """Called once, while a compiler traces a call; it keeps the result."""
    warn_once(HiddenStates._name, _COMPILED)
    return True


class _Shared(HiddenStates):
    """The mode that wrapped modules and single calls share; a step ends when nothing is saved."""

    _has_told = False
    """Whether it was told that an input came by a keyword."""

    def hooks(self) -> Any:
        """Hooks for one call, which take themselves off, and no other."""
        return Hooked(self._pack, unpack)

    def offered(self) -> tuple[Any, int]:
        """Bytes that were offered in this step so far, with what counts them."""
        counts = self._counts
        return counts, counts.moved + sum(counts.kept.values())

    def tell_of_keywords(self, out: Any) -> None:
        """A call gave ``out``, and offered nothing since its input came by a keyword."""
        if not self._has_told and _has_gradient(out):
            self._has_told = True
            self._warn(_BY_KEYWORD)

    def take_input_of(self, pack_hook: Any) -> bool:
        """Moves what a checkpoint saved already, in whose forward the caller is.

        Its frame is in the closure of its pack hook. Where it is not, or where somebody else's
        hooks have its input, nothing moves.

        Returns:
            Whether the checkpoint saved an input at all, of any kind.
        """
        cells = dict(zip(pack_hook.__code__.co_freevars, pack_hook.__closure__ or (), strict=True))
        saver = getattr(cells.get("frame"), "cell_contents", None)
        node = getattr(getattr(saver, "input_saver", None), "grad_fn", None)
        saved: Any = getattr(node, "_raw_saved_tensors", ())
        # The first one is the checkpoint's own dummy.
        if len(saved) > 1:
            with contextlib.suppress(RuntimeError):
                saved[1].register_hooks(self._pack_input, unpack)
        return len(saved) > 1

    def _pack_input(self, tensor: torch.Tensor) -> Packed:
        if self._forks != _forks.count or not tensor.is_floating_point():
            return self._keep(tensor)
        why = self._wants_input(tensor)
        if why is not None:
            if why:
                self._counts.stay(self._extent(tensor), why)
            return self._keep(tensor)
        if is_plain(tensor):
            return self._take(tensor, tensor.untyped_storage())
        return self._pack_apart(tensor)

    def _next_step(self, least: int) -> None:
        self._test_itself()
        self._begin()
        # Last, as the engine may have an error of the step before to tell.
        super()._next_step(least)


_shared: weakref.WeakKeyDictionary[Engine, _Shared] = weakref.WeakKeyDictionary()
_shared_default: list[_Shared] = []
_shared_lock = threading.Lock()


# A child makes its own; the lock may be held where it was forked.
def _forked() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    _shared_default.clear()


os.register_at_fork(after_in_child=_forked)


def _mode_of(engine: Engine | None) -> _Shared:
    engine = checked(engine)
    with _shared_lock:
        if engine is None:
            if not _shared_default:
                _shared_default.append(_Shared())
            return _shared_default[0]
        found = _shared.get(engine)
        if found is None:
            found = _shared[engine] = _Shared(engine=engine)
        return found


def report(engine: Engine | None = None) -> Report:
    """What wrapped modules and ``checkpoint`` moved and freed in the last step, in bytes.

    Args:
        engine: the one that they were given; None for those of the shared engines.

    Raises:
        TypeError: ``engine`` is something else.
    """
    return _mode_of(engine).report()


class _Held:
    """A mode, as a module holds it: copies of the module share it, and a file names it."""

    __slots__ = ("mode",)

    def __init__(self, mode: _Shared) -> None:
        self.mode = mode

    def __deepcopy__(self, memo: Any) -> _Held:
        return self

    def __reduce__(self) -> Any:
        if self.mode._has_engine:
            raise pickle.PicklingError(
                "a module that offload_wrapper gave an engine of its own (engine=) cannot be "
                "pickled; its state_dict can"
            )
        return _held_default, ()


def _held_default() -> _Held:
    return _Held(_mode_of(None))


class OffloadWrapper(ActivationWrapper):
    """What ``offload_wrapper`` returns."""

    def __init__(self, module: torch.nn.Module, mode: _Shared) -> None:
        super().__init__(module)
        self._mode = _Held(mode)
        self._takes_hidden_states = first_is_hidden_states(cast(Any, type(_innermost(module))))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; what its checkpoint saves first leaves the device.

        Inside of a compiled function it is torch's checkpoint, and nothing leaves: that is told.

        Raises:
            Usage: nothing checkpoints the module, and it trains.
        """
        if torch.compiler.is_compiling():
            _tell_of_compiling()
            return self._checkpoint_wrapped_module(*args, **kwargs)
        return self._run(*args, **kwargs)

    @torch._disable_dynamo(recursive=False)
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        module, mode = self._checkpoint_wrapped_module, self._mode.mode
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return module(*args, **kwargs)
        around = _checkpoint_around()
        if around is not None:
            is_first = around.__qualname__.startswith("_checkpoint_hook.")
            has_input = not is_first or mode.take_input_of(around)
            out = module(*args, **kwargs)
            if not has_input and self.training and _hides_input(args, kwargs):
                mode.tell_of_keywords(out)
            return out
        if self.training and not _checkpoints_itself(module):
            raise Usage(
                f"offload_wrapper: {type(_innermost(module)).__name__} is not checkpointed; wrap "
                "it in checkpoint_wrapper, or use SavedTensors to move all that it saves"
            )
        if not args and "hidden_states" in kwargs and self._takes_hidden_states:
            # Hooks see positional tensors only.
            args = (kwargs.pop("hidden_states"),)
        if _is_mode_around(mode):
            return module(*args, **kwargs)
        before = mode.offered() if self.training and _hides_input(args, kwargs) else None
        with mode.hooks():
            out = module(*args, **kwargs)
        if before is not None and before == mode.offered():
            mode.tell_of_keywords(out)
        return out


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _hides_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether floating-point tensors came by keywords alone: hooks do not see those."""
    return (
        bool(kwargs)
        and not any(map(_is_floating, args))
        and any(map(_is_floating, kwargs.values()))
    )


def _has_gradient(out: Any) -> bool:
    """Whether a backward pass can come through what a call gave."""
    if isinstance(out, torch.Tensor):
        return out.requires_grad
    # Nothing else is iterated: it may be an iterator that the caller reads.
    values = out.values() if isinstance(out, Mapping) else out if type(out) in (tuple, list) else ()
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in values)


def _checkpoint_around() -> Any:
    """The pack hook of the checkpoint in whose function, or recompute, the caller is; or None."""
    hook = _hook_around()
    # Anybody's hook may be anything that can be called.
    is_of_torch = getattr(hook, "__module__", None) == torch_checkpoint.__name__
    return hook if is_of_torch and hasattr(hook, "__qualname__") else None


def _hook_around() -> Any:
    """The pack hook that is called for what the caller saves; or None."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top[0] if top else None


def _is_mode_around(mode: _Shared) -> bool:
    """Whether a ``HiddenStates`` around the caller moves what a checkpoint in it saves: the one
    that somebody entered knows its engine, where none was named here."""
    around = getattr(_hook_around(), "__self__", None)
    return not mode._has_engine and isinstance(around, HiddenStates)


def _checkpoints_itself(module: Any) -> bool:
    """Whether a module is run again in the backward pass."""
    while module is not None:
        if isinstance(module, CheckpointWrapper) or getattr(
            module, "gradient_checkpointing", False
        ):
            return True
        inner = module.__dict__.get("_modules", {})
        module = inner.get("_checkpoint_wrapped_module") or inner.get("_orig_mod")
    return False


def offload_wrapper(module: torch.nn.Module, *, engine: Engine | None = None) -> torch.nn.Module:
    """Wraps a checkpointed module: the hidden states that enter it leave the device.

    ::

        model.layers[i] = offload_wrapper(checkpoint_wrapper(layer))

    Args:
        module: one that ``checkpoint_wrapper`` returned, or that checkpoints itself.
        engine: a ``lightering.Engine``; None for that of a ``HiddenStates`` around the call, or
            else the one that contexts of a device share.

    Returns:
        The module, wrapped: its parameters' names and ``state_dict`` keys are as before.

    Raises:
        TypeError: ``module`` or ``engine`` is something else.
        ValueError: it is wrapped in FSDP1, whose flat weights are not supported.

    Source: the call is that of ``offload_wrapper`` in torch's
    ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``; what moves is as of
    ``HiddenStates``, with its defaults.

    ``checkpoint_wrapper(offload_wrapper(layer))`` is right, too. Since one cannot tell beforehand
    who will wrap it, a module that nothing checkpoints is an error when it first trains.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module={module!r}: a torch.nn.Module")
    if is_fsdp1(module):
        raise ValueError(
            "offload_wrapper: FullyShardedDataParallel (FSDP1) is not supported; use fully_shard"
        )
    return OffloadWrapper(module, _mode_of(engine))


def _innermost(module: torch.nn.Module) -> torch.nn.Module:
    while isinstance(module, ActivationWrapper):
        module = module._checkpoint_wrapped_module
    return module


def respecting(checkpoint_function: Callable[..., Any]) -> dict[str, bool]:
    """What a checkpoint function has to be told so that saved tensors of its own reach hooks.

    torch asks for it from 2.14 on; earlier versions do not know the word.
    """
    names = inspect.signature(inspect.unwrap(checkpoint_function)).parameters
    word = "respect_saved_tensors_hooks"
    return {word: True} if word in names else {}


_RESPECTING = respecting(torch_checkpoint.checkpoint)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    engine: Engine | None = None,
    **kwargs: Any,
) -> Any:
    """Runs ``function`` as ``torch.utils.checkpoint.checkpoint`` does; its input leaves the device.

    Args:
        function: what to run now, and again in the backward pass; anything that can be called.
        args: its arguments. The first tensor moves if it is floating-point; others stay.
        use_reentrant: as torch's, True or False.
        engine: a ``lightering.Engine``; None for that of a ``HiddenStates`` around the call, or
            else the one that contexts of a device share.
        kwargs: torch's own options, and with ``use_reentrant=False`` keyword arguments of
            ``function``; of these ``hidden_states`` moves where no argument is positional.

    Returns:
        What ``function`` returns.

    Raises:
        TypeError: ``function`` cannot be called, ``use_reentrant`` is neither True nor False, or
            ``engine`` is something else.
        Exception: whatever torch's ``checkpoint`` and ``function`` raise.

    Source: the call is that of ``torch.utils.checkpoint.checkpoint``, which does the work; what
    moves is as of ``HiddenStates``, with its defaults. Inside of a compiled function it is torch's.
    """
    if not callable(function):
        raise TypeError(f"function={function!r}: something that can be called")
    _arguments.flag(use_reentrant, "use_reentrant")
    checked(engine)
    options = kwargs if use_reentrant else {**_RESPECTING, **kwargs}
    is_compiling = torch.compiler.is_compiling()
    if is_compiling or not torch.is_grad_enabled() or _checkpoint_around() is not None:
        # Inside of another checkpoint that one drops what is saved, and makes it anew.
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=use_reentrant, **options
        )
    if not args and not use_reentrant and "hidden_states" in options:
        args = (options.pop("hidden_states"),)
        function = functools.partial(_by_keyword, function)
    mode = _mode_of(engine)
    is_around = _is_mode_around(mode)
    is_hidden = not is_around and getattr(function, "training", True) and _hides_input(args, kwargs)
    before = mode.offered() if is_hidden else None
    with contextlib.nullcontext() if is_around else mode.hooks():
        out = torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **options)
    if before is not None and before == mode.offered():
        mode.tell_of_keywords(out)
    return out


def _by_keyword(function: Callable[..., Any], hidden_states: Any, **kwargs: Any) -> Any:
    return function(hidden_states=hidden_states, **kwargs)
