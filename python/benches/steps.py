#!/usr/bin/env python3
"""Training steps without offload, with each peer, and with ours, in one run on one GPU.

    steps.py [--workloads A,B] [--ways X,Y] [--parts A,B] [--steps 20]
             [--rounds 4] [--scale full|small] [--device auto|cpu|cuda:0] [--out FOLDER]

    first    the first step of each way, each in a process of its own, there and back, behind one
             process that is not counted
    steps    all ways of a workload in turn, there and back (A B B A), in one process
    turns    single steps in turn (A B C C B A), of ways that leave the model as it is; resolves
             less than a percent. Not among the parts without --parts.
    host     host time of one pack + unpack pair
    lengths  100 steps of ten sequence lengths: does memory stay flat, does it cost time

Prints what it has as it goes, at last three tables: first steps, steps, and the figures beside what
is asked of them. Adds lines to FOLDER/runs.jsonl, which tools/figures.py takes. TRL and DeepSpeed
are skipped aloud where they are not installed; peers.sh fetches them where there is no network.
"pinned GB" of ours is the pool of this process, which never shrinks: a workload shows what those
before it took, too, and what it takes itself where it is run alone.
``--scale small`` on a CPU tries the script itself; such times are marked, and are no figures. A run
that is interrupted keeps what it has measured, and judges nothing; judge.py does, and leaves out
what was not visited as often back as there.
Two GPUs: sharded_steps.py. judge.py makes the figures that are asked for, of all lines in a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from clock import Visit, clean, clean_host, interval, ratio, visit
from lines import Wrong, program
from memory import pack_pairs, ten_lengths
from output import Output, gigabytes, percent
from raw import link_bytes_per_second
from turns import turns_of
from ways import WAYS, Missing, versions
from workloads import WORKLOADS, Workload, build, transformers_of

PARTS = ("first", "steps", "host", "lengths")
MORE_PARTS = ("turns",)
HEAD = ("workload", "way", "step s", "95 %", "over control", "95 %", "peak GB", "after fwd GB",
        "out GB", "in GB", "pinned GB", "host s", "link share")
FIRST_HEAD = ("workload", "way", "first step s", "second s", "out GB", "pinned GB", "reserve s",
              "engine s")


class Table:
    """Rows that were measured, printed as they come and once more at the end."""

    def __init__(self, output: Output, head: tuple[str, ...]) -> None:
        self.output, self.rows = output, [head]

    def add(self, *cells: str) -> None:
        self.rows.append(cells)

    def end(self) -> None:
        if len(self.rows) > 1:
            self.output.say()
            self.output.table(self.rows)


def steps_of(workload: Workload, options: argparse.Namespace, output: Output, table: Table) -> None:
    """All ways in turn; each round goes through them the other way round."""
    device = options.device
    built = build(workload, device, options.small)
    out_rate, in_rate = link_bytes_per_second(device, options.small)
    output.say(f"link: {out_rate / 1e9:.2f} GB/s out, {in_rate / 1e9:.2f} GB/s in")
    names = [name for name in workload.ways if name in options.ways]
    # What wraps layers wants them checkpointed.
    names += [name for name in options.more_ways
              if name not in names and (workload.checkpointed or not name.endswith("wrapper"))]
    found: dict[str, list[Visit]] = {}
    says: dict[str, Any] = {}
    each = -(-options.steps // options.rounds)
    for turn in range(options.rounds):
        for name in names if turn % 2 == 0 else names[::-1]:
            if name in says and "missing" in says[name]:
                continue
            way = WAYS[name](device)
            attached = False
            if name not in says:
                # What others left in torch's cache of pinned memory is not this one's.
                clean_host()
            try:
                way.attach(built)
                attached = True
                one = visit(built, way, device, each, options.warm)
                pinned = says.get(name, {}).get("pinned_bytes", way.pinned_bytes())
                says[name] = {**way.says(), "pinned_bytes": pinned}
            except (Missing, torch.OutOfMemoryError) as error:
                says[name] = {"missing": str(error).splitlines()[0]}
                output.say(f"{workload.name} {name}: skipped: {says[name]['missing']}")
                output.record(workload.name, name, says[name])
                continue
            finally:
                if attached:
                    way.detach(built)
                del way
                clean(built, device)
            found.setdefault(name, []).append(one)
            median = statistics.median(one.seconds)
            output.record(workload.name, name, {
                "step_seconds": median, "all_seconds": one.seconds, "host_seconds": min(
                    one.host_seconds), "peak_bytes": one.peak_bytes, "round": turn,
                "after_forward_bytes": one.after_forward_bytes,
                "reserved_bytes": one.reserved_bytes, "out_bytes": one.out_bytes,
                "in_bytes": one.in_bytes, "link_out_bytes_per_second": out_rate,
                "link_in_bytes_per_second": in_rate, "input_bytes": built.input_bytes,
                "applications": built.applications, "versions": versions(), **says[name]})
            output.say(f"{workload.name} {name}: {median:.4f} s, peak {gigabytes(one.peak_bytes)}"
                       f" GB, after forward {gigabytes(one.after_forward_bytes)} GB")
    for name, visits in found.items():
        add_row(table, workload, name, visits, found, says[name], (out_rate, in_rate))
    built.model.to("meta")
    del built
    clean_host()


def add_row(
    table: Table, workload: Workload, name: str, visits: list[Visit],
    found: dict[str, list[Visit]], says: dict[str, Any], link: tuple[float, float],
) -> None:
    seconds = [one for each in visits for one in each.seconds]
    median = statistics.median(seconds)
    by_visit = [each.seconds for each in visits]
    low, high = interval(by_visit)
    over = between = "-"
    control = found.get(workload.control)
    if control and name != workload.control:
        theirs = [each.seconds for each in control]
        over = percent(ratio(by_visit, theirs))
        between = " ".join(percent(edge) for edge in interval(by_visit, theirs))
    out, back = (statistics.median(getattr(each, which) for each in visits)
                 for which in ("out_bytes", "in_bytes"))
    share = f"{(out / link[0] + back / link[1]) / median:.3f}" if out else "-"
    table.add(
        workload.name, name, f"{median:.4f}", f"{low:.4f} {high:.4f}", over, between,
        gigabytes(max(each.peak_bytes for each in visits)),
        gigabytes(max(each.after_forward_bytes for each in visits)),
        gigabytes(out), gigabytes(back), gigabytes(says.get("pinned_bytes", 0)),
        f"{min(min(each.host_seconds) for each in visits):.4f}", share)


def first_of(workload: Workload, options: argparse.Namespace, output: Output, table: Table) -> None:
    """First steps; each way in a fresh process, before this one takes memory of the device.

    There and back, of two pairs the worse one counts; and behind a process that nobody counts: the
    first one of a machine reads libraries and kernels from its disk, for seconds, which are no part
    of its way.
    """
    names = [name for name in workload.first if name.partition("-reserved")[0] in options.ways]
    if not names:
        output.say(f"{workload.name}: skipped: no first steps are measured of it in these ways")
        return
    # Without offload: it runs wherever one of the others does.
    warm = in_a_process(workload, workload.first[0], options)
    output.say(f"{workload.name} {workload.first[0]}: one process to warm up, not counted"
               + (f": {warm['missing']}" if "missing" in warm else ""))
    for name in names + names[::-1]:
        said = in_a_process(workload, name, options)
        output.record(workload.name, name, {"first": True, **said})
        if "missing" in said:
            output.say(f"{workload.name} {name}: skipped: {said['missing']}")
            continue
        output.say(f"{workload.name} {name}: first step {said['first_step_seconds']:.3f} s")
        reserve = said["reserve_seconds"]
        table.add(workload.name, name, f"{said['first_step_seconds']:.3f}",
                  f"{said['second_step_seconds']:.3f}", gigabytes(said["out_bytes"]),
                  gigabytes(said["pinned_bytes"]), f"{reserve:.3f}" if reserve else "-",
                  f"{said['engine_seconds']:.3f}" if said["engine_seconds"] else "-")


def in_a_process(workload: Workload, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What first.py says of a way; {"missing": why} where that is nothing."""
    command = [sys.executable, str(Path(__file__).with_name("first.py")), workload.name, name,
               str(options.device), "small" if options.small else "full"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return {"missing": f"first step not measured: {why}"}
    return json.loads(lines[-1])


def options_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(of: Any) -> Any:
        def parse(text: str) -> list[str]:
            found = [name for name in text.split(",") if name]
            unknown = [name for name in found or [text] if name not in of]
            if unknown:
                raise argparse.ArgumentTypeError(f"{unknown[0]}: one of {', '.join(of)}")
            return found
        return parse

    parser.add_argument("--workloads", type=names(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ways", type=names(WAYS), default=list(WAYS),
                        help="of each workload's ways those; all without this")
    parser.add_argument("--more-ways", type=names(WAYS), default=[],
                        help="such as ours-wrapper, which no workload runs by itself")
    parser.add_argument("--parts", type=names(PARTS + MORE_PARTS), default=list(PARTS))
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each way, at least")
    parser.add_argument("--rounds", type=int, default=4,
                        help="visits to each way; of an odd number times are no figures")
    parser.add_argument("--warm", type=int, default=2, help="steps before those, in each visit")
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path,
                        default=Path(os.environ.get("LIGHTERING_RESULTS", "results")))
    options = parser.parse_args(words)
    options.small = options.scale == "small"
    if options.steps < 1 or options.rounds < 1 or options.warm < 0:
        parser.error("--steps and --rounds are at least 1, --warm at least 0")
    options.device = device_of(options.device, parser)
    if options.device.type == "cpu" and not options.small:
        parser.error("no GPU here: a CPU runs --scale small only")
    return options


def device_of(name: str, parser: argparse.ArgumentParser) -> torch.device:
    there = torch.cuda.device_count()
    if name == "auto":
        name = "cuda:0" if there else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device {name}: one of auto, cpu, cuda:0 and so on")
    if device.type == "cuda" and (device.index or 0) >= there:
        parser.error(f"--device {name}: here are {there} GPUs")
    return device


def fitting(name: str, output: Output, part: Callable[..., None], *arguments: Any) -> None:
    """Runs a part; where the GPU has no room for its model, says so, and others go on."""
    try:
        part(*arguments)
    except torch.OutOfMemoryError as error:
        output.say(f"{name}: skipped: {str(error).splitlines()[0]}")
    else:
        return
    # Only now nothing holds the frames that hold the model.
    clean_host()
    torch.cuda.empty_cache()


def measured(
    options: argparse.Namespace, output: Output, tables: list[Table], began: float
) -> None:
    """All parts of all workloads."""
    for workload in [WORKLOADS[name] for name in options.workloads]:
        output.say(f"== {workload.name}: {workload.about}")
        if "first" in options.parts:
            first_of(workload, options, output, tables[0])
        if "steps" in options.parts:
            fitting(workload.name, output, steps_of, workload, options, output, tables[1])
        if "turns" in options.parts:
            fitting(workload.name, output, turns_of, workload, options, output)
        output.say(f"-- {time.perf_counter() - began:.0f} s since the start")
    if "host" in options.parts:
        fitting("host", output, pack_pairs, options, output)
    if "lengths" in options.parts:
        fitting("lengths", output, ten_lengths, options, output)


def main(words: list[str]) -> None:
    options = options_of(words)
    if set(options.parts) != {"host"}:
        # Now, and in one line; every workload would say it.
        transformers_of()
    if options.device.type == "cpu":
        torch.set_num_threads(1)
    output = Output(options.out, options.device, shlex.join(["steps.py", *words]))
    began = time.perf_counter()
    tables = [Table(output, FIRST_HEAD), Table(output, HEAD)]

    def ended(judge: bool) -> None:
        for table in tables:
            table.end()
        if judge:
            output.judged()
        output.say(f"-- {time.perf_counter() - began:.0f} s in all; lines in {output.folder}")

    try:
        measured(options, output, tables, began)
    except Wrong:
        # Such as a disk that takes no more: there is nowhere to say anything further.
        raise
    except BaseException:
        # What was not measured to its end is not judged.
        ended(judge=False)
        raise
    else:
        ended(judge=True)
    finally:
        output.close()


if __name__ == "__main__":
    program(main, "steps.py")
