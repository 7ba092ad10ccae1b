"""A mode that does nothing, and says nothing: the fault guarded against. And one that is wrong
where graphs are compiled or captured.
"""

from __future__ import annotations

import functools
import shutil
import warnings

import harness
import lightering.torch._warn as warn_module
import models
import pytest
import rig as rigs
import torch
from lightering.torch import checkpoint, offload_wrapper
from rig import rig  # noqa: F401
from saving import leaf, save
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr(warn_module, "_told", set())


def test_a_mode_that_moved_nothing_says_why_once(rig):  # noqa: F811
    with pytest.warns(UserWarning, match="moved nothing: all .* most of them: too small") as told:
        for _ in range(3):
            with rig.saved(min_bytes="1GiB"):
                (leaf(rig.device) * 2).sin().sum().backward()
    assert len([each for each in told if "lightering" in str(each.message)]) == 1


def test_what_one_engine_has_no_room_for_is_told_with_its_bound_and_the_size():
    """Advice to reserve more was given where the engine's own bound refused the first tensor."""
    small = rigs.make("sim", pinned_bytes="64KiB")
    with pytest.warns(UserWarning, match="no pinned room") as told, small.saved():
        save(leaf("cpu"), [torch.ones(1 << 20)], []).sum().backward()
    (text,) = told_of_us(told)
    said = f"the largest tensor has {4 << 20} bytes, and `pinned_bytes` of the engine are 65536)"
    assert text.endswith(said), text
    small.assert_nothing_left()


def test_a_mode_that_freed_nothing_says_so_once(rig):  # noqa: F811
    kept = torch.randn(512, device=rig.device)
    with pytest.warns(UserWarning, match="freed nothing: all 2048 bytes") as told:
        for _ in range(3):
            with rig.saved():
                save(leaf(rig.device), [kept], []).sum().backward()
    texts = [str(each.message) for each in told]
    assert len([text for text in texts if "freed nothing" in text]) == 1, texts


def test_a_mode_of_checkpoints_without_one_says_so_once(rig):  # noqa: F811
    with pytest.warns(UserWarning, match="moved nothing: no checkpoint saved a floating") as told:
        for _ in range(3):
            with rig.hidden():
                harness.loss_of(models.dense(rig.device, checkpoint="none")).backward()
    assert len([each for each in told if "lightering" in str(each.message)]) == 1


def test_a_mode_whose_checkpoints_hide_their_inputs_says_so(rig):  # noqa: F811
    x = torch.ones(64, device=rig.device, requires_grad=True)
    with pytest.warns(UserWarning, match="no checkpoint saved a floating"), rig.hidden():
        out = torch.utils.checkpoint.checkpoint(lambda: torch.sin(x), use_reentrant=False)
        out.sum().backward()


class Named(torch.nn.Module):
    """A layer whose input is called ``x``; it adds a bias that may come beside it."""

    def __init__(self, device):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32, device=device)

    def forward(self, x, bias=None):
        out = torch.tanh(self.linear(x))
        return out if bias is None else (out + bias, bias)


BY_KEYWORD = {
    "checkpoint": lambda layer, engine: functools.partial(checkpoint, layer, engine=engine),
    "offload_wrapper": lambda layer, engine: offload_wrapper(
        checkpoint_wrapper(layer), engine=engine),
    "the other order": lambda layer, engine: checkpoint_wrapper(
        offload_wrapper(layer, engine=engine)),
}


def told_of_us(told):
    return [str(each.message) for each in told if "lightering" in str(each.message)]


@pytest.mark.parametrize("how", list(BY_KEYWORD))
def test_a_call_whose_input_comes_by_a_keyword_says_so_once(rig, how):  # noqa: F811
    """It offered nothing, for ever, in silence."""
    layers = [BY_KEYWORD[how](Named(rig.device), rig.engine) for _ in range(2)]
    with pytest.warns(UserWarning, match="came by a keyword; pass the layer its input") as told:
        for _ in range(3):
            hidden = torch.ones(64, 32, device=rig.device)
            for layer in layers:
                hidden, _ = layer(x=hidden, bias=torch.ones(32, device=rig.device))
            hidden.sum().backward()
    assert len(told_of_us(told)) == 1 and told[0].filename == __file__, told_of_us(told)
    assert rig.engine.stats()["evicted_count"] == 0


@pytest.mark.parametrize("how", list(BY_KEYWORD))
def test_a_call_that_moves_or_trains_nothing_is_not_told_of_keywords(rig, how):  # noqa: F811
    layer, bias = Named(rig.device), torch.ones(32, device=rig.device)
    run, x = BY_KEYWORD[how](layer, rig.engine), torch.ones(64, 32, device=rig.device)
    embedding = torch.nn.Embedding(8, 32, device=rig.device)
    of_words = BY_KEYWORD[how](embedding, rig.engine)
    words = torch.tensor([1, 2], device=rig.device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x, bias=bias)[0].sum().backward()
        (of_words(input=words).sum() + of_words(words).sum()).backward()
        with torch.no_grad():
            run(x=x)
        for each in (run, layer):
            if isinstance(each, torch.nn.Module):
                each.eval()
        run(x=x)


def test_a_reentrant_wrapper_makes_keywords_positional_and_moves_them(rig):  # noqa: F811
    layers = [offload_wrapper(checkpoint_wrapper(Named(rig.device), CheckpointImpl.REENTRANT),
                              engine=rig.engine) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "lightering")
        hidden = torch.ones(64, 32, device=rig.device, requires_grad=True) * 1
        for layer in layers:
            hidden = layer(x=hidden)
        hidden.sum().backward()
    assert rig.engine.stats()["evicted_count"] == 2


def test_a_mode_that_works_or_is_off_or_is_idle_says_nothing(rig):  # noqa: F811
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rig.saved():
            harness.loss_of(models.dense(rig.device, checkpoint="none")).backward()
        with rig.hidden():
            harness.loss_of(models.dense(rig.device)).backward()
        with rig.saved(placement="none") as off:
            harness.loss_of(models.dense(rig.device)).backward()
        with rig.saved():
            pass
    assert off.report().offered == 0


def test_a_report_adds_up_and_reads_as_one_line(rig):  # noqa: F811
    with rig.hidden() as context:
        loss = harness.loss_of(models.dense(rig.device))
        report = context.report()
        loss.backward()
    assert report.offered == report.moved + sum(report.kept.values()) > 0
    assert report.moved == report.released + report.unreleased
    assert report.pinned > 0 and report.restored == 0
    assert context.report().restored == report.offered
    assert "\n" not in str(report) and "kept among the last" in str(report)
    assert (report.peak > 0) == (rig.kind == "cuda")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("what", ["layers", "model"])
@pytest.mark.parametrize("mode, how", [
    ("saved", "none"), ("saved", "positional"), ("hidden", "positional")])
def test_compiled_models_have_the_same_bits(rig, backend, what, mode, how):  # noqa: F811
    if backend == "inductor" and rig.kind == "sim":
        pytest.skip("not run: inductor on CPU compiles C++ for minutes; it runs on a GPU")
    if backend == "inductor" and not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("not run: inductor needs a C compiler, and this machine has none")

    def compiled(model):
        torch._dynamo.reset()
        if what == "model":
            return torch.compile(model, backend=backend)
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, backend=backend)
        return model

    context = getattr(rig, mode)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        harness.compare(
            lambda: models.dense(rig.device, layers=2, checkpoint=how, dropout=0.0),
            harness.one_step,
            harness.Way(mode, lambda: context, prepare=compiled),
            baseline=harness.Way("compiled", prepare=compiled))
    if (mode, what) != ("hidden", "model"):
        assert context.report().moved > 0
    torch._dynamo.reset()


def test_a_captured_graph_keeps_its_tensors_and_says_so():
    rigs.gpu_or_skip()
    found = rigs.make("cuda")
    weight = torch.randn(256, 256, device="cuda", requires_grad=True)
    x = torch.randn(256, 256, device="cuda")

    def step():
        weight.grad = None
        (x @ weight).tanh().square().mean().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    wanted = weight.grad.clone()
    weight.grad = None
    graph = torch.cuda.CUDAGraph()
    context = found.saved()
    with pytest.warns(UserWarning, match="capture"), torch.cuda.graph(graph), context:
        step()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(weight.grad, wanted)
    assert set(context.report().kept) == {"stream capture"}


def test_under_cuda_graph_trees_tensors_stay_and_bits_are_right():
    rigs.gpu_or_skip()
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("not run: inductor needs a C compiler, and this machine has none")
    found = rigs.make("cuda")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(),
                                torch.nn.Linear(256, 256)).cuda()
    fast = torch.compile(model, mode="reduce-overhead")

    def run(x, around):
        model.zero_grad(set_to_none=True)
        with around:
            fast(x).square().mean().backward()
        return [weight.grad.clone() for weight in model.parameters()]

    inputs = [torch.randn(64, 256, device="cuda") for _ in range(6)]
    import contextlib

    wanted = [run(x, contextlib.nullcontext()) for x in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context = found.saved()
        for x, gradients in zip(inputs, wanted, strict=True):
            got = run(x, context)
            assert all(torch.equal(one, two) for one, two in zip(gradients, got, strict=True))
    assert context.report().moved == 0 and "CUDA graph trees" in context.report().kept
    torch._dynamo.reset()
