"""The models that the benchmarks train, by name and size: loss, batches, and manual stages for torch.

    llama   the Llama of examples/llama.py
    gpt2    learned positions, LayerNorm, GELU, untied head; dropout of embeddings, attention weights and residuals
    moe     gpt2 without dropout, with 8 experts in each layer, 2 of them for a token (`blocks.Experts`)
    vit     patch embedding by a convolution, encoder layers, class head: 1 + length places from images of length patches
    resnet  patches by a convolution, then basic blocks over length places with dim channels: no width or size changes

Contract: `workload(name, size)` has the same parameters and batches on every call and every rank; its layers are called
`layers.N`. Widths make a layer of each model about as large as the Llama's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import blocks
import models
import torch
from blocks import Attention, Block, Experts, FeedForward, Head, Patches, Pooled, Residual, Stack, Words
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]  # inputs and targets, both with the rows first
VOCAB, PATCH = 256, 4


@dataclass(frozen=True)
class Size:
    """Width and number of layers, tokens (or patches) of a row, and the probability of dropout for a model that has dropout."""

    dim: int = 256
    layers: int = 8
    length: int = 64
    dropout: float = 0.1

    @property
    def heads(self) -> int:
        return max(4, self.dim // 64)


@dataclass(frozen=True)
class Workload:
    """A model with its data. `part(model, start, end)`: layers `start` up to `end` as a stage."""

    name: str
    size: Size
    build: Callable[[Size], nn.Module]
    part: Callable[[nn.Module, int, int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    make_batch: Callable[[Size, int, torch.Generator], Batch]

    def model(self) -> nn.Module:
        """A new model."""
        return models.new(lambda: self.build(self.size))

    def batch(self, rows: int, seed: int = 1) -> Batch:
        """Inputs and targets of `rows` rows, on the CPU."""
        return self.make_batch(self.size, rows, torch.Generator().manual_seed(seed))

    @property
    def draws(self) -> bool:
        """True if a step depends on random numbers."""
        return self.name == "gpt2" and self.size.dropout > 0

    def without_dropout(self) -> Workload:
        """The workload without dropout: every contender computes the same numbers."""
        return replace(self, size=replace(self.size, dropout=0.0))


def workload(name: str, size: Size) -> Workload:
    """The workload of a name in NAMES."""
    if name == "llama":
        return Workload(name, size, llama, models.Part, models.loss, text)
    if name in ("vit", "resnet"):
        return Workload(name, size, {"vit": vit, "resnet": resnet}[name], blocks.part, F.cross_entropy, images)
    return Workload(name, size, {"gpt2": gpt2, "moe": moe}[name], blocks.part, models.loss, text)


NAMES = ("llama", "gpt2", "moe", "vit", "resnet")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The options that say how large a step is."""
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a row; patches of an image")


def llama(size: Size) -> nn.Module:
    return models.Llama(models.llama_small(size.dim, size.layers))


def gpt2(size: Size) -> nn.Module:
    """GPT-2 (Radford et al. 2019), but the head has a weight of its own."""
    dim, drop = size.dim, size.dropout
    layers = [
        Block(dim, Attention(dim, size.heads, causal=True, dropout=drop), FeedForward(dim), drop) for _ in range(size.layers)
    ]
    return Stack(Words(VOCAB, size.length, dim, drop), nn.ModuleList(layers), Head(dim, VOCAB))


def moe(size: Size) -> nn.Module:
    """A mixture of experts: the two experts of a token are together as wide as the feed-forward layer of the other models."""
    dim = size.dim
    layers = [Block(dim, Attention(dim, size.heads, causal=True), Experts(dim, 2 * dim)) for _ in range(size.layers)]
    return Stack(Words(VOCAB, size.length, dim), nn.ModuleList(layers), Head(dim, VOCAB))


def vit(size: Size) -> nn.Module:
    """A vision transformer (Dosovitskiy et al. 2021)."""
    dim = size.dim
    layers = [Block(dim, Attention(dim, size.heads, causal=False), FeedForward(dim)) for _ in range(size.layers)]
    return Stack(Patches(side(size), PATCH, dim), nn.ModuleList(layers), Head(dim, VOCAB, first=True))


def resnet(size: Size) -> nn.Module:
    """Residual blocks of one width (He et al. 2015): two convolutions have about twice the operations of a Llama's layer."""
    stem = nn.Conv2d(3, size.dim, PATCH, PATCH)
    return Stack(stem, nn.ModuleList(Residual(size.dim) for _ in range(size.layers)), Pooled(size.dim, VOCAB))


def side(size: Size) -> int:
    """Pixels of an image's side. Raises ValueError where the patches make no square."""
    if math.isqrt(size.length) ** 2 != size.length:
        raise ValueError(f"an image has a square number of patches, not {size.length}")
    return math.isqrt(size.length) * PATCH


def text(size: Size, rows: int, generator: torch.Generator) -> Batch:
    """Random tokens and their successors, each int64 [rows, length]."""
    tokens = torch.randint(VOCAB, (rows, size.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def images(size: Size, rows: int, generator: torch.Generator) -> Batch:
    """Random images [rows, 3, side, side] and classes [rows]."""
    pixels = torch.randn(rows, 3, side(size), side(size), generator=generator)
    return pixels, torch.randint(VOCAB, (rows,), generator=generator)
