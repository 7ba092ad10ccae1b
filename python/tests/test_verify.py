"""Bytes that come back wrong, and a loss that still falls: the fault guarded against by ``verify``;
and its twin, an alarm over bytes that are right.
"""

from __future__ import annotations

import harness
import lightering
import models
import pytest
import rig as rigs
import torch
from lightering.torch import SavedTensors
from lightering.torch._stash import Desk
from saving import leaf, save


CHUNK = 16 << 20


def ranges_of_this_process():
    """Every range of memory that can be written, by its begin and end."""
    with open("/proc/self/maps") as maps:
        for line in maps.readlines():
            span, rights = line.split()[:2]
            begin, end = (int(each, 16) for each in span.split("-"))
            # Larger ones are addresses that are kept free, not memory.
            if rights.startswith("rw") and "[v" not in line and end - begin <= 1 << 30:
                yield from ((at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK))


def spoil(pattern: bytes) -> int:
    """Changes a bit in every copy of a pattern in this process's memory; says how many."""
    found = 0
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for begin, end in ranges_of_this_process():
            try:
                memory.seek(begin)
                data = memory.read(end - begin)
            except OSError:
                continue
            at = data.find(pattern)
            # What was just read, and the pattern as it came, are of no account.
            while at >= 0:
                memory.seek(begin + at)
                memory.write(bytes([data[at] ^ 1]))
                found += 1
                at = data.find(pattern, at + 1)
            del data
    return found


def step_that_is_spoiled(engine: lightering.Engine) -> int:
    """Saves a pattern, spoils the only copy there is, and reads it; says how many were spoiled."""
    tensor = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    pattern = bytes(tensor[100:164].tolist())
    x, seen = leaf("cpu"), []
    with SavedTensors(min_bytes=1, engine=engine):
        out = save(x, [tensor], seen)
        del tensor
        out = save(out, [torch.zeros(4096)], [])
        engine.drain()
        Desk.of(engine).flush()
        count = spoil(pattern)
        out.sum().backward()
    return count


def test_bytes_that_rot_in_pinned_memory_are_an_error_with_verify():
    engine = lightering.Engine("sim", verify=True, prefetch_count=0)
    with pytest.raises(lightering.Corrupt, match="4.00 KiB"):
        step_that_is_spoiled(engine)
        engine.drain()
    assert engine.stats()["corrupt_count"] == 1


def test_without_verify_nobody_notices():
    """Else the test above could pass for another reason."""
    engine = lightering.Engine("sim", prefetch_count=0)
    assert step_that_is_spoiled(engine) > 0
    engine.drain()
    assert engine.stats()["corrupt_count"] == engine.stats()["verified_count"] == 0


@pytest.mark.parametrize("kind", rigs.DEVICES)
@pytest.mark.parametrize("mode, how", [("saved", "none"), ("hidden", "positional")])
def test_bytes_that_are_right_raise_no_alarm_and_were_compared(kind, mode, how):
    found = rigs.make(kind, verify=True, unreleased_bytes="64KiB", prefetch_bytes="64KiB")
    context = getattr(found, mode)()
    harness.compare(
        lambda: models.dense(found.device, checkpoint=how), harness.micro_steps,
        harness.Way(mode, lambda: context))
    found.assert_nothing_left()
    stats = found.engine.stats()
    assert stats["verified_count"] > 0 and stats["corrupt_count"] == 0, stats
