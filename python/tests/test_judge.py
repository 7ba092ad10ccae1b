"""A figure that says more than was measured: the fault guarded against, on lines made up.

What is judged here is what the scripts of python/benches leave; test_more_benches.py runs those.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).resolve().parent.parent / "benches"
sys.path.insert(0, str(BENCHES))

import judge  # noqa: E402


def line(kind, way, run=1, **said):
    return {"part": "torch", "kind": kind, "run": run, "command": "c", "commit": "0",
            "said": {"mode": way, "simulated": False, **said}}


def visits(kind, way, seconds, **said):
    return [line(kind, way, step_seconds=each, **said) for each in seconds]


def test_single_steps_in_turn_count_before_visits_and_name_their_own_command(tmp_path):
    kind, memory = "inputs-1.7b", {"input_bytes": 1, "peak_bytes": 5, "after_forward_bytes": 5}
    lines = [*visits(kind, "ours", [9.0], **memory), *visits(kind, "control", [1.0], **memory)]
    for way, seconds in (("ours", 2.0), ("control", 4.0)):
        lines.append({**line(kind, way, step_seconds=seconds, turns=True), "command": "in turn"})
    assert judge.figures(lines)[f"torch.{kind}.over_control"] == [(2.0, 4.0)]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in reversed(lines)))
    judge.judge(tmp_path)
    said = [json.loads(each) for each in path.read_text().splitlines()]
    commands = {each["said"]["figure"]: each["command"] for each in said
                if "figure" in each["said"]}
    assert commands == {f"torch.{kind}.over_control": "in turn"}


def test_visits_count_where_only_one_of_two_ways_took_turns():
    """A later run of fewer ways in turn took the figure of those that it left out away."""
    lines = [*visits("inputs-1.7b", "ours", [9.0, 8.0]),
             *visits("inputs-1.7b", "control", [1.0, 2.0])]
    lines.insert(0, line("inputs-1.7b", "ours", step_seconds=2.0, turns=True))
    assert judge.figures(lines) == {"torch.inputs-1.7b.over_control": [(9.0, 1.0), (8.0, 2.0)]}


def test_a_figure_of_visits_names_theirs_where_one_way_took_turns_later(tmp_path):
    kind = "inputs-1.7b"
    lines = [*visits(kind, "ours", [9.0, 9.0]), *visits(kind, "control", [1.0, 1.0])]
    lines.append({**line(kind, "ours", step_seconds=2.0, turns=True), "command": "in turn"})
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    judge.judge(tmp_path)
    said = json.loads((tmp_path / "runs.jsonl").read_text().splitlines()[-1])
    assert said["said"]["pairs"] == 2 * [[9.0, 1.0]] and said["command"] == "c"


@pytest.mark.parametrize("kind, theirs, field", [
    ("inputs-1.7b", "control", "step_seconds"), ("inputs-8b", "checkpoint", "step_seconds"),
    ("sharded-1.7b", "control", "step_seconds"), ("gathers", "raw", "gather_seconds")])
def test_ours_that_moved_nothing_is_in_no_figure(kind, theirs, field):
    """To keep everything on the device is faster than any offload, and slows no all-gather."""
    lines = [line(kind, way, **({"out_bytes": 0} if way == "ours" else {}), **{field: 1.0})
             for way in ("ours", theirs, theirs, "ours")]
    assert judge.figures(lines) == {}
    assert judge.left_out(lines) == [f"{kind} ours: moved nothing, and is in no figure"]
    for ours in (lines[0], lines[3]):
        ours["said"]["out_bytes"] = 5
    assert len(judge.figures(lines)) == 1 and judge.left_out(lines) == []


def test_ours_that_moved_less_than_the_control_is_not_beside_it():
    lines = [line("inputs-8b", way, step_seconds=1.0, out_bytes=out, turns=True)
             for way, out in (("checkpoint", 0), ("control", 27), ("ours", 26))]
    assert judge.figures(lines) == {"torch.inputs-8b.over_checkpoint": [(1.0, 1.0)]}
    assert judge.left_out(lines) == [
        "inputs-8b ours: moved less than the control: not beside it"]


def test_short_steps_may_stay_on_the_device():
    lines = [line("short-0.6b", way, step_seconds=1.0, out_bytes=0)
             for way in ("checkpoint", "ours", "ours", "checkpoint")]
    assert judge.figures(lines) == {"torch.short-0.6b.over_checkpoint": 2 * [(1.0, 1.0)]}
    assert judge.left_out(lines) == []


def test_a_pair_of_hooks_that_moved_nothing_has_no_figure():
    of = {"pair_microseconds": 1.0}
    assert judge.figures([line("host", "ours-all", out_bytes=0, **of)]) == {}
    assert judge.figures([line("host", "ours-all", out_bytes=9, **of)]) == {
        "torch.host.pair": [(1.0, 20.0)]}


@pytest.mark.parametrize("of", [{"pair_microseconds": -3.0}, {}])
def test_a_pair_that_the_noise_hides_is_no_figure(of):
    """A time below zero passed what is asked of it."""
    assert judge.figures([line("host", "ours-all", out_bytes=9, **of)]) == {}


def test_a_time_below_zero_is_not_resolved_nor_is_a_pair_with_one():
    import memory

    assert memory.resolved(2.0, 3.0, 4.0) == {
        "pack": 2.0, "unpack": 3.0, "leave": 4.0, "pair": 5.0}
    assert memory.resolved(-1.0, 3.0, 0.0) == {
        "pack": None, "unpack": 3.0, "leave": None, "pair": None}


def test_plain_checkpointing_alone_is_no_peer():
    memory = {"peak_bytes": 5e9, "after_forward_bytes": 4e9, "input_bytes": 1, "applications": 2}
    lines = [line("inputs-8b", way, **memory) for way in ("checkpoint", "ours")]
    assert judge.figures(lines) == {}
    # Nor is a peer of another run, which may have been of another shape.
    other = line("inputs-8b", "torch", run=2, **memory)
    assert judge.figures([*lines, other]) == {}
    assert set(judge.figures([*lines, {**other, "run": 1}])) == {
        "torch.inputs-8b.peak", "torch.inputs-8b.after_forward"}


def test_first_steps_of_two_runs_are_not_compared():
    """One may run ours again until it is good, beside the checkpointing of another day."""
    first = {"first": True, "later_out_bytes": 4e9, "out_bytes": 4e9}
    lines = [
        line("inputs-8b", "checkpoint", first=True, first_step_seconds=2.0, out_bytes=0),
        line("inputs-8b", "ours-reserved", first_step_seconds=2.05, reserve_bytes=8e9,
             reserve_seconds=0.5, **first),
        line("inputs-8b", "ours", run=2, first_step_seconds=1.9, **first),
        line("inputs-8b", "ours-reserved", run=2, first_step_seconds=1.9, reserve_bytes=8e9,
             reserve_seconds=0.5, **first)]
    # Each there and back.
    assert judge.figures([again for each in lines for again in (each, each)]) == {
        "torch.inputs-8b.first_moved": 2 * [(4.0, 4.0)],
        "torch.inputs-8b.first_reserved": 2 * [(2.05, 2.0)]}


def test_the_table_has_the_worse_of_two_middle_pairs_and_says_what_is_short():
    asked = BENCHES.parent.parent / "benches" / "results" / "required.json"
    if not asked.exists():
        pytest.skip("not run: the bundle has no benches/results")
    head, link, over = judge.rows({
        "torch.saved-0.6b.link": [(0.98, 1.0), (0.96, 1.0)],
        "torch.inputs-8b.over_control": [(1.0, 1.0), (1.001, 1.0)]})
    assert len(head) == len(link)
    assert link[3:] == ("0.9600", ">= 0.97", "2", "SHORT")
    assert over[3:] == ("1.0010", "<= 1.002", "2", "")


def test_peaks_are_beside_the_lowest_peer_and_two_inputs():
    memory = {"input_bytes": int(1e9), "applications": 28}
    lines = [
        line("inputs-8b", "checkpoint", peak_bytes=9e9, after_forward_bytes=8e9),
        line("inputs-8b", "trl", peak_bytes=5e9, after_forward_bytes=3e9),
        line("inputs-8b", "deepspeed", missing="not installed"),
        line("inputs-8b", "ours", peak_bytes=6e9, after_forward_bytes=4e9, step_seconds=1.0,
             **memory)]
    found = judge.figures(lines)
    assert found["torch.inputs-8b.peak"] == [(6.0, 7.0)]
    assert found["torch.inputs-8b.after_forward"] == [(4.0, 5.0)]


def test_a_figure_names_the_command_that_measured_it(tmp_path):
    lines = [
        line("inputs-8b", "checkpoint", first=True, first_step_seconds=2.0, out_bytes=0),
        line("inputs-8b", "ours-reserved", first=True, first_step_seconds=2.1, reserve_bytes=0,
             later_out_bytes=4, out_bytes=4),
        line("inputs-8b", "trl", peak_bytes=5e9, after_forward_bytes=3e9),
        line("inputs-8b", "ours", peak_bytes=6e9, after_forward_bytes=4e9, step_seconds=1.0,
             input_bytes=1e9),
        line("inputs-8b", "checkpoint", turns=True, step_seconds=1.0),
        line("inputs-8b", "ours", turns=True, step_seconds=1.0)]
    for which, commands in (("first", lines[:2]), ("steps", lines[2:4]), ("turns", lines[4:])):
        for one in commands:
            one["command"] = which
    # Back as well as there.
    lines = lines[:2] + lines
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    judge.judge(tmp_path)
    said = [json.loads(one) for one in (tmp_path / "runs.jsonl").read_text().splitlines()]
    by = {one["said"]["figure"]: one["command"] for one in said if "figure" in one["said"]}
    assert by == {"torch.inputs-8b.first_reserved": "first", "torch.inputs-8b.peak": "steps",
                  "torch.inputs-8b.after_forward": "steps",
                  "torch.inputs-8b.over_checkpoint": "turns"}


def test_a_run_that_measured_nothing_has_no_figures(tmp_path):
    assert judge.judge(tmp_path) == {}


def test_pairs_are_of_one_run_and_first_with_first():
    lines = visits("short-0.6b", "ours", [2.0, 3.0, 4.0, 5.0])
    lines += visits("short-0.6b", "checkpoint", [1.0, 1.5])
    lines += [line("short-0.6b", "ours", run=2, step_seconds=7.0)]
    assert judge.figures(lines) == {"torch.short-0.6b.over_checkpoint": [(2.0, 1.0), (3.0, 1.5)]}


def test_a_cold_first_step_is_beside_checkpointing_and_the_time_of_pinning():
    first = {"first": True, "later_out_bytes": 4e9, "out_bytes": 3.9e9}
    lines = [
        line("inputs-8b", "checkpoint", first=True, first_step_seconds=2.0, out_bytes=0),
        line("inputs-8b", "ours", first_step_seconds=2.1, **first),
        line("inputs-8b", "ours-reserved", first_step_seconds=2.05, reserve_bytes=8e9,
             reserve_seconds=0.5, **first)]
    # Without a rate there is no bound.
    assert "torch.inputs-8b.first_cold" not in judge.figures(lines[:2] + lines[:2])
    # There and back: each round is a pair of its own.
    again = [line("inputs-8b", "ours-reserved", first_step_seconds=2.0, reserve_bytes=8e9,
                  reserve_seconds=1.0, **first),
             line("inputs-8b", "ours", first_step_seconds=2.2, **first),
             line("inputs-8b", "checkpoint", first=True, first_step_seconds=1.9, out_bytes=0)]
    found = judge.figures(lines + again)
    # 4 GB at 16 GB/s, and at 8 GB/s.
    assert found["torch.inputs-8b.first_moved"] == 2 * [(3.9, 4.0)]
    assert found["torch.inputs-8b.first_cold"] == [(2.1, 2.25), (2.2, 2.4)]
    assert found["torch.inputs-8b.first_reserved"] == [(2.05, 2.0), (2.0, 1.9)]


def test_the_block_is_judged_by_what_it_frees_of_what_was_predicted():
    memory = {"input_bytes": int(1e9), "applications": 11}
    lines = visits("block-64", "checkpoint", [1.0], peak_bytes=14e9, **memory)
    lines += visits("block-64", "ours", [1.005], peak_bytes=4.2e9, **memory)
    found = judge.figures(lines)
    assert found["torch.block-64.peak"] == [(4.2, 14.0)]
    (freed, predicted), = found["torch.block-64.freed"]
    assert (freed, predicted) == (pytest.approx(9.8), 10.0)


def test_figures_replace_those_made_before(tmp_path):
    lines = visits("short-0.6b", "ours", 2 * [2.0]) + visits("short-0.6b", "checkpoint", 2 * [1.0])
    other = {"part": "train", "kind": "", "run": 1, "command": "t", "said": {"figure": "x"}}
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [*lines, other]))
    judge.judge(tmp_path)
    once = path.read_text()
    judge.judge(tmp_path)
    assert path.read_text() == once
    assert once.count('"figure": "torch.') == 1 and '"figure": "x"' in once


def test_required_figures_are_ones_that_the_judgement_can_give():
    asked = BENCHES.parent.parent / "benches" / "results" / "required.json"
    if not asked.exists():
        pytest.skip("not run: the bundle has no benches/results")
    names = {each["name"] for each in json.loads(asked.read_text())["figures"]}
    source = (BENCHES / "judge.py").read_text()
    for name in names:
        # PyTorch's pool of pinned memory is a part of tools/measure.sh, not of these benches.
        if name.startswith("torch.") and not name.startswith("torch.pinned."):
            kind, figure = name.removeprefix("torch.").rsplit(".", 1)
            assert kind in source and (figure in source or kind == "lengths"), name
