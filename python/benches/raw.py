"""Raw copies through pinned memory: the control, and what the link gives.

What it is: as many bytes as layer inputs have, copied out while the forward runs and in while the
backward runs, on two side streams; and the link's rate each way.
What it is not: offload. No kernel waits for a copy, and nobody reads what was copied.
Invariant: a copy begins when its layer does, as an offloaded one would, and none is for the last
layer. On the CPU there are no streams: the copies are made in turn.

    layer i enters, forward : out += one input        layer i enters, recompute : in += one input

Who may call it: ways.py, steps.py.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from workloads import Built


class Copies:
    """Copies beside the layers of a built workload, until closed."""

    def __init__(self, built: Built, device: torch.device) -> None:
        self.out_bytes = self.in_bytes = 0
        self._on_gpu = device.type == "cuda"
        self._applications = built.applications
        self._nbytes = built.input_bytes
        self._seen = 0
        self._backward = self._is_on = False
        self.pinned_bytes = 2 * self._nbytes
        pinned: Any = {"dtype": torch.uint8, "pin_memory": self._on_gpu}
        self._device = [torch.empty(self._nbytes, dtype=torch.uint8, device=device)
                        for _ in range(2)]
        self._host = [torch.empty(self._nbytes, **pinned) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._on_gpu else []
        self._handles = [entry.register_forward_pre_hook(self._enter) for entry in built.entries]

    def forward(self) -> None:
        """A forward pass begins."""
        self._seen, self._backward, self._is_on = 0, False, True

    def backward(self) -> None:
        """A backward pass begins."""
        self._seen, self._backward = 0, True

    def rest(self) -> None:
        """A step is over; the next one may be another way's."""
        self._is_on = False

    def close(self) -> None:
        """Takes the hooks back, and the memory once the copies are done."""
        for handle in self._handles:
            handle.remove()
        for stream in self._streams:
            stream.synchronize()
        self._device.clear()
        self._host.clear()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if not self._is_on:
            return
        self._seen += 1
        last = 1 if self._backward else self._applications
        if self._seen == last or self._seen > self._applications:
            return
        way = 1 if self._backward else 0
        source, target = self._device[way], self._host[way]
        if self._backward:
            source, target = target, source
            self.in_bytes += self._nbytes
        else:
            self.out_bytes += self._nbytes
        if not self._on_gpu:
            target.copy_(source)
            return
        begun = torch.cuda.current_stream().record_event()
        stream = self._streams[way]
        stream.wait_event(begun)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


def link_bytes_per_second(device: torch.device, small: bool) -> tuple[float, float]:
    """The link's rates out and in: the median of seven copies of 1 GiB through pinned memory."""
    on_gpu = device.type == "cuda"
    nbytes = 1 << 20 if small or not on_gpu else 1 << 30
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    here.fill_(1)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        times = []
        for _ in range(8):
            if on_gpu:
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        # The first one warms up.
        return nbytes / sorted(times[1:])[3]

    return rate(here, there), rate(there, here)
