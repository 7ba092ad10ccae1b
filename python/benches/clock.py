"""Times of steps, and what is said of them.

What it is: one visit to a way (warm-up, timed steps, one step for memory), medians, intervals.
What it is not: a choice of what runs when; steps.py alternates the ways.
Invariant: nothing is waited for between the timed steps, so that a step's end overlaps the next
one's begin as in training; a step's time is between two events of the compute stream.

    warm-up, warm-up | event, step, event, step, event ... wait | step that waits in its middle

Who may call it: steps.py and its children.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from ways import Way
from workloads import Built


@dataclasses.dataclass
class Visit:
    """What some steps of one way in a row took."""

    seconds: list[float]
    host_seconds: list[float]
    """Until all of a step was enqueued; where steps are faster than that, the host is the bound."""
    peak_bytes: int
    after_forward_bytes: int
    reserved_bytes: int
    out_bytes: float
    in_bytes: float
    """Copied per timed step."""


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """Moments of the compute stream, or of the CPU, that nobody waits for as they pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Marks now, in the order of the compute stream."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def seconds(self) -> list[float]:
        """Seconds from each mark to the next; waits for the last."""
        wait(self._device)
        on_gpu = self._device.type == "cuda"
        return [one.elapsed_time(two) / 1e3 if on_gpu else two - one
                for one, two in itertools.pairwise(self._marks)]


def step(built: Built, way: Way) -> None:
    """One forward and backward, with gradients from nothing."""
    built.model.zero_grad(set_to_none=True)
    with way.context():
        loss = built.forward()
        way.turn()
        loss.backward()
    way.step_done()


def step_for_memory(built: Built, way: Way, device: torch.device) -> int:
    """A step that waits after its forward; device bytes allocated then, 0 on the CPU."""
    built.model.zero_grad(set_to_none=True)
    with way.context():
        loss = built.forward()
        wait(device)
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        way.turn()
        loss.backward()
    way.step_done()
    wait(device)
    return allocated


def visit(built: Built, way: Way, device: torch.device, steps: int, warm: int) -> Visit:
    """Attached already: warms up, times some steps, and measures memory."""
    on_gpu = device.type == "cuda"
    for _ in range(warm):
        step(built, way)
    wait(device)
    way.warmed()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = way.moved()
    host, marks = [], Marks(device)
    marks.mark()
    for _ in range(steps):
        began = time.perf_counter()
        step(built, way)
        host.append(time.perf_counter() - began)
        marks.mark()
    seconds = marks.seconds()
    out, back = (now - then for now, then in zip(way.moved(), before, strict=True))
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    reserved = torch.cuda.memory_reserved(device) if on_gpu else 0
    after = step_for_memory(built, way, device)
    return Visit(seconds, host, peak, after, reserved, out / steps, back / steps)


def clean(built: Built, device: torch.device) -> None:
    """Between ways: no gradients, no garbage, no cached blocks of another way's sizes."""
    built.model.zero_grad(set_to_none=True)
    gc.collect()
    wait(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def clean_host() -> None:
    """Between workloads, and before the first visit to each way: pinned memory that torch caches
    is not kept from the next, nor counted as the next one's.

    Not between later visits: who pins in every visit would be measured pinning.
    """
    gc.collect()
    if torch.cuda.is_available() and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """The middle ratio of the pairs of visits' medians, first with first; of two the worse."""
    ratios = sorted(statistics.median(mine) / statistics.median(other)
                    for mine, other in zip(ours, theirs, strict=False))
    return ratios[len(ratios) // 2]


def interval(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]] | None = None,
    draws: int = 2000,
) -> tuple[float, float]:
    """A bootstrap 95 % interval of the middle visit's median, or, beside others, of ``ratio``.

    Visits are drawn, pairs of them with others, and then steps of each: a machine whose speed
    drifts makes visits differ by more than their steps do.
    """
    dice = random.Random(5)

    def drawn(values: Sequence[float]) -> list[float]:
        return dice.choices(values, k=len(values))

    def once() -> float:
        if theirs is None:
            visits = dice.choices(ours, k=len(ours))
            return statistics.median(statistics.median(drawn(one)) for one in visits)
        pairs = list(zip(ours, theirs, strict=False))
        picked = [(drawn(one), drawn(two)) for one, two in dice.choices(pairs, k=len(pairs))]
        return ratio([one for one, _ in picked], [two for _, two in picked])

    found = sorted(once() for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws) - 1]
