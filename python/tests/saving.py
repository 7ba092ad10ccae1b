"""A function that saves whatever it is told to, and shows what it had back.

What it is: the smallest node of a graph whose saved tensors a test chooses and looks at.
Invariant: its value and its gradient are those of ``x.clone()``.

    out = save(x, tensors, seen)     out.sum().backward()     seen: what backward was given

Who may call it: tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightering._native import Moved
from lightering.torch import HiddenStates


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        ctx.seen.append(saved)
        return (gradient, None, *(None for _ in saved))


def save(x: torch.Tensor, tensors: Sequence[torch.Tensor], seen: list[Any]) -> torch.Tensor:
    """Saves the tensors in a node on top of ``x``, which requires gradients."""
    return _Save.apply(x, seen, *tensors)


def leaf(device: str) -> torch.Tensor:
    """Something to build a graph on."""
    return torch.ones(4, device=device, requires_grad=True)


def watch(context, note):
    """Has ``note`` called with every plain tensor that a context moves from now on."""
    # One of hidden states looks who called it: a hook around its own would stand between.
    name = "_wants_input" if isinstance(context, HiddenStates) else "_pack"
    asked = getattr(context, name)

    def watching(tensor, *args):
        found = asked(tensor, *args)
        if found is None or type(found) is Moved:
            note(tensor)
        return found

    setattr(context, name, watching)
