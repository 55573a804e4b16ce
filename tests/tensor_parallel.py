"""A model whose layers are spread over ranks by `parallelize_module`, and trainings of it on meshes with `tp`.

Contract: `spread(model, mesh, sequence=...)` spreads a `Decoder` as torch's documentation says, with sequence parallelism or
without. `train_on_mesh` runs on one rank and gathers whole gradients and parameters there. `train_alone` is a plain loop in
one process over all replicas' batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphpp
from graphpp.runtime.dtensors import whole_tensor
from tests.distributed import on_cpu
from tests.sharding import Mesh

VOCAB, WIDTH, LENGTH, ROWS, MICROBATCHES, STEPS = 24, 8, 6, 8, 4, 2
CUTS = {1: None, 2: ["layers.1"], 4: ["layers.0.norm2", "layers.1", "layers.1.norm2"]}  # by number of stages


class Layer(nn.Module):
    """Attention of two heads and a feed-forward network, each after a norm, as in a transformer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.out(self.attention(self.query(y), self.key(y), self.value(y)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Attention(nn.Module):
    """Causal attention over the heads of this rank; dropout within, if any, is on these heads."""

    dropout = 0.0

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = (each.unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=self.dropout).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Tokens to logits."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def decoder(*, layers: int = 2, tied: bool = False, dropout: float = 0.0) -> Decoder:
    torch.manual_seed(3)
    model = Decoder(layers, dropout)
    if tied:
        model.head.weight = model.embed.weight
    return model


def spread(model: Decoder, mesh: DeviceMesh, *, sequence: bool = False, whole_logits: bool = True) -> Decoder:
    """The model with its layers over the ranks of `mesh`; `sequence`: what is between sharded layers is sharded by tokens."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    tied = model.head.weight is model.embed.weight
    between = Shard(1) if sequence else Replicate()
    row = RowwiseParallel(output_layouts=between)
    plan: dict[str, Any] = {"up": ColwiseParallel(input_layouts=between), "out": row, "down": row}
    plan |= {name: ColwiseParallel(input_layouts=between) for name in ("query", "key", "value")}
    if sequence:
        plan |= {"norm": SequenceParallel(), "norm2": SequenceParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    ends: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Replicate() if whole_logits else Shard(-1), use_local_output=whole_logits
        ),
    }
    if sequence:
        whole = (Replicate(),)
        ends["layers.0"] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=(between,), use_local_output=True)
        ends["norm"] = SequenceParallel()
    parallelize_module(model, mesh, ends)
    if tied:
        model.head.weight = model.embed.weight
    return model


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=generator), torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)


def example() -> graphpp.Microbatch:
    tokens, target = batch(0)
    rows = ROWS // MICROBATCHES
    return graphpp.Microbatch((tokens[:rows],), {}, target[:rows])


def compiled(mesh: DeviceMesh | None, model: nn.Module, **options: Any) -> graphpp.Pipeline:
    return graphpp.compile(model, loss, mesh=mesh, **{"microbatches": MICROBATCHES, "example": example(), **options})


class Trained(NamedTuple):
    """By step: the loss of this rank's replica, the norm, whole gradients by FQN; at the end the whole parameters."""

    losses: list[Tensor]
    norms: list[Tensor]
    grads: list[dict[str, Tensor]]
    params: dict[str, Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """`foreach`, the default on CUDA, does not take `DTensor`s and other tensors in one parameter group."""
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9, foreach=False)


def train_on_mesh(rank: int, mesh: Mesh, model: Mapping[str, Any], sequence: bool, options: Mapping[str, Any]) -> Trained:
    """Train with each replica on batches of its own. `model`: the arguments of `decoder`."""
    torch.set_num_threads(1)
    made = mesh.made()
    return train(compiled(made, spread(decoder(**model), made["tp"], sequence=sequence), **options), [mesh.replica(rank)])


def train_alone(replicas: int, model: Mapping[str, Any]) -> Trained:
    """The same training in one process; the losses are those of the first replica."""
    return train(compiled(None, decoder(**model)), range(replicas))


def train(pipe: graphpp.Pipeline, replicas: Sequence[int], *, flat: bool = False) -> Trained:
    """Train on the batches of some replicas. `flat`: with an optimizer of flat parameters."""
    optimizer, found = sgd(pipe.flat_parameters() if flat else pipe.parameters()), Trained([], [], [], {})
    for number in range(STEPS):
        losses = []
        for replica in replicas:
            tokens, target = batch(100 * number + replica)
            torch.manual_seed(number)
            losses.append(pipe.step(tokens, target=target, accumulation_steps=len(replicas)).loss)
        found.losses.append(losses[0])
        found.norms.append(pipe.clip_grad_norm_(0.5))
        found.grads.append({fqn: whole_tensor(each.grad).clone() for fqn, each in pipe.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    found.params.update({fqn: whole_tensor(parameter).clone() for fqn, parameter in pipe.named_parameters()})
    return on_cpu(found)


def assert_near(found: Trained, expected: Trained) -> None:
    torch.testing.assert_close(found.norms, expected.norms, rtol=2e-6, atol=0)
    for mine, theirs in zip(found.grads, expected.grads, strict=True):
        for fqn, gradient in mine.items():
            torch.testing.assert_close(gradient, theirs[fqn], rtol=1e-5, atol=1e-6)
    for fqn, parameter in found.params.items():
        torch.testing.assert_close(parameter, expected.params[fqn], rtol=1e-5, atol=1e-6)
