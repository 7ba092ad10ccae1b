#!/usr/bin/env python3
"""Training steps under FSDP2 on two GPUs, and all-gathers beside copies.

    sharded_steps.py [--parts steps,gathers] [--steps 20] [--rounds 4] [--scale full|small]
                     [--device auto|cpu|cuda] [--ranks 2] [--out FOLDER]

Each rank trains Qwen3-1.7B's shape, 8 x 2048, each layer sharded and checkpointed, in turn without
offload, with the same bytes copied raw beside it, and with ours. A step takes as long as its
slowest rank. Then passes of 20 all-gathers, by the device's clock, alone, beside raw copies out,
and beside ours (``gathers.py``). The part
``turns`` takes the steps one by one in turn, ``--rounds`` there and back, for less than a percent.
``--scale small`` on CPUs with gloo tries the script itself; such times are no figures. A pass of
gathers whose copies were over before the last gather is left out, in all ways; where those are more
than a tenth, gathers have no figure. Ranks end with the process that started them, however it does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import gc
import os
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import gathers
import torch.multiprocessing
from clock import clean, interval, ratio, visit
from gathers import meet, slowest
from lines import Wrong, program
from output import Output, gigabytes, percent
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from turns import attached, rounds_of, say
from ways import WAYS, Missing, versions
from workloads import WORKLOADS, Built, Workload, build, transformers_of

NAME = "sharded-1.7b"
ORDER = ("checkpoint", "control", "ours")


def workload() -> Workload:
    base = WORKLOADS["inputs-1.7b"]
    return dataclasses.replace(base, name=NAME, shape=dataclasses.replace(base.shape, batch=8))


def sharded(device: torch.device, small: bool) -> Built:
    """The model with each layer and the root sharded; bf16 weights, reduced in fp32."""
    built = build(workload(), device, small)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Named: where there is a GPU it would be taken, be the ranks on it or not.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers: Any = built.model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(built.model, mesh=mesh, mp_policy=policy)
    return built


def rank_main(rank: int, options: argparse.Namespace, folder: str, wrong: Any) -> None:
    """What a rank does; what is Wrong goes to the one who started it, by ``wrong``."""
    end_with(options.parent)
    on_gpu = options.kind == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank,
                            world_size=options.ranks, timeout=datetime.timedelta(seconds=300))
    try:
        output = Output(options.out, device, options.command) if rank == 0 else None
        if "steps" in options.parts or "turns" in options.parts:
            built = sharded(device, options.small)
            for part, run in (("steps", steps), ("turns", turns)):
                if part in options.parts:
                    run(built, device, options, output)
            del built
        if "gathers" in options.parts:
            gathers.run(device, options.small, options.ranks, output)
    except Wrong as error:
        # At once: the others wait for this one within a collective, until they are ended.
        wrong.put(str(error))
        os._exit(1)
    finally:
        # A model is a cycle that holds the group, whose threads would outlive its end.
        gc.collect()
        dist.destroy_process_group()
    # Everything is written and waited for. An interpreter that takes itself apart while a thread of
    # gloo still drops tensors aborts now and then (pytorch/pytorch#179291, #190489).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_with(parent: int) -> None:
    """Has this process end when the one that started it does, of whatever."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG. torch asks for SIGINT, which is ignored by who was started in the
        # background, and not heard by who waits within a collective.
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        # It ended before that.
        os._exit(1)


@contextlib.contextmanager
def told_to_end() -> Iterator[None]:
    """A SIGTERM within is an exit, on whose way ranks and folders are cleaned up."""

    def leave(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_ranks(options: argparse.Namespace) -> None:
    """Runs all ranks to their end, or ends them. Raises Wrong."""
    options.parent = os.getpid()
    wrong = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, told_to_end():
        ranks = torch.multiprocessing.spawn(
            rank_main, (options, folder, wrong), nprocs=options.ranks, join=False)
        try:
            while not ranks.join():
                pass
        except (torch.multiprocessing.ProcessRaisedException,
                torch.multiprocessing.ProcessExitedException):
            if not wrong.empty():
                raise Wrong(wrong.get()) from None
            raise
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()


def steps(
    built: Built, device: torch.device, options: argparse.Namespace, output: Output | None
) -> None:
    """All ways in turn, there and back."""
    found: dict[str, list[list[float]]] = {}
    for turn in range(options.rounds):
        for name in ORDER if turn % 2 == 0 else ORDER[::-1]:
            way = WAYS[name](device)
            try:
                way.attach(built)
            except Missing as missing:
                # On every rank alike.
                if output:
                    output.say(f"{NAME} {name}: skipped: {missing}")
                continue
            meet(device)
            one = visit(built, way, device, -(-options.steps // options.rounds), options.warm)
            seconds = slowest(one.seconds, device)
            peak, after = slowest([one.peak_bytes, one.after_forward_bytes], device)
            says = way.says()
            way.detach(built)
            clean(built, device)
            found.setdefault(name, []).append(seconds)
            if output:
                median = statistics.median(seconds)
                output.record(NAME, name, {
                    "step_seconds": median, "all_seconds": seconds, "peak_bytes": peak,
                    "after_forward_bytes": after, "out_bytes": one.out_bytes, "round": turn,
                    "in_bytes": one.in_bytes, "input_bytes": built.input_bytes,
                    "applications": built.applications, "versions": versions(), **says})
                output.say(f"{NAME} {name}: {median:.4f} s, peak {gigabytes(peak)} GB, "
                           f"after forward {gigabytes(after)} GB")
    if output:
        report(found, output)


def turns(
    built: Built, device: torch.device, options: argparse.Namespace, output: Output | None
) -> None:
    """Steps of all ways one by one in turn; of each the slowest rank's."""
    ways = attached(ORDER, built, device, output, NAME)
    meet(device)
    found = rounds_of(built, ways, options, device, output, NAME, slowest)
    if output:
        say(NAME, found, output)
    for way in ways.values():
        way.detach(built)
    clean(built, device)


def report(found: dict[str, list[list[float]]], output: Output) -> None:
    rows = [("way", "step s", "over control", "95 %")]
    control = found.get("control")
    for name, visits in found.items():
        seconds = [one for each in visits for one in each]
        over = between = "-"
        if control and name != "control":
            over = percent(ratio(visits, control))
            between = " ".join(percent(edge) for edge in interval(visits, control))
        rows.append((name, f"{statistics.median(seconds):.4f}", over, between))
    output.say()
    output.table(rows)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="steps,gathers",
                        help="of steps, turns, gathers, with commas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path,
                        default=Path(os.environ.get("LIGHTERING_RESULTS", "results")))
    options = parser.parse_args(words)
    if min(options.steps, options.rounds, options.ranks) < 1 or options.warm < 0:
        parser.error("--steps, --rounds and --ranks are at least 1, --warm at least 0")
    options.parts = options.parts.split(",")
    unknown = [part for part in options.parts if part not in ("steps", "turns", "gathers")]
    if unknown:
        parser.error(f"--parts {unknown[0]}: of steps, turns, gathers")
    options.small = options.scale == "small"
    there = torch.cuda.device_count()
    options.kind = options.device
    if options.device == "auto":
        options.kind = "cuda" if there else "cpu"
    if options.kind == "cuda" and there < options.ranks:
        parser.error(f"{options.ranks} ranks want as many GPUs, here are {there}")
    if options.kind == "cpu" and not options.small:
        parser.error("no GPU here: CPUs run --scale small only")
    options.command = shlex.join(["sharded_steps.py", *words])
    if options.parts != ["gathers"]:
        transformers_of()
    # Whether anything can be kept there is known before the ranks begin; rank 0 writes.
    output = Output(options.out, torch.device(options.kind), options.command)
    output.close()
    run_ranks(options)
    output.judged()


if __name__ == "__main__":
    program(main, "sharded_steps.py", kept="what was measured is kept; of the parts turns and "
            "gathers only what had come to its end")
