#!/usr/bin/env python3
"""Training steps under FSDP2 on two GPUs, and all-gathers beside copies.

    sharded_steps.py [--parts steps,gathers] [--steps 20] [--rounds 4] [--scale full|small]
                     [--device auto|cpu|cuda] [--ranks 2] [--out FOLDER]

Each rank trains Qwen3-1.7B's shape, 8 x 2048, each layer sharded and checkpointed, in turn without
offload, with the same bytes copied raw beside it, and with ours. A step takes as long as its
slowest rank. Then passes of 20 all-gathers alone, beside raw copies out, and beside ours. The part
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
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from clock import clean, interval, ratio, visit, wait
from lines import Wrong, program
from output import Output, gigabytes, percent
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from turns import attached, rounds_of, say
from ways import WAYS, Missing, OursAll, load, versions
from workloads import WORKLOADS, Built, Workload, build, transformers_of

NAME = "sharded-1.7b"
ORDER = ("checkpoint", "control", "ours")
GATHERS = 20
# Passes of 20 all-gathers in each way, and gathers before each pass.
PASSES = 60
WARMING = 200
# Of passes, those that may be left out.
EARLY_MAX = 0.1


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
            gathers(device, options, output)
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


def meet(device: torch.device) -> None:
    """All ranks go on from here at once."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def slowest(values: list[float], device: torch.device) -> list[float]:
    """Of each value the largest of all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


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


def gathers(device: torch.device, options: argparse.Namespace, output: Output | None) -> None:
    """Seconds of 20 all-gathers behind a chain of kernels that saves tensors: plainly, while those
    tensors are copied out raw, and while they leave through ours; each to a place of its own. Ours
    has a window that all of them fit in, so that both copy long past the last gather; a pass in
    which one did not is left out."""
    on_gpu = device.type == "cuda"
    numel = (1 << 10) if options.small else (16 << 20)
    links = 8 if options.small else 96
    piece = torch.randn(numel, device=device)
    whole = torch.empty(numel * options.ranks, device=device)
    aside = torch.cuda.Stream(device) if on_gpu else None
    collective = torch.cuda.Stream(device) if on_gpu else None
    leaf = torch.randn(numel, device=device, requires_grad=True)

    def chain() -> list[torch.Tensor]:
        values = [leaf]
        for _ in range(links):
            values.append(values[-1].sin())
        # The first one is a leaf, which stays, and the last one nobody saves.
        return values[1:-1]

    leaving = (links - 1) * numel * piece.element_size()
    hosts = [torch.empty(numel, pin_memory=on_gpu) for _ in range(links - 1)]

    def raw(values: list[torch.Tensor]) -> None:
        if aside is None:
            for host, value in zip(hosts, values, strict=True):
                host.copy_(value.detach())
            return
        # As ours, behind each tensor's kernel; all of them are alive until the pass is over.
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for host, value in zip(hosts, values, strict=True):
                host.copy_(value.detach(), non_blocking=True)

    try:
        window = load("lightering").Engine(
            str(device) if on_gpu else "sim", unreleased_bytes=2 * leaving)
    except Missing:
        window = None
    ours = OursAll(device, window)
    # Of each pass, what left for ours; and whether copies of some way were over too early.
    left: list[int] = []
    early: list[float] = []

    def timed(name: str, context: Any, beside: Any) -> float:
        before = ours.moved()[0] if name == "ours" else 0
        # A GPU that only copied for a tenth of a second, as behind two of the ways, gathers 2 %
        # slower for a while: every pass begins behind the same work.
        for _ in range(1 if options.small else WARMING):
            dist.all_gather_into_tensor(whole, piece)
        wait(device)
        meet(device)
        # Inside: who leaves the context has the stream wait for the copies.
        with context:
            values = chain()
            if beside:
                beside(values)
            # The chain is over; what is left to run beside the gathers is copies, in every way.
            if on_gpu:
                torch.cuda.current_stream(device).synchronize()
            if name == "ours":
                left.append(ours.moved()[0] - before)
            # Hooks take the host's time, on each rank another: who is early would wait for the
            # other one within the gathers.
            meet(device)
            began = time.perf_counter()
            with torch.cuda.stream(collective) if on_gpu else nullcontext():
                for _ in range(GATHERS):
                    dist.all_gather_into_tensor(whole, piece)
                if collective is not None:
                    collective.synchronize()
            seconds = time.perf_counter() - began
            wait(device)
            copied = time.perf_counter() - began - seconds
            if on_gpu and name != "alone" and copied < 0.001:
                early[-1] = 1
        del values
        return seconds

    found: dict[str, list[float]] = {}
    plain = nullcontext()
    ways: dict[str, tuple[Any, Any]] = {"alone": (plain, None), "raw": (plain, raw)}
    try:
        # It needs nothing of a model.
        ours.attach(Built(torch.nn.Module(), chain, [], links, 0, lambda tokens: None))
        ways["ours"] = (ours.context(), None)
    except Missing as missing:
        if output:
            output.say(f"gathers ours: skipped: {missing}")
    for turn in range(2 + (4 if options.small else PASSES)):
        early.append(0)
        for name in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
            found.setdefault(name, []).append(timed(name, *ways[name]))
    # The first two warm up.
    gathered({name: slowest(values[2:], device) for name, values in found.items()},
             slowest(early[2:], device), {"ours": left[2:], "raw": [leaving] * len(early)}, output)


def gathered(
    found: dict[str, list[float]], early: list[float], moved: dict[str, list[int]],
    output: Output | None,
) -> None:
    """Says and keeps the passes in which no copy was over early on any rank, in all ways alike:
    a pass of one way is beside the same one of another."""
    if output is None:
        return
    count, whole = len(early), [nth for nth, is_early in enumerate(early) if not is_early]
    if len(whole) < count:
        output.say(f"gathers: in {count - len(whole)} of {count} passes copies were over before "
                   "the gathers: left out")
    if count - len(whole) > EARLY_MAX * count:
        output.say("gathers: more than a tenth of the passes: no figure")
        return
    for name, seconds in found.items():
        median = statistics.median(seconds[nth] for nth in whole)
        output.say(f"gathers {name}: {median * 1e3:.2f} ms")
        for nth in whole:
            output.record("gathers", name, {
                "gather_seconds": seconds[nth], "round": nth,
                "out_bytes": moved[name][nth] if name in moved else 0})


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
