"""Runs a function on several ranks of a group, each a fresh process of this machine.

What it is: processes forked off a server that has imported torch and done nothing with it, a store
in a file, no port of ours, results by return value.
Invariant: a rank that fails, hangs or dies fails the test with its own traceback; no process is
left behind; one rank that fails does not leave the others waiting.

    test -- fork server --> rank 0 ... rank n-1 -- FileStore --> group -- function -- result

Who may call it: tests. The function must be importable (top level of a test module).
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS_MAX = 240


class RankFailed(AssertionError):
    """What the ranks died of."""


def _rank(
    function: Callable[..., Any], rank: int, world: int, folder: str, backend: str, args: tuple
) -> None:
    path = Path(folder)
    # One thread each: the ranks share two cores, and sums stay in one order.
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(path / "store"), world)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world,
            timeout=datetime.timedelta(seconds=60),
        )
        try:
            result = ("returned", function(rank, world, *args))
        finally:
            dist.destroy_process_group()
    except BaseException:
        result = ("raised", traceback.format_exc(limit=-12))
    (path / f"rank{rank}.part").write_bytes(pickle.dumps(result))
    os.rename(path / f"rank{rank}.part", path / f"rank{rank}")


def run_ranks(
    function: Callable[..., Any], world: int, folder: Path, *args: Any, backend: str = "gloo"
) -> list[Any]:
    """Calls ``function(rank, world, *args)`` on each rank; its results in the order of ranks.

    Args:
        function: at the top level of a module; inside, the process group is there.
        world: how many ranks.
        folder: an empty folder of the test (``tmp_path``) for the store and the results.
        backend: "gloo", or "nccl" where each rank has a GPU of its number.

    Raises:
        RankFailed: with the tracebacks of the ranks that raised, or how they died.
    """
    context = multiprocessing.get_context("forkserver")
    # Importing torch takes longer than what the ranks do; the server does it once.
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint"])

    def call(rank: int) -> tuple:
        return function, rank, world, str(folder), backend, args

    ranks = [
        context.Process(target=_rank, args=call(rank), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + SECONDS_MAX
    try:
        while any(process.is_alive() for process in ranks) and time.monotonic() < end:
            # A rank that died leaves the others in a collective.
            if any(process.exitcode not in (None, 0) for process in ranks):
                break
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
    results, faults = [], []
    for rank, process in enumerate(ranks):
        path = folder / f"rank{rank}"
        if not path.exists():
            faults.append(f"rank {rank} left no result, exit code {process.exitcode}")
            continue
        how, what = pickle.loads(path.read_bytes())
        if how == "raised":
            faults.append(f"rank {rank} raised:\n{what}")
        results.append(what)
    if faults:
        raise RankFailed("\n".join(faults))
    return results
