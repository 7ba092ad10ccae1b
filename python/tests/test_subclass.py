"""A wrapper's bytes are taken for the wrapper's own: the fault guarded against.

A subclass says how it is taken apart, or it stays; what is taken apart comes back the same.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from lightering._ownership import identity
from lightering._subclass import flatten, is_plain
from lightering._version import share_outer
from lightering.torch import _reasons
from rig import rig  # noqa: F401
from saving import leaf, save


class Pair(torch.Tensor):
    """Two tensors of one shape that go through each operator side by side."""

    @staticmethod
    def __new__(cls, one, two, tag):
        return torch.Tensor._make_wrapper_subclass(
            cls, one.size(), strides=one.stride(), dtype=one.dtype, device=one.device,
            requires_grad=one.requires_grad,
        )

    def __init__(self, one, two, tag):
        self.one, self.two, self.tag = one, two, tag

    def __tensor_flatten__(self):
        return ["one", "two"], self.tag

    @staticmethod
    def __tensor_unflatten__(inner, tag, size, stride):
        return Pair(inner["one"], inner["two"], tag)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs):
        def take(name):
            args_of, kwargs_of = torch.utils._pytree.tree_map_only(
                Pair, lambda pair: getattr(pair, name), (args, kwargs or {}))
            return func(*args_of, **kwargs_of)

        out = cls(take("one"), take("two"), "made")
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


class Silent(torch.Tensor):
    """A subclass that says nothing of its bytes."""


def test_a_plain_tensor_is_of_itself():
    tensor = torch.randn(3)
    flat = flatten(tensor)
    assert flat.leaves == [tensor] and flat.rebuild([tensor]) is tensor
    weight = torch.nn.Parameter(tensor)
    assert flatten(weight).leaves[0] is weight


def test_a_wrapper_is_of_its_inner_tensors_and_comes_back_the_same():
    pair = Pair(torch.randn(3, 4).t(), torch.randn(3, 4).t(), "tag")
    flat = flatten(pair)
    assert [leaf is inner for leaf, inner in zip(flat.leaves, (pair.one, pair.two), strict=True)]
    again = flat.rebuild([leaf.clone() for leaf in flat.leaves])
    assert type(again) is Pair and again.tag == "tag"
    assert again.size() == pair.size() and again.stride() == pair.stride()
    assert torch.equal(again.one, pair.one) and torch.equal(again.two, pair.two)


def test_a_wrapper_of_wrappers_is_taken_apart_to_the_bottom():
    outer = Pair(Pair(torch.ones(2), torch.zeros(2), "a"), torch.full((2,), 3.0), "b")
    flat = flatten(outer)
    assert [float(leaf[0]) for leaf in flat.leaves] == [1, 0, 3]
    again = flat.rebuild([leaf + 10 for leaf in flat.leaves])
    assert again.one.tag == "a" and float(again.one.two[0]) == 10 and float(again.two[0]) == 13


def test_rebuild_alone_keeps_no_leaf_alive():
    flat = flatten(Pair(torch.ones(2), torch.zeros(2), "a"))
    storages = [identity(leaf) for leaf in flat.leaves]
    build = flat.detach()
    del flat
    gc.collect()
    assert all(storage() is None for storage in storages)
    assert build([torch.ones(2), torch.ones(2)]).tag == "a"


def test_too_few_leaves_are_refused():
    with pytest.raises(ValueError, match="Pair is of 2 tensors, got 1"):
        flatten(Pair(torch.ones(2), torch.zeros(2), "a")).rebuild([torch.ones(2)])


@pytest.mark.parametrize("make", [
    lambda: torch.ones(2).as_subclass(Silent),
    lambda: Pair(torch.ones(2), torch.ones(2).as_subclass(Silent), "inner one unknown"),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
])
def test_what_is_unknown_stays(make):
    assert flatten(make()) is None


def test_a_fake_tensor_has_no_bytes_to_move():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert flatten(torch.ones(2)) is None


def test_a_tensor_inside_of_a_transform_has_no_storage_of_its_own():
    seen = []

    def look(tensor):
        seen.append(is_plain(tensor))
        return tensor.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert seen == [False, False]


def of_two_lengths(layout):
    parts = [torch.randn(2, 8), torch.randn(3, 8)]
    return torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_stays_and_its_gradient_is_the_same(rig, layout):  # noqa: F811
    """One kind raised when it was saved, and one in the backward pass: its lengths were others."""
    torch.manual_seed(0)
    one, wanted = of_two_lengths(layout), None
    for context in (contextlib.nullcontext(), rig.saved(min_bytes=0)):
        one.grad = None
        with context:
            out = (one * one).sin()
        torch.autograd.backward(out, torch.ones_like(out))
        found = [part.clone() for part in one.grad.unbind()]
        wanted = wanted or found
        assert all(map(torch.equal, found, wanted))
    report = context.report()
    assert report.kept[_reasons.UNKNOWN_KIND] > 0, report
    rig.assert_nothing_left()


def test_zeros_without_bytes_are_not_plain():
    zeros = torch._efficientzerotensor(5)
    assert not is_plain(zeros) and flatten(zeros) is None


class Whole(Pair):
    """Cannot be taken apart now."""

    def __tensor_flatten__(self):
        raise NotImplementedError("not now")


class Stubborn(Pair):
    """Does not let go of what it holds."""

    one = property(lambda self: self.__dict__["kept"])

    @one.setter
    def one(self, value):
        self.__dict__.setdefault("kept", value)


def test_a_class_that_cannot_be_taken_apart_now_stays(rig):  # noqa: F811
    """Its error came out of the forward."""
    tensor = Whole(*(torch.ones(64, device=rig.device) for _ in range(2)), "made")
    assert flatten(tensor) is None
    x = leaf(rig.device)
    seen: list = []
    with rig.saved() as context:
        out = save(x, [tensor], seen)
    out.sum().backward()
    assert _reasons.UNKNOWN_KIND in context.report().kept


def pair(rig, value=1.0):  # noqa: F811
    return Pair(*(torch.full((64,), value, device=rig.device) for _ in range(2)), "made")


@pytest.mark.parametrize("min_bytes", [16, 1 << 20])
@pytest.mark.parametrize("flushed", [False, True])
def test_an_edit_of_a_subclass_raises_what_autograd_raises(rig, min_bytes, flushed):  # noqa: F811
    """It counts in the subclass, and not in the tensors that it holds."""
    def backward(around):
        x = pair(rig).requires_grad_()
        with around:
            tensor = x * 3
            out = tensor.sin().sum()
            if flushed:
                rig.engine.drain()
                rig.desk.flush()
            with torch.no_grad():
                tensor.add_(1)
        out.backward()

    for around in (contextlib.nullcontext(), rig.saved(min_bytes=min_bytes)):
        with pytest.raises(RuntimeError, match="modified by an ?inplace operation"):
            backward(around)


class Scaling(torch.autograd.Function):
    """Edits in its backward what it saved, as fused losses do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return gradient * x


@pytest.mark.parametrize("reader", ["another node", "the same node again", "nobody"])
def test_an_edit_of_a_subclass_in_a_backward_raises_what_autograd_raises(rig, reader):  # noqa: F811
    """What came back had a counter of its own: later readers got the edited bytes."""
    def backward(around):
        x = pair(rig).requires_grad_()
        with around:
            tensor = x * 3
            out = tensor.sin().sum() if reader == "another node" else 0
            out = out + Scaling.apply(tensor).sum()
            rig.engine.drain()
            rig.desk.flush()
            out.backward(retain_graph=reader == "the same node again")
            if reader == "the same node again":
                out.backward()
        return x.grad.one

    context = rig.saved()
    if reader == "nobody":
        assert torch.equal(backward(contextlib.nullcontext()), backward(context))
    else:
        for around in (contextlib.nullcontext(), context):
            with pytest.raises(RuntimeError, match="modified by an ?inplace operation"):
                backward(around)
    assert context.report().moved > 0


def test_a_subclass_that_is_saved_edited_and_saved_again_gives_each_its_own(rig):  # noqa: F811
    """The second one was taken for the first, which had left."""
    def gradient(around):
        weight, state = pair(rig).requires_grad_(), pair(rig, 2.0)
        with around:
            first = (state * weight).sum()
            rig.engine.drain()
            rig.desk.flush()
            state.mul_(0.5)
            second = (state * weight).sum()
        del first, state
        second.backward()
        return weight.grad.one.clone()

    assert torch.equal(gradient(rig.saved()), gradient(contextlib.nullcontext()))


def test_a_class_that_does_not_let_go_of_its_bytes_stays(rig):  # noqa: F811
    tensor = Stubborn(torch.ones(64, device=rig.device), torch.ones(64, device=rig.device), "made")
    assert share_outer(tensor, ["one", "two"]) is None
