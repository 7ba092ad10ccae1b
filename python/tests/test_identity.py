"""A tensor that comes back with other strides, twice, or as somebody else's bytes: the fault
guarded against, with all that must not leave at all.
"""

from __future__ import annotations

import warnings

import lightering
import pytest
import torch
from lightering.torch import SavedTensors
from rig import rig  # noqa: F401
from saving import leaf, save, watch

VIEWS = {
    "transposed square": lambda: torch.randn(16, 16).t(),
    "offset slice": lambda: torch.randn(100)[7:93],
    "every other": lambda: torch.randn(100)[3::2],
    "expanded": lambda: torch.randn(16, 1).expand(16, 9),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "overlapping": lambda: torch.randn(20).as_strided((4, 8), (3, 1), 2),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "half of a pair": lambda: torch.randn(64, dtype=torch.complex64).real,
    "bytes of an odd length": lambda: torch.arange(37, dtype=torch.uint8),
    "booleans": lambda: torch.randn(64) > 0,
    "half precision": lambda: torch.randn(33).to(torch.bfloat16),
    "one number": lambda: torch.randn(20)[11],
    "of no dimension": lambda: torch.tensor(3.0, dtype=torch.float64),
}


@pytest.mark.parametrize("name", VIEWS)
def test_size_stride_offset_and_bytes_come_back(rig, name):  # noqa: F811
    made = VIEWS[name]()
    x, seen = leaf(rig.device), []
    with rig.saved(min_bytes=1) as context:
        tensor = _moved_whole(made, rig.device)
        wanted = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        bits = tensor.clone()
        out = save(x, [tensor], seen)
        del tensor
        out.sum().backward()
        assert context.report().moved > 0, context.report()
    (found,), = seen
    assert (found.size(), found.stride(), found.storage_offset(), found.dtype) == wanted
    assert torch.equal(found, bits)


def _moved_whole(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The same view of a copy of its whole storage, on a device."""
    storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.copy_(whole)
    return torch.empty(0, dtype=tensor.dtype, device=device).set_(
        storage.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def test_aliases_and_views_of_a_storage_move_once(rig):  # noqa: F811
    x, seen = leaf(rig.device), []
    with rig.saved() as context:
        base = torch.randn(64, 64, device=rig.device)
        whole, bits = base.nelement() * 4, base.clone()
        out = save(x, [base, base.t(), base[8:], base.view(-1), base.detach(), base], seen)
        del base
        out = save(out, [bits[0:1].expand(64, 64)], [])
        report = context.report()
        assert report.moved == whole + bits.nelement() * 4
        out.sum().backward()
    assert rig.engine.stats()["refilled_count"] <= 2, "a storage comes back once"
    found = seen[0]
    wanted = [bits, bits.t(), bits[8:], bits.view(-1), bits, bits]
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    assert len({each.untyped_storage().data_ptr() for each in found}) == 1


def test_a_storage_is_not_taken_for_the_one_that_had_its_address(rig):  # noqa: F811
    x = leaf(rig.device)
    for step in range(60):
        seen = []
        with rig.saved():
            out = x
            for layer in range(3):
                tensor = torch.full((256,), float(10 * step + layer), device=rig.device)
                out = save(out, [tensor], seen)
                del tensor
            out.sum().backward()
        assert [each[0][0].item() for each in seen] == [10 * step + 2, 10 * step + 1, 10 * step]


def test_a_shared_storage_is_not_freed_under_a_sibling(rig):  # noqa: F811
    x, seen = leaf(rig.device), []
    with rig.saved() as context:
        base = torch.arange(4096.0, device=rig.device)
        sibling = base[100:200]
        out = save(x, [base], seen)
        del base
        for _ in range(3):
            out = save(out, [torch.randn(4096, device=rig.device)], [])
        rig.desk.flush()
        report = context.report()
        assert report.unreleased >= 4096 * 4, "somebody keeps it"
        assert torch.equal(sibling, torch.arange(100.0, 200.0, device=rig.device))
        out.sum().backward()
    assert torch.equal(seen[0][0], torch.arange(4096.0, device=rig.device))


def test_parameters_and_buffers_never_move(rig):  # noqa: F811
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 32),
    ).to(rig.device)
    model[2].requires_grad_(False)
    addresses = {each.untyped_storage().data_ptr() for each in
                 [*model.parameters(), *model.buffers()]}
    packed, context = [], rig.saved()
    watch(context, lambda tensor: packed.append(tensor.untyped_storage().data_ptr()))
    with context:
        model(torch.randn(64, 32, device=rig.device)).sum().backward()
    assert packed and not addresses & set(packed)
    for each in [*model.parameters(), *model.buffers()]:
        assert each.untyped_storage().nbytes() > 0


def test_a_wrapper_subclass_moves_through_its_inner_tensors(rig):  # noqa: F811
    from torch.testing._internal.two_tensor import TwoTensor

    x, seen = leaf(rig.device), []
    with rig.saved() as context:
        one, two = (torch.randn(32, 8, device=rig.device) for _ in range(2))
        bits = one.clone(), two.clone()
        out = save(x, [TwoTensor(one, two)], seen)
        del one, two
        assert context.report().moved == 2 * 32 * 8 * 4
        out.sum().backward()
    (found,), = seen
    assert type(found) is TwoTensor and found.shape == (32, 8)
    assert torch.equal(found.a, bits[0]) and torch.equal(found.b, bits[1])


def test_a_dtensor_moves_through_its_local_tensor(rig, tmp_path):  # noqa: F811
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

    backend = "nccl" if rig.kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda" if rig.kind == "cuda" else "cpu", (1,))
        x, seen = leaf(rig.device), []
        with rig.saved() as context:
            tensor = distribute_tensor(torch.randn(32, 8, device=rig.device), mesh, [Replicate()])
            bits = tensor.to_local().clone()
            out = save(x, [tensor], seen)
            del tensor
            assert context.report().moved == 32 * 8 * 4
            out.sum().backward()
        (found,), = seen
        assert isinstance(found, DTensor) and torch.equal(found.to_local(), bits)
        del found
        seen.clear()
    finally:
        dist.destroy_process_group()


def test_an_unknown_kind_of_tensor_stays_and_says_so(rig):  # noqa: F811
    class Odd(torch.Tensor):
        pass

    x, seen = leaf(rig.device), []
    with rig.saved() as context, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = torch.randn(64, device=rig.device).as_subclass(Odd)
        out = save(x, [odd], seen)
        assert context.report().kept == {"unknown kind of tensor": 256}
        out.sum().backward()
    assert type(seen[0][0]) is Odd


def test_tensors_of_the_cpu_stay_without_an_engine_of_the_simulated_device():
    x, seen = leaf("cpu"), []
    context = SavedTensors(min_bytes=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with context:
            save(x, [torch.randn(64)], seen).sum().backward()
    assert context.report().kept == {"other device": 256}
    assert seen[0][0].shape == (64,)


def test_memory_that_two_storages_share_is_not_moved_twice(rig):  # noqa: F811
    if rig.kind == "cuda":
        pytest.skip("not run: from_blob on a GPU is not needed to show it")
    x, seen = leaf(rig.device), []
    with rig.saved() as context:
        base = torch.randn(64)
        other = torch.from_numpy(base.numpy())
        out = save(x, [base, other], seen)
        out.sum().backward()
        assert context.report().kept == {"shares memory with another": 256}
    assert torch.equal(seen[0][0], seen[0][1])


def test_an_engine_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="engine="):
        SavedTensors(engine="sim")
    with pytest.raises(ValueError, match="MiBB"):
        SavedTensors(min_bytes="1MiBB")
    with pytest.raises(ValueError, match="placement="):
        SavedTensors(placement="disk")
