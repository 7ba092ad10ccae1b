"""All-gathers of two ranks, beside copies out.

What it is: passes of 20 all-gathers behind a chain of kernels that saves tensors: plainly, while
those tensors are copied out raw, and while they leave through ours; each to a place of its own.
What it is not: steps of a model; ``sharded_steps.py`` has those, and calls this.
Invariant: both ways copy past the last gather, or the pass is left out in all ways; every pass
begins behind the same work, with all ranks there; the device's clock counts, and of it the slowest
rank's.

    warm ........|meet|chain: sin sin sin ...|idle, meet|gather|event|20 gathers|event|
                       copies ===================================================== ... done
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from clock import wait
from output import Output
from ways import Missing, OursAll, load
from workloads import Built

GATHERS = 20
# Passes of 20 all-gathers in each way, and gathers before each pass.
PASSES = 60
WARMING = 200
# Passes that warm up, and of the others those that may be left out.
COLD = 2
EARLY_MAX = 0.1


def meet(device: torch.device) -> None:
    """All ranks go on from here at once."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def slowest(values: list[float], device: torch.device) -> list[float]:
    """Of each value the largest of all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


class Gathers:
    """What every way gathers and copies, on one rank."""

    def __init__(self, device: torch.device, small: bool, ranks: int) -> None:
        self.device, self.small = device, small
        self.on_gpu = device.type == "cuda"
        numel = (1 << 10) if small else (16 << 20)
        self.links = 8 if small else 96
        self.piece = torch.randn(numel, device=device)
        self.whole = torch.empty(numel * ranks, device=device)
        self.leaf = torch.randn(numel, device=device, requires_grad=True)
        self.aside = torch.cuda.Stream(device) if self.on_gpu else None
        self.collective = torch.cuda.Stream(device) if self.on_gpu else None
        # The chain's first value is a leaf, which stays, and its last one nobody saves.
        self.hosts = [torch.empty(numel, pin_memory=self.on_gpu) for _ in range(self.links - 1)]
        self.leaving = len(self.hosts) * numel * self.piece.element_size()
        # Of each pass what left for ours; and whether copies of some way were over too early.
        self.left: list[int] = []
        self.early: list[float] = []

    def attach(self) -> Any:
        """Ours, with a window that all the tensors fit in. Raises Missing where it is not there."""
        place = str(self.device) if self.on_gpu else "sim"
        window = load("lightering").Engine(place, unreleased_bytes=2 * self.leaving)
        self.ours = OursAll(self.device, window)
        # It needs nothing of a model.
        module = torch.nn.Module()
        self.ours.attach(Built(module, self.chain, [], self.links, 0, lambda tokens: None))
        return self.ours.context()

    def chain(self) -> list[torch.Tensor]:
        values = [self.leaf]
        for _ in range(self.links):
            values.append(values[-1].sin())
        return values[1:-1]

    def raw(self, values: list[torch.Tensor]) -> None:
        if self.aside is None:
            for host, value in zip(self.hosts, values, strict=True):
                host.copy_(value.detach())
            return
        # As ours, behind the kernels; all the tensors are alive until the pass is over.
        self.aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.aside):
            for host, value in zip(self.hosts, values, strict=True):
                host.copy_(value.detach(), non_blocking=True)

    def gather(self, count: int) -> None:
        for _ in range(count):
            dist.all_gather_into_tensor(self.whole, self.piece)

    def timed(self) -> float:
        """Seconds of the gathers, by the device's clock. One goes ahead of them: what the host
        takes to begin is not theirs."""
        if self.collective is None:
            began = time.perf_counter()
            self.gather(GATHERS)
            return time.perf_counter() - began
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.collective):
            self.gather(1)
            first.record()
            self.gather(GATHERS)
            last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def one(self, name: str, context: Any) -> float:
        """One pass of a way; its seconds."""
        is_ours = name == "ours"
        before = self.ours.moved()[0] if is_ours else 0
        # A GPU that only copied for a tenth of a second, as behind two of the ways, gathers 2 %
        # slower for a while.
        self.gather(1 if self.small else WARMING)
        wait(self.device)
        meet(self.device)
        # Inside: who leaves the context has the stream wait for the copies.
        with context:
            values = self.chain()
            if name == "raw":
                self.raw(values)
            # The chain is over; what is left to run beside the gathers is copies, in every way.
            if self.on_gpu:
                torch.cuda.current_stream(self.device).synchronize()
            if is_ours:
                self.left.append(self.ours.moved()[0] - before)
            # Hooks take the host's time, on each rank another: who is early would wait for the
            # other one within the gathers.
            meet(self.device)
            seconds = self.timed()
            over = time.perf_counter()
            wait(self.device)
            if self.on_gpu and name != "alone" and time.perf_counter() - over < 0.001:
                self.early[-1] = 1
        del values
        return seconds


def run(device: torch.device, small: bool, ranks: int, output: Output | None) -> None:
    """All ways in turn, there and back."""
    gathers = Gathers(device, small, ranks)
    ways: dict[str, Any] = {"alone": nullcontext(), "raw": nullcontext()}
    try:
        ways["ours"] = gathers.attach()
    except Missing as missing:
        if output:
            output.say(f"gathers ours: skipped: {missing}")
    found: dict[str, list[float]] = {}
    for turn in range(COLD + (4 if small else PASSES)):
        gathers.early.append(0)
        for name in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
            found.setdefault(name, []).append(gathers.one(name, ways[name]))
    early = slowest(gathers.early[COLD:], device)
    moved = {"ours": gathers.left[COLD:], "raw": [gathers.leaving] * len(early)}
    told({name: slowest(all_of[COLD:], device) for name, all_of in found.items()}, early, moved,
         output)


def told(
    found: dict[str, list[float]], early: list[float], moved: dict[str, list[int]],
    output: Output | None,
) -> None:
    """Says and keeps the passes in which no copy was over early on any rank, in all ways alike:
    a pass of one way is beside the same one of another."""
    if output is None:
        return
    count, whole = len(early), [nth for nth, is_early in enumerate(early) if not is_early]
    if len(whole) < count:
        output.say(f"gathers: in {count - len(whole)} of {count} passes copies were over before "
                   "the gathers: left out")
    if count - len(whole) > EARLY_MAX * count:
        output.say("gathers: more than a tenth of the passes: no figure")
        return
    for name, seconds in found.items():
        median = statistics.median(seconds[nth] for nth in whole)
        output.say(f"gathers {name}: {median * 1e3:.2f} ms")
        for nth in whole:
            output.record("gathers", name, {
                "gather_seconds": seconds[nth], "round": nth,
                "out_bytes": moved[name][nth] if name in moved else 0})
