"""An operator that saves something unusual gets something else back: the fault guarded against.

Each operator runs plainly and with every saved tensor leaving, under several orders of copies and
windows that hold next to nothing; outputs and gradients are those of the plain run, bit for bit.
"""

from __future__ import annotations

import contextlib

import harness
import pytest
import rig as rigs
import torch
from harness import Void
from torch import nn
from torch.nn import functional


def leaf(*size, dtype=torch.float32):
    return torch.randn(*size, dtype=dtype).requires_grad_()


def conv():
    image = leaf(2, 3, 9, 9)
    layer = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
    out = layer((image * 1).to(memory_format=torch.channels_last)).relu_()
    return functional.max_pool2d(out, 2, return_indices=False), [image, *layer.parameters()]


def batch_norm():
    image = leaf(4, 3, 5, 5)
    layer = nn.BatchNorm2d(3)
    # Its running means are buffers that the forward edits in place.
    return layer(layer(image * 2)), [image, *layer.parameters()]


def lstm():
    series = leaf(5, 2, 6)
    layer = nn.LSTM(6, 7, num_layers=2, dropout=0.3, bidirectional=True)
    return layer(series * 1)[0], [series, *layer.parameters()]


def attention():
    words = leaf(2, 6, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return layer(words * 1, src_mask=torch.ones(6, 6).triu(1).bool()), [words, *layer.parameters()]


def embedding():
    layer = nn.EmbeddingBag(11, 6, mode="max")
    other = nn.Embedding(11, 6, padding_idx=0, sparse=False)
    ids = torch.randint(11, (4, 3))
    return layer(ids) + other(ids).sum(1), [*layer.parameters(), *other.parameters()]


def in_place():
    one = leaf(6, 6)
    value = (one * 3).mul_(2).sigmoid_()
    value = functional.dropout(value * 1, 0.5, inplace=True)
    return functional.leaky_relu(value.mul(1).add_(0.1), 0.1, inplace=True) * 3, [one]


def orders():
    one = leaf(7, 5)
    sorted_, places = (one * 2).sort(0)
    top = one.exp().topk(3, 1).values
    taken = one.sin().gather(0, places)
    flat = [sorted_.cumsum(0).flatten(), top.flatten(), taken.cumprod(1).flatten()]
    return torch.cat(flat), [one]


def spectra():
    one = leaf(4, 8)
    spectrum = torch.fft.rfft(one * 2)
    # A lazy conjugate, and a lazy negation of its imaginary part.
    turned = spectrum.conj() * torch.view_as_complex(leaf(4, 5, 2))
    return turned.conj().imag * turned.abs(), [one]


def linear_algebra():
    one = leaf(5, 5, dtype=torch.float64)
    square = one @ one.mT + 5 * torch.eye(5, dtype=torch.float64)
    lower = torch.linalg.cholesky(square)
    values = torch.linalg.eigvalsh(square)
    return torch.linalg.solve(square, lower) * values, [one]


def views():
    one = leaf(6, 8)
    whole = one * 2
    parts = [whole.t(), whole[1:, ::2], whole.expand(3, 6, 8), whole.unfold(1, 3, 2),
             whole.as_strided((3, 3), (9, 1), 4), whole.diagonal(), whole.unflatten(1, (2, 4))]
    return torch.cat([(part * part.sin()).flatten() for part in parts]), [one]


def kinds():
    one = leaf(6, 6)
    small = one.to(torch.float16).cos().to(torch.bfloat16).sin().float()
    chosen = torch.where(one > 0, small.exp(), one.tanh())
    return functional.cross_entropy(chosen, torch.arange(6)) * chosen.prelu(leaf(1)), [one]


def sparse():
    one = leaf(5, 4)
    places = torch.tensor([[0, 1, 2, 4], [1, 0, 3, 2]])
    weights = leaf(4)
    return torch.sparse.mm(torch.sparse_coo_tensor(places, weights * 1, (5, 5)), one * 1), [
        one, weights]


def own_function():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, nothing):
            out = value.exp()
            ctx.save_for_backward(value, nothing, out)
            return out, out.sum()

        @staticmethod
        def backward(ctx, gradient, of_sum):
            again = [ctx.saved_tensors for _ in range(3)]
            (value, nothing, out), *_ = again
            assert nothing is None
            assert all(torch.equal(each[2], out) for each in again)
            return (gradient + of_sum) * out + 0 * value, None

    one = leaf(5, 5)
    out, total = Own.apply(one * 1, None)
    return out * total, [one]


def autocast():
    one = leaf(6, 8)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))
    with torch.autocast("cpu", torch.bfloat16):
        out = layers(layers(one * 1))
    return out.float(), [one, *layers.parameters()]


def tied():
    table = nn.Embedding(13, 6)
    hidden = table(torch.randint(13, (4, 3))).tanh()
    return functional.linear(hidden, table.weight), [table.weight]


def checkpoints_inside():
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    one = leaf(4, 8)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(4)))
    out = checkpoint_sequential(layers, 2, one * 1, use_reentrant=False)
    return checkpoint(layers, out, use_reentrant=False), [one, *layers.parameters()]


OPERATORS = [conv, batch_norm, lstm, attention, embedding, in_place, orders, spectra,
             linear_algebra, views, kinds, sparse, own_function, autocast, tied,
             checkpoints_inside]


def outcome(operator, around):
    """The bits of an operator's result and of its gradients, which are asked for twice."""
    with harness.deterministic():
        with around():
            out, leaves = operator()
        weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.real.dtype).view_as(out)
        loss = (out * weights).sum()
        gradients = [torch.autograd.grad(loss, leaves, retain_graph=turn == 0) for turn in range(2)]
    return [out.detach(), *(each for turn in gradients for each in turn)]


def same(one, two):
    return len(one) == len(two) and all(map(harness.same_bits, one, two))


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_of_every_operator_are_those_of_the_plain_run(operator, seed):
    wanted = outcome(operator, contextlib.nullcontext)
    if not same(wanted, outcome(operator, contextlib.nullcontext)):
        raise Void(operator.__name__)
    options = {} if seed is None else {"seed": seed}
    rig = rigs.make("sim", unreleased_bytes="512B", prefetch_bytes="1KiB", **options)
    context = rig.saved(min_bytes=1)
    found = outcome(operator, lambda: context)
    report = context.report()
    assert same(wanted, found)
    assert report.moved > 0
    assert report.offered == report.moved + sum(report.kept.values())
    del found, wanted
    rig.assert_nothing_left()
