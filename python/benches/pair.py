#!/usr/bin/env python3
"""Host time of one pack + unpack pair, and whose it is.

    pair.py [--device auto|sim|cuda:0] [--bytes SIZE] [--pairs 40] [--repeats 300]

What it is: the same graph of sines with and without ``SavedTensors``, the fastest of many repeats
that are short enough to pass between two turns of the scheduler; then its parts, each by itself.
What it is not: a training step. Nothing here waits for the device, and kernels are small.
Invariant: the last line is one of JSON; ``pair_us`` is measured, and its parts add up to it.

    torch    hooks that do nothing but the version probe, the metadata and making a tensor anew
    engine   the verbs of a pair alone, on the same bytes, less the door
    door     from Python to the engine and back: the interpreter's lock, two locks, no verb
    python   the rest: the hooks' rules and books, the interpreter, room from torch's allocator

Over the simulated device "engine" has the cost of simulating, and the copies are the host's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import lightering
import torch
from lightering import _arguments, _native
from lightering.torch import SavedTensors
from lightering.torch._stash import Desk
from lines import program

# Verbs of a pair: pack; unpack, refill or prefetch, sweep.
CALLS = 4


class Measured:
    """One device, its tensors, and the fastest that things went so far."""

    def __init__(self, device: str, nbytes: int, pairs: int, repeats: int) -> None:
        self.engine = lightering.Engine(device, unreleased_bytes="8GiB")
        self.desk = Desk.of(self.engine)
        self.device = self.desk.device
        self.pairs, self.repeats, self.nbytes = pairs, repeats, nbytes // 4 * 4
        self.engine.reserve(2 * pairs * nbytes)
        self.leaf = torch.randn(nbytes // 4, device=self.device, requires_grad=True)

    def wait(self) -> None:
        self.engine.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def graph(self, context: Any) -> tuple[float, float]:
        """Microseconds of one sine's forward and backward."""
        self.leaf.grad = None
        self.wait()
        with context:
            began = time.perf_counter()
            value = self.leaf
            for _ in range(self.pairs + 1):
                # Saves its input; the first one is a leaf, which stays.
                value = value.sin()
            total = value.sum()
            between = time.perf_counter()
            total.backward()
            ended = time.perf_counter()
        return tuple(each / self.pairs * 1e6 for each in (between - began, ended - between))

    def fastest(self, run: Callable[[], tuple[float, ...]]) -> list[float]:
        """Of each figure the fastest repeat: the host's own time, without what others did."""
        found = [run() for _ in range(self.repeats)][3:]
        return [min(each) for each in zip(*found, strict=True)]

    def verbs(self) -> tuple[float, float]:
        """Microseconds of a pair's verbs alone, packing and unpacking."""
        native, stream = self.desk.native, self.desk.stream()
        room = self.desk.room
        saved = _native.Saved(native, 0, 1)
        held = [room.take(self.nbytes)[0] for _ in range(2 * self.pairs)]
        places = [each.data_ptr() for each in held]
        addresses, targets = places[: self.pairs], places[self.pairs :]
        began = time.perf_counter()
        leases = [saved.pack(at, self.nbytes, stream, "pair")[0] for at in addresses]
        packed = time.perf_counter() - began
        native.flush()
        self.wait()
        native.flush()
        began = time.perf_counter()
        for target in targets:
            lease = leases.pop()
            if not saved.unpack(lease, stream)[0]:
                saved.refill(lease, target, stream)
            del lease
            native.sweep()
        unpacked = time.perf_counter() - began
        self.wait()
        native.flush()
        del held
        return tuple(each / self.pairs * 1e6 for each in (packed, unpacked))

    def door(self) -> tuple[float]:
        """Microseconds of a verb that does nothing."""
        call, count = self.desk.native.windows, 1000
        began = time.perf_counter()
        for _ in range(count):
            call()
        return ((time.perf_counter() - began) / count * 1e6,)

    def hooks(self) -> Any:
        """torch's own part of a pair, and no more: nothing moves."""
        from lightering._version import share

        def pack(tensor: torch.Tensor) -> Any:
            shared = share(tensor)
            return (tensor.untyped_storage(), shared, shared._version, tensor.storage_offset(),
                    tensor.size(), tensor.stride(), tensor.dtype)

        def unpack(packed: Any) -> torch.Tensor:
            storage, shared, version, offset, size, stride, dtype = packed
            assert shared._version == version
            return torch.empty(0, dtype=dtype, device=self.device).set_(
                storage, offset, size, stride)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def measure(device: str, nbytes: int, pairs: int, repeats: int) -> dict[str, Any]:
    """All figures of one device."""
    rig = Measured(device, nbytes, pairs, repeats)
    context = SavedTensors(min_bytes=1, engine=rig.engine)
    plain = rig.fastest(lambda: rig.graph(contextlib.nullcontext()))
    ours = rig.fastest(lambda: rig.graph(context))
    moved = context.report().moved
    assert moved >= pairs * rig.nbytes, f"{moved} bytes moved: nothing was measured"
    hooked = rig.fastest(lambda: rig.graph(rig.hooks()))
    verbs, (door,) = rig.fastest(rig.verbs), rig.fastest(rig.door)
    pack, unpack = (one - two for one, two in zip(ours, plain, strict=True))
    parts = {"torch_us": sum(hooked) - sum(plain), "engine_us": sum(verbs) - CALLS * door,
             "door_us": CALLS * door}
    parts["python_us"] = pack + unpack - sum(parts.values())
    figures = {"pair_us": pack + unpack, "pack_us": pack, "unpack_us": unpack, **parts}
    name = torch.cuda.get_device_name(rig.device) if rig.device.type == "cuda" else "simulated"
    return {"bench": "pair", "device": name, "simulated": rig.engine.is_simulated,
            "bytes": rig.nbytes, "pairs": pairs, "torch": torch.__version__,
            "lightering": lightering.__version__,
            **{key: round(value, 2) for key, value in figures.items()}}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bytes", default=None, help="of each tensor; 1MiB, simulated 16KiB")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args(words)
    if options.pairs < 1 or options.repeats < 4:
        parser.error("--pairs is at least 1, --repeats at least 4")
    torch.set_num_threads(1)
    try:
        is_simulated = lightering.Engine(options.device).is_simulated
        size = options.bytes or ("16KiB" if is_simulated else "1MiB")
        nbytes = _arguments.size(size, "--bytes", least=16)
        figures = measure(options.device, nbytes, options.pairs, options.repeats)
    except (ValueError, lightering.Error) as error:
        parser.error(str(error))
    print(json.dumps(figures))


if __name__ == "__main__":
    program(main, "pair.py")
