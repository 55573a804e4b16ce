"""Attention over sequences that ranks share: the output and gradients of one process, in eager and under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp import attention
from graphpp.errors import GraphPPError
from tests.distributed import DEVICE, on_cpu, run_ranks
from tests.exhaustive import further

HEADS, WIDTH, TOKENS = 6, 4, 12


def tensors(kv_heads: int = HEADS) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, TOKENS, WIDTH, generator=generator) for heads in (HEADS, kv_heads, kv_heads))


def whole(is_causal: bool, kv_heads: int, **options: Any) -> tuple[Tensor, ...]:
    q, k, v = (each.requires_grad_() for each in tensors(kv_heads))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **options)
    (out * out).sum().backward()
    return out.detach(), q.grad, k.grad, v.grad  # type: ignore[return-value]


def parts(rank: int, how: str, is_causal: bool, kv_heads: int, **options: Any) -> list[Tensor]:
    torch.set_num_threads(1)
    group, balanced = dist.group.WORLD, how == "balanced"
    q, k, v = (attention.sequence_part(each, group, 2, balanced=balanced).requires_grad_() for each in tensors(kv_heads))
    if how == "ulysses":
        out = attention.ulysses(q, k, v, group, is_causal=is_causal, **options)
    else:
        positions = attention.sequence_positions(q.shape[2], group, balanced=True) if balanced else None
        out = attention.gathered(q, k, v, group, is_causal=is_causal, positions=positions, **options)
    (out * out).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


def with_groups(rank: int, how: str, is_causal: bool) -> list[Tensor]:
    return parts(rank, how, is_causal, HEADS // 2 if how != "ulysses" else HEADS, enable_gqa=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("how", ["ulysses", "contiguous", "balanced"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_output_and_gradients_are_those_of_one_process(ranks: int, how: str, is_causal: bool) -> None:
    found = run_ranks(parts, ranks, how, is_causal, HEADS)
    order = torch.cat([positions_of(rank, ranks, how == "balanced") for rank in range(ranks)])
    for at, expected in enumerate(whole(is_causal, HEADS)):
        together = torch.cat([each[at] for each in found], 2)
        assert torch.allclose(together, expected[:, :, order], rtol=1e-5, atol=1e-6)


def positions_of(rank: int, ranks: int, balanced: bool) -> Tensor:
    size = TOKENS // (2 * ranks if balanced else ranks)
    pieces = (rank, 2 * ranks - 1 - rank) if balanced else (rank,)
    return torch.cat([torch.arange(at * size, (at + 1) * size) for at in pieces])


@pytest.mark.parametrize("how", ["ulysses", "contiguous"])
def test_fewer_heads_of_key_and_value(how: str) -> None:
    found = run_ranks(with_groups, 2, how, True)
    for at, expected in enumerate(whole(True, HEADS if how == "ulysses" else HEADS // 2, enable_gqa=True)):
        assert torch.allclose(torch.cat([each[at] for each in found], 2), expected, rtol=1e-5, atol=1e-6)


def refused(rank: int) -> list[str]:
    group = dist.group.WORLD
    q = torch.randn(1, 3, 4, 2)
    calls = [
        lambda: attention.ulysses(q, q, q, group),
        lambda: attention.ulysses(q[0], q, q, group),
        lambda: attention.gathered(q, q, q, group, attn_mask=torch.ones(4, 4)),
        lambda: attention.gathered(q, q, q, group, positions=torch.arange(3)),
        lambda: attention.gathered(q, q, q, 3),  # type: ignore[arg-type]
        lambda: attention.sequence_part(torch.ones(1, 5), group),
        lambda: attention.sequence_part(torch.ones(1, 6), group, balanced=True),
        lambda: attention.sequence_part(torch.ones(6), group),
        lambda: attention.sequence_positions(3, group, balanced=True),
    ]
    found = []
    for call in calls:
        with pytest.raises(GraphPPError) as caught:
            call()
        found.append(str(caught.value))
    return found


REFUSED = [
    "query: 2 ranks do not divide its 3 heads",
    "query: take a tensor [batch, heads, tokens, width], got a tensor [3, 4, 2] of torch.float32",
    "attn_mask: gathered makes the mask",
    "positions: take integers of shape [4]",
    "group: take a ProcessGroup of this rank, got 3",
    "tensor: its 5 tokens along dimension 1 do not make 2 equal pieces",
    "tensor: its 6 tokens along dimension 1 do not make 4 equal pieces",
    "dim: the tensor has 1 dimensions, got 1",
    "tokens: balanced parts are two pieces of equal size, got 3 tokens",
]


def test_what_cannot_be_is_refused_by_name() -> None:
    for found, expected in zip(run_ranks(refused, 2)[0], REFUSED, strict=True):
        assert expected in found


class Block(nn.Module):
    """Attention and a linear layer; `how` as in `parts`, or one process."""

    def __init__(self, group: dist.ProcessGroup | None, how: str) -> None:
        super().__init__()
        self.group, self.how = group, how
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 2)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        if self.group is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "ulysses":
            out = attention.ulysses(q, k, v, self.group, is_causal=True)
        else:
            out = attention.gathered(q, k, v, self.group, is_causal=True, positions=positions)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None = None, how: str = "ulysses") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block(group, how) for _ in range(4))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * replica + step)
    tokens = torch.randint(11, (8, 17), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def one_process(replicas: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    model, losses = Decoder(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        data = [batch(step, replica) for replica in range(replicas)]
        each = [loss(model(x, torch.arange(16)), y) for x, y in data]
        total = torch.stack(each).mean()
        total.backward()
        losses.append(total.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


def train(rank: int, shape: dict[str, int], schedule: str, how: str, backend: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    mesh = init_device_mesh(DEVICE.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    group = mesh.get_group("cp")
    balanced = how == "balanced"
    model = Decoder(group, how)
    replica = mesh.get_local_rank("dp_replicate") if "dp_replicate" in shape else 0
    positions = attention.sequence_positions(16 // shape["cp"], group, balanced=balanced)
    stages = shape["pp"] * (2 if schedule not in ("1F1B", "GPipe") else 1)
    pipe = graphpp.compile(
        model, loss, mesh=mesh, schedule=schedule, split=stages, microbatches=4, backend=backend
    )
    losses = []
    optimizer = None
    for step in range(3):
        x, y = (attention.sequence_part(each, group, balanced=balanced) for each in batch(step, replica))
        mean = pipe.step(x, graphpp.whole(positions), target=y).loss.clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / mesh.size())
        pipe.clip_grad_norm_(0.1)
        optimizer = optimizer or torch.optim.SGD(pipe.parameters(), lr=0.5, momentum=0.9)
        optimizer.step()
        optimizer.zero_grad()
    return losses, on_cpu(dict(pipe.state_dict()))


MESHES = {
    "pp2 cp2": {"pp": 2, "cp": 2},
    "cp2 pp2": {"cp": 2, "pp": 2},
    "dp2 pp1 cp2": {"dp_replicate": 2, "pp": 1, "cp": 2},
    "pp1 cp2": {"pp": 1, "cp": 2},
}


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("mesh", "schedule", "how", "backend"),
    [
        ("pp2 cp2", "ZBVZeroBubble", "balanced", "eager"),
        *further(
            ("pp1 cp2", "GPipe", "ulysses", "eager"),
            ("cp2 pp2", "Interleaved1F1B", "contiguous", "eager"),
            ("dp2 pp1 cp2", "GPipe", "ulysses", "eager"),
            ("pp1 cp2", "GPipe", "ulysses", "inductor"),
            ("pp2 cp2", "1F1B", "ulysses", "eager"),
            ("pp2 cp2", "DualPipeV", "ulysses", "eager"),
        ),
    ],
)
def test_a_mesh_with_context_trains_as_one_process(mesh: str, schedule: str, how: str, backend: str) -> None:
    shape = MESHES[mesh]
    ranks = torch.Size(shape.values()).numel()
    expected, state = one_process(shape.get("dp_replicate", 1))
    found = run_ranks(train, ranks, shape, schedule, how, backend)
    together = {key: value for _, own in found for key, value in own.items()}
    assert together.keys() == state.keys()
    for losses, own in found:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert all(torch.allclose(value, state[key], rtol=1e-4, atol=1e-6) for key, value in own.items())
