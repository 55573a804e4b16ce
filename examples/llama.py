"""A Llama-style language model in plain PyTorch: RoPE, RMSNorm, SwiGLU, causal grouped-query attention, untied head.

Contract: `Llama(config)(tokens)` maps int64 tokens [batch, length] to logits [batch, length, vocab]; `loss` takes the logits.
The file knows nothing of pipelines; module names follow torchtitan (`tok_embeddings`, `layers.N`, `norm`, `output`).
The demo and the benchmarks train this model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the default has 10.1 million parameters and reads bytes.

    `kv_heads`: heads of keys and values; None: one for each query head. `hidden`: width of the feed-forward layer; None: 8/3 of
    dim, as in Llama, rounded up to a multiple of 32.
    """

    dim: int = 320
    layers: int = 8
    heads: int = 5
    kv_heads: int | None = None
    hidden: int | None = None
    vocab: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that do not fit together."""
        if self.dim % (2 * self.heads) or self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{self}: heads must have an even width, and each key head the same number of query heads")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.heads

    @property
    def ffn_dim(self) -> int:
        """Width of the feed-forward layer."""
        return self.hidden or -(-8 * self.dim // (3 * 32)) * 32


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Tables of the rotary position embedding (Su et al. 2021): cos and sin, each [length, head_dim / 2]."""

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
    """Causal grouped-query attention over [batch, length, dim] (Ainslie et al. 2023)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        kv_heads = config.kv_heads or config.heads
        self.head_dim, self.group = config.head_dim, config.heads // kv_heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self.heads(self.wq(x)), cos, sin)
        key = self.repeated(rotate(self.heads(self.wk(x)), cos, sin))
        mixed = F.scaled_dot_product_attention(query, key, self.repeated(self.heads(self.wv(x))), is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """[batch, length, heads * head_dim] -> [batch, heads, length, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def repeated(self, x: Tensor) -> Tensor:
        """Each key or value head once for every query head of its group."""
        return x if self.group == 1 else x.repeat_interleave(self.group, dim=1)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each normalised before and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocab]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        cos, sin = self.rotary(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


def initialise(module: nn.Module) -> None:
    """For `Module.apply`: small normal weights, as GPT-2 and Llama start."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token, in nats: logits [batch, length, vocab], targets [batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
