"""PyTorch: layer inputs and saved tensors leave the GPU, with the gradients untouched.

What it is: contexts, a wrapper and a checkpoint function that a training loop uses.
What it is not: a trainer. It changes no kernel and no order of kernels: gradients are bit for bit
those of the same run without it.
Invariant: what autograd asks for is what it saved, or an exception is raised.

    SavedTensors      every saved tensor          HiddenStates      inputs of checkpointed layers
    offload_wrapper   the same for one module     checkpoint        the same for one call

Who may call it: everyone.
"""

from ._hidden import HiddenStates
from ._report import Report
from ._saved import SavedTensors
from ._wrapper import checkpoint, offload_wrapper, report

__all__ = [
    "HiddenStates",
    "Report",
    "SavedTensors",
    "checkpoint",
    "offload_wrapper",
    "report",
]
