"""A program that nobody thought of gets another gradient, or another error: the fault guarded
against.

Random graphs of operators, views, edits, checkpoints and functions that edit what they saved in
their backward; each runs plainly and with what it saves leaving. Gradients are of equal bits, and
where autograd refuses, the other run is refused for the same reason.
"""

from __future__ import annotations

import contextlib
import random

import harness
import pytest
import rig as rigs
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SIZE, PROGRAMS = (8, 8), 60
REASONS = ("inplace operation", "second time", "use_reentrant=True")


class Product(torch.autograd.Function):
    """Saves its inputs, one of which some of its kinds edit in their backward."""

    @staticmethod
    def forward(ctx, x, y, kind):
        ctx.kind = kind
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        found = gradient * y, gradient * x, None
        if ctx.kind == 1:
            x.mul_(2)
        if ctx.kind == 2:
            y[0].add_(1)
        return found


def edited(a, b):
    with torch.no_grad():
        a.detach().add_(0.1)
    return a


OPERATORS = (
    lambda a, b: a.sin(),
    lambda a, b: a @ b.t(),
    lambda a, b: (a * b).exp().clamp(max=3),
    lambda a, b: a.t(),
    lambda a, b: torch.cat([a[2:], b[:2]]),
    lambda a, b: functional.dropout(a, 0.3),
    lambda a, b: a.expand(3, *SIZE).sum(0) * b,
    lambda a, b: a.softmax(-1),
    lambda a, b: a.clone().mul_(1.1).tanh(),
    lambda a, b: torch.where(a > 0, a, b).cumsum(0),
    lambda a, b: Product.apply(a, b, 0),
    lambda a, b: Product.apply(a, b, 1),
    lambda a, b: Product.apply(a, b, 2),
    lambda a, b: checkpoint(lambda x, y: torch.tanh(x) * y.sin(), a, b, use_reentrant=False),
    lambda a, b: checkpoint(lambda x: functional.dropout(x, 0.2).sin() * x, a,
                            use_reentrant=a.requires_grad),
    edited,
)


def gradients(loss, leaves, how):
    """Those of a backward, of two, of one that is differentiated itself, or none."""
    if how == 0:
        return list(torch.autograd.grad(loss, leaves, allow_unused=True))
    if how == 1:
        loss.backward(retain_graph=True)
    if how == 2:
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        loss = sum(each.square().sum() for each in first if each is not None)
    if how < 4:
        loss.backward()
    return [leaf.grad for leaf in leaves]


def outcome(seed, context):
    """Gradients, or why autograd refused to give them."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    leaves = [torch.randn(*SIZE, requires_grad=True) for _ in range(2)]
    values = [*(leaf * 1.5 for leaf in leaves), torch.randn(*SIZE)]
    try:
        with context:
            for _ in range(choose.randrange(4, 14)):
                one, two = choose.choice(values), choose.choice(values)
                values.append(choose.choice(OPERATORS)(one, two))
                if choose.random() < 0.1:
                    values.pop(choose.randrange(len(values) - 1))
            loss = sum((each * each).mean() for each in values) + 0 * sum(map(torch.sum, leaves))
        if choose.random() < 0.5:
            values.clear()
        return gradients(loss, leaves, choose.randrange(5))
    except RuntimeError as error:
        return [reason for reason in REASONS if reason in str(error)] or [str(error)]


def same(one, two):
    if len(one) != len(two) or any(type(a) is not type(b) for a, b in zip(one, two, strict=True)):
        return False
    return all(a == b if isinstance(a, str) else harness.same_bits(a, b)
               for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("mode", ["saved", "hidden"])
@pytest.mark.parametrize("first", range(0, 4 * PROGRAMS, PROGRAMS))
def test_random_programs_have_the_same_bits_and_the_same_errors(mode, first):
    refused = moving = 0
    for seed in range(first, first + PROGRAMS):
        wanted = outcome(seed, contextlib.nullcontext())
        options = {"seed": seed} if seed % 2 else {}
        rig = rigs.make("sim", unreleased_bytes="512B", prefetch_bytes="512B", **options)
        found = outcome(seed, getattr(rig, mode)(min_bytes=1))
        assert same(wanted, found), f"program {seed}: {wanted} and {found}"
        refused += isinstance(wanted[0], str)
        moving += rig.moved() > 0
        del found, wanted
        if seed % 10 == 0:
            rig.assert_nothing_left()
    assert PROGRAMS // 10 < refused < PROGRAMS, refused
    # Not every program has a checkpoint.
    assert moving > PROGRAMS // (2 if mode == "saved" else 10), moving
