"""The Llama of `examples/llama.py` in the sizes of the benchmarks, and manual stages of it for torch.

Contract
--------
- `new` and `new_llama` make the same parameters on every rank from one seed.
- `Part(model, start, end)` is layers `start` up to `end` of the same model, its modules not copied, with the embedding
  before the first layer and the head after the last: the stage that a user of torch.distributed.pipelining writes by hand.
- `python benchmarks/x.py` has this folder on its path but not the examples, so this file appends their folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from llama import Config as Config
from llama import Llama as Llama
from llama import loss as loss

Model = TypeVar("Model", bound=nn.Module)


def llama_small(dim: int, layers: int = 8) -> Config:
    """A model for timing steps: at least 4 heads, of at most 64."""
    return Config(dim, layers, heads=max(4, dim // 64))


def llama_1b() -> Config:
    """The shape of Llama 3.2 1B with a head of its own over a smaller vocabulary: 1.1 billion parameters."""
    return Config(2048, 16, heads=32, kv_heads=8, hidden=8192, vocab=32768, rope_theta=500_000.0)


def llama_405b(layers: int = 126) -> Config:
    """Llama 3.1 405B (Llama team 2024, table 3), with fewer layers to see how a cost scales."""
    return Config(16384, layers, heads=128, kv_heads=8, hidden=53248, vocab=128256, rope_theta=500_000.0)


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
    """The model that `make` returns, with small normal weights, the same on every call and every rank with such a device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = make()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model
