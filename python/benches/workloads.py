"""What is trained: models of random weights, and the tensors that go in.

What it is: the workloads of the table, at full size for a GPU and small for a try of the script.
What it is not: a way to offload; ways.py has those.
Invariant: a workload's step is the same kernels in every way that checkpoints alike; ``entries``
are modules that run once when a layer's computation begins, in the forward and in the recompute.

    Workload -- build(device) --> Built: model, forward() -> loss, entries, input_bytes

Who may call it: steps.py and its children.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from lines import Wrong
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class Qwen3:
    """Shape of a Qwen3 decoder without its head, and of its batch."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    batch: int
    tokens: int
    key_heads: int = 8
    head_width: int = 128
    vocabulary: int = 151_936

    def small(self) -> Qwen3:
        return Qwen3(64, 4, 2, 128, batch=2, tokens=64, key_heads=1, head_width=32, vocabulary=101)


@dataclasses.dataclass(frozen=True)
class Block64:
    """One block that is applied many times: its inputs are nearly all of the memory."""

    hidden: int = 8192
    feed_forward: int = 8192
    tokens: int = 16_384
    applications: int = 64

    def small(self) -> Block64:
        return Block64(64, 64, 128, 8)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A row of the table."""

    name: str
    about: str
    shape: Qwen3 | Block64
    ways: tuple[str, ...]
    """Ways to run it, in the order of the table."""
    control: str
    """The way that ours is compared with."""
    checkpointed: bool = True
    first: tuple[str, ...] = ()
    """Ways whose first step is measured in a process of its own."""
    reserve_bytes: int = 0
    """What a reserved pool is made to hold; 0 for all layer inputs."""


@dataclasses.dataclass
class Built:
    """A workload on its device, ready for steps."""

    model: nn.Module
    forward: Callable[[], torch.Tensor]
    entries: list[nn.Module]
    applications: int
    """Layer inputs of a step: entries times how often each is applied."""
    input_bytes: int
    """Bytes of one layer's input."""
    resize: Callable[[int], None]
    """Makes later steps take sequences of another length."""


_INPUTS = ("checkpoint", "control", "torch", "trl", "deepspeed", "ours")
_FIRST = ("checkpoint", "torch", "trl", "deepspeed", "ours", "ours-reserved")
_QWEN3_06 = Qwen3(1024, 28, 16, 3072, batch=4, tokens=4096)

WORKLOADS = {
    each.name: each
    for each in (
        Workload("inputs-1.7b", "layer inputs, Qwen3-1.7B shape, 16 x 2048",
                 Qwen3(2048, 28, 16, 6144, batch=16, tokens=2048), _INPUTS, "control",
                 first=_FIRST),
        Workload("inputs-8b", "layer inputs, Qwen3-8B shape, 4 x 4096",
                 Qwen3(4096, 36, 32, 12_288, batch=4, tokens=4096), _INPUTS, "control",
                 first=_FIRST),
        Workload("short-0.6b", "layer inputs, short, Qwen3-0.6B shape, 8 x 512",
                 dataclasses.replace(_QWEN3_06, batch=8, tokens=512), _INPUTS, "checkpoint"),
        Workload("saved-0.6b", "every saved tensor, Qwen3-0.6B shape, 4 x 4096",
                 _QWEN3_06, ("none", "ours-all", "trl-all", "torch-all"), "none",
                 checkpointed=False,
                 first=("none", "torch-all", "trl-all", "ours-all", "ours-all-reserved-warm"),
                 reserve_bytes=36 << 30),
        Workload("block-64", "64 applications of one block, hidden 8192, 16,384 tokens",
                 Block64(), _INPUTS, "control"),
    )
}


def build(workload: Workload, device: torch.device, small: bool) -> Built:
    """Makes the model on the device; in training mode, bf16, with random weights. Raises Wrong."""
    shape = workload.shape.small() if small else workload.shape
    torch.manual_seed(0)
    if isinstance(shape, Block64):
        return _block_64(shape, device)
    return _qwen3(shape, device, workload.checkpointed)


def transformers_of() -> Any:
    """transformers, which has the layers of all models. Raises Wrong."""
    try:
        import transformers
    except ImportError as error:
        raise Wrong(f"every model here is made of transformers, which cannot be imported: {error}: "
                    "pip install transformers") from error
    return transformers


def _qwen3(shape: Qwen3, device: torch.device, checkpointed: bool) -> Built:
    transformers = transformers_of()
    config = transformers.Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        intermediate_size=shape.feed_forward, num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads, head_dim=shape.head_width, use_cache=False)
    with device:
        model = transformers.AutoModel.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.to(device).train()
    if checkpointed:
        enable_checkpointing(model)
    ids = torch.randint(shape.vocabulary, (shape.batch, shape.tokens), device=device)
    batch = [ids]

    def resize(tokens: int) -> None:
        batch[0] = torch.randint(shape.vocabulary, (shape.batch, tokens), device=device)

    def forward() -> torch.Tensor:
        out = model(input_ids=batch[0], use_cache=False).last_hidden_state
        return out.float().square().mean()

    entries = [layer.input_layernorm for layer in model.layers]
    nbytes = shape.batch * shape.tokens * shape.hidden * 2
    return Built(model, forward, entries, len(entries), nbytes, resize)


def enable_checkpointing(model: Any) -> None:
    """Checkpoints each layer without reentry, by whatever name this transformers has for it."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _block_64(shape: Block64, device: torch.device) -> Built:
    transformers_of()
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Block(GradientCheckpointingLayer):
        """A layer of transformers' own kind, which every way to offload knows."""

        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Identity()
            self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
            self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            hidden = self.enter(hidden_states)
            return hidden + self.down(nn.functional.silu(self.up(hidden)))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block()])

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for _ in range(shape.applications):
                hidden = self.layers[0](hidden)
            return hidden

    with device:
        model = Stack().to(torch.bfloat16).train()
    block = model.layers[0]
    block.gradient_checkpointing = True
    block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    batch = [torch.randn(shape.tokens, shape.hidden, device=device, dtype=torch.bfloat16)]

    def resize(tokens: int) -> None:
        batch[0] = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        # Behind an operator, as a decoder's first hidden state is behind its embedding.
        return model(batch[0].requires_grad_() * 1).float().square().mean()

    nbytes = shape.tokens * shape.hidden * 2
    return Built(model, forward, [block.enter], shape.applications, nbytes, resize)
