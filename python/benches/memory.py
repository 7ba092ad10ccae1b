"""Two small measurements: what a pack + unpack pair costs the host, and what lengths do to memory.

What it is: host time beside the same graph without hooks; memory and time of 100 steps whose
sequence lengths are drawn from ten.
Invariant: the first ten of the 100 steps take each length once, so that "flat after the tenth" is
a fair demand; all ways draw the same lengths.

    graph of 200 sines, 1 MiB each: (with hooks - without) / 200 = one pair
    lengths: 10 once each, 45 drawn | each by itself | 45 drawn | each by itself: by their means,
             what the 90 should take

Who may call it: steps.py.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from clock import clean, step, wait
from output import Output, percent
from ways import WAYS, Missing, Way
from workloads import WORKLOADS, Built, build

PAIRS = 200
REPEATS = 20
WARM = 3
LENGTHS = 10
STEPS = 100
# Steps of one length in a row, of each half.
FIXED = 3


def _graph(device: torch.device) -> Built:
    leaf = torch.randn(512, 512, device=device, requires_grad=True)

    def forward() -> torch.Tensor:
        value = leaf
        for _ in range(PAIRS + 1):
            # Saves its input; the first one is a leaf, which stays.
            value = value.sin()
        return value.sum()

    model = torch.nn.Module()
    model.leaf = torch.nn.Parameter(leaf)
    return Built(model, forward, [], PAIRS, leaf.numel() * 4, lambda tokens: None)


def pack_pairs(options: argparse.Namespace, output: Output) -> None:
    """Host microseconds of a pair, for each way that saves all tensors."""
    device = options.device
    output.say("== host: microseconds of the host for one pack and one unpack, tensors of 1 MiB")
    built = _graph(device)

    def once(way: Way) -> tuple[float, ...]:
        """Seconds of a forward, its backward, and of leaving the context."""
        built.model.zero_grad(set_to_none=True)
        wait(device)
        with way.context():
            began = time.perf_counter()
            loss = built.forward()
            between = time.perf_counter()
            loss.backward()
            ended = time.perf_counter()
        left = time.perf_counter()
        way.step_done()
        return between - began, ended - between, left - ended

    def beside_plain(way: Way) -> list[float]:
        """Microseconds of each part that a way adds to a pair: the middle one of the differences
        of neighbours, plain first and ours first in turn."""
        plain, found = Way(device), []
        for nth in range(WARM + REPEATS):
            both = (plain, way) if nth % 2 == 0 else (way, plain)
            first, second = once(both[0]), once(both[1])
            mine, theirs = (second, first) if nth % 2 == 0 else (first, second)
            found.append([(one - two) / PAIRS * 1e6 for one, two in zip(mine, theirs, strict=True)])
        return [statistics.median(part) for part in zip(*found[WARM:], strict=True)]

    for name in ("torch-all", "trl-all", "ours-all"):
        if name not in options.ways:
            continue
        way = WAYS[name](device)
        try:
            way.attach(built)
        except Missing as missing:
            output.say(f"host {name}: skipped: {missing}")
            continue
        pack, unpack, leave = beside_plain(way)
        # Once a context, and over the simulated device the copies themselves: no part of a pair.
        said = resolved(pack, unpack, leave)
        text = {part: "not resolved" if us is None else f"{us:.1f} us"
                for part, us in said.items()}
        output.say(f"host {name}: pack {text['pack']}, unpack {text['unpack']}, "
                   f"pair {text['pair']}; leaving the context {text['leave']} of each")
        output.record("host", name, {
            **{f"{part}_microseconds": us for part, us in said.items() if us is not None},
            "out_bytes": way.moved()[0], **way.says()})
        way.detach(built)
        clean(built, device)


def resolved(pack: float, unpack: float, leave: float) -> dict[str, float | None]:
    """Microseconds by part, and of the pair; None where the machine's noise is more than that: a
    difference of times that is not above zero, and a pair with such a part."""
    parts = {"pack": pack, "unpack": unpack, "leave": leave}
    said = {part: us if us > 0 else None for part, us in parts.items()}
    return {**said, "pair": pack + unpack if min(pack, unpack) > 0 else None}


def resident_bytes() -> int:
    """Host memory of this process."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    return 0


def ten_lengths(options: argparse.Namespace, output: Output) -> None:
    """100 steps of ten lengths, without offload and with ours."""
    device, small = options.device, options.small
    # Not shorter: the host bounds those steps, and they vary by more than is asked about.
    unit, least = (16, 16) if small else (256, 1792)
    lengths = [least + unit * nth for nth in range(LENGTHS)]
    dice = random.Random(3)
    drawn = dice.sample(lengths, LENGTHS) + dice.choices(lengths, k=STEPS - LENGTHS)
    output.say(f"== lengths: {STEPS} steps of {lengths[0]} to {lengths[-1]} tokens")
    built = build(WORKLOADS["short-0.6b"], device, small)
    for name in ("checkpoint", "ours"):
        if name not in options.ways:
            continue
        way = WAYS[name](device)
        try:
            way.attach(built)
        except Missing as missing:
            output.say(f"lengths {name}: skipped: {missing}")
            continue
        said = _lengths_of(built, way, device, lengths, drawn)
        growth = ", ".join(f"{what} {said[f'{what}_growth_bytes'] / 1e6:.1f} MB"
                           for what in ("reserved", "pinned", "resident"))
        output.say(f"lengths {name}: after the tenth step grew: {growth}; "
                   f"time over fixed lengths {percent(said['over_fixed'])}")
        output.record("lengths", name, {**said, **way.says()})
        way.detach(built)
        clean(built, device)


def _lengths_of(
    built: Built, way: Way, device: torch.device, lengths: list[int], drawn: list[int]
) -> dict[str, Any]:
    on_gpu = device.type == "cuda"

    def timed(tokens: int) -> float:
        built.resize(tokens)
        wait(device)
        began = time.perf_counter()
        step(built, way)
        wait(device)
        return time.perf_counter() - began

    seconds, held = [], []
    fixed: dict[int, list[float]] = {tokens: [] for tokens in lengths}
    # In halves, so that a machine whose speed drifts does so for both.
    half = LENGTHS + (STEPS - LENGTHS) // 2
    for part in (drawn[:half], drawn[half:]):
        for tokens in part:
            seconds.append(timed(tokens))
            held.append({
                "reserved": torch.cuda.memory_reserved(device) if on_gpu else 0,
                "pinned": way.pinned_bytes(), "resident": resident_bytes()})
        for tokens, found in fixed.items():
            # The first one learns what is new.
            found += [timed(tokens) for _ in range(1 + FIXED)][1:]
    after = slice(LENGTHS, None)
    # Sums and means: what one step in a hundred waits for counts on both sides.
    wanted = sum(statistics.mean(fixed[tokens]) for tokens in drawn[after])
    growth = {
        f"{what}_growth_bytes": max(each[what] for each in held[after]) - held[LENGTHS - 1][what]
        for what in held[0]
    }
    return {"mixed_seconds": sum(seconds[after]), "fixed_seconds": wanted,
            "over_fixed": sum(seconds[after]) / wanted, "all_seconds": seconds,
            "held_tenth": held[LENGTHS - 1], "held_last": held[-1], "out_bytes": way.moved()[0],
            **growth}
