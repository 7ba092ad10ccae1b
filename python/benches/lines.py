"""The lines of a folder: read whole or refused, written anew so that none is ever lost.

What it is: runs.jsonl as a list, lines that are added to it whole, and a program whose refusals are
one line each.
Invariant: a file that is written anew is the old one or the new one at any moment, whatever ends
the program; a line that no run leaves is named, and nothing is measured beside it.

    runs.jsonl --read--> lines --replace--> runs.jsonl.new --renamed--> runs.jsonl

Who may call it: output.py, judge.py; whoever has something to say that is Wrong; program() whoever
is run by people.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Wrong(Exception):
    """What is wrong with what was given, in one line."""


def read(path: Path) -> list[Line]:
    """All lines of a file; none where there is no file. Raises Wrong."""
    try:
        texts = path.read_text().splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise Wrong(f"{path}: {error}") from error
    return [_line(text, f"{path}, line {number}") for number, text in enumerate(texts, 1)]


def _line(text: str, where: str) -> Line:
    try:
        line = json.loads(text)
        line["part"], line["kind"], line["command"], line["said"].keys()
        line["run"] + 0
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Wrong(f"{where}: not what a run leaves ({error!r}): take it out, "
                    "or take another folder") from error
    return line


def replace(path: Path, lines: list[Line]) -> None:
    """Writes a file anew. Raises Wrong, and leaves the old one then."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.replace(new, path)
    except OSError as error:
        # Half of it would only take more of a disk that is full.
        with contextlib.suppress(OSError):
            new.unlink()
        raise Wrong(f"{path}: {error.strerror}") from error


def add(path: Path, text: str) -> None:
    """Adds whole lines, or none of them: half a line would have every later run refuse the folder.
    Raises Wrong."""
    whole = None
    try:
        whole = path.stat().st_size if path.exists() else 0
        with path.open("a") as file:
            file.write(text)
    except OSError as error:
        if whole is not None:
            with contextlib.suppress(OSError):
                os.truncate(path, whole)
        raise Wrong(f"{path}: {error.strerror}") from error


def program(
    main: Callable[[list[str]], None], name: str, kept: str = "what was measured is kept"
) -> None:
    """Runs it with the words of the command line; what is wrong, and an interruption, is a line,
    the latter with what is kept then."""
    try:
        main(sys.argv[1:])
    except Wrong as wrong:
        sys.exit(f"{name}: {wrong}")
    except KeyboardInterrupt:
        print(f"{name}: interrupted; {kept}", file=sys.stderr)
        sys.exit(130)
