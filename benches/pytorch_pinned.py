#!/usr/bin/env python3
"""What pinned host memory costs in PyTorch: its caching host allocator, beside tools/measure.sh's
part `pinned`, which measures this crate's pool on the same machine.

    python3 benches/pytorch_pinned.py [--bytes 8GiB,32GiB] [--json]

For each size: a fresh allocation (cudaHostAlloc behind it, and the size rounded up to a power of
two), then the same size again out of the cache; then one block of 1 MiB taken and given back out of
the cache, many times. Needs torch and a GPU; without them it says so and ends with status 1.
"""

import argparse
import json
import statistics
import sys
import time

UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
ROUNDS = 2001


def size(text):
    for unit, bytes_each in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * bytes_each
    raise argparse.ArgumentTypeError(f"{text}: a whole number of MiB or GiB")


def timed(work):
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def warm_up(torch, bytes_wanted):
    """Touches a tenth more than is measured, and frees it: memory that a virtual machine has not
    touched yet is slow."""
    torch.ones(bytes_wanted // 10 * 11, dtype=torch.uint8)


def measure(torch, bytes_wanted):
    """Seconds of a fresh allocation and of one out of the cache, and what became page-locked."""
    take = lambda: torch.empty(bytes_wanted, dtype=torch.uint8, pin_memory=True)
    fresh, block = timed(take)
    stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    pinned = stats.get("allocated_bytes.current")
    del block
    cached, block = timed(take)
    del block
    return fresh, cached, pinned


def block(torch):
    """Nanoseconds of a block of 1 MiB out of the cache and back, the middle of many."""
    def turn():
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)

    turn()
    return statistics.median(timed(turn)[0] for _ in range(ROUNDS)) * 1e9


def main():
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--bytes", default="8GiB,32GiB",
                       type=lambda text: [size(part) for part in text.split(",")])
    words.add_argument("--json", action="store_true")
    options = words.parse_args()
    try:
        import torch
    except ImportError as error:
        sys.exit(f"pytorch_pinned.py: {error}")
    if not torch.cuda.is_available():
        sys.exit("pytorch_pinned.py: PyTorch finds no GPU here")
    torch.cuda.init()
    warm_up(torch, max(options.bytes))
    for bytes_wanted in options.bytes:
        fresh, cached, pinned = measure(torch, bytes_wanted)
        said = {"what": "torch", "torch": torch.__version__, "bytes": bytes_wanted,
                "fresh_seconds": fresh, "gb_per_second": bytes_wanted / 1e9 / fresh,
                "cached_seconds": cached, "pinned_bytes": pinned}
        if options.json:
            print(json.dumps(said), flush=True)
        else:
            rate = said["gb_per_second"]
            print(f"{bytes_wanted >> 20} MiB: fresh {fresh:.3f} s ({rate:.2f} GB/s), "
                  f"out of the cache {cached * 1e6:.1f} us, page-locked by then: {pinned} bytes")
    nanoseconds = block(torch)
    if options.json:
        print(json.dumps({"what": "torch-block", "bytes": 1 << 20, "nanoseconds": nanoseconds}))
    else:
        print(f"1 MiB out of the cache and back: {nanoseconds:.0f} ns")


if __name__ == "__main__":
    main()
