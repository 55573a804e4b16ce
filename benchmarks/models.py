"""The Llama of the benchmarks: plain PyTorch, any size, grouped-query attention; and manual stages of it for torch.

Contract
--------
- `Llama(config)(tokens)` maps int64 tokens [batch, length] to logits [batch, length, vocab]; `loss(logits, targets)` is
  the mean cross entropy. `new` and `new_llama` make the same parameters on every rank from one seed.
- `Part(model, start, end)` is layers `start` up to `end` of the same model, its modules not copied, with the embedding
  before the first layer and the head after the last: what a user of torch.distributed.pipelining writes by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Config:
    """Sizes of a model. `kv_heads`: heads of keys and values; `hidden`: width of the feed-forward layer."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 256
    rope_theta: float = 10_000.0

    @classmethod
    def small(cls, dim: int, layers: int = 8) -> Config:
        """A model for timing steps: at least 4 heads, of at most 64; feed-forward 8/3 of dim rounded up to 32."""
        heads = max(4, dim // 64)
        return cls(dim, layers, heads, heads, hidden=-(-8 * dim // (3 * 32)) * 32)

    @classmethod
    def llama_1b(cls) -> Config:
        """The shape of Llama 3.2 1B with a head of its own over a smaller vocabulary: 1.1 billion parameters."""
        return cls(2048, 16, heads=32, kv_heads=8, hidden=8192, vocab=32768, rope_theta=500_000.0)

    @classmethod
    def llama_405b(cls, layers: int = 126) -> Config:
        """Llama 3.1 405B (Llama team 2024, table 3); fewer layers to see how something scales."""
        return cls(16384, layers, heads=128, kv_heads=8, hidden=53248, vocab=128256, rope_theta=500_000.0)


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Rotary(nn.Module):
    """Tables of rotary position embedding (Su et al. 2021): cos and sin, each [length, head_dim / 2]."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inverse_frequencies", theta**-exponents, persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        frequencies = self.get_buffer("inverse_frequencies")
        angles = torch.outer(torch.arange(length, device=frequencies.device), frequencies)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + half]) of the last dimension by the angle of their position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention over [batch, length, dim]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.groups = config.heads // config.kv_heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self.heads(self.wq(x)), cos, sin)
        key = self.shared(rotate(self.heads(self.wk(x)), cos, sin))
        mixed = F.scaled_dot_product_attention(query, key, self.shared(self.heads(self.wv(x))), is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """[batch, length, heads * head_dim] -> [batch, heads, length, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def shared(self, x: Tensor) -> Tensor:
        """One key or value head for each query head of its group."""
        return x if self.groups == 1 else x.repeat_interleave(self.groups, dim=1)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocab]; names follow torchtitan."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.rotary = Rotary(config.dim // config.heads, config.rope_theta)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        cos, sin = self.rotary(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


class Part(nn.Module):
    """Layers `start` up to `end` of a model as a manual stage: tokens or activations in, activations or logits out."""

    def __init__(self, model: Llama, start: int, end: int) -> None:
        super().__init__()
        self.rotary = model.rotary
        self.tok_embeddings = model.tok_embeddings if start == 0 else None
        self.layers = model.layers[start:end]
        last = end == len(model.layers)
        self.norm, self.output = (model.norm, model.output) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rotary(x.shape[1])
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.output is None else self.output(self.norm(x))


def new_llama(config: Config, device: torch.device | str = "cpu") -> Llama:
    """A new Llama, the same on every call and every rank."""
    return new(lambda: Llama(config), device)


def new(make: Callable[[], Model], device: torch.device | str = "cpu") -> Model:
    """What `make` makes, with small normal weights, the same on every call and every rank."""
    torch.manual_seed(0)
    with torch.device("meta" if str(device) == "meta" else "cpu"):
        model = make()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model.to(device)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats: logits [batch, length, vocab], targets [batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
