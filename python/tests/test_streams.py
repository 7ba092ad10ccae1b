"""A stream remembered from an earlier call, a copy that does not wait, memory taken on a stream
that does not use it: the faults guarded against. Their kernels run late here on purpose.
"""

from __future__ import annotations

from pathlib import Path

import harness
import lightering
import lightering.torch._stash as stash
import models
import pytest
import rig as rigs
import torch
from rig import rig  # noqa: F401
from saving import leaf, save

LATE_CYCLES = 20_000_000
"""About ten milliseconds: longer than any copy here."""


@pytest.fixture
def gpu():
    rigs.gpu_or_skip()
    found = rigs.make("cuda", unreleased_bytes="256KiB", prefetch_bytes="256KiB")
    yield found
    torch.cuda.synchronize()
    found.assert_nothing_left()


def test_the_stream_is_asked_for_at_every_call(rig, monkeypatch):  # noqa: F811
    asked = []
    stream = stash.Desk.stream
    monkeypatch.setattr(stash.Desk, "stream", lambda desk: asked.append(1) or stream(desk))
    x, counts = leaf(rig.device), []
    with rig.saved():
        out = x
        for _ in range(4):
            before = len(asked)
            out = save(out, [torch.randn(64, device=rig.device)], [])
            counts.append(len(asked) - before)
        before = len(asked)
        out.sum().backward()
    assert counts == [1, 1, 1, 1] and len(asked) - before >= 4


def test_no_stream_is_told_of_memory_by_record_stream(rig, monkeypatch):  # noqa: F811
    def record(*_):
        raise AssertionError("record_stream was called")

    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    with rig.saved():
        harness.loss_of(models.moe(rig.device, checkpoint="none")).backward()
    with rig.hidden():
        harness.loss_of(models.moe(rig.device)).backward()
    for source in Path(lightering.__file__).parent.rglob("*.py"):
        assert ".record_stream(" not in source.read_text(), source


def test_once_a_second_stream_was_seen_memory_goes_when_nobody_can_use_it(rig):  # noqa: F811
    # The simulated device's default stream, or one of torch's; the work goes on where it was.
    second = 0 if rig.kind == "sim" else torch.cuda.Stream().cuda_stream
    rig.engine._native.wanted(second)
    rig.desk.streams.update((second, rig.desk.stream()))
    x, seen = leaf(rig.device), []
    with rig.saved() as context:
        mine = torch.randn(1024, device=rig.device)
        out = save(x, [mine], seen)
        for _ in range(3):
            out = save(out, [torch.randn(1024, device=rig.device)], seen)
        for _ in range(4):
            rig.engine.drain()
            rig.desk.flush()
        assert len(rig.desk.streams) == 2
        assert len(rig.desk._lingering) == 1, "a test has the other reference"
        assert context.report().released == 3 * 4096, "one lingers"
        del mine
        out.sum().backward()
    # They hold what came back.
    seen.clear()
    del out
    for how in ("none", "positional"):
        saved, hidden = rig.saved(), rig.hidden()
        harness.compare(
            lambda how=how: models.moe(rig.device, checkpoint=how), harness.micro_steps,
            harness.Way("saved", lambda saved=saved: saved),
            harness.Way("hidden", lambda hidden=hidden: hidden))
    for _ in range(4):
        rig.engine.drain()
        rig.desk.sweep()
    assert not rig.desk._lingering and not rig.desk._retired


class Late(torch.autograd.Function):
    """Passes a tensor on behind a kernel that takes its time, forwards and backwards."""

    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(LATE_CYCLES)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(LATE_CYCLES)
        return gradient.clone()


def late_steps(how="none", streams=1):
    """Steps of a model whose layers run late, each on one of several streams."""

    def step(model, around):
        default = torch.cuda.current_stream()
        used = [default] if streams == 1 else [torch.cuda.Stream() for _ in range(streams)]
        losses = []
        for seed in range(3):
            stream = used[seed % len(used)]
            stream.wait_stream(default)
            with around(), torch.cuda.stream(stream):
                for layer in model.layers:
                    layer.late = layer.register_forward_pre_hook(
                        lambda _, args: (Late.apply(args[0]), *args[1:]))
                loss = harness.loss_of(model, seed, tokens=(16, 24, 8)[seed])
                loss.backward()
                for layer in model.layers:
                    layer.late.remove()
            default.wait_stream(stream)
            losses.append(loss)
        torch.cuda.synchronize()
        return losses

    return step


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("mode, how", [("saved", "none"), ("hidden", "positional")])
def test_steps_on_several_streams_with_late_kernels_have_the_same_bits(gpu, mode, how, streams):
    context = getattr(gpu, mode)()
    harness.compare(
        lambda: models.moe("cuda", checkpoint=how, layers=4), late_steps(how, streams),
        harness.Way(mode, lambda: context))
    assert context.report().moved > 0


@pytest.mark.parametrize("mode, how", [("saved", "none"), ("hidden", "positional")])
def test_a_step_on_a_side_stream_alone_has_the_same_bits(gpu, mode, how):
    side = torch.cuda.Stream()

    def step(model, around):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            losses = late_steps(how)(model, around)
        torch.cuda.current_stream().wait_stream(side)
        return losses

    context = getattr(gpu, mode)()
    harness.compare(
        lambda: models.dense("cuda", checkpoint=how, layers=4), step,
        harness.Way(mode, lambda: context))


def test_a_side_stream_within_the_forward_has_the_same_bits(gpu):
    side = torch.cuda.Stream()

    def step(model, around):
        main = torch.cuda.current_stream()
        with around():
            x = torch.linspace(-1, 1, 64 * 64, device="cuda").view(64, 64).requires_grad_()
            hidden = x * 1
            for layer in model:
                hidden = Late.apply(layer(hidden))
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    beside = torch.tanh(hidden * 2).square()
                main.wait_stream(side)
                hidden = torch.sin(hidden) + beside
            loss = hidden.square().mean()
            loss.backward()
        torch.cuda.synchronize()
        return [loss, x.grad]

    context = gpu.saved()
    harness.compare(
        lambda: models.seeded(lambda: torch.nn.Sequential(
            *(torch.nn.Linear(64, 64) for _ in range(5))), "cuda"),
        step, harness.Way("saved", lambda: context))


def test_memory_that_is_written_again_at_once_does_not_reach_what_left(gpu):
    """The allocator hands released bytes to the next tensor: a copy out must be done with them."""
    x = leaf("cuda")
    for round_ in range(5):
        seen = []
        with gpu.saved():
            out = x
            for index in range(12):
                torch.cuda._sleep(LATE_CYCLES // 10)
                tensor = torch.full((1 << 18,), float(100 * round_ + index), device="cuda")
                out = save(out, [tensor], seen)
                del tensor
                torch.full((1 << 18,), -1.0, device="cuda")
            out.sum().backward()
        values = [(each[0].min().item(), each[0].max().item()) for each in seen]
        assert values == [(100.0 * round_ + index,) * 2 for index in reversed(range(12))]


def test_destinations_come_from_the_stream_that_reads_them(gpu):
    side = torch.cuda.Stream()
    seen = []
    with torch.cuda.stream(side), gpu.saved():
        x = leaf("cuda")
        out = x
        for _ in range(6):
            out = save(out, [torch.randn(1 << 20, device="cuda")], seen)
        gpu.desk.flush()
        torch.cuda.synchronize()
        gpu.desk.sweep()
        out.sum().backward()
    segments = torch.cuda.memory_snapshot()
    for (tensor,) in seen:
        at = tensor.data_ptr()
        owner = [each for each in segments
                 if each["address"] <= at < each["address"] + each["total_size"]]
        assert [each["stream"] for each in owner] == [side.cuda_stream]
