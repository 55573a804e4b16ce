"""A model with the parts that make initialising by rank hard, and the same numbers in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpp
from tests.saved_graphs import GRAPHS


class Block(nn.Module):
    """Attention, whose initialiser writes a child's bias, and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class Angles(nn.Module):
    """Holds a buffer that no state dict has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("angles", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(self.width).float().cos())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles


class Model(nn.Module):
    """A tied embedding, a buffer without a name in the state dict, running statistics, and a parameter that nothing reads."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.angles = Angles(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.unread = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.angles(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def init(module: nn.Module) -> None:
    """Redraws values out of range, writes through `.data`, and lets a block write parameters of its children."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.MultiheadAttention):
        module._reset_parameters()
        nn.init.orthogonal_(module.in_proj_weight)
    elif isinstance(module, Block):
        for name, parameter in module.named_parameters():
            if name == "down.weight":
                parameter.data.normal_(0, 0.3)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


X = torch.arange(20).view(4, 5) % 11


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def whole() -> Model:
    """The model as one process initialises it."""
    torch.manual_seed(3)
    model = Model()
    torch.manual_seed(5)
    model.apply(init)
    return model


def compiled(model: nn.Module, **options: Any) -> graphpp.Pipeline:
    example = graphpp.Microbatch((X[:1],), target=X[:1])
    return graphpp.compile(model, loss, example=example, **{"microbatches": 4, "artifact": GRAPHS, **options})


def values(pipe: graphpp.Pipeline) -> dict[str, Tensor]:
    """This rank's entries of the state dict and its other buffers."""
    return {key: value.detach().clone() for key, value in [*pipe.state_dict().items(), *pipe.named_buffers()]}
