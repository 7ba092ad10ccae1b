"""Compares gradients of a step run in several ways, bit for bit.

What it is: the settings under which torch repeats itself, the rule of the void baseline, and the
steps that training code takes.
Invariant: a comparison in which the baseline differs from itself is an error (``Void``), never a
pass; settings and random state are afterwards what they were.

    baseline --twice--> equal? --no--> Void
                          | yes
    each other way -----> equal? --no--> AssertionError naming losses and gradients

Who may call it: tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import models
import torch
from torch import nn

Around = Callable[[], AbstractContextManager[Any]]
Step = Callable[[nn.Module, Around], list[torch.Tensor]]


class Void(Exception):
    """The baseline differs from itself: nothing was compared."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a step: what is done to the model once, and the context around each forward."""

    name: str
    around: Around = nullcontext
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    moved: Callable[[], int] | None = None
    """Bytes that left so far, of a way in which some must."""


PLAIN = Way("plain")


@dataclasses.dataclass
class Outcome:
    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]


@contextlib.contextmanager
def deterministic(seed: int = 7) -> Iterator[None]:
    """torch's settings for equal bits, and a seed; all as before afterwards."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    workspace = os.environ.get(name)
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    os.environ[name] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if workspace is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = workspace


def same_bits(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    """Whether two tensors are of one type and shape and of equal bytes; not numbers are equal."""
    if one is None or two is None:
        return one is two
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    flat = [_local(each).reshape(-1).contiguous().view(torch.uint8) for each in (one, two)]
    return torch.equal(*flat)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of this rank, or the tensor itself."""
    return getattr(tensor.detach(), "_local_tensor", tensor.detach())


def run(make: Callable[[], nn.Module], step: Step, way: Way) -> Outcome:
    """Makes the model anew, prepares it, takes the step, and gives losses and gradients."""
    with deterministic():
        model = make()
        names = [name for name, _ in model.named_parameters()]
        prepared = way.prepare(model)
        losses = [loss.detach().clone() for loss in step(prepared, way.around)]
        # By the names of the model as it was made: wrappers add to them, and keep the order.
        gradients = {
            name: None if weight.grad is None else weight.grad.clone()
            for name, weight in zip(names, prepared.parameters(), strict=True)
        }
    return Outcome(losses, gradients)


def differences(one: Outcome, two: Outcome) -> list[str]:
    """What differs between two outcomes, in words; empty where they are of equal bits."""
    found = []
    if len(one.losses) != len(two.losses):
        found.append(f"{len(one.losses)} and {len(two.losses)} losses")
    for index, (mine, other) in enumerate(zip(one.losses, two.losses, strict=False)):
        if not same_bits(mine, other):
            found.append(f"loss {index}: {float(mine)!r} and {float(other)!r}")
    if one.gradients.keys() != two.gradients.keys():
        found.append(f"names: {sorted(one.gradients.keys() ^ two.gradients.keys())[:4]}")
    for name in one.gradients.keys() & two.gradients.keys():
        mine, other = one.gradients[name], two.gradients[name]
        if not same_bits(mine, other):
            away = "" if mine is None or other is None else (
                f", {int((_local(mine) != _local(other)).sum())} of {mine.numel()} values")
            found.append(f"gradient of {name}{away}")
    return found


def compare(
    make: Callable[[], nn.Module], step: Step, *ways: Way, baseline: Way = PLAIN
) -> Outcome:
    """Runs the step in the baseline twice, then in each way, and compares all bits.

    Raises:
        Void: the baseline differs from itself, or has nothing to compare, or a way that must move
            something moved nothing.
        AssertionError: a way differs from the baseline; says where.
    """
    wanted = run(make, step, baseline)
    again = differences(wanted, run(make, step, baseline))
    if again:
        raise Void(f"{baseline.name} differs from itself: {'; '.join(again[:4])}")
    moving = [each for each in wanted.gradients.values()
              if each is not None and _local(each).any()]
    if not moving or not wanted.losses:
        raise Void(f"{baseline.name} has no gradient that is not zero")
    for way in ways:
        before = way.moved() if way.moved else -1
        found = differences(wanted, run(make, step, way))
        assert not found, (
            f"{way.name} differs from {baseline.name} in {len(found)} places: "
            f"{'; '.join(found[:4])}")
        if way.moved and way.moved() <= before:
            raise Void(f"{way.name} moved nothing")
    return wanted


# ---- steps ----


def loss_of(model: nn.Module, seed: int = 0, **sizes: Any) -> torch.Tensor:
    device = next(model.parameters()).device
    return model(**models.batch(seed, device=device, **sizes)).loss


def one_step(model: nn.Module, around: Around) -> list[torch.Tensor]:
    with around():
        loss = loss_of(model)
        loss.backward()
    return [loss]


def micro_steps(model: nn.Module, around: Around) -> list[torch.Tensor]:
    """Gradients of four batches of three lengths add up."""
    losses = []
    for seed in range(4):
        with around():
            loss = loss_of(model, seed, tokens=(16, 24, 8)[seed % 3])
            loss.backward()
        losses.append(loss)
    return losses


def micro_steps_in_one_context(model: nn.Module, around: Around) -> list[torch.Tensor]:
    losses = []
    with around():
        for seed in range(3):
            loss = loss_of(model, seed)
            loss.backward()
            losses.append(loss)
    return losses


def two_backwards(model: nn.Module, around: Around) -> list[torch.Tensor]:
    """retain_graph: what was saved is read twice."""
    with around():
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
    return [loss]


def double_backward(model: nn.Module, around: Around) -> list[torch.Tensor]:
    """A penalty on gradients: the backward itself is differentiated."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    # Flash attention has no second derivative; the plain one has.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), around():
        loss = loss_of(model)
        # A backward goes through nodes by their numbers, which each thread counts for itself: of
        # those that a GPU's own thread made, and those of this one, the order, and so the rounding
        # of sums, changes with what either did before.
        with torch.autograd.set_multithreading_enabled(False):
            first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        penalty = sum(each.pow(2).sum() for each in first if each is not None)
        (loss + 0.1 * penalty).backward()
    return [loss, penalty]


def two_forwards(model: nn.Module, around: Around) -> list[torch.Tensor]:
    """Both graphs are alive at once, and the first one made is the first to go back."""
    with around():
        one = loss_of(model, 1)
        two = loss_of(model, 2, tokens=24)
        one.backward()
        two.backward()
    return [one, two]


def two_contexts_before_a_backward(model: nn.Module, around: Around) -> list[torch.Tensor]:
    with around():
        one = loss_of(model, 1)
    with around():
        two = loss_of(model, 2)
    (one + two).backward()
    return [one, two]


def backward_outside(model: nn.Module, around: Around) -> list[torch.Tensor]:
    with around():
        loss = loss_of(model)
    loss.backward()
    return [loss]


def evaluation_between(model: nn.Module, around: Around) -> list[torch.Tensor]:
    """Training, evaluation of another length under no_grad, training."""
    losses = []
    for seed in range(3):
        with around():
            loss = loss_of(model, seed)
            loss.backward()
        model.eval()
        with torch.no_grad(), around():
            losses += [loss, loss_of(model, 10 + seed, tokens=20)]
        model.train()
    return losses


STEPS: Mapping[str, Step] = {
    step.__name__: step
    for step in (one_step, micro_steps, micro_steps_in_one_context, two_backwards, double_backward,
                 two_forwards, two_contexts_before_a_backward, backward_outside,
                 evaluation_between)
}
