#!/usr/bin/env python3
"""What copies in that wait in their streams take from copies out, and whom a queue of copies in
lets in between: why `engine/lanes.rs` chooses its streams as it does. No part of this crate runs.

    python3 benches/waiting_streams.py [--json]

First: 2 GiB go out in pieces of 32 MiB while 24 such pieces wait to come in, on 0 to 4 streams,
for an event that comes later; beside a kernel that spins, and beside some that read and write
memory.
Then: 2 GiB come in, and 5 ms later another stream asks for 32 MiB: on one stream; on one with an
empty stream between each two pieces; on two that take strict turns; and on three, of which a turn
waits for the last but one. Needs torch and a GPU; without them it says so and ends with status 1.
"""

import argparse
import json
import statistics
import sys

PIECE = 32 << 20
PIECES = 64
WAITING = 24
ROUNDS = 5
SPIN_CYCLES_A_MS = 1_700_000
STREAMS_MAX = 4


class Rig:
    def __init__(self, torch):
        self.torch = torch
        self.compute = torch.cuda.current_stream()
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS_MAX + 2)]
        pinned = lambda: torch.empty(PIECE * PIECES, dtype=torch.uint8, pin_memory=True)
        device = lambda: torch.empty(PIECE * PIECES, dtype=torch.uint8, device="cuda")
        self.hosts, self.devices = (pinned(), pinned()), (device(), device())
        self.floats = torch.empty(1 << 30, dtype=torch.float32, device="cuda")

    def mark(self, stream, timed=False):
        event = self.torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return event

    def copy(self, stream, to, source, index):
        piece = slice(index * PIECE, (index + 1) * PIECE)
        with self.torch.cuda.stream(stream):
            to[piece].copy_(source[piece], non_blocking=True)

    def spin(self, ms):
        self.torch.cuda._sleep(SPIN_CYCLES_A_MS * ms)

    def memory(self, ms):
        for _ in range(ms // 2):
            self.floats.add_(1.0)

    def out(self, compute, waiting):
        """GB/s of the copies out."""
        stream, others = self.streams[0], self.streams[1:1 + waiting]
        self.spin(15)  # until all is enqueued
        stream.wait_event(self.mark(self.compute))
        begin = self.mark(stream, timed=True)
        for index in range(PIECES):
            self.copy(stream, self.hosts[0], self.devices[0], index)
        end = self.mark(stream, timed=True)
        compute(60)
        later = self.mark(self.compute)
        for index in range(WAITING if others else 0):
            other = others[index % len(others)]
            other.wait_event(later)
            self.copy(other, self.devices[1], self.hosts[1], index)
        for other in others:
            self.compute.wait_event(self.mark(other))
        self.torch.cuda.synchronize()
        return PIECE * PIECES / begin.elapsed_time(end) / 1e6

    def into(self, how):
        """Milliseconds that another stream's copy takes, and GB/s of those in front of it."""
        count, wait_for = {"two": (2, 1), "three": (3, 2)}.get(how, (1, None))
        streams, between, other = self.streams[:count], self.streams[3], self.streams[4]
        self.spin(20)  # until all is enqueued
        begin, ends = self.mark(self.compute, timed=True), []
        for stream in streams:
            stream.wait_event(begin)
        for index in range(PIECES):
            stream = streams[index % count]
            if wait_for and index >= wait_for:
                stream.wait_event(ends[-wait_for])
            if how == "empty" and ends:
                between.wait_event(ends[-1])
                stream.wait_event(self.mark(between))
            self.copy(stream, self.devices[1], self.hosts[1], index)
            ends.append(self.mark(stream))
        self.spin(5)
        asked = self.mark(self.compute, timed=True)
        other.wait_event(asked)
        self.copy(other, self.devices[0], self.hosts[0], 0)
        there = self.mark(other, timed=True)
        for end in ends[-count:]:
            self.compute.wait_event(end)
        done = self.mark(self.compute, timed=True)
        self.torch.cuda.synchronize()
        return asked.elapsed_time(there), PIECE * PIECES / begin.elapsed_time(done) / 1e6


def main():
    keeps_lines = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keeps_lines)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row, besides")
    as_json = parser.parse_args().json
    try:
        import torch
    except ImportError:
        sys.exit("torch is not installed: nothing was measured")
    if not torch.cuda.is_available():
        sys.exit("there is no GPU: nothing was measured")
    rig = Rig(torch)

    def say(text, **row):
        print(text, flush=True)
        if as_json:
            print(json.dumps({"bench": "waiting_streams", **row}), flush=True)

    for name, compute in (("spin", rig.spin), ("memory", rig.memory)):
        for waiting in range(STREAMS_MAX + 1):
            rate = statistics.median(rig.out(compute, waiting) for _ in range(ROUNDS))
            say(f"out beside {name:6}, copies in wait on {waiting}: {rate:5.1f} GB/s",
                beside=name, waiting=waiting, out_gb_per_s=rate)
    for how in ("one", "empty", "two", "three"):
        took = [rig.into(how) for _ in range(ROUNDS)]
        wait, rate = (statistics.median(each) for each in zip(*took))
        say(f"in on {how:5}: another's copy after {wait:6.2f} ms, {rate:5.1f} GB/s",
            streams=how, other_ms=wait, in_gb_per_s=rate)


if __name__ == "__main__":
    main()
