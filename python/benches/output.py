"""Where figures go: lines for tools/figures.py, tables for people.

What it is: OUT/machine.txt, OUT/runs.jsonl, OUT/all.log, in the form that tools/measure.sh leaves.
What it is not: a judgement; benches/results/required.json says what is asked.
Invariant: each line is written when it is known, so that a run that is cut short keeps it, and
whole, so that a later run can read it; where a disk takes no more that is Wrong. A folder is of one
commit, and one run at a time writes into it; times of a CPU are marked as
simulated, and no tool takes them for figures.

    record(workload, way, figures) --> runs.jsonl          say(text) --> screen, all.log

Who may call it: steps.py and sharded_steps.py.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from judge import judge, left_out, rows
from lines import Wrong, add, read

PART = "torch"


def commit() -> str:
    """What is measured: LIGHTERING_COMMIT, or the file COMMIT above, or what git says."""
    found = os.environ.get("LIGHTERING_COMMIT")
    if found:
        return found
    here = Path(__file__).resolve()
    for folder in here.parents:
        if (folder / "COMMIT").is_file():
            return (folder / "COMMIT").read_text().strip()

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-changed" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Output:
    """A folder that figures are added to. Raises Wrong where that cannot be."""

    def __init__(self, folder: Path, device: torch.device, command: str) -> None:
        self.folder, self.device = folder, device
        # Where the lines go is no part of what to run to measure it again.
        self.command = re.sub(r" --out[= ]('[^']*'|\S+)", "", command)
        self._runs, self._log = folder / "runs.jsonl", folder / "all.log"
        self._commit = commit()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held = self._log.open("a")
            self._hold()
            self.run = self._last_run() + 1
            (folder / "machine.txt").write_text(self._machine())
        except OSError as error:
            raise Wrong(f"{folder}: {error.strerror}") from error

    def _hold(self) -> None:
        """Until closed no other run writes here: its lines would count as this one's."""
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Wrong(f"{self.folder}: another run writes there: take another folder") from error
        except OSError:
            # A file system without locks.
            return

    def close(self) -> None:
        """Lets others write into the folder."""
        self._held.close()

    def _last_run(self) -> int:
        lines = read(self._runs)
        for line in lines:
            # All figures of a folder are said to be of the commit that machine.txt names.
            if (of := line.get("commit", self._commit)) != self._commit:
                raise Wrong(f"{self._runs} is of another commit, {of[:12]}: take another folder")
        return max((line["run"] for line in lines), default=0)

    def _machine(self) -> str:
        on_gpu = self.device.type == "cuda"
        now = datetime.datetime.now(datetime.timezone.utc)
        lines = [
            f"commit {self._commit}",
            f"date {now:%Y-%m-%dT%H:%M:%SZ}",
            f"device cuda:{self.device.index or 0}" if on_gpu else "device cpu",
            f"{platform.system()} {platform.release()} {platform.machine()}",
            f"cores {os.cpu_count()}",
            f"python {platform.python_version()}, torch {torch.__version__}",
        ]
        if on_gpu:
            query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total",
                     "--format=csv,noheader"]
            try:
                said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
                lines.append(said.splitlines()[0])
            except (OSError, subprocess.CalledProcessError, IndexError) as error:
                lines.append(f"nvidia-smi: {error!r}")
        return "\n".join(lines) + "\n"

    def say(self, text: str = "") -> None:
        """Prints now, and keeps. Raises Wrong."""
        try:
            print(text, flush=True)
        except OSError as error:
            # What it holds back would fail once more, when the interpreter ends.
            with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            raise Wrong(f"standard output: {error.strerror}") from error
        add(self._log, text + "\n")

    def record(self, workload: str, way: str, figures: dict[str, Any]) -> None:
        """Keeps one line of figures. Raises Wrong."""
        said = {"mode": way, "simulated": self.device.type != "cuda", **figures}
        line = {"part": PART, "kind": workload, "run": self.run, "command": self.command,
                "commit": self._commit, "said": said}
        add(self._runs, json.dumps(line) + "\n")

    def judged(self) -> None:
        """Makes the figures of all lines in the folder, and shows them beside what is asked; at the
        end of a run that came to its end. Raises Wrong."""
        table = rows(judge(self.folder))
        for text in left_out(read(self._runs)):
            self.say(text)
        if len(table) > 1:
            self.say()
            if self.device.type != "cuda":
                self.say("of a CPU and a simulated device, which is no figure, and not judged:")
                # Without what is asked, and whether it is short of it.
                table = [(*row[:4], row[5]) for row in table]
            self.table(table)

    def table(self, table: Sequence[Sequence[str]]) -> None:
        """Prints rows whose first one is the head."""
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        for row in table:
            self.say("  ".join(cell.ljust(width)
                               for cell, width in zip(row, widths, strict=True)).rstrip())


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}" if nbytes else "-"


def percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.2f} %"
