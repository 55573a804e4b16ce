"""A model on ranks of tensor parallelism, by a plan: exchanges and local work are those of the model that torch spreads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphpp.batch.microbatch import Microbatch, tensors_by_path, with_tensors
from graphpp.capture.trace import capture
from graphpp.cluster_planner.costs.facts import note_facts
from graphpp.cluster_planner.costs.model_costs import Degrees
from graphpp.cluster_planner.costs.tensor_plan import Plan, ShardedParameters
from graphpp.errors import GraphPPError
from graphpp.passes.graph.collectives import is_collective
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.op_costs import flops, nbytes
from graphpp.passes.lower import assigned
from tests import models, tensor_parallel
from tests.exhaustive import further
from tests.planner.plan_table import fake_ranks

Figures = tuple[Counter[tuple[str, float, bool]], float]
"""(exchanges: kind, bytes of the whole value, whether in the backward; FLOPs of one rank)."""


def _decoder() -> tuple[nn.Module, Any, Microbatch]:
    return tensor_parallel.decoder(), tensor_parallel.loss, tensor_parallel.example()


def _llama() -> tuple[nn.Module, Any, Microbatch]:
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    return models.hf_llama().model, models.logits_loss, Microbatch((), {"input_ids": tokens}, tokens)


DECODER_PLAN: Plan = {
    **{f"layers.*.{name}": "colwise" for name in ("query", "key", "value", "up")},
    **{f"layers.*.{name}": "rowwise" for name in ("out", "down")},
    "embed": "embedding_rowwise",
    "head": "colwise_gather_output",
}


def _spread_llama(model: Any, mesh: DeviceMesh) -> nn.Module:
    """The model as its own plan says, by torch's classes."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, {pattern: styles[style]() for pattern, style in model.tp_plan.items()})


CASES = {
    "decoder": (_decoder, lambda model: DECODER_PLAN, tensor_parallel.spread),
    "llama": (_llama, lambda model: model.tp_plan, _spread_llama),
}


def _noted(model: nn.Module, loss: Any, example: Microbatch, plan: Plan, **options: Any) -> JointGraph:
    joint = assigned(capture(model, loss, example, torch.device("cpu")).joint, (0,))
    shapes = {fqn: tuple(meta.shape) for fqn, meta in joint.parameters.items()}
    larger = assigned(capture(model, loss, _twice(example), torch.device("cpu")).joint, (0,))
    note_facts(joint, larger, ShardedParameters.of(shapes, plan, {}), **options)
    return joint


def _twice(example: Microbatch) -> Microbatch:
    return with_tensors(example, [torch.cat([each, each]) for each in tensors_by_path(example).values()])


def _figures(joint: JointGraph, ranks: int) -> Figures:
    degrees = Degrees(1, tp=ranks, sequence=False)
    exchanges = Counter(
        (kind, degrees.amount(size, whole=True), node.meta["backward"])
        for node in joint.computed()
        for kind, size, _ in node.meta.get("exchanges", ())
        if kind != "context"
    )
    return exchanges, sum(degrees.amount((node.meta["work"],)) for node in joint.computed() if "work" in node.meta)


def _spread_figures(build: Callable[[], Any], spread: Callable[[Any, DeviceMesh], nn.Module], ranks: int) -> Figures:
    """The figures of the graph that a rank captures of a model with DTensor parameters."""
    with fake_ranks(ranks):
        model, loss, example = build()
        spread(model, init_device_mesh("cpu", (ranks,)))
        joint = capture(model, loss, example, torch.device("cpu")).joint
    names = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather"}
    found = [node for node in joint.computed() if is_collective(node)]
    kinds = [names[node.target._schema.name.split("::")[1]] for node in found]
    exchanges = Counter((kind, float(nbytes(node)), node.meta["backward"]) for kind, node in zip(kinds, found, strict=True))
    return exchanges, sum(map(flops, joint.computed()))


@pytest.mark.parametrize("name", ["decoder", *further("llama")])
def test_exchanges_and_work_are_those_of_parallelize_module(name: str) -> None:
    build, plan, spread = CASES[name]
    model, loss, example = build()
    planned = _figures(_noted(model, loss, example, plan(model), merged=False), 2)
    assert planned == _spread_figures(build, spread, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers.*.up": "sideways"}, "the style of 'layers.\\*.up' is 'sideways'"),
        ({"layer": "colwise"}, "'layer' fits no parameter"),
    ],
)
def test_refused_plans(plan: Plan, message: str) -> None:
    with pytest.raises(GraphPPError, match=message):
        ShardedParameters.of({"layers.0.up.weight": (8, 4)}, plan, {})


def test_the_longest_pattern_counts_and_a_bias_goes_with_the_output_features() -> None:
    each = {"up.weight": (8, 4), "up.bias": (8,), "down.weight": (4, 8), "down.bias": (4,)}
    shapes = {f"layers.0.{name}": shape for name, shape in each.items()}
    found = ShardedParameters.of(shapes, {"layers.*": "replicate", "up": "replicate", "layers.*.down": "rowwise"}, {})
    assert found.dims == {"layers.0.down.weight": 1}
    found = ShardedParameters.of(shapes, {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, {})
    assert found.dims == {"layers.0.up.weight": 0, "layers.0.up.bias": 0, "layers.0.down.weight": 1}
