"""Ways to run a step: without offload, with raw copies beside it, with each peer, with ours.

What it is: what each way needs of the model and around a step, taken back without a trace.
What it is not: a judgement; what is not installed says so, and is skipped aloud.
Invariant: ``attach`` and ``detach`` are a pair, and between ways the model is as it was built.

    attach --> (context: forward, turn(), backward) ... --> detach

Who may call it: steps.py and its children.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from raw import Copies
from workloads import Built


class Missing(Exception):
    """The way cannot run here, and why."""


class Way:
    """Nothing is moved: the model as it is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def attach(self, built: Built) -> None:
        """Before the first step. Raises Missing."""

    def context(self) -> AbstractContextManager[Any]:
        """Around forward and backward of one step."""
        return nullcontext()

    def turn(self) -> None:
        """Between forward and backward."""

    def step_done(self) -> None:
        """After the context of a step."""

    def detach(self, built: Built) -> None:
        """After the last step."""

    def warmed(self) -> None:
        """Warmed up: the steps that are timed begin."""

    def moved(self) -> tuple[int, int]:
        """Bytes copied out and in since attached; zeros where nobody counts."""
        return 0, 0

    def pinned_bytes(self) -> int:
        """Page-locked host memory that this way holds; ask at its first visit, before which torch's
        allocator was emptied."""
        return torch_pinned_bytes()

    def says(self) -> dict[str, Any]:
        """Further figures, for the log."""
        return {}


def torch_pinned_bytes() -> int:
    """What torch's own host allocator has page-locked; it keeps what is free until asked."""
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


class Control(Way):
    """The same bytes copied raw on side streams; nothing depends on the copies."""

    def attach(self, built: Built) -> None:
        self.copies = Copies(built, self.device)

    def context(self) -> AbstractContextManager[Any]:
        self.copies.forward()
        return nullcontext()

    def turn(self) -> None:
        self.copies.backward()

    def step_done(self) -> None:
        self.copies.rest()

    def detach(self, built: Built) -> None:
        self.copies.close()

    def moved(self) -> tuple[int, int]:
        return self.copies.out_bytes, self.copies.in_bytes

    def pinned_bytes(self) -> int:
        return self.copies.pinned_bytes


class TorchWrapper(Way):
    """torch's offload_wrapper around each layer: accelerate's, and transformers' offload=True."""

    def _wrap(self, layer: torch.nn.Module) -> torch.nn.Module:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

        if self.device.type != "cuda":
            raise Missing("torch's offload_wrapper pins memory, which takes a GPU")
        return offload_wrapper(layer)

    def attach(self, built: Built) -> None:
        layers: Any = built.model.layers
        self._own = list(layers)
        for index, layer in enumerate(self._own):
            layers[index] = self._wrap(layer)

    def detach(self, built: Built) -> None:
        layers: Any = built.model.layers
        for index, layer in enumerate(self._own):
            layers[index] = layer
        self._own.clear()


class TorchAll(Way):
    """torch's save_on_cpu around the whole step."""

    def context(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")


class Trl(Way):
    """TRL's OffloadActivations, as its trainer makes it."""

    def attach(self, built: Built) -> None:
        manager = load("trl.models.activation_offloading", "get_act_offloading_ctx_manager")
        if self.device.type != "cuda":
            raise Missing("TRL's OffloadActivations takes a GPU")
        self._context = manager(built.model, warn_if_no_head=False)

    def context(self) -> AbstractContextManager[Any]:
        return self._context


class DeepSpeed(Way):
    """DeepSpeed's context for the hidden states of transformers' layers."""

    def attach(self, built: Built) -> None:
        if self.device.type != "cuda":
            raise Missing("DeepSpeed's engine takes a GPU")
        name = "deepspeed.runtime.activation_checkpointing.offload_activations"
        self._context = load(name, "CheckpointHiddenStatesOffload")()

    def context(self) -> AbstractContextManager[Any]:
        return self._context

    def says(self) -> dict[str, Any]:
        return {"stats": repr(self._context.stats)}


class Ours(Way):
    """HiddenStates, with its defaults."""

    mode = "HiddenStates"

    def __init__(self, device: torch.device, engine: Any = None) -> None:
        super().__init__(device)
        self._engine = self._own = engine
        self._longest, self._has_stepped = (0.0, ""), False
        # The small models of a CPU have tensors of less than the default of 1 MiB.
        self._bounds = {} if device.type == "cuda" else {"min_bytes": 1024}

    def engine(self) -> Any:
        """The one that contexts of this device share; a simulated one for the CPU."""
        if self._engine is None:
            lightering = load("lightering")
            self._engine = (
                lightering.Engine.of(f"cuda:{self.device.index or 0}")
                if self.device.type == "cuda" else lightering.Engine(device="sim"))
        return self._engine

    def attach(self, built: Built) -> None:
        modes = load("lightering.torch")
        own = None if self.device.type == "cuda" else self.engine()
        self._context = getattr(modes, self.mode)(engine=self._own or own, **self._bounds)
        self._before = self.engine().stats()

    def context(self) -> AbstractContextManager[Any]:
        return self._context

    def warmed(self) -> None:
        self._longest, self._has_stepped = (0.0, ""), False

    def step_done(self) -> None:
        stats = self.engine().stats()
        if not self._has_stepped:
            # It still says what the warm-up took, too; the next one says what this one did.
            self._has_stepped = True
            return
        self._longest = max(self._longest, (stats["longest_verb_seconds"], stats["longest_verb"]))

    def moved(self) -> tuple[int, int]:
        stats = self.engine().stats()
        # What left without a copy, as its host copy was good, is no byte of the link's.
        names = ("evicted_bytes", "clean_bytes", "refilled_bytes")
        begun, clean, back = (int(stats[name] - self._before[name]) for name in names)
        return begun - clean, back

    def pinned_bytes(self) -> int:
        return int(self.engine().stats()["pinned_bytes"])

    def says(self) -> dict[str, Any]:
        seconds, verb = self._longest
        return {"report": str(self._context.report()), "longest_verb": verb,
                "longest_verb_seconds": seconds}


class OursAll(Ours):
    """SavedTensors, with its defaults."""

    mode = "SavedTensors"


class OursWrapper(Ours):
    """Our offload_wrapper around each layer, in the place of torch's."""

    def attach(self, built: Built) -> None:
        self._modes = load("lightering.torch")
        own = None if self.device.type == "cuda" else self.engine()
        self._before = self.engine().stats()
        layers: Any = built.model.layers
        self._own = list(layers)
        for index, layer in enumerate(self._own):
            layers[index] = self._modes.offload_wrapper(layer, engine=own)

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def detach(self, built: Built) -> None:
        layers: Any = built.model.layers
        for index, layer in enumerate(self._own):
            layers[index] = layer
        self._own.clear()

    def says(self) -> dict[str, Any]:
        own = None if self.device.type == "cuda" else self.engine()
        return {"report": str(self._modes.report(own))}


WAYS: dict[str, type[Way]] = {
    "none": Way, "checkpoint": Way, "control": Control, "torch": TorchWrapper,
    "torch-all": TorchAll, "trl": Trl, "trl-all": Trl, "deepspeed": DeepSpeed, "ours": Ours,
    "ours-all": OursAll, "ours-wrapper": OursWrapper,
}


def load(name: str, member: str = "") -> Any:
    """Imports a module, or what it has of that name, or says why it cannot be."""
    package = name.partition(".")[0]
    try:
        module = importlib.import_module(name)
    except Exception as error:  # Whatever a foreign package does at import.
        raise Missing(f"{package} cannot be imported: {error!r}") from error
    if member and not hasattr(module, member):
        raise Missing(f"this {package} has no {name}.{member}")
    return getattr(module, member) if member else module


def versions() -> dict[str, str]:
    """Versions of what was imported."""
    names = ("torch", "transformers", "trl", "deepspeed", "lightering")
    found = {name: sys.modules.get(name) for name in names}
    return {name: getattr(module, "__version__", "?") for name, module in found.items() if module}
