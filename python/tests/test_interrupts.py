"""An interrupt may come between any two steps of Python. Nothing is lost, and nothing stays on."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import threading
from pathlib import Path

import lightering
import pytest
import torch
from lightering.torch._hidden import _keywords
from lightering.torch._saved import _watch
from rig import MODES, rig  # noqa: F401
from saving import leaf, save

SOURCES = str(Path(lightering.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt before the ``count``-th line of this package that runs inside.

    Not at a ``with``, where a trace function is called between a block and what ends it: Python
    looks for no signal there.
    """

    def __init__(self, count):
        self.left, self.came = count, False

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def _call(self, frame, *_):
        return self._line if frame.f_code.co_filename.startswith(SOURCES) else None

    def _line(self, frame, event, _):
        if event == "line" and not self.came and not is_with(frame):
            self.left -= 1
            if self.left < 0:
                self.came = True
                raise KeyboardInterrupt
        return self._line


def is_with(frame):
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ")


def each(body):
    """Runs ``body(count)`` for every step there is to be interrupted before; says how many."""
    count = 0
    while body(count):
        count += 1
    return count


def nothing_is_on():
    layers = sys.modules.get("transformers.modeling_layers")
    is_patched = layers is not None and hasattr(
        layers.GradientCheckpointingLayer.__call__, "__wrapped__")
    return not (torch._C._autograd._top_saved_tensors_default_hooks(True) or is_patched
                or _watch.users or _keywords._users)


@pytest.fixture(autouse=True)
def _with_layers_that_are_patched():
    """The modes change them where transformers is there, whatever ran before."""
    if importlib.util.find_spec("transformers"):
        importlib.import_module("transformers.modeling_layers")


def step(rig, context):  # noqa: F811
    """A module whose buffer is saved, and a tensor that is nobody's."""
    module = torch.nn.BatchNorm1d(256).to(rig.device).eval()
    x = torch.randn(8, 256, device=rig.device, requires_grad=True)
    with context:
        out = module(x * 1).sum()
        save(leaf(rig.device), [torch.ones(512, device=rig.device)], []).sum().backward()
        report = context.report()
        out.backward()
    return report


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_at_any_step_of_a_context_leaves_nothing_on(rig, mode):  # noqa: F811
    """Hooks stayed on, and every step from then on saved through a context nobody was in; or the
    watch over buffers was off for good, and they left the device."""
    context = getattr(rig, mode)()
    wanted = step(rig, context)

    def body(count):
        with Interrupt(count) as interrupt:
            with context:
                pass
        assert nothing_is_on(), count
        return interrupt.came

    assert each(body) > 10
    report = step(rig, context)
    assert (report.moved, report.offered) == (wanted.moved, wanted.offered)
    assert nothing_is_on()


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_of_an_inner_entry_leaves_the_outer_one_as_it_was(rig, mode):  # noqa: F811
    """The hooks of the outer one went with those of the inner, whose were not on yet."""
    context = getattr(rig, mode)()
    other = getattr(rig, mode)()

    def body(count):
        with context:
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            for inner in (context, other):
                with Interrupt(count) as interrupt:
                    with inner:
                        pass
                assert torch._C._autograd._top_saved_tensors_default_hooks(True) == hooks, count
            assert (context in _watch.users) == (mode == "saved")
        assert nothing_is_on(), count
        return interrupt.came

    assert each(body) > 10


def test_an_interrupt_at_any_step_of_packing_keeps_no_bytes(rig):  # noqa: F811
    """What the engine had named was lost where the counting was interrupted, and stayed for good.
    """
    context = rig.hidden(keep_last=1)
    count_of_steps = 0

    def body(count):
        nonlocal count_of_steps
        x = torch.ones(512, device=rig.device, requires_grad=True)
        out = x * 1
        with context, Interrupt(count) as interrupt:
            for _ in range(3):
                out = torch.utils.checkpoint.checkpoint(torch.sin, out, use_reentrant=False)
        del out, x
        count_of_steps = count
        return interrupt.came and count < 400

    each(body)
    assert count_of_steps > 20
    rig.desk.flush()
    rig.assert_nothing_left()


def test_no_step_of_python_lies_between_a_lock_and_its_holder(rig):  # noqa: F811
    """An interrupt there left it taken, and a backward on another thread waited for ever."""
    calls, lock = [], rig.desk.lock
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    with lock:
        pass
    sys.setprofile(None)
    assert not calls


def test_no_step_of_python_lies_between_what_is_named_and_what_goes(rig):  # noqa: F811
    """The engine names what may go once: an interrupt in between kept its device bytes for good."""
    calls = []

    def look(frame, event, what):
        name = frame.f_code.co_name if event == "call" else getattr(what, "__name__", "")
        calls.append((event, name))

    out = leaf(rig.device)
    with rig.saved():
        for verb in ("sweep", "flush"):
            out = save(out, [torch.ones(512, device=rig.device)], [])
            sys.setprofile(look)
            getattr(rig.desk, verb)()
            sys.setprofile(None)
            steps = [name for event, name in calls if event == "c_call"]
            assert steps.count(f"{verb}_now") == 1
            assert not {"drop_gone", verb} & set(steps), steps
            calls.clear()
    assert not rig.desk._held


def test_no_step_of_python_lies_between_the_queue_of_the_dead_and_their_burial(rig):  # noqa: F811
    """A stash that died while another thread had the lock was taken from the queue, and an
    interrupt before it was buried kept it among the living for good."""
    calls = []
    with rig.saved():
        out = save(leaf(rig.device), [torch.ones(512, device=rig.device)], [])
    assert rig.desk.live_count == 1
    graphs = [out]
    del out
    with rig.desk.lock:
        thread = threading.Thread(target=graphs.clear)
        thread.start()
        thread.join()
        sys.setprofile(
            lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    sys.setprofile(None)
    assert rig.desk.live_count == 0 and not calls
