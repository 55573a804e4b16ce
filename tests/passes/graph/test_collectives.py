"""The passes neither duplicate, drop nor reorder collectives, and each wait stays in the stage of its collective."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from graphpp.passes.graph.aliases import root, shared_results
from graphpp.passes.graph.collectives import group_of, is_collective, is_started, is_wait
from graphpp.passes.graph.joint_graph import JointGraph, remove_unused
from graphpp.passes.joint.assign_stages import assign_stages
from graphpp.passes.joint.clean_up import clean_up
from graphpp.passes.joint.views import merge_views, relax_views
from graphpp.passes.stage.cut_stages import cut_stages
from tests.passes.graphs import traced

c10d = torch.ops._c10d_functional
X = torch.randn(4, 4)


def reduced(x: Tensor, group: str = "7") -> Tensor:
    result: Tensor = c10d.wait_tensor.default(c10d.all_reduce.default(x, "sum", group))
    return result


def collectives(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_collective(node)]


def test_collectives_and_waits_are_recognised_and_their_group_too() -> None:
    joint = traced(lambda x: [reduced(x) + c10d.all_to_all_single.default(x, [4], [4], "ep")], X)
    assert [(str(node.target).split(".")[1], group_of(node), is_started(node)) for node in collectives(joint.graph)] == [
        ("all_reduce", "7", True), ("all_to_all_single", "ep", False)
    ]  # fmt: skip
    assert sum(map(is_wait, joint.graph.nodes)) == 1


def test_nobody_removes_or_merges_a_collective() -> None:
    joint = traced(lambda x: [reduced(x), reduced(x), x * 2][2:], X)
    for each in (clean_up, merge_views, relax_views):
        for node in joint.graph.nodes:
            node.meta.setdefault("stage", None if node.op == "placeholder" else 0)
        each(joint)
    remove_unused(joint.graph)
    assert len(collectives(joint.graph)) == sum(map(is_wait, joint.graph.nodes)) == 2


def assigned(joint: JointGraph, *starts: int) -> JointGraph:
    return assign_stages(clean_up(joint), (0, *starts))


def test_a_collective_of_an_input_runs_in_one_stage_only() -> None:
    """What else depends on inputs alone is computed wherever it is read."""
    joint = assigned(traced(lambda x: [reduced(x * 2) + 1, (x * 2).sin()], X), 4)
    (collective,) = collectives(joint.graph)
    assert collective.meta["stage"] == 0
    assert all(slots == 1 for slots in [sum(len(collectives(slot.graph)) for slot in cut_stages(joint, 2).graphs.values())])


def test_a_wait_stays_with_its_collective() -> None:
    """A stage that began at the wait would be sent the collective's result before it has arrived."""
    joint = traced(lambda x: [reduced(x.cos() @ x) @ x], X)
    at = next(node.meta["position"] for node in joint.graph.nodes if is_wait(node))
    joint = assigned(joint, at)
    (wait,) = (node for node in joint.graph.nodes if is_wait(node))
    (collective,) = collectives(joint.graph)
    assert wait.meta["stage"] == collective.meta["stage"] == 0
    assert [meta.name for meta in cut_stages(joint, 2).boundaries[0].forward] == [wait.name]


def test_what_came_lies_in_the_memory_of_the_collective() -> None:
    joint = traced(lambda x: [reduced(x), reduced(x).t()], X)
    waits = [node for node in joint.graph.nodes if is_wait(node)]
    assert [root(node) for node in waits] == collectives(joint.graph)
    assert shared_results(joint.graph) == frozenset()
    assert shared_results(traced(lambda x: [y := reduced(x), y.t()], X).graph) == {0, 1}
    assert shared_results(traced(lambda x: [c10d.wait_tensor.default(x)], X).graph) == {0}
