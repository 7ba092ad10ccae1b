#!/usr/bin/env python3
"""Figures of the table, of all lines in a folder: judge.py FOLDER.

What it is: what benches/results/required.json asks of PyTorch's steps, as pairs of a value and what
it is compared with, in lines that tools/figures.py takes.
What it is not: a threshold; those stand in required.json alone.
Invariant: a pair is of visits of one run, first with first; what was not measured has no figure,
a peer that is missing is in no comparison, and ours that moved nothing, or fewer bytes than the
control copied, is in none either.

    runs.jsonl: lines of steps.py, sharded_steps.py --> lines {"figure": name, "pairs": [[a, b]]}

Who may call it: steps.py and sharded_steps.py at their end, and people.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lines import Line, Wrong, program, read, replace

Pairs = list[tuple[float, float]]

PART = "torch"
PEERS = ("torch", "torch-all", "trl", "trl-all", "deepspeed")
# Whose inputs may stay on the GPU, as is asked of them.
MAY_STAY = ("short-0.6b",)
HOST_PAIR_MICROSECONDS_MAX = 20.0
SAVED_PEAK_GB_MAX = 5.1
LONGEST_VERB_MS_MAX = 1.0


class Lines:
    """What was measured, by workload and way."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = [line for line in lines if line["part"] == PART
                      and not line["said"].keys() & {"missing", "figure"} and not _is_idle(line)]

    def of(self, kind: str, way: str, first: bool = False) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind
                and line["said"].get("mode") == way and line["said"].get("first", False) == first]

    def last(self, kind: str, *ways: str, first: bool = False) -> list[Line]:
        """What each way said last in the latest run that has all of them, or nothing."""
        return ([[]] + self.latest(kind, *ways, first=first))[-1]

    def latest(self, kind: str, *ways: str, first: bool = False) -> list[list[Line]]:
        """What the ways said in the latest run that has all of them, first with first: of visits,
        as single steps in turn have no figures of memory."""
        by_way = [[line for line in self.of(kind, way, first) if not line["said"].get("turns")]
                  for way in ways]
        runs = set.intersection(*({line["run"] for line in found} for found in by_way))
        of_run = [[line["said"] for line in found if line["run"] == max(runs, default=0)]
                  for found in by_way]
        return [list(each) for each in zip(*of_run, strict=False)]

    def pairs(self, kind: str, theirs: str, field: str, ours: str = "ours") -> Pairs:
        """Visits of one run, first with first; of rounds of single steps those alone, where both
        have some."""
        pairs: Pairs = []
        every = self.of(kind, ours), self.of(kind, theirs)
        in_turn = all(any(line["said"].get("turns") for line in lines) for lines in every)
        mine, other = ([line for line in lines if line["said"].get("turns", False) == in_turn]
                       for lines in every)
        for run in sorted({line["run"] for line in mine}):
            both = ([line["said"] for line in lines if line["run"] == run]
                    for lines in (mine, other))
            pairs += [(one.get(field, 0), two.get(field, 0))
                      for one, two in zip(*both, strict=False) if _moved_as_much(one, two)]
        return pairs

    def beside_lowest(self, kind: str, field: str) -> Pairs:
        """Ours beside the lowest of all peers and two layer inputs, in the latest run that has ours
        and a peer; plain checkpointing counts there, and is no peer."""
        runs = [{line["run"] for way in ways for line in self.of(kind, way)
                 if field in line["said"]} for ways in (("ours",), PEERS)]
        for run in sorted(set.intersection(*runs), reverse=True)[:1]:
            said = {line["said"].get("mode"): line["said"] for line in self.lines
                    if (line["kind"], line["run"]) == (kind, run) and field in line["said"]}
            ours = said["ours"]
            lowest = min(said[way][field] for way in ("checkpoint", *PEERS) if way in said)
            return [(ours[field] / 1e9, (lowest + 2 * ours["input_bytes"]) / 1e9 if lowest else 0)]
        return []


def _is_idle(line: Line) -> bool:
    """Ours, counted, and nothing left the device: whatever it took is no time of offload."""
    said = line["said"]
    return (said.get("mode", "").startswith("ours") and said.get("out_bytes") == 0
            and line["kind"] not in MAY_STAY)


def _moved_as_much(ours: Line, theirs: Line) -> bool:
    """The control copies what leaves: where less did, the two are not of the same bytes."""
    counted = [said.get("out_bytes") for said in (ours, theirs)]
    return None in counted or counted[0] >= counted[1]


def left_out(lines: list[Line]) -> list[str]:
    """What was measured and is in no figure, and why."""
    known, found = Lines(lines), []
    for line in lines:
        said, kind = line["said"], line["kind"]
        if line["part"] != PART or not said.get("mode", "").startswith("ours"):
            continue
        beside = (each["said"] for each in known.of(kind, "control") if each["run"] == line["run"])
        if _is_idle(line):
            found.append(f"{kind} {said['mode']}: moved nothing, and is in no figure")
        elif not all(_moved_as_much(said, each) for each in beside):
            found.append(f"{kind} {said['mode']}: moved less than the control: not beside it")
    return list(dict.fromkeys(found))


def _inputs(lines: Lines, kind: str) -> dict[str, Pairs]:
    """A workload whose layer inputs move."""
    figures = {f"{kind}.over_control": lines.pairs(kind, "control", "step_seconds"),
               f"{kind}.over_checkpoint": lines.pairs(kind, "checkpoint", "step_seconds")}
    for name, field in (("peak", "peak_bytes"), ("after_forward", "after_forward_bytes")):
        figures[f"{kind}.{name}"] = lines.beside_lowest(kind, field)
    return {**figures, **_first(lines, kind)}


def _first(lines: Lines, kind: str) -> dict[str, Pairs]:
    """First steps of a workload whose layer inputs move."""
    moved = [(cold["out_bytes"] / 1e9, cold["later_out_bytes"] / 1e9)
             for cold, in lines.latest(kind, "ours", first=True)]
    reserved = [(ours["first_step_seconds"], plain["first_step_seconds"])
                for plain, ours in lines.latest(kind, "checkpoint", "ours-reserved", first=True)]
    cold = [(ours["first_step_seconds"], plain["first_step_seconds"] + ours["later_out_bytes"]
             / (made["reserve_bytes"] / made["reserve_seconds"]))
            for plain, ours, made in lines.latest(kind, "checkpoint", "ours", "ours-reserved",
                                                  first=True) if made["reserve_bytes"]]
    return {f"{kind}.first_moved": moved, f"{kind}.first_reserved": reserved,
            f"{kind}.first_cold": cold}


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
        longest = [said.get("longest_verb_seconds", 0) for said in visits]
        if all(longest):
            figures[f"{kind}.longest_verb"] = [(1e3 * max(longest), LONGEST_VERB_MS_MAX)]
    figures[f"{kind}.first"] = [
        (said["first_step_seconds"], said["later_step_seconds"])
        for said, in lines.latest(kind, "ours-all-reserved-warm", first=True)]
    return figures


def _block(lines: Lines, kind: str) -> dict[str, Pairs]:
    """The workload whose memory is nearly all layer inputs."""
    figures = {f"{kind}.over_checkpoint": lines.pairs(kind, "checkpoint", "step_seconds")}
    if both := lines.last(kind, "ours", "checkpoint"):
        ours, plain = both
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
    for host in lines.last("host", "ours-all"):
        if host.get("pair_microseconds", 0) <= 0:
            # The noise was more than the time.
            continue
        figures["host.pair"] = [(host["pair_microseconds"], HOST_PAIR_MICROSECONDS_MAX)]
    for lengths in lines.last("lengths", "ours"):
        figures["lengths.over_fixed"] = [(lengths["mixed_seconds"], lengths["fixed_seconds"])]
        plain = (lines.last("lengths", "checkpoint", "ours") or [{}])[0]
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


def _source(of_kind: list[Line], name: str, pairs: Pairs) -> Line:
    """The line whose command a figure was measured by."""
    if ".over_" in name:
        # Visits and single steps in turn both have such times: the one that said this.
        said = [line for line in of_kind if pairs[-1][0] in line["said"].values()]
        return (said or of_kind)[-1]
    first = [line for line in of_kind if line["said"].get("first")]
    rest = [line for line in of_kind if line not in first and not line["said"].get("turns")]
    return ((first if ".first" in name else rest) or of_kind)[-1]


def judge(folder: Path) -> dict[str, Pairs]:
    """Writes the figures of a folder into its runs.jsonl, in the place of earlier ones. Raises
    Wrong."""
    path = folder / "runs.jsonl"
    lines = [line for line in read(path)
             if line["part"] != PART or "figure" not in line["said"]]
    # None, where every way was skipped, which was said.
    found = figures(lines)
    measured = Lines(lines).lines
    for name, pairs in found.items():
        kind = name.removeprefix(f"{PART}.").rsplit(".", 1)[0]
        source = _source([line for line in measured if line["kind"] == kind], name, pairs)
        said = {"figure": name, "simulated": source["said"]["simulated"], "pairs": pairs}
        lines.append({**source, "kind": "", "said": said})
    if lines:
        replace(path, lines)
    return found


def _asked() -> dict[str, Line]:
    """What is asked of each figure, where this repository or its bundle is around."""
    above = Path(__file__).resolve().parents[2]
    for path in (above / "benches" / "results" / "required.json", above / "required.json"):
        if path.is_file():
            return {each["name"]: each for each in json.loads(path.read_text())["figures"]}
    return {}


def rows(found: dict[str, Pairs]) -> list[tuple[str, ...]]:
    """The figures as a table: of each its middle pair, of two the worse, as tools/figures.py."""
    known = _asked()
    table = [("figure", "value", "beside", "ratio", "asked", "pairs", "")]
    for name, pairs in found.items():
        asked = known.get(name, {"unit": "", "better": "lower", "threshold": None})
        is_more = asked["better"] == "higher"
        ratios = sorted(pairs, key=lambda pair: pair[0] / pair[1], reverse=is_more)
        value, beside = ratios[len(pairs) // 2]
        ratio, threshold = value / beside, asked["threshold"]
        bound = "-" if threshold is None else f"{'>=' if is_more else '<='} {threshold}"
        is_short = threshold is not None and (
            ratio < threshold if is_more else ratio > threshold)
        table.append((name, f"{value:.4g} {asked['unit']}".strip(), f"{beside:.4g}",
                      f"{ratio:.4f}", bound, str(len(pairs)), "SHORT" if is_short else ""))
    return table


def main(words: list[str]) -> None:
    if len(words) != 1 or not Path(words[0], "runs.jsonl").is_file():
        raise Wrong("names one folder, with the runs.jsonl that steps.py left there")
    for row in rows(judge(Path(words[0]))):
        name, *rest = row
        print(name.ljust(34), *(cell.ljust(12) for cell in rest))


if __name__ == "__main__":
    program(main, "judge.py")
