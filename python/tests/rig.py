"""The devices that tests run on: CPU tensors over the simulated device, and a GPU.

What it is: the fixture ``rig``, once for each device; a test that needs a GPU says so where there
is none.
Invariant: each test has an engine of its own, which holds nothing when the test is over.

    rig.engine: lightering.Engine     rig.device: "cpu" or "cuda:0", for tensors and models

Who may call it: tests.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import lightering
import pytest
import torch
from lightering.torch import HiddenStates, SavedTensors
from lightering.torch._stash import Desk

DEVICES = ("sim", "cuda")
# Contexts that a rig makes, by the names of its methods.
MODES = ("saved", "hidden")


def gpu_or_skip(count: int = 1) -> None:
    """Says aloud that a test does not run without so many GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < count:
        pytest.skip(f"not run: it needs {count} GPU(s), this machine has {found}")


@dataclasses.dataclass
class Rig:
    kind: str
    device: str
    engine: lightering.Engine

    @property
    def desk(self) -> Desk:
        return Desk.of(self.engine)

    def saved(self, min_bytes: int = 16, **options: Any) -> SavedTensors:
        return SavedTensors(min_bytes=min_bytes, engine=self.engine, **options)

    def hidden(self, min_bytes: int = 16, **options: Any) -> HiddenStates:
        return HiddenStates(min_bytes=min_bytes, engine=self.engine, **options)

    def moved(self) -> int:
        """Bytes that left so far."""
        return int(self.engine.stats()["evicted_bytes"])

    def assert_nothing_left(self) -> None:
        """No storage, no block and no device bytes are held any more."""
        # After a backward that raised torch keeps its open tasks, and so the graph, until the next.
        torch.ones(1, device=self.device, requires_grad=True).sum().backward()
        gc.collect()
        settle(self.engine)
        stats = self.engine.stats()
        assert self.desk.live_count == 0, "saved storages are still held"
        assert self.desk.held_bytes == 0, "device bytes are still held"
        assert stats["storage_count"] == 0, "the engine still has storages"
        assert stats["unreleased_bytes"] == 0 and stats["prefetched_bytes"] == 0
        assert stats["leaked_on_purpose_bytes"] == 0


def settle(engine: lightering.Engine) -> None:
    """All that was enqueued is done, and what may be dropped is dropped."""
    # Where several streams are in use a flush asks after marks that it set just then.
    for _ in range(2):
        engine.drain()
        Desk.of(engine).flush()


def make(kind: str, **options: Any) -> Rig:
    """A rig with an engine made with these options."""
    if kind == "cuda":
        gpu_or_skip()
        return Rig(kind, "cuda:0", lightering.Engine("cuda:0", **options))
    return Rig(kind, "cpu", lightering.Engine("sim", **options))


@pytest.fixture(params=DEVICES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    found = make(request.param, unreleased_bytes="64KiB", prefetch_bytes="64KiB")
    yield found
    found.assert_nothing_left()
