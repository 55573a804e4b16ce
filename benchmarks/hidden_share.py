"""The share of a backward's collectives that its program hides, of all that its weight gradients could hide, by estimates.

    torchrun --nproc-per-node 2 benchmarks/hidden_share.py [--width 256] [--layers 4] [--links 10 3 1 0.3 0.1]

graphpp orders the operations of a backward so that its collectives run beside weight gradients, within the memory of the order
of the capture (`graphpp/passes/overlap`). The planner prices these orders by one share, `_HIDDEN` of
`graphpp/cluster_planner/costs/price.py`. Here real programs are ordered: a decoder whose layers are spread over two ranks,
without and with sequence parallelism, and a mixture of experts with one expert on each rank; with and without recomputation.

    exchanged   seconds of the collectives over those of computation, by the costs: a roofline with a link of --links GB/s
    possible    the part of the collectives that an order could hide at most: the rest of the backward waits for them
    hidden      the part that the order of graphpp hides, over `possible`

No time is measured: both parts are estimates of the clock with which graphpp orders.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from harness import RANK, start
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import graphpp
from graphpp.passes.graph.joint_graph import reached
from graphpp.passes.graph.op_costs import OpCosts
from graphpp.passes.graph.stage_graphs import PhaseGraph
from graphpp.passes.overlap.list_schedule import list_schedule
from graphpp.passes.overlap.stream_timing import GraphTiming
from graphpp.runtime.program import Gradient, Phase

sys.path.append(str(Path(__file__).parents[1]))
from tests import tensor_parallel
from tests.internals import last_lowered
from tests.moe import MoE

RECOMPUTE = None, "selective", "full"
STEP = graphpp.Schedule.parse("r0 0F0 0B0 0F1 0B1")


def main() -> None:
    option = options()
    start()
    table = Table(title="a backward's collectives under its own operations", title_justify="left")
    for column in ("model", "recompute", "exchanged", "possible", "hidden"):
        table.add_column(column)
    for name, model, mesh, inputs, targets in models(option):
        for recompute in RECOMPUTE:
            graph = backward(model, inputs, targets, mesh, recompute)
            for gigabytes in option.links:
                cost = OpCosts(flops=5e10, memory=1e10, launch=1e-6, latency=2e-5, link=1e9 * gigabytes)
                exchanged, possible, hidden = shares(graph, cost)
                table.add_row(name, recompute or "none", f"{exchanged:.2f}", f"{possible:.2f}", f"{hidden:.2f}")
    if RANK == 0:
        Console(width=110).print(table)
    dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--links", type=float, nargs="+", default=[10.0, 3.0, 1.0, 0.3, 0.1], help="GB/s")
    return parser.parse_args()


Mesh = DeviceMesh | dist.ProcessGroup


def models(option: argparse.Namespace) -> Iterator[tuple[str, nn.Module, Mesh, Tensor, Tensor]]:
    """Names, models, pipelines of one stage, and the inputs and targets of two microbatches."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    words = torch.arange(4 * option.width).view(8, -1) % tensor_parallel.VOCAB  # equal on both ranks
    with patch.object(tensor_parallel, "WIDTH", option.width):
        for name, sequence in (("decoder", False), ("decoder, sequence parallel", True)):
            whole = tensor_parallel.decoder(layers=option.layers)
            yield name, tensor_parallel.spread(whole, mesh["tp"], sequence=sequence), mesh, words, words
    rows = torch.randn(4 * option.width, option.width)
    mixture = MoE(mesh["tp"].get_group(), option.width, option.layers, 4 * option.width)
    yield (
        "mixture of experts",
        mixture,
        [dist.new_group([rank]) for rank in range(2)][RANK],
        rows,
        rows[:, 0].gt(0).long(),
    )


def loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), target.flatten())


def backward(model: nn.Module, inputs: Tensor, targets: Tensor, mesh: Mesh, recompute: str | None) -> PhaseGraph:
    """The program of a whole backward, in the order of the capture."""
    example = graphpp.Microbatch((inputs[: len(inputs) // 2],), target=targets[: len(inputs) // 2])
    with patch("graphpp.compiler.overlap.reordered", lambda graph, cost: None):
        memory = graphpp.Memory(recompute=recompute)
        pipe = graphpp.compile(model, loss, example=example, schedule=STEP, memory=memory, mesh=mesh)
        pipe.step(inputs, target=targets)
    lowered = last_lowered(pipe)
    return lowered.sources.of(lowered.programs[0].stages[0].programs[Phase.BACKWARD])


def shares(source: PhaseGraph, cost: OpCosts) -> tuple[float, float, float]:
    """Collectives over computation; the part that could hide; the part that hides, over this one."""
    timing = GraphTiming(source.graph, cost)
    exchanged = sum(timing.cost[node] for node in timing.started)
    computed = sum(timing.cost.values()) - exchanged
    free = sum(timing.cost[node] for node in timing.nodes if node not in needed(source, timing.started))
    _, best, _ = list_schedule(source.graph, cost, keep_peak=True)
    possible = min(exchanged, free)
    return exchanged / computed, possible / exchanged, (exchanged + computed - best.seconds) / possible


def needed(source: PhaseGraph, started: Sequence[fx.Node]) -> set[fx.Node]:
    """The operations from which a collective, or a result that is no gradient of a parameter, follows."""
    results: Sequence[fx.Node] = source.graph.output_node().args[0]
    pairs = zip(results, source.outputs, strict=True)
    others = [node for node, role in pairs if not isinstance(role, Gradient)]
    return reached([*started, *others], lambda node: node.all_input_nodes)


if __name__ == "__main__":
    main()
