"""An edit of a saved tensor that nobody notices: the fault guarded against. Hooks switch off the
check that autograd makes itself; whatever it would have raised is raised here.
"""

from __future__ import annotations

import pytest
import torch
from rig import rig  # noqa: F401
from saving import leaf, save

EDITS = {
    "itself": lambda tensor: tensor.add_(1),
    "a view": lambda tensor: tensor[2:5].zero_(),
    "a view of a view": lambda tensor: tensor.view(8, 8)[1].mul_(2),
    "a detached one": lambda tensor: tensor.detach().fill_(0),
    "by copy": lambda tensor: tensor.copy_(torch.zeros_like(tensor)),
}
SAID = "modified by an ?inplace operation"


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("flushed", [False, True])
def test_an_edit_after_the_save_raises_what_autograd_raises(rig, name, flushed):  # noqa: F811
    def backward(around):
        x = torch.ones(64, device=rig.device, requires_grad=True)
        with around:
            tensor = x * 3
            out = tensor.sin().sum() + tensor.square().sum()
            if flushed:
                rig.desk.flush()
            with torch.no_grad():
                EDITS[name](tensor)
            out.backward()

    with pytest.raises(RuntimeError, match=SAID):
        backward(torch.enable_grad())
    context = rig.saved()
    with pytest.raises(RuntimeError, match=SAID):
        backward(context)
    assert context.report().moved == 256, "an edit of what stayed is another story"


@pytest.mark.parametrize("mode", ["saved", "hidden"])
def test_an_edit_of_a_tensor_that_stayed_raises_too(rig, mode):  # noqa: F811
    weight = torch.nn.Parameter(torch.ones(64, device=rig.device))
    context = getattr(rig, mode)()
    with context:
        out = (weight * weight.sin()).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match=SAID):
        out.backward()


def test_an_edited_input_of_a_checkpoint_raises(rig):  # noqa: F811
    x = torch.ones(64, device=rig.device, requires_grad=True)
    with rig.hidden(keep_last=0) as context:
        hidden = x * 2
        out = torch.utils.checkpoint.checkpoint(torch.sin, hidden, use_reentrant=False)
        with torch.no_grad():
            hidden.add_(1)
        with pytest.raises(RuntimeError, match=SAID):
            out.sum().backward()
        assert context.report().moved == 256
    del hidden, out


def test_a_tensor_that_is_saved_edited_and_saved_again_gives_each_its_own(rig):  # noqa: F811
    x, seen = leaf(rig.device), []
    with rig.saved() as context:
        tensor = torch.zeros(64, device=rig.device)
        first = save(x, [tensor], [])
        tensor.add_(5)
        out = save(x, [tensor], seen)
        out.sum().backward()
        assert context.report().kept.get("edited since it was saved") == 256
    assert first is not None and torch.equal(seen[0][0], torch.full((64,), 5.0, device=rig.device))


def test_an_edit_of_what_nobody_reads_again_raises_nothing(rig):  # noqa: F811
    x = leaf(rig.device)
    with rig.saved():
        tensor = x * 2
        tensor.sin()
        unused = tensor.square()
        with torch.no_grad():
            tensor.zero_()
        (x * 3).sum().backward()
    assert unused is not None and torch.equal(x.grad, torch.full_like(x, 3.0))


class Scaling(torch.autograd.Function):
    """Edits in its backward what it saved, or a view of that, as fused losses do."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.save_for_backward(x)
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        EDITS[ctx.name](x)
        return gradient * x, None


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("part", ["all of it", "half of it"])
@pytest.mark.parametrize("reader", ["another node", "the same node again", "nobody"])
def test_an_edit_in_a_backward_raises_what_autograd_raises(rig, name, part, reader):  # noqa: F811
    """What came back had a version of its own: later readers got the edited bytes."""

    def backward(around):
        x = torch.ones(64, device=rig.device, requires_grad=True)
        with around:
            tensor = x.repeat(1 if part == "all of it" else 2) * 3
            out = tensor.sin().sum() if reader == "another node" else 0
            out = out + Scaling.apply(tensor[-64:], name).sum()
            del tensor
            rig.desk.flush()
            out.backward(retain_graph=reader == "the same node again")
            if reader == "the same node again":
                out.backward()
        return x.grad

    context = rig.saved()
    if reader == "nobody":
        assert torch.equal(backward(torch.enable_grad()), backward(context))
    else:
        for around in (torch.enable_grad(), context):
            with pytest.raises(RuntimeError, match=SAID):
                backward(around)
    assert context.report().moved >= 256


@pytest.mark.parametrize("again", [False, True])
def test_a_storage_that_is_resized_while_it_is_copied_is_an_error(rig, again):  # noqa: F811
    """As FSDP does with its own: what was copied then are the bytes of whoever came next."""
    x, seen = leaf(rig.device), []
    with rig.saved():
        tensor = torch.full((256,), 3.0, device=rig.device)
        if rig.kind == "cuda":
            # The copy is behind it, and not done before the storage is resized.
            torch.cuda._sleep(20_000_000)
        out = save(x, [tensor], seen)
        tensor.untyped_storage().resize_(0)
        others = [torch.full((256,), 7.0, device=rig.device) for _ in range(4)]
        if again:
            tensor.untyped_storage().resize_(1024)
        rig.desk.flush()
        with pytest.raises(RuntimeError, match="resized while it was copied"):
            out.sum().backward()
    assert len(others) == 4 and not seen
