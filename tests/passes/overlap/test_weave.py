"""Woven programs: the collectives of one part run while another part computes, and nothing else changes.

The collective of these tests is an operator defined here that negates, so that programs run in one process. Its time on the
simulated clock is the cost that a test gives it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphpp.passes.graph.collectives import group_of, is_collective, is_wait
from graphpp.passes.graph.op_costs import OpCosts
from graphpp.passes.graph.region import RegionCall
from graphpp.passes.graph.stage_graphs import PhaseGraph
from graphpp.passes.overlap.list_schedule import ListScheduler, SchedulingUnits
from graphpp.passes.overlap.stream_timing import GraphTiming, estimate_order
from graphpp.passes.overlap.weave import WovenGraph, collective_order, concatenate, emit_woven, reordered, weave
from graphpp.passes.stage.outline_regions import cost_with_regions, outline_regions
from graphpp.passes.text.render import render
from graphpp.runtime import program as p
from graphpp.runtime.program import Phase, Program
from tests.exhaustive import further

F, B = Phase.FORWARD, Phase.BACKWARD


@torch.library.custom_op("graphpp_tests::exchange", mutates_args=())
def exchange(x: Tensor, group_name: str) -> Tensor:
    """An operator that the passes take for a collective."""
    return -x


@exchange.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(x)


start = torch.ops.graphpp_tests.exchange.default
wait = torch.ops._c10d_functional.wait_tensor.default


def all_to_all(x: Tensor, group: str = "ep") -> Tensor:
    result: Tensor = wait(start(x, group))
    return result


def slot(stage: int, phase: Phase, function: Callable[..., Any], *inputs: Tensor, gradients: int = 0) -> PhaseGraph:
    """A function's operators as one phase of a stage; its last `gradients` results are gradients, the others are sent."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    roles = tuple(p.Received(f"x{index}") for index in range(len(inputs)))
    for role, node in zip(roles, module.graph.find_nodes(op="placeholder"), strict=True):
        node.meta |= {"role": role}
    for node in module.graph.nodes:
        node.meta |= {"backward": phase is B, "stage": stage, "calls": (), "source": "", "seq": -1, "position": 0}
    end = module.graph.output_node()
    count = len(end.args[0])
    sent = [p.Sent(f"y{index}") for index in range(count - gradients)]
    outputs = (*sent, *(p.Gradient(f"w{index}") for index in range(gradients)))
    end.meta["roles"] = list(outputs)
    return PhaseGraph(stage, phase, module.graph, roles, outputs)


def ticks(node: fx.Node) -> float:
    """Cost: a collective takes 3, a contraction 1, any other operation 0."""
    if is_collective(node):
        return 3.0
    return float(node.target is torch.ops.aten.mm.default)


def program(each: PhaseGraph) -> Program:
    return Program(each.stage, each.phase, each.inputs, each.outputs, render(each.graph).load("<part>"))


def values(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 4, generator=generator) for _ in range(count)]


def layers(count: int) -> Callable[..., list[Tensor]]:
    """Layers of two contractions with a collective between the two."""

    def run(x: Tensor, w: Tensor) -> list[Tensor]:
        for _ in range(count):
            x = all_to_all(x @ w) @ w
        return [x]

    return run


def backward(count: int) -> Callable[..., list[Tensor]]:
    """Such layers with a weight gradient in each, which no other operation waits for."""

    def run(g: Tensor, w: Tensor) -> list[Tensor]:
        grads = []
        for _ in range(count):
            h = g @ w
            grads.append(g.t() @ h)
            g = all_to_all(h) @ w
        return [g, *grads]

    return run


def pair(count: int = 3) -> list[PhaseGraph]:
    """A forward of stage 0 and a backward of stage 3."""
    f = slot(0, F, layers(count), *values(2))
    return [f, slot(3, B, backward(count), *values(2, 1), gradients=count)]


def results(parts: Sequence[PhaseGraph], inputs: Sequence[Sequence[Tensor]], cost: Callable[[fx.Node], float]) -> list[Tensor]:
    woven = emit_woven(weave(parts, cost), [program(part) for part in parts])
    boxed = [tensor for each in inputs for tensor in each]
    found = list(woven.run(boxed))
    assert boxed == []
    return found


def apart(parts: Sequence[PhaseGraph], inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [value for part, each in zip(parts, inputs, strict=True) for value in program(part).run(list(each))]


def names(graph: fx.Graph, *wanted: Callable[[fx.Node], bool]) -> list[str]:
    return [node.name for node in graph.nodes if any(test(node) for test in wanted)]


def test_all_collectives_hide_where_there_is_enough_to_compute() -> None:
    woven = weave(pair(), ticks)
    assert woven.sequence.seconds == 15 + 6 * 3
    assert woven.woven.seconds == 20  # 15 of computation; the longest chain of operations takes 20


def under_way(graph: fx.Graph) -> dict[str, set[str]]:
    """For each collective the parts that compute between its start and its wait."""
    pending: dict[fx.Node, str] = {}
    found: dict[str, set[str]] = {}
    for node in graph.nodes:
        if is_collective(node):
            pending[node], found[node.name] = node.name, set()
        elif is_wait(node):
            del pending[node.all_input_nodes[0]]
        elif node.target is torch.ops.aten.mm.default:
            for name in pending.values():
                found[name].add(node.meta["part"].prefix)
    return found


def test_a_collective_of_one_part_is_under_way_while_the_other_computes() -> None:
    graph = weave(pair(), ticks).graph
    for name, parts in under_way(graph).items():
        assert parts - {name[:2]}, f"{name} is under way while nothing of the other part computes"
    assert all(not parts for parts in under_way(concatenate(pair())).values())


def test_two_microbatches_of_one_stage_keep_their_own_values() -> None:
    parts, inputs = [slot(0, F, layers(2), *values(2))] * 2, [values(2, 7), values(2, 8)]
    for mine, theirs in zip(results(parts, inputs, ticks), apart(parts, inputs), strict=True):
        assert torch.equal(mine, theirs)


def test_without_collectives_the_parts_stand_one_after_the_other() -> None:
    parts = [slot(0, F, lambda x, w: [x @ w @ w], *values(2)), slot(1, B, lambda x, w: [w @ x], *values(2))]
    woven = weave(parts, ticks)
    assert [node.name for node in woven.graph.nodes] == [node.name for node in concatenate(parts).nodes]
    assert woven.woven == woven.sequence


def test_weaving_does_not_hold_memory_that_it_need_not() -> None:
    """With enough computation, not all weight gradients need be deferred; longest-chain-first order would defer all."""

    def quick(node: fx.Node) -> float:
        return 1.0 if is_collective(node) else ticks(node)

    parts = pair(8)
    woven = weave(parts, quick)
    assert woven.woven.seconds == 40  # all of it computation
    timing = GraphTiming(concatenate(parts), quick)
    greedy = estimate_order(timing, ListScheduler(SchedulingUnits(timing), timing.tail.__getitem__, float("inf")).order())
    assert woven.woven.seconds <= 1.01 * greedy.seconds
    assert woven.woven.peak < 0.75 * greedy.peak


@pytest.mark.parametrize("costs", [ticks, OpCosts.of("cpu"), OpCosts.of("cuda"), lambda node: 0.0, lambda node: 1.0])
def test_results_are_bit_equal_whatever_the_costs(costs: Callable[[fx.Node], float]) -> None:
    parts, inputs = pair(), [values(2, 7), values(2, 8)]
    for mine, theirs in zip(results(parts, inputs, costs), apart(parts, inputs), strict=True):
        assert torch.equal(mine, theirs)


def random_function(generator: random.Random) -> tuple[Callable[..., list[Tensor]], int, int]:
    """A function of random operators, among them collectives and views; and the numbers of its inputs and results."""
    steps = [(generator.choice("mmaevtnc"), generator.random(), generator.random()) for _ in range(generator.randrange(1, 30))]
    count, kept = generator.randrange(1, 4), generator.randrange(1, 6)

    def run(*inputs: Tensor) -> list[Tensor]:
        found = list(inputs)
        for kind, left, right in steps:
            a, b = found[int(left * len(found))], found[int(right * len(found))]
            match kind:
                case "m":
                    found.append(a @ b)
                case "a":
                    found.append(a + b)
                case "e":
                    found.append(all_to_all(a.contiguous(), "one" if left < right else "two"))
                case "v":
                    found.append(a.reshape(2, 8).reshape(4, 4))
                case "t":
                    found.append(a.t())
                case "n":
                    found.extend(torch.native_layer_norm(a, [4], None, None, 1e-5)[:1])
                case _:
                    found += [wait(each) for each in (start(a.clone(), "one"), start(b.clone(), "one"))]
        return found[-kept:]

    return run, count, min(kept, 1 + len(steps))


@pytest.mark.parametrize("seed", [*range(24), *further(*range(24, 60))])
def test_random_parts(seed: int) -> None:
    generator = random.Random(seed)
    parts, inputs = [], []
    for stage in range(generator.randrange(1, 4)):
        function, count, _ = random_function(generator)
        inputs.append(values(count, seed + stage))
        kept = len(function(*inputs[-1]))
        phase = generator.choice([F, B, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD])
        parts.append(slot(generator.randrange(2), phase, function, *inputs[-1], gradients=generator.randrange(kept + 1)))
    drawn: dict[str, float] = {}

    def cost(node: fx.Node) -> float:
        return drawn.setdefault(node.name, 0.0 if is_wait(node) else generator.choice([0.0, 0.5, 1.0, 4.0]))

    for mine, theirs in zip(results(parts, inputs, cost), apart(parts, inputs), strict=True):
        assert torch.equal(mine, theirs)
    for part, each in zip(parts, inputs, strict=True):
        check_alone(part, each, reordered(part, cost), cost)
    woven = weave(parts, cost)
    assert woven.woven.seconds <= woven.sequence.seconds * 1.01 + 1e-9
    again = weave(parts, cost)
    assert [node.name for node in woven.graph.nodes] == [node.name for node in again.graph.nodes]


def check_alone(part: PhaseGraph, inputs: Sequence[Tensor], found: WovenGraph | None, cost: Callable[[fx.Node], float]) -> None:
    """A program in another order is faster, computes the same, and takes no more memory."""
    if found is None:
        return
    given, now = (GraphTiming(each, cost) for each in (part.graph, found.graph))
    before, after = estimate_order(given, given.nodes), estimate_order(now, now.nodes)
    assert after.seconds < before.seconds
    assert after.peak <= before.peak
    assert names(found.graph, is_collective) == names(part.graph, is_collective)
    for mine, theirs in zip(apart(found.parts, [inputs]), apart([part], [inputs]), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("outlined", [False, True])
def test_a_program_alone_hides_its_exchanges_under_its_weight_gradients(outlined: bool) -> None:
    run = backward(3)  # after an operation that takes more memory than the rest
    source = slot(3, B, lambda g, w: run(torch.stack([g] * 4).sum(0), w), *values(2, 1), gradients=3)
    if outlined:
        made = outline_regions(source, lambda node: None)
        for call in made.calls:
            call.run = render(call.region.graph, call.region.title).load("<region>")
        source = made.phase_graph
    cost = cost_with_regions(ticks)
    found = reordered(source, cost)
    assert found is not None
    assert (found.sequence.seconds, found.woven.seconds) == (18, 15)
    check_alone(source, values(2, 7), found, cost)


def test_a_region_takes_the_memory_of_its_operations() -> None:
    source = slot(0, F, lambda x: [(x.repeat(10, 1) @ x).sum(0) @ x], *values(1))
    timing = GraphTiming(outline_regions(source, lambda node: None).phase_graph.graph, cost_with_regions(ticks))
    assert [timing.made(node) for node in timing.nodes if isinstance(node.target, RegionCall)] == [2 * 40 * 4 * 4]


def test_a_program_that_cannot_hide_its_exchanges_keeps_its_order() -> None:
    assert reordered(slot(0, F, layers(3), *values(2)), ticks) is None


def test_a_value_that_a_later_program_reads_takes_memory_until_the_end() -> None:
    """An input gradient leaves saved values to the weight gradient: room that they take is not used to run ahead."""

    def run(x: Tensor, w: Tensor, saved: Tensor) -> list[Tensor]:
        sent = all_to_all(((x @ w) * saved.sum(0)).relu())
        large = (sent.repeat(60, 1) @ w).view(60, 4, 4).sum(0) * sent
        return [(all_to_all(large) @ w).relu(), ((x @ w) @ w).repeat(20, 1) @ w]

    inputs = [*values(2), torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))]
    source = slot(0, Phase.INPUT_GRAD, run, *inputs)
    saved = list(source.graph.find_nodes(op="placeholder"))[2]
    saved.meta |= {"role": p.Saved("saved"), "kept": True}
    found = reordered(source, ticks)
    assert found is not None, "an order that also keeps the peak is found"
    check_alone(source, inputs, found, ticks)


def test_collectives_of_a_part_keep_their_order_even_where_another_would_be_faster() -> None:
    def late_first(x: Tensor, y: Tensor) -> list[Tensor]:
        return [all_to_all(x @ x @ x @ x, "a"), all_to_all(y, "b") @ y]

    woven = weave([slot(0, F, late_first, *values(2)), pair(1)[1]], ticks)
    assert names(woven.graph, lambda node: is_collective(node) and group_of(node) in "ab") == ["f0_exchange", "f0_exchange_1"]
    assert {name: len(lines) for name, lines in collective_order(woven.graph).items()} == {"a": 1, "b": 1, "ep": 1}


def test_the_text_says_which_part_a_line_belongs_to() -> None:
    woven = weave(pair(1), ticks)
    assert woven.title == "stage 0 forward with stage 3 backward"
    lines = render(woven.graph, woven.title).text.splitlines()
    made = [line for line in lines if line.startswith("    ") and " = " in line and "take(" not in line and "boxed" not in line]
    assert len(made) == sum(node.op == "call_function" for node in woven.graph.nodes)
    for line in made:
        prefix = line.strip()[:2]
        assert {"f0": "stage 0 forward", "b3": "stage 3 backward"}[prefix] in line.partition("  # ")[2]
    assert "_group_0 = 'ep'" in lines


def test_the_peak_counts_memory_once_and_until_its_last_reader() -> None:
    def function(x: Tensor) -> list[Tensor]:
        a = x @ x
        b = a.t() @ a
        return [b @ b]

    timing = GraphTiming(slot(0, F, function, *values(1)).graph, ticks)
    tensor = 4 * 4 * 4
    assert estimate_order(timing, timing.nodes).peak == 2 * tensor
