"""Programs gather their parameters layer by layer: two layers are whole at most, and no whole parameter leaves a program."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import graphpp
from graphpp.passes.graph.aliases import root
from graphpp.passes.graph.stage_graphs import B, PhaseGraph, StagedGraphs
from graphpp.passes.graph.stage_graphs import F as FORWARD
from graphpp.passes.joint.gradient_sums import split_tied_gradients
from graphpp.passes.stage.cut_stages import cut_stages
from graphpp.passes.stage.gather_layers import ShardedLayers, follows_parameters, gather_layers, in_order, is_gather
from graphpp.passes.stage.hoist_per_step import find_step_invariants, hoist_per_step
from graphpp.passes.stage.split_weight_grad import split_weight_grad
from graphpp.passes.text.render import render
from graphpp.planner.layers import layer_or_call, module_calls
from graphpp.runtime import program as p
from tests.passes.graphs import assigned, captured, starts

D, RANKS, LAYERS = 6, 4, 4  # four ranks have 2, 2, 2 and 0 rows of six


class Net(nn.Module):
    """Layers under autocast, a table made of a buffer, an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, D)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.linspace(0, 1, D))
        self.head = nn.Linear(D, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.table.cos()
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = x + F.gelu(layer(x))
            return self.head(x).float()


def gathered(*calls: str, dtype: torch.dtype = torch.float32) -> StagedGraphs:
    """The phase graphs of all phases; `dtype`: of the rows."""
    net = Net()
    joint = captured(net, torch.arange(8))
    joint = find_step_invariants(split_tied_gradients(assigned(joint, *starts(joint, *calls))))
    staged = hoist_per_step(joint, cut_stages(joint, 1 + len(calls)), follows_parameters(joint))
    staged = split_weight_grad(joint, staged, lambda node: bool(node.meta.get("step_invariant")))
    names = {fqn: dtype for fqn, _ in net.named_parameters(remove_duplicate=False)}
    layer_of = layer_or_call(module_calls(joint))
    return gather_layers(staged, ShardedLayers("ranks", RANKS, names, lambda own: own, layer_of))


def layers_gathered(source: PhaseGraph) -> list[list[str]]:
    return [node.meta["fqns"] for node in source.graph.nodes if "fqns" in node.meta]


def whole_at_once(graph: fx.Graph) -> int:
    """The most gathers of which a value is alive at once, as the program's text frees them."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for memory in map(root, (node, *node.all_input_nodes)):
            if is_gather(memory) and "fqns" not in memory.meta:
                last[memory] = node
    ends: dict[fx.Node, set[fx.Node]] = {}
    for memory, node in last.items():
        ends.setdefault(node, set()).add(memory)
    alive, most = set[fx.Node](), 0
    for node in graph.nodes:
        alive |= {memory for memory in last if "fqns" in node.meta and memory.args[0] is node}
        most = max(most, len({memory.args[0] for memory in alive}))
        alive -= ends.get(node, set())
    return most


def test_each_layer_is_gathered_once_in_each_program() -> None:
    staged = gathered("layers.2")
    per_layer = [[f"layers.{n}.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")] for n in range(LAYERS)]
    assert layers_gathered(staged.graphs[FORWARD, 0]) == [["embed.weight"], *per_layer[:2]]
    assert layers_gathered(staged.graphs[FORWARD, 1]) == [*per_layer[2:], ["embed.weight"]]
    backward = [fqns[0].split(".")[1] for fqns in layers_gathered(staged.graphs[B, 1])]
    assert backward == ["weight", "3", "2"]
    for source in staged.graphs.values():
        assert not any(type(role) is p.Parameter and role.fqn != "scale" for role in source.inputs)
        assert whole_at_once(source.graph) <= 2


def test_no_value_of_parameters_alone_leaves_a_program() -> None:
    staged = gathered("layers.2")
    for source in staged.graphs.values():
        results: Sequence[fx.Node] = source.graph.output_node().args[0]  # type: ignore[assignment]
        for role, node in zip(source.outputs, results, strict=True):
            assert not (isinstance(role, p.Saved | p.Sent) and node.meta.get("step_invariant")), role
    assert [role for role in staged.graphs[FORWARD, 0].inputs if isinstance(role, p.StepInvariant)]  # of the buffer
    assert not layers_gathered(staged.graphs[p.Phase.WEIGHT_GRAD, 1])


def test_the_traffic_of_a_program() -> None:
    forward, backward = (gathered("layers.2").graphs[phase, 0] for phase in (FORWARD, B))
    layer, row = (2 * D + 2 + 2 + 2) * 4, 3 * D * 4  # two of six rows; three of the embedding's nine
    assert forward.layers is not None and backward.layers is not None
    assert forward.layers.gathers == (row, layer, layer)
    assert forward.layers.whole == RANKS * 2 * layer
    assert ("layers.1.0.weight", "layers.1.0.bias", "layers.1.1.weight", "layers.1.1.bias") in backward.layers.gradients
    assert sum(backward.layers.sums) == (9 * D + 1 + 2 * (D * D + 3 * D)) * 4
    assert sum(backward.layers.reductions) == sum(backward.layers.sums) + (RANKS - 1) * 4  # the 0-dim one goes to all
    ordered = in_order(backward.graph, backward.layers)
    assert ordered is not None
    assert ordered.order[-1].startswith("reduce") and len(ordered.order) == 2 + len(backward.layers.gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_another_dtype_are_cast_before_they_are_sent(dtype: torch.dtype) -> None:
    text = render(gathered("layers.2", dtype=dtype).graphs[FORWARD, 0].graph).text.partition("def run")[2]
    assert text.index("_to_copy") < text.index("all_gather")
    assert "parameter rows layers.0.0.weight" in text


def test_a_whole_parameter_that_would_stay_is_refused() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D, D))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()) @ self.weight

    joint = captured(Turns(), torch.randn(2, D))
    staged = cut_stages(assigned(joint), 1)
    forward = staged.graphs[FORWARD, 0]
    view = next(node for node in forward.graph.nodes if node.op == "call_function" and root(node).op == "placeholder")
    end = forward.graph.output_node()
    end.args = ((*end.args[0], view),)  # type: ignore[misc]
    end.meta["roles"] = [*end.meta["roles"], p.Saved("turned")]
    staged.graphs[FORWARD, 0] = PhaseGraph(0, FORWARD, forward.graph, forward.inputs, (*forward.outputs, p.Saved("turned")))
    with pytest.raises(graphpp.CaptureError, match=r"keep=0: stage 0 would keep a whole parameter for its backward.*keep=1"):
        gather_layers(staged, ShardedLayers("ranks", RANKS, {"weight": torch.float32}, lambda own: own, lambda node: None))
