"""A storage is emptied while somebody else still reads it: the fault guarded against.

Each case makes owners in a way that programs do and asks for the verdict. A "yes" in a case that
has another owner would be silent corruption; a "no" for a sole owner would free nothing.
"""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightering import _ownership
from lightering._ownership import RESIZE, Counts, counts, identity, sole


@pytest.fixture(autouse=True)
def calibrated():
    if sys.version_info[:2] <= (3, 13) and torch.__version__.startswith("2.11"):
        assert RESIZE.allowed, RESIZE.reason
    elif not RESIZE.allowed:
        pytest.skip(f"not calibrated here: {RESIZE.reason}")


def result():
    return torch.randn(8, requires_grad=True) * 2


def test_a_sole_owner_is_known_as_one():
    holder = [result()]
    assert counts(holder) == Counts(2, 1, 1)
    assert sole(holder)


def test_a_dead_view_is_no_owner():
    holder = [result()]
    view = holder[0][1:]
    assert not sole(holder)
    del view
    assert sole(holder)


def test_a_live_view_is_an_owner():
    holder = [result()]
    view = holder[0][1:]
    assert counts(holder) == Counts(3, 2, 2) and view is not None
    assert not sole(holder)


def test_a_detached_tensor_is_an_owner():
    holder = [result()]
    detached = holder[0].detach()
    assert counts(holder) == Counts(3, 1, 1) and detached is not None
    assert not sole(holder)


def test_a_numpy_array_is_an_owner():
    pytest.importorskip("numpy")
    holder = [torch.randn(8)]
    array = holder[0].numpy()
    assert not sole(holder) and array is not None


def test_an_export_by_dlpack_is_an_owner():
    holder = [torch.randn(8)]
    capsule = torch.utils.dlpack.to_dlpack(holder[0])
    assert not sole(holder) and capsule is not None


def test_the_same_object_in_a_list_is_seen_by_the_python_count_alone():
    holder = [result()]
    elsewhere = [holder[0]]
    assert counts(holder) == Counts(2, 1, 2) and elsewhere
    assert not sole(holder)
    assert sole(holder, python_named=2)


def test_an_operator_that_saved_the_tensor_is_an_owner():
    holder = [result()]
    graph = holder[0].sin()
    assert counts(holder) == Counts(2, 2, 2) and graph is not None
    assert not sole(holder)
    # Naming more Python references must not talk the C++ owner away.
    assert not sole(holder, python_named=2)


def test_an_operator_that_saved_a_view_is_an_owner():
    holder = [result()]
    graph = holder[0][1:].sin()
    assert not sole(holder) and not sole(holder, python_named=2) and graph is not None


def test_an_output_saved_by_its_own_operator_is_owned_by_the_graph():
    holder = [result().exp()]
    assert counts(holder) == Counts(3, 1, 1)
    assert not sole(holder)


def test_a_view_whose_base_is_dead_is_not_taken_for_a_whole_storage():
    holder = [result()[1:]]
    assert not sole(holder)


class Block(torch.nn.Module):
    """A layer, and what a test does with its input between the layer and the question."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, hidden, scale=1.0):
        return torch.tanh(self.linear(hidden)) * scale


def keyword(block, hidden):
    return checkpoint(block, use_reentrant=False, hidden=hidden)


def closure(block, hidden):
    import functools

    return checkpoint(functools.partial(block, hidden), use_reentrant=False)


def cell(block, hidden):
    return checkpoint(lambda: block(hidden), use_reentrant=False)


@pytest.mark.parametrize("call", [keyword, closure, cell])
def test_a_checkpoint_that_closes_over_its_input_is_an_owner_that_can_be_named(call):
    holder = [result()]
    out = call(Block(), holder[0])
    assert counts(holder) == Counts(2, 1, 2)
    assert sole(holder, python_named=2) and not sole(holder)
    out.sum().backward()


def test_a_user_who_keeps_a_checkpointed_input_is_an_owner():
    holder = [result()]
    out = keyword(Block(), holder[0])
    kept = {"hidden": holder[0], "again": [holder[0]]}
    assert counts(holder) == Counts(2, 1, 4) and kept and out is not None
    assert not sole(holder, python_named=2)


def test_a_view_kept_of_a_checkpointed_input_is_an_owner():
    holder = [result()]
    out = keyword(Block(), holder[0])
    kept = holder[0][1:]
    assert counts(holder) == Counts(3, 2, 3) and kept is not None and out is not None
    assert not sole(holder, python_named=2) and not sole(holder, python_named=3)


def test_a_residual_product_with_a_checkpointed_input_is_an_owner():
    holder = [result()]
    out = holder[0] * keyword(Block(), holder[0])
    assert counts(holder) == Counts(2, 2, 3) and out is not None
    assert not sole(holder, python_named=2) and not sole(holder, python_named=3)


# ---- the calibration itself ----


def test_counts_that_disagree_with_a_known_case_forbid_every_resize():
    name = "the same object in a list"
    case = _ownership._beside(lambda tensor: [tensor])
    verdict = _ownership._calibrate(((name, case, True),))
    assert not verdict.allowed and name in verdict.reason
    verdict = _ownership._calibrate((("a sole owner", lambda: Counts(2, 2, 1), True),))
    assert not verdict.allowed and "Counts(storage=2, tensor=2, python=1)" in verdict.reason


def test_a_private_name_that_raises_forbids_every_resize():
    def gone():
        raise AttributeError("no such name")

    verdict = _ownership._calibrate((("a sole owner", gone, True),))
    assert not verdict.allowed and "no such name" in verdict.reason


def test_a_private_name_that_is_gone_forbids_every_resize(monkeypatch):
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    verdict = _ownership._calibrate()
    assert not verdict.allowed and "_storage_Use_Count" in verdict.reason


def test_free_threaded_python_forbids_every_resize(monkeypatch):
    monkeypatch.setattr(_ownership.sysconfig, "get_config_var", lambda name: 1)
    verdict = _ownership._calibrate()
    assert not verdict.allowed and "free-threaded" in verdict.reason


def test_a_forbidden_resize_makes_no_owner_sole(monkeypatch):
    monkeypatch.setattr(_ownership, "RESIZE", _ownership.Resize(False, "a test"))
    assert not sole([result()])


def test_calibration_does_not_depend_on_the_grad_mode_of_the_importer():
    with torch.no_grad():
        assert _ownership._calibrate().allowed
    with torch.inference_mode():
        assert _ownership._calibrate().allowed


# ---- identity ----


def test_all_views_of_a_storage_have_one_identity():
    base = torch.randn(4, 6)
    views = [base[1:], base.t(), base.detach(), base.view(-1)[3:], base.expand(2, 4, 6)]
    assert all(identity(view) is identity(base) for view in views)
    assert identity(base.clone()) != identity(base)


def test_an_identity_lives_as_long_as_the_storage_and_no_longer():
    base = result()
    known = identity(base)
    kept = base.detach()
    del base
    gc.collect()
    assert known() is kept.untyped_storage()
    del kept
    assert known() is None


def test_a_storage_at_the_address_of_a_dead_one_is_another_one():
    seen: dict[weakref.ref, int] = {}
    addresses = set()
    for turn in range(200):
        tensor = torch.empty(64)
        addresses.add(tensor.untyped_storage()._cdata)
        assert identity(tensor) not in seen
        seen[identity(tensor)] = turn
    assert len(seen) == 200
    # The addresses were lent again, or this test showed nothing.
    assert len(addresses) < 200
