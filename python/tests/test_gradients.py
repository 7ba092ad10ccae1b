"""A gradient that is nearly right: the fault guarded against.

Every mode, on a dense decoder and a mixture of experts, in every order of forwards and backwards
that training code has: losses and gradients are those of the same run without offload, bit for bit.
"""

from __future__ import annotations

import threading

import harness
import models
import pytest
import rig as rigs
import torch
from harness import STEPS, Way, compare
from lightering.torch import checkpoint
from rig import rig  # noqa: F401


def ways(rig, how="positional", **options):  # noqa: F811
    """Both modes; hidden states move where a checkpoint has its input by position."""
    saved, hidden = rig.saved(**options), rig.hidden(**options)
    moved = rig.moved if how in ("positional", "reentrant") else None
    return (Way("SavedTensors", lambda: saved, moved=rig.moved),
            Way("HiddenStates", lambda: hidden, moved=moved))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", models.WAYS_TO_CHECKPOINT)
@pytest.mark.parametrize("make", [models.dense, models.moe])
def test_gradients_are_those_of_the_same_run_without_offload(rig, make, how, step):  # noqa: F811
    if step == "double_backward" and how == "reentrant":
        pytest.skip("not run: torch refuses a double backward of reentrant checkpointing")
    # torch keeps the random state of those GPUs alone that positional tensors are on: a recompute
    # of keywords drops other values, and then a router sends tokens elsewhere.
    options = {"dropout": 0.0} if how == "keyword" and rig.kind == "cuda" else {}
    compare(lambda: make(rig.device, checkpoint=how, **options), STEPS[step], *ways(rig, how))


@pytest.mark.parametrize("step", ["micro_steps", "two_backwards", "backward_outside"])
@pytest.mark.parametrize("make", [models.dense, models.moe])
def test_bf16_has_the_same_bits(rig, make, step):  # noqa: F811
    for how in ("none", "positional"):
        model = lambda how=how: make(rig.device, checkpoint=how, dtype=torch.bfloat16)  # noqa: E731
        compare(model, STEPS[step], *ways(rig, how))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [models.qwen3, models.qwen3_moe])
def test_models_of_transformers_have_the_same_bits(rig, make, dtype):  # noqa: F811
    pytest.importorskip("transformers")
    compare(lambda: make(rig.device, dtype=dtype), STEPS["micro_steps"], *ways(rig))


@pytest.mark.parametrize("step", STEPS)
def test_no_order_of_copies_changes_a_bit(step):
    for seed in range(4):
        seeded = rigs.make("sim", seed=seed, unreleased_bytes="2KiB", prefetch_bytes="4KiB")
        for how in ("none", "positional"):
            compare(lambda how=how: models.dense(checkpoint=how), STEPS[step],
                    *ways(seeded, how))
        seeded.assert_nothing_left()


def test_an_input_that_is_packed_and_unpacked_on_other_threads_is_the_same(rig):  # noqa: F811
    def step(model, around):
        losses = []

        def forward():
            with around():
                losses.append(harness.loss_of(model))

        for target in (forward, lambda: losses[0].backward()):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        return losses

    for how in ("none", "positional"):
        compare(lambda how=how: models.moe(rig.device, checkpoint=how), step,
                *ways(rig, how))


@pytest.mark.parametrize("reentrant", [False, True])
def test_single_calls_have_the_same_bits(rig, reentrant):  # noqa: F811
    def layers(run):
        def step(model, around):
            hidden = torch.linspace(-1, 1, 64 * 32, device=rig.device).view(64, 32)
            hidden = hidden.requires_grad_()
            mask = torch.ones(32, device=rig.device)
            out = hidden * 2
            for layer in model:
                out = run(lambda x, m, layer=layer: torch.tanh(layer(x)) * m, out, mask)
            loss = out.square().mean()
            loss.backward()
            return [loss, hidden.grad]

        return step

    def make():
        return models.seeded(
            lambda: torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))), rig.device)

    def plainly(function, *args):
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=reentrant)

    def moved(function, *args):
        return checkpoint(function, *args, use_reentrant=reentrant, engine=rig.engine)

    wanted = compare(make, layers(plainly))
    found = harness.run(make, layers(moved), harness.PLAIN)
    assert not harness.differences(wanted, found)
    assert rig.engine.stats()["evicted_bytes"] >= 3 * 64 * 32 * 4
