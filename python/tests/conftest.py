"""Settings of all tests: one thread, since small models on a shared machine would spend their time
in waiting for one another's threads, and the workspace that cuBLAS repeats itself with."""

from __future__ import annotations

import os

# cuBLAS reads it once, when its first handle is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

torch.set_num_threads(1)

import pytest
from lightering.torch import _reasons, _report


@pytest.fixture(autouse=True)
def only_documented_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test does, a tensor stays for a reason that a user can look up."""
    for name in ("stay", "keep"):
        count = getattr(_report.Counts, name)

        def counted(self, what, why, count=count):
            assert why.partition(":")[0] in _reasons.REASONS, f"{why!r} is not documented"
            count(self, what, why)

        monkeypatch.setattr(_report.Counts, name, counted)
