"""Gradients of bytes that were overwritten after they were saved: the fault guarded against.

Saved-tensors hooks switch autograd's own check off. Each edit runs twice: plainly, and with hooks
that save a probe; both have to raise, or neither.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightering._ownership import identity, sole
from lightering._version import VersionProbe, probe


def pack(tensor):
    return tensor.clone(), probe(tensor)


def unpack(packed):
    tensor, seen = packed
    seen.check()
    return tensor


def nothing(tensor):
    pass


def itself(tensor):
    tensor.add_(1)


def its_view(tensor):
    tensor[1:].mul_(2)


def its_view_of_before(tensor):
    tensor.view_of_before.zero_()


def its_base(tensor):
    tensor._base.zero_()


def a_detached_one(tensor):
    tensor.detach().zero_()


def out_of_an_operator(tensor):
    torch.add(torch.ones(4), 1, out=tensor)


def behind_the_counter(tensor):
    tensor.data.add_(1)


def outcome(edit, hooked):
    """What a step ends in whose saved tensor was edited: the error, or None."""
    leaf = torch.ones(5, requires_grad=True)
    with saved_tensors_hooks(pack, unpack) if hooked else torch.enable_grad():
        saved = (leaf * 2)[1:]
        saved.view_of_before = saved[2:]
        # sin saves its input.
        loss = saved.sin().sum()
    with torch.no_grad():
        edit(saved)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("edit", [
    nothing, itself, its_view, its_view_of_before, its_base, a_detached_one, out_of_an_operator,
    behind_the_counter,
])
def test_an_edit_after_saving_raises_what_autograd_raises(edit):
    plain, hooked = outcome(edit, False), outcome(edit, True)
    assert (plain is None) == (hooked is None), (plain, hooked)
    assert (plain is None) == (edit in (nothing, behind_the_counter))
    if plain is not None:
        phrase = "modified by an inplace operation"
        assert phrase in plain and phrase in hooked
        assert "expected version" in hooked


def test_an_output_that_its_own_operator_saved_is_followed_too():
    leaf = torch.ones(4, requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        out = leaf.exp()
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


def test_an_edit_before_saving_is_no_edit():
    leaf = torch.ones(4, requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        once = leaf * 2
        once.add_(1)
        loss = once.sin().sum()
    loss.backward()


@pytest.mark.parametrize("make", [
    lambda: torch.randn(1000),
    lambda: torch.randn(1000, requires_grad=True) * 2,
    lambda: (torch.randn(1000, requires_grad=True) * 2).exp(),
])
def test_a_probe_holds_no_bytes_and_owns_nothing(make):
    holder = [make()]
    owned = sole(holder)
    seen = VersionProbe(holder[0])
    assert seen._shared.untyped_storage().nbytes() == 0
    assert sole(holder) == owned
    storage = identity(holder[0])
    del holder
    gc.collect()
    assert storage() is None
    assert not seen.changed()


def test_a_probe_made_under_no_grad_or_of_a_parameter_follows_edits():
    weight = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        seen = probe(weight)
        weight.add_(1)
    assert seen.changed()
    with pytest.raises(RuntimeError, match=r"shape \[3\]"):
        seen.check()


def test_an_inference_tensor_has_no_probe():
    with torch.inference_mode():
        tensor = torch.ones(3)
    assert probe(tensor) is None


def test_the_first_probe_of_a_kind_may_be_made_in_inference_mode():
    normal = torch.ones(3, dtype=torch.float64)
    with torch.inference_mode():
        seen = probe(normal)
    normal.add_(1)
    assert seen.changed()
