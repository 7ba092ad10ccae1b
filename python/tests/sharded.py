"""Training under FSDP2 on the ranks of a gloo group, or of NCCL where each rank has a GPU.

What it is: a small model, checkpointed, wrapped by a mode, and sharded; a loop that trains it,
saves it, loads it, and resumes.
Invariant: functions of this file run on every rank alike, and take and give what pickles, so that
``run_ranks`` can call them from a test.

    Mode.wrap: layer -> checkpoint_wrapper -> mode's own wrapper -> fully_shard
    Mode.around: the context of each step

Who may call it: tests. A mode is given by a function at the top level of a test module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import harness
import models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclasses.dataclass(frozen=True)
class Mode:
    """What offloads: a wrapper of checkpointed layers, a context around each step, or both."""

    wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer
    around: harness.Around = nullcontext
    checkpoint: bool = True
    """Whether the layers are checkpointed besides."""


def plain() -> Mode:
    return Mode()


def not_checkpointed() -> Mode:
    return Mode(checkpoint=False)


def of_torch() -> Mode:
    """torch's own, which copies on the compute stream: right, and slow."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

    return Mode(wrap=offload_wrapper)


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else (
        torch.device("cpu"))


def make(kind: str = "dense") -> nn.Module:
    """The model of every rank before it is sharded; calls its layers plainly."""
    return models.MAKERS[kind](device=str(device()), checkpoint="none")


def shard(model: nn.Module, mode: Mode, low: bool = True, reshard: bool = True) -> nn.Module:
    """Checkpoints and wraps each layer as the mode says, then shards layers and root.

    Args:
        low: compute in bf16 and reduce in fp32, weights in fp32.
        reshard: give gathered weights back after each forward.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    for index, layer in enumerate(model.layers):
        wrapped = checkpoint_wrapper(layer, preserve_rng_state=True) if mode.checkpoint else layer
        model.layers[index] = mode.wrap(wrapped)
        fully_shard(model.layers[index], mp_policy=policy, reshard_after_forward=reshard)
    return fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)


def loss_of(model: nn.Module, seed: int, **sizes: Any) -> torch.Tensor:
    """Each rank has a batch of its own."""
    return model(**models.batch(seed * 10 + dist.get_rank(), device=device(), **sizes)).loss


def accumulate(model: nn.Module, around: harness.Around) -> list[torch.Tensor]:
    """Two micro-steps of which the first reduces no gradients."""
    losses = []
    for seed in range(2):
        model.set_requires_gradient_sync(seed == 1)
        with around():
            loss = loss_of(model, seed, tokens=(16, 24)[seed])
            loss.backward()
        losses.append(loss)
    return losses


def gradients_are_equal(
    rank: int, world: int, mode: Callable[[], Mode], kind: str, reshard: bool
) -> int:
    """Compares this rank's shards with those of the same run without offload; how many."""
    ours = mode()
    base = plain() if ours.checkpoint else not_checkpointed()

    def way(name: str, of: Mode) -> harness.Way:
        return harness.Way(name, of.around, lambda model: shard(model, of, reshard=reshard))

    wanted = harness.compare(
        lambda: make(kind), accumulate, way(mode.__name__, ours), baseline=way("plain", base))
    return len(wanted.gradients)


def whole_check(
    rank: int, world: int, mode: Callable[[], Mode], other: Callable[[], Mode], folder: str
) -> dict[str, Any]:
    """All that is asked of a mode, on one group of ranks; ``other`` resumes what ``mode`` saved."""
    before, after = state_keys(rank, world, mode)
    return {
        "dense": gradients_are_equal(rank, world, mode, "dense", True),
        "moe": gradients_are_equal(rank, world, mode, "moe", False),
        "keys": (before, after),
        "resumed": resume_is_exact(rank, world, mode, other, folder),
    }


def state_keys(rank: int, world: int, mode: Callable[[], Mode]) -> tuple[list[str], list[str]]:
    """Keys of the model's state before it is wrapped, and after."""
    model = make()
    before = list(model.state_dict())
    return before, list(shard(model, mode()).state_dict())


def _train(model: nn.Module, optimizer: Any, mode: Mode, steps: range) -> None:
    for step in steps:
        # Dropout's numbers are of the step, so that a resumed run draws the same.
        torch.manual_seed(1000 * step + dist.get_rank())
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            with mode.around():
                loss_of(model, 2 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _sharded(mode: Mode) -> tuple[nn.Module, Any]:
    model = shard(make(), mode)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def resume_is_exact(
    rank: int, world: int, save_as: Callable[[], Mode], load_as: Callable[[], Mode], folder: str
) -> list[str]:
    """Trains two steps, saves, trains two more; loads into a fresh model and trains those again.

    Returns the names of weights that differ: none, if it resumes bit for bit.
    """
    path = Path(folder) / "saved"
    with harness.deterministic():
        model, optimizer = _sharded(save_as())
        _train(model, optimizer, save_as(), range(2))
        dcp.save(_state(model, optimizer), checkpoint_id=path)
        _train(model, optimizer, save_as(), range(2, 4))
        again, optimizer_again = _sharded(load_as())
        torch.manual_seed(99)
        with torch.no_grad():
            for weight in again.parameters():
                # What is not loaded shall not be equal by its seed.
                weight.uniform_(-9, 9)
        state = _state(again, optimizer_again)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(again, optimizer_again, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        _train(again, optimizer_again, load_as(), range(2, 4))
    # Wrappers add to names, and keep the order.
    pairs = zip(model.named_parameters(), again.parameters(), strict=True)
    return [name for (name, one), two in pairs if not harness.same_bits(one, two)]
