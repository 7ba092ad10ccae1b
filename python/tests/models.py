"""Small models with random weights, of the shapes that training code meets.

What it is: a dense decoder and a mixture of experts with router losses in pure torch, and the same
of transformers' own configs. Dropout is on, so a recompute needs its random numbers again.
Invariant: equal arguments and seed make models of equal bits; ``forward(**batch)`` gives an object
with ``loss``.

    ids -> embedding -> layers (checkpointed in one of WAYS_TO_CHECKPOINT) -> norm -> head -> loss
                          |  router logits, outside of the checkpoint ------------------> + aux

Who may call it: tests and python/benches.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the positions, shared by all layers."""

WAYS_TO_CHECKPOINT = ("none", "positional", "keyword", "partial", "reentrant")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model; a layer's hidden state is batch x tokens x hidden."""

    layers: int = 3
    hidden: int = 32
    feed_forward: int = 64
    heads: int = 4
    vocabulary: int = 61
    experts: int = 0
    experts_per_token: int = 2
    dropout: float = 0.1
    dtype: torch.dtype = torch.float32
    checkpoint: str = "positional"


class Output(NamedTuple):
    """A tuple, in which FSDP2 finds the tensors whose backward it has to gather weights for."""

    loss: torch.Tensor
    logits: torch.Tensor
    router_logits: tuple[torch.Tensor, ...] = ()


class RmsNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor, turn: Turn) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        qkv = self.qkv(hidden).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        query, key = rotate(query, turn), rotate(key, turn)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def rotate(heads: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotary positions; ``turn`` is shared by all layers and is no layer's own."""
    cos, sin = turn
    one, two = heads.chunk(2, -1)
    return heads * cos + torch.cat((-two, one), -1) * sin


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Experts(nn.Module):
    """Each token goes to a few experts; who gets how many differs from step to step."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(shape) for _ in range(shape.experts))
        self.per_token = shape.experts_per_token

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = self.router(flat)
        share, chosen = logits.float().softmax(-1).topk(self.per_token, -1)
        share = (share / share.sum(-1, keepdim=True)).to(flat.dtype)
        mixed = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            part = expert(flat[token]) * share[token, place, None]
            mixed = mixed.index_add(0, token, part)
        return mixed.view_as(hidden), logits


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before, self.between = RmsNorm(shape.hidden), RmsNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mixer = Experts(shape) if shape.experts else FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden_states: torch.Tensor, turn: Any = None) -> tuple[torch.Tensor, Any]:
        hidden = hidden_states
        hidden = hidden + self.dropout(self.attention(self.before(hidden), turn))
        mixed = self.mixer(self.between(hidden))
        mixed, logits = mixed if isinstance(mixed, tuple) else (mixed, None)
        return hidden + self.dropout(mixed), logits


class Decoder(nn.Module):
    """A decoder; ``checkpoint`` of its shape says how its layers are called in training."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        half = shape.hidden // shape.heads // 2
        self.register_buffer("rate", 10000.0 ** (-torch.arange(half) / half), persistent=False)
        self.to(shape.dtype)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = self.embedding(input_ids)
        angle = torch.arange(input_ids.shape[1], device=hidden.device)[:, None] * self.rate.float()
        angle = torch.cat((angle, angle), -1)
        turn = (angle.cos().to(hidden.dtype), angle.sin().to(hidden.dtype))
        routed = []
        for layer in self.layers:
            hidden, logits = self.call(layer, hidden, turn)
            routed += [] if logits is None else [logits]
        logits = self.head(self.norm(hidden))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss = loss + sum(router_loss(each, self.shape.experts_per_token) for each in routed)
        return Output(loss, logits, tuple(routed))

    def call(self, layer: nn.Module, hidden: torch.Tensor, turn: Any) -> Any:
        how = self.shape.checkpoint if self.training and torch.is_grad_enabled() else "none"
        if how == "none":
            return layer(hidden, turn)
        if how == "keyword":
            return checkpoint(layer, use_reentrant=False, hidden_states=hidden, turn=turn)
        if how == "partial":
            return checkpoint(functools.partial(layer, turn=turn), hidden, use_reentrant=False)
        return checkpoint(layer, hidden, turn, use_reentrant=how == "reentrant")


def router_loss(logits: torch.Tensor, per_token: int) -> torch.Tensor:
    """The load-balancing loss and the z-loss, which the router's gradients come from besides."""
    wide = logits.float()
    share = wide.softmax(-1)
    chosen = functional.one_hot(share.topk(per_token, -1).indices, share.shape[-1])
    balance = (chosen.sum(1).float().mean(0) * share.mean(0)).sum() * share.shape[-1]
    return 0.01 * balance + 0.001 * wide.logsumexp(-1).pow(2).mean()


# ---- makers: each gives a model in training mode ----


def seeded(make: Callable[[], nn.Module], device: str | torch.device = "cpu") -> nn.Module:
    """Makes a model of the same bits each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = make()
    return model.to(device).train()


def dense(device: str = "cpu", **shape: Any) -> nn.Module:
    return seeded(lambda: Decoder(Shape(**shape)), device)


def moe(device: str = "cpu", **shape: Any) -> nn.Module:
    return seeded(lambda: Decoder(Shape(experts=4, **shape)), device)


def qwen3(device: str = "cpu", dtype: torch.dtype = torch.float32, **config: Any) -> nn.Module:
    """transformers' Qwen3, tiny, with attention dropout; checkpointed without reentry."""
    import transformers

    sizes = {"num_hidden_layers": 3, "attention_dropout": 0.1, **_TINY, **config}
    return _of_transformers(transformers.Qwen3Config(**sizes), device, dtype)


def qwen3_moe(device: str = "cpu", dtype: torch.dtype = torch.float32, **config: Any) -> nn.Module:
    """transformers' Qwen3-MoE, tiny, whose loss has the router's loss in it."""
    import transformers

    sizes = {"num_hidden_layers": 2, "attention_dropout": 0.1, "num_experts": 4,
             "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True,
             "router_aux_loss_coef": 0.05, **_TINY, **config}
    return _of_transformers(transformers.Qwen3MoeConfig(**sizes), device, dtype)


_TINY = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
         "use_cache": False}


def _of_transformers(config: Any, device: str, dtype: torch.dtype) -> nn.Module:
    import transformers

    def make() -> nn.Module:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa")
        with warnings.catch_warnings():
            # Its new name is not in every version that is supported.
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return seeded(make, device)


MAKERS: dict[str, Callable[..., nn.Module]] = {
    "dense": dense, "moe": moe, "qwen3": qwen3, "qwen3_moe": qwen3_moe,
}


def batch(
    seed: int = 0, sequences: int = 2, tokens: int = 16, vocabulary: int = 61,
    device: str | torch.device = "cpu",
) -> dict[str, torch.Tensor]:
    """A batch of its seed alone: ``model(**batch(3)).loss``."""
    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(vocabulary, (sequences, tokens), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids.clone()}
