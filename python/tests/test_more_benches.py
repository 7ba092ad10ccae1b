"""A table that compares what was not measured alike: the fault guarded against.

The scripts of python/benches run here at their small scale, with every way that a CPU has; what
they leave is what tools/figures.py takes. test_judge.py tries the judgement on lines made up.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

BENCHES = Path(__file__).resolve().parent.parent / "benches"
sys.path.insert(0, str(BENCHES))

import clock  # noqa: E402
import judge  # noqa: E402
import lines as lines_of_runs  # noqa: E402
import output  # noqa: E402
import pair  # noqa: E402
import raw  # noqa: E402
import sharded_steps  # noqa: E402
import steps  # noqa: E402
import torch  # noqa: E402
import ways  # noqa: E402
import workloads  # noqa: E402


@pytest.fixture
def small():
    workload = workloads.WORKLOADS["inputs-1.7b"]
    return workloads.build(workload, torch.device("cpu"), small=True)


def run(script, *words):
    command = [sys.executable, str(BENCHES / script), "--scale", "small", "--device", "cpu", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_single_steps_in_turn_leave_a_pair_for_each_round_and_no_figure_of_memory(tmp_path):
    pytest.importorskip("transformers")
    said = run("steps.py", "--workloads", "inputs-1.7b", "--parts", "turns", "--rounds", "3",
               "--warm", "1", "--out", str(tmp_path))
    assert "ours over control" in said and "ours over checkpoint" in said
    assert "inputs-1.7b torch: skipped: takes no turns" in said, "left out in silence"
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    found = {line["said"]["figure"]: line["said"]["pairs"] for line in lines
             if "figure" in line["said"]}
    assert set(found) == {"torch.inputs-1.7b.over_control", "torch.inputs-1.7b.over_checkpoint"}
    assert all(len(pairs) == 3 for pairs in found.values())
    moved = {(line["said"]["mode"], line["said"]["out_bytes"]) for line in lines
             if "step_seconds" in line["said"]}
    assert {way for way, _ in moved} == {"checkpoint", "control", "ours"} and len(moved) == 3
    out = dict(moved)
    assert out["control"] == out["ours"] > 0 == out["checkpoint"]
    # What is asked stands beside it.
    assert "which is no figure, and not judged" in said
    assert "<= 1.002" not in said and "SHORT" not in said


def test_a_control_at_rest_copies_nothing_in_the_steps_of_others(small):
    device = torch.device("cpu")
    control, plain = ways.WAYS["control"](device), ways.WAYS["checkpoint"](device)
    control.attach(small)
    clock.step(small, control)
    moved = control.moved()
    assert min(moved) > 0
    clock.step(small, plain)
    assert control.moved() == moved
    control.detach(small)


def test_a_run_of_every_way_leaves_lines_and_figures(tmp_path):
    pytest.importorskip("transformers")
    briefly = ["--steps", "2", "--rounds", "2", "--warm", "1", "--out"]
    folders = tmp_path / "inputs", tmp_path / "saved"
    with ThreadPoolExecutor() as both:
        inputs = both.submit(
            run, "steps.py", "--workloads", "inputs-1.7b", "--parts", "steps,host",
            "--more-ways", "ours-wrapper", "--ways", "checkpoint,control,trl,ours,ours-all",
            *briefly, str(folders[0]))
        saved = both.submit(
            run, "steps.py", "--workloads", "saved-0.6b", "--parts", "first,steps",
            "--ways", "torch-all,ours-all", *briefly, str(folders[1]))
        said = inputs.result()
        saved.result()
    lines = [json.loads(line) for folder in folders
             for line in (folder / "runs.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "step_seconds" in line["said"]]
    # There and back.
    order = [line["said"]["mode"] for line in measured if line["kind"] == "inputs-1.7b"]
    assert order == order[::-1] and order.count("ours") == 2
    assert all(line["said"]["simulated"] for line in lines), "times of a CPU are no figures"
    by_way = {line["said"]["mode"]: line["said"] for line in measured}
    for way in ("control", "ours", "ours-wrapper", "ours-all"):
        assert by_way[way]["out_bytes"] > 0, f"{way} moved nothing"
    # Three of four layer inputs: the last one stays.
    inputs = next(line["said"] for line in measured if line["said"]["mode"] == "ours")
    control = next(line["said"] for line in measured if line["said"]["mode"] == "control")
    assert inputs["out_bytes"] == control["out_bytes"] == 3 * inputs["input_bytes"]
    figures = {line["said"]["figure"] for line in lines if "figure" in line["said"]}
    assert {"torch.inputs-1.7b.over_control", "torch.saved-0.6b.link",
            "torch.saved-0.6b.first"} <= figures
    host = next(line["said"] for line in lines
                if line["kind"] == "host" and line["said"]["mode"] == "ours-all")
    # On a CPU that others use a pair may be less than the noise; then it is not told.
    assert ("torch.host.pair" in figures) == (host.get("pair_microseconds", 0) > 0)
    assert host["out_bytes"] > 0 and host["leave_microseconds"] > 0
    warm = next(line["said"] for line in lines if line["said"].get("first")
                and line["said"]["mode"] == "ours-all")
    assert warm["engine_seconds"] > 0, "making the engine is in no first step, and was not told"
    assert "skipped: trl" in said or "skipped: TRL" in said, "a peer was skipped in silence"
    tmp_path = folders[0]
    assert (tmp_path / "machine.txt").read_text().startswith("commit ")
    tool = BENCHES.parent.parent / "tools" / "figures.py"
    if not tool.exists():
        return
    refused = subprocess.run([sys.executable, tool, tmp_path], capture_output=True, text=True)
    assert refused.returncode != 0 and "simulated" in refused.stderr
    command = [sys.executable, tool, tmp_path, "--rehearsal"]
    assert "torch.inputs-1.7b.over_control" in subprocess.run(
        command, capture_output=True, text=True, check=True).stdout


def test_two_ranks_under_fsdp_leave_lines(tmp_path):
    pytest.importorskip("transformers")
    run("sharded_steps.py", "--steps", "2", "--rounds", "2", "--warm", "1", "--out", str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    ours = [line["said"] for line in lines
            if line["kind"] == "sharded-1.7b" and line["said"].get("mode") == "ours"]
    assert len(ours) == 2 and all(said["out_bytes"] > 0 for said in ours)
    assert all(line["said"]["out_bytes"] > 0 for line in lines
               if line["kind"] == "gathers" and line["said"].get("mode") == "ours")
    assert {line["said"]["mode"] for line in lines if line["kind"] == "gathers"} == {
        "alone", "raw", "ours"}


@pytest.mark.parametrize("words, said", [
    (["--workloads", "inputs-2b"], "inputs-2b: one of inputs-1.7b"),
    (["--ways", "theirs"], "theirs: one of none"),
    (["--steps", "0"], "--steps and --rounds are at least 1"),
    (["--device", "cpu", "--scale", "full"], "a CPU runs --scale small only"),
    (["--workloads", ""], "one of inputs-1.7b"),
    (["--device", "gpu"], "--device gpu: one of auto, cpu, cuda:0"),
    (["--device", "meta", "--scale", "small"], "--device meta: one of auto, cpu, cuda:0"),
    (["--device", "cuda:99"], "--device cuda:99: here are "),
])
def test_what_a_command_line_asks_for_that_is_not_there_is_refused(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        steps.main(["--out", str(tmp_path), *words])
    assert ended.value.code == 2 and "error: " in (told := capsys.readouterr().err)
    assert said in told and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [
    ["--rounds", "0"], ["--steps", "0"], ["--ranks", "0"], ["--warm", "-1"]])
def test_no_steps_on_two_devices_are_refused_before_ranks_begin(tmp_path, capsys, words):
    with pytest.raises(SystemExit) as ended:
        sharded_steps.main(["--scale", "small", "--device", "cpu", "--out", str(tmp_path), *words])
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    assert "--steps, --rounds and --ranks are at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("words, said", [
    (["--device", "gpu"], "device='gpu'"),
    (["--device", "sim", "--bytes", "much"], "--bytes='much'"),
    (["--device", "sim", "--bytes", "4TiB"], "over the pinned-memory budget"),
])
def test_a_pair_that_cannot_be_measured_is_one_line(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        pair.main([*words, "--pairs", "1", "--repeats", "4"])
    assert ended.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_an_interrupted_run_says_so_in_a_line_and_keeps_what_was_measured(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, str(BENCHES / "steps.py"), "--scale", "small", "--device", "cpu",
               "--workloads", "inputs-1.7b", "--parts", "steps", "--ways", "checkpoint,control",
               "--steps", "1000", "--rounds", "1000", "--warm", "0", "--out", str(tmp_path)]
    going = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Who starts the tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    for said in going.stdout:
        if "inputs-1.7b control: " in said:
            break
    going.send_signal(signal.SIGINT)
    rest, wrong = going.communicate(timeout=120)
    assert going.returncode == 130 and "Traceback" not in wrong
    assert wrong.splitlines()[-1] == "steps.py: interrupted; what was measured is kept"
    assert "lines in " in rest, "no table of what there is"
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert {"checkpoint", "control"} <= {line["said"].get("mode") for line in lines}


def test_a_model_that_finds_no_room_is_skipped_aloud_and_others_go_on(
        tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    whole = steps.build

    def build(workload, device, small):
        if workload.name == "inputs-8b":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to")
        return whole(workload, device, small)

    monkeypatch.setattr(steps, "build", build)
    steps.main(["--scale", "small", "--device", "cpu", "--workloads", "inputs-8b,inputs-1.7b",
                "--parts", "steps", "--ways", "checkpoint", "--steps", "1", "--rounds", "1",
                "--warm", "0", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "inputs-8b: skipped: CUDA out of memory.\n" in said
    assert "inputs-1.7b checkpoint: " in said


def test_a_peer_that_lost_what_is_called_is_missing_by_name():
    with pytest.raises(ways.Missing, match="this json has no json.get_act_offloading"):
        ways.load("json", "get_act_offloading")


def test_bytes_that_left_without_a_copy_are_none_of_the_link(small):
    way = ways.Ours(torch.device("cpu"))
    way.attach(small)
    way._before = {"evicted_bytes": 10, "clean_bytes": 1, "refilled_bytes": 2}
    way._engine = type("Engine", (), {"stats": lambda self: {
        "evicted_bytes": 30, "clean_bytes": 6, "refilled_bytes": 9}})()
    assert way.moved() == (15, 7)


# ---- the folder ----


def opened(folder):
    return output.Output(folder, torch.device("cpu"), "steps.py --steps 1")


def test_a_folder_that_nothing_can_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(lines_of_runs.Wrong, match="file.*: "):
            opened(place)


def test_a_refused_folder_is_one_line_of_the_program(tmp_path):
    (tmp_path / "runs.jsonl").write_text('{"part": "torch", "ki')
    words = ["--scale", "small", "--device", "cpu", "--out", str(tmp_path)]
    command = [sys.executable, str(BENCHES / "steps.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"steps.py: {tmp_path}/runs.jsonl, line 1: not what a run")
    with pytest.raises(lines_of_runs.Wrong, match="line 1: not what a run"):
        sharded_steps.main(words)
    assert (tmp_path / "runs.jsonl").read_text() == '{"part": "torch", "ki', "lost"


@pytest.mark.parametrize("text", ["{}", "[]", "1", '{"part": "torch", "kind": "", "run": "1"}'])
def test_a_line_that_no_run_leaves_is_named(tmp_path, text):
    (tmp_path / "runs.jsonl").write_text(text + "\n")
    with pytest.raises(lines_of_runs.Wrong, match="line 1: not what a run leaves"):
        opened(tmp_path)


def test_lines_of_another_commit_are_not_said_to_be_of_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTERING_COMMIT", "a" * 40)
    once = opened(tmp_path)
    once.record("host", "ours-all", {"pair_microseconds": 1.0})
    once.close()
    again = opened(tmp_path)
    assert again.run == 2
    again.close()
    monkeypatch.setenv("LIGHTERING_COMMIT", "b" * 40)
    with pytest.raises(lines_of_runs.Wrong, match="of another commit, aaaaaaaaaaaa: take another"):
        opened(tmp_path)
    assert "a" * 40 in (tmp_path / "machine.txt").read_text()


def test_two_runs_at_once_in_one_folder_are_not_taken_for_one(tmp_path):
    once = opened(tmp_path)
    with pytest.raises(lines_of_runs.Wrong, match="another run writes there"):
        opened(tmp_path)
    once.close()
    opened(tmp_path).close()


def test_lines_are_the_old_ones_where_new_ones_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    said = {"mode": "ours", "simulated": False, "step_seconds": 2.0}
    text = json.dumps({"part": "torch", "kind": "short-0.6b", "run": 1, "command": "c",
                       "commit": "0", "said": said}) + "\n"
    path.write_text(text)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lines_of_runs.os, "replace", full)
    with pytest.raises(lines_of_runs.Wrong, match="No space left on device"):
        judge.judge(tmp_path)
    assert path.read_text() == text


def test_a_path_with_blanks_is_no_part_of_the_command(tmp_path):
    out = output.Output(tmp_path, torch.device("cpu"), "steps.py --out '/a b/c' --steps 1")
    assert out.command == "steps.py --steps 1"
    out.close()


def test_lines_of_the_first_run_do_not_make_the_second_one_of_a_changed_tree():
    ignored = BENCHES.parent.parent / ".gitignore"
    if not ignored.exists():
        pytest.skip("not run: the bundle is no repository")
    assert "/results/" in ignored.read_text().splitlines()


def test_judge_without_a_folder_of_lines_is_one_line(tmp_path):
    for words in ([], [str(tmp_path)]):
        with pytest.raises(lines_of_runs.Wrong, match="names one folder"):
            judge.main(words)


def test_a_pair_is_measured_in_one_line_whose_parts_add_up():
    command = [sys.executable, str(BENCHES / "pair.py"), "--device", "sim", "--repeats", "6",
               "--pairs", "20"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["simulated"] is True and found["pairs"] == 20
    parts = [found[f"{name}_us"] for name in ("torch", "engine", "door", "python")]
    assert sum(parts) == pytest.approx(found["pair_us"], abs=0.05)
    assert found["pack_us"] + found["unpack_us"] == pytest.approx(found["pair_us"], abs=0.05)


@pytest.mark.parametrize("name", ["none", "control", "ours", "ours-all", "ours-wrapper"])
def test_a_way_leaves_the_model_as_it_was(small, name):
    pytest.importorskip("transformers")
    layers = list(small.model.layers)
    hooks = {module: len(module._forward_pre_hooks) for module in small.model.modules()}
    way = ways.WAYS[name](torch.device("cpu"))
    way.attach(small)
    for _ in range(2):
        clock.step(small, way)
    way.detach(small)
    assert all(now is then for now, then in zip(small.model.layers, layers, strict=True))
    assert {module: len(module._forward_pre_hooks) for module in small.model.modules()} == hooks
    assert all(weight.grad is not None for weight in small.model.parameters())


def test_the_control_copies_as_many_bytes_as_leave_and_none_for_the_last_layer(small):
    pytest.importorskip("transformers")
    copies = raw.Copies(small, torch.device("cpu"))
    for _ in range(2):
        copies.forward()
        loss = small.forward()
        copies.backward()
        loss.backward()
    copies.close()
    assert copies.out_bytes == copies.in_bytes == 2 * 3 * small.input_bytes


def test_of_two_middle_pairs_the_worse_counts():
    assert clock.ratio([[1.0], [1.1]], [[1.0], [1.0]]) == pytest.approx(1.1)
    # The middle of three medians; a visit's own outlier does not count.
    ours = [[1.0, 1.0, 9.0], [1.2, 1.2, 1.2], [2.0, 2.0, 2.0]]
    assert clock.ratio(ours, [[1.0], [1.0], [1.0]]) == pytest.approx(1.2)


def test_an_interval_holds_the_ratio_of_medians_and_widens_with_noise():
    steady = clock.interval([[1.01] * 20], [[1.0] * 20])
    assert steady == (pytest.approx(1.01), pytest.approx(1.01))
    noisy = [1.0 + 0.1 * (nth % 5) for nth in range(20)]
    low, high = clock.interval([noisy], [[1.0] * 20])
    assert low < 1.2 < high
    low, high = clock.interval([noisy])
    assert low < 1.2 < high


def test_an_interval_knows_that_visits_drift_and_holds_its_own_estimate():
    """It was that of all steps together, beside an estimate of pairs of visits."""
    ours = [[1.000] * 10, [1.020] * 10, [1.010] * 10, [1.030] * 10]
    theirs = [[1.0] * 10] * 4
    low, high = clock.interval(ours, theirs)
    assert low <= clock.ratio(ours, theirs) <= high
    assert high - low > 0.01
    low, high = clock.interval(ours)
    assert low <= 1.01 < 1.02 <= high


# ---- the judgement ----
