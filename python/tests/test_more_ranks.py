"""Gradients that ranks share go wrong under offload: the fault guarded against.

DistributedDataParallel, whose hooks run in the backward; a tensor-parallel layer, whose activations
are DTensors and whose collectives are asynchronous; FSDP2 without checkpointing and with weights
that stay gathered. Two ranks of gloo on this machine; on GPUs where there are two.
"""

from __future__ import annotations

import harness
import models
import pytest
import rig as rigs
import sharded
import torch
import torch.distributed as dist
from harness import Way
from ranks import run_ranks
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


def rig_of(backend):
    """This rank's engine; a small one, so that copies wait for each other."""
    import lightering

    options = {"unreleased_bytes": "2KiB", "prefetch_bytes": "4KiB"}
    if backend == "nccl":
        index = dist.get_rank()
        return rigs.Rig("cuda", f"cuda:{index}", lightering.Engine(f"cuda:{index}", **options))
    return rigs.make("sim", **options)


def modes(rig):
    saved, hidden = rig.saved(), rig.hidden()
    return Way("saved", lambda: saved), Way("hidden", lambda: hidden)


def accumulate(model, around):
    """Two micro-steps, the first of which reduces nothing, and a step without."""
    losses = []
    for seed in range(3):
        sync = model.no_sync if seed == 0 else None
        with around():
            if sync:
                with sync():
                    loss = sharded.loss_of(model, seed)
                    loss.backward()
            else:
                loss = sharded.loss_of(model, seed)
                loss.backward()
        losses.append(loss)
    return losses


def data_parallel(rank, world, backend, options):
    rig = rig_of(backend)

    def make():
        model = models.moe(rig.device, checkpoint="positional")
        return DistributedDataParallel(model, find_unused_parameters=False, **options)

    outcome = harness.compare(make, accumulate, *modes(rig))
    rig.assert_nothing_left()
    return len(outcome.gradients)


@pytest.mark.parametrize("options", [
    {}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
])
@pytest.mark.parametrize("kind", rigs.DEVICES)
def test_data_parallel_gradients_are_those_without_offload(tmp_path, kind, options):
    backend = backend_of(kind)
    counts = run_ranks(data_parallel, 2, tmp_path, backend, options, backend=backend)
    assert counts[0] == counts[1] > 20


def backend_of(kind):
    if kind == "cuda":
        rigs.gpu_or_skip(2)
        return "nccl"
    return "gloo"


class Halves(torch.nn.Module):
    """A feed-forward whose two products are of two ranks; its own input is sharded by tokens."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


def tensor_parallel(rank, world, backend):
    rig = rig_of(backend)
    mesh = init_device_mesh("cuda" if backend == "nccl" else "cpu", (world,))

    def make():
        model = models.seeded(lambda: torch.nn.Sequential(Halves(), Halves()), rig.device)
        for layer in model:
            parallelize_module(layer, mesh, {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=True),
            })
        return model

    def step(model, around):
        losses = []
        for seed in range(2):
            torch.manual_seed(100 + seed)
            hidden = torch.randn(6, 8).to(rig.device).requires_grad_()
            with around():
                loss = model(hidden * 1).square().sum()
                loss.backward()
            losses += [loss, hidden.grad]
        return losses

    kinds = set()

    def look(tensor):
        kinds.add(type(tensor))
        return tensor

    step(make(), lambda: saved_tensors_hooks(look, lambda tensor: tensor))
    assert DTensor in kinds, f"nothing was shown: autograd saved {kinds}"
    saved = rig.saved()
    harness.compare(make, step, Way("saved", lambda: saved))
    assert saved.report().moved > 0 and not saved.report().kept, saved.report()
    rig.assert_nothing_left()
    return True


@pytest.mark.parametrize("kind", rigs.DEVICES)
def test_tensor_parallel_layers_have_the_same_bits(tmp_path, kind):
    backend = backend_of(kind)
    assert run_ranks(tensor_parallel, 2, tmp_path, backend, backend=backend) == [True, True]


def saved_mode():
    rig = rig_of(dist.get_backend())
    context = rig.saved()
    return sharded.Mode(around=lambda: context, checkpoint=False)


def saved_mode_of_checkpointed():
    rig = rig_of(dist.get_backend())
    context = rig.saved()
    return sharded.Mode(around=lambda: context)


@pytest.mark.parametrize("mode", [saved_mode, saved_mode_of_checkpointed])
@pytest.mark.parametrize("kind", rigs.DEVICES)
def test_weights_that_stay_gathered_are_served_alike(tmp_path, kind, mode):
    backend = backend_of(kind)
    for reshard in (True, False):
        folder = tmp_path / str(reshard)
        folder.mkdir()
        counts = run_ranks(
            sharded.gradients_are_equal, 2, folder, mode, "moe", reshard, backend=backend)
        assert counts[0] == counts[1] > 20
