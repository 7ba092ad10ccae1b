"""Steps of several ways in turn, one each, there and back.

What it is: ``A B C C B A`` of single steps, in which a machine that speeds up or slows down is the
same to all; a figure is the mean of a way's two steps in one round.
What it is not: a measure of memory; ways that change the model cannot take turns at it.
Invariant: nothing is waited for between two steps, as in clock.py, and so no time is known before
the last of them; what a way leaves under way at its step's end is little: no way copies anything
after its last layer.

    round: event, A, event, B, event, C, event, C, event, B, event, A, event

Who may call it: steps.py, sharded_steps.py.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from clock import Marks, clean, clean_host, interval, step, wait
from output import Output, percent
from ways import WAYS, Missing, versions
from workloads import Workload, build

# Those that leave the model as it is while another one steps.
WAYS_IN_TURN = ("none", "checkpoint", "control", "ours", "ours-all")


def turns_of(workload: Workload, options: argparse.Namespace, output: Output) -> None:
    """Rounds of all ways of a workload that can take turns."""
    device = options.device
    built = build(workload, device, options.small)
    names = [name for name in workload.ways if name in options.ways]
    for name in names:
        if name not in WAYS_IN_TURN:
            output.say(f"{workload.name} {name}: skipped: takes no turns, --parts steps has it")
    names = [name for name in names if name in WAYS_IN_TURN]
    ways = attached(names, built, device, output, workload.name)
    found = rounds_of(built, ways, options, device, output, workload.name)
    say(workload.name, found, output)
    for way in ways.values():
        way.detach(built)
    clean(built, device)
    built.model.to("meta")
    clean_host()


def attached(
    names: Sequence[str], built: Any, device: torch.device, output: Output | None, name_of: str
) -> dict[str, Any]:
    """Those of the ways that are here, attached; what is not is said."""
    ways: dict[str, Any] = {}
    for name in names:
        way = WAYS[name](device)
        try:
            way.attach(built)
        except Missing as missing:
            if output is not None:
                output.say(f"{name_of} {name}: skipped: {missing}")
            continue
        ways[name] = way
    return ways


def rounds_of(
    built: Any, ways: dict[str, Any], options: argparse.Namespace, device: torch.device,
    output: Output | None, name_of: str,
    slowest: Callable[[list[float], torch.device], list[float]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of a step by way and round, of ways that are attached. What is said of them goes to
    ``output``; where several ranks step together, ``slowest`` takes of each step the longest."""
    for way in ways.values():
        for _ in range(max(options.warm, 1)):
            step(built, way)
    order = [*ways, *reversed(ways)]
    before = {name: way.moved() for name, way in ways.items()}
    seconds = _timed(built, [ways[name] for name in order] * options.rounds, device)
    if slowest is not None:
        seconds = slowest(seconds, device)
    moved = {name: [(now - then) / (2 * options.rounds)
                    for now, then in zip(way.moved(), before[name], strict=True)]
             for name, way in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds):
        of_round = seconds[turn * len(order):][:len(order)]
        for name in ways:
            there_and_back = [took for one, took in zip(order, of_round, strict=True)
                              if one == name]
            found[name].append(statistics.mean(there_and_back))
            if output is not None:
                output.record(name_of, name, {
                    "step_seconds": found[name][-1], "round": turn, "turns": True,
                    "out_bytes": moved[name][0], "in_bytes": moved[name][1],
                    "versions": versions(), **ways[name].says()})
    return found


def _timed(built: Any, ways: list[Any], device: torch.device) -> list[float]:
    """Seconds of each step, of those ways one after another."""
    wait(device)
    marks = Marks(device)
    marks.mark()
    for way in ways:
        step(built, way)
        marks.mark()
    return marks.seconds()


def say(workload: str, found: dict[str, list[float]], output: Output) -> None:
    """The middle of each way, and of ours beside the others, in words."""
    for name, mine in found.items():
        output.say(f"{workload} {name}: {statistics.median(mine):.4f} s in turn, of "
                   f"{2 * len(mine)} steps")
    ours = next((name for name in found if name.startswith("ours")), None)
    for name, theirs in found.items():
        if ours in (None, name):
            continue
        ratios = [one / two for one, two in zip(found[ours], theirs, strict=True)]
        low, high = interval([ratios])
        output.say(f"{workload} {ours} over {name}: {percent(statistics.median(ratios))}, the "
                   f"middle of {len(ratios)} rounds ({percent(low)} to {percent(high)})")
