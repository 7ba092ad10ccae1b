"""An interrupt may come between any two steps of Python. Nothing is lost, and nothing stays on."""

from __future__ import annotations

import sys

import pytest
import torch
from rig import MODES, rig  # noqa: F401
from saving import leaf, save


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


@pytest.mark.parametrize("where", ["hooks", "_start"])
@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_while_a_context_is_entered_leaves_nothing_on(
    rig, mode, where, monkeypatch  # noqa: F811
):
    """The hooks stayed on, and every step from then on saved through a context nobody was in."""
    context = getattr(rig, mode)()
    layers = sys.modules.get("transformers.modeling_layers")
    kind = getattr(layers, "GradientCheckpointingLayer", torch.nn.Module)
    before = kind.__call__

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "hooks":
            enter = torch.autograd.graph.saved_tensors_hooks.__enter__
            patch.setattr(torch.autograd.graph.saved_tensors_hooks, "__enter__",
                          lambda hooks: interrupt(enter(hooks)))
        else:
            patch.setattr(type(context), where, interrupt)
        with pytest.raises(KeyboardInterrupt), context:
            pass
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert kind.__call__ is before
    with context:
        save(leaf(rig.device), [torch.ones(512, device=rig.device)], []).sum().backward()
    assert kind.__call__ is before
    assert context.report().moved == (2048 if mode == "saved" else 0)
