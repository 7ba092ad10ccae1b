"""A swap of one import that changes more than where bytes are: the fault guarded against.

``offload_wrapper`` and ``checkpoint`` take torch's calls, and leave names, keys and masks alone.
"""

from __future__ import annotations

import functools
import pickle
import warnings

import harness
import lightering
import models
import pytest
import torch
from lightering.torch import _wrapper, checkpoint, offload_wrapper, report
from lightering.torch._wrapper import respecting
from rig import rig  # noqa: F401
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    offload_wrapper as of_torch,
)


def wrap_layers(model, wrap):
    for index, layer in enumerate(model.layers):
        model.layers[index] = wrap(layer)
    return model


@pytest.mark.parametrize("make", [models.dense, models.moe])
@pytest.mark.parametrize("step", ["one_step", "micro_steps", "two_backwards", "two_forwards"])
@pytest.mark.parametrize("impl", list(CheckpointImpl))
def test_a_wrapped_model_has_the_same_bits(rig, make, step, impl):  # noqa: F811
    def plainly(model):
        return wrap_layers(model, lambda layer: checkpoint_wrapper(layer, impl))

    def moved(model):
        return wrap_layers(model, lambda layer: offload_wrapper(
            checkpoint_wrapper(layer, impl), engine=rig.engine))

    harness.compare(
        lambda: make(rig.device, checkpoint="none", layers=4), harness.STEPS[step],
        harness.Way("offload_wrapper", prepare=moved),
        baseline=harness.Way("checkpoint_wrapper", prepare=plainly))
    found = report(rig.engine)
    assert found.moved > 0 and found.released > 0, found


def test_keys_and_names_are_those_of_the_model_and_load_both_ways(rig):  # noqa: F811
    plain = models.dense(rig.device)
    wrapped = wrap_layers(models.dense(rig.device), lambda layer: offload_wrapper(
        checkpoint_wrapper(layer), engine=rig.engine))
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    names = [name for name, _ in plain.layers[0].named_parameters()]
    assert [name for name, _ in wrapped.layers[0].named_parameters()] == names
    with torch.no_grad():
        for weight in plain.parameters():
            weight.add_(1)
    assert not any(wrapped.load_state_dict(plain.state_dict()))
    assert not any(plain.load_state_dict(wrapped.state_dict()))
    theirs = of_torch(checkpoint_wrapper(models.dense(rig.device).layers[0]))
    assert list(theirs.state_dict()) == list(wrapped.layers[0].state_dict())


class Layer(nn.Module):
    """One that is called by keyword."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden_states, mask=None, rope=None):
        return torch.tanh(self.linear(hidden_states)) * mask + rope


def call_layers(layers, device, **named):
    x = torch.linspace(-1, 1, 64 * 32, device=device).view(64, 32).requires_grad_()
    mask, rope = torch.ones(64, 32, device=device), torch.full((64, 32), 0.1, device=device)
    hidden = x * 2
    for layer in layers:
        if named:
            hidden = layer(hidden_states=hidden, mask=mask, rope=rope)
        else:
            hidden = layer(hidden, mask, rope)
    loss = hidden.square().mean()
    return loss, x, (mask, rope)


@pytest.mark.parametrize("named", [{}, {"by": "keyword"}])
def test_hidden_states_move_and_masks_stay_however_they_are_passed(rig, named):  # noqa: F811
    torch.manual_seed(0)
    layers = [Layer().to(rig.device) for _ in range(5)]
    loss, x, _ = call_layers([checkpoint_wrapper(each) for each in layers], rig.device, **named)
    (wanted,) = torch.autograd.grad(loss, x)
    wrapped = [offload_wrapper(checkpoint_wrapper(each), engine=rig.engine) for each in layers]
    loss, x, shared = call_layers(wrapped, rig.device, **named)
    rig.desk.flush()
    found = report(rig.engine)
    assert (found.moved, found.kept) == (4 * 64 * 32 * 4, {"among the last": 64 * 32 * 4}), found
    assert found.released == found.moved, "keywords are rebound, so nobody else holds them"
    assert all(each.untyped_storage().nbytes() for each in shared)
    (gradient,) = torch.autograd.grad(loss, x)
    assert harness.same_bits(wanted, gradient)


def test_hidden_states_that_a_single_call_is_given_by_keyword_move_too(rig):  # noqa: F811
    def layer(mask, hidden_states):
        return torch.tanh(hidden_states) * mask

    def run(call):
        x = torch.linspace(-1, 1, 64 * 32, device=rig.device).view(64, 32).requires_grad_()
        mask, hidden = torch.full((64, 32), 0.5, device=rig.device), x * 2
        for _ in range(5):
            hidden = call(layer, hidden_states=hidden, mask=mask)
        rig.desk.flush()
        moved = report(rig.engine).moved
        return moved, torch.autograd.grad(hidden.square().mean(), x)[0]

    _, wanted = run(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
    moved, found = run(functools.partial(checkpoint, engine=rig.engine))
    assert moved == 4 * 64 * 32 * 4 and harness.same_bits(wanted, found)


def test_what_a_recompute_saves_stays_since_its_reader_comes_next(rig):  # noqa: F811
    inner = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    x = torch.ones(64, 32, device=rig.device, requires_grad=True)
    with rig.hidden(keep_last=0) as context:
        out = x * 2
        for _ in range(3):
            out = inner(lambda hidden: inner(torch.sin, inner(torch.cos, hidden)), out)
        out.sum().backward()
    report = context.report()
    assert report.moved == 3 * 64 * 32 * 4, report
    assert report.kept == {"saved in a backward pass": 6 * 64 * 32 * 4}, report


def test_hidden_states_that_a_context_sees_by_keyword_move_too(rig):  # noqa: F811
    layers = pytest.importorskip("transformers.modeling_layers")

    class Keyworded(layers.GradientCheckpointingLayer):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, hidden_states, mask=None, rope=None):
            return torch.tanh(self.linear(hidden_states)) * mask + rope

    made = [Keyworded().to(rig.device).train() for _ in range(5)]
    for each in made:
        each.gradient_checkpointing = True
        each._gradient_checkpointing_func = functools.partial(
            torch.utils.checkpoint.checkpoint, use_reentrant=False)
    loss, x, _ = call_layers(made, rig.device, by="keyword")
    (wanted,) = torch.autograd.grad(loss, x)
    with rig.hidden() as context:
        loss, x, _ = call_layers(made, rig.device, by="keyword")
        assert context.report().moved == 4 * 64 * 32 * 4
        (gradient,) = torch.autograd.grad(loss, x)
    assert harness.same_bits(wanted, gradient)


@pytest.mark.parametrize("how", ["checkpoint", "offload_wrapper"])
def test_a_context_around_a_call_that_names_no_engine_moves_its_input(rig, how):  # noqa: F811
    """They took the shared engine, which CPU tensors have none of, and moved nothing."""
    linears = [nn.Linear(32, 32).to(rig.device) for _ in range(4)]

    def run(call):
        x = torch.ones(64, 32, device=rig.device, requires_grad=True)
        value = x * 1
        for each in linears:
            value = call(each, value)
        return torch.autograd.grad(value.square().sum(), x)[0]

    def moved(each, value):
        if how == "checkpoint":
            return checkpoint(torch.tanh, each(value))
        return offload_wrapper(checkpoint_wrapper(nn.Sequential(each, nn.Tanh())))(value)

    wanted = run(lambda each, value: torch.tanh(each(value)))
    with rig.hidden() as context:
        gradient = run(moved)
        found = context.report()
    assert found.moved == 3 * 64 * 32 * 4, found
    assert harness.same_bits(wanted, gradient)
    rig.assert_nothing_left()


def test_an_input_is_not_emptied_before_the_forward_that_uses_it(rig):  # noqa: F811
    seen = []

    def layer(hidden):
        rig.desk.flush()
        rig.engine.drain()
        rig.desk.sweep()
        seen.append(hidden.clone())
        return torch.sin(hidden)

    hidden = torch.full((64,), 0.5, device=rig.device, requires_grad=True) * 1
    wanted = []
    for _ in range(4):
        wanted.append(hidden.detach().clone())
        hidden = checkpoint(layer, hidden, engine=rig.engine)
    hidden.sum().backward()
    del hidden
    assert all(torch.equal(one, two) for one, two in zip(seen[:4], wanted, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(seen[4:], wanted[::-1], strict=True)), (
        "the recompute is given what the forward was given")


def test_logits_of_routers_outside_of_the_checkpoint_are_untouched(rig):  # noqa: F811
    model = models.moe(rig.device, layers=4)
    batch = models.batch(device=rig.device)
    wanted = model.eval()(**batch).router_logits
    with rig.hidden(keep_last=0) as context:
        found = model(**batch).router_logits
        rig.desk.flush()
        assert context.report().kept == {}
        assert all(each.untyped_storage().nbytes() for each in found)
    assert all(harness.same_bits(one, two) for one, two in zip(wanted, found, strict=True))


def test_an_input_that_stays_begins_no_step_of_its_own(rig):  # noqa: F811
    layers = [nn.Linear(64, 64, device=rig.device) for _ in range(6)]
    batch = torch.randn(32, 64, device=rig.device, requires_grad=True)
    for step in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hidden = batch
            for layer in layers:
                hidden = checkpoint(layer, hidden, engine=rig.engine)
            # The batch outlives its graph: it stays from the second step on, and is counted.
            found = report(rig.engine)
            assert found.offered == 6 * batch.nbytes, f"step {step}: {found}"
            hidden.sum().backward()
            del hidden


@pytest.mark.parametrize("call", [
    lambda engine: offload_wrapper(nn.Linear(2, 2), engine=engine),
    lambda engine: checkpoint(nn.Linear(2, 2), torch.ones(2), engine=engine),
    report,
])
def test_an_engine_that_is_none_is_refused_by_its_name(call):
    with pytest.raises(TypeError, match="engine='sim'"):
        call("sim")


def test_bad_combinations_are_refused_when_they_are_made(rig):  # noqa: F811
    with pytest.raises(TypeError, match="module=.*torch.nn.Module"):
        offload_wrapper(torch.sin)
    with pytest.raises(ValueError, match="keep_last"):
        rig.hidden(keep_last=-1)
    with pytest.raises(TypeError, match="keep_last"):
        rig.hidden(keep_last=True)


def test_fsdp1_is_refused_when_it_is_wrapped(monkeypatch):
    import torch.distributed.fsdp as fsdp

    class Old(nn.Module):
        """Stands for FSDP1, which torch does not make on CPU."""

    monkeypatch.setattr(fsdp, "FullyShardedDataParallel", Old)
    for each in (Old(), nn.Sequential(nn.Linear(4, 4), Old())):
        with pytest.raises(ValueError, match="FSDP1"):
            offload_wrapper(each)


def test_a_wrapped_module_that_nothing_checkpoints_is_refused_when_it_trains(rig):  # noqa: F811
    model = offload_wrapper(nn.Linear(64, 64).to(rig.device), engine=rig.engine)
    x = torch.ones(64, 64, device=rig.device)
    with pytest.raises(lightering.Usage, match="not checkpointed"):
        model(x)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


def test_wrappers_in_the_other_order_have_the_same_bits(rig):  # noqa: F811
    def plainly(model):
        return wrap_layers(model, checkpoint_wrapper)

    def moved(model):
        return wrap_layers(model, lambda layer: checkpoint_wrapper(
            offload_wrapper(layer, engine=rig.engine)))

    harness.compare(
        lambda: models.moe(rig.device, checkpoint="none", layers=4), harness.micro_steps,
        harness.Way("the other order", prepare=moved),
        baseline=harness.Way("checkpoint_wrapper", prepare=plainly))
    found = report(rig.engine)
    assert found.moved > 0 and found.released > 0, found
    # What the layers save inside is still the checkpoint's to drop: inputs alone are kept.
    model, loss = moved(models.moe(rig.device, checkpoint="none", layers=4)), None
    loss = harness.loss_of(model)
    assert report(rig.engine).offered == 4 * 2 * 16 * 32 * 4
    loss.backward()


def test_hooks_of_others_that_are_no_functions_are_passed_over(rig):  # noqa: F811
    layer = offload_wrapper(checkpoint_wrapper(nn.Linear(32, 32).to(rig.device)),
                            engine=rig.engine)
    x = torch.ones(64, 32, device=rig.device, requires_grad=True)
    same = functools.partial(lambda tensor: tensor)
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        out = checkpoint(torch.sin, layer(x * 2), engine=rig.engine)
    out.sum().backward()
    assert x.grad is not None and rig.engine.stats()["evicted_count"] >= 1


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_checkpoints_within_checkpoints_have_the_same_bits(rig, outer, inner):  # noqa: F811
    def step(run_outer, run_inner):
        def steps(model, _):
            x = torch.linspace(-1, 1, 64 * 32, device=rig.device).view(64, 32).requires_grad_()

            def block(hidden, first):
                for layer in model[first:first + 2]:
                    hidden = run_inner(lambda h, layer=layer: torch.tanh(layer(h)), hidden)
                return hidden

            hidden = x * 2
            for first in (0, 2, 4):
                hidden = run_outer(block, hidden, first)
            loss = hidden.square().mean()
            loss.backward()
            return [loss, x.grad]

        return steps

    def make():
        return models.seeded(lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))),
                             rig.device)

    plain = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    moved = functools.partial(checkpoint, engine=rig.engine)
    wanted = harness.compare(make, step(plain, plain))
    found = harness.run(
        make, step(moved if outer else plain, moved if inner else plain), harness.PLAIN)
    assert not harness.differences(wanted, found)


def test_the_word_of_a_later_torch_is_said_where_it_is_known():
    def later(function, *args, use_reentrant=None, respect_saved_tensors_hooks=False, **kwargs):
        return None

    def earlier(function, *args, use_reentrant=None, **kwargs):
        return None

    assert respecting(later) == {"respect_saved_tensors_hooks": True}
    assert respecting(functools.wraps(later)(lambda *args: None)) == respecting(later)
    assert respecting(earlier) == {}


def test_a_checkpoint_of_a_later_torch_is_told_the_word(monkeypatch):
    """And one that its caller tells otherwise is told that. Reentrant ones do not know it."""
    told = []

    def later(function, *args, use_reentrant=None, respect_saved_tensors_hooks=False, **kwargs):
        told.append(respect_saved_tensors_hooks)
        return function(*args, **kwargs)

    monkeypatch.setattr(_wrapper.torch_checkpoint, "checkpoint", later)
    monkeypatch.setattr(_wrapper, "_RESPECTING", respecting(later))
    x = torch.ones(4, requires_grad=True)
    checkpoint(torch.sin, x)
    checkpoint(torch.sin, x, respect_saved_tensors_hooks=False)
    checkpoint(torch.sin, x, use_reentrant=True)
    with torch.no_grad():
        checkpoint(torch.sin, x)
    assert told == [True, False, False, True]


def test_a_module_of_the_shared_engine_is_pickled_in_a_child_of_a_fork(monkeypatch):
    """It was told to have an engine of its own: a child forgets its parent's shared modes."""
    module = offload_wrapper(checkpoint_wrapper(torch.nn.Linear(4, 4)))
    monkeypatch.setattr(_wrapper, "_shared_default", [])
    again = pickle.loads(pickle.dumps(module))
    assert list(again.state_dict()) == list(module.state_dict())
