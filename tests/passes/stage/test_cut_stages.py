"""Each row of the routing table, the boundaries' metadata, and the check for lost or doubled nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.stage_graphs import StagedGraphs
from graphpp.passes.stage.cut_stages import _check, cut_stages
from graphpp.runtime import program as p
from graphpp.runtime.program import Phase
from tests.passes.graphs import Hand

STAGES = 4


def chain(hand: Hand, first: str, last: str) -> JointGraph:
    """A value `v` computed in phase `first` and read in phase `last`; parameters w0 .. w3, one per stage."""
    parameters = [hand.input(p.Parameter(f"w{stage}")) for stage in range(STAGES)]
    value = hand.node("v", first, parameters[int(first[1])])
    reader = hand.node("reader", last, value, parameters[int(last[1])])
    if last[0] == "B":
        hand.result(p.Gradient(f"w{last[1]}"), reader)
    hand.result(p.Loss(), hand.node("loss", f"F{STAGES - 1}", parameters[-1], *([reader] if last[0] == "F" else [])))
    return hand.joint()


def traffic(staged: StagedGraphs) -> tuple[list[str], list[str], list[str]]:
    """The route of the value `v`: boundaries crossed forward, stages that save it, boundaries crossed backward."""
    return (
        [f"{b.stage}|{b.stage + 1}" for b in staged.boundaries if "v" in names(b.forward)],
        [str(stage) for stage, saved in enumerate(staged.saved) if "v" in names(saved)],
        [f"{b.stage}|{b.stage + 1}" for b in staged.boundaries if "v" in names(b.backward)],
    )


def names(metas: Sequence[p.TensorMeta]) -> list[str]:
    return [meta.name for meta in metas]


ROUTES = {
    ("F1", "F1"): ([], [], []),
    ("F0", "F1"): (["0|1"], [], []),
    ("F0", "F3"): (["0|1", "1|2", "2|3"], [], []),  # stages 1 and 2 relay it
    ("F1", "B1"): ([], ["1"], []),
    ("F0", "B2"): (["0|1", "1|2"], ["2"], []),
    ("F2", "B0"): ([], ["2"], ["0|1", "1|2"]),
    ("F3", "B0"): ([], ["3"], ["0|1", "1|2", "2|3"]),
    ("B2", "B2"): ([], [], []),
    ("B3", "B2"): ([], [], ["2|3"]),
    ("B3", "B0"): ([], [], ["0|1", "1|2", "2|3"]),
}


@pytest.mark.parametrize(("first", "last"), ROUTES)
def test_a_value_goes_along_neighbours(first: str, last: str) -> None:
    hand = Hand(*(f"w{stage}" for stage in range(STAGES)))
    staged = cut_stages(chain(hand, first, last), STAGES)
    assert traffic(staged) == ROUTES[first, last]


def test_a_value_crosses_a_boundary_once_however_many_read_it() -> None:
    hand = Hand("w")
    w = hand.input(p.Parameter("w"))
    value = hand.node("v", "F0", w)
    readers = [hand.node(f"r{index}", slot, value) for index, slot in enumerate(["F1", "F1", "F2", "F3", "B3", "B2"])]
    hand.result(p.Loss(), readers[3])
    hand.result(p.Gradient("w"), hand.node("g", "B0", readers[5], value))
    staged = cut_stages(hand.joint(), STAGES)
    assert traffic(staged) == (["0|1", "1|2", "2|3"], ["0", "2", "3"], [])
    for boundary in staged.boundaries:
        assert len({meta.name for meta in boundary.forward}) == len(boundary.forward)


def test_loss_and_outputs_stand_in_the_last_stage_gradients_where_they_are_made() -> None:
    hand = Hand("w")
    w = hand.input(p.Parameter("w"))
    value = hand.node("v", "F0", w)
    hand.result(p.Output(0), value)
    hand.result(p.Loss(), hand.node("loss", "F1", value))
    hand.result(p.Gradient("w"), hand.node("g", "B0", value))
    staged = cut_stages(hand.joint(), STAGES)
    assert staged.graphs[Phase.FORWARD, 3].outputs[:2] == (p.Output(0), p.Loss())
    assert staged.graphs[Phase.BACKWARD, 0].outputs == (p.Gradient("w"),)
    assert traffic(staged)[0] == ["0|1", "1|2", "2|3"]


def replicated(source: str) -> StagedGraphs:
    """A mask without a stage, computed from the input through a second node; read in F0, F2, B2 and B1."""
    hand = Hand("w")
    w, x = hand.input(p.Parameter("w")), hand.input(p.Input("args[0]"))
    inner = hand.node("inner", "F", x)
    mask = hand.node("mask", "F", inner) if source == "computed" else x
    first = hand.node("first", "F0", w, mask)
    second = hand.node("second", "F2", first, mask)
    hand.result(p.Loss(), second)
    late = hand.node("late", "B2", second, mask)
    hand.result(p.Gradient("w"), hand.node("g", "B1", late, mask))
    return cut_stages(hand.joint(), 3)


def computed(staged: StagedGraphs, slot: str) -> list[str]:
    graph = staged.graphs[Phase(slot[0]), int(slot[1])].graph
    return [node.name for node in graph.nodes if node.op not in ("placeholder", "output")]


def test_a_replicated_value_is_computed_where_it_is_read_and_saved_where_the_forward_made_it() -> None:
    staged = replicated("computed")
    assert computed(staged, "F0") == ["inner", "mask", "first"]
    assert computed(staged, "F1") == []
    assert computed(staged, "F2") == ["inner", "mask", "second"]
    assert computed(staged, "B2") == ["late"]
    assert computed(staged, "B1") == ["inner", "mask", "g"]
    assert [[meta.name for meta in saved] for saved in staged.saved] == [[], [], ["mask", "second"]]
    assert [[meta.name for meta in boundary.forward] for boundary in staged.boundaries] == [["first"], ["first"]]


def test_boundaries_say_shape_dtype_strides_and_needs_grad() -> None:
    hand = Hand("w", "frozen")
    hand.parameters["frozen"] = p.TensorMeta("frozen", (2, 3), (3, 1), torch.float32, False)
    w, frozen = hand.input(p.Parameter("w")), hand.input(p.Parameter("frozen"))
    meta = torch.device("meta")
    values = {
        "half": (w, torch.empty(3, 2, dtype=torch.bfloat16, device=meta).t()),
        "number": (w, torch.empty((), device=meta)),
        "wave": (w, torch.empty(2, dtype=torch.complex64, device=meta)),
        "choice": (w, torch.empty(2, dtype=torch.int64, device=meta)),
        "flag": (w, torch.empty(0, 5, dtype=torch.bool, device=meta)),
        "still": (frozen, torch.empty(4, 1, device=meta).expand(4, 6)),
    }
    nodes = [hand.node(name, "F0", source, value=value) for name, (source, value) in values.items()]
    behind = hand.node("behind", "F0", nodes[3])
    hand.result(p.Loss(), hand.node("loss", "F1", *nodes, behind))
    (boundary,) = cut_stages(hand.joint(), 2).boundaries
    assert boundary.forward == (
        p.TensorMeta("half", (2, 3), (1, 2), torch.bfloat16, True),
        p.TensorMeta("number", (), (), torch.float32, True),
        p.TensorMeta("wave", (2,), (1,), torch.complex64, True),
        p.TensorMeta("choice", (2,), (1,), torch.int64, False),
        p.TensorMeta("flag", (0, 5), (5, 1), torch.bool, False),
        p.TensorMeta("still", (4, 6), (1, 0), torch.float32, False),
        p.TensorMeta("behind", (2, 3), (3, 1), torch.float32, False),  # through integers no gradient flows
    )
    assert boundary.backward == ()


def pair() -> tuple[JointGraph, StagedGraphs]:
    hand = Hand(*(f"w{stage}" for stage in range(STAGES)))
    joint = chain(hand, "F0", "B0")
    return joint, cut_stages(joint, STAGES)


def lose_a_node(staged: StagedGraphs) -> None:
    graph = staged.graphs[Phase.BACKWARD, 0].graph
    (reader,) = (node for node in graph.nodes if node.name == "reader")
    reader.replace_all_uses_with(reader.all_input_nodes[0])
    graph.erase_node(reader)


def double_a_node(staged: StagedGraphs) -> None:
    first, second = (staged.graphs[Phase.FORWARD, stage].graph for stage in (0, 1))
    (value,) = (node for node in first.nodes if node.name == "v")
    with second.inserting_before(second.output_node()):
        copy = second.create_node("call_function", value.target, (), name="v")
    copy.meta = dict(value.meta)


def lose_a_result(staged: StagedGraphs) -> None:
    _replace(staged, (Phase.BACKWARD, 0), ())


def double_a_result(staged: StagedGraphs) -> None:
    _replace(staged, (Phase.FORWARD, 0), (p.Gradient("w0"),))


def _replace(staged: StagedGraphs, slot: tuple[Phase, int], outputs: tuple[p.OutputRole, ...]) -> None:
    old = staged.graphs[slot]
    staged.graphs[slot] = type(old)(old.stage, old.phase, old.graph, old.inputs, outputs)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose_a_node, "reader stands in 0 phase graphs"),
        (double_a_node, "v stands in 2 phase graphs"),
        (lose_a_result, "lost or doubled"),
        (double_a_result, "lost or doubled"),
    ],
)
def test_a_lost_or_doubled_value_is_noticed(damage: Callable[[StagedGraphs], None], said: str) -> None:
    joint, staged = pair()
    _check(joint, staged)
    damage(staged)
    with pytest.raises(AssertionError, match=said):
        _check(joint, staged)
