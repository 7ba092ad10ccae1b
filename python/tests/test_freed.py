"""Bytes that are reported as freed and are not: the fault guarded against.

On a GPU torch's allocator is asked; on CPU tensors, weak references to every storage that moved.
"""

from __future__ import annotations

import harness
import models
import pytest
import rig as rigs
import torch
from lightering._ownership import identity
from rig import rig  # noqa: F401
from saving import leaf, save, watch

SIZES = {"layers": 6, "hidden": 64, "feed_forward": 256}


def watched(context):
    """Weak references to the storages that a context takes, with their bytes."""
    found = {}

    def note(tensor):
        found[identity(tensor)] = tensor.untyped_storage().nbytes()

    watch(context, note)
    return found


@pytest.mark.parametrize("mode, how", [("saved", "none"), ("hidden", "positional")])
@pytest.mark.parametrize("make", [models.dense, models.moe])
def test_what_is_reported_as_released_is_gone_after_the_forward(rig, make, mode, how):  # noqa: F811
    model = make(rig.device, checkpoint=how, **SIZES)
    context = getattr(rig, mode)(min_bytes=1024)
    found = watched(context)
    before = 0
    if rig.kind == "cuda":
        with torch.enable_grad():
            loss = harness.loss_of(model, tokens=64)
            kept = torch.cuda.memory_allocated()
            del loss
        before = torch.cuda.memory_allocated()
        assert kept > before
    with context:
        loss = harness.loss_of(model, tokens=64)
        rig.desk.flush()
        rig.engine.drain()
        rig.desk.sweep()
        report = context.report()
        assert report.moved > 0 and report.released + report.unreleased == report.moved
        dead = sum(nbytes for storage, nbytes in found.items() if storage() is None)
        assert dead >= 0.99 * report.released > 0, (dead, report)
        alive = sum(nbytes for storage, nbytes in found.items() if storage() is not None)
        assert alive <= report.unreleased + sum(report.kept.values())
        if rig.kind == "cuda":
            saved = kept - torch.cuda.memory_allocated()
            assert saved >= 0.99 * report.released, (saved, report)
        # All but what the model itself still holds, and the last input of HiddenStates.
        assert report.released >= 0.7 * report.offered, report
        loss.backward()


def test_what_others_keep_alive_is_called_unreleased(rig):  # noqa: F811
    x = leaf(rig.device)
    context = rig.saved()
    with context:
        mine = torch.randn(4096, device=rig.device)
        out = save(x, [mine, torch.randn(1024, device=rig.device)], [])
        out = save(out, [torch.randn(64, device=rig.device)], [])
        rig.desk.flush()
        report = context.report()
        assert (report.moved, report.released) == (4 * (4096 + 1024 + 64), 4 * (1024 + 64))
        assert report.unreleased == 4 * 4096
        del mine
        assert context.report().unreleased == 0, "it is freed when they let go"
        out.sum().backward()
    assert context.report().released == report.moved


@pytest.mark.parametrize("mode, how", [("saved", "none"), ("hidden", "positional")])
def test_no_storage_is_ever_resized(rig, mode, how, monkeypatch):  # noqa: F811
    def resize(storage, nbytes):
        raise AssertionError(f"a storage of {storage.nbytes()} bytes is resized to {nbytes}")

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    with getattr(rig, mode)() as context:
        harness.loss_of(models.moe(rig.device, checkpoint=how)).backward()
    assert context.report().released > 0


def test_a_retained_graph_does_not_keep_what_it_read_on_the_device(rig):  # noqa: F811
    x = leaf(rig.device)
    held = []

    class Looking(torch.autograd.Function):
        """Looks at what is held in the middle of a backward."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            held.append(rig.desk.held_bytes)
            return gradient

    with rig.saved():
        out = x
        for _ in range(24):
            out = Looking.apply(save(out, [torch.randn(8192, device=rig.device)], []))
        rig.desk.flush()
        for _ in range(3):
            out.sum().backward(retain_graph=True)
        # Two tensors fit into each window: those fetched ahead, those read; and those on their way.
        assert max(held) <= 3 * 64 * 1024 + 2 * 8192 * 4, held
        rig.desk.flush()
        rig.engine.drain()
        rig.desk.sweep()
        # What is fetched ahead of a fourth backward may stay, within its window.
        assert rig.desk.held_bytes <= 64 * 1024, rig.desk.held_bytes
    del out


def test_a_host_that_runs_ahead_of_the_device_keeps_no_more_than_the_windows(rig):  # noqa: F811
    """Bytes that came back early stood in the way of all that left after them: 63 of 64 stayed."""
    layers, nbytes = 48, 1 << 20
    x = torch.ones(nbytes // 4, device=rig.device, requires_grad=True)
    seen = []

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.save_for_backward(value)
            seen.append(rig.desk.held_bytes)
            return value * 1

        @staticmethod
        def backward(ctx, gradient):
            (value,) = ctx.saved_tensors
            seen.append(rig.desk.held_bytes)
            return gradient * value

    windows = sum(rig.engine._native.windows())
    with rig.saved(min_bytes=1024):
        if rig.kind == "cuda":
            # Some tenths of a second, in which the host enqueues the whole step.
            torch.cuda._sleep(500_000_000)
        value = x * 1
        for _ in range(layers):
            value = Layer.apply(value)
        value.sum().backward()
    # Besides the windows: what was packed last, and what a reader has just now.
    assert len(seen) == 2 * layers and max(seen) <= windows + 3 * nbytes, max(seen)
    del value
    rig.assert_nothing_left()


def test_a_wide_window_keeps_little_of_what_is_done_on_the_device():
    """A sixteenth of a window may be gigabytes, of which every copy was done long ago."""
    wide = rigs.make("sim", unreleased_bytes="100GiB")
    value = torch.ones(1 << 20, requires_grad=True) * 1
    most = 0
    with wide.saved() as context:
        for _ in range(30):
            value = value.sin()
            wide.engine.drain()
            most = max(most, wide.desk.held_bytes)
    # Eight tensors of 4 MiB, the one before the last question, and the one behind it.
    assert context.report().moved == 30 << 22 and most <= 10 << 22
    del value
    wide.assert_nothing_left()
