#!/usr/bin/env python3
"""The first step of one way, in this process of its own: first.py WORKLOAD WAY DEVICE SCALE.

What it is: what a user waits for when training starts: allocators, kernels and pinned memory that
nobody used before. A way's name may end in -reserved (the pool is made before, and timed), and
then in -warm (one step without offload before). Making the engine is no part of the first step, and
is timed by itself.
Invariant: prints one line of JSON: its figures, or {"missing": why}.

    build -- [engine] -- [reserve] -- [one plain step] -- first step -- second -- ... -- line

Who may call it: steps.py.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from clock import step, wait
from ways import WAYS, Missing, Ours, Way, load, versions
from workloads import WORKLOADS, build

LATER = 5


def measure(workload_name: str, way_name: str, device: torch.device, small: bool) -> dict[str, Any]:
    """Figures of the first steps. Raises Missing."""
    workload = WORKLOADS[workload_name]
    base, _, suffix = way_name.partition("-reserved")
    built = build(workload, device, small)
    way = WAYS[base](device)
    engine_seconds = 0.0
    if isinstance(way, Ours):
        load("lightering.torch")
        began = time.perf_counter()
        way.engine()
        engine_seconds = time.perf_counter() - began
    way.attach(built)
    reserve_seconds = 0.0
    reserved = built.applications * built.input_bytes
    if suffix or base != way_name:
        assert isinstance(way, Ours), "only ours has a pool to reserve"
        if workload.reserve_bytes and not small:
            reserved = workload.reserve_bytes
        began = time.perf_counter()
        way.engine().reserve(reserved)
        reserve_seconds = time.perf_counter() - began
    if suffix == "-warm":
        step(built, Way(device))

    def timed() -> tuple[float, tuple[int, int]]:
        before = way.moved()
        wait(device)
        began = time.perf_counter()
        step(built, way)
        wait(device)
        seconds = time.perf_counter() - began
        return seconds, tuple(now - then for now, then in zip(way.moved(), before, strict=True))

    first, moved = timed()
    second, _ = timed()
    later = [timed() for _ in range(LATER)]
    return {
        "first_step_seconds": first, "second_step_seconds": second,
        "later_step_seconds": statistics.median(seconds for seconds, _ in later),
        "out_bytes": moved[0], "in_bytes": moved[1], "later_out_bytes": later[-1][1][0],
        "input_bytes": built.input_bytes, "applications": built.applications,
        "engine_seconds": engine_seconds, "reserve_seconds": reserve_seconds,
        "reserve_bytes": reserved if reserve_seconds else 0,
        "pinned_bytes": way.pinned_bytes(), "versions": versions(), **way.says(),
    }


def main(words: list[str]) -> None:
    workload, way, device, scale = words
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        said = measure(workload, way, torch.device(device), scale == "small")
    except Missing as missing:
        said = {"missing": str(missing)}
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])
