"""Settings of all tests: one thread, since small models on a shared machine would spend their time
in waiting for one another's threads; the workspace that cuBLAS repeats itself with; a share of the
pinned memory for each process of several; and what did not run, said aloud."""

from __future__ import annotations

import collections
import os

# cuBLAS reads it once, when its first handle is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Processes that share the tests (pytest -n) share the host's memory: each pool gets its part.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["PYTEST_XDIST_WORKER_COUNT"])

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what did not run and why, also where nobody asked for it."""
    reasons: collections.Counter[str] = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report.longrepr, tuple):
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for why, count in reasons.most_common():
        terminalreporter.write_line(f"{count} test(s) {why}")
