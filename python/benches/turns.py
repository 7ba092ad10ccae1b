"""Steps of several ways in turn, one each, there and back.

What it is: ``A B C C B A`` of single steps, in which a machine that speeds up or slows down is the
same to all; a figure is the mean of a way's two steps in one round.
What it is not: a measure of memory; ways that change the model cannot take turns at it.
Invariant: nothing is waited for between two steps, as in clock.py, and so no time is known before
the last of them, or before an interruption, which keeps the rounds that were whole; what a way
leaves under way at its step's end is little: no way copies anything after its last layer.

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
    ``output``, of an interruption the rounds before it; where several ranks step together,
    ``slowest`` takes of each step the longest, and who is interrupted has nothing to say: the
    others do not answer."""
    for way in ways.values():
        for _ in range(max(options.warm, 1)):
            step(built, way)
    wait(device)
    rounds = Rounds(ways, device)
    try:
        for _ in range(options.rounds):
            rounds.once(built)
    except (KeyboardInterrupt, torch.OutOfMemoryError):
        if slowest is None:
            recorded(built, rounds, rounds.marks.seconds(), output, name_of)
        raise
    seconds = rounds.marks.seconds()
    rounds.look()
    return recorded(built, rounds, seconds if slowest is None else slowest(seconds, device),
                    output, name_of)


class Rounds:
    """Rounds of single steps there and back, one after another, and what moved in the whole
    ones."""

    def __init__(self, ways: dict[str, Any], device: torch.device) -> None:
        self.ways, self.order = ways, [*ways, *reversed(ways)]
        self.done = 0
        self.look()
        self._before = self._after
        self.marks = Marks(device)
        self.marks.mark()

    def once(self, built: Any) -> None:
        for name in self.order:
            step(built, self.ways[name])
            self.marks.mark()
        self.look()
        self.done += 1

    def look(self) -> None:
        """What has moved by now."""
        self._after = {name: way.moved() for name, way in self.ways.items()}

    def moved(self, name: str) -> list[float]:
        """Bytes out and in of one step of a way."""
        return [(now - then) / (2 * self.done) for now, then in zip(
            self._after[name], self._before[name], strict=True)]


def recorded(
    built: Any, rounds: Rounds, seconds: list[float], output: Output | None, name_of: str
) -> dict[str, list[float]]:
    """Mean seconds of a step by way and whole round, which ``output`` keeps."""
    found: dict[str, list[float]] = {name: [] for name in rounds.ways}
    for turn in range(rounds.done):
        of_round = seconds[turn * len(rounds.order):][:len(rounds.order)]
        for name, way in rounds.ways.items():
            there_and_back = [took for one, took in zip(rounds.order, of_round, strict=True)
                              if one == name]
            found[name].append(statistics.mean(there_and_back))
            if output is not None:
                out, back = rounds.moved(name)
                output.record(name_of, name, {
                    "step_seconds": found[name][-1], "round": turn, "turns": True,
                    "out_bytes": out, "in_bytes": back, "input_bytes": built.input_bytes,
                    "applications": built.applications, "versions": versions(), **way.says()})
    return found


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
