"""A run that did not come to its end, or did not do its work, and yet has good figures: the fault
guarded against.

The judgement is tried on lines made up; the scripts are interrupted, refused by a disk, and killed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHES = Path(__file__).resolve().parent.parent / "benches"
sys.path.insert(0, str(BENCHES))

import clock  # noqa: E402
import judge  # noqa: E402
import lines as lines_of_runs  # noqa: E402
import output  # noqa: E402
import gathers  # noqa: E402
import steps  # noqa: E402
import torch  # noqa: E402
import turns  # noqa: E402
import workloads  # noqa: E402

SMALL = ["--scale", "small", "--device", "cpu"]
KIND = "inputs-8b"


def line(kind, way, run=1, **said):
    return {"part": "torch", "kind": kind, "run": run, "command": "c", "commit": "0",
            "said": {"mode": way, "simulated": False, **said}}


def kept(folder):
    return [json.loads(text)["said"] for text in (folder / "runs.jsonl").read_text().splitlines()]


def firsts(order, run=1):
    """First steps in that order; the first process of all reads its libraries from the disk."""
    moved = {"out_bytes": 4e9, "later_out_bytes": 4e9}
    of = {"checkpoint": {"out_bytes": 0}, "ours": moved,
          "ours-reserved": {**moved, "reserve_bytes": 8e9, "reserve_seconds": 0.5}}
    return [line(KIND, way, run, first=True, first_step_seconds=1.5 if nth else 3.8, **of[way])
            for nth, way in enumerate(order)]


# ---- there, and not back ----


def test_first_steps_that_were_cut_off_have_no_figure_and_are_named():
    there = ["checkpoint", "ours", "ours-reserved"]
    whole = firsts(there + there[::-1])
    names = [f"torch.{KIND}.first_{name}" for name in ("cold", "moved", "reserved")]
    assert list(judge.figures(whole)) == names and judge.left_out(whole) == []
    for count in (3, 4, 5):
        cut = whole[:count]
        found = judge.figures(cut)
        # Ours were there and back, and checkpointing, which was cold, was not.
        assert set(found) == ({names[1]} if count == 5 else set())
        assert [said.partition(": cut off: run 1 ")[0] for said in judge.left_out(cut)] == [
            name for name in names if name not in found]


def test_a_whole_run_counts_beside_one_that_was_cut_off():
    there = ["checkpoint", "ours-reserved"]
    lines = firsts(there + there[::-1]) + firsts(there, run=2)
    name = f"torch.{KIND}.first_reserved"
    assert judge.figures(lines)[name] == [(1.5, 3.8), (1.5, 1.5)]
    assert any(said.startswith(f"{name}: cut off: run 2 ") for said in judge.left_out(lines))


@pytest.mark.parametrize("kind, theirs", [
    ("inputs-1.7b", "control"), ("inputs-8b", "checkpoint"), ("short-0.6b", "checkpoint"),
    ("block-64", "checkpoint"), ("sharded-1.7b", "control")])
def test_visits_that_did_not_come_back_are_in_no_figure_of_time(kind, theirs):
    of = {"peak_bytes": 1e9, "step_seconds": 1.0}
    lines = [line(kind, way, **of) for way in (theirs, "ours", "ours", theirs, theirs, "ours")]
    name = f"torch.{kind}.over_{theirs}"
    assert judge.figures(lines[:4])[name] == 2 * [(1.0, 1.0)]
    for count in (2, 3, 5, 6):
        assert name not in judge.figures(lines[:count])
        assert [said for said in judge.left_out(lines[:count]) if said.startswith(f"{name}: cut")]


def test_a_program_that_judges_says_what_was_cut_off(tmp_path, capsys):
    cut = "".join(json.dumps(each) + "\n" for each in firsts(["checkpoint", "ours-reserved"]))
    (tmp_path / "runs.jsonl").write_text(cut)
    judge.main([str(tmp_path)])
    assert f"torch.{KIND}.first_reserved: cut off" in capsys.readouterr().out
    assert (tmp_path / "runs.jsonl").read_text() == cut


def test_a_process_that_is_not_counted_runs_before_first_steps_are_timed(
        tmp_path, capsys, monkeypatch):
    ran = []

    def in_a_process(workload, name, options):
        ran.append(name)
        return {"missing": "nothing here"} if len(ran) > 1 else {"first_step_seconds": 3.8}

    monkeypatch.setattr(steps, "in_a_process", in_a_process)
    steps.main([*SMALL, "--workloads", "inputs-8b", "--parts", "first", "--ways", "ours",
                "--out", str(tmp_path)])
    assert ran == ["checkpoint", "ours", "ours-reserved", "ours-reserved", "ours"]
    said = capsys.readouterr().out
    assert "inputs-8b checkpoint: one process to warm up, not counted\n" in said
    assert [each["mode"] for each in kept(tmp_path)] == ran[1:]


# ---- what is in the figure ----


def test_a_peak_is_the_worst_visit_of_ours_beside_the_best_of_each_other():
    """It was the last visit's, whose peak may be the least."""
    def of(way, *peaks, kind=KIND, **more):
        return [line(kind, way, peak_bytes=each, after_forward_bytes=each / 2, step_seconds=1.0,
                     input_bytes=int(1e9), applications=3, **more) for each in peaks]

    lines = of("ours", 6e9, 5e9) + of("trl", 4e9, 5e9) + of("checkpoint", 9e9, 8e9)
    found = judge.figures(lines)
    assert found[f"torch.{KIND}.peak"] == [(6.0, 6.0)]
    assert found[f"torch.{KIND}.after_forward"] == [(3.0, 4.0)]
    block = of("ours", 4e9, 3e9, kind="block-64") + of("checkpoint", 6e9, 7e9, kind="block-64")
    found = judge.figures(block)
    assert found["torch.block-64.peak"] == [(4.0, 6.0)]
    assert found["torch.block-64.freed"] == [(2.0, 2.0)]
    link = {"out_bytes": 4e9, "in_bytes": 4e9, "link_out_bytes_per_second": 1e9,
            "link_in_bytes_per_second": 1e9}
    saved = of("ours-all", 5e9, 4e9, kind="saved-0.6b", **link)
    assert judge.figures(saved)["torch.saved-0.6b.peak"] == [(5.0, judge.SAVED_PEAK_GB_MAX)]


def test_ours_that_moved_almost_nothing_is_in_no_figure():
    """One byte was enough to count as offload."""
    def lines(out, **more):
        return [line("sharded-1.7b", way, step_seconds=1.0, out_bytes=out, **more)
                for way in ("control", "ours", "ours", "control")]

    says = {"applications": 5, "input_bytes": 100}
    name = "torch.sharded-1.7b.over_control"
    assert name in judge.figures(lines(380, **says))
    assert judge.figures(lines(379, **says)) == {}
    assert judge.left_out(lines(4, **says)) == [
        "sharded-1.7b ours: moved 1.0 % of what should, and is in no figure"]
    # A line from before it said what should move.
    assert name in judge.figures(lines(4))


def test_a_first_step_that_moved_little_is_no_time_but_says_how_little():
    there = ["checkpoint", "ours", "ours-reserved"]
    lines = firsts(there + there[::-1])
    for each in lines:
        each["said"] |= {"applications": 5, "input_bytes": 1e9}
        if each["said"]["mode"] == "ours":
            each["said"]["out_bytes"] = 2e9
    found = judge.figures(lines)
    assert found[f"torch.{KIND}.first_moved"] == 2 * [(2.0, 4.0)]
    assert f"torch.{KIND}.first_cold" not in found and f"torch.{KIND}.first_reserved" in found
    # Nothing later either: then two halves would be a whole.
    for each in lines:
        each["said"]["later_out_bytes"] = 2e9
    assert f"torch.{KIND}.first_moved" not in judge.figures(lines)
    assert any("in later steps" in said or "no figure of time" in said
               for said in judge.left_out(lines))


def test_a_first_step_alone_that_moved_little_has_a_command(tmp_path):
    """The figure is of lines that no other figure is of."""
    lines = firsts(["ours", "ours"])
    for each in lines:
        each["said"] |= {"applications": 5, "input_bytes": 1e9, "out_bytes": 2e9}
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert list(judge.judge(tmp_path)) == [f"torch.{KIND}.first_moved"]


# ---- a disk that takes no more ----


def test_a_full_disk_is_named_and_leaves_whole_lines_that_the_next_run_adds_to(tmp_path):
    pytest.importorskip("transformers")
    words = [*SMALL, "--workloads", "block-64", "--parts", "steps", "--ways", "checkpoint,control",
             "--steps", "1", "--rounds", "2", "--warm", "0", "--out", str(tmp_path)]
    command = [sys.executable, str(BENCHES / "steps.py"), *words]
    done = subprocess.run(
        command, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"steps.py: {tmp_path}/runs.jsonl: File too large"]
    there = kept(tmp_path)
    assert there and not any("figure" in said for said in there), "judged"
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert kept(tmp_path)[:len(there)] == there


def test_half_a_line_is_taken_back(tmp_path):
    out = output.Output(tmp_path, torch.device("cpu"), "steps.py")
    out.record("host", "ours-all", {"pair_microseconds": 1.0})
    out.say("once")
    before = [(tmp_path / name).read_bytes() for name in ("runs.jsonl", "all.log")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before[0]) + 20, limits[1]))
        with pytest.raises(lines_of_runs.Wrong, match="runs.jsonl: File too large"):
            out.record("host", "ours-all", {"pair_microseconds": 2.0})
        with pytest.raises(lines_of_runs.Wrong, match="all.log: File too large"):
            lines_of_runs.add(tmp_path / "all.log", "x" * 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert before == [(tmp_path / name).read_bytes() for name in ("runs.jsonl", "all.log")]
    out.close()


def test_a_screen_that_takes_no_more_is_one_line(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, str(BENCHES / "steps.py"), *SMALL, "--parts", "host",
             "--out", str(tmp_path)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "steps.py: standard output: No space left on device\n"


def test_what_ends_by_an_error_is_not_judged(tmp_path, capsys, monkeypatch):
    def failing(workload, options, out, table):
        for way in ("checkpoint", "ours", "ours", "checkpoint"):
            out.record(workload.name, way, {"step_seconds": 1.0})
        raise ZeroDivisionError

    monkeypatch.setattr(steps, "steps_of", failing)
    monkeypatch.setattr(steps, "transformers_of", lambda: None)
    with pytest.raises(ZeroDivisionError):
        steps.main([*SMALL, "--workloads", "short-0.6b", "--parts", "steps",
                    "--out", str(tmp_path)])
    assert "lines in " in capsys.readouterr().out
    assert not any("figure" in said for said in kept(tmp_path))
    # Its lock is gone, and what it measured can be judged.
    assert list(judge.judge(tmp_path)) == ["torch.short-0.6b.over_checkpoint"]


# ---- interrupted, killed, without a package ----


def test_single_steps_in_turn_keep_their_whole_rounds_when_interrupted(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    device = torch.device("cpu")
    built = workloads.build(workloads.WORKLOADS["inputs-1.7b"], device, small=True)
    taken = []

    def step(built, way):
        taken.append(way)
        # Warm-up of three ways, two rounds of six steps, and half of a third one.
        if len(taken) == 3 + 2 * 6 + 4:
            raise KeyboardInterrupt
        clock.step(built, way)

    monkeypatch.setattr(turns, "step", step)
    out = output.Output(tmp_path, device, "steps.py")
    of = turns.attached(("checkpoint", "control", "ours"), built, device, out, "inputs-1.7b")
    options = argparse.Namespace(warm=1, rounds=5)
    with pytest.raises(KeyboardInterrupt):
        turns.rounds_of(built, of, options, device, out, "inputs-1.7b")
    out.close()
    said = kept(tmp_path)
    assert [(each["mode"], each["round"]) for each in said] == [
        (way, turn) for turn in range(2) for way in of]
    should = (built.applications - 1) * built.input_bytes
    assert {each["mode"]: each["out_bytes"] for each in said} == {
        "checkpoint": 0, "control": should, "ours": should}
    assert all(each["input_bytes"] == built.input_bytes
               and each["applications"] == built.applications for each in said)
    for way in of.values():
        way.detach(built)


def test_a_first_step_says_what_should_move():
    pytest.importorskip("transformers")
    import first

    said = first.measure("block-64", "ours", torch.device("cpu"), small=True)
    assert said["out_bytes"] >= 0.95 * (said["applications"] - 1) * said["input_bytes"] > 0


def started(tmp_path, **more):
    """Two ranks in the middle of their steps, and their ids; none where they did not begin."""
    going = subprocess.Popen(
        [sys.executable, str(BENCHES / "sharded_steps.py"), *SMALL, "--parts", "steps",
         "--steps", "1000", "--rounds", "1000", "--warm", "0", "--out", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
    ranks = []
    while going.poll() is None and (len(ranks) < 2 or not (tmp_path / "runs.jsonl").exists()):
        time.sleep(0.2)
        below = Path(f"/proc/{going.pid}/task/{going.pid}/children").read_text().split()
        ranks = [pid for pid in below
                 if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return going, [int(pid) for pid in ranks]


def are_gone(pids, seconds=20.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(tmp_path, how):
    pytest.importorskip("transformers")
    # As who is started in the background: a rank would ignore an interruption.
    going, ranks = started(
        tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    try:
        assert len(ranks) == 2, going.communicate()[1]
        going.send_signal(how)
        going.wait(timeout=60)
        assert going.returncode == (143 if how == signal.SIGTERM else -how)
        assert are_gone(ranks), "a rank outlived its parent"
    finally:
        for pid in (pid for pid in ranks if is_alive(pid)):
            os.kill(pid, signal.SIGKILL)
        going.kill()
        going.communicate()


def test_what_is_wrong_in_a_rank_is_one_line_of_the_program(tmp_path):
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(BENCHES / "sharded_steps.py"), *SMALL, "--parts", "steps", "--steps",
         "1", "--rounds", "6", "--warm", "0", "--out", str(tmp_path)],
        capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"sharded_steps.py: {tmp_path}/runs.jsonl: File too large")
    assert kept(tmp_path)


@pytest.mark.parametrize("script", ["steps.py", "sharded_steps.py"])
def test_without_transformers_one_line_says_so(tmp_path, script):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "transformers.py").write_text("raise ImportError('No module named transformers')")
    done = subprocess.run(
        [sys.executable, str(BENCHES / script), *SMALL, "--out", str(tmp_path / "out")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(hidden)})
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr[-2000:]
    assert "transformers, which cannot be imported" in done.stderr
    assert "pip install transformers" in done.stderr and done.stderr.startswith(script)


def gathered(tmp_path, early, passes=20):
    out = output.Output(tmp_path, torch.device("cpu"), "sharded_steps.py")
    seconds = {name: [float(nth + 1) for nth in range(passes)] for name in ("alone", "raw", "ours")}
    moved = {"raw": [9] * passes, "ours": [9] * passes}
    gathers.told(
        seconds, [float(nth in early) for nth in range(passes)], moved, out)
    out.close()
    return judge.judge(tmp_path)


def test_an_early_pass_is_left_out_in_all_ways_and_counted_aloud(tmp_path, capsys):
    found = gathered(tmp_path, early={3, 7})
    pairs = found["torch.gathers.over_raw"]
    assert len(pairs) == 18 and all(ours == theirs for ours, theirs in pairs)
    assert not {4.0, 8.0} & {ours for ours, _ in pairs}
    assert "in 2 of 20 passes copies were over before" in capsys.readouterr().out


def test_more_than_a_tenth_of_early_passes_have_no_figure(tmp_path, capsys):
    assert gathered(tmp_path, early={3, 7, 8}) == {}
    said = capsys.readouterr().out
    assert "in 3 of 20 passes" in said and "more than a tenth of the passes: no figure" in said
    (tmp_path / "none").mkdir()
    assert gathered(tmp_path / "none", early=set(range(20))) == {}
