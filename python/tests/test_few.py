"""A step whose inputs are few stays on the device: the fault guarded against is one of many inputs
that stays as a whole, since each looked like a step, or a context, of its own.
"""

from __future__ import annotations

import warnings

import harness
import lightering
import pytest
import torch
from lightering.torch import HiddenStates, _warn, _wrapper
from rig import rig  # noqa: F401
from torch.utils.checkpoint import checkpoint

COUNT = 1000
NBYTES = 4 * COUNT
LAYERS = 12
LEAST = 3 * NBYTES


def few(rig):  # noqa: F811
    return HiddenStates(min_bytes=16, engine=rig.engine, min_step_bytes=LEAST)


def step(rig, layer, layers=LAYERS, count=COUNT):  # noqa: F811
    """A forward; its end."""
    value = torch.full((count,), 0.5, device=rig.device, requires_grad=True) * 1
    for _ in range(layers):
        value = layer(value)
    return value.sum()


def stayed(*contexts):
    return sum(each.report().kept.get("too little in a step", 0) for each in contexts)


@pytest.fixture(autouse=True)
def without_warnings(monkeypatch):
    """Not even remembered: others test that these are told once."""
    monkeypatch.setattr(_warn, "_told", set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_graph_that_is_gone_at_once_ends_no_step_of_others(rig):  # noqa: F811
    """A checkpoint that nothing asks a gradient of drops its input, the last one that stayed."""
    def layer(value):
        checkpoint(torch.cos, torch.ones(COUNT, device=rig.device), use_reentrant=False)
        return checkpoint(torch.sin, value, use_reentrant=False)

    context = few(rig)
    with context:
        step(rig, layer, layers=1).backward()
    for _ in range(2):
        with context:
            end = step(rig, layer)
        # The first of all is gone before another comes, and so a step of its own.
        assert stayed(context) <= LEAST
        end.backward()


def test_a_part_of_a_storage_counts_as_all_that_stays_with_it(rig):  # noqa: F811
    def layer(value):
        large = value.expand(100, COUNT // 100).reshape(-1)
        return checkpoint(torch.sin, (large * 1)[:COUNT // 100], use_reentrant=False)

    context = few(rig)
    with context:
        step(rig, layer, layers=1, count=COUNT // 100).backward()
    with context:
        end = step(rig, layer, count=COUNT // 100)
    # Whole storages, of which few parts are asked for.
    assert context.report().moved >= (LAYERS - 4) * NBYTES
    end.backward()


def test_contexts_that_have_few_each_let_no_more_stay_in_all(rig):  # noqa: F811
    """A model whose every layer has a context of its own."""
    contexts = [few(rig) for _ in range(LAYERS)]
    gradients = []
    for _ in range(3):
        x = value = torch.full((COUNT,), 0.5, device=rig.device, requires_grad=True)
        value = value * 1
        for context in contexts:
            with context:
                value = checkpoint(torch.sin, value, use_reentrant=False)
        assert stayed(*contexts) < LEAST
        value.sum().backward()
        gradients.append(x.grad)
    assert all(harness.same_bits(each, gradients[0]) for each in gradients)
    del x, value


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_input_whose_bytes_nobody_can_count_stays_as_without(rig, reentrant):  # noqa: F811
    """A sparse one has no count of bytes: asking for it raised in a step that was right."""
    def gradient(context):
        x = torch.eye(8, device=rig.device).to_sparse().requires_grad_()
        with context:
            y = checkpoint(lambda a: torch.sparse.mm(a, torch.ones(8, 2, device=rig.device)), x,
                           use_reentrant=reentrant)
            y.sum().backward()
        return x.grad.to_dense()

    context = few(rig)
    ours, plain = gradient(context), gradient(HiddenStates(placement="none"))
    assert harness.same_bits(ours, plain)
    assert list(context.report().kept) == ["unknown kind of tensor"]


def test_a_program_traced_with_sizes_that_are_symbols_is_traced_with_them():
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(x):
        return checkpoint(torch.sin, x * 2, use_reentrant=False)

    with HiddenStates(engine=lightering.Engine("sim"), min_step_bytes=LEAST):
        graph = make_fx(traced, tracing_mode="symbolic")(torch.ones(8, 3, requires_grad=True))
    shapes = [node.meta["val"].shape for node in graph.graph.nodes if "val" in node.meta]
    assert not all(type(size) is int for shape in shapes for size in shape)


def test_each_device_of_a_context_has_windows_by_its_own_largest_item():
    class Windows:
        has_own_windows = False

        def ask_windows(self, who, windows):
            self.found = windows

    class Saved:
        largest = 1000

    context = HiddenStates(engine=lightering.Engine("sim"))
    one, two = Windows(), Windows()
    for desk in (one, two):
        context._packed(desk, Saved)
    assert one.found == two.found == (1000, 2000)


def test_what_left_in_the_step_before_is_dropped_though_nothing_leaves_any_more(rig):  # noqa: F811
    """Wrapped layers whose graph died while their copies were on the way, and then few inputs: the
    engine kept the storages, and their device bytes, until something left again."""
    mode = _wrapper._mode_of(rig.engine)
    mode._step_least = LEAST

    def layer(value):
        return lightering.torch.checkpoint(torch.sin, value, engine=rig.engine)

    if rig.device != "cpu":
        torch.cuda._sleep(400_000_000)
    end = step(rig, layer, layers=2)
    moved = rig.engine.stats()["evicted_count"]
    del end
    for _ in range(3):
        if rig.device != "cpu":
            torch.cuda.synchronize()
        step(rig, layer, layers=1).backward()
    stats = rig.engine.stats()
    assert stats["evicted_count"] == moved > 0
    assert stats["storage_count"] == 0 and rig.desk.held_bytes == 0


class Marks:
    """An engine whose marks of steps are counted."""

    def __init__(self, native):
        self.native, self.count = native, 0

    def mark_step(self):
        self.count += 1
        self.native.mark_step()

    def __getattr__(self, name):
        return getattr(self.native, name)


@pytest.mark.parametrize("steps_a_context", [1, 4])
def test_a_step_is_marked_once_however_contexts_lie_around_it(
    rig, steps_a_context, monkeypatch  # noqa: F811
):
    """A context that was entered again marked it twice: what the engine keeps for two passes, as
    whether a reader was overtaken, was forgotten within one."""
    context, marks = rig.hidden(min_step_bytes=0), Marks(rig.desk.native)
    monkeypatch.setattr(rig.desk, "native", marks)

    def layer(value):
        return checkpoint(torch.sin, value, use_reentrant=False)

    for nth in range(4):
        for _ in range(4 // steps_a_context):
            with context:
                for _ in range(steps_a_context):
                    step(rig, layer, layers=3).backward()
        assert marks.count == 4 * (nth + 1)
