"""Checkpoints inside of what is compiled, and edits that nobody can notice: the fault guarded
against is a gradient that differs, or a mode that does nothing and does not say so.

Checkpoints around compiled layers, and whole models of transformers, are tried in test_tells.py.
"""

from __future__ import annotations

import warnings

import lightering.torch
import pytest
import torch
from lightering.torch import _warn, offload_wrapper
from rig import rig  # noqa: F401
from saving import leaf, save
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    monkeypatch.setattr(_warn, "_told", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layers(torch.nn.Module):
    """Layers whose own forward checkpoints them: all of it is compiled."""

    def __init__(self, checkpoint) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        self.checkpoint = checkpoint

    def forward(self, x):
        for layer in self.layers:
            x = self.checkpoint(lambda y, layer=layer: torch.tanh(layer(y)) * y, x)
        return x.square().mean()


def by_torch(function, x):
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)


def gradients(rig, model, context=None):  # noqa: F811
    model.zero_grad()
    torch.manual_seed(5)
    x = torch.randn(16, 32, device=rig.device) * 1
    if context is None:
        model(x).backward()
    else:
        with context:
            model(x).backward()
    return [weight.grad.clone() for weight in model.parameters()]


def equal(one, two) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(one, two, strict=True))


def compiled(rig, checkpoint):  # noqa: F811
    model = torch.compile(Layers(checkpoint).to(rig.device), backend="aot_eager", fullgraph=True)
    wanted = gradients(rig, model)
    assert equal(wanted, gradients(rig, model)), "void"
    return model, wanted


def test_a_checkpoint_inside_of_a_compiled_region_shows_hidden_states_nothing(rig):  # noqa: F811
    model, wanted = compiled(rig, by_torch)
    context = rig.hidden()
    with pytest.warns(UserWarning, match="moved nothing: no checkpoint saved a floating") as told:
        for _ in range(2):
            assert equal(wanted, gradients(rig, model, context))
    assert len([each for each in told if "lightering" in str(each.message)]) == 1
    assert context.report().offered == 0


def test_what_a_compiled_checkpoint_keeps_is_moved_by_saved_tensors(rig):  # noqa: F811
    model, wanted = compiled(rig, by_torch)
    context = rig.saved(min_bytes=1024)
    for _ in range(2):
        assert equal(wanted, gradients(rig, model, context))
    # The inputs of three layers; that of the first is what the caller holds.
    assert context.report().moved >= 3 * 16 * 32 * 4


def test_our_checkpoint_inside_of_a_compiled_region_is_torchs(rig):  # noqa: F811
    def ours(function, x):
        return lightering.torch.checkpoint(function, x, engine=rig.engine)

    model, wanted = compiled(rig, by_torch)
    torch._dynamo.reset()
    model = torch.compile(Layers(ours).to(rig.device), backend="aot_eager")
    before = lightering.torch.report(rig.engine).moved
    assert equal(wanted, gradients(rig, model))
    assert lightering.torch.report(rig.engine).moved == before


def test_an_edit_through_data_raises_nowhere_and_what_was_copied_comes_back(rig):  # noqa: F811
    old, new = (torch.full((256,), value, device=rig.device) for value in (2.0, 5.0))

    def seen_by_backward(context) -> torch.Tensor:
        x, seen, saved = leaf(rig.device), [], old.clone()
        if context is None:
            out = save(x, [saved], seen)
        else:
            with context, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = save(x, [saved], seen)
                out = save(out, [torch.zeros(64, device=rig.device)], [])
                rig.engine.drain()
            rig.desk.flush()
        saved.data.copy_(new)
        out.sum().backward()
        return seen[0][0].clone()

    assert torch.equal(seen_by_backward(None), new), "autograd itself does not notice"
    assert torch.equal(seen_by_backward(rig.saved()), old), "copied before the edit"
    # Its bytes were still there, and nothing was fetched: as without offload.
    kept = rig.saved(min_bytes=1 << 20)
    assert torch.equal(seen_by_backward(kept), new)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_wrapped_module_that_is_compiled_runs_as_without_and_says_so(
    rig, fullgraph, monkeypatch  # noqa: F811
):
    """It broke the graph, which ``fullgraph`` forbids, moved nothing, and said nothing."""
    monkeypatch.setattr(_warn, "_told", set())

    def gradient(wrap):
        torch.manual_seed(0)
        torch._dynamo.reset()
        layers = [wrap(checkpoint_wrapper(torch.nn.Linear(64, 64))).to(rig.device)
                  for _ in range(3)]
        layers = [torch.compile(each, backend="eager", fullgraph=fullgraph) for each in layers]
        x = value = torch.ones(8, 64, device=rig.device, requires_grad=True)
        for layer in layers:
            value = layer(value).sin()
        value.sum().backward()
        return x.grad

    wanted = gradient(lambda layer: layer)
    with pytest.warns(UserWarning, match="offload_wrapper moves nothing of what is compiled"):
        found = gradient(lambda layer: offload_wrapper(layer, engine=rig.engine))
    assert torch.equal(found, wanted)
