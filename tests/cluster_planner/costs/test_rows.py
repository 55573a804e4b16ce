"""The bytes and FLOPs for more rows, from graphs for two numbers of rows, are those of a graph for so many rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from graphpp.batch.microbatch import Microbatch
from graphpp.capture.trace import capture
from graphpp.cluster_planner.costs import capture_costs
from graphpp.cluster_planner.costs.dims import unchanged
from graphpp.cluster_planner.costs.facts import note_facts
from graphpp.cluster_planner.costs.model_costs import Degrees
from graphpp.cluster_planner.costs.operations import size_of
from graphpp.cluster_planner.costs.tensor_plan import ShardedParameters
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.op_costs import flops
from graphpp.passes.lower import assigned
from tests import models, tensor_parallel
from tests.exhaustive import further


def _tokens(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 16, dtype=torch.int64), torch.zeros(rows, 16, dtype=torch.int64)


def _text(model: nn.Module, rows: int) -> tuple[nn.Module, Any, Microbatch]:
    tokens, target = _tokens(rows)
    return model, models.logits_loss, Microbatch((), {"input_ids": tokens}, target)


def _llama(rows: int) -> Any:
    return _text(models.hf_llama().model, rows)


def _gpt2(rows: int) -> Any:
    config = transformers.GPT2Config(vocab_size=24, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    return _text(transformers.GPT2LMHeadModel(config).train(), rows)


def _mixtral(rows: int) -> Any:
    config = transformers.MixtralConfig(
        vocab_size=24, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, use_cache=False, max_position_embeddings=32,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    model = transformers.MixtralForCausalLM(config).train()
    return _text(model.to(torch.bfloat16), rows)


class Convolutions(nn.Module):
    """Images to classes: convolutions, batch norm, group norm, pooling, and a mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.group = nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.GroupNorm(4, 16)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(images)))
        x = F.dropout(self.pool(F.silu(self.group(self.second(x)))), 0.1, self.training)
        return self.head(x.mean((2, 3)))


def _convolutions(rows: int) -> Any:
    batch = Microbatch((torch.zeros(rows, 3, 16, 16),), {}, torch.zeros(rows, dtype=torch.int64))
    return Convolutions().train(), F.cross_entropy, batch


class Mixed(nn.Module):
    """Operations whose sizes are plain numbers in a graph: zeros, expansions, parts, pads, stacks, einsum, a mask, cumsum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.state = nn.Embedding(24, 16), nn.Parameter(torch.zeros(1, 4, 16))
        self.mix, self.out = nn.Linear(32, 16), nn.Linear(16, 24)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        rows, length, width = x.shape
        prefix = torch.cat([self.state.expand(rows, -1, -1), x], 1)
        before = torch.zeros(rows, 1, width, dtype=x.dtype)
        shifted = torch.cat([before, prefix[:, :-1]], 1)
        x = self.mix(torch.cat([prefix, shifted], -1))
        first, second = x.chunk(2, dim=-1)
        x = torch.stack([first.tanh(), second.sigmoid()], -1).flatten(2)
        scores = torch.einsum("bid,bjd->bij", x, x) / width**0.5
        mask = torch.ones(rows, 1, 1).expand(rows, length + 4, length + 4).tril()
        x = torch.softmax(scores.masked_fill(mask == 0, -1e9), -1) @ x
        x = self.norm(F.pad(x, (0, 0, 1, 0))[:, 1:].cumsum(1))
        picked = x[torch.arange(rows)[:, None], torch.arange(4, length + 4)]
        return self.out(picked.index_select(1, torch.arange(length)))


def _mixed(rows: int) -> Any:
    tokens, target = _tokens(rows)
    return Mixed(), tensor_parallel.loss, Microbatch((tokens,), {}, target)


MODELS = {"llama": _llama, "gpt2": _gpt2, "mixtral": _mixtral, "convolutions": _convolutions, "mixed": _mixed}


def _graph(name: str, rows: int) -> JointGraph:
    torch.manual_seed(0)
    model, loss, example = MODELS[name](rows)
    return assigned(capture(model, loss, example, torch.device("cpu")).joint, (0,))


def _figures(joint: JointGraph, factor: float) -> list[tuple[str, float, float]]:
    """(operator, bytes, FLOPs) of each value, with so many times the rows."""
    amount = Degrees(factor, sequence=False).amount
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    return [(str(node.target), amount(size_of(node)), amount((node.meta.get("work", (0, 0, 0, 0.0)),))) for node in nodes]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", ["convolutions", "mixed", *further("mixtral", "llama", "gpt2")])
def test_figures_of_more_rows_are_those_of_a_capture(name: str) -> None:
    joint, larger, third = (_graph(name, rows) for rows in (2, 4, 6))
    note_facts(joint, larger, ShardedParameters())
    for node in third.graph.nodes:
        if node.op != "output":
            work = (0, 0, 0, flops(node))
            node.meta |= {"rows": unchanged(node.meta["val"]), "sharded": unchanged(node.meta["val"]), "work": work}
    assert _figures(joint, 3) == _figures(third, 1)


class RowByRow(nn.Module):
    """A linear layer in a loop over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.linear(row) for row in x])


def test_a_loop_over_the_rows_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"with twice as many rows, the model runs other .* compute all rows at once"):
        capture_costs(RowByRow(), F.mse_loss, Microbatch((torch.zeros(2, 8),), {}, torch.zeros(2, 8)), param_dtype=None)
