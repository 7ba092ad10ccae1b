"""Settings of all tests: one thread, since small models on a shared machine would spend their time
in waiting for one another's threads, and the workspace that cuBLAS repeats itself with."""

from __future__ import annotations

import os

# cuBLAS reads it once, when its first handle is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

torch.set_num_threads(1)
