"""Bytes that come back wrong, and a loss that still falls: the fault guarded against by ``verify``;
and its twin, an alarm over bytes that are right.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import harness
import models
import pytest
import rig as rigs


def step_that_rots(how: str) -> str:
    program = Path(__file__).with_name("rot.py")
    done = subprocess.run(
        [sys.executable, str(program), how], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_bytes_that_rot_in_pinned_memory_are_an_error_with_verify():
    said = step_that_rots("verify")
    assert said.startswith("True 1 True ") and "not those that left" in said, said
    assert "saved tensor" in said and "4.00 KiB" in said, said


def test_without_verify_nobody_notices():
    """Else the test above could pass for another reason."""
    assert step_that_rots("plain") == "True 0 False nobody noticed"


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
