"""How many forks made this process, of processes that had imported this package.

What it is: a count that tells a child from its parent.
What it is not: the system's number of a process, which takes a system call to ask for.
Invariant: what was made before a fork has noted another count than the child's.

    parent: count 0, engine (0) --fork--> child: count 1; engine (0) is the parent's

Who may call it: the package's modules.
"""

from __future__ import annotations

import os

count = 0
"""This process's."""


def _forked() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_forked)
