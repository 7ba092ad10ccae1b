"""A step whose saved bytes rot in pinned memory, as a program of its own.

What it is: saves a pattern, changes a bit in every copy of it that this process has, reads it.
Invariant: the tensor that was saved is gone by then, so the copy in pinned memory is the only one.

    rot.py verify     says how many copies were changed, and what became of the step
    rot.py plain      the same without verify

Who may call it: test_verify.py, in a process whose memory is as small as can be.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import lightering
import torch
from lightering.torch import SavedTensors
from lightering.torch._stash import Desk
from saving import leaf, save

CHUNK = 16 << 20
EDGE = 256 << 20


def ranges() -> Iterator[tuple[int, int]]:
    """The memory of this process that can be written, by begin and end, in chunks."""
    with open("/proc/self/maps") as maps:
        lines = maps.readlines()
    for line in lines:
        span, rights = line.split()[:2]
        begin, end = (int(each, 16) for each in span.split("-"))
        if not rights.startswith("rw") or "[v" in line:
            continue
        # What is larger is an address space that is kept free; a neighbour may be merged with it.
        parts = [(begin, end)] if end - begin <= 4 * EDGE else [
            (begin, begin + EDGE), (end - EDGE, end)]
        for first, last in parts:
            yield from ((at, min(at + CHUNK, last)) for at in range(first, last, CHUNK))


def spoil(pattern: bytes) -> int:
    """Changes a bit in every copy of a pattern; says how many there were."""
    found = 0
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for begin, end in ranges():
            try:
                memory.seek(begin)
                data = memory.read(end - begin)
            except OSError:
                continue
            at = data.find(pattern)
            # What was just read, and the pattern itself, are of no account.
            while at >= 0:
                memory.seek(begin + at)
                memory.write(bytes([data[at] ^ 1]))
                found += 1
                at = data.find(pattern, at + 1)
            del data
    return found


def main(verify: bool) -> None:
    engine = lightering.Engine("sim", verify=verify, prefetch_count=0)
    tensor = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    pattern = bytes(tensor[100:164].tolist())
    count, became = 0, "nobody noticed"
    try:
        with SavedTensors(min_bytes=1, engine=engine):
            out = save(leaf("cpu"), [tensor], [])
            del tensor
            out = save(out, [torch.zeros(4096)], [])
            engine.drain()
            Desk.of(engine).flush()
            count = spoil(pattern)
            out.sum().backward()
            engine.drain()
    except lightering.Corrupt as error:
        became = str(error)
    stats = engine.stats()
    print(count > 0, stats["corrupt_count"], stats["verified_count"] > 0, became)


if __name__ == "__main__":
    main(sys.argv[1] == "verify")
