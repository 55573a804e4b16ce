"""Regions of a program: their operations, their keys, the operations outside; dropout's masks stay outside of regions."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpp.batch.microbatch import Microbatch
from graphpp.capture.trace import capture
from graphpp.passes.graph.region import RegionCall
from graphpp.passes.graph.stage_graphs import PhaseGraph, StagedGraphs
from graphpp.passes.lower import LoweringOptions, PassResult, lower
from graphpp.passes.stage.outline_regions import LayerOf, outline_regions
from graphpp.passes.stage.split_dropout import split_dropout
from graphpp.passes.text.render import render
from graphpp.planner.layers import layers_of, module_calls
from graphpp.runtime.program import Phase, RandomKey
from graphpp.runtime.random_keys import dropout_mask, seeded


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8, dropout) for _ in range(layers))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def slots(model: nn.Module, stages: int = 1, **choices: Any) -> tuple[list[PhaseGraph], LayerOf]:
    """The programs' graphs of a model cut into equal stages, and the layer of each operation."""
    batch = Microbatch((torch.randn(4, 8),), target=torch.randn(4, 3))
    joint = capture(model, loss, batch, torch.device("cpu")).joint
    calls = module_calls(joint)
    ends = [call.position for call in calls if call.fqn.startswith("layers.") and call.fqn.count(".") == 1]
    staged: list[StagedGraphs] = []

    def watch(passed: PassResult) -> None:
        if isinstance(passed.result, StagedGraphs):
            staged.append(passed.result)

    begins = [ends[len(ends) * stage // stages] if stage else 0 for stage in range(stages)]
    lower(joint, begins, watch, LoweringOptions(**choices))
    return list(staged[-1].graphs.values()), layers_of(calls)


def interpreted(call: RegionCall) -> Callable[[list[Any]], Any]:
    return render(call.region.graph, call.region.title).load("<region>")


def values(slot: PhaseGraph) -> list[Any]:
    """Random arguments for a program, by its inputs' shapes."""
    torch.manual_seed(3)
    made: list[Any] = []
    for node in slot.graph.find_nodes(op="placeholder"):
        like = node.meta["val"]
        made.append(7 if node.meta["role"] == RandomKey() else torch.empty_strided(like.shape, like.stride()).normal_())
    return made


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(
    ("choices", "dropout"),
    [
        ({}, 0.0),
        ({"split_backward": True}, 0.3),
        ({"fuse_grad_accumulation": True}, 0.0),
        ({}, 0.3),
        ({"split_backward": True}, 0.0),
        ({"fuse_grad_accumulation": True}, 0.3),
    ],
)
def test_a_program_computes_the_same_with_its_regions_taken_out(choices: dict[str, Any], dropout: float) -> None:
    found, layer = slots(Net(4, dropout), 2, **choices)
    for slot in found:
        made = outline_regions(split_dropout(slot), layer)
        for call in made.calls:
            call.run = interpreted(call)
        before = render(slot.graph).load("<before>")(values(slot))
        after = render(made.phase_graph.graph).load("<after>")(values(made.phase_graph))
        assert made.calls or slot.phase is Phase.INPUT_GRAD  # the first stage sends no gradient
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_equal_layers_are_one_region() -> None:
    few, many = (slots(Net(layers)) for layers in (4, 12))
    keys = [{call.region.key for slot in found for call in outline_regions(slot, layer).calls} for found, layer in (few, many)]
    assert keys[0] == keys[1]
    counts = [len([call for slot in found for call in outline_regions(slot, layer).calls]) for found, layer in (few, many)]
    assert counts[1] - counts[0] == 2 * 8  # one more forward and backward region for each of 8 layers


def test_inputs_of_a_region_die_inside_it() -> None:
    """When a region frees its inputs, nothing else holds an input without a later reader."""
    ((_, backward), layer) = slots(Net(2))
    made = outline_regions(backward, layer)
    died: list[bool] = []

    def watching(call: RegionCall) -> Callable[[list[Any]], Any]:
        inner = interpreted(call)

        def run(boxed: list[Any]) -> Any:
            results = inner(list(boxed))
            given = [weakref.ref(value) for value in boxed]
            boxed.clear()
            died.extend(value() is None for value in given)
            return results

        return run

    for call in made.calls:
        call.run = watching(call)
    given = values(made.phase_graph)
    render(made.phase_graph.graph).load("<region>")(given)
    assert given == []
    inputs = len(made.phase_graph.graph.find_nodes(op="placeholder"))
    assert sum(died) == inputs + len(made.calls) - 1  # inputs, and the values that regions hand on


def test_random_operators_stay_outside_and_masks_need_nothing() -> None:
    found, layer = slots(Net(2, 0.5))
    slot = next(slot for slot in found if slot.phase is Phase.FORWARD)
    assert any(node.target is seeded for node in slot.graph.nodes)
    made = outline_regions(split_dropout(slot), layer)
    masks = [node for node in made.phase_graph.graph.nodes if node.target is dropout_mask]
    assert len(masks) == 2
    assert all(source.op == "placeholder" for mask in masks for source in mask.all_input_nodes)
    assert len(made.calls) == 3  # the layers are whole: random masks are inputs


@pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_mask_is_what_dropout_draws(probability: float, transposed: bool) -> None:
    x = torch.randn(6, 5).t() if transposed else torch.randn(5, 6)
    dropped, mask = seeded(11, 4, torch.ops.aten.native_dropout.default, x, probability, True)
    like = {"size": list(x.shape), "stride": list(x.stride()), "dtype": x.dtype, "device": x.device}
    drawn = dropout_mask(11, 4, like, probability)
    scale = 1.0 / (1.0 - probability) if probability < 1 else 0.0
    assert torch.equal(drawn, mask)
    assert torch.equal(x * drawn * scale, dropped)


class Average(nn.Module):
    """Multiplies by a buffer and then writes it; uses an operator with several results."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(8, 3), nn.LayerNorm(8)
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.line(self.norm(x.sin() * 2)) * self.mean.clone()
        self.mean.mul_(0.5).add_(made.detach().mean(0))
        return made


def test_the_copy_of_a_buffer_that_is_overwritten_is_not_left_to_a_compiler() -> None:
    (forward, *_), layer = slots(Average())
    copies = [node for node in forward.graph.nodes if node.target is torch.ops.aten.clone.default]
    assert copies
    nodes = outline_regions(forward, layer).phase_graph.graph.nodes
    outside = [node for node in nodes if node.target is torch.ops.aten.clone.default]
    assert len(outside) == len(copies)
