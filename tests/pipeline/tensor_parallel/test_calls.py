"""Calls of a pipeline whose layers tp spreads: refusals on all ranks, losses of sharded logits, layers of uneven sizes."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import graphpp
from graphpp.errors import GraphPPError
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.tensor_parallel import batch, compiled, decoder, example, loss, spread


def refused(rank: int, what: str) -> str:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    options: dict[str, Any] = {"mesh": mesh, "model": None}
    model = decoder(layers=2, dropout=0.1 if what == "dropout of tokens" else 0.0)
    spread(model, mesh["tp"], sequence=what == "dropout of tokens")
    if what == "dropout of heads":
        model.layers[1].attention.dropout = 0.1
    elif what == "no dimension":
        options["mesh"] = mesh["pp"]
    elif what == "another mesh":
        options["mesh"] = other
    elif what == "partial":
        weight = nn.Parameter(DTensor.from_local(torch.ones(8), mesh["tp"], [Partial()]))
        model.norm.weight = weight
    elif what == "unequal values":
        torch.nn.init.constant_(model.layers[1].norm.bias, float(rank))
    elif what == "an error on one rank" and rank:
        model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    options.pop("model")
    tokens, target = batch(rank if what == "unequal data" else 0)
    with pytest.raises(GraphPPError) as caught:
        compiled(options.pop("mesh"), model, **options).step(tokens, target=target)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("dropout of heads", ["CaptureError: aten.*dropout.* in layers.1.attention .*tensor_parallel.py:.*ranks of tp"] * 2),
        *further(("dropout of tokens", ["CaptureError: aten.native_dropout.* in layers.0.dropout .* the ranks of tp"] * 2)),
        ("no dimension", [r"CaptureError: embed.weight is a DTensor .* mesh= .* has no dimension tp or ep"] * 2),
        ("another mesh", ["CaptureError: embed.weight is a DTensor .* has no dimension tp or ep"] * 2),
        ("partial", [r"CaptureError: norm.weight is a DTensor with placements \(Partial\(sum\),\)"] * 2),
        ("unequal values", ["MismatchError: .*the values of layers.1.norm.bias, which every rank along tp has whole"] * 2),
        ("unequal data", ["MismatchError: .*args.0. of microbatch 0"] * 2),
        ("an error on one rank", ["MismatchError: .*rank 1 .*: .*ZeroDivisionError", "CaptureError: .*ZeroDivisionError"]),
    ],
)
def test_refusals_name_the_cause_on_all_ranks(what: str, messages: list[str]) -> None:
    for found, pattern in zip(run_ranks(refused, 2, what), messages, strict=True):
        assert re.search(pattern, found, re.DOTALL), found


def losses_of_sharded_logits(rank: int, how: str) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    model, reference = spread(decoder(layers=2), mesh["tp"], whole_logits=False), decoder(layers=2)
    tokens, target = batch(3)

    def squares(logits: Tensor, target: Tensor) -> Tensor:
        return (logits * logits).mean()

    chosen = loss if how == "loss_parallel" else squares
    with loss_parallel() if how == "loss_parallel" else contextlib.nullcontext():
        pipe = graphpp.compile(model, chosen, example=example(), mesh=mesh, microbatches=4)
        found = pipe.step(tokens, target=target).loss
    for x, y in zip(tokens.chunk(4), target.chunk(4), strict=True):
        (chosen(reference(x), y) / 4).backward()
    torch.testing.assert_close(found, chosen(reference(tokens), target).detach(), rtol=1e-6, atol=0)
    wanted = {fqn: parameter.grad for fqn, parameter in reference.named_parameters()}
    for fqn, parameter in pipe.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient, wanted[fqn], rtol=1e-5, atol=1e-6)
    output = pipe.eval(tokens).output
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output, reference.eval()(tokens).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["loss_parallel", *further("a DTensor")])
def test_losses_of_sharded_logits_are_those_of_one_process(how: str) -> None:
    run_ranks(losses_of_sharded_logits, 2, how)


class Unlike(nn.Module):
    """Sizes that two ranks do not divide, a frozen parameter, statistics, a checkpointed call, a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y = torch.utils.checkpoint.checkpoint(lambda z: torch.relu(self.again(z)), y, use_reentrant=False)
        with torch.no_grad():
            scale = y.abs().mean()
        return self.norm(self.last(y) * scale)


def unlike_sizes(rank: int) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(0)
    reference = Unlike()
    torch.manual_seed(0)
    model, whole = Unlike(), Replicate()
    plan = {"first": ColwiseParallel(output_layouts=whole), "last": RowwiseParallel(input_layouts=whole)}
    parallelize_module(model, mesh["tp"], plan)
    x, y = torch.randn(8, 6), torch.randn(8, 5)
    pipe = graphpp.compile(model, F.mse_loss, mesh=mesh, microbatches=2)
    for _ in range(2):  # gradients of two steps add up
        pipe.step(x, target=y)
        for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            (F.mse_loss(reference(part), wanted) / 2).backward()
    for fqn, parameter in pipe.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        expected = dict(reference.named_parameters())[fqn].grad
        assert (gradient is None) == (expected is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.norm.running_mean, reference.norm.running_mean)


def test_uneven_sizes_statistics_checkpoints_and_frozen_layers() -> None:
    run_ranks(unlike_sizes, 2)
