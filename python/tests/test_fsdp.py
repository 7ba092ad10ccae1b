"""A weight leaves the device under its module: the fault guarded against.

Storages of parameters, buffers and weights that FSDP2 gathered must be known as resident at the
moment autograd saves them, and hooks must be gone when the watch ends.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_module
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.modules import module as modules

from lightering import _fsdp
from lightering._fsdp import ResidentStorages, gathered, is_fsdp, is_fsdp1, is_weight
from lightering._ownership import identity
from lightering._subclass import flatten


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def watched():
    resident = ResidentStorages()
    resident.start()
    yield resident
    resident.stop()
    assert not modules._global_forward_pre_hooks


class Layer(torch.nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8, bias=False)
        self.norm = torch.nn.LayerNorm(8)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.up.requires_grad_(not frozen)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden)))) * self.scale


class Stack(torch.nn.Module):
    def __init__(self, layers=3, frozen=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(frozen) for _ in range(layers))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def saved_in_a_step(model, resident, steps=1):
    """What autograd saves: whether each storage is resident, and whether it is a weight's."""
    seen = []

    def pack(tensor):
        weights = {identity(leaf) for weight in (*model.parameters(), *model.buffers())
                   for leaf in flatten(weight).leaves}
        for module in model.modules():
            if is_fsdp(module):
                weights |= {identity(each) for each in gathered(module)}
        seen.append((tensor in resident, identity(tensor) in weights))
        return tensor

    for _ in range(steps):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(torch.randn(4, 8, requires_grad=True))
        out.sum().backward()
    return seen


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_and_buffers_are_resident_and_activations_are_not(watched, frozen):
    seen = saved_in_a_step(Stack(frozen=frozen), watched)
    assert all(resident == weight for resident, weight in seen)
    assert {weight for _, weight in seen} == {True, False}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_fsdp_gathered_are_resident_from_the_first_step_on(
    group, watched, frozen, reshard
):
    model = Stack(frozen=frozen)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    seen = saved_in_a_step(model, watched, steps=3)
    assert not watched.blind
    assert all(resident == weight for resident, weight in seen)
    assert {weight for _, weight in seen} == {True, False}


def test_checkpointing_inside_of_fsdp_hides_no_weight(group, watched):
    model = Stack()
    for layer in model.layers:
        checkpoint_module(layer)
        fully_shard(layer)
    fully_shard(model)
    seen = saved_in_a_step(model, watched, steps=2)
    assert seen and all(resident == weight for resident, weight in seen)


def test_fsdp_that_hides_its_weights_makes_everything_stay(group, watched, monkeypatch):
    model = fully_shard(Stack())

    def moved(module):
        raise AttributeError("no fsdp_params here")

    monkeypatch.setattr(_fsdp, "gathered", moved)
    model(torch.randn(4, 8))
    assert "no fsdp_params here" in watched.blind
    assert torch.randn(3) in watched


def test_kinds_of_tensors_without_a_storage_are_nobodys(watched):
    layer = Layer()
    layer(torch.randn(2, 8))
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), "no tensor", None):
        assert tensor not in watched
    with torch.device("meta"):
        assert torch.ones(3) not in watched


def test_a_wrapper_of_a_weight_is_the_weights(group, watched):
    mesh = init_device_mesh("cpu", (1,))
    layer = Layer()
    parallelize_module(layer, mesh, {"up": ColwiseParallel()})
    layer(torch.randn(2, 8))
    weight = layer.up.weight
    assert weight in watched and weight.detach().t() in watched
    assert weight._local_tensor.view(-1) in watched
    assert distribute_tensor(torch.randn(4, 4), mesh) not in watched


def test_a_second_root_and_a_replaced_parameter_are_read(watched):
    one, two = Layer(), Layer()
    one(torch.randn(2, 8))
    assert one.up.weight in watched and two.up.weight not in watched
    two(torch.randn(2, 8))
    old = identity(one.up.weight)
    one.up.weight = torch.nn.Parameter(torch.randn(16, 8))
    assert one.up.weight not in watched
    one(torch.randn(2, 8))
    assert one.up.weight in watched and two.up.weight in watched and old() is None


def test_what_died_is_forgotten_over_many_roots(watched):
    for _ in range(50):
        Layer()(torch.randn(2, 8))
    watched.read(torch.nn.Identity())
    assert len(watched._known) == len(watched) <= 6


def test_a_root_that_raises_is_watched_again(watched):
    class Broken(torch.nn.Module):
        def forward(self, hidden):
            raise ValueError("broken")

    broken = Broken()
    with pytest.raises(ValueError, match="broken"):
        broken(torch.randn(2, 8))
    assert not broken._forward_hooks
    layer = Layer()
    layer(torch.randn(2, 8))
    assert layer.up.weight in watched


def test_while_a_root_runs_no_global_hook_slows_its_modules(watched):
    seen = []

    class Asks(torch.nn.Module):
        def forward(self, hidden):
            seen.append(len(modules._global_forward_pre_hooks))
            return hidden

    asks = torch.nn.Sequential(Asks(), Layer())
    asks(torch.randn(2, 8))
    assert seen == [0]
    assert len(modules._global_forward_pre_hooks) == 1
    assert not asks._forward_hooks


def test_another_thread_neither_is_read_nor_ends_the_watch(watched):
    other, mine = Layer(), Layer()
    thread = threading.Thread(target=other, args=(torch.randn(2, 8),))
    thread.start()
    thread.join()
    assert other.up.weight not in watched
    mine(torch.randn(2, 8))
    assert mine.up.weight in watched


def test_the_end_of_a_watch_leaves_no_hook(group):
    model = fully_shard(Stack())
    before = len(model._forward_pre_hooks)
    resident = ResidentStorages()
    resident.start()
    model(torch.randn(4, 8))
    assert len(model._forward_pre_hooks) == before + 1
    resident.stop()
    resident.stop()
    assert len(model._forward_pre_hooks) == before and not modules._global_forward_pre_hooks


def test_a_weight_in_a_compiled_function_is_known_without_its_root():
    layer = Layer(frozen=True)
    seen = []

    def pack(tensor):
        weights = {identity(weight) for weight in layer.parameters()}
        seen.append((is_weight(tensor), identity(tensor) in weights))
        return tensor

    compiled = torch.compile(lambda hidden: layer(hidden) * 2, backend="aot_eager")
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(torch.randn(4, 8)).sum().backward()
        layer(torch.randn(4, 8)).sum().backward()
    assert {weight for _, weight in seen} == {True, False}
    assert all(known == weight for known, weight in seen), seen


def test_fsdp1_is_told_from_fsdp2(group, monkeypatch):
    assert not is_fsdp1(fully_shard(Stack())) and not is_fsdp(Stack())

    # FSDP1 itself runs on no CPU; only its type is asked for.
    class Flat(torch.nn.Sequential):
        pass

    monkeypatch.setattr(torch.distributed.fsdp, "FullyShardedDataParallel", Flat)
    assert is_fsdp1(torch.nn.Sequential(Flat(Layer()))) and not is_fsdp1(Layer())
