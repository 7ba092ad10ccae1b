#!/usr/bin/env python3
"""Figures of the table, of all lines in a folder: judge.py FOLDER.

What it is: what benches/results/required.json asks of PyTorch's steps, as pairs of a value and what
it is compared with, in lines that tools/figures.py takes.
What it is not: a threshold; those stand in required.json alone.
Invariant: a pair is of visits of one run, first with first; what was not measured has no figure,
and a peer that is missing is in no comparison.

    runs.jsonl: lines of steps.py, sharded_steps.py --> lines {"figure": name, "pairs": [[a, b]]}

Who may call it: steps.py and sharded_steps.py at their end, and people.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Pairs = list[tuple[float, float]]

PART = "torch"
PEERS = ("checkpoint", "torch", "torch-all", "trl", "trl-all", "deepspeed")
HOST_PAIR_MICROSECONDS_MAX = 20.0
SAVED_PEAK_GB_MAX = 5.1


class Lines:
    """What was measured, by workload and way."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = [line for line in lines if line["part"] == PART
                      and not line["said"].keys() & {"missing", "figure"}]

    def of(self, kind: str, way: str, first: bool = False) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind
                and line["said"]["mode"] == way and line["said"].get("first", False) == first]

    def last(self, kind: str, way: str, first: bool = False) -> Line | None:
        """What was said last, of visits: single steps in turn have no figures of memory."""
        found = [line["said"] for line in self.of(kind, way, first)
                 if not line["said"].get("turns")]
        return found[-1] if found else None

    def pairs(self, kind: str, theirs: str, field: str, ours: str = "ours") -> Pairs:
        """Visits of one run, first with first; of rounds of single steps those alone, where both
        have some."""
        pairs: Pairs = []
        every = self.of(kind, ours), self.of(kind, theirs)
        in_turn = all(any(line["said"].get("turns") for line in lines) for lines in every)
        mine, other = ([line for line in lines if line["said"].get("turns", False) == in_turn]
                       for lines in every)
        for run in sorted({line["run"] for line in mine}):
            both = ([line for line in lines if line["run"] == run] for lines in (mine, other))
            pairs += [(one["said"].get(field, 0), two["said"].get(field, 0))
                      for one, two in zip(*both, strict=False)]
        return pairs

    def lowest(self, kind: str, field: str) -> float | None:
        """The lowest of all peers in the last run."""
        found = [said[field] for way in PEERS if (said := self.last(kind, way))]
        return min(found) if found else None


def _inputs(lines: Lines, kind: str) -> dict[str, Pairs]:
    """A workload whose layer inputs move."""
    figures = {f"{kind}.over_control": lines.pairs(kind, "control", "step_seconds"),
               f"{kind}.over_checkpoint": lines.pairs(kind, "checkpoint", "step_seconds")}
    ours = lines.last(kind, "ours")
    for name, field in (("peak", "peak_bytes"), ("after_forward", "after_forward_bytes")):
        lowest = lines.lowest(kind, field)
        if ours and lowest:
            allowed = lowest + 2 * ours["input_bytes"]
            figures[f"{kind}.{name}"] = [(ours[field] / 1e9, allowed / 1e9)]
    return {**figures, **_first(lines, kind)}


def _first(lines: Lines, kind: str) -> dict[str, Pairs]:
    """First steps of a workload whose layer inputs move."""
    plain, cold, reserved = (
        lines.last(kind, way, first=True) for way in ("checkpoint", "ours", "ours-reserved"))
    figures: dict[str, Pairs] = {}
    if cold and cold["later_out_bytes"]:
        moved = (cold["out_bytes"] / 1e9, cold["later_out_bytes"] / 1e9)
        figures[f"{kind}.first_moved"] = [moved]
    if plain and reserved:
        figures[f"{kind}.first_reserved"] = [
            (reserved["first_step_seconds"], plain["first_step_seconds"])]
    if plain and reserved and cold and reserved["reserve_bytes"]:
        rate = reserved["reserve_bytes"] / reserved["reserve_seconds"]
        bound = plain["first_step_seconds"] + cold["later_out_bytes"] / rate
        figures[f"{kind}.first_cold"] = [(cold["first_step_seconds"], bound)]
    return figures


def _saved(lines: Lines, kind: str) -> dict[str, Pairs]:
    """The workload of which every saved tensor moves."""
    figures: dict[str, Pairs] = {}
    visits = [line["said"] for line in lines.of(kind, "ours-all")
              if not line["said"].get("turns")]
    if visits:
        figures[f"{kind}.link"] = [
            (said["out_bytes"] / said["link_out_bytes_per_second"]
             + said["in_bytes"] / said["link_in_bytes_per_second"], said["step_seconds"])
            for said in visits]
        figures[f"{kind}.peak"] = [(visits[-1]["peak_bytes"] / 1e9, SAVED_PEAK_GB_MAX)]
    first = lines.last(kind, "ours-all-reserved-warm", first=True)
    if first:
        figures[f"{kind}.first"] = [(first["first_step_seconds"], first["later_step_seconds"])]
    return figures


def _block(lines: Lines, kind: str) -> dict[str, Pairs]:
    """The workload whose memory is nearly all layer inputs."""
    figures = {f"{kind}.over_checkpoint": lines.pairs(kind, "checkpoint", "step_seconds")}
    ours, plain = lines.last(kind, "ours"), lines.last(kind, "checkpoint")
    if ours and plain:
        figures[f"{kind}.peak"] = [(ours["peak_bytes"] / 1e9, plain["peak_bytes"] / 1e9)]
        # All inputs but the last one, which stays.
        predicted = (ours["applications"] - 1) * ours["input_bytes"]
        less = plain["peak_bytes"] - ours["peak_bytes"]
        figures[f"{kind}.freed"] = [(less / 1e9, predicted / 1e9)]
    return figures


def _others(lines: Lines) -> dict[str, Pairs]:
    figures: dict[str, Pairs] = {
        "sharded-1.7b.over_control": lines.pairs("sharded-1.7b", "control", "step_seconds"),
        "gathers.over_raw": lines.pairs("gathers", "raw", "gather_seconds")}
    host = lines.last("host", "ours-all")
    if host:
        figures["host.pair"] = [(host["pair_microseconds"], HOST_PAIR_MICROSECONDS_MAX)]
    lengths = lines.last("lengths", "ours")
    if lengths:
        figures["lengths.over_fixed"] = [(lengths["mixed_seconds"], lengths["fixed_seconds"])]
        plain = lines.last("lengths", "checkpoint") or {}
        for name in ("reserved", "pinned", "resident"):
            tenth, growth = lengths["held_tenth"][name], f"{name}_growth_bytes"
            if tenth:
                # What the same steps grow by without offload is not ours.
                least = tenth + plain.get(growth, 0)
                figures[f"lengths.{name}"] = [((tenth + lengths[growth]) / 1e9, least / 1e9)]
    return figures


def figures(lines: list[Line]) -> dict[str, Pairs]:
    """All figures there are, by name; pairs with a zero are none."""
    known = Lines(lines)
    found = {**_inputs(known, "inputs-1.7b"), **_inputs(known, "inputs-8b"),
             **_saved(known, "saved-0.6b"), **_block(known, "block-64"), **_others(known)}
    found["short-0.6b.over_checkpoint"] = known.pairs("short-0.6b", "checkpoint", "step_seconds")
    whole = {name: [pair for pair in pairs if all(pair)] for name, pairs in found.items()}
    return {f"{PART}.{name}": pairs for name, pairs in sorted(whole.items()) if pairs}


def _source(of_kind: list[Line], name: str) -> Line:
    """The line whose command a figure was measured by."""
    first, in_turn, rest = ([] for _ in range(3))
    for line in of_kind:
        (first if line["said"].get("first") else in_turn if line["said"].get("turns")
         else rest).append(line)
    if ".first" in name:
        return (first or rest)[-1]
    return ((in_turn if ".over_" in name else None) or rest or of_kind)[-1]


def judge(folder: Path) -> dict[str, Pairs]:
    """Writes the figures of a folder into its runs.jsonl, in the place of earlier ones."""
    path = folder / "runs.jsonl"
    if not path.exists():
        # Every way was skipped, which was said.
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines
             if line["part"] != PART or "figure" not in line["said"]]
    found = figures(lines)
    ours = [line for line in lines if line["part"] == PART]
    for name, pairs in found.items():
        kind = name.removeprefix(f"{PART}.").rsplit(".", 1)[0]
        source = _source([line for line in ours if line["kind"] == kind], name)
        said = {"figure": name, "simulated": source["said"]["simulated"], "pairs": pairs}
        lines.append({**source, "kind": "", "said": said})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def main(words: list[str]) -> None:
    for name, pairs in judge(Path(words[0])).items():
        middle = statistics.median(one / two for one, two in pairs)
        print(f"{name}: {middle:.4f} of {len(pairs)} pairs, the last {pairs[-1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
