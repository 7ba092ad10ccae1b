#!/usr/bin/env python3
"""Figures of the table, of all lines in a folder: judge.py FOLDER.

What it is: what benches/results/required.json asks of PyTorch's steps, as pairs of a value and what
it is compared with, in lines that tools/figures.py takes.
What it is not: a threshold; those stand in required.json alone.
Invariant: a pair is of visits of one run, first with first, and of a run that went back as often
as there: one that was cut off is in no such figure. What was not measured has no figure, a peer
that is missing is in no comparison, and ours that moved less than nearly all of what should move,
or fewer bytes than the control copied, is in none either. Of memory the worst visit of ours is
beside the best one of each other.

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
# Of what should move, where the line says what does: less is no offload.
MOVED_MIN = 0.95
# Both directions of `first`: there, and back.
FIRST_MIN = 2
HOST_PAIR_MICROSECONDS_MAX = 20.0
SAVED_PEAK_GB_MAX = 5.1
LONGEST_VERB_MS_MAX = 1.0


class Lines:
    """What was measured, by workload and way."""

    def __init__(self, lines: list[Line]) -> None:
        said = [line for line in lines if line["part"] == PART
                and not line["said"].keys() & {"missing", "figure"}]
        self.lines = [line for line in said if not _is_idle(line)]
        # A first step that moved too little is no time of offload, yet how much it moved is asked.
        self.began = [line for line in said if not _is_idle(line, "later_out_bytes")]
        self.cut: dict[str, int] = {}
        """Figures that lack a run which was cut off, and that run."""

    def of(self, kind: str, way: str, first: bool = False) -> list[Line]:
        return _of(self.lines, kind, way, first)

    def last(self, kind: str, *ways: str) -> list[Line]:
        """What each way said last in the latest run that has all of them, or nothing."""
        return [said[-1] for said in self.visits(kind, *ways)]

    def visits(self, kind: str, *ways: str) -> list[list[Line]]:
        """What each way said in the latest run that has all of them, or nothing."""
        return next((by_way for _, by_way in _runs(self.lines, kind, ways)), [])

    def firsts(self, name: str, *ways: str, began: bool = False) -> list[list[Line]]:
        """What the first steps of the ways said in the latest run that has all of them there and
        back, first with first."""
        kind = name.rpartition(".")[0]
        for run, by_way in _runs(self.began if began else self.lines, kind, ways, first=True):
            if all(len(said) >= FIRST_MIN for said in by_way):
                return [list(each) for each in zip(*by_way, strict=False)]
            self.cut.setdefault(name, run)
        return []

    def pairs(self, name: str, theirs: str, field: str = "step_seconds") -> Pairs:
        """Visits of one run, first with first; of rounds of single steps those alone, where both
        have some. A run that visited a way once more there than back is left out: the machine may
        have been another one in that direction."""
        pairs: Pairs = []
        kind = name.rpartition(".")[0]
        every = self.of(kind, "ours"), self.of(kind, theirs)
        in_turn = all(any(line["said"].get("turns") for line in lines) for lines in every)
        mine, other = ([line for line in lines if line["said"].get("turns", False) == in_turn]
                       for lines in every)
        for run in sorted({line["run"] for line in mine}):
            both = [[line["said"] for line in lines if line["run"] == run]
                    for lines in (mine, other)]
            # A round of single steps is there and back by itself, and so are passes of gathers.
            by_visit = not in_turn and field == "step_seconds"
            if by_visit and all(both) and any(len(said) % 2 for said in both):
                self.cut[name] = run
                continue
            pairs += [(one.get(field, 0), two.get(field, 0))
                      for one, two in zip(*both, strict=False) if _moved_as_much(one, two)]
        return pairs

    def beside_lowest(self, kind: str, field: str) -> Pairs:
        """The most of ours beside the least of all peers and two layer inputs, in the latest run
        that has ours and a peer; plain checkpointing counts there, and is no peer."""
        runs = [{line["run"] for way in ways for line in self.of(kind, way)
                 if field in line["said"]} for ways in (("ours",), PEERS)]
        for run in sorted(set.intersection(*runs), reverse=True)[:1]:
            ours, others = ([line["said"] for way in ways for line in self.of(kind, way)
                             if line["run"] == run and field in line["said"]]
                            for ways in (("ours",), ("checkpoint", *PEERS)))
            most, least = max(said[field] for said in ours), min(said[field] for said in others)
            return [(most / 1e9, (least + 2 * ours[-1]["input_bytes"]) / 1e9 if least else 0)]
        return []


def _of(lines: list[Line], kind: str, way: str, first: bool) -> list[Line]:
    return [line for line in lines if line["kind"] == kind
            and line["said"].get("mode") == way and line["said"].get("first", False) == first]


def _runs(
    lines: list[Line], kind: str, ways: tuple[str, ...], first: bool = False
) -> list[tuple[int, list[list[Line]]]]:
    """Runs that have all of the ways, the latest one first, and what each way said there: in
    visits, as single steps in turn have no figures of memory."""
    found = [[line for line in _of(lines, kind, way, first) if not line["said"].get("turns")]
             for way in ways]
    runs = set.intersection(*({line["run"] for line in of_way} for of_way in found))
    return [(run, [[line["said"] for line in of_way if line["run"] == run] for of_way in found])
            for run in sorted(runs, reverse=True)]


def _is_idle(line: Line, field: str = "out_bytes") -> bool:
    """Ours, counted, and less left the device than should: whatever it took is no time of offload.
    What should leave is all layer inputs but the last one; who saves all tensors saves those too. A
    line that does not say how many there are is idle where nothing left."""
    said = line["said"]
    moved, should = said.get(field), _should(said)
    if not said.get("mode", "").startswith("ours") or moved is None or line["kind"] in MAY_STAY:
        return False
    return moved == 0 or moved < MOVED_MIN * should


def _should(said: Line) -> float:
    """Bytes that should leave in a step, or 0 where the line does not say."""
    return max(said.get("applications", 0) - 1, 0) * said.get("input_bytes", 0)


def _how_much(said: Line, field: str) -> str:
    if not said[field]:
        return "nothing"
    return f"{100 * said[field] / _should(said):.1f} % of what should"


def _moved_as_much(ours: Line, theirs: Line) -> bool:
    """The control copies what leaves: where less did, the two are not of the same bytes."""
    counted = [said.get("out_bytes") for said in (ours, theirs)]
    return None in counted or counted[0] >= counted[1]


def left_out(lines: list[Line]) -> list[str]:
    """What was measured and is in no figure, and why."""
    known, found = Lines(lines), []
    _figures(known)
    for line in lines:
        said, kind = line["said"], line["kind"]
        if line["part"] != PART or not said.get("mode", "").startswith("ours"):
            continue
        beside = (each["said"] for each in known.of(kind, "control") if each["run"] == line["run"])
        if _is_idle(line):
            what = "no figure of time" if said.get("first") else "no figure"
            found.append(f"{kind} {said['mode']}: moved {_how_much(said, 'out_bytes')}, "
                         f"and is in {what}")
        elif _is_idle(line, "later_out_bytes"):
            found.append(f"{kind} {said['mode']}: moved {_how_much(said, 'later_out_bytes')} in "
                         "later steps: how much the first one moved is no figure")
        elif not all(_moved_as_much(said, each) for each in beside):
            found.append(f"{kind} {said['mode']}: moved less than the control: not beside it")
    found += [f"{PART}.{name}: cut off: run {run} did not go back as often as there, and is not in "
              "it" for name, run in sorted(known.cut.items())]
    return list(dict.fromkeys(found))


def _inputs(lines: Lines, kind: str) -> dict[str, Pairs]:
    """A workload whose layer inputs move."""
    figures = {name: lines.pairs(name, theirs) for name, theirs in (
        (f"{kind}.over_control", "control"), (f"{kind}.over_checkpoint", "checkpoint"))}
    for name, field in (("peak", "peak_bytes"), ("after_forward", "after_forward_bytes")):
        figures[f"{kind}.{name}"] = lines.beside_lowest(kind, field)
    return {**figures, **_first(lines, kind)}


def _first(lines: Lines, kind: str) -> dict[str, Pairs]:
    """First steps of a workload whose layer inputs move."""
    moved, reserved = f"{kind}.first_moved", f"{kind}.first_reserved"
    cold = f"{kind}.first_cold"
    return {
        moved: [(ours["out_bytes"] / 1e9, ours["later_out_bytes"] / 1e9)
                for ours, in lines.firsts(moved, "ours", began=True)],
        reserved: [(ours["first_step_seconds"], plain["first_step_seconds"])
                   for plain, ours in lines.firsts(reserved, "checkpoint", "ours-reserved")],
        cold: [(ours["first_step_seconds"], plain["first_step_seconds"] + ours["later_out_bytes"]
                / (made["reserve_bytes"] / made["reserve_seconds"]))
               for plain, ours, made in lines.firsts(cold, "checkpoint", "ours", "ours-reserved")
               if made["reserve_bytes"]]}


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
        latest, = lines.visits(kind, "ours-all")
        figures[f"{kind}.peak"] = [(_most(latest) / 1e9, SAVED_PEAK_GB_MAX)]
        longest = [said.get("longest_verb_seconds", 0) for said in visits]
        if all(longest):
            figures[f"{kind}.longest_verb"] = [(1e3 * max(longest), LONGEST_VERB_MS_MAX)]
    first = f"{kind}.first"
    figures[first] = [(said["first_step_seconds"], said["later_step_seconds"])
                      for said, in lines.firsts(first, "ours-all-reserved-warm")]
    return figures


def _block(lines: Lines, kind: str) -> dict[str, Pairs]:
    """The workload whose memory is nearly all layer inputs."""
    over = f"{kind}.over_checkpoint"
    figures = {over: lines.pairs(over, "checkpoint")}
    if both := lines.visits(kind, "ours", "checkpoint"):
        ours, plain = both
        most, least = _most(ours), min(said["peak_bytes"] for said in plain)
        figures[f"{kind}.peak"] = [(most / 1e9, least / 1e9)]
        # All inputs but the last one, which stays.
        figures[f"{kind}.freed"] = [((least - most) / 1e9, _should(ours[-1]) / 1e9)]
    return figures


def _most(visits: list[Line]) -> float:
    return max(said["peak_bytes"] for said in visits)


def _others(lines: Lines) -> dict[str, Pairs]:
    sharded, raw = "sharded-1.7b.over_control", "gathers.over_raw"
    figures: dict[str, Pairs] = {sharded: lines.pairs(sharded, "control"),
                                 raw: lines.pairs(raw, "raw", "gather_seconds")}
    for host in lines.last("host", "ours-all"):
        if host.get("pair_microseconds", 0) <= 0:
            # The noise was more than the time.
            continue
        figures["host.pair"] = [(host["pair_microseconds"], HOST_PAIR_MICROSECONDS_MAX)]
    for lengths in lines.last("lengths", "ours"):
        figures["lengths.over_fixed"] = [(lengths["mixed_seconds"], lengths["fixed_seconds"])]
        plain, *_ = lines.last("lengths", "checkpoint", "ours") or [{}]
        for name in ("reserved", "pinned", "resident"):
            tenth, growth = lengths["held_tenth"][name], f"{name}_growth_bytes"
            if tenth:
                # What the same steps grow by without offload is not ours.
                least = tenth + plain.get(growth, 0)
                figures[f"lengths.{name}"] = [((tenth + lengths[growth]) / 1e9, least / 1e9)]
    return figures


def figures(lines: list[Line]) -> dict[str, Pairs]:
    """All figures there are, by name; pairs with a zero are none."""
    return _figures(Lines(lines))


def _figures(known: Lines) -> dict[str, Pairs]:
    short = "short-0.6b.over_checkpoint"
    found = {**_inputs(known, "inputs-1.7b"), **_inputs(known, "inputs-8b"),
             **_saved(known, "saved-0.6b"), **_block(known, "block-64"), **_others(known),
             short: known.pairs(short, "checkpoint")}
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
    known = Lines(lines)
    found = _figures(known)
    for name, pairs in found.items():
        kind = name.removeprefix(f"{PART}.").rsplit(".", 1)[0]
        of_kind = ([line for line in each if line["kind"] == kind]
                   for each in (known.lines, known.began))
        source = _source(next(filter(None, of_kind)), name, pairs)
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
    folder = Path(words[0])
    table = rows(judge(folder))
    for text in left_out(read(folder / "runs.jsonl")):
        print(text)
    for row in table:
        name, *rest = row
        print(name.ljust(34), *(cell.ljust(12) for cell in rest))


if __name__ == "__main__":
    program(main, "judge.py")
