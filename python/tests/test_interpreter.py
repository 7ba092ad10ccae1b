"""Threads of Python stand still while the engine works: the fault guarded against. The
interpreter's lock is let go before the engine's is taken, so that neither who is at work in the
engine nor who waits for it stops anybody else.
"""

from __future__ import annotations

import threading
import time

import lightering
import pytest
import torch
from lightering.torch import SavedTensors
from saving import leaf, save

TENSORS, NUMBERS = 4, 1 << 24
"""Together 256 MiB, which the simulated device copies while it is waited for."""


def longest_pause(engine: lightering.Engine) -> tuple[float, float]:
    """Seconds that the engine was waited for, and the most that this thread stood still then."""
    ended: list[float] = []

    def drain() -> None:
        engine.drain()
        ended.append(time.perf_counter())

    def wait() -> None:
        # Behind the other one, for the engine's lock.
        time.sleep(0.01)
        engine.stats()
        ended.append(time.perf_counter())

    threads = [threading.Thread(target=each) for each in (drain, wait)]
    began = last = time.perf_counter()
    longest = 0.0
    for thread in threads:
        thread.start()
    while len(ended) < len(threads):
        time.sleep(0.0001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    for thread in threads:
        thread.join()
    return min(ended) - began, longest


def test_python_goes_on_while_the_engine_works_and_is_waited_for():
    engine = lightering.Engine("sim", unreleased_bytes="4GiB")
    engine.reserve(TENSORS * NUMBERS * 4)
    tensors = [torch.ones(NUMBERS) for _ in range(TENSORS)]
    found = []
    # Another program may have the processors for a moment.
    for _ in range(3):
        with SavedTensors(min_bytes=16, engine=engine):
            out = leaf("cpu")
            for tensor in tensors:
                out = save(out, [tensor.clone()], [])
            found.append(longest_pause(engine))
        del out
        waited, longest = found[-1]
        if longest < waited / 2:
            return
    pytest.fail(f"seconds of work, and of standing still: {found}")
