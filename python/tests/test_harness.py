"""A comparison that cannot fail passes for a proof: the fault guarded against.

The harness itself is tried: with gradients that are wrong by one bit, with a baseline that does
not repeat itself, with torch's own save_on_cpu as a way that must pass.
"""

from __future__ import annotations

import os

import harness
import models
import pytest
import torch
from harness import PLAIN, STEPS, Void, Way, compare
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

ON_CPU = Way("save_on_cpu", save_on_cpu)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("make, how", [
    *((models.moe, how) for how in models.WAYS_TO_CHECKPOINT),
    (models.dense, "none"),
    (models.dense, "positional"),
])
def test_every_step_runs_and_repeats_itself(make, how, step):
    if step == "double_backward" and how == "reentrant":
        with pytest.raises(RuntimeError, match=r"\.grad\(\)|Checkpointing is not compatible"):
            compare(lambda: make(checkpoint=how), STEPS[step])
        return
    compare(lambda: make(checkpoint=how), STEPS[step], ON_CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [models.qwen3, models.qwen3_moe])
def test_models_of_transformers_run_and_repeat_themselves(make, dtype):
    pytest.importorskip("transformers")
    compare(lambda: make(dtype=dtype), STEPS["micro_steps"], ON_CPU)


def test_checkpointing_changes_no_gradient():
    wanted = compare(lambda: models.moe(checkpoint="none"), STEPS["one_step"])
    for how in models.WAYS_TO_CHECKPOINT[1:]:
        found = compare(lambda how=how: models.moe(checkpoint=how), STEPS["one_step"])
        assert not harness.differences(wanted, found)


def test_routers_have_gradients_of_their_own_loss():
    for make in (models.moe, models.qwen3_moe):
        outcome = compare(make, STEPS["one_step"])
        routers = [each for name, each in outcome.gradients.items()
                   if "router" in name or ("gate.weight" in name and each.shape[0] == 4)]
        assert routers and all(each.any() for each in routers)


def test_one_wrong_bit_is_found():
    def wrong(tensor):
        if tensor.dtype is torch.float32 and tensor.numel() > 100:
            tensor = tensor.contiguous().clone()
            tensor.view(-1).view(torch.int32)[0] ^= 1
        return tensor

    hooks = Way("wrong", lambda: saved_tensors_hooks(wrong, lambda tensor: tensor))
    with pytest.raises(AssertionError, match="wrong differs from plain in"):
        compare(lambda: models.dense(checkpoint="none"), STEPS["one_step"], hooks)


def test_a_lost_gradient_and_a_lost_loss_are_found():
    def freeze(model):
        model.head.requires_grad_(False)
        return model

    with pytest.raises(AssertionError, match=r"gradient of head\.weight"):
        compare(models.dense, STEPS["one_step"], Way("frozen", prepare=freeze))
    one = harness.run(models.dense, STEPS["micro_steps"], PLAIN)
    two = harness.run(models.dense, STEPS["one_step"], PLAIN)
    assert "4 and 1 losses" in harness.differences(one, two)


def test_a_baseline_that_does_not_repeat_itself_is_void():
    turns = iter(range(100))

    def shifting():
        model = models.dense()
        with torch.no_grad():
            model.head.weight.add_(next(turns))
        return model

    with pytest.raises(Void, match="differs from itself"):
        compare(shifting, STEPS["one_step"])


def test_a_baseline_without_gradients_is_void():
    with pytest.raises(Void, match="no gradient"):
        compare(models.dense, lambda model, around: [harness.loss_of(model)])


def test_settings_and_random_numbers_are_as_before(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), harness.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        torch.rand(3)
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.equal(state, torch.get_rng_state())


def test_bits_are_compared_and_not_numbers():
    zero = torch.zeros(2)
    assert not harness.same_bits(zero, -zero)
    assert harness.same_bits(zero / zero, zero / zero)
    assert not harness.same_bits(zero, zero.double()) and not harness.same_bits(zero, None)
